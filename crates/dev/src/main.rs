//! `nstance-dev`: parse, then hand over to the library.

use std::process::ExitCode;

use clap::Parser;
use nstance_dev::cli::{Cli, run};

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
