//! Every flag may also be given by the environment (`--identity-dir`: `NSTANCE_IDENTITY_DIR`) or by `admin.yaml`
//! (`identity-dir: ...`). Flag beats environment beats file, also where two flags exclude each other: `--all-shards` is not
//! refused for a `NSTANCE_SHARD` that stands in the environment for other commands.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs,
    path::Path,
};

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

/// Where flags get their values from.
pub(crate) struct Sources<'a> {
    /// Flags of the command line, as they are typed.
    said: BTreeSet<String>,
    file: &'a BTreeMap<String, String>,
}

impl<'a> Sources<'a> {
    pub(crate) fn new(words: &[OsString], file: &'a BTreeMap<String, String>) -> Self {
        let words = words.iter().skip(1).map(|it| it.to_string_lossy());
        let flags = words.take_while(|it| it != "--").filter(|it| it.starts_with("--"));
        let said = flags.map(|it| it.split('=').next().unwrap_or_default().to_owned()).collect();
        Self { said, file }
    }

    /// Who gives a flag its value. What only says that a switch is off does not stand against anything.
    fn rank(&self, flag: &Flag) -> Rank {
        let variable = std::env::var_os(variable(&flag.long)).filter(|it| !it.is_empty());
        if self.said.contains(&format!("--{}", flag.long)) {
            Rank::Line
        } else if let Some(value) = variable {
            let off = flag.is_switch && is_off(&value.to_string_lossy());
            if off { Rank::None } else { Rank::Variable }
        } else if self.file.get(&flag.long).is_some_and(|it| !(flag.is_switch && is_off(it))) {
            Rank::File
        } else {
            Rank::None
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    None,
    File,
    Variable,
    Line,
}

/// As clap reads a switch's variable.
fn is_off(value: &str) -> bool {
    ["", "n", "no", "f", "false", "off", "0"].contains(&value.to_ascii_lowercase().as_str())
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Flag {
    long: String,
    is_switch: bool,
}

impl Flag {
    fn of(arg: &Arg) -> Option<Self> {
        let is_switch = matches!(arg.get_action(), ArgAction::SetTrue);
        arg.get_long().map(|long| Self { long: long.to_owned(), is_switch })
    }
}

/// The flags that each flag excludes. It is said of one of the two, and holds for both.
fn rivals(command: &Command) -> BTreeMap<Flag, BTreeSet<Flag>> {
    let mut rivals: BTreeMap<Flag, BTreeSet<Flag>> = BTreeMap::new();
    for arg in command.get_arguments() {
        let Some(flag) = Flag::of(arg) else { continue };
        for other in command.get_arg_conflicts_with(arg).into_iter().filter_map(Flag::of) {
            rivals.entry(flag.clone()).or_default().insert(other.clone());
            rivals.entry(other).or_default().insert(flag.clone());
        }
    }
    rivals
}

/// Gives every flag its variable, and the values of the file as defaults, but where a flag that excludes it comes from
/// nearer.
pub(crate) fn apply(command: Command, sources: &Sources<'_>) -> Command {
    let rivals = rivals(&command);
    let command = command.mut_args(|mut arg| {
        let Some(flag) = Flag::of(&arg).filter(|_| !is_own(&arg)) else { return arg };
        let others = rivals.get(&flag).into_iter().flatten();
        let nearest = others.map(|it| sources.rank(it)).max().unwrap_or(Rank::None);
        // A variable that says no is there for clap all the same, which would see two that exclude each other.
        let own = sources.rank(&flag);
        if nearest == Rank::None || nearest < Rank::Line && Rank::Variable <= own {
            arg = arg.env(variable(&flag.long)).hide_env(true);
        }
        if nearest < Rank::Variable
            && let Some(value) = sources.file.get(&flag.long)
        {
            arg = arg.default_value(value.clone()).required(false);
        }
        arg
    });
    command.mut_subcommands(|sub| apply(sub, sources))
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
