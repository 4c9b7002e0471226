//! Asks how many addresses the subnets have left, before somebody needs to know: no create waits for an answer.

use std::{sync::Arc, time::Duration};

use nstance_core::ports::provider::{ErrorClass, ProviderError, SubnetFree};
use nstance_rt::chain::Chain;

use crate::{tasks::observe::observe_call, term::Term};

/// Often enough that a figure is seldom too old to be believed.
const PERIOD: Duration = Duration::from_secs(20);

/// Limit of one call, short enough that the figures before it are still believed.
const ANSWER: Duration = Duration::from_secs(5);

pub async fn work(term: Arc<Term>) {
    let token = term.tasks.token().clone();
    loop {
        tokio::select! {
            biased;
            () = token.cancelled() => return,
            () = ask_all(&term) => {}
        }
        tokio::select! {
            biased;
            () = token.cancelled() => return,
            () = tokio::time::sleep(PERIOD) => {}
        }
    }
}

/// All figures are taken in together: a better subnet is not passed over because its answer came a moment later.
async fn ask_all(term: &Arc<Term>) {
    let asked_at = term.now();
    let subnets = term.world.subnets();
    let answers = futures::future::join_all(subnets.iter().map(|subnet| ask(term, subnet))).await;
    let mut state = term.world.lock();
    for (subnet, free) in subnets.iter().zip(answers) {
        state.places.learn(subnet, free, asked_at);
    }
}

async fn ask(term: &Arc<Term>, subnet: &str) -> SubnetFree {
    let started = term.world.clock().monotonic();
    let answer = match tokio::time::timeout(ANSWER, term.shared.provider.subnet_free(subnet)).await {
        Ok(answer) => answer,
        Err(_) => Err(ProviderError::new("subnet_free", ErrorClass::Unavailable, "no answer in time")),
    };
    observe_call(term, "subnet_free", started, answer.as_ref().err());
    // A figure is good to have and nothing more: without one creates go on, so a failure says nothing about the
    // provider as a whole.
    answer.unwrap_or_else(|error| {
        tracing::debug!(subnet, error = %Chain(&error), "free addresses are not known");
        SubnetFree::Unknown
    })
}
