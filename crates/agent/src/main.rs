//! The binary: arguments, signals, exit codes. Everything else is in the library.

use std::{
    io::{self, IsTerminal as _, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use nstance_agent::{
    Components, Control, Endpoints, State, TcpNet,
    boot::spool::{SpoolError, Word, say},
    check::check,
    cli::{self, Command},
    disk::Disk,
    host::Host,
    identity_dir::{directory_problems, prepare},
    service::{Manager, Status, Teller, unit},
    settings::{Problem, Settings, identity_path},
};
use nstance_core::ports::clock::Clock as _;
use nstance_rt::{
    chain::Chain,
    clock::SystemClock,
    entropy::SystemEntropy,
    shutdown::StopSignals,
    telemetry::{self, LogForm},
};
use tokio::signal::unix::{SignalKind, signal};

/// `EX_CONFIG` of sysexits: the service manager shows it, and its backoff keeps the restarts slow.
const BAD_CONFIG: u8 = 78;
const BAD_USAGE: u8 = 64;

/// Names are looked up on threads of their own. Few: a resolver that does not answer must not get all tasks that the unit
/// grants. And kept: if something else has got them, no other thread can be started, which would end the process.
const LOOKUP: &str = "lookup";
const MAX_LOOKUPS: usize = 4;
const LOOKUPS_LAST: Duration = Duration::from_secs(u32::MAX as u64);

/// Where the kernel shares the processors between sessions first, a new session begins as everybody's equal, and the
/// low priority that our parent gave us would mean nothing. Elsewhere the file is not there.
fn keep_rank() {
    if let Ok(nice @ 1..) = rustix::process::getpriority_process(None) {
        let _ = std::fs::write("/proc/self/autogroup", nice.to_string());
    }
}

fn main() -> ExitCode {
    // Asked for by a parent that wants us to outlive it. Fails only if we lead a session already, which is as good.
    if std::env::var("NSTANCE_NEW_SESSION").is_ok_and(|value| value == "1") {
        let _ = rustix::process::setsid();
        keep_rank();
    }
    match cli::parse(std::env::args().skip(1)) {
        Err(problem) => {
            eprint!("{problem}\n\n{}", cli::USAGE);
            ExitCode::from(BAD_USAGE)
        }
        Ok(Command::Help) => print(cli::USAGE),
        Ok(Command::Version) => {
            let commit = option_env!("NSTANCE_COMMIT").unwrap_or("unknown");
            let date = option_env!("NSTANCE_BUILD_DATE").unwrap_or("unknown");
            print(&format!("nstance-agent {} (commit {commit}, built {date})\n", env!("CARGO_PKG_VERSION")))
        }
        Ok(Command::Unit) => print(&unit(std::env::current_exe().ok().map(PathBuf::into_os_string))),
        Ok(Command::Status { json }) => with_identity(|identity| status(identity, json)),
        Ok(Command::Say(word)) => with_identity(|identity| tell(identity, &word)),
        Ok(Command::Check) => on_runtime(async {
            let lines = check(Settings::from_env()).await;
            for line in &lines {
                print(&format!("{} {}\n", if line.ok { "ok  " } else { "FAIL" }, line.text));
            }
            if lines.iter().all(|line| line.ok) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }),
        Ok(Command::Run { debug }) => match Settings::from_env() {
            Ok(settings) => match prepare(&settings) {
                Ok(()) => on_runtime(run(settings, debug)),
                Err(problems) => refuse(&problems),
            },
            // Whoever mends these is not to find others at the next start.
            Err(problems) => refuse(&[problems, directory_problems()].concat()),
        },
    }
}

/// A reader that went away is no failure of ours.
fn print(text: &str) -> ExitCode {
    let _ = std::io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}

fn refuse(problems: &[Problem]) -> ExitCode {
    for problem in problems {
        eprintln!("{problem}");
    }
    ExitCode::from(BAD_CONFIG)
}

fn fail(error: &(dyn std::error::Error + 'static)) -> ExitCode {
    eprintln!("{}", Chain(error));
    ExitCode::FAILURE
}

/// For commands that need nothing of the settings but where the agent keeps its identity.
fn with_identity(work: impl FnOnce(&Path) -> ExitCode) -> ExitCode {
    match identity_path(|name| std::env::var_os(name)) {
        Ok(identity) => work(&identity),
        Err(problem) => refuse(&[problem]),
    }
}

fn tell(identity: &Path, word: &Word) -> ExitCode {
    match say(identity, &Host::machine(), SystemClock.now(), word) {
        Ok(()) => ExitCode::SUCCESS,
        // Scripts that end at the first failure must not end because they said too much.
        Err(error @ SpoolError::Full { .. }) if !word.is_verdict() => {
            eprintln!("{}", Chain(&error));
            ExitCode::SUCCESS
        }
        Err(error) => fail(&error),
    }
}

fn status(identity: &Path, json: bool) -> ExitCode {
    match Status::read(identity) {
        Ok(status) => {
            print(&if json { format!("{}\n", status.json) } else { status.text(SystemClock.now()) });
            if status.running { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => fail(&error),
    }
}

/// One thread is all the agent needs.
fn on_runtime(work: impl Future<Output = ExitCode>) -> ExitCode {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().thread_name(LOOKUP).max_blocking_threads(MAX_LOOKUPS).thread_keep_alive(LOOKUPS_LAST);
    match builder.build() {
        Ok(runtime) => {
            runtime.spawn_blocking(|| ());
            let code = runtime.block_on(work);
            // A look-up that gets no answer would hold up our end by many seconds, and a stop must take two at most.
            runtime.shutdown_background();
            code
        }
        Err(error) => {
            eprintln!("start runtime: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(settings: Settings, debug: bool) -> ExitCode {
    let had_terminal = io::stdin().is_terminal();
    let host = Host::machine().with_log(telemetry::start_on_stdout(LogForm::Json, debug || settings.debug));
    let (mut stop, mut hangup) = match StopSignals::listen().and_then(|stop| Ok((stop, signal(SignalKind::hangup())?)))
    {
        Ok(signals) => signals,
        Err(error) => {
            eprintln!("listen for signals: {error}");
            return ExitCode::FAILURE;
        }
    };
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        instance = %settings.instance,
        environment = settings.environment,
        "agent starts"
    );
    let parts = Components {
        clock: Arc::new(SystemClock),
        entropy: Arc::new(SystemEntropy::new()),
        net: Arc::new(TcpNet),
        disk: Disk::default(),
        metadata: Endpoints::default(),
        host,
        console: true,
    };
    let mut teller = Teller::new(&settings, parts.clock.clone(), parts.disk.clone(), Manager::from_env());
    let control = Control::new();
    let agent = nstance_agent::run(settings, parts, control.clone());
    let signals = async {
        let mut asked = false;
        loop {
            tokio::select! {
                name = stop.next() => {
                    tracing::info!(signal = name, "stop signal");
                    if asked {
                        return; // whoever asks twice does not want to wait
                    }
                    asked = true;
                    control.stop();
                }
                Some(()) = hangup.recv() => {
                    if had_terminal && !io::stdin().is_terminal() {
                        return; // whoever closed our window wants us gone, and nobody would see us any more
                    }
                    control.reload();
                }
            }
        }
    };
    tokio::select! {
        () = agent => {}
        () = signals => {}
        never = teller.run(&control) => match never {},
    }
    teller.tell(&State::Leaving);
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::mpsc};

    use super::*;

    #[test]
    fn thread_for_names_is_there_before_the_first_one() {
        on_runtime(async {
            let threads = || fs::read_dir("/proc/self/task").unwrap().flatten();
            let named = |name: String| name.trim() == LOOKUP;
            let found = || threads().any(|it| fs::read_to_string(it.path().join("comm")).is_ok_and(named));
            let until_found = async {
                while !found() {
                    tokio::task::yield_now().await;
                }
            };
            tokio::time::timeout(Duration::from_secs(30), until_found).await.expect("a thread");
            ExitCode::SUCCESS
        });
    }

    #[test]
    fn process_ends_while_a_name_is_still_looked_up() {
        let (found, answer) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        on_runtime(async move {
            let (begun, running) = tokio::sync::oneshot::channel();
            tokio::task::spawn_blocking(move || {
                let _ = begun.send(());
                let _ = tell.send(answer.recv_timeout(Duration::from_secs(30)));
            });
            running.await.unwrap();
            ExitCode::SUCCESS
        });
        found.send(()).expect("somebody still waits for the answer");
        assert_eq!(told.recv().unwrap(), Ok(()), "the runtime's end waited until the look-up gave up");
    }
}
