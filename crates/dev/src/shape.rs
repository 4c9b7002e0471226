//! How large an environment is: which shards, which servers, and which of those are whose.
//!
//! Server `n` belongs to shard `(n - 1) mod shards + 1`: the first servers lead one shard each, further ones stand by.

use nstance_core::ids::Shard;
use serde::{Deserialize, Serialize};

/// So many servers fit below the ports that links leave to them, and far more than one machine runs well.
pub(crate) const MOST_SERVERS: u16 = 64;

/// Ports between one server and the next.
pub(crate) const STRIDE: u16 = 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub(crate) shards: u16,
    pub(crate) servers_per_shard: u16,
    /// Agents and operators reach a shard's leader through a relay of `up`.
    pub(crate) links: bool,
}

/// Where one server stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// From 1.
    pub(crate) number: u16,
    pub(crate) shard: Shard,
    /// Added to the ports of the shard's config.
    pub(crate) port_offset: u16,
}

impl Place {
    pub(crate) fn name(&self) -> String {
        format!("server-{}", self.number)
    }
}

/// The `number`th shard, from 1.
pub(crate) fn shard(number: u16) -> Shard {
    format!("dev-{number}").parse().expect("a well-formed shard, whatever its number")
}

impl Shape {
    pub(crate) fn new(shards: u16, servers_per_shard: u16, links: bool) -> anyhow::Result<Self> {
        let n_servers = u32::from(shards) * u32::from(servers_per_shard);
        if n_servers == 0 || u32::from(MOST_SERVERS) < n_servers {
            anyhow::bail!(
                "{shards} shards of {servers_per_shard} servers are {n_servers} servers; there can be 1 to {MOST_SERVERS}"
            );
        }
        // Several servers cannot all have the one address that is told to agents.
        Ok(Self { shards, servers_per_shard, links: links || 1 < servers_per_shard })
    }

    pub(crate) fn n_servers(self) -> u16 {
        self.shards * self.servers_per_shard
    }

    pub(crate) fn shards(self) -> impl Iterator<Item = Shard> {
        (1..=self.shards).map(shard)
    }

    /// In the order of their numbers.
    pub(crate) fn places(self) -> impl Iterator<Item = Place> {
        (0..self.n_servers()).map(move |index| Place {
            number: index + 1,
            shard: shard(index % self.shards + 1),
            port_offset: index / self.shards * self.shards * STRIDE,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_servers_have_a_shard_each_and_the_others_stand_by() {
        let shape = Shape::new(2, 2, false).unwrap();
        assert!(shape.links);
        let places: Vec<(String, String, u16)> =
            shape.places().map(|it| (it.name(), it.shard.to_string(), it.port_offset)).collect();
        let expected =
            [("server-1", "dev-1", 0), ("server-2", "dev-2", 0), ("server-3", "dev-1", 20), ("server-4", "dev-2", 20)];
        assert_eq!(places, expected.map(|(name, shard, offset)| (name.to_owned(), shard.to_owned(), offset)));
        assert!(!Shape::new(1, 1, false).unwrap().links);
        for (shards, servers) in [(0, 1), (1, 0), (33, 2)] {
            assert!(Shape::new(shards, servers, false).is_err());
        }
    }
}
