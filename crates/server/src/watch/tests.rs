use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::AtomicU64,
};

use futures::{FutureExt as _, StreamExt as _};
use nstance_core::{
    ids::{GroupRef, InstanceId, uuid_v7},
    time::Timestamp,
};
use proptest::prelude::*;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::*;
use crate::{
    events::{Events, Reason, Tell},
    grpc::status::reason_of,
};

/// A clock that stands still until it is moved.
#[derive(Default)]
struct Hand(AtomicU64);

impl Hand {
    fn advance(&self, by: Duration) {
        self.0.fetch_add(u64::try_from(by.as_millis()).unwrap(), Ordering::SeqCst);
    }
}

impl Clock for Hand {
    fn now(&self) -> Timestamp {
        Timestamp::EPOCH
    }

    fn monotonic(&self) -> Mono {
        Mono::from_start(Duration::from_millis(self.0.load(Ordering::SeqCst)))
    }
}

fn tenant(name: &str) -> Tenant {
    name.parse().unwrap()
}

fn operator(n: u8) -> OperatorId {
    OperatorId::new(uuid_v7(Timestamp::EPOCH, [n; 10]))
}

fn watcher(name: &str, n: u8) -> Watcher {
    Watcher { tenant: tenant(name), operator: operator(n), not_after: Timestamp::EPOCH }
}

fn id(n: u8) -> InstanceId {
    InstanceId::new("knc".parse().unwrap(), uuid_v7(Timestamp::EPOCH, [0, 0, 0, 0, 0, 0, 0, 0, 0, n]))
}

fn group(key: &str, size: i32) -> Arc<v1::GroupEvent> {
    let status = v1::GroupStatus { key: key.to_owned(), size, ..v1::GroupStatus::default() };
    Arc::new(v1::GroupEvent { group: Some(status), ..v1::GroupEvent::default() })
}

fn error(text: &str) -> Arc<v1::ErrorEvent> {
    Arc::new(v1::ErrorEvent { error: text.to_owned(), ..v1::ErrorEvent::default() })
}

/// What a stream has for its reader right now.
fn read<K: Kind>(stream: &mut Subscription<K>) -> Vec<Result<K::Message, Status>> {
    let mut read = Vec::new();
    while let Some(Some(message)) = stream.next().now_or_never() {
        read.push(message);
    }
    read
}

fn texts(stream: &mut Subscription<ErrorKind>) -> Vec<String> {
    read(stream).into_iter().map(|message| message.unwrap().error).collect()
}

struct Bench {
    clock: Arc<Hand>,
    errors: Arc<Registry<ErrorKind>>,
    groups: Arc<Registry<GroupKind>>,
    end: CancellationToken,
}

impl Bench {
    fn new() -> Self {
        let clock = Arc::new(Hand::default());
        let errors = Arc::new(Registry::new(Epoch(7), clock.clone() as Arc<dyn Clock>, false));
        let groups = Arc::new(Registry::new(Epoch(7), clock.clone() as Arc<dyn Clock>, false));
        Self { clock, errors, groups, end: CancellationToken::new() }
    }

    fn tail(&self, watcher: &Watcher, token: &str) -> Result<Subscription<ErrorKind>, Refusal> {
        Subscription::tail(&self.errors, watcher, token, Box::new(|_| true), &self.end)
    }

    fn open(&self, watcher: &Watcher, token: &str) -> Subscription<GroupKind> {
        let mut parts = vec![vec![v1::GroupEvent { snapshot: true, ..group("shown", 0).as_ref().clone() }]];
        Subscription::open(&self.groups, watcher, token, Box::new(move |_| parts.pop()), &self.end).unwrap()
    }
}

fn sizes(stream: &mut Subscription<GroupKind>) -> Vec<(String, i32)> {
    let all = read(stream).into_iter().map(|message| message.unwrap().group.unwrap());
    all.map(|group| (group.key, group.size)).collect()
}

#[test]
fn every_stream_of_a_tenant_hears_all_of_it_and_nothing_else() {
    let bench = Bench::new();
    let mut first = bench.tail(&watcher("a", 1), "").unwrap();
    let mut second = bench.tail(&watcher("a", 2), "").unwrap();
    let mut other = bench.tail(&watcher("b", 3), "").unwrap();
    bench.errors.publish(&tenant("a"), || error("a's"));
    bench.errors.publish(&tenant("b"), || error("b's"));
    bench.errors.publish_to_all(&error("everybody's"));
    assert_eq!(texts(&mut first), ["a's", "everybody's"]);
    assert_eq!(texts(&mut second), ["a's", "everybody's"]);
    assert_eq!(texts(&mut other), ["b's", "everybody's"]);
}

#[test]
fn nothing_is_made_for_a_tenant_nobody_follows() {
    let bench = Bench::new();
    bench.groups.publish(&tenant("a"), || unreachable!("nobody listens"));
    let token = bench.groups.token(&tenant("a"));
    bench.groups.publish(&tenant("a"), || group("web", 1));
    assert_eq!(sizes(&mut bench.open(&watcher("a", 1), &token)), [("web".to_owned(), 1)], "one may come back");
}

#[test]
fn one_who_comes_back_is_told_what_it_missed() {
    let bench = Bench::new();
    let mut stream = bench.open(&watcher("a", 1), "");
    assert_eq!(sizes(&mut stream), [("shown".to_owned(), 0)], "the snapshot");
    bench.groups.publish(&tenant("a"), || group("web", 1));
    let token = stream.next().now_or_never().unwrap().unwrap().unwrap().resume_token;
    drop(stream);
    bench.groups.publish(&tenant("a"), || group("web", 2));
    bench.groups.publish(&tenant("a"), || group("db", 1));
    let mut back = bench.open(&watcher("a", 1), &token);
    bench.groups.publish(&tenant("a"), || group("web", 3));
    let told = [("web".to_owned(), 2), ("db".to_owned(), 1), ("web".to_owned(), 3)];
    assert_eq!(sizes(&mut back), told, "no snapshot");
}

#[test]
fn a_token_that_names_no_place_in_the_log_gives_a_snapshot() {
    let bench = Bench::new();
    let old = bench.groups.token(&tenant("a"));
    for n in 0..=RING {
        bench.groups.publish(&tenant("a"), || group("web", i32::try_from(n).unwrap()));
    }
    for token in [old.as_str(), "6-1", "7-99999", "7-x", "junk", ""] {
        let told = sizes(&mut bench.open(&watcher("a", 1), token));
        assert_eq!(told, [("shown".to_owned(), 0)], "{token}");
    }
    assert_eq!(sizes(&mut bench.open(&watcher("a", 1), "7-1")).len(), RING, "the oldest place there is");
}

#[test]
fn errors_that_were_forgotten_are_counted() {
    let bench = Bench::new();
    let mut first = bench.tail(&watcher("a", 1), "").unwrap();
    for _ in 0..RING + 3 {
        bench.errors.publish(&tenant("a"), || error("again"));
    }
    let dropped: Vec<u32> = read(&mut first).into_iter().map(|message| message.unwrap().dropped).collect();
    assert_eq!(dropped.len(), pending::QUEUE);
    assert_eq!(dropped[0], u32::try_from(RING + 3 - pending::QUEUE).unwrap());
    assert!(dropped[1..].iter().all(|n| *n == 0));
    let back = read(&mut bench.tail(&watcher("a", 1), "7-0").unwrap());
    assert_eq!(back.len(), RING);
    assert_eq!(back[0].as_ref().unwrap().dropped, 3);
}

#[test]
fn who_comes_from_an_earlier_leader_is_told_all_of_this_term_and_how_much_that_is() {
    let bench = Bench::new();
    let first = bench.tail(&watcher("a", 1), "").unwrap();
    assert_eq!(first.n_replayed(), 0);
    for text in ["one", "two", "three"] {
        bench.errors.publish(&tenant("a"), || error(text));
    }
    for (token, n) in [("6-4095", 3), ("0-0", 3), ("7-1", 2), ("7-3", 0), ("8-1", 0), ("junk", 0), ("", 0)] {
        let mut stream = bench.tail(&watcher("a", 1), token).unwrap();
        assert_eq!(stream.n_replayed(), n, "{token}");
        assert_eq!(texts(&mut stream), ["one", "two", "three"][3 - n..], "{token}");
    }
}

#[test]
fn streams_are_limited_by_operator_and_by_tenant() {
    let bench = Bench::new();
    let refused = |answer: Result<Subscription<ErrorKind>, Refusal>| {
        let refusal = answer.err().unwrap();
        assert_eq!((refusal.code, refusal.reason), (Code::ResourceExhausted, "TOO_MANY_STREAMS"), "{refusal}");
    };
    let mut open: Vec<_> = (0..8).map(|_| bench.tail(&watcher("a", 0), "").unwrap()).collect();
    refused(bench.tail(&watcher("a", 0), ""));
    for n in 1..8 {
        open.extend((0..8).map(|_| bench.tail(&watcher("a", n), "").unwrap()));
    }
    refused(bench.tail(&watcher("a", 9), ""));
    bench.tail(&watcher("b", 9), "").unwrap();
    bench.open(&watcher("a", 9), "");
    open.pop();
    bench.tail(&watcher("a", 9), "").unwrap();
}

#[test]
fn only_the_stream_that_takes_nothing_is_cut() {
    let bench = Bench::new();
    let mut slow = bench.tail(&watcher("a", 1), "").unwrap();
    let mut quick = bench.tail(&watcher("a", 2), "").unwrap();
    let mut idle = bench.tail(&watcher("b", 3), "").unwrap();
    bench.clock.advance(STALL * 2);
    assert_eq!(bench.errors.cut_slow(), 0, "nothing to take is no fault");
    bench.errors.publish(&tenant("a"), || error("one"));
    bench.errors.publish(&tenant("a"), || error("two"));
    bench.clock.advance(STALL / 2);
    assert_eq!(texts(&mut quick), ["one", "two"]);
    // It takes one of two: its time begins anew.
    assert_eq!(slow.next().now_or_never().unwrap().unwrap().unwrap().error, "one");
    bench.clock.advance(STALL - Duration::from_millis(1));
    assert_eq!(bench.errors.cut_slow(), 0);
    bench.clock.advance(Duration::from_millis(1));
    assert_eq!(bench.errors.cut_slow(), 1);
    let end = read(&mut slow);
    let status = end[0].as_ref().unwrap_err();
    assert_eq!((status.code(), reason_of(status).as_deref()), (Code::ResourceExhausted, Some("SLOW_CONSUMER")));
    assert_eq!(end.len(), 1);
    bench.errors.publish(&tenant("a"), || error("three"));
    assert_eq!(texts(&mut quick), ["three"]);
    assert!(read(&mut idle).is_empty());
    assert_eq!(texts(&mut bench.tail(&watcher("a", 1), "7-1").unwrap()), ["two", "three"], "it resumes");
}

#[test]
fn a_snapshot_nobody_takes_is_something_to_take() {
    let bench = Bench::new();
    let mut stream = bench.open(&watcher("a", 1), "");
    bench.clock.advance(STALL);
    assert_eq!(bench.groups.cut_slow(), 1);
    assert_eq!(reason_of(read(&mut stream)[0].as_ref().unwrap_err()).as_deref(), Some("SLOW_CONSUMER"));
}

#[test]
fn streams_end_with_the_term() {
    let bench = Bench::new();
    let mut stream = bench.tail(&watcher("a", 1), "").unwrap();
    bench.errors.publish(&tenant("a"), || error("late"));
    bench.end.cancel();
    let end = read(&mut stream);
    let status = end[0].as_ref().unwrap_err();
    assert_eq!((status.code(), reason_of(status).as_deref()), (Code::Unavailable, Some("LEADER_CHANGED")));
    assert_eq!(end.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_waiting_stream_is_woken() {
    let bench = Bench::new();
    let mut stream = bench.tail(&watcher("a", 1), "").unwrap();
    let (told, ()) = tokio::join!(stream.next(), async { bench.errors.publish(&tenant("a"), || error("news")) });
    assert_eq!(told.unwrap().unwrap().error, "news");
    let (told, ()) = tokio::join!(stream.next(), async { bench.end.cancel() });
    assert!(told.unwrap().is_err());
}

#[test]
fn equal_errors_are_folded_and_none_is_lost() {
    let clock = Arc::new(Hand::default());
    let errors = Errors::new(Epoch(7), clock.clone() as Arc<dyn Clock>);
    let events = Events::new(Arc::default());
    let web = GroupRef::new(tenant("a"), "web".parse().unwrap());
    let fail = |message: &str| {
        let tell = Tell::group(Reason::InstanceCreateFailed, &web, message).error("quota");
        errors.tell(&events.tell(Timestamp::EPOCH, Epoch(7), tell.retry_after(Duration::from_secs(30))));
    };
    let end = CancellationToken::new();
    let mut stream = Subscription::tail(&errors.registry, &watcher("a", 1), "", Box::new(|_| true), &end).unwrap();
    let mut told = || {
        let all = read(&mut stream).into_iter().map(Result::unwrap);
        all.map(|it| (it.error, it.repeated)).collect::<Vec<_>>()
    };
    fail("full");
    fail("full");
    fail("other");
    fail("full");
    assert_eq!(told(), [("full".to_owned(), 0), ("other".to_owned(), 0)], "at once, and once");
    clock.advance(Duration::from_secs(9));
    assert!(errors.unfold());
    assert!(told().is_empty());
    clock.advance(Duration::from_secs(1));
    errors.unfold();
    assert_eq!(told(), [("full".to_owned(), 2)]);
    clock.advance(Duration::from_secs(10));
    assert!(!errors.unfold(), "silence ends the count");
    fail("full");
    assert_eq!(told(), [("full".to_owned(), 0)]);
}

#[test]
fn only_serious_events_with_a_class_are_errors() {
    let errors = Errors::new(Epoch(7), Arc::new(Hand::default()));
    let events = Events::new(Arc::default());
    let end = CancellationToken::new();
    let mut stream = Subscription::tail(&errors.registry, &watcher("a", 1), "", Box::new(|_| true), &end).unwrap();
    let web = GroupRef::new(tenant("a"), "web".parse().unwrap());
    for tell in [
        Tell::group(Reason::GroupChanged, &web, "no error").detail("class", "odd"),
        Tell::group(Reason::InstanceLost, &web, "no class"),
        Tell::instance(Reason::LbFailing, &web, id(1), "lb").retry_after(Duration::from_millis(1500)),
        Tell::shard(Reason::ProviderFailing, "down").error("unavailable"),
    ] {
        errors.tell(&events.tell(Timestamp::EPOCH, Epoch(7), tell));
    }
    let told: Vec<_> = read(&mut stream).into_iter().map(Result::unwrap).collect();
    assert_eq!(told.len(), 2);
    assert_eq!((told[0].class.as_str(), told[0].group.as_str()), ("load_balancer", "web"));
    assert_eq!(told[0].instance_id, id(1).to_string());
    assert_eq!(told[0].retry_after, Some(prost_types::Duration { seconds: 1, nanos: 500_000_000 }));
    assert_eq!((told[1].class.as_str(), told[1].group.as_str()), ("unavailable", ""));
}

const TOLD: [Told; 9] = [
    Told::Pending,
    Told::Failed,
    Told::Provisioning,
    Told::Running,
    Told::Unhealthy,
    Told::PendingDeletion,
    Told::DrainCancelled,
    Told::Deleting,
    Told::Deleted,
];

fn change(n: u8, told: Told) -> Arc<InstanceChange> {
    Arc::new(InstanceChange { id: id(n), told, event: v1::InstanceEvent::default() })
}

fn sequence(told: &[Told]) -> Vec<Told> {
    let mut pending = Sequences::default();
    for (number, told) in (1..).zip(told) {
        pending.push(number, change(1, *told));
    }
    std::iter::from_fn(|| pending.pop()).map(|line| line.item.told).collect()
}

#[test]
fn a_drain_and_its_end_stay_in_order() {
    use Told::*;
    assert_eq!(sequence(&[Pending, Provisioning, Running]), [Running]);
    assert_eq!(sequence(&[Running, PendingDeletion]), [PendingDeletion]);
    assert_eq!(sequence(&[PendingDeletion, DrainCancelled]), [PendingDeletion, DrainCancelled]);
    assert_eq!(sequence(&[PendingDeletion, Deleting]), [PendingDeletion, Deleting]);
    assert_eq!(sequence(&[PendingDeletion, DrainCancelled, PendingDeletion]), [DrainCancelled, PendingDeletion]);
    assert_eq!(sequence(&[PendingDeletion, DrainCancelled, Unhealthy, Deleting, Deleted]), [Deleted]);
}

proptest! {
    /// Whatever is pushed and taken in whatever order: numbers only grow, what is held is bounded, the last state of
    /// every instance is told last, and nothing is told of one after its end.
    #[test]
    fn sequences_keep_their_promises(steps in prop::collection::vec((0..4_u8, 0..TOLD.len(), any::<bool>()), 0..200)) {
        let mut pending = Sequences::default();
        let mut last = BTreeMap::new();
        let mut told: Vec<(u64, Arc<InstanceChange>)> = Vec::new();
        for (number, (n, state, take)) in (1..).zip(steps) {
            if last.get(&n) == Some(&Told::Deleted) {
                continue;
            }
            pending.push(number, change(n, TOLD[state]));
            last.insert(n, TOLD[state]);
            prop_assert!(pending.first().is_some_and(|first| first <= number));
            if take {
                told.extend(pending.pop().map(|line| (line.number, line.item)));
            }
        }
        let left: Vec<_> = std::iter::from_fn(|| pending.pop()).map(|line| (line.number, line.item)).collect();
        prop_assert!(left.len() <= 4 * 3);
        prop_assert!(pending.is_empty());
        told.extend(left);
        prop_assert!(told.is_sorted_by(|a, b| a.0 < b.0));
        for (n, state) in last {
            let of: Vec<Told> = told.iter().filter(|(_, it)| it.id == id(n)).map(|(_, it)| it.told).collect();
            prop_assert_eq!(of.last(), Some(&state));
            prop_assert!(of.iter().filter(|it| **it == Told::Deleted).count() <= 1);
        }
    }

    /// A reader that stops anywhere and comes back with its last token ends with the same picture as one that stayed.
    #[test]
    fn a_reader_that_comes_back_misses_nothing(
        steps in prop::collection::vec((0..5_u8, any::<bool>()), 1..120), stop in 0..120_usize,
    ) {
        let bench = Bench::new();
        let mut stream = bench.open(&watcher("a", 1), "7-0");
        let mut picture = BTreeMap::new();
        let mut token = "7-0".to_owned();
        let mut take = |stream: &mut Subscription<GroupKind>| {
            if let Some(Some(Ok(event))) = stream.next().now_or_never() {
                let group = event.group.unwrap();
                picture.insert(group.key, group.size);
                token = event.resume_token;
                return true;
            }
            false
        };
        let mut truth = BTreeMap::new();
        for (n, (key, read)) in steps.iter().enumerate() {
            let (key, size) = (format!("g{key}"), i32::try_from(n).unwrap());
            bench.groups.publish(&tenant("a"), || group(&key, size));
            truth.insert(key, size);
            if *read && n < stop {
                take(&mut stream);
            }
        }
        drop(stream);
        let mut back = bench.open(&watcher("a", 1), &token);
        for event in read(&mut back) {
            let group = event.unwrap().group.unwrap();
            picture.insert(group.key, group.size);
        }
        prop_assert_eq!(picture, truth);
    }

    /// A snapshot in parts and what is pending beside it add up: nothing covered is told again, nothing else is lost.
    #[test]
    fn what_a_snapshot_covers_is_not_told_again(
        pushed in prop::collection::vec(0..20_u8, 0..60), from in 0..20_u8, to in 0..20_u8,
    ) {
        use std::ops::Bound;
        prop_assume!(from < to);
        let mut pending = Sequences::default();
        for (number, n) in (1..).zip(&pushed) {
            pending.push(number, change(*n, Told::Running));
        }
        pending.cover((Bound::Excluded(id(from)), Bound::Included(id(to))));
        let left: BTreeSet<_> = std::iter::from_fn(|| pending.pop()).map(|line| line.item.id).collect();
        let wanted: BTreeSet<_> = pushed.iter().filter(|n| **n <= from || to < **n).map(|n| id(*n)).collect();
        prop_assert_eq!(left, wanted);
    }
}
