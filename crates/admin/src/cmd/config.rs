//! `config`: what is in force in each shard, and what another one would change.

mod candidate;
pub(crate) mod changed;
mod refresh;
mod status;

use std::{
    io::Read as _,
    path::{Path, PathBuf},
};

use clap::{Args, Subcommand};

use crate::{args::Context, exit::Exit, failure::Failure};

#[derive(Debug, Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Show which config is in force in each shard
    Status(status::StatusArgs),
    /// Have shards read their config again and apply it
    Refresh(refresh::RefreshArgs),
    /// Check a config file, alone or against a shard
    Validate(candidate::ValidateArgs),
    /// Show what a shard would do under another config
    Diff(candidate::DiffArgs),
}

pub async fn run(context: &Context, args: ConfigArgs) -> Result<Exit, Failure> {
    match args.command {
        ConfigCommand::Status(args) => status::run(context, args).await,
        ConfigCommand::Refresh(args) => refresh::run(context, args).await,
        ConfigCommand::Validate(args) => candidate::validate(context, args).await,
        ConfigCommand::Diff(args) => candidate::diff(context, args).await,
    }
}

/// A file, or stdin for `-`.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let read = if path == Path::new("-") {
        let mut bytes = Vec::new();
        std::io::stdin().read_to_end(&mut bytes).map(|_| bytes)
    } else {
        std::fs::read(path)
    };
    read.map_err(|error| Failure::usage(format!("read {}", shown(path))).because(error))
}

fn shown(path: &Path) -> String {
    if path == Path::new("-") { "stdin".to_owned() } else { path.display().to_string() }
}

/// A config file to look at.
#[derive(Debug, Args)]
struct FileArgs {
    /// The config; `-` reads stdin
    file: PathBuf,
}
