//! The only place where tasks are spawned. Each has a name, is joined, and a panic in one does not pass unseen.
//!
//! A [`Tasks`] is a scope: everything of a leadership term hangs on one, and ending it ends them all. Tasks watch the
//! scope's token and come to their end by themselves; what has not after the grace period is aborted.

use std::{
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use pin_project_lite::pin_project;
use tokio_util::{
    sync::{CancellationToken, WaitForCancellationFutureOwned},
    task::TaskTracker,
};
use tracing::Instrument;

use crate::process::{Process, Running};

#[derive(Clone)]
pub struct Tasks {
    token: CancellationToken,
    tracker: TaskTracker,
    /// Ends those who did not end by themselves.
    abort: CancellationToken,
    failed: tokio::sync::watch::Sender<Option<Failure>>,
    /// In a simulation: what these tasks are frozen and killed with.
    process: Option<Process>,
}

/// A task that ended by panicking.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("task {name} failed: {message}")]
pub struct Failure {
    pub name: &'static str,
    pub message: String,
}

impl Default for Tasks {
    fn default() -> Self {
        Self::new()
    }
}

impl Tasks {
    pub fn new() -> Self {
        Self::with_token(CancellationToken::new())
    }

    fn with_token(token: CancellationToken) -> Self {
        Self {
            token,
            tracker: TaskTracker::new(),
            abort: CancellationToken::new(),
            failed: tokio::sync::watch::Sender::new(None),
            process: None,
        }
    }

    /// A scope whose tasks, and those of every scope inside it, belong to a simulated process.
    pub fn of(process: &Process) -> Self {
        Self { process: Some(process.clone()), ..Self::new() }
    }

    /// A scope inside this one: it ends with this one, or earlier by itself. Failures in it are known here too.
    pub fn child(&self) -> Self {
        let (failed, process) = (self.failed.clone(), self.process.clone());
        Self { failed, process, ..Self::with_token(self.token.child_token()) }
    }

    /// Cancelled when the scope ends.
    pub fn token(&self) -> &CancellationToken {
        &self.token
    }

    pub fn is_stopping(&self) -> bool {
        self.token.is_cancelled()
    }

    /// Starts a task of this scope. Its future should end soon after the scope's token is cancelled.
    #[expect(clippy::disallowed_methods, reason = "this is the one door")]
    pub fn spawn<F>(&self, name: &'static str, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let task = Task { name, failed: self.failed.clone(), aborted: self.abort.clone().cancelled_owned(), future };
        let future = self.tracker.track_future(task).instrument(tracing::debug_span!("task", name));
        match &self.process {
            None => drop(tokio::spawn(future)),
            Some(process) => {
                let task = tokio::spawn(Running { process: process.clone(), future: Box::pin(future) });
                process.track(task.abort_handle());
            }
        }
    }

    /// Starts a task that is dropped at its next await when the scope ends.
    pub fn spawn_droppable<F>(&self, name: &'static str, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let token = self.token.clone();
        self.spawn(name, async move {
            tokio::select! {
                biased;
                () = token.cancelled() => {}
                () = future => {}
            }
        });
    }

    /// Resolves when a task of this scope (or of one inside it) has panicked.
    pub async fn failure(&self) -> Failure {
        let mut failed = self.failed.subscribe();
        loop {
            if let Some(failure) = failed.borrow_and_update().clone() {
                return failure;
            }
            if failed.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Ends the scope without waiting.
    pub fn cancel(&self) {
        self.token.cancel();
    }

    /// Ends the scope: cancels, waits up to `grace` for the tasks, then aborts the rest. Says how many were aborted.
    pub async fn end(&self, grace: Duration) -> usize {
        self.token.cancel();
        self.tracker.close();
        if tokio::time::timeout(grace, self.tracker.wait()).await.is_ok() {
            return 0;
        }
        let left = self.tracker.len();
        self.abort.cancel();
        self.tracker.wait().await;
        left
    }
}

pin_project! {
    /// One task. It is its own witness: a handle that waits for it would be a second task, and a list of handles would
    /// keep the memory of those that ended.
    struct Task<F> {
        name: &'static str,
        failed: tokio::sync::watch::Sender<Option<Failure>>,
        #[pin]
        aborted: WaitForCancellationFutureOwned,
        #[pin]
        future: F,
    }
}

impl<F: Future<Output = ()>> Future for Task<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut this = self.project();
        if this.aborted.poll(cx).is_ready() {
            return Poll::Ready(());
        }
        // Nobody polls it again after a panic, so nobody sees what it left half done.
        match catch_unwind(AssertUnwindSafe(|| this.future.as_mut().poll(cx))) {
            Ok(polled) => polled,
            Err(panic) => {
                let (name, message) = (*this.name, panic_text(panic));
                tracing::error!(task = name, message, "task panicked");
                this.failed.send_replace(Some(Failure { name, message }));
                Poll::Ready(())
            }
        }
    }
}

fn panic_text(panic: Box<dyn std::any::Any + Send>) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "panic without a message".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn ending_a_scope_waits_for_the_willing_and_aborts_the_rest() {
        let tasks = Tasks::new();
        let token = tasks.token().clone();
        tasks.spawn("willing", async move { token.cancelled().await });
        tasks.spawn("stubborn", std::future::pending());
        tasks.spawn_droppable("droppable", std::future::pending());
        assert_eq!(tasks.end(Duration::from_secs(1)).await, 1);
    }

    #[tokio::test]
    async fn a_panic_is_told_to_the_outer_scope() {
        let outer = Tasks::new();
        let inner = outer.child();
        inner.spawn("doomed", async { panic!("no luck") });
        assert_eq!(outer.failure().await, Failure { name: "doomed", message: "no luck".into() });
    }

    #[tokio::test]
    async fn an_outer_scope_ends_the_inner_one() {
        let outer = Tasks::new();
        let inner = outer.child();
        outer.cancel();
        assert!(inner.is_stopping());
    }
}
