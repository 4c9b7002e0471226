//! `check`: everything that must hold, in the order in which one thing rests on another.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use nstance_core::ports::clock::Clock as _;
use nstance_rt::clock::SystemClock;
use serde_json::json;

use crate::{
    args::{Context, ShardArgs, duration},
    check::{Group, Sheet, Verdict, config, environment, fleet, identity, secrets, shards, store},
    exit::Exit,
    failure::Failure,
    output::{Format, Shown, Table},
    storage::StoreArgs,
};

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Only what must hold before the first server starts: environment, store, secrets, config
    #[arg(long, conflicts_with = "only")]
    pre: bool,
    /// Repeat it until nothing fails, for so long at most
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    wait: Option<Duration>,
    /// Only this group; repeatable
    #[arg(long, value_enum, value_name = "NAME", value_delimiter = ',')]
    only: Vec<Group>,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    shards: ShardArgs,
}

impl CheckArgs {
    fn wants(&self, group: Group) -> bool {
        if self.pre { group.is_before_servers() } else { self.only.is_empty() || self.only.contains(&group) }
    }

    fn identity_dir(&self, context: &Context) -> PathBuf {
        self.shards.identity_dir.clone().unwrap_or_else(|| context.identity_dir())
    }
}

/// Between two rounds of --wait.
const PAUSE: Duration = Duration::from_secs(1);

pub(super) async fn run(context: &Context, args: CheckArgs) -> Result<Exit, Failure> {
    let until = args.wait.map(|wait| SystemClock.monotonic() + wait);
    loop {
        let sheet = look(context, &args).await?;
        let failed = 0 < sheet.count(Verdict::Fail);
        if failed && until.is_some_and(|until| SystemClock.monotonic() < until) {
            tokio::time::sleep(PAUSE).await;
            continue;
        }
        show(context, &sheet);
        return Ok(match (failed, until) {
            (false, _) => Exit::Done,
            (true, None) => Exit::Failed,
            (true, Some(_)) => Exit::TimedOut,
        });
    }
}

async fn look(context: &Context, args: &CheckArgs) -> Result<Sheet, Failure> {
    let cluster = args.store.open()?;
    let mut sheet = Sheet::default();
    let targets = args.shards.servers.as_ref();
    if args.wants(Group::Environment) {
        environment::check(sheet.of(Group::Environment), &cluster, targets).await;
    }
    if args.wants(Group::Store) {
        store::check(sheet.of(Group::Store), &cluster).await;
    }
    let no_store = sheet.has_failed(Group::Store);
    for group in [Group::Secrets, Group::Config, Group::Identity] {
        if !args.wants(group) {
            continue;
        }
        let mut section = sheet.of(group);
        match group {
            _ if no_store => section.skip("all", "the store failed"),
            Group::Secrets => secrets::check(section, &cluster, &args.store).await,
            Group::Config => config::check(section, &cluster, targets).await,
            _ => identity::check(section, &cluster, &args.identity_dir(context)).await,
        }
    }
    let no_identity = sheet.has_failed(Group::Identity);
    let mut reached = None;
    if args.wants(Group::Shards) || args.wants(Group::Fleet) {
        let group = if args.wants(Group::Shards) { Group::Shards } else { Group::Fleet };
        let mut section = sheet.of(group);
        match (targets, no_identity) {
            (None, _) => section.fail("servers", "no server is named", "--servers SHARD=HOST:8993,..., or --pre"),
            (_, true) => section.skip("all", "the identity failed"),
            _ => match args.shards.shards(context).await {
                Ok(shards) => reached = Some(shards),
                Err(failure) => {
                    let fix = failure.next.clone().unwrap_or_else(|| "nstance-admin check --only identity".to_owned());
                    section.fail("identity", failure.lines(false)[0].trim_start_matches("error: "), fix);
                }
            },
        }
    }
    if let Some(reached) = &reached
        && args.wants(Group::Shards)
    {
        shards::check(sheet.of(Group::Shards), &cluster, reached).await;
    }
    if args.wants(Group::Fleet) && args.wants(Group::Shards) && reached.is_none() {
        sheet.of(Group::Fleet).skip("all", "no shard was asked");
    } else if let Some(reached) = &reached
        && args.wants(Group::Fleet)
    {
        fleet::check(sheet.of(Group::Fleet), &cluster, reached).await;
    }
    Ok(sheet)
}

pub(super) fn show(context: &Context, sheet: &Sheet) {
    let [n_ok, n_warn, n_fail, n_skip] =
        [Verdict::Ok, Verdict::Warn, Verdict::Fail, Verdict::Skip].map(|it| sheet.count(it));
    let checks = sheet.lines.iter().map(|it| {
        json!({
            "group": it.group.as_str(),
            "name": it.name,
            "result": it.verdict.as_str().to_ascii_lowercase(),
            "detail": it.detail,
            "fix": it.fix,
        })
    });
    let document = json!({
        "ok": n_fail == 0,
        "passed": n_ok,
        "warnings": n_warn,
        "failed": n_fail,
        "skipped": n_skip,
        "checks": checks.collect::<Vec<_>>(),
    });
    let mut table = Table::default();
    if matches!(context.output.format, Format::Table | Format::Wide) {
        let width = sheet.lines.iter().map(|it| it.name.len()).max().unwrap_or(0);
        let mut group = None;
        for it in &sheet.lines {
            if group != Some(it.group) {
                group = Some(it.group);
                table.note(it.group.as_str());
            }
            let mut detail = it.detail.lines();
            let first = detail.next().unwrap_or_default();
            table.note(format!("  {:<4}  {:<width$}  {first}", it.verdict.as_str(), it.name).trim_end().to_owned());
            detail.for_each(|line| table.note(format!("        {line}")));
            if let Some(fix) = it.fix.as_ref().filter(|_| it.verdict != Verdict::Ok) {
                table.note(format!("        fix: {fix}"));
            }
        }
        table.note(format!("{n_ok} ok, {n_warn} warnings, {n_fail} failed, {n_skip} skipped"));
    }
    let failed = sheet.lines.iter().filter(|it| it.verdict == Verdict::Fail);
    let names = failed.map(|it| format!("{}/{}", it.group.as_str(), it.name)).collect();
    context.output.show(&Shown { document, table, names });
}
