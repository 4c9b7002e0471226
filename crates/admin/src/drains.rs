//! Drains that go on, and what each of them waits for.

use std::collections::BTreeMap;

use nstance_client::ShardClient;
use nstance_proto::v1::{
    Event, ExplainRequest, GroupStatus, InstanceStatusResponse, ListInstancesRequest, PlanHold, explain_request::Target,
};
use serde_json::{Value, json};
use tonic::{Code, Status};

use crate::view;

/// Deletes whose history is asked for. If more go on at once, they rather have a cause in common, which holds tell.
const MAX_EXPLAINED: usize = 16;

/// Holds that name no instance, and under which no drain of their group ends.
const OF_ALL: &[&str] = &["SnapshotIncomplete", "RecordCorrupt", "ProviderUnavailable", "ProviderAuth", "LeaseStalled"];

pub struct Drain {
    pub instance: InstanceStatusResponse,
    /// Nothing if it is not known to wait for anything.
    pub blocked_by: Vec<Blocker>,
}

/// Something that a drain waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocker {
    /// `acknowledgement`, `deletion`, `delete-failing`, or the kind of a hold.
    pub kind: String,
    pub message: String,
}

impl Blocker {
    fn new(kind: &str, message: impl Into<String>) -> Self {
        Self { kind: kind.to_owned(), message: message.into() }
    }

    pub fn document(&self) -> Value {
        json!({"kind": self.kind, "message": self.message})
    }
}

/// All drains of one shard, those included whose VM is being deleted.
pub async fn of_shard(client: &mut ShardClient) -> Result<Vec<Drain>, Status> {
    let instances = client.instances(ListInstancesRequest::default()).await?;
    let draining: Vec<_> = instances.into_iter().filter(|it| it.drain.is_some()).collect();
    if draining.is_empty() {
        return Ok(Vec::new());
    }
    let groups = client.groups().await?;
    let groups: BTreeMap<&str, &GroupStatus> = groups.iter().map(|it| (it.key.as_str(), it)).collect();
    let mut drains = Vec::new();
    let mut n_explained = 0;
    for instance in draining {
        let mut failure = None;
        if instance.status == "deleting" && n_explained < MAX_EXPLAINED {
            failure = failed_delete(client, &instance.instance_id).await?;
            n_explained += 1;
        }
        let holds = groups.get(instance.group.as_str()).map_or(&[][..], |it| &it.holds);
        let blocked_by = blockers(&instance, holds, failure.as_ref());
        drains.push(Drain { instance, blocked_by });
    }
    Ok(drains)
}

/// The last time that the provider refused to delete it, as far as it is remembered.
async fn failed_delete(client: &mut ShardClient, id: &str) -> Result<Option<Event>, Status> {
    let request = ExplainRequest { target: Some(Target::InstanceId(id.to_owned())) };
    match client.service.explain(request).await {
        Ok(answer) => Ok(answer.into_inner().history.into_iter().rfind(|it| it.reason == "DeleteFailing")),
        // Forgotten since it was listed.
        Err(status) if status.code() == Code::NotFound => Ok(None),
        Err(status) => Err(status),
    }
}

/// What an instance that leaves waits for.
pub fn blockers(it: &InstanceStatusResponse, holds: &[PlanHold], failed: Option<&Event>) -> Vec<Blocker> {
    let mut found = Vec::new();
    let drain = it.drain.clone().unwrap_or_default();
    let unheard = it.status == "draining" && drain.acked_at.is_none();
    if unheard {
        let end = view::time(drain.delete_at.as_ref());
        let end = end.map(|at| format!("; it ends without one at {at}")).unwrap_or_default();
        found.push(Blocker::new("acknowledgement", format!("nobody has acknowledged the drain{end}")));
    }
    let concerns = |hold: &&PlanHold| {
        let same = unheard && hold.kind == "WaitingForDrain";
        let of_all = hold.instance_id.is_empty() && OF_ALL.contains(&hold.kind.as_str());
        !same && (hold.instance_id == it.instance_id || of_all)
    };
    found.extend(holds.iter().filter(concerns).map(|hold| Blocker::new(&hold.kind, hold.message.as_str())));
    if let Some(event) = failed.filter(|_| it.status == "deleting") {
        let at = view::time(event.at.as_ref()).map(|at| format!(" at {at}")).unwrap_or_default();
        found.push(Blocker::new("delete-failing", format!("the provider refused{at}: {}", event.message)));
    }
    if found.is_empty() && it.status == "deleting" {
        let state = if it.provider_state.is_empty() { "unknown" } else { &it.provider_state };
        let message = format!("its VM is being deleted, and not proven gone; to the provider it is {state}");
        found.push(Blocker::new("deletion", message));
    }
    found
}

#[cfg(test)]
mod tests {
    use nstance_proto::v1::DrainStatus;
    use prost_types::Timestamp;

    use super::*;

    const AT: Timestamp = Timestamp { seconds: 1_800_000_000, nanos: 0 };

    fn leaving(status: &str, acked: bool) -> InstanceStatusResponse {
        let drain = DrainStatus { delete_at: Some(AT), acked_at: acked.then_some(AT), ..DrainStatus::default() };
        InstanceStatusResponse {
            instance_id: "a".into(),
            status: status.into(),
            drain: Some(drain),
            provider_state: "running".into(),
            ..InstanceStatusResponse::default()
        }
    }

    fn hold(kind: &str, instance: &str) -> PlanHold {
        let message = format!("because of {kind}");
        PlanHold { kind: kind.into(), instance_id: instance.into(), message, ..PlanHold::default() }
    }

    fn said(it: &InstanceStatusResponse, holds: &[PlanHold], failed: Option<&Event>) -> Vec<String> {
        blockers(it, holds, failed).iter().map(|it| format!("{}: {}", it.kind, it.message)).collect()
    }

    #[test]
    fn a_drain_waits_for_its_word_and_for_what_holds_it() {
        let word =
            "acknowledgement: nobody has acknowledged the drain; it ends without one at 2027-01-15T08:00:00.000Z";
        let holds = [hold("WaitingForDrain", "a"), hold("WaitingForLb", "b"), hold("RolloutPaused", "")];
        assert_eq!(said(&leaving("draining", false), &holds, None), [word], "told once, and of nobody else");
        let holds = [hold("WaitingForLb", "a"), hold("SnapshotIncomplete", "")];
        let expected = ["WaitingForLb: because of WaitingForLb", "SnapshotIncomplete: because of SnapshotIncomplete"];
        assert_eq!(said(&leaving("draining", true), &holds, None), expected);
        assert_eq!(said(&leaving("draining", true), &[], None), [""; 0], "it goes on by itself");
    }

    #[test]
    fn a_delete_that_fails_says_why() {
        let failed = Event { at: Some(AT), message: "quota of calls is used up".into(), ..Event::default() };
        let (deleting, holds) = (leaving("deleting", true), [hold("InProgress", "a")]);
        let refused = "delete-failing: the provider refused at 2027-01-15T08:00:00.000Z: quota of calls is used up";
        assert_eq!(said(&deleting, &holds, Some(&failed)), ["InProgress: because of InProgress", refused]);
        let going = "deletion: its VM is being deleted, and not proven gone; to the provider it is running";
        assert_eq!(said(&deleting, &[], None), [going]);
        assert_eq!(said(&leaving("draining", true), &[], Some(&failed)), [""; 0], "of a delete that was");
    }
}
