//! Asks the provider how large the machines of each instance type are, so that a group without a machine can say what
//! the first one will bring.
//!
//! Begins at take-over and whenever something else is asked of a group. Nobody waits for an answer: without one the
//! group's status leaves the capacity out.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures::StreamExt as _;
use nstance_core::ports::provider::{ErrorClass, InstanceType, Provider, ProviderError};
use nstance_rt::chain::Chain;

use crate::{
    tasks::{observe::observe_call, watch},
    term::Term,
    world::TypeAnswer,
};

/// Questions beside each other. A shard has few types, and a cloud counts requests.
const AT_ONCE: usize = 4;

pub async fn work(term: Arc<Term>) {
    let token = term.tasks.token().clone();
    loop {
        let wait = tokio::select! {
            biased;
            () = token.cancelled() => return,
            wait = ask_due(&term) => wait,
        };
        tokio::select! {
            biased;
            () = token.cancelled() => return,
            () = term.world.asked_anew() => {}
            () = sleep(wait) => {}
        }
    }
}

async fn sleep(wait: Option<Duration>) {
    match wait {
        Some(wait) => tokio::time::sleep(wait).await,
        None => std::future::pending().await,
    }
}

/// Asks for every type that is due, and answers when the next one is.
async fn ask_due(term: &Arc<Term>) -> Option<Duration> {
    let clock = term.world.clock();
    let names = term.world.instance_types();
    let due = term.world.lock().types.due(&names, clock.monotonic());
    let mut answers = futures::stream::iter(due).map(|name| ask(term, name)).buffer_unordered(AT_ONCE);
    while let Some((name, answer)) = answers.next().await {
        let groups = {
            let mut state = term.world.lock();
            let is_news = state.types.learn(&name, answer, clock.monotonic(), term.shared.entropy.as_ref());
            if is_news { state.groups_of_types(&BTreeSet::from([name])) } else { Vec::new() }
        };
        for group in groups {
            watch::passed(term, &group);
        }
    }
    term.world.lock().types.next_due(&names, clock.monotonic())
}

async fn ask(term: &Arc<Term>, name: String) -> (String, TypeAnswer) {
    let started = term.world.clock().monotonic();
    let provider = term.shared.provider.as_ref();
    let answer = size_of(provider, &name, provider.capabilities().deadlines.other).await;
    observe_call(term, "instance_type", started, answer.as_ref().err());
    let answer = match answer {
        Ok(Some(size)) => TypeAnswer::Size(size),
        Ok(None) => TypeAnswer::Unknown,
        // It says nothing about the provider as a whole: creates go on without it.
        Err(error) => {
            tracing::debug!(instance_type = name, error = %Chain(&error), "size of the instance type not known");
            TypeAnswer::Failed
        }
    };
    (name, answer)
}

/// One question, within a limit.
async fn size_of(provider: &dyn Provider, name: &str, limit: Duration) -> Result<Option<InstanceType>, ProviderError> {
    match tokio::time::timeout(limit, provider.instance_type(name)).await {
        Ok(answer) => answer,
        Err(_) => Err(ProviderError::new("instance_type", ErrorClass::Unavailable, "no answer in time")),
    }
}
