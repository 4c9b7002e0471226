//! Who leads: the servers' own word from their health ports, and the lease in the store.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures::{StreamExt as _, future::join_all, stream::FuturesUnordered};
use nstance_core::ports::clock::Clock as _;
use nstance_rt::clock::SystemClock;
use serde::Deserialize;

use crate::{
    http,
    layout::Layout,
    records::{self, RunFile},
    stored,
};

/// A server answers from memory. One that stands still must not hold up a picture of the others.
const LIMIT: Duration = Duration::from_secs(1);

/// What a server says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Role {
    pub(crate) role: String,
    pub(crate) epoch: u64,
}

/// What the store says of a shard's leader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lease {
    pub(crate) holder: String,
    pub(crate) epoch: u64,
    pub(crate) released: bool,
    pub(crate) renewed: Duration,
    pub(crate) ttl: Duration,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Roles {
    /// By name; a server that does not answer has none.
    pub(crate) servers: BTreeMap<String, Role>,
    /// By shard.
    pub(crate) leases: BTreeMap<String, Lease>,
}

/// Asks all servers and the store at once.
pub(crate) async fn look(layout: &Layout) -> Roles {
    let (servers, leases) = tokio::join!(servers(layout), leases(layout));
    Roles { servers, leases }
}

async fn servers(layout: &Layout) -> BTreeMap<String, Role> {
    let living = records::servers(layout).into_iter().filter(|it| it.process.lives());
    let asked = join_all(living.map(|it| async move { Some((it.name.clone(), role(&it).await?)) })).await;
    asked.into_iter().flatten().collect()
}

pub(crate) async fn role(server: &RunFile) -> Option<Role> {
    let answer = http::get_within(server.port("health")?, "/ready", LIMIT).await.ok()?;
    serde_json::from_str(&answer.body).ok()
}

async fn leases(layout: &Layout) -> BTreeMap<String, Lease> {
    let store = RunFile::read(layout, records::STORE).filter(|it| it.process.lives());
    let Some(bucket) = store.and_then(|it| it.port("s3")).and_then(|port| stored::open(port).ok()) else {
        return BTreeMap::new();
    };
    let mut leases = BTreeMap::new();
    for shard in records::shape(layout).shards() {
        // A store that is slow or down is seen elsewhere.
        let Ok(Ok(Some(record))) = tokio::time::timeout(LIMIT, stored::read_lease(&bucket, &shard)).await else {
            continue;
        };
        let lease = Lease {
            holder: record.holder,
            epoch: record.epoch.0,
            released: record.released,
            renewed: SystemClock.now().since(record.renewed_at),
            ttl: record.ttl,
        };
        leases.insert(shard.to_string(), lease);
    }
    leases
}

/// The server of a shard that serves as its leader now.
pub(crate) async fn leader(layout: &Layout, shard: &str) -> Option<RunFile> {
    let [leader, ..] = &asked(records::servers_of(layout, shard)).await[..] else { return None };
    leader.1.then(|| leader.0.clone())
}

/// Who holds the lease of a shard, and in which term, whether it answers or not.
pub(crate) async fn holder(layout: &Layout, shard: &str) -> Option<(RunFile, u64)> {
    let lease = leases(layout).await.remove(shard).filter(|lease| !lease.released)?;
    let holder = records::servers_of(layout, shard).into_iter().find(|it| it.name == lease.holder)?;
    Some((holder, lease.epoch))
}

/// The names of those servers that lead, by their own word.
pub(crate) async fn leaders(servers: &[RunFile]) -> BTreeSet<String> {
    let asked = servers.iter().filter(|it| it.process.lives()).map(|it| async move {
        let role = role(it).await?;
        matches!(role.role.as_str(), "leading" | "stalled" | "acquiring").then(|| it.name.clone())
    });
    join_all(asked).await.into_iter().flatten().collect()
}

/// Those of the servers that answer, and whether they lead; a leader is the first, and the only one once it is known.
pub(crate) async fn asked(servers: Vec<RunFile>) -> Vec<(RunFile, bool)> {
    let mut answers: FuturesUnordered<_> = servers
        .into_iter()
        .map(|it| async move {
            let answer = http::get_within(it.port("health")?, "/leader", LIMIT).await.ok()?;
            Some((it, answer.code == 200))
        })
        .collect();
    let mut others = Vec::new();
    while let Some(answer) = answers.next().await {
        match answer {
            Some((leader, true)) => return vec![(leader, true)],
            Some(other) => others.push(other),
            None => {}
        }
    }
    others
}
