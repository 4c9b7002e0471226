//! Which shards there are and at which addresses their leaders may listen.

use std::{fmt, str::FromStr};

use nstance_core::ids::Shard;
use nstance_identity::link::Address;

/// One shard and the addresses of the servers that may lead it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub shard: String,
    /// All are tried at the same time; only a leader accepts connections.
    pub addresses: Vec<Address>,
}

/// All shards of a cluster: `shard=host:port[,shard=host:port...]`. A shard with several addresses is listed several times.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Targets(pub Vec<Target>);

/// A list of shards that could not be parsed. The message names the part that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParseTargetsError(String);

impl FromStr for Targets {
    type Err = ParseTargetsError;

    fn from_str(text: &str) -> Result<Self, ParseTargetsError> {
        let mut targets: Vec<Target> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (shard, address) = part.split_once('=').ok_or_else(|| {
                ParseTargetsError(format!("`{part}`: expected shard=host:port, as in dev-1=10.0.0.5:8993"))
            })?;
            let shard: Shard = shard.trim().parse().map_err(|error| ParseTargetsError(format!("`{part}`: {error}")))?;
            let address = Address::parse(address.trim()).ok_or_else(|| {
                ParseTargetsError(format!("`{part}`: expected host:port after the `=`, as in 10.0.0.5:8993"))
            })?;
            match targets.iter_mut().find(|it| it.shard == shard.as_str()) {
                Some(target) => target.addresses.push(address),
                None => targets.push(Target { shard: shard.as_str().to_owned(), addresses: vec![address] }),
            }
        }
        if targets.is_empty() {
            return Err(ParseTargetsError("expected shard=host:port, as in dev-1=10.0.0.5:8993".to_owned()));
        }
        Ok(Self(targets))
    }
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs = self.0.iter().flat_map(|it| it.addresses.iter().map(|address| format!("{}={address}", it.shard)));
        f.write_str(&pairs.collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_parsed_and_displayed_in_the_same_form() {
        let text = "dev-1=127.0.0.1:8993,dev-2=[::1]:9003,dev-1=leader.example.com:8993";
        let targets: Targets = text.parse().unwrap();
        assert_eq!(targets.0.len(), 2);
        assert_eq!(targets.0[0].addresses.len(), 2);
        assert_eq!(targets.to_string(), "dev-1=127.0.0.1:8993,dev-1=leader.example.com:8993,dev-2=[::1]:9003");
    }

    #[test]
    fn a_parse_error_names_the_part_that_is_wrong() {
        for (text, part) in
            [("", "shard=host:port"), ("dev-1", "`dev-1`"), ("a=b:0", "`a=b:0`"), ("A b=c:1", "`A b=c:1`")]
        {
            let error = text.parse::<Targets>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
