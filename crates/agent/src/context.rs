//! What every part of a running agent shares: settings, components, its directory, and the strings it hangs on.

use std::{
    future::Future,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use nstance_core::{
    ports::clock::{Clock, Entropy},
    time::{Mono, Timestamp},
};
use nstance_rt::entropy::hex;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use crate::{
    board::Board,
    disk::Disk,
    files::Shared,
    host::Host,
    identity_dir::IdentityDir,
    link::Net,
    machine::Addresses,
    metadata::{Endpoints, Monitor},
    settings::Settings,
};

/// What the agent is made of besides its settings.
#[derive(Clone)]
pub struct Components {
    pub clock: Arc<dyn Clock>,
    pub entropy: Arc<dyn Entropy>,
    pub net: Arc<dyn Net>,
    pub disk: Disk,
    pub metadata: Endpoints,
    pub host: Host,
    /// Whether a failed boot is told on standard error, for the machine's console.
    pub console: bool,
}

/// Where the agent is in its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    Starting,
    Enrolling,
    Connecting,
    Serving,
    Rejoining,
    /// Alive and quiet until a person does something; the reason.
    Parked(String),
    /// The server no longer counts on this machine.
    Dismissed,
    Leaving,
}

impl State {
    /// Of all states.
    pub const NAMES: [&str; 8] =
        ["starting", "enrolling", "connecting", "serving", "rejoining", "parked", "dismissed", "leaving"];

    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Enrolling => "enrolling",
            Self::Connecting => "connecting",
            Self::Serving => "serving",
            Self::Rejoining => "rejoining",
            Self::Parked(_) => "parked",
            Self::Dismissed => "dismissed",
            Self::Leaving => "leaving",
        }
    }
}

/// The strings on which a running agent hangs. All clones are one.
#[derive(Clone)]
pub struct Control {
    stop: CancellationToken,
    reload: Arc<Notify>,
    state: watch::Sender<State>,
}

impl Default for Control {
    fn default() -> Self {
        Self::new()
    }
}

impl Control {
    pub fn new() -> Self {
        Self { stop: CancellationToken::new(), reload: Arc::default(), state: watch::Sender::new(State::Starting) }
    }

    /// Says goodbye to the server and ends, within two seconds.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Wakes a parked agent.
    pub fn reload(&self) {
        self.reload.notify_one();
    }

    pub fn state(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    pub(crate) fn set(&self, state: State) {
        self.state.send_if_modified(|current| {
            let changed = *current != state;
            if changed {
                tracing::info!(from = current.as_str(), to = state.as_str(), "state changed");
                *current = state;
            }
            changed
        });
    }

    pub(crate) fn is(&self, state: &State) -> bool {
        *self.state.borrow() == *state
    }

    pub(crate) async fn stopped(&self) {
        self.stop.cancelled().await;
    }

    pub(crate) async fn reloaded(&self) {
        self.reload.notified().await;
    }
}

/// A stop was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stopped;

/// How a certificate came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Received {
    serial: String,
    pub(crate) at: Mono,
    /// When its issuer wants it renewed, if it told.
    pub(crate) renew_after: Option<Timestamp>,
}

pub(crate) struct Context {
    pub(crate) settings: Settings,
    pub(crate) parts: Components,
    pub(crate) dir: IdentityDir,
    pub(crate) control: Control,
    pub(crate) board: Board,
    pub(crate) files: Shared,
    pub(crate) monitor: Monitor,
    /// Of this process; every stream carries it.
    pub(crate) session_id: String,
    /// The highest epoch a leader has spoken in.
    highest_epoch: AtomicU64,
    /// Our end of the last connection, and what it and the machine were found to be called.
    found: Mutex<Option<(Option<IpAddr>, Addresses)>>,
    /// Why no server could be reached, as it was last complained of.
    complaint: Mutex<String>,
    /// The last certificate that this process received.
    received: Mutex<Option<Received>>,
    /// Until when a server may still be told that we go; set with the notice that says so.
    pub(crate) leave_by: OnceLock<Instant>,
}

impl Context {
    pub(crate) fn new(settings: Settings, parts: Components, control: Control) -> Self {
        let dir = IdentityDir::new(&settings.identity, parts.disk.clone());
        let session_id = hex(&*parts.entropy, 16);
        Self {
            settings,
            parts,
            dir,
            control,
            board: Board::default(),
            files: Shared::default(),
            monitor: Monitor::default(),
            session_id,
            highest_epoch: AtomicU64::new(0),
            found: Mutex::default(),
            complaint: Mutex::default(),
            received: Mutex::default(),
            leave_by: OnceLock::new(),
        }
    }

    /// Whether a message of this epoch may be obeyed: a deposed leader must not command agents. Zero is a server that
    /// does not tell.
    pub(crate) fn obeys(&self, epoch: u64) -> bool {
        epoch == 0 || self.highest_epoch.fetch_max(epoch, Ordering::Relaxed) <= epoch
    }

    /// Finds out the machine's addresses by our end of a new connection.
    pub(crate) fn find(&self, local: Option<SocketAddr>) -> Addresses {
        let local = local.map(|local| local.ip());
        let addresses = Addresses::detect(&self.settings.overrides, &self.parts.host, local);
        *self.found.lock().unwrap_or_else(PoisonError::into_inner) = Some((local, addresses.clone()));
        addresses
    }

    /// As they were last found.
    pub(crate) fn addresses(&self) -> Addresses {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        found.as_ref().map(|(_, addresses)| addresses.clone()).unwrap_or_default()
    }

    /// Looks again, and has it reported if something is different: a name given late, a network that came or went.
    pub(crate) fn look_around(&self) {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((local, before)) = &mut *found else { return };
        let now = Addresses::detect(&self.settings.overrides, &self.parts.host, *local);
        if now != *before {
            tracing::info!(?before, ?now, "addresses changed");
            *before = now;
            drop(found);
            self.board.changed();
        }
    }

    /// Whether this reason why no server is reached is another one than the last. Empty once one is reached, so that the
    /// next absence is told again.
    pub(crate) fn is_news(&self, why: &str) -> bool {
        let mut last = self.complaint.lock().unwrap_or_else(PoisonError::into_inner);
        let news = *last != why;
        why.clone_into(&mut last);
        news
    }

    /// Takes note of a certificate that came just now, and of when its issuer wants it renewed.
    pub(crate) fn set_received(&self, serial: &str, renew_after: Option<Timestamp>) {
        let received = Received { serial: serial.to_owned(), at: self.parts.clock.monotonic(), renew_after };
        *self.received.lock().unwrap_or_else(PoisonError::into_inner) = Some(received);
    }

    /// What is known of this certificate beyond what it says; nothing if an earlier process got it.
    pub(crate) fn received(&self, serial: &str) -> Option<Received> {
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        received.clone().filter(|it| it.serial == serial)
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.parts.clock.now()
    }

    pub(crate) fn entropy(&self) -> &dyn Entropy {
        &*self.parts.entropy
    }

    /// Runs `work` unless or until a stop is asked for.
    pub(crate) async fn unless_stopped<T>(&self, work: impl Future<Output = T>) -> Result<T, Stopped> {
        tokio::select! {
            biased;
            () = self.control.stopped() => Err(Stopped),
            done = work => Ok(done),
        }
    }

    /// A notice cuts it short: after the wait there may be no machine left to tell of it.
    pub(crate) async fn pause_unless_urgent(&self, wait: Duration) -> Result<(), Stopped> {
        self.unless_stopped(self.urgent_or(wait)).await
    }

    pub(crate) async fn urgent_or(&self, wait: Duration) {
        tokio::select! {
            biased;
            () = self.board.urgent() => {}
            () = sleep(wait) => {}
        }
    }
}

#[cfg(test)]
impl Context {
    /// An agent that does nothing, in a directory of its own.
    pub(crate) fn for_tests(more: &[(&str, &str)]) -> (tempfile::TempDir, Self) {
        let outer = tempfile::tempdir().expect("a directory");
        let at = |leaf: &str| outer.path().join(leaf).display().to_string();
        let mut all: std::collections::BTreeMap<String, String> = [
            ("SERVER_REGISTRATION_ADDR", "127.0.0.1:1".to_owned()),
            ("SERVER_AGENT_ADDR", "127.0.0.1:1".to_owned()),
            ("INSTANCE_ID", "knc06bgm7733st2576nx5jht4ecjw".to_owned()),
            ("IDENTITY_DIR", at("identity")),
            ("KEYS_DIR", at("keys")),
            ("RECV_DIR", at("recv")),
        ]
        .into_iter()
        .map(|(name, value)| (format!("NSTANCE_{name}"), value))
        .collect();
        all.extend(more.iter().map(|(name, value)| (format!("NSTANCE_{name}"), (*value).to_owned())));
        let settings = Settings::read(|name| all.get(name).cloned()).expect("good settings");
        crate::identity_dir::prepare(&settings).expect("directories");
        let parts = Components {
            clock: Arc::new(nstance_rt::clock::SystemClock),
            entropy: Arc::new(nstance_rt::entropy::SeededEntropy::new(1)),
            net: Arc::new(crate::link::TcpNet),
            disk: Disk::default(),
            metadata: Endpoints::default(),
            host: Host::nowhere(),
            console: false,
        };
        (outer, Self::new(settings, parts, Control::new()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_is_news_until_it_is_known_and_again_after_a_connection() {
        let (_outer, ctx) = Context::for_tests(&[]);
        assert!(ctx.is_news("refused"));
        assert!(!ctx.is_news("refused"));
        assert!(ctx.is_news("not trusted"));
        ctx.is_news("");
        assert!(ctx.is_news("not trusted"));
    }
}
