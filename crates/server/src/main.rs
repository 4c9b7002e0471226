//! `nstance-server`: parse, then hand over to the library.

use std::process::ExitCode;

use clap::Parser;
use nstance_rt::telemetry::{self, LogForm};
use nstance_server::{args::Args, boot, validate};

/// Of many small pieces, on several threads, it is by a third faster than the system's.
#[cfg(feature = "fast-alloc")]
#[global_allocator]
static ALLOC: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let args = Args::parse();
    let form = if args.log_json { LogForm::Json } else { LogForm::Text };
    telemetry::start(form, args.debug);
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("nstance-server: cannot start the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let ended = runtime.block_on(async {
        match args.validate {
            Some(_) => validate::run(&args).await,
            None => boot::run(args).await,
        }
    });
    // Blocking store calls that nobody waits for any more must not hold the process.
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    match ended {
        Ok(code) => code,
        Err(error) => {
            eprintln!("nstance-server: {error:#}");
            ExitCode::FAILURE
        }
    }
}
