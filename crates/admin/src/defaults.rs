//! Every flag may also be given by the environment (`--identity-dir`: `NSTANCE_IDENTITY_DIR`) or by `admin.yaml`
//! (`identity-dir: ...`). Flag beats environment beats file.

use std::{collections::BTreeMap, fs, path::Path};

use clap::{Arg, ArgAction, Command};

use crate::failure::Failure;

pub(crate) const FILE: &str = "admin.yaml";

/// The name of a flag's variable.
pub(crate) fn variable(long: &str) -> String {
    format!("NSTANCE_{}", long.to_ascii_uppercase().replace('-', "_"))
}

/// Not by the environment: what only one command line can mean.
fn is_own(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version)
}

/// Gives every flag its variable, and the values of the file as defaults.
pub(crate) fn apply(command: Command, file: &BTreeMap<String, String>) -> Command {
    let command = command.mut_args(|arg| {
        let Some(long) = arg.get_long().map(str::to_owned) else { return arg };
        if is_own(&arg) {
            return arg;
        }
        let mut arg = arg.env(variable(&long)).hide_env(true);
        if let Some(value) = file.get(&long) {
            arg = arg.default_value(value.clone()).required(false);
        }
        arg
    });
    command.mut_subcommands(|sub| apply(sub, file))
}

/// One `key: value` per line; `#` begins a comment.
pub(crate) fn read(dir: &Path) -> Result<BTreeMap<String, String>, Failure> {
    let path = dir.join(FILE);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(Failure::failed(format!("read {}", path.display())).because(error)),
    };
    parse(&text).map_err(|problems| {
        Failure::usage(format!("{}: {}", path.display(), problems.join("; ")))
            .next("one `flag: value` per line, as in `servers: dev-1=10.0.0.5:8993`")
    })
}

fn parse(text: &str) -> Result<BTreeMap<String, String>, Vec<String>> {
    let (mut values, mut problems) = (BTreeMap::new(), Vec::new());
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') || line == "---" {
            continue;
        }
        let Some((key, value)) = line.split_once(':') else {
            problems.push(format!("line {number}: no `:` after a key"));
            continue;
        };
        let value = value.trim();
        let value = match value.chars().next() {
            Some(quote @ ('"' | '\'')) => {
                let rest = &value[1..];
                rest.split_once(quote).map_or(rest, |(inner, _)| inner)
            }
            _ => value.split_once(" #").map_or(value, |(before, _)| before).trim_end(),
        };
        // Flags are spelled with dashes, keys of such files often with underscores.
        values.insert(key.trim().replace('_', "-"), value.to_owned());
    }
    if problems.is_empty() { Ok(values) } else { Err(problems) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_of_defaults_is_flat_yaml() {
        let text =
            "---\n# ours\nservers: dev-1=10.0.0.5:8993 # the leader\nidentity_dir: \"/a b/c\" \n\ntimeout: '5s'\n";
        let values = parse(text).unwrap();
        assert_eq!(values["servers"], "dev-1=10.0.0.5:8993");
        assert_eq!(values["identity-dir"], "/a b/c");
        assert_eq!(values["timeout"], "5s");
        assert_eq!(parse("a: 1\nnonsense\n").unwrap_err(), ["line 2: no `:` after a key"]);
    }
}
