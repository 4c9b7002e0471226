//! JSON with comments, read into a tree in which every key and value knows its place.
//!
//! Our own reader, because no library gives positions, duplicate keys and recovery together. It carries on after
//! faults that leave the rest readable (a missing comma, a bare word, single quotes), so that one run shows them all;
//! an unreadable value becomes `Json::Broken`, which later stages pass over in silence. Only faults that unhinge the
//! structure (a lost brace, the file's end) stop it.
//!
//! Messages never quote what stands in the file, for it may be a secret.

use nstance_core::value::{Object, Value};

use crate::{
    path::{Path, Step},
    problems::{Code, Problem},
};

/// Largest config file.
pub const MAX_BYTES: usize = 4 * 1024 * 1024;

/// Deepest nesting of objects and lists; bounds the recursion of everything that walks the tree.
pub const MAX_DEPTH: usize = 64;

/// Entries of one object: several times what any part of a config may hold. Objects keep their keys in a list, so that
/// more of them would take quadratic time.
pub const MAX_KEYS: usize = 4096;

/// Faults noted in one file. Whoever has this many did not mean to write JSON.
const MAX_FAULTS: usize = 200;

/// A place in the file: 1-based line, and column in characters. Zeroes mean nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Pos {
    pub line: u32,
    pub column: u32,
}

impl Pos {
    pub const NOWHERE: Self = Self { line: 0, column: 0 };
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    String(String),
    Array(Vec<Node>),
    Object(Vec<Entry>),
    /// Something was here that could not be read; its problem is already reported.
    Broken,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Node {
    pub(crate) pos: Pos,
    pub(crate) json: Json,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) key_pos: Pos,
    pub(crate) value: Node,
}

impl Node {
    pub(crate) fn get(&self, key: &str) -> Option<&Node> {
        self.entry(key).map(|entry| &entry.value)
    }

    pub(crate) fn entry(&self, key: &str) -> Option<&Entry> {
        match &self.json {
            Json::Object(entries) => entries.iter().find(|entry| entry.key == key),
            _ => None,
        }
    }

    pub(crate) fn type_name(&self) -> &'static str {
        match &self.json {
            Json::Null | Json::Broken => "null",
            Json::Bool(_) => "boolean",
            Json::Int(_) | Json::Float(_) => "number",
            Json::String(_) => "string",
            Json::Array(_) => "list",
            Json::Object(_) => "object",
        }
    }

    /// The same without places. What was broken reads as null; its problem keeps the config from being used.
    pub(crate) fn to_value(&self) -> Value {
        match &self.json {
            Json::Null | Json::Broken => Value::Null,
            Json::Bool(it) => Value::Bool(*it),
            Json::Int(it) => Value::Int(*it),
            Json::Float(it) => Value::Float(*it),
            Json::String(it) => Value::String(it.clone()),
            Json::Array(items) => Value::Array(items.iter().map(Node::to_value).collect()),
            Json::Object(entries) => Value::Object(to_object(entries)),
        }
    }
}

pub(crate) fn to_object(entries: &[Entry]) -> Object {
    entries.iter().map(|entry| (entry.key.clone(), entry.value.to_value())).collect()
}

/// Reads a file. The tree is absent if the structure was lost; the problems then say where.
pub(crate) fn parse(bytes: &[u8]) -> (Option<Node>, Vec<Problem>) {
    if MAX_BYTES < bytes.len() {
        let message = format!("the file has {} bytes, more than the {MAX_BYTES} a config may have", bytes.len());
        return (None, vec![Problem::new(Code::Limit, "", Pos { line: 1, column: 1 }, message)]);
    }
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let good = std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default();
            let mut parser = Parser::new(good);
            while parser.bump().is_some() {}
            let problem = Problem::new(Code::Syntax, "", parser.pos, "the file is not UTF-8 from here on")
                .with_help("save it in the encoding UTF-8");
            return (None, vec![problem]);
        }
    };
    let mut parser = Parser::new(text);
    let node = parser.document().ok();
    (node, parser.problems)
}

/// The structure is lost; the problem is already noted.
struct Lost;

struct Parser<'a> {
    rest: &'a str,
    pos: Pos,
    depth: usize,
    /// Where we are, for duplicate keys; every other problem of this stage belongs to the file.
    path: Path,
    problems: Vec<Problem>,
}

impl<'a> Parser<'a> {
    fn new(text: &'a str) -> Self {
        Self { rest: text, pos: Pos { line: 1, column: 1 }, depth: 0, path: Path::root(), problems: Vec::new() }
    }

    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn bump(&mut self) -> Option<char> {
        let mut chars = self.rest.chars();
        let c = chars.next()?;
        self.rest = chars.as_str();
        if c == '\n' {
            self.pos.line = self.pos.line.saturating_add(1);
            self.pos.column = 1;
        } else {
            self.pos.column = self.pos.column.saturating_add(1);
        }
        Some(c)
    }

    fn eat(&mut self, c: char) -> bool {
        let found = self.peek() == Some(c);
        if found {
            self.bump();
        }
        found
    }

    fn fault(&mut self, pos: Pos, message: &str, help: &str) {
        if MAX_FAULTS <= self.problems.len() {
            return;
        }
        let problem = Problem::new(Code::Syntax, "", pos, message);
        self.problems.push(if help.is_empty() { problem } else { problem.with_help(help) });
    }

    fn lost<T>(&mut self, pos: Pos, message: &str, help: &str) -> Result<T, Lost> {
        self.fault(pos, message, help);
        Err(Lost)
    }

    /// White space and comments.
    fn space(&mut self) -> Result<(), Lost> {
        loop {
            match self.peek() {
                Some(' ' | '\t' | '\r' | '\n') => {
                    self.bump();
                }
                Some('/') if self.rest.starts_with("//") => {
                    while self.peek().is_some_and(|c| c != '\n') {
                        self.bump();
                    }
                }
                Some('/') if self.rest.starts_with("/*") => {
                    let start = self.pos;
                    self.bump();
                    self.bump();
                    while !self.rest.starts_with("*/") {
                        if self.bump().is_none() {
                            return self.lost(start, "this comment is never closed", "close it with */");
                        }
                    }
                    self.bump();
                    self.bump();
                }
                Some('#') => {
                    let start = self.pos;
                    self.fault(start, "`#` does not begin a comment", "write comments as // or /* */");
                    while self.peek().is_some_and(|c| c != '\n') {
                        self.bump();
                    }
                }
                _ => return Ok(()),
            }
        }
    }

    fn document(&mut self) -> Result<Node, Lost> {
        self.space()?;
        if self.rest.is_empty() {
            let pos = self.pos;
            return self.lost(pos, "the file is empty", "a config is an object: { \"server\": { … } }");
        }
        let node = self.value()?;
        self.space()?;
        if !self.rest.is_empty() {
            let pos = self.pos;
            self.fault(pos, "text after the end of the config", "is there a brace too many before it?");
        }
        Ok(node)
    }

    fn value(&mut self) -> Result<Node, Lost> {
        let pos = self.pos;
        let json = match self.peek() {
            Some('{') => self.nested(Self::object)?,
            Some('[') => self.nested(Self::array)?,
            Some('"' | '\'') => self.string()?.map_or(Json::Broken, Json::String),
            Some(c) if c == '-' || c == '+' || c == '.' || c.is_ascii_digit() => self.number(),
            Some(c) if c.is_alphabetic() || c == '_' || c == '$' => self.word(),
            Some(',' | '}' | ']') => {
                self.fault(pos, "a value is missing here", "");
                Json::Broken
            }
            Some(_) => {
                self.fault(
                    pos,
                    "this is no value",
                    "values are strings in double quotes, numbers, true, false, null, objects and lists",
                );
                self.skip_junk();
                Json::Broken
            }
            None => return self.lost(pos, "the file ends where a value is expected", ""),
        };
        Ok(Node { pos, json })
    }

    fn nested(&mut self, inner: fn(&mut Self) -> Result<Json, Lost>) -> Result<Json, Lost> {
        if self.depth == MAX_DEPTH {
            let message = format!("nested deeper than {MAX_DEPTH} levels");
            self.problems.push(Problem::new(Code::Limit, "", self.pos, message));
            return Err(Lost);
        }
        self.depth += 1;
        let json = inner(self)?;
        self.depth -= 1;
        Ok(json)
    }

    fn object(&mut self) -> Result<Json, Lost> {
        let start = self.pos;
        self.bump();
        let mut entries: Vec<Entry> = Vec::new();
        let mut seen = std::collections::HashMap::new();
        loop {
            self.space()?;
            let key_pos = self.pos;
            let key = match self.peek() {
                Some('}') => {
                    self.bump();
                    return Ok(Json::Object(entries));
                }
                Some(',') => {
                    self.fault(key_pos, "a comma too many", "");
                    self.bump();
                    continue;
                }
                Some('"' | '\'') => self.string()?,
                Some(c) if c.is_alphanumeric() || c == '_' || c == '$' => {
                    self.fault(key_pos, "a key must be in double quotes", "");
                    Some(self.take_word())
                }
                Some(_) => {
                    return self.lost(key_pos, "a key or `}` is expected here", "is a bracket not closed before?");
                }
                None => return self.lost(start, "this `{` is never closed", ""),
            };
            self.space()?;
            if !self.eat(':') {
                let pos = self.pos;
                if self.peek() == Some('=') {
                    self.fault(pos, "`:` is expected between key and value", "");
                    self.bump();
                } else if matches!(self.peek(), Some(',' | '}')) {
                    self.fault(pos, "this key has no value", "");
                } else {
                    return self.lost(pos, "`:` is expected after a key", "");
                }
            }
            self.space()?;
            let value = if matches!(self.peek(), Some(',' | '}')) {
                if self.problems.last().is_none_or(|it| it.message != "this key has no value") {
                    let pos = self.pos;
                    self.fault(pos, "a value is missing here", "");
                }
                Node { pos: self.pos, json: Json::Broken }
            } else {
                self.path.0.push(Step::Key(key.clone().unwrap_or_default()));
                let value = self.value()?;
                self.path.0.pop();
                value
            };
            if entries.len() == MAX_KEYS {
                let message = format!("an object with more than {MAX_KEYS} keys");
                self.problems.push(Problem::new(Code::Limit, self.path.to_string(), start, message));
                return Err(Lost);
            }
            if let Some(key) = key {
                match seen.entry(key.clone()) {
                    std::collections::hash_map::Entry::Vacant(free) => {
                        free.insert(key_pos);
                        entries.push(Entry { key, key_pos, value });
                    }
                    std::collections::hash_map::Entry::Occupied(first) => {
                        let first = *first.get();
                        let message = format!("key `{key}` occurs twice in this object");
                        let help = format!("the first is at {}:{}; keep one of them", first.line, first.column);
                        let path = self.path.key(&key).to_string();
                        if self.problems.len() < MAX_FAULTS {
                            self.problems
                                .push(Problem::new(Code::DuplicateKey, path, key_pos, message).with_help(help));
                        }
                    }
                }
            }
            self.separator('}', start)?;
        }
    }

    fn array(&mut self) -> Result<Json, Lost> {
        let start = self.pos;
        self.bump();
        let mut items = Vec::new();
        loop {
            self.space()?;
            match self.peek() {
                Some(']') => {
                    self.bump();
                    return Ok(Json::Array(items));
                }
                Some('}') => {
                    let pos = self.pos;
                    return self.lost(pos, "`]` is expected here, not `}`", "is the list not closed?");
                }
                None => return self.lost(start, "this `[` is never closed", ""),
                Some(',') => {
                    let pos = self.pos;
                    self.fault(pos, "a comma too many", "");
                    self.bump();
                }
                Some(_) => {
                    self.path.0.push(Step::Index(items.len()));
                    items.push(self.value()?);
                    self.path.0.pop();
                    self.separator(']', start)?;
                }
            }
        }
    }

    /// What follows an entry: a comma, the end, or (reported, but understood) the next entry.
    fn separator(&mut self, end: char, start: Pos) -> Result<(), Lost> {
        self.space()?;
        if self.eat(',') || self.peek() == Some(end) {
            return Ok(());
        }
        let pos = self.pos;
        match self.peek() {
            None if end == '}' => self.lost(start, "this `{` is never closed", ""),
            None => self.lost(start, "this `[` is never closed", ""),
            Some(']' | '}' | ':' | ';') => {
                self.lost(pos, "`,` or the closing bracket is expected here", "is a bracket not closed before?")
            }
            Some(_) => {
                self.fault(pos, "a comma is missing before this", "");
                Ok(())
            }
        }
    }

    /// A string; `None` if it was reported as unreadable but its end was found.
    fn string(&mut self) -> Result<Option<String>, Lost> {
        let start = self.pos;
        let quote = self.bump().unwrap_or('"');
        if quote == '\'' {
            self.fault(start, "strings are written in double quotes", "");
        }
        let mut text = String::new();
        let mut good = true;
        loop {
            let pos = self.pos;
            match self.peek() {
                None | Some('\n') => {
                    return self.lost(
                        start,
                        "this string is not closed on its line",
                        "write a line break in a string as \\n",
                    );
                }
                Some(c) if c == quote => {
                    self.bump();
                    return Ok(good.then_some(text));
                }
                Some('\\') => {
                    self.bump();
                    match self.escape() {
                        Some(c) => text.push(c),
                        None => {
                            good = false;
                            self.fault(
                                pos,
                                "this escape is unknown",
                                "escapes are \\\" \\\\ \\/ \\b \\f \\n \\r \\t and \\uXXXX",
                            );
                        }
                    }
                }
                Some(c) if u32::from(c) < 0x20 => {
                    self.bump();
                    self.fault(pos, "a control character must be escaped in a string", "write a tab as \\t");
                    text.push(c);
                }
                Some(c) => {
                    self.bump();
                    text.push(c);
                }
            }
        }
    }

    fn escape(&mut self) -> Option<char> {
        // The character is looked at first: a line's end stays, and reports the string as unclosed.
        let c = match self.peek()? {
            '"' => '"',
            '\\' => '\\',
            '/' => '/',
            'b' => '\u{8}',
            'f' => '\u{c}',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'u' => {
                self.bump();
                return self.unicode();
            }
            '\n' => return None,
            _ => {
                self.bump();
                return None;
            }
        };
        self.bump();
        Some(c)
    }

    fn unicode(&mut self) -> Option<char> {
        let first = self.hex4()?;
        if !(0xd800..0xe000).contains(&first) {
            return char::from_u32(first);
        }
        // Half of a pair is no character; only the two halves together are.
        if 0xdc00 <= first || !self.rest.starts_with("\\u") {
            return None;
        }
        self.bump();
        self.bump();
        let second = self.hex4()?;
        (0xdc00..0xe000)
            .contains(&second)
            .then(|| char::from_u32(0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00)))
            .flatten()
    }

    fn hex4(&mut self) -> Option<u32> {
        let mut value = 0;
        for _ in 0..4 {
            value = value * 16 + self.peek()?.to_digit(16)?;
            self.bump();
        }
        Some(value)
    }

    fn take_word(&mut self) -> String {
        let mut word = String::new();
        while let Some(c) = self.peek().filter(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '+' | '.' | '$')) {
            word.push(c);
            self.bump();
        }
        word
    }

    fn skip_junk(&mut self) {
        while self.peek().is_some_and(|c| !matches!(c, ',' | '}' | ']' | '\n')) {
            self.bump();
        }
    }

    fn word(&mut self) -> Json {
        let start = self.pos;
        match self.take_word().as_str() {
            "true" => Json::Bool(true),
            "false" => Json::Bool(false),
            "null" => Json::Null,
            word => {
                let help = match word {
                    "True" | "TRUE" | "yes" | "on" => "did you mean true?",
                    "False" | "FALSE" | "no" | "off" => "did you mean false?",
                    "None" | "nil" | "undefined" | "NULL" => "did you mean null?",
                    _ => "text is written in double quotes",
                };
                self.fault(start, "a bare word is no value", help);
                Json::Broken
            }
        }
    }

    fn number(&mut self) -> Json {
        let start = self.pos;
        let text = self.take_word();
        if is_json_number(&text) {
            if text.contains(['.', 'e', 'E']) {
                if let Some(float) = text.parse().ok().filter(|it: &f64| it.is_finite()) {
                    return Json::Float(float);
                }
            } else if let Ok(int) = text.parse() {
                return Json::Int(int);
            }
            self.fault(start, "this number does not fit into 64 bits", "");
        } else {
            self.fault(start, "this is no JSON number", "if it is text, such as a duration, write it in double quotes");
        }
        Json::Broken
    }
}

fn is_json_number(text: &str) -> bool {
    let text = text.strip_prefix('-').unwrap_or(text);
    let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
    let whole = digits(text);
    if whole == 0 || (1 < whole && text.starts_with('0')) {
        return false;
    }
    let mut rest = &text[whole..];
    if let Some(after) = rest.strip_prefix('.') {
        let fraction = digits(after);
        if fraction == 0 {
            return false;
        }
        rest = &after[fraction..];
    }
    if let Some(after) = rest.strip_prefix(['e', 'E']) {
        let after = after.strip_prefix(['+', '-']).unwrap_or(after);
        let exponent = digits(after);
        return exponent != 0 && exponent == after.len();
    }
    rest.is_empty()
}

#[cfg(test)]
mod tests;
