//! Strict reading of the tree: what people write, before it means anything.
//!
//! A [`Fields`] hands out an object's entries by name and, when finished, complains about every entry nobody asked
//! for. An [`At`] is one value with its path; its readers complain about a wrong type and answer `None`, so that the
//! caller simply goes on with the next field and all problems come out at once. `null` reads as absent.

use std::{cell::RefCell, collections::BTreeMap, ops::RangeInclusive, time::Duration};

use crate::{
    duration::{self, DurationError},
    jsonc::{Entry, Json, Node, Pos},
    path::Path,
    problems::{Code, Problem, Problems, nearest, suggest},
};

/// One value, and where it stands.
#[derive(Clone)]
pub(crate) struct At<'a> {
    pub(crate) problems: &'a Problems,
    pub(crate) path: Path,
    pub(crate) node: &'a Node,
}

impl<'a> At<'a> {
    pub(crate) fn pos(&self) -> Pos {
        self.node.pos
    }

    pub(crate) fn report(&self, code: Code, message: impl Into<String>, help: Option<String>) {
        let mut problem = Problem::new(code, self.path.to_string(), self.pos(), message);
        problem.help = help;
        self.problems.push(problem);
    }

    pub(crate) fn bad(&self, message: impl Into<String>, help: impl Into<String>) {
        let help: String = help.into();
        self.report(Code::BadValue, message, (!help.is_empty()).then_some(help));
    }

    /// Whether no message may quote what stands here.
    fn is_secret(&self) -> bool {
        self.path.is_under(&["server", "secrets"])
    }

    /// `text` as a message may quote it; hidden below `server.secrets`.
    pub(crate) fn show(&self, text: &str) -> String {
        if self.is_secret() {
            return "this value".to_owned();
        }
        const MAX_QUOTED: usize = 80;
        match text.char_indices().nth(MAX_QUOTED) {
            Some((end, _)) => format!("`{}…`", &text[..end]),
            None => format!("`{text}`"),
        }
    }

    /// Notes what a value here should be, for the list of all keys.
    pub(crate) fn wants(&self, what: &str) {
        self.problems.note_asked(|| self.path.to_string(), || [what.to_owned()]);
    }

    fn wrong_type(&self, expected: &str) {
        if self.node.json != Json::Broken {
            self.report(
                Code::WrongType,
                format!("expected {expected}, found {}", article(self.node.type_name())),
                None,
            );
        }
    }

    /// The right value in the wrong type: nothing is converted, but the remedy is plain.
    fn unquoted<T>(&self, expected: &str) -> Option<T> {
        let help = "write it without quotes".to_owned();
        self.report(Code::WrongType, format!("expected {expected}, found a string"), Some(help));
        None
    }

    pub(crate) fn string(&self) -> Option<&'a str> {
        self.wants("string");
        self.any_string()
    }

    /// A string of which the caller says itself what is wanted.
    fn any_string(&self) -> Option<&'a str> {
        match &self.node.json {
            Json::String(text) => Some(text),
            Json::Int(_) | Json::Float(_) | Json::Bool(_) => {
                let help = "write it in double quotes".to_owned();
                let found = article(self.node.type_name());
                self.report(Code::WrongType, format!("expected a string, found {found}"), Some(help));
                None
            }
            _ => {
                self.wrong_type("a string");
                None
            }
        }
    }

    /// A string that is not empty.
    pub(crate) fn text(&self) -> Option<&'a str> {
        let text = self.string()?;
        if text.is_empty() {
            self.bad("this must not be empty", "");
            return None;
        }
        Some(text)
    }

    pub(crate) fn bool(&self) -> Option<bool> {
        self.wants("boolean");
        match &self.node.json {
            Json::Bool(it) => Some(*it),
            Json::String(text) if text == "true" || text == "false" => self.unquoted("true or false"),
            _ => {
                self.wrong_type("true or false");
                None
            }
        }
    }

    pub(crate) fn int(&self, range: RangeInclusive<u32>) -> Option<u32> {
        self.wants("integer");
        match &self.node.json {
            Json::Int(it) => {
                let int = u32::try_from(*it).ok().filter(|it| range.contains(it));
                if int.is_none() {
                    self.bad(format!("{it} is out of range"), format!("use {} to {}", range.start(), range.end()));
                }
                int
            }
            Json::Float(_) => {
                let help = "write it without a decimal point".to_owned();
                self.report(Code::WrongType, "expected an integer, found a decimal number", Some(help));
                None
            }
            Json::String(text) if text.parse::<i64>().is_ok() => self.unquoted("an integer"),
            _ => {
                self.wrong_type("an integer");
                None
            }
        }
    }

    pub(crate) fn duration(&self) -> Option<Duration> {
        self.wants("duration");
        match &self.node.json {
            Json::Int(0) => Some(Duration::ZERO),
            Json::Int(it) if 0 < *it => {
                let example = if self.is_secret() { 90 } else { *it };
                self.bad("a duration needs a unit", format!("write it as \"{example}s\", or with ms, m, h, d or w"));
                None
            }
            Json::Int(_) | Json::Float(_) => {
                self.bad("a duration is a string with units", "such as \"90s\", \"1h30m\" or \"21d\"");
                None
            }
            Json::String(text) => match duration::parse(text) {
                Ok(duration) => Some(duration),
                Err(DurationError::Unit) => {
                    self.bad("a duration needs a unit", "such as \"90s\"; units are ms, s, m, h, d and w");
                    None
                }
                Err(error @ DurationError::TooLong) => {
                    self.bad(error.to_string(), "");
                    None
                }
                Err(DurationError::Form) => {
                    let message = format!("{} is no duration", self.show(text));
                    self.bad(message, "write numbers with units, such as \"90s\", \"1h30m\" or \"21d\"");
                    None
                }
            },
            _ => {
                self.wrong_type("a duration such as \"90s\"");
                None
            }
        }
    }

    /// One of a closed set. `foreign` maps spellings of elsewhere to ours.
    pub(crate) fn one_of<T: Copy>(&self, valid: &[(&'static str, T)], foreign: &[(&str, &str)]) -> Option<T> {
        let names = || valid.iter().map(|(name, _)| *name);
        self.problems.note_asked(|| self.path.to_string(), || names().map(|name| format!("\"{name}\"")));
        let text = self.any_string()?;
        let found = valid.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
        if found.is_none() {
            let help = match foreign.iter().find(|(theirs, _)| *theirs == text) {
                Some((_, ours)) => Some(format!("here it is called `{ours}`")),
                None => suggest(text, "use one of", names()),
            };
            self.report(Code::BadValue, format!("{} is not known here", self.show(text)), help);
        }
        found
    }

    /// A value with a grammar of its own, whose error says everything.
    pub(crate) fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(&self) -> Option<T> {
        let text = self.string()?;
        match text.parse() {
            Ok(value) => Some(value),
            Err(error) => {
                let message = error.to_string();
                // Errors of ids read "what is wrong: what to do".
                match message.split_once(": ") {
                    Some((what, todo)) => self.bad(what, todo),
                    None => self.bad(message, ""),
                }
                None
            }
        }
    }

    pub(crate) fn fields(&self) -> Option<Fields<'a>> {
        self.wants("object");
        match &self.node.json {
            Json::Object(entries) => Some(Fields {
                at: self.clone(),
                entries,
                known: RefCell::default(),
                needed: RefCell::default(),
                hints: &[],
            }),
            _ => {
                self.wrong_type("an object");
                None
            }
        }
    }

    /// The entries of an object whose keys are free. Entries of null are absent.
    pub(crate) fn entries(&self) -> Vec<(Key<'a>, At<'a>)> {
        self.wants("map");
        match &self.node.json {
            Json::Object(entries) => entries
                .iter()
                .filter(|entry| !matches!(entry.value.json, Json::Null | Json::Broken))
                .map(|entry| {
                    let path = self.path.key(&entry.key);
                    let key = Key { problems: self.problems, path: path.clone(), entry };
                    (key, At { problems: self.problems, path, node: &entry.value })
                })
                .collect(),
            _ => {
                self.wrong_type("an object");
                Vec::new()
            }
        }
    }

    pub(crate) fn list(&self) -> Vec<At<'a>> {
        self.wants("list");
        match &self.node.json {
            Json::Array(items) => items
                .iter()
                .enumerate()
                .filter(|(_, item)| item.json != Json::Broken)
                .map(|(i, node)| At { problems: self.problems, path: self.path.index(i), node })
                .collect(),
            _ => {
                self.wrong_type("a list");
                Vec::new()
            }
        }
    }

    pub(crate) fn strings(&self) -> Vec<String> {
        self.list().iter().filter_map(At::text).map(str::to_owned).collect()
    }

    pub(crate) fn is_object(&self) -> bool {
        matches!(self.node.json, Json::Object(_))
    }
}

fn article(noun: &str) -> String {
    match noun {
        "null" => noun.to_owned(),
        "object" => format!("an {noun}"),
        _ => format!("a {noun}"),
    }
}

/// The key of an entry whose name people choose.
pub(crate) struct Key<'a> {
    problems: &'a Problems,
    pub(crate) path: Path,
    pub(crate) entry: &'a Entry,
}

impl<'a> Key<'a> {
    pub(crate) fn text(&self) -> &'a str {
        &self.entry.key
    }

    pub(crate) fn report(&self, code: Code, message: impl Into<String>, help: impl Into<String>) {
        let help: String = help.into();
        let mut problem = Problem::new(code, self.path.to_string(), self.entry.key_pos, message);
        problem.help = (!help.is_empty()).then_some(help);
        self.problems.push(problem);
    }

    pub(crate) fn bad(&self, message: impl Into<String>, help: impl Into<String>) {
        self.report(Code::BadValue, message, help);
    }

    pub(crate) fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(&self) -> Option<T> {
        match self.text().parse() {
            Ok(value) => Some(value),
            Err(error) => {
                let message: String = error.to_string();
                match message.split_once(": ") {
                    Some((what, todo)) => self.bad(what, todo),
                    None => self.bad(message, ""),
                }
                None
            }
        }
    }
}

/// An object whose keys are known.
pub(crate) struct Fields<'a> {
    pub(crate) at: At<'a>,
    entries: &'a [Entry],
    known: RefCell<Vec<&'static str>>,
    /// Keys that were needed and not there; told at the end, for a misspelt one is told as such.
    needed: RefCell<Vec<&'static str>>,
    hints: &'static [(&'static str, &'static str)],
}

impl<'a> Fields<'a> {
    /// Hints for keys that are known elsewhere under this name.
    pub(crate) fn with_hints(mut self, hints: &'static [(&'static str, &'static str)]) -> Self {
        self.hints = hints;
        self
    }

    /// The value of `key`, unless it is absent, null or unreadable.
    pub(crate) fn get(&self, key: &'static str) -> Option<At<'a>> {
        self.known.borrow_mut().push(key);
        self.at.problems.note_asked(|| self.at.path.key(key).to_string(), || []);
        let entry = self.entries.iter().find(|entry| entry.key == key)?;
        (!matches!(entry.value.json, Json::Null | Json::Broken)).then(|| At {
            problems: self.at.problems,
            path: self.at.path.key(key),
            node: &entry.value,
        })
    }

    /// Like `get`, and an absent value is a problem.
    pub(crate) fn need(&self, key: &'static str) -> Option<At<'a>> {
        let at = self.get(key);
        let broken = self.entries.iter().any(|entry| entry.key == key && entry.value.json == Json::Broken);
        if at.is_none() && !broken {
            self.needed.borrow_mut().push(key);
        }
        at
    }

    /// Says that `key` is missing.
    pub(crate) fn missing(&self, key: &str) {
        let problem = Problem::new(
            Code::Missing,
            self.at.path.key(key).to_string(),
            self.at.pos(),
            format!("`{key}` is missing"),
        );
        let place = if self.at.path.0.is_empty() { "the config".to_owned() } else { format!("`{}`", self.at.path) };
        self.at.problems.push(problem.with_help(format!("add \"{key}\" to {place}")));
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.entries.iter().any(|entry| entry.key == key && entry.value.json != Json::Null)
    }

    pub(crate) fn duration(&self, key: &'static str, default: Duration) -> Duration {
        self.get(key).and_then(|at| at.duration()).unwrap_or(default)
    }

    pub(crate) fn int(&self, key: &'static str, range: RangeInclusive<u32>, default: u32) -> u32 {
        self.get(key).and_then(|at| at.int(range)).unwrap_or(default)
    }

    pub(crate) fn strings(&self, key: &'static str) -> Vec<String> {
        self.get(key).map(|at| at.strings()).unwrap_or_default()
    }

    pub(crate) fn text(&self, key: &'static str) -> Option<String> {
        self.get(key).and_then(|at| at.text()).map(str::to_owned)
    }

    /// A path below this object, for problems between fields.
    pub(crate) fn at_key(&self, key: &str) -> At<'a> {
        let node = self.entries.iter().find(|entry| entry.key == key).map_or(self.at.node, |entry| &entry.value);
        At { problems: self.at.problems, path: self.at.path.key(key), node }
    }

    /// Complains about every key that was needed, without a word on the others: for objects whose kind is unknown.
    pub(crate) fn give_up(self) {
        for key in self.needed.take() {
            self.missing(key);
        }
    }

    /// Complains about every key that was needed and is missing, and every one that was never asked for.
    pub(crate) fn finish(self) {
        let known = self.known.take();
        let mut needed = self.needed.take();
        for entry in self.entries.iter().filter(|entry| !known.contains(&entry.key.as_str())) {
            let path = self.at.path.key(&entry.key);
            let message = format!("unknown key `{}`", entry.key);
            let mut problem = Problem::new(Code::UnknownKey, path.to_string(), entry.key_pos, message);
            if !self.at.problems.is_full() {
                // One misspelt key is one problem, not an unknown and a missing one.
                needed.retain(|key| suggest_key(&entry.key, &known) != Some(format!("did you mean `{key}`?")));
                problem.help = self
                    .hints
                    .iter()
                    .find(|(theirs, _)| *theirs == entry.key)
                    .map(|(_, hint)| (*hint).to_owned())
                    .or_else(|| suggest_key(&entry.key, &known));
            }
            self.at.problems.push(problem);
        }
        for key in needed {
            self.missing(key);
        }
    }
}

pub(crate) fn suggest_key(key: &str, known: &[&'static str]) -> Option<String> {
    let snake = snake_case(key);
    if known.contains(&snake.as_str()) {
        return Some(format!("did you mean `{snake}`?"));
    }
    match nearest(key, known.iter().copied()).or_else(|| nearest(&snake, known.iter().copied())) {
        Some(near) => Some(format!("did you mean `{near}`?")),
        None if known.is_empty() => Some("no keys are known here".to_owned()),
        None => suggest("", "known keys", known.iter().copied()),
    }
}

/// `registrationTimeout` → `registration_timeout`; runs of capitals count as one word (`leaderIP` → `leader_ip`).
fn snake_case(key: &str) -> String {
    let chars: Vec<char> = key.chars().collect();
    let mut out = String::with_capacity(key.len() + 4);
    for (i, c) in chars.iter().enumerate() {
        let after_lower = 0 < i && (chars[i - 1].is_lowercase() || chars[i - 1].is_ascii_digit());
        let word_end = 0 < i && chars[i - 1].is_uppercase() && chars.get(i + 1).is_some_and(|it| it.is_lowercase());
        if c.is_uppercase() && (after_lower || word_end) {
            out.push('_');
        }
        out.extend(c.to_lowercase());
    }
    out.replace('-', "_")
}

/// A map of names to strings, whose names follow `is_name`.
pub(crate) fn string_map(at: &At<'_>, is_name: fn(&str) -> bool, grammar: &str) -> BTreeMap<String, String> {
    let mut map = BTreeMap::new();
    for (key, value) in at.entries() {
        if !is_name(key.text()) {
            key.bad(format!("`{}` is no valid name here", key.text()), grammar);
        } else if let Some(text) = value.string() {
            map.insert(key.text().to_owned(), text.to_owned());
        }
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn camel_case_becomes_snake_case() {
        for (camel, snake) in [
            ("registrationTimeout", "registration_timeout"),
            ("clusterID", "cluster_id"),
            ("leaderIPAddress", "leader_ip_address"),
            ("IP4", "ip4"),
            ("subnet-pool", "subnet_pool"),
            ("plain", "plain"),
        ] {
            assert_eq!(snake_case(camel), snake);
        }
    }
}
