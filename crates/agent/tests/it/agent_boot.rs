//! The black box: what a machine tells of its boot, to the server, on disk and on the console.

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use crate::common::{Skewed, Talk, World};
use nstance_agent::{
    State,
    boot::spool::{StageName, Word, say},
    host::Host,
};
use nstance_core::ports::clock::Clock;
use nstance_proto::v1::{BootReport, ReportKind};
use serde_json::Value;
use tonic::Code;

const HOUR: Duration = Duration::from_secs(3600);

/// A world whose agent runs on a machine of its own, which has a way out.
struct Machine {
    world: World,
}

impl Machine {
    fn new() -> Self {
        let machine = Self { world: World::new() };
        machine.put("proc/sys/kernel/random/boot_id", "b1\n");
        machine.put("proc/stat", &format!("btime {}\n", crate::common::START.as_millis() / 1000 - 30));
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
        self.start_with(more, self.world.plane.clock.clone());
    }

    fn start_with(&self, more: &[(&str, &str)], clock: Arc<dyn Clock>) {
        let log = self.root().join("cloud-init-output.log").display().to_string();
        let sentinel = self.root().join("sentinel").display().to_string();
        let error = self.root().join("error").display().to_string();
        let mut all = vec![("BOOT_LOGS", &*log), ("BOOT_SENTINEL", &*sentinel), ("BOOT_ERROR_FILE", &*error)];
        all.extend_from_slice(more);
        let settings = self.world.settings_with(&all);
        nstance_agent::identity_dir::prepare(&settings).unwrap();
        let parts = nstance_agent::Components { clock, host: Host::at(self.root()), ..self.world.parts() };
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
    assert_eq!(boot.stages[0].started.unwrap().seconds, crate::common::START.as_millis() / 1000 - 30);
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
async fn what_the_machine_says_of_itself_fails_the_boot_without_its_secrets() {
    let cloud_init = r#"{"v1":{"modules-final":{"errors":["runparts: API_TOKEN=abc refused"]},"stage":null}}"#;
    for (path, text, stage) in [
        ("run/cloud-init/status.json", cloud_init, "cloud-init"),
        ("error", "kubeadm join: API_TOKEN=abc refused\n", "bootstrap"),
    ] {
        let mut machine = Machine::new();
        machine.put("cloud-init-output.log", "+ API_TOKEN=abc kubeadm join\n");
        machine.world.write_nonce(HOUR);
        machine.world.start_server();
        machine.start(&[]);
        machine.world.until(|state| *state == State::Serving).await;
        machine.put(path, text);
        let boot = machine.next_box(|boot| boot.failed).await;
        assert!(boot.reason.ends_with("API_TOKEN=[redacted] refused"), "{}", boot.reason);
        assert!(states(&boot).contains(&format!("{stage} failed")), "{:?}", states(&boot));
        assert_eq!(boot.logs[0].text, "+ API_TOKEN=[redacted] kubeadm join\n");
        assert!(!machine.kept().to_string().contains("abc"));
        // Mended by hand, and said so.
        machine.say(&Word::Ready);
        let boot = machine.next_box(|boot| !boot.failed).await;
        assert!(states(&boot).contains(&"ready done".to_owned()), "{:?}", states(&boot));
    }
}

#[tokio::test(start_paused = true)]
async fn sentinel_finishes_the_boot() {
    let mut machine = Machine::new();
    machine.put("run/cloud-init/status.json", r#"{"v1":{"stage":"modules-final"}}"#);
    machine.world.write_nonce(HOUR);
    machine.world.start_server();
    machine.start(&[]);
    machine.put("sentinel", "");
    let boot = machine.next_box(|boot| states(boot).contains(&"ready done".to_owned())).await;
    assert!(states(&boot).contains(&"bootstrap done".to_owned()) && !boot.failed);
}

#[tokio::test(start_paused = true)]
async fn server_that_is_not_trusted_for_ten_minutes_is_a_failed_stage() {
    let machine = Machine::new();
    let others = World::with(2, machine.world.plane.clock.clone());
    fs::write(machine.world.path("identity/ca.crt"), others.plane.ca.bundle_pem()).unwrap();
    machine.world.write_nonce(HOUR);
    machine.world.start_server();
    machine.start(&[]);
    tokio::time::sleep(Duration::from_secs(590)).await;
    assert_eq!(machine.kept()["failed"], false);
    tokio::time::sleep(Duration::from_secs(60)).await;
    let kept = machine.kept();
    assert_eq!(kept["reason"], "the server's certificate is not trusted", "{kept}");
    assert_eq!(machine.world.control.state().borrow().as_str(), "enrolling", "and goes on trying");
}

/// Before there is a session, too: a machine that boots with a wrong clock may never have one.
#[tokio::test(start_paused = true)]
async fn clock_that_is_behind_is_told_with_the_registration() {
    let machine = Machine::new();
    machine.world.write_nonce(HOUR);
    machine.world.start_server();
    let right = machine.world.plane.clock.clone();
    machine.start_with(&[], Arc::new(Skewed { right, ahead: Duration::ZERO, behind: HOUR * 24 }));
    let registered = |machine: &Machine| {
        let stages = machine.kept()["stages"].as_array().unwrap().clone();
        let stage = stages.into_iter().find(|it| it["name"] == "registered").unwrap();
        (stage["state"].clone(), stage["detail"].clone())
    };
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(registered(&machine), ("running".into(), "clock".into()));
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(registered(&machine), ("failed".into(), "clock".into()));
    assert_eq!(machine.kept()["reason"], "clock");
    assert_eq!(machine.world.control.state().borrow().as_str(), "enrolling", "and goes on trying");
}

#[tokio::test(start_paused = true)]
async fn shared_identity_is_told_with_the_session() {
    let mut machine = Machine::new();
    machine.world.write_nonce(HOUR);
    machine.world.script_talk([Talk::RefuseAfterFirst(Code::Aborted, "SUPERSEDED")]);
    machine.world.start_server();
    machine.start(&[]);
    let shared = |boot: &BootReport| boot.stages.iter().any(|stage| stage.detail == "identity-shared");
    let boot = machine.next_box(shared).await;
    let told: Vec<_> = boot.stages.iter().filter(|stage| !stage.detail.is_empty()).map(|stage| &*stage.name).collect();
    assert_eq!(told, ["session"]);
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

#[tokio::test(start_paused = true)]
async fn reports_carry_what_was_measured() {
    let mut machine = Machine::new();
    machine.put("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 400 kB\n");
    machine.put("proc/net/dev", "eth0: 1000 0 0 0 0 0 0 0 500 0 0 0 0 0 0 0\n");
    machine.world.write_nonce(HOUR);
    machine.world.start_server();
    machine.start(&[]);
    let (_, first) = machine.world.next_report().await;
    assert!(first.one_minute.is_none() && first.window_end.is_none());
    machine.put("proc/net/dev", "eth0: 4000 0 0 0 0 0 0 0 600 0 0 0 0 0 0 0\n");
    let report = loop {
        let (_, report) = machine.world.next_report().await;
        if report.kind() == ReportKind::Periodic {
            break report;
        }
    };
    for window in [report.one_minute, report.five_minutes, report.fifteen_minutes] {
        let window = window.unwrap();
        assert_eq!((window.network_bytes_received, window.network_bytes_sent), (3000.0, 100.0));
        assert_eq!((window.memory_usage, window.cpu_usage), (60.0, 0.0));
    }
    let (start, end) = (report.window_start.unwrap().seconds, report.window_end.unwrap().seconds);
    assert_eq!(start, crate::common::START.as_millis() / 1000);
    assert!(start + 40 <= end && end <= report.timestamp.unwrap().seconds, "{start} {end}");
}

/// Renewed trust on one side only: the session stage says why it does not come about, and forgets it once it does.
#[tokio::test(start_paused = true)]
async fn server_that_is_not_trusted_is_remarked_on_the_session() {
    let mut machine = Machine::new();
    machine.world.write_nonce(HOUR);
    let server = machine.world.start_server();
    machine.start(&[]);
    machine.world.until(|state| *state == State::Serving).await;
    machine.world.kill(server).await;
    let stranger = World::with(98, machine.world.plane.clock.clone());
    let server = machine.world.start_server_of(&stranger.plane);
    let detail = |machine: &Machine| {
        let kept = machine.kept();
        let stages = kept["stages"].as_array().unwrap().clone();
        stages.into_iter().find(|it| it["name"] == "session").map(|it| it["detail"].clone()).unwrap()
    };
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(detail(&machine), "server-not-trusted");
    machine.world.kill(server).await;
    while machine.world.seen.try_recv().is_ok() {}
    machine.world.start_server();
    machine.next_box(|boot| boot.stages.iter().any(|it| it.name == "session" && it.detail.is_empty())).await;
    assert_eq!(detail(&machine), Value::Null);
}
