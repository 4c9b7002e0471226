//! Turns what shards send into what decisions are made from.

use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use nstance_client::live::ShardState;
use nstance_proto::v1;

use crate::decide::observed::{Boot, Drain, Group, GroupLayer, Instance, InstanceStatus, Picture};

/// All that one shard reported.
pub fn picture(state: &ShardState) -> Picture {
    let shard = state.status.shard.as_str();
    let mut picture = Picture {
        groups: state.groups.values().map(|it| (it.key.clone(), Arc::new(group(it)))).collect(),
        instances: state.instances.values().map(|it| (it.instance_id.clone(), Arc::new(instance(shard, it)))).collect(),
        ..Picture::default()
    };
    set_status(&mut picture, &state.status);
    picture
}

/// Who leads the shard, and where it is.
pub fn set_status(picture: &mut Picture, status: &v1::ConfigStatusResponse) {
    picture.leader.clone_from(&status.leader_id);
    picture.epoch = status.epoch;
    picture.provider.clone_from(&status.provider);
    picture.region.clone_from(&status.region);
    picture.zone.clone_from(&status.zone);
}

pub fn group(it: &v1::GroupStatus) -> Group {
    Group {
        key: it.key.clone(),
        size: it.size,
        template: it.template.clone(),
        instance_type: it.instance_type.clone(),
        subnet_pool: it.subnet_pool.clone(),
        vars: it.vars.clone().into_iter().collect(),
        is_static: it.is_static,
        is_deleting: it.deleting,
        etag: it.etag.clone(),
        actual: it.actual_size,
        ready: it.ready_size,
        registered: it.registered_size,
        draining: it.draining_size,
        capacity: it.capacity.clone().into_iter().collect(),
        arch: it.arch.clone(),
        holds: it.holds.iter().map(|hold| format!("{}: {}", hold.kind, hold.message)).collect(),
        layer: it.layer.as_ref().map(layer),
    }
}

fn layer(it: &v1::GroupConfig) -> GroupLayer {
    let set = |text: &str| Some(text.to_owned()).filter(|it| !it.is_empty());
    GroupLayer {
        size: it.size,
        template: set(&it.template),
        instance_type: set(&it.instance_type),
        subnet_pool: set(&it.subnet_pool),
        vars: it.vars.clone().into_iter().collect(),
    }
}

/// `shard` is used if the message does not name one.
pub fn instance(shard: &str, it: &v1::InstanceStatusResponse) -> Instance {
    Instance {
        id: it.instance_id.clone(),
        shard: if it.shard.is_empty() { shard.to_owned() } else { it.shard.clone() },
        group: it.group.clone(),
        on_demand: it.on_demand,
        status: status(&it.status),
        health: it.health.clone(),
        provider_state: it.provider_state.clone(),
        provider_instance_id: text(&it.provider_instance_id),
        provider_id: text(&it.k8s_provider_id),
        ip4: text(&it.private_ipv4),
        ip6: text(&it.private_ipv6),
        hostname: text(&it.hostname),
        instance_type: text(&it.instance_type),
        spot: it.spot,
        created_at: time(it.created_at.as_ref()),
        registered_at: time(it.registered_at.as_ref()),
        drain: it.drain.as_ref().map(|drain| Drain {
            id: drain.drain_id.clone(),
            reason: drain.reason.clone(),
            started_at: time(drain.started_at.as_ref()),
            delete_at: time(drain.delete_at.as_ref()),
            acked_at: time(drain.acked_at.as_ref()),
        }),
        boot: it.boot.as_ref().and_then(boot),
        failure_reason: text(&it.failure_reason),
        failure_message: text(&it.failure_message),
        traceparent: text(&it.traceparent),
    }
}

fn status(word: &str) -> InstanceStatus {
    match word {
        "pending" => InstanceStatus::Pending,
        "failed" => InstanceStatus::Failed,
        "provisioning" => InstanceStatus::Provisioning,
        "running" => InstanceStatus::Running,
        "draining" => InstanceStatus::Draining,
        "deleting" => InstanceStatus::Deleting,
        "deleted" => InstanceStatus::Deleted,
        _ => InstanceStatus::Other,
    }
}

/// The last stage that began; one that failed or stalled goes before later ones.
fn boot(report: &v1::BootReport) -> Option<Boot> {
    let is_bad = |stage: &&v1::BootStage| matches!(stage.state.as_str(), "failed" | "stalled");
    let stage = report.stages.iter().find(is_bad).or_else(|| report.stages.last());
    if stage.is_none() && !report.failed {
        return None;
    }
    Some(Boot {
        stage: stage.map(|it| it.name.clone()).unwrap_or_default(),
        state: stage.map(|it| it.state.clone()).unwrap_or_default(),
        since: stage.and_then(|it| time(it.ended.as_ref().or(it.started.as_ref()))),
        detail: stage.map(|it| it.detail.clone()).unwrap_or_default(),
        failed: report.failed,
        reason: report.reason.clone(),
    })
}

fn text(it: &str) -> Option<String> {
    (!it.is_empty()).then(|| it.to_owned())
}

fn time(it: Option<&prost_types::Timestamp>) -> Option<Timestamp> {
    let it = it?;
    Timestamp::new(it.seconds, it.nanos).ok()
}

/// An error that a shard reports about a group or an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub shard: String,
    /// Empty if it concerns no group.
    pub group: String,
    /// Empty if it concerns no single instance.
    pub instance: String,
    /// The server's reason code.
    pub reason: String,
    pub message: String,
}

pub fn fault(shard: &str, it: &v1::ErrorEvent) -> Fault {
    Fault {
        shard: shard.to_owned(),
        group: it.group.clone(),
        instance: it.instance_id.clone(),
        reason: if it.reason.is_empty() { "ProviderError".to_owned() } else { it.reason.clone() },
        message: it.error.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_keeps_every_field_that_decisions_use() {
        let message = v1::InstanceStatusResponse {
            instance_id: "knc1".into(),
            status: "draining".into(),
            group: "web".into(),
            on_demand: true,
            provider_state: "running".into(),
            k8s_provider_id: "aws:///a/i-1".into(),
            drain: Some(v1::DrainStatus {
                drain_id: "7".into(),
                delete_at: Some(prost_types::Timestamp { seconds: 60, nanos: 0 }),
                ..v1::DrainStatus::default()
            }),
            ..v1::InstanceStatusResponse::default()
        };
        let it = instance("dev-1", &message);
        assert_eq!((it.shard.as_str(), it.status, it.on_demand), ("dev-1", InstanceStatus::Draining, true));
        assert_eq!(it.provider_id.as_deref(), Some("aws:///a/i-1"));
        assert_eq!(it.ip4, None, "an empty field is no address");
        let drain = it.drain.unwrap();
        assert_eq!((drain.id.as_str(), drain.delete_at), ("7", Timestamp::from_second(60).ok()));
        assert_eq!(drain.acked_at, None);
        assert_eq!(status("new-word"), InstanceStatus::Other);
    }

    #[test]
    fn a_failed_boot_stage_goes_before_later_ones() {
        let stage = |name: &str, state: &str| v1::BootStage {
            name: name.into(),
            state: state.into(),
            ..v1::BootStage::default()
        };
        let report = v1::BootReport {
            stages: vec![stage("network", "done"), stage("disk", "failed"), stage("files", "running")],
            failed: true,
            reason: "DISK".into(),
            ..v1::BootReport::default()
        };
        let it = boot(&report).unwrap();
        assert_eq!((it.stage.as_str(), it.state.as_str(), it.failed), ("disk", "failed", true));
        assert_eq!(boot(&v1::BootReport::default()), None);
    }
}
