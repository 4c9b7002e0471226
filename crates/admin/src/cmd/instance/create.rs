//! `instance create`.

use clap::Args;
use nstance_core::{
    ids::{uuid_text, uuid_v7},
    ports::clock::random,
};
use nstance_proto::v1::{CreateInstanceRequest, GetInstanceStatusRequest, InstanceConfig};
use nstance_rt::entropy::SystemEntropy;

use super::list;
use crate::{
    args::{Context, ShardArgs, pair},
    exit::Exit,
    failure::Failure,
    told,
    wait::{Goal, wait},
    words,
};

#[derive(Debug, Args)]
pub(super) struct CreateArgs {
    /// Group whose template and settings it is made with
    #[arg(long)]
    group: String,
    /// Another template
    #[arg(long)]
    template: Option<String>,
    /// Another instance type
    #[arg(long, value_name = "TYPE")]
    instance_type: Option<String>,
    /// Another place
    #[arg(long, value_name = "POOL")]
    subnet_pool: Option<String>,
    /// Variable for templates and files; repeatable
    #[arg(long = "var", value_name = "KEY=VALUE", value_parser = pair)]
    vars: Vec<(String, String)>,
    /// The same id again makes no second instance [default: a new one, printed]
    #[arg(long, value_name = "ID")]
    request_id: Option<String>,
    /// Follow until its agent has come
    #[arg(long)]
    wait: bool,
    /// Only look whether the group is there
    #[arg(long, conflicts_with = "wait")]
    dry_run: bool,
    #[command(flatten)]
    shards: ShardArgs,
}

pub(super) async fn run(context: &Context, args: CreateArgs) -> Result<Exit, Failure> {
    let shards = args.shards.chosen(context).await?.waiting(args.wait);
    if 1 < shards.targets().len() {
        return Err(Failure::usage("an instance is made in one shard").next("name it with --shard"));
    }
    let group = args.group.as_str();
    if args.dry_run {
        let answers = shards.each(|mut client| async move { client.group(group).await }).await;
        let exit = told::ended(context, &answers);
        if exit == Exit::Done {
            context.output.note(&format!("an instance of group {group} would be made"));
        }
        return Ok(exit);
    }
    let request_id = args.request_id.clone().unwrap_or_else(|| {
        let made = uuid_text(&uuid_v7(words::now(), random(&SystemEntropy::new())));
        context.output.note(&format!("request id {made}; with --request-id {made} this makes no second instance"));
        made
    });
    let request = CreateInstanceRequest {
        instance_id: String::new(),
        config: Some(InstanceConfig {
            group: args.group.clone(),
            template: args.template.clone().unwrap_or_default(),
            instance_type: args.instance_type.clone().unwrap_or_default(),
            subnet_pool: args.subnet_pool.clone().unwrap_or_default(),
            vars: args.vars.iter().cloned().collect(),
        }),
        request_id,
    };
    let request = &request;
    let created = shards.each(|mut client| async move {
        Ok(client.service.create_instance(request.clone()).await?.into_inner().instance_id)
    });
    let created = created.await;
    let Some((_, id)) = created.ok.first() else { return Ok(told::ended(context, &created)) };
    let waited = if args.wait {
        wait(context, &shards, Goal::Running(id.clone()), args.shards.patience()).await
    } else {
        Ok(Exit::Done)
    };
    let status = GetInstanceStatusRequest { instance_id: id.clone(), max_age: None };
    let status = &status;
    let now = shards
        .each(|mut client| async move { Ok(client.service.get_instance_status(status.clone()).await?.into_inner()) });
    let now = now.await;
    let rows: Vec<_> = now.ok.iter().map(|(shard, it)| (shard.as_str(), it)).collect();
    context.output.show(&list::shown(&rows, &now.errors));
    waited
}
