//! `env`: what every shared flag is, and who said so.

use clap::{ArgMatches, Args, parser::ValueSource};
use serde_json::json;

use crate::{
    args::{Context, ShardArgs},
    defaults,
    exit::Exit,
    output::{Shown, Table},
    storage::StoreArgs,
};

#[derive(Debug, Args)]
pub struct EnvArgs {
    #[command(flatten)]
    shards: ShardArgs,
    #[command(flatten)]
    store: StoreArgs,
}

/// Values of these are secrets, or lead to them.
const MASKED: [&str; 1] = ["key_source"];

pub(super) fn run(context: &Context, matches: &ArgMatches) -> Exit {
    let empty = ArgMatches::default();
    let own = matches.subcommand_matches("env").unwrap_or(&empty);
    let file = defaults::read(&context.temp_dir).unwrap_or_default();
    let mut table = Table::new(&["FLAG", "VALUE", "FROM", "+VARIABLE"]);
    let (mut values, mut names) = (Vec::new(), Vec::new());
    let mut ids: Vec<&str> = own.ids().map(clap::Id::as_str).filter(|id| id.starts_with(char::is_lowercase)).collect();
    // These have a value even if nobody gave one.
    for id in ["identity_dir", "temp_dir"] {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    ids.sort_unstable();
    for id in ids {
        let long = id.replace('_', "-");
        let raw: Vec<String> = own
            .try_get_raw(id)
            .ok()
            .flatten()
            .into_iter()
            .flatten()
            .map(|it| it.to_string_lossy().into_owned())
            .collect();
        let raw = match id {
            "temp_dir" => vec![context.temp_dir.display().to_string()],
            "identity_dir" if raw.is_empty() => vec![context.identity_dir().display().to_string()],
            _ => raw,
        };
        let value = if MASKED.contains(&id) { "(hidden)".to_owned() } else { raw.join(",") };
        let from = match own.value_source(id) {
            Some(ValueSource::CommandLine) => "command line",
            Some(ValueSource::EnvVariable) => "environment",
            // Another flag may have kept it away.
            _ if file.get(&long).is_some_and(|it| *it == raw.join(",")) => defaults::FILE,
            _ => "default",
        };
        table.row([format!("--{long}"), value.clone(), from.to_owned(), defaults::variable(&long)]);
        values.push(json!({"flag": long, "value": value, "from": from, "variable": defaults::variable(&long)}));
        names.push(long);
    }
    context.output.show(&Shown { document: json!({"flags": values}), table, names });
    Exit::Done
}
