//! What watchers need besides the events themselves: statuses of changed groups, counted errors, and an end for those
//! who do not read. Begins with the first watcher of a term.

use std::{sync::Arc, time::Duration};

use nstance_core::ids::GroupRef;

use crate::{
    service::{operators, status},
    term::Term,
};

/// How often streams that take nothing are looked for, and windows of equal errors that are over.
const SWEEP: Duration = Duration::from_secs(1);

/// Sees to it that watchers are served.
pub fn serve(term: &Arc<Term>) {
    if term.watches.begin() {
        term.tasks.spawn("watch", work(term.clone()));
        term.tasks.spawn("watchers", operators::watch_watchers(term.clone()));
    }
    term.watches.group_memory.wake();
}

/// A group's worker has looked at its group: whatever changed in it changed before.
pub fn passed(term: &Term, group: &GroupRef) {
    if term.watches.groups.is_followed(&group.tenant) {
        term.watches.group_memory.mark(group);
    }
}

async fn work(term: Arc<Term>) {
    let token = term.tasks.token().clone();
    loop {
        let next = pass(&term);
        let tick = async {
            match next {
                Some(wait) => tokio::time::sleep(wait).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = token.cancelled() => return,
            () = term.watches.group_memory.changed() => {}
            () = tick => {}
        }
    }
}

/// One pass; answers when the next is due if nothing changes before.
fn pass(term: &Arc<Term>) -> Option<Duration> {
    let watches = &term.watches;
    let now = term.world.clock().monotonic();
    let (due, next) = watches.group_memory.due(|tenant| watches.groups.is_watched(tenant), now);
    for group in due {
        watches.group_memory.in_turn(|| {
            let status = status::listed_group(term, &group);
            if let Some(event) = watches.group_memory.tell(&group, status, now) {
                watches.groups.publish(&group.tenant, || Arc::new(event));
            }
        });
    }
    let folded = watches.errors.unfold();
    let n_cut = watches.cut_slow();
    if 0 < n_cut {
        term.shared.metrics.watchers_cut_off.inc_by(u64::try_from(n_cut).unwrap_or(u64::MAX));
        tracing::warn!(n_cut, "watchers that read nothing for 30 s were cut off; they resume by their tokens");
    }
    let sweep = (folded || watches.has_streams()).then_some(SWEEP);
    [next, sweep].into_iter().flatten().min()
}
