//! `nstance-operator`: parse, then hand over to the library.

use std::process::ExitCode;

use clap::Parser;
use nstance_operator::{args::Args, run};
use nstance_rt::{
    chain::Chain,
    telemetry::{self, LogForm},
};

fn main() -> ExitCode {
    let args = Args::parse();
    let form = if args.is_text() { LogForm::Text } else { LogForm::Json };
    telemetry::start_at(form, args.log_level());
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("nstance-operator: cannot start the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let ended = runtime.block_on(run::run(args, run::start_controllers));
    match &ended {
        // Who does not lead any more must not go on for a moment.
        Ok(run::Ended::NotLeader) => runtime.shutdown_background(),
        _ => runtime.shutdown_timeout(std::time::Duration::from_secs(1)),
    }
    match ended {
        Ok(run::Ended::Asked) => ExitCode::SUCCESS,
        Ok(run::Ended::NotLeader) => ExitCode::from(3),
        Err(error) => {
            eprintln!("nstance-operator: {}", Chain(&error));
            ExitCode::FAILURE
        }
    }
}
