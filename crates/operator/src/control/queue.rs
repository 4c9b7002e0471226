//! The queue of a controller: which objects to look at, each at most once at a time.
//!
//! A key that is added again while it is queued is one piece of work; one that is added while it is worked on is looked at
//! once more afterwards. What failed comes back after growing waits.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nstance_rt::{backoff::Backoff, entropy::SystemEntropy, tasks::Tasks};
use tokio::{sync::Notify, time::Instant};

const FIRST_WAIT: Duration = Duration::from_millis(200);
const MAX_WAIT: Duration = Duration::from_secs(60);

/// What a reconcile wants after it succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Nothing until something changes.
    Wait,
    /// To look again after this time, or when something changes.
    After(Duration),
}

/// Takes how looks at objects went; it must be quick.
pub trait QueueMetrics: Send + Sync {
    /// An object was looked at by the controller of this name.
    fn reconciled(&self, controller: &'static str, result: Reconciled, took: Duration);
}

/// How a look at an object ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reconciled {
    Ok,
    Error,
}

impl Reconciled {
    pub const ALL: [Self; 2] = [Self::Ok, Self::Error];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Error => "error",
        }
    }
}

/// Measures nothing.
pub struct NoMetrics;

impl NoMetrics {
    pub fn of_queues() -> Arc<dyn QueueMetrics> {
        Arc::new(Self)
    }
}

impl QueueMetrics for NoMetrics {
    fn reconciled(&self, _: &'static str, _: Reconciled, _: Duration) {}
}

pub struct Queue<K> {
    name: &'static str,
    /// How long a key waits for more changes before it is worked on.
    debounce: Duration,
    state: Mutex<State<K>>,
    changed: Notify,
}

struct State<K> {
    /// When each key is due.
    due: BTreeMap<K, Instant>,
    /// The order in which keys became due.
    running: BTreeSet<K>,
    /// Keys that were added while they were worked on.
    again: BTreeMap<K, Instant>,
    failures: BTreeMap<K, Backoff>,
}

impl<K: Ord + Clone + Send + Sync + 'static> Queue<K> {
    pub fn new(name: &'static str, debounce: Duration) -> Arc<Self> {
        let state =
            State { due: BTreeMap::new(), running: BTreeSet::new(), again: BTreeMap::new(), failures: BTreeMap::new() };
        Arc::new(Self { name, debounce, state: Mutex::new(state), changed: Notify::new() })
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    fn state(&self) -> MutexGuard<'_, State<K>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something about this object changed.
    pub fn add(&self, key: K) {
        self.add_after(key, self.debounce);
    }

    /// The object is looked at no later than after this time.
    pub fn add_after(&self, key: K, wait: Duration) {
        let at = Instant::now() + wait;
        {
            let state = &mut *self.state();
            let place = if state.running.contains(&key) { &mut state.again } else { &mut state.due };
            let due = place.entry(key).or_insert(at);
            *due = (*due).min(at);
        }
        self.changed.notify_one();
    }

    /// How many keys wait.
    pub fn len(&self) -> usize {
        let state = self.state();
        state.due.len() + state.again.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes the key that has been due for longest, or tells when the next one will be.
    fn take(&self) -> Result<K, Option<Instant>> {
        let state = &mut *self.state();
        let Some((key, at)) = state.due.iter().min_by_key(|(_, at)| **at).map(|(key, at)| (key.clone(), *at)) else {
            return Err(None);
        };
        if Instant::now() < at {
            return Err(Some(at));
        }
        state.due.remove(&key);
        state.running.insert(key.clone());
        Ok(key)
    }

    /// The next key that is due. It must be given back by [`Self::done`].
    async fn next(&self) -> K {
        loop {
            match self.take() {
                Ok(key) => {
                    // Another worker may have slept on the notice that this one used up.
                    self.changed.notify_one();
                    return key;
                }
                Err(None) => self.changed.notified().await,
                Err(Some(at)) => {
                    tokio::select! {
                        biased;
                        () = self.changed.notified() => {}
                        () = tokio::time::sleep_until(at) => {}
                    }
                }
            }
        }
    }

    fn done(&self, key: &K, outcome: Option<Next>, entropy: &SystemEntropy) {
        {
            let state = &mut *self.state();
            state.running.remove(key);
            let mut at = state.again.remove(key);
            let wait = match outcome {
                Some(next) => {
                    state.failures.remove(key);
                    match next {
                        Next::Wait => None,
                        Next::After(wait) => Some(wait),
                    }
                }
                None => {
                    let backoff =
                        state.failures.entry(key.clone()).or_insert_with(|| Backoff::new(FIRST_WAIT, MAX_WAIT));
                    Some(backoff.next(entropy))
                }
            };
            if let Some(wait) = wait {
                let then = Instant::now() + wait;
                at = Some(at.map_or(then, |at| at.min(then)));
            }
            if let Some(at) = at {
                let due = state.due.entry(key.clone()).or_insert(at);
                *due = (*due).min(at);
            }
        }
        self.changed.notify_one();
    }
}

/// Starts the workers of a controller. `reconcile` is called for one key at most once at a time; its errors are logged here.
pub fn start<K, F, R, E>(
    tasks: &Tasks,
    queue: &Arc<Queue<K>>,
    n_workers: usize,
    metrics: &Arc<dyn QueueMetrics>,
    reconcile: F,
) where
    K: Ord + Clone + Send + Sync + std::fmt::Debug + 'static,
    F: Fn(K) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = Result<Next, E>> + Send + 'static,
    E: std::error::Error + Send + Sync + 'static,
{
    for _ in 0..n_workers {
        let (queue, reconcile, metrics) = (queue.clone(), reconcile.clone(), metrics.clone());
        tasks.spawn_droppable(queue.name(), async move {
            let entropy = SystemEntropy::new();
            loop {
                let key = queue.next().await;
                let started = Instant::now();
                let outcome = reconcile(key.clone()).await;
                let result = if outcome.is_ok() { Reconciled::Ok } else { Reconciled::Error };
                metrics.reconciled(queue.name(), result, started.elapsed());
                let outcome = match outcome {
                    Ok(next) => Some(next),
                    Err(error) => {
                        tracing::warn!(
                            controller = queue.name(),
                            object = ?key,
                            error = %nstance_rt::chain::Chain(&error),
                            "reconcile failed"
                        );
                        None
                    }
                };
                queue.done(&key, outcome, &entropy);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("no")]
    struct No;

    async fn until(what: &str, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(120);
        while !condition() {
            assert!(Instant::now() < deadline, "{what}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn changes_that_come_together_are_one_piece_of_work() {
        let (tasks, queue) = (Tasks::new(), Queue::new("test", Duration::from_millis(50)));
        let n = Arc::new(AtomicUsize::new(0));
        let counted = n.clone();
        start(&tasks, &queue, 2, &NoMetrics::of_queues(), move |_: &str| {
            counted.fetch_add(1, Ordering::SeqCst);
            async { Ok::<_, No>(Next::Wait) }
        });
        for _ in 0..10 {
            queue.add("a");
        }
        until("worked on", || n.load(Ordering::SeqCst) == 1).await;
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(n.load(Ordering::SeqCst), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn an_object_is_never_worked_on_twice_at_a_time_and_a_change_meanwhile_is_not_lost() {
        let (tasks, queue) = (Tasks::new(), Queue::new("test", Duration::ZERO));
        let (running, n) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (r, c) = (running.clone(), n.clone());
        start(&tasks, &queue, 4, &NoMetrics::of_queues(), move |_: &str| {
            let (running, n) = (r.clone(), c.clone());
            async move {
                assert_eq!(running.fetch_add(1, Ordering::SeqCst), 0);
                tokio::time::sleep(Duration::from_secs(1)).await;
                running.fetch_sub(1, Ordering::SeqCst);
                n.fetch_add(1, Ordering::SeqCst);
                Ok::<_, No>(Next::Wait)
            }
        });
        queue.add("a");
        until("started", || running.load(Ordering::SeqCst) == 1).await;
        queue.add("a");
        until("done twice", || n.load(Ordering::SeqCst) == 2).await;
        assert!(queue.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn failed_work_comes_back_and_others_do_not_wait_for_it() {
        let (tasks, queue) = (Tasks::new(), Queue::new("test", Duration::ZERO));
        let (bad, good) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (b, g) = (bad.clone(), good.clone());
        start(&tasks, &queue, 1, &NoMetrics::of_queues(), move |key: &str| {
            let is_bad = key == "bad";
            if is_bad { &b } else { &g }.fetch_add(1, Ordering::SeqCst);
            async move { if is_bad { Err(No) } else { Ok(Next::After(Duration::from_secs(30))) } }
        });
        queue.add("bad");
        queue.add("good");
        until("tried again", || 3 <= bad.load(Ordering::SeqCst)).await;
        until("looked at again after its time", || 2 <= good.load(Ordering::SeqCst)).await;
    }

    /// What was measured, in order.
    #[derive(Default)]
    struct Looks(Mutex<Vec<(&'static str, Reconciled, Duration)>>);

    impl QueueMetrics for Looks {
        fn reconciled(&self, controller: &'static str, result: Reconciled, took: Duration) {
            self.0.lock().unwrap().push((controller, result, took));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn every_look_is_measured_with_its_result_and_time() {
        let (tasks, queue, looks) = (Tasks::new(), Queue::new("test", Duration::ZERO), Arc::new(Looks::default()));
        let metrics: Arc<dyn QueueMetrics> = looks.clone();
        let n = Arc::new(AtomicUsize::new(0));
        start(&tasks, &queue, 1, &metrics, move |_: &str| {
            let is_first = n.fetch_add(1, Ordering::SeqCst) == 0;
            async move {
                tokio::time::sleep(Duration::from_secs(3)).await;
                if is_first { Err(No) } else { Ok(Next::Wait) }
            }
        });
        queue.add("a");
        until("looked at twice", || looks.0.lock().unwrap().len() == 2).await;
        let looks = looks.0.lock().unwrap();
        assert_eq!(
            looks.iter().map(|it| (it.0, it.1)).collect::<Vec<_>>(),
            [("test", Reconciled::Error), ("test", Reconciled::Ok)]
        );
        assert!(looks.iter().all(|it| Duration::from_secs(3) <= it.2 && it.2 < Duration::from_secs(4)));
    }
}
