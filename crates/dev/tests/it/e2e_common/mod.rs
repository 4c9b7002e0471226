//! One environment per test: own directory, own ports, real processes. However a test ends, nothing of it stays.
#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    sync::Once,
    time::{Duration, SystemTime},
};

use nstance_providers::process::{Process, end_all, power};
use serde_json::Value;
use tempfile::TempDir;
use tokio::process::{Child, Command};

pub(crate) const DEV: &str = env!("CARGO_BIN_EXE_nstance-dev");

/// Nothing here takes a tenth of this on a machine that has nothing else to do.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
const PERIOD: Duration = Duration::from_millis(50);

/// The server and the agent must be there, as new as their sources. `make test` builds them first; whoever runs one test
/// by hand gets them built here.
pub(crate) fn binaries() {
    static BUILT: Once = Once::new();
    BUILT.call_once(|| {
        let bin = Path::new(DEV).parent().expect("a program is in a directory");
        let built = ["nstance-server", "nstance-agent", "nstance-admin", "nstance-operator"]
            .map(|name| modified(&bin.join(name)));
        let sources = newest(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap());
        if built.iter().all(|it| it.is_some() && sources <= *it) {
            return;
        }
        let profile = match bin.file_name().and_then(|name| name.to_str()) {
            Some("debug") | None => "dev",
            Some(profile) => profile,
        };
        let mut cargo = std::process::Command::new(env!("CARGO"));
        // Those of this test; build scripts that look at them would run again, and everything above them be built anew.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("CARGO_PKG_")) {
            cargo.env_remove(name);
        }
        let built = cargo
            // All of them, as `make build` does: another choice of packages would mean other features, and a build of
            // everything once more.
            .args(["build", "--workspace", "--bins", "--profile", profile])
            .arg("--target-dir")
            .arg(bin.parent().expect("target directory"))
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .expect("run cargo");
        assert!(built.success(), "server and agent do not build");
    });
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|meta| meta.modified()).ok()
}

/// The youngest source that the two programs are made of.
fn newest(crates: &Path) -> Option<SystemTime> {
    fn walk(dir: &Path, newest: &mut Option<SystemTime>) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                if !matches!(entry.file_name().to_str(), Some("dev" | "tests" | "target")) {
                    walk(&path, newest);
                }
            } else {
                *newest = (*newest).max(modified(&path));
            }
        }
    }
    let mut newest = None;
    walk(crates, &mut newest);
    newest
}

pub(crate) struct Env {
    temp: TempDir,
    /// Processes seen so far that must not outlive the test, beside those that are recorded.
    foreground: Vec<Process>,
}

impl Drop for Env {
    fn drop(&mut self) {
        // The supervisors first, or they would start again what we end.
        for process in self.foreground.iter().copied().chain(self.recorded("up")) {
            let _ = process.kill_hard();
        }
        for name in self.components() {
            if let Some(process) = self.recorded(&name) {
                let _ = process.kill_hard();
            }
        }
        let _ = end_all(&self.instances());
    }
}

impl Env {
    pub(crate) fn new() -> Self {
        binaries();
        Self { temp: TempDir::new().unwrap(), foreground: Vec::new() }
    }

    pub(crate) fn dir(&self) -> PathBuf {
        self.temp.path().join("temp")
    }

    /// The windows of the environment's tmux session; none without a session. `None` where tmux is not installed.
    pub(crate) fn windows(&self) -> Option<BTreeSet<String>> {
        let mut tmux = std::process::Command::new("tmux");
        tmux.env("TMUX_TMPDIR", self.temp.path()).env_remove("TMUX");
        tmux.args(["list-windows", "-t", "=nstance-dev-agents", "-F", "#{window_name}"]);
        let listed = tmux.output().ok()?;
        Some(String::from_utf8_lossy(&listed.stdout).lines().map(str::to_owned).collect())
    }

    pub(crate) fn instances(&self) -> PathBuf {
        self.dir().join("instances")
    }

    /// Names of all that is recorded.
    fn components(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir().join("run")).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter(|it| !it.starts_with('.')).filter_map(|it| it.strip_suffix(".json").map(str::to_owned)).collect()
    }

    pub(crate) fn recorded(&self, component: &str) -> Option<Process> {
        let bytes = fs::read(self.dir().join("run").join(format!("{component}.json"))).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Runs a command to its end, within the patience.
    pub(crate) async fn dev(&self, args: &[&str]) -> Output {
        let child = self.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        tokio::time::timeout(PATIENCE, child.wait_with_output())
            .await
            .unwrap_or_else(|_| panic!("nstance-dev {args:?} does not end"))
            .unwrap()
    }

    fn command(&self, args: &[&str]) -> Command {
        let (first, rest) = args.split_first().expect("a command");
        let mut command = Command::new(DEV);
        // Windows of tmux are opened on a server of this test's own.
        command.env("TMUX_TMPDIR", self.temp.path()).env_remove("TMUX");
        command.arg(first).arg("--dir").arg(self.dir()).args(rest).stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    /// What a command says if it succeeds.
    pub(crate) async fn ok(&self, args: &[&str]) -> String {
        let output = self.dev(args).await;
        let text = text(&output);
        assert!(output.status.success(), "nstance-dev {args:?}: {text}\n{}", self.logs());
        text
    }

    pub(crate) async fn fails(&self, args: &[&str]) -> String {
        let output = self.dev(args).await;
        let text = text(&output);
        assert!(!output.status.success(), "nstance-dev {args:?} was to fail: {text}");
        text
    }

    /// Without Kubernetes; with one shard, unless the arguments or the environment itself say otherwise.
    pub(crate) async fn up(&self, args: &[&str]) -> String {
        self.ok(&[&["up", "--detach", "--port-base", "0", "--no-k8s"], self.one_shard(args), args].concat()).await
    }

    fn one_shard(&self, args: &[&str]) -> &'static [&'static str] {
        let is_new = !self.dir().join("dev-s3/config/dev-1.jsonc").exists();
        if is_new && !args.contains(&"--shards") { &["--shards", "1"] } else { &[] }
    }

    /// Everything, as a person gets it.
    pub(crate) async fn up_with_kubernetes(&self, args: &[&str]) -> String {
        self.ok(&[&["up", "--detach", "--port-base", "0"], args].concat()).await
    }

    /// `up` without a terminal, as a child of ours.
    pub(crate) async fn up_in_foreground(&mut self, args: &[&str]) -> Child {
        let log = fs::File::create(self.temp.path().join("foreground.log")).unwrap();
        let args = [&["up", "--port-base", "0", "--no-k8s"], self.one_shard(args), args].concat();
        let child = self.command(&args).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        self.foreground.extend(Process::find(child.id().unwrap()).unwrap());
        child
    }

    pub(crate) async fn status(&self) -> Value {
        let output = self.dev(&["status", "--json"]).await;
        serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
    }

    /// Waits until the status is as wanted, and answers it.
    pub(crate) async fn until(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        let wait = async {
            loop {
                last = self.status().await;
                if holds(&last) {
                    return;
                }
                tokio::time::sleep(PERIOD).await;
            }
        };
        if tokio::time::timeout(PATIENCE, wait).await.is_err() {
            panic!("not in time: {what}\n{last:#}\n{}", self.logs());
        }
        last
    }

    pub(crate) async fn healthy(&self) -> Value {
        self.until("all healthy", |status| status["healthy"] == true).await
    }

    /// Every process that was started for an instance.
    pub(crate) async fn agents(&self) -> Vec<Process> {
        power::agents(&self.instances()).await.unwrap()
    }

    /// Waits until exactly these many agents run.
    pub(crate) async fn until_agents(&self, n: usize) {
        let wait = async {
            while self.agents().await.len() != n {
                tokio::time::sleep(PERIOD).await;
            }
        };
        if tokio::time::timeout(PATIENCE, wait).await.is_err() {
            panic!("{:?} run instead of {n} agents\n{}", self.agents().await, self.logs());
        }
    }

    /// Supervisor, store, servers and agents that run now.
    pub(crate) async fn processes(&self) -> Vec<Process> {
        let components: Vec<Process> = self.components().iter().filter_map(|name| self.recorded(name)).collect();
        let components = components.into_iter();
        components.chain(self.agents().await).filter(|it| it.lives()).collect()
    }

    pub(crate) fn logs(&self) -> String {
        ["up", "server-1", "server-2", "dev-k8s", "operator"]
            .map(|name| format!("logs/{name}.log"))
            .iter()
            .map(String::as_str)
            .chain(["../foreground.log"])
            .map(|name| {
                let text = fs::read_to_string(self.dir().join(name)).unwrap_or_default();
                let lines: Vec<&str> = text.lines().collect();
                format!("--- {name}\n{}\n", lines[lines.len().saturating_sub(40)..].join("\n"))
            })
            .collect()
    }
}

pub(crate) fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

pub(crate) fn ids(status: &Value) -> BTreeSet<String> {
    let instances = status["instances"].as_array().cloned().unwrap_or_default();
    instances.iter().filter_map(|it| Some(it["id"].as_str()?.to_owned())).collect()
}

pub(crate) fn group(status: &Value) -> [i64; 3] {
    let group = &status["shards"][0]["groups"][0];
    ["size", "actual", "ready"].map(|field| group[field].as_i64().unwrap_or(-1))
}

/// What the status says of one server.
pub(crate) fn server<'a>(status: &'a Value, name: &str) -> &'a Value {
    let components = status["components"].as_array().map(Vec::as_slice).unwrap_or_default();
    components.iter().find(|it| it["name"] == name).unwrap_or(&Value::Null)
}

/// The process of every instance's agent, by instance.
pub(crate) fn pids(status: &Value) -> BTreeMap<String, u64> {
    let instances = status["instances"].as_array().cloned().unwrap_or_default();
    instances.iter().filter_map(|it| Some((it["id"].as_str()?.to_owned(), it["pid"].as_u64()?))).collect()
}

pub(crate) fn signal(process: &Process, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(process.pid).unwrap()).unwrap();
    assert!(process.lives(), "{process:?} is to be signalled and is gone");
    rustix::process::kill_process(pid, signal).unwrap();
}

/// Waits for the end of a process we started ourselves.
pub(crate) async fn exit(child: &mut Child) -> std::process::ExitStatus {
    tokio::time::timeout(PATIENCE, child.wait()).await.expect("it does not end").unwrap()
}
