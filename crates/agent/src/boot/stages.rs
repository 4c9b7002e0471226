//! The timeline of a boot, and the verdict over it. Pure: it is shown what there is, and remembers when.
//!
//! Everything is judged by levels, not by events: a look that comes late, or twice, or after a restart of the agent,
//! finds the same timeline. Only times are remembered.

use std::time::Duration;

use nstance_core::time::Timestamp;

use super::{
    redact::redact,
    spool::{Said, Word, cut},
};
use crate::session::CLOCK;

/// The box closes that long after it was opened, whatever became of the boot.
pub(crate) const MAX_AGE: Duration = Duration::from_secs(3600);

/// A server whose certificate was not trusted for this long is told as a failed stage.
const UNTRUSTED_LIMIT: Duration = Duration::from_secs(600);

/// A machine that was asked for no key and sent no file in this time gets none: its template has no files.
const FILES_PATIENCE: Duration = Duration::from_secs(300);

/// More stages than a person reads. Scripts that name more get the rest unrecorded.
const MAX_USER_STAGES: usize = 64;

pub(crate) const KERNEL: &str = "kernel";
pub(crate) const AGENT: &str = "agent";
pub(crate) const NETWORK: &str = "network";
pub(crate) const REGISTERED: &str = "registered";
pub(crate) const SESSION: &str = "session";
pub(crate) const FILES: &str = "files";
pub(crate) const CLOUD_INIT: &str = "cloud-init";
pub(crate) const BOOTSTRAP: &str = "bootstrap";
pub(crate) const KUBELET: &str = "kubelet";
pub(crate) const READY: &str = "ready";
const USER: &str = "user:";

/// In the order they are told.
const ORDER: [&str; 11] =
    [KERNEL, AGENT, NETWORK, REGISTERED, SESSION, FILES, CLOUD_INIT, BOOTSTRAP, KUBELET, USER, READY];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StageState {
    Running,
    Done,
    Failed,
    Stalled,
}

impl StageState {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Stalled => "stalled",
        }
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        [Self::Running, Self::Done, Self::Failed, Self::Stalled].into_iter().find(|state| state.as_str() == text)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stage {
    pub(crate) name: String,
    pub(crate) state: StageState,
    pub(crate) started: Timestamp,
    pub(crate) ended: Option<Timestamp>,
    pub(crate) detail: String,
}

/// What cloud-init says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum CloudInit {
    #[default]
    Absent,
    Running(String),
    Done,
    Failed(String),
}

/// How far the agent itself has come.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Progress {
    /// Its settings and directories are good.
    pub(crate) started: bool,
    pub(crate) routed: bool,
    pub(crate) registered: bool,
    pub(crate) session: bool,
    pub(crate) parked: Option<String>,
    /// For how long no server's certificate has been trusted.
    pub(crate) untrusted: Option<Duration>,
    /// What is worth telling about the session.
    pub(crate) remark: Option<&'static str>,
}

/// One look at the machine.
#[derive(Debug, Clone)]
pub(crate) struct Look<'a> {
    pub(crate) now: Timestamp,
    /// Of the box.
    pub(crate) age: Duration,
    pub(crate) kernel: Option<Timestamp>,
    pub(crate) progress: Progress,
    /// When the first batch of files was committed.
    pub(crate) files: Option<Timestamp>,
    /// Neither a key nor a file lies there, so that none may be meant to come.
    pub(crate) bare: bool,
    pub(crate) cloud_init: CloudInit,
    pub(crate) sentinel: Option<Timestamp>,
    pub(crate) error_file: Option<String>,
    /// Whether it is well; `None` if this machine has none.
    pub(crate) kubelet: Option<bool>,
    pub(crate) words: &'a [Said],
}

/// The timeline and its verdict.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Timeline {
    pub(crate) stages: Vec<Stage>,
    pub(crate) finished: bool,
    /// Where and why the boot failed, as far as it has not been mended.
    pub(crate) failure: Option<Failure>,
    pub(crate) closed: bool,
    /// How old the box was when files began to be waited for; nothing if another process did.
    pub(crate) files_from: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) stage: String,
    pub(crate) reason: String,
}

impl Failure {
    fn new(stage: &str, reason: &str) -> Self {
        Self { stage: stage.to_owned(), reason: cut(&redact(reason)).to_owned() }
    }
}

impl Timeline {
    /// Takes a look in. `timeout` is how long a boot may take; zero for as long as it likes.
    pub(crate) fn take(&mut self, look: &Look<'_>, timeout: Duration) {
        if self.closed {
            self.remark(look);
            return;
        }
        let now = look.now;
        // Judged anew below, as everything is.
        for stage in self.stages.iter_mut().filter(|stage| stage.state == StageState::Stalled) {
            stage.state = StageState::Running;
        }
        self.agent(look);
        self.machine(look);
        let said = self.user(look.words);
        self.remark(look);
        let failure = self.failure(look, said.as_ref());
        let mut since = now;
        self.finished = match said {
            Some(Verdict::Ready(at)) => {
                since = at;
                look.progress.parked.is_none()
            }
            Some(Verdict::Failed(_)) => false,
            None => failure.is_none() && (look.sentinel.is_some() || self.joined(look)),
        };
        if self.finished {
            self.failure = None;
            self.end(READY, StageState::Done, since, since, "");
            // Not now, which is another time at every look: a stage that nobody ended would change with each.
            let finished = self.find(READY).map_or(since, |stage| stage.started);
            self.settle(USER, StageState::Done, Some(finished));
        } else {
            self.stages.retain(|stage| stage.name != READY);
            self.failure = failure.or_else(|| self.stalled(look.age, timeout));
        }
        let waits = |stage: &Stage| stage.state == StageState::Running && !stage.name.starts_with(USER);
        self.closed = MAX_AGE <= look.age || self.finished && !self.stages.iter().any(waits);
    }

    /// The stages the agent itself goes through.
    fn agent(&mut self, look: &Look<'_>) {
        let (now, progress) = (look.now, &look.progress);
        self.begin(AGENT, now);
        let opened = self.find(AGENT).map_or(now, |stage| stage.started);
        if let Some(kernel) = look.kernel
            && self.find(KERNEL).is_none()
        {
            self.end(KERNEL, StageState::Done, kernel.min(opened), opened, "");
        }
        if progress.started {
            self.done(AGENT, now);
            self.begin(REGISTERED, now);
        }
        self.begin(NETWORK, opened);
        if progress.registered || progress.session {
            self.done(REGISTERED, now);
        }
        if progress.routed || self.is_done(REGISTERED) {
            self.done(NETWORK, now);
        }
        if self.is_done(REGISTERED) {
            self.begin(SESSION, now);
        }
        if progress.session {
            self.done(SESSION, now);
        }
        if self.is_done(SESSION) {
            self.files(look, opened);
        }
        let stuck = if self.is_done(REGISTERED) { SESSION } else { REGISTERED };
        let untrusted = progress.untrusted.is_some_and(|since| UNTRUSTED_LIMIT <= since);
        let why = match &progress.parked {
            Some(why) => Some(why.as_str()),
            None if untrusted && stuck == REGISTERED => {
                Some(progress.remark.unwrap_or("the server's certificate is not trusted"))
            }
            None => None,
        };
        match why {
            Some(why) if !self.is_done(stuck) => self.fail(stuck, now, why),
            _ => self.revive(stuck),
        }
    }

    /// The first batch of files, once there is a session for it to come by.
    fn files(&mut self, look: &Look<'_>, opened: Timestamp) {
        if self.find(FILES).is_none() {
            self.files_from = look.age;
        }
        self.begin(FILES, look.now);
        let Some(started) = self.find(FILES).filter(|it| it.state != StageState::Done).map(|it| it.started) else {
            return;
        };
        match look.files {
            // A machine that was here before has its files already.
            Some(at) if at < opened => self.end(FILES, StageState::Done, started, look.now, "from an earlier boot"),
            Some(at) => self.end(FILES, StageState::Done, started, at.max(started), ""),
            // By the age of the box: the wall clock of a machine that boots is set right some time.
            None if look.bare && FILES_PATIENCE <= look.age.saturating_sub(self.files_from) => {
                self.end(FILES, StageState::Done, started, look.now.max(started), "none were sent");
            }
            None => {}
        }
    }

    /// The stages of the machine around it.
    fn machine(&mut self, look: &Look<'_>) {
        let now = look.now;
        match &look.cloud_init {
            CloudInit::Absent => {}
            CloudInit::Running(detail) => {
                self.begin(CLOUD_INIT, now);
                self.detail(CLOUD_INIT, detail);
            }
            CloudInit::Done => self.done(CLOUD_INIT, now),
            CloudInit::Failed(why) => self.fail(CLOUD_INIT, now, why),
        }
        match (&look.error_file, look.sentinel) {
            (Some(why), _) => self.fail(BOOTSTRAP, now, why),
            (None, Some(at)) => {
                let started = self.find(BOOTSTRAP).map_or(at, |stage| stage.started);
                self.end(BOOTSTRAP, StageState::Done, started, at.max(started), "");
            }
            (None, None) => self.revive(BOOTSTRAP),
        }
        match look.kubelet {
            None => {}
            Some(false) => self.begin(KUBELET, now),
            Some(true) => self.done(KUBELET, now),
        }
    }

    /// The stages that scripts have named: each runs until the next begins. Returns the scripts' last word on the whole.
    fn user(&mut self, words: &[Said]) -> Option<Verdict> {
        self.stages.retain(|stage| !stage.name.starts_with(USER));
        let mut verdict = None;
        for Said { at, word } in words {
            match word {
                Word::Stage { name, detail, failed } => {
                    let name = format!("{USER}{}", name.as_str());
                    let known = self.find(&name).is_some_and(|stage| stage.state == StageState::Running);
                    if !known {
                        self.settle(USER, StageState::Done, Some(*at));
                        self.stages.retain(|stage| stage.name != name);
                    }
                    let n_user = self.stages.iter().filter(|stage| stage.name.starts_with(USER)).count();
                    let recorded = known || n_user < MAX_USER_STAGES;
                    if recorded {
                        self.begin(&name, *at);
                        self.detail(&name, detail);
                    }
                    if *failed {
                        if recorded {
                            self.fail(&name, *at, detail);
                        }
                        let why = if detail.is_empty() { "no reason was given" } else { detail };
                        verdict = Some(Verdict::Failed(Failure::new(&name, why)));
                    }
                }
                Word::Fail(why) => {
                    let running = |stage: &&Stage| stage.name.starts_with(USER) && stage.state == StageState::Running;
                    let name = self.stages.iter().find(running).map(|stage| stage.name.clone());
                    if let Some(name) = &name {
                        self.fail(name, *at, why);
                    }
                    verdict = Some(Verdict::Failed(Failure::new(name.as_deref().unwrap_or(READY), why)));
                }
                Word::Ready => {
                    self.settle(USER, StageState::Done, Some(*at));
                    verdict = Some(Verdict::Ready(*at));
                }
            }
        }
        verdict
    }

    /// What is worth telling of the session, however old the box is, or of the registration while that is under way.
    fn remark(&mut self, look: &Look<'_>) {
        if let Some(stage) = self.find(REGISTERED).filter(|stage| stage.state == StageState::Running) {
            match look.progress.remark {
                Some(remark) => self.detail(REGISTERED, remark),
                // What else stands there is the reason of an earlier failure.
                None if stage.detail == CLOCK => self.detail(REGISTERED, ""),
                None => {}
            }
        }
        match look.progress.remark {
            Some(remark) => self.detail(SESSION, remark),
            None if look.progress.session => self.detail(SESSION, ""),
            None => {}
        }
    }

    fn failure(&self, look: &Look<'_>, said: Option<&Verdict>) -> Option<Failure> {
        let failed = |name: &str| self.find(name).filter(|stage| stage.state == StageState::Failed);
        if let Some(reason) = &look.progress.parked {
            let stage = if self.is_done(REGISTERED) { SESSION } else { REGISTERED };
            return Some(Failure::new(stage, reason));
        }
        if let Some(Verdict::Failed(failure)) = said {
            return Some(failure.clone());
        }
        let order = [BOOTSTRAP, CLOUD_INIT, REGISTERED];
        // A bootstrap that says it is done outweighs what cloud-init complains about.
        let stage =
            order.into_iter().filter_map(failed).find(|stage| stage.name != CLOUD_INIT || look.sentinel.is_none())?;
        let reason = if stage.detail.is_empty() { "no reason was given" } else { &stage.detail };
        Some(Failure::new(&stage.name, reason))
    }

    /// Finished without anybody saying so.
    fn joined(&self, look: &Look<'_>) -> bool {
        matches!(look.cloud_init, CloudInit::Absent | CloudInit::Done) && self.is_done(SESSION) && self.is_done(FILES)
    }

    fn stalled(&mut self, age: Duration, timeout: Duration) -> Option<Failure> {
        if timeout.is_zero() || age < timeout.min(MAX_AGE) {
            return None;
        }
        self.settle("", StageState::Stalled, None);
        let stuck: Vec<_> =
            self.stages.iter().filter(|it| it.state == StageState::Stalled).map(|it| &*it.name).collect();
        let waiting = if stuck.is_empty() { "a sign that it is ready".to_owned() } else { stuck.join(", ") };
        let stage = stuck.first().map_or(READY, |name| name).to_owned();
        Some(Failure { stage, reason: format!("not finished after {}s, waiting for {waiting}", timeout.as_secs()) })
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Stage> {
        self.stages.iter().find(|stage| stage.name == name)
    }

    pub(crate) fn is_done(&self, name: &str) -> bool {
        self.find(name).is_some_and(|stage| stage.state == StageState::Done)
    }

    fn begin(&mut self, name: &str, at: Timestamp) {
        if self.find(name).is_none() {
            let stage = Stage {
                name: name.to_owned(),
                state: StageState::Running,
                started: at,
                ended: None,
                detail: String::new(),
            };
            let place = self.stages.partition_point(|it| rank(&it.name) <= rank(name));
            self.stages.insert(place, stage);
        }
    }

    fn done(&mut self, name: &str, at: Timestamp) {
        if !self.is_done(name) {
            let started = self.find(name).map_or(at, |stage| stage.started);
            self.end(name, StageState::Done, started, at, "");
        }
    }

    fn fail(&mut self, name: &str, at: Timestamp, why: &str) {
        let known = self.find(name).filter(|stage| stage.state == StageState::Failed);
        let ended = known.and_then(|stage| stage.ended).unwrap_or(at);
        let started = self.find(name).map_or(at, |stage| stage.started);
        self.end(name, StageState::Failed, started, ended, why);
    }

    fn end(&mut self, name: &str, state: StageState, started: Timestamp, ended: Timestamp, detail: &str) {
        self.begin(name, started);
        if let Some(stage) = self.stages.iter_mut().find(|stage| stage.name == name)
            && (stage.state != state || stage.state == StageState::Failed)
        {
            stage.state = state;
            stage.ended = Some(ended);
            stage.detail = cut(&redact(detail)).to_owned();
        }
    }

    fn detail(&mut self, name: &str, detail: &str) {
        if let Some(stage) = self.stages.iter_mut().find(|stage| stage.name == name) {
            stage.detail = cut(&redact(detail)).to_owned();
        }
    }

    /// A stage that failed and is tried again.
    fn revive(&mut self, name: &str) {
        if let Some(stage) = self.stages.iter_mut().find(|stage| stage.name == name)
            && stage.state == StageState::Failed
        {
            (stage.state, stage.ended) = (StageState::Running, None);
        }
    }

    /// Ends what still runs among the stages of that kind.
    fn settle(&mut self, kind: &str, state: StageState, ended: Option<Timestamp>) {
        let open = |stage: &&mut Stage| stage.state == StageState::Running && stage.name.starts_with(kind);
        for stage in self.stages.iter_mut().filter(open) {
            (stage.state, stage.ended) = (state, ended.map(|ended| ended.max(stage.started)));
        }
    }
}

/// The scripts' word on the whole boot.
enum Verdict {
    Ready(Timestamp),
    Failed(Failure),
}

fn rank(name: &str) -> usize {
    ORDER.iter().position(|known| *known == name || *known == USER && name.starts_with(USER)).unwrap_or(ORDER.len())
}

#[cfg(test)]
#[path = "stages/tests.rs"]
mod tests;
