//! What the parts of an agent have to say to the server, kept until a report says it.
//!
//! Nothing is queued: each part has one slot, and the newest word wins. Whoever writes makes reports go out; a notice
//! at once, everything else a moment later, so that changes that come together travel together.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nstance_core::time::Mono;
use nstance_proto::v1::{BootReport, HealthReportRequest, ReportKind, TerminationNotice};
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use crate::{health::wire_time, notice::Notice, sample::Samples};

/// Changes that come within this time of each other share a report.
const TOGETHER: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(crate) struct Board {
    slots: Mutex<Slots>,
    written: Notify,
    remarked: Notify,
    samples: Mutex<Samples>,
}

#[derive(Default)]
struct Slots {
    /// Sticky: repeated in every report until the process ends.
    notice: Option<Notice>,
    notice_due: bool,
    /// No report has been made since it came, nor a way to send one been tried for its sake.
    notice_urgent: bool,
    /// No report has been made since it came, nor a connection been tried in haste.
    notice_hasty: bool,
    /// When the next report of changes is due.
    change_due: Option<Instant>,
    boot: Option<BootReport>,
    boot_due: bool,
    /// What is known of the machine's place in its cloud.
    provider: BTreeMap<String, String>,
    /// Since when no server's certificate is trusted.
    untrusted: Option<Mono>,
    /// What is worth telling of the session, in the boot record.
    remark: Option<&'static str>,
    /// How many reports were made, by the number of their kind.
    n_reports: BTreeMap<i32, u64>,
}

impl Board {
    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was measured of the machine.
    pub(crate) fn samples(&self) -> MutexGuard<'_, Samples> {
        self.samples.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says that the machine goes. Advice does not take the place of an order, nor the stop of the agent that of the
    /// machine.
    pub(crate) fn set_notice(&self, notice: Notice) {
        let mut slots = self.slots();
        if slots.notice.as_ref().is_some_and(|old| notice.action.weight() < old.action.weight()) {
            return;
        }
        slots.notice = Some(notice);
        slots.notice_due = true;
        (slots.notice_urgent, slots.notice_hasty) = (true, true);
        drop(slots);
        self.written.notify_one();
    }

    pub(crate) fn notice(&self) -> Option<Notice> {
        self.slots().notice.clone()
    }

    /// Something a report shows has changed: files, keys, addresses.
    pub(crate) fn changed(&self) {
        let mut slots = self.slots();
        slots.change_due.get_or_insert_with(|| Instant::now() + TOGETHER);
        drop(slots);
        self.written.notify_one();
    }

    pub(crate) fn set_boot(&self, boot: BootReport) {
        let mut slots = self.slots();
        slots.boot = Some(boot);
        slots.boot_due = true;
        drop(slots);
        self.changed();
    }

    /// Whether the last round found only servers whose certificates are not trusted.
    pub(crate) fn set_untrusted(&self, untrusted: bool, now: Mono) {
        let mut slots = self.slots();
        slots.untrusted = untrusted.then(|| slots.untrusted.unwrap_or(now));
    }

    pub(crate) fn untrusted_since(&self) -> Option<Mono> {
        self.slots().untrusted
    }

    /// Says in the session's stage of the boot record what is worth telling of it; `None` if there is nothing any more.
    pub(crate) fn set_remark(&self, remark: Option<&'static str>) {
        if std::mem::replace(&mut self.slots().remark, remark) != remark {
            self.remarked.notify_one();
        }
    }

    /// Takes back this remark, if it is the one that stands.
    pub(crate) fn drop_remark(&self, remark: &'static str) {
        if self.remark() == Some(remark) {
            self.set_remark(None);
        }
    }

    pub(crate) fn remark(&self) -> Option<&'static str> {
        self.slots().remark
    }

    pub(crate) async fn remarked(&self) {
        self.remarked.notified().await;
    }

    pub(crate) fn boot(&self) -> Option<BootReport> {
        self.slots().boot.clone()
    }

    pub(crate) fn n_reports(&self, kind: ReportKind) -> u64 {
        self.slots().n_reports.get(&kind.into()).copied().unwrap_or(0)
    }

    pub(crate) fn provider_fact(&self, name: &str) -> Option<String> {
        self.slots().provider.get(name).cloned()
    }

    pub(crate) fn set_provider(&self, facts: BTreeMap<String, String>) {
        let mut slots = self.slots();
        if slots.provider == facts {
            return;
        }
        slots.provider = facts;
        drop(slots);
        self.changed();
    }

    /// Waits for a notice that is worth a connection out of turn. Once for each: a server that is not there is not
    /// hammered for its sake.
    pub(crate) async fn urgent(&self) {
        while !std::mem::take(&mut self.slots().notice_urgent) {
            self.written.notified().await;
        }
    }

    /// Whether there is a notice that is worth a connection in haste. Once for each, too.
    pub(crate) fn take_haste(&self) -> bool {
        let mut slots = self.slots();
        let hasty = std::mem::take(&mut slots.notice_hasty);
        slots.notice_urgent &= !hasty;
        hasty
    }

    /// Waits until a report should go out of turn.
    pub(crate) async fn due(&self) -> ReportKind {
        loop {
            let change_due = {
                let slots = self.slots();
                if slots.notice_due {
                    return ReportKind::Notice;
                }
                slots.change_due
            };
            match change_due {
                None => self.written.notified().await,
                Some(at) => tokio::select! {
                    biased;
                    () = self.written.notified() => {}
                    () = sleep_until(at) => return ReportKind::Change,
                },
            }
        }
    }

    /// Puts what there is into a report, which is on its way then.
    pub(crate) fn fill(&self, report: &mut HealthReportRequest) {
        let mut slots = self.slots();
        slots.notice_due = false;
        (slots.notice_urgent, slots.notice_hasty) = (false, false);
        slots.change_due = None;
        *slots.n_reports.entry(report.kind).or_default() += 1;
        report.termination_notice = slots.notice.as_ref().map(|notice| TerminationNotice {
            action: notice.action.as_str().to_owned(),
            deadline: notice.deadline.map(wire_time),
            detected_at: Some(wire_time(notice.detected_at)),
            notice_id: notice.id.clone(),
        });
        // The first report of a stream says all: what went out on the last one may not have arrived.
        if std::mem::take(&mut slots.boot_due) || report.kind() == ReportKind::First {
            report.boot.clone_from(&slots.boot);
        }
        self.samples().fill(report);
        report.provider_facts = slots.provider.clone().into_iter().collect();
    }
}

#[cfg(test)]
mod tests {
    use nstance_core::time::Timestamp;

    use super::*;
    use crate::notice::Action;

    fn notice(action: Action) -> Notice {
        Notice { action, deadline: None, detected_at: Timestamp::from_millis(1), id: action.as_str().to_owned() }
    }

    fn told(board: &Board) -> Option<String> {
        let mut report = HealthReportRequest::default();
        board.fill(&mut report);
        report.termination_notice.map(|notice| notice.action)
    }

    #[tokio::test(start_paused = true)]
    async fn changes_that_come_together_share_a_report_and_a_notice_does_not_wait() {
        let board = Board::default();
        let began = Instant::now();
        board.changed();
        tokio::time::advance(Duration::from_millis(60)).await;
        board.changed();
        assert_eq!(board.due().await, ReportKind::Change);
        assert_eq!(began.elapsed(), TOGETHER);
        assert_eq!(told(&board), None);
        board.changed();
        board.set_notice(notice(Action::Terminate));
        assert_eq!(board.due().await, ReportKind::Notice);
        assert_eq!(began.elapsed(), TOGETHER);
        assert_eq!(told(&board).as_deref(), Some("terminate"));
        assert!(tokio::time::timeout(Duration::from_secs(60), board.due()).await.is_err(), "all is said");
    }

    #[test]
    fn weaker_notice_does_not_replace_a_stronger_one() {
        let board = Board::default();
        for (given, expected) in [
            (Action::Rebalance, "rebalance"),
            (Action::Terminate, "terminate"),
            (Action::Shutdown, "terminate"),
            (Action::Maintenance, "terminate"),
            (Action::Preempt, "preempt"),
        ] {
            board.set_notice(notice(given));
            assert_eq!(told(&board).as_deref(), Some(expected), "{given:?}");
        }
    }

    #[test]
    fn black_box_is_told_once_per_stream_and_when_it_changes() {
        let board = Board::default();
        let has_box = |kind: ReportKind| {
            let mut report = HealthReportRequest { kind: kind.into(), ..Default::default() };
            board.fill(&mut report);
            report.boot.is_some()
        };
        assert!(!has_box(ReportKind::First));
        board.set_boot(BootReport::default());
        assert!(has_box(ReportKind::Change));
        assert!(!has_box(ReportKind::Periodic));
        assert!(has_box(ReportKind::First));
    }
}
