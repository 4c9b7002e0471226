//! The same provider with agents in windows, against a real tmux. Each test has a tmux server of its own.

use super::{
    tests::{Bench, OBEDIENT, eventually, half_created, instance, of, permit, seen, spec, state},
    *,
};

/// Does not die of its terminal's end, and says something.
const STUBBORN: &str = "#!/bin/sh\ntrap '' HUP\necho an agent speaks\nwhile :; do sleep 600 & wait $!; done\n";

fn window(n: u8) -> String {
    provider_id(instance(n))
}

fn target(n: u8) -> String {
    format!("=nstance-dev-agents:={}", window(n))
}

fn windows(bench: &Bench) -> Vec<String> {
    let mut names: Vec<String> = bench
        .tmux(&["list-windows", "-a", "-F", "#{session_name}/#{window_name}"])
        .lines()
        .map(str::to_owned)
        .collect();
    names.sort();
    names
}

fn ours(numbers: &[u8]) -> Vec<String> {
    numbers.iter().map(|n| format!("nstance-dev-agents/{}", window(*n))).collect()
}

fn file_of(provider: &ProcessProvider, n: u8) -> Box<VmFile> {
    let Read::File(file) = provider.inner.dir(instance(n)).read() else { panic!("no vm.json") };
    file
}

#[tokio::test]
async fn a_vm_is_a_window_of_its_name_without_secrets() {
    let Some(bench) = Bench::in_tmux(STUBBORN) else { return };
    let provider = bench.provider("dev-1");
    assert_eq!(provider.kind(), "tmux");
    assert_eq!(provider.check(&Needs::default()).await, []);
    for n in [1, 2] {
        let vm = provider.create(permit(), &spec("dev-1", n)).await.unwrap();
        assert_eq!((vm.seen, vm.vm.provider_id), (Seen::Running, Some(window(n))));
        assert_eq!(seen(&provider, n).await, Some(Seen::Running));
    }
    assert_eq!(windows(&bench), ours(&[1, 2]), "the session has no window but these");
    let process = file_of(&provider, 1).process.unwrap();
    let environ = || fs::read_to_string(format!("/proc/{}/environ", process.pid)).unwrap();
    eventually("it is the agent", async || environ().contains("NSTANCE_INSTANCE_ID=")).await;
    let environ = environ();
    assert!(environ.contains("NSTANCE_SERVER_AGENT_ADDR=127.0.0.1:8994\0"));
    assert!(!environ.contains("CARGO") && !environ.contains("TMUX"), "{environ}");
    let log = provider.inner.dir(instance(1)).path.join("agent.log");
    eventually("what it says is kept", async || fs::read_to_string(&log).unwrap().contains("an agent speaks")).await;
    assert!(bench.tmux(&["capture-pane", "-p", "-t", &target(1)]).contains("an agent speaks"), "and shown");

    provider.delete(permit(), &of(1), DeleteHow::Graceful).await.unwrap();
    eventually("deleted", async || state(&provider, 1) == Some(VmState::Deleted)).await;
    eventually("its window is closed", async || windows(&bench) == ours(&[2])).await;
    provider.clean(permit(), &of(1)).await.unwrap();
    provider.delete(permit(), &of(2), DeleteHow::Now).await.unwrap();
    eventually("the session goes with its last window", async || windows(&bench).is_empty()).await;
}

#[tokio::test]
async fn closing_a_window_is_the_death_of_that_vm() {
    for agent in [OBEDIENT, STUBBORN] {
        let Some(bench) = Bench::in_tmux(agent) else { return };
        let provider = bench.provider("dev-1");
        for n in [1, 2] {
            provider.create(permit(), &spec("dev-1", n)).await.unwrap();
        }
        let process = file_of(&provider, 1).process.unwrap();
        eventually("it is the agent", async || {
            fs::read_to_string(format!("/proc/{}/comm", process.pid)).is_ok_and(|it| it == "agent\n" || it == "sleep\n")
        })
        .await;
        bench.tmux(&["kill-window", "-t", &target(1)]);
        eventually("dead", async || seen(&provider, 1).await == Some(Seen::Gone)).await;
        let again = provider.create(permit(), &spec("dev-1", 1)).await.unwrap_err();
        assert_eq!(again.class, ErrorClass::NotFound, "a dead VM is not made a second time");
        let listed: Vec<Seen> = provider.list().await.unwrap().vms.iter().map(|vm| vm.seen).collect();
        assert_eq!(listed, [Seen::Gone, Seen::Running]);
        eventually("nothing is left of it", async || !process.is_alive().unwrap()).await;
        provider.clean(permit(), &of(1)).await.unwrap();
        assert_eq!(seen(&provider, 1).await, None);
        assert_eq!(windows(&bench), ours(&[2]));
        assert_eq!(seen(&provider, 2).await, Some(Seen::Running));
    }
}

#[tokio::test]
async fn other_sessions_and_windows_are_never_touched() {
    let Some(bench) = Bench::in_tmux(OBEDIENT) else { return };
    let provider = bench.provider("dev-1");
    // Names that tmux would take for ours where it may match a part.
    bench.tmux(&["new-session", "-d", "-s", "nstance-dev-agents-2", "-n", &window(1), "sleep", "600"]);
    bench.tmux(&["new-session", "-d", "-s", "nstance-dev", "-n", "mine", "sleep", "600"]);
    let theirs = windows(&bench);
    provider.create(permit(), &spec("dev-1", 1)).await.unwrap();
    provider.create(permit(), &spec("dev-1", 2)).await.unwrap();
    bench.tmux(&["new-window", "-d", "-t", "=nstance-dev-agents:", "-n", "shell", "sleep", "600"]);
    bench.tmux(&["new-window", "-d", "-t", "=nstance-dev-agents:", "-n", &format!("{}0", window(3)), "sleep", "600"]);
    provider.delete(permit(), &of(1), DeleteHow::Now).await.unwrap();
    eventually("deleted", async || state(&provider, 1) == Some(VmState::Deleted)).await;
    provider.clean(permit(), &of(1)).await.unwrap();
    provider.list().await.unwrap();
    power::power_off(&bench.work_dir(), Duration::from_secs(3)).await.unwrap();
    let bystanders = ["nstance-dev-agents/shell".to_owned(), format!("nstance-dev-agents/{}0", window(3))];
    let mut left: Vec<String> = theirs.into_iter().chain(bystanders).collect();
    left.sort();
    eventually("ours are closed and no others", async || windows(&bench) == left).await;
}

#[tokio::test]
async fn windows_that_the_users_settings_keep_are_closed_all_the_same() {
    let Some(bench) = Bench::in_tmux(OBEDIENT) else { return };
    bench.tmux(&["new-session", "-d", "-s", "theirs", "-n", "w", "sleep", "600"]);
    bench.tmux(&["set-option", "-g", "remain-on-exit", "on"]);
    let provider = bench.provider("dev-1");
    for n in 1..=4 {
        provider.create(permit(), &spec("dev-1", n)).await.unwrap();
    }
    let is_left = |numbers: &[u8]| windows(&bench) == [ours(numbers), vec!["theirs/w".to_owned()]].concat();
    provider.delete(permit(), &of(1), DeleteHow::Graceful).await.unwrap();
    eventually("closed after a delete", async || is_left(&[2, 3, 4])).await;
    assert!(kill_agent(&bench.work_dir(), instance(2)).unwrap());
    eventually("dead", async || seen(&provider, 2).await == Some(Seen::Gone)).await;
    assert!(is_left(&[2, 3, 4]), "the setting is kept");
    provider.clean(permit(), &of(2)).await.unwrap();
    assert!(is_left(&[3, 4]));
    fs::remove_dir_all(provider.inner.dir(instance(3)).path).unwrap();
    provider.list().await.unwrap();
    eventually("closed with its stray agent", async || is_left(&[4])).await;
    let work_dir = bench.work_dir();
    assert_eq!(tokio::task::spawn_blocking(move || end_all(&work_dir)).await.unwrap().unwrap(), 1);
    assert!(is_left(&[]));
}

#[tokio::test]
async fn a_creator_killed_before_recording_the_start_leaves_one_window() {
    let Some(bench) = Bench::in_tmux(OBEDIENT) else { return };
    let provider = bench.provider("dev-1");
    for (n, finish) in [(1, "create"), (2, "list"), (3, "delete")] {
        let (dir, file) = half_created(&provider, &spec("dev-1", n));
        let options = &provider.inner.options;
        let Ok(LockOutcome::Locked(lock)) = dir.try_lock() else { panic!("not locked") };
        let started =
            agent::start(&options.agent_binary, &lock, &dir, &file, &options.owner, options.metrics_interval).unwrap();
        drop(lock);
        assert_eq!(seen(&provider, n).await, Some(Seen::Pending));
        let successor = bench.provider("dev-1");
        match finish {
            "create" => {
                successor.create(permit(), &spec("dev-1", n)).await.unwrap();
            }
            "list" => {
                successor.list().await.unwrap();
                eventually("recorded", async || state(&successor, n) == Some(VmState::Running)).await;
            }
            _ => {
                successor.delete(permit(), &of(n), DeleteHow::Now).await.unwrap();
                eventually("deleted", async || state(&successor, n) == Some(VmState::Deleted)).await;
                assert!(!started.process.is_alive().unwrap());
                break;
            }
        }
        assert_eq!(file_of(&provider, n).process, Some(started.process), "found again, not started anew");
    }
    assert_eq!(windows(&bench), ours(&[1, 2]));
}

#[tokio::test]
async fn a_failed_start_leaves_nothing_and_says_what_is_missing() {
    let Some(bench) = Bench::in_tmux(OBEDIENT) else { return };
    let agent_binary = bench.agent().with_file_name("no-such-agent");
    let provider = bench.provider_with(ProcessOptions { agent_binary, ..bench.options("dev-1") });
    let error = provider.create(permit(), &spec("dev-1", 1)).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Invalid);
    assert!(error.to_string().contains("no-such-agent"), "{error}");
    assert_eq!(fs::read_dir(bench.work_dir()).unwrap().count(), 0);
    assert!(windows(&bench).is_empty());
}

#[tokio::test]
async fn an_agent_that_ends_at_once_is_a_vm_that_died_young() {
    let Some(bench) = Bench::in_tmux("#!/bin/sh\nexit 1\n") else { return };
    let provider = bench.provider("dev-1");
    provider.create(permit(), &spec("dev-1", 1)).await.unwrap();
    eventually("dead", async || seen(&provider, 1).await == Some(Seen::Gone)).await;
    provider.clean(permit(), &of(1)).await.unwrap();
    assert_eq!(fs::read_dir(bench.work_dir()).unwrap().count(), 0);
}

#[tokio::test]
async fn power_closes_the_windows_and_opens_them_again() {
    let Some(bench) = Bench::in_tmux(STUBBORN) else { return };
    let provider = bench.provider("dev-1");
    for n in [1, 2] {
        provider.create(permit(), &spec("dev-1", n)).await.unwrap();
    }
    let before = file_of(&provider, 1);
    let off = power::power_off(&bench.work_dir(), Duration::from_secs(3)).await.unwrap();
    assert_eq!((off.instances, off.problems), (vec![instance(1), instance(2)], vec![]));
    assert!(windows(&bench).is_empty(), "the session has ended with its windows");
    assert_eq!(seen(&provider, 1).await, Some(Seen::Stopped), "not dead");
    let on = power::power_on(&bench.work_dir(), &bench.agent()).await.unwrap();
    assert_eq!((on.instances, on.problems), (vec![instance(1), instance(2)], vec![]));
    assert_eq!(windows(&bench), ours(&[1, 2]));
    assert_eq!(seen(&provider, 1).await, Some(Seen::Running));
    let after = file_of(&provider, 1);
    assert_ne!(after.process, before.process);
    assert_eq!(VmFile { process: before.process, ..*after }, *before, "everything else is as it was");
}
