//! A plane under simulation: what stands, who lives on it, what is asked of it, and whether it is so.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nstance_core::{
    ids::{GroupRef, InstanceId},
    instance::{Instance, Ownership, Phase, Seen},
    ports::provider::LbMemberState,
};
use nstance_providers::{
    fake::{FakeOptions, FakeProvider},
    faulty::Faults,
};
use nstance_rt::tasks::Tasks;
use nstance_server::term::Planner;
use nstance_store::faulty::FaultPlan;
use serde_json::{Value, json};

use crate::{
    fleet::Fleet,
    operators::{Operator, Wish},
    points::Points,
    site::{Site, chance, lb, tenant},
};

/// After the last fault everything is in order within this time. The promise is the sum of sweep, registration timeout
/// and two minutes; on top of it come waits that are by design: a rotation of a whole group, one after another, and
/// the pauses of a group whose machines keep failing.
const SETTLES: Duration = Duration::from_secs(1500);
/// A rollout that kept failing while things were broken is tried again by one probe, an hour later at the latest: that
/// is by design, and only a rollout may take so long.
const PROBES_AFTER: Duration = Duration::from_secs(3600);

/// So long it must stay as it is.
const STAYS: u32 = 20;

/// How agents and operators are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manners {
    /// As in the world: some agents never start, some drains are never acknowledged, some nonces are tried twice.
    Real,
    /// Everybody does what it should, at once.
    Good,
}

/// What a plane begins with.
pub struct Beginning {
    pub seed: u64,
    pub cloud: FakeOptions,
    /// Sizes of `web` of the tenants `default` and `acme`.
    pub sizes: [u32; 2],
    pub drain_timeout: Duration,
    pub manners: Manners,
    pub planner: Planner,
    /// Whether a plan that the server's own checker refuses is a broken promise by itself.
    pub hears_checker: bool,
    /// How many servers the shard has.
    pub servers: usize,
    /// Whether the servers' clocks run at rates of their own.
    pub skew: bool,
    /// Changes the config before it is uploaded.
    pub config: fn(&mut Value),
}

impl Beginning {
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            cloud: FakeOptions::default(),
            sizes: [2, 0],
            drain_timeout: Duration::from_secs(20),
            manners: Manners::Good,
            planner: Arc::new(nstance_core::plan::plan),
            hears_checker: true,
            servers: 1,
            skew: false,
            config: |_| {},
        }
    }
}

pub struct Plane {
    /// The config as it was uploaded last, and the groups that only it names.
    pub(crate) config: Mutex<Value>,
    pub(crate) statics: Mutex<BTreeMap<GroupRef, u32>>,
    pub(crate) site: Arc<Site>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) operators: Vec<Arc<Operator>>,
    pub(crate) tasks: Tasks,
    /// How many servers the shard has.
    pub(crate) servers: usize,
}

impl Plane {
    /// Brings a plane up: a bucket, a cloud, servers, agents, two operators.
    pub async fn start(beginning: Beginning) -> anyhow::Result<Self> {
        let Beginning { seed, cloud, sizes, drain_timeout, manners, planner, .. } = beginning;
        let Beginning { hears_checker, servers, skew, config, .. } = beginning;
        let site = Site::new(seed, cloud, planner, hears_checker, skew)?;
        let tasks = Tasks::new();
        let mut value = base_config(&site, sizes, drain_timeout);
        config(&mut value);
        site.upload(&value).await?;
        for n in 1..=servers {
            site.start(n)?;
        }
        let fleet = Fleet::start(&site, &tasks, chance(seed, "fleet"), manners);
        let operators: Vec<_> = ["default", "acme"]
            .into_iter()
            .map(|name| {
                Operator::start(&site, &tasks, tenant(name), chance(seed, &format!("operator {name}")), manners)
            })
            .collect();
        for (operator, size) in operators.iter().zip(sizes) {
            let wish = Wish { size, is_static: true, instance_type: "small".to_owned(), deleted: false };
            operator.want("web", wish);
        }
        Ok(Self { config: Mutex::new(value), statics: Mutex::default(), site, fleet, operators, tasks, servers })
    }

    /// What a tenant wants of a group that the config has.
    pub fn want(&self, tenant: &str, group: &str, change: impl FnOnce(&mut Wish)) {
        let operator = self.operator(tenant);
        let fresh = Wish { size: 0, is_static: false, instance_type: "small".to_owned(), deleted: false };
        let mut wish = operator.groups().remove(group).unwrap_or(fresh);
        change(&mut wish);
        if wish.deleted {
            self.site.group_goes(operator.group(group));
        }
        operator.want(group, wish);
    }

    /// Changes the config, uploads it, and has the server asked to take it.
    pub async fn change_config(&self, change: impl FnOnce(&mut Value)) {
        let value = {
            let mut value = self.config.lock().unwrap_or_else(PoisonError::into_inner);
            change(&mut value);
            value.clone()
        };
        self.upload(&value).await;
    }

    /// Uploads something in the place of the config, which itself stays as it was.
    pub async fn upload(&self, value: &Value) {
        // The bucket itself is never at fault.
        self.site.upload(value).await.expect("the bucket takes it");
        self.operators[0].refresh();
    }

    /// A group of `acme` that only the config names, of this size; or not any more.
    pub async fn static_group(&self, key: &str, size: Option<u32>) {
        let group = crate::site::group("acme", key);
        self.note(format!("the config asks for {size:?} of {group}"));
        {
            let mut statics = self.statics.lock().unwrap_or_else(PoisonError::into_inner);
            if size.is_none() {
                self.site.group_goes(group.clone());
            }
            statics.insert(group, size.unwrap_or(0));
        }
        self.change_config(|config| match size {
            Some(size) => config["groups"]["acme"][key] = json!({ "template": "knc", "size": size }),
            None => {
                if let Some(groups) = config["groups"]["acme"].as_object_mut() {
                    groups.remove(key);
                }
            }
        })
        .await;
    }

    pub(crate) fn operator(&self, tenant: &str) -> &Arc<Operator> {
        let found = self.operators.iter().find(|operator| operator.tenant.as_str() == tenant);
        found.unwrap_or_else(|| panic!("{tenant} is no tenant of the simulation"))
    }

    /// An operator asks for the end of an instance, or for another in its place.
    pub fn remove(&self, tenant: &str, instance: InstanceId) {
        self.operator(tenant).remove(instance);
    }

    pub fn replace(&self, tenant: &str, instance: InstanceId) {
        self.operator(tenant).replace(instance);
    }

    pub fn cloud(&self) -> &FakeProvider {
        self.site.cloud()
    }

    /// Instances of a group whose VM runs, in order.
    pub fn running(&self, tenant: &str, group: &str) -> Vec<InstanceId> {
        let group = crate::site::group(tenant, group);
        let mut running: Vec<_> =
            self.cloud().states().into_iter().filter(|(_, seen)| *seen == Seen::Running).map(|(id, _)| id).collect();
        running.retain(|id| self.site.judge().instance(*id).is_some_and(|it| it.group == group));
        running.sort();
        running
    }

    /// The latest record of an instance, as it stands in the bucket.
    pub fn record(&self, instance: InstanceId) -> Option<Instance> {
        self.site.judge().instance(instance)
    }

    pub fn records(&self) -> Vec<Instance> {
        self.site.judge().instances()
    }

    /// Cuts agents off for a time; their VMs run on.
    pub fn cut_agents(&self, instances: &[InstanceId], time: Duration) {
        self.fleet.cut(instances, time);
    }

    /// Kills the first server where it stands. With `forgets`, its machine loses its disk too.
    pub fn kill_server(&self, forgets: bool) {
        self.kill_nth(1, forgets);
    }

    pub fn start_server(&self) {
        self.start_nth(1);
    }

    /// The first server stands still for a time, as a suspended machine does.
    pub async fn freeze_server(&self, time: Duration) {
        if let Some(server) = self.site.server(1) {
            server.process.freeze();
            tokio::time::sleep(time).await;
            server.process.thaw();
        }
    }

    pub fn set_store(&self, plan: FaultPlan) {
        self.site.set_store(plan);
    }

    pub fn cut_store(&self, cut: bool) {
        self.site.cut_store(1, cut);
    }

    pub fn set_provider(&self, faults: &Faults) {
        self.site.set_provider(faults);
    }

    /// The term that is led in now, if any is.
    pub fn term(&self) -> Option<Arc<nstance_server::term::Term>> {
        self.site.leader().map(|(_, term)| term)
    }

    /// Promises that were broken so far.
    pub fn violations(&self) -> Vec<String> {
        self.site.judge().verdict().0
    }

    pub fn trace(&self) -> Vec<String> {
        self.site.judge().verdict().1
    }

    pub fn points(&self) -> &Points {
        &self.site.points
    }

    /// Ends everything. Panics if a promise was broken, with the trace.
    pub async fn finish(self) {
        self.close().await;
        let (violations, trace, ..) = self.site.judge().verdict();
        assert!(violations.is_empty(), "{}\n{}", trace.join("\n"), violations.join("\n"));
    }

    pub(crate) async fn close(&self) {
        self.tasks.end(Duration::ZERO).await;
        self.site.close().await;
    }

    pub(crate) fn note(&self, line: impl AsRef<str>) {
        self.site.judge().note(line);
    }

    /// What must hold at every moment.
    pub(crate) fn look(&self) {
        self.site.examine_all();
        let standing = self.site.cloud().standing();
        let ids: BTreeSet<_> = standing.iter().collect();
        if ids.len() < standing.len() {
            self.site.judge().violate("I11", "two VMs stand for one instance");
        }
    }

    /// Everything heals.
    pub async fn heal(&self) {
        self.change_config(|_| {}).await;
        self.note("everything heals");
        self.fleet.heals();
        let site = &self.site;
        site.set_store(FaultPlan::default());
        site.set_provider(&Faults::default());
        site.cloud().outage(false);
        site.cloud().clear_script();
        site.lose_answers(0);
        site.hosts.join_all();
        site.true_time();
        for server in site.hosts.servers() {
            // A second process of a server goes as it came.
            if self.servers < server.n {
                site.kill(server.n);
            }
        }
        for n in 1..=self.servers {
            site.cut_store(n, false);
            match site.server(n) {
                Some(server) => server.process.thaw(),
                None => site.start(n).expect("a server starts"),
            }
        }
    }

    /// Waits until all is as asked for, and sees that it stays so.
    pub async fn settle(&self) {
        let judge = self.site.judge();
        let began = tokio::time::Instant::now();
        let mut limit = SETTLES;
        let mut good = 0;
        let mut standing = Vec::new();
        let mut what = String::new();
        loop {
            if limit <= began.elapsed() {
                if limit != SETTLES || !self.rolls() {
                    break;
                }
                limit += PROBES_AFTER;
            }
            tokio::select! {
                biased;
                () = judge.broken.cancelled() => return,
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
            }
            // A crash that was still to come.
            if (1..=self.servers).any(|n| self.site.server(n).is_none()) {
                good = 0;
                continue;
            }
            self.look();
            match self.is_settled() {
                Ok(now) if good == 0 || now == standing => {
                    good += 1;
                    standing = now;
                    if good == STAYS {
                        self.note("settled");
                        return;
                    }
                }
                Ok(_) => good = 0,
                Err(why) => {
                    good = 0;
                    what = why;
                }
            }
        }
        judge.violate("I9", format!("{what}, {limit:?} after everything healed"));
    }

    /// Whether a rollout is not over.
    fn rolls(&self) -> bool {
        let records = self.site.judge().instances();
        self.wishes().iter().any(|(group, wish)| {
            let lives = |it: &Instance| !matches!(it.phase(), Phase::Deleted | Phase::Failed);
            let mut of =
                records.iter().filter(|it| it.group == *group && it.ownership == Ownership::Managed && lives(it));
            !wish.deleted && of.any(|it| !wish.is_of_type(it))
        })
    }

    /// What the groups should be.
    fn wishes(&self) -> BTreeMap<GroupRef, Wish> {
        let statics = self.statics.lock().unwrap_or_else(PoisonError::into_inner);
        let wish = |size| Wish { size, is_static: true, instance_type: "small".to_owned(), deleted: false };
        let mut wanted: BTreeMap<GroupRef, Wish> =
            statics.iter().map(|(group, size)| (group.clone(), wish(*size))).collect();
        for operator in &self.operators {
            wanted.extend(operator.groups().into_iter().map(|(key, wish)| (operator.group(&key), wish)));
        }
        wanted
    }

    /// Whether everything is as asked for; if so, who stands.
    fn is_settled(&self) -> Result<Vec<InstanceId>, String> {
        let states = self.site.cloud().states();
        let standing: BTreeMap<InstanceId, Seen> = states.into_iter().filter(|(_, seen)| *seen != Seen::Gone).collect();
        let records: BTreeMap<InstanceId, _> = self
            .site
            .judge()
            .instances()
            .into_iter()
            .filter(|it| !matches!(it.phase(), Phase::Deleted | Phase::Failed))
            .map(|it| (it.id, it))
            .collect();
        if let Some(id) = standing.keys().find(|id| !records.contains_key(id)) {
            return Err(format!("the VM of {id} has no record"));
        }
        if let Some(id) = records.keys().find(|id| !standing.contains_key(id)) {
            return Err(format!("the record of {id} has no VM"));
        }
        let connected: BTreeSet<_> = self.fleet.connected().into_iter().collect();
        for (id, it) in &records {
            if it.phase() != Phase::Running {
                return Err(format!("{id} is {}", it.phase().as_str()));
            }
            if !connected.contains(id) {
                return Err(format!("{id} has no agent connected"));
            }
        }
        let wanted = self.wishes();
        let alone: BTreeSet<InstanceId> =
            records.values().filter(|it| it.ownership == Ownership::OnDemand).map(|it| it.id).collect();
        let asked: BTreeSet<InstanceId> = self.operators.iter().flat_map(|operator| operator.on_demand()).collect();
        if let Some(id) = alone.difference(&asked).next() {
            return Err(format!("{id} stands by itself and nobody asked for it"));
        }
        for operator in &self.operators {
            if !operator.is_content() {
                return Err(format!("{} still asks", operator.tenant));
            }
        }
        for (group, wish) in &wanted {
            let of = records.values().filter(|it| it.group == *group && it.ownership == Ownership::Managed);
            let n = of.clone().count();
            let size = if wish.deleted { 0 } else { wish.size };
            if n != usize::try_from(size).unwrap_or(usize::MAX) {
                return Err(format!("{group} has {n} of {size}"));
            }
            let old = of.filter(|it| !wish.is_of_type(it)).count();
            if 0 < old {
                return Err(format!("{group} has {old} of another type than {}", wish.instance_type));
            }
        }
        for operator in &self.operators {
            let mine: BTreeSet<InstanceId> =
                records.values().filter(|it| it.group.tenant == operator.tenant).map(|it| it.id).collect();
            let watched = operator.watched();
            if watched != mine {
                let (more, less): (Vec<_>, Vec<_>) =
                    (watched.difference(&mine).collect(), mine.difference(&watched).collect());
                return Err(format!("the watch of {} shows {more:?} too many and {less:?} not", operator.tenant));
            }
        }
        let managed = |it: &&Instance| it.ownership == Ownership::Managed;
        if let Some(it) = records.values().filter(managed).find(|it| !wanted.contains_key(&it.group)) {
            return Err(format!("{} is in {}, which nobody asks for", it.id, it.group));
        }
        let members: BTreeSet<InstanceId> = self
            .site
            .cloud()
            .members(&lb())
            .into_iter()
            .filter(|(_, member)| *member == LbMemberState::In)
            .map(|(id, _)| id)
            .collect();
        let web = crate::site::group("default", "web");
        let expected: BTreeSet<InstanceId> =
            records.values().filter(managed).filter(|it| it.group == web).map(|it| it.id).collect();
        if members != expected {
            return Err(format!("the load balancer knows {members:?}, the group is {expected:?}"));
        }
        Ok(standing.into_keys().collect())
    }
}

fn base_config(site: &Site, sizes: [u32; 2], drain: Duration) -> Value {
    json!({
        "server": {
            "cluster_id": "sim", "shard": "s1",
            "provider": { "kind": "fake", "region": "r1", "zone": "z1" },
            "subnet_pools": { "main": ["subnet-1", "subnet-2"] },
            "secrets": {
                "provider": "object-storage",
                "encryption_key": { "provider": "file", "source": site.key_path() }
            },
            "default_drain_timeout": format!("{}s", drain.as_secs()),
            "health_check_interval": "5s",
            "garbage_collection": {
                "interval": "30s", "registration_timeout": "60s", "deleted_record_retention": "2m"
            },
            "leader_election": { "ttl": "6s", "renew_interval": "2s", "margin": "1s" },
            "safety": { "runaway_window": "3m" },
            "error_exit_jitter": { "min_delay": "0s", "max_delay": "0s" }
        },
        "tenants": { "acme": {} },
        "load_balancers": { "front": {} },
        "templates": {
            "knc": { "kind": "knc", "arch": "amd64", "subnet_pool": "main", "instance_type": "small" }
        },
        "groups": {
            "default": { "web": { "template": "knc", "size": sizes[0], "load_balancers": ["front"] } },
            "acme": { "web": { "template": "knc", "size": sizes[1] } }
        }
    })
}
