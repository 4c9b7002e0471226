//! All shards of a cluster, asked at the same time.
//!
//! Each shard has its own deadline. An answer is never lost because another shard failed: the caller gets all answers and
//! all errors.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::{StreamExt as _, future::join_all, stream::FuturesUnordered};
use nstance_identity::link::Net;
use tonic::{Code, Status};

use crate::{Connection, Identity, ShardClient, ShardError, Targets};

/// What the shards answered, in the order in which they are configured.
#[derive(Debug)]
pub struct Answers<T> {
    pub ok: Vec<(String, T)>,
    pub errors: Vec<ShardError>,
}

/// A shard that is not configured was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("shard {shard} is not configured; configured are {}", known.join(", "))]
pub struct UnknownShard {
    pub shard: String,
    pub known: Vec<String>,
}

/// The chosen shards, one connection each.
#[derive(Clone)]
pub struct Shards {
    connections: Vec<Connection>,
    identity: Arc<Identity>,
    timeout: Duration,
}

impl Shards {
    pub fn new(targets: Targets, identity: Identity, timeout: Duration) -> Self {
        Self::sharing(targets, Arc::new(identity), timeout)
    }

    /// With an identity that others use too: when it is renewed, all use the new one.
    pub fn sharing(targets: Targets, identity: Arc<Identity>, timeout: Duration) -> Self {
        let connections = targets.0.into_iter().map(|target| Connection::new(target, identity.clone(), timeout));
        Self { connections: connections.collect(), identity, timeout }
    }

    /// Keeps each connection open between calls.
    #[must_use]
    pub fn keeping_connections(self) -> Self {
        self.map(Connection::keep_open)
    }

    /// The next call to each shard opens a new connection.
    pub fn forget_connections(&self) {
        self.connections.iter().for_each(Connection::forget);
    }

    /// Sockets come from here instead of the machine's network.
    #[must_use]
    pub fn with_network(self, network: &Arc<dyn Net>) -> Self {
        self.map(|it| it.with_network(network.clone()))
    }

    /// The timeout of each call, if it is longer than this, becomes this.
    #[must_use]
    pub fn with_timeout_at_most(self, max: Duration) -> Self {
        let timeout = self.timeout.min(max);
        Self { timeout, ..self.map(|it| it.with_timeout(timeout)) }
    }

    pub fn connections(&self) -> &[Connection] {
        &self.connections
    }

    /// The names of the shards.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.connections.iter().map(Connection::shard)
    }

    pub fn len(&self) -> usize {
        self.connections.len()
    }

    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// The place of a shard in the configured order.
    pub fn position(&self, shard: &str) -> Option<usize> {
        self.names().position(|it| it == shard)
    }

    pub fn contains(&self, shard: &str) -> bool {
        self.position(shard).is_some()
    }

    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Only these shards.
    pub fn only(&self, names: &[String]) -> Result<Self, UnknownShard> {
        if let Some(name) = names.iter().find(|name| !self.contains(name)) {
            return Err(UnknownShard { shard: name.clone(), known: self.names().map(str::to_owned).collect() });
        }
        Ok(self.filter(|shard| names.iter().any(|it| it == shard)))
    }

    /// All shards but these.
    #[must_use]
    pub fn without(&self, is_excluded: impl Fn(&str) -> bool) -> Self {
        self.filter(|shard| !is_excluded(shard))
    }

    fn filter(&self, is_wanted: impl Fn(&str) -> bool) -> Self {
        let connections = self.connections.iter().filter(|it| is_wanted(it.shard())).cloned().collect();
        Self { connections, ..self.clone() }
    }

    fn map(self, change: impl Fn(Connection) -> Connection) -> Self {
        Self { connections: self.connections.into_iter().map(change).collect(), ..self }
    }

    /// Sends the same request to all shards at the same time. Each has the whole timeout, connecting included.
    pub async fn each<T, F>(&self, request: impl Fn(ShardClient) -> F) -> Answers<T>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let calls = join_all(self.connections.iter().map(|connection| connection.call(&request))).await;
        let mut answers = Answers { ok: Vec::new(), errors: Vec::new() };
        for (shard, answer) in self.names().zip(calls) {
            match answer {
                Ok(answer) => answers.ok.push((shard.to_owned(), answer)),
                Err(error) => answers.errors.push(error),
            }
        }
        answers
    }

    /// Asks all shards for an object that only one of them has, and says which. "Not found" is reported only if every
    /// shard was asked and does not have it.
    pub async fn find<T, F>(
        &self,
        what: &str,
        request: impl Fn(ShardClient) -> F,
    ) -> Result<(String, T), Vec<ShardError>>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let call = async |connection: &Connection| {
            connection.call(&request).await.map(|found| (connection.shard().to_owned(), found))
        };
        let errors = match first_success(self.connections.iter().map(call)).await {
            Ok(found) => return Ok(found),
            Err(errors) => errors,
        };
        let (absent, failed): (Vec<_>, Vec<_>) = errors.into_iter().partition(|error| error.code == Code::NotFound);
        if failed.is_empty() {
            let asked: Vec<&str> = absent.iter().map(|it| it.shard.as_str()).collect();
            let message = format!("there is no {what}");
            return Err(vec![ShardError::new(&asked.join(", "), Code::NotFound, message)]);
        }
        Err(failed)
    }
}

/// The first call that succeeds, without waiting for the others; else the errors of all, in the order of the calls.
async fn first_success<T, E>(calls: impl IntoIterator<Item = impl Future<Output = Result<T, E>>>) -> Result<T, Vec<E>> {
    let running = FuturesUnordered::new();
    for (at, call) in calls.into_iter().enumerate() {
        running.push(async move { (at, call.await) });
    }
    let mut running = std::pin::pin!(running);
    let mut errors = BTreeMap::new();
    while let Some((at, answer)) = running.next().await {
        match answer {
            Ok(found) => return Ok(found),
            Err(error) => errors.insert(at, error),
        };
    }
    Err(errors.into_values().collect())
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;
    use crate::testing::{DeadNetwork, identity};

    fn shards(targets: &str) -> Shards {
        let network: Arc<dyn Net> = Arc::new(DeadNetwork);
        Shards::new(targets.parse().unwrap(), identity(), Duration::from_secs(30)).with_network(&network)
    }

    /// The shards with their errors, and how long the call took.
    async fn ask(shards: &Shards) -> (Vec<(String, Code)>, Duration) {
        let began = tokio::time::Instant::now();
        let answers = shards.each(|mut client| async move { client.config_status().await }).await;
        assert!(answers.ok.is_empty());
        (answers.errors.into_iter().map(|it| (it.shard, it.code)).collect(), began.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn each_shard_has_its_own_deadline_and_its_own_error() {
        let shards = shards("silent=silent:1,dead=refuses:1").with_timeout_at_most(Duration::from_secs(2));
        let (errors, took) = ask(&shards).await;
        let expected = [("silent", Code::DeadlineExceeded), ("dead", Code::Unavailable)];
        assert_eq!(errors, expected.map(|(shard, code)| (shard.to_owned(), code)));
        assert_eq!(took, Duration::from_secs(2));
        let dead = shards.only(&["dead".to_owned()]).unwrap();
        assert_eq!(ask(&dead).await.1, Duration::ZERO, "it waits for no other shard");
    }

    #[tokio::test(start_paused = true)]
    async fn absence_is_not_concluded_from_a_shard_that_does_not_answer() {
        let shards = shards("silent=silent:1,dead=refuses:1");
        let found = shards.find("instance x", |mut client| async move { client.config_status().await }).await;
        let codes: Vec<Code> = found.unwrap_err().into_iter().map(|it| it.code).collect();
        assert_eq!(codes, [Code::Unavailable, Code::Unavailable]);
    }

    #[tokio::test]
    async fn an_unknown_shard_is_named_with_the_known_ones() {
        let shards = shards("dev-1=a:1,dev-2=b:1");
        let error = shards.only(&["dev-3".to_owned()]).err().unwrap();
        assert_eq!(error.to_string(), "shard dev-3 is not configured; configured are dev-1, dev-2");
        assert_eq!(shards.without(|it| it == "dev-1").names().collect::<Vec<_>>(), ["dev-2"]);
    }

    #[tokio::test]
    async fn one_success_is_enough_and_the_others_are_not_waited_for() {
        let answer = |answer: Option<Result<u8, &'static str>>| match answer {
            Some(answer) => std::future::ready(answer).boxed(),
            None => std::future::pending().boxed(),
        };
        assert_eq!(first_success([None, Some(Err("no")), Some(Ok(7))].map(answer)).await, Ok(7));
        assert_eq!(first_success([Some(Err("one")), Some(Err("two"))].map(answer)).await, Err(vec!["one", "two"]));
        let undecided = first_success([None, Some(Err("no"))].map(answer));
        assert!(undecided.now_or_never().is_none(), "absence is proven only by all");
    }
}
