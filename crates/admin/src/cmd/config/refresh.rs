//! `config refresh`.

use clap::Args;
use nstance_client::{Answers, ShardError};
use nstance_proto::v1::{RefreshConfigRequest, RefreshConfigResponse};
use serde_json::json;

use crate::{
    args::{Context, ShardArgs},
    exit::Exit,
    failure::Failure,
    output::{Shown, Table},
    report, view,
};

#[derive(Debug, Args)]
pub(super) struct RefreshArgs {
    /// Apply it although it takes away many instances
    #[arg(long)]
    confirm_removals: bool,
    /// Validate and say what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    shards: ShardArgs,
}

pub(super) async fn run(context: &Context, args: RefreshArgs) -> Result<Exit, Failure> {
    let shards = args.shards.chosen(context).await?;
    let request = RefreshConfigRequest { confirm_removals: args.confirm_removals, dry_run: args.dry_run };
    let answers =
        shards.each(|mut client| async move { Ok(client.service.refresh_config(request).await?.into_inner()) }).await;
    context.output.show(&shown(&answers));
    let exit = report::outcome(context, &answers);
    if answers.errors.iter().any(|it| it.reason == "MASS_REMOVAL") {
        context
            .output
            .note("next: look at `nstance-admin config refresh --dry-run`, then repeat with --confirm-removals");
    }
    Ok(exit)
}

fn outcome(error: &ShardError) -> &'static str {
    if error.problems.is_empty() { "failed" } else { "invalid" }
}

fn shown(answers: &Answers<RefreshConfigResponse>) -> Shown {
    let mut table = Table::new(&["SHARD", "RESULT", "ETAG", "CHANGED", "REMOVED", "RESTARTED"]);
    for (shard, it) in &answers.ok {
        let result = match it.updated {
            true => "updated",
            // A dry run has found another one.
            false if !it.prev_etag.is_empty() && it.prev_etag != it.etag => "would change",
            false => "unchanged",
        };
        let etag = match it.prev_etag.as_str() {
            before if before.is_empty() || before == it.etag => it.etag.clone(),
            before => format!("{before} -> {}", it.etag),
        };
        let lists = [&it.changed_groups, &it.removed_groups, &it.restarted].map(|it| it.join(","));
        let [changed, removed, restarted] = lists;
        table.row([shard.clone(), result.to_owned(), etag, changed, removed, restarted]);
        for warning in &it.warnings {
            table.note(format!("{shard}: {warning}"));
        }
    }
    for error in &answers.errors {
        let none = String::new;
        table.row([error.shard.clone(), outcome(error).to_owned(), none(), none(), none(), none()]);
    }
    Shown {
        document: json!({
            "shards": answers.ok.iter().map(|(shard, it)| view::refreshed(shard, it)).collect::<Vec<_>>(),
            "errors": report::error_documents(&answers.errors),
        }),
        table,
        names: answers.ok.iter().map(|(shard, _)| shard.clone()).collect(),
    }
}
