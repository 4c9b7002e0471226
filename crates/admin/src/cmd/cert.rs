//! `cert list` and `cert revoke`: what was issued, and how each kind of certificate is ended.

use std::time::Duration;

use clap::{Args, Subcommand};
use nstance_core::{ids::OperatorId, time::Timestamp};
use nstance_proto::v1::ReplaceInstanceRequest;
use serde_json::{Value, json};

use super::operator;
use crate::{
    args::{Context, ShardArgs, duration},
    certificates::{self, Certificate, State},
    exit::Exit,
    failure::Failure,
    output::{Shown, Table},
    storage::{Cluster, StoreArgs},
    view,
};

#[derive(Debug, Subcommand)]
pub enum CertCommand {
    /// Show every certificate that was issued, and what it is worth now
    List(ListArgs),
    /// End what a certificate is good for
    ///
    /// An operator is revoked. The instance of an agent is replaced: drained, then deleted, which ends its identity. A
    /// certificate that lies on machines as a file cannot be revoked: it ends by its ttl, or with its CA.
    Revoke(RevokeArgs),
}

#[derive(Debug, Args)]
pub struct ListArgs {
    /// Only those whose subject or holder contains this
    #[arg(long, value_name = "TEXT")]
    subject: Option<String>,
    /// Only those that are still good
    #[arg(long)]
    valid: bool,
    /// Only those that this shard issued
    #[arg(long, value_name = "SHARD")]
    shard: Option<String>,
    /// Only those of this instance
    #[arg(long, value_name = "ID")]
    instance: Option<String>,
    /// Only those of this operator
    #[arg(long, value_name = "ID")]
    operator: Option<String>,
    /// Only good ones that end within this time, as in 7d
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    expiring: Option<Duration>,
    #[command(flatten)]
    store: StoreArgs,
}

impl ListArgs {
    fn wants(&self, it: &Certificate, now: Timestamp) -> bool {
        let is = |wanted: &Option<String>, there: &str| wanted.as_deref().is_none_or(|wanted| wanted == there);
        let subject = |text: &String| it.logged.subject.contains(text) || it.subject_id.contains(text);
        self.subject.as_ref().is_none_or(subject)
            && (!self.valid || it.state.is_live())
            && is(&self.shard, it.shard.as_deref().unwrap_or_default())
            && is(&self.instance, &it.subject_id)
            && is(&self.operator, &it.subject_id)
            && self.expiring.is_none_or(|within| it.state.is_live() && it.logged.not_after < now.plus(within))
    }
}

#[derive(Debug, Args)]
pub struct RevokeArgs {
    /// Serial number, as in `cert list`
    serial: String,
    /// Why, for whoever reads the record
    #[arg(long, default_value = "certificate revoked by hand")]
    reason: String,
    /// Only say what would happen
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    shards: ShardArgs,
}

pub(super) async fn run(context: &Context, command: CertCommand) -> Result<Exit, Failure> {
    match command {
        CertCommand::List(args) => list(context, &args).await,
        CertCommand::Revoke(args) => revoke(context, &args).await,
    }
}

async fn read(cluster: &Cluster) -> Result<certificates::Certificates, Failure> {
    let read = certificates::read(cluster).await;
    read.map_err(|error| {
        Failure::failed("read the log of certificates").because(error).next("nstance-admin check --only store")
    })
}

async fn list(context: &Context, args: &ListArgs) -> Result<Exit, Failure> {
    let cluster = args.store.open()?;
    let (read, now) = (read(&cluster).await?, cluster.clock.now());
    let shown: Vec<&Certificate> = read.all.iter().filter(|it| args.wants(it, now)).collect();
    let mut table =
        Table::new(&["SERIAL", "SUBJECT", "KIND", "ISSUED", "EXPIRES", "STATE", "+NAME", "+SHARD", "+ISSUER"]);
    for it in &shown {
        table.row([
            it.logged.serial.clone(),
            it.logged.subject.clone(),
            it.kind().to_owned(),
            it.issued_at.to_string(),
            it.logged.not_after.to_string(),
            it.state.as_str().to_owned(),
            it.logged.name.clone(),
            it.shard.clone().unwrap_or_default(),
            it.logged.issuer.clone(),
        ]);
    }
    read.problems.iter().for_each(|it| table.note(format!("unreadable: {it}")));
    context.output.show(&Shown {
        document: json!({
            "certificates": shown.iter().map(|it| document(it)).collect::<Vec<_>>(),
            "problems": read.problems,
        }),
        table,
        names: shown.iter().map(|it| it.logged.serial.clone()).collect(),
    });
    Ok(if read.problems.is_empty() { Exit::Done } else { Exit::Partly })
}

fn document(it: &Certificate) -> Value {
    json!({
        "serial": it.logged.serial,
        "subject": it.logged.subject,
        "subject_id": it.subject_id,
        "kind": it.kind(),
        "name": it.logged.name,
        "sans": it.logged.sans,
        "shard": it.shard,
        "tenant": it.tenant,
        "issued_at": it.issued_at.to_string(),
        "not_before": it.logged.not_before.to_string(),
        "not_after": it.logged.not_after.to_string(),
        "sha256": it.logged.sha256,
        "issuer": it.logged.issuer,
        "state": it.state.as_str(),
    })
}

async fn revoke(context: &Context, args: &RevokeArgs) -> Result<Exit, Failure> {
    let cluster = args.store.open()?;
    // As tools print them, too: 0A:1B:...
    let serial = args.serial.replace(':', "").to_ascii_lowercase();
    let Some(it) = read(&cluster).await?.all.into_iter().find(|it| it.logged.serial == serial) else {
        return Err(Failure::new(Exit::NotFound, format!("no certificate with serial {serial} was ever issued"))
            .next("nstance-admin cert list"));
    };
    if !it.state.is_live() && it.kind() != "operator" {
        context.output.note(&format!("nothing to do: certificate {serial} is {} already", it.state.as_str()));
        context.output.show(&one(&it, None));
        return Ok(Exit::Done);
    }
    let cannot = |why: &str, next: &str| {
        Err(Failure::failed(format!("certificate {serial} ({}) cannot be revoked: {why}", it.logged.subject))
            .next(next))
    };
    match it.kind() {
        "operator" if it.state == State::Superseded => {
            let what = format!("certificate {serial} of operator {} is superseded and passes nowhere", it.subject_id);
            context.output.note(&format!("nothing to do: {what}"));
            context.output.show(&one(&it, None));
            Ok(Exit::Done)
        }
        "operator" => {
            let id: OperatorId = it.subject_id.parse().map_err(|error| {
                Failure::failed(format!("the log names operator {}", it.subject_id)).because(format!("{error}"))
            })?;
            operator::revoke(context, &cluster, &args.shards, id, &args.reason, args.dry_run).await
        }
        "agent" => replace(context, args, &it).await,
        "ca" => cannot("it is a CA's", "nstance-admin cluster rotate-ca"),
        "server" => cannot(
            "it is a server's, which makes itself another one whenever it likes",
            "stop that server; what it had ends within 7 days, or with nstance-admin cluster rotate-ca",
        ),
        _ => cannot(
            &format!(
                "it is a file on a machine, and there is no list that its readers ask; it ends at {}",
                it.logged.not_after
            ),
            "a shorter ttl in the config, or nstance-admin cluster rotate-ca",
        ),
    }
}

/// Replaced, and with its machine its identity ends.
async fn replace(context: &Context, args: &RevokeArgs, it: &Certificate) -> Result<Exit, Failure> {
    let instance = &it.subject_id;
    let what = format!("Instance {instance} is replaced: a new one is made, then it is drained and deleted.");
    if args.dry_run {
        context.output.note(&format!("would do: {what}"));
        context.output.show(&one(it, None));
        return Ok(Exit::Done);
    }
    let shards = args.shards.shards(context).await?;
    let shards = match &it.shard {
        // The log knows where it is; nobody else needs to be asked.
        Some(shard) => shards.only(std::slice::from_ref(shard))?,
        None => shards,
    };
    context.confirm(&what)?;
    let request = ReplaceInstanceRequest { instance_id: instance.clone(), reason: args.reason.clone() };
    let found = shards
        .find(&format!("instance {instance}"), |mut client| {
            let request = request.clone();
            async move { Ok(client.service.replace_instance(request).await?.into_inner()) }
        })
        .await;
    match found {
        Ok((shard, _)) => {
            context.output.show(&one(it, Some(&shard)));
            context.output.note(&format!("next: nstance-admin instance show {instance}"));
            Ok(Exit::Done)
        }
        Err(errors) => {
            for error in &errors {
                tracing::debug!(error = %view::code_of(error), "not replaced");
            }
            let exit = Exit::of_shards(0, &errors);
            let why: Vec<String> = errors.iter().map(ToString::to_string).collect();
            Err(Failure::new(exit, format!("replace instance {instance}")).because(why.join("; ")))
        }
    }
}

fn one(it: &Certificate, replaced_in: Option<&str>) -> Shown {
    let mut table = Table::new(&["SERIAL", "SUBJECT", "KIND", "STATE"]);
    let state = if replaced_in.is_some() { "being replaced" } else { it.state.as_str() };
    table.row([it.logged.serial.clone(), it.logged.subject.clone(), it.kind().to_owned(), state.to_owned()]);
    let mut document = document(it);
    document["replaced_in"] = json!(replaced_in);
    Shown { document, table, names: vec![it.logged.serial.clone()] }
}
