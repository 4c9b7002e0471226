//! Plan and Explain: the real planner on the present picture, and why it says so. Nothing here has an effect.

use std::collections::BTreeMap;

use nstance_config::{Code, Config, Problem};
use nstance_core::{
    group::Desired,
    ids::{GroupRef, InstanceId, Tenant},
    plan::{Action, Plan, Planned, counts},
    snapshot::{GroupView, Snapshot},
    time::Timestamp,
};
use nstance_proto::v1;

use super::{
    config::{asked_of, check},
    groups::problem,
    status::{self, timestamp},
};
use crate::{grpc::status::Refusal, term::Term, world::Entry};

/// Largest size of a group, as in the config.
const MAX_SIZE: i32 = 10_000;

/// Largest candidate config.
const MAX_CANDIDATE: usize = 3 * 1024 * 1024;

/// Events that an explanation shows.
const HISTORY: usize = 50;

/// What would be planned for a tenant's groups, or one of them, perhaps with other sizes or another config.
pub fn dry_run(term: &Term, tenant: &Tenant, request: &v1::PlanRequest) -> Result<v1::PlanResponse, Refusal> {
    let (mut snapshot, now) = picture(term, tenant);
    if !request.candidate_config.is_empty() {
        let candidate = candidate(term, &request.candidate_config)?;
        imagine(term, tenant, &candidate, &mut snapshot);
    }
    let mut problems = Vec::new();
    for (key, size) in &request.sizes {
        let view = snapshot.groups.iter_mut().find(|(group, _)| group.group.as_str() == key);
        let path = format!("sizes.{key}");
        match (view, u32::try_from(*size)) {
            (None, _) => problems.push(problem(Code::BadReference, &path, format!("there is no group `{key}`"))),
            (Some((_, view)), Ok(n)) if *size <= MAX_SIZE => resize(view, n),
            _ => problems.push(problem(Code::BadValue, &path, format!("{size} is not between 0 and {MAX_SIZE}"))),
        }
    }
    if !problems.is_empty() {
        return Err(Refusal::bad_request(problems));
    }
    if !request.group.is_empty() {
        snapshot.groups.retain(|group, _| group.group.as_str() == request.group);
        if snapshot.groups.is_empty() {
            return Err(Refusal::not_found(format!("there is no group {}", request.group)));
        }
    }
    let Plan { actions, holds, wake_at } = (term.shared.planner)(&snapshot, now);
    let complete = snapshot.shard.complete;
    Ok(v1::PlanResponse {
        actions: actions.iter().map(planned).collect(),
        holds: holds.iter().map(status::hold).collect(),
        snapshot_at: Some(timestamp(now)),
        complete: complete.config && complete.groups && complete.records && complete.listing,
        epoch: term.epoch().0,
        wake_at: wake_at.map(timestamp),
    })
}

/// The present picture, as far as a tenant may see it.
fn picture(term: &Term, tenant: &Tenant) -> (Snapshot, Timestamp) {
    let (mut snapshot, now) = term.world.snapshot(None);
    snapshot.groups.retain(|group, _| group.tenant == *tenant);
    (snapshot, now)
}

fn resize(view: &mut GroupView, size: u32) {
    view.desired = Desired::Known(size);
    view.window.largest_size = view.window.largest_size.max(size);
}

fn candidate(term: &Term, text: &[u8]) -> Result<Config, Refusal> {
    if MAX_CANDIDATE < text.len() {
        let message = format!("longer than {MAX_CANDIDATE} bytes");
        return Err(Refusal::bad_request(vec![problem(Code::Limit, "candidate_config", message)]));
    }
    let loaded = check("candidate_config", text, Some(&term.shared.shard));
    let in_force = &term.applied().config;
    match loaded.config {
        Some(config) => match in_force.immutable_changes(&config, &BTreeMap::new()) {
            changes if changes.is_empty() => Ok(config),
            changes => Err(Refusal::bad_request(changes)),
        },
        None => Err(Refusal::bad_request(errors(&loaded.report))),
    }
}

fn errors(report: &nstance_config::Report) -> Vec<Problem> {
    report.problems.iter().filter(|it| it.severity == nstance_config::Severity::Error).cloned().collect()
}

/// The picture as it would be under another config: static groups that leave it are deleted.
fn imagine(term: &Term, tenant: &Tenant, config: &Config, snapshot: &mut Snapshot) {
    let file = term.groups.file();
    let ca_bundle = term.shared.authority.bundle_pem();
    let default = config.server.default_drain_timeout;
    let new = config.groups.keys().filter(|group| group.tenant == *tenant);
    let all: Vec<GroupRef> = snapshot.groups.keys().chain(new).cloned().collect();
    for group in all {
        let asked = asked_of(config, file.as_ref(), &group, &ca_bundle);
        let view = snapshot.groups.entry(group.clone()).or_insert_with(empty);
        let merged = asked.as_ref().and_then(|asked| asked.merged.clone());
        view.drain_timeout = merged.as_ref().map_or(default, |merged| merged.drain_timeout);
        view.load_balancers = merged.as_ref().map(|merged| merged.load_balancers.clone()).unwrap_or_default();
        view.rollout_paused = merged.as_ref().is_some_and(|merged| merged.rollout_paused);
        match asked {
            Some(asked) => {
                view.infra_hash = asked.infra_hash;
                match asked.desired {
                    Desired::Known(size) => resize(view, size),
                    other => view.desired = other,
                }
            }
            None if term.applied().config.groups.contains_key(&group) => view.desired = Desired::Tombstoned,
            None => {}
        }
    }
}

/// A group that has nothing yet.
fn empty() -> GroupView {
    GroupView {
        desired: Desired::Unknown,
        infra_hash: String::new(),
        drain_timeout: Default::default(),
        load_balancers: Vec::new(),
        rollout_paused: false,
        victims: Vec::new(),
        create_blocks: Vec::new(),
        failures: Default::default(),
        window: Default::default(),
        instances: BTreeMap::new(),
        candidates: Vec::new(),
        corrupt: Vec::new(),
        mass_removal: None,
    }
}

fn planned(it: &Planned) -> v1::PlannedAction {
    let mut detail = BTreeMap::new();
    let (kind, instance, reason) = match &it.action {
        Action::Create { reason } => ("Create", None, reason.as_str().to_owned()),
        Action::ResolveCreate { instance } => ("ResolveCreate", Some(*instance), String::new()),
        Action::StartDrain { instance, reason, delete_at, replacement } => {
            detail.insert("delete_at".to_owned(), delete_at.to_string());
            if let Some(replacement) = replacement {
                detail.insert("replacement".to_owned(), replacement.to_string());
            }
            ("StartDrain", Some(*instance), reason.as_str().to_owned())
        }
        Action::CancelDrain { instance } => ("CancelDrain", Some(*instance), String::new()),
        Action::Delete { instance, reason } => ("Delete", Some(*instance), reason.to_string()),
        Action::MarkDeleted { instance } => ("MarkDeleted", Some(*instance), String::new()),
        Action::Forget { instance } => ("Forget", Some(*instance), String::new()),
        Action::Adopt { vm } => ("Adopt", Some(vm.instance), String::new()),
        Action::TerminateOrphan { vm } => ("TerminateOrphan", Some(vm.instance), String::new()),
        Action::LbRegister { lb, instance } | Action::LbDeregister { lb, instance } => {
            detail.insert("load_balancer".to_owned(), lb.to_string());
            let kind = if matches!(it.action, Action::LbRegister { .. }) { "LbRegister" } else { "LbDeregister" };
            (kind, Some(*instance), String::new())
        }
    };
    v1::PlannedAction {
        kind: kind.to_owned(),
        group: it.group.group.to_string(),
        instance_id: instance.map(|id| id.to_string()).unwrap_or_default(),
        reason,
        priority: it.priority as i32,
        detail: detail.into_iter().collect(),
    }
}

/// What an explanation is about.
pub enum Subject {
    Group(GroupRef),
    Instance(Tenant, InstanceId),
}

pub fn explain(term: &Term, subject: &Subject) -> Result<v1::ExplainResponse, Refusal> {
    match subject {
        Subject::Group(group) => explain_group(term, group),
        Subject::Instance(tenant, id) => explain_instance(term, tenant, *id),
    }
}

fn explain_group(term: &Term, group: &GroupRef) -> Result<v1::ExplainResponse, Refusal> {
    let missing = || Refusal::not_found(format!("there is no group {}", group.group));
    let (snapshot, now) = term.world.snapshot(Some(group));
    let view = snapshot.groups.get(group).ok_or_else(missing)?;
    let Plan { actions, holds, .. } = (term.shared.planner)(&snapshot, now);
    let counts = counts(&snapshot.shard, group, view, now);
    let desired = match view.desired {
        Desired::Known(size) => size.to_string(),
        Desired::Tombstoned => "none, it is being deleted".to_owned(),
        Desired::Unknown => "unknown".to_owned(),
    };
    let facts = [
        fact("desired", &desired, "config", None),
        fact("infra_hash", &view.infra_hash, "config", None),
        fact("members", counts.actual, "planner", Some(now)),
        fact("uncertain", counts.uncertain, "planner", Some(now)),
        fact("registered", counts.registered, "record", Some(now)),
        fact("ready", counts.ready, "planner", Some(now)),
        fact("draining", counts.draining, "record", Some(now)),
        fact("unhealthy", counts.unhealthy, "agent", Some(now)),
    ];
    let summary = format!(
        "{}: {} members, {} ready, wanted {desired}; {}",
        group.group,
        counts.actual,
        counts.ready,
        outlook(actions.len(), holds.len())
    );
    Ok(v1::ExplainResponse {
        summary,
        facts: facts.into(),
        actions: actions.iter().map(planned).collect(),
        holds: holds.iter().map(status::hold).collect(),
        history: history(term, &group.tenant, |event| event.group.as_ref() == Some(group)),
    })
}

fn explain_instance(term: &Term, tenant: &Tenant, id: InstanceId) -> Result<v1::ExplainResponse, Refusal> {
    let missing = || Refusal::not_found(format!("there is no instance {id}"));
    let instance = term.world.instance(tenant, id).ok_or_else(missing)?;
    let (snapshot, now) = term.world.snapshot(Some(&instance.group));
    let Plan { actions, holds, .. } = (term.shared.planner)(&snapshot, now);
    let id_text = id.to_string();
    let actions: Vec<_> = actions.iter().map(planned).filter(|action| action.instance_id == id_text).collect();
    // What holds its group holds it too.
    let holds: Vec<_> = holds.iter().filter(|hold| hold.instance.is_none_or(|it| it == id)).map(status::hold).collect();
    let (facts, health) = {
        let state = term.world.lock();
        let entry = state.entries.get(&id).ok_or_else(missing)?;
        let health = entry.health(&state, now).as_str();
        (facts_of(entry, health), health)
    };
    let summary = format!("{id}: {}, {health}; {}", instance.phase().as_str(), outlook(actions.len(), holds.len()));
    let history = history(term, tenant, |event| event.instance == Some(id));
    Ok(v1::ExplainResponse { summary, facts, actions, holds, history })
}

fn facts_of(entry: &Entry, health: &str) -> Vec<v1::Fact> {
    let it = entry.instance();
    let last_seen = entry.link.reported.then_some(entry.link.last_seen);
    let mut facts = vec![
        fact("group", &it.group.group, "record", None),
        fact("phase", it.phase().as_str(), "record", None),
        fact("created", it.reason.as_str(), "record", Some(it.created_at)),
        fact("infra_hash", &it.infra_hash, "record", None),
        fact("provider_state", entry.seen.as_str(), "provider", entry.seen_at),
        fact("health", health, "agent", last_seen),
    ];
    if let Some(confirmed) = it.provider.confirmed_at {
        facts.push(fact("provider_id", it.provider.id.as_deref().unwrap_or_default(), "record", Some(confirmed)));
    }
    if let Some(failure) = &it.create_failure {
        facts.push(fact(
            "create_failure",
            format!("{}: {}", failure.class, failure.message),
            "record",
            Some(failure.at),
        ));
    }
    if let Some(registration) = &it.registration {
        facts.push(fact("registered", &registration.agent_version, "record", Some(registration.at)));
    }
    if let Some(mark) = &it.replace {
        facts.push(fact("replace", format!("{} by {}", mark.reason, mark.by), "record", Some(mark.at)));
    }
    if let Some(drain) = it.open_drain() {
        let acked = if drain.acked_at.is_some() { ", acknowledged" } else { "" };
        let value = format!("{} until {}{acked}", drain.reason.as_str(), drain.deadline);
        facts.push(fact("drain", value, "record", Some(drain.started_at)));
    }
    if let Some(delete) = &it.delete {
        facts.push(fact("delete", format!("{} by {}", delete.reason, delete.by), "record", Some(delete.requested_at)));
    }
    facts
}

fn fact(name: &str, value: impl ToString, source: &str, at: Option<Timestamp>) -> v1::Fact {
    v1::Fact { name: name.to_owned(), value: value.to_string(), source: source.to_owned(), at: at.map(timestamp) }
}

fn outlook(n_actions: usize, n_holds: usize) -> String {
    match (n_actions, n_holds) {
        (0, 0) => "nothing to do".to_owned(),
        (0, n) => format!("waits, {n} reasons below"),
        (n, _) => format!("{n} actions due"),
    }
}

/// The last events of a subject, oldest first.
fn history(term: &Term, tenant: &Tenant, of: impl Fn(&crate::events::Event) -> bool) -> Vec<v1::Event> {
    let all = term.shared.events.last(tenant, usize::MAX);
    let mut last: Vec<_> = all.iter().rev().filter(|event| of(event)).take(HISTORY).collect();
    last.reverse();
    last.into_iter().map(|event| status::event(event)).collect()
}
