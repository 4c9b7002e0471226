//! Is this store safe to lead on? Asked at every start, before anything else is believed.
//!
//! Leader election and every record rest on conditional writes. A store that ignores a condition looks fine until two
//! servers meet; so each condition is tried once, on a throw-away object, and a store that fails is refused by name.
//! A store that cannot be reached, or does not let us in, is another matter: that is retried.

use nstance_core::{
    ids::{ServerId, Shard},
    ports::{
        clock::Entropy,
        objects::{Condition, ETag, ObjectStore, StoreError, StoreFault},
    },
};
use nstance_rt::entropy;

use crate::records::probe_key;

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum QualifyError {
    /// The store broke a rule: the process ends.
    #[error(
        "object store {store} is not safe: {finding} (step {step}), leader election would be unsound; upgrade the store \
         or use another; nothing was changed"
    )]
    Unsafe { store: String, step: u8, finding: &'static str },
    /// It could not be asked: try again, and show why.
    #[error("object store {store} could not be checked (step {step})")]
    Unreachable {
        store: String,
        step: u8,
        #[source]
        source: StoreError,
    },
}

impl QualifyError {
    pub fn is_unsafe(&self) -> bool {
        matches!(self, Self::Unsafe { .. })
    }

    /// How far it came.
    pub fn step(&self) -> u8 {
        match self {
            Self::Unsafe { step, .. } | Self::Unreachable { step, .. } => *step,
        }
    }
}

/// What each step asks of a store, in their order; the first is step 1.
pub const STEPS: [&str; 8] = [
    "write",
    "create-refuses-existing",
    "update",
    "update-refuses-wrong-etag",
    "update-refuses-missing",
    "read",
    "list",
    "delete",
];

/// Walks the eight steps. The probe object is removed again, whatever they show.
pub async fn qualify(
    store: &dyn ObjectStore,
    shard: &Shard,
    server: &ServerId,
    entropy: &dyn Entropy,
) -> Result<(), QualifyError> {
    qualify_at(store, |random| probe_key(shard, server, random), entropy).await
}

/// The same on keys of the caller's choice, each made of some random hex digits.
pub async fn qualify_at(
    store: &dyn ObjectStore,
    key: impl Fn(&str) -> String,
    entropy: &dyn Entropy,
) -> Result<(), QualifyError> {
    let (key, missing) = (key(&entropy::hex(entropy, 8)), key(&entropy::hex(entropy, 8)));
    let walked = Walk { store, key: &key, missing: &missing }.steps().await;
    if walked.is_err() {
        // Best effort: a probe left behind harms nobody, and the finding matters more.
        for key in [&key, &missing] {
            let _ = store.delete(key).await;
        }
    }
    walked
}

/// Writers that race, and how often they do.
const RACERS: u8 = 4;
const RACES: usize = 3;

/// Step 9: of writers that race for a key, to create or to update it, exactly one wins, and what it wrote is there.
/// Two servers meet at a start, so this is asked by people who look at a store, not by servers.
pub async fn race(
    store: &dyn ObjectStore,
    key: impl Fn(&str) -> String,
    entropy: &dyn Entropy,
) -> Result<(), QualifyError> {
    for _ in 0..RACES {
        let key = key(&entropy::hex(entropy, 8));
        let walk = Walk { store, key: &key, missing: &key };
        let raced = async {
            let first = walk.race("a", || Condition::Create).await?;
            walk.race("b", || Condition::Match(first.clone())).await
        };
        let raced = raced.await.map(drop);
        let removed = store.delete(&key).await;
        raced?;
        removed.map_err(|error| walk.unreachable(9, error))?;
    }
    Ok(())
}

/// Step 10: whoever repeats a create because its answer was lost finds what it wrote, and so knows that it was its own.
pub async fn recognise(
    store: &dyn ObjectStore,
    key: impl Fn(&str) -> String,
    entropy: &dyn Entropy,
) -> Result<(), QualifyError> {
    let key = key(&entropy::hex(entropy, 8));
    let walk = Walk { store, key: &key, missing: &key };
    let asked = async {
        let mine = entropy::hex(entropy, 16);
        if walk.put(10, &key, &mine, Condition::Create).await?.is_none() {
            return Err(walk.refused(10, &mine, "creation of a new key was refused").await);
        }
        if walk.put(10, &key, &mine, Condition::Create).await?.is_some() {
            return Err(walk.broken(10, "a repeated creation was accepted"));
        }
        match store.get(&key).await {
            Ok(there) if there.body == mine.as_bytes() => Ok(()),
            Ok(_) => Err(walk.broken(10, "a refused repetition cannot be told from somebody else's write")),
            Err(error) => Err(walk.unreachable(10, error)),
        }
    };
    let asked = asked.await;
    let _ = store.delete(&key).await;
    asked
}

struct Walk<'a> {
    store: &'a dyn ObjectStore,
    key: &'a str,
    missing: &'a str,
}

impl Walk<'_> {
    async fn steps(&self) -> Result<(), QualifyError> {
        let first = self.put(1, self.key, "one", Condition::Create).await?;
        let Some(first) = first else {
            return Err(self.refused(1, "one", "creation of a new key was refused").await);
        };

        if self.put(2, self.key, "two", Condition::Create).await?.is_some() {
            return Err(self.broken(2, "creation over an existing key with If-None-Match was accepted"));
        }

        let second = self.put(3, self.key, "three", Condition::Match(first.clone())).await?;
        let Some(second) = second else {
            return Err(self.refused(3, "three", "update with the right ETag was refused").await);
        };
        if second == first {
            return Err(self.broken(3, "two contents of a key have the same ETag"));
        }

        if self.put(4, self.key, "four", Condition::Match(first)).await?.is_some() {
            return Err(self.broken(4, "update with an old ETag and If-Match was accepted"));
        }

        if self.put(5, self.missing, "five", Condition::Match(second.clone())).await?.is_some() {
            return Err(self.broken(5, "update of a missing key with If-Match was accepted"));
        }

        match self.store.get(self.key).await {
            Ok(object) if object.body == b"three" && object.etag == second => {}
            Ok(_) => return Err(self.broken(6, "a read did not show the last write and its ETag")),
            Err(error) if error.is_not_found() => return Err(self.broken(6, "a written key reads as missing")),
            Err(error) => return Err(self.unreachable(6, error)),
        }

        let listed = self.store.list(self.key).await.map_err(|error| self.unreachable(7, error))?;
        if !listed.iter().any(|it| it.key == self.key && it.etag == second) {
            return Err(self.broken(7, "a list did not show the last write and its ETag"));
        }

        self.store.delete(self.key).await.map_err(|error| self.unreachable(8, error))?;
        match self.store.get(self.key).await {
            Err(error) if error.is_not_found() => Ok(()),
            Ok(_) => Err(self.broken(8, "a deleted key can still be read")),
            Err(error) => Err(self.unreachable(8, error)),
        }
    }

    /// `None` if the condition was refused.
    async fn put(&self, step: u8, key: &str, body: &str, condition: Condition) -> Result<Option<ETag>, QualifyError> {
        match self.store.put(key, body.as_bytes().to_vec(), condition).await {
            Ok(etag) => Ok(Some(etag)),
            Err(error) if error.fault == StoreFault::Precondition => Ok(None),
            // An unclear answer spoils the probe; the next walk takes another key.
            Err(error) => Err(self.unreachable(step, error)),
        }
    }

    async fn race(&self, name: &str, condition: impl Fn() -> Condition) -> Result<ETag, QualifyError> {
        let racers = (0..RACERS).map(|number| {
            let (body, condition) = (format!("{name}{number}"), condition());
            async move { (self.put(9, self.key, &body, condition).await, body) }
        });
        let mut winners = Vec::new();
        for (put, body) in futures::future::join_all(racers).await {
            winners.extend(put?.map(|etag| (etag, body)));
        }
        let there = self.store.get(self.key).await.map_err(|error| self.unreachable(9, error))?;
        match winners.as_slice() {
            [] => Err(self.broken(9, "of writers that race for a key none wins")),
            [(etag, body)] if there.body == body.as_bytes() && there.etag == *etag => Ok(there.etag),
            [_] => Err(self.broken(9, "of writers that race for a key one wins, and another's write is there")),
            _ => Err(self.broken(9, "of writers that race for a key several win")),
        }
    }

    /// A write that should have been taken was refused. If it is there all the same, the refusal was of a repetition on
    /// the way (the first try's answer was lost): that spoils the probe and proves nothing.
    async fn refused(&self, step: u8, body: &str, finding: &'static str) -> QualifyError {
        match self.store.get(self.key).await {
            Ok(object) if object.body == body.as_bytes() => {
                let message = "the write landed and its answer was lost";
                self.unreachable(step, StoreError::new("put", self.key, StoreFault::Ambiguous, message))
            }
            Err(error) if !error.is_not_found() => self.unreachable(step, error),
            _ => self.broken(step, finding),
        }
    }

    fn broken(&self, step: u8, finding: &'static str) -> QualifyError {
        QualifyError::Unsafe { store: self.store.describe(), step, finding }
    }

    fn unreachable(&self, step: u8, source: StoreError) -> QualifyError {
        QualifyError::Unreachable { store: self.store.describe(), step, source }
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use nstance_core::ports::objects::{Listed, Object, Unavailable};
    use nstance_rt::entropy::SeededEntropy;

    use super::*;
    use crate::memory::MemoryStore;

    /// One way in which a store may not keep its word.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Lie {
        None,
        RefusesCreate,
        CreateOverwrites,
        RefusesMatch,
        SameTag,
        OldTagOverwrites,
        MatchMakesMissing,
        StaleRead,
        HidesWrite,
        PartialList,
        DeleteDoesNothing,
        Unreachable,
        Denied,
    }

    struct Liar {
        inner: MemoryStore,
        lie: Lie,
    }

    impl Liar {
        async fn force(&self, key: &str, body: Vec<u8>) -> Result<ETag, StoreError> {
            match self.inner.get(key).await {
                Ok(object) => self.inner.put(key, body, Condition::Match(object.etag)).await,
                Err(_) => self.inner.put(key, body, Condition::Create).await,
            }
        }
    }

    #[async_trait]
    impl ObjectStore for Liar {
        async fn get(&self, key: &str) -> Result<Object, StoreError> {
            match self.lie {
                Lie::StaleRead => Ok(Object { body: b"one".to_vec(), ..self.inner.get(key).await? }),
                Lie::HidesWrite => Err(crate::memory::not_found("get", key)),
                _ => self.inner.get(key).await,
            }
        }

        async fn get_if_changed(&self, key: &str, etag: &ETag) -> Result<Option<Object>, StoreError> {
            self.inner.get_if_changed(key, etag).await
        }

        async fn put(&self, key: &str, body: Vec<u8>, condition: Condition) -> Result<ETag, StoreError> {
            let exists = self.inner.get(key).await.is_ok();
            let refused = || Err(crate::memory::precondition("put", key, "no"));
            match (self.lie, &condition) {
                (Lie::Unreachable, _) => {
                    Err(StoreError::new("put", key, StoreFault::Unavailable(Unavailable::Network), "no route"))
                }
                (Lie::Denied, _) => {
                    Err(StoreError::new("put", key, StoreFault::Unavailable(Unavailable::Denied), "forbidden"))
                }
                (Lie::RefusesCreate, Condition::Create) => refused(),
                (Lie::RefusesMatch, Condition::Match(_)) => refused(),
                (Lie::CreateOverwrites, Condition::Create) => self.force(key, body).await,
                (Lie::OldTagOverwrites, Condition::Match(_)) if exists => self.force(key, body).await,
                (Lie::MatchMakesMissing, Condition::Match(_)) if !exists => self.force(key, body).await,
                (Lie::SameTag, Condition::Match(etag)) => {
                    let same = etag.clone();
                    self.inner.put(key, body, condition).await.map(|_| same)
                }
                _ => self.inner.put(key, body, condition).await,
            }
        }

        async fn delete(&self, key: &str) -> Result<(), StoreError> {
            if self.lie == Lie::DeleteDoesNothing { Ok(()) } else { self.inner.delete(key).await }
        }

        async fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
            if self.lie == Lie::PartialList { Ok(vec![]) } else { self.inner.list(prefix).await }
        }

        fn describe(&self) -> String {
            "s3://b at http://127.0.0.1:1".to_owned()
        }
    }

    async fn ask(lie: Lie) -> (Result<(), QualifyError>, usize) {
        let store = Liar { inner: MemoryStore::new(), lie };
        let answer = qualify(&store, &"a".parse().unwrap(), &"s1".parse().unwrap(), &SeededEntropy::new(7)).await;
        (answer, store.inner.list("").await.unwrap().len())
    }

    #[tokio::test]
    async fn an_honest_store_passes_and_keeps_no_probe() {
        assert_eq!(ask(Lie::None).await, (Ok(()), 0));
    }

    #[tokio::test]
    async fn a_store_that_updates_missing_keys_is_refused() {
        let (answer, left) = ask(Lie::MatchMakesMissing).await;
        assert_eq!(
            answer.unwrap_err().to_string(),
            "object store s3://b at http://127.0.0.1:1 is not safe: update of a missing key with If-Match was accepted \
             (step 5), leader election would be unsound; upgrade the store or use another; nothing was changed"
        );
        assert_eq!(left, 0);
    }

    #[tokio::test]
    async fn every_other_lie_is_found_at_its_step() {
        for (lie, step) in [
            (Lie::RefusesCreate, 1),
            (Lie::CreateOverwrites, 2),
            (Lie::RefusesMatch, 3),
            (Lie::SameTag, 3),
            (Lie::OldTagOverwrites, 4),
            (Lie::StaleRead, 6),
            (Lie::HidesWrite, 6),
            (Lie::PartialList, 7),
            (Lie::DeleteDoesNothing, 8),
        ] {
            match ask(lie).await.0 {
                Err(QualifyError::Unsafe { step: found, .. }) => assert_eq!(found, step, "{lie:?}"),
                other => panic!("{lie:?} was not found: {other:?}"),
            }
        }
    }

    #[tokio::test]
    async fn racing_writers_have_one_winner_in_an_honest_store_only() {
        let entropy = SeededEntropy::new(7);
        let key = |random: &str| format!("cluster/.probe/{random}");
        for (lie, found) in [
            (Lie::None, None),
            (Lie::CreateOverwrites, Some("several win")),
            (Lie::OldTagOverwrites, Some("several win")),
            (Lie::RefusesMatch, Some("none wins")),
        ] {
            let store = Liar { inner: MemoryStore::new(), lie };
            let told = race(&store, key, &entropy).await.err().map(|error| error.to_string());
            assert_eq!(told.is_some(), found.is_some(), "{lie:?}: {told:?}");
            assert!(found.is_none_or(|found| told.unwrap().contains(found)), "{lie:?}");
            assert_eq!(store.inner.list("").await.unwrap(), [], "{lie:?} leaves something");
        }
    }

    #[tokio::test]
    async fn own_write_is_recognised_when_it_is_repeated() {
        let entropy = SeededEntropy::new(7);
        let key = |random: &str| format!("cluster/.probe/{random}");
        for (lie, fine) in [(Lie::None, true), (Lie::StaleRead, false), (Lie::CreateOverwrites, false)] {
            let store = Liar { inner: MemoryStore::new(), lie };
            assert_eq!(recognise(&store, key, &entropy).await.is_ok(), fine, "{lie:?}");
            assert_eq!(store.inner.list("").await.unwrap(), [], "{lie:?} leaves something");
        }
    }

    #[tokio::test]
    async fn a_refusal_of_a_write_that_landed_is_not_unsafe() {
        use crate::faulty::{Fault, FaultPlan, FaultyStore};
        // The puts of the walk: create, create again, update, ...
        for faults in [vec![Fault::PreconditionAfter], vec![Fault::None, Fault::None, Fault::PreconditionAfter]] {
            let entropy = std::sync::Arc::new(SeededEntropy::new(7));
            let inner = std::sync::Arc::new(MemoryStore::new());
            let store = FaultyStore::new(inner, entropy.clone(), FaultPlan::default());
            store.script_puts(faults);
            let ask =
                || async { qualify(&store, &"a".parse().unwrap(), &"s1".parse().unwrap(), entropy.as_ref()).await };
            assert!(matches!(ask().await, Err(QualifyError::Unreachable { .. })));
            assert_eq!(ask().await, Ok(()));
        }
    }

    #[tokio::test]
    async fn unreachable_is_not_unsafe() {
        for lie in [Lie::Unreachable, Lie::Denied] {
            let error = ask(lie).await.0.unwrap_err();
            assert!(!error.is_unsafe(), "{lie:?}");
            assert!(std::error::Error::source(&error).is_some(), "the cause is shown");
        }
    }
}
