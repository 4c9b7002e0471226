//! The configuration file: which cluster and tenant, and where the shards are.
//!
//! Strict: every mistake is reported at once, with its line, and a misspelt key with the one that was probably meant.

use std::{fmt, path::Path};

use nstance_client::{Target, Targets};
use nstance_core::ids::{ClusterId, Shard, Tenant};
use nstance_identity::link::Address;
use serde_json::Value;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    pub cluster_id: ClusterId,
    pub tenant: Tenant,
    /// In the order of the file. Where operators register.
    pub registration: Targets,
    /// In the order of the file. Where operators call.
    pub operator: Targets,
}

/// One mistake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// From 1; 0 if it is nowhere.
    pub line: usize,
    /// As `shards.dev-1.operator_addr`.
    pub path: String,
    pub what: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if 0 < self.line {
            write!(f, "line {}: ", self.line)?;
        }
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.what)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("read {file}")]
    Read { file: String, source: std::io::Error },
    #[error("{file} has {}:\n  {}", count(mistakes.len()), mistakes.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n  "))]
    Invalid { file: String, mistakes: Vec<Mistake> },
}

fn count(n: usize) -> String {
    if n == 1 { "a mistake".to_owned() } else { format!("{n} mistakes") }
}

pub fn read(file: &Path) -> Result<Config, ConfigError> {
    let name = file.display().to_string();
    let text = std::fs::read_to_string(file).map_err(|source| ConfigError::Read { file: name.clone(), source })?;
    parse(&text).map_err(|mistakes| ConfigError::Invalid { file: name, mistakes })
}

const TOP: [&str; 3] = ["cluster_id", "tenant", "shards"];
const OF_SHARD: [&str; 2] = ["registration_addr", "operator_addr"];

/// Every key of the file; `*` is the name of a shard.
pub fn keys() -> Vec<String> {
    let of_shard = OF_SHARD.iter().map(|it| format!("shards.*.{it}"));
    TOP.iter().map(|it| (*it).to_owned()).chain(["shards.*".to_owned()]).chain(of_shard).collect()
}

pub fn parse(text: &str) -> Result<Config, Vec<Mistake>> {
    let value: Value = serde_saphyr::from_str(text).map_err(|error| {
        let error = error.without_snippet();
        let line = error.location().and_then(|it| usize::try_from(it.line()).ok()).unwrap_or(0);
        vec![Mistake { line, path: String::new(), what: format!("not YAML: {}", first_line(&error.to_string())) }]
    })?;
    let mut reader = Reader { text, mistakes: Vec::new() };
    let config = reader.config(&value);
    match config {
        Some(config) if reader.mistakes.is_empty() => Ok(config),
        _ => Err(reader.mistakes),
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

struct Reader<'a> {
    text: &'a str,
    mistakes: Vec<Mistake>,
}

impl Reader<'_> {
    fn mistake(&mut self, path: &[&str], what: impl Into<String>) {
        self.mistakes.push(Mistake { line: line_of(self.text, path), path: path.join("."), what: what.into() });
    }

    /// Keys that are not known, with the one that was probably meant.
    fn check_keys(&mut self, path: &[&str], value: &Value, known: &[&str]) {
        for key in value.as_object().into_iter().flat_map(|it| it.keys()) {
            if known.contains(&key.as_str()) {
                continue;
            }
            let near =
                known.iter().min_by_key(|it| distance(it, key)).filter(|it| distance(it, key) <= 1 + it.len() / 3);
            let help = match near {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("known are {}", known.join(", ")),
            };
            self.mistake(&[path, &[key.as_str()]].concat(), format!("unknown key; {help}"));
        }
    }

    fn text_at<'v>(&mut self, path: &[&str], value: &'v Value) -> Option<&'v str> {
        match value {
            Value::String(text) if !text.trim().is_empty() => Some(text.trim()),
            Value::Null => {
                self.mistake(path, "is missing");
                None
            }
            Value::String(_) => {
                self.mistake(path, "is empty");
                None
            }
            other => {
                self.mistake(path, format!("expected text, found {other}; put it into quotes"));
                None
            }
        }
    }

    fn config(&mut self, value: &Value) -> Option<Config> {
        if !value.is_object() {
            self.mistake(&[], format!("expected the keys {}", TOP.join(", ")));
            return None;
        }
        self.check_keys(&[], value, &TOP);
        let cluster_id = self.text_at(&["cluster_id"], &value["cluster_id"]);
        let cluster_id = cluster_id.and_then(|it| it.parse().map_err(|e| self.mistake(&["cluster_id"], say(&e))).ok());
        let tenant = self.text_at(&["tenant"], &value["tenant"]);
        let tenant = tenant.and_then(|it| it.parse().map_err(|e| self.mistake(&["tenant"], say(&e))).ok());
        let (mut registration, mut operator) = (Targets::default(), Targets::default());
        match &value["shards"] {
            Value::Object(shards) if !shards.is_empty() => {
                for (name, shard) in shards {
                    let path = ["shards", name.as_str()];
                    if let Err(error) = name.parse::<Shard>() {
                        self.mistake(&path, say(&error));
                    }
                    if !shard.is_object() {
                        self.mistake(&path, format!("expected the keys {}", OF_SHARD.join(", ")));
                        continue;
                    }
                    self.check_keys(&path, shard, &OF_SHARD);
                    for (key, targets) in [(OF_SHARD[0], &mut registration), (OF_SHARD[1], &mut operator)] {
                        let addresses = self.addresses(&[&path[..], &[key]].concat(), &shard[key]);
                        targets.0.push(Target { shard: name.clone(), addresses });
                    }
                }
            }
            Value::Object(_) | Value::Null => self.mistake(&["shards"], "name at least one shard"),
            _ => self.mistake(&["shards"], "expected shards by name, each with registration_addr and operator_addr"),
        }
        Some(Config { cluster_id: cluster_id?, tenant: tenant?, registration, operator })
    }

    fn addresses(&mut self, path: &[&str], value: &Value) -> Vec<Address> {
        let Some(text) = self.text_at(path, value) else { return Vec::new() };
        let mut addresses = Vec::new();
        for part in text.split(',').map(str::trim) {
            match Address::parse(part) {
                Some(address) => addresses.push(address),
                None => self.mistake(path, format!("`{part}` is not host:port, as in 10.0.0.5:8993")),
            }
        }
        addresses
    }
}

fn say(error: &dyn std::error::Error) -> String {
    error.to_string()
}

/// The line of a key: the first after its parent's that begins with it. The parent's if there is none.
fn line_of(text: &str, path: &[&str]) -> usize {
    let (mut at, mut found) = (0, 0);
    for key in path {
        let is_key = |line: &str| {
            let line = line.trim_start().trim_start_matches(['"', '\'']);
            line.strip_prefix(key)
                .is_some_and(|rest| rest.trim_start_matches(['"', '\'']).trim_start().starts_with(':'))
        };
        match text.lines().enumerate().skip(at).find(|(_, line)| is_key(line)) {
            Some((n, _)) => (at, found) = (n + 1, n + 1),
            None => break,
        }
    }
    found
}

/// How many letters must be changed, added or removed.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let changed = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "\
cluster_id: demo
tenant: default
shards:
  dev-2:
    registration_addr: 127.0.0.1:9002
    operator_addr: 127.0.0.1:9003, [::1]:9003
  dev-1:
    registration_addr: 127.0.0.1:8992
    operator_addr: 127.0.0.1:8993
";

    #[test]
    fn shards_keep_the_order_of_the_file_and_may_have_several_addresses() {
        let config = parse(GOOD).unwrap();
        assert_eq!(config.operator.to_string(), "dev-2=127.0.0.1:9003,dev-2=[::1]:9003,dev-1=127.0.0.1:8993");
        assert_eq!(config.registration.0.len(), 2);
        assert_eq!(config.cluster_id.as_str(), "demo");
    }

    #[test]
    fn every_mistake_is_told_with_its_line_and_a_suggestion() {
        let text = "\
cluster_id: Demo
tennant: default
shards:
  dev-1:
    registration_address: 127.0.0.1:8992
    operator_addr: 127.0.0.1
";
        let mistakes: Vec<String> = parse(text).unwrap_err().iter().map(ToString::to_string).collect();
        let has = |start: &str, part: &str| {
            assert!(mistakes.iter().any(|it| it.starts_with(start) && it.contains(part)), "{start}: {mistakes:#?}");
        };
        has("line 2: tennant: ", "did you mean `tenant`?");
        has("line 1: cluster_id: ", "Demo");
        has("tenant: ", "is missing");
        has("line 5: shards.dev-1.registration_address: ", "did you mean `registration_addr`?");
        has("line 4: shards.dev-1.registration_addr: ", "is missing");
        has("line 6: shards.dev-1.operator_addr: ", "not host:port");
    }

    #[test]
    fn a_file_that_is_no_yaml_is_one_mistake() {
        let mistakes = parse("cluster_id: [\n").unwrap_err();
        assert_eq!(mistakes.len(), 1);
        assert!(mistakes[0].what.starts_with("not YAML"), "{}", mistakes[0]);
        assert!(parse("").is_err() && parse("- a\n").is_err());
        assert!(parse(&GOOD.replace("tenant: default", "tenant: 7")).is_err(), "a number is no name");
    }
}
