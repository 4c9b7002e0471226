//! What objects wish of one shard, and where each wish stands: the latest per object and topic. Pure: time is an argument.

use std::{collections::BTreeMap, time::Duration};

use nstance_client::ShardError;
use nstance_core::ports::clock::Entropy;
use nstance_rt::backoff::Backoff;
use tokio::time::Instant;
use tonic::Code;

use crate::ports::{Answer, Progress, Wish, WishKey};

const FIRST_WAIT: Duration = Duration::from_millis(100);
const MAX_WAIT: Duration = Duration::from_secs(10);
/// A wish that the shard refused for good is tried again after this, for the shard's config may have changed.
const REFUSED_WAIT: Duration = Duration::from_secs(300);
/// While the shard is down a wish is tried again after this, besides when the shard comes back.
const PARKED_WAIT: Duration = Duration::from_secs(30);
/// An answer that describes a moment is asked for again when it is older than this.
const MAX_AGE: Duration = Duration::from_secs(30);

/// A wish that is due to be sent.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    pub key: WishKey,
    /// Tells this wish from later ones of the same object.
    pub number: u64,
    pub wish: Wish,
}

enum Outcome {
    None,
    Answered(Answer, Instant),
    Refused(ShardError),
    Failed(ShardError),
}

struct Entry {
    wish: Wish,
    number: u64,
    outcome: Outcome,
    /// When it is sent (again).
    due: Option<Instant>,
    in_flight: bool,
    backoff: Backoff,
}

#[derive(Default)]
pub struct Wishes {
    entries: BTreeMap<WishKey, Entry>,
    last_number: u64,
    /// Why the shard is down.
    down: Option<String>,
}

impl Wishes {
    /// Takes the latest wish of an object. Answers where it stands, and whether there is something new to send.
    pub fn ask(&mut self, key: &WishKey, wish: Wish, now: Instant) -> (Progress, bool) {
        let due = self.due(now);
        let entry = match self.entries.get_mut(key) {
            Some(entry) if entry.wish == wish => {
                let is_old = |at: &Instant| !answer_lasts(&wish) && MAX_AGE <= now.duration_since(*at);
                if !entry.in_flight && matches!(&entry.outcome, Outcome::Answered(_, at) if is_old(at)) {
                    (entry.outcome, entry.due) = (Outcome::None, Some(due));
                    return (self.progress(key), true);
                }
                return (self.progress(key), false);
            }
            Some(entry) => entry,
            None => self.entries.entry(key.clone()).or_insert_with(|| Entry {
                wish: wish.clone(),
                number: 0,
                outcome: Outcome::None,
                due: None,
                in_flight: false,
                backoff: Backoff::new(FIRST_WAIT, MAX_WAIT),
            }),
        };
        self.last_number += 1;
        (entry.wish, entry.number, entry.outcome, entry.due) = (wish, self.last_number, Outcome::None, Some(due));
        entry.backoff.reset();
        (self.progress(key), true)
    }

    pub fn withdraw(&mut self, key: &WishKey) {
        self.entries.remove(key);
    }

    fn due(&self, now: Instant) -> Instant {
        if self.down.is_some() { now + PARKED_WAIT } else { now }
    }

    fn progress(&self, key: &WishKey) -> Progress {
        let Some(entry) = self.entries.get(key) else { return Progress::Waiting };
        match (&entry.outcome, &self.down) {
            (Outcome::Answered(answer, _), _) => Progress::Answered(answer.clone()),
            (Outcome::Refused(error), _) => Progress::Refused(error.clone()),
            (_, Some(why)) => Progress::Down(why.clone()),
            (Outcome::Failed(error), None) => Progress::Retrying(error.clone()),
            (Outcome::None, None) => Progress::Waiting,
        }
    }

    /// A wish that is due and whose object has no call under way, the one that waited longest.
    pub fn take_due(&mut self, now: Instant) -> Option<Job> {
        let is_due = |entry: &Entry| !entry.in_flight && entry.due.is_some_and(|due| due <= now);
        let (key, entry) = self.entries.iter_mut().filter(|(_, it)| is_due(it)).min_by_key(|(_, it)| it.due)?;
        (entry.in_flight, entry.due) = (true, None);
        Some(Job { key: key.clone(), number: entry.number, wish: entry.wish.clone() })
    }

    /// When the next wish is due.
    pub fn next_due(&self) -> Option<Instant> {
        self.entries.values().filter(|it| !it.in_flight).filter_map(|it| it.due).min()
    }

    /// Takes the answer to a job. Answers whether the object is to be told: not if it wishes something else by now.
    pub fn finish(
        &mut self,
        job: &Job,
        answer: Result<Answer, ShardError>,
        now: Instant,
        entropy: &dyn Entropy,
    ) -> bool {
        let parked = self.down.is_some();
        let Some(entry) = self.entries.get_mut(&job.key) else { return false };
        if entry.number != job.number {
            // Of an earlier wish. Unless it was withdrawn and put down anew meanwhile, the later one waited for this.
            entry.in_flight = false;
            return false;
        }
        entry.in_flight = false;
        match answer {
            Ok(answer) => {
                entry.backoff.reset();
                (entry.outcome, entry.due) = (Outcome::Answered(answer, now), None);
            }
            Err(error) if is_for_good(&error) => {
                (entry.outcome, entry.due) = (Outcome::Refused(error), Some(now + REFUSED_WAIT));
            }
            Err(error) => {
                let wait = if parked { PARKED_WAIT } else { entry.backoff.next(entropy) };
                (entry.outcome, entry.due) = (Outcome::Failed(error), Some(now + wait));
            }
        }
        true
    }

    /// The shard cannot be reached: what is not answered waits for it.
    pub fn go_down(&mut self, why: &str, now: Instant) {
        self.down = Some(why.to_owned());
        for entry in self.unsettled() {
            entry.due = Some(entry.due.map_or(now + PARKED_WAIT, |due| due.max(now + PARKED_WAIT)));
        }
    }

    /// The shard is back: everything that is not answered is sent now.
    pub fn come_back(&mut self, now: Instant) {
        self.down = None;
        for entry in self.unsettled() {
            entry.backoff.reset();
            entry.due = Some(now);
        }
    }

    fn unsettled(&mut self) -> impl Iterator<Item = &mut Entry> {
        let is_open = |it: &&mut Entry| !it.in_flight && matches!(it.outcome, Outcome::None | Outcome::Failed(_));
        self.entries.values_mut().filter(is_open)
    }

    /// The wishes of another shard actor of the same shard, none of them under way.
    pub fn moved(&mut self, now: Instant) -> Self {
        let mut moved = std::mem::take(self);
        for entry in moved.entries.values_mut() {
            if std::mem::take(&mut entry.in_flight) {
                entry.due = Some(entry.due.unwrap_or(now));
            }
        }
        moved
    }
}

/// Whether asking again makes no sense until the wish or the shard's config changes.
fn is_for_good(error: &ShardError) -> bool {
    matches!(error.code, Code::InvalidArgument | Code::NotFound | Code::FailedPrecondition)
}

/// Whether an answer stays true: the shard keeps what it was asked for. A status describes one moment only, and a removal is
/// asked for again as long as somebody still wants it.
fn answer_lasts(wish: &Wish) -> bool {
    match wish {
        Wish::UpsertGroup(_) | Wish::CreateInstance(_) | Wish::AcknowledgeDrained { .. } => true,
        Wish::DeleteGroup { .. }
        | Wish::DeleteInstance { .. }
        | Wish::ReplaceInstance { .. }
        | Wish::InstanceStatus { .. } => false,
    }
}

#[cfg(test)]
mod tests {
    use nstance_rt::entropy::SeededEntropy;

    use super::*;
    use crate::ports::{GroupWish, ObjectRef, kinds};

    fn key(name: &str) -> WishKey {
        WishKey { object: ObjectRef::new(kinds::NSTANCE_SHARD_GROUP, "default", name), topic: "size" }
    }

    fn size(size: i32) -> Wish {
        Wish::UpsertGroup(GroupWish { key: "web".into(), size, ..GroupWish::default() })
    }

    fn error(code: Code) -> ShardError {
        ShardError::new("dev-1", code, "no")
    }

    struct Fixture {
        wishes: Wishes,
        entropy: SeededEntropy,
        now: Instant,
    }

    impl Fixture {
        fn new() -> Self {
            Self { wishes: Wishes::default(), entropy: SeededEntropy::new(1), now: Instant::now() }
        }

        fn ask(&mut self, size_: i32) -> Progress {
            self.wishes.ask(&key("a"), size(size_), self.now).0
        }

        fn take(&mut self) -> Option<Job> {
            self.wishes.take_due(self.now)
        }

        fn finish(&mut self, job: &Job, answer: Result<Answer, ShardError>) -> bool {
            self.wishes.finish(job, answer, self.now, &self.entropy)
        }
    }

    #[tokio::test]
    async fn the_same_wish_is_sent_once_and_its_answer_is_kept() {
        let mut it = Fixture::new();
        assert!(matches!(it.ask(3), Progress::Waiting));
        let job = it.take().unwrap();
        assert_eq!(job.wish, size(3));
        assert!(it.take().is_none() && matches!(it.ask(3), Progress::Waiting));
        assert!(it.finish(&job, Ok(Answer::Done)));
        assert!(matches!(it.ask(3), Progress::Answered(Answer::Done)));
        assert_eq!(it.take(), None);
    }

    #[tokio::test]
    async fn the_latest_wish_wins_and_waits_for_the_call_that_is_under_way() {
        let mut it = Fixture::new();
        it.ask(3);
        let first = it.take().unwrap();
        it.ask(4);
        it.ask(5);
        assert_eq!(it.take(), None, "one call per object at a time");
        assert!(!it.finish(&first, Ok(Answer::Done)), "nobody waits for this answer any more");
        let second = it.take().unwrap();
        assert_eq!(second.wish, size(5));
        assert!(it.finish(&second, Ok(Answer::Done)));
    }

    #[tokio::test]
    async fn a_refusal_is_kept_for_five_minutes_and_ends_with_another_wish() {
        let mut it = Fixture::new();
        it.ask(3);
        let job = it.take().unwrap();
        it.finish(&job, Err(error(Code::InvalidArgument)));
        assert!(matches!(it.ask(3), Progress::Refused(_)));
        it.now += Duration::from_secs(299);
        assert_eq!(it.take(), None);
        it.now += Duration::from_secs(1);
        assert!(it.take().is_some(), "tried again");
        let mut it = Fixture::new();
        it.ask(3);
        let job = it.take().unwrap();
        it.finish(&job, Err(error(Code::NotFound)));
        assert!(matches!(it.ask(4), Progress::Waiting));
        assert_eq!(it.take().unwrap().wish, size(4));
    }

    #[tokio::test]
    async fn other_failures_are_tried_again_after_growing_waits() {
        let mut it = Fixture::new();
        it.ask(3);
        for _ in 0..12 {
            let job = it.take().unwrap();
            it.finish(&job, Err(error(Code::Unavailable)));
            assert!(matches!(it.ask(3), Progress::Retrying(_)));
            let due = it.wishes.next_due().unwrap();
            assert!(due.duration_since(it.now) <= MAX_WAIT);
            it.now = due;
        }
    }

    #[tokio::test]
    async fn while_the_shard_is_down_wishes_wait_and_are_sent_when_it_is_back() {
        let mut it = Fixture::new();
        it.ask(3);
        it.wishes.go_down("refused", it.now);
        assert!(matches!(it.ask(3), Progress::Down(why) if why == "refused"));
        assert!(matches!(it.ask(4), Progress::Down(_)));
        it.now += Duration::from_secs(29);
        assert_eq!(it.take(), None);
        it.wishes.come_back(it.now);
        assert!(matches!(it.ask(4), Progress::Waiting));
        assert_eq!(it.take().unwrap().wish, size(4));
    }

    #[tokio::test]
    async fn the_status_of_an_instance_is_asked_for_again_when_it_is_old() {
        let mut it = Fixture::new();
        let wish = Wish::InstanceStatus { id: "knc1".into() };
        it.wishes.ask(&key("a"), wish.clone(), it.now);
        let job = it.take().unwrap();
        it.finish(&job, Ok(Answer::Done));
        assert!(matches!(it.wishes.ask(&key("a"), wish.clone(), it.now).0, Progress::Answered(_)));
        it.now += MAX_AGE;
        let (progress, is_new) = it.wishes.ask(&key("a"), wish, it.now);
        assert!(is_new && matches!(progress, Progress::Waiting));
        assert!(it.take().is_some());
    }

    #[tokio::test]
    async fn a_withdrawn_wish_is_neither_sent_nor_answered() {
        let mut it = Fixture::new();
        it.ask(3);
        let job = it.take().unwrap();
        it.wishes.withdraw(&key("a"));
        assert!(!it.finish(&job, Ok(Answer::Done)));
        assert!(it.wishes.next_due().is_none());
    }
}
