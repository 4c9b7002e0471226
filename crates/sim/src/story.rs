//! What happens in a run: a plane comes up, a random script is played on it, everything heals, and then it must be
//! exactly what was asked for.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use nstance_core::{
    ids::InstanceId,
    instance::{Ownership, Phase, Seen},
    ports::{
        clock::Entropy,
        provider::{Ended, ErrorClass},
    },
};
use nstance_providers::{
    fake::{EndOf, FakeOptions, Op, Outcome, Rule, ScriptedEnd, When},
    faulty::Faults,
};
use nstance_rt::entropy::below;
use nstance_server::term::Planner;
use nstance_store::faulty::FaultPlan;

use crate::{
    Setup,
    operators::{Operator, Wish},
    plane::{Beginning, Manners, Plane},
    site::{Site, chance},
};

/// Second processes of servers run on machines this far off.
const SECOND: usize = 10;

pub(crate) struct Story {
    pub(crate) plane: Plane,
    chance: Arc<dyn Entropy>,
    n_groups: std::cell::Cell<u32>,
}

/// The cloud of a seed: how slow, how late, how full.
pub(crate) fn options(seed: u64) -> FakeOptions {
    let chance = chance(seed, "options");
    let chance = chance.as_ref();
    let millis = |least: u64, most: u64| Duration::from_millis(least + below(chance, most - least + 1));
    let sometimes = |odds: u64, time: Duration| if below(chance, 100) < odds { time } else { Duration::ZERO };
    FakeOptions {
        idempotent_create: below(chance, 4) != 0,
        reserve: below(chance, 2) == 0,
        places: [0, 1, 3][usize::try_from(below(chance, 3)).unwrap_or(0)],
        latencies: BTreeMap::from([(Op::Create, millis(50, 800))]),
        latency: millis(2, 200),
        jitter: millis(0, 100),
        boot_time: millis(100, 3000),
        delete_time: millis(0, 5000),
        stop_time: millis(0, 2000),
        visibility_delay: sometimes(40, millis(500, 8000)),
        listing_delay: sometimes(40, millis(500, 10_000)),
        page_size: usize::try_from(1 + below(chance, 20)).unwrap_or(1),
        subnet_capacity: BTreeMap::from([("subnet-1".to_owned(), 11 + below(chance, 10))]),
        throttle_rate: if below(chance, 4) == 0 { 8 + below(chance, 20) } else { 0 },
        lb_drain_time: millis(0, 4000),
        ..FakeOptions::default()
    }
}

impl Story {
    /// Brings the plane of a seed up.
    pub(crate) async fn begin(seed: u64, planner: Planner, setup: Setup) -> anyhow::Result<Self> {
        let dice = chance(seed, "script");
        let drawn = 1 + usize::try_from(below(chance(seed, "servers").as_ref(), 3)).unwrap_or(0);
        let plane = Plane::start(Beginning {
            cloud: options(seed),
            sizes: [1 + size(dice.as_ref(), 5), size(dice.as_ref(), 4)],
            drain_timeout: Duration::from_secs(5 + below(dice.as_ref(), 25)),
            manners: Manners::Real,
            planner,
            hears_checker: setup.hears_checker,
            servers: setup.servers.unwrap_or(drawn).max(1),
            skew: true,
            ..Beginning::new(seed)
        })
        .await?;
        Ok(Self { plane, chance: dice, n_groups: std::cell::Cell::new(0) })
    }

    fn below(&self, bound: u64) -> u64 {
        below(self.chance.as_ref(), bound)
    }

    fn seconds(&self, least: u64, most: u64) -> Duration {
        Duration::from_millis(least * 1000 + self.below((most - least) * 1000))
    }

    fn note(&self, line: impl AsRef<str>) {
        self.plane.site.judge().note(line);
    }

    /// Does something after a time, whatever happens meanwhile.
    fn later(&self, wait: Duration, act: impl FnOnce(&Site) + Send + 'static) {
        let site = self.plane.site.clone();
        self.plane.tasks.spawn_droppable("later", async move {
            tokio::time::sleep(wait).await;
            act(&site);
        });
    }

    pub(crate) async fn play(&self, n_steps: u64) {
        for _ in 0..n_steps {
            // Mostly in quick succession, sometimes with time to settle.
            let wait = match self.below(10) {
                0..4 => Duration::from_millis(self.below(300)),
                4..8 => self.seconds(0, 6),
                _ => self.seconds(5, 40),
            };
            tokio::select! {
                biased;
                () = self.plane.site.judge().broken.cancelled() => return,
                () = tokio::time::sleep(wait) => {}
            }
            self.step().await;
            self.plane.site.judge().count(|stats| stats.steps += 1);
            self.plane.look();
        }
    }

    async fn step(&self) {
        match self.below(136) {
            124..128 => self.hide_tags(),
            128..132 => self.end_early(),
            132..136 => self.slow_balancers(),
            112..115 => self.hand_over(),
            115..118 => self.partition(),
            118..121 => self.clock_jump(),
            121..123 => self.store_outage(),
            123 => self.twice(),
            100..105 => self.alone(),
            105..112 => self.configure().await,
            0..16 => self.scale(),
            16..22 => self.dynamic(),
            22..32 => self.kill(),
            32..37 => self.reclaim(),
            37..40 => self.stop(),
            40..45 => self.drift(),
            45..50 => self.request(),
            50..54 => self.outage(),
            54..59 => self.refusals(),
            59..65 => self.provider_faults(),
            65..72 => self.store_faults(),
            72..76 => self.store_cut(),
            76..81 => self.agents_cut(),
            81..84 => self.freeze(),
            84..95 => self.crash(),
            95..98 => self.lose_answers(),
            _ => self.stranger(),
        }
    }

    fn operator(&self) -> &Arc<Operator> {
        &self.plane.operators[usize::try_from(self.below(2)).unwrap_or(0)]
    }

    fn some_group(&self) -> (Arc<Operator>, String, Wish) {
        let operator = self.operator().clone();
        let groups: Vec<_> = operator.groups().into_iter().filter(|(_, wish)| !wish.deleted).collect();
        let n = usize::try_from(self.below(groups.len() as u64)).unwrap_or(0);
        let (key, wish) = groups[n].clone();
        (operator, key, wish)
    }

    /// Up to `n` running VMs, of one group or of all.
    fn victims(&self, n: u64) -> Vec<InstanceId> {
        let mut running: Vec<_> = self
            .plane
            .site
            .cloud()
            .states()
            .into_iter()
            .filter(|(_, seen)| *seen == Seen::Running)
            .map(|(id, _)| id)
            .collect();
        running.sort();
        running.dedup();
        let mut chosen = Vec::new();
        while !running.is_empty() && (chosen.len() as u64) < n {
            chosen.push(running.remove(usize::try_from(self.below(running.len() as u64)).unwrap_or(0)));
        }
        chosen
    }

    fn scale(&self) {
        let (operator, key, wish) = self.some_group();
        let size = size(self.chance.as_ref(), 7);
        operator.want(&key, Wish { size, ..wish });
    }

    /// A group over the API comes or goes.
    fn dynamic(&self) {
        let operator = self.operator().clone();
        let going = operator.groups().into_iter().find(|(_, wish)| !wish.is_static && !wish.deleted);
        match going {
            Some((key, wish)) if self.below(2) == 0 => {
                self.plane.site.group_goes(operator.group(&key));
                operator.want(&key, Wish { deleted: true, ..wish });
            }
            _ => {
                let n = self.n_groups.get();
                self.n_groups.set(n + 1);
                let size = size(self.chance.as_ref(), 3);
                let wish = Wish { size, is_static: false, instance_type: "small".to_owned(), deleted: false };
                // Equal names in both tenants, on purpose.
                operator.want(&format!("dyn-{}", n / 2), wish);
            }
        }
    }

    /// An instance outside of any size comes or goes.
    fn alone(&self) {
        let (operator, key, _) = self.some_group();
        if self.below(3) == 0 && operator.give_back() {
            return;
        }
        let n = self.n_groups.get();
        self.n_groups.set(n + 1);
        operator.ask_for(format!("request-{n}"), key);
    }

    /// Another config: a static group comes, goes or changes, a setting changes, or it is no config at all.
    async fn configure(&self) {
        match self.below(6) {
            0 => self.plane.static_group("fixed", None).await,
            1..3 => self.plane.static_group("fixed", Some(size(self.chance.as_ref(), 3))).await,
            3 => {
                let n = self.below(1000);
                self.note(format!("the config says {n}"));
                self.plane.change_config(|config| config["defaults"]["vars"]["n"] = n.to_string().into()).await;
            }
            4 => {
                let drain = 5 + self.below(20);
                self.note(format!("the config drains for {drain} s"));
                let text = format!("{drain}s");
                self.plane.change_config(|config| config["server"]["default_drain_timeout"] = text.into()).await;
            }
            _ => {
                self.note("the config is nonsense for a while");
                self.plane.upload(&serde_json::json!({ "server": 1 })).await;
            }
        }
    }

    fn kill(&self) {
        for id in self.victims(1 + self.below(3)) {
            self.note(format!("VM of {id} dies"));
            self.plane.site.judge().count(|stats| stats.kills += 1);
            self.plane.site.cloud().kill(id);
        }
    }

    fn reclaim(&self) {
        for id in self.victims(1 + self.below(4)) {
            let notice = self.seconds(5, 60);
            self.note(format!("VM of {id} is reclaimed in {notice:?}"));
            self.plane.site.judge().count(|stats| stats.kills += 1);
            self.plane.site.cloud().reclaim(id, notice);
        }
    }

    fn stop(&self) {
        for id in self.victims(1) {
            self.note(format!("VM of {id} is stopped"));
            self.plane.site.judge().count(|stats| stats.kills += 1);
            self.plane.site.cloud().stop(id);
        }
    }

    /// Another machine type: a rollout.
    fn drift(&self) {
        let (operator, key, wish) = self.some_group();
        let instance_type = ["small", "medium", "large"][usize::try_from(self.below(3)).unwrap_or(0)].to_owned();
        operator.want(&key, Wish { instance_type, ..wish });
    }

    fn request(&self) {
        let mine: Vec<_> = self
            .plane
            .site
            .judge()
            .instances()
            .into_iter()
            .filter(|it| matches!(it.phase(), Phase::Running | Phase::Provisioning))
            .collect();
        let mine: Vec<_> = mine.into_iter().filter(|it| it.ownership == Ownership::Managed).collect();
        if mine.is_empty() {
            return;
        }
        let it = &mine[usize::try_from(self.below(mine.len() as u64)).unwrap_or(0)];
        let Some(operator) = self.plane.operators.iter().find(|operator| operator.tenant == it.group.tenant) else {
            return;
        };
        if self.below(2) == 0 {
            operator.remove(it.id);
        } else {
            operator.replace(it.id);
        }
    }

    fn outage(&self) {
        let time = self.seconds(2, 60);
        self.note(format!("the cloud is away for {time:?}"));
        self.plane.site.judge().count(|stats| stats.provider_faults += 1);
        self.plane.site.cloud().outage(true);
        self.later(time, |site| site.cloud().outage(false));
    }

    /// One kind of refusal, for a while.
    fn refusals(&self) {
        let classes = [
            ErrorClass::Capacity,
            ErrorClass::Quota,
            ErrorClass::Throttled,
            ErrorClass::Auth,
            ErrorClass::Invalid,
            ErrorClass::Unavailable,
        ];
        let class = classes[usize::try_from(self.below(classes.len() as u64)).unwrap_or(0)];
        let when = if class == ErrorClass::Capacity && self.below(2) == 0 {
            When::Subnet("subnet-1".to_owned())
        } else {
            When::Always
        };
        let times = 1 + u32::try_from(self.below(6)).unwrap_or(0);
        self.note(format!("{times} creates are refused: {}", class.as_str()));
        self.plane.site.judge().count(|stats| stats.provider_faults += u64::from(times));
        self.plane.site.cloud().script(Rule { op: Op::Create, when, times, outcome: Outcome::Refuse(class) });
    }

    /// Some answers come without the tags of the VMs.
    fn hide_tags(&self) {
        let op = if self.below(2) == 0 { Op::List } else { Op::Describe };
        let times = 1 + u32::try_from(self.below(6)).unwrap_or(0);
        self.note(format!("{times} answers to {} come without tags", op.as_str()));
        self.plane.site.judge().count(|stats| stats.provider_faults += u64::from(times));
        self.plane.site.cloud().script(Rule { op, when: When::Always, times, outcome: Outcome::HideTags });
    }

    /// Some VMs are accepted and end soon after, most of them before they register; the cloud says why.
    fn end_early(&self) {
        let classes = [ErrorClass::Capacity, ErrorClass::Quota, ErrorClass::Invalid];
        let class = classes[usize::try_from(self.below(3)).unwrap_or(0)];
        let subnet = if self.below(2) == 0 { "subnet-1" } else { "subnet-2" };
        let instance_type = ["small", "medium", "large"][usize::try_from(self.below(3)).unwrap_or(0)];
        let times = 1 + u32::try_from(self.below(3)).unwrap_or(0);
        let after = Duration::from_millis(self.below(5000));
        self.note(format!("{times} new {instance_type} VMs in {subnet} end after {after:?}: {}", class.as_str()));
        self.plane.site.judge().count(|stats| stats.kills += u64::from(times));
        self.plane.site.cloud().script_end(ScriptedEnd {
            of: EndOf::Choice { subnet: subnet.to_owned(), instance_type: Some(instance_type.to_owned()) },
            after,
            times,
            ended: Ended { class, code: None, message: "the story wants it".to_owned() },
        });
    }

    /// Load balancers take their time to serve new members.
    fn slow_balancers(&self) {
        let (warmup, time) = (self.seconds(0, 20), self.seconds(10, 60));
        self.note(format!("load balancers serve new members after {warmup:?}"));
        self.plane.site.cloud().set_lb_warmup(warmup);
        self.later(time, |site| site.cloud().set_lb_warmup(Duration::ZERO));
    }

    fn provider_faults(&self) {
        let odds = |most: u64| u32::try_from(self.below(most)).unwrap_or(0);
        let faults = Faults {
            delay: Duration::from_millis(self.below(2000)),
            lose_before: odds(80),
            lose_after: odds(80),
            refuse: BTreeMap::from([(ErrorClass::Throttled, odds(60)), (ErrorClass::Unavailable, odds(60))]),
            land_then_refuse: BTreeMap::from([(ErrorClass::Invalid, odds(20))]),
        };
        let time = self.seconds(5, 60);
        self.note(format!("calls to the cloud go wrong for {time:?}: {faults:?}"));
        self.plane.site.set_provider(&faults);
        self.later(time, |site| site.set_provider(&Faults::default()));
    }

    fn store_faults(&self) {
        let odds = |most: u64| u16::try_from(self.below(most)).unwrap_or(0);
        let plan = FaultPlan {
            max_delay: Duration::from_millis(self.below(800)),
            lost_before: odds(60),
            lost_after: odds(60),
            precondition_after: odds(60),
            throttled: odds(60),
            failed_reads: odds(60),
            failed_lists: odds(200),
            write_gap: if self.below(4) == 0 { Duration::from_secs(1) } else { Duration::ZERO },
        };
        let time = self.seconds(5, 60);
        self.note(format!("the store goes wrong for {time:?}: {plan:?}"));
        self.plane.site.set_store(plan);
        self.later(time, |site| site.set_store(FaultPlan::default()));
    }

    /// One of the servers, every second time the leader.
    fn some_server(&self) -> usize {
        let any = 1 + usize::try_from(self.below(self.plane.servers as u64)).unwrap_or(0);
        match self.plane.leader() {
            Some(leader) if self.below(2) == 0 && leader <= self.plane.servers => leader,
            _ => any,
        }
    }

    fn store_cut(&self) {
        let (n, time) = (self.some_server(), self.seconds(1, 30));
        self.note(format!("the store is away for server {n} for {time:?}"));
        self.plane.site.judge().count(|stats| stats.store_faults += 1);
        self.plane.site.cut_store(n, true);
        self.later(time, move |site| site.cut_store(n, false));
    }

    fn store_outage(&self) {
        let time = self.seconds(1, 60);
        let servers = self.plane.servers;
        self.note(format!("the store is away for everybody for {time:?}"));
        self.plane.site.judge().count(|stats| stats.store_faults += 1);
        let cut = move |site: &Site, cut: bool| (1..=servers).for_each(|n| site.cut_store(n, cut));
        cut(&self.plane.site, true);
        self.later(time, move |site| cut(site, false));
    }

    /// Two servers do not hear each other, or only one of them the other.
    fn partition(&self) {
        let one = self.some_server();
        let other = 1 + usize::try_from(self.below(self.plane.servers as u64)).unwrap_or(0);
        if one == other {
            return;
        }
        let (time, both) = (self.seconds(1, 40), self.below(3) != 0);
        self.note(format!("server {other} does not hear {one} for {time:?}, both ways: {both}"));
        self.plane.site.judge().count(|stats| stats.partitions += 1);
        let block = move |site: &Site, on: bool| {
            site.hosts.block(one, other, on);
            site.hosts.block(other, one, on && both);
        };
        block(&self.plane.site, true);
        self.later(time, move |site| block(site, false));
    }

    /// A wall clock is set, and set right after a time. Never so far that two leaders in a row, one late and one early,
    /// disagree by the two minutes for which records of the dead are kept here: a VM that its provider still shows would
    /// be taken for a new one. Days are for directed tests.
    fn clock_jump(&self) {
        let (n, time) = (self.some_server(), self.seconds(1, 60));
        let seconds = i64::try_from(self.below(81)).unwrap_or(0) - 40;
        self.note(format!("the wall clock of server {n} is {seconds} s ahead for {time:?}"));
        self.plane.site.judge().count(|stats| stats.clock_jumps += 1);
        self.plane.site.clock_of(n).jump_to(seconds * 1000);
        self.later(time, move |site| site.clock_of(n).jump_to(0));
    }

    /// A server is asked to stop, and is started again.
    fn hand_over(&self) {
        let n = self.some_server();
        let down = Duration::from_millis(self.below(20_000));
        self.note(format!("server {n} is asked to stop, and is back after {down:?}"));
        let site = self.plane.site.clone();
        self.plane.tasks.spawn_droppable("hand-over", async move {
            site.stop(n).await;
            tokio::time::sleep(down).await;
            if site.server(n).is_none() {
                site.start(n).expect("a server starts");
            }
        });
    }

    /// Somebody starts a server a second time, under the same id, on another machine.
    fn twice(&self) {
        let (id, time) = (self.some_server(), self.seconds(5, 60));
        let n = id + SECOND;
        if self.plane.site.server(n).is_none() {
            self.note(format!("server {id} is there twice for {time:?}"));
            self.plane.site.start_as(n, id).expect("a server starts");
            self.later(time, move |site| site.kill(n));
        }
    }

    fn agents_cut(&self) {
        let n = if self.below(4) == 0 { 100 } else { 1 + self.below(2) };
        let ids = self.victims(n);
        let time = self.seconds(1, 50);
        self.note(format!("{} agents are cut off for {time:?}", ids.len()));
        if self.below(4) == 0 {
            self.plane.fleet.reset(&ids);
        } else {
            self.plane.fleet.cut(&ids, time);
        }
    }

    /// A server stands still, as a suspended machine does: for less than its lease, or for longer.
    fn freeze(&self) {
        let n = self.some_server();
        let Some(server) = self.plane.site.server(n) else { return };
        let time = self.seconds(0, 40);
        self.note(format!("server {n} stands still for {time:?}"));
        self.plane.site.judge().count(|stats| stats.pauses += 1);
        server.process.freeze();
        self.plane.tasks.spawn_droppable("thaw", async move {
            tokio::time::sleep(time).await;
            server.process.thaw();
        });
    }

    /// A server dies: now, or at some await in the near future. Another begins on the same machine, with or without
    /// what that remembers. Sometimes the machine has no power meanwhile.
    fn crash(&self) {
        let n = self.some_server();
        let Some(server) = self.plane.site.server(n) else { return };
        let process = server.process.clone();
        let polls = if self.below(3) == 0 { None } else { Some(self.below(400)) };
        let down = if self.below(3) == 0 { self.seconds(1, 40) } else { Duration::from_millis(self.below(1500)) };
        let (forgets, dark) = (self.below(4) == 0, self.below(4) == 0);
        self.note(format!(
            "server {n} dies after {polls:?} polls, is back after {down:?}, forgets: {forgets}, dark: {dark}"
        ));
        let site = self.plane.site.clone();
        self.plane.tasks.spawn_droppable("crash", async move {
            if let Some(polls) = polls {
                process.doom_after(polls);
                tokio::select! {
                    biased;
                    () = process.doomed() => {}
                    () = process.token().cancelled() => return,
                    () = tokio::time::sleep(Duration::from_secs(60)) => {}
                }
            }
            if process.is_killed() {
                return;
            }
            if dark {
                site.hosts.darken(n);
            }
            site.kill(n);
            tokio::time::sleep(down).await;
            if forgets {
                site.lose_cache(n);
            }
            if site.server(n).is_none() {
                // An error here would be one of the simulation.
                site.start(n).expect("a server starts");
            }
        });
    }

    fn lose_answers(&self) {
        let (permille, time) = (self.below(200), self.seconds(5, 60));
        self.note(format!("clients miss {permille} answers of 1000 for {time:?}"));
        self.plane.site.lose_answers(permille);
        self.later(time, |site| site.lose_answers(0));
    }

    /// A VM that is none of ours.
    fn stranger(&self) {
        self.plane.site.cloud().add_foreign(&format!("stranger-{}", self.below(1000)), None, None);
    }
}

fn size(chance: &dyn Entropy, most: u64) -> u32 {
    // Small sizes oftener: there one too few is everything.
    u32::try_from(below(chance, most + 1).min(below(chance, most * 2 + 1))).unwrap_or(0)
}
