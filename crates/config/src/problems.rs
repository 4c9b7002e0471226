//! What is wrong with a config: every problem at once, each with its place and, where we can guess one, its remedy.
//!
//! The report has two spellings, text for people and JSON for programs; both are part of the contract and are held by
//! snapshot tests. Values below `server.secrets` never reach a message: whoever writes one there asks
//! `At::show`, which hides them.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Write as _},
};

use crate::jsonc::Pos;

/// Problems that a report prints; the rest is counted. More than a screenful is not read, and a report travels in
/// status details of limited size.
pub const MAX_PRINTED: usize = 100;

/// Problems that are kept at all. A hostile 4 MiB file can hold a million unknown keys, and none past these is shown.
const MAX_KEPT: usize = 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    Error,
    Warning,
}

impl Severity {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
        }
    }
}

macro_rules! codes {
    ($($name:ident $text:literal $severity:ident,)*) => {
        /// The closed set of problem codes. Each has one severity.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Code {
            $($name,)*
        }

        impl Code {
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            pub fn severity(self) -> Severity {
                match self {
                    $(Self::$name => Severity::$severity,)*
                }
            }
        }
    };
}

codes! {
    Syntax "syntax" Error,
    DuplicateKey "duplicate-key" Error,
    UnknownKey "unknown-key" Error,
    Missing "missing" Error,
    WrongType "wrong-type" Error,
    BadValue "bad-value" Error,
    BadReference "bad-reference" Error,
    Conflict "conflict" Error,
    Immutable "immutable" Error,
    Limit "limit" Error,
    TemplateSyntax "template-syntax" Error,
    UnknownField "unknown-field" Error,
    MissingVar "missing-var" Error,
    ProviderArgs "provider-args" Error,
    UnpinnedUrl "unpinned-url" Warning,
    NoUserdata "no-userdata" Warning,
    GcOff "gc-off" Warning,
    UnusedOverride "unused-override" Warning,
    TwoConfigs "two-configs" Warning,
    UndefinedVar "undefined-var" Warning,
    DeprecatedArg "deprecated-arg" Warning,
    TwoBalancers "two-balancers" Warning,
    ProviderWarning "provider-warning" Warning,
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One thing that is wrong, or at least doubtful.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    pub severity: Severity,
    pub code: Code,
    /// Where in the config, e.g. `templates.knc.files["node.env"].kind`; empty for the file as a whole.
    pub path: String,
    /// 1-based line, or 0 if the problem has no place in a file (a request's, for instance).
    pub line: u32,
    /// 1-based column in characters, or 0 like `line`.
    pub column: u32,
    pub message: String,
    pub help: Option<String>,
}

impl Problem {
    pub fn new(code: Code, path: impl Into<String>, pos: Pos, message: impl Into<String>) -> Self {
        Self {
            severity: code.severity(),
            code,
            path: path.into(),
            line: pos.line,
            column: pos.column,
            message: message.into(),
            help: None,
        }
    }

    #[must_use]
    pub fn with_help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    fn write_text(&self, out: &mut String) {
        let _ = write!(out, "{}[{}]", self.severity.as_str(), self.code);
        if !self.path.is_empty() {
            let _ = write!(out, " {}", self.path);
        }
        if self.line != 0 {
            let _ = write!(out, " ({}:{})", self.line, self.column);
        }
        out.push('\n');
        for line in self.message.lines() {
            let _ = writeln!(out, "  {line}");
        }
        if let Some(help) = &self.help {
            let _ = writeln!(out, "  help: {}", help.replace('\n', " "));
        }
    }

    fn write_json(&self, out: &mut String) {
        out.push_str("{\"severity\":");
        write_json_string(out, self.severity.as_str());
        out.push_str(",\"code\":");
        write_json_string(out, self.code.as_str());
        out.push_str(",\"path\":");
        write_json_string(out, &self.path);
        let _ = write!(out, ",\"line\":{},\"column\":{},\"message\":", self.line, self.column);
        write_json_string(out, &self.message);
        out.push_str(",\"help\":");
        match &self.help {
            Some(help) => write_json_string(out, help),
            None => out.push_str("null"),
        }
        out.push('}');
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        self.write_text(&mut text);
        f.write_str(text.trim_end())
    }
}

/// The keys that were asked for, by their paths, and what their values should be.
pub(crate) type Asked = BTreeMap<String, BTreeSet<String>>;

/// Problems while they are collected. Readers hold it shared, so that each may complain wherever it stands.
#[derive(Debug, Default)]
pub(crate) struct Problems {
    list: RefCell<Vec<Problem>>,
    n_dropped_errors: Cell<usize>,
    n_dropped_warnings: Cell<usize>,
    /// Kept only for those who want to know which keys there are.
    asked: Option<RefCell<Asked>>,
}

impl Problems {
    /// Remembers what is asked for, as well.
    pub(crate) fn with_asked() -> Self {
        Self { asked: Some(RefCell::default()), ..Self::default() }
    }

    /// Notes that a key is asked for, and what its value may be, as far as that is said here.
    pub(crate) fn note_asked<I: IntoIterator<Item = String>>(
        &self,
        path: impl FnOnce() -> String,
        what: impl FnOnce() -> I,
    ) {
        if let Some(asked) = &self.asked {
            asked.borrow_mut().entry(path()).or_default().extend(what());
        }
    }

    pub(crate) fn into_asked(self) -> Asked {
        self.asked.map(RefCell::into_inner).unwrap_or_default()
    }

    pub(crate) fn push(&self, problem: Problem) {
        let mut list = self.list.borrow_mut();
        if list.len() < MAX_KEPT {
            list.push(problem);
            return;
        }
        let dropped = match problem.severity {
            Severity::Error => &self.n_dropped_errors,
            Severity::Warning => &self.n_dropped_warnings,
        };
        dropped.set(dropped.get() + 1);
    }

    /// Whether further problems are only counted, so that nobody works out a suggestion for them.
    pub(crate) fn is_full(&self) -> bool {
        MAX_KEPT <= self.list.borrow().len()
    }

    pub(crate) fn has_errors(&self) -> bool {
        0 < self.n_dropped_errors.get() || self.list.borrow().iter().any(|it| it.severity == Severity::Error)
    }

    /// Whether an error is known at `prefix` or below it.
    pub(crate) fn has_error_under(&self, prefix: &str) -> bool {
        self.list.borrow().iter().any(|it| {
            let below = it.path.strip_prefix(prefix);
            it.severity == Severity::Error && below.is_some_and(|it| it.is_empty() || it.starts_with(['.', '[']))
        })
    }

    pub(crate) fn into_report(self, object: &str) -> Report {
        let mut problems = self.list.into_inner();
        problems.sort_by(|a, b| (a.line, a.column, &a.path).cmp(&(b.line, b.column, &b.path)));
        drop_repeated(&mut problems);
        Report {
            object: object.to_owned(),
            etag: None,
            problems,
            n_dropped_errors: self.n_dropped_errors.get(),
            n_dropped_warnings: self.n_dropped_warnings.get(),
        }
    }

    pub(crate) fn into_list(self) -> Vec<Problem> {
        let mut problems = self.list.into_inner();
        drop_repeated(&mut problems);
        problems
    }
}

/// Two groups of one template share its problems; each is told once.
fn drop_repeated(problems: &mut Vec<Problem>) {
    let mut seen = std::collections::HashSet::new();
    problems.retain(|it| seen.insert((it.code, it.path.clone(), it.line, it.column, it.message.clone())));
}

/// Everything found in one config file, in the order of the file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// The object (or file) the config came from.
    pub object: String,
    /// Its version, if the caller knows one; only repeated in the JSON form.
    pub etag: Option<String>,
    pub problems: Vec<Problem>,
    n_dropped_errors: usize,
    n_dropped_warnings: usize,
}

impl Report {
    /// A report of problems found elsewhere, e.g. against live state.
    pub fn of(object: &str, problems: Vec<Problem>) -> Self {
        Self { object: object.to_owned(), problems, ..Self::default() }
    }

    /// Whether the config may be applied: warnings do not stand in the way.
    pub fn is_ok(&self) -> bool {
        self.n_errors() == 0
    }

    pub fn n_errors(&self) -> usize {
        self.n_dropped_errors + self.count(Severity::Error)
    }

    pub fn n_warnings(&self) -> usize {
        self.n_dropped_warnings + self.count(Severity::Warning)
    }

    fn count(&self, severity: Severity) -> usize {
        self.problems.iter().filter(|it| it.severity == severity).count()
    }

    fn n_more(&self) -> usize {
        self.n_errors() + self.n_warnings() - self.problems.len().min(MAX_PRINTED)
    }

    /// The report for people.
    pub fn text(&self) -> String {
        let mut out = format!(
            "{}: {}, {}{}\n",
            self.object,
            plural(self.n_errors(), "error"),
            plural(self.n_warnings(), "warning"),
            if self.is_ok() { "" } else { "; nothing was applied" },
        );
        for problem in self.problems.iter().take(MAX_PRINTED) {
            problem.write_text(&mut out);
        }
        if 0 < self.n_more() {
            let _ = writeln!(out, "and {}", plural(self.n_more(), "more problem"));
        }
        out
    }

    /// The report for programs. `more` appears only when problems were left out.
    pub fn json(&self) -> String {
        let mut out = String::from("{\"object\":");
        write_json_string(&mut out, &self.object);
        out.push_str(",\"etag\":");
        match &self.etag {
            Some(etag) => write_json_string(&mut out, etag),
            None => out.push_str("null"),
        }
        let _ = write!(out, ",\"ok\":{},\"problems\":[", self.is_ok());
        for (i, problem) in self.problems.iter().take(MAX_PRINTED).enumerate() {
            if i != 0 {
                out.push(',');
            }
            problem.write_json(&mut out);
        }
        out.push(']');
        if 0 < self.n_more() {
            let _ = write!(out, ",\"more\":{}", self.n_more());
        }
        out.push('}');
        out
    }
}

fn plural(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// Writes a JSON string in the escaping of RFC 8785, which is also the shortest.
pub(crate) fn write_json_string(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if u32::from(c) < 0x20 => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// Valid names are listed in a suggestion up to this many; a longer list hides the answer.
const MAX_LISTED: usize = 12;

/// The valid name nearest to `name`, if one is near enough to be meant.
pub(crate) fn nearest<'a>(name: &str, valid: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let length = name.chars().count();
    let allowed = (length / 3).max(2).min(length.saturating_sub(1));
    valid
        .into_iter()
        .map(|it| (edit_distance(name, it), it))
        .filter(|(distance, it)| *distance <= allowed && *distance < it.chars().count())
        .min()
        .map(|(_, it)| it)
}

/// ``did you mean `ingress`? pools: control-plane, ingress, workers``, as far as there is something to say.
pub(crate) fn suggest<'a>(
    name: &str,
    plural: &str,
    valid: impl IntoIterator<Item = &'a str> + Clone,
) -> Option<String> {
    let near = nearest(name, valid.clone()).map(|it| format!("did you mean `{it}`?"));
    let valid: Vec<&str> = valid.into_iter().collect();
    let list = (!valid.is_empty() && valid.len() <= MAX_LISTED).then(|| format!("{plural}: {}", valid.join(", ")));
    match (near, list) {
        (Some(near), Some(list)) => Some(format!("{near} {list}")),
        (near, list) => near.or(list),
    }
}

/// Insertions, deletions, replacements and swaps of neighbours between two names.
fn edit_distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    // Beyond the longest near miss of a name the exact number does not matter, and keys may be megabytes long.
    const LONG: usize = 64;
    if LONG < a.len().max(b.len()) {
        return if a == b { 0 } else { usize::MAX };
    }
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    rows[0] = (0..=b.len()).collect();
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let replace = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replace.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if 1 < i && 1 < j && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = best;
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_names_are_suggested_and_far_ones_are_not() {
        assert_eq!(nearest("ingres", ["control-plane", "ingress", "workers"]), Some("ingress"));
        assert_eq!(nearest("registrationTimeout", ["interval", "registration_timeout"]), Some("registration_timeout"));
        assert_eq!(nearest("ttl", ["ip", "bind"]), None);
        assert_eq!(nearest("x", ["ip", "y"]), None);
        assert_eq!(edit_distance("abcd", "abdc"), 1);
    }

    #[test]
    fn a_report_prints_one_hundred_problems_and_counts_the_rest() {
        let problems = Problems::default();
        for line in 1..=1500 {
            problems.push(Problem::new(Code::UnknownKey, "x", Pos { line, column: 1 }, "m"));
        }
        problems.push(Problem::new(Code::GcOff, "x", Pos { line: 1, column: 2 }, "m"));
        let report = problems.into_report("o");
        assert_eq!((report.n_errors(), report.n_warnings()), (1500, 1));
        let text = report.text();
        assert!(text.starts_with("o: 1500 errors, 1 warning; nothing was applied\n"), "{text}");
        assert!(text.ends_with("and 1401 more problems\n"), "{text}");
        assert_eq!(text.matches("error[unknown-key]").count(), 100);
        assert!(report.json().ends_with("],\"more\":1401}"));
    }
}
