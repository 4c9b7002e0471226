//! The commands, as real processes, and what is shipped beside the binary.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStderr, Command, Output, Stdio},
    sync::Arc,
    time::Duration,
};

use crate::common::World;
use nstance_agent::{
    boot::spool::{StageName, Word, say},
    host::Host,
};
use nstance_core::ports::clock::Clock as _;
use nstance_identity::keys::KeyPair;
use nstance_proto::v1::ReportKind;
use nstance_rt::clock::SystemClock;
use serde_json::Value;
use tokio::{net::TcpListener, sync::mpsc, time::Instant};

const HOUR: Duration = Duration::from_secs(3600);

fn agent(directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nstance-agent"));
    command
        .env_clear()
        .envs(crate::common::environment(directory))
        .env("NSTANCE_NEW_SESSION", "1")
        .stdin(Stdio::null());
    // Nobody listens there: the agent goes on trying.
    command.env("NSTANCE_SERVER_REGISTRATION_ADDR", "127.0.0.1:1").env("NSTANCE_SERVER_AGENT_ADDR", "127.0.0.1:1");
    command
}

fn run(directory: &Path, arguments: &[&str]) -> Output {
    agent(directory).args(arguments).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A running agent and its console.
struct Running {
    child: Child,
    console: BufReader<ChildStderr>,
}

impl Running {
    fn start(directory: &Path) -> Self {
        Self::of(&mut agent(directory))
    }

    fn of(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let console = BufReader::new(child.stderr.take().unwrap());
        Self { child, console }
    }

    /// The next line about the boot; there is nothing else on the console.
    fn told(&mut self) -> Value {
        let mut line = String::new();
        self.console.read_line(&mut line).unwrap();
        serde_json::from_str(line.strip_prefix("nstance-boot: ").unwrap_or_else(|| panic!("`{line}`"))).unwrap()
    }

    fn ask_to_stop(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }

    fn stop(mut self) {
        self.ask_to_stop();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

fn world() -> World {
    World::with(1, Arc::new(SystemClock))
}

fn stage_states(told: &Value) -> Vec<String> {
    let stages = told["stages"].as_array().unwrap();
    stages.iter().map(|it| format!("{} {}", it["name"].as_str().unwrap(), it["state"].as_str().unwrap())).collect()
}

#[tokio::test]
async fn words_are_taken_in_by_the_running_agent_and_by_the_next() {
    let world = world();
    world.write_nonce(HOUR);
    let dir = world.directory.path();
    // Before any agent runs.
    assert!(run(dir, &["stage", "packages", "--detail", "apt install"]).status.success());
    let mut running = Running::start(dir);
    assert!(run(dir, &["fail", "apt: API_TOKEN=abc refused"]).status.success());
    let told = running.told();
    assert_eq!((told["stage"].as_str(), told["failed"].as_bool()), (Some("user:packages"), Some(true)));
    assert_eq!(told["reason"], "apt: API_TOKEN=[redacted] refused");
    assert_eq!(told["instance"], crate::common::INSTANCE);
    assert!(stage_states(&told).contains(&"user:packages failed".to_owned()), "{told}");
    running.stop();
    let kept: Value = serde_json::from_slice(&fs::read(world.path("identity/boot.json")).unwrap()).unwrap();
    assert_eq!(kept["reason"], told["reason"]);
    let own = kept["logs"].as_array().unwrap().iter().find(|log| log["name"] == "nstance-agent").unwrap();
    assert!(own["text"].as_str().unwrap().contains("agent starts"), "{own}");
    assert!(run(dir, &["stage", "second", "--failed"]).status.success());
    let mut running = Running::start(dir);
    let told = running.told();
    assert_eq!((told["stage"].as_str(), told["reason"].as_str()), (Some("user:second"), Some("no reason was given")));
    running.stop();
}

#[test]
fn script_that_says_too_much_is_told_and_goes_on() {
    let world = world();
    let dir = world.directory.path();
    let word = |failed| Word::Stage { name: StageName::parse("waiting").unwrap(), detail: "x".repeat(256), failed };
    let identity = world.path("identity");
    while say(&identity, &Host::machine(), SystemClock.now(), &word(false)).is_ok() {}
    let detail = "x".repeat(256);
    let said = run(dir, &["stage", "waiting", "--detail", &detail]);
    assert!(said.status.success() && stderr(&said).contains("is full"), "{}", stderr(&said));
    assert!(run(dir, &["ready"]).status.success());
    while say(&identity, &Host::machine(), SystemClock.now(), &word(true)).is_ok() {}
    assert_eq!(run(dir, &["stage", "waiting", "--failed", "--detail", &detail]).status.code(), Some(1));
}

#[tokio::test]
async fn parked_agent_says_so_on_the_console_and_in_its_status() {
    let world = world();
    let dir = world.directory.path();
    let mut running = Running::start(dir);
    let told = running.told();
    assert_eq!(told["stage"], "registered");
    assert_eq!(told["reason"], "there is neither a certificate nor nonce.jwt");
    assert!(stage_states(&told).contains(&"agent done".to_owned()), "{told}");
    // The console is told first; the state is left a moment later.
    let mut json = Value::Null;
    for _ in 0..500 {
        let status = run(dir, &["status", "-o", "json"]);
        json = serde_json::from_str(&stdout(&status)).unwrap_or_default();
        if json["state"] == "parked" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!((json["state"].as_str(), json["instance"].as_str()), (Some("parked"), Some(crate::common::INSTANCE)));
    assert_eq!(json["reason"], told["reason"]);
    assert_eq!(json["pid"], running.child.id());
    assert!(stdout(&run(dir, &["status"])).starts_with("state        parked\n"));
    running.stop();
    let status = run(dir, &["status"]);
    assert_eq!(status.status.code(), Some(1));
    assert!(stdout(&status).starts_with("state        not running, was leaving\n"), "{}", stdout(&status));
}

/// Listens on both ports, on real sockets: for registration, and for agents.
async fn listen(world: &World) -> [String; 2] {
    let mut addresses = [String::new(), String::new()];
    for (mutual, address) in [false, true].into_iter().zip(&mut addresses) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        *address = listener.local_addr().unwrap().to_string();
        let (sender, incoming) = mpsc::channel(16);
        world.tasks.spawn_droppable("listen", async move {
            while let Ok((stream, _)) = listener.accept().await {
                let _ = sender.send(stream).await;
            }
        });
        world.plane.serve(&world.tasks, mutual, incoming);
    }
    addresses
}

/// From the signal in one process to the report in the other, in real time. On an idle machine that is less than a
/// millisecond, for nothing in between waits for anything: not for a poll, a timer or the disk. Asking the service
/// manager may take 20 ms, so `always`, which asks nobody, has to be faster than that, and `auto` has the 50 ms that are
/// promised.
///
/// A machine under load makes a round slower and never faster, whereas a wait by design is in every round. So one round
/// of many must keep the time.
#[tokio::test]
async fn server_hears_of_a_stop_signal_at_once() {
    const ROUNDS: usize = 20;
    let mut world = world();
    world.write_nonce(HOUR);
    let [registration, sessions] = listen(&world).await;
    for (setting, limit, actions) in [
        ("always", Duration::from_millis(20), &["shutdown"][..]),
        ("auto", Duration::from_millis(50), &["shutdown", "leave"]),
    ] {
        let mut taken = Vec::new();
        while taken.iter().all(|it| limit <= *it) {
            assert!(taken.len() < ROUNDS, "{setting}: {taken:?}");
            let mut command = agent(world.directory.path());
            command.env("NSTANCE_SERVER_REGISTRATION_ADDR", &registration).env("NSTANCE_SERVER_AGENT_ADDR", &sessions);
            let running = Running::of(command.env("NSTANCE_LEAVE_ON_STOP", setting));
            while world.next_report().await.1.kind() != ReportKind::First {}
            let asked = Instant::now();
            running.ask_to_stop();
            let (heard, notice) = loop {
                let (at, report) = world.next_report().await;
                if let Some(notice) = report.termination_notice {
                    break (at, notice);
                }
            };
            assert!(actions.contains(&notice.action.as_str()), "{setting}: {}", notice.action);
            taken.push(heard - asked);
        }
    }
}

#[test]
fn words_and_status_without_a_directory_say_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let output = run(dir.path(), &["ready"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("identity is not there; make it, or set NSTANCE_IDENTITY_DIR"));
    let output = run(dir.path(), &["status"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("is nstance-agent.service running?"), "{}", stderr(&output));
    let output = agent(dir.path()).env("NSTANCE_IDENTITY_DIR", "here").arg("ready").output().unwrap();
    assert_eq!(output.status.code(), Some(78));
    assert!(stderr(&output).starts_with("NSTANCE_IDENTITY_DIR: "));
}

#[test]
fn usage_errors_name_the_problem_and_exit_with_64() {
    let dir = tempfile::tempdir().unwrap();
    for arguments in [&["dance"][..], &["stage"], &["stage", "a b"], &["fail"], &["status", "-o", "xml"], &["--fast"]] {
        let output = run(dir.path(), arguments);
        assert_eq!(output.status.code(), Some(64), "{arguments:?}");
        assert!(stderr(&output).contains("usage: nstance-agent"), "{arguments:?}");
        assert!(output.stdout.is_empty());
    }
    let help = run(dir.path(), &["--help"]);
    assert!(help.status.success() && stdout(&help).starts_with("usage: nstance-agent"));
}

fn shipped(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// The unit as the binary prints it, where systemd can look at it.
fn printed_unit() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nstance-agent.service");
    fs::write(&path, stdout(&run(dir.path(), &["unit"]))).unwrap();
    (dir, path)
}

/// Runs `systemd-analyze`, or says that there is none.
fn analyze(arguments: &[&str], unit: &Path) -> Option<Output> {
    match Command::new("systemd-analyze").args(arguments).arg(unit).output() {
        Ok(output) => Some(output),
        Err(error) => {
            println!("skipped: systemd-analyze {}: {error}", arguments.join(" "));
            None
        }
    }
}

#[test]
fn unit_is_the_shipped_one_with_the_path_of_this_binary() {
    let (_dir, path) = printed_unit();
    let shipped = fs::read_to_string(shipped("deploy/nstance-agent.service")).unwrap();
    let expected = shipped.replace("/usr/bin/nstance-agent", env!("CARGO_BIN_EXE_nstance-agent"));
    assert_eq!(fs::read_to_string(path).unwrap(), expected);
}

#[test]
fn unit_is_accepted_by_systemd() {
    let (_dir, path) = printed_unit();
    let Some(output) = analyze(&["verify"], &path) else { return };
    // It reads the machine's other units too, and complains of those as it likes.
    let text = stderr(&output);
    assert!(!text.lines().any(|line| line.contains("nstance-agent.service")), "{text}");
}

#[test]
fn unit_is_locked_down() {
    let (_dir, path) = printed_unit();
    let Some(output) = analyze(&["security", "--offline=true", "--threshold=20"], &path) else { return };
    if stderr(&output).contains("unrecognized option") {
        println!("skipped: this systemd-analyze judges running units only");
        return;
    }
    assert!(output.status.success(), "{}", stdout(&output));
}

#[test]
fn unit_says_what_its_makers_agreed_on() {
    let text = fs::read_to_string(shipped("deploy/nstance-agent.service")).unwrap();
    let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    for wanted in [
        "Type=notify",
        "WatchdogSec=30",
        "Restart=always",
        "RestartSec=1",
        "StartLimitIntervalSec=0",
        "TimeoutStopSec=5",
        "KillMode=mixed",
        "EnvironmentFile=/etc/nstance/agent.env",
        "User=nstance-agent",
        "SupplementaryGroups=adm",
        "RuntimeDirectory=nstance-agent",
        "StandardOutput=journal",
        "StandardError=journal+console",
        "After=network.target",
        "CapabilityBoundingSet=",
        "ProtectSystem=strict",
        "ReadWritePaths=/opt/nstance-agent",
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK",
        "SystemCallArchitectures=native",
        "SystemCallFilter=@system-service",
        "OOMPolicy=continue",
        "MemoryMax=64M",
        "TasksMax=32",
    ] {
        assert!(lines.contains(&wanted), "{wanted}");
    }
    for wanted in [
        "NoNewPrivileges",
        "ProtectHome",
        "PrivateTmp",
        "PrivateDevices",
        "ProtectKernelTunables",
        "ProtectKernelModules",
        "ProtectKernelLogs",
        "ProtectControlGroups",
        "ProtectClock",
        "RestrictNamespaces",
        "LockPersonality",
        "MemoryDenyWriteExecute",
        "RestrictRealtime",
    ] {
        assert!(lines.contains(&format!("{wanted}=yes").as_str()), "{wanted}");
    }
    assert!(!lines.iter().any(|line| line.starts_with("Before=")), "the goodbye must not wait for others");
    let own_name = lines.iter().any(|line| line.starts_with("ProtectHostname="));
    assert!(!own_name, "a name that the machine gets later would not be seen, and is to be reported");
}

/// As the agent itself would judge it: a certificate of another key or machine is none.
#[tokio::test]
async fn check_judges_the_certificate_that_lies_there() {
    let world = World::with(5, Arc::new(SystemClock));
    let key = KeyPair::generate(&*world.plane.dice);
    let other = KeyPair::generate(&*world.plane.dice);
    fs::set_permissions(world.path("identity"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(world.path("identity/identity.key"), key.to_pkcs8_pem().as_bytes()).unwrap();
    for (key, life, expected) in [
        (&key, HOUR, "ok   certificate until "),
        (&key, Duration::ZERO, "FAIL certificate ran out at "),
        (&other, HOUR, "FAIL identity.crt is not of this instance and identity.key"),
    ] {
        fs::write(world.path("identity/identity.crt"), world.plane.sign(&key.public_key(), life)).unwrap();
        let said = stdout(&run(world.directory.path(), &["check"]));
        assert!(said.lines().any(|line| line.starts_with(expected)), "{expected}: {said}");
    }
    fs::write(world.path("identity/identity.crt"), "nonsense").unwrap();
    world.write_nonce(HOUR);
    let said = stdout(&run(world.directory.path(), &["check"]));
    assert!(said.contains("ok   nonce for"), "what is no certificate is not looked at further: {said}");
}

/// Of several servers one leads, and the others may not listen at all; but whoever listens has to be a server of ours.
#[tokio::test]
async fn check_is_content_with_one_address_that_answers() {
    let world = world();
    world.write_nonce(HOUR);
    fs::set_permissions(world.path("identity"), fs::Permissions::from_mode(0o700)).unwrap();
    nstance_agent::identity_dir::prepare(&world.settings()).unwrap();
    let [registration, sessions] = listen(&world).await;
    let check = async |registration: &str, sessions: &str| {
        let mut command = agent(world.directory.path());
        command.env("NSTANCE_SERVER_REGISTRATION_ADDR", registration).env("NSTANCE_SERVER_AGENT_ADDR", sessions);
        let checked = tokio::task::spawn_blocking(move || command.arg("check").output().unwrap()).await.unwrap();
        let said: Vec<_> = stdout(&checked).lines().map(str::to_owned).collect();
        (checked.status.code(), said)
    };
    let has = |said: &[String], start: &str| said.iter().any(|line| line.starts_with(start));

    let (code, said) = check(&format!("127.0.0.1:1,{registration}"), &format!("{sessions},127.0.0.1:1")).await;
    assert_eq!(code, Some(0), "{said:?}");
    assert!(has(&said, &format!("ok   registration {registration}")), "{said:?}");
    assert!(has(&said, "ok   registration 127.0.0.1:1: not needed, another answers: connect to"), "{said:?}");
    assert!(has(&said, "ok   agent 127.0.0.1:1: not needed, another answers: connect to"), "{said:?}");

    let (code, said) = check(&registration, "127.0.0.1:1,127.0.0.1:2").await;
    assert_eq!(code, Some(1), "{said:?}");
    for address in ["127.0.0.1:1", "127.0.0.1:2"] {
        assert!(has(&said, &format!("FAIL agent {address}: connect to")), "{said:?}");
    }

    let stranger = World::with(6, Arc::new(SystemClock));
    let [theirs, _] = listen(&stranger).await;
    let (code, said) = check(&format!("{registration},{theirs}"), &sessions).await;
    assert_eq!(code, Some(1), "{said:?}");
    assert!(has(&said, &format!("ok   registration {registration}")), "{said:?}");
    let distrust = format!("FAIL registration {theirs}: the server at {theirs} is not trusted");
    assert!(has(&said, &distrust), "{said:?}");
}

/// The promise is two seconds. The bound here is far above it, for a machine under load is slow; what it finds is an
/// agent that waits for a server, which would take for ever.
#[tokio::test]
async fn process_whose_server_is_dead_ends_on_sigterm() {
    // One refuses connections, the other takes them and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    for address in ["127.0.0.1:1".to_owned(), silent.local_addr().unwrap().to_string()] {
        let world = world();
        let key = KeyPair::generate(&*world.plane.dice);
        fs::write(world.path("identity/identity.key"), key.to_pkcs8_pem().as_bytes()).unwrap();
        fs::write(world.path("identity/identity.crt"), world.plane.sign(&key.public_key(), HOUR)).unwrap();
        let dir = world.directory.path();
        let mut running = Running::of(agent(dir).env("NSTANCE_SERVER_AGENT_ADDR", &address));
        let state = || {
            let json: Value = serde_json::from_str(&stdout(&run(dir, &["status", "-o", "json"]))).unwrap_or_default();
            json["state"].as_str().unwrap_or_default().to_owned()
        };
        until("it looks for a server", || state() == "connecting").await;
        running.ask_to_stop();
        let asked = Instant::now();
        let mut ended = None;
        until("it ends", || {
            ended = running.child.try_wait().unwrap();
            ended.is_some()
        })
        .await;
        assert_eq!(ended.unwrap().code(), Some(0));
        assert!(asked.elapsed() < Duration::from_secs(10), "{address}: {:?}", asked.elapsed());
    }
}

/// Looks again and again, for half a minute at most.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let look = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), look).await.expect(what);
}

/// Whoever mends one of them should not find the other at the next start.
#[test]
fn problems_of_directories_are_told_with_those_of_other_settings() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    fs::create_dir(&keys).unwrap();
    fs::set_permissions(&keys, fs::Permissions::from_mode(0o777)).unwrap();
    for (command, code, stream) in [("run", 78, "stderr"), ("check", 1, "stdout")] {
        let mut agent = agent(dir.path());
        let output =
            agent.env("NSTANCE_DEBUG", "perhaps").env("NSTANCE_RECV_DIR", "here").arg(command).output().unwrap();
        assert_eq!(output.status.code(), Some(code));
        let said = if stream == "stderr" { stderr(&output) } else { stdout(&output) };
        let about = |name: &str| said.lines().filter(|line| line.contains(&format!("NSTANCE_{name}: "))).count();
        assert_eq!(["DEBUG", "RECV_DIR", "KEYS_DIR"].map(about), [1, 1, 1], "{said}");
        assert!(said.contains("can be written by others (mode 0777)"), "{said}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is made");
        if command == "run" {
            assert_eq!(about("IDENTITY_DIR"), 0, "what could be made is no problem: {said}");
        }
    }
}

/// Whoever asks may be root, whose directories the agent could not use.
#[test]
fn check_makes_no_directories() {
    let dir = tempfile::tempdir().unwrap();
    let checked = run(dir.path(), &["check"]);
    assert_eq!(checked.status.code(), Some(1));
    let said = stdout(&checked);
    for name in ["IDENTITY", "KEYS", "RECV"] {
        let expected = format!("FAIL NSTANCE_{name}_DIR: ");
        assert!(said.lines().any(|line| line.starts_with(&expected) && line.contains("is not there")), "{said}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// The names that userdata may use are those of the configuration; here each stands for something a shell must bear.
#[test]
fn userdata_is_a_shell_script_once_rendered() {
    let mut script = fs::read_to_string(shipped("examples/userdata-agent.sh")).unwrap();
    for (field, value) in [
        ("{{ .Nonce }}", "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJ4In0.c2ln"),
        ("{{ .Cluster.CACert }}", "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----"),
        ("{{ .Instance.ID }}", crate::common::INSTANCE),
        ("{{ .Server.RegistrationAddr }}", "[fd00::1]:8992,10.0.0.1:8992"),
        ("{{ .Server.AgentAddr }}", "10.0.0.1:8994"),
        ("{{ .Vars.AgentURL }}", "https://example.com/nstance-agent?arch=amd64&v=1"),
        ("{{ .Vars.AgentSHA256 }}", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
    ] {
        assert!(script.contains(field), "{field}");
        script = script.replace(field, value);
    }
    assert!(!script.contains("{{"), "a field nobody knows: {script}");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("userdata.sh");
    fs::write(&path, script).unwrap();
    let checked = Command::new("sh").arg("-n").arg(&path).output().unwrap();
    assert!(checked.status.success(), "{}", stderr(&checked));
}

#[test]
fn manual_names_every_command_and_setting() {
    let manual = fs::read_to_string(shipped("deploy/nstance-agent.8")).unwrap().replace("\\-", "-");
    let help = stdout(&run(Path::new("/"), &["--help"]));
    let commands = help.lines().filter_map(|line| line.strip_prefix("  ")?.split([' ', ',']).next());
    for command in commands.filter(|word| !word.is_empty()) {
        assert!(manual.contains(command), "{command}");
    }
    let settings = fs::read_to_string(shipped("crates/agent/src/settings/tests.rs")).unwrap();
    let rows = settings.lines().filter_map(|line| line.trim().strip_prefix("(\"")?.split('"').next());
    let names: Vec<_> =
        rows.filter(|name| name.chars().all(|c| c.is_ascii_uppercase() || c == '_' || c.is_ascii_digit())).collect();
    assert!(30 < names.len());
    for name in names {
        let name = if name.starts_with("NSTANCE_") { name.to_owned() } else { format!("NSTANCE_{name}") };
        assert!(manual.contains(&name), "{name}");
    }
}

/// What a package installs beside the unit: whom the agent runs as, and what it writes.
#[test]
fn packaged_user_and_directories_are_those_of_the_unit() {
    let unit = fs::read_to_string(shipped("deploy/nstance-agent.service")).unwrap();
    let user = unit.lines().find_map(|line| line.strip_prefix("User=")).unwrap();
    let users = fs::read_to_string(shipped("deploy/nstance-agent.sysusers")).unwrap();
    assert!(users.lines().any(|line| line.starts_with(&format!("u {user} "))), "{users}");
    let directories = fs::read_to_string(shipped("deploy/nstance-agent.tmpfiles")).unwrap();
    for (leaf, mode) in [("identity", "0700"), ("keys", "0700"), ("recv", "0750")] {
        let line = format!("d /opt/nstance-agent/{leaf} {mode} {user} {user} -");
        assert!(directories.lines().any(|it| it == line), "{line}");
    }
}
