//! Asks how many addresses the subnets have left, before somebody needs to know: no create waits for an answer.

use std::{sync::Arc, time::Duration};

use nstance_core::ports::provider::{ErrorClass, ProviderError, SubnetFree};
use nstance_rt::chain::Chain;

use crate::{tasks::observe::observe_call, term::Term};

/// Often enough that a figure is seldom too old to be believed.
const PERIOD: Duration = Duration::from_secs(20);

pub async fn work(term: Arc<Term>) {
    let token = term.tasks.token().clone();
    loop {
        for subnet in term.world.subnets() {
            let (scope, term) = (term.tasks.clone(), term.clone());
            scope.spawn_droppable("capacity", async move { ask(&term, &subnet).await });
        }
        tokio::select! {
            biased;
            () = token.cancelled() => return,
            () = tokio::time::sleep(PERIOD) => {}
        }
    }
}

async fn ask(term: &Arc<Term>, subnet: &str) {
    let (started, asked_at) = (term.world.clock().monotonic(), term.now());
    let answer = match tokio::time::timeout(PERIOD, term.shared.provider.subnet_free(subnet)).await {
        Ok(answer) => answer,
        Err(_) => Err(ProviderError::new("subnet_free", ErrorClass::Unavailable, "no answer in time")),
    };
    observe_call(term, "subnet_free", started, answer.as_ref().err());
    // A figure is good to have and nothing more: without one creates go on, so a failure says nothing about the
    // provider as a whole.
    let free = answer.unwrap_or_else(|error| {
        tracing::debug!(subnet, error = %Chain(&error), "free addresses are not known");
        SubnetFree::Unknown
    });
    term.world.lock().places.learn(subnet, free, asked_at);
}
