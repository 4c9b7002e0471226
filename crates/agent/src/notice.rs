//! Notices: the machine is about to go, or the agent is. What a stop signal means is decided here; the clouds' notices
//! come from the metadata watch.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use nstance_core::time::Timestamp;
use tokio::time::{sleep, timeout};

use crate::settings::LeaveOnStop;

/// How long the service manager may take to answer; the notice matters more than its precision.
const ASK_LIMIT: Duration = Duration::from_millis(20);

nstance_core::words!(
    /// What is about to happen.
    Action {
        Terminate "terminate",
        Stop "stop",
        Hibernate "hibernate",
        Preempt "preempt",
        /// Advice: the machine may be taken soon.
        Rebalance "rebalance",
        /// Advice: something will be done to the machine.
        Maintenance "maintenance",
        /// The machine goes down.
        Shutdown "shutdown",
        /// The agent alone goes, and is expected back.
        Leave "leave",
    }
);

impl Action {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|action| action.as_str() == text)
    }

    /// What it means for the machine: the larger, the surer and the sooner is its end.
    pub(crate) fn weight(self) -> u8 {
        match self {
            Self::Rebalance | Self::Maintenance => 0,
            Self::Leave => 1,
            Self::Shutdown => 2,
            Self::Terminate | Self::Stop | Self::Hibernate | Self::Preempt => 3,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    pub action: Action,
    pub deadline: Option<Timestamp>,
    pub detected_at: Timestamp,
    pub id: String,
}

/// What a stop signal means here and now. Whoever cannot tell says `shutdown`: the server asks the provider before it
/// believes it, whereas a shutdown taken for a restart would leave a hole until a deadline passes.
pub async fn stop_action(setting: LeaveOnStop) -> Action {
    match setting {
        LeaveOnStop::Always => Action::Shutdown,
        LeaveOnStop::Never => Action::Leave,
        LeaveOnStop::Auto => auto(Path::new("/"), ask_systemd()).await,
    }
}

/// What it means on the machine below `root` whose service manager says `state`. Only a word that is known to mean that
/// the machine stays is believed: the manager also says `offline` and `unknown`, and what it says next is not known.
async fn auto(root: &Path, state: impl Future<Output = Option<String>>) -> Action {
    let systemd = fs::read_to_string(root.join("proc/1/comm")).is_ok_and(|name| name.trim() == "systemd");
    if !systemd || going_down(&root.join("run")) {
        return Action::Shutdown;
    }
    match timeout(ASK_LIMIT, state).await.ok().flatten().as_deref() {
        Some("initializing" | "starting" | "running" | "degraded" | "maintenance") => Action::Leave,
        _ => Action::Shutdown,
    }
}

/// Signs that systemd leaves when the machine goes down.
fn going_down(run: &Path) -> bool {
    ["nologin", "systemd/shutdown/scheduled"].iter().any(|name| run.join(name).exists())
}

async fn ask_systemd() -> Option<String> {
    let mut child = Command::new("systemctl")
        .arg("is-system-running")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    // Looked at rather than waited for: a process of two seconds' remaining life needs no machinery for children.
    while child.try_wait().ok()?.is_none() {
        sleep(Duration::from_millis(1)).await;
    }
    let output = child.wait_with_output().ok()?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned()).filter(|state| !state.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn setting_decides_what_a_stop_means() {
        assert_eq!(stop_action(LeaveOnStop::Always).await, Action::Shutdown);
        assert_eq!(stop_action(LeaveOnStop::Never).await, Action::Leave);
    }

    /// A machine whose first process has this name.
    fn machine(first: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/1")).unwrap();
        fs::create_dir_all(root.path().join("run/systemd/shutdown")).unwrap();
        fs::write(root.path().join("proc/1/comm"), format!("{first}\n")).unwrap();
        root
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_manager_that_says_the_machine_stays_makes_a_stop_a_leave() {
        let systemd = machine("systemd");
        for (state, expected) in [
            (Some("initializing"), Action::Leave),
            (Some("starting"), Action::Leave),
            (Some("running"), Action::Leave),
            (Some("degraded"), Action::Leave),
            (Some("maintenance"), Action::Leave),
            (Some("stopping"), Action::Shutdown),
            (Some("offline"), Action::Shutdown),
            (Some("unknown"), Action::Shutdown),
            (Some("hovering"), Action::Shutdown),
            (None, Action::Shutdown),
        ] {
            let found = auto(systemd.path(), async { state.map(str::to_owned) }).await;
            assert_eq!(found, expected, "{state:?}");
        }
        let began = tokio::time::Instant::now();
        assert_eq!(auto(systemd.path(), std::future::pending()).await, Action::Shutdown);
        assert!(began.elapsed() <= ASK_LIMIT + Duration::from_millis(1), "a manager that is silent is not waited for");
    }

    #[tokio::test(start_paused = true)]
    async fn without_systemd_or_with_signs_of_a_shutdown_nobody_is_asked() {
        let running = || async { Some("running".to_owned()) };
        assert_eq!(auto(machine("init").path(), running()).await, Action::Shutdown);
        let systemd = machine("systemd");
        fs::write(systemd.path().join("run/systemd/shutdown/scheduled"), "").unwrap();
        assert_eq!(auto(systemd.path(), running()).await, Action::Shutdown);
    }

    #[test]
    fn signs_of_a_shutdown_are_seen() {
        let run = tempfile::tempdir().unwrap();
        assert!(!going_down(run.path()));
        fs::write(run.path().join("nologin"), "").unwrap();
        assert!(going_down(run.path()));
    }
}
