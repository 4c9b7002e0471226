//! What the API answers, as JSON: the one form that the command line and the HTTP API share. Keys are stable.
//!
//! Empty texts and absent times are left out of nothing: a key is always there, `null` if there is no value.

use std::collections::BTreeMap;

use nstance_client::ShardError;
use nstance_core::time::Timestamp;
use nstance_proto::v1::{
    BootReport, ConfigStatusResponse, DrainStatus, Event, ExplainResponse, Fact, GroupStatus, InstanceStatusResponse,
    PlanHold, PlanResponse, PlannedAction, Problem, RefreshConfigResponse, RolloutStatus, Severity, TerminationNotice,
};
use serde_json::{Value, json};

/// RFC 3339 in UTC.
pub fn time(at: Option<&prost_types::Timestamp>) -> Option<Timestamp> {
    at.map(|at| Timestamp::from_millis(at.seconds.saturating_mul(1000).saturating_add(i64::from(at.nanos) / 1_000_000)))
}

fn at(at: Option<&prost_types::Timestamp>) -> Value {
    time(at).map_or(Value::Null, |it| it.to_string().into())
}

fn text(text: &str) -> Value {
    if text.is_empty() { Value::Null } else { text.into() }
}

fn map(map: &std::collections::HashMap<String, String>) -> Value {
    // Maps of the wire have no order; people and scripts want one.
    let sorted: BTreeMap<&String, &String> = map.iter().collect();
    json!(sorted)
}

/// The code of a status in the words of a machine: `not_found`, or the server's own reason.
pub fn code_of(error: &ShardError) -> String {
    if error.reason.is_empty() { code_name(error.code).to_owned() } else { error.reason.to_lowercase() }
}

fn code_name(code: tonic::Code) -> &'static str {
    use tonic::Code;
    match code {
        Code::Ok => "ok",
        Code::Cancelled => "cancelled",
        Code::InvalidArgument => "invalid_argument",
        Code::DeadlineExceeded => "deadline_exceeded",
        Code::NotFound => "not_found",
        Code::AlreadyExists => "already_exists",
        Code::PermissionDenied => "permission_denied",
        Code::ResourceExhausted => "resource_exhausted",
        Code::FailedPrecondition => "failed_precondition",
        Code::Aborted => "aborted",
        Code::Unimplemented => "unimplemented",
        Code::Internal => "internal",
        Code::Unavailable => "unavailable",
        Code::Unauthenticated => "unauthenticated",
        Code::Unknown | Code::OutOfRange | Code::DataLoss => "unknown",
    }
}

pub fn error(error: &ShardError) -> Value {
    let mut value = json!({"shard": error.shard, "code": code_of(error), "message": error.message});
    if !error.problems.is_empty() {
        value["problems"] = error.problems.iter().map(problem).collect();
    }
    value
}

pub fn problem(it: &Problem) -> Value {
    json!({
        "severity": it.severity,
        "code": it.code,
        "path": it.path,
        "line": it.line,
        "column": it.column,
        "message": it.message,
        "suggestion": text(&it.help),
    })
}

pub fn config_status(shard: &str, it: &ConfigStatusResponse) -> Value {
    json!({
        "shard": shard,
        "etag": it.etag,
        "last_modified": at(it.last_modified.as_ref()),
        "size": it.size,
        "loaded_at": at(it.loaded_at.as_ref()),
        "groups_etag": text(&it.groups_etag),
        "cluster_id": it.cluster_id,
        "leader": it.leader_id,
        "epoch": it.epoch,
        "provider": it.provider,
        "region": text(&it.region),
        "zone": text(&it.zone),
        "server_version": it.server_version,
        "stale": it.stale,
        "pending_etag": text(&it.pending_etag),
        "apply_errors": it.apply_errors,
    })
}

pub fn refreshed(shard: &str, it: &RefreshConfigResponse) -> Value {
    json!({
        "shard": shard,
        "updated": it.updated,
        "prev_etag": text(&it.prev_etag),
        "etag": it.etag,
        "changed_groups": it.changed_groups,
        "removed_groups": it.removed_groups,
        "restarted": it.restarted,
        "warnings": it.warnings,
    })
}

pub fn group(shard: &str, it: &GroupStatus) -> Value {
    json!({
        "group": it.key,
        "shard": shard,
        "tenant": it.tenant,
        "template": it.template,
        "size": it.size,
        "actual_size": it.actual_size,
        "ready_size": it.ready_size,
        "pending_size": it.pending_size,
        "registered_size": it.registered_size,
        "draining_size": it.draining_size,
        "unhealthy_size": it.unhealthy_size,
        "updated_size": it.updated_size,
        "instance_type": text(&it.instance_type),
        "subnet_pool": text(&it.subnet_pool),
        "kind": text(&it.kind),
        "arch": text(&it.arch),
        "vars": map(&it.vars),
        "capacity": map(&it.capacity),
        "load_balancers": it.load_balancers,
        "drain_timeout_seconds": it.drain_timeout.map(|it| it.seconds),
        "is_static": it.is_static,
        "deleting": it.deleting,
        "etag": it.etag,
        "runtime_hash": text(&it.runtime_hash),
        "infra_hash": text(&it.infra_hash),
        "rollout": it.rollout.as_ref().map(rollout),
        "holds": it.holds.iter().map(hold).collect::<Vec<_>>(),
        "provider_ids": it.provider_ids,
    })
}

fn rollout(it: &RolloutStatus) -> Value {
    json!({
        "target_hash": text(&it.target_hash),
        "updated": it.updated,
        "total": it.total,
        "paused": it.paused,
        "failures": it.failures,
        "reason": text(&it.reason),
    })
}

pub fn hold(it: &PlanHold) -> Value {
    json!({
        "kind": it.kind,
        "group": text(&it.group),
        "instance_id": text(&it.instance_id),
        "message": it.message,
        "since": at(it.since.as_ref()),
        "until": at(it.until.as_ref()),
    })
}

pub fn action(it: &PlannedAction) -> Value {
    json!({
        "kind": it.kind,
        "group": text(&it.group),
        "instance_id": text(&it.instance_id),
        "reason": it.reason,
        "priority": it.priority,
        "detail": map(&it.detail),
    })
}

pub fn plan(shard: &str, it: &PlanResponse) -> Value {
    json!({
        "shard": shard,
        "actions": it.actions.iter().map(action).collect::<Vec<_>>(),
        "holds": it.holds.iter().map(hold).collect::<Vec<_>>(),
        "snapshot_at": at(it.snapshot_at.as_ref()),
        "complete": it.complete,
        "epoch": it.epoch,
        "wake_at": at(it.wake_at.as_ref()),
    })
}

pub fn instance(shard: &str, it: &InstanceStatusResponse) -> Value {
    json!({
        "instance_id": it.instance_id,
        "shard": shard,
        "tenant": it.tenant,
        "group": it.group,
        "status": it.status,
        "health": it.health,
        "instance_type": text(&it.instance_type),
        "subnet": text(&it.subnet),
        "spot": it.spot,
        "on_demand": it.on_demand,
        "provider_instance_id": text(&it.provider_instance_id),
        "provider_state": text(&it.provider_state),
        "provider_state_at": at(it.provider_state_at.as_ref()),
        "created_at": at(it.created_at.as_ref()),
        "registered_at": at(it.registered_at.as_ref()),
        "last_seen": at(it.last_seen.as_ref()),
        "deleted_at": at(it.deleted_at.as_ref()),
        "private_ipv4": text(&it.private_ipv4),
        "private_ipv6": text(&it.private_ipv6),
        "hostname": text(&it.hostname),
        "k8s_provider_id": text(&it.k8s_provider_id),
        "infra_hash": text(&it.infra_hash),
        "runtime_hash": text(&it.runtime_hash),
        "replaces": text(&it.replaces),
        "replaced_by": text(&it.replaced_by),
        "failure_reason": text(&it.failure_reason),
        "failure_message": text(&it.failure_message),
        "drain": it.drain.as_ref().map(drain),
        "notice": it.notice.as_ref().map(notice),
        "machine": it.machine.as_ref().map(|it| json!({
            "cpu_count": it.cpu_count,
            "memory_bytes": it.memory_bytes,
            "disk_bytes": it.disk_bytes,
            "arch": text(&it.arch),
            "os": text(&it.os),
            "kernel": text(&it.kernel),
        })),
        "boot": it.boot.as_ref().map(boot),
    })
}

pub fn drain(it: &DrainStatus) -> Value {
    json!({
        "drain_id": it.drain_id,
        "reason": it.reason,
        "started_at": at(it.started_at.as_ref()),
        "delete_at": at(it.delete_at.as_ref()),
        "acked_at": at(it.acked_at.as_ref()),
    })
}

fn notice(it: &TerminationNotice) -> Value {
    json!({
        "action": it.action,
        "deadline": at(it.deadline.as_ref()),
        "detected_at": at(it.detected_at.as_ref()),
    })
}

fn boot(it: &BootReport) -> Value {
    let stages = it.stages.iter().map(|it| {
        json!({
            "name": it.name,
            "state": it.state,
            "started": at(it.started.as_ref()),
            "ended": at(it.ended.as_ref()),
            "detail": text(&it.detail),
        })
    });
    json!({
        "failed": it.failed,
        "reason": text(&it.reason),
        "stages": stages.collect::<Vec<_>>(),
        "logs": it.logs.iter().map(|it| json!({"name": it.name, "text": it.text})).collect::<Vec<_>>(),
    })
}

pub fn event(shard: &str, it: &Event) -> Value {
    json!({
        "at": at(it.at.as_ref()),
        "shard": shard,
        "reason": it.reason,
        "severity": severity(it.severity()),
        "group": text(&it.group),
        "instance_id": text(&it.instance_id),
        "message": it.message,
        "detail": map(&it.detail),
        "epoch": it.epoch,
        "actor": text(&it.actor),
        "dropped": it.dropped,
        "resume_token": it.resume_token,
    })
}

pub fn severity(it: Severity) -> &'static str {
    match it {
        Severity::Debug => "debug",
        Severity::Info => "info",
        Severity::Warning => "warning",
        Severity::Error => "error",
    }
}

pub fn fact(it: &Fact) -> Value {
    json!({"name": it.name, "value": it.value, "source": it.source, "at": at(it.at.as_ref())})
}

pub fn explained(shard: &str, it: &ExplainResponse) -> Value {
    json!({
        "shard": shard,
        "summary": it.summary,
        "facts": it.facts.iter().map(fact).collect::<Vec<_>>(),
        "actions": it.actions.iter().map(action).collect::<Vec<_>>(),
        "holds": it.holds.iter().map(hold).collect::<Vec<_>>(),
        "history": it.history.iter().map(|it| event(shard, it)).collect::<Vec<_>>(),
    })
}
