//! What an instance is owed, decided from facts alone: what its template asks for, what its agent shows, what we sent.
//!
//! A report shows of a file only when it was written, or why it was not, and one hash for all of them. So what is sent
//! is remembered by its content, for the term, and counts as lost with its stream until a report names its batch.
//!
//! After a take-over nothing is remembered. What the hash vouches for is taken as it is. What it says nothing about
//! (secrets, objects, where the leader and the machine are, images) is sent once more; an agent leaves equal bytes
//! alone. Certificates are taken as they are although names in them may be others by now: to send them once more is to
//! sign for the whole fleet at every take-over, and a renewal brings the names.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use nstance_config::{MergedGroup, model::FileSpec};
use nstance_core::{instance::Addresses, time::Timestamp};

/// How long a new stream waits for a report that says what is there.
pub const FIRST_REPORT: Duration = Duration::from_secs(5);

/// A file that did not arrive, or could not be made, is tried again after this, then after twice as long …
const RETRY: Duration = Duration::from_secs(10);

/// An agent that was told everything and still has another hash.
const DRIFT: Duration = Duration::from_secs(60);

/// … but never later than this.
const MAX_WAIT: Duration = Duration::from_secs(600);

/// So many streams in a row may lose what they bore before the next one waits: an agent that is killed again and again
/// gets its files at once, one that throws them away would have us sign all day.
const FREE_LOSSES: u32 = 8;

/// What no hash covers (secrets, objects, addresses) is compared anew this often. Nobody tells us of their change.
pub const RECHECK: Duration = Duration::from_secs(300);

/// The wait after so many tries: `base`, doubled with each.
pub fn wait(base: Duration, tries: u32) -> Duration {
    base.saturating_mul(2_u32.saturating_pow(tries.saturating_sub(1))).min(MAX_WAIT)
}

/// What the template of an instance asks for, with everything merged.
#[derive(Clone)]
pub struct Wanted {
    pub merged: Arc<MergedGroup>,
    /// The runtime hash that an agent has when all of it has arrived.
    pub hash: String,
}

impl Wanted {
    /// Names of the keys that the instance must have.
    pub fn keys(&self) -> BTreeSet<String> {
        let key = |spec: &FileSpec| match spec {
            FileSpec::Certificate { key, .. } => Some(key.clone()),
            _ => None,
        };
        self.merged.files.values().filter_map(key).collect()
    }

    /// Whether nothing is missing to make this file.
    pub fn is_ready(spec: &FileSpec, held: &BTreeSet<String>) -> bool {
        match spec {
            FileSpec::Certificate { key, .. } => held.contains(key),
            _ => true,
        }
    }

    /// When a certificate that was written then has a third of its life left. The machine's clock tells when that was:
    /// ahead of ours, it would put the renewal beyond the end.
    fn renewal_of_one_from(&self, spec: &FileSpec, written: Timestamp, now: Timestamp) -> Option<Timestamp> {
        let FileSpec::Certificate { template, .. } = spec else { return None };
        let ttl = self.merged.certificates.get(template)?.ttl;
        Some(written.min(now).plus(ttl * 2 / 3))
    }
}

/// What the hash of an agent says of a file that we did not send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    /// It is as it should be.
    Vouches,
    Nothing,
    /// Nothing, and we cannot make a better one yet.
    Waits,
}

/// One file as an agent shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shown {
    Written(Timestamp),
    Failed(String),
}

/// What the last report said of files, and of where the machine is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reported {
    pub session: String,
    /// Empty if the agent has none.
    pub hash: String,
    /// The last batch that it has committed; empty if the agent has begun anew since.
    pub batch: String,
    pub files: BTreeMap<String, Shown>,
    /// Files that lie there as the agent wrote them for a server, be it an earlier leader. All others are not ours.
    pub received: BTreeSet<String>,
    pub addresses: Addresses,
}

/// What is known of the agent's files.
#[derive(Clone, Copy)]
pub enum Heard<'a> {
    /// A stream was opened just now; its report is on the way.
    Waiting {
        until: Timestamp,
    },
    /// There is none, and nobody waits for one any more.
    Nothing,
    Report(&'a Reported),
}

/// Hash of a file's content; of a certificate, of all that goes into it but time and serial.
pub type Print = [u8; 32];

/// What we sent, and the agent has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Known {
    pub print: Print,
    /// When a certificate is due for its next.
    pub renew_at: Option<Timestamp>,
}

/// The beginning of time: whatever is due then is due at once.
const AT_ONCE: Timestamp = Timestamp::EPOCH;

/// How often something was sent without being there afterwards, and when it may be sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tries {
    n: u32,
    next: Timestamp,
    /// It is there: the next time is a first one.
    arrived: bool,
}

impl Default for Tries {
    fn default() -> Self {
        Self { n: 0, next: AT_ONCE, arrived: false }
    }
}

impl Tries {
    fn again(&mut self, base: Duration, now: Timestamp) -> Duration {
        self.n = if self.arrived { 1 } else { self.n + 1 };
        let wait = wait(base, self.n);
        (self.next, self.arrived) = (now.plus(wait), false);
        wait
    }
}

/// A batch on its way, and the files in it.
struct Sent {
    batch: String,
    names: BTreeSet<String>,
}

/// What we remember of the files of one instance; it ends with the term.
#[derive(Default)]
pub struct Memory {
    pub known: BTreeMap<String, Known>,
    /// Nobody knows what the agent has under these names: they are sent whatever a report shows.
    doubtful: BTreeSet<String>,
    /// Sent on this stream, and no report names them or a later one. A file is in the last that bore it.
    unproven: Vec<Sent>,
    /// Streams in a row that ended before a report named their last batch, and when something was sent last.
    n_lost: u32,
    sent_at: Option<Timestamp>,
    /// What was asked for when something was sent last.
    sent_for: Option<String>,
    tries: BTreeMap<String, Tries>,
    /// Files whose error was told, with the try it belongs to.
    told: BTreeMap<String, Timestamp>,
    /// Left the template; the agent may still have them.
    left: BTreeSet<String>,
    /// Not in the template, and the agent has them from a server, as its last report says.
    stale: BTreeSet<String>,
    /// What the template asked for when we looked last.
    names: BTreeSet<String>,
    /// Nothing was sent yet on the stream that is open.
    is_fresh: bool,
    /// The hash for which all contents were compared on the stream that is open, and when.
    checked_for: Option<String>,
    checked_at: Option<Timestamp>,
    /// The provider has shown in this term where the machine is.
    is_located: bool,
    /// A file waits for that.
    awaits_place: bool,
    /// Contents are to be compared again, and the batch that is being made may not know.
    changed: bool,
    /// The hash that a batch said was reached.
    completed: Option<String>,
    drift: Tries,
}

/// What to do now.
#[derive(Debug, PartialEq, Eq)]
pub enum Due {
    Wait(Option<Timestamp>),
    Batch(Order),
}

/// What a batch is to hold.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Order {
    /// Everything, whatever is known.
    pub all: bool,
    /// Whatever turns out to differ from what the agent has.
    pub compare: bool,
    /// These in any case.
    pub names: BTreeSet<String>,
}

/// What the next batch says of a file that is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Not looked at, or tried again later.
    Leave,
    Send,
    /// Its content decides.
    Compare,
}

impl Memory {
    /// A stream was opened: what it will bear is looked at as a whole.
    pub fn opened(&mut self, now: Timestamp) {
        self.is_fresh = true;
        self.checked_for = None;
        self.checked_at = Some(now);
    }

    /// The stream is over, or its agent has begun anew elsewhere. What it bore last may have been lost with it.
    pub fn closed(&mut self) {
        self.n_lost += u32::from(!self.unproven.is_empty());
        for name in self.unproven.drain(..).flat_map(|it| it.names) {
            self.known.remove(&name);
            self.doubtful.insert(name);
        }
        self.completed = None;
    }

    /// Contents are compared at the next look: a key or an address is another.
    pub fn look_again(&mut self) {
        self.checked_for = None;
        self.changed = true;
    }

    /// The provider shows where the machine is. Until then its record tells, which may be older than its address.
    pub fn located(&mut self) {
        self.is_located = true;
        if std::mem::take(&mut self.awaits_place) {
            self.look_again();
        }
    }

    /// A batch is made from what is known now. What changes from here on is for the next one.
    pub fn begun(&mut self) {
        self.changed = false;
    }

    /// Takes note of what left the template: since we looked last, or while others led, of which only a report knows.
    pub fn look(&mut self, wanted: &Wanted, report: Option<&Reported>) {
        let names: BTreeSet<String> = wanted.merged.files.keys().cloned().collect();
        for name in self.names.difference(&names) {
            self.left.insert(name.clone());
            self.known.remove(name);
            self.doubtful.remove(name);
            for sent in &mut self.unproven {
                sent.names.remove(name);
            }
            self.tries.remove(name);
            self.told.remove(name);
        }
        // Only what the last report says: one that names others each time would otherwise fill our memory.
        if let Some(report) = report {
            self.stale.clone_from(&report.received);
        }
        for gone in [&mut self.left, &mut self.stale] {
            gone.retain(|name| !names.contains(name));
        }
        self.names = names;
    }

    /// Whether nothing is under way: a report that says what the last one said changes nothing then.
    pub fn is_settled(&self) -> bool {
        let Self { doubtful, unproven, tries, left, stale, awaits_place, changed, drift, .. } = self;
        doubtful.is_empty()
            && unproven.is_empty()
            && tries.is_empty()
            && left.is_empty()
            && stale.is_empty()
            && !awaits_place
            && !changed
            && (drift.arrived || *drift == Tries::default())
    }

    /// A report came. Answers the errors in it that nobody was told of.
    pub fn reported(&mut self, report: &Reported, now: Timestamp) -> Vec<(String, String)> {
        // Whatever else it shows may be from before the batch. Those of one stream arrive in their order.
        if let Some(at) = self.unproven.iter().position(|it| it.batch == report.batch) {
            self.unproven.drain(..=at);
            self.n_lost = 0;
        }
        // Its time stands all the same: one that has the hash in every other report is not sent everything each time.
        self.drift.arrived |= self.completed.as_ref() == Some(&report.hash);
        // Until its time is over also what is there is not sent anew on the agent's word: one that shows and hides a
        // file would otherwise have us sign all day.
        self.tries.retain(|name, tries| {
            tries.arrived |= matches!(report.files.get(name), Some(Shown::Written(_)));
            !tries.arrived || now < tries.next || self.doubtful.contains(name)
        });
        // One that never names a batch is believed by the hash, which comes with the last one: else nothing is ever gone.
        let by_hash = report.batch.is_empty() && self.completed.as_ref() == Some(&report.hash);
        if by_hash {
            self.n_lost = 0;
        }
        let is_after = self.unproven.is_empty() || by_hash;
        for gone in [&mut self.left, &mut self.stale] {
            gone.retain(|name| report.files.contains_key(name) || !is_after);
        }
        let mut errors = Vec::new();
        for name in &self.names {
            let Some(Shown::Failed(why)) = report.files.get(name) else { continue };
            // Once for each try, whatever the words: an agent that finds others every time would drown all other events.
            let the_try = self.tries.get(name).map_or(AT_ONCE, |it| it.next);
            if self.told.insert(name.clone(), the_try) != Some(the_try) {
                errors.push((name.clone(), why.clone()));
            }
        }
        errors
    }

    fn word(&self, wanted: &Wanted, name: &str) -> Word {
        match wanted.merged.unhashed.get(name) {
            None => Word::Vouches,
            // One without an address in the place of one that has it would be worse than an old one.
            Some(unhashed) if unhashed.place && !self.is_located => Word::Waits,
            Some(_) => Word::Nothing,
        }
    }

    /// When this file is due; `None` if nothing is known to be wrong with it. What was tried lately waits.
    fn due(
        &self,
        wanted: &Wanted,
        name: &str,
        spec: &FileSpec,
        report: Option<&Reported>,
        now: Timestamp,
    ) -> Option<Timestamp> {
        let next_try = Some(self.tries.get(name).map_or(AT_ONCE, |it| it.next));
        if self.doubtful.contains(name) {
            return next_try;
        }
        let known = self.known.get(name);
        let shown = report.map(|it| it.files.get(name));
        let has_hash = report.is_some_and(|it| it.hash == wanted.hash);
        match (shown, known) {
            (Some(None | Some(Shown::Failed(_))), _) => next_try,
            (_, Some(known)) => known.renew_at,
            (Some(Some(Shown::Written(at))), None) if has_hash => match self.word(wanted, name) {
                Word::Vouches => wanted.renewal_of_one_from(spec, *at, now),
                Word::Nothing => next_try,
                Word::Waits => None,
            },
            (_, None) => next_try,
        }
    }

    pub fn decide(&self, now: Timestamp, wanted: &Wanted, held: &BTreeSet<String>, heard: Heard<'_>) -> Due {
        let report = match heard {
            Heard::Waiting { until } => return Due::Wait(Some(until)),
            Heard::Nothing => None,
            Heard::Report(report) => Some(report),
        };
        let n_too_many = self.n_lost.saturating_sub(FREE_LOSSES);
        let patient = self.sent_at.filter(|_| 0 < n_too_many).map(|at| at.plus(wait(RETRY, n_too_many)));
        if patient.is_some_and(|at| now < at) {
            return Due::Wait(patient);
        }
        let recheck = self.checked_at.map_or(AT_ONCE, |at| at.plus(RECHECK));
        let mut next = vec![recheck];
        let is_new = self.checked_for.as_ref() != Some(&wanted.hash);
        let all = report.is_none() && self.is_fresh;
        let mut order = Order { all, compare: is_new || recheck <= now, ..Order::default() };
        for (name, spec) in &wanted.merged.files {
            if !Wanted::is_ready(spec, held) {
                continue;
            }
            let Some(due) = self.due(wanted, name, spec, report, now) else { continue };
            if due <= now {
                order.names.insert(name.clone());
            } else {
                next.push(due);
            }
        }
        let drifts = report.is_some_and(|it| it.hash != wanted.hash);
        if drifts && !is_new {
            if self.completed.as_ref() != Some(&wanted.hash) {
                // What was missing has come since; only the word for it is owed.
                order.compare |= self.is_complete(wanted, &BTreeMap::new(), report);
            } else if self.drift.next <= now {
                order.all = true;
            } else {
                next.push(self.drift.next);
            }
        }
        if order == Order::default() {
            return Due::Wait(next.into_iter().filter(|at| now < *at).min());
        }
        Due::Batch(order)
    }

    /// What a batch of this order says of one file.
    pub fn verdict(&self, order: &Order, wanted: &Wanted, name: &str, now: Timestamp) -> Verdict {
        if order.all || order.names.contains(name) {
            return Verdict::Send;
        }
        // What failed a moment ago for this very hash waits for its time.
        let fails = self.doubtful.contains(name) && self.tries.get(name).is_some_and(|it| now < it.next);
        if !order.compare || (fails && self.checked_for.as_ref() == Some(&wanted.hash)) {
            return Verdict::Leave;
        }
        Verdict::Compare
    }

    /// Whether a file that is only compared is sent: it differs from what the agent has.
    pub fn differs(
        &mut self,
        wanted: &Wanted,
        name: &str,
        print: Print,
        report: Option<&Reported>,
        now: Timestamp,
    ) -> bool {
        if let Some(known) = self.known.get(name) {
            if known.print == print {
                return false;
            }
            // Under the same config the agent itself is what differs, its key or its address. That has time.
            let is_soon = self.tries.get(name).is_some_and(|it| now < it.next);
            if is_soon && self.sent_for.as_ref() == Some(&wanted.hash) {
                self.doubtful.insert(name.to_owned());
                return false;
            }
            return true;
        }
        let Some(spec) = wanted.merged.files.get(name) else { return false };
        let vouched = report.filter(|it| it.hash == wanted.hash).and_then(|it| it.files.get(name));
        let Some(Shown::Written(at)) = vouched.filter(|_| !self.doubtful.contains(name)) else { return true };
        // A take-over.
        match self.word(wanted, name) {
            Word::Vouches => {
                // From now on we know it.
                let renew_at = wanted.renewal_of_one_from(spec, *at, now);
                self.known.insert(name.to_owned(), Known { print, renew_at });
                false
            }
            Word::Nothing => true,
            Word::Waits => {
                self.awaits_place = true;
                false
            }
        }
    }

    /// Files that left the template, to be removed.
    pub fn left(&self) -> BTreeSet<String> {
        &self.left | &self.stale
    }

    /// A file is to be sent and does not fit into this batch: it is due at once.
    pub fn postponed(&mut self, name: &str) {
        self.doubtful.insert(name.to_owned());
        self.tries.remove(name);
    }

    /// A file was not made: the agent keeps what it has. Answers when it is tried again.
    pub fn failed(&mut self, name: &str, now: Timestamp) -> Duration {
        self.doubtful.insert(name.to_owned());
        self.tried(name, now)
    }

    fn tried(&mut self, name: &str, now: Timestamp) -> Duration {
        self.tries.entry(name.to_owned()).or_default().again(RETRY, now)
    }

    /// Whether the agent has everything once these are there. What it could not write it has not.
    pub fn is_complete(&self, wanted: &Wanted, sent: &BTreeMap<String, Known>, report: Option<&Reported>) -> bool {
        let has_hash = report.is_some_and(|it| it.hash == wanted.hash);
        wanted.merged.files.keys().all(|name| {
            let written = report.map(|it| matches!(it.files.get(name), Some(Shown::Written(_))));
            let arrived = written.unwrap_or(true) || self.unproven.iter().any(|it| it.names.contains(name));
            let known = self.known.contains_key(name) && arrived;
            let vouched = has_hash && written == Some(true);
            sent.contains_key(name) || (!self.doubtful.contains(name) && (known || vouched))
        })
    }

    /// Whether a batch that holds nothing is worth its last message: the agent has everything and does not know.
    pub fn owes_hash(&self, order: &Order, wanted: &Wanted) -> bool {
        order.all || self.completed.as_ref() != Some(&wanted.hash)
    }

    /// All of an order was looked at, for this hash.
    pub fn checked(&mut self, order: &Order, wanted: &Wanted, now: Timestamp) {
        self.is_fresh = false;
        if (order.all || order.compare) && !self.changed {
            self.checked_for = Some(wanted.hash.clone());
            self.checked_at = Some(now);
        }
    }

    /// A batch was handed over, its commit included.
    pub fn sent(
        &mut self,
        batch: &str,
        sent: BTreeMap<String, Known>,
        wanted: &Wanted,
        complete: bool,
        now: Timestamp,
    ) {
        let names: BTreeSet<String> = sent.keys().cloned().collect();
        // Without what comes again, and without those of which nothing is left: an agent that names none fills no memory.
        for earlier in &mut self.unproven {
            earlier.names.retain(|name| !names.contains(name));
        }
        self.unproven.retain(|earlier| !earlier.names.is_empty());
        self.unproven.push(Sent { batch: batch.to_owned(), names });
        for (name, known) in sent {
            self.tried(&name, now);
            self.doubtful.remove(&name);
            self.known.insert(name, known);
        }
        (self.sent_at, self.sent_for) = (Some(now), Some(wanted.hash.clone()));
        if !complete {
            self.completed = None;
            return;
        }
        if self.completed.as_ref() != Some(&wanted.hash) {
            self.drift = Tries::default();
        }
        self.completed = Some(wanted.hash.clone());
        self.drift.again(DRIFT, now);
    }
}

#[cfg(test)]
mod tests;
