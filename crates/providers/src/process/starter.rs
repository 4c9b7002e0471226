//! The one thread that starts agents.
//!
//! Starting a process holds its caller until the child runs its own program, and no process is busier than one that
//! just began. Fifty of them started side by side, as equals of the server, take the processors away from it while it
//! still has to ask for the other forty-nine. No real cloud does that: its machines run elsewhere. So here they begin
//! one after the other, when no more are asked for in that moment, and rank below whoever asked for them: on Linux a
//! priority belongs to a thread, and children inherit that of the thread which started them. Where sessions share the
//! processors first (autogroups), the agent takes its rank along into the session it makes.

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc::{SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::Duration,
};

use nstance_core::ports::provider::{ErrorClass, ProviderError};
use tokio::{runtime::Handle, sync::oneshot};

use super::held;

/// How far below its server an agent ranks. Not far: on a machine that is busy with other things agents still get a
/// third of an equal's share, so that nobody takes them for dead.
const BELOW: i32 = 5;

/// A start waits until nobody asked for another one for this long …
const QUIET: Duration = Duration::from_millis(5);
/// … but no more often than this: no cloud is quicker.
const MAX_LOOKS: u32 = 5;

/// As many as a config may allow to be under way at once.
const MAX_WAITING: usize = 1000;

type Start = Box<dyn FnOnce() + Send>;

/// The way to the thread, which begins with the first start and ends with the last owner of this.
pub(super) struct Starter {
    queue: Mutex<Option<SyncSender<Start>>>,
    n_asked: Arc<AtomicU64>,
    below: i32,
}

impl Default for Starter {
    fn default() -> Self {
        Self { queue: Mutex::default(), n_asked: Arc::default(), below: BELOW }
    }
}

impl Starter {
    /// What it starts ranks like the server. A tmux server that begins here is the user's own from then on.
    pub(super) fn with_equal_rank() -> Self {
        Self { below: 0, ..Self::default() }
    }

    /// Runs `start` in our runtime when those before it are done. Once accepted it runs even if the caller goes away,
    /// so nothing is ever left half-started by a caller that was cancelled.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        start: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ProviderError> {
        let failed = |class, message: String| ProviderError::new("create", class, message);
        let (done, answer) = oneshot::channel();
        let start: Start = Box::new(move || {
            let _ = done.send(start());
        });
        let queue = self
            .queue()
            .map_err(|error| failed(ErrorClass::Capacity, format!("start the thread that starts agents: {error}")))?;
        self.n_asked.fetch_add(1, Ordering::Relaxed);
        queue.try_send(start).map_err(|error| match error {
            TrySendError::Full(_) => failed(ErrorClass::Throttled, format!("{MAX_WAITING} starts wait already")),
            TrySendError::Disconnected(_) => self.ended(ErrorClass::Unavailable),
        })?;
        // Whether the start had begun is not known then.
        answer.await.map_err(|_| self.ended(ErrorClass::Ambiguous))
    }

    fn queue(&self) -> io::Result<SyncSender<Start>> {
        let mut queue = held(&self.queue);
        match &*queue {
            Some(queue) => Ok(queue.clone()),
            None => Ok(queue.insert(begin(Handle::current(), self.n_asked.clone(), self.below)?).clone()),
        }
    }

    /// A start panicked and took the thread along; the next one gets a new thread.
    fn ended(&self, class: ErrorClass) -> ProviderError {
        *held(&self.queue) = None;
        ProviderError::new("create", class, "the thread that starts agents has ended")
    }
}

fn begin(runtime: Handle, n_asked: Arc<AtomicU64>, below: i32) -> io::Result<SyncSender<Start>> {
    let (queue, starts) = sync_channel::<Start>(MAX_WAITING);
    thread::Builder::new().name("vm-starter".to_owned()).spawn(move || {
        let _inside = runtime.enter();
        // Where it may not be changed, agents start all the same.
        if let Err(error) = rustix::process::nice(below) {
            tracing::debug!(%error, "agents rank like the server");
        }
        let mut n_known = 0;
        for start in starts {
            await_quiet(&n_asked, &mut n_known, rest);
            start();
        }
    })?;
    Ok(queue)
}

/// Waits as long as more are asked for than are known of.
fn await_quiet(n_asked: &AtomicU64, n_known: &mut u64, mut wait: impl FnMut()) {
    for _ in 0..MAX_LOOKS {
        let n = n_asked.load(Ordering::Relaxed);
        if n == *n_known {
            return;
        }
        *n_known = n;
        wait();
    }
}

#[expect(clippy::disallowed_methods, reason = "it waits for nothing to come, on a thread without a runtime's timers")]
fn rest() {
    thread::sleep(QUIET);
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use futures::future::join_all;

    use super::*;

    fn rank() -> i32 {
        rustix::process::getpriority_process(None).unwrap()
    }

    #[tokio::test]
    async fn starts_rank_below_their_server_and_leave_its_own_rank_alone() {
        let before = rank();
        let starter = Starter::default();
        assert_eq!(starter.run(rank).await.unwrap(), (before + BELOW).min(19));
        assert_eq!(Starter::with_equal_rank().run(rank).await.unwrap(), before);
        assert_eq!(rank(), before);
    }

    #[tokio::test]
    async fn a_start_that_takes_long_holds_back_the_next_start_and_nobody_else() {
        let starter = Arc::new(Starter::default());
        let (let_go, wait) = mpsc::channel::<()>();
        let (log, seen) = mpsc::channel();
        let slow = {
            let log = log.clone();
            starter.run(move || {
                wait.recv().unwrap();
                log.send("slow").unwrap();
            })
        };
        let next = starter.run(move || log.send("next").unwrap());
        // This runtime has one thread: that it gets here at all shows that it is not the one which waits.
        let release = async {
            assert!(seen.try_recv().is_err());
            let_go.send(()).unwrap();
        };
        let (slow, next, ()) = tokio::join!(slow, next, release);
        slow.and(next).unwrap();
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), ["slow", "next"]);
    }

    #[test]
    fn a_start_waits_while_more_are_asked_for_but_not_for_ever() {
        let (n_asked, mut n_known) = (AtomicU64::new(1), 0);
        let mut waits = |n_more: u32| {
            let mut n_waits = 0;
            await_quiet(&n_asked, &mut n_known, || {
                n_asked.fetch_add(u64::from(n_waits < n_more), Ordering::Relaxed);
                n_waits += 1;
            });
            n_waits
        };
        assert_eq!(waits(2), 3, "two more came while it waited, none in the last moment");
        assert_eq!(waits(0), 0, "no more have come since the start before");
        n_asked.fetch_add(1, Ordering::Relaxed);
        assert_eq!(waits(u32::MAX), MAX_LOOKS);
    }

    #[tokio::test]
    async fn a_start_whose_caller_went_away_still_runs_to_its_end() {
        let starter = Starter::default();
        let (log, seen) = mpsc::channel();
        let mut gone = Box::pin(starter.run(move || log.send(()).unwrap()));
        assert!(futures::poll!(&mut gone).is_pending());
        drop(gone);
        starter.run(|| ()).await.unwrap();
        assert_eq!(seen.try_recv(), Ok(()));
    }

    #[tokio::test]
    async fn too_many_starts_are_refused_and_a_start_that_panics_spoils_only_itself() {
        let starter = Starter::default();
        let (let_go, wait) = mpsc::channel::<()>();
        let first = starter.run(move || wait.recv().is_ok());
        let rest = join_all((0..MAX_WAITING + 1).map(|_| starter.run(|| ())));
        let release = async { let_go.send(()).unwrap() };
        let (first, rest, ()) = tokio::join!(first, rest, release);
        assert!(first.unwrap());
        // One more fits if the thread has taken the first one out already.
        let refused: Vec<_> = rest.into_iter().filter_map(Result::err).collect();
        assert!((1..=2).contains(&refused.len()), "{}", refused.len());
        assert!(refused.iter().all(|error| error.class == ErrorClass::Throttled));

        let lost = starter.run(|| -> () { panic!("on purpose") }).await.unwrap_err();
        assert_eq!(lost.class, ErrorClass::Ambiguous);
        assert_eq!(starter.run(|| 7).await.unwrap(), 7);
    }
}
