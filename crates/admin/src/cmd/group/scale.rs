//! `group scale`: how many instances a group shall have.

use std::{collections::BTreeMap, time::Duration};

use clap::Args;
use nstance_client::{Answers, ShardClient, Shards, goal::Goal};
use nstance_core::distribute::{Part, distribute};
use nstance_proto::v1::{GroupConfig, GroupStatus, InstanceStatusResponse, ListInstancesRequest, UpsertGroupRequest};

use super::list;
use crate::{
    args::{Context, ShardArgs, limit_requests},
    cmd::plan,
    exit::Exit,
    failure::Failure,
    rehearse::check_etag,
    report,
    wait::wait,
    words::count,
};

/// Largest size of a group in one shard, as the server has it.
const MAX_SIZE: i64 = 10_000;

#[derive(Debug, Args)]
pub(super) struct ScaleArgs {
    /// Name of the group
    group: String,
    /// Instances in each chosen shard, or in all of them together with --total
    #[arg(value_parser = clap::value_parser!(u32).range(0..=64 * MAX_SIZE), allow_negative_numbers = true)]
    size: u32,
    /// SIZE is for all chosen shards together: the smallest grow first, the largest shrink first
    #[arg(long)]
    total: bool,
    /// Remove this instance first; repeatable
    #[arg(long, value_name = "INSTANCE")]
    victim: Vec<String>,
    /// Only if the group still has this version
    #[arg(long)]
    etag: Option<String>,
    /// Follow until every instance is ready
    #[arg(long)]
    wait: bool,
    /// Show what would be done, and do nothing
    #[arg(long, conflicts_with = "wait")]
    dry_run: bool,
    #[command(flatten)]
    shards: ShardArgs,
}

pub(super) async fn run(context: &Context, args: ScaleArgs) -> Result<Exit, Failure> {
    let shards = limit_requests(args.shards.chosen(context).await?, args.wait);
    if args.etag.is_some() && 1 < shards.len() {
        return Err(Failure::usage("--etag is of one shard's group").next("name the shard with --shard"));
    }
    let found = look(&shards, &args).await;
    if found.ok.is_empty() || (args.total && !found.errors.is_empty()) {
        if args.total && !found.ok.is_empty() {
            context.output.note("nothing was changed: a total can be parted only if every shard says what it has");
        }
        return Ok(match report::all_failed(context, &found.errors) {
            Exit::Done => Exit::NotFound,
            exit => exit,
        });
    }
    let sizes = parted(&args, &found)?;
    if args.dry_run {
        let of = |shard: &str| sizes.get(shard).map(|size| BTreeMap::from([(args.group.clone(), *size)]));
        let exit = plan::show(context, &shards, &args.group, of).await;
        return Ok(if exit == Exit::Changes { Exit::Done } else { exit });
    }
    let n_less: i64 =
        found.ok.iter().map(|(shard, it)| i64::from((it.group.size - sizes[shard.as_str()]).max(0))).sum();
    if 0 < n_less {
        let what = found.ok.iter().map(|(shard, it)| format!("{shard} {} -> {}", it.group.size, sizes[shard.as_str()]));
        let what = what.collect::<Vec<_>>().join(", ");
        context.confirm(&format!(
            "{} of group {} will be drained and deleted: {what}",
            count(n_less, "instance"),
            args.group
        ))?;
    }
    let names: Vec<String> = found.ok.iter().map(|(shard, _)| shard.clone()).collect();
    let there = shards.only(&names)?;
    let (args, sizes) = (&args, &sizes);
    let mut answers = there.each(|client| send(client, args, sizes)).await;
    answers.errors.extend(found.errors);
    finish(context, &shards, answers, args.wait.then(|| (Goal::GroupReady(args.group.clone()), args.shards.patience())))
        .await
}

/// Waits where a change was taken, shows what there is then, and says how it ended.
pub(super) async fn finish(
    context: &Context,
    shards: &Shards,
    mut answers: Answers<GroupStatus>,
    waited: Option<(Goal, Duration)>,
) -> Result<Exit, Failure> {
    let Some((goal, patience)) = waited.filter(|_| !answers.ok.is_empty()) else {
        list::show(context, &answers);
        let exit = report::outcome(context, &answers);
        if let (Exit::Done, [(_, group), ..], true) = (exit, answers.ok.as_slice(), context.output.is_for_people()) {
            context.output.note(&format!("next: nstance-admin group status {} --watch", group.key));
        }
        return Ok(exit);
    };
    // Told before the waiting, which may be long.
    report::print_errors(context, &answers.errors);
    let names: Vec<String> = answers.ok.iter().map(|(shard, _)| shard.clone()).collect();
    let there = shards.only(&names)?;
    let ended = wait(context, &there, goal, patience).await;
    let key = answers.ok.first().map(|(_, group)| group.key.clone()).unwrap_or_default();
    let key = key.as_str();
    let now = there.each(|mut client| async move { client.group(key).await }).await;
    if now.errors.is_empty() {
        answers.ok = now.ok;
    }
    list::show(context, &answers);
    Ok(match ended? {
        Exit::Done => Exit::of_shards(answers.ok.len(), &answers.errors),
        exit => exit,
    })
}

/// What a shard has before the change.
struct Found {
    group: GroupStatus,
    instances: Vec<InstanceStatusResponse>,
}

async fn look(shards: &Shards, args: &ScaleArgs) -> Answers<Found> {
    let (key, victims) = (args.group.as_str(), !args.victim.is_empty());
    // Where something is sent, the server looks at it in the same breath.
    let etag = args.etag.as_deref().filter(|_| args.dry_run).unwrap_or_default();
    let look = |mut client: ShardClient| async move {
        let group = client.group(key).await?;
        check_etag(key, Some(&group), etag)?;
        let request = ListInstancesRequest { group: key.to_owned(), ..ListInstancesRequest::default() };
        let instances = if victims { client.instances(request).await? } else { Vec::new() };
        Ok(Found { group, instances })
    };
    shards.each(look).await
}

/// The new size of each shard. Every victim must be there, or a slip of the pen would choose another one.
fn parted(args: &ScaleArgs, found: &Answers<Found>) -> Result<BTreeMap<String, i32>, Failure> {
    for victim in &args.victim {
        let there = found.ok.iter().any(|(_, it)| it.instances.iter().any(|it| it.instance_id == *victim));
        if !there {
            let what = format!("--victim {victim}: group {} has no such instance in the chosen shards", args.group);
            return Err(
                Failure::new(Exit::NotFound, what).next(format!("nstance-admin instance list --group {}", args.group))
            );
        }
    }
    let parts: Vec<Part> = found
        .ok
        .iter()
        .map(|(_, it)| Part {
            size: u32::try_from(it.group.size).unwrap_or(0),
            n_hints: u32::try_from(it.instances.iter().filter(|it| args.victim.contains(&it.instance_id)).count())
                .unwrap_or(u32::MAX),
        })
        .collect();
    let sizes = if args.total { distribute(args.size, &parts) } else { vec![args.size; parts.len()] };
    let mut by_shard = BTreeMap::new();
    for ((shard, _), size) in found.ok.iter().zip(sizes) {
        let size = i32::try_from(size).ok().filter(|it| i64::from(*it) <= MAX_SIZE).ok_or_else(|| {
            Failure::usage(format!("{size} instances in {shard} are more than {MAX_SIZE}, the most of a group"))
        })?;
        by_shard.insert(shard.clone(), size);
    }
    Ok(by_shard)
}

async fn send(
    mut client: ShardClient,
    args: &ScaleArgs,
    sizes: &BTreeMap<String, i32>,
) -> Result<GroupStatus, tonic::Status> {
    let request = UpsertGroupRequest {
        key: args.group.clone(),
        config: Some(GroupConfig { size: sizes.get(&client.shard).copied(), ..GroupConfig::default() }),
        expected_etag: args.etag.clone().unwrap_or_default(),
        update_mask: Some(prost_types::FieldMask { paths: vec!["size".to_owned()] }),
        // Ids of other shards are no concern of this one, which leaves them out.
        preferred_victims: args.victim.clone(),
    };
    Ok(client.service.upsert_group(request).await?.into_inner())
}
