//! A certificate is renewed while it is good, on the open session, and the session moves to it without a gap.

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::common::{Register, Renew, START, Seen, World};
use nstance_agent::{Control, State, disk::Disk};
use nstance_identity::{
    ca::{CaProfile, make_ca_certificate},
    keys::KeyPair,
    peer::Peer,
};
use nstance_rt::{clock::TokioClock, entropy::SeededEntropy};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use tokio::{task::JoinSet, time::Instant};
use tonic::Code;

const HOUR: Duration = Duration::from_secs(3600);
/// Of a certificate here: each of its hours is hundreds of pings on the wire.
const LIFE: Duration = Duration::from_secs(1800);
const MINUTE: Duration = Duration::from_secs(60);

fn serving(state: &State) -> bool {
    *state == State::Serving
}

/// A world whose agent reports only when there is something to say, so that days are short.
async fn serving_world() -> World {
    let mut world = World::new();
    *world.plane.ttl.lock().unwrap() = LIFE;
    world.write_nonce(HOUR);
    world.start_server();
    world.start_agent_with(world.settings_with(&[("METRICS_INTERVAL", "0")]));
    world.next_report().await;
    world.until(serving).await;
    world
}

fn certificate(world: &World) -> Peer {
    let pem = fs::read(world.path("identity/identity.crt")).unwrap();
    Peer::from_der(&CertificateDer::from_pem_slice(&pem).unwrap()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn certificate_is_renewed_in_its_last_third_and_the_session_moves_without_a_gap() {
    let mut world = serving_world().await;
    let began = Instant::now();
    let first = certificate(&world);
    let key = fs::read(world.path("identity/identity.key")).unwrap();
    for _ in 0..3 {
        let before = certificate(&world);
        let (at, _) = world.next_renewal().await;
        let (moved, serial) = world.next_stream().await;
        assert_eq!(world.net.n_open(), 2, "the old connection stands until the streams are on the new one");
        assert_eq!(serial, certificate(&world).serial);
        assert_ne!(serial, before.serial);
        assert!(moved - at < Duration::from_secs(1), "{:?}", moved - at);
        world.next_report().await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(world.net.n_open(), 1);
        assert!(serving(&world.control.state().borrow()));
    }
    let average = began.elapsed() / 3;
    assert!(LIFE * 2 / 3 - LIFE / 10 <= average && average <= LIFE * 2 / 3 + MINUTE, "{average:?}");
    assert_eq!(fs::read(world.path("identity/identity.key")).unwrap(), key, "the key stays");
    assert!(first.not_after < certificate(&world).not_after);
}

#[tokio::test(start_paused = true)]
async fn issuer_may_tell_when_to_renew() {
    let mut world = serving_world().await;
    world.script_renew([Renew::SignFor(10 * MINUTE)]);
    let (first, _) = world.next_renewal().await;
    let (second, _) = world.next_renewal().await;
    // Less up to a tenth of its life.
    let gap = second - first;
    assert!((6 * MINUTE..=11 * MINUTE).contains(&gap), "{gap:?}");
}

/// A tenth of a long life is longer than the time that was told.
#[tokio::test(start_paused = true)]
async fn issuer_that_tells_to_renew_soon_is_not_asked_at_once() {
    let mut world = serving_world().await;
    *world.plane.ttl.lock().unwrap() = crate::common::DAY;
    world.script_renew((0..20).map(|_| Renew::SignFor(MINUTE)));
    let (first, _) = world.next_renewal().await;
    for _ in 0..19 {
        world.next_renewal().await;
    }
    let mean = (world.next_renewal().await.0 - first) / 20;
    assert!((MINUTE / 2..=MINUTE).contains(&mean), "{mean:?}");
}

#[tokio::test(start_paused = true)]
async fn failed_renewal_is_tried_again_and_costs_no_session() {
    let mut world = serving_world().await;
    let busy = || Renew::Refuse(Code::ResourceExhausted, "TOO_MANY_RENEWALS");
    world.script_renew([busy(), Renew::SignAndLose, Renew::Nonsense, busy(), Renew::Sign]);
    let serial = certificate(&world).serial;
    let mut tries = Vec::new();
    for _ in 0..4 {
        tries.push(world.next_renewal().await.0);
        tokio::task::yield_now().await;
        assert_eq!(certificate(&world).serial, serial, "nothing is taken but a certificate for this key");
        assert!(serving(&world.control.state().borrow()));
    }
    tries.push(world.next_renewal().await.0);
    for (n, pair) in tries.windows(2).enumerate() {
        let bound = (Duration::from_secs(30) * 2_u32.pow(u32::try_from(n).unwrap())).min(10 * MINUTE);
        assert!(pair[1] - pair[0] <= bound, "try {n}: {:?}", pair[1] - pair[0]);
    }
    let (_, now) = world.next_stream().await;
    assert_ne!(now, serial);
}

fn n_sessions(world: &World) -> usize {
    world.net.dialled.lock().unwrap().iter().filter(|(_, address)| address == crate::common::AGENT).count()
}

/// A slow store makes every renewal slow; were each to cost its agent the session, a fleet would flap.
#[tokio::test(start_paused = true)]
async fn renewal_that_is_not_answered_in_time_costs_no_session() {
    let mut world = serving_world().await;
    world.script_renew((0..5).map(|_| Renew::Hang));
    let mut before = world.next_renewal().await.0;
    for n in 0..4 {
        let (at, _) = world.next_renewal().await;
        let (least, most) = (Duration::from_secs(10), Duration::from_secs(10) + Duration::from_secs(30) * 2_u32.pow(n));
        assert!((least..=most).contains(&(at - before)), "try {n}: {:?}", at - before);
        assert_eq!(n_sessions(&world), 1, "try {n}");
        assert!(serving(&world.control.state().borrow()));
        before = at;
    }
    world.next_stream().await;
    assert_eq!(n_sessions(&world), 2, "the one with the new certificate");
}

#[tokio::test(start_paused = true)]
async fn renewal_that_is_reset_costs_no_session() {
    let mut world = serving_world().await;
    world.plane.resets.lock().unwrap().push("RenewCertificate");
    world.script_renew([Renew::Refuse(Code::ResourceExhausted, "TOO_MANY_RENEWALS")]);
    world.next_renewal().await;
    assert!(world.plane.resets.lock().unwrap().is_empty());
    assert_eq!(n_sessions(&world), 1);
}

/// It may be the renewal that a server dies of.
#[tokio::test(start_paused = true)]
async fn renewal_whose_connection_is_lost_is_not_repeated_at_once() {
    let mut world = serving_world().await;
    *world.plane.ttl.lock().unwrap() = crate::common::DAY;
    world.script_renew([Renew::SignFor(MINUTE)].into_iter().chain((0..60).map(|_| Renew::Hang)));
    world.next_renewal().await;
    let (first, _) = world.next_renewal().await;
    for n in 1..=5 {
        world.net.cut();
        world.start_server();
        let (at, _) = world.next_renewal().await;
        let most = Duration::from_secs(30) * (2_u32.pow(n) - 1);
        assert!(at - first <= most, "try {n} after {:?}", at - first);
    }
    assert!(Duration::from_secs(60) < first.elapsed(), "five tries in {:?}", first.elapsed());
}

/// Or whoever loses his connection often asks often.
#[tokio::test(start_paused = true)]
async fn waits_between_renewals_outlast_a_connection() {
    let mut world = serving_world().await;
    *world.plane.ttl.lock().unwrap() = crate::common::DAY;
    let busy = || Renew::Refuse(Code::ResourceExhausted, "TOO_MANY_RENEWALS");
    world.script_renew([Renew::SignFor(MINUTE)].into_iter().chain((0..60).map(|_| busy())));
    for _ in 0..7 {
        world.next_renewal().await;
    }
    let mut n_renewals = 0;
    for _ in 0..10 {
        world.net.cut();
        world.start_server();
        while !matches!(world.next().await, Seen::StreamOpened { .. }) {}
        tokio::time::sleep(Duration::from_secs(6)).await;
        while let Ok(seen) = world.seen.try_recv() {
            n_renewals += usize::from(matches!(seen, Seen::Renewed { .. }));
        }
    }
    assert!(n_renewals <= 2, "{n_renewals} in ten short connections");
}

#[tokio::test(start_paused = true)]
async fn told_wait_bounds_the_next_try_but_never_hurries_it() {
    for (told, least, most) in [(1, 10, 20), (120_000, 45, 75)] {
        let mut world = serving_world().await;
        world.script_renew((0..40).map(|_| Renew::RefuseFor(Code::ResourceExhausted, "RATE_LIMITED", told)));
        let (first, _) = world.next_renewal().await;
        let mut waits = Vec::new();
        let mut before = first;
        for _ in 0..40 {
            let (at, _) = world.next_renewal().await;
            waits.push(at - before);
            before = at;
        }
        let mean = (before - first) / 40;
        assert!((least..=most).contains(&mean.as_secs()), "told {told} ms: {mean:?}");
        waits.dedup();
        assert_eq!(waits.len(), 40, "a fleet that was told one time does not come at one time");
    }
}

/// Far ahead, each certificate would be due as it comes; far behind, none before its end.
#[tokio::test(start_paused = true)]
async fn clock_that_is_off_neither_hurries_renewals_nor_misses_them() {
    for (ahead, behind) in [(LIFE * 3 / 4, Duration::ZERO), (LIFE * 100, Duration::ZERO), (Duration::ZERO, HOUR)] {
        let mut world = World::new();
        *world.plane.ttl.lock().unwrap() = LIFE;
        world.start_server();
        // The server is up for longer than the clock is off, as servers are.
        tokio::time::sleep(2 * HOUR).await;
        world.write_nonce(HOUR);
        world.start_skewed(ahead, behind, &[("METRICS_INTERVAL", "0")]);
        world.next_registration().await;
        let mut before = Instant::now();
        for n in 0..4 {
            let at = loop {
                match world.next().await {
                    Seen::Renewed { at, .. } => break at,
                    Seen::Registered { .. } => panic!("it rejoined instead"),
                    _ => {}
                }
            };
            let gap = at - before;
            assert!((LIFE / 4..=LIFE * 2 / 3 + MINUTE).contains(&gap), "renewal {n} of {ahead:?}, {behind:?}: {gap:?}");
            before = at;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn certificate_that_passes_no_longer_is_not_renewed_but_rejoined() {
    let mut world = serving_world().await;
    world.script_renew([Renew::Refuse(Code::Unauthenticated, "CERT_SUPERSEDED")]);
    world.next_renewal().await;
    let (_, request) = world.next_registration().await;
    assert_eq!(request.rejoin.unwrap().counter, 1);
    world.until(serving).await;
}

#[tokio::test(start_paused = true)]
async fn server_away_for_longer_than_the_certificate_lives_is_rejoined() {
    let mut world = World::new();
    *world.plane.ttl.lock().unwrap() = LIFE;
    world.write_nonce(HOUR);
    let server = world.start_server();
    world.start_agent();
    world.until(serving).await;
    let before = certificate(&world);
    world.kill(server).await;
    tokio::time::sleep(LIFE * 2).await;
    assert!(before.not_after < world.plane.clock.now());
    while world.seen.try_recv().is_ok() {}
    world.start_server();
    let (_, request) = world.next_registration().await;
    assert!(request.rejoin.is_some() && request.registration_nonce_jwt.is_empty());
    world.until(serving).await;
    assert_ne!(certificate(&world).serial, before.serial);
}

#[tokio::test(start_paused = true)]
async fn bundle_of_a_renewal_is_taken_only_if_it_overlaps() {
    let mut world = serving_world().await;
    let dice = SeededEntropy::new(5);
    let stranger =
        make_ca_certificate(&KeyPair::generate(&dice), &CaProfile::of("demo".parse().unwrap()), START, &dice);
    let both = format!("{}{}", world.plane.ca.bundle_pem(), stranger.chain_pem);
    world.script_renew([Renew::SignWithBundle(stranger.chain_pem.clone()), Renew::SignWithBundle(both.clone())]);
    let bundle = |world: &World| fs::read_to_string(world.path("identity/ca.crt")).unwrap();
    world.next_renewal().await;
    world.next_stream().await;
    assert_eq!(bundle(&world), world.plane.ca.bundle_pem());
    world.next_renewal().await;
    world.next_stream().await;
    assert_eq!(bundle(&world), both);
}

/// Runs an agent that dies at the `n`th step it takes on disk after `armed`; answers whether it did.
async fn dies_at(world: &mut World, n: usize, armed: impl AsyncFnOnce(&mut World)) -> bool {
    let steps = Arc::new(AtomicUsize::new(usize::MAX));
    let counted = steps.clone();
    let watcher = move |_: nstance_agent::disk::Step, _: &Path| {
        let left = counted.load(Ordering::SeqCst);
        if left != usize::MAX {
            assert_ne!(left, 0, "the process dies here");
            counted.store(left - 1, Ordering::SeqCst);
        }
    };
    let parts = nstance_agent::Components { disk: Disk::watched(Arc::new(watcher)), ..world.parts() };
    let settings = world.settings_with(&[("METRICS_INTERVAL", "0")]);
    nstance_agent::identity_dir::prepare(&settings).unwrap();
    let mut agent = JoinSet::new();
    agent.spawn(nstance_agent::run(settings, parts, world.control.clone()));
    let arm = async {
        steps.store(n, Ordering::SeqCst);
        armed(world).await;
    };
    tokio::select! {
        died = agent.join_next() => {
            assert!(died.unwrap().unwrap_err().is_panic());
            true
        }
        () = arm => {
            agent.shutdown().await;
            false
        }
    }
}

/// After a death at any step a new start ends well: serving, with one certificate that is the key's and good.
async fn ends_well(world: &mut World, key: Option<&[u8]>) {
    world.control = Control::new();
    while world.seen.try_recv().is_ok() {}
    world.start_agent_with(world.settings_with(&[("METRICS_INTERVAL", "0")]));
    world.next_report().await;
    world.until(serving).await;
    let peer = certificate(world);
    let now = world.plane.clock.now();
    assert!(peer.not_before < now && now < peer.not_after);
    let found = fs::read(world.path("identity/identity.key")).unwrap();
    assert!(key.is_none_or(|key| key == found), "the key stays");
    assert_eq!(KeyPair::from_pkcs8_pem(&found).unwrap().public_key(), peer.public_key);
    assert!(!world.path("identity/nonce.jwt").exists());
}

#[tokio::test(start_paused = true)]
async fn death_at_any_step_of_a_registration_is_only_a_later_start() {
    let mut n = 0;
    loop {
        let mut world = World::with(9, Arc::new(TokioClock::starting_at(START)));
        *world.plane.ttl.lock().unwrap() = LIFE;
        world.write_nonce(HOUR);
        world.script_register([Register::SignAndLose]);
        world.start_server();
        let died = dies_at(&mut world, n, async |world| {
            world.until(serving).await;
        })
        .await;
        ends_well(&mut world, None).await;
        if !died {
            break;
        }
        n += 1;
    }
    assert!(10 < n, "{n} steps");
}

#[tokio::test(start_paused = true)]
async fn death_at_any_step_of_a_renewal_is_only_a_later_start() {
    let mut n = 0;
    loop {
        let mut world = World::with(9, Arc::new(TokioClock::starting_at(START)));
        *world.plane.ttl.lock().unwrap() = LIFE;
        // Enrolled by an earlier process; this one only renews.
        let key = KeyPair::generate(&*world.plane.dice).to_pkcs8_pem().as_bytes().to_vec();
        let public = KeyPair::from_pkcs8_pem(&key).unwrap().public_key();
        fs::write(world.path("identity/identity.key"), &key).unwrap();
        fs::write(world.path("identity/identity.crt"), world.plane.sign(&public, LIFE)).unwrap();
        fs::write(world.path("identity/cluster.id"), "demo").unwrap();
        world.start_server();
        let died = dies_at(&mut world, n, async |world| {
            world.next_renewal().await;
            while !matches!(world.next().await, Seen::StreamOpened { .. }) {}
            world.next_report().await;
        })
        .await;
        ends_well(&mut world, Some(&key)).await;
        if !died {
            break;
        }
        n += 1;
    }
    assert!(3 < n, "{n} steps");
}

/// Everything that a rejoin writes: its counter, the new bundle, the certificate, the counter again.
#[tokio::test(start_paused = true)]
async fn death_at_any_step_of_a_rejoin_is_only_a_later_start() {
    let mut n = 0;
    loop {
        let mut world = World::with(9, Arc::new(TokioClock::starting_at(START)));
        let newer = World::with(10, world.plane.clock.clone());
        let both = [newer.plane.ca.bundle_pem(), world.plane.ca.bundle_pem()].concat();
        let key = KeyPair::generate(&*world.plane.dice).to_pkcs8_pem().as_bytes().to_vec();
        let public = KeyPair::from_pkcs8_pem(&key).unwrap().public_key();
        fs::write(world.path("identity/identity.key"), &key).unwrap();
        fs::write(world.path("identity/identity.crt"), world.plane.sign(&public, LIFE)).unwrap();
        fs::write(world.path("identity/cluster.id"), "demo").unwrap();
        // It slept for longer than its certificate lives.
        tokio::time::sleep(2 * LIFE).await;
        world.script_register((0..3).map(|_| Register::SignWithBundle(both.clone())));
        world.start_server();
        let died = dies_at(&mut world, n, async |world| {
            world.until(serving).await;
        })
        .await;
        let counter = |world: &World| fs::read_to_string(world.path("identity/rejoin.counter")).ok();
        let is_over = counter(&world).as_deref() == Some("1\n");
        assert!(
            !is_over || world.plane.clock.now() < certificate(&world).not_after,
            "step {n}: the certificate is first"
        );
        ends_well(&mut world, Some(&key)).await;
        assert_eq!(fs::read_to_string(world.path("identity/ca.crt")).unwrap(), both, "step {n}");
        // However often it was sent: always the same one, which a server that has heard it answers again.
        assert!(["1\n", "1 sent\n"].contains(&counter(&world).unwrap().as_str()), "step {n}: {:?}", counter(&world));
        if !died {
            break;
        }
        n += 1;
    }
    assert!(14 < n, "{n} steps");
}
