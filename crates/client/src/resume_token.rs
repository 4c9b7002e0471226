//! Where an event stands in its shard's history.

use std::fmt;

/// The epoch of the leader that reported the event, and a number within that epoch. Tokens are ordered; those of different
/// epochs cannot be counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ResumeToken {
    epoch: u64,
    number: u64,
}

impl fmt::Display for ResumeToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.epoch, self.number)
    }
}

impl ResumeToken {
    /// Before everything that the leader of this epoch reports.
    pub fn start_of_epoch(epoch: u64) -> Self {
        Self { epoch, number: 0 }
    }

    pub fn parse(token: &str) -> Option<Self> {
        let (epoch, number) = token.split_once('-')?;
        Some(Self { epoch: epoch.parse().ok()?, number: number.parse().ok()? })
    }

    pub fn epoch(self) -> u64 {
        self.epoch
    }

    /// How many events lie between this one and a later one: 0 if they are of different epochs.
    pub fn n_between(self, later: Self) -> u64 {
        if self.epoch == later.epoch { later.number.saturating_sub(self.number).saturating_sub(1) } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_ordered_and_gaps_counted() {
        let at = |text: &str| ResumeToken::parse(text).unwrap();
        assert!(at("1-9") < at("2-1") && at("2-1") < at("2-10"));
        assert_eq!(at("2-1").n_between(at("2-2")), 0);
        assert_eq!(at("2-1").n_between(at("2-5")), 3);
        assert_eq!(at("1-1").n_between(at("2-5")), 0);
        assert_eq!(ResumeToken::parse("x-1"), None);
    }
}
