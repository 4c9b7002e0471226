//! How this process is, told to whoever asks on the health port. Told apart: alive, loaded, able to lead, leading.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use nstance_core::ids::Epoch;
use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Booting,
    Following,
    Acquiring,
    Leading,
    Stalled,
    Stopping,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct State {
    role: Role,
    epoch: Epoch,
    /// Config loaded and synced to the cache at least once.
    loaded: bool,
    /// The three gRPC ports are open.
    serving: bool,
    config_etag: String,
    config_stale: bool,
    store: String,
    /// What is wrong now, by part: a retry that goes on is seen here.
    problems: BTreeMap<&'static str, String>,
}

impl State {
    /// Whether a problem keeps this server from leading. A config that is only old does not.
    fn is_hindered(&self) -> bool {
        self.problems.keys().any(|part| *part != "config" || !self.config_stale)
    }
}

pub struct Vitals(Mutex<State>);

impl Default for Vitals {
    fn default() -> Self {
        Self(Mutex::new(State {
            role: Role::Booting,
            epoch: Epoch(0),
            loaded: false,
            serving: false,
            config_etag: String::new(),
            config_stale: false,
            store: String::new(),
            problems: BTreeMap::new(),
        }))
    }
}

/// The body of `/ready`.
#[derive(Debug, Serialize)]
pub struct Ready {
    pub ready: bool,
    pub leader: bool,
    pub role: Role,
    pub epoch: u64,
    pub config: ReadyConfig,
    pub store: String,
    pub problems: Vec<String>,
}

#[derive(Debug, Serialize)]
pub struct ReadyConfig {
    pub etag: String,
    pub stale: bool,
}

impl Vitals {
    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn set_role(&self, role: Role, epoch: Epoch) {
        self.with(|state| {
            state.role = role;
            state.epoch = epoch;
            if role != Role::Leading && role != Role::Stalled {
                state.serving = false;
            }
        });
    }

    /// Changes the role only from this one: two sides may know of a stall.
    pub fn turn(&self, from: Role, to: Role, epoch: Epoch) -> bool {
        self.with(|state| {
            let turns = state.role == from;
            if turns {
                state.role = to;
                state.epoch = epoch;
            }
            turns
        })
    }

    pub fn role(&self) -> Role {
        self.with(|state| state.role)
    }

    pub fn set_loaded(&self) {
        self.with(|state| state.loaded = true);
    }

    pub fn set_serving(&self, serving: bool) {
        self.with(|state| state.serving = serving);
    }

    pub fn set_config(&self, etag: &str, stale: bool) {
        self.with(|state| {
            state.config_etag = etag.to_owned();
            state.config_stale = stale;
        });
    }

    pub fn set_store(&self, store: String) {
        self.with(|state| state.store = store);
    }

    pub fn problem(&self, part: &'static str, message: impl Into<String>) {
        self.with(|state| state.problems.insert(part, message.into()));
    }

    pub fn clear(&self, part: &'static str) {
        self.with(|state| state.problems.remove(part));
    }

    pub fn is_loaded(&self) -> bool {
        self.with(|state| state.loaded)
    }

    pub fn is_serving_leader(&self) -> bool {
        self.with(|state| state.role == Role::Leading && state.serving)
    }

    pub fn ready(&self) -> Ready {
        self.with(|state| Ready {
            ready: state.loaded && !state.is_hindered() && state.role != Role::Stopping,
            leader: matches!(state.role, Role::Leading | Role::Stalled),
            role: state.role,
            epoch: state.epoch.0,
            config: ReadyConfig { etag: state.config_etag.clone(), stale: state.config_stale },
            store: state.store.clone(),
            problems: state.problems.iter().map(|(part, message)| format!("{part}: {message}")).collect(),
        })
    }
}
