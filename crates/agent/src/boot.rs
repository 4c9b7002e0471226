//! The black box: when a machine never joins, it says why, without anybody logging in.
//!
//! It is opened at the first start of the agent in a boot, filled by looking at the machine, kept in `boot.json`, and
//! told in reports whenever it changes. A failed boot is told on the console too, for there may be no network. The box
//! closes once the boot is finished, and an hour after it was opened at the latest.

use std::{convert::Infallible, io::Write as _, path::Path, time::Duration};

use nstance_core::time::{Mono, Timestamp};
use nstance_proto::v1::{BootReport, BootStage, LogTail};
use nstance_rt::chain::Chain;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::{
    context::{Context, State},
    disk::Access,
    health::wire_time,
};

mod redact;

mod logs;

pub mod spool;

mod look;

mod stages;

use spool::Spool;
use stages::{Failure, Look, NETWORK, Progress, Stage, StageState, Timeline};

/// Between two looks, while the box is open.
const LOOK: Duration = Duration::from_secs(2);

const FILE: &str = "boot.json";

pub(crate) async fn watch(ctx: &Context) -> Infallible {
    let mut states = ctx.control.state();
    let mut black_box = ctx.parts.host.is_somewhere().then(|| BlackBox::open(ctx));
    let mut told = black_box.as_ref().and_then(|it| it.timeline.failure.clone());
    loop {
        let failure = match &mut black_box {
            Some(black_box) => black_box.look(ctx).await,
            None => None,
        };
        // A closed box, or none, still has a voice: whoever is parked needs a person.
        let parked = match &*states.borrow_and_update() {
            State::Parked(why) => Some(Failure::parked(why)),
            _ => None,
        };
        let failure = failure.or(parked);
        if let Some(failure) = &failure
            && ctx.parts.console
            && told.as_ref() != Some(failure)
        {
            let stages = black_box.as_ref().map(|it| it.timeline.stages.as_slice()).unwrap_or_default();
            tell_console(ctx, failure, stages);
        }
        told = failure;
        let pause = async {
            match &black_box {
                Some(black_box) if !black_box.timeline.closed => sleep(LOOK).await,
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            changed = states.changed() => if changed.is_err() { return std::future::pending().await },
            () = ctx.board.remarked() => {}
            () = pause => {}
        }
    }
}

/// One line, without the logs: consoles are slow and keep little.
fn tell_console(ctx: &Context, failure: &Failure, stages: &[Stage]) {
    let line = json!({
        "failed": true,
        "instance": ctx.settings.instance.to_string(),
        "stage": failure.stage,
        "reason": failure.reason,
        "stages": stages.iter().map(stage_json).collect::<Vec<_>>(),
    });
    // Nobody may be listening any more, and that is no reason to stop.
    let _ = writeln!(std::io::stderr(), "nstance-boot: {line}");
}

struct BlackBox {
    boot_id: String,
    opened: Mono,
    timeline: Timeline,
    logs: Vec<LogTail>,
    spool: Spool,
    /// Whether the last write went well: a disk that is full is complained of once.
    writable: bool,
}

impl BlackBox {
    /// The box of this boot, as an earlier start of the agent left it, or a new one.
    fn open(ctx: &Context) -> Self {
        let identity = &ctx.settings.identity.path;
        let boot_id = ctx.parts.host.boot_id();
        let now = ctx.parts.clock.monotonic();
        let kept = read(identity).filter(|kept| kept.boot_id == boot_id && !boot_id.is_empty());
        let spool = Spool::new(identity, &boot_id);
        let (timeline, logs) = (Timeline::default(), Vec::new());
        let mut black_box = Self { boot_id, opened: now, timeline, logs, spool, writable: true };
        if let Some(kept) = kept {
            black_box.opened = kept.opened.min(now);
            (black_box.timeline, black_box.logs) = (kept.timeline, kept.logs);
            ctx.board.set_boot(black_box.report());
        }
        black_box
    }

    /// Looks, and tells what has changed. Returns the failure that stands.
    async fn look(&mut self, ctx: &Context) -> Option<Failure> {
        let (host, settings) = (&ctx.parts.host, &ctx.settings);
        let progress = progress(ctx, &self.timeline);
        let before = self.timeline.clone();
        let open = !before.closed;
        let look = Look {
            now: ctx.now(),
            age: ctx.parts.clock.monotonic().since(self.opened),
            kernel: look::kernel(host).filter(|_| open),
            progress,
            files: look::files(&settings.identity.path),
            bare: look::is_bare(&[&settings.keys.path, &settings.recv.path]),
            cloud_init: look::cloud_init(host),
            sentinel: look::since(&settings.boot_sentinel),
            error_file: settings.boot_error_file.as_deref().and_then(look::reason),
            kubelet: if open { look::kubelet(host).await } else { None },
            words: self.spool.words(),
        };
        self.timeline.take(&look, settings.boot_timeout);
        if self.timeline != before {
            if self.timeline.failure.is_none() {
                self.logs.clear();
            } else if self.timeline.failure != before.failure {
                self.logs = logs::collect(host, &settings.boot_logs);
            }
            self.keep(ctx);
            ctx.board.set_boot(self.report());
        }
        self.timeline.failure.clone().filter(|_| open)
    }

    fn keep(&mut self, ctx: &Context) {
        let path = ctx.settings.identity.path.join(FILE);
        let written = ctx.parts.disk.write(&path, self.to_json().to_string().as_bytes(), Access::mode(0o600));
        if let Err(error) = &written
            && self.writable
        {
            tracing::warn!(path = %path.display(), error = %Chain(error), "boot record not written");
        }
        self.writable = written.is_ok();
    }

    fn report(&self) -> BootReport {
        BootReport {
            stages: self.timeline.stages.iter().map(wire_stage).collect(),
            failed: self.timeline.failure.is_some(),
            reason: self.timeline.failure.as_ref().map(|failure| failure.reason.clone()).unwrap_or_default(),
            logs: self.logs.clone(),
        }
    }

    fn to_json(&self) -> Value {
        json!({
            "boot_id": self.boot_id,
            "opened_ms": u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX),
            "finished": self.timeline.finished,
            "closed": self.timeline.closed,
            "failed": self.timeline.failure.is_some(),
            "stage": self.timeline.failure.as_ref().map(|failure| &failure.stage),
            "reason": self.timeline.failure.as_ref().map(|failure| &failure.reason),
            "stages": self.timeline.stages.iter().map(stage_json).collect::<Vec<_>>(),
            "logs": self.logs.iter().map(|log| json!({ "name": log.name, "text": log.text })).collect::<Vec<_>>(),
        })
    }
}

/// How far the agent has come. What was reached once in this boot stays reached.
fn progress(ctx: &Context, timeline: &Timeline) -> Progress {
    let state = ctx.control.state().borrow().clone();
    Progress {
        started: state != State::Starting,
        routed: timeline.is_done(NETWORK) || look::routed(&ctx.parts.host),
        registered: matches!(state, State::Connecting | State::Serving | State::Rejoining | State::Dismissed),
        session: state == State::Serving,
        untrusted: ctx.board.untrusted_since().map(|since| ctx.parts.clock.monotonic().since(since)),
        remark: ctx.board.remark(),
        parked: match state {
            State::Parked(why) => Some(why),
            _ => None,
        },
    }
}

fn wire_stage(stage: &Stage) -> BootStage {
    BootStage {
        name: stage.name.clone(),
        state: stage.state.as_str().to_owned(),
        started: Some(wire_time(stage.started)),
        ended: stage.ended.map(wire_time),
        detail: stage.detail.clone(),
    }
}

fn stage_json(stage: &Stage) -> Value {
    let mut value = json!({
        "name": stage.name,
        "state": stage.state.as_str(),
        "started": stage.started.to_string(),
    });
    if let Some(ended) = stage.ended {
        value["ended"] = ended.to_string().into();
    }
    if !stage.detail.is_empty() {
        value["detail"] = stage.detail.as_str().into();
    }
    value
}

/// What `boot.json` holds.
struct Kept {
    boot_id: String,
    opened: Mono,
    timeline: Timeline,
    logs: Vec<LogTail>,
}

/// Reads `boot.json`; one that does not make sense is as good as none.
fn read(identity: &Path) -> Option<Kept> {
    let value: Value = serde_json::from_slice(&std::fs::read(identity.join(FILE)).ok()?).ok()?;
    let text = |of: &Value, name: &str| of.get(name).and_then(Value::as_str).map(str::to_owned);
    let flag = |name: &str| value.get(name).and_then(Value::as_bool).unwrap_or(false);
    let stage = |of: &Value| {
        let time = |name: &str| text(of, name).and_then(|it| it.parse::<Timestamp>().ok());
        Some(Stage {
            name: text(of, "name")?,
            state: StageState::parse(&text(of, "state")?)?,
            started: time("started")?,
            ended: time("ended"),
            detail: text(of, "detail").unwrap_or_default(),
        })
    };
    let log = |of: &Value| Some(LogTail { name: text(of, "name")?, text: text(of, "text")? });
    let failure = text(&value, "stage").zip(text(&value, "reason"));
    Some(Kept {
        boot_id: text(&value, "boot_id")?,
        opened: Mono::from_start(Duration::from_millis(value.get("opened_ms")?.as_u64()?)),
        timeline: Timeline {
            stages: value.get("stages")?.as_array()?.iter().map(stage).collect::<Option<_>>()?,
            finished: flag("finished"),
            failure: failure.map(|(stage, reason)| Failure { stage, reason }),
            closed: flag("closed"),
            files_from: Duration::ZERO,
        },
        logs: value.get("logs")?.as_array()?.iter().map(log).collect::<Option<_>>()?,
    })
}

impl Failure {
    fn parked(why: &str) -> Self {
        Self { stage: stages::REGISTERED.to_owned(), reason: redact::redact(why) }
    }
}
