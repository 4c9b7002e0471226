//! Power against real processes.

use nstance_core::{
    instance::Seen,
    ports::provider::{DeleteHow, Provider as _},
};

use super::{
    super::{
        mark,
        tests::{Bench, DEAF, OBEDIENT, eventually, instance, of, permit, seen, spec, state},
    },
    *,
};

const GRACE: Duration = Duration::from_secs(3);

fn file_of(bench: &Bench, n: u8) -> Box<super::super::VmFile> {
    match VmDir::new(&bench.work_dir(), instance(n)).read() {
        Read::File(file) => file,
        _ => panic!("no vm.json"),
    }
}

#[tokio::test]
async fn vms_come_back_as_they_were() {
    let bench = Bench::new(OBEDIENT);
    let provider = bench.provider("dev-1");
    for n in [1, 2] {
        provider.create(permit(), &spec("dev-1", n)).await.unwrap();
    }
    let before = file_of(&bench, 1);
    let environ = |process: Process| {
        let text = fs::read_to_string(format!("/proc/{}/environ", process.pid)).unwrap();
        let mut lines: Vec<String> = text.split('\0').map(str::to_owned).collect();
        lines.sort();
        lines
    };
    // The shell has a few variables fewer than what it becomes.
    let comm = format!("/proc/{}/comm", before.process.unwrap().pid);
    eventually("the agent is itself", async || fs::read_to_string(&comm).is_ok_and(|it| it == "sleep\n")).await;
    let old_environ = environ(before.process.unwrap());

    let off = power_off(&bench.work_dir(), GRACE).await.unwrap();
    assert_eq!((off.instances, off.strays, off.problems), (vec![instance(1), instance(2)], 0, vec![]));
    assert_eq!(bench.agents(), []);
    assert_eq!(seen(&provider, 1).await, Some(Seen::Stopped), "not dead");
    assert_eq!(power_off(&bench.work_dir(), GRACE).await.unwrap(), Switched::default(), "twice is once");

    let on = power_on(&bench.work_dir(), &bench.agent()).await.unwrap();
    assert_eq!((on.instances, on.problems), (vec![instance(1), instance(2)], vec![]));
    assert_eq!(power_on(&bench.work_dir(), &bench.agent()).await.unwrap(), Switched::default(), "twice is once");
    let after = file_of(&bench, 1);
    assert_eq!(seen(&provider, 1).await, Some(Seen::Running));
    assert_ne!(after.process, before.process);
    let same = super::super::VmFile { process: before.process, ..*after.clone() };
    assert_eq!(same, *before, "everything else is as it was");
    eventually("the agent shows its environment", async || environ(after.process.unwrap()) == old_environ).await;
    assert_eq!(bench.agents().len(), 2);
}

#[tokio::test]
async fn the_dead_stay_dead() {
    let bench = Bench::new(OBEDIENT);
    let provider = bench.provider("dev-1");
    for n in [1, 2, 3] {
        provider.create(permit(), &spec("dev-1", n)).await.unwrap();
    }
    file_of(&bench, 1).process.unwrap().end(Duration::ZERO).await.unwrap();
    provider.delete(permit(), &of(2), DeleteHow::Now).await.unwrap();
    eventually("deleted", async || state(&provider, 2) == Some(VmState::Deleted)).await;

    assert_eq!(power_off(&bench.work_dir(), GRACE).await.unwrap().instances, [instance(3)]);
    assert_eq!(power_on(&bench.work_dir(), &bench.agent()).await.unwrap().instances, [instance(3)]);
    assert_eq!(seen(&provider, 1).await, Some(Seen::Gone));
    assert_eq!(state(&provider, 2), Some(VmState::Deleted));
    assert_eq!(bench.agents().len(), 1);
}

#[tokio::test]
async fn an_agent_deaf_to_sigterm_is_killed_after_the_grace() {
    let bench = Bench::new(DEAF);
    let provider = bench.provider("dev-1");
    provider.create(permit(), &spec("dev-1", 1)).await.unwrap();
    let deaf = bench.work_dir().join(instance(1).to_string()).join("deaf");
    eventually("the agent listens", async || deaf.exists()).await;
    power_off(&bench.work_dir(), Duration::from_millis(50)).await.unwrap();
    assert_eq!(bench.agents(), [], "its helper is gone too");
    assert_eq!(state(&provider, 1), Some(VmState::PoweredOff));
}

#[tokio::test]
async fn a_power_off_that_was_cut_short_is_finished_by_the_next_power_on() {
    let bench = Bench::new(OBEDIENT);
    let provider = bench.provider("dev-1");
    provider.create(permit(), &spec("dev-1", 1)).await.unwrap();
    let old = file_of(&bench, 1).process.unwrap();
    mark(&bench.work_dir(), instance(1), VmState::PoweredOff).await.unwrap();
    assert_eq!(power_on(&bench.work_dir(), &bench.agent()).await.unwrap().instances, [instance(1)]);
    assert!(!old.lives(), "it had been told to end");
    assert_eq!(bench.agents(), [file_of(&bench, 1).process.unwrap()]);
}

#[tokio::test]
async fn a_power_on_that_was_cut_short_is_finished_by_the_listing() {
    let bench = Bench::new(OBEDIENT);
    let provider = bench.provider("dev-1");
    provider.create(permit(), &spec("dev-1", 1)).await.unwrap();
    power_off(&bench.work_dir(), GRACE).await.unwrap();
    mark(&bench.work_dir(), instance(1), VmState::Starting).await.unwrap();
    assert_eq!(power_on(&bench.work_dir(), &bench.agent()).await.unwrap(), Switched::default());
    provider.list().await.unwrap();
    eventually("booted", async || seen(&provider, 1).await == Some(Seen::Running)).await;
    assert_eq!(bench.agents().len(), 1);
}

#[tokio::test]
async fn a_vm_whose_agent_cannot_be_started_stays_powered_off() {
    let bench = Bench::new(OBEDIENT);
    let provider = bench.provider("dev-1");
    provider.create(permit(), &spec("dev-1", 1)).await.unwrap();
    power_off(&bench.work_dir(), GRACE).await.unwrap();
    let on = power_on(&bench.work_dir(), Path::new("/nowhere/agent")).await.unwrap();
    assert_eq!(on.instances, []);
    assert!(on.problems[0].contains("start /nowhere/agent"), "{:?}", on.problems);
    assert_eq!(state(&provider, 1), Some(VmState::PoweredOff));
}

#[tokio::test]
async fn a_directory_that_is_not_there_has_no_vms() {
    let bench = Bench::new(OBEDIENT);
    let nowhere = bench.work_dir().join("nowhere");
    assert_eq!(power_off(&nowhere, GRACE).await.unwrap(), Switched::default());
    assert_eq!(power_on(&nowhere, &bench.agent()).await.unwrap(), Switched::default());
}
