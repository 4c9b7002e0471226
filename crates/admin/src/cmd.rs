//! The commands.

pub mod shards;

use clap::{ArgMatches, Subcommand};

use crate::{args::Context, exit::Exit, failure::Failure};

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show every shard: whether it answers, who leads it, since which epoch, and what it has
    Shards(shards::ShardsArgs),
}

impl Command {
    pub(crate) async fn run(self, context: &Context, _matches: &ArgMatches) -> Result<Exit, Failure> {
        match self {
            Self::Shards(args) => shards::run(context, args).await,
        }
    }
}
