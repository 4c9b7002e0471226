//! `group create` and `group set`.

use std::time::Duration;

use clap::{Args, ValueEnum};
use nstance_client::{ShardClient, goal::Goal, wire_duration};
use nstance_proto::v1::{GroupConfig, GroupStatus, UpsertGroupRequest};
use tonic::{Code, Status};

use super::{list, scale::finish};
use crate::{
    args::{Context, ShardArgs, duration, limit_requests, pair},
    exit::Exit,
    failure::Failure,
    rehearse::{Names, check_etag, is_in_use},
    report,
};

#[derive(Debug, Args)]
pub(super) struct CreateArgs {
    /// Name of the group
    group: String,
    /// Template of the config that its instances are made from
    #[arg(long)]
    template: String,
    /// Instances in each chosen shard [default: what the template says]
    #[arg(long, value_parser = clap::value_parser!(i32).range(0..=10_000))]
    size: Option<i32>,
    #[command(flatten)]
    settings: Settings,
    /// Where its instances are placed
    #[arg(long, value_name = "POOL")]
    subnet_pool: Option<String>,
    /// Register its instances there; repeatable
    #[arg(long, value_name = "KEY", value_delimiter = ',')]
    load_balancer: Vec<String>,
    /// Follow until every instance is ready
    #[arg(long)]
    wait: bool,
    /// Only look whether it could be done, as far as others than the server know, and show what it would be
    #[arg(long, conflicts_with = "wait")]
    dry_run: bool,
    #[command(flatten)]
    shards: ShardArgs,
}

/// What may be changed of a group later, too.
#[derive(Debug, Args)]
struct Settings {
    /// Instance type of the provider
    #[arg(long, value_name = "TYPE")]
    instance_type: Option<String>,
    /// Variable for templates and files; repeatable. Takes the place of all that were given in this way before
    #[arg(long = "var", value_name = "KEY=VALUE", value_parser = pair)]
    vars: Vec<(String, String)>,
    /// How long an instance may take to drain
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    drain_timeout: Option<Duration>,
}

pub(super) async fn create(context: &Context, args: CreateArgs) -> Result<Exit, Failure> {
    let shards = limit_requests(args.shards.chosen(context).await?, args.wait);
    let config = GroupConfig {
        template: args.template.clone(),
        size: args.size,
        instance_type: args.settings.instance_type.clone().unwrap_or_default(),
        subnet_pool: args.subnet_pool.clone().unwrap_or_default(),
        vars: args.settings.vars.iter().cloned().collect(),
        drain_timeout: args.settings.drain_timeout.map(wire_duration),
        load_balancers: args.load_balancer.clone(),
        ..GroupConfig::default()
    };
    let request = UpsertGroupRequest { key: args.group.clone(), config: Some(config), ..UpsertGroupRequest::default() };
    let (request, dry_run) = (&request, args.dry_run);
    let answers = shards.each(|client| make(context, client, request, dry_run)).await;
    if dry_run {
        list::show(context, &answers);
        return Ok(report::outcome(context, &answers));
    }
    let waited = args.wait.then(|| (Goal::GroupReady(args.group.clone()), args.shards.patience()));
    finish(context, &shards, answers, waited).await
}

async fn make(
    context: &Context,
    mut client: ShardClient,
    request: &UpsertGroupRequest,
    dry_run: bool,
) -> Result<GroupStatus, Status> {
    let key = &request.key;
    let groups = client.groups().await?;
    if let Some(there) = groups.iter().find(|it| it.key == *key && !it.deleting).cloned() {
        let etag = if there.etag.is_empty() { "none".to_owned() } else { there.etag };
        let message =
            format!("group {key} exists already, version {etag}; change it with `group scale` or `group set`");
        return Err(Status::new(Code::AlreadyExists, message));
    }
    if dry_run {
        let config = request.config.clone().unwrap_or_default();
        Names { group: key, template: &config.template, subnet_pool: &config.subnet_pool }.check()?;
        if !is_in_use(&config.template, &groups) {
            let (template, shard) = (&config.template, &client.shard);
            context.output.note(&format!(
                "note: {shard}: no group has template {template}; whether the config has it, only the server knows"
            ));
        }
        return Ok(GroupStatus {
            key: key.clone(),
            template: config.template,
            size: config.size.unwrap_or(0),
            instance_type: config.instance_type,
            subnet_pool: config.subnet_pool,
            vars: config.vars,
            load_balancers: config.load_balancers,
            drain_timeout: config.drain_timeout,
            ..GroupStatus::default()
        });
    }
    Ok(client.service.upsert_group(request.clone()).await?.into_inner())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Field {
    Size,
    InstanceType,
    SubnetPool,
    Vars,
    DrainTimeout,
    LoadBalancers,
    RolloutPaused,
}

impl Field {
    fn path(self) -> &'static str {
        match self {
            Self::Size => "size",
            Self::InstanceType => "instance_type",
            Self::SubnetPool => "subnet_pool",
            Self::Vars => "vars",
            Self::DrainTimeout => "drain_timeout",
            Self::LoadBalancers => "load_balancers",
            Self::RolloutPaused => "rollout_paused",
        }
    }
}

#[derive(Debug, Args)]
pub(super) struct SetArgs {
    /// Name of the group
    group: String,
    #[command(flatten)]
    settings: Settings,
    /// Take back what was changed of a field, so that the config decides again; repeatable
    #[arg(long, value_enum, value_name = "FIELD", value_delimiter = ',')]
    unset: Vec<Field>,
    /// Replace no instance because of a changed config
    #[arg(long, conflicts_with = "resume_rollout")]
    pause_rollout: bool,
    /// Go on with a paused rollout
    #[arg(long)]
    resume_rollout: bool,
    /// Only if the group still has this version
    #[arg(long)]
    etag: Option<String>,
    /// Only look whether the group is there and has this version, and show what it would be
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    shards: ShardArgs,
}

pub(super) async fn set(context: &Context, args: SetArgs) -> Result<Exit, Failure> {
    let Settings { instance_type, vars, drain_timeout } = &args.settings;
    let rollout = args.pause_rollout || args.resume_rollout;
    let given = [
        (instance_type.is_some(), Field::InstanceType),
        (!vars.is_empty(), Field::Vars),
        (drain_timeout.is_some(), Field::DrainTimeout),
        (rollout, Field::RolloutPaused),
    ];
    let given: Vec<Field> = given.into_iter().filter_map(|(is, field)| is.then_some(field)).collect();
    if given.is_empty() && args.unset.is_empty() {
        return Err(Failure::usage(format!("nothing to change of group {}", args.group))
            .next("--instance-type, --var, --drain-timeout, --unset, --pause-rollout or --resume-rollout"));
    }
    if let Some(both) = given.iter().find(|it| args.unset.contains(it)) {
        return Err(Failure::usage(format!("{} is both set and unset", both.path())));
    }
    let shards = args.shards.chosen(context).await?;
    if args.etag.is_some() && 1 < shards.len() {
        return Err(Failure::usage("--etag is of one shard's group").next("name the shard with --shard"));
    }
    let config = GroupConfig {
        instance_type: instance_type.clone().unwrap_or_default(),
        vars: vars.iter().cloned().collect(),
        drain_timeout: drain_timeout.map(wire_duration),
        rollout_paused: rollout.then_some(args.pause_rollout),
        ..GroupConfig::default()
    };
    let paths = given.iter().chain(&args.unset).map(|it| it.path().to_owned()).collect();
    let request = UpsertGroupRequest {
        key: args.group.clone(),
        config: Some(config),
        expected_etag: args.etag.clone().unwrap_or_default(),
        update_mask: Some(prost_types::FieldMask { paths }),
        preferred_victims: Vec::new(),
    };
    let (request, dry_run) = (&request, args.dry_run);
    let answers = shards.each(|client| change(client, request, dry_run)).await;
    if dry_run {
        list::show(context, &answers);
        return Ok(report::outcome(context, &answers));
    }
    finish(context, &shards, answers, None).await
}

async fn change(mut client: ShardClient, request: &UpsertGroupRequest, dry_run: bool) -> Result<GroupStatus, Status> {
    // A slip of the pen must not make a group.
    let there = client.group(&request.key).await?;
    if dry_run {
        check_etag(&request.key, Some(&there), &request.expected_etag)?;
        return Ok(changed(there, request));
    }
    Ok(client.service.upsert_group(request.clone()).await?.into_inner())
}

/// The group as it would be. What the config says where something is unset, only the server knows.
fn changed(mut it: GroupStatus, request: &UpsertGroupRequest) -> GroupStatus {
    let config = request.config.clone().unwrap_or_default();
    if !config.instance_type.is_empty() {
        it.instance_type = config.instance_type;
    }
    it.vars.extend(config.vars);
    it.drain_timeout = config.drain_timeout.or(it.drain_timeout);
    if let (Some(rollout), Some(paused)) = (&mut it.rollout, config.rollout_paused) {
        rollout.paused = paused;
    }
    it
}
