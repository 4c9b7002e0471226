//! A process inside this process, for simulations: everything it runs can be stopped in its tracks, and killed.
//!
//! While frozen none of its tasks is polled, whatever becomes ready; clocks go on, as they do for a machine that was
//! suspended or a process that was sent SIGSTOP. Killed, its tasks are dropped where they stand: nothing of them runs
//! again, and nobody is told but those who waited for its answer.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

#[derive(Clone, Default)]
pub struct Process {
    state: Arc<Mutex<State>>,
    doomed: Arc<Notify>,
    killed: CancellationToken,
}

#[derive(Default)]
struct State {
    frozen: bool,
    /// Of futures that wanted to run while frozen.
    wakers: Vec<Waker>,
    aborts: Vec<tokio::task::AbortHandle>,
    /// How many polls are left before it stops for good.
    polls_left: Option<u64>,
    /// Polls since the clock moved last.
    busy: Option<(tokio::time::Instant, u64)>,
    spins: bool,
}

/// More than this at one moment of a simulated clock is a loop that waits for nothing.
const SPIN: u64 = 200_000;

impl State {
    /// A process that spins would keep a clock that jumps from timer to timer from ever moving: it is stopped.
    fn watch_out(&mut self, now: tokio::time::Instant) {
        let n = match self.busy {
            Some((at, n)) if at == now => n + 1,
            _ => 0,
        };
        self.busy = Some((now, n));
        if SPIN < n {
            self.spins = true;
            self.frozen = true;
        }
    }
}

impl Process {
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn freeze(&self) {
        self.state().frozen = true;
    }

    /// Lets it run on. What became due meanwhile is due at once.
    pub fn thaw(&self) {
        let wakers = {
            let mut state = self.state();
            state.frozen = self.killed.is_cancelled() || state.spins;
            std::mem::take(&mut state.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    pub fn is_frozen(&self) -> bool {
        self.state().frozen
    }

    /// Whether it was stopped because it span.
    pub fn spins(&self) -> bool {
        self.state().spins
    }

    pub fn is_killed(&self) -> bool {
        self.killed.is_cancelled()
    }

    /// Ends it where it stands.
    pub fn kill(&self) {
        let aborts = {
            let mut state = self.state();
            state.frozen = true;
            state.wakers.clear();
            std::mem::take(&mut state.aborts)
        };
        // Frozen first: between the abort and the drop nothing may be polled.
        for abort in aborts {
            abort.abort();
        }
        self.killed.cancel();
    }

    /// Lets it run for so many polls more, then stops it where it stands: any await may be the one. Whoever armed this
    /// kills it when [`Process::doomed`] resolves.
    pub fn doom_after(&self, n_polls: u64) {
        self.state().polls_left = Some(n_polls);
    }

    pub async fn doomed(&self) {
        self.doomed.notified().await;
    }

    /// Cancelled when it is killed.
    pub fn token(&self) -> &CancellationToken {
        &self.killed
    }

    /// Waits for something of this process, from outside. `None` if it is killed before.
    pub async fn answer<T>(&self, answer: impl Future<Output = T>) -> Option<T> {
        let mut answer = std::pin::pin!(answer);
        let running = std::future::poll_fn(|cx| match self.poll_runs(cx) {
            Poll::Ready(()) => answer.as_mut().poll(cx),
            Poll::Pending => Poll::Pending,
        });
        tokio::select! {
            biased;
            () = self.killed.cancelled() => None,
            answer = running => Some(answer),
        }
    }

    pub(crate) fn track(&self, abort: tokio::task::AbortHandle) {
        let mut state = self.state();
        if 256 <= state.aborts.len() && state.aborts.len().is_power_of_two() {
            state.aborts.retain(|it| !it.is_finished());
        }
        state.aborts.push(abort);
    }

    /// Whether something may be polled now; if not, it is woken when it may.
    pub fn poll_runs(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state();
        state.watch_out(tokio::time::Instant::now());
        if let Some(left) = state.polls_left.filter(|_| !state.frozen) {
            state.polls_left = left.checked_sub(1);
            if left == 0 {
                state.frozen = true;
                self.doomed.notify_one();
            }
        }
        if state.frozen {
            state.wakers.push(cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(())
    }
}

/// A future that is polled only while its process runs.
pub(crate) struct Running<F> {
    pub(crate) process: Process,
    pub(crate) future: Pin<Box<F>>,
}

impl<F: Future> Future for Running<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.get_mut();
        match this.process.poll_runs(cx) {
            Poll::Ready(()) => this.future.as_mut().poll(cx),
            Poll::Pending => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicU32, Ordering},
        time::Duration,
    };

    use super::*;
    use crate::tasks::Tasks;

    fn ticking(process: &Process) -> (Tasks, Arc<AtomicU32>) {
        let (tasks, n) = (Tasks::of(process), Arc::new(AtomicU32::new(0)));
        let counted = n.clone();
        tasks.child().spawn("tick", async move {
            loop {
                tokio::time::sleep(Duration::from_secs(1)).await;
                counted.fetch_add(1, Ordering::SeqCst);
            }
        });
        (tasks, n)
    }

    async fn seconds(n: u64) {
        tokio::time::sleep(Duration::from_millis(n * 1000 + 1)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_frozen_process_does_nothing_and_goes_on_where_it_was() {
        let process = Process::new();
        let (_tasks, n) = ticking(&process);
        seconds(2).await;
        assert_eq!(n.load(Ordering::SeqCst), 2);
        process.freeze();
        seconds(10).await;
        assert_eq!(n.load(Ordering::SeqCst), 2);
        process.thaw();
        seconds(2).await;
        assert_eq!(n.load(Ordering::SeqCst), 5, "one was due, two came after");
    }

    #[tokio::test(start_paused = true)]
    async fn a_killed_process_never_runs_again_and_who_waits_for_it_learns() {
        let process = Process::new();
        let (_tasks, n) = ticking(&process);
        seconds(2).await;
        let waiting = process.clone();
        let answer = waiting.answer(std::future::pending::<()>());
        tokio::pin!(answer);
        assert!(futures_poll(answer.as_mut()).is_pending());
        process.kill();
        assert_eq!(answer.await, None);
        process.thaw();
        seconds(10).await;
        assert_eq!(n.load(Ordering::SeqCst), 2);
        assert!(process.is_killed());
    }

    fn futures_poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }
}
