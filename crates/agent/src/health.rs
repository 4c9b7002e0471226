//! Health reports: what is in them, and when the next one is due.

use std::time::Duration;

use nstance_core::{ports::clock::Entropy, time::Timestamp};
use nstance_proto::v1::{HealthReportRequest, ReportKind};
use nstance_rt::entropy::jitter;

use crate::{context::Context, files, machine};

/// Of the report's form.
const PROTOCOL_VERSION: &str = "1";

pub const AGENT_VERSION: &str = env!("CARGO_PKG_VERSION");

/// Makes the reports of one process: they are numbered through, over all its sessions.
pub(crate) struct Reports {
    interval: Duration,
    started: Timestamp,
    count: i64,
}

impl Reports {
    pub(crate) fn new(ctx: &Context) -> Self {
        Self { interval: ctx.settings.metrics_interval, started: ctx.now(), count: 0 }
    }

    pub(crate) fn make(&mut self, ctx: &Context, kind: ReportKind) -> HealthReportRequest {
        self.count += 1;
        let addresses = ctx.addresses();
        let first = kind == ReportKind::First;
        let mut report = HealthReportRequest {
            version: PROTOCOL_VERSION.to_owned(),
            instance_id: ctx.settings.instance.to_string(),
            timestamp: Some(wire_time(ctx.now())),
            count: self.count,
            started: Some(wire_time(self.started)),
            uptime: format!("{}s", machine::uptime().as_secs()),
            files: files::status(ctx).into_iter().collect(),
            config_hash: ctx.dir.config_hash().unwrap_or_default(),
            batch_id: ctx.files.batch().clone(),
            kind: kind.into(),
            interval_ms: u32::try_from(self.interval.as_millis()).unwrap_or(u32::MAX),
            machine: first.then(machine::facts),
            agent_version: AGENT_VERSION.to_owned(),
            session_id: ctx.session_id.clone(),
            private_ipv4: addresses.ipv4,
            private_ipv6: addresses.ipv6,
            hostname: addresses.hostname,
            fqdn: addresses.fqdn,
            ..Default::default()
        };
        ctx.board.fill(&mut report);
        report
    }

    /// The wait before the next periodic report: the interval, ten per cent more or less, so that a fleet does not
    /// report in step. `None` if there are none.
    pub(crate) fn pause(&self, entropy: &dyn Entropy) -> Option<Duration> {
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
    use nstance_rt::entropy::SeededEntropy;

    use super::*;
    use crate::notice::{Action, Notice};

    fn make(ctx: &Context, reports: &mut Reports, kind: ReportKind) -> HealthReportRequest {
        reports.make(ctx, kind)
    }

    #[test]
    fn reports_are_counted_and_only_the_first_describes_the_machine() {
        let (_outer, ctx) = Context::for_tests(&[]);
        let mut reports = Reports::new(&ctx);
        let first = make(&ctx, &mut reports, ReportKind::First);
        let second = make(&ctx, &mut reports, ReportKind::Periodic);
        assert_eq!((first.count, second.count), (1, 2));
        assert!(first.machine.is_some() && second.machine.is_none());
        assert_eq!(first.started, second.started);
        assert_eq!(first.interval_ms, 60_000);
        assert_eq!(first.kind(), ReportKind::First);
    }

    #[test]
    fn missing_hash_does_not_suppress_a_report_and_a_new_one_is_told() {
        let (_outer, ctx) = Context::for_tests(&[]);
        let mut reports = Reports::new(&ctx);
        assert_eq!(make(&ctx, &mut reports, ReportKind::First).config_hash, "");
        ctx.dir.write_config_hash("sha256:00").unwrap();
        assert_eq!(make(&ctx, &mut reports, ReportKind::Periodic).config_hash, "sha256:00");
    }

    #[test]
    fn notice_is_repeated_in_every_report() {
        let (_outer, ctx) = Context::for_tests(&[]);
        let mut reports = Reports::new(&ctx);
        let notice = Notice { action: Action::Shutdown, deadline: None, detected_at: ctx.now(), id: "n1".into() };
        ctx.board.set_notice(notice);
        for kind in [ReportKind::Notice, ReportKind::First, ReportKind::Periodic] {
            let told = make(&ctx, &mut reports, kind).termination_notice.unwrap();
            assert_eq!((told.action.as_str(), told.notice_id.as_str()), ("shutdown", "n1"));
        }
    }

    #[test]
    fn pauses_spread_around_the_interval() {
        let (_outer, ctx) = Context::for_tests(&[]);
        let reports = Reports::new(&ctx);
        let dice = SeededEntropy::new(1);
        let pauses: Vec<_> = (0..500).map(|_| reports.pause(&dice).unwrap()).collect();
        assert!(pauses.iter().all(|it| (Duration::from_secs(54)..=Duration::from_secs(66)).contains(it)));
        assert!(pauses.iter().any(|it| *it < Duration::from_secs(55)));
        assert!(pauses.iter().any(|it| Duration::from_secs(65) < *it));
        let (_outer, ctx) = Context::for_tests(&[("METRICS_INTERVAL", "0")]);
        assert_eq!(Reports::new(&ctx).pause(&dice), None);
    }
}
