//! The shards of a cluster and what each of them answers.
//!
//! Shards are asked beside each other, each with its own deadline. An answer is never lost because another shard failed:
//! whoever asks gets all answers and all errors.

#[path = "shard_client.rs"]
mod client;
#[path = "dial.rs"]
mod dial;
#[path = "identity.rs"]
pub mod identity;

use std::{
    collections::BTreeMap,
    fmt,
    str::FromStr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::{StreamExt as _, future::join_all, stream::FuturesUnordered};
use nstance_identity::link::Address;
use nstance_proto::{
    refusal::{problems_of, reason_of},
    v1::Problem,
};
use tonic::{Code, Status};

use crate::args::TIMEOUT;

pub use self::{
    client::{Client, N_REPLAYED, wire_duration},
    identity::Identity,
};

/// One shard and where its leader may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub shard: String,
    /// Tried in this order; only a leader accepts.
    pub addresses: Vec<Address>,
}

/// `shard=host:port[,shard=host:port...]`; a shard may stand there several times.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Targets(pub Vec<Target>);

impl FromStr for Targets {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut targets: Vec<Target> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (shard, address) = part
                .split_once('=')
                .ok_or_else(|| format!("`{part}`: expected shard=host:port, as in dev-1=10.0.0.5:8993"))?;
            let shard: nstance_core::ids::Shard = shard.trim().parse().map_err(|error| format!("`{part}`: {error}"))?;
            let address = Address::parse(address.trim())
                .ok_or_else(|| format!("`{part}`: expected host:port after the `=`, as in 10.0.0.5:8993"))?;
            match targets.iter_mut().find(|it| it.shard == shard.as_str()) {
                Some(target) => target.addresses.push(address),
                None => targets.push(Target { shard: shard.as_str().to_owned(), addresses: vec![address] }),
            }
        }
        if targets.is_empty() {
            return Err("expected shard=host:port, as in dev-1=10.0.0.5:8993".to_owned());
        }
        Ok(Self(targets))
    }
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs = self.0.iter().flat_map(|it| it.addresses.iter().map(|address| format!("{}={address}", it.shard)));
        f.write_str(&pairs.collect::<Vec<_>>().join(","))
    }
}

/// Why a shard gave no answer, or said no.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{shard}: {message}")]
pub struct ShardError {
    pub shard: String,
    pub code: Code,
    /// The server's typed reason; ours if no server was reached. May be empty.
    pub reason: String,
    pub message: String,
    /// Everything that is wrong with a bad input.
    pub problems: Vec<Problem>,
    /// By which the server's log names the request; empty if none was reached.
    pub request_id: Box<str>,
}

/// Metadata of every answer.
const REQUEST_ID: &str = "nstance-request-id";

impl ShardError {
    pub fn new(shard: &str, code: Code, message: impl Into<String>) -> Self {
        Self {
            shard: shard.to_owned(),
            code,
            reason: String::new(),
            message: message.into(),
            problems: Vec::new(),
            request_id: Box::default(),
        }
    }

    #[must_use]
    pub fn with_reason(mut self, reason: &str) -> Self {
        reason.clone_into(&mut self.reason);
        self
    }

    pub fn of(shard: &str, status: &Status) -> Self {
        Self {
            shard: shard.to_owned(),
            code: status.code(),
            reason: reason_of(status).unwrap_or_default(),
            message: status.message().to_owned(),
            problems: problems_of(status),
            request_id: status.metadata().get(REQUEST_ID).and_then(|it| it.to_str().ok()).unwrap_or_default().into(),
        }
    }

    /// What to do about it, if there is one thing to do.
    pub fn next(&self) -> Option<String> {
        let text = match self.code {
            Code::Unauthenticated => "nstance-admin cluster register-operator, which makes a new identity",
            Code::PermissionDenied => "use an operator's identity: --identity-dir",
            Code::Unavailable => "nstance-admin check --only shards",
            Code::DeadlineExceeded => "a longer --timeout, or nstance-admin check --only shards",
            Code::NotFound if self.message.contains("no instance") => {
                "nstance-admin instance list --deleted; those that are long gone are not kept"
            }
            Code::NotFound if self.message.contains("no group") => "nstance-admin group list",
            Code::AlreadyExists => "nstance-admin group list -o wide, which shows what is there and its version",
            Code::Aborted if self.reason == "ETAG_MISMATCH" => {
                "nstance-admin group list -o wide, which shows the version that --etag wants now"
            }
            _ => return None,
        };
        Some(text.to_owned())
    }
}

/// What all shards said, in the order in which they are configured.
#[derive(Debug)]
pub struct Answers<T> {
    pub ok: Vec<(String, T)>,
    pub errors: Vec<ShardError>,
}

/// The chosen shards, and how they are reached.
#[derive(Clone)]
pub struct Shards {
    targets: Vec<Target>,
    identity: Arc<Identity>,
    timeout: Duration,
    /// Open connections by shard, for a process that asks more than once.
    kept: Option<Arc<Mutex<BTreeMap<String, Client>>>>,
}

impl Shards {
    pub fn new(targets: Targets, identity: Identity, timeout: Duration) -> Self {
        Self { targets: targets.0, identity: Arc::new(identity), timeout, kept: None }
    }

    /// The same, with connections that stay open from one question to the next.
    #[must_use]
    pub fn keeping_connections(mut self) -> Self {
        self.kept = Some(Arc::default());
        self
    }

    /// The next question to each shard opens a connection anew.
    pub fn forget_connections(&self) {
        if let Some(kept) = &self.kept {
            kept.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
    }

    pub fn targets(&self) -> &[Target] {
        &self.targets
    }

    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// With `--wait` the timeout is how long one follows; a single question has the usual time all the same.
    #[must_use]
    pub fn waiting(mut self, waits: bool) -> Self {
        if waits {
            self.timeout = self.timeout.min(TIMEOUT);
        }
        self
    }

    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Only these. A name that is not configured is an error of the command line.
    pub fn only(&self, names: &[String]) -> Result<Self, String> {
        let known: Vec<&str> = self.targets.iter().map(|it| it.shard.as_str()).collect();
        for name in names {
            if !known.contains(&name.as_str()) {
                return Err(format!("shard {name} is not in --servers, which has {}", known.join(", ")));
            }
        }
        let targets = self.targets.iter().filter(|it| names.contains(&it.shard)).cloned().collect();
        Ok(Self { targets, ..self.clone() })
    }

    /// All but these.
    #[must_use]
    pub fn without(&self, is_one: impl Fn(&str) -> bool) -> Self {
        let targets = self.targets.iter().filter(|it| !is_one(&it.shard)).cloned().collect();
        Self { targets, ..self.clone() }
    }

    /// Opens a connection of the caller's own to one shard's leader.
    pub async fn dial(&self, target: &Target) -> Result<Client, ShardError> {
        dial::connect(target, &self.identity).await
    }

    /// Opens a connection to one shard's leader, or takes the one that is open.
    pub async fn connect(&self, target: &Target) -> Result<Client, ShardError> {
        let Some(kept) = &self.kept else { return dial::connect(target, &self.identity).await };
        let open = kept.lock().unwrap_or_else(PoisonError::into_inner).get(&target.shard).cloned();
        if let Some(client) = open {
            return Ok(client);
        }
        let client = dial::connect(target, &self.identity).await?;
        kept.lock().unwrap_or_else(PoisonError::into_inner).insert(target.shard.clone(), client.clone());
        Ok(client)
    }

    /// Whether an answer came from no server but from a connection that is of no use any more. If so, it is forgotten.
    fn is_dead(&self, target: &Target, status: &Status) -> bool {
        let Some(kept) = &self.kept else { return false };
        let dead = match status.code() {
            Code::Unavailable | Code::Unknown | Code::Cancelled => reason_of(status).is_none(),
            // It may be for the certificate that the connection was opened with.
            Code::Unauthenticated => true,
            _ => false,
        };
        dead && kept.lock().unwrap_or_else(PoisonError::into_inner).remove(&target.shard).is_some()
    }

    /// Asks all shards the same, beside each other. Each has the whole timeout, connecting included.
    pub async fn each<T, F>(&self, ask: impl Fn(Client) -> F) -> Answers<T>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let asked = join_all(self.targets.iter().map(|target| self.one(target, &ask))).await;
        let mut answers = Answers { ok: Vec::new(), errors: Vec::new() };
        for answer in asked {
            match answer {
                Ok(answer) => answers.ok.push(answer),
                Err(error) => answers.errors.push(error),
            }
        }
        answers
    }

    /// Asks one shard, within the timeout.
    async fn one<T, F>(&self, target: &Target, ask: &impl Fn(Client) -> F) -> Result<(String, T), ShardError>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let answer = async {
            let client = self.connect(target).await?;
            let asked = match ask(client).await {
                // All calls may be repeated: they name an end state, or carry an id of their own.
                Err(status) if self.is_dead(target, &status) => ask(self.connect(target).await?).await,
                asked => asked,
            };
            asked.map_err(|status| ShardError::of(&target.shard, &status))
        };
        let late = |_| {
            let message = format!("no answer within {} s", self.timeout.as_secs_f64());
            ShardError::new(&target.shard, Code::DeadlineExceeded, message)
        };
        let answer = tokio::time::timeout(self.timeout, answer).await.map_err(late).flatten();
        answer.map(|answer| (target.shard.clone(), answer))
    }

    /// Asks all shards for an object that only one of them has, and says which. "Not found" is said only if every shard
    /// was asked and has it not.
    pub async fn find<T, F>(&self, what: &str, ask: impl Fn(Client) -> F) -> Result<(String, T), Vec<ShardError>>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let mut asked = Vec::new();
        for target in &self.targets {
            asked.push(self.one(target, &ask));
        }
        let errors = match first(asked).await {
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

/// The first that succeeds, whoever else is still asked; else all errors, in the order of those who were asked.
async fn first<T, E>(asked: Vec<impl Future<Output = Result<T, E>>>) -> Result<T, Vec<E>> {
    let answers = FuturesUnordered::new();
    for (at, answer) in asked.into_iter().enumerate() {
        answers.push(async move { (at, answer.await) });
    }
    let mut answers = std::pin::pin!(answers);
    let mut errors = BTreeMap::new();
    while let Some((at, answer)) = answers.next().await {
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

    #[tokio::test]
    async fn whoever_has_it_is_enough_and_nobody_else_is_waited_for() {
        let answer = |answer: Option<Result<u8, &'static str>>| match answer {
            Some(answer) => std::future::ready(answer).boxed(),
            None => std::future::pending().boxed(),
        };
        assert_eq!(first([None, Some(Err("no")), Some(Ok(7))].map(answer).into()).await, Ok(7));
        assert_eq!(first([Some(Err("one")), Some(Err("two"))].map(answer).into()).await, Err(vec!["one", "two"]));
        let undecided = first([None, Some(Err("no"))].map(answer).into());
        assert!(undecided.now_or_never().is_none(), "absence is proven by all");
    }

    #[test]
    fn servers_are_parsed_and_shown_alike() {
        let text = "dev-1=127.0.0.1:8993,dev-2=[::1]:9003,dev-1=leader.example.com:8993";
        let targets: Targets = text.parse().unwrap();
        assert_eq!(targets.0.len(), 2);
        assert_eq!(targets.0[0].addresses.len(), 2);
        assert_eq!(targets.to_string(), "dev-1=127.0.0.1:8993,dev-1=leader.example.com:8993,dev-2=[::1]:9003");
    }

    #[test]
    fn wrong_servers_are_told_with_their_part() {
        for (text, part) in
            [("", "shard=host:port"), ("dev-1", "`dev-1`"), ("a=b:0", "`a=b:0`"), ("A b=c:1", "`A b=c:1`")]
        {
            let error = text.parse::<Targets>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn what_can_be_done_about_a_refusal_is_said() {
        let next = |code: Code, reason: &str, message: &str| {
            ShardError::new("dev-1", code, message).with_reason(reason).next().unwrap_or_default()
        };
        assert_eq!(next(Code::NotFound, "NOT_FOUND", "there is no group instance-1"), "nstance-admin group list");
        assert!(
            next(Code::NotFound, "", "there is no instance x").starts_with("nstance-admin instance list --deleted")
        );
        assert!(
            next(Code::AlreadyExists, "", "group web exists already").starts_with("nstance-admin group list -o wide")
        );
        assert!(next(Code::Aborted, "ETAG_MISMATCH", "group web is at 2-1").contains("--etag"));
        assert_eq!(next(Code::Aborted, "", "try again"), "");
    }

    #[test]
    fn a_refusal_carries_the_id_by_which_the_server_logs_it() {
        let mut status = Status::new(Code::Internal, "no");
        assert_eq!(&*ShardError::of("dev-1", &status).request_id, "");
        status.metadata_mut().insert(REQUEST_ID, "5f0c".parse().unwrap());
        assert_eq!(&*ShardError::of("dev-1", &status).request_id, "5f0c");
    }
}
