//! Every write and every effect of a server, in order: a server can be stopped right before one, or right after it has
//! landed and before its answer is heard.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nstance_rt::process::Process;
use tokio::sync::Notify;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Before,
    After,
}

/// Shared by all servers of a site.
#[derive(Clone, Default)]
pub struct Points {
    state: Arc<Mutex<State>>,
    hit: Arc<Notify>,
}

#[derive(Default)]
struct State {
    passed: Vec<String>,
    armed: Option<(Where, Side)>,
    /// Whether whoever is stopped goes on from there when it is thawed, instead of being killed.
    goes_on: bool,
    /// Who was stopped last.
    stopped: Option<Process>,
}

/// Which point is meant.
enum Where {
    Nth(usize),
    /// The first of this name from `from` on, once `skip` others of it were reached.
    Named {
        name: String,
        from: usize,
        skip: usize,
    },
}

impl State {
    fn is_armed(&self, n: usize, side: Side) -> bool {
        match &self.armed {
            Some((Where::Nth(it), at)) => (*it, *at) == (n, side),
            Some((Where::Named { name, from, skip }, at)) => {
                let means = |it: &&String| it.starts_with(name.as_str());
                *at == side
                    && *from <= n
                    && self.passed.get(n).is_some_and(|it| means(&it))
                    && self.passed[*from..n].iter().filter(means).count() == *skip
            }
            None => false,
        }
    }
}

/// One point, from when it is reached until it is passed.
pub(crate) struct Point(Option<usize>);

impl Points {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops the server that reaches the nth point from now on, counted from 0.
    pub fn arm(&self, n: usize, side: Side) {
        let mut state = self.state();
        state.passed.clear();
        state.armed = Some((Where::Nth(n), side));
    }

    /// As [`Points::arm`], but the server that is stopped goes on from there when it is thawed.
    pub fn arm_pause(&self, n: usize, side: Side) {
        self.arm(n, side);
        self.state().goes_on = true;
    }

    /// Lets the server run on that was stopped.
    pub fn thaw(&self) {
        let stopped = self.state().stopped.take();
        if let Some(process) = stopped {
            process.thaw();
        }
    }

    /// Stops the server at the next point whose name begins so, after `skip` others of that name.
    pub fn arm_at(&self, name: &str, skip: usize, side: Side) {
        let mut state = self.state();
        let from = state.passed.len();
        state.armed = Some((Where::Named { name: name.to_owned(), from, skip }, side));
    }

    /// Forgets what was passed.
    pub fn clear(&self) {
        *self.state() = State::default();
    }

    /// What was passed, in order.
    pub fn passed(&self) -> Vec<String> {
        self.state().passed.clone()
    }

    /// Resolves when a server stands at the armed point. It must be killed then, or thawed if it was only to pause.
    pub async fn hit(&self) {
        self.hit.notified().await;
    }

    pub(crate) async fn reach(&self, process: &Process, name: impl FnOnce() -> Option<String>) -> Point {
        let Some(name) = name() else { return Point(None) };
        let n = {
            let mut state = self.state();
            state.passed.push(name);
            state.passed.len() - 1
        };
        self.stop(process, n, Side::Before).await;
        Point(Some(n))
    }

    pub(crate) async fn pass(&self, process: &Process, point: Point) {
        if let Point(Some(n)) = point {
            self.stop(process, n, Side::After).await;
        }
    }

    async fn stop(&self, process: &Process, n: usize, side: Side) {
        let hit = {
            let mut state = self.state();
            let hit = state.is_armed(n, side);
            if hit {
                state.armed = None;
            }
            hit
        };
        if hit {
            process.freeze();
            self.state().stopped = Some(process.clone());
            self.hit.notify_one();
            if !self.state().goes_on {
                std::future::pending::<()>().await;
            }
            // Polled again only when its process is.
            tokio::task::yield_now().await;
        }
    }
}
