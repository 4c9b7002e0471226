//! The binary: arguments, signals, exit codes. Everything else is in the library.

use std::{process::ExitCode, sync::Arc};

use nstance_agent::{
    Components, Control, Endpoints, TcpNet, check::check, disk::Disk, host::Host, identity_dir::prepare,
    settings::Problem,
    settings::Settings,
};
use nstance_rt::{
    clock::SystemClock,
    entropy::SystemEntropy,
    shutdown::StopSignals,
    telemetry::{self, LogForm},
};
use tokio::signal::unix::{SignalKind, signal};

/// `EX_CONFIG` of sysexits: the service manager shows it, and its backoff keeps the restarts slow.
const BAD_CONFIG: u8 = 78;
const BAD_USAGE: u8 = 64;

const USAGE: &str = "usage: nstance-agent [run|check] [--debug|-v] [--version]";

enum Command {
    Run,
    Check,
    Version,
}

fn main() -> ExitCode {
    // Asked for by a parent that wants us to outlive it. Fails only if we lead a session already, which is as good.
    if std::env::var("NSTANCE_NEW_SESSION").is_ok_and(|value| value == "1") {
        let _ = rustix::process::setsid();
    }
    let Some((command, debug)) = arguments(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(BAD_USAGE);
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("start runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    match command {
        Command::Version => {
            let commit = option_env!("NSTANCE_COMMIT").unwrap_or("unknown");
            let date = option_env!("NSTANCE_BUILD_DATE").unwrap_or("unknown");
            println!("nstance-agent {} (commit {commit}, built {date})", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        Command::Check => {
            let lines = runtime.block_on(check(Settings::from_env()));
            for line in &lines {
                println!("{} {}", if line.ok { "ok  " } else { "FAIL" }, line.text);
            }
            if lines.iter().all(|line| line.ok) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Command::Run => match Settings::from_env().and_then(|it| prepare(&it).map(|()| it)) {
            Ok(settings) => runtime.block_on(run(settings, debug)),
            Err(problems) => refuse(&problems),
        },
    }
}

fn arguments(arguments: impl Iterator<Item = String>) -> Option<(Command, bool)> {
    let (mut command, mut debug) = (None, false);
    for argument in arguments {
        let given = match argument.as_str() {
            "--debug" | "-v" => {
                debug = true;
                continue;
            }
            "--version" => Command::Version,
            "run" => Command::Run,
            "check" => Command::Check,
            _ => return None,
        };
        if command.replace(given).is_some() {
            return None;
        }
    }
    Some((command.unwrap_or(Command::Run), debug))
}

fn refuse(problems: &[Problem]) -> ExitCode {
    for problem in problems {
        eprintln!("{problem}");
    }
    ExitCode::from(BAD_CONFIG)
}

async fn run(settings: Settings, debug: bool) -> ExitCode {
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
                Some(()) = hangup.recv() => control.reload(),
            }
        }
    };
    tokio::select! {
        () = agent => {}
        () = signals => {}
    }
    ExitCode::SUCCESS
}
