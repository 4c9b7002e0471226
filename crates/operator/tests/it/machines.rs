//! The machines behind a fake shard: groups keep their size, instances boot, drain and go.
//!
//! What an instance leaves in the world is what providers of `nstance-dev` leave: a node file, and a directory whose
//! `vm.json` tells that its agent lives.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::Duration,
};

use nstance_core::time::Timestamp;
use nstance_proto::{refusal::DOMAIN, rpc, v1};
use prost::Message as _;
use serde_json::json;
use tonic::{Code, Status};

/// From a request to a running VM, and from a granted deletion to its end.
const STEP: Duration = Duration::from_millis(200);

/// Where the machines of a test leave their files.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    pub(crate) nodes: PathBuf,
    pub(crate) instances: PathBuf,
}

/// All machines of one shard.
pub(crate) struct Machines {
    shard: String,
    /// Nodes have no namespace, so ids carry the story's name.
    story: String,
    places: Places,
    drain_time: Duration,
    n_made: usize,
    pub(crate) instances: BTreeMap<String, v1::InstanceStatusResponse>,
    pub(crate) deleted: BTreeMap<String, v1::InstanceStatusResponse>,
    /// When each instance came to its present status.
    since: BTreeMap<String, Timestamp>,
    preferred: BTreeMap<String, Vec<String>>,
    requests: BTreeMap<String, String>,
    labels: BTreeMap<String, BTreeMap<String, String>>,
    /// Groups that are to go once they are empty.
    ending: BTreeSet<String>,
    /// All drains that were begun: instance and drain id.
    pub(crate) drains: Vec<(String, String)>,
    /// All drains that were acknowledged.
    pub(crate) acknowledged: Vec<(String, String)>,
}

/// What changed in one step.
#[derive(Default)]
pub(crate) struct Changes {
    pub(crate) instances: Vec<v1::InstanceStatusResponse>,
    pub(crate) groups: Vec<v1::GroupStatus>,
    pub(crate) deleted_groups: Vec<String>,
}

impl Machines {
    pub(crate) fn new(shard: &str, story: &str, places: Places, drain_time: Duration) -> Self {
        Self {
            shard: shard.to_owned(),
            story: story.to_owned(),
            places,
            drain_time,
            n_made: 0,
            instances: BTreeMap::new(),
            deleted: BTreeMap::new(),
            since: BTreeMap::new(),
            preferred: BTreeMap::new(),
            requests: BTreeMap::new(),
            labels: BTreeMap::new(),
            ending: BTreeSet::new(),
            drains: Vec::new(),
            acknowledged: Vec::new(),
        }
    }

    pub(crate) fn prefer(&mut self, group: &str, ids: &[String]) {
        self.ending.remove(group);
        self.preferred.insert(group.to_owned(), ids.to_vec());
    }

    pub(crate) fn end_group(&mut self, group: &str) {
        self.ending.insert(group.to_owned());
    }

    /// The VM is gone, and nobody asked for it.
    pub(crate) fn crash(&mut self, id: &str, changes: &mut Changes) {
        self.end(id, "vm-gone", changes);
    }

    /// One VM for one request, however often it is made.
    pub(crate) fn create(&mut self, request: &v1::CreateInstanceRequest, now: Timestamp) -> v1::InstanceStatusResponse {
        if let Some(made) = self.requests.get(&request.request_id) {
            return self.find(made).unwrap_or_default();
        }
        let config = request.config.clone().unwrap_or_default();
        let made = self.make(&config.group, true, now);
        let labels = config.vars.get("NodeLabels").map(String::as_str).unwrap_or_default();
        let labels = labels.split(',').filter_map(|it| it.split_once('='));
        let labels = labels.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        self.labels.insert(made.instance_id.clone(), labels);
        self.requests.insert(request.request_id.clone(), made.instance_id.clone());
        made
    }

    /// The instance, gone ones included.
    pub(crate) fn find(&self, id: &str) -> Option<v1::InstanceStatusResponse> {
        self.instances.get(id).or_else(|| self.deleted.get(id)).cloned()
    }

    /// Begins a drain; `None` if there is no such instance, an error if it leaves already.
    pub(crate) fn leave(
        &mut self,
        id: &str,
        reason: &str,
        now: Timestamp,
    ) -> Option<Result<v1::InstanceStatusResponse, Status>> {
        let drain_id = format!("{}{}", now.as_millis(), self.drains.len());
        let instance = self.instances.get_mut(id)?;
        if !is_live(instance) {
            return Some(Err(refusal(Code::FailedPrecondition, "ALREADY_LEAVING", "it is leaving already")));
        }
        instance.status = "draining".to_owned();
        instance.drain = Some(v1::DrainStatus {
            drain_id: drain_id.clone(),
            reason: reason.to_owned(),
            started_at: Some(wire(now)),
            delete_at: Some(wire(now.plus(self.drain_time))),
            acked_at: None,
        });
        let instance = instance.clone();
        self.since.insert(id.to_owned(), now);
        self.drains.push((id.to_owned(), drain_id));
        Some(Ok(instance))
    }

    pub(crate) fn acknowledge(
        &mut self,
        request: &v1::DrainAckRequest,
        now: Timestamp,
    ) -> Result<v1::InstanceStatusResponse, Status> {
        let id = &request.instance_id;
        let Some(instance) = self.instances.get_mut(id) else { return Err(Status::not_found("no such instance")) };
        let Some(drain) = &mut instance.drain else {
            return Err(refusal(Code::FailedPrecondition, "NOT_DRAINING", "it does not drain"));
        };
        if drain.drain_id != request.drain_id {
            return Err(refusal(Code::FailedPrecondition, "STALE_DRAIN", "there is a newer drain"));
        }
        drain.acked_at = Some(wire(now));
        self.acknowledged.push((id.clone(), request.drain_id.clone()));
        Ok(instance.clone())
    }

    /// Lets time pass.
    pub(crate) fn step(&mut self, groups: &mut BTreeMap<String, v1::GroupStatus>, now: Timestamp) -> Changes {
        let mut changes = Changes::default();
        for id in self.instances.keys().cloned().collect::<Vec<_>>() {
            self.go_on(&id, now, &mut changes);
        }
        let keys: Vec<String> = groups.keys().cloned().collect();
        for key in keys {
            self.keep_size(&key, groups, now, &mut changes);
        }
        changes
    }

    fn go_on(&mut self, id: &str, now: Timestamp, changes: &mut Changes) {
        let Some(instance) = self.instances.get_mut(id) else { return };
        let is_due = self.since.get(id).is_none_or(|since| STEP <= now.since(*since));
        match instance.status.as_str() {
            "provisioning" if is_due => {
                instance.status = "running".to_owned();
                instance.health = "healthy".to_owned();
                instance.provider_state = "running".to_owned();
                instance.provider_instance_id = format!("nstance-agent-{id}");
                instance.k8s_provider_id = format!("dev:///nstance-agent-{id}");
                instance.registered_at = Some(wire(now));
                changes.instances.push(instance.clone());
                let labels = self.labels.get(id).cloned().unwrap_or_default();
                boot(&self.places, id, &labels);
            }
            "draining" => {
                let drain = instance.drain.clone().unwrap_or_default();
                let delete_at = drain.delete_at.map_or(0, |it| it.seconds);
                if drain.acked_at.is_some() || delete_at <= now.as_millis() / 1000 {
                    instance.status = "deleting".to_owned();
                    changes.instances.push(instance.clone());
                    self.since.insert(id.to_owned(), now);
                }
            }
            "deleting" if is_due => self.end(id, "drained", changes),
            _ => {}
        }
    }

    fn keep_size(
        &mut self,
        key: &str,
        groups: &mut BTreeMap<String, v1::GroupStatus>,
        now: Timestamp,
        changes: &mut Changes,
    ) {
        let Some(group) = groups.get_mut(key) else { return };
        let managed = |it: &&v1::InstanceStatusResponse| it.group == key && !it.on_demand;
        let live: Vec<String> =
            self.instances.values().filter(managed).filter(|it| is_live(it)).map(|it| it.instance_id.clone()).collect();
        let is_ending = self.ending.contains(key);
        let size = if is_ending { 0 } else { usize::try_from(group.size).unwrap_or_default() };
        for _ in live.len()..size {
            changes.instances.push(self.make(key, false, now));
        }
        let preferred = self.preferred.get(key).cloned().unwrap_or_default();
        let mut victims: Vec<String> = preferred.into_iter().filter(|it| live.contains(it)).collect();
        victims.extend(live.iter().rev().filter(|it| !victims.contains(it)).cloned().collect::<Vec<_>>());
        for id in victims.into_iter().take(live.len().saturating_sub(size)) {
            changes.instances.extend(self.leave(&id, "scale-down", now).and_then(Result::ok));
        }
        let of_group: Vec<_> = self.instances.values().filter(managed).collect();
        if is_ending && of_group.is_empty() {
            groups.remove(key);
            self.ending.remove(key);
            changes.deleted_groups.push(key.to_owned());
            return;
        }
        let count = |status: &str| i32::try_from(of_group.iter().filter(|it| it.status == status).count()).unwrap_or(0);
        let mut new = group.clone();
        new.actual_size = count("running") + count("provisioning");
        new.ready_size = count("running");
        new.registered_size = count("running");
        new.draining_size = count("draining");
        new.deleting = is_ending;
        new.k8s_provider_ids = of_group.iter().map(|it| it.k8s_provider_id.clone()).collect();
        new.k8s_provider_ids.retain(|it| !it.is_empty());
        if *group != new {
            group.clone_from(&new);
            changes.groups.push(new);
        }
    }

    fn make(&mut self, group: &str, on_demand: bool, now: Timestamp) -> v1::InstanceStatusResponse {
        self.n_made += 1;
        // So that the order of ids is that of creation.
        let id = format!("{}-{}-{:03}", self.story, self.shard, self.n_made);
        let instance = v1::InstanceStatusResponse {
            instance_id: id.clone(),
            tenant: "default".to_owned(),
            shard: self.shard.clone(),
            group: group.to_owned(),
            on_demand,
            status: "provisioning".to_owned(),
            health: "starting".to_owned(),
            provider_state: "starting".to_owned(),
            hostname: id.clone(),
            instance_type: "small".to_owned(),
            created_at: Some(wire(now)),
            ..v1::InstanceStatusResponse::default()
        };
        self.since.insert(id.clone(), now);
        self.instances.insert(id, instance.clone());
        instance
    }

    fn end(&mut self, id: &str, reason: &str, changes: &mut Changes) {
        let Some(mut instance) = self.instances.remove(id) else { return };
        instance.status = "deleted".to_owned();
        instance.provider_state = "gone".to_owned();
        instance.failure_reason = reason.to_owned();
        // An agent that is not there any more keeps no Node.
        let _ = std::fs::remove_dir_all(self.places.instances.join(id));
        self.deleted.insert(id.to_owned(), instance.clone());
        changes.instances.push(instance);
    }
}

fn is_live(instance: &v1::InstanceStatusResponse) -> bool {
    ["provisioning", "running"].contains(&instance.status.as_str())
}

/// The agent starts: its process is this one, and its Node registers.
fn boot(places: &Places, id: &str, labels: &BTreeMap<String, String>) {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let start_time: u64 = stat.rsplit_once(") ").unwrap().1.split_ascii_whitespace().nth(19).unwrap().parse().unwrap();
    let vm = json!({ "state": "running", "pid": std::process::id(), "start_time": start_time });
    write(&places.instances.join(id).join("vm.json"), &vm.to_string());
    let list: Vec<String> = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
    write(&places.instances.join(id).join("recv/instance.env"), &format!("NODE_LABELS={}\n", list.join(",")));
    let node = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": id, "labels": { "nstance.dev/instance-id": id } },
        "spec": { "providerID": format!("dev:///nstance-agent-{id}") },
    });
    write(&places.nodes.join(format!("{id}.json")), &node.to_string());
}

fn write(path: &Path, text: &str) {
    let dir = path.parent().unwrap();
    std::fs::create_dir_all(dir).unwrap();
    let draft = dir.join(format!(".{}.tmp", path.file_name().unwrap().to_string_lossy()));
    std::fs::write(&draft, text).unwrap();
    std::fs::rename(draft, path).unwrap();
}

fn wire(at: Timestamp) -> prost_types::Timestamp {
    let millis = at.as_millis();
    let nanos = i32::try_from(millis.rem_euclid(1000) * 1_000_000).unwrap_or_default();
    prost_types::Timestamp { seconds: millis.div_euclid(1000), nanos }
}

/// A refusal with the server's typed reason.
fn refusal(code: Code, reason: &str, message: &str) -> Status {
    let info = rpc::ErrorInfo { reason: reason.to_owned(), domain: DOMAIN.to_owned(), ..rpc::ErrorInfo::default() };
    let any = prost_types::Any {
        type_url: "type.googleapis.com/google.rpc.ErrorInfo".to_owned(),
        value: info.encode_to_vec(),
    };
    let status = rpc::Status { code: code.into(), message: message.to_owned(), details: vec![any] };
    Status::with_details(code, message, status.encode_to_vec().into())
}
