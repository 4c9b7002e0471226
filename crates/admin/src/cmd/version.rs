//! `version`: ours, and with `--servers` theirs.

use clap::Args;
use nstance_client::Answers;
use serde_json::json;

use crate::{
    args::{Context, ShardArgs},
    exit::Exit,
    failure::Failure,
    output::{Shown, Table},
    view,
};

const OURS: &str = env!("CARGO_PKG_VERSION");

#[derive(Debug, Args)]
pub struct VersionArgs {
    #[command(flatten)]
    shards: ShardArgs,
}

/// A server that cannot be asked does not keep us from telling our own.
pub(super) async fn run(context: &Context, args: VersionArgs) -> Result<Exit, Failure> {
    let mut table = Table::new(&["WHO", "VERSION"]);
    table.row(["nstance-admin", OURS]);
    let (mut servers, mut errors) = (Vec::new(), Vec::new());
    if args.shards.servers.is_some() {
        let answers = match args.shards.shards(context).await {
            Ok(shards) => shards.each(|mut client| async move { client.config_status().await }).await,
            Err(failure) if failure.exit == Exit::Usage => return Err(failure),
            // Whoever has no identity yet may want to know what to ask for help with.
            Err(failure) => {
                for line in failure.lines(context.debug) {
                    let what = line.strip_prefix("error: ").map(|it| format!("note: servers were not asked: {it}"));
                    context.output.note(&what.unwrap_or(line));
                }
                Answers { ok: Vec::new(), errors: Vec::new() }
            }
        };
        for (shard, it) in &answers.ok {
            table.row([format!("{shard} ({})", it.leader_id), it.server_version.clone()]);
            servers.push(json!({"shard": shard, "leader": it.leader_id, "version": it.server_version}));
        }
        for error in &answers.errors {
            table.note(error.to_string());
            errors.push(view::error(error));
        }
    }
    let document = json!({"client": OURS, "servers": servers, "errors": errors});
    context.output.show(&Shown { document, table, names: vec![OURS.to_owned()] });
    Ok(if errors.is_empty() { Exit::Done } else { Exit::Partly })
}
