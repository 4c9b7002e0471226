//! `group`: what is asked for, and how much of it there is.

mod change;
mod delete;
mod list;
mod scale;
mod status;

use clap::{Args, Subcommand};

use crate::{args::Context, exit::Exit, failure::Failure};

#[derive(Debug, Args)]
pub struct GroupArgs {
    #[command(subcommand)]
    command: GroupCommand,
}

#[derive(Debug, Subcommand)]
enum GroupCommand {
    /// Show all groups of all shards
    List(list::ListArgs),
    /// Make a group from a template of the config
    Create(change::CreateArgs),
    /// Set how many instances a group shall have in each chosen shard
    Scale(scale::ScaleArgs),
    /// Change a group's instance type, vars, drain timeout, or pause its rollout
    Set(change::SetArgs),
    /// Show one group: sizes, rollout, what holds it back, its instances
    Status(status::StatusArgs),
    /// Delete a group, or what was changed of one that the config holds
    Delete(delete::DeleteArgs),
}

pub async fn run(context: &Context, args: GroupArgs) -> Result<Exit, Failure> {
    match args.command {
        GroupCommand::List(args) => list::run(context, args).await,
        GroupCommand::Create(args) => change::create(context, args).await,
        GroupCommand::Scale(args) => scale::run(context, args).await,
        GroupCommand::Set(args) => change::set(context, args).await,
        GroupCommand::Status(args) => status::run(context, args).await,
        GroupCommand::Delete(args) => delete::run(context, args).await,
    }
}
