//! Files over a real connection: a batch reaches the disk and the next report, whatever else a server sends.

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::common::{
    World,
    files::{commit, file, files, say},
};
use nstance_agent::{Components, Control, State, disk::Disk};
use nstance_proto::v1::{FileTransfer, HealthReportRequest};

fn read(world: &World, name: &str) -> Option<String> {
    fs::read_to_string(world.path("recv").join(name)).ok()
}

#[tokio::test(start_paused = true)]
async fn batch_reaches_the_disk_and_the_next_report() {
    let mut world = World::new();
    let voice = world.feed_files();
    world.start_enrolled(&[("RECV_MODE", "0600")]).await;
    assert_eq!(world.next_files_stream().await.config_hash, "sha256:00");
    say(&voice, [file("1", "a.json", "{}"), file("1", "b.env", "A=1\n"), commit("1", "sha256:01")]).await;
    let (_, report) = world.next_change().await;
    assert_eq!(report.config_hash, "sha256:01");
    assert_eq!(files(&report), [("a.json".to_owned(), None), ("b.env".to_owned(), None)]);
    assert_eq!(read(&world, "a.json").as_deref(), Some("{}"));
    assert_eq!(fs::metadata(world.path("recv/b.env")).unwrap().mode() & 0o7777, 0o600);
    let millis: i64 = fs::read_to_string(world.path("identity/write-files.last")).unwrap().trim().parse().unwrap();
    assert!(crate::common::START.as_millis() <= millis);
}

/// Names that a report says were received from a server.
fn received(report: &HealthReportRequest) -> Vec<&str> {
    let mut names: Vec<_> = report.files.iter().filter(|(_, it)| it.received).map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    names
}

#[tokio::test(start_paused = true)]
async fn reports_of_any_life_tell_received_files_from_those_of_others() {
    let mut world = World::new();
    let voice = world.feed_files();
    world.start_enrolled(&[]).await;
    for name in ["mine", "taken"] {
        fs::write(world.path("recv").join(name), "of the machine's owner").unwrap();
    }
    let all = [file("1", "a", "a"), file("1", "b", "b"), file("1", "taken", "the server's now"), commit("1", "h1")];
    say(&voice, all).await;
    let (_, report) = world.next_change().await;
    assert_eq!(files(&report).len(), 4);
    assert_eq!(received(&report), ["a", "b", "taken"]);

    restart(&mut world).await;
    fs::write(world.path("recv/b"), "changed by hand").unwrap();
    let changed = fs::File::options().write(true).open(world.path("recv/b")).unwrap();
    changed.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    while world.seen.try_recv().is_ok() {}
    let voice = world.feed_files();
    world.start_agent();
    let (_, report) = world.next_report().await;
    assert_eq!(received(&report), ["a", "taken"], "remembered, and what somebody changed is his");
    let remove = FileTransfer { remove: true, ..file("2", "a", "") };
    say(&voice, [remove, file("2", "b", "b"), commit("2", "h2")]).await;
    let (_, report) = world.next_change().await;
    assert_eq!(received(&report), ["b", "taken"]);
}

#[tokio::test(start_paused = true)]
async fn change_is_told_within_a_tenth_of_a_second() {
    let mut world = World::new();
    let voice = world.feed_files();
    world.start_enrolled(&[]).await;
    world.until_serving().await;
    let sent = tokio::time::Instant::now();
    say(&voice, [file("1", "a", "1"), commit("1", "h1")]).await;
    let (at, _) = world.next_change().await;
    assert!(at - sent <= Duration::from_millis(101), "{:?}", at - sent);
}

/// Each file costs a few syncs, and there is one thread for everything.
#[tokio::test(start_paused = true)]
async fn notice_does_not_wait_behind_a_batch_of_files() {
    const N_FILES: usize = 60;
    let mut world = World::new();
    let voice = world.feed_files();
    // They lie ready when the stream is opened, and so arrive together.
    say(&voice, (0..N_FILES).map(|n| file("1", &n.to_string(), "x"))).await;
    world.write_nonce(Duration::from_secs(3600));
    world.start_server();
    let settings = world.settings();
    nstance_agent::identity_dir::prepare(&settings).unwrap();
    let n_staged = Arc::new(AtomicUsize::new(0));
    let (counted, control) = (n_staged.clone(), world.control.clone());
    let watcher = move |step: nstance_agent::disk::Step, path: &std::path::Path| {
        let staged = path.parent().is_some_and(|parent| parent.ends_with(".stage"));
        if staged && step == nstance_agent::disk::Step::Write && counted.fetch_add(1, Ordering::SeqCst) == 0 {
            control.stop();
        }
    };
    let parts = Components { disk: Disk::watched(Arc::new(watcher)), ..world.parts() };
    world.tasks.spawn_droppable("agent", nstance_agent::run(settings, parts, world.control.clone()));
    while world.next_report().await.1.termination_notice.is_none() {}
    let n_before = n_staged.load(Ordering::SeqCst);
    assert!((1..N_FILES / 2).contains(&n_before), "{n_before} files were written before it was heard");
}

#[tokio::test(start_paused = true)]
async fn a_secret_change_reaches_an_open_stream() {
    let mut world = World::new();
    let voice = world.feed_files();
    world.start_enrolled(&[]).await;
    say(&voice, [file("1", "token", "old"), file("1", "a", "1"), commit("1", "h1")]).await;
    world.next_change().await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let untouched = fs::metadata(world.path("recv/a")).unwrap().ino();
    // What a secret holds is not part of the hash, so the hash is the same.
    say(&voice, [file("2", "token", "new"), file("2", "a", "1"), commit("2", "h1")]).await;
    world.next_change().await;
    assert_eq!(read(&world, "token").as_deref(), Some("new"));
    assert_eq!(fs::metadata(world.path("recv/a")).unwrap().ino(), untouched);
}

#[tokio::test(start_paused = true)]
async fn bad_file_is_reported_and_the_stream_lives_on() {
    let mut world = World::new();
    let voice = world.feed_files();
    world.start_enrolled(&[]).await;
    say(&voice, [file("1", "a.json", "{}"), file("1", "b", "1"), commit("1", "h1")]).await;
    world.next_change().await;
    say(&voice, [file("2", "a.json", "{"), file("2", "../c", "1"), file("2", "b", "2"), commit("2", "h2")]).await;
    let (_, report) = world.next_change().await;
    assert_eq!(report.config_hash, "h1");
    let told = files(&report);
    assert_eq!(told.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["_._c", "a.json", "b"]);
    assert!(told[0].1.as_ref().unwrap().contains("../c") && told[1].1.as_ref().unwrap().contains("JSON"));
    assert_eq!((read(&world, "a.json").as_deref(), read(&world, "b").as_deref()), (Some("{}"), Some("2")));
    let gone = FileTransfer { remove: true, ..file("3", "../c", "") };
    say(&voice, [file("3", "a.json", "[]"), gone, commit("3", "h2")]).await;
    let (_, report) = world.next_change().await;
    assert_eq!(report.config_hash, "h2");
    assert_eq!(files(&report), [("a.json".to_owned(), None), ("b".to_owned(), None)]);
}

#[tokio::test(start_paused = true)]
async fn batch_that_lost_its_stream_is_dropped_and_taken_when_it_comes_again() {
    let mut world = World::new();
    let (first, second) = (world.feed_files(), world.feed_files());
    world.start_enrolled(&[]).await;
    world.next_files_stream().await;
    say(&first, [file("1", "a", "1")]).await;
    drop(first);
    world.next_files_stream().await;
    say(&second, [commit("1", "h1")]).await;
    let (_, report) = world.next_change().await;
    assert!(report.files.is_empty() && read(&world, "a").is_none());
    say(&second, [file("2", "a", "1"), commit("2", "h2")]).await;
    world.next_change().await;
    assert_eq!(read(&world, "a").as_deref(), Some("1"));
}

#[tokio::test(start_paused = true)]
async fn deposed_leader_writes_nothing() {
    let mut world = World::new();
    let (first, second) = (world.feed_files(), world.feed_files());
    world.start_enrolled(&[]).await;
    world.next_files_stream().await;
    let of = |epoch: u64, it: FileTransfer| FileTransfer { epoch, ..it };
    say(&first, [of(5, file("1", "a", "new")), of(5, commit("1", "h5"))]).await;
    world.next_change().await;
    say(&first, [FileTransfer { config_hash: "h4".into(), ..of(4, file("2", "a", "old")) }]).await;
    // It leaves for whoever leads now.
    world.next_stream().await;
    world.next_files_stream().await;
    assert_eq!(read(&world, "a").as_deref(), Some("new"));
    say(&second, [of(6, file("3", "b", "1")), of(6, commit("3", "h6"))]).await;
    let (_, report) = world.next_change().await;
    assert_eq!(report.config_hash, "h6");
}

/// Somebody restored an old state: the epoch is lower for good.
#[tokio::test(start_paused = true)]
async fn leader_of_an_epoch_that_is_over_is_not_hammered() {
    let mut world = World::new();
    let of = |epoch: u64| FileTransfer { epoch, ..commit("1", "h1") };
    let newest = world.feed_files();
    for _ in 0..600 {
        world.feed_files().try_send(Ok(of(4))).unwrap();
    }
    world.start_enrolled(&[]).await;
    say(&newest, [of(5)]).await;
    drop(newest);
    let n_dialled = |world: &World| world.net.dialled.lock().unwrap().len();
    let n_before = n_dialled(&world);
    tokio::time::sleep(Duration::from_secs(120)).await;
    let n_tries = n_dialled(&world) - n_before;
    assert!((30..90).contains(&n_tries), "{n_tries} in two minutes");
}

#[tokio::test(start_paused = true)]
async fn huge_file_is_refused_and_a_huge_message_costs_the_stream_alone() {
    let mut world = World::new();
    let (first, second) = (world.feed_files(), world.feed_files());
    world.start_enrolled(&[]).await;
    world.next_files_stream().await;
    let huge = vec![b'x'; 3 * 1024 * 1024 + 1];
    say(&first, [file("1", "huge", &huge), file("1", "a", "1"), commit("1", "h1")]).await;
    let (_, report) = world.next_change().await;
    assert_eq!(files(&report).len(), 2);
    assert!(files(&report)[1].1.as_ref().unwrap().contains("3145729"));
    let _ = first.send(Ok(file("2", "a", vec![b'x'; 5 * 1024 * 1024]))).await;
    world.next_files_stream().await;
    say(&second, [file("3", "huge", "1"), commit("3", "h3")]).await;
    let (_, report) = world.next_change().await;
    assert_eq!(report.config_hash, "h3");
    assert_eq!(files(&report), [("a".to_owned(), None), ("huge".to_owned(), None)]);
    let sessions =
        world.net.dialled.lock().unwrap().iter().filter(|(_, address)| address == crate::common::AGENT).count();
    assert_eq!(sessions, 1, "the connection is the same");
}

#[tokio::test(start_paused = true)]
async fn start_empties_the_stage_before_there_is_a_server() {
    let world = World::new();
    world.write_nonce(crate::common::DAY);
    nstance_agent::identity_dir::prepare(&world.settings()).unwrap();
    fs::create_dir(world.path("recv/.stage")).unwrap();
    fs::write(world.path("recv/.stage/half"), "ha").unwrap();
    world.start_agent();
    world.until(|state| *state == State::Enrolling).await;
    tokio::task::yield_now().await;
    assert_eq!(fs::read_dir(world.path("recv/.stage")).unwrap().count(), 0);
}

/// Ends the agent that is running, and makes the world ready for another.
async fn restart(world: &mut World) {
    world.control.stop();
    world.until(|state| *state == State::Leaving).await;
    world.control = Control::new();
}

#[tokio::test(start_paused = true)]
async fn death_at_any_step_of_a_batch_is_only_a_later_start() {
    let second = || [file("2", "a", "new"), file("2", "b.json", "[]"), file("2", "c", "same"), commit("2", "h2")];
    for crash_at in 0.. {
        let mut world = World::new();
        let voice = world.feed_files();
        world.start_enrolled(&[]).await;
        world.next_files_stream().await;
        say(&voice, [file("1", "a", "old"), file("1", "c", "same"), file("1", "b.json", "{"), commit("1", "h1")]).await;
        world.next_change().await;
        restart(&mut world).await;

        // The count begins with the second batch.
        let n_left = Arc::new(AtomicUsize::new(usize::MAX));
        let counted = n_left.clone();
        let disk = Disk::watched(Arc::new(move |_, _| {
            if counted.load(Ordering::SeqCst) != usize::MAX {
                assert_ne!(counted.fetch_sub(1, Ordering::SeqCst), 0, "the process dies here");
            }
        }));
        let voice = world.feed_files();
        let parts = Components { disk, ..world.parts() };
        #[allow(clippy::disallowed_methods, reason = "the test wants to see it die")]
        let agent = tokio::spawn(nstance_agent::run(world.settings(), parts, world.control.clone()));
        world.next_files_stream().await;
        n_left.store(crash_at, Ordering::SeqCst);
        say(&voice, second()).await;
        let died = tokio::select! {
            ended = agent => ended.unwrap_err().is_panic(),
            _ = world.next_change() => false,
        };
        let found = read(&world, "a");
        assert!(["old", "new"].contains(&found.as_deref().unwrap()), "step {crash_at}: {found:?}");

        if died {
            world.control = Control::new();
        } else {
            restart(&mut world).await;
        }
        while world.seen.try_recv().is_ok() {}
        let voice = world.feed_files();
        world.start_agent();
        let hello = world.next_files_stream().await;
        if hello.config_hash == "h2" {
            assert_eq!(read(&world, "b.json").as_deref(), Some("[]"), "step {crash_at}: the hash came first");
        }
        say(&voice, second()).await;
        let (_, report) = world.next_change().await;
        assert_eq!(report.config_hash, "h2", "step {crash_at}");
        let whole = ["a", "b.json", "c"].map(|name| (name.to_owned(), None));
        assert_eq!(files(&report), whole, "step {crash_at}");
        assert_eq!(received(&report), ["a", "b.json", "c"], "step {crash_at}");
        let found = ["a", "b.json", "c"].map(|name| read(&world, name).unwrap());
        assert_eq!(found, ["new", "[]", "same"], "step {crash_at}");
        if !died {
            assert!(10 < crash_at, "{crash_at}");
            return;
        }
    }
}

fn last_batch(world: &World) -> Option<String> {
    fs::read_to_string(world.path("identity/write-files.last")).ok()
}

/// A leader who finds the batch in its place does not send it again.
#[tokio::test(start_paused = true)]
async fn death_at_the_end_of_a_batch_does_not_hide_it_from_whoever_waits_for_it() {
    // The hash that the nonce had, and another.
    for hash in ["sha256:00", "sha256:01"] {
        let mut n_caught_up = 0;
        let mut crash_at = 0;
        while dies_amid_a_batch(crash_at, hash, &mut n_caught_up).await {
            crash_at += 1;
        }
        assert!(3 <= n_caught_up, "{n_caught_up} of {crash_at}");
    }
}

/// Whether an agent died before it had taken this many steps of its first batch; if so, another one was started.
async fn dies_amid_a_batch(crash_at: usize, hash: &str, n_caught_up: &mut usize) -> bool {
    let mut world = World::new();
    let voice = world.feed_files();
    world.start_enrolled(&[]).await;
    world.next_files_stream().await;
    restart(&mut world).await;
    assert_eq!(last_batch(&world), None, "the hash of a nonce is no batch");

    // The count begins with the batch.
    drop(voice);
    let voice = world.feed_files();
    let n_left = Arc::new(AtomicUsize::new(usize::MAX));
    let counted = n_left.clone();
    let disk = Disk::watched(Arc::new(move |_, _| {
        if counted.load(Ordering::SeqCst) != usize::MAX {
            assert_ne!(counted.fetch_sub(1, Ordering::SeqCst), 0, "the process dies here");
        }
    }));
    let parts = Components { disk, ..world.parts() };
    #[allow(clippy::disallowed_methods, reason = "the test wants to see it die")]
    let agent = tokio::spawn(nstance_agent::run(world.settings(), parts, world.control.clone()));
    world.next_files_stream().await;
    assert_eq!(last_batch(&world), None, "the hash of a nonce is no batch");
    n_left.store(crash_at, Ordering::SeqCst);
    say(&voice, [file("1", "a", "new"), commit("1", hash)]).await;
    let died = tokio::select! {
        ended = agent => ended.expect_err("it runs until it is stopped").is_panic(),
        _ = world.next_change() => false,
    };
    if !died {
        return false;
    }

    let told = last_batch(&world);
    world.control = Control::new();
    while world.seen.try_recv().is_ok() {}
    let voice = world.feed_files();
    world.start_agent();
    world.next_files_stream().await;
    let is_noted = world.path("recv/.received").exists();
    assert_eq!(last_batch(&world).is_some(), is_noted, "step {crash_at}");
    *n_caught_up += usize::from(is_noted && told.is_none());
    drop(voice);
    true
}

/// In real time: a program does not run on a paused clock.
#[tokio::test]
async fn program_is_told_of_a_batch_and_its_failure_reported() {
    let mut world = World::new();
    let voice = world.feed_files();
    let program = world.path("hook");
    fs::write(
        &program,
        "#!/bin/sh\necho \"$@\" >> \"$NSTANCE_RECV_DIR/../seen\"\necho 'no unit' >&2\n[ \"$1\" != a ]\n",
    )
    .unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    world.start_enrolled(&[("ON_CHANGE", program.to_str().unwrap())]).await;
    say(&voice, [file("1", "b", "1"), file("1", "a", "1"), file("1", "c.json", "{"), commit("1", "h1")]).await;
    let error = |report: &nstance_proto::v1::HealthReportRequest| {
        files(report).into_iter().find(|(name, _)| name == "on-change").and_then(|(_, why)| why)
    };
    let told = loop {
        let (_, report) = world.next_change().await;
        if let Some(told) = error(&report) {
            break told;
        }
    };
    assert!(told.contains("exit status: 1") && told.ends_with("no unit"), "{told}");
    // What is the same is no change: only `b` is told of, and with its success the complaint goes.
    say(&voice, [file("2", "b", "2"), file("2", "a", "1"), commit("2", "h2")]).await;
    while error(&world.next_change().await.1).is_some() {}
    assert_eq!(fs::read_to_string(world.path("seen")).unwrap(), "a b\nb\n");
}
