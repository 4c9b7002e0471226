//! Health reports: what is in them, and when the next one is due.

use std::{sync::Arc, time::Duration};

use nstance_core::{
    ids::InstanceId,
    ports::clock::{Clock, Entropy},
    time::Timestamp,
};
use nstance_proto::v1::{HealthReportRequest, ReportKind, TerminationNotice};
use nstance_rt::entropy::jitter;

use crate::{identity_dir::IdentityDir, machine, machine::Addresses, notice::Notice};

/// Of the report's form.
const PROTOCOL_VERSION: &str = "1";

pub const AGENT_VERSION: &str = env!("CARGO_PKG_VERSION");

/// Makes the reports of one process: they are numbered through, over all its sessions.
pub struct Reports {
    clock: Arc<dyn Clock>,
    dir: IdentityDir,
    instance: InstanceId,
    interval: Duration,
    session_id: String,
    started: Timestamp,
    count: i64,
    /// Sticky: repeated in every report until the process ends.
    notice: Option<Notice>,
}

impl Reports {
    pub fn new(
        clock: Arc<dyn Clock>,
        dir: IdentityDir,
        instance: InstanceId,
        interval: Duration,
        session_id: String,
    ) -> Self {
        let started = clock.now();
        Self { clock, dir, instance, interval, session_id, started, count: 0, notice: None }
    }

    pub fn set_notice(&mut self, notice: Notice) {
        self.notice = Some(notice);
    }

    pub fn make(&mut self, kind: ReportKind, addresses: &Addresses) -> HealthReportRequest {
        self.count += 1;
        let first = kind == ReportKind::First;
        HealthReportRequest {
            version: PROTOCOL_VERSION.to_owned(),
            instance_id: self.instance.to_string(),
            timestamp: Some(wire_time(self.clock.now())),
            count: self.count,
            started: Some(wire_time(self.started)),
            uptime: format!("{}s", machine::uptime().as_secs()),
            termination_notice: self.notice.as_ref().map(|notice| TerminationNotice {
                action: notice.action.as_str().to_owned(),
                deadline: notice.deadline.map(wire_time),
                detected_at: Some(wire_time(notice.detected_at)),
                notice_id: notice.id.clone(),
            }),
            config_hash: self.dir.config_hash().unwrap_or_default(),
            kind: kind.into(),
            interval_ms: u32::try_from(self.interval.as_millis()).unwrap_or(u32::MAX),
            machine: first.then(machine::facts),
            agent_version: AGENT_VERSION.to_owned(),
            session_id: self.session_id.clone(),
            private_ipv4: addresses.ipv4.clone(),
            private_ipv6: addresses.ipv6.clone(),
            hostname: addresses.hostname.clone(),
            fqdn: addresses.fqdn.clone(),
            ..Default::default()
        }
    }

    /// The wait before the next periodic report: the interval, ten per cent more or less, so that a fleet does not
    /// report in step. `None` if there are none.
    pub fn pause(&self, entropy: &dyn Entropy) -> Option<Duration> {
        (!self.interval.is_zero()).then(|| self.interval * 9 / 10 + jitter(entropy, self.interval / 5))
    }
}

pub(crate) fn wire_time(at: Timestamp) -> prost_types::Timestamp {
    let millis = at.as_millis();
    prost_types::Timestamp {
        seconds: millis.div_euclid(1000),
        nanos: i32::try_from(millis.rem_euclid(1000) * 1_000_000).expect("less than a second of nanoseconds"),
    }
}

#[cfg(test)]
mod tests {
    use nstance_rt::{clock::SystemClock, entropy::SeededEntropy};

    use super::*;
    use crate::{notice::Action, settings::Directory};

    fn reports(interval: Duration) -> (tempfile::TempDir, Reports) {
        let outer = tempfile::tempdir().unwrap();
        let dir = IdentityDir::new(&Directory { path: outer.path().to_owned(), file_mode: 0o600, group: None });
        let id = "knc06bgm7733st2576nx5jht4ecjw".parse().unwrap();
        (outer, Reports::new(Arc::new(SystemClock), dir, id, interval, "s".into()))
    }

    #[test]
    fn reports_are_counted_and_only_the_first_describes_the_machine() {
        let (_outer, mut reports) = reports(Duration::from_secs(60));
        let first = reports.make(ReportKind::First, &Addresses::default());
        let second = reports.make(ReportKind::Periodic, &Addresses::default());
        assert_eq!((first.count, second.count), (1, 2));
        assert!(first.machine.is_some() && second.machine.is_none());
        assert_eq!(first.started, second.started);
        assert_eq!(first.interval_ms, 60_000);
        assert_eq!(first.kind(), ReportKind::First);
    }

    #[test]
    fn missing_hash_does_not_suppress_a_report_and_a_new_one_is_told() {
        let (_outer, mut reports) = reports(Duration::from_secs(60));
        assert_eq!(reports.make(ReportKind::First, &Addresses::default()).config_hash, "");
        reports.dir.write_config_hash("sha256:00").unwrap();
        assert_eq!(reports.make(ReportKind::Periodic, &Addresses::default()).config_hash, "sha256:00");
    }

    #[test]
    fn notice_is_repeated_in_every_report() {
        let (_outer, mut reports) = reports(Duration::from_secs(60));
        let detected_at = reports.clock.now();
        reports.set_notice(Notice { action: Action::Shutdown, deadline: None, detected_at, id: "n1".into() });
        for kind in [ReportKind::Notice, ReportKind::First, ReportKind::Periodic] {
            let told = reports.make(kind, &Addresses::default()).termination_notice.unwrap();
            assert_eq!((told.action.as_str(), told.notice_id.as_str()), ("shutdown", "n1"));
        }
    }

    #[test]
    fn pauses_spread_around_the_interval() {
        let (_outer, reports_) = reports(Duration::from_secs(60));
        let dice = SeededEntropy::new(1);
        let pauses: Vec<_> = (0..500).map(|_| reports_.pause(&dice).unwrap()).collect();
        assert!(pauses.iter().all(|it| (Duration::from_secs(54)..=Duration::from_secs(66)).contains(it)));
        assert!(pauses.iter().any(|it| *it < Duration::from_secs(55)));
        assert!(pauses.iter().any(|it| Duration::from_secs(65) < *it));
        assert_eq!(reports(Duration::ZERO).1.pause(&dice), None);
    }
}
