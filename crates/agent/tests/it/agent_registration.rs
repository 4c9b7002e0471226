//! Registration: every class of answer, lost answers, parked agents, rejoining.

use std::{fs, sync::Arc, time::Duration};

use crate::common::{DAY, REGISTRATION, Register, Skewed, Talk, World, refusal};
use nstance_agent::{Control, State};
use nstance_identity::keys::KeyPair;
use tonic::Code;

const HOUR: Duration = Duration::from_secs(3600);

fn serving(state: &State) -> bool {
    *state == State::Serving
}

#[tokio::test(start_paused = true)]
async fn fresh_machine_registers_and_serves() {
    let mut world = World::new();
    world.write_nonce(HOUR);
    world.start_server();
    world.start_agent();
    let (_, request) = world.next_registration().await;
    assert!(!request.registration_nonce_jwt.is_empty() && request.rejoin.is_none());
    assert_eq!(request.private_ipv4, "10.9.8.7");
    assert!(!request.hostname.is_empty() && !request.client_version.is_empty());
    world.until(serving).await;
    assert!(!world.path("identity/nonce.jwt").exists());
    assert!(world.path("identity/identity.crt").exists());
    assert_eq!(fs::read_to_string(world.path("identity/config.hash")).unwrap(), "sha256:00");
    assert_eq!(fs::read_to_string(world.path("identity/cluster.id")).unwrap(), "demo");
}

#[tokio::test(start_paused = true)]
async fn key_is_on_disk_before_the_first_call() {
    let mut world = World::new();
    world.write_nonce(HOUR);
    world.script_register([Register::Hang]);
    world.start_server();
    world.start_agent();
    let (_, request) = world.next_registration().await;
    let key = KeyPair::from_pkcs8_pem(&fs::read(world.path("identity/identity.key")).unwrap()).unwrap();
    assert_eq!(request.public_key_pem, key.public_key_pem().into_bytes());
}

#[tokio::test(start_paused = true)]
async fn machine_with_a_certificate_does_not_register_and_drops_a_stale_nonce() {
    let mut world = World::new();
    let key = KeyPair::generate(&*world.plane.dice);
    fs::write(world.path("identity/identity.key"), key.to_pkcs8_pem().as_bytes()).unwrap();
    fs::write(world.path("identity/identity.crt"), world.plane.sign(&key.public_key(), DAY)).unwrap();
    world.write_nonce(HOUR);
    world.start_server();
    world.start_agent();
    world.next_stream().await;
    assert!(world.net.dialled.lock().unwrap().iter().all(|(_, address)| address != REGISTRATION));
    assert!(!world.path("identity/nonce.jwt").exists());
}

#[tokio::test(start_paused = true)]
async fn lost_answer_is_repeated_with_the_same_key() {
    let mut world = World::new();
    world.write_nonce(HOUR);
    world.script_register([Register::SignAndLose, Register::Hang, Register::Nonsense]);
    world.start_server();
    world.start_agent();
    let mut keys = Vec::new();
    for _ in 0..4 {
        keys.push(world.next_registration().await.1.public_key_pem);
    }
    keys.dedup();
    assert_eq!(keys.len(), 1);
    world.until(serving).await;
}

#[tokio::test(start_paused = true)]
async fn crash_at_any_write_is_only_a_later_start() {
    let key = |world: &World| {
        let key = KeyPair::generate(&*world.plane.dice);
        fs::write(world.path("identity/identity.key"), key.to_pkcs8_pem().as_bytes()).unwrap();
        key
    };
    type Prepare<'a> = &'a dyn Fn(&World);
    let states: [(&str, Prepare<'_>); 5] = [
        ("half a key", &|world| fs::write(world.path("identity/.identity.key.tmp"), "-----BEG").unwrap()),
        ("key, no answer yet", &|world| drop(key(world))),
        ("half a certificate", &|world| {
            key(world);
            fs::write(world.path("identity/.identity.crt.tmp"), "-----BEGIN CERT").unwrap();
        }),
        ("certificate, nonce not yet removed", &|world| {
            let chain = world.plane.sign(&key(world).public_key(), DAY);
            fs::write(world.path("identity/identity.crt"), chain).unwrap();
        }),
        ("certificate of a key that is gone", &|world| {
            let other = KeyPair::generate(&*world.plane.dice);
            fs::write(world.path("identity/identity.crt"), world.plane.sign(&other.public_key(), DAY)).unwrap();
        }),
    ];
    for (what, prepare) in states {
        let world = World::new();
        world.write_nonce(HOUR);
        prepare(&world);
        world.start_server();
        world.start_agent();
        world.until(serving).await;
        assert!(!world.path("identity/nonce.jwt").exists(), "{what}");
        let key = KeyPair::from_pkcs8_pem(&fs::read(world.path("identity/identity.key")).unwrap()).unwrap();
        let tls =
            nstance_identity::tls::ServerIdentity::new(&fs::read(world.path("identity/identity.crt")).unwrap(), &key);
        assert!(tls.is_ok(), "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn unreadable_key_parks_rather_than_being_replaced() {
    let world = World::new();
    world.write_nonce(HOUR);
    fs::write(world.path("identity/identity.key"), "nonsense").unwrap();
    world.start_server();
    world.start_agent();
    assert!(world.until_parked().await.contains("identity.key"));
    assert_eq!(fs::read_to_string(world.path("identity/identity.key")).unwrap(), "nonsense");
}

/// A file that is there and cannot be read is no proof that there is none.
#[tokio::test(start_paused = true)]
async fn certificate_that_cannot_be_read_for_a_while_parks_nobody() {
    let mut world = World::new();
    world.write_nonce(HOUR);
    let server = world.start_server();
    world.start_agent();
    world.until(serving).await;
    let hide = |world: &World| {
        fs::rename(world.path("identity/identity.crt"), world.path("identity/aside")).unwrap();
        fs::create_dir(world.path("identity/identity.crt")).unwrap();
    };
    let mend = |world: &World| {
        fs::remove_dir(world.path("identity/identity.crt")).unwrap();
        fs::rename(world.path("identity/aside"), world.path("identity/identity.crt")).unwrap();
    };
    let is_parked = |world: &World| matches!(*world.control.state().borrow(), State::Parked(_));
    // While it looks for a server …
    hide(&world);
    world.kill(server).await;
    world.until(|state| *state == State::Connecting).await;
    tokio::time::sleep(HOUR).await;
    assert!(!is_parked(&world));
    mend(&world);
    let _server = world.start_server();
    world.until(serving).await;

    // … and when it starts.
    world.control.stop();
    world.until(|state| *state == State::Leaving).await;
    world.control = Control::new();
    hide(&world);
    world.start_agent();
    world.until(|state| *state == State::Enrolling).await;
    tokio::time::sleep(HOUR).await;
    assert!(!is_parked(&world));
    mend(&world);
    world.until(serving).await;
}

#[tokio::test(start_paused = true)]
async fn transient_refusals_are_retried_with_growing_waits() {
    let mut world = World::new();
    world.write_nonce(HOUR);
    world.script_register([
        Register::Refuse(Code::Unavailable, "NOT_READY"),
        Register::Refuse(Code::ResourceExhausted, "RATE_LIMITED"),
        Register::Refuse(Code::Internal, ""),
        Register::Refuse(Code::Unauthenticated, "NONCE_NOT_YET_VALID"),
        Register::Refuse(Code::PermissionDenied, "NOBODY_KNOWS"),
    ]);
    world.start_server();
    world.start_agent();
    let (first, _) = world.next_registration().await;
    for _ in 0..4 {
        world.next_registration().await;
    }
    let (last, _) = world.next_registration().await;
    assert!(last - first < Duration::from_millis(200 + 400 + 800 + 1600 + 3200));
    world.until(serving).await;
}

#[tokio::test(start_paused = true)]
async fn server_spreads_its_fleet_by_telling_the_wait() {
    let mut world = World::new();
    world.write_nonce(HOUR);
    world.script_register((0..30).map(|_| Register::RefuseFor(Code::Unavailable, "NOT_READY", 20_000)));
    world.start_server();
    world.start_agent();
    let (first, _) = world.next_registration().await;
    for _ in 0..29 {
        world.next_registration().await;
    }
    let (last, _) = world.next_registration().await;
    let mean = (last - first) / 30;
    assert!(Duration::from_secs(6) < mean && mean < Duration::from_secs(14), "{mean:?}");
}

#[tokio::test(start_paused = true)]
async fn every_final_refusal_parks_the_agent() {
    for (code, reason) in [
        (Code::InvalidArgument, "BAD_REQUEST"),
        (Code::Unauthenticated, "NONCE_INVALID"),
        (Code::Unauthenticated, "NONCE_WRONG_KIND"),
        (Code::Unauthenticated, "NONCE_EXPIRED"),
        (Code::InvalidArgument, "WRONG_CLUSTER"),
        (Code::InvalidArgument, "WRONG_SHARD"),
        (Code::Unauthenticated, "INSTANCE_UNKNOWN"),
        (Code::PermissionDenied, "INSTANCE_DELETED"),
        (Code::Unauthenticated, "NONCE_SUPERSEDED"),
        (Code::Unauthenticated, "NONCE_USED"),
    ] {
        let mut world = World::new();
        world.write_nonce(HOUR);
        world.script_register([Register::Refuse(code, reason)]);
        world.start_server();
        world.start_agent();
        world.next_registration().await;
        assert!(world.until_parked().await.contains(reason));
        // Hang, do not hammer.
        let n_dialled = world.net.dialled.lock().unwrap().len();
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(world.net.n_open(), 0);
        assert_eq!(world.net.dialled.lock().unwrap().len(), n_dialled, "{reason}");
    }
}

#[tokio::test(start_paused = true)]
async fn parked_agent_tries_again_with_a_new_nonce() {
    let mut world = World::new();
    world.write_nonce(HOUR);
    world.script_register([Register::Refuse(Code::Unauthenticated, "NONCE_SUPERSEDED")]);
    world.start_server();
    world.start_agent();
    let (_, first) = world.next_registration().await;
    world.until_parked().await;
    world.write_nonce(HOUR * 2);
    let (_, second) = world.next_registration().await;
    assert_ne!(first.registration_nonce_jwt, second.registration_nonce_jwt);
    assert_eq!(first.public_key_pem, second.public_key_pem);
    world.until(serving).await;
}

/// It supersedes the one that is being tried, whose refusal says so.
#[tokio::test(start_paused = true)]
async fn nonce_that_comes_while_another_is_tried_is_taken() {
    let superseded = Register::RefuseAfter(Duration::from_secs(5), Code::Unauthenticated, "NONCE_SUPERSEDED");
    for answer in [superseded, Register::Hang] {
        let mut world = World::new();
        world.write_nonce(HOUR);
        world.script_register([answer]);
        world.start_server();
        world.start_agent();
        let (_, first) = world.next_registration().await;
        world.write_nonce(HOUR * 2);
        let (_, second) = world.next_registration().await;
        assert_ne!(first.registration_nonce_jwt, second.registration_nonce_jwt);
        world.until(serving).await;
    }
}

#[tokio::test(start_paused = true)]
async fn parked_agent_is_woken_by_hand() {
    let mut world = World::new();
    world.write_nonce(HOUR);
    world.script_register([Register::Refuse(Code::Unauthenticated, "INSTANCE_UNKNOWN")]);
    world.start_server();
    world.start_agent();
    world.next_registration().await;
    world.until_parked().await;
    world.control.reload();
    world.next_registration().await;
    world.until(serving).await;
}

#[tokio::test(start_paused = true)]
async fn machine_without_proof_or_with_a_malformed_one_is_parked() {
    let world = World::new();
    world.start_agent();
    assert!(world.until_parked().await.contains("nonce.jwt"));

    let world = World::new();
    fs::write(world.path("identity/nonce.jwt"), "not a token").unwrap();
    world.start_agent();
    assert!(world.until_parked().await.contains("malformed"));
    assert!(world.net.dialled.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn nonce_that_runs_out_before_success_parks_the_agent() {
    let world = World::new();
    world.write_nonce(Duration::from_secs(600));
    world.start_agent();
    assert_eq!(world.until_parked().await, "registration-expired");
    let dialled = world.net.dialled.lock().unwrap();
    // Ten minutes and the leeway, at first every few seconds, then every fifteen at most.
    assert!(60 < dialled.len() && dialled.len() < 400, "{}", dialled.len());
    assert!(Duration::from_secs(640) < dialled.last().unwrap().0 - dialled[0].0);
}

#[tokio::test(start_paused = true)]
async fn clock_ahead_of_the_server_does_not_stop_the_first_try() {
    let mut world = World::new();
    world.write_nonce(Duration::from_secs(60));
    // The agent's clock stands past the nonce's end before it tries at all; here the server's does not decide otherwise,
    // so it is the server that says so.
    tokio::time::advance(Duration::from_secs(600)).await;
    world.start_server();
    world.start_agent();
    world.next_registration().await;
    assert!(world.until_parked().await.contains("NONCE_EXPIRED"));
}

#[tokio::test(start_paused = true)]
async fn untrusted_server_is_asked_slowly_and_served_once_the_ca_arrives() {
    // The leader alone, and with followers, where nobody listens.
    for addresses in ["localhost:8992", "localhost:8992,b.example.com:8992", "a.example.com:8992,localhost:8992"] {
        let mut world = World::new();
        world.write_nonce(DAY);
        let right = fs::read(world.path("identity/ca.crt")).unwrap();
        let other = World::with(99, world.plane.clock.clone());
        fs::write(world.path("identity/ca.crt"), other.plane.ca.bundle_pem()).unwrap();
        world.start_server();
        world.start_agent_with(world.settings_with(&[("SERVER_REGISTRATION_ADDR", addresses)]));
        tokio::time::sleep(HOUR).await;
        let dialled = world.net.dialled.lock().unwrap().clone();
        let n_dialled = dialled.iter().filter(|(_, address)| address == REGISTRATION).count();
        assert!((100..=140).contains(&n_dialled), "{addresses}: {n_dialled}");
        fs::write(world.path("identity/ca.crt"), right).unwrap();
        world.next_registration().await;
        world.until(serving).await;
    }
}

/// What a server says is worth more than that another is not trusted: it may be the leader.
#[tokio::test(start_paused = true)]
async fn refusal_of_one_server_outweighs_that_another_is_not_trusted() {
    let mut world = World::new();
    world.write_nonce(HOUR);
    let stranger = World::with(99, world.plane.clock.clone());
    let server = world.start_server_of(&stranger.plane);
    let elsewhere = world.net.move_listener(REGISTRATION, "a.example.com:8992");
    assert!(elsewhere);
    world.script_register((0..4).map(|_| Register::Refuse(Code::Unavailable, "NOT_READY")));
    world.start_server();
    world.start_agent_with(world.settings_with(&[("SERVER_REGISTRATION_ADDR", "localhost:8992,a.example.com:8992")]));
    let (first, _) = world.next_registration().await;
    for _ in 0..3 {
        world.next_registration().await;
    }
    let (last, _) = world.next_registration().await;
    assert!(last - first < Duration::from_millis(200 + 400 + 800 + 1600), "{:?}", last - first);
    drop(server);
}

#[tokio::test(start_paused = true)]
async fn addresses_are_tried_in_order_without_a_pause() {
    let mut world = World::new();
    world.write_nonce(HOUR);
    world.start_server();
    let addresses = "a.example.com:8992,b.example.com:8992,localhost:8992";
    world.start_agent_with(world.settings_with(&[("SERVER_REGISTRATION_ADDR", addresses)]));
    world.next_registration().await;
    let dialled = world.net.dialled.lock().unwrap().clone();
    let names: Vec<_> = dialled.iter().map(|(_, name)| name.as_str()).collect();
    assert_eq!(names[..3], ["a.example.com:8992", "b.example.com:8992", "localhost:8992"]);
    assert_eq!(dialled[0].0, dialled[2].0);
}

#[tokio::test(start_paused = true)]
async fn bundle_of_the_answer_is_taken_only_if_it_overlaps() {
    let world = World::new();
    world.write_nonce(HOUR);
    let newer = World::with(98, world.plane.clock.clone());
    let both = [newer.plane.ca.bundle_pem(), world.plane.ca.bundle_pem()].concat();
    world.script_register([Register::SignWithBundle(both.clone())]);
    world.start_server();
    world.start_agent();
    world.until(serving).await;
    assert_eq!(fs::read_to_string(world.path("identity/ca.crt")).unwrap(), both);

    let world = World::new();
    world.write_nonce(HOUR);
    world.script_register([Register::SignWithBundle(newer.plane.ca.bundle_pem().to_owned())]);
    world.start_server();
    world.start_agent();
    world.until(serving).await;
    assert_eq!(fs::read_to_string(world.path("identity/ca.crt")).unwrap(), world.plane.ca.bundle_pem());
}

#[tokio::test(start_paused = true)]
async fn agent_rejoins_after_long_sleep_with_its_old_key() {
    let mut world = World::new();
    world.write_nonce(HOUR);
    *world.plane.ttl.lock().unwrap() = HOUR;
    let server = world.start_server();
    world.start_agent();
    let (_, first) = world.next_registration().await;
    world.until(serving).await;
    world.kill(server).await;
    tokio::time::sleep(HOUR * 2).await;
    world.script_register([Register::SignAndLose]);
    world.start_server();
    let (_, lost) = world.next_registration().await;
    assert_eq!(fs::read_to_string(world.path("identity/rejoin.counter")).unwrap(), "1 sent\n");
    let (_, again) = world.next_registration().await;
    let proof = again.rejoin.clone().unwrap();
    assert_eq!(lost.rejoin, again.rejoin);
    assert_eq!(
        (proof.client_id.as_str(), proof.tenant.as_str(), proof.counter),
        (crate::common::INSTANCE, "default", 1)
    );
    assert!(again.registration_nonce_jwt.is_empty());
    assert_eq!(first.public_key_pem, again.public_key_pem);
    world.until(serving).await;
    assert_eq!(fs::read_to_string(world.path("identity/rejoin.counter")).unwrap(), "1\n");
}

#[tokio::test(start_paused = true)]
async fn refused_rejoin_parks_and_a_new_nonce_helps() {
    let mut world = World::new();
    world.write_nonce(HOUR);
    world.start_server();
    world.script_talk([Talk::Refuse(Code::Unauthenticated, "CERT_SUPERSEDED")]);
    world.script_register([Register::Sign, Register::Refuse(Code::PermissionDenied, "REJOIN_COUNTER")]);
    world.start_agent();
    assert!(world.until_parked().await.contains("REJOIN_COUNTER"));
    world.next_registration().await;
    world.next_registration().await;
    world.write_nonce(HOUR * 2);
    let (_, request) = world.next_registration().await;
    assert!(!request.registration_nonce_jwt.is_empty());
    world.until(serving).await;
}

/// An agent whose certificate ran out, and whose rejoin was refused just then: its instance is deleted.
async fn dismissed_by_its_rejoin() -> (World, tokio::time::Instant) {
    let mut world = World::new();
    world.write_nonce(HOUR);
    world.start_server();
    world.script_talk([Talk::Refuse(Code::Unauthenticated, "CERT_EXPIRED")]);
    world.script_register([Register::Sign, Register::Refuse(Code::PermissionDenied, "INSTANCE_DELETED")]);
    world.start_agent();
    world.until(|state| *state == State::Dismissed).await;
    world.next_registration().await;
    let (refused, _) = world.next_registration().await;
    (world, refused)
}

#[tokio::test(start_paused = true)]
async fn rejoin_of_a_deleted_instance_is_dismissed_and_looks_again() {
    let (mut world, refused) = dismissed_by_its_rejoin().await;
    let (again, _) = world.next_registration().await;
    assert!((Duration::from_secs(53)..Duration::from_secs(67)).contains(&(again - refused)));
    world.until(serving).await;
}

#[tokio::test(start_paused = true)]
async fn dismissed_agent_whose_rejoin_is_accepted_is_dismissed_no_longer() {
    let (mut world, _) = dismissed_by_its_rejoin().await;
    // Nobody is there for its session, so that nothing else makes it forget.
    world.net.hang_at(crate::common::AGENT);
    world.next_registration().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(*world.control.state().borrow(), State::Connecting);
}

/// That nobody answers is no reason to hope, nor to hurry.
#[tokio::test(start_paused = true)]
async fn dismissed_agent_stays_so_while_it_rejoins_and_no_server_is_there() {
    let deleted = (Code::PermissionDenied, "INSTANCE_DELETED");
    for (talk, answer) in [
        // Dismissed by its rejoin …
        (Talk::Refuse(Code::Unauthenticated, "CERT_EXPIRED"), Register::Refuse(deleted.0, deleted.1)),
        // … or by its session, and its certificate runs out meanwhile.
        (Talk::Refuse(deleted.0, deleted.1), Register::Sign),
    ] {
        let world = World::new();
        *world.plane.ttl.lock().unwrap() = HOUR / 2;
        world.write_nonce(HOUR);
        let server = world.start_server();
        world.script_talk([talk]);
        world.script_register([Register::Sign, answer]);
        world.start_agent();
        world.until(|state| *state == State::Dismissed).await;
        world.kill(server).await;
        let n_dialled = || world.net.dialled.lock().unwrap().len();
        tokio::time::sleep(HOUR).await;
        let n_before = n_dialled();
        tokio::time::sleep(HOUR).await;
        let n_looks = n_dialled() - n_before;
        assert!((54..=67).contains(&n_looks), "{n_looks} in an hour");
        assert_eq!(*world.control.state().borrow(), State::Dismissed);
    }
}

/// What was broken is the bundle; nobody has said anything against the certificate.
#[tokio::test(start_paused = true)]
async fn broken_bundle_that_is_mended_does_not_cost_a_good_certificate() {
    let mut world = World::new();
    world.write_nonce(HOUR);
    let server = world.start_server();
    world.start_agent();
    world.next_registration().await;
    world.until(serving).await;
    let right = fs::read(world.path("identity/ca.crt")).unwrap();
    fs::write(world.path("identity/ca.crt"), "nonsense").unwrap();
    world.kill(server).await;
    assert!(world.until_parked().await.contains("ca.crt"));
    let _server = world.start_server();
    fs::write(world.path("identity/ca.crt"), right).unwrap();
    world.until(serving).await;
    while let Ok(seen) = world.seen.try_recv() {
        assert!(!matches!(seen, crate::common::Seen::Registered { .. }), "it asked for another one");
    }
}

/// The first certificate of the file is this machine's and good; what follows it is torn, so that the file cannot be used.
#[tokio::test(start_paused = true)]
async fn certificate_with_a_torn_chain_parks_and_a_new_nonce_helps() {
    let mut world = World::new();
    world.write_nonce(HOUR);
    let server = world.start_server();
    world.start_agent();
    world.next_registration().await;
    world.until(serving).await;
    let mut torn = fs::read_to_string(world.path("identity/identity.crt")).unwrap();
    torn.push_str("-----BEGIN CERTIFICATE-----\nMIIB");
    fs::write(world.path("identity/identity.crt"), torn).unwrap();
    world.kill(server).await;
    assert!(world.until_parked().await.contains("identity.crt"));
    let _server = world.start_server();
    world.write_nonce(HOUR * 2);
    let (_, request) = world.next_registration().await;
    assert!(!request.registration_nonce_jwt.is_empty() && request.rejoin.is_none());
    world.until(serving).await;
}

/// Whoever was given up by the servers need not be restarted to look at what was brought to it.
#[tokio::test(start_paused = true)]
async fn new_nonce_helps_an_agent_whose_rejoin_is_refused_over_and_over() {
    for reason in ["REJOIN_REFUSED", "INSTANCE_DELETED"] {
        let mut world = World::new();
        world.write_nonce(HOUR);
        world.start_server();
        world.script_talk([Talk::Refuse(Code::Unauthenticated, "CERT_SUPERSEDED")]);
        let refused = (0..20).map(|_| Register::Refuse(Code::Unauthenticated, reason));
        world.script_register([Register::Sign].into_iter().chain(refused));
        world.start_agent();
        for _ in 0..10 {
            world.next_registration().await;
        }
        world.plane.register.lock().unwrap().clear();
        world.write_nonce(HOUR * 2);
        let (_, request) = world.next_registration().await;
        assert!(!request.registration_nonce_jwt.is_empty() && request.rejoin.is_none(), "{reason}");
        world.until(serving).await;
    }
}

#[tokio::test(start_paused = true)]
async fn dismissed_agent_takes_a_new_nonce_and_is_woken_by_a_reload() {
    let mut world = World::new();
    world.write_nonce(HOUR);
    world.start_server();
    world.script_talk((0..20).map(|_| Talk::Refuse(Code::PermissionDenied, "INSTANCE_DELETED")));
    world.start_agent();
    world.next_registration().await;
    world.until(|state| *state == State::Dismissed).await;
    world.next_stream().await;
    world.plane.talk.lock().unwrap().clear();
    world.write_nonce(HOUR * 2);
    let told = tokio::time::Instant::now();
    world.control.reload();
    let (at, request) = world.next_registration().await;
    assert!(!request.registration_nonce_jwt.is_empty());
    assert!(at - told < Duration::from_secs(1), "{:?}", at - told);
    world.until(serving).await;
}

/// The nonce is good for half an hour, the machine's clock an hour off: the server's clock decides.
#[tokio::test(start_paused = true)]
async fn skewed_agent_registers() {
    for (ahead, behind) in [(HOUR, Duration::ZERO), (Duration::ZERO, HOUR)] {
        let mut world = World::new();
        world.start_server();
        // The server is up for longer than the clock is off, as servers are.
        tokio::time::sleep(HOUR * 2).await;
        world.write_nonce(HOUR / 2);
        world.start_skewed(ahead, behind, &[]);
        let (_, request) = world.next_registration().await;
        assert!(!request.registration_nonce_jwt.is_empty());
        world.until(serving).await;
        // And it stays: for a certificate that seems not to be valid yet, or to be nearly over, nobody registers again.
        tokio::time::sleep(HOUR).await;
        assert!(serving(&world.control.state().borrow()));
    }
}

/// A nonce lives for minutes, and one failure is nothing special while a machine boots.
#[tokio::test(start_paused = true)]
async fn clock_ahead_of_the_nonce_does_not_stop_later_tries() {
    let mut world = World::new();
    world.start_server();
    tokio::time::sleep(HOUR * 2).await;
    world.write_nonce(HOUR / 12);
    world.script_register([Register::Refuse(Code::Unavailable, "NOT_READY"), Register::SignAndLose]);
    world.start_skewed(HOUR, Duration::ZERO, &[]);
    for _ in 0..3 {
        world.next_registration().await;
    }
    world.until(serving).await;
}

/// Of all that can be wrong with a server's certificate, this is the machine's own fault, and a person is told so.
#[tokio::test(start_paused = true)]
async fn server_certificate_of_the_future_points_to_the_clock() {
    let world = World::new();
    world.start_server();
    let clock = Arc::new(Skewed { right: world.plane.clock.clone(), ahead: Duration::ZERO, behind: HOUR });
    let bundle = nstance_identity::ca::Bundle::parse(world.plane.ca.bundle_pem().as_bytes()).unwrap();
    let mut texts = Vec::new();
    for _ in 0..2 {
        let tls = nstance_identity::tls::client_config(&bundle, None, clock.clone()).unwrap();
        let address = nstance_agent::settings::Address::parse(REGISTRATION).unwrap();
        let error = nstance_agent::link::dial(&*world.net, &tls, &address).await.err().expect("not trusted yet");
        texts.push(nstance_rt::chain::Chain(&error).to_string());
        tokio::time::sleep(Duration::from_secs(30)).await;
    }
    assert!(texts[0].contains("check this machine's clock"), "{texts:?}");
    assert_eq!(texts[0], texts[1], "the same cause is the same text, so that it is logged once");
}

#[tokio::test(start_paused = true)]
async fn stop_while_enrolling_or_parked_ends_at_once() {
    let world = World::new();
    world.write_nonce(HOUR);
    let started = tokio::time::Instant::now();
    let run = nstance_agent::run(world.settings(), world.parts(), world.control.clone());
    tokio::join!(run, async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        world.control.stop();
    });
    assert!(started.elapsed() < Duration::from_millis(5100));

    let world = World::new();
    let run = nstance_agent::run(world.settings(), world.parts(), world.control.clone());
    tokio::join!(run, async {
        world.until_parked().await;
        world.control.stop();
    });
    // The helper's own form of a refusal carries what the agent reads.
    assert_eq!(refusal(Code::Aborted, "SUPERSEDED").code(), Code::Aborted);
}
