//! What a directed test does to a plane, and what it reads of it: one thing at one moment, instead of a script by chance.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use nstance_core::{
    group::Desired,
    ids::{Epoch, InstanceId},
    instance::{Instance, Phase},
    plan::HoldKind,
    ports::{
        objects::{Condition, ObjectStore as _},
        peers::{Knock, PeerAsk, PeerError, PeerView, Peers as _},
        provider::Tags,
    },
    time::Timestamp,
};
use nstance_proto::v1;
use nstance_providers::fake::{Call, Op};
use nstance_server::term::Term;
use nstance_store::{
    faulty::{Calls, Fault, FaultPlan},
    records::{self, Meta, config_keys, instance_key, leader::LeaseRecord, lease_key},
};
use serde_json::Value;
use tonic::Status;

use crate::{
    hosts::port_of,
    operators::Operator,
    peers::SimPeers,
    plane::{Manners, Plane},
    site::{chance, cluster, group, lb, shard, tenant},
};

/// How often a test looks.
const LOOK: Duration = Duration::from_millis(10);

impl Plane {
    pub fn now(&self) -> Timestamp {
        self.site.now()
    }

    /// Waits until it is so, at most `limit`; says how long it took.
    pub async fn until(&self, what: &str, limit: Duration, mut is: impl FnMut() -> bool) -> Duration {
        let start = tokio::time::Instant::now();
        while !is() {
            if let Some(broken) = self.violations().first() {
                panic!("{}\n{broken}", self.trace().join("\n"));
            }
            assert!(start.elapsed() <= limit, "{}\nnot within {limit:?}: {what}", self.trace().join("\n"));
            tokio::time::sleep(LOOK).await;
        }
        start.elapsed()
    }

    /// Lets time pass, and sees at every look that it stays so.
    pub async fn while_for(&self, time: Duration, what: &str, mut is: impl FnMut() -> bool) {
        let start = tokio::time::Instant::now();
        while start.elapsed() < time {
            assert!(is(), "{}\nno more after {:?}: {what}", self.trace().join("\n"), start.elapsed());
            tokio::time::sleep(LOOK * 10).await;
        }
    }

    /// Waits until the server leads, at most `limit`; says how long it took.
    pub async fn leads(&self, limit: Duration) -> Duration {
        self.until("somebody leads", limit, || self.term().is_some()).await
    }

    /// Calls of one kind, in the order they began.
    pub fn calls(&self, op: Op) -> Vec<Call> {
        self.cloud().calls().into_iter().filter(|call| call.op == op).collect()
    }

    /// Calls that change the cloud and began at this moment or later.
    pub fn effects_since(&self, at: Timestamp) -> Vec<Call> {
        self.cloud().calls().into_iter().filter(|call| call.op.is_effect() && at <= call.at).collect()
    }

    /// Creates of a group.
    pub fn creates(&self, tenant: &str, key: &str) -> Vec<Call> {
        let of = group(tenant, key);
        self.calls(Op::Create).into_iter().filter(|call| call.group.as_ref() == Some(&of)).collect()
    }

    pub fn phase(&self, instance: InstanceId) -> Option<Phase> {
        self.record(instance).map(|it| it.phase())
    }

    /// Why nothing more is done for a group, as its worker last said.
    pub fn holds(&self, tenant: &str, key: &str) -> Vec<HoldKind> {
        let of = group(tenant, key);
        let Some(term) = self.term() else { return Vec::new() };
        let state = term.world.lock();
        state.groups.get(&of).map(|it| it.holds.iter().map(|hold| hold.kind).collect()).unwrap_or_default()
    }

    /// Whether traffic goes to an instance, or still may.
    pub fn is_balanced(&self, instance: InstanceId) -> bool {
        self.cloud().members(&lb()).contains_key(&instance)
    }

    /// Agents that have a stream open.
    pub fn connected(&self) -> Vec<InstanceId> {
        self.fleet.connected()
    }

    /// A VM ends, and its connections with it.
    pub fn vm_dies(&self, instance: InstanceId) {
        self.note(format!("VM of {instance} dies"));
        self.cloud().kill(instance);
        self.fleet.dies(instance, false);
    }

    /// A VM ends as by a power cut: nobody is told.
    pub fn power_cut(&self, instance: InstanceId) {
        self.note(format!("VM of {instance} dies without a word"));
        self.cloud().kill(instance);
        self.fleet.dies(instance, true);
    }

    /// Ends the connections of agents, and lets them make no other for a time; their VMs run on.
    pub fn sever_agents(&self, instances: &[InstanceId], time: Duration) {
        self.note(format!("{} agents are severed for {time:?}", instances.len()));
        self.fleet.sever(instances, time);
    }

    /// VMs are taken back after a notice, which their agents hear at once.
    pub fn reclaim(&self, instances: &[InstanceId], notice: Duration) {
        for id in instances {
            self.note(format!("VM of {id} is reclaimed in {notice:?}"));
            self.cloud().reclaim(*id, notice);
        }
        self.fleet.tick();
    }

    /// An operator that says nothing to drains.
    pub fn mute(&self, tenant: &str, on: bool) {
        self.operator(tenant).mute.store(on, Ordering::SeqCst);
    }

    /// Clients miss so many answers of a thousand.
    pub fn lose_answers(&self, permille: u64) {
        self.site.lose_answers(permille);
    }

    /// The first server does nothing until it is thawed.
    pub fn freeze(&self, on: bool) {
        self.freeze_nth(1, on);
    }

    pub fn freeze_nth(&self, n: usize, on: bool) {
        self.note(format!("server {n} {}", if on { "stands still" } else { "wakes up" }));
        if let Some(server) = self.site.server(n) {
            if on { server.process.freeze() } else { server.process.thaw() }
        }
    }

    /// Which server leads, as clients see it.
    pub fn leader(&self) -> Option<usize> {
        self.site.leader().map(|(server, _)| server.n)
    }

    /// The term a server leads in, or believes to.
    pub fn term_of(&self, n: usize) -> Option<Arc<Term>> {
        self.site.server(n).and_then(|server| server.running.term())
    }

    pub fn is_up(&self, n: usize) -> bool {
        self.site.server(n).is_some()
    }

    /// Kills a server where it stands. With `forgets`, its machine loses its disk too.
    pub fn kill_nth(&self, n: usize, forgets: bool) {
        self.site.kill(n);
        if forgets {
            self.site.lose_cache(n);
        }
    }

    /// A server dies with its machine: nobody there says that nobody is there.
    pub fn power_off(&self, n: usize) {
        self.site.hosts.darken(n);
        self.site.kill(n);
    }

    pub fn start_nth(&self, n: usize) {
        // An error here would be one of the simulation.
        self.site.start(n).expect("a server starts");
    }

    /// Starts a process on the machine `n` that says to be server `id`.
    pub fn start_as(&self, n: usize, id: usize) {
        self.site.start_as(n, id).expect("a server starts");
    }

    /// Asks a server to end, as a signal does, and waits until it has.
    pub async fn stop_nth(&self, n: usize) {
        self.site.stop(n).await;
    }

    pub fn cut_store_of(&self, n: usize, cut: bool) {
        self.note(format!("server {n} {} the store", if cut { "is cut off from" } else { "reaches" }));
        self.site.cut_store(n, cut);
    }

    /// Two servers do not hear each other, or do again.
    pub fn part(&self, one: usize, other: usize, on: bool) {
        self.note(format!("servers {one} and {other} are {}", if on { "parted" } else { "joined" }));
        self.site.hosts.block(one, other, on);
        self.site.hosts.block(other, one, on);
    }

    /// Sets the wall clock of a machine so many seconds ahead of true time, or behind.
    pub fn set_clock(&self, n: usize, ahead: i64) {
        self.note(format!("the wall clock of server {n} is {ahead} s ahead"));
        self.site.clock_of(n).jump_to(ahead.saturating_mul(1000));
    }

    /// From now on a machine's monotonic clock runs so many thousandths of true time.
    pub fn set_rate(&self, n: usize, rate: u32) {
        self.site.clock_of(n).run_at(rate);
    }

    /// The test itself meddles with the lease: so long two leaders may believe in theirs.
    pub fn excuse_two_leaders(&self, time: Duration) {
        self.site.judge().excuse(time);
    }

    fn way(&self, from: usize) -> SimPeers {
        SimPeers { n: from, id: format!("srv-{from}"), hosts: self.site.hosts.clone(), chance: self.site.net.clone() }
    }

    /// What a server hears from another if it asks it now.
    pub async fn ask_peer(&self, from: usize, to: usize, ask: &PeerAsk) -> Result<PeerView, PeerError> {
        self.way(from).ask(&format!("127.0.0.1:{}", port_of(to)), ask).await
    }

    /// What a server meets if it connects to another now.
    pub async fn knock(&self, from: usize, to: usize) -> Knock {
        self.way(from).knock(&format!("127.0.0.1:{}", port_of(to))).await
    }

    /// How many calls of the store each server has made.
    pub fn store_calls(&self, n: usize) -> Calls {
        self.site.server(n).map(|server| server.store.calls()).unwrap_or_default()
    }

    /// Takes an object out of the bucket behind everybody's back.
    pub async fn remove_object(&self, key: &str) {
        self.site.bucket.delete(key).await.expect("the bucket takes it");
    }

    pub fn lease_key(&self) -> String {
        lease_key(Some(&shard()))
    }

    /// The first server's next writes meet these.
    pub fn script_puts(&self, faults: impl IntoIterator<Item = Fault>) {
        if let Some(server) = self.site.server(1) {
            server.store.script_puts(faults);
        }
    }

    /// Kills the server at the armed point once it is there, and says which it was.
    pub async fn dies_there(&self, forgets: bool) {
        let limit = Duration::from_secs(120);
        let hit = tokio::time::timeout(limit, self.points().hit()).await;
        assert!(hit.is_ok(), "{}\nthe point was not met within {limit:?}", self.trace().join("\n"));
        self.kill_server(forgets);
    }

    /// Asks as a group would be asked, and wakes nobody.
    pub fn whisper_size(&self, tenant: &str, key: &str, size: u32) {
        let term = self.term().expect("somebody leads");
        let mut state = term.world.lock();
        let it = state.group(&group(tenant, key));
        it.desired = Desired::Known(size);
        it.revision += 1;
    }

    /// Starts a server on a slow store and waits until it holds the lease, in an epoch above `old`. It has not read
    /// anything of the state then.
    pub async fn start_until_it_holds_the_lease(&self, old: Epoch) -> LeaseRecord {
        self.set_store(FaultPlan { max_delay: Duration::from_millis(400), ..FaultPlan::default() });
        self.start_server();
        for _ in 0..6000 {
            let lease = self.lease().await;
            if old < lease.epoch {
                return lease;
            }
            tokio::time::sleep(LOOK).await;
        }
        panic!("{}\nthe lease was not taken", self.trace().join("\n"))
    }

    /// Changes the stored config.
    pub async fn edit_config(&self, change: impl FnOnce(&mut Value)) {
        let [key, _] = config_keys(&shard());
        let object = self.site.bucket.get(&key).await.expect("the config is there");
        let mut value = serde_json::from_slice(&object.body).expect("the config is JSON");
        change(&mut value);
        self.site.upload(&value).await.expect("the bucket takes it");
    }

    /// Asks for a refresh, as an operator of the tenant.
    pub async fn refresh(&self, tenant: &str, confirm: bool) -> Result<v1::RefreshConfigResponse, Status> {
        let mut client = self.operator(tenant).client().expect("the operator is registered");
        let request = v1::RefreshConfigRequest { confirm_removals: confirm, ..Default::default() };
        client.refresh_config(request).await.map(tonic::Response::into_inner)
    }

    /// Somebody finds the nonce of a VM and tries it with a key of its own.
    pub async fn steal_nonce(&self, instance: InstanceId) -> Result<(), Status> {
        self.fleet.thief(instance).await
    }

    /// A VM of a group that nobody knows of, without an agent.
    pub fn add_orphan(&self, instance: InstanceId, tenant: &str, key: &str) {
        let of = group(tenant, key);
        let tags = Tags {
            cluster: cluster(),
            shard: shard(),
            instance,
            tenant: of.tenant,
            group: of.group,
            on_demand: false,
            epoch: Epoch(1),
            template: "knc".to_owned(),
            infra_hash: String::new(),
        };
        self.cloud().add_foreign(&format!("orphan-{instance}"), Some(instance), Some(tags));
    }

    /// What lies in the bucket.
    pub async fn stored(&self, key: &str) -> Option<Vec<u8>> {
        self.site.bucket.get(key).await.ok().map(|object| object.body)
    }

    /// Puts something into the bucket behind everybody's back.
    pub async fn overwrite(&self, key: &str, body: Vec<u8>) {
        let condition = match self.site.bucket.get(key).await {
            Ok(object) => Condition::Match(object.etag),
            Err(_) => Condition::Create,
        };
        self.site.bucket.put(key, body, condition).await.expect("the bucket takes it");
    }

    pub fn groups_key(&self) -> String {
        records::groups_key(&shard())
    }

    pub async fn lease(&self) -> LeaseRecord {
        let key = lease_key(Some(&shard()));
        let object = self.site.bucket.get(&key).await.expect("the lease is there");
        records::decode_object::<LeaseRecord>(&key, object).expect("a lease").value
    }

    /// Somebody else holds the lease from now on, for a minute at a time; or gives it back.
    pub async fn usurp(&self, epoch: Epoch, released: bool) {
        self.note(format!("a stranger has the lease in epoch {epoch}, released: {released}"));
        let key = lease_key(Some(&shard()));
        let object = self.site.bucket.get(&key).await.expect("the lease is there");
        let there = records::decode_object::<LeaseRecord>(&key, object).expect("a lease");
        let theirs = LeaseRecord {
            epoch,
            holder: "srv-9".to_owned(),
            process: "0123456789abcdef0123456789abcdef".to_owned(),
            addr: "192.0.2.9:8991".to_owned(),
            direct: false,
            ttl: Duration::from_secs(60),
            released,
            ..there.value
        };
        let meta = Meta { write_id: format!("theirs-{released}"), epoch, ..there.meta };
        self.overwrite(&key, records::encode(&theirs, &meta, &there.extra)).await;
    }

    /// Somebody holds the cluster's lease and does not let go of it.
    pub async fn hold_cluster_lease(&self) {
        self.note("a stranger has the cluster's lease");
        let lease = LeaseRecord { holder: "srv-9".to_owned(), ttl: Duration::from_secs(3600), ..self.lease().await };
        let key = lease_key(None);
        let object = self.site.bucket.get(&key).await.expect("the cluster had a leader once");
        let there = records::decode_object::<LeaseRecord>(&key, object).expect("a lease");
        let meta = Meta { write_id: "theirs".to_owned(), ..there.meta };
        self.overwrite(&key, records::encode(&lease, &meta, &there.extra)).await;
    }

    /// Another operator of a tenant registers, and is one from then on. Says how long it took.
    pub async fn register_operator(&self, name: &str, limit: Duration) -> Duration {
        let dice = chance(self.operators.len() as u64, "another operator");
        let operator = Operator::start(&self.site, &self.tasks, tenant(name), dice, Manners::Good);
        self.until("an operator registers", limit, || operator.client().is_some()).await
    }

    /// Somebody with a higher epoch writes a record anew, as it is.
    pub async fn write_as(&self, instance: InstanceId, epoch: Epoch) {
        let tenant = self.record(instance).expect("it has a record").group.tenant;
        let key = instance_key(&shard(), &tenant, &instance);
        let object = self.site.bucket.get(&key).await.expect("the record is there");
        let there = records::decode_object::<Instance>(&key, object).expect("a record");
        let meta = Meta { epoch, write_id: "theirs".to_owned(), ..there.meta };
        let body = records::encode(&Instance { epoch, ..there.value }, &meta, &there.extra);
        self.overwrite(&key, body.clone()).await;
        self.site.judge().written(&key, &body);
    }
}
