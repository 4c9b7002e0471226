//! `instance create`.

use std::collections::BTreeMap;

use clap::Args;
use nstance_client::{Answers, goal::Goal};
use nstance_core::{
    ids::{uuid_text, uuid_v7},
    ports::clock::random,
};
use nstance_proto::v1::{CreateInstanceRequest, GetInstanceStatusRequest, GroupStatus, InstanceConfig};
use nstance_rt::entropy::SystemEntropy;
use serde_json::json;
use tonic::Status;

use super::list;
use crate::{
    args::{Context, ShardArgs, limit_requests, pair},
    exit::Exit,
    failure::Failure,
    output::{Shown, Table},
    rehearse::{Names, is_in_use},
    report,
    wait::wait,
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
    /// Only look whether it could be done, as far as others than the server know, and show what it would be
    #[arg(long, conflicts_with = "wait")]
    dry_run: bool,
    #[command(flatten)]
    shards: ShardArgs,
}

pub(super) async fn run(context: &Context, args: CreateArgs) -> Result<Exit, Failure> {
    let shards = limit_requests(args.shards.chosen(context).await?, args.wait);
    if 1 < shards.len() {
        return Err(Failure::usage("an instance is made in one shard").next("name it with --shard"));
    }
    let group = args.group.as_str();
    if args.dry_run {
        let template = args.template.as_deref().unwrap_or_default();
        let subnet_pool = args.subnet_pool.as_deref().unwrap_or_default();
        let answers = shards.each(|mut client| async move {
            Names { group, template, subnet_pool }.check()?;
            let groups = client.groups().await?;
            if !template.is_empty() && !is_in_use(template, &groups) {
                let shard = &client.shard;
                context.output.note(&format!(
                    "note: {shard}: no group has template {template}; whether the config has it, only the server knows"
                ));
            }
            let found = groups.into_iter().find(|it| it.key == group);
            found.ok_or_else(|| Status::not_found(format!("there is no group {group} in {}", client.shard)))
        });
        let answers = answers.await;
        context.output.show(&rehearsed(&args, &answers));
        let exit = report::outcome(context, &answers);
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
    let Some((_, id)) = created.ok.first() else { return Ok(report::outcome(context, &created)) };
    let waited = if args.wait {
        wait(context, &shards, Goal::InstanceRunning(id.clone()), args.shards.patience()).await
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

/// The instance as it would be asked for.
fn rehearsed(args: &CreateArgs, answers: &Answers<GroupStatus>) -> Shown {
    let mut table = Table::default();
    if !answers.ok.is_empty() {
        table = Table::new(&["GROUP", "SHARD", "TEMPLATE", "TYPE", "SUBNET POOL"]);
    }
    let mut instances = Vec::new();
    for (shard, group) in &answers.ok {
        let or = |own: &Option<String>, groups: &str| own.clone().unwrap_or_else(|| groups.to_owned());
        let template = or(&args.template, &group.template);
        let instance_type = or(&args.instance_type, &group.instance_type);
        let subnet_pool = or(&args.subnet_pool, &group.subnet_pool);
        table.row([&group.key, shard, &template, &instance_type, &subnet_pool].map(ToOwned::to_owned));
        let mut vars: BTreeMap<String, String> = group.vars.clone().into_iter().collect();
        vars.extend(args.vars.iter().cloned());
        instances.push(json!({
            "group": group.key,
            "shard": shard,
            "template": template,
            "instance_type": Some(instance_type).filter(|it| !it.is_empty()),
            "subnet_pool": subnet_pool,
            "vars": vars,
            "dry_run": true,
        }));
    }
    Shown {
        document: json!({"instances": instances, "errors": report::error_documents(&answers.errors)}),
        table,
        names: Vec::new(),
    }
}
