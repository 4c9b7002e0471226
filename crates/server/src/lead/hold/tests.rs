use std::sync::atomic::AtomicBool;

use async_trait::async_trait;
use nstance_core::{
    ports::{
        objects::ObjectStore,
        peers::{PeerAsk, PeerError, PeerView},
    },
    time::Timestamp,
};
use nstance_rt::{clock::TokioClock, entropy::SeededEntropy};
use nstance_store::{
    election::{Identity, TakeOver},
    faulty::{Fault, FaultPlan, FaultyStore},
    memory::MemoryStore,
    records::lease_key,
};

use super::*;
use crate::peer::Who;

const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// Our own peer port, as a knock meets it.
#[derive(Default)]
struct Port {
    dead: AtomicBool,
}

#[async_trait]
impl Peers for Port {
    async fn ask(&self, addr: &str, _: &PeerAsk) -> Result<PeerView, PeerError> {
        Err(PeerError { addr: addr.to_owned(), message: "nobody asks here".to_owned() })
    }

    async fn knock(&self, _: &str) -> Knock {
        if self.dead.load(Ordering::SeqCst) { Knock::Refused } else { Knock::Unknown }
    }
}

struct Bench {
    holding: Holding,
    around: Around,
    port: Arc<Port>,
    keeper: Arc<LeaseKeeper>,
    beats: Tasks,
}

/// A lease just taken, on a clock that jumps.
async fn bench() -> Bench {
    bench_on(Arc::new(MemoryStore::new())).await
}

async fn bench_on(store: Arc<dyn ObjectStore>) -> Bench {
    let clock: Arc<dyn Clock> = Arc::new(TokioClock::starting_at(Timestamp::from_millis(1_800_000_000_000)));
    let own = Identity {
        server_id: "s1".to_owned(),
        process: "p1".to_owned(),
        addr: "10.0.0.1:8991".to_owned(),
        health_addr: "10.0.0.1:8990".to_owned(),
        direct: true,
        exclusive: true,
        boot_id: String::new(),
        provider_id: None,
    };
    let who = Who {
        cluster: "c1".parse().unwrap(),
        shard: "a".parse().unwrap(),
        server_id: "s1".parse().unwrap(),
        process: "p1".to_owned(),
    };
    let key = lease_key(Some(&who.shard));
    let entropy = Arc::new(SeededEntropy::new(1));
    let keeper = LeaseKeeper::new(store, key, "a/s1".to_owned(), own, Timing::SHARD, clock.clone(), entropy);
    let keeper = Arc::new(keeper);
    let seen = keeper.look(None).await.unwrap();
    let held = keeper.acquire(&seen, TakeOver::Absent, Epoch(0)).await.unwrap();
    let (vitals, port, beats) = (Arc::new(Vitals::default()), Arc::new(Port::default()), Tasks::new());
    vitals.set_role(Role::Leading, held.epoch());
    let around = Around {
        lane: Lane::Common(Tasks::new()),
        clock: clock.clone(),
        desk: Arc::new(Desk::new(who, clock.clone(), vitals.clone())),
        vitals,
        metrics: Arc::new(Metrics::new()),
        pulse: Pulse::start(&beats, clock),
        peers: port.clone(),
    };
    around.desk.stand(Election::Shard, |it| it.role = PeerRole::Leading);
    let holding = Holding::start(&around, keeper.clone(), held);
    Bench { holding, around, port, keeper, beats }
}

fn renewed_ago(bench: &Bench) -> Duration {
    let renewed = bench.around.desk.standing(Election::Shard).renewed.unwrap();
    bench.around.clock.monotonic().since(renewed)
}

#[tokio::test(start_paused = true)]
async fn a_stuck_runtime_loses_its_lease() {
    let bench = bench().await;
    let guard = bench.holding.guard();
    tokio::time::sleep(secs(20)).await;
    assert!(guard.is_open(), "renewed while the main runtime lives");
    bench.beats.end(Duration::ZERO).await;
    tokio::time::sleep(secs(9)).await;
    assert!(!guard.is_open(), "and not when it does not");
    assert!(secs(4) < renewed_ago(&bench), "peers are told the last durable renewal, not now");
    assert_eq!(bench.around.desk.standing(Election::Shard).role, PeerRole::Stalled);
    assert_eq!(bench.around.vitals.role(), Role::Stalled);
    let before = bench.holding.news().n_resumed;
    let beating = Tasks::new();
    let pulse = bench.around.pulse.clone();
    beating.spawn_droppable("beats again", async move {
        loop {
            pulse.beat();
            tokio::time::sleep(BEAT).await;
        }
    });
    bench.holding.resumed(before).await;
    assert!(guard.is_open(), "nobody took over: the same guard opens again");
    assert_eq!(bench.around.vitals.role(), Role::Leading);
}

/// A lease counts from when its renewal began. One that landed late and is followed a whole interval later would run
/// out in between.
#[tokio::test(start_paused = true)]
async fn a_renewal_that_took_long_is_soon_followed_by_the_next() {
    let entropy = Arc::new(SeededEntropy::new(2));
    let store = Arc::new(FaultyStore::new(Arc::new(MemoryStore::new()), entropy, FaultPlan::default()));
    let bench = bench_on(store.clone()).await;
    store.script_puts([Fault::HangsAfter]);
    let (interval, per_try) = (Timing::SHARD.renew_interval, Timing::SHARD.ttl / 4);
    tokio::time::sleep(interval + per_try + Duration::from_millis(100)).await;
    assert!(per_try <= renewed_ago(&bench), "it landed, and began as long ago as it was waited for");
    assert!(renewed_ago(&bench) < interval);
    tokio::time::sleep(interval - per_try).await;
    assert!(renewed_ago(&bench) <= Duration::from_millis(200), "{:?}", renewed_ago(&bench));
}

#[tokio::test(start_paused = true)]
async fn a_dead_listener_closes_the_guard_first() {
    let bench = bench().await;
    let guard = bench.holding.guard();
    tokio::time::sleep(secs(3)).await;
    bench.port.dead.store(true, Ordering::SeqCst);
    let start = bench.around.clock.monotonic();
    let why = bench.holding.lost().await;
    assert!(bench.around.clock.monotonic().since(start) <= KNOCK, "noticed with the next knock");
    assert!(guard.is_closed(), "for good");
    assert!(why.contains("peer port"), "{why}");
    assert_eq!(bench.around.desk.standing(Election::Shard).role, PeerRole::Following);
}

#[tokio::test(start_paused = true)]
async fn a_lone_leader_saves_requests_until_somebody_could_succeed_it() {
    let bench = bench().await;
    tokio::time::sleep(ALONE_AFTER + secs(30)).await;
    let lease = bench.keeper.look(None).await.unwrap().lease.unwrap().value;
    assert_eq!(lease.ttl, secs(60));
    let ask = PeerAsk { election: Election::Shard, known: None, wait: Duration::ZERO };
    let first = bench.around.desk.answer("s2", true, &ask).await;
    assert_eq!(first.ttl, secs(60), "the standby is told what is in force");
    tokio::time::sleep(Duration::from_millis(1)).await;
    let lease = bench.keeper.look(None).await.unwrap().lease.unwrap().value;
    assert_eq!(lease.ttl, Timing::SHARD.ttl, "renewed at once with the time it can count on");
    let until = bench.holding.guard();
    tokio::time::sleep(secs(1)).await;
    assert!(until.is_open());
}

#[test]
fn a_longer_lease_keeps_its_share_of_margin() {
    let long = alone(Timing::SHARD);
    assert_eq!((long.ttl, long.renew_interval, long.margin), (secs(60), secs(20), secs(10)));
    let longer = Timing { ttl: secs(90), renew_interval: secs(30), margin: secs(9) };
    assert_eq!(alone(longer), longer, "what is cheap already stays as it is");
}
