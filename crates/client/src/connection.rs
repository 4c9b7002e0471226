//! The connection to one shard, over however many leaders and sockets it takes.
//!
//! A [`Connection`] never waits for another shard. Each call has a deadline that includes opening the connection, and is
//! repeated once if an open connection turned out to be dead: every call of the operators' service may be repeated,
//! because it names an end state or carries an id of its own.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nstance_identity::link::{Net, TcpNet};
use nstance_proto::refusal::reason_of;
use tonic::{Code, Status};

use crate::{Identity, ShardClient, ShardError, Target, dial};

/// One shard: its addresses, the identity that calls, and the deadline of a call. Clones share the open connection.
#[derive(Clone)]
pub struct Connection {
    target: Target,
    identity: Arc<Identity>,
    network: Arc<dyn Net>,
    timeout: Duration,
    reuse: Reuse,
}

/// What becomes of a connection after a call.
#[derive(Clone)]
enum Reuse {
    /// Every call opens its own.
    Never,
    /// It stays open for the next call.
    Keep(Arc<Mutex<Option<ShardClient>>>),
}

impl Connection {
    /// Opens nothing yet. Each call will open a connection of its own, until [`Self::keep_open`].
    pub fn new(target: Target, identity: Arc<Identity>, timeout: Duration) -> Self {
        Self { target, identity, network: Arc::new(TcpNet), timeout, reuse: Reuse::Never }
    }

    /// Keeps the connection open between calls. Connections that are kept already are not shared with the result.
    #[must_use]
    pub fn keep_open(self) -> Self {
        Self { reuse: Reuse::Keep(Arc::default()), ..self }
    }

    /// Sockets come from here instead of the machine's network.
    #[must_use]
    pub fn with_network(self, network: Arc<dyn Net>) -> Self {
        Self { network, ..self }
    }

    /// The deadline of each call, opening the connection included.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    pub fn shard(&self) -> &str {
        &self.target.shard
    }

    pub fn target(&self) -> &Target {
        &self.target
    }

    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Opens a new connection to the shard's leader, which is not shared.
    pub async fn dial(&self) -> Result<ShardClient, ShardError> {
        dial::open(self.network.as_ref(), &self.target, &self.identity).await
    }

    /// The open connection, else a new one.
    pub async fn client(&self) -> Result<ShardClient, ShardError> {
        if let Some(client) = self.kept().and_then(|kept| kept.clone()) {
            return Ok(client);
        }
        let client = self.dial().await?;
        if let Some(mut kept) = self.kept() {
            *kept = Some(client.clone());
        }
        Ok(client)
    }

    /// The next call opens a new connection. Streams over the old one go on.
    pub fn forget(&self) {
        if let Some(mut kept) = self.kept() {
            *kept = None;
        }
    }

    /// Sends one request, within the timeout.
    pub async fn call<T, F>(&self, request: impl Fn(ShardClient) -> F) -> Result<T, ShardError>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let answer = async {
            let client = self.client().await?;
            let answer = match request(client).await {
                Err(status) if self.forget_if_dead(&status) => request(self.client().await?).await,
                answer => answer,
            };
            answer.map_err(|status| ShardError::from_status(self.shard(), &status))
        };
        let timed_out = |_| ShardError::timed_out(self.shard(), self.timeout);
        tokio::time::timeout(self.timeout, answer).await.map_err(timed_out).flatten()
    }

    fn kept(&self) -> Option<MutexGuard<'_, Option<ShardClient>>> {
        match &self.reuse {
            Reuse::Never => None,
            Reuse::Keep(kept) => Some(kept.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Whether the status came from a kept connection that is of no use any more, and not from a server. If so, the
    /// connection is forgotten.
    fn forget_if_dead(&self, status: &Status) -> bool {
        let is_dead = match status.code() {
            Code::Unavailable | Code::Unknown | Code::Cancelled => reason_of(status).is_none(),
            // The refusal may be for an old certificate, with which the connection was opened.
            Code::Unauthenticated => true,
            _ => false,
        };
        is_dead && self.kept().is_some_and(|mut kept| kept.take().is_some())
    }
}
