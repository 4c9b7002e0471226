//! `config validate` and `config diff`: a config that is not in force.

use std::collections::BTreeMap;

use clap::Args;
use nstance_client::{Answers, ShardError, Shards};
use nstance_config::{Checks, Config, Loaded, Problem, load};
use nstance_core::ids::Shard;
use nstance_proto::v1::{PlanRequest, PlanResponse, PlannedAction};
use serde_json::{Value, json};

use super::{FileArgs, changed::changed, read, shown};
use crate::{
    args::{Context, ShardArgs},
    cmd::plan,
    exit::Exit,
    failure::{Failure, unknown_shard},
    output::{Shown, Table},
    report, view,
    words::count,
};

#[derive(Debug, Args)]
pub(super) struct ValidateArgs {
    #[command(flatten)]
    file: FileArgs,
    #[command(flatten)]
    shards: ShardArgs,
}

/// All that a server would say of the file alone; what the live groups say to it is the server's to judge, if a shard is
/// named.
pub(super) async fn validate(context: &Context, args: ValidateArgs) -> Result<Exit, Failure> {
    let bytes = read(&args.file.file)?;
    let name = shown(&args.file.file);
    let loaded = check(&name, &bytes, &args.shards.shard)?;
    let live = if loaded.report.is_ok() && (!args.shards.shard.is_empty() || args.shards.all_shards) {
        let shards = args.shards.chosen(context).await?;
        Some(ask(&shards, &bytes).await)
    } else {
        None
    };
    let errors = live.as_ref().map(|it| it.errors.as_slice()).unwrap_or_default();
    context.output.show(&report(&name, &loaded, live.as_ref()));
    // An invalid config is a 1, whoever found it.
    let unanswered: Vec<ShardError> = errors.iter().filter(|it| it.problems.is_empty()).cloned().collect();
    report::print_errors(context, &unanswered);
    if !loaded.report.is_ok() || unanswered.len() < errors.len() {
        return Ok(Exit::Failed);
    }
    if live.is_none() && context.output.is_for_people() {
        context.output.note(
            "note: the live groups were not looked at; add --shard NAME to have its server check the file against them",
        );
    }
    Ok(Exit::of_shards(live.map_or(1, |it| it.ok.len()), &unanswered))
}

fn check(name: &str, bytes: &[u8], shards: &[String]) -> Result<Loaded, Failure> {
    let shard = match shards {
        [one] => Some(one.parse::<Shard>().map_err(|error| Failure::usage(format!("--shard {one}: {error}")))?),
        _ => None,
    };
    Ok(load(name, bytes, &Checks { schemas: nstance_schemas::ALL, shard: shard.as_ref() }))
}

async fn ask(shards: &Shards, bytes: &[u8]) -> Answers<PlanResponse> {
    let request = |_: &str| PlanRequest { candidate_config: bytes.to_vec(), ..PlanRequest::default() };
    plan::ask(shards, request).await
}

fn report(name: &str, loaded: &Loaded, live: Option<&Answers<PlanResponse>>) -> Shown {
    let mut table = Table::default();
    let report = &loaded.report;
    for it in &report.problems {
        table.note(line(name, it));
    }
    let mut problems: Vec<Value> = report.problems.iter().map(document).collect();
    for error in live.iter().flat_map(|it| &it.errors) {
        for it in &error.problems {
            table.note(format!("{name}:{} (says {})", report::problem(it), error.shard));
            problems.push(view::problem(it));
        }
    }
    let n_errors = problems.iter().filter(|it| it["severity"] == "error").count();
    table.note(format!(
        "{name}: {}, {}",
        if n_errors == 0 { "valid".to_owned() } else { count(n_errors, "error") },
        count(report.n_warnings(), "warning")
    ));
    let errors = live.map(|it| report::error_documents(&it.errors)).unwrap_or_default();
    Shown {
        document: json!({"file": name, "valid": n_errors == 0, "problems": problems, "errors": errors}),
        table,
        names: vec![name.to_owned()],
    }
}

/// `file:line:column: path: message (suggestion)`.
fn line(name: &str, it: &Problem) -> String {
    let place = if it.line == 0 { String::new() } else { format!("{}:{}: ", it.line, it.column) };
    let path = if it.path.is_empty() { String::new() } else { format!("{}: ", it.path) };
    let help = it.help.as_ref().map(|it| format!(" ({it})")).unwrap_or_default();
    format!("{name}:{place}{}[{}] {path}{}{help}", it.severity.as_str(), it.code, it.message)
}

fn document(it: &Problem) -> Value {
    json!({
        "severity": it.severity.as_str(),
        "code": it.code.as_str(),
        "path": it.path,
        "line": it.line,
        "column": it.column,
        "message": it.message,
        "suggestion": it.help,
    })
}

#[derive(Debug, Args)]
pub(super) struct DiffArgs {
    #[command(flatten)]
    file: FileArgs,
    #[command(flatten)]
    shards: ShardArgs,
}

/// The plan under the candidate, less what would be done anyway, and the groups that it changes.
pub(super) async fn diff(context: &Context, args: DiffArgs) -> Result<Exit, Failure> {
    let bytes = read(&args.file.file)?;
    let name = shown(&args.file.file);
    let loaded = check(&name, &bytes, &args.shards.shard)?;
    let Some(config) = loaded.config.as_ref() else {
        context.output.show(&report(&name, &loaded, None));
        return Ok(Exit::Failed);
    };
    let shards = of_file(context, &args.shards, config).await?;
    let tenant = shards.identity().tenant();
    let bundle = shards.identity().ca_bundle();
    let (tenant, bundle, bytes) = (&tenant, bundle.pem(), &bytes);
    let asked = shards.each(|mut client| async move {
        let request = PlanRequest { candidate_config: bytes.clone(), ..PlanRequest::default() };
        let mut plan = client.service.plan(request).await?.into_inner();
        let before = client.service.plan(PlanRequest::default()).await?.into_inner();
        plan.actions = beyond(&before.actions, plan.actions);
        plan.holds.retain(|it| !before.holds.iter().any(|had| same_hold(had, it)));
        let groups = client.groups().await?;
        let changed = tenant.as_ref().map(|tenant| changed(config, tenant, &groups, bundle)).unwrap_or_default();
        Ok((plan, changed))
    });
    let asked = asked.await;
    let mut groups = BTreeMap::new();
    let mut answers = Answers { ok: Vec::new(), errors: asked.errors };
    for (shard, (plan, changed)) in asked.ok {
        groups.insert(shard.clone(), changed);
        answers.ok.push((shard, plan));
    }
    Ok(plan::tell_diff(context, &answers, &groups))
}

/// What is planned beyond what is planned already: of equal actions those that are more. When something would be done is
/// no part of what is done, for it differs from one plan to the next.
fn beyond(before: &[PlannedAction], after: Vec<PlannedAction>) -> Vec<PlannedAction> {
    let what = |it: &PlannedAction| [&it.kind, &it.group, &it.instance_id, &it.reason].map(String::clone);
    let mut known: BTreeMap<_, usize> = BTreeMap::new();
    for it in before {
        *known.entry(what(it)).or_default() += 1;
    }
    let mut is_more = |it: &PlannedAction| match known.get_mut(&what(it)) {
        Some(n @ 1..) => {
            *n -= 1;
            false
        }
        _ => true,
    };
    after.into_iter().filter(|it| is_more(it)).collect()
}

fn same_hold(left: &nstance_proto::v1::PlanHold, right: &nstance_proto::v1::PlanHold) -> bool {
    (&left.kind, &left.group, &left.instance_id) == (&right.kind, &right.group, &right.instance_id)
}

/// A config names its shard, so nobody else need.
async fn of_file(context: &Context, args: &ShardArgs, config: &Config) -> Result<Shards, Failure> {
    if !args.shard.is_empty() || args.all_shards {
        return args.chosen(context).await;
    }
    let named = config.server.shard.as_str().to_owned();
    args.shards(context).await?.only(&[named]).map_err(|error| {
        Failure::usage(format!("the config is for another shard: {}", unknown_shard(&error)))
            .next("name one with --shard")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn action(kind: &str, instance: &str, delete_at: &str) -> PlannedAction {
        PlannedAction {
            kind: kind.into(),
            group: "web".into(),
            instance_id: instance.into(),
            reason: "scale-up".into(),
            priority: 1,
            detail: [("delete_at".to_owned(), delete_at.to_owned())].into(),
        }
    }

    #[test]
    fn of_equal_actions_those_are_shown_that_are_more() {
        let before = [action("Create", "", ""), action("StartDrain", "a", "12:00")];
        let mut after = vec![action("Create", "", ""); 4];
        after.extend([action("StartDrain", "a", "12:01"), action("StartDrain", "b", "12:01")]);
        let more: Vec<String> =
            beyond(&before, after).into_iter().map(|it| format!("{} {}", it.kind, it.instance_id)).collect();
        assert_eq!(more, ["Create ", "Create ", "Create ", "StartDrain b"]);
        assert_eq!(beyond(&before, before.to_vec()), []);
    }
}
