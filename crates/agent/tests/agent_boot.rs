//! The black box: what a machine tells of its boot, to the server, on disk and on the console.

#![allow(clippy::unwrap_used, reason = "a helper of tests fails by panicking, as the tests do")]

mod common;

use std::{fs, path::PathBuf, time::Duration};

use common::World;
use nstance_agent::{
    State,
    boot::spool::{StageName, Word, say},
    host::Host,
};
use nstance_proto::v1::BootReport;
use serde_json::Value;

const HOUR: Duration = Duration::from_secs(3600);

/// A world whose agent runs on a machine of its own, which has a way out.
struct Machine {
    world: World,
}

impl Machine {
    fn new() -> Self {
        let machine = Self { world: World::new() };
        machine.put("proc/sys/kernel/random/boot_id", "b1\n");
        machine.put("proc/stat", &format!("btime {}\n", common::START.as_millis() / 1000 - 30));
        machine.put("proc/net/route", "Iface Destination\neth0 00000000\n");
        machine
    }

    fn root(&self) -> PathBuf {
        self.world.path("machine")
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn start(&self, more: &[(&str, &str)]) {
        let log = self.root().join("cloud-init-output.log").display().to_string();
        let sentinel = self.root().join("sentinel").display().to_string();
        let error = self.root().join("error").display().to_string();
        let mut all = vec![("BOOT_LOGS", &*log), ("BOOT_SENTINEL", &*sentinel), ("BOOT_ERROR_FILE", &*error)];
        all.extend_from_slice(more);
        let settings = self.world.settings_with(&all);
        nstance_agent::identity_dir::prepare(&settings).unwrap();
        let parts = nstance_agent::Components { host: Host::at(self.root()), ..self.world.parts() };
        let control = self.world.control.clone();
        self.world.tasks.spawn_droppable("agent", nstance_agent::run(settings, parts, control));
    }

    fn say(&self, word: &Word) {
        let host = Host::at(self.root());
        say(&self.world.path("identity"), &host, self.world.plane.clock.now(), word).unwrap();
    }

    fn commit_files(&self) {
        let now = self.world.plane.clock.now().as_millis().to_string();
        fs::write(self.world.path("identity/write-files.last"), now).unwrap();
    }

    /// The next black box that fits.
    async fn next_box(&mut self, wanted: impl Fn(&BootReport) -> bool) -> BootReport {
        loop {
            let (_, report) = self.world.next_report().await;
            if let Some(boot) = report.boot.filter(|boot| wanted(boot)) {
                return boot;
            }
        }
    }

    fn kept(&self) -> Value {
        serde_json::from_slice(&fs::read(self.world.path("identity/boot.json")).unwrap()).unwrap()
    }
}

fn states(boot: &BootReport) -> Vec<String> {
    boot.stages.iter().map(|stage| format!("{} {}", stage.name, stage.state)).collect()
}

#[tokio::test(start_paused = true)]
async fn good_boot_is_told_without_logs_and_kept() {
    let mut machine = Machine::new();
    machine.put("cloud-init-output.log", "all is well\n");
    machine.world.write_nonce(HOUR);
    machine.world.start_server();
    machine.start(&[]);
    machine.world.until(|state| *state == State::Serving).await;
    machine.commit_files();
    let boot = machine.next_box(|boot| boot.stages.iter().any(|stage| stage.name == "ready")).await;
    let expected =
        ["kernel", "agent", "network", "registered", "session", "files", "ready"].map(|name| format!("{name} done"));
    assert_eq!(states(&boot), expected);
    assert!(!boot.failed && boot.logs.is_empty() && boot.reason.is_empty());
    assert_eq!(boot.stages[0].started.unwrap().seconds, common::START.as_millis() / 1000 - 30);
    let kept = machine.kept();
    assert_eq!((kept["closed"].as_bool(), kept["failed"].as_bool()), (Some(true), Some(false)));
    assert_eq!(kept["boot_id"], "b1");
}

#[tokio::test(start_paused = true)]
async fn failed_boot_is_told_with_redacted_logs_out_of_turn() {
    let mut machine = Machine::new();
    let log = format!(
        "{}+ DB_PASSWORD=hunter2\n-----BEGIN PRIVATE KEY-----\nMC4CAQ\n-----END PRIVATE KEY-----\nnonce {}\nE: no disk\n",
        "old line\n".repeat(200),
        machine.world.plane.nonce(HOUR),
    );
    machine.put("cloud-init-output.log", &log);
    machine.world.write_nonce(HOUR);
    machine.world.start_server();
    machine.start(&[]);
    machine.world.until(|state| *state == State::Serving).await;
    let name = StageName::parse("packages").unwrap();
    machine.say(&Word::Stage { name, detail: String::new(), failed: false });
    machine.say(&Word::Fail("apt: no space left".into()));
    let boot = machine.next_box(|boot| boot.failed).await;
    assert_eq!(boot.reason, "apt: no space left");
    assert!(states(&boot).contains(&"user:packages failed".to_owned()), "{:?}", states(&boot));
    let text = &boot.logs[0].text;
    assert_eq!(text.lines().count(), 100, "{text}");
    assert!(text.ends_with("E: no disk\n"));
    for secret in ["hunter2", "MC4CAQ", "eyJ"] {
        assert!(!text.contains(secret), "{secret}: {text}");
        assert!(!machine.kept().to_string().contains(secret));
    }
    assert_eq!(machine.kept()["reason"], "apt: no space left");
    // And a second try of the script mends it.
    machine.say(&Word::Ready);
    let boot = machine.next_box(|boot| !boot.failed).await;
    assert!(boot.logs.is_empty());
}

#[tokio::test(start_paused = true)]
async fn boot_that_takes_too_long_is_stalled() {
    let mut machine = Machine::new();
    machine.put("run/cloud-init/status.json", r#"{"v1":{"stage":"modules-final"}}"#);
    machine.world.write_nonce(HOUR);
    machine.world.start_server();
    machine.start(&[("BOOT_TIMEOUT", "4m")]);
    let boot = machine.next_box(|boot| boot.failed).await;
    assert_eq!(boot.reason, "not finished after 240s, waiting for files, cloud-init");
    assert!(states(&boot).contains(&"cloud-init stalled".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn parked_machine_keeps_its_reason_on_disk() {
    let machine = Machine::new();
    fs::write(machine.world.path("identity/nonce.jwt"), "no token").unwrap();
    machine.start(&[]);
    machine.world.until_parked().await;
    // The look follows the state, on the same thread.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let kept = machine.kept();
    assert_eq!((kept["failed"].as_bool(), kept["stage"].as_str()), (Some(true), Some("registered")));
    assert!(kept["reason"].as_str().unwrap().contains("nonce.jwt is malformed"), "{kept}");
}

#[tokio::test(start_paused = true)]
async fn restarted_agent_goes_on_with_the_box_of_its_boot_and_a_new_boot_opens_a_new_one() {
    let mut machine = Machine::new();
    machine.world.write_nonce(HOUR);
    machine.world.start_server();
    machine.start(&[]);
    let first = machine.next_box(|boot| states(boot).contains(&"session done".to_owned())).await;
    let stop = |machine: &mut Machine| {
        machine.world.control.stop();
        machine.world.control = nstance_agent::Control::new();
    };
    stop(&mut machine);
    tokio::time::sleep(Duration::from_secs(60)).await;
    machine.start(&[]);
    let again = machine.next_box(|boot| states(boot).contains(&"session done".to_owned())).await;
    assert_eq!(again.stages, first.stages);
    stop(&mut machine);
    tokio::time::sleep(Duration::from_secs(60)).await;
    machine.put("proc/sys/kernel/random/boot_id", "b2\n");
    machine.start(&[]);
    let new = machine.next_box(|boot| states(boot).contains(&"session done".to_owned())).await;
    assert!(first.stages[1].started.unwrap().seconds + 120 <= new.stages[1].started.unwrap().seconds);
}

#[tokio::test(start_paused = true)]
async fn agent_that_stands_for_no_machine_keeps_no_box() {
    let mut world = World::new();
    world.write_nonce(HOUR);
    world.start_server();
    world.start_agent();
    let (_, report) = world.next_report().await;
    assert!(report.boot.is_none() && report.one_minute.is_none());
    world.until(|state| *state == State::Serving).await;
    assert!(!world.path("identity/boot.json").exists());
}
