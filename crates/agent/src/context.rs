//! What every part of a running agent shares: settings, components, its directory, and the strings it hangs on.

use std::{future::Future, sync::Arc, time::Duration};

use nstance_core::{
    ports::clock::{Clock, Entropy},
    time::Timestamp,
};
use tokio::{
    sync::{Notify, watch},
    time::sleep,
};
use tokio_util::sync::CancellationToken;

use crate::{identity_dir::IdentityDir, link::Net, settings::Settings};

/// What the agent is made of besides its settings.
#[derive(Clone)]
pub struct Components {
    pub clock: Arc<dyn Clock>,
    pub entropy: Arc<dyn Entropy>,
    pub net: Arc<dyn Net>,
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

pub(crate) struct Context {
    pub(crate) settings: Settings,
    pub(crate) parts: Components,
    pub(crate) dir: IdentityDir,
    pub(crate) control: Control,
}

impl Context {
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

    pub(crate) async fn pause(&self, wait: Duration) -> Result<(), Stopped> {
        self.unless_stopped(sleep(wait)).await
    }
}
