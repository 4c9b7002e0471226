//! Where an event stands in its shard's history.

use std::fmt;

/// A leader's epoch, and a number in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position(u64, u64);

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.0, self.1)
    }
}

impl Position {
    /// Before everything that the leader of an epoch tells.
    pub(crate) fn beginning(epoch: u64) -> Self {
        Self(epoch, 0)
    }

    pub(crate) fn parse(token: &str) -> Option<Self> {
        let (epoch, number) = token.split_once('-')?;
        Some(Self(epoch.parse().ok()?, number.parse().ok()?))
    }

    pub(crate) fn epoch(self) -> u64 {
        self.0
    }

    /// How many events lie between this one and a later one. Those of another leader cannot be counted.
    pub(crate) fn n_between(self, later: Self) -> u64 {
        if self.0 == later.0 { later.1.saturating_sub(self.1).saturating_sub(1) } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_ordered_and_gaps_counted() {
        let at = |text: &str| Position::parse(text).unwrap();
        assert!(at("1-9") < at("2-1") && at("2-1") < at("2-10"));
        assert_eq!(at("2-1").n_between(at("2-2")), 0);
        assert_eq!(at("2-1").n_between(at("2-5")), 3);
        assert_eq!(at("1-1").n_between(at("2-5")), 0);
        assert_eq!(Position::parse("x-1"), None);
    }
}
