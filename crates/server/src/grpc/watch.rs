//! The streams of port 8993: who asks, from where on, and what of it. What they are told is in `watch.rs`.

use std::sync::Arc;

use nstance_core::ids::Tenant;
use nstance_proto::v1;
use tonic::Status;

use super::auth::Caller;
use crate::{
    events::{Event, Severity},
    service::status,
    tasks,
    term::Term,
    watch::{ErrorKind, EventKind, GroupKind, InstanceKind, Subscription, Watcher, group_snapshot, instance_snapshot},
};

/// Metadata: how many of a stream's first events are of the time before it was opened.
pub const N_REPLAYED: &str = "nstance-replayed";

pub fn groups(term: &Arc<Term>, caller: &Caller, token: &str) -> Result<Subscription<GroupKind>, Status> {
    let watcher = Watcher::of(caller)?;
    let snapshot = group_snapshot(term.clone(), watcher.tenant().clone());
    let opened = Subscription::open(&term.watches.groups, &watcher, token, snapshot, term.tasks.token())?;
    tasks::watch::serve(term);
    Ok(opened)
}

pub fn instances(term: &Arc<Term>, caller: &Caller, token: &str) -> Result<Subscription<InstanceKind>, Status> {
    let watcher = Watcher::of(caller)?;
    let snapshot = instance_snapshot(term.clone(), watcher.tenant().clone());
    let opened = Subscription::open(&term.watches.instances, &watcher, token, snapshot, term.tasks.token())?;
    tasks::watch::serve(term);
    Ok(opened)
}

pub fn errors(term: &Arc<Term>, caller: &Caller, token: &str) -> Result<Subscription<ErrorKind>, Status> {
    let watcher = Watcher::of(caller)?;
    let all = Box::new(|_: &v1::ErrorEvent| true);
    let opened = Subscription::tail(&term.watches.errors.registry, &watcher, token, all, term.tasks.token())?;
    tasks::watch::serve(term);
    Ok(opened)
}

pub fn events(
    term: &Arc<Term>,
    caller: &Caller,
    request: v1::WatchEventsRequest,
) -> Result<Subscription<EventKind>, Status> {
    let watcher = Watcher::of(caller)?;
    let token = request.resume_token.clone();
    let wanted = Box::new(move |event: &Event| is_wanted(&request, event));
    let opened = Subscription::tail(&term.watches.events, &watcher, &token, wanted, term.tasks.token())?;
    tasks::watch::serve(term);
    Ok(opened)
}

fn is_wanted(request: &v1::WatchEventsRequest, event: &Event) -> bool {
    let severity = match event.severity {
        Severity::Debug => 0,
        Severity::Info => 1,
        Severity::Warning => 2,
        Severity::Error => 3,
    };
    request.min_severity <= severity
        && (request.group.is_empty() || event.group.as_ref().is_some_and(|it| it.group.as_str() == request.group))
        && (request.instance_id.is_empty() || event.instance.is_some_and(|id| id.to_string() == request.instance_id))
}

/// All groups of a tenant, and a token from which a watch goes on without a gap.
pub fn list_groups(term: &Term, tenant: &Tenant) -> (Vec<v1::GroupStatus>, String) {
    term.watches.group_memory.in_turn(|| {
        // Before the look: what changes meanwhile is told again rather than never.
        let token = term.watches.groups.token(tenant);
        let groups = status::groups(term, tenant);
        term.watches.group_memory.show(&groups);
        (groups, token)
    })
}
