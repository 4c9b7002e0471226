//! `instance show`: everything known, each fact with its source and age, and the way it came.

use clap::Args;
use nstance_client::{ShardClient, ShardError, Shards};
use nstance_core::time::Timestamp;
use nstance_proto::v1::{
    ExplainRequest, ExplainResponse, GetInstanceStatusRequest, InstanceStatusResponse, explain_request::Target,
};
use serde_json::{Value, json};

use super::why::timeline;
use crate::{
    args::{Context, ShardArgs},
    cmd::explain,
    exit::Exit,
    failure::Failure,
    output::{Format, Table, print},
    report, view, words,
};

#[derive(Debug, Args)]
pub(super) struct ShowArgs {
    /// Id of the instance
    id: String,
    #[command(flatten)]
    shards: ShardArgs,
}

/// One instance and what its shard says about it.
pub(super) struct Seen {
    pub(super) instance: InstanceStatusResponse,
    pub(super) explained: ExplainResponse,
}

pub(super) async fn look(shards: &Shards, id: &str) -> Result<(String, Seen), Vec<ShardError>> {
    shards.find(&format!("instance {id}"), |client| ask(client, id)).await
}

async fn ask(mut client: ShardClient, id: &str) -> Result<Seen, tonic::Status> {
    let request = GetInstanceStatusRequest { instance_id: id.to_owned(), max_age: None };
    let instance = client.service.get_instance_status(request).await?.into_inner();
    let target = Some(Target::InstanceId(id.to_owned()));
    let explained = client.service.explain(ExplainRequest { target }).await?.into_inner();
    Ok(Seen { instance, explained })
}

pub(super) async fn run(context: &Context, args: ShowArgs) -> Result<Exit, Failure> {
    let shards = args.shards.shards(context).await?;
    let (shard, seen) = match look(&shards, &args.id).await {
        Ok(found) => found,
        Err(errors) => return Ok(report::all_failed(context, &errors)),
    };
    match context.output.format {
        Format::Json | Format::Yaml => context.output.document(&document(&shard, &seen)),
        Format::Name => print(&format!("{}\n", seen.instance.instance_id)),
        Format::Table | Format::Wide => print(&page(&shard, &seen, words::now())),
    }
    Ok(Exit::Done)
}

fn document(shard: &str, seen: &Seen) -> Value {
    let mut value = view::instance(shard, &seen.instance);
    let timeline = timeline(&seen.instance, &seen.explained.history);
    value["facts"] = seen.explained.facts.iter().map(view::fact).collect();
    value["timeline"] = timeline.iter().map(|it| json!({"at": it.at.to_string(), "what": it.what})).collect();
    value
}

fn page(shard: &str, seen: &Seen, now: Timestamp) -> String {
    let it = &seen.instance;
    let mut lines = vec![format!("{} in {shard}: {}, {}", it.instance_id, it.status, it.health)];
    let on_demand = if it.on_demand { "yes" } else { "" };
    let failure = [it.failure_reason.as_str(), &it.failure_message].join(" ");
    let pairs = [
        ("group", it.group.as_str()),
        ("on demand", on_demand),
        ("type", &it.instance_type),
        ("subnet", &it.subnet),
        ("provider id", &it.provider_instance_id),
        ("addresses", &[it.private_ipv4.as_str(), &it.private_ipv6].join(" ")),
        ("hostname", &it.hostname),
        ("replaced by", &it.replaced_by),
        ("failure", failure.trim()),
    ];
    lines.extend(pairs.iter().filter(|(_, value)| !value.trim().is_empty()).map(|(name, value)| {
        let value = value.trim();
        format!("  {name:<12} {value}")
    }));
    lines.push(String::new());
    lines.extend(explain::facts(&seen.explained, now));
    lines.push(String::new());
    lines.extend(timeline_lines(seen));
    lines.join("\n") + "\n"
}

/// Every moment, with the time since the one before.
pub(super) fn timeline_lines(seen: &Seen) -> Vec<String> {
    let mut table = Table::new(&["  TIME", ">AFTER", "WHAT"]);
    let moments = timeline(&seen.instance, &seen.explained.history);
    let mut before: Option<Timestamp> = None;
    for it in &moments {
        let after = before.map(|before| format!("{:.1}s", it.at.since(before).as_secs_f64()));
        table.row([format!("  {}", it.at), after.unwrap_or_default(), it.what.clone()]);
        before = Some(it.at);
    }
    table.lines(false)
}
