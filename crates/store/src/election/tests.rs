use nstance_core::term::LeaseStalled;
use nstance_rt::entropy::SeededEntropy;

use super::*;
use crate::{
    faulty::{Fault, FaultPlan, FaultyStore},
    records::lease_key,
    testing::{Bench, shard},
};

const S: fn(u64) -> Duration = Duration::from_secs;

fn identity(n: u64) -> Identity {
    Identity {
        server_id: format!("s{n}"),
        process: format!("process-{n}"),
        addr: format!("10.0.0.{n}:8991"),
        health_addr: format!("10.0.0.{n}:8990"),
        direct: true,
        exclusive: true,
        boot_id: format!("boot-{n}"),
        provider_id: None,
    }
}

fn keeper_as(bench: &Bench, store: Arc<dyn ObjectStore>, own: Identity, seed: u64) -> LeaseKeeper {
    let entropy = Arc::new(SeededEntropy::new(seed));
    let writer = format!("a/{}", own.server_id);
    LeaseKeeper::new(store, lease_key(Some(&shard())), writer, own, Timing::SHARD, bench.clock.clone(), entropy)
}

fn keeper(bench: &Bench, n: u64) -> (LeaseKeeper, Arc<FaultyStore>) {
    let link = bench.link(n);
    (keeper_as(bench, link.clone(), identity(n), n), link)
}

/// Follows until it may bid, and bids.
async fn follow(keeper: &LeaseKeeper) -> Result<Held, ElectionError> {
    let mut seen = keeper.look(None).await?;
    loop {
        match may_bid(&seen, keeper.clock.monotonic(), keeper.identity()) {
            Bid::Yes { reason, .. } => return keeper.acquire(&seen, reason, Epoch(0)).await,
            Bid::No { look_again_in } => {
                tokio::time::sleep(look_again_in.min(S(1)).max(Duration::from_millis(10))).await;
                seen = keeper.look(Some(&seen)).await?;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_retried_put_that_already_landed_is_ours() {
    for faults in [
        vec![Fault::LostAfter],
        vec![Fault::PreconditionAfter],
        vec![Fault::LostBefore],
        vec![Fault::LostBefore, Fault::LostAfter],
        vec![Fault::HangsAfter],
        vec![Fault::Hangs],
        vec![Fault::HangsAfter, Fault::None],
    ] {
        let bench = Bench::new();
        let (keeper, link) = keeper(&bench, 1);
        link.script_puts(faults.clone());
        let mut held = follow(&keeper).await.unwrap_or_else(|error| panic!("acquire {faults:?}: {error:?}"));
        assert!(held.guard().is_open());
        for _ in 0..3 {
            link.script_puts(faults.clone());
            let deadline = bench.clock.monotonic() + S(5);
            loop {
                match keeper.renew(&mut held).await {
                    Renewal::Extended { .. } => break,
                    Renewal::Retry { after, .. } => tokio::time::sleep(after).await,
                    Renewal::Lost => panic!("renew {faults:?}"),
                }
                assert!(bench.clock.monotonic() < deadline, "{faults:?}");
            }
            assert_eq!(*held.etag(), keeper.look(None).await.unwrap().lease.unwrap().etag);
            tokio::time::sleep(S(2)).await;
        }
        link.script_puts(faults.clone());
        let etag = keeper.release(held).await.unwrap_or_else(|error| panic!("release {faults:?}: {error:?}"));
        let seen = keeper.look(None).await.unwrap().lease.unwrap();
        assert!(seen.value.released);
        assert_eq!(seen.etag, etag);
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_renewal_that_cannot_be_read_back_at_once_is_ours_later() {
    let bench = Bench::new();
    let (keeper, link) = keeper(&bench, 1);
    let mut held = follow(&keeper).await.unwrap();
    link.script_puts([Fault::PreconditionAfter]);
    link.script_gets([Fault::Unreachable]);
    assert!(matches!(keeper.renew(&mut held).await, Renewal::Retry { .. }));
    assert!(matches!(keeper.renew(&mut held).await, Renewal::Extended { .. }));
}

#[tokio::test(start_paused = true)]
async fn the_guard_counts_from_the_start_of_the_first_try() {
    let bench = Bench::new();
    let (keeper, link) = keeper(&bench, 1);
    let mut held = follow(&keeper).await.unwrap();
    link.set_plan(FaultPlan { max_delay: Duration::from_millis(600), ..FaultPlan::default() });
    let start = bench.clock.monotonic();
    link.script_puts([Fault::LostBefore]);
    let until = loop {
        match keeper.renew(&mut held).await {
            Renewal::Extended { until } => break until,
            Renewal::Retry { after, .. } => tokio::time::sleep(after).await,
            Renewal::Lost => panic!("nobody else is there"),
        }
    };
    assert_eq!(until, start + S(5));
    assert_eq!(held.renewed(), start);
}

#[tokio::test(start_paused = true)]
async fn a_leader_cut_off_from_the_store_stops_by_itself() {
    let bench = Bench::new();
    let (first, link) = keeper(&bench, 1);
    let (second, _) = keeper(&bench, 2);
    let mut held = follow(&first).await.unwrap();
    let began = bench.clock.monotonic();
    link.set_unreachable(true);
    let mut closed = None;
    let mut taken = std::pin::pin!(follow(&second));
    let new = loop {
        tokio::select! {
            biased;
            renewal = first.renew(&mut held) => {
                assert!(matches!(renewal, Renewal::Retry { .. }));
                tokio::time::sleep(Duration::from_millis(50)).await;
                if !held.guard().is_open() && closed.is_none() {
                    closed = Some(bench.clock.monotonic());
                }
            }
            new = &mut taken => break new.unwrap(),
        }
        if let Some(new) = futures::FutureExt::now_or_never(&mut taken) {
            break new.unwrap();
        }
    };
    let closed = closed.expect("it stopped, though every call failed");
    assert!(closed.since(began) <= Duration::from_millis(5100));
    assert!(S(6) <= bench.clock.monotonic().since(began), "and the other waited the full time");
    assert!(held.epoch() < new.epoch());
    assert_eq!(held.guard().permit(), Err(LeaseStalled { epoch: Epoch(1) }));
}

#[tokio::test(start_paused = true)]
async fn losing_the_swap_ends_the_term() {
    let bench = Bench::new();
    let (first, _) = keeper(&bench, 1);
    let (second, _) = keeper(&bench, 2);
    let mut held = follow(&first).await.unwrap();
    let guard = held.guard().clone();
    let seen = second.look(None).await.unwrap();
    second.acquire(&seen, TakeOver::Expired, Epoch(0)).await.unwrap();
    assert!(guard.is_open());
    assert_eq!(first.renew(&mut held).await, Renewal::Lost);
    assert!(guard.is_closed(), "the whole term knows at once");
    assert!(matches!(first.release(held).await, Err(ElectionError::Taken { .. })), "and nothing is released");
}

#[tokio::test(start_paused = true)]
async fn a_deleted_lease_ends_the_term() {
    let bench = Bench::new();
    let (keeper, _) = keeper(&bench, 1);
    let mut held = follow(&keeper).await.unwrap();
    bench.bucket.delete(&lease_key(Some(&shard()))).await.unwrap();
    assert_eq!(keeper.renew(&mut held).await, Renewal::Lost);
    assert!(held.guard().is_closed());
}

#[tokio::test(start_paused = true)]
async fn a_restarted_server_acquires_properly() {
    let bench = Bench::new();
    let (before, _) = keeper(&bench, 1);
    let old = follow(&before).await.unwrap();
    // The same id, address and host, another process: the address is ours alone, so nobody else can lead there.
    let again = Identity { process: "another".into(), ..identity(1) };
    let after = keeper_as(&bench, bench.link(9), again.clone(), 9);
    let seen = after.look(None).await.unwrap();
    let now = bench.clock.monotonic();
    assert!(matches!(may_bid(&seen, now, &again), Bid::Yes { reason: TakeOver::SameHost, .. }));
    let new = follow(&after).await.unwrap();
    assert!(old.epoch() < new.epoch(), "a term of its own, not a renewal of the old one");
    assert_eq!(new.lease().previous.as_ref().unwrap().reason, TakeOver::SameHost);
    // None of the conditions may be missing.
    for (name, other) in [
        ("shared port", Identity { exclusive: false, ..again.clone() }),
        ("behind an address translation", Identity { direct: false, ..again.clone() }),
        ("another address", Identity { addr: "10.0.0.9:8991".into(), ..again.clone() }),
        ("another boot", Identity { boot_id: "later".into(), ..again.clone() }),
        ("the very same process", Identity { process: identity(1).process, ..again.clone() }),
    ] {
        assert!(matches!(may_bid(&seen, now, &other), Bid::No { .. }), "{name}");
    }
    let mut nameless = seen.clone();
    nameless.lease.as_mut().unwrap().value.boot_id.clear();
    assert!(matches!(may_bid(&nameless, now, &Identity { boot_id: String::new(), ..again }), Bid::No { .. }));
}

#[tokio::test(start_paused = true)]
async fn the_same_id_twice_is_two_holders() {
    let bench = Bench::new();
    let (first, _) = keeper(&bench, 1);
    let twin = Identity { process: "twin".into(), addr: "10.0.0.7:8991".into(), ..identity(1) };
    let second = keeper_as(&bench, bench.link(2), twin, 2);
    let mut held = follow(&first).await.unwrap();
    let new = follow(&second).await.unwrap();
    assert_eq!(new.lease().holder, held.lease().holder);
    assert_eq!(first.renew(&mut held).await, Renewal::Lost);
}

#[tokio::test(start_paused = true)]
async fn two_candidates_have_one_winner() {
    for seed in 0..20 {
        let bench = Bench::new();
        let (first, _) = keeper(&bench, 2 * seed + 1);
        let (second, _) = keeper(&bench, 2 * seed + 2);
        let seen = [first.look(None).await.unwrap(), second.look(None).await.unwrap()];
        let (a, b) = tokio::join!(
            first.acquire(&seen[0], TakeOver::Absent, Epoch(0)),
            second.acquire(&seen[1], TakeOver::Absent, Epoch(0)),
        );
        assert!(a.is_ok() != b.is_ok(), "seed {seed}: {a:?} {b:?}");
        let lost = a.err().or(b.err()).unwrap();
        assert!(matches!(lost, ElectionError::Taken { .. }), "{lost:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn epochs_only_grow() {
    let bench = Bench::new();
    let (first, _) = keeper(&bench, 1);
    let key = lease_key(Some(&shard()));
    let held = follow(&first).await.unwrap();
    assert_eq!(held.epoch(), Epoch(1));
    first.release(held).await.unwrap();
    let held = follow(&first).await.unwrap();
    assert_eq!(held.epoch(), Epoch(2), "also by the same server");
    let old = bench.bucket.get(&key).await.unwrap();
    first.release(held).await.unwrap();
    assert_eq!(follow(&first).await.unwrap().epoch(), Epoch(3));
    // The lease is deleted: groups file and cache remember.
    bench.bucket.delete(&key).await.unwrap();
    let seen = first.look(None).await.unwrap();
    assert_eq!(next_epoch(seen.epoch(), Epoch(3), Epoch(2)), Epoch(4));
    let held = first.acquire(&seen, TakeOver::Absent, Epoch(3)).await.unwrap();
    assert_eq!(held.epoch(), Epoch(4));
    // The bucket is rolled back.
    bench.bucket.delete(&key).await.unwrap();
    bench.bucket.put(&key, old.body, Condition::Create).await.unwrap();
    let seen = first.look(None).await.unwrap();
    let held = first.acquire(&seen, TakeOver::Expired, Epoch(4)).await.unwrap();
    assert_eq!(held.epoch(), Epoch(5));
}

#[tokio::test(start_paused = true)]
async fn a_higher_epoch_found_later_raises_the_lease() {
    let bench = Bench::new();
    let (keeper, link) = keeper(&bench, 1);
    let mut held = follow(&keeper).await.unwrap();
    let old = held.guard().clone();
    link.script_puts([Fault::LostAfter]);
    assert!(matches!(keeper.raise(&mut held, Epoch(41)).await, Renewal::Extended { .. }));
    assert_eq!(held.epoch(), Epoch(42));
    assert!(old.is_closed() && held.guard().is_open());
    assert_eq!(held.guard().epoch(), Epoch(42));
    assert!(matches!(keeper.renew(&mut held).await, Renewal::Extended { .. }));
    assert_eq!(keeper.look(None).await.unwrap().epoch(), Epoch(42));
}

#[tokio::test(start_paused = true)]
async fn skewed_followers_wait_the_full_ttl() {
    let bench = Bench::new();
    let (leader, _) = keeper(&bench, 1);
    let (follower, _) = keeper(&bench, 2);
    let held = follow(&leader).await.unwrap();
    // What the leader's wall clock says must not matter: it may be a year behind.
    let mut seen = follower.look(None).await.unwrap();
    seen.lease.as_mut().unwrap().value.renewed_at = nstance_core::time::Timestamp::EPOCH;
    seen.lease.as_mut().unwrap().value.acquired_at = nstance_core::time::Timestamp::EPOCH;
    let t = seen.first_seen;
    let own = identity(2);
    assert_eq!(may_bid(&seen, t, &own), Bid::No { look_again_in: S(6) });
    assert_eq!(may_bid(&seen, t + S(4), &own), Bid::No { look_again_in: S(2) });
    // Long known, but not looked at since: it may have been renewed a moment ago.
    assert_eq!(may_bid(&seen, t + S(100), &own), Bid::No { look_again_in: S(0) });
    let early = Observation::after(Some(&seen), seen.lease.clone(), t + S(5), t + S(7));
    assert_eq!(may_bid(&early, t + S(7), &own), Bid::No { look_again_in: S(0) }, "that look began too early");
    let late = Observation::after(Some(&early), seen.lease.clone(), t + S(6), t + S(6));
    assert!(matches!(may_bid(&late, t + S(6), &own), Bid::Yes { reason: TakeOver::Expired, .. }));
    // Another version begins anew, at the end of the read that showed it.
    let mut renewed = seen.lease.clone().unwrap();
    renewed.etag = ETag("another".into());
    let fresh = Observation::after(Some(&late), Some(renewed), t + S(6), t + S(8));
    assert_eq!(may_bid(&fresh, t + S(8), &own), Bid::No { look_again_in: S(6) });
    // Followers obey the ttl in the object.
    let mut longer = seen.clone();
    longer.lease.as_mut().unwrap().value.ttl = S(60);
    assert_eq!(may_bid(&longer, t, &own), Bid::No { look_again_in: S(60) });
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn absent_and_released_leases_are_free() {
    let bench = Bench::new();
    let (first, _) = keeper(&bench, 1);
    let (second, _) = keeper(&bench, 2);
    let seen = first.look(None).await.unwrap();
    let absent = Bid::Yes { reason: TakeOver::Absent, condition: Condition::Create };
    assert_eq!(may_bid(&seen, bench.clock.monotonic(), &identity(1)), absent);
    let held = follow(&first).await.unwrap();
    let guard = held.guard().clone();
    let etag = first.release(held).await.unwrap();
    assert!(guard.is_closed());
    let began = bench.clock.monotonic();
    let seen = second.look(None).await.unwrap();
    let free = Bid::Yes { reason: TakeOver::Released, condition: Condition::Match(etag) };
    assert_eq!(may_bid(&seen, began, &identity(2)), free);
    let new = follow(&second).await.unwrap();
    assert_eq!(bench.clock.monotonic(), began, "a released lease is taken without a wait");
    let previous = new.lease().previous.clone().unwrap();
    assert_eq!((previous.holder.as_str(), previous.epoch, previous.reason), ("s1", Epoch(1), TakeOver::Released));
}

#[tokio::test(start_paused = true)]
async fn a_candidate_never_acts_on_hope() {
    let bench = Bench::new();
    let (keeper, link) = keeper(&bench, 1);
    let seen = keeper.look(None).await.unwrap();
    link.script_puts([Fault::LostAfter]);
    link.script_gets([Fault::Unreachable; 64]);
    let hope = keeper.acquire(&seen, TakeOver::Absent, Epoch(0)).await;
    assert!(matches!(hope, Err(ElectionError::TooLate { .. })), "{hope:?}");
    let link = bench.link(2);
    link.set_unreachable(true);
    let other = keeper_as(&bench, link, identity(2), 2);
    assert!(matches!(other.look(None).await, Err(ElectionError::Store { .. })));
    let unreachable = other.acquire(&seen, TakeOver::Absent, Epoch(0)).await;
    assert!(matches!(unreachable, Err(ElectionError::Store { .. })));
}

#[tokio::test(start_paused = true)]
async fn a_stalled_leader_resumes_its_epoch() {
    let bench = Bench::new();
    let (keeper, link) = keeper(&bench, 1);
    let mut held = follow(&keeper).await.unwrap();
    link.set_unreachable(true);
    for _ in 0..20 {
        assert!(matches!(keeper.renew(&mut held).await, Renewal::Retry { .. }));
        tokio::time::sleep(S(1)).await;
    }
    assert!(!held.guard().is_open());
    link.set_unreachable(false);
    assert!(matches!(keeper.renew(&mut held).await, Renewal::Extended { .. }));
    assert!(held.guard().is_open(), "nobody took over, so the term goes on");
    assert_eq!(held.epoch(), Epoch(1));
}

#[tokio::test(start_paused = true)]
async fn a_put_from_long_ago_gives_no_time() {
    let bench = Bench::new();
    let (keeper, link) = keeper(&bench, 1);
    let mut held = follow(&keeper).await.unwrap();
    // It lands, unnoticed, and the store stays silent for longer than a lease.
    link.script_puts([Fault::LostAfter]);
    link.script_gets([Fault::Unreachable]);
    assert!(matches!(keeper.renew(&mut held).await, Renewal::Retry { .. }));
    tokio::time::sleep(S(30)).await;
    match keeper.renew(&mut held).await {
        Renewal::Extended { until } => assert!(until < bench.clock.monotonic(), "known to have landed, and over"),
        other => panic!("{other:?}"),
    }
    assert!(!held.guard().is_open());
    assert!(matches!(keeper.renew(&mut held).await, Renewal::Extended { .. }));
    assert!(held.guard().is_open());
}

/// The timing of a leader without a standby.
const ALONE: Timing =
    Timing { ttl: Duration::from_secs(60), renew_interval: Duration::from_secs(20), margin: Duration::from_secs(1) };

#[tokio::test(start_paused = true)]
async fn a_longer_lease_reaches_further_only_when_it_is_durable() {
    let bench = Bench::new();
    let (keeper, link) = keeper(&bench, 1);
    let mut held = follow(&keeper).await.unwrap();
    let (began, before) = (bench.clock.monotonic(), held.until());
    link.script_puts([Fault::LostAfter]);
    link.script_gets([Fault::Unreachable]);
    assert!(matches!(keeper.renew_as(&mut held, ALONE).await, Renewal::Retry { .. }));
    assert_eq!((held.until(), held.timing(), held.lease().ttl), (before, Timing::SHARD, S(6)));
    let extended = Renewal::Extended { until: began + S(59) };
    assert_eq!(keeper.renew(&mut held).await, extended, "goes on as asked, and finds that it landed");
    assert_eq!((held.timing(), held.lease().ttl, held.renewed()), (ALONE, S(60), began));
    assert_eq!(keeper.look(None).await.unwrap().lease.unwrap().value.ttl, S(60), "and followers obey it");
    tokio::time::sleep(S(58)).await;
    assert!(held.guard().is_open());
    assert!(matches!(keeper.renew(&mut held).await, Renewal::Extended { .. }));
    assert_eq!(held.timing(), ALONE, "renewed as it is");
}

#[tokio::test(start_paused = true)]
async fn a_shorter_lease_cuts_the_guard_before_anybody_can_know_of_it() {
    let bench = Bench::new();
    let (first, link) = keeper(&bench, 1);
    let (second, _) = keeper(&bench, 2);
    let mut held = follow(&first).await.unwrap();
    assert!(matches!(first.renew_as(&mut held, ALONE).await, Renewal::Extended { .. }));
    tokio::time::sleep(S(1)).await;
    // It lands; its answer and all that follows are lost on us.
    let (began, guard) = (bench.clock.monotonic(), held.guard().clone());
    link.script_puts([Fault::LostAfter]);
    link.script_gets([Fault::Unreachable]);
    assert!(matches!(first.renew_as(&mut held, Timing::SHARD).await, Renewal::Retry { .. }));
    link.set_unreachable(true);
    assert!(matches!(first.renew(&mut held).await, Renewal::Retry { .. }));
    assert_eq!(held.until(), began + S(5));
    let new = follow(&second).await.unwrap();
    assert!(S(6) <= bench.clock.monotonic().since(began));
    assert!(new.guard().is_open() && !guard.is_open(), "it was shut a second before the other could come");
}

#[tokio::test(start_paused = true)]
async fn a_shorter_lease_that_never_left_gives_the_guard_its_time_back() {
    let bench = Bench::new();
    let (keeper, link) = keeper(&bench, 1);
    let mut held = follow(&keeper).await.unwrap();
    keeper.renew_as(&mut held, ALONE).await;
    let until = held.until();
    link.set_unreachable(true);
    assert!(matches!(keeper.renew_as(&mut held, Timing::SHARD).await, Renewal::Retry { .. }));
    assert_eq!(held.until(), until);
    tokio::time::sleep(S(30)).await;
    assert!(held.guard().is_open(), "nobody was told of less than a minute");
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_is_dropped_midway_is_remembered() {
    let bench = Bench::new();
    let (keeper, link) = keeper(&bench, 1);
    let mut held = follow(&keeper).await.unwrap();
    keeper.renew_as(&mut held, ALONE).await;
    let began = bench.clock.monotonic();
    link.script_puts([Fault::HangsAfter]);
    let dropped = tokio::time::timeout(Duration::from_millis(100), keeper.renew_as(&mut held, Timing::SHARD)).await;
    assert!(dropped.is_err());
    assert_eq!(held.until(), began + S(5), "cut while it was under way");
    assert_eq!(keeper.renew(&mut held).await, Renewal::Extended { until: began + S(5) }, "not taken for a stranger's");
}

#[tokio::test(start_paused = true)]
async fn throttled_renewal_does_not_flap() {
    let bench = Bench::new();
    let (keeper, link) = keeper(&bench, 1);
    link.set_plan(FaultPlan { write_gap: S(1), max_delay: Duration::from_millis(500), ..FaultPlan::default() });
    let mut held = follow(&keeper).await.unwrap();
    for _ in 0..200 {
        assert!(held.guard().is_open());
        match keeper.renew(&mut held).await {
            Renewal::Extended { .. } => tokio::time::sleep(S(2)).await,
            Renewal::Retry { after, .. } => tokio::time::sleep(after).await,
            Renewal::Lost => panic!("nobody else is there"),
        }
    }
}

struct Server {
    keeper: LeaseKeeper,
    link: Arc<FaultyStore>,
    held: Option<Held>,
    seen: Option<Observation>,
}

impl Server {
    fn new((keeper, link): (LeaseKeeper, Arc<FaultyStore>)) -> Self {
        Self { keeper, link, held: None, seen: None }
    }
}

#[tokio::test(start_paused = true)]
async fn one_guard_at_a_time() {
    for seed in 0..30 {
        let bench = Bench::new();
        let mut open: Vec<Guard> = Vec::new();
        let mut servers: Vec<Server> = (1..=3).map(|n| Server::new(keeper(&bench, 10 * seed + n))).collect();
        let chance = SeededEntropy::new(seed);
        for _ in 0..150 {
            for Server { keeper, link, held, seen } in &mut servers {
                link.set_unreachable(entropy::below(&chance, 4) == 0);
                link.set_plan(FaultPlan {
                    max_delay: Duration::from_millis(200),
                    lost_before: 60,
                    lost_after: 60,
                    precondition_after: 60,
                    ..FaultPlan::default()
                });
                match held {
                    Some(lease) => {
                        if keeper.renew(lease).await == Renewal::Lost {
                            *held = None;
                        }
                    }
                    None => {
                        let Ok(now) = keeper.look(seen.as_ref()).await else { continue };
                        if let Bid::Yes { reason, .. } = may_bid(&now, bench.clock.monotonic(), keeper.identity())
                            && let Ok(lease) = keeper.acquire(&now, reason, Epoch(0)).await
                        {
                            open.push(lease.guard().clone());
                            *held = Some(lease);
                        }
                        *seen = Some(now);
                    }
                }
                let n_open = open.iter().filter(|it| it.is_open()).count();
                assert!(n_open <= 1, "seed {seed}: {open:?}");
            }
            tokio::time::sleep(jitter(&chance, Duration::from_millis(900))).await;
        }
        assert!(open.windows(2).all(|two| two[0].epoch() < two[1].epoch()), "seed {seed}: epochs grow");
        assert!(!open.is_empty());
    }
}
