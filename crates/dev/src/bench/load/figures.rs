//! What was measured, as a table, as JSON, and held against limits.

use std::{fmt, str::FromStr, time::Duration};

use serde::Serialize;

use super::super::failover::quantile;
use crate::table::columns;

/// How long a number of replacements took to begin.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Spread {
    /// How many were struck at one moment.
    pub(super) at_once: usize,
    pub(super) samples: usize,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) max_ms: f64,
}

impl Spread {
    pub(super) fn of(at_once: usize, mut times: Vec<Duration>) -> Self {
        times.sort();
        let at = |share| quantile(&times, share).as_secs_f64() * 1000.0;
        Self { at_once, samples: times.len(), p50_ms: at(0.5), p99_ms: at(0.99), max_ms: at(1.0) }
    }
}

/// One run with so many agents.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub(super) struct Figures {
    pub(super) agents: usize,
    pub(super) groups: usize,
    pub(super) scale_up_s: f64,
    pub(super) creates_per_s: f64,
    pub(super) register_s: f64,
    pub(super) registrations_per_s: f64,
    pub(super) connect_s: f64,
    pub(super) furnish_s: f64,
    pub(super) registrations_put_off: u64,
    pub(super) rss_empty_mib: f64,
    pub(super) rss_mib: f64,
    pub(super) rss_peak_mib: f64,
    pub(super) rss_per_agent_kib: f64,
    pub(super) reports_per_s: f64,
    pub(super) reports_sent: u64,
    pub(super) reports_missed: u64,
    pub(super) cpu_percent: f64,
    pub(super) flood_reports_per_s: f64,
    pub(super) cpu_ms_per_1000_reports: f64,
    pub(super) store_requests_per_hour: f64,
    pub(super) certificates_per_s: f64,
    pub(super) losses: Vec<Spread>,
    pub(super) notices: Vec<Spread>,
    pub(super) cold_start_s: f64,
    pub(super) sessions_reopened: u64,
    /// Processor time that others took while we measured, of all there was.
    pub(super) others_percent: f64,
}

impl Figures {
    /// Label, value, digits after the point.
    fn rows(&self) -> Vec<(String, f64, usize)> {
        let row = |label: &str, value, digits| (label.to_owned(), value, digits);
        #[expect(clippy::cast_precision_loss, reason = "counts of a bench are small")]
        let n = |it: u64| it as f64;
        let mut rows = vec![
            row("scale-up, 0 to all create calls, s", self.scale_up_s, 2),
            row("  create calls per second", self.creates_per_s, 0),
            row("storm: all registered, s", self.register_s, 2),
            row("  registrations per second", self.registrations_per_s, 0),
            row("  put off by the server's limits", n(self.registrations_put_off), 0),
            row("  all sessions open, s", self.connect_s, 2),
            row("  all files delivered, s", self.furnish_s, 2),
            row("server memory (RSS), MiB", self.rss_mib, 1),
            row("  before the first instance, MiB", self.rss_empty_mib, 1),
            row("  highest so far, MiB", self.rss_peak_mib, 1),
            row("  share of one agent, KiB", self.rss_per_agent_kib, 1),
            row("reports per second, as told", self.reports_per_s, 0),
            row("  server CPU meanwhile, % of a core", self.cpu_percent, 1),
            row("  reports missed", n(self.reports_missed), 0),
            row("reports per second, flood", self.flood_reports_per_s, 0),
            row("  server CPU per 1,000 reports, ms", self.cpu_ms_per_1000_reports, 1),
            row("store requests per hour, idle", self.store_requests_per_hour, 0),
            row("certificates per second, renewals", self.certificates_per_s, 0),
        ];
        for (what, spreads) in [("lost", &self.losses), ("notices", &self.notices)] {
            for it in spreads {
                let label = format!("{} {what} at once: create call after, p50 ms", it.at_once);
                rows.push((label, it.p50_ms, 2));
                rows.push(row("  p99, ms", it.p99_ms, 2));
                rows.push(row("  max, ms", it.max_ms, 2));
            }
        }
        rows.push(row("cold start with all records, s", self.cold_start_s, 2));
        rows.push(row("sessions that had to be opened anew", n(self.sessions_reopened), 0));
        rows.push(row("taken by other processes, % of all CPU", self.others_percent, 0));
        rows
    }
}

/// A column for each run, and one for how much more each is than the one before it.
pub(super) fn table(runs: &[Figures]) -> Vec<String> {
    let mut head = vec!["AGENTS".to_owned()];
    head.extend(runs.iter().map(|it| it.agents.to_string()));
    head.extend(runs.windows(2).map(|pair| format!("{}/{}", pair[1].agents, pair[0].agents)));
    let all: Vec<Vec<(String, f64, usize)>> = runs.iter().map(Figures::rows).collect();
    let labels = all.iter().max_by_key(|it| it.len()).map(|it| it.iter().map(|(label, ..)| label.clone()));
    let mut rows = vec![head];
    let mut group = String::new();
    for label in labels.into_iter().flatten() {
        // A label that is set in belongs to the one above it; small runs lack some groups.
        if !label.starts_with(' ') {
            group.clone_from(&label);
        }
        let found: Vec<Option<(f64, usize)>> = all
            .iter()
            .map(|run| {
                let mut inside = run.iter().skip_while(|(it, ..)| *it != group);
                inside.find(|(it, ..)| *it == label).map(|(_, value, digits)| (*value, *digits))
            })
            .collect();
        let value =
            |it: &Option<(f64, usize)>| it.map_or_else(|| "-".to_owned(), |(it, digits)| format!("{it:.digits$}"));
        let mut cells = vec![label];
        cells.extend(found.iter().map(value));
        cells.extend(found.windows(2).map(|pair| growth(pair[0].map(|it| it.0), pair[1].map(|it| it.0))));
        rows.push(cells);
    }
    let right: Vec<usize> = (1..rows[0].len()).collect();
    columns(&rows, &right)
}

fn growth(from: Option<f64>, to: Option<f64>) -> String {
    match (from, to) {
        (Some(from), Some(to)) if 0.0 < from => format!("x{:.2}", to / from),
        _ => "-".to_owned(),
    }
}

/// `3`, for every run, or `1000=3`, for the one with so many agents.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Limit {
    agents: Option<usize>,
    most: f64,
}

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = |_| format!("{text:?} is neither a number nor AGENTS=NUMBER, as in 1000=3");
        let number = |text: &str| {
            text.parse::<f64>().map_err(|_| ()).and_then(|it| if it.is_finite() { Ok(it) } else { Err(()) })
        };
        match text.split_once('=') {
            Some((agents, most)) => {
                let agents = agents.parse().map_err(|_| ()).map_err(form)?;
                Ok(Self { agents: Some(agents), most: number(most).map_err(form)? })
            }
            None => Ok(Self { agents: None, most: number(text).map_err(form)? }),
        }
    }
}

/// What may be asked of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Measure {
    Register,
    Rss,
    /// Of single losses.
    Replacement,
    /// Of the most notices at once.
    Notice,
    ColdStart,
    Missed,
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Register => "seconds until all were registered",
            Self::Rss => "MiB of server memory",
            Self::Replacement => "ms, p99, from a single loss to the create call",
            Self::Notice => "ms, p99, from the most notices at once to the create calls",
            Self::ColdStart => "seconds of a cold start",
            Self::Missed => "missed reports",
        })
    }
}

impl Measure {
    /// `None` if this run did not measure it.
    fn of(self, run: &Figures) -> Option<f64> {
        #[expect(clippy::cast_precision_loss, reason = "counts of a bench are small")]
        Some(match self {
            Self::Register => run.register_s,
            Self::Rss => run.rss_mib,
            Self::Replacement => run.losses.iter().find(|it| it.at_once == 1)?.p99_ms,
            Self::Notice => run.notices.iter().max_by_key(|it| it.at_once)?.p99_ms,
            Self::ColdStart => run.cold_start_s,
            Self::Missed => run.reports_missed as f64,
        })
    }
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Limits(Vec<(Measure, Limit)>);

impl Limits {
    pub(super) fn add(&mut self, measure: Measure, limits: &[Limit]) {
        self.0.extend(limits.iter().map(|limit| (measure, *limit)));
    }

    /// What is promised on two processors.
    pub(super) fn promised() -> Self {
        let at = |agents, most| Limit { agents: Some(agents), most };
        let mut limits = Self::default();
        limits.add(Measure::Register, &[at(1000, 3.0)]);
        limits.add(Measure::Rss, &[at(10_000, 400.0)]);
        limits.add(Measure::Replacement, &[at(1000, 5.0), at(10_000, 20.0)]);
        limits.add(Measure::Notice, &[at(1000, 10.0)]);
        limits.add(Measure::ColdStart, &[at(10_000, 3.0)]);
        limits.add(Measure::Missed, &[Limit { agents: None, most: 0.0 }]);
        limits
    }

    /// A line for each limit that a run is above.
    pub(super) fn missed(&self, runs: &[Figures]) -> Vec<String> {
        let mut lines = Vec::new();
        for (measure, limit) in &self.0 {
            for run in runs.iter().filter(|run| limit.agents.is_none_or(|it| it == run.agents)) {
                match measure.of(run) {
                    Some(found) if limit.most < found => {
                        lines.push(format!("{} agents: {found:.2} {measure}, at most {}", run.agents, limit.most));
                    }
                    Some(_) => {}
                    None => lines.push(format!("{} agents: {measure}: not measured", run.agents)),
                }
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(agents: usize, register_s: f64) -> Figures {
        let times = |n: u64| (1..=n).map(Duration::from_millis).collect();
        Figures {
            agents,
            register_s,
            losses: vec![Spread::of(1, times(100)), Spread::of(10, times(20))],
            ..Figures::default()
        }
    }

    #[test]
    fn a_spread_holds_times_that_were_measured() {
        let spread = Spread::of(1, [30, 10, 20].map(Duration::from_millis).to_vec());
        assert_eq!((spread.p50_ms, spread.p99_ms, spread.max_ms, spread.samples), (20.0, 30.0, 30.0, 3));
        assert_eq!(Spread::of(1, Vec::new()).max_ms, 0.0);
    }

    #[test]
    fn a_table_shows_each_run_and_how_figures_grow() {
        let small = Figures { losses: vec![Spread::of(1, vec![Duration::from_millis(2)])], ..run(10, 0.5) };
        let lines = table(&[small, run(20, 1.25)]);
        let line = |label: &str| lines.iter().find(|it| it.starts_with(label)).unwrap();
        let cells = |label: &str| line(label)[label.len()..].split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(cells("AGENTS"), ["10", "20", "20/10"]);
        assert_eq!(cells("storm: all registered, s"), ["0.50", "1.25", "x2.50"]);
        assert_eq!(cells("1 lost at once: create call after, p50 ms"), ["2.00", "50.00", "x25.00"]);
        assert_eq!(cells("10 lost at once: create call after, p50 ms"), ["-", "10.00", "-"], "not of the small run");
        assert_eq!(cells("cold start with all records, s"), ["0.00", "0.00", "-"]);
    }

    #[test]
    fn limits_are_for_all_runs_or_for_one() {
        let mut limits = Limits::default();
        limits.add(Measure::Register, &["1".parse().unwrap(), "20=1.2".parse().unwrap()]);
        limits.add(Measure::Replacement, &["10=98".parse().unwrap()]);
        limits.add(Measure::Notice, &["20=5".parse().unwrap()]);
        let missed = limits.missed(&[run(10, 0.5), run(20, 1.25)]);
        assert_eq!(
            missed,
            [
                "20 agents: 1.25 seconds until all were registered, at most 1",
                "20 agents: 1.25 seconds until all were registered, at most 1.2",
                "10 agents: 99.00 ms, p99, from a single loss to the create call, at most 98",
                "20 agents: ms, p99, from the most notices at once to the create calls: not measured",
            ]
        );
        assert_eq!(limits.missed(&[]), Vec::<String>::new());
    }

    #[test]
    fn limits_that_are_no_numbers_are_refused() {
        for bad in ["", "x", "1000=", "=3", "a=3", "1000=NaN", "inf"] {
            assert!(bad.parse::<Limit>().is_err(), "{bad}");
        }
    }

    #[test]
    fn promises_are_kept_by_a_run_within_them() {
        let times = |ms| vec![Duration::from_millis(ms)];
        let kept = Figures {
            notices: vec![Spread::of(50, times(10))],
            losses: vec![Spread::of(1, times(5))],
            ..run(1000, 3.0)
        };
        assert_eq!(Limits::promised().missed(std::slice::from_ref(&kept)), Vec::<String>::new());
        let broken = Figures { reports_missed: 1, ..kept };
        assert_eq!(Limits::promised().missed(&[broken]), ["1000 agents: 1.00 missed reports, at most 0"]);
    }
}
