//! How results are shown: tables for people, JSON and YAML for programs. Results go to stdout, everything else to stderr.

pub mod table;
mod yaml;

use std::io::{self, IsTerminal as _, Write as _};

use clap::ValueEnum;
use serde_json::Value;

pub use self::table::Table;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Columns for people
    Table,
    /// The same with more columns
    Wide,
    Json,
    Yaml,
    /// Only the names, one per line
    Name,
}

/// A result in every form.
pub struct Shown {
    /// For `json` and `yaml`: the whole document.
    pub document: Value,
    pub table: Table,
    /// For `name`.
    pub names: Vec<String>,
}

/// Where a command writes.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    pub format: Format,
    /// Colour is allowed.
    pub colour: bool,
    /// Lines may be redrawn.
    pub progress: bool,
}

impl Output {
    pub fn new(format: Format, no_color: bool, no_progress: bool) -> Self {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|it| !it.is_empty())
            || std::env::var_os("TERM").is_some_and(|it| it == "dumb");
        let terminal = io::stdout().is_terminal();
        Self {
            format,
            colour: terminal && !no_color && !plain,
            progress: io::stderr().is_terminal() && !no_progress && !plain,
        }
    }

    /// Prints a result.
    pub fn show(&self, shown: &Shown) {
        match self.format {
            Format::Json => print(&pretty(&shown.document)),
            Format::Yaml => print(&yaml::text(&shown.document)),
            Format::Name => print(&lines(&shown.names)),
            Format::Table => print(&lines(&shown.table.lines(false))),
            Format::Wide => print(&lines(&shown.table.lines(true))),
        }
    }

    /// Prints a document that has no table: `json`, and `yaml` if asked for.
    pub fn document(&self, document: &Value) {
        match self.format {
            Format::Yaml => print(&yaml::text(document)),
            _ => print(&pretty(document)),
        }
    }

    /// One item of a stream: one line of JSON, one document of YAML, or a line of text.
    pub fn item(&self, document: &Value, line: impl FnOnce() -> String) {
        match self.format {
            Format::Json => print(&format!("{document}\n")),
            Format::Yaml => print(&format!("---\n{}", yaml::text(document))),
            Format::Table | Format::Wide | Format::Name => print(&format!("{}\n", line())),
        }
    }

    pub fn is_for_people(&self) -> bool {
        matches!(self.format, Format::Table | Format::Wide)
    }

    /// Something a person may want to know, on stderr.
    pub fn note(&self, text: &str) {
        let _ = writeln!(io::stderr(), "{text}");
    }
}

fn pretty(document: &Value) -> String {
    format!("{document:#}\n")
}

fn lines(lines: &[String]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// A reader that went away is no failure of ours.
pub fn print(text: &str) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
