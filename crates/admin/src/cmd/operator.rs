//! `operator list` and `operator revoke`: an operator's identity is as good as its record.

use clap::{Args, Subcommand};
use nstance_core::{ids::OperatorId, time::Timestamp};
use nstance_proto::v1::RefreshConfigRequest;
use nstance_store::{
    Fence, Versioned,
    records::operator::{OperatorRecord, Revoked},
};
use serde_json::{Value, json};

use crate::{
    args::{Context, ShardArgs},
    exit::Exit,
    failure::Failure,
    output::{Shown, Table},
    storage::{Cluster, StoreArgs},
};

#[derive(Debug, Subcommand)]
pub enum OperatorCommand {
    /// Show who was ever registered as an operator
    List(ListArgs),
    /// End an operator's identity for good
    ///
    /// The mark is made in the operator's record. Shards of --servers are told at once; others see it within 5 minutes.
    Revoke(RevokeArgs),
}

#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    store: StoreArgs,
}

#[derive(Debug, Args)]
pub struct RevokeArgs {
    /// Its id, as in `operator list`
    id: OperatorId,
    /// Why, for whoever reads the record
    #[arg(long, default_value = "revoked by hand")]
    reason: String,
    /// Only say what would happen
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    shards: ShardArgs,
}

pub(super) async fn run(context: &Context, command: OperatorCommand) -> Result<Exit, Failure> {
    match command {
        OperatorCommand::List(args) => list(context, &args).await,
        OperatorCommand::Revoke(args) => {
            let cluster = args.store.open()?;
            revoke(context, &cluster, &args.shards, args.id, &args.reason, args.dry_run).await
        }
    }
}

async fn list(context: &Context, args: &ListArgs) -> Result<Exit, Failure> {
    let cluster = args.store.open()?;
    let (operators, problems) = read(&cluster).await?;
    let now = cluster.clock.now();
    let mut table = Table::new(&["OPERATOR", "TENANT", "STATE", "REGISTERED", "EXPIRES", "+SERIAL", "+REASON"]);
    for it in operators.iter().map(|it| &it.value) {
        let current = &it.cert.current;
        table.row([
            it.operator_id.to_string(),
            it.tenant.to_string(),
            state(it, now).to_owned(),
            it.registered_at.to_string(),
            current.not_after.to_string(),
            current.serial.clone(),
            it.revoked.as_ref().map(|it| it.reason.clone()).unwrap_or_default(),
        ]);
    }
    problems.iter().for_each(|it| table.note(format!("unreadable: {it}")));
    context.output.show(&Shown {
        document: json!({
            "operators": operators.iter().map(|it| document(&it.value, now)).collect::<Vec<_>>(),
            "problems": problems,
        }),
        table,
        names: operators.iter().map(|it| it.value.operator_id.to_string()).collect(),
    });
    Ok(if problems.is_empty() { Exit::Done } else { Exit::Partly })
}

async fn read(cluster: &Cluster) -> Result<(Vec<Versioned<OperatorRecord>>, Vec<String>), Failure> {
    let read = cluster.operators().await.map_err(|error| Failure::failed("read the operators").because(error))?;
    let (mut operators, mut problems) = (Vec::new(), Vec::new());
    for it in read {
        match it {
            Ok(record) => operators.push(record),
            Err(problem) => problems.push(problem),
        }
    }
    operators.sort_by_key(|it| (it.value.registered_at, it.value.operator_id.to_string()));
    Ok((operators, problems))
}

fn state(it: &OperatorRecord, now: Timestamp) -> &'static str {
    if it.revoked.is_some() {
        "revoked"
    } else if it.cert.current.not_after <= now {
        "expired"
    } else {
        "valid"
    }
}

fn document(it: &OperatorRecord, now: Timestamp) -> Value {
    json!({
        "operator_id": it.operator_id.to_string(),
        "tenant": it.tenant.to_string(),
        "state": state(it, now),
        "registered_at": it.registered_at.to_string(),
        "renewed_at": it.renewed_at.map(|it| it.to_string()),
        "expires_at": it.cert.current.not_after.to_string(),
        "serial": it.cert.current.serial,
        "issuer": it.cert.current.issuer,
        "revoked": it.revoked.as_ref().map(|it| json!({"at": it.at.to_string(), "by": it.by, "reason": it.reason})),
    })
}

/// Marks the operator's record and tells every shard that is reached.
pub(super) async fn revoke(
    context: &Context,
    cluster: &Cluster,
    shards: &ShardArgs,
    id: OperatorId,
    reason: &str,
    dry_run: bool,
) -> Result<Exit, Failure> {
    let (operators, _) = read(cluster).await?;
    let Some(record) = operators.into_iter().find(|it| it.value.operator_id == id) else {
        return Err(
            Failure::new(Exit::NotFound, format!("there is no operator {id}")).next("nstance-admin operator list")
        );
    };
    let what = format!("Operator {id} of tenant {} is revoked for good: {reason}.", record.value.tenant);
    if dry_run {
        context.output.note(&format!("would do: {what}"));
    } else if record.value.revoked.is_none() {
        context.confirm(&what)?;
        tell(context, shards, || mark(cluster, &record, reason)).await?;
    } else {
        context.output.note(&format!("operator {id} is revoked already"));
        tell(context, shards, || async { Ok(()) }).await?;
    }
    let now = cluster.clock.now();
    let after = cluster.records().read_operator(&record.value.tenant, &id).await;
    let after = after.map_err(|error| Failure::failed(format!("read operator {id}")).because(error))?.unwrap_or(record);
    let mut table = Table::new(&["OPERATOR", "TENANT", "STATE"]);
    table.row([id.to_string(), after.value.tenant.to_string(), state(&after.value, now).to_owned()]);
    context.output.show(&Shown { document: document(&after.value, now), table, names: vec![id.to_string()] });
    Ok(Exit::Done)
}

async fn mark(cluster: &Cluster, record: &Versioned<OperatorRecord>, reason: &str) -> Result<(), Failure> {
    let revoked = Revoked { at: cluster.clock.now(), by: cluster.writer.clone(), reason: reason.to_owned() };
    let change = |it: &OperatorRecord| match it.revoked {
        // The first mark stays: it says since when.
        Some(_) => None,
        None => Some(OperatorRecord { revoked: Some(revoked.clone()), ..it.clone() }),
    };
    let fence = Fence::Epoch(nstance_core::ids::Epoch(0));
    let marked = cluster.records().update_operator(fence, record, change).await;
    let what = || format!("mark operator {} as revoked", record.value.operator_id);
    marked.map(drop).map_err(|error| Failure::failed(what()).because(error).next("repeat it: nothing is done twice"))
}

/// Our own identity is read, and renewed if it must be, before the mark is made: it may be the one that ends. Servers that
/// still remember it as good take the refresh from it, and those that do not know the mark already.
async fn tell<F>(context: &Context, args: &ShardArgs, mark: impl FnOnce() -> F) -> Result<(), Failure>
where
    F: Future<Output = Result<(), Failure>>,
{
    let later = "servers see it within 5 minutes; with --servers they are told at once";
    let shards = match args.servers {
        Some(_) => args.shards(context).await.map_err(|failure| failure.lines(false).join("; ")),
        None => Err("no --servers are given".to_owned()),
    };
    mark().await?;
    match shards {
        Err(why) => context.output.note(&format!("note: {why}: {later}")),
        Ok(shards) => {
            let told = shards
                .each(|mut client| async move { client.service.refresh_config(RefreshConfigRequest::default()).await })
                .await;
            for error in &told.errors {
                context.output.note(&format!("note: {error}; it sees the mark within 5 minutes"));
            }
        }
    }
    Ok(())
}
