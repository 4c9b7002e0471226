//! `config status`.

use clap::Args;
use serde_json::json;

use crate::{
    args::{Context, ShardArgs},
    exit::Exit,
    failure::Failure,
    output::{Shown, Table},
    report, view,
};

#[derive(Debug, Args)]
pub(super) struct StatusArgs {
    #[command(flatten)]
    shards: ShardArgs,
}

pub(super) async fn run(context: &Context, args: StatusArgs) -> Result<Exit, Failure> {
    let shards = args.shards.shards(context).await?;
    let answers = shards.each(|mut client| async move { client.config_status().await }).await;
    let mut table = Table::new(&["SHARD", "ETAG", "LAST_MODIFIED", ">SIZE", "+LOADED_AT", "+LEADER", "+PENDING"]);
    let time = |at: &Option<prost_types::Timestamp>| view::time(at.as_ref()).map(|it| it.to_string());
    for (shard, it) in &answers.ok {
        table.row([
            shard.clone(),
            it.etag.clone(),
            time(&it.last_modified).unwrap_or_default(),
            it.size.to_string(),
            time(&it.loaded_at).unwrap_or_default(),
            it.leader_id.clone(),
            it.pending_etag.clone(),
        ]);
        if !it.pending_etag.is_empty() {
            table.note(format!(
                "{shard}: another config is stored and not in force; nstance-admin config refresh --shard {shard}"
            ));
        }
        if it.stale {
            table.note(format!("{shard}: the stored config could not be used; the last good one is in force"));
        }
        for error in &it.apply_errors {
            table.note(format!("{shard}: {error}"));
        }
    }
    context.output.show(&Shown {
        document: json!({
            "shards": answers.ok.iter().map(|(shard, it)| view::config_status(shard, it)).collect::<Vec<_>>(),
            "errors": report::error_documents(&answers.errors),
        }),
        table,
        names: answers.ok.iter().map(|(shard, _)| shard.clone()).collect(),
    });
    Ok(report::outcome(context, &answers))
}
