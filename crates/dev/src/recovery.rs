//! How the rest gets over a fault: who leads when, who runs again when, and when all is healthy. Told as it comes.

use std::{process::ExitCode, time::Duration};

use nstance_core::{ports::clock::Clock as _, time::Mono};
use nstance_rt::clock::SystemClock;

use crate::{
    http,
    layout::Layout,
    records::{self, Kind, RunFile},
    roles,
    status::{self, Clients},
};

/// Short beside what is measured.
const PERIOD: Duration = Duration::from_millis(20);

/// What there was before the fault.
pub(crate) struct Watched {
    old: RunFile,
    /// Its shard's leader and epoch, if there was one.
    leader: Option<(RunFile, u64)>,
    n_others: usize,
}

impl Watched {
    pub(crate) async fn begin(layout: &Layout, component: &RunFile) -> Self {
        let (mut leader, mut n_others) = (None, 0);
        if let Some(shard) = &component.shard {
            n_others = records::servers_of(layout, shard).iter().filter(|it| it.name != component.name).count();
            // One that does not answer just now leads all the same, as long as the lease says so.
            leader = match leader_of(layout, shard).await {
                None => roles::holder(layout, shard).await,
                known => known,
            };
        }
        Self { old: component.clone(), leader, n_others }
    }

    /// Whether somebody else may lead in its place.
    pub(crate) fn has_others(&self) -> bool {
        0 < self.n_others
    }

    pub(crate) fn led(&self) -> bool {
        self.leader.as_ref().is_some_and(|(leader, _)| leader.name == self.old.name)
    }

    /// Waits for all that is to come: a new leader, the component itself again, and everything healthy.
    pub(crate) async fn recovery(&self, layout: &Layout, since: Mono, comes_back: bool) {
        let (new_leader, back) = (self.new_leader(layout, since), async {
            if comes_back {
                self.back(layout, since).await;
            }
        });
        // Alone it cannot be followed by anybody before it is back, but it must lead again.
        tokio::join!(new_leader, back);
        all_healthy(layout, since).await;
    }

    /// Waits until a later term than before has its leader, if it was the leader that was hit.
    pub(crate) async fn new_leader(&self, layout: &Layout, since: Mono) {
        let Some(shard) = &self.old.shard else { return };
        match &self.leader {
            Some((leader, epoch)) if !self.led() => {
                say!("{} goes on leading {shard} (epoch {epoch})", leader.name);
            }
            before => {
                let least = before.as_ref().map_or(0, |(_, epoch)| *epoch);
                let (leader, epoch) = leader_after(layout, shard, least).await;
                say!("{} leads {shard} (epoch {epoch}) after {}", leader.name, seconds(since));
            }
        }
    }

    /// Waits for another process in the old one's place.
    async fn back(&self, layout: &Layout, since: Mono) {
        let old = &self.old;
        loop {
            let new = RunFile::read(layout, &old.name).filter(|it| it.process != old.process && it.process.lives());
            if let Some(new) = new {
                let after = SystemClock.monotonic().since(since).as_millis();
                say!("{} runs again after {after} ms (pid {})", old.name, new.process.pid);
                return self.answers(&new).await;
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// Started is not yet there.
    async fn answers(&self, new: &RunFile) {
        let (port, path) = match new.kind {
            Kind::Store => (new.port("s3"), "/-/health"),
            Kind::Kubernetes => (new.port("k8s"), "/readyz"),
            Kind::Operator => (new.port("probes"), "/readyz"),
            _ => (new.port("health"), "/health"),
        };
        while !http::get(port.unwrap_or_default(), path).await.is_ok_and(|answer| answer.code == 200) {
            tokio::time::sleep(PERIOD).await;
        }
    }
}

/// Who leads a shard, and in which term.
async fn leader_of(layout: &Layout, shard: &str) -> Option<(RunFile, u64)> {
    let leader = roles::leader(layout, shard).await?;
    let epoch = roles::role(&leader).await?.epoch;
    Some((leader, epoch))
}

/// Waits for the leader of a later term.
async fn leader_after(layout: &Layout, shard: &str, epoch: u64) -> (RunFile, u64) {
    loop {
        if let Some((leader, new)) = leader_of(layout, shard).await
            && epoch < new
        {
            return (leader, new);
        }
        tokio::time::sleep(PERIOD).await;
    }
}

/// Waits until every shard is led and every group complete.
pub(crate) async fn all_healthy(layout: &Layout, since: Mono) {
    let mut clients = Clients::new();
    loop {
        let picture = status::look(layout, &mut clients).await;
        if status::compose(layout, &picture).healthy {
            say!("all healthy after {}", seconds(since));
            return;
        }
        tokio::time::sleep(PERIOD).await;
    }
}

/// Gives a recovery its time, and says so if it did not come.
pub(crate) async fn within<T>(layout: &Layout, patience: Duration, recovery: impl Future<Output = T>) -> ExitCode {
    if tokio::time::timeout(patience, recovery).await.is_ok() {
        return ExitCode::SUCCESS;
    }
    let (seconds, flag) = (patience.as_secs(), layout.dir_flag());
    say!("not recovered within {seconds} s; look with `nstance-dev status{flag}`");
    ExitCode::FAILURE
}

fn seconds(since: Mono) -> String {
    let after = SystemClock.monotonic().since(since);
    if after < Duration::from_secs(1) {
        format!("{} ms", after.as_millis())
    } else {
        format!("{:.1} s", after.as_secs_f64())
    }
}
