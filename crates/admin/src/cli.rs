//! From the command line to an exit code.

use std::{ffi::OsString, process::ExitCode};

use clap::{CommandFactory as _, FromArgMatches as _, Parser, error::ErrorKind};

use crate::{
    args::{self, Context, Root},
    cmd::{Command, with_candidates},
    defaults,
    exit::Exit,
    failure::Failure,
};

/// Look at and steer a cluster of Nstance: groups, instances, certificates, and why things are as they are.
///
/// Every flag may also be given as NSTANCE_<FLAG> in the environment or in admin.yaml below --temp-dir.
#[derive(Debug, Parser)]
#[command(name = "nstance-admin", version, subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    #[command(flatten)]
    pub root: Root,
    #[command(subcommand)]
    pub command: Command,
}

pub fn main() -> ExitCode {
    nstance_rt::pipe::end_quietly_when_closed();
    // Whoever links another provider beside ours must not decide by accident.
    let _ = rustls::crypto::ring::default_provider().install_default();
    // A shell that asks what may come next is answered here, and nothing else happens.
    clap_complete::CompleteEnv::with_factory(|| with_candidates(command())).complete();
    run(std::env::args_os().collect()).into()
}

/// The whole tree of commands, as the program and its documents know it.
pub fn command() -> clap::Command {
    // As a plugin of kubectl it has that name, and the same commands.
    Cli::command().disable_help_subcommand(true)
}

fn run(words: Vec<OsString>) -> Exit {
    // Until all is read, only the command line says it.
    let mut debug = words.iter().any(|word| word == "--debug");
    match parse_and_run(words, &mut debug) {
        Ok(exit) => exit,
        Err(failure) => {
            for line in failure.lines(debug) {
                eprintln!("{line}");
            }
            failure.exit
        }
    }
}

fn parse_and_run(words: Vec<OsString>, debug: &mut bool) -> Result<Exit, Failure> {
    let file = defaults::read(&temp_dir_of(&words))?;
    let command = defaults::apply(command(), &defaults::Sources::new(&words, &file));
    let matches = match command.try_get_matches_from(words) {
        Ok(matches) => matches,
        Err(error) => {
            let _ = error.print();
            let fine = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            return Ok(if fine { Exit::Done } else { Exit::Usage });
        }
    };
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return Ok(Exit::Usage);
        }
    };
    let context = Context::new(&cli.root);
    *debug = context.debug;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(|error| Failure::failed("start the runtime").because(error))?;
    let ended = runtime.block_on(cli.command.run(&context, &matches));
    // Nobody waits for a read that hangs.
    runtime.shutdown_timeout(std::time::Duration::from_millis(100));
    ended
}

/// The file of defaults is found before the flags are read, and by one of them.
fn temp_dir_of(words: &[OsString]) -> std::path::PathBuf {
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        let text = word.to_string_lossy();
        if text == "--temp-dir" {
            return rest.next().map(Into::into).unwrap_or_default();
        }
        if let Some(value) = text.strip_prefix("--temp-dir=") {
            return value.into();
        }
    }
    let variable = std::env::var_os(defaults::variable("temp-dir")).filter(|it| !it.is_empty());
    variable.map_or_else(args::default_temp_dir, Into::into)
}
