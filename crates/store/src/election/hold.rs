//! A candidate and a holder of the lease, as pure machines: told what became of a put, or what a read showed, they say
//! what to do next and until when effects may start. They read no clock and do no I/O.
//!
//! # Until when a holder may act
//!
//! A follower takes over when the version it knows was there for that version's `ttl` on the follower's own clock,
//! counted from the end of a read that showed it. No read can show a version before its put was started. So a version
//! whose put started at `s` with `t` as its ttl is safe to act on before `s + t − margin`, *as long as it is the version
//! in the store*. The version in the store is the one we last knew to have landed, or any one of the puts sent on top of
//! it whose outcome is open; all of those bear the same condition, so at most one of them lands, and none of them after
//! another version is known to be there. Hence the one rule, whatever the mix of ttls:
//!
//! > effects may start before the least of `start + ttl − margin` over the known version and every open put on it.
//!
//! - Ttl unchanged: open puts started later than the known version, so they change nothing.
//! - Lengthening: an open put with the longer ttl is not the least either. Only its landing moves the end.
//! - Shortening: the put may be in force the moment it leaves, so it counts as open *before* it is sent, and it stays
//!   open until some put is known to have landed. A later put with a long ttl does not undo that: either may be there.
//! - A put that is known to have failed (not merely refused, nor unanswered) at its only try never lands, and counts no
//!   more. "It is not there yet" is no such knowledge: it may be under way.

use nstance_core::{
    ids::Epoch,
    ports::objects::{Condition, ETag, StoreError, StoreFault},
    term::Moment,
    time::Mono,
};

use super::Timing;
use crate::retry;

/// One put of the lease, which may take several tries of the same bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Put {
    pub write_id: String,
    /// Of its first try.
    pub start: Moment,
    pub timing: Timing,
    pub epoch: Epoch,
}

impl Put {
    /// Until when effects may start while this put's version is the one in the store.
    pub fn end(&self) -> Mono {
        self.start.mono + self.timing.act_for()
    }
}

/// What one try of a put met.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Answer {
    Landed(ETag),
    /// The condition did not hold. Perhaps because an earlier try landed, also one that was repeated below us.
    Refused,
    /// No answer: it landed, or will, or never does.
    Unclear,
    /// Surely not applied, and a later try may be.
    NotDone,
    /// Surely not applied, and no later try will be.
    Impossible,
}

impl Answer {
    pub fn of(done: &Result<ETag, StoreError>) -> Self {
        match done {
            Ok(etag) => Self::Landed(etag.clone()),
            Err(error) => match error.fault {
                StoreFault::Precondition => Self::Refused,
                StoreFault::Ambiguous => Self::Unclear,
                StoreFault::Unavailable(_) | StoreFault::NotFound if retry::is_passing(error) => Self::NotDone,
                StoreFault::Unavailable(_) | StoreFault::NotFound => Self::Impossible,
            },
        }
    }
}

/// What a read showed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Sight {
    Version {
        etag: ETag,
        write_id: String,
    },
    Nothing,
    /// Written by somebody whose form we do not know, so not by us.
    Foreign,
    /// Nothing was learned.
    Failed,
}

/// What a candidate does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Turn {
    /// The lease is ours, in this version.
    Won(ETag),
    /// Read what is there, now the first time, after a wait if a read just failed.
    ReadBack,
    /// The same bytes again, after a wait: two of them recognise each other.
    PutAgain,
    Lost,
    /// It may be ours by now, but too late to act on it.
    TooLate,
    /// The put surely did not land and there is no reason to insist.
    Failed,
}

/// A candidate's one put, from its first try to its known outcome. It never acts on hope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidacy {
    put: Put,
    condition: Condition,
    /// A try was not answered.
    unclear: bool,
    /// The last try was refused: what is there now was there then.
    refused: bool,
}

impl Candidacy {
    pub fn new(put: Put, condition: Condition) -> Self {
        Self { put, condition, unclear: false, refused: false }
    }

    pub fn put(&self) -> &Put {
        &self.put
    }

    pub fn condition(&self) -> &Condition {
        &self.condition
    }

    /// Whether success would give no time any more.
    pub fn is_late(&self, now: Mono) -> bool {
        self.put.end() <= now
    }

    /// A try ended at `now`.
    pub fn answered(&mut self, answer: &Answer, now: Mono) -> Turn {
        match answer {
            Answer::Landed(etag) => self.won(etag.clone(), now),
            Answer::Refused | Answer::Unclear => {
                self.refused = *answer == Answer::Refused;
                self.unclear |= *answer == Answer::Unclear;
                Turn::ReadBack
            }
            Answer::NotDone if self.unclear => self.unless_late(Turn::PutAgain, now),
            Answer::NotDone | Answer::Impossible => Turn::Failed,
        }
    }

    /// A read that began after the last try ended at `now`.
    pub fn saw(&mut self, sight: &Sight, now: Mono) -> Turn {
        match (sight, &self.condition) {
            (Sight::Version { etag, write_id }, _) if *write_id == self.put.write_id => self.won(etag.clone(), now),
            (Sight::Failed, _) => self.unless_late(Turn::ReadBack, now),
            _ if self.refused => Turn::Lost,
            (Sight::Version { etag, .. }, Condition::Match(before)) if etag == before => {
                self.unless_late(Turn::PutAgain, now)
            }
            (Sight::Nothing, Condition::Create) => self.unless_late(Turn::PutAgain, now),
            (Sight::Version { .. } | Sight::Nothing | Sight::Foreign, _) => Turn::Lost,
        }
    }

    fn won(&self, etag: ETag, now: Mono) -> Turn {
        if self.is_late(now) { Turn::TooLate } else { Turn::Won(etag) }
    }

    fn unless_late(&self, turn: Turn, now: Mono) -> Turn {
        if self.is_late(now) { Turn::TooLate } else { turn }
    }
}

#[cfg(test)]
impl std::hash::Hash for Candidacy {
    fn hash<H: std::hash::Hasher>(&self, into: &mut H) {
        let condition = match &self.condition {
            Condition::Create => None,
            Condition::Match(etag) => Some(etag),
        };
        (&self.put, condition, self.unclear, self.refused).hash(into);
    }
}

/// What became of a holder's put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Read what is there, and tell it to [`Tenure::saw`].
    ReadBack,
    /// A put landed, perhaps an earlier one than the last: [`Tenure::landed`].
    Landed,
    /// Not known, or not done.
    Again,
    /// Somebody else has it, or it is gone.
    Lost,
}

/// A holder: the version it knows to be its own, and what it sent since.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Tenure {
    landed: Put,
    etag: ETag,
    /// Puts on that version whose outcome is open.
    open: Vec<Sent>,
    /// The timing asked for last.
    asked: Timing,
    /// The epoch must rise above this.
    floor: Epoch,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Sent {
    put: Put,
    /// One of its tries may have landed, or may land yet, whatever the present one meets.
    doubtful: bool,
}

impl Tenure {
    /// Begins with the put that took the lease.
    pub fn new(landed: Put, etag: ETag) -> Self {
        Self { asked: landed.timing, landed, etag, open: Vec::new(), floor: Epoch(0) }
    }

    /// The last put that is known to have landed.
    pub fn landed(&self) -> &Put {
        &self.landed
    }

    /// Of the last version known to be ours. Every put bears it as its condition.
    pub fn etag(&self) -> &ETag {
        &self.etag
    }

    /// The timing asked for last; that of the version in force is in [`Tenure::landed`].
    pub fn asked(&self) -> Timing {
        self.asked
    }

    /// From the next put on the epoch is above `above`.
    pub fn raise(&mut self, above: Epoch) {
        self.floor = self.floor.max(above);
    }

    /// Effects may start before this: see the reasoning at the head of the file.
    pub fn end(&self) -> Mono {
        self.open.iter().map(|it| it.put.end()).fold(self.landed.end(), Mono::min)
    }

    /// Whether this is an open put of ours.
    pub fn sent(&self, write_id: &str) -> bool {
        self.open.iter().any(|it| it.put.write_id == write_id)
    }

    /// The put to send at `now`. [`Tenure::end`] takes it into account already: obey it *before* sending.
    pub fn next(&mut self, timing: Timing, now: Moment, write_id: impl FnOnce() -> String) -> Put {
        self.asked = timing;
        // An open put is sent again as it was, unless its success would give no time any more.
        if let Some(last) = self.open.last_mut()
            && last.put.timing == timing
            && now.mono < last.put.end()
        {
            // Also where no answer was waited for: its earlier try may be under way.
            last.doubtful = true;
            return last.put.clone();
        }
        let epoch = if self.landed.epoch <= self.floor { self.floor.next() } else { self.landed.epoch };
        let put = Put { write_id: write_id(), start: now, timing, epoch };
        self.open.push(Sent { put: put.clone(), doubtful: false });
        put
    }

    /// A try of `put`, from [`Tenure::next`], ended.
    pub fn answered(&mut self, put: &Put, answer: Answer) -> Step {
        match answer {
            Answer::Landed(etag) => self.take(put.clone(), etag),
            // A refusal may be the answer to a retry below us of a try that landed, so it is as unclear.
            Answer::Refused | Answer::Unclear => {
                for sent in self.open.iter_mut().filter(|it| it.put == *put) {
                    sent.doubtful = true;
                }
                Step::ReadBack
            }
            Answer::NotDone | Answer::Impossible => {
                self.open.retain(|it| it.doubtful || it.put != *put);
                Step::Again
            }
        }
    }

    /// A read that began after the last try showed this.
    pub fn saw(&mut self, sight: Sight) -> Step {
        match sight {
            Sight::Version { etag, write_id } => {
                if let Some(at) = self.open.iter().position(|it| it.put.write_id == write_id) {
                    let sent = self.open.swap_remove(at);
                    return self.take(sent.put, etag);
                }
                // Nobody took over; the put did not land, or not yet.
                if etag == self.etag && write_id == self.landed.write_id { Step::Again } else { Step::Lost }
            }
            Sight::Nothing | Sight::Foreign => Step::Lost,
            Sight::Failed => Step::Again,
        }
    }

    /// Every other open put bears a condition that will never hold again.
    fn take(&mut self, put: Put, etag: ETag) -> Step {
        self.landed = put;
        self.etag = etag;
        self.open.clear();
        Step::Landed
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nstance_core::time::Timestamp;

    use super::*;

    const S: fn(u64) -> Duration = Duration::from_secs;
    const LONG: Timing = Timing {
        ttl: Duration::from_secs(60),
        renew_interval: Duration::from_secs(20),
        margin: Duration::from_secs(1),
    };

    fn at(s: u64) -> Moment {
        Moment { wall: Timestamp::EPOCH.plus(S(s)), mono: Mono::from_start(S(s)) }
    }

    fn end(s: u64) -> Mono {
        Mono::from_start(S(s))
    }

    fn tag(n: &str) -> ETag {
        ETag(n.to_owned())
    }

    fn sees(n: &str) -> Sight {
        Sight::Version { etag: tag(n), write_id: n.to_owned() }
    }

    /// A holder whose put "0" of this timing landed, begun at 100 s.
    fn holder(timing: Timing) -> Tenure {
        let put = Put { write_id: "0".into(), start: at(100), timing, epoch: Epoch(1) };
        Tenure::new(put, tag("0"))
    }

    fn next(tenure: &mut Tenure, timing: Timing, s: u64, id: &str) -> Put {
        tenure.next(timing, at(s), || id.to_owned())
    }

    #[test]
    fn a_longer_lease_counts_only_once_it_is_known_to_be_there() {
        let mut tenure = holder(Timing::SHARD);
        assert_eq!(tenure.end(), end(105));
        let put = next(&mut tenure, LONG, 102, "1");
        assert_eq!(tenure.end(), end(105), "sent is not landed");
        assert_eq!(tenure.answered(&put, Answer::Unclear), Step::ReadBack);
        assert_eq!(tenure.saw(Sight::Failed), Step::Again);
        assert_eq!(tenure.end(), end(105), "nor is unclear");
        assert_eq!(next(&mut tenure, LONG, 103, "2"), put, "the same bytes again");
        assert_eq!(tenure.answered(&put, Answer::Refused), Step::ReadBack);
        assert_eq!(tenure.saw(sees("1")), Step::Landed);
        assert_eq!((tenure.end(), tenure.landed().timing), (end(161), LONG), "counted from its first try");
    }

    #[test]
    fn a_shorter_lease_cuts_the_end_before_it_is_sent() {
        let mut tenure = holder(LONG);
        assert_eq!(tenure.end(), end(159));
        let put = next(&mut tenure, Timing::SHARD, 110, "1");
        assert_eq!(tenure.end(), end(115));
        assert_eq!(tenure.answered(&put, Answer::Unclear), Step::ReadBack);
        assert_eq!(tenure.saw(sees("0")), Step::Again);
        assert_eq!(tenure.end(), end(115), "not there is not there yet: it may be under way");
        assert_eq!(tenure.landed().timing, LONG, "what peers are told is what is durable");
        let late = next(&mut tenure, Timing::SHARD, 120, "2");
        assert_eq!(tenure.answered(&late, Answer::NotDone), Step::Again);
        assert_eq!(tenure.end(), end(115), "of the first nothing is known yet");
        let again = next(&mut tenure, Timing::SHARD, 121, "3");
        assert_eq!(tenure.answered(&again, Answer::Landed(tag("3"))), Step::Landed);
        assert_eq!(tenure.end(), end(126));
    }

    #[test]
    fn a_shorter_lease_that_surely_failed_gives_the_time_back() {
        for answer in [Answer::NotDone, Answer::Impossible] {
            let mut tenure = holder(LONG);
            let put = next(&mut tenure, Timing::SHARD, 110, "1");
            assert_eq!(tenure.answered(&put, answer.clone()), Step::Again);
            assert_eq!(tenure.end(), end(159));
            // But not if another try of it had no answer.
            let put = next(&mut tenure, Timing::SHARD, 111, "2");
            tenure.answered(&put, Answer::Unclear);
            assert_eq!(next(&mut tenure, Timing::SHARD, 112, "3"), put);
            tenure.answered(&put, answer);
            assert_eq!(tenure.end(), end(116));
        }
    }

    #[test]
    fn an_answer_that_nobody_waited_for_is_unclear() {
        let mut tenure = holder(LONG);
        let dropped = next(&mut tenure, Timing::SHARD, 110, "1");
        let put = next(&mut tenure, Timing::SHARD, 111, "2");
        assert_eq!(put, dropped);
        tenure.answered(&put, Answer::NotDone);
        assert_eq!(tenure.end(), end(115));
        assert_eq!(tenure.saw(sees("1")), Step::Landed, "and it is recognised");
    }

    /// Every order of two open puts of either length, on a version of either length.
    #[test]
    fn the_end_is_the_least_of_all_that_may_be_in_force() {
        let timings = [Timing::SHARD, LONG];
        for (known, first, second) in
            timings.into_iter().flat_map(|a| timings.into_iter().flat_map(move |b| timings.map(|c| (a, b, c))))
        {
            for landed in ["0", "1", "2"] {
                let mut tenure = holder(known);
                let one = next(&mut tenure, first, 101, "1");
                tenure.answered(&one, Answer::Unclear);
                // Late enough that a short first one is not sent again.
                let two = next(&mut tenure, second, 107, "2");
                if two == one {
                    continue;
                }
                tenure.answered(&two, Answer::Unclear);
                let ends = [holder(known).end(), one.end(), two.end()];
                assert_eq!(Some(tenure.end()), ends.iter().min().copied());
                let step = tenure.saw(sees(landed));
                let expected = match landed {
                    "0" => (Step::Again, ends.iter().min().copied()),
                    "1" => (Step::Landed, Some(one.end())),
                    _ => (Step::Landed, Some(two.end())),
                };
                assert_eq!((step, Some(tenure.end())), expected, "{known:?} {first:?} {second:?} {landed}");
            }
        }
    }

    #[test]
    fn a_version_of_somebody_else_ends_the_tenure() {
        for sight in [sees("x"), Sight::Nothing, Sight::Foreign] {
            let mut tenure = holder(Timing::SHARD);
            let put = next(&mut tenure, Timing::SHARD, 102, "1");
            assert_eq!(tenure.answered(&put, Answer::Refused), Step::ReadBack);
            assert_eq!(tenure.saw(sight), Step::Lost);
        }
    }

    #[test]
    fn a_raised_epoch_comes_with_the_next_new_put() {
        let mut tenure = holder(Timing::SHARD);
        tenure.raise(Epoch(41));
        let put = next(&mut tenure, Timing::SHARD, 102, "1");
        assert_eq!(put.epoch, Epoch(42));
        tenure.answered(&put, Answer::Landed(tag("1")));
        assert_eq!(next(&mut tenure, Timing::SHARD, 104, "2").epoch, Epoch(42));
    }
}
