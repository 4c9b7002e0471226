//! `completion`: shells complete commands and flags by themselves, groups and instances by asking the shards.

use std::{collections::BTreeSet, time::Duration};

use clap::{Args, FromArgMatches as _, ValueEnum};
use clap_complete::{
    ArgValueCandidates, CompletionCandidate,
    env::{Bash, EnvCompleter, Fish, Powershell, Zsh},
};
use nstance_client::{Answers, ShardClient};
use nstance_proto::v1::ListInstancesRequest;

use crate::{
    args::{Context, Root, ShardArgs, default_temp_dir},
    defaults,
    exit::Exit,
    failure::Failure,
    output::print,
};

/// Nobody waits longer for a completion.
const BUDGET: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub struct CompletionArgs {
    shell: Shell,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
    Powershell,
}

pub(super) fn run(args: &CompletionArgs) -> Result<Exit, Failure> {
    let completer: &dyn EnvCompleter = match args.shell {
        Shell::Bash => &Bash,
        Shell::Zsh => &Zsh,
        Shell::Fish => &Fish,
        Shell::Powershell => &Powershell,
    };
    let name = std::env::args_os().next().map(std::path::PathBuf::from);
    let name = name.as_deref().and_then(|it| it.file_name()).map_or("nstance-admin".into(), |it| it.to_string_lossy());
    let mut script = Vec::new();
    let written = completer.write_registration("COMPLETE", "nstance_admin", &name, &name, &mut script);
    written.map_err(|error| Failure::failed("make the completion script").because(error))?;
    print(&String::from_utf8_lossy(&script));
    Ok(Exit::Done)
}

/// Lets values that name something be completed with what there is.
pub(crate) fn with_candidates(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| {
        let value = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
        match value.as_deref() {
            Some("GROUP") => arg.add(ArgValueCandidates::new(groups)),
            Some("ID" | "INSTANCE") => arg.add(ArgValueCandidates::new(instances)),
            Some("SHARD") => arg.add(ArgValueCandidates::new(shards)),
            _ => arg,
        }
    });
    command.mut_subcommands(with_candidates)
}

fn groups() -> Vec<CompletionCandidate> {
    candidates(|mut client| async move { Ok(client.groups().await?.into_iter().map(|it| it.key).collect()) })
}

fn instances() -> Vec<CompletionCandidate> {
    candidates(|mut client| async move {
        let instances = client.instances(ListInstancesRequest::default()).await?;
        Ok(instances.into_iter().map(|it| it.instance_id).collect())
    })
}

fn shards() -> Vec<CompletionCandidate> {
    let Some((_, args)) = settings() else { return Vec::new() };
    let targets = args.servers.unwrap_or_default().0;
    targets.into_iter().map(|it| CompletionCandidate::new(it.shard)).collect()
}

/// What all shards name that answer within the budget. A completion never fails, it only knows less.
fn candidates<F>(ask: impl Fn(ShardClient) -> F) -> Vec<CompletionCandidate>
where
    F: Future<Output = Result<Vec<String>, tonic::Status>>,
{
    let asked = || {
        let (context, args) = settings()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
        let names = runtime.block_on(async {
            let shards = args.shards(&context).await.ok()?;
            let Answers { ok, .. } = shards.each(ask).await;
            Some(ok.into_iter().flat_map(|(_, names)| names).collect::<BTreeSet<String>>())
        });
        runtime.shutdown_background();
        names
    };
    asked().unwrap_or_default().into_iter().map(CompletionCandidate::new).collect()
}

/// From the environment and the file: the line that is being completed is not parsed yet.
fn settings() -> Option<(Context, ShardArgs)> {
    let dir = std::env::var_os(defaults::variable("temp-dir")).map_or_else(default_temp_dir, Into::into);
    let bare = <ShardArgs as Args>::augment_args(<Root as Args>::augment_args(clap::Command::new("nstance-admin")));
    let file = defaults::read(&dir).ok()?;
    let bare = defaults::apply(bare, &defaults::Sources::new(&[], &file));
    let matches = bare.try_get_matches_from(["nstance-admin"]).ok()?;
    let root = Root::from_arg_matches(&matches).ok()?;
    let mut args = ShardArgs::from_arg_matches(&matches).ok()?;
    args.timeout = Some(BUDGET);
    Some((Context::new(&root), args))
}
