//! What `check` finds: one line per question, in groups that build on each other. A question that makes no sense because
//! an earlier one failed is skipped and says so; every failure says how to repair it.

pub mod bucket;
pub mod config;
pub mod environment;
pub mod fleet;
pub mod identity;
pub mod secrets;
pub mod shards;
pub mod store;

use clap::ValueEnum;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Group {
    Environment,
    Store,
    Secrets,
    Config,
    Identity,
    Shards,
    Fleet,
    /// Of `cluster doctor` only.
    #[value(skip)]
    Bucket,
}

impl Group {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Environment => "environment",
            Self::Store => "store",
            Self::Secrets => "secrets",
            Self::Config => "config",
            Self::Identity => "identity",
            Self::Shards => "shards",
            Self::Fleet => "fleet",
            Self::Bucket => "bucket",
        }
    }

    /// Those that need no identity and no server.
    pub fn is_before_servers(self) -> bool {
        self <= Self::Config
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Ok,
    Warn,
    Fail,
    Skip,
}

impl Verdict {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
            Self::Skip => "skip",
        }
    }
}

/// The answer to one question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub group: Group,
    pub name: String,
    pub verdict: Verdict,
    pub detail: String,
    /// The command to run, or what to change.
    pub fix: Option<String>,
}

/// The answers so far.
#[derive(Debug, Default)]
pub struct Sheet {
    pub lines: Vec<Line>,
}

impl Sheet {
    pub fn of(&mut self, group: Group) -> Section<'_> {
        Section { sheet: self, group }
    }

    pub fn count(&self, verdict: Verdict) -> usize {
        self.lines.iter().filter(|it| it.verdict == verdict).count()
    }

    pub fn has_failed(&self, group: Group) -> bool {
        self.lines.iter().any(|it| it.group == group && it.verdict == Verdict::Fail)
    }
}

/// The part of one group.
pub struct Section<'a> {
    sheet: &'a mut Sheet,
    group: Group,
}

impl Section<'_> {
    fn line(&mut self, verdict: Verdict, name: &str, detail: impl Into<String>, fix: Option<String>) {
        let (name, detail) = (name.to_owned(), detail.into());
        self.sheet.lines.push(Line { group: self.group, name, verdict, detail, fix });
    }

    pub fn ok(&mut self, name: &str, detail: impl Into<String>) {
        self.line(Verdict::Ok, name, detail, None);
    }

    pub fn warn(&mut self, name: &str, detail: impl Into<String>, fix: impl Into<String>) {
        self.line(Verdict::Warn, name, detail, Some(fix.into()));
    }

    pub fn fail(&mut self, name: &str, detail: impl Into<String>, fix: impl Into<String>) {
        self.line(Verdict::Fail, name, detail, Some(fix.into()));
    }

    pub fn skip(&mut self, name: &str, why: impl Into<String>) {
        self.line(Verdict::Skip, name, why, None);
    }
}
