//! Whether this process may act. Every write asks here first.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nstance_core::{ports::clock::Clock, time::Mono};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// Without election: there is only one.
    Always,
    Standby,
    Leading {
        renewed_at: Mono,
        lasts: Duration,
        transitions: i32,
    },
    Lost,
}

pub struct Leadership {
    clock: Arc<dyn Clock>,
    standing: Mutex<Standing>,
}

impl Leadership {
    /// For a process that need not be elected.
    pub fn always(clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self { clock, standing: Mutex::new(Standing::Always) })
    }

    /// For a process that is not elected yet.
    pub fn standby(clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self { clock, standing: Mutex::new(Standing::Standby) })
    }

    fn standing(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this process leads now. A process that was stopped for longer than its term does not, from its first moment
    /// on.
    pub fn is_leader(&self) -> bool {
        match *self.standing() {
            Standing::Always => true,
            Standing::Leading { renewed_at, lasts, .. } => self.clock.monotonic().since(renewed_at) < lasts,
            Standing::Standby | Standing::Lost => false,
        }
    }

    /// How often the leader changed before this term.
    pub fn transitions(&self) -> i32 {
        match *self.standing() {
            Standing::Leading { transitions, .. } => transitions,
            Standing::Always | Standing::Standby | Standing::Lost => 0,
        }
    }

    /// The term was renewed and lasts from then on for this long. A lost term is never renewed.
    pub(super) fn renew(&self, renewed_at: Mono, lasts: Duration, transitions: i32) {
        let mut standing = self.standing();
        if *standing != Standing::Lost {
            *standing = Standing::Leading { renewed_at, lasts, transitions };
        }
    }

    pub(super) fn lose(&self) {
        *self.standing() = Standing::Lost;
    }
}
