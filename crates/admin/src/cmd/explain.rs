//! `explain`: what a shard knows of a group or an instance, what it decides, and what it waits for.

use clap::{Args, Subcommand};
use nstance_client::ShardError;
use nstance_core::time::Timestamp;
use nstance_proto::v1::{ExplainRequest, ExplainResponse, explain_request::Target};
use serde_json::json;
use tonic::Code;

use crate::{
    args::{Context, ShardArgs},
    exit::Exit,
    failure::Failure,
    output::{Format, Table, print},
    report, view, words,
};

#[derive(Debug, Args)]
pub struct ExplainArgs {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(Debug, Subcommand)]
enum Subject {
    /// A group, in every shard that has it
    Group(GroupArgs),
    /// An instance
    Instance(InstanceArgs),
}

#[derive(Debug, Args)]
struct GroupArgs {
    /// Name of the group
    group: String,
    #[command(flatten)]
    shards: ShardArgs,
}

#[derive(Debug, Args)]
struct InstanceArgs {
    /// Id of the instance
    id: String,
    #[command(flatten)]
    shards: ShardArgs,
}

pub async fn run(context: &Context, args: ExplainArgs) -> Result<Exit, Failure> {
    let (shards, target, what) = match args.subject {
        Subject::Group(args) => {
            let what = format!("group {}", args.group);
            (args.shards, Target::Group(args.group), what)
        }
        Subject::Instance(args) => {
            let what = format!("instance {}", args.id);
            (args.shards, Target::InstanceId(args.id), what)
        }
    };
    let shards = shards.shards(context).await?;
    let request = ExplainRequest { target: Some(target) };
    let request = &request;
    let answers =
        shards.each(|mut client| async move { Ok(client.service.explain(request.clone()).await?.into_inner()) });
    let mut answers = answers.await;
    // It need not be in every shard. If it is nowhere, that is said once.
    if !answers.ok.is_empty() {
        answers.errors.retain(|it| it.code != Code::NotFound);
    } else if answers.errors.iter().all(|it| it.code == Code::NotFound) {
        let asked = answers.errors.iter().map(|it| it.shard.as_str()).collect::<Vec<_>>().join(", ");
        return Ok(report::all_failed(
            context,
            &[ShardError::new(&asked, Code::NotFound, format!("there is no {what}"))],
        ));
    }
    match context.output.format {
        Format::Json | Format::Yaml => context.output.document(&json!({
            "explanations": answers.ok.iter().map(|(shard, it)| view::explained(shard, it)).collect::<Vec<_>>(),
            "errors": report::error_documents(&answers.errors),
        })),
        Format::Name => print(&answers.ok.iter().map(|(shard, _)| format!("{shard}\n")).collect::<String>()),
        Format::Table | Format::Wide => {
            let pages: Vec<String> = answers.ok.iter().map(|(shard, it)| page(shard, it, words::now())).collect();
            print(&pages.join("\n"));
        }
    }
    Ok(report::outcome(context, &answers))
}

fn page(shard: &str, it: &ExplainResponse, now: Timestamp) -> String {
    let mut lines = vec![format!("{shard}: {}", it.summary)];
    lines.extend(facts(it, now));
    lines.push(String::new());
    if it.actions.is_empty() {
        lines.push("  nothing is due".to_owned());
    }
    for action in &it.actions {
        let reason = if action.reason.is_empty() { String::new() } else { format!(", because of {}", action.reason) };
        lines.push(format!("  due: {} {}{reason}", action.kind, action.instance_id).trim_end().to_owned());
    }
    for hold in &it.holds {
        let since = words::age(hold.since.as_ref(), now);
        let since = if since.is_empty() { String::new() } else { format!(", for {since}") };
        lines.push(format!("  held back by {}: {}{since}", hold.kind, hold.message));
    }
    if !it.history.is_empty() {
        lines.push(String::new());
        lines.extend(events(it, now));
    }
    lines.join("\n") + "\n"
}

/// Each fact with who says so and how old it is.
pub(super) fn facts(it: &ExplainResponse, now: Timestamp) -> Vec<String> {
    let mut table = Table::new(&["  FACT", "VALUE", "SOURCE", ">AGE"]);
    for fact in &it.facts {
        let age = words::age(fact.at.as_ref(), now);
        table.row([format!("  {}", fact.name), fact.value.clone(), fact.source.clone(), age]);
    }
    table.lines(false)
}

pub(super) fn events(it: &ExplainResponse, now: Timestamp) -> Vec<String> {
    let mut table = Table::new(&["  AGO", "EVENT", "INSTANCE", "MESSAGE"]);
    for event in &it.history {
        let ago = format!("  {}", words::age(event.at.as_ref(), now));
        table.row([ago, event.reason.clone(), event.instance_id.clone(), event.message.clone()]);
    }
    table.lines(false)
}
