//! The machines of a shard's servers: what runs on each, and which of them reach each other.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nstance_providers::faulty::FaultyProvider;
use nstance_rt::{process::Process, tasks::Tasks};
use nstance_server::{boot::Running, grpc::serve::Inside, term::Term};
use nstance_store::faulty::FaultyStore;

/// Where the nth server answers its peers.
pub(crate) fn port_of(n: usize) -> u16 {
    7000 + u16::try_from(n).unwrap_or(0)
}

pub(crate) struct Server {
    pub(crate) n: usize,
    pub(crate) process: Process,
    pub(crate) running: Running,
    pub(crate) store: Arc<FaultyStore>,
    pub(crate) provider: Arc<FaultyProvider>,
    pub(crate) tasks: Tasks,
    pub(crate) door: Mutex<Option<(Arc<Term>, Inside)>>,
}

#[derive(Default)]
pub(crate) struct Hosts {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    servers: BTreeMap<usize, Arc<Server>>,
    /// Nothing of the first reaches the second.
    blocked: BTreeSet<(usize, usize)>,
    /// Machines without power: nobody there says even that nobody is there.
    dark: BTreeSet<usize>,
}

impl Hosts {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn server(&self, n: usize) -> Option<Arc<Server>> {
        self.state().servers.get(&n).cloned()
    }

    pub(crate) fn servers(&self) -> Vec<Arc<Server>> {
        self.state().servers.values().cloned().collect()
    }

    pub(crate) fn put(&self, n: usize, server: Arc<Server>) {
        let mut state = self.state();
        state.dark.remove(&n);
        state.servers.insert(n, server);
    }

    pub(crate) fn remove(&self, n: usize) -> Option<Arc<Server>> {
        self.state().servers.remove(&n)
    }

    pub(crate) fn take_all(&self) -> Vec<Arc<Server>> {
        std::mem::take(&mut self.state().servers).into_values().collect()
    }

    /// Whether what `from` sends gets to `to`.
    pub(crate) fn reaches(&self, from: usize, to: usize) -> bool {
        !self.state().blocked.contains(&(from, to))
    }

    pub(crate) fn block(&self, from: usize, to: usize, on: bool) {
        let mut state = self.state();
        if on {
            state.blocked.insert((from, to));
        } else {
            state.blocked.remove(&(from, to));
        }
    }

    pub(crate) fn join_all(&self) {
        self.state().blocked.clear();
    }

    /// The power of a machine goes, and with it whatever would have answered. It is back with the next start there.
    pub(crate) fn darken(&self, n: usize) {
        self.state().dark.insert(n);
    }

    pub(crate) fn is_dark(&self, n: usize) -> bool {
        self.state().dark.contains(&n)
    }
}
