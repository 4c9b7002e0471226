//! `plan`: what the planner would do now, and what it holds back.

use std::{collections::BTreeMap, path::PathBuf};

use clap::Args;
use nstance_client::{Answers, ShardError, Shards};
use nstance_proto::v1::{PlanRequest, PlanResponse};
use serde_json::json;
use tonic::Code;

use crate::{
    args::{Context, ShardArgs, pair},
    cmd::config::{self, changed::Changed},
    exit::Exit,
    failure::Failure,
    output::{Shown, Table},
    report, view,
};

#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Only this group
    group: Option<String>,
    /// As if this group had this size; repeatable
    #[arg(long, value_name = "GROUP=SIZE", value_parser = sized)]
    size: Vec<(String, i32)>,
    /// As if this config were in force; `-` reads stdin
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    shards: ShardArgs,
}

fn sized(text: &str) -> Result<(String, i32), String> {
    let size = |text: &str| text.parse().ok().filter(|size| (0..=10_000).contains(size));
    let parsed = pair(text).ok().and_then(|(group, rest)| Some((group, size(&rest)?)));
    parsed.ok_or_else(|| format!("`{text}`: expected GROUP=SIZE with a size of 0 to 10000"))
}

pub async fn run(context: &Context, args: PlanArgs) -> Result<Exit, Failure> {
    let shards = match &args.config {
        // A config is one shard's.
        Some(_) => args.shards.chosen(context).await?,
        None => args.shards.shards(context).await?,
    };
    let candidate_config = args.config.as_deref().map(config::read).transpose()?.unwrap_or_default();
    let request =
        PlanRequest { group: args.group.unwrap_or_default(), sizes: args.size.into_iter().collect(), candidate_config };
    let request = &request;
    let answers = ask(&shards, |_| request.clone()).await;
    match of_those_that_have_it(answers, &request.group) {
        Ok(answers) => Ok(tell(context, answers)),
        Err(absent) => Ok(report::all_failed(context, &[absent])),
    }
}

/// A group need not be in every shard: one that has it not has nothing to say. If it is nowhere, that is said once.
fn of_those_that_have_it<T>(mut answers: Answers<T>, group: &str) -> Result<Answers<T>, ShardError> {
    let is_absent = |it: &ShardError| !group.is_empty() && it.code == Code::NotFound;
    if answers.ok.is_empty() && !answers.errors.is_empty() && answers.errors.iter().all(is_absent) {
        let asked: Vec<&str> = answers.errors.iter().map(|it| it.shard.as_str()).collect();
        return Err(ShardError::new(&asked.join(", "), Code::NotFound, format!("there is no group {group}")));
    }
    answers.errors.retain(|it| !is_absent(it));
    Ok(answers)
}

/// The plan of one group under other sizes, which may differ from shard to shard. A shard without any is not asked.
pub async fn show(
    context: &Context,
    shards: &Shards,
    group: &str,
    sizes: impl Fn(&str) -> Option<BTreeMap<String, i32>>,
) -> Exit {
    let asked: Vec<String> = shards.names().filter(|it| sizes(it).is_some()).map(str::to_owned).collect();
    let Ok(shards) = shards.only(&asked) else { return Exit::Failed };
    let request = |shard: &str| PlanRequest {
        group: group.to_owned(),
        sizes: sizes(shard).into_iter().flatten().collect(),
        candidate_config: Vec::new(),
    };
    tell(context, ask(&shards, request).await)
}

pub(super) async fn ask(shards: &Shards, request: impl Fn(&str) -> PlanRequest) -> Answers<PlanResponse> {
    let request = &request;
    shards.each(|mut client| async move { Ok(client.service.plan(request(&client.shard)).await?.into_inner()) }).await
}

/// Shows all plans. Without a refusal the exit says whether there is something to do.
pub(super) fn tell(context: &Context, answers: Answers<PlanResponse>) -> Exit {
    finish(context, &answers, shown(&answers, "nothing to do"), false)
}

/// The same with the groups that another config changes, by shard, be there something to do for it or not.
pub(super) fn tell_diff(
    context: &Context,
    answers: &Answers<PlanResponse>,
    groups: &BTreeMap<String, Vec<Changed>>,
) -> Exit {
    let changes = groups.values().any(|it| !it.is_empty());
    let mut shown = shown(answers, if changes { "nothing to do but to tell machines" } else { "nothing to do" });
    for (shard, changed) in groups {
        changed.iter().for_each(|it| shown.table.note(it.line(shard)));
    }
    for plan in shown.document["plans"].as_array_mut().into_iter().flatten() {
        let changed = plan["shard"].as_str().and_then(|it| groups.get(it)).map(Vec::as_slice).unwrap_or_default();
        plan["changed_groups"] = changed.iter().map(Changed::document).collect();
    }
    finish(context, answers, shown, changes)
}

fn finish(context: &Context, answers: &Answers<PlanResponse>, shown: Shown, changes: bool) -> Exit {
    context.output.show(&shown);
    for (shard, plan) in &answers.ok {
        if !plan.complete {
            context.output.note(&format!("note: {shard} does not know everything yet; this plan may change"));
        }
    }
    let changes = changes || answers.ok.iter().any(|(_, plan)| !plan.actions.is_empty());
    match report::outcome(context, answers) {
        Exit::Done if changes => Exit::Changes,
        exit => exit,
    }
}

fn shown(answers: &Answers<PlanResponse>, nothing: &str) -> Shown {
    let mut table = Table::new(&["ACTION", "GROUP", "SHARD", "INSTANCE", "REASON", "+DETAIL"]);
    for (shard, plan) in &answers.ok {
        for it in &plan.actions {
            let detail: BTreeMap<&String, &String> = it.detail.iter().collect();
            let detail: Vec<String> = detail.iter().map(|(key, value)| format!("{key}={value}")).collect();
            let cells = [&it.kind, &it.group, shard, &it.instance_id, &it.reason, &detail.join(",")];
            table.row(cells.map(ToOwned::to_owned));
        }
    }
    if table.is_empty() {
        table = Table::default();
        table.note(nothing);
    }
    for (shard, plan) in &answers.ok {
        for it in &plan.holds {
            let of = if it.instance_id.is_empty() { &it.group } else { &it.instance_id };
            table.note(format!("held back in {shard}: {of}: {}: {}", it.kind, it.message));
        }
    }
    Shown {
        document: json!({
            "plans": answers.ok.iter().map(|(shard, plan)| view::plan(shard, plan)).collect::<Vec<_>>(),
            "errors": report::error_documents(&answers.errors),
        }),
        table,
        names: answers.ok.iter().flat_map(|(_, plan)| &plan.actions).map(|it| it.kind.clone()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_need_not_be_in_every_shard() {
        let error = |shard: &str, code: Code| ShardError::new(shard, code, "no");
        let left = |ok: &[&str], errors: Vec<ShardError>, group: &str| {
            let ok = ok.iter().map(|it| ((*it).to_owned(), ())).collect();
            let kept = of_those_that_have_it(Answers { ok, errors }, group).map_err(|it| it.to_string())?;
            Ok(Exit::of_shards(kept.ok.len(), &kept.errors))
        };
        let absent = |shard: &str| error(shard, Code::NotFound);
        assert_eq!(left(&["dev-1"], vec![absent("dev-2")], "web"), Ok(Exit::Done));
        let lost = || error("dev-3", Code::Unavailable);
        assert_eq!(left(&["dev-1"], vec![absent("dev-2"), lost()], "web"), Ok(Exit::Partly));
        assert_eq!(left(&[], vec![absent("dev-2"), lost()], "web"), Ok(Exit::Failed), "nobody has proved it");
        let nowhere = Err("dev-1, dev-2: there is no group web".to_owned());
        assert_eq!(left(&[], vec![absent("dev-1"), absent("dev-2")], "web"), nowhere);
        assert_eq!(left(&["dev-1"], vec![absent("dev-2")], ""), Ok(Exit::Partly), "what is absent was not a group");
    }
}
