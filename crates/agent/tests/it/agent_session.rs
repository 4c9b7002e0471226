//! The session: first report at once, cadence, every way a stream or connection ends, and the farewell.

use std::{process::Stdio, sync::Arc, time::Duration};

use crate::common::{
    Seen, Talk, World,
    files::{commit, file, say},
};
use nstance_agent::{State, host::Host};
use nstance_core::ports::clock::Clock as _;
use nstance_identity::keys::KeyPair;
use nstance_proto::v1::{KeyGenerationRequest, ReportKind};
use nstance_rt::clock::SystemClock;
use tokio::{net::TcpListener, sync::mpsc, time::Instant};
use tonic::Code;

const HOUR: Duration = Duration::from_secs(3600);
const SECOND: Duration = Duration::from_secs(1);

/// A world with an enrolled agent whose server is up.
async fn serving_world() -> (World, nstance_rt::tasks::Tasks) {
    let mut world = World::new();
    world.write_nonce(HOUR);
    let server = world.start_server();
    world.start_agent();
    world.next_report().await;
    world.until(|state| *state == State::Serving).await;
    (world, server)
}

fn enrolling_world() -> World {
    let world = World::new();
    world.write_nonce(HOUR);
    world.start_server();
    world
}

#[tokio::test(start_paused = true)]
async fn first_report_comes_at_once_and_says_who_and_what() {
    let mut world = enrolling_world();
    world.start_agent();
    let (opened, _) = world.next_stream().await;
    let (at, report) = world.next_report().await;
    assert_eq!(at, opened);
    assert_eq!(report.kind(), ReportKind::First);
    assert_eq!(report.instance_id, crate::common::INSTANCE);
    assert_eq!((report.count, report.interval_ms), (1, 60_000));
    assert_eq!(report.config_hash, "sha256:00");
    assert_eq!(report.private_ipv4, "10.9.8.7");
    assert_eq!(report.session_id.len(), 32);
    assert!(0 < report.machine.unwrap().cpu_count);
    assert!(report.started.is_some() && report.timestamp.is_some() && report.uptime.ends_with('s'));
    assert!(report.termination_notice.is_none());
}

#[tokio::test(start_paused = true)]
async fn reports_follow_the_interval_within_ten_per_cent() {
    let (mut world, _server) = serving_world().await;
    let (mut before, first) = world.next_report().await;
    assert_eq!((first.kind(), first.count), (ReportKind::Periodic, 2));
    for count in 3..20 {
        let (at, report) = world.next_report().await;
        let gap = at - before;
        assert!(Duration::from_secs(53) < gap && gap < Duration::from_secs(67), "{gap:?}");
        assert_eq!(report.count, count);
        assert!(report.machine.is_none());
        before = at;
    }
}

#[tokio::test(start_paused = true)]
async fn name_that_the_machine_gets_late_is_reported_out_of_turn() {
    let mut world = enrolling_world();
    let name = world.path("root/proc/sys/kernel/hostname");
    std::fs::create_dir_all(name.parent().unwrap()).unwrap();
    std::fs::write(&name, "localhost\n").unwrap();
    let parts = nstance_agent::Components { host: Host::at(world.path("root")), ..world.parts() };
    let settings = world.settings_with(&[("METRICS_INTERVAL", "0")]);
    world.tasks.spawn_droppable("agent", nstance_agent::run(settings, parts, world.control.clone()));
    let (_, report) = world.next_report().await;
    assert_eq!((report.hostname.as_str(), report.fqdn.as_str()), ("localhost", ""));
    world.until(|state| *state == State::Serving).await;
    while report_before(&mut world, Duration::from_secs(60)).await.is_some() {}
    std::fs::write(&name, "web-1.example.com\n").unwrap();
    let renamed = Instant::now();
    let (at, report) = world.next_report().await;
    assert_eq!((report.hostname.as_str(), report.fqdn.as_str()), ("web-1", "web-1.example.com"));
    assert_eq!(report.kind(), ReportKind::Change);
    assert!(at - renamed <= Duration::from_millis(10_200), "{:?}", at - renamed);
    assert!(report_before(&mut world, HOUR).await.is_none_or(|next| next.hostname == "web-1"));
}

/// The next report, if one comes in this time.
async fn report_before(world: &mut World, limit: Duration) -> Option<nstance_proto::v1::HealthReportRequest> {
    tokio::time::timeout(limit, world.next_report()).await.ok().map(|(_, report)| report)
}

#[tokio::test(start_paused = true)]
async fn interval_of_zero_means_the_first_report_only() {
    let mut world = enrolling_world();
    world.start_agent_with(world.settings_with(&[("METRICS_INTERVAL", "0")]));
    assert_eq!(world.next_report().await.1.interval_ms, 0);
    tokio::time::sleep(HOUR).await;
    assert!(world.seen.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn server_that_comes_back_is_found_within_seconds() {
    let (mut world, server) = serving_world().await;
    world.kill(server).await;
    let killed = Instant::now();
    tokio::time::sleep(Duration::from_secs(20)).await;
    let dialled: Vec<_> =
        world.net.dialled.lock().unwrap().iter().map(|(at, _)| *at).filter(|at| killed <= *at).collect();
    assert!(8 < dialled.len() && dialled.len() < 40, "{}", dialled.len());
    let back = Instant::now();
    world.start_server();
    let (at, report) = world.next_report().await;
    assert!(at - back < Duration::from_secs(5));
    assert_eq!((report.kind(), report.count), (ReportKind::First, 2));
}

#[tokio::test(start_paused = true)]
async fn long_absence_makes_the_agent_patient_but_never_tired() {
    let (mut world, server) = serving_world().await;
    world.kill(server).await;
    tokio::time::sleep(HOUR).await;
    let n_before = world.net.dialled.lock().unwrap().len();
    tokio::time::sleep(HOUR).await;
    let n_dialled = world.net.dialled.lock().unwrap().len() - n_before;
    // Full jitter below 15 s: one try in 7.5 s on average.
    assert!((350..650).contains(&n_dialled), "{n_dialled}");
    world.start_server();
    world.next_report().await;
}

#[tokio::test(start_paused = true)]
async fn silent_server_is_noticed_by_keepalive() {
    let (world, _server) = serving_world().await;
    world.net.freeze();
    let since = Instant::now();
    world.until(|state| *state != State::Serving).await;
    assert!(since.elapsed() <= Duration::from_secs(16), "{:?}", since.elapsed());
}

#[tokio::test(start_paused = true)]
async fn stream_refused_for_a_while_is_opened_again_on_the_same_connection() {
    let mut world = enrolling_world();
    world.script_talk((0..4).map(|_| Talk::Refuse(Code::Internal, "ODD")));
    world.start_agent();
    let (first, _) = world.next_stream().await;
    let (second, _) = world.next_stream().await;
    assert_eq!(first, second, "the first time at once");
    for _ in 0..2 {
        world.next_stream().await;
    }
    world.next_report().await;
    let dialled = world.net.dialled.lock().unwrap().clone();
    assert_eq!(dialled.iter().filter(|(_, address)| address == crate::common::AGENT).count(), 1);
}

/// A proxy in between may end a stream and keep the connection.
#[tokio::test(start_paused = true)]
async fn stream_that_is_reset_is_opened_again_on_the_same_connection() {
    for name in ["ReceiveFiles", "KeyGenRequests"] {
        let mut world = enrolling_world();
        let (files, _keys) = (world.feed_files(), world.feed_keys());
        world.plane.resets.lock().unwrap().push(name);
        world.start_agent();
        say(&files, [file("1", "a", "1"), commit("1", "sha256:01")]).await;
        world.next_change().await;
        world.until(|state| *state == State::Serving).await;
        assert!(world.plane.resets.lock().unwrap().is_empty());
        let dialled = world.net.dialled.lock().unwrap().clone();
        assert_eq!(dialled.iter().filter(|(_, address)| address == crate::common::AGENT).count(), 1, "{name}");
    }
}

/// One that goes on resetting is left for another: there is no loop without a pause.
#[tokio::test(start_paused = true)]
async fn server_that_resets_every_stream_is_not_hammered() {
    let world = enrolling_world();
    world.plane.resets.lock().unwrap().extend(["ReceiveFiles"; 10_000]);
    world.start_agent();
    tokio::time::sleep(HOUR).await;
    let n_resets = 10_000 - world.plane.resets.lock().unwrap().len();
    assert!((100..3000).contains(&n_resets), "{n_resets} in an hour");
}

#[tokio::test(start_paused = true)]
async fn told_wait_is_obeyed_on_the_session() {
    let mut world = enrolling_world();
    world.script_talk((0..20).map(|_| Talk::RefuseFor(Code::Unavailable, "NOT_READY", 30_000)));
    world.start_agent();
    let (first, _) = world.next_stream().await;
    for _ in 0..19 {
        world.next_stream().await;
    }
    let mean = (world.next_stream().await.0 - first) / 20;
    assert!(Duration::from_secs(8) < mean && mean < Duration::from_secs(22), "{mean:?}");
}

#[tokio::test(start_paused = true)]
async fn hand_over_is_followed_at_once() {
    for talk in [Talk::EndAfterFirst, Talk::RefuseAfterFirst(Code::Unavailable, "LEADER_CHANGED")] {
        let mut world = enrolling_world();
        world.script_talk([talk]);
        world.start_agent();
        let (first, _) = world.next_report().await;
        let (second, report) = world.next_report().await;
        assert!(second - first < Duration::from_millis(510));
        assert_eq!(report.kind(), ReportKind::First);
    }
}

#[tokio::test(start_paused = true)]
async fn certificate_that_is_not_accepted_leads_to_a_rejoin() {
    for reason in ["CERT_EXPIRED", "CERT_INVALID", "CERT_SUPERSEDED"] {
        let mut world = enrolling_world();
        world.script_talk([Talk::Refuse(Code::Unauthenticated, reason)]);
        world.start_agent();
        world.next_registration().await;
        let (_, old) = world.next_stream().await;
        assert!(world.next_registration().await.1.rejoin.is_some(), "{reason}");
        let (_, new) = world.next_stream().await;
        assert_ne!(old, new);
    }
}

/// It slept through a rotation: its bundle has the new CA, its certificate is by the old one, which nobody trusts now.
#[tokio::test(start_paused = true)]
async fn certificate_of_a_retired_ca_leads_to_a_rejoin() {
    let (mut world, server) = serving_world().await;
    let newer = World::with(98, world.plane.clock.clone());
    let both = [newer.plane.ca.bundle_pem(), world.plane.ca.bundle_pem()].concat();
    std::fs::write(world.path("identity/ca.crt"), &both).unwrap();
    world.kill(server).await;
    world.start_server_of(&newer.plane);
    let swapped = Instant::now();
    world.seen = newer.seen;
    let (at, request) = world.next_registration().await;
    assert_eq!(request.rejoin.unwrap().counter, 1);
    assert!(at - swapped < Duration::from_secs(10), "{:?}", at - swapped);
    world.next_report().await;
    world.until(|state| *state == State::Serving).await;
    assert_eq!(std::fs::read_to_string(world.path("identity/ca.crt")).unwrap(), newer.plane.ca.bundle_pem());
}

/// The agents' port may be what is gone, while there is somebody to rejoin with.
#[tokio::test(start_paused = true)]
async fn certificate_that_ran_out_leads_to_a_rejoin_although_nobody_refused_it() {
    let mut world = enrolling_world();
    *world.plane.ttl.lock().unwrap() = HOUR;
    world.start_agent_with(world.settings_with(&[("SERVER_AGENT_ADDR", "nowhere.example.com:8994")]));
    let (first, request) = world.next_registration().await;
    assert!(request.rejoin.is_none());
    let (at, request) = world.next_registration().await;
    assert_eq!(request.rejoin.unwrap().counter, 1);
    let waited = at - first;
    assert!((HOUR..HOUR + Duration::from_secs(90)).contains(&waited), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn server_that_refuses_what_it_signed_is_not_hammered() {
    let world = enrolling_world();
    world.script_talk((0..1000).map(|_| Talk::Refuse(Code::Unauthenticated, "CERT_INVALID")));
    world.start_agent();
    tokio::time::sleep(HOUR).await;
    let n_dialled = world.net.dialled.lock().unwrap().len();
    // Two connections a try; one try in half a minute on average.
    assert!((150..400).contains(&n_dialled), "{n_dialled}");
}

#[tokio::test(start_paused = true)]
async fn deleted_instance_is_dismissed_and_welcome_later() {
    let mut world = enrolling_world();
    world.script_talk((0..2).map(|_| Talk::Refuse(Code::PermissionDenied, "INSTANCE_DELETED")));
    world.start_agent();
    let (first, _) = world.next_stream().await;
    world.until(|state| *state == State::Dismissed).await;
    let (second, _) = world.next_stream().await;
    assert!((Duration::from_secs(53)..Duration::from_secs(67)).contains(&(second - first)));
    world.next_report().await;
    world.until(|state| *state == State::Serving).await;
}

#[tokio::test(start_paused = true)]
async fn dismissed_agent_is_patient_and_takes_help_also_without_a_server() {
    let world = World::new();
    world.write_nonce(HOUR);
    let server = world.start_server();
    world.script_talk([Talk::Refuse(Code::PermissionDenied, "INSTANCE_DELETED")]);
    world.start_agent();
    world.until(|state| *state == State::Dismissed).await;
    world.kill(server).await;
    let n_dialled = || world.net.dialled.lock().unwrap().len();
    let n_before = n_dialled();
    tokio::time::sleep(HOUR).await;
    let n_looks = n_dialled() - n_before;
    assert!((54..=67).contains(&n_looks), "{n_looks} in an hour");
    assert_eq!(*world.control.state().borrow(), State::Dismissed);
    world.write_nonce(HOUR);
    let brought = Instant::now();
    world.until(|state| *state == State::Enrolling).await;
    assert!(brought.elapsed() < Duration::from_secs(67), "{:?}", brought.elapsed());
}

#[tokio::test(start_paused = true)]
async fn wrong_role_parks() {
    let world = enrolling_world();
    world.script_talk([Talk::Refuse(Code::PermissionDenied, "WRONG_ROLE")]);
    world.start_agent();
    assert!(world.until_parked().await.contains("WRONG_ROLE"));
}

#[tokio::test(start_paused = true)]
async fn shared_identity_waits_a_minute() {
    let mut world = enrolling_world();
    world.script_talk([Talk::RefuseAfterFirst(Code::Aborted, "SUPERSEDED")]);
    world.start_agent();
    let (first, _) = world.next_report().await;
    let (second, _) = world.next_report().await;
    assert!((Duration::from_secs(53)..Duration::from_secs(67)).contains(&(second - first)));
}

#[tokio::test(start_paused = true)]
async fn agent_that_waits_to_come_back_does_not_say_that_it_serves() {
    let mut world = enrolling_world();
    world.script_talk([Talk::RefuseAfter(10 * SECOND, Code::Aborted, "SUPERSEDED")]);
    world.start_agent();
    let (first, _) = world.next_report().await;
    world.until(|state| *state == State::Serving).await;
    let state = world.until(|state| *state != State::Serving).await;
    assert_eq!(state, State::Connecting);
    assert!(first.elapsed() < 11 * SECOND, "{:?}", first.elapsed());
}

/// When an agent has come to its end.
async fn end_of(run: impl Future<Output = ()>) -> Instant {
    run.await;
    Instant::now()
}

#[tokio::test(start_paused = true)]
async fn stop_with_an_open_stream_tells_the_server_at_once() {
    for (setting, action) in [("always", "shutdown"), ("never", "leave")] {
        let mut world = enrolling_world();
        let settings = world.settings_with(&[("LEAVE_ON_STOP", setting)]);
        let run = nstance_agent::run(settings, world.parts(), world.control.clone());
        let (ended, ()) = tokio::join!(end_of(run), async {
            world.next_report().await;
            world.until(|state| *state == State::Serving).await;
            let asked = Instant::now();
            world.control.stop();
            let (at, report) = world.next_report().await;
            assert!(at - asked < Duration::from_millis(50));
            assert_eq!(report.kind(), ReportKind::Notice);
            let notice = report.termination_notice.unwrap();
            assert_eq!(notice.action, action);
            assert!(notice.deadline.is_none() && notice.detected_at.is_some() && !notice.notice_id.is_empty());
            assert!(matches!(world.next().await, Seen::HalfClosed { at } if at - asked < Duration::from_millis(50)));
        });
        assert!(ended.elapsed() < SECOND);
    }
}

#[tokio::test(start_paused = true)]
async fn stop_between_connections_tells_a_server_that_is_there() {
    let mut world = enrolling_world();
    // Dismissed: a minute without a connection, in which the stop comes.
    world.script_talk([Talk::Refuse(Code::PermissionDenied, "INSTANCE_DELETED")]);
    let run = nstance_agent::run(world.settings(), world.parts(), world.control.clone());
    tokio::join!(run, async {
        world.until(|state| *state == State::Dismissed).await;
        world.control.stop();
        let (_, report) = world.next_report().await;
        assert_eq!(report.kind(), ReportKind::Notice);
        assert_eq!(report.termination_notice.unwrap().action, "shutdown");
    });
}

/// The connection dies, or the server does, just as the stop is asked for; another one is there.
#[tokio::test(start_paused = true)]
async fn farewell_whose_stream_dies_under_it_is_said_on_a_new_connection() {
    let mut world = enrolling_world();
    let run = nstance_agent::run(world.settings(), world.parts(), world.control.clone());
    let (ended, asked) = tokio::join!(end_of(run), async {
        world.next_report().await;
        world.until(|state| *state == State::Serving).await;
        world.net.cut();
        world.start_server();
        world.control.stop();
        let asked = Instant::now();
        let (_, report) = world.next_report().await;
        assert_eq!(report.kind(), ReportKind::Notice);
        assert_eq!(report.termination_notice.unwrap().action, "shutdown");
        assert!(matches!(world.next().await, Seen::HalfClosed { .. }));
        asked
    });
    assert!(ended - asked < 2 * SECOND, "{:?}", ended - asked);
}

/// A server that has fallen silent takes half of the time, and another try does not take more than the rest.
#[tokio::test(start_paused = true)]
async fn farewell_that_nobody_hears_ends_within_two_seconds() {
    let mut world = enrolling_world();
    let run = nstance_agent::run(world.settings(), world.parts(), world.control.clone());
    let (ended, asked) = tokio::join!(end_of(run), async {
        world.next_report().await;
        world.until(|state| *state == State::Serving).await;
        world.net.freeze();
        world.start_server();
        world.control.stop();
        Instant::now()
    });
    let dialled = world.net.dialled.lock().unwrap().clone();
    assert!(dialled.iter().any(|(at, _)| *at == asked + SECOND), "it is tried again once it is late: {dialled:?}");
    assert!(ended - asked <= 2 * SECOND, "{:?}", ended - asked);
}

/// The silent server is dialled again, and so is another that swallows everything: both in what is left of the time.
#[tokio::test(start_paused = true)]
async fn farewell_to_a_server_that_fell_silent_is_heard_by_another() {
    let silent = ["localhost:8995", "localhost:8996"];
    let mut world = enrolling_world();
    assert!(world.net.move_listener(crate::common::AGENT, silent[0]));
    let addresses = format!("{},{}", silent.join(","), crate::common::AGENT);
    let settings = world.settings_with(&[("SERVER_AGENT_ADDR", &addresses)]);
    let run = nstance_agent::run(settings, world.parts(), world.control.clone());
    let (ended, asked) = tokio::join!(end_of(run), async {
        world.next_report().await;
        world.until(|state| *state == State::Serving).await;
        world.net.freeze_open();
        for address in silent {
            world.net.hang_at(address);
        }
        world.start_server();
        world.control.stop();
        let asked = Instant::now();
        let (at, report) = world.next_report().await;
        assert_eq!(report.termination_notice.unwrap().action, "shutdown");
        assert!(at - asked < 2 * SECOND, "{:?}", at - asked);
        asked
    });
    assert!(ended - asked < 2 * SECOND, "{:?}", ended - asked);
}

#[tokio::test(start_paused = true)]
async fn address_that_swallows_everything_does_not_silence_the_farewell() {
    let mut world = enrolling_world();
    world.net.hang_at("hole.example.com:8994");
    world.script_talk([Talk::Refuse(Code::PermissionDenied, "INSTANCE_DELETED")]);
    let addresses = format!("hole.example.com:8994,{}", crate::common::AGENT);
    let settings = world.settings_with(&[("SERVER_AGENT_ADDR", &addresses)]);
    let run = nstance_agent::run(settings, world.parts(), world.control.clone());
    let (ended, asked) = tokio::join!(end_of(run), async {
        world.until(|state| *state == State::Dismissed).await;
        let asked = Instant::now();
        world.control.stop();
        let (_, report) = world.next_report().await;
        assert_eq!(report.termination_notice.unwrap().action, "shutdown");
        asked
    });
    assert!(ended - asked < 2 * SECOND, "{:?}", ended - asked);
}

#[tokio::test(start_paused = true)]
async fn stop_with_a_dead_server_ends_within_two_seconds() {
    let mut world = World::new();
    world.write_nonce(HOUR);
    let server = world.start_server();
    let run = nstance_agent::run(world.settings(), world.parts(), world.control.clone());
    let (ended, asked) = tokio::join!(end_of(run), async {
        world.next_report().await;
        world.until(|state| *state == State::Serving).await;
        world.kill(server).await;
        world.net.hang();
        world.until(|state| *state == State::Connecting).await;
        tokio::time::sleep(Duration::from_millis(700)).await;
        world.control.stop();
        Instant::now()
    });
    assert!(ended - asked <= Duration::from_secs(2), "{:?}", ended - asked);
}

/// Listens on both ports of a plane, on real sockets.
async fn listen(world: &World, plane: &Arc<crate::common::Plane>) -> [String; 2] {
    let mut addresses = [String::new(), String::new()];
    for (mutual, address) in [false, true].into_iter().zip(&mut addresses) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        *address = listener.local_addr().expect("it is bound").to_string();
        let (sender, incoming) = mpsc::channel(16);
        world.tasks.spawn_droppable("listen", async move {
            while let Ok((stream, _)) = listener.accept().await {
                let _ = sender.send(stream).await;
            }
        });
        plane.serve(&world.tasks, mutual, incoming);
    }
    addresses
}

/// Over real sockets, where the server's close may overtake the alert it sent.
#[tokio::test]
async fn certificate_of_a_retired_ca_leads_to_a_rejoin_over_tcp() {
    let mut world = World::with(5, Arc::new(SystemClock));
    let newer = World::with(98, world.plane.clock.clone());
    let key = KeyPair::generate(&*world.plane.dice);
    std::fs::write(world.path("identity/identity.key"), key.to_pkcs8_pem().as_bytes()).unwrap();
    std::fs::write(world.path("identity/identity.crt"), world.plane.sign(&key.public_key(), HOUR)).unwrap();
    std::fs::write(world.path("identity/cluster.id"), "demo").unwrap();
    std::fs::write(world.path("identity/ca.crt"), newer.plane.ca.bundle_pem()).unwrap();
    let [registration, agent] = listen(&world, &newer.plane).await;
    let settings = world.settings_with(&[("SERVER_REGISTRATION_ADDR", &registration), ("SERVER_AGENT_ADDR", &agent)]);
    let parts = nstance_agent::Components { net: Arc::new(nstance_agent::TcpNet), ..world.parts() };
    world.tasks.spawn_droppable("agent", nstance_agent::run(settings, parts, world.control.clone()));
    world.seen = newer.seen;
    assert_eq!(world.next_registration().await.1.rejoin.unwrap().counter, 1);
    world.next_report().await;
}

/// The real binary over real sockets: registration, first report, SIGTERM, exit code.
#[tokio::test]
async fn process_says_goodbye_on_sigterm() {
    let mut world = World::with(5, Arc::new(SystemClock));
    world.write_nonce(HOUR);
    let addresses = listen(&world, &world.plane).await;
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_nstance-agent"))
        .env_clear()
        .envs(crate::common::environment(world.directory.path()))
        .env("NSTANCE_SERVER_REGISTRATION_ADDR", &addresses[0])
        .env("NSTANCE_SERVER_AGENT_ADDR", &addresses[1])
        .env("NSTANCE_NEW_SESSION", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (_, report) = world.next_report().await;
    assert_eq!((report.kind(), report.private_ipv4.as_str()), (ReportKind::First, "127.0.0.1"));
    let before = SystemClock.monotonic();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let (_, report) = world.next_report().await;
    assert_eq!(report.termination_notice.unwrap().action, "shutdown");
    let status = tokio::time::timeout(Duration::from_secs(2), async {
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
    assert!(status.success());
    assert!(SystemClock.monotonic().since(before) < Duration::from_secs(2));
}

/// A machine in full: nonce, own key, a key made for the server, a file with a secret, one that is refused; logged with
/// everything that the agent has to say.
#[tokio::test]
async fn no_secret_is_logged_or_left_beside() {
    let mut world = World::with(5, Arc::new(SystemClock));
    world.write_nonce(HOUR);
    let nonce = std::fs::read_to_string(world.path("identity/nonce.jwt")).unwrap();
    let (asks, sends) = (world.feed_keys(), world.feed_files());
    let addresses = listen(&world, &world.plane).await;
    let log = world.path("log");
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_nstance-agent"))
        .arg("--debug")
        .env_clear()
        .envs(crate::common::environment(world.directory.path()))
        .env("NSTANCE_SERVER_REGISTRATION_ADDR", &addresses[0])
        .env("NSTANCE_SERVER_AGENT_ADDR", &addresses[1])
        .env("NSTANCE_NEW_SESSION", "1")
        .stdin(Stdio::null())
        .stdout(std::fs::File::create(&log).unwrap())
        .stderr(std::fs::File::create(world.path("console")).unwrap())
        .spawn()
        .unwrap();
    let request = KeyGenerationRequest { key_names: vec!["demo.key".into()], ..Default::default() };
    say(&asks, [request]).await;
    world.next_submission().await;
    let good = "PLANTED=hunter2-in-a-file\n";
    let bad = "hunter2-in-a-file-that-is-refused";
    say(&sends, [file("1", "app.env", good), file("1", "bad.json", bad), commit("1", "sha256:01")]).await;
    while !world.path("recv/errors/bad.json").exists() || !world.path("recv/app.env").exists() {
        world.next_change().await;
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    tokio::task::spawn_blocking(move || child.wait()).await.unwrap().unwrap();

    let middle = |path: &str| {
        let pem = std::fs::read_to_string(world.path(path)).unwrap();
        pem.lines().nth(1).expect("a line of the key").to_owned()
    };
    let signature = nonce.rsplit('.').next().unwrap().trim().to_owned();
    let secrets = [signature, middle("identity/identity.key"), middle("keys/demo.key"), "hunter2".to_owned()];
    let mut looked = 0;
    let beside = ["log", "console", "identity/boot.json", "identity/state.json", "recv/errors/bad.json"];
    for name in beside {
        let Ok(text) = std::fs::read_to_string(world.path(name)) else { continue };
        looked += 1;
        for secret in &secrets {
            assert!(!text.contains(secret.as_str()), "{name} tells `{secret}`: {text}");
        }
    }
    assert_eq!(looked, beside.len());
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains("certificate received") && log.contains("DEBUG"), "it did log: {log}");
}

#[test]
fn process_refuses_a_bad_environment_with_78() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_nstance-agent"))
        .env_clear()
        .env("NSTANCE_DEBUG", "perhaps")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(78));
    let text = String::from_utf8(output.stderr).unwrap();
    for name in ["INSTANCE_ID", "SERVER_REGISTRATION_ADDR", "SERVER_AGENT_ADDR", "DEBUG"] {
        assert!(text.contains(&format!("NSTANCE_{name}: ")), "{text}");
    }
}

#[test]
fn process_tells_its_version_and_usage() {
    let run = |arguments: &[&str]| {
        std::process::Command::new(env!("CARGO_BIN_EXE_nstance-agent")).args(arguments).env_clear().output().unwrap()
    };
    let version = run(&["--version"]);
    assert!(String::from_utf8(version.stdout).unwrap().starts_with("nstance-agent 0."));
    assert_eq!(run(&["dance"]).status.code(), Some(64));
    let checked = run(&["check"]);
    assert_eq!(checked.status.code(), Some(1));
    assert!(String::from_utf8(checked.stdout).unwrap().contains("FAIL NSTANCE_INSTANCE_ID"));
}
