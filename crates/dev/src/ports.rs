//! Which ports an environment uses.

use std::net::{Ipv4Addr, TcpListener};

use anyhow::bail;
use nstance_rt::entropy::{SystemEntropy, below};

use crate::shape::{STRIDE, Shape};

pub(crate) const DEFAULT_BASE: u16 = 8990;

/// The five ports of a server, in the order of their numbers.
pub(crate) const SERVER: [&str; 5] = ["health", "election", "registration", "operator", "agent"];

/// Between the ports of the first server and those of the second, where an environment has ports of its own.
const K8S_ABOVE: u16 = 5;
const PROBES_ABOVE: u16 = 6;
const METRICS_ABOVE: u16 = 7;

/// How many of them are a server's own; the others are those of whoever leads.
const OWN: u16 = 2;

/// Where links take the leader's ports, servers have theirs so much higher.
const BEHIND_LINKS: u16 = 1000;

/// Below the range from which the kernel takes ports for outgoing connections: a port of ours must still be free when
/// its server comes back.
const FREE_FROM: u64 = 12_000;
const FREE_TO: u64 = 31_000;

/// The store is at `base - 1`, the first server at `base` and the four after it, each further one ten above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ports {
    pub(crate) base: u16,
    links: bool,
}

impl Ports {
    pub(crate) fn at(base: u16, shape: Shape) -> anyhow::Result<Self> {
        let highest = u16::MAX - BEHIND_LINKS - shape.n_servers() * STRIDE;
        match base {
            0 => Self::free(shape),
            2.. if base <= highest => Ok(Self { base, links: shape.links }),
            _ => bail!("--port-base {base} leaves no room for all ports; use one between 2 and {highest}, or 0"),
        }
    }

    /// Ports in their rows that nobody uses now.
    fn free(shape: Shape) -> anyhow::Result<Self> {
        let entropy = SystemEntropy::new();
        for _ in 0..200 {
            let base = FREE_FROM + below(&entropy, (FREE_TO - FREE_FROM) / 8) * 8 + 1;
            let ports = Self { base: u16::try_from(base).unwrap_or(DEFAULT_BASE), links: shape.links };
            let taken: Result<Vec<TcpListener>, _> =
                ports.all(shape).map(|port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))).collect();
            if taken.is_ok() {
                return Ok(ports);
            }
        }
        bail!("found no free ports in rows between {FREE_FROM} and {FREE_TO}; name them with --port-base")
    }

    /// All ports of an environment that nobody gave others, and whose they are.
    pub(crate) fn usual(shape: Shape) -> Vec<(u16, String)> {
        let ports = Self { base: DEFAULT_BASE, links: shape.links };
        let mut all = vec![(ports.store(), "dev-s3".to_owned())];
        for n in 1..=shape.n_servers() {
            let of_server =
                (0..).zip(SERVER).map(|(index, name)| (ports.bound(n, index), format!("server-{n} ({name})")));
            all.extend(of_server);
        }
        all.push((ports.kubernetes(), "dev-k8s".to_owned()));
        all.extend([
            (ports.probes(), "operator (probes)".to_owned()),
            (ports.metrics(), "operator (metrics)".to_owned()),
        ]);
        all
    }

    fn all(self, shape: Shape) -> impl Iterator<Item = u16> {
        let of_servers = (1..=shape.n_servers()).flat_map(move |n| (0..5).map(move |index| self.bound(n, index)));
        let of_links = (1..=shape.shards).filter(move |_| self.links);
        let of_links = of_links.flat_map(move |n| (OWN..5).map(move |index| self.told(n, index)));
        [self.store(), self.kubernetes(), self.probes(), self.metrics()].into_iter().chain(of_servers).chain(of_links)
    }

    pub(crate) fn store(self) -> u16 {
        self.base - 1
    }

    /// The API server for development.
    pub(crate) fn kubernetes(self) -> u16 {
        self.usual_or(6443, K8S_ABOVE)
    }

    /// The operator's.
    pub(crate) fn probes(self) -> u16 {
        self.usual_or(8081, PROBES_ABOVE)
    }

    /// The operator's.
    pub(crate) fn metrics(self) -> u16 {
        self.usual_or(8082, METRICS_ABOVE)
    }

    fn usual_or(self, usual: u16, above: u16) -> u16 {
        if self.base == DEFAULT_BASE { usual } else { self.base + above }
    }

    /// What the `index`th port of the `number`th server is told as.
    pub(crate) fn told(self, number: u16, index: u16) -> u16 {
        self.base + STRIDE * (number - 1) + index
    }

    /// What it binds.
    pub(crate) fn bound(self, number: u16, index: u16) -> u16 {
        self.told(number, index) + if self.links && OWN <= index { BEHIND_LINKS } else { 0 }
    }
}

/// Whether somebody listens there already.
pub(crate) fn is_taken(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_those_of_the_documentation_by_default() {
        let alone = Shape::new(1, 1, false).unwrap();
        let ports = Ports::at(DEFAULT_BASE, alone).unwrap();
        assert_eq!((ports.store(), ports.bound(1, 0), ports.bound(1, 4)), (8989, 8990, 8994));
        assert_eq!((ports.kubernetes(), ports.probes(), ports.metrics()), (6443, 8081, 8082));
        let others = Ports::at(4000, alone).unwrap();
        assert_eq!((others.kubernetes(), others.probes(), others.metrics()), (4005, 4006, 4007));
        for bad in [1, 65_532] {
            assert!(Ports::at(bad, alone).is_err());
        }
    }

    #[test]
    fn with_links_servers_leave_the_ports_that_are_told_to_agents() {
        let ports = Ports::at(DEFAULT_BASE, Shape::new(2, 2, false).unwrap()).unwrap();
        assert_eq!([ports.told(2, 0), ports.told(2, 2), ports.told(2, 4)], [9000, 9002, 9004]);
        assert_eq!([ports.bound(2, 0), ports.bound(2, 1), ports.bound(2, 2)], [9000, 9001, 10_002]);
        let all: Vec<u16> = ports.all(Shape::new(2, 2, false).unwrap()).collect();
        let distinct: std::collections::BTreeSet<u16> = all.iter().copied().collect();
        assert_eq!((all.len(), distinct.len()), (30, 30));
    }

    #[test]
    fn free_ports_are_free() {
        let ports = Ports::at(0, Shape::new(2, 2, false).unwrap()).unwrap();
        assert!(12_000 <= ports.store() && ports.bound(4, 4) < 32_768);
    }
}
