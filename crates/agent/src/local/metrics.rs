//! What `/metrics` shows, in the text form of Prometheus. Labels are closed sets, but for stages that scripts name.

use std::{fmt::Write as _, fs, path::Path};

use nstance_identity::peer::Peer;
use nstance_proto::v1::{BootStage, ReportKind};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};

use super::Course;
use crate::{
    context::{Context, State},
    enrol::from_wire,
    notice::Action,
};

const ACTIONS: [Action; 8] = [
    Action::Terminate,
    Action::Stop,
    Action::Hibernate,
    Action::Preempt,
    Action::Rebalance,
    Action::Maintenance,
    Action::Shutdown,
    Action::Leave,
];

/// The text being made.
struct Page(String);

impl Page {
    fn about(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = write!(self.0, "# HELP nstance_agent_{name} {help}\n# TYPE nstance_agent_{name} {kind}\n");
    }

    fn value(&mut self, name: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.0, "nstance_agent_{name} {value}");
    }

    fn labelled(&mut self, name: &str, label: &str, of: &str, value: impl std::fmt::Display) {
        let _ = write!(self.0, "nstance_agent_{name}{{{label}=\"");
        for c in of.chars() {
            let _ = match c {
                '"' => self.0.write_str("\\\""),
                '\\' => self.0.write_str("\\\\"),
                '\n' => self.0.write_str("\\n"),
                other => self.0.write_char(other),
            };
        }
        let _ = writeln!(self.0, "\"}} {value}");
    }
}

pub(super) fn text(ctx: &Context, course: &Course) -> String {
    let mut page = Page(String::with_capacity(4096));
    page.about("state", "gauge", "Where the agent is in its life: 1 for the state it is in.");
    for state in State::NAMES {
        page.labelled("state", "state", state, u8::from(state == course.state.as_str()));
    }
    page.about("connected", "gauge", "Whether there is a session.");
    page.value("connected", u8::from(course.state == State::Serving));
    page.about("reconnects_total", "counter", "Sessions that were lost and looked for again.");
    page.value("reconnects_total", course.n_reconnects);
    page.about("reports_total", "counter", "Health reports made, by cause.");
    for kind in [ReportKind::First, ReportKind::Periodic, ReportKind::Notice, ReportKind::Change] {
        let cause = kind.as_str_name().to_ascii_lowercase();
        page.labelled("reports_total", "cause", &cause, ctx.board.n_reports(kind));
    }
    page.about("notice", "gauge", "Whether the machine, or the agent, is about to go.");
    let notice = ctx.board.notice().map(|notice| notice.action);
    for action in ACTIONS {
        page.labelled("notice", "action", action.as_str(), u8::from(notice == Some(action)));
    }
    if let Some(left) = certificate_life(ctx) {
        page.about("cert_expiry_seconds", "gauge", "Until the certificate expires; negative once it has.");
        page.value("cert_expiry_seconds", left);
    }
    page.about("files", "gauge", "Received files, and files that could not be received.");
    page.labelled("files", "state", "ok", n_files(&ctx.settings.recv.path));
    page.labelled("files", "state", "error", n_files(&ctx.settings.recv.path.join("errors")));
    if let Some(state) = ctx.board.provider_fact("spot_monitor") {
        page.about("spot_monitor", "gauge", "What is known of the cloud's notices: 1 for the state the monitor is in.");
        page.labelled("spot_monitor", "state", &state, 1);
    }
    let stages = ctx.board.boot().map(|boot| boot.stages).unwrap_or_default();
    if !stages.is_empty() {
        page.about("boot_stage_seconds", "gauge", "How long each stage of the boot took, or takes so far.");
        for stage in &stages {
            page.labelled("boot_stage_seconds", "stage", &stage.name, length(ctx, stage));
        }
    }
    if let Some(bytes) = resident() {
        page.about("process_resident_bytes", "gauge", "Memory the agent holds.");
        page.value("process_resident_bytes", bytes);
    }
    page.0
}

#[allow(clippy::cast_precision_loss, reason = "lives of certificates fit a double")]
fn certificate_life(ctx: &Context) -> Option<f64> {
    let chain = ctx.dir.certificate().ok()??;
    let peer = Peer::from_der(&CertificateDer::from_pem_slice(&chain).ok()?).ok()?;
    Some(peer.not_after.as_millis().saturating_sub(ctx.now().as_millis()) as f64 / 1000.0)
}

fn n_files(directory: &Path) -> usize {
    let Ok(entries) = fs::read_dir(directory) else { return 0 };
    let counts = |entry: &fs::DirEntry| {
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        !hidden && entry.file_type().is_ok_and(|kind| kind.is_file())
    };
    entries.filter_map(Result::ok).filter(counts).count()
}

fn length(ctx: &Context, stage: &BootStage) -> f64 {
    let started = stage.started.as_ref().map_or_else(|| ctx.now(), from_wire);
    let ended = stage.ended.as_ref().map_or_else(|| ctx.now(), from_wire);
    ended.since(started).as_secs_f64()
}

/// Of this process, from the kernel.
fn resident() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let kib: u64 =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse().ok())?;
    Some(kib.saturating_mul(1024))
}
