//! The other servers of a shard: what they say of their leadership, and whether anybody is there at all.
//!
//! What a peer says makes a take-over fast. It never makes one right: the store decides, and a peer's word only tells a
//! follower when to look at it. The one exception is silence of a certain kind: a machine that refuses connections on
//! the port its leader must listen on proves that no leader runs there.

use std::time::Duration;

use async_trait::async_trait;

use super::objects::ETag;
use crate::ids::Epoch;

/// What a server does in an election, in the words of the peer endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PeerRole {
    Following,
    Acquiring,
    Leading,
    /// Leads, but its lease ran out unrenewed: no effect starts until a renewal succeeds.
    Stalled,
    /// Gives up on purpose and is about to release.
    Stopping,
    /// Gave up: the ETag it names may be bid on at once.
    Released,
}

impl PeerRole {
    pub const ALL: [Self; 6] =
        [Self::Following, Self::Acquiring, Self::Leading, Self::Stalled, Self::Stopping, Self::Released];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Following => "following",
            Self::Acquiring => "acquiring",
            Self::Leading => "leading",
            Self::Stalled => "stalled",
            Self::Stopping => "stopping",
            Self::Released => "released",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.as_str() == name)
    }
}

/// Which of the two leases is asked about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Election {
    Shard,
    Cluster,
}

impl Election {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Shard => "shard",
            Self::Cluster => "cluster",
        }
    }
}

/// A server's answer. `etag` and `renewed_ago` are of its last *durable* renewal, never of now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerView {
    pub election: Election,
    pub cluster: String,
    pub shard: String,
    pub server_id: String,
    /// 128 random bits of the answering process: with the id it is a holder's identity.
    pub process: String,
    pub role: PeerRole,
    pub epoch: Epoch,
    pub etag: Option<ETag>,
    pub renewed_ago: Option<Duration>,
    pub ttl: Duration,
    pub ready: bool,
    pub version: String,
}

/// A question: answered at once if the role or the ETag is another, else when one of them changes, else after `wait`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerAsk {
    pub election: Election,
    pub known: Option<(PeerRole, Option<ETag>)>,
    pub wait: Duration,
}

/// What a connection attempt met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Knock {
    /// The machine answered that nobody listens: it is up, the process is not.
    Refused,
    /// Somebody accepted, or there was no answer, or no way there. Proves nothing.
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("peer {addr}: {message}")]
pub struct PeerError {
    pub addr: String,
    pub message: String,
}

#[async_trait]
pub trait Peers: Send + Sync {
    /// Asks the server at an advertised election address. An answer that does not come is an error within two seconds
    /// after `ask.wait`, and within two seconds at all if the connection breaks or goes silent.
    async fn ask(&self, addr: &str, ask: &PeerAsk) -> Result<PeerView, PeerError>;

    /// Connects once, for at most 300 ms, and hangs up.
    async fn knock(&self, addr: &str) -> Knock;
}
