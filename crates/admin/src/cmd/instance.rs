//! `instance`: machines one by one.

mod change;
mod create;
mod list;
mod show;
mod why;

use clap::{Args, Subcommand};
use nstance_client::{ShardError, Shards};
use nstance_proto::v1::{GetInstanceStatusRequest, InstanceStatusResponse};

use crate::{args::Context, exit::Exit, failure::Failure};

#[derive(Debug, Args)]
pub struct InstanceArgs {
    #[command(subcommand)]
    command: InstanceCommand,
}

#[derive(Debug, Subcommand)]
enum InstanceCommand {
    /// Show instances of all shards
    List(list::ListArgs),
    /// Show everything that is known of an instance, and from whom
    Show(show::ShowArgs),
    /// Make an instance that belongs to nobody but you: its group neither counts nor replaces it
    Create(create::CreateArgs),
    /// Drain an instance and delete it; its group makes another one unless told to shrink
    Delete(change::DeleteArgs),
    /// Make a replacement for an instance, then drain the old one
    Replace(change::ReplaceArgs),
    /// Drain an instance and delete it, and follow how that goes
    Drain(change::DrainArgs),
    /// Say by hand that an instance is drained
    Ack(change::AckArgs),
    /// Say in plain words why an instance is as it is
    Why(why::WhyArgs),
}

pub async fn run(context: &Context, args: InstanceArgs) -> Result<Exit, Failure> {
    match args.command {
        InstanceCommand::List(args) => list::run(context, args).await,
        InstanceCommand::Show(args) => show::run(context, args).await,
        InstanceCommand::Create(args) => create::run(context, args).await,
        InstanceCommand::Delete(args) => change::delete(context, args).await,
        InstanceCommand::Replace(args) => change::replace(context, args).await,
        InstanceCommand::Drain(args) => change::drain(context, args).await,
        InstanceCommand::Ack(args) => change::ack(context, args).await,
        InstanceCommand::Why(args) => why::run(context, args).await,
    }
}

/// The shard that has an instance, and only it; an id is never in two.
async fn find(shards: &Shards, id: &str) -> Result<(Shards, InstanceStatusResponse), Vec<ShardError>> {
    let request = GetInstanceStatusRequest { instance_id: id.to_owned(), max_age: None };
    let request = &request;
    let what = format!("instance {id}");
    let found = shards.find(&what, |mut client| async move {
        Ok(client.service.get_instance_status(request.clone()).await?.into_inner())
    });
    let (shard, instance) = found.await?;
    let there = shards.only(&[shard]).map_err(|error| {
        // It answered a moment ago, so it is configured.
        vec![ShardError::new("", tonic::Code::Internal, error.to_string())]
    })?;
    Ok((there, instance))
}
