//! What the process tells of itself to those beside it: the service manager, and whoever asks for `status`.
//!
//! The binary runs this, not the agent: agents that share a process have neither a service manager nor a state file.

use std::{
    convert::Infallible,
    ffi::{OsStr, OsString},
    fs, io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use nstance_core::{ports::clock::Clock, time::Timestamp};
use nstance_rt::chain::Chain;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::{
    context::{Control, State},
    disk::{Access, Disk},
    health::AGENT_VERSION,
    settings::Settings,
};

const FILE: &str = "state.json";

/// Where the unit's runtime directory is.
const RUN: &str = "/run/nstance-agent";

/// The way to a service manager that wants to know, as `sd_notify(3)` has it.
pub struct Manager {
    socket: UnixDatagram,
    address: SocketAddr,
    /// How often it wants to hear that we are alive.
    watchdog: Option<Duration>,
}

impl Manager {
    /// Whoever started us, if it wants to be told.
    pub fn from_env() -> Option<Self> {
        let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
        // A watchdog that is meant for another process is not ours to feed.
        let ours = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
        let watchdog = number("WATCHDOG_USEC").filter(|_| ours).map(Duration::from_micros);
        let name = std::env::var_os("NOTIFY_SOCKET")?;
        match Self::connect(&name, watchdog) {
            Ok(manager) => Some(manager),
            Err(error) => {
                tracing::warn!(socket = ?name, error = %Chain(&error), "service manager not reachable");
                None
            }
        }
    }

    /// `name` is a path, or `@` and an abstract name.
    pub fn connect(name: &OsStr, watchdog: Option<Duration>) -> io::Result<Self> {
        let address = match name.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(name)?,
        };
        let socket = UnixDatagram::unbound()?;
        // A manager that does not read must not hold us up.
        socket.set_nonblocking(true)?;
        Ok(Self { socket, address, watchdog: watchdog.filter(|it| !it.is_zero()) })
    }

    fn tell(&self, words: &str) {
        if let Err(error) = self.socket.send_to_addr(words.as_bytes(), &self.address) {
            tracing::debug!(words, error = %Chain(&error), "service manager not told");
        }
    }
}

/// Tells where the agent is in its life.
pub struct Teller {
    clock: Arc<dyn Clock>,
    disk: Disk,
    place: PathBuf,
    instance: String,
    environment: String,
    manager: Option<Manager>,
    ready: bool,
    writable: bool,
}

impl Teller {
    pub fn new(settings: &Settings, clock: Arc<dyn Clock>, disk: Disk, manager: Option<Manager>) -> Self {
        // The manager makes the directory and takes it away again; one that merely lies there is another agent's.
        let place = std::env::var_os("RUNTIME_DIRECTORY").and_then(|all| first_path(&all));
        Self {
            clock,
            disk,
            place: place.unwrap_or_else(|| settings.identity.path.clone()).join(FILE),
            instance: settings.instance.to_string(),
            environment: settings.environment.clone(),
            manager,
            ready: false,
            writable: true,
        }
    }

    /// Tells every change, and that we live, for as long as it is asked to.
    pub async fn run(&mut self, control: &Control) -> Infallible {
        let mut states = control.state();
        let half = self.manager.as_ref().and_then(|manager| manager.watchdog).map(|period| period / 2);
        loop {
            let state = states.borrow_and_update().clone();
            self.notify(&state);
            // While we leave, the goodbye is what counts: a slow disk must not hold up the one thread it needs. That we
            // left is written at the end.
            if state != State::Leaving {
                self.write(&state);
            }
            loop {
                let beat = async {
                    match half {
                        Some(half) => sleep(half).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    biased;
                    changed = states.changed() => match changed {
                        Ok(()) => break,
                        Err(_) => std::future::pending().await,
                    },
                    () = beat => {}
                }
                if let Some(manager) = &self.manager {
                    manager.tell("WATCHDOG=1");
                }
            }
        }
    }

    /// Tells one state.
    pub fn tell(&mut self, state: &State) {
        self.notify(state);
        self.write(state);
    }

    fn notify(&mut self, state: &State) {
        if let Some(manager) = &self.manager {
            let mut words = format!("STATUS={}", state.as_str());
            if let State::Parked(why) = state {
                words.push_str(": ");
                words.extend(why.chars().map(|c| if c.is_control() { ' ' } else { c }));
            }
            if !self.ready && *state != State::Starting {
                self.ready = true;
                words.push_str("\nREADY=1");
            }
            if *state == State::Leaving {
                words.push_str("\nSTOPPING=1");
            }
            words.push_str("\nWATCHDOG=1");
            manager.tell(&words);
        }
    }

    fn write(&mut self, state: &State) {
        let mut file = json!({
            "state": state.as_str(),
            "since": self.clock.now().to_string(),
            "instance": self.instance,
            "environment": self.environment,
            "version": AGENT_VERSION,
            "pid": std::process::id(),
        });
        if let State::Parked(why) = state {
            file["reason"] = why.as_str().into();
        }
        // Nothing in it is secret, and whoever looks after a machine may not be the agent's user.
        let written = self.disk.write(&self.place, format!("{file}\n").as_bytes(), Access::mode(0o644));
        if let Err(error) = &written
            && self.writable
        {
            tracing::warn!(path = %self.place.display(), error = %Chain(error), "state not written");
        }
        self.writable = written.is_ok();
    }
}

fn first_path(all: &OsStr) -> Option<PathBuf> {
    let first = all.as_bytes().split(|byte| *byte == b':').next()?;
    Some(PathBuf::from(OsStr::from_bytes(first))).filter(|path| path.is_absolute())
}

#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    #[error("no agent has left its state in {}; is nstance-agent.service running?", places.join(" or "))]
    None { places: Vec<String> },
    #[error("read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is not the state of an agent", path.display())]
    Form { path: PathBuf },
}

/// What an agent has left of itself.
#[derive(Debug)]
pub struct Status {
    /// As it was written.
    pub json: Value,
    pub running: bool,
}

impl Status {
    /// The state of the agent that runs here, wherever it keeps it.
    pub fn read(identity: &Path) -> Result<Self, StatusError> {
        let run = std::env::var_os("RUNTIME_DIRECTORY").and_then(|all| first_path(&all));
        Self::read_first(&[run.unwrap_or_else(|| PathBuf::from(RUN)), identity.to_owned()])
    }

    fn read_first(places: &[PathBuf]) -> Result<Self, StatusError> {
        for place in places {
            let path = place.join(FILE);
            match fs::read(&path) {
                Ok(bytes) => return Self::parse(&bytes).ok_or(StatusError::Form { path }),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(StatusError::Read { path, source }),
            }
        }
        Err(StatusError::None { places: places.iter().map(|place| place.display().to_string()).collect() })
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let json: Value = serde_json::from_slice(bytes).ok()?;
        let pid = i32::try_from(json.get("pid")?.as_i64()?).ok()?;
        let gone = |error| error == rustix::io::Errno::SRCH;
        let running = rustix::process::Pid::from_raw(pid)
            .is_some_and(|pid| rustix::process::test_kill_process(pid).map_or_else(|error| !gone(error), |()| true));
        Some(Self { json, running })
    }

    /// For people: a name and a value in each line.
    pub fn text(&self, now: Timestamp) -> String {
        let mut lines = String::new();
        let mut line = |name: &str, value: &str| lines.push_str(&format!("{name:<12} {value}\n"));
        let text = |name: &str| self.json.get(name).and_then(Value::as_str);
        match self.running {
            true => line("state", text("state").unwrap_or("unknown")),
            false => line("state", &format!("not running, was {}", text("state").unwrap_or("unknown"))),
        }
        if let Some(why) = text("reason") {
            line("reason", why);
        }
        if let Some(since) = text("since") {
            let age = since.parse::<Timestamp>().map(|since| format!(" ({}s ago)", now.since(since).as_secs()));
            line("since", &format!("{since}{}", age.unwrap_or_default()));
        }
        for name in ["instance", "environment", "version"] {
            line(name, text(name).unwrap_or_default());
        }
        line("pid", &self.json.get("pid").map(Value::to_string).unwrap_or_default());
        lines
    }
}

/// The unit in which this binary is meant to run, for the place where it lies.
pub fn unit(executable: Option<OsString>) -> String {
    const UNIT: &str = include_str!("../../../deploy/nstance-agent.service");
    let path = executable.and_then(|path| path.into_string().ok()).filter(|path| !path.contains(char::is_whitespace));
    match path {
        Some(path) => UNIT.replace("/usr/bin/nstance-agent", &path),
        None => UNIT.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use nstance_rt::clock::TokioClock;

    use super::*;
    use crate::context::Context;

    fn teller(name: &OsStr, watchdog: Option<Duration>) -> (tempfile::TempDir, Teller) {
        let (dir, ctx) = Context::for_tests(&[]);
        let clock = Arc::new(TokioClock::starting_at(Timestamp::from_millis(1_769_860_800_000)));
        let manager = Manager::connect(name, watchdog).unwrap();
        (dir, Teller::new(&ctx.settings, clock, Disk::default(), Some(manager)))
    }

    fn heard(manager: &UnixDatagram) -> Vec<String> {
        let mut bytes = [0; 512];
        std::iter::from_fn(|| manager.recv(&mut bytes).ok().map(|n| String::from_utf8_lossy(&bytes[..n]).into_owned()))
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn manager_hears_ready_states_beats_and_the_end() {
        let sockets = tempfile::tempdir().unwrap();
        let path = sockets.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        manager.set_nonblocking(true).unwrap();
        let (_dir, mut teller) = teller(path.as_os_str(), Some(Duration::from_secs(30)));
        let control = Control::new();
        let script = async {
            let pause = || tokio::time::sleep(Duration::from_millis(1));
            pause().await;
            assert_eq!(heard(&manager), ["STATUS=starting\nWATCHDOG=1"]);
            control.set(State::Enrolling);
            pause().await;
            assert_eq!(heard(&manager), ["STATUS=enrolling\nREADY=1\nWATCHDOG=1"]);
            tokio::time::sleep(Duration::from_secs(61)).await;
            assert_eq!(heard(&manager), ["WATCHDOG=1"; 4], "at half of the period");
            control.set(State::Parked("no\nnonce".into()));
            pause().await;
            assert_eq!(heard(&manager), ["STATUS=parked: no nonce\nWATCHDOG=1"]);
            control.set(State::Leaving);
            pause().await;
            assert_eq!(heard(&manager), ["STATUS=leaving\nSTOPPING=1\nWATCHDOG=1"]);
        };
        tokio::select! {
            never = teller.run(&control) => match never {},
            () = script => {}
        }
    }

    /// The disk may be slow, and the goodbye needs the thread.
    #[tokio::test(start_paused = true)]
    async fn disk_is_not_touched_between_a_stop_and_the_end() {
        let sockets = tempfile::tempdir().unwrap();
        let path = sockets.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        manager.set_nonblocking(true).unwrap();
        let (_dir, mut teller) = teller(path.as_os_str(), None);
        let place = teller.place.clone();
        let left = || Status::parse(&fs::read(&place).unwrap()).unwrap().json["state"].as_str().unwrap().to_owned();
        let control = Control::new();
        control.set(State::Serving);
        let script = async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert_eq!(left(), "serving");
            heard(&manager);
            control.set(State::Leaving);
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert_eq!(heard(&manager), ["STATUS=leaving\nSTOPPING=1\nWATCHDOG=1"]);
        };
        tokio::select! {
            never = teller.run(&control) => match never {},
            () = script => {}
        }
        assert_eq!(left(), "serving");
        teller.tell(&State::Leaving);
        assert_eq!(left(), "leaving");
    }

    #[tokio::test(start_paused = true)]
    async fn abstract_sockets_are_reached_and_a_deaf_manager_is_survived() {
        let name = format!("nstance-agent-test-{}", std::process::id());
        let manager = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let (_dir, mut teller) = teller(OsStr::new(&format!("@{name}")), None);
        teller.tell(&State::Serving);
        assert_eq!(
            heard(&{
                manager.set_nonblocking(true).unwrap();
                manager
            }),
            ["STATUS=serving\nREADY=1\nWATCHDOG=1"]
        );
        teller.tell(&State::Leaving);
    }

    #[tokio::test(start_paused = true)]
    async fn state_is_left_for_whoever_asks() {
        let sockets = tempfile::tempdir().unwrap();
        let path = sockets.path().join("notify");
        let _manager = UnixDatagram::bind(&path).unwrap();
        let (dir, mut teller) = teller(path.as_os_str(), None);
        let places = [dir.path().join("run"), dir.path().join("identity")];
        assert!(matches!(Status::read_first(&places), Err(StatusError::None { .. })));
        teller.tell(&State::Parked("NONCE_USED: no".into()));
        let status = Status::read_first(&places).unwrap();
        assert!(status.running);
        assert_eq!(
            status.text(Timestamp::from_millis(1_769_860_805_000)),
            format!(
                "state        parked\nreason       NONCE_USED: no\nsince        2026-01-31T12:00:00.000Z (5s ago)\n\
                 instance     knc06bgm7733st2576nx5jht4ecjw\nenvironment  development\nversion      {AGENT_VERSION}\npid          {}\n",
                std::process::id()
            )
        );
        fs::write(&teller.place, r#"{"pid":2147483647,"state":"serving"}"#).unwrap();
        let status = Status::read_first(&places).unwrap();
        assert!(!status.running && status.text(Timestamp::EPOCH).contains("not running, was serving"));
        fs::write(&teller.place, "{").unwrap();
        assert!(matches!(Status::read_first(&places), Err(StatusError::Form { .. })));
    }

    #[test]
    fn unit_names_the_binary_it_comes_from() {
        let shown = unit(Some("/usr/local/bin/nstance-agent".into()));
        assert!(shown.contains("\nExecStart=/usr/local/bin/nstance-agent run\n"));
        assert!(unit(None).contains("\nExecStart=/usr/bin/nstance-agent run\n"));
        assert!(unit(Some("/odd place/agent".into())).contains("\nExecStart=/usr/bin/nstance-agent run\n"));
    }
}
