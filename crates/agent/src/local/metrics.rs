//! What `/metrics` shows, in the text form of Prometheus. Labels are closed sets, but for stages that scripts name.
//!
//! [`Figures`] is what there is to show, apart from how it is written.

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

/// What there is to show. What is absent has no line.
#[derive(Debug, Clone)]
pub(super) struct Figures {
    state: State,
    n_reconnects: u64,
    n_reports: [u64; KINDS.len()],
    notice: Option<Action>,
    /// Seconds until the certificate expires.
    certificate_life: Option<f64>,
    n_files: usize,
    n_file_errors: usize,
    spot_monitor: Option<String>,
    /// Name and seconds.
    boot_stages: Vec<(String, f64)>,
    resident: Option<u64>,
}

const KINDS: [ReportKind; 4] = [ReportKind::First, ReportKind::Periodic, ReportKind::Notice, ReportKind::Change];

impl Figures {
    pub(super) fn of(ctx: &Context, course: &Course) -> Self {
        let stages = ctx.board.boot().map(|boot| boot.stages).unwrap_or_default();
        Self {
            state: course.state.clone(),
            n_reconnects: course.n_reconnects,
            n_reports: KINDS.map(|kind| ctx.board.n_reports(kind)),
            notice: ctx.board.notice().map(|notice| notice.action),
            certificate_life: certificate_life(ctx),
            n_files: n_files(&ctx.settings.recv.path),
            n_file_errors: n_files(&ctx.settings.recv.path.join("errors")),
            spot_monitor: ctx.board.provider_fact("spot_monitor"),
            boot_stages: stages.iter().map(|stage| (stage.name.clone(), length(ctx, stage))).collect(),
            resident: resident(),
        }
    }

    /// With something under every name.
    pub(super) fn example() -> Self {
        Self {
            state: State::Serving,
            n_reconnects: 1,
            n_reports: [1; KINDS.len()],
            notice: Some(Action::Preempt),
            certificate_life: Some(60.0),
            n_files: 1,
            n_file_errors: 1,
            spot_monitor: Some("ok".to_owned()),
            boot_stages: vec![("kernel".to_owned(), 2.5)],
            resident: Some(1024),
        }
    }

    pub(super) fn text(&self) -> String {
        let mut page = Page(String::with_capacity(4096));
        page.about("state", "gauge", "Where the agent is in its life: 1 for the state it is in.");
        for state in State::NAMES {
            page.labelled("state", "state", state, u8::from(state == self.state.as_str()));
        }
        page.about("connected", "gauge", "Whether there is a session.");
        page.value("connected", u8::from(self.state == State::Serving));
        page.about("reconnects_total", "counter", "Sessions that were lost and looked for again.");
        page.value("reconnects_total", self.n_reconnects);
        page.about("reports_total", "counter", "Health reports made, by cause.");
        for (kind, n) in KINDS.iter().zip(self.n_reports) {
            let cause = kind.as_str_name().to_ascii_lowercase();
            page.labelled("reports_total", "cause", &cause, n);
        }
        page.about("notice", "gauge", "Whether the machine, or the agent, is about to go.");
        for action in Action::ALL {
            page.labelled("notice", "action", action.as_str(), u8::from(self.notice == Some(*action)));
        }
        if let Some(left) = self.certificate_life {
            page.about("cert_expiry_seconds", "gauge", "Until the certificate expires; negative once it has.");
            page.value("cert_expiry_seconds", left);
        }
        page.about("files", "gauge", "Received files, and files that could not be received.");
        page.labelled("files", "state", "ok", self.n_files);
        page.labelled("files", "state", "error", self.n_file_errors);
        if let Some(state) = &self.spot_monitor {
            let help = "What is known of the cloud's notices: 1 for the state the monitor is in.";
            page.about("spot_monitor", "gauge", help);
            page.labelled("spot_monitor", "state", state, 1);
        }
        if !self.boot_stages.is_empty() {
            page.about("boot_stage_seconds", "gauge", "How long each stage of the boot took, or takes so far.");
            for (stage, seconds) in &self.boot_stages {
                page.labelled("boot_stage_seconds", "stage", stage, seconds);
            }
        }
        if let Some(bytes) = self.resident {
            page.about("process_resident_bytes", "gauge", "Memory the agent holds.");
            page.value("process_resident_bytes", bytes);
        }
        page.0
    }
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
