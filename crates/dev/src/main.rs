//! `nstance-dev`: parse, then hand over to the library.

use std::process::ExitCode;

use clap::Parser;
use nstance_dev::cli::{Cli, run};

#[cfg(feature = "fast-alloc")]
#[global_allocator]
static ALLOC: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("nstance-dev: {error:#}");
            ExitCode::FAILURE
        }
    }
}
