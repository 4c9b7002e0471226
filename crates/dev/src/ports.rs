//! Which ports an environment uses.

use std::net::{Ipv4Addr, TcpListener};

use anyhow::bail;
use nstance_rt::entropy::{SystemEntropy, below};

pub(crate) const DEFAULT_BASE: u16 = 8990;

/// The five ports of a server, in the order of their numbers.
pub(crate) const SERVER: [&str; 5] = ["health", "election", "registration", "operator", "agent"];

/// Below the range from which the kernel takes ports for outgoing connections: a port of ours must still be free when
/// its server comes back.
const FREE_FROM: u64 = 12_000;
const FREE_TO: u64 = 32_000;

/// The store is at `base - 1`, the server at `base` and the four after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ports {
    pub(crate) base: u16,
}

impl Ports {
    pub(crate) fn at(base: u16) -> anyhow::Result<Self> {
        match base {
            0 => Self::free(),
            2..=65_531 => Ok(Self { base }),
            _ => bail!("--port-base {base} leaves no room for six ports; use one between 2 and 65531, or 0"),
        }
    }

    /// Six ports in a row that nobody uses now.
    fn free() -> anyhow::Result<Self> {
        let entropy = SystemEntropy::new();
        for _ in 0..200 {
            let base = FREE_FROM + below(&entropy, (FREE_TO - FREE_FROM) / 8) * 8 + 1;
            let ports = Self { base: u16::try_from(base).unwrap_or(DEFAULT_BASE) };
            let all = std::iter::once(ports.store()).chain((0..5).map(|i| ports.server(i)));
            let taken: Result<Vec<TcpListener>, _> =
                all.map(|port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))).collect();
            if taken.is_ok() {
                return Ok(ports);
            }
        }
        bail!("found no six free ports in a row between {FREE_FROM} and {FREE_TO}; name them with --port-base")
    }

    pub(crate) fn store(self) -> u16 {
        self.base - 1
    }

    pub(crate) fn server(self, index: u16) -> u16 {
        self.base + index
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
        let ports = Ports::at(DEFAULT_BASE).unwrap();
        assert_eq!((ports.store(), ports.server(0), ports.server(4)), (8989, 8990, 8994));
        for bad in [1, 65_532] {
            assert!(Ports::at(bad).is_err());
        }
    }

    #[test]
    fn free_ports_are_free() {
        let ports = Ports::at(0).unwrap();
        assert!(12_000 <= ports.store() && ports.server(4) < 32_768);
    }
}
