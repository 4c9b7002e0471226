//! Keys and files of one instance, as its leader remembers them. One lock, never held over an await, and never taken
//! before the world's.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nstance_core::{instance::Addresses, time::Timestamp};
use nstance_identity::keys::PublicKey;
use nstance_proto::v1;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::{
    decide::{Memory, Reported, Shown},
    wanted::Asked,
};
use crate::service::{
    keys::is_name,
    report::{TELL_PAUSE, clean},
};

/// Files of a report that are looked at, and what is kept of each error: more than any template has.
const MAX_FILES: usize = 512;
const MAX_ERROR: usize = 256;

/// The server's side of what an agent is told.
#[derive(Default)]
pub struct Delivery {
    state: Mutex<State>,
}

#[derive(Default)]
pub struct State {
    pub keys: BTreeMap<String, PublicKey>,
    pub reported: Option<Arc<Reported>>,
    pub memory: Memory,
    /// What was last told of addresses that do not agree.
    mismatch: Vec<String>,
    mismatch_told_at: Option<Timestamp>,
    /// What an on-demand instance asks for.
    pub on_demand: Option<Asked>,
    n_streams: u64,
    open: BTreeMap<Stream, Open>,
}

/// An agent has one stream of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stream {
    Keys,
    Files,
}

struct Open {
    id: u64,
    superseded: CancellationToken,
    wake: Arc<Notify>,
}

/// A stream that is open. Dropping it ends it.
pub struct Opened {
    pub delivery: Arc<Delivery>,
    stream: Stream,
    id: u64,
    /// A newer stream of the same kind took over.
    pub superseded: CancellationToken,
    /// Something may have changed.
    pub wake: Arc<Notify>,
}

impl Delivery {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a stream, superseding an older one.
    pub fn open(self: &Arc<Self>, stream: Stream, now: Timestamp) -> Opened {
        let mut state = self.lock();
        state.n_streams += 1;
        let (id, superseded, wake) = (state.n_streams, CancellationToken::new(), Arc::new(Notify::new()));
        let open = Open { id, superseded: superseded.clone(), wake: wake.clone() };
        if let Some(older) = state.open.insert(stream, open) {
            older.superseded.cancel();
            state.end(stream);
        }
        if stream == Stream::Files {
            state.memory.opened(now);
        }
        Opened { delivery: self.clone(), stream, id, superseded, wake }
    }

    /// What is asked of the instance may be another now.
    pub fn wake(&self) {
        self.lock().wake(&[Stream::Keys, Stream::Files]);
    }

    /// Contents that no hash covers may be others now.
    pub fn look_again(&self) {
        let mut state = self.lock();
        state.memory.look_again();
        state.wake(&[Stream::Keys, Stream::Files]);
    }

    /// Takes in what a report says of files. Answers the errors in it that nobody was told of.
    pub fn reported(&self, report: &v1::HealthReportRequest, now: Timestamp) -> Vec<(String, String)> {
        let reported = Arc::new(read(report));
        let mut state = self.lock();
        // Nearly all say what the one before said, of files that are all there: nobody need look for that.
        let is_news = state.reported.as_ref() != Some(&reported) || !state.memory.is_settled();
        let errors = state.memory.reported(&reported, now);
        if state.reported.as_ref().is_some_and(|before| before.addresses != reported.addresses) {
            state.memory.look_again();
        }
        if is_news {
            state.reported = Some(reported);
            state.wake(&[Stream::Files]);
        }
        errors
    }
}

impl State {
    fn wake(&self, streams: &[Stream]) {
        for open in streams.iter().filter_map(|stream| self.open.get(stream)) {
            open.wake.notify_one();
        }
    }

    fn end(&mut self, stream: Stream) {
        if stream == Stream::Files {
            self.memory.closed();
        }
    }

    /// Takes note of what provider and agent disagree on. Answers whether people are to be told: one that finds other
    /// names with every report would drown all other events. What is not told now is told with a later batch.
    pub fn mismatches(&mut self, found: &[String], now: Timestamp) -> bool {
        let is_soon = self.mismatch_told_at.is_some_and(|at| now.since(at) < TELL_PAUSE);
        if self.mismatch == found || (is_soon && !found.is_empty()) {
            return false;
        }
        self.mismatch = found.to_vec();
        if found.is_empty() {
            return false;
        }
        self.mismatch_told_at = Some(now);
        true
    }

    /// Takes in keys that are needed. If they are others, what they are for is made anew. Answers whether they are.
    pub fn take_keys(&mut self, keys: &BTreeMap<String, PublicKey>) -> bool {
        let changes = keys.iter().any(|(name, key)| self.keys.get(name) != Some(key));
        if changes {
            self.keys.extend(keys.iter().map(|(name, key)| (name.clone(), *key)));
            self.memory.look_again();
            self.wake(&[Stream::Keys, Stream::Files]);
        }
        changes
    }

    pub fn held(&self) -> BTreeSet<String> {
        self.keys.keys().cloned().collect()
    }
}

impl Opened {
    /// What is remembered, as long as it is this stream's to change. A newer one has its own idea of what arrived.
    pub fn own(&self) -> Option<MutexGuard<'_, State>> {
        // Under the lock: it is held while a newer one takes over.
        let state = self.delivery.lock();
        (!self.superseded.is_cancelled()).then_some(state)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let mut state = self.delivery.lock();
        if state.open.get(&self.stream).is_some_and(|open| open.id == self.id) {
            state.open.remove(&self.stream);
            state.end(self.stream);
        }
    }
}

/// What a report says of files and addresses, as far as it is of use. A bad field is as good as none.
fn read(report: &v1::HealthReportRequest) -> Reported {
    use v1::file_status::Status;
    let files = report.files.iter().filter(|(name, _)| is_name(name)).filter_map(|(name, it)| {
        let shown = match it.status.as_ref()? {
            Status::LastModified(at) => {
                let millis = at.seconds.saturating_mul(1000).saturating_add(i64::from(at.nanos) / 1_000_000);
                Shown::Written(Timestamp::from_millis(millis))
            }
            Status::Error(why) => Shown::Failed(clean(why, MAX_ERROR, false)),
        };
        Some((name.clone(), shown))
    });
    let received = report.files.iter().filter(|(name, it)| it.received && is_name(name)).map(|(name, _)| name.clone());
    let said = |text: &String| (!text.is_empty() && text.len() <= 253).then(|| clean(text, text.len(), false));
    Reported {
        session: report.session_id.chars().take(MAX_ERROR).collect(),
        hash: report.config_hash.chars().take(MAX_ERROR).collect(),
        batch: report.batch_id.chars().take(MAX_ERROR).collect(),
        // Ordered before it is cut: what is kept must not depend on the order of a map.
        files: files.collect::<BTreeMap<_, _>>().into_iter().take(MAX_FILES).collect(),
        received: received.collect::<BTreeSet<_>>().into_iter().take(MAX_FILES).collect(),
        addresses: Addresses {
            ip4: said(&report.private_ipv4),
            ip6: said(&report.private_ipv6),
            hostname: said(&report.hostname),
            fqdn: said(&report.fqdn),
        },
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);

    fn report(hash: &str) -> v1::HealthReportRequest {
        v1::HealthReportRequest { config_hash: hash.to_owned(), ..v1::HealthReportRequest::default() }
    }

    #[test]
    fn a_stream_that_was_superseded_changes_nothing_any_more() {
        let delivery = Arc::new(Delivery::default());
        let older = delivery.open(Stream::Files, NOW);
        assert!(older.own().is_some());
        let newer = delivery.open(Stream::Files, NOW);
        assert!(older.own().is_none());
        drop(older);
        assert!(newer.own().is_some());
    }

    #[test]
    fn an_agent_with_another_name_every_second_is_told_of_twice_a_minute() {
        let delivery = Delivery::default();
        let told = (0..60).filter(|second| {
            let now = NOW.plus(std::time::Duration::from_secs(*second));
            delivery.lock().mismatches(&[format!("host name {second}")], now)
        });
        assert_eq!(told.collect::<Vec<_>>(), [0, 30]);
        let later = NOW.plus(std::time::Duration::from_secs(100));
        assert!(!delivery.lock().mismatches(&["host name 30".to_owned()], later), "it was told");
        assert!(!delivery.lock().mismatches(&[], later), "there is nothing to tell");
        assert!(delivery.lock().mismatches(&["host name 30".to_owned()], later), "it is wrong once more");
    }

    #[test]
    fn only_a_report_that_says_something_new_wakes_the_stream_of_files() {
        let delivery = Arc::new(Delivery::default());
        let stream = delivery.open(Stream::Files, NOW);
        let wakes = |report: &v1::HealthReportRequest| {
            delivery.reported(report, NOW);
            stream.wake.notified().now_or_never().is_some()
        };
        assert!(wakes(&report("a")), "the first");
        assert!(!wakes(&report("a")), "the same");
        assert!(wakes(&report("b")), "another hash");
        assert!(wakes(&v1::HealthReportRequest { session_id: "2".to_owned(), ..report("b") }), "another session");
        let moved = v1::HealthReportRequest { session_id: "2".to_owned(), hostname: "moved".to_owned(), ..report("b") };
        assert!(wakes(&moved), "another name");
        assert!(wakes(&moved), "nobody has looked at what follows from the name");
        delivery.lock().memory.begun();
        assert!(!wakes(&moved));
    }
}
