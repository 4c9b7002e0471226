//! `cluster rotate-ca`: one step at a time, each refused while it would cut somebody off.

use clap::Args;
use nstance_core::time::Timestamp;
use serde_json::json;

use crate::{
    args::Context,
    exit::Exit,
    failure::Failure,
    output::{Shown, Table},
    rotation::{Done, Rotation, RotationError, RotationStatus, Stage, Step},
    storage::StoreArgs,
};

#[derive(Debug, Args)]
pub struct RotateArgs {
    /// Let the new CA issue
    #[arg(long, group = "step")]
    activate: bool,
    /// End the trust of the old CA, and delete its key
    #[arg(long, group = "step")]
    retire: bool,
    /// Show where the rotation stands, and change nothing
    #[arg(long, group = "step")]
    status: bool,
    /// Take a rotation back that was not activated
    #[arg(long, group = "step")]
    abort: bool,
    /// The key of the CA is lost: make a new CA that issues at once
    #[arg(long, group = "step")]
    lost_key: bool,
    /// Do it although it cuts somebody off, whom it lists
    #[arg(long)]
    force: bool,
    /// Only say what would happen
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    store: StoreArgs,
}

fn what(step: Step) -> &'static str {
    match step {
        Step::Start => "A new CA is made and trusted beside the present one, which goes on issuing.",
        Step::Activate => "The new CA issues from now on; the old one stays trusted. This cannot be aborted.",
        Step::Retire => "The old CA is not trusted any more and its key is deleted, for good.",
        Step::Abort => "The new CA is dropped before it issued anything.",
        Step::LostKey => {
            "A new CA issues from now on. Whoever does not get its certificate in time must register again or be replaced."
        }
    }
}

pub(super) async fn run(context: &Context, args: RotateArgs) -> Result<Exit, Failure> {
    let step = match &args {
        RotateArgs { status: true, .. } => None,
        RotateArgs { activate: true, .. } => Some(Step::Activate),
        RotateArgs { retire: true, .. } => Some(Step::Retire),
        RotateArgs { abort: true, .. } => Some(Step::Abort),
        RotateArgs { lost_key: true, .. } => Some(Step::LostKey),
        _ => Some(Step::Start),
    };
    let cluster = args.store.open()?;
    let secrets = args.store.secrets(cluster.store.clone(), Vec::new())?;
    let profile = cluster.profile().await?;
    let rotation = Rotation::new(
        cluster.store.clone(),
        secrets,
        cluster.records(),
        profile,
        &cluster.writer,
        cluster.clock.clone(),
        cluster.entropy.clone(),
    );
    let before = rotation.status().await.map_err(|error| explain(error, None))?;
    let Some(step) = step else {
        show(context, &before, &rotation.obstacles().await.map_err(|error| explain(error, Some(&before)))?, None);
        return Ok(Exit::Done);
    };
    // Whether it comes in its turn, and whom it would cut off, is known before anybody is asked.
    rotation.may(step).await.map_err(|error| explain(error, Some(&before)))?;
    let obstacles = match step {
        Step::Activate | Step::Retire => rotation.obstacles().await.map_err(|error| explain(error, Some(&before)))?,
        _ => Vec::new(),
    };
    if args.dry_run {
        context.output.note(&format!("would do: {}", what(step)));
        show(context, &before, &obstacles, None);
        return Ok(if obstacles.is_empty() || args.force { Exit::Done } else { Exit::Failed });
    }
    let mut told = what(step).to_owned();
    if args.force && !obstacles.is_empty() {
        told.push_str(&format!("\nIt is forced, and cuts off:\n  {}", obstacles.join("\n  ")));
    }
    if obstacles.is_empty() || args.force {
        context.confirm(&told)?;
    }
    let done = match step {
        Step::Start => rotation.start().await,
        Step::Activate => rotation.activate(args.force).await,
        Step::Retire => rotation.retire(args.force).await,
        Step::Abort => rotation.abort().await,
        Step::LostKey => rotation.lost_key().await.map(|lost| {
            context.output.note(&format!(
                "{} agents and {} operators hold certificates of the CA whose key is lost; they must register again or be replaced",
                lost.agents, lost.operators
            ));
            lost.done
        }),
    };
    let done = done.map_err(|error| explain(error, Some(&before)))?;
    let after = rotation.status().await.map_err(|error| explain(error, None))?;
    let obstacles = rotation.obstacles().await.map_err(|error| explain(error, Some(&after)))?;
    show(context, &after, &obstacles, Some(&done));
    Ok(Exit::Done)
}

fn explain(error: RotationError, status: Option<&RotationStatus>) -> Failure {
    let next = match &error {
        RotationError::NoCa => "start a nstance-server, which makes the first CA",
        RotationError::KeyLost { .. } => "restore the secret, or nstance-admin cluster rotate-ca --lost-key",
        RotationError::Refused { .. } => {
            "nstance-admin cluster rotate-ca --status shows who is left; --force does it all the same"
        }
        _ => "nstance-admin cluster rotate-ca --status",
    };
    let exit = if matches!(error, RotationError::NoCa) { Exit::NotFound } else { Exit::Failed };
    let mut failure = Failure::new(exit, "rotate the CA").next(next);
    if let (RotationError::Refused { .. }, Some(at)) = (&error, status.and_then(earliest)) {
        failure = failure.next(format!("wait until {at} at least; {next}"));
    }
    failure.because(error)
}

/// When the next step is allowed at the earliest, as far as the clock is concerned.
fn earliest(status: &RotationStatus) -> Option<Timestamp> {
    (status.stage == Stage::Started).then_some(status.activate_from)
}

fn show(context: &Context, status: &RotationStatus, obstacles: &[String], done: Option<&Done>) {
    let (stage, next) = match status.stage {
        Stage::Settled => ("settled", "nstance-admin cluster rotate-ca"),
        Stage::Started => ("started", "nstance-admin cluster rotate-ca --activate"),
        Stage::Active => ("active", "nstance-admin cluster rotate-ca --retire"),
    };
    let mut table = Table::new(&["CA", "MADE", "ROLE", ">IN USE"]);
    let count = |fingerprint: &str| status.in_use.get(fingerprint).copied().unwrap_or(0);
    for (number, (fingerprint, made)) in status.cas.iter().enumerate() {
        let role = if number == 0 { "issues" } else { "trusted" };
        table.row([fingerprint.clone(), made.to_string(), role.to_owned(), count(fingerprint).to_string()]);
    }
    table.note(format!("rotation: {stage}"));
    let earliest = earliest(status);
    match (status.stage, obstacles) {
        (Stage::Settled, _) => table.note(format!("next: {next}, whenever the CA is to be replaced")),
        (_, []) => table.note(format!("next: {next}, now")),
        (_, some) => {
            let from = earliest.map(|at| format!(" from {at}")).unwrap_or_default();
            table.note(format!("next: {next}{from}, once nobody is cut off by it; {} in the way:", some.len()));
            const SHOWN: usize = 20;
            some.iter().take(SHOWN).for_each(|it| table.note(format!("  {it}")));
            if SHOWN < some.len() {
                table.note(format!("  and {} more; all of them with -o json", some.len() - SHOWN));
            }
        }
    }
    let cas = status.cas.iter().enumerate().map(|(number, (fingerprint, made))| {
        json!({
            "fingerprint": fingerprint,
            "made_at": made.to_string(),
            "issues": number == 0,
            "certificates_in_use": count(fingerprint),
        })
    });
    context.output.show(&Shown {
        document: json!({
            "stage": stage,
            "cas": cas.collect::<Vec<_>>(),
            "next": next,
            "next_from": earliest.map(|it| it.to_string()),
            "in_the_way": obstacles,
            "cut_off": done.map(|it| it.cut_off.clone()),
        }),
        table,
        names: status.cas.iter().map(|(fingerprint, _)| fingerprint.clone()).collect(),
    });
}
