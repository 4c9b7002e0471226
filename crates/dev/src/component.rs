//! One child process of the supervisor: started, recorded, ended.

use std::{
    collections::BTreeMap,
    fs::{self, OpenOptions},
    io::{self, Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::Context;
use nstance_core::ports::clock::Clock as _;
use nstance_providers::process::Process;
use nstance_rt::clock::SystemClock;
use tokio::process::{Child, Command};

use crate::{
    layout::Layout,
    records::{Kind, Phase, RunFile},
};

/// What is needed to start a component, again and again.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<String>,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) ports: BTreeMap<String, u16>,
    /// How long it may take to end when asked.
    pub(crate) grace: Duration,
    /// Of a server: whose.
    pub(crate) shard: Option<String>,
}

/// A component that was started by this process.
pub(crate) struct Component {
    pub(crate) spec: Spec,
    child: Child,
    pub(crate) record: RunFile,
    /// Where its own lines begin in its log.
    log_from: u64,
}

/// Variables of a person's shell that would send a component to another store.
const FOREIGN: [&str; 5] = [
    "AWS_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL_S3",
    "AWS_DEFAULT_REGION",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
];

impl Component {
    pub(crate) fn start(layout: &Layout, spec: Spec, restarts: u32) -> anyhow::Result<Self> {
        let log_path = layout.log(&spec.name);
        fs::create_dir_all(layout.logs()).context("make the directory of logs")?;
        let open = || OpenOptions::new().create(true).append(true).open(&log_path);
        let log = open().with_context(|| format!("open {}", log_path.display()))?;
        let log_from = log.metadata().map_or(0, |meta| meta.len());
        let mut command = Command::new(&spec.program);
        for name in FOREIGN {
            command.env_remove(name);
        }
        let mut child = command
            .args(&spec.args)
            .envs(&spec.env)
            .current_dir(layout.dir())
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("share the log")?)
            .stderr(log)
            // Ctrl-C goes to the terminal's whole group; we end components in our own order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("start {} ({})", spec.name, spec.program.display()))?;
        let process = child.id().map(Process::find).transpose().context("look at the started process")?.flatten();
        let Some(process) = process else {
            let _ = child.start_kill();
            anyhow::bail!("{} ended before it could be recorded; see {}", spec.name, layout.short(&log_path));
        };
        let record = RunFile {
            name: spec.name.clone(),
            kind: spec.kind,
            phase: Phase::Ready,
            process,
            ports: spec.ports.clone(),
            command: std::iter::once(spec.program.display().to_string()).chain(spec.args.iter().cloned()).collect(),
            log: log_path,
            started_at: SystemClock.now().to_string(),
            restarts,
            shard: spec.shard.clone(),
            shape: None,
            extras: Vec::new(),
        };
        if let Err(error) = record.write(layout) {
            let _ = child.start_kill();
            return Err(error);
        }
        Ok(Self { spec, child, record, log_from })
    }

    pub(crate) fn name(&self) -> &str {
        &self.spec.name
    }

    pub(crate) fn pid(&self) -> u32 {
        self.record.process.pid
    }

    /// Resolves when the process has ended. May be dropped and asked again.
    pub(crate) async fn ended(&mut self) -> String {
        match self.child.wait().await {
            Ok(status) => how(status),
            Err(error) => format!("could not be waited for: {error}"),
        }
    }

    /// Asks it to end, and kills it if it takes longer than `grace`. Afterwards it is neither there nor recorded.
    pub(crate) async fn stop(&mut self, layout: &Layout, grace: Duration) -> io::Result<()> {
        self.record.process.end(grace).await?;
        self.child.wait().await?;
        self.record.forget(layout);
        Ok(())
    }

    /// Its last lines since it was started.
    pub(crate) fn tail(&self, n_lines: usize) -> Vec<String> {
        tail(&self.record.log, self.log_from, n_lines)
    }
}

fn how(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, Some(9)) => "was killed (SIGKILL)".to_owned(),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

/// The last lines of a file after `from`.
pub(crate) fn tail(path: &Path, from: u64, n_lines: usize) -> Vec<String> {
    const WINDOW: u64 = 64 * 1024;
    let read = || -> io::Result<String> {
        let mut file = fs::File::open(path)?;
        let end = file.metadata()?.len();
        file.seek(SeekFrom::Start(from.max(end.saturating_sub(WINDOW)).min(end)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(n_lines)..].iter().map(|line| (*line).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_is_the_last_lines_after_a_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.log");
        fs::write(&path, "old\n1\n2\n3\n").unwrap();
        assert_eq!(tail(&path, 4, 2), ["2", "3"]);
        assert_eq!(tail(&path, 4, 9), ["1", "2", "3"]);
        assert_eq!(tail(&path, 999, 9), Vec::<String>::new());
        assert_eq!(tail(&dir.path().join("none"), 0, 9), Vec::<String>::new());
    }
}
