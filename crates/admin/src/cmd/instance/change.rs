//! `instance delete`, `replace`, `drain` and `ack`: each on the one shard that has the instance.

use std::time::Duration;

use clap::Args;
use nstance_client::{ShardClient, ShardError, Shards, goal::Goal, wire_duration};
use nstance_proto::v1::{DeleteInstanceRequest, DrainAckRequest, InstanceStatusResponse, ReplaceInstanceRequest};
use serde_json::json;
use tonic::Status;

use super::find;
use crate::{
    args::{Context, ShardArgs, duration, limit_requests},
    exit::Exit,
    failure::Failure,
    output::{Shown, Table},
    report,
    wait::wait,
};

#[derive(Debug, Args)]
pub(super) struct DeleteArgs {
    /// Id of the instance
    id: String,
    /// Take one off the group's size in the same write
    #[arg(long)]
    shrink: bool,
    /// Do not wait for a drain
    #[arg(long)]
    now: bool,
    /// Follow until it is gone
    #[arg(long)]
    wait: bool,
    /// Say what would be done, and do nothing
    #[arg(long, conflicts_with = "wait")]
    dry_run: bool,
    #[command(flatten)]
    shards: ShardArgs,
}

#[derive(Debug, Args)]
pub(super) struct ReplaceArgs {
    /// Id of the instance
    id: String,
    /// Why, for its record and the events
    #[arg(long, default_value = "")]
    reason: String,
    /// Follow until the old one is gone
    #[arg(long)]
    wait: bool,
    /// Say what would be done, and do nothing
    #[arg(long, conflicts_with = "wait")]
    dry_run: bool,
    #[command(flatten)]
    shards: ShardArgs,
}

#[derive(Debug, Args)]
pub(super) struct DrainArgs {
    /// Id of the instance
    id: String,
    /// Give the drain less time than its group does
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    drain_timeout: Option<Duration>,
    /// Say what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    shards: ShardArgs,
}

#[derive(Debug, Args)]
pub(super) struct AckArgs {
    /// Id of the instance
    id: String,
    /// Only this drain, as `drains` shows it
    #[arg(long, default_value = "")]
    drain_id: String,
    /// Only look whether it is draining
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    shards: ShardArgs,
}

/// Asks the one shard.
async fn once<T, F>(there: &Shards, ask: impl Fn(ShardClient) -> F) -> Result<T, Vec<ShardError>>
where
    F: Future<Output = Result<T, Status>>,
{
    let mut answers = there.each(ask).await;
    answers.ok.pop().map(|(_, answer)| answer).ok_or(answers.errors)
}

fn name(it: &InstanceStatusResponse, there: &Shards) -> String {
    let shard = there.names().next().unwrap_or_default();
    format!("instance {} of group {} in {shard}", it.instance_id, it.group)
}

/// What became of it, in one row.
fn show(context: &Context, it: &InstanceStatusResponse, there: &Shards, status: &str, replacement: &str) {
    tell(context, it, there, status, replacement, None);
}

/// What would become of it. Its status stays what it is.
fn rehearse(context: &Context, it: &InstanceStatusResponse, there: &Shards, effect: &str) -> Exit {
    context.output.note(effect);
    tell(context, it, there, &it.status, "", Some(effect));
    Exit::Done
}

fn tell(
    context: &Context,
    it: &InstanceStatusResponse,
    there: &Shards,
    status: &str,
    replacement: &str,
    effect: Option<&str>,
) {
    let shard = there.names().next().unwrap_or_default();
    let mut table = Table::new(&["ID", "GROUP", "SHARD", "RESULT", "REPLACEMENT"]);
    table.row([it.instance_id.as_str(), &it.group, shard, status, replacement]);
    let replaced = (!replacement.is_empty()).then_some(replacement);
    let mut result = json!({
        "instance_id": it.instance_id, "group": it.group, "shard": shard, "status": status, "replacement_id": replaced,
    });
    if let Some(effect) = effect {
        result["effect"] = effect.into();
        result["dry_run"] = true.into();
    }
    context.output.show(&Shown {
        document: json!({"results": [result], "errors": []}),
        table,
        names: vec![it.instance_id.clone()],
    });
}

pub(super) async fn delete(context: &Context, args: DeleteArgs) -> Result<Exit, Failure> {
    let shards = limit_requests(args.shards.shards(context).await?, args.wait);
    let (there, it) = match find(&shards, &args.id).await {
        Ok(found) => found,
        Err(errors) => return Ok(report::all_failed(context, &errors)),
    };
    let how = if args.now { "deleted at once, without a drain" } else { "drained and deleted" };
    let then = match (it.on_demand, args.shrink) {
        (true, _) => "",
        (false, true) => "; its group shrinks by one",
        (false, false) => "; its group makes another one",
    };
    let what = format!("{} will be {how}{then}", name(&it, &there));
    if args.dry_run {
        return Ok(rehearse(context, &it, &there, &what));
    }
    context.confirm(&what)?;
    let request = DeleteInstanceRequest {
        instance_id: args.id.clone(),
        shrink_group: args.shrink,
        drain_timeout: args.now.then(|| wire_duration(Duration::ZERO)),
    };
    remove(context, &there, &it, request, args.wait.then(|| args.shards.patience())).await
}

pub(super) async fn drain(context: &Context, args: DrainArgs) -> Result<Exit, Failure> {
    let shards = limit_requests(args.shards.shards(context).await?, true);
    let (there, it) = match find(&shards, &args.id).await {
        Ok(found) => found,
        Err(errors) => return Ok(report::all_failed(context, &errors)),
    };
    let then = if it.on_demand { "" } else { "; its group makes another one" };
    let what = format!("{} will be drained and then deleted{then}", name(&it, &there));
    if args.dry_run {
        return Ok(rehearse(context, &it, &there, &what));
    }
    context.confirm(&what)?;
    context.output.note(&format!(
        "whoever watches drains acknowledges it; by hand: nstance-admin instance ack {}",
        it.instance_id
    ));
    let request = DeleteInstanceRequest {
        instance_id: args.id.clone(),
        shrink_group: false,
        drain_timeout: args.drain_timeout.map(wire_duration),
    };
    remove(context, &there, &it, request, Some(args.shards.patience())).await
}

async fn remove(
    context: &Context,
    there: &Shards,
    it: &InstanceStatusResponse,
    request: DeleteInstanceRequest,
    patience: Option<Duration>,
) -> Result<Exit, Failure> {
    let request = &request;
    let asked = once(there, |mut client| async move {
        Ok(client.service.delete_instance(request.clone()).await?.into_inner().status)
    });
    let status = match asked.await {
        Ok(status) => status,
        Err(errors) => return Ok(report::all_failed(context, &errors)),
    };
    let Some(patience) = patience else {
        show(context, it, there, &status, "");
        return Ok(Exit::Done);
    };
    let ended = wait(context, there, Goal::InstanceDeleted(it.instance_id.clone()), patience).await?;
    show(context, it, there, if ended == Exit::Done { "deleted" } else { &status }, "");
    Ok(ended)
}

pub(super) async fn replace(context: &Context, args: ReplaceArgs) -> Result<Exit, Failure> {
    let shards = limit_requests(args.shards.shards(context).await?, args.wait);
    let (there, it) = match find(&shards, &args.id).await {
        Ok(found) => found,
        Err(errors) => return Ok(report::all_failed(context, &errors)),
    };
    let what = format!("{} gets a replacement and is then drained and deleted", name(&it, &there));
    if args.dry_run {
        return Ok(rehearse(context, &it, &there, &what));
    }
    context.confirm(&what)?;
    let request = ReplaceInstanceRequest { instance_id: args.id.clone(), reason: args.reason.clone() };
    let request = &request;
    let asked =
        once(
            &there,
            |mut client| async move { Ok(client.service.replace_instance(request.clone()).await?.into_inner()) },
        );
    let answer = match asked.await {
        Ok(answer) => answer,
        Err(errors) => return Ok(report::all_failed(context, &errors)),
    };
    if !args.wait {
        show(context, &it, &there, &answer.status, &answer.replacement_id);
        return Ok(Exit::Done);
    }
    let ended = wait(context, &there, Goal::InstanceDeleted(it.instance_id.clone()), args.shards.patience()).await?;
    let replacement = match find(&shards, &args.id).await {
        Ok((_, now)) if !now.replaced_by.is_empty() => now.replaced_by,
        _ => answer.replacement_id,
    };
    show(context, &it, &there, if ended == Exit::Done { "replaced" } else { &answer.status }, &replacement);
    Ok(ended)
}

pub(super) async fn ack(context: &Context, args: AckArgs) -> Result<Exit, Failure> {
    let shards = args.shards.shards(context).await?;
    let (there, it) = match find(&shards, &args.id).await {
        Ok(found) => found,
        Err(errors) => return Ok(report::all_failed(context, &errors)),
    };
    if args.dry_run {
        return Ok(rehearse(context, &it, &there, &format!("{} is {}", name(&it, &there), it.status)));
    }
    let request = DrainAckRequest { instance_id: args.id.clone(), drain_id: args.drain_id.clone() };
    let request = &request;
    let asked =
        once(&there, |mut client| async move { client.service.acknowledge_drained(request.clone()).await.map(|_| ()) });
    if let Err(errors) = asked.await {
        return Ok(report::all_failed(context, &errors));
    }
    show(context, &it, &there, "acknowledged", "");
    Ok(Exit::Done)
}
