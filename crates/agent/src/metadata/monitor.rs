//! How the watch over the cloud's notices fares. A watch that fails silently is worse than none, because somebody
//! counts on it: so its state is in every report.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use nstance_rt::chain::Chain;

use super::service::Trouble;
use crate::board::Board;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MonitorState {
    /// There is nothing to watch here, or nobody wants it watched.
    Off,
    /// It is not known which cloud this is, or its metadata service has not said anything about notices yet.
    Unknown,
    Ok,
    /// It works, but the service hands out no tokens: anything on this machine that can be made to fetch an address
    /// can read the metadata too.
    Tokenless,
    /// Some of what should be asked does not get a usable answer.
    Failing,
}

impl MonitorState {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Unknown => "unknown",
            Self::Ok => "ok",
            Self::Tokenless => "tokenless",
            Self::Failing => "failing",
        }
    }
}

/// What is known of the machine's place in its cloud; nothing where it is not known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) provider: Option<&'static str>,
    pub(crate) spot: Option<bool>,
    pub(crate) zone: Option<String>,
}

#[derive(Debug, Default)]
pub(crate) struct Monitor(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    place: Place,
    watches: bool,
    tokenless: bool,
    /// What is asked regularly, and whether the last answer was of use.
    sources: BTreeMap<&'static str, bool>,
    n_errors: u64,
}

impl Inner {
    fn state(&self) -> MonitorState {
        if !self.watches {
            MonitorState::Off
        } else if self.sources.is_empty() {
            MonitorState::Unknown
        } else if self.sources.values().any(|good| !good) {
            MonitorState::Failing
        } else if self.tokenless {
            MonitorState::Tokenless
        } else {
            MonitorState::Ok
        }
    }

    fn publish(&self, board: &Board) {
        let facts = [
            ("provider", self.place.provider.map(str::to_owned)),
            ("spot", self.place.spot.map(|spot| spot.to_string())),
            ("zone", self.place.zone.clone()),
            ("spot_monitor", Some(self.state().as_str().to_owned())),
        ];
        board.set_provider(facts.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect());
    }
}

impl Monitor {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg_attr(not(test), allow(dead_code, reason = "for the local listener's metrics"))]
    pub(crate) fn state(&self) -> MonitorState {
        self.inner().state()
    }

    /// Answers that were of no use, and calls that got none, since the start.
    #[cfg_attr(not(test), allow(dead_code, reason = "for the local listener's metrics"))]
    pub(crate) fn n_errors(&self) -> u64 {
        self.inner().n_errors
    }

    /// Nothing will be watched.
    pub(crate) fn stay_off(&self, board: &Board, provider: Option<&'static str>) {
        let mut inner = self.inner();
        inner.place.provider = provider;
        inner.publish(board);
    }

    /// Something will be watched, here as far as known.
    pub(crate) fn begin(&self, board: &Board, place: Place) {
        let mut inner = self.inner();
        inner.watches = true;
        inner.place = place;
        inner.publish(board);
    }

    pub(crate) fn set_tokenless(&self, board: &Board, tokenless: bool) {
        let mut inner = self.inner();
        if inner.tokenless != tokenless {
            if tokenless {
                tracing::warn!("this machine's metadata service gives no tokens; asking without, as anybody could");
            }
            inner.tokenless = tokenless;
            inner.publish(board);
        }
    }

    pub(crate) fn set_spot(&self, board: &Board, spot: bool) {
        let mut inner = self.inner();
        inner.place.spot = Some(spot);
        inner.publish(board);
    }

    /// A call failed before the watch began.
    pub(crate) fn count(&self) {
        self.inner().n_errors += 1;
    }

    /// One of the sources was asked. Told in the log when it changes, for a service may be away for days.
    pub(crate) fn heard<T>(&self, board: &Board, source: &'static str, answer: &Result<T, Trouble>) {
        let mut inner = self.inner();
        let good = answer.is_ok();
        let before = inner.sources.insert(source, good);
        if let Err(error) = answer {
            inner.n_errors += 1;
            if before != Some(false) {
                tracing::warn!(source, error = %Chain(error), "metadata of no use; asking on");
            }
        } else if before == Some(false) {
            tracing::info!(source, "metadata of use again");
        }
        if before != Some(good) {
            inner.publish(board);
        }
    }
}

#[cfg(test)]
mod tests {
    use nstance_proto::v1::HealthReportRequest;

    use super::*;

    fn told(board: &Board) -> BTreeMap<String, String> {
        let mut report = HealthReportRequest::default();
        board.fill(&mut report);
        report.provider_facts.into_iter().collect()
    }

    #[test]
    fn one_failing_source_is_shown_and_every_error_is_counted() {
        let (monitor, board) = (Monitor::default(), Board::default());
        let bad = || Err::<(), _>(Trouble::Status { path: "/x".into(), status: 500 });
        monitor.begin(&board, Place { provider: Some("aws"), spot: Some(true), zone: None });
        assert_eq!(monitor.state(), MonitorState::Unknown);
        monitor.heard(&board, "action", &Ok(()));
        assert_eq!((monitor.state(), told(&board)["spot_monitor"].as_str()), (MonitorState::Ok, "ok"));
        for _ in 0..3 {
            monitor.heard(&board, "rebalance", &bad());
            monitor.heard(&board, "action", &Ok(()));
            assert_eq!(told(&board)["spot_monitor"], "failing");
        }
        assert_eq!(monitor.n_errors(), 3);
        monitor.heard(&board, "rebalance", &Ok(()));
        monitor.set_tokenless(&board, true);
        let facts = [("provider", "aws"), ("spot", "true"), ("spot_monitor", "tokenless")];
        assert_eq!(told(&board), facts.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
    }

    #[test]
    fn watch_that_is_not_wanted_is_off_and_not_unknown() {
        let (monitor, board) = (Monitor::default(), Board::default());
        monitor.stay_off(&board, Some("none"));
        assert_eq!((told(&board)["provider"].as_str(), told(&board)["spot_monitor"].as_str()), ("none", "off"));
    }
}
