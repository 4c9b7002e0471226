//! Any store, made worse: slow, forgetful, throttled. Seeded, so that a run can be had again.
//!
//! What it does to a write is what real networks do: lose it on the way (surely not applied, or unclear), lose the answer
//! on the way back (applied, and nobody knows), or answer a retry's 412 to a write that landed. It never lies about what
//! the store says of itself; that is what [`crate::qualify`] is for.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use nstance_core::ports::{
    clock::Entropy,
    objects::{Condition, ETag, Listed, Object, ObjectStore, StoreError, StoreFault, Unavailable},
};
use nstance_rt::entropy::{below, jitter};

/// How often what goes wrong, in calls of a thousand. The default is a flawless store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FaultPlan {
    /// Every call waits a random part of this before it is done, and again before it answers.
    pub max_delay: Duration,
    /// A write never arrives, and the caller cannot know.
    pub lost_before: u16,
    /// A write lands, its answer does not arrive.
    pub lost_after: u16,
    /// A write lands, and its retry below us is refused.
    pub precondition_after: u16,
    /// Any call is refused as too much.
    pub throttled: u16,
    /// A read finds no connection.
    pub failed_reads: u16,
    /// A list breaks off.
    pub failed_lists: u16,
    /// Writes of one key closer together than this are throttled.
    pub write_gap: Duration,
}

/// What happens to one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    LostBefore,
    LostAfter,
    PreconditionAfter,
    Throttled,
    /// Surely not applied.
    Unreachable,
    Denied,
    /// No answer, ever; nothing is applied.
    Hangs,
    /// The write is applied, then no answer, ever.
    HangsAfter,
}

/// How many calls came, faults included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Calls {
    pub get: u64,
    pub get_if_changed: u64,
    pub put: u64,
    pub delete: u64,
    pub list: u64,
}

impl Calls {
    pub fn total(&self) -> u64 {
        self.get + self.get_if_changed + self.put + self.delete + self.list
    }
}

pub struct FaultyStore {
    inner: Arc<dyn ObjectStore>,
    entropy: Arc<dyn Entropy>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    plan: FaultPlan,
    unreachable: bool,
    puts: VecDeque<Fault>,
    gets: VecDeque<Fault>,
    lists: VecDeque<Fault>,
    calls: Calls,
    n_faults: u64,
    last_write: BTreeMap<String, tokio::time::Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    List,
    Write,
}

impl FaultyStore {
    pub fn new(inner: Arc<dyn ObjectStore>, entropy: Arc<dyn Entropy>, plan: FaultPlan) -> Self {
        Self { inner, entropy, state: Mutex::new(State { plan, ..State::default() }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set_plan(&self, plan: FaultPlan) {
        self.state().plan = plan;
    }

    /// Cuts this client off from the store, or joins it again. Others that share the inner store are not touched.
    pub fn set_unreachable(&self, unreachable: bool) {
        self.state().unreachable = unreachable;
    }

    /// The next writes (puts and deletes) meet these, one each, whatever the plan says.
    pub fn script_puts(&self, faults: impl IntoIterator<Item = Fault>) {
        self.state().puts.extend(faults);
    }

    /// The next gets meet these.
    pub fn script_gets(&self, faults: impl IntoIterator<Item = Fault>) {
        self.state().gets.extend(faults);
    }

    /// The next lists meet these.
    pub fn script_lists(&self, faults: impl IntoIterator<Item = Fault>) {
        self.state().lists.extend(faults);
    }

    /// How many calls did not go well.
    pub fn n_faults(&self) -> u64 {
        self.state().n_faults
    }

    pub fn calls(&self) -> Calls {
        self.state().calls
    }

    /// Draws the same number of chances for every call, so that one fault more does not change all that follow.
    fn draw(&self, kind: Kind, key: &str, count: impl FnOnce(&mut Calls)) -> (Fault, [Duration; 2]) {
        let chance = below(&*self.entropy, 1000);
        let mut state = self.state();
        let delays = [(); 2].map(|()| jitter(&*self.entropy, state.plan.max_delay));
        count(&mut state.calls);
        let scripted = match kind {
            Kind::Read => state.gets.pop_front(),
            Kind::List => state.lists.pop_front(),
            Kind::Write => state.puts.pop_front(),
        };
        let plan = state.plan;
        let planned: &[(u16, Fault)] = match kind {
            Kind::Read => &[(plan.throttled, Fault::Throttled), (plan.failed_reads, Fault::Unreachable)],
            Kind::List => &[(plan.throttled, Fault::Throttled), (plan.failed_lists, Fault::Unreachable)],
            Kind::Write => &[
                (plan.throttled, Fault::Throttled),
                (plan.lost_before, Fault::LostBefore),
                (plan.lost_after, Fault::LostAfter),
                (plan.precondition_after, Fault::PreconditionAfter),
            ],
        };
        let mut below = 0;
        let drawn = planned.iter().find(|(share, _)| {
            below += u64::from(*share);
            chance < below
        });
        let mut fault = scripted.or(drawn.map(|(_, fault)| *fault)).unwrap_or(Fault::None);
        if state.unreachable {
            fault = Fault::Unreachable;
        }
        if kind == Kind::Write && fault != Fault::Unreachable && !plan.write_gap.is_zero() {
            let now = tokio::time::Instant::now();
            let too_soon = state.last_write.get(key).is_some_and(|last| now.duration_since(*last) < plan.write_gap);
            if too_soon {
                fault = Fault::Throttled;
            } else {
                state.last_write.insert(key.to_owned(), now);
            }
        }
        state.n_faults += u64::from(fault != Fault::None);
        (fault, delays)
    }

    async fn read<T>(
        &self,
        op: &'static str,
        key: &str,
        (fault, delays): (Fault, [Duration; 2]),
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        wait(delays[0]).await;
        match fault {
            Fault::Hangs | Fault::HangsAfter => std::future::pending().await,
            Fault::Throttled => Err(refused(op, key, Unavailable::Throttled)),
            Fault::Denied => Err(refused(op, key, Unavailable::Denied)),
            Fault::LostBefore | Fault::LostAfter | Fault::Unreachable => Err(refused(op, key, Unavailable::Network)),
            Fault::None | Fault::PreconditionAfter => {
                let done = call.await;
                wait(delays[1]).await;
                done
            }
        }
    }

    async fn write<T>(
        &self,
        op: &'static str,
        key: &str,
        (fault, delays): (Fault, [Duration; 2]),
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        wait(delays[0]).await;
        let unclear = || StoreError::new(op, key, StoreFault::Ambiguous, "the answer was lost");
        match fault {
            Fault::Hangs => std::future::pending().await,
            Fault::Throttled => Err(refused(op, key, Unavailable::Throttled)),
            Fault::Denied => Err(refused(op, key, Unavailable::Denied)),
            Fault::Unreachable => Err(refused(op, key, Unavailable::Network)),
            Fault::LostBefore => Err(unclear()),
            Fault::None => {
                let done = call.await;
                wait(delays[1]).await;
                done
            }
            Fault::LostAfter => {
                let _ = call.await;
                wait(delays[1]).await;
                Err(unclear())
            }
            Fault::HangsAfter => {
                let _ = call.await;
                std::future::pending().await
            }
            Fault::PreconditionAfter => {
                call.await?;
                wait(delays[1]).await;
                Err(StoreError::new(op, key, StoreFault::Precondition, "the retry found another version"))
            }
        }
    }
}

async fn wait(delay: Duration) {
    if !delay.is_zero() {
        tokio::time::sleep(delay).await;
    }
}

fn refused(op: &'static str, key: &str, why: Unavailable) -> StoreError {
    let message = match why {
        Unavailable::Network => "no connection",
        Unavailable::Throttled => "slow down",
        Unavailable::Denied => "forbidden",
        Unavailable::Invalid => "invalid",
    };
    StoreError::new(op, key, StoreFault::Unavailable(why), message)
}

#[async_trait]
impl ObjectStore for FaultyStore {
    async fn get(&self, key: &str) -> Result<Object, StoreError> {
        let fate = self.draw(Kind::Read, key, |calls| calls.get += 1);
        self.read("get", key, fate, self.inner.get(key)).await
    }

    async fn get_if_changed(&self, key: &str, etag: &ETag) -> Result<Option<Object>, StoreError> {
        let fate = self.draw(Kind::Read, key, |calls| calls.get_if_changed += 1);
        self.read("get", key, fate, self.inner.get_if_changed(key, etag)).await
    }

    async fn put(&self, key: &str, body: Vec<u8>, condition: Condition) -> Result<ETag, StoreError> {
        let fate = self.draw(Kind::Write, key, |calls| calls.put += 1);
        self.write("put", key, fate, self.inner.put(key, body, condition)).await
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        let fate = self.draw(Kind::Write, key, |calls| calls.delete += 1);
        let fate = (if fate.0 == Fault::PreconditionAfter { Fault::LostAfter } else { fate.0 }, fate.1);
        self.write("delete", key, fate, self.inner.delete(key)).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        let fate = self.draw(Kind::List, prefix, |calls| calls.list += 1);
        self.read("list", prefix, fate, self.inner.list(prefix)).await
    }

    fn describe(&self) -> String {
        format!("faulty {}", self.inner.describe())
    }
}

#[cfg(test)]
mod tests {
    use nstance_rt::entropy::SeededEntropy;

    use super::*;
    use crate::memory::MemoryStore;

    async fn story(seed: u64) -> Vec<String> {
        let plan = FaultPlan {
            max_delay: Duration::from_millis(20),
            lost_before: 100,
            lost_after: 100,
            precondition_after: 100,
            throttled: 100,
            failed_reads: 100,
            failed_lists: 500,
            write_gap: Duration::ZERO,
        };
        let store = FaultyStore::new(Arc::new(MemoryStore::new()), Arc::new(SeededEntropy::new(seed)), plan);
        let mut story = Vec::new();
        for n in 0..60 {
            let key = format!("k{n}");
            story.push(format!("{:?}", store.put(&key, vec![n], Condition::Create).await));
            story.push(format!("{:?}", store.get(&key).await));
            story.push(format!("{:?}", store.list("k").await.map(|it| it.len())));
        }
        assert_eq!(store.calls().total(), 180);
        story
    }

    #[tokio::test(start_paused = true)]
    async fn one_seed_tells_one_story() {
        let (first, again, other) = (story(1).await, story(1).await, story(2).await);
        assert_eq!(first, again);
        assert_ne!(first, other);
        for word in ["Ambiguous", "Precondition", "Throttled", "Network", "Ok"] {
            assert!(first.iter().any(|it| it.contains(word)), "{word} never happened");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_answer_leaves_the_write_and_a_lost_request_does_not() {
        let store =
            FaultyStore::new(Arc::new(MemoryStore::new()), Arc::new(SeededEntropy::new(1)), FaultPlan::default());
        store.script_puts([Fault::LostBefore, Fault::LostAfter, Fault::None]);
        assert_eq!(store.put("a", vec![1], Condition::Create).await.unwrap_err().fault, StoreFault::Ambiguous);
        assert!(store.get("a").await.unwrap_err().is_not_found());
        assert_eq!(store.put("a", vec![1], Condition::Create).await.unwrap_err().fault, StoreFault::Ambiguous);
        assert_eq!(store.get("a").await.unwrap().body, [1]);
        assert!(store.put("a", vec![2], Condition::Create).await.unwrap_err().is_precondition());
    }

    #[tokio::test(start_paused = true)]
    async fn writes_of_one_key_are_spaced() {
        let plan = FaultPlan { write_gap: Duration::from_secs(1), ..FaultPlan::default() };
        let store = FaultyStore::new(Arc::new(MemoryStore::new()), Arc::new(SeededEntropy::new(1)), plan);
        let etag = store.put("a", vec![1], Condition::Create).await.unwrap();
        store.put("b", vec![1], Condition::Create).await.unwrap();
        let throttled = store.put("a", vec![2], Condition::Match(etag.clone())).await.unwrap_err();
        assert_eq!(throttled.fault, StoreFault::Unavailable(Unavailable::Throttled));
        tokio::time::advance(Duration::from_secs(1)).await;
        store.put("a", vec![2], Condition::Match(etag)).await.unwrap();
    }
}
