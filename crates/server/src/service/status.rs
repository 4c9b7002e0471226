//! The leader's picture in the words of the API. Counts are the planner's own.

use std::{collections::BTreeMap, time::Duration};

use nstance_core::{
    group::Desired,
    ids::{GroupRef, InstanceId, Tenant},
    instance::{Ownership, Phase},
    plan::{Counts, Hold, HoldKind, counts, members},
    ports::provider::Provider,
    snapshot::{GroupView, ShardView},
    time::Timestamp,
};
use nstance_proto::v1;
use nstance_schemas::quantities;
use nstance_store::records::groups::GroupEntry;

use super::report::brief;
use crate::{
    term::Term,
    world::{Entry, GroupState, State, type_name},
};

pub fn timestamp(at: Timestamp) -> prost_types::Timestamp {
    let millis = at.as_millis();
    prost_types::Timestamp {
        seconds: millis.div_euclid(1000),
        nanos: i32::try_from(millis.rem_euclid(1000)).unwrap_or(0) * 1_000_000,
    }
}

pub fn duration(it: Duration) -> prost_types::Duration {
    prost_types::Duration {
        seconds: i64::try_from(it.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(it.subsec_nanos()).unwrap_or(0),
    }
}

fn int(n: u32) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

/// All groups of a tenant, those of size 0 and those being deleted included. One that nobody asks for and that has no
/// instance left is no more.
pub fn groups(term: &Term, tenant: &Tenant) -> Vec<v1::GroupStatus> {
    let (snapshot, now) = term.world.snapshot(None);
    let state = term.world.lock();
    snapshot
        .groups
        .iter()
        .filter(|(group, _)| group.tenant == *tenant && !is_gone(&state, group))
        .map(|(group, view)| group_status(term, &state, &snapshot.shard, (group, view), now))
        .collect()
}

/// One group, if there is such a one in any way.
pub fn group(term: &Term, group: &GroupRef) -> Option<v1::GroupStatus> {
    let (snapshot, now) = term.world.snapshot(Some(group));
    let state = term.world.lock();
    let view = snapshot.groups.get(group)?;
    Some(group_status(term, &state, &snapshot.shard, (group, view), now))
}

/// The same, unless it would be missing from the list.
pub fn listed_group(term: &Term, group: &GroupRef) -> Option<v1::GroupStatus> {
    if is_gone(&term.world.lock(), group) {
        return None;
    }
    self::group(term, group)
}

fn is_gone(state: &State, group: &GroupRef) -> bool {
    let Some(it) = state.groups.get(group) else { return true };
    let asked = match it.desired {
        Desired::Known(_) => true,
        Desired::Tombstoned => false,
        Desired::Unknown => it.merged.is_some() || !state.complete.groups,
    };
    !asked && it.candidates.is_empty() && !is_named(state, group, it)
}

/// Whether an instance of the group is there, or may be.
fn is_named(state: &State, group: &GroupRef, it: &GroupState) -> bool {
    let phases = it.members.iter().filter_map(|id| state.entries.get(id)).map(|entry| entry.phase());
    phases.into_iter().any(|phase| !matches!(phase, Phase::Deleted | Phase::Failed))
        || state.corrupt.iter().any(|record| record.group.as_ref() == Some(group))
}

fn group_status(
    term: &Term,
    state: &State,
    shard: &ShardView,
    (group, view): (&GroupRef, &GroupView),
    now: Timestamp,
) -> v1::GroupStatus {
    let it = state.groups.get(group);
    let merged = it.and_then(|it| it.merged.as_deref());
    let counts = counts(shard, group, view, now);
    let members = members(shard, group, view, now);
    let refs: Vec<_> = members.iter().filter_map(|id| state.entries.get(id)).map(|entry| entry.vm_ref()).collect();
    let mut provider_ids: Vec<String> = refs.iter().filter_map(|vm| vm.provider_id.clone()).collect();
    provider_ids.sort();
    let size = merged.and_then(|merged| state.types.get(type_name(merged)));
    v1::GroupStatus {
        key: group.group.to_string(),
        tenant: group.tenant.to_string(),
        template: merged.map(|merged| merged.template.clone()).unwrap_or_default(),
        size: match view.desired {
            Desired::Known(size) => i32::try_from(size).unwrap_or(i32::MAX),
            Desired::Tombstoned | Desired::Unknown => 0,
        },
        instance_type: merged.and_then(|merged| merged.instance_type.clone()).unwrap_or_default(),
        subnet_pool: merged.map(|merged| merged.subnet_pool.to_string()).unwrap_or_default(),
        vars: merged.map(|merged| merged.vars.clone().into_iter().collect()).unwrap_or_default(),
        is_static: merged.is_some_and(|merged| merged.is_static),
        etag: it.map(|it| it.etag.clone()).unwrap_or_default(),
        actual_size: int(counts.actual),
        provider_ids,
        ready_size: int(counts.ready),
        pending_size: int(counts.pending),
        draining_size: int(counts.draining),
        unhealthy_size: int(counts.unhealthy),
        rollout: rollout(view, &counts, it.map(|it| it.holds.as_slice()).unwrap_or_default()),
        holds: it.map(|it| it.holds.iter().map(hold).collect()).unwrap_or_default(),
        runtime_hash: it.map(|it| it.runtime_hash.clone()).unwrap_or_default(),
        infra_hash: view.infra_hash.clone(),
        deleting: view.desired == Desired::Tombstoned,
        load_balancers: view.load_balancers.iter().map(ToString::to_string).collect(),
        drain_timeout: Some(duration(view.drain_timeout)),
        capacity: size.map(quantities).unwrap_or_default().into_iter().collect(),
        arch: merged.map(|merged| merged.arch.as_str().to_owned()).unwrap_or_default(),
        kind: merged.map(|merged| merged.kind.to_string()).unwrap_or_default(),
        k8s_provider_ids: refs.iter().map(|vm| term.shared.provider.k8s_provider_id(vm)).collect(),
        registered_size: int(counts.registered),
        updated_size: int(counts.updated),
        layer: Some(term.groups.entry(group).map(layer).unwrap_or_default()),
    }
}

/// What the API holds of a group, as a client would send it.
fn layer(entry: GroupEntry) -> v1::GroupConfig {
    v1::GroupConfig {
        template: entry.template.unwrap_or_default(),
        size: entry.size.map(|it| i32::try_from(it).unwrap_or(i32::MAX)),
        instance_type: entry.instance_type.unwrap_or_default(),
        subnet_pool: entry.subnet_pool.unwrap_or_default(),
        vars: entry.vars.unwrap_or_default().into_iter().collect(),
        args: Default::default(),
        drain_timeout: entry.drain_timeout.map(duration),
        load_balancers: entry.load_balancers.unwrap_or_default(),
        rollout_paused: entry.rollout_paused,
    }
}

/// How far the group is on its way to its infra hash, and what it waits for.
fn rollout(view: &GroupView, counts: &Counts, holds: &[Hold]) -> Option<v1::RolloutStatus> {
    let Desired::Known(size) = view.desired else { return None };
    let waits = holds.iter().filter(|_| 0 < counts.drifted).find(|hold| {
        matches!(
            hold.kind,
            HoldKind::RolloutPaused
                | HoldKind::RolloutFailing
                | HoldKind::BackingOff
                | HoldKind::WaitingForDrain
                | HoldKind::WaitingForReplacement
                | HoldKind::WaitingForLb
        )
    });
    Some(v1::RolloutStatus {
        target_hash: view.infra_hash.clone(),
        updated: int(counts.updated),
        total: int(size),
        paused: view.rollout_paused,
        failures: int(view.failures.rollout_in_a_row),
        reason: waits.map(|hold| format!("{}: {}", hold.kind.as_str(), hold.message)).unwrap_or_default(),
    })
}

pub fn hold(hold: &Hold) -> v1::PlanHold {
    v1::PlanHold {
        kind: hold.kind.as_str().to_owned(),
        group: hold.group.group.to_string(),
        instance_id: hold.instance.map(|id| id.to_string()).unwrap_or_default(),
        message: hold.message.clone(),
        since: hold.since.map(timestamp),
        until: hold.until.map(timestamp),
    }
}

/// Instances of a tenant in the order of their ids, from after `after`.
pub fn instances(
    term: &Term,
    tenant: &Tenant,
    which: impl Fn(&InstanceId, &Entry) -> bool,
    after: Option<InstanceId>,
    limit: usize,
) -> Vec<v1::InstanceStatusResponse> {
    let now = term.now();
    let state = term.world.lock();
    state
        .entries
        .iter()
        .filter(|(id, entry)| {
            entry.instance().group.tenant == *tenant && after.is_none_or(|after| after < **id) && which(id, entry)
        })
        .take(limit)
        .map(|(_, entry)| instance_status(term.shared.provider.as_ref(), &state, entry, now))
        .collect()
}

pub fn instance(term: &Term, tenant: &Tenant, id: InstanceId) -> Option<v1::InstanceStatusResponse> {
    let mut found = instances(term, tenant, |it, _| *it == id, None, 1).pop()?;
    // Lists go without the logs.
    let state = term.world.lock();
    let whole = state.entries.get(&id).and_then(|entry| entry.link.machine.boot.report.clone());
    found.boot = whole.map(|boot| boot.as_ref().clone());
    Some(found)
}

/// How long a caller waits for a fresh look.
const FRESH: Duration = Duration::from_secs(5);

/// Has an instance's VM looked at unless what is known of it is younger than `max_age`: with zero in any case. Whatever
/// comes of the look, and be it nothing in time: what is known is shown with its time.
pub async fn refresh(term: &Term, tenant: &Tenant, id: InstanceId, max_age: Duration) {
    let now = term.now();
    let vm = {
        let state = term.world.lock();
        let entry = state.entries.get(&id).filter(|entry| entry.instance().group.tenant == *tenant);
        // What nobody has confirmed yet, or what is over, has no VM to look at.
        entry
            .filter(|entry| !matches!(entry.phase(), Phase::Pending | Phase::Failed | Phase::Deleted))
            .filter(|entry| entry.seen_at.is_none_or(|at| max_age <= now.since(at)))
            .map(|entry| entry.vm_ref())
    };
    if let Some(vm) = vm {
        let _ = tokio::time::timeout(FRESH, term.observer.ask(vm)).await;
    }
}

pub fn instance_status(
    provider: &dyn Provider,
    state: &State,
    entry: &Entry,
    now: Timestamp,
) -> v1::InstanceStatusResponse {
    let it = entry.instance();
    let addresses = entry.provider_addresses();
    let text = |it: Option<String>| it.unwrap_or_default();
    v1::InstanceStatusResponse {
        instance_id: it.id.to_string(),
        tenant: it.group.tenant.to_string(),
        status: it.phase().as_str().to_owned(),
        created_at: Some(timestamp(it.created_at)),
        last_seen: entry.link.reported.then(|| timestamp(entry.link.last_seen)),
        provider_instance_id: text(it.provider.id.clone()),
        group: it.group.group.to_string(),
        on_demand: it.ownership == Ownership::OnDemand,
        health: entry.health(state, now).as_str().to_owned(),
        provider_state: entry.seen.as_str().to_owned(),
        provider_state_at: entry.seen_at.map(timestamp),
        registered_at: it.registration.as_ref().map(|registration| timestamp(registration.at)),
        drain: it.open_drain().map(|drain| v1::DrainStatus {
            drain_id: drain.started_at.as_millis().to_string(),
            reason: drain.reason.as_str().to_owned(),
            started_at: Some(timestamp(drain.started_at)),
            delete_at: Some(timestamp(drain.deadline)),
            acked_at: drain.acked_at.map(timestamp),
        }),
        private_ipv4: text(addresses.ip4),
        private_ipv6: text(addresses.ip6),
        hostname: text(addresses.hostname),
        instance_type: text(it.instance_type.clone()),
        subnet: it.subnet.clone(),
        infra_hash: it.infra_hash.clone(),
        runtime_hash: it.runtime_hash.clone(),
        shard: it.shard.to_string(),
        k8s_provider_id: provider.k8s_provider_id(&entry.vm_ref()),
        replaces: String::new(),
        replaced_by: text(it.drain.as_ref().and_then(|drain| drain.replacement).map(|id| id.to_string())),
        boot: entry.link.machine.boot.report.as_deref().map(brief),
        failure_reason: it.create_failure.as_ref().map(|failure| failure.class.clone()).unwrap_or_default(),
        failure_message: it.create_failure.as_ref().map(|failure| failure.message.clone()).unwrap_or_default(),
        deleted_at: it.delete.as_ref().and_then(|delete| delete.gone_at).map(timestamp),
        machine: entry.link.machine.info.clone(),
        spot: entry.vm.as_ref().and_then(|vm| vm.spot).or(entry.link.machine.spot).unwrap_or(false),
        traceparent: String::new(),
        notice: entry.link.notice.as_ref().map(|notice| v1::TerminationNotice {
            action: notice.action.clone(),
            deadline: notice.deadline.map(timestamp),
            detected_at: Some(timestamp(notice.detected_at.unwrap_or(notice.at))),
            notice_id: notice.id.clone(),
        }),
    }
}

/// An event, as it is told. Its place in a stream is the stream's.
pub fn event(event: &crate::events::Event) -> v1::Event {
    use crate::events::Severity;
    v1::Event {
        resume_token: String::new(),
        at: Some(timestamp(event.at)),
        reason: event.reason.as_str().to_owned(),
        severity: match event.severity {
            Severity::Debug => v1::Severity::Debug,
            Severity::Info => v1::Severity::Info,
            Severity::Warning => v1::Severity::Warning,
            Severity::Error => v1::Severity::Error,
        }
        .into(),
        group: event.group.as_ref().map(|group| group.group.to_string()).unwrap_or_default(),
        instance_id: event.instance.map(|id| id.to_string()).unwrap_or_default(),
        message: event.message.clone(),
        detail: event
            .detail
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()))
            .collect::<BTreeMap<_, _>>()
            .into_iter()
            .collect(),
        epoch: event.epoch.0,
        actor: event.actor.clone(),
        dropped: 0,
    }
}
