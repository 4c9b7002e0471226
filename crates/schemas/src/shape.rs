//! What values of a config may look like, as data, and the one checker for all of it.

use nstance_core::{
    ports::schema::{SchemaFault, SchemaProblem},
    value::{Object, Value},
};

use crate::duration;

/// What a value has to be.
#[derive(Debug)]
pub enum Shape {
    /// Any string, also an empty one.
    String,
    /// A string that is not empty.
    Text,
    /// A string with a grammar of its own, which is not empty.
    Grammar(fn(&str) -> TextFault),
    Bool,
    Integer {
        min: i64,
        max: i64,
    },
    /// RFC 3339, as in `2026-01-31T12:00:00Z`.
    Timestamp,
    Duration,
    Enum(&'static [&'static str]),
    List(&'static Shape),
    /// An object with these keys and no others.
    Struct(&'static [Member]),
    /// An object whose keys people choose; `expected` says in words what it holds.
    Map {
        expected: &'static str,
        of: &'static Shape,
    },
    /// An object with anything in it.
    AnyObject,
}

/// What is wrong with a text, if anything, and what to write.
pub type TextFault = Option<(String, &'static str)>;

/// One key of a [`Shape::Struct`].
#[derive(Debug)]
pub struct Member {
    pub name: &'static str,
    /// Its name in a request of the provider's query protocol; the same as `name` where there is none.
    pub wire: &'static str,
    pub shape: &'static Shape,
    pub required: bool,
    pub deprecated: bool,
}

impl Member {
    pub const fn new(name: &'static str, shape: &'static Shape) -> Self {
        Self { name, wire: name, shape, required: false, deprecated: false }
    }

    pub const fn wire(name: &'static str, wire: &'static str, shape: &'static Shape) -> Self {
        Self { name, wire, shape, required: false, deprecated: false }
    }

    #[must_use]
    pub const fn required(self) -> Self {
        Self { required: true, ..self }
    }

    #[must_use]
    pub const fn deprecated(self) -> Self {
        Self { deprecated: true, ..self }
    }
}

/// A number that counts something.
pub static COUNT: Shape = Shape::Integer { min: 0, max: i64::MAX };

/// How far a value is on its way from the config to the provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Never rendered: a value has the type that it was written with.
    Settings,
    /// To be rendered: a string with a template may stand for any string, number or boolean.
    Template,
    /// Rendered. Numbers and booleans may still be strings, as rendering makes no others.
    Rendered,
}

/// A key that Nstance sets, and where to write what it is for.
pub type Managed = (&'static str, &'static str);

/// Checks an object against `members`, of which people may not write the `managed` ones.
pub fn check(object: &Object, members: &[Member], managed: &[Managed], stage: Stage) -> Vec<SchemaProblem> {
    let mut checker = Checker { stage, path: Vec::new(), problems: Vec::new() };
    checker.structure(object, members, managed);
    checker.problems
}

/// Refuses every key of `object`.
pub fn refuse_all(object: &Object) -> Vec<SchemaProblem> {
    check(object, &[], &[], Stage::Settings)
}

/// Every key of `members` and of what is below them by its path, with what its value should be.
pub fn keys(members: &[Member]) -> Vec<(String, String)> {
    fn add(path: &str, shape: &Shape, found: &mut Vec<(String, String)>) {
        let what = match shape {
            Shape::String | Shape::Text | Shape::Grammar(_) | Shape::Timestamp => "string",
            Shape::Bool => "boolean",
            Shape::Integer { .. } => "integer",
            Shape::Duration => "duration",
            Shape::Enum(values) => {
                found.extend(values.iter().map(|value| (path.to_owned(), format!("{value:?}"))));
                return;
            }
            Shape::List(_) => "list",
            Shape::Struct(_) => "object",
            Shape::Map { .. } | Shape::AnyObject => "map",
        };
        found.push((path.to_owned(), what.to_owned()));
        match shape {
            Shape::List(of) => add(&format!("{path}[0]"), of, found),
            Shape::Struct(members) => {
                members.iter().for_each(|it| add(&format!("{path}.{}", it.name), it.shape, found));
            }
            _ => {}
        }
    }
    let mut found = Vec::new();
    members.iter().for_each(|it| add(it.name, it.shape, &mut found));
    found
}

/// Whether a string is still to be rendered.
pub fn is_template(text: &str) -> bool {
    text.contains("{{")
}

struct Checker {
    stage: Stage,
    path: Vec<String>,
    problems: Vec<SchemaProblem>,
}

impl Checker {
    fn report(&mut self, what: SchemaFault) {
        self.problems.push(SchemaProblem { path: self.path.clone(), what, help: None });
    }

    fn wrong_type(&mut self, expected: &'static str) {
        self.report(SchemaFault::WrongType { expected });
    }

    fn bad(&mut self, message: String, help: Option<String>) {
        let what = SchemaFault::BadValue { message };
        self.problems.push(SchemaProblem { path: self.path.clone(), what, help });
    }

    fn below(&mut self, step: String, check: impl FnOnce(&mut Self)) {
        self.path.push(step);
        check(self);
        self.path.pop();
    }

    fn structure(&mut self, object: &Object, members: &[Member], managed: &[Managed]) {
        for (key, value) in object.iter() {
            if *value == Value::Null && self.stage == Stage::Settings && members.iter().any(|it| it.name == key) {
                continue;
            }
            self.below(key.to_owned(), |it| it.member(key, value, members, managed));
        }
        for member in members.iter().filter(|it| it.required) {
            if object.get(member.name).is_none_or(|it| *it == Value::Null) {
                self.report(SchemaFault::Missing { key: member.name });
            }
        }
    }

    fn member(&mut self, key: &str, value: &Value, members: &[Member], managed: &[Managed]) {
        if let Some((_, instead)) = managed.iter().find(|(name, _)| *name == key) {
            self.report(SchemaFault::ManagedKey { instead });
            return;
        }
        let Some(member) = members.iter().find(|it| it.name == key) else {
            let is_managed = |name: &str| managed.iter().any(|(it, _)| *it == name);
            let known = members.iter().map(|it| it.name).filter(|name| !is_managed(name)).collect();
            self.report(SchemaFault::UnknownKey { known });
            return;
        };
        if member.deprecated {
            let message = format!("`{key}` is deprecated by the provider");
            self.report(SchemaFault::Deprecated { message });
        }
        self.value(value, member.shape);
    }

    fn value(&mut self, value: &Value, shape: &Shape) {
        match (shape, value) {
            (Shape::List(of), Value::Array(items)) => {
                for (i, item) in items.iter().enumerate() {
                    self.below(i.to_string(), |it| it.value(item, of));
                }
            }
            (Shape::List(_), _) => self.wrong_type("a list"),
            (Shape::Struct(members), Value::Object(object)) => self.structure(object, members, &[]),
            (Shape::Map { of, .. }, Value::Object(object)) => {
                for (key, value) in object.iter() {
                    self.below(key.to_owned(), |it| it.value(value, of));
                }
            }
            (Shape::AnyObject, Value::Object(_)) => {}
            (Shape::Map { expected, .. }, _) => self.wrong_type(expected),
            (Shape::Struct(_) | Shape::AnyObject, _) => self.wrong_type("an object"),
            (_, Value::String(text)) if self.stage == Stage::Template && is_template(text) => {}
            (Shape::Integer { min, max }, value) => self.integer(value, *min, *max),
            (Shape::Bool, Value::Bool(_)) => {}
            (Shape::Bool, Value::String(text)) if self.is_lenient() && matches!(text.as_str(), "true" | "false") => {}
            (Shape::Bool, _) => self.wrong_type("true or false"),
            (Shape::Duration, value) => match (duration::parse(value), value) {
                (Some(_), _) => {}
                (None, Value::String(_)) => self.bad(format!("expected {}", duration::EXPECTED), None),
                (None, _) => self.wrong_type(duration::EXPECTED),
            },
            (_, Value::String(text)) => self.string(text, shape),
            _ => self.wrong_type("a string"),
        }
    }

    fn is_lenient(&self) -> bool {
        self.stage != Stage::Settings
    }

    fn integer(&mut self, value: &Value, min: i64, max: i64) {
        let number = match value {
            Value::Int(number) => Some(*number),
            Value::String(text) if self.is_lenient() => text.parse().ok(),
            _ => None,
        };
        match number {
            Some(number) if (min..=max).contains(&number) => {}
            Some(number) => {
                let help = if max == i64::MAX { format!("use {min} or more") } else { format!("use {min} to {max}") };
                self.bad(format!("{number} is out of range"), Some(help));
            }
            None if (min, max) == (0, i64::MAX) => self.wrong_type("a whole number, 0 or more"),
            None => self.wrong_type("a whole number"),
        }
    }

    fn string(&mut self, text: &str, shape: &Shape) {
        match shape {
            Shape::Text if text.is_empty() => self.bad("this must not be empty".to_owned(), None),
            Shape::Grammar(_) if text.is_empty() => self.bad("this must not be empty".to_owned(), None),
            Shape::Grammar(fault) => {
                if let Some((message, help)) = fault(text) {
                    self.bad(message, Some(help.to_owned()));
                }
            }
            Shape::Enum(values) if !values.contains(&text) => {
                let same = values.iter().find(|it| it.eq_ignore_ascii_case(text));
                let help = match same {
                    Some(same) => format!("write `{same}`"),
                    None => format!("use one of: {}", values.join(", ")),
                };
                self.bad(format!("{} is not known here", shown(text)), Some(help));
            }
            Shape::Timestamp if !is_timestamp(text) => {
                self.bad(format!("{} is no time", shown(text)), Some("such as 2026-01-31T12:00:00Z".to_owned()));
            }
            _ => {}
        }
    }
}

/// `text` as a message may quote it.
pub(crate) fn shown(text: &str) -> String {
    const MAX_SHOWN: usize = 80;
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("`{}…`", &text[..end]),
        None => format!("`{text}`"),
    }
}

/// The form of a time only: whether there is such a day is for the provider to say.
fn is_timestamp(text: &str) -> bool {
    let digits = |from: usize, to: usize| text.get(from..to).is_some_and(|it| it.bytes().all(|b| b.is_ascii_digit()));
    let marks = [(4, '-'), (7, '-'), (10, 'T'), (13, ':'), (16, ':')];
    let has_marks = marks.iter().all(|(at, mark)| text.as_bytes().get(*at).is_some_and(|b| char::from(*b) == *mark));
    let numbers = [(0, 4), (5, 7), (8, 10), (11, 13), (14, 16), (17, 19)];
    has_marks && numbers.iter().all(|(from, to)| digits(*from, *to)) && text.ends_with('Z')
}

/// Whether `text` is 1 to `max` long and of these characters only.
pub(crate) fn is_made_of(text: &str, max: usize, is_allowed: impl Fn(u8) -> bool) -> bool {
    !text.is_empty() && text.len() <= max && text.bytes().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{faults, list, object};

    static INNER: Shape = Shape::Struct(&[
        Member::new("Size", &Shape::Integer { min: 1, max: 10 }).required(),
        Member::new("On", &Shape::Bool),
        Member::new("Old", &Shape::String).deprecated(),
    ]);
    static MEMBERS: &[Member] = &[
        Member::new("Name", &Shape::Text),
        Member::new("Mode", &Shape::Enum(&["fast", "slow"])),
        Member::new("Items", &Shape::List(&INNER)),
        Member::new("Until", &Shape::Timestamp),
        Member::new("Wait", &Shape::Duration),
        Member::new("Labels", &Shape::Map { expected: "an object of strings", of: &Shape::String }),
        Member::new("Id", &Shape::Text),
    ];

    fn check_at(stage: Stage, entries: &[(&str, Value)]) -> Vec<String> {
        faults(check(&object(entries), MEMBERS, &[("Id", "remove it")], stage))
    }

    #[test]
    fn every_fault_is_found_with_its_path() {
        let items = list(&[
            Value::Object(object(&[("Size", Value::Int(11)), ("On", Value::from("yes")), ("on", Value::Bool(true))])),
            Value::Object(object(&[("Old", Value::from("x"))])),
            Value::from("x"),
        ]);
        let found = check_at(
            Stage::Settings,
            &[
                ("Name", Value::from("")),
                ("Mode", Value::from("Fast")),
                ("Items", items),
                ("Until", Value::from("tomorrow")),
                ("Wait", Value::Int(5)),
                ("Labels", Value::Object(object(&[("a", Value::Int(1))]))),
                ("Id", Value::from("x")),
                ("Nmae", Value::from("x")),
            ],
        );
        assert_eq!(
            found,
            [
                "Name: this must not be empty",
                "Mode: `Fast` is not known here (write `fast`)",
                "Items.0.Size: 11 is out of range (use 1 to 10)",
                "Items.0.On: expected true or false",
                "Items.0.on: unknown of Size, On, Old",
                "Items.1.Old: deprecated: `Old` is deprecated by the provider",
                "Items.1: missing Size",
                "Items.2: expected an object",
                "Until: `tomorrow` is no time (such as 2026-01-31T12:00:00Z)",
                "Wait: expected a duration such as \"500ms\" or \"1m30s\"",
                "Labels.a: expected a string",
                "Id: managed: remove it",
                "Nmae: unknown of Name, Mode, Items, Until, Wait, Labels",
            ]
        );
    }

    #[test]
    fn a_string_stands_for_a_number_only_where_rendering_makes_strings() {
        let item = |size, on| list(&[Value::Object(object(&[("Size", size), ("On", on)]))]);
        let strings = [("Items", item(Value::from("3"), Value::from("true")))];
        assert_eq!(check_at(Stage::Rendered, &strings), [""; 0]);
        assert_eq!(check_at(Stage::Template, &strings), [""; 0]);
        assert_eq!(check_at(Stage::Settings, &strings).len(), 2);
        let templates = [
            ("Items", item(Value::from("{{ .Vars.Size }}"), Value::from("{{ .Vars.On }}"))),
            ("Mode", Value::from("{{ .Vars.Mode }}")),
            ("Until", Value::from("{{ .Vars.Until }}")),
            ("Wait", Value::from("{{ .Vars.Wait }}")),
        ];
        assert_eq!(check_at(Stage::Template, &templates), [""; 0]);
        assert_eq!(check_at(Stage::Rendered, &templates).len(), 5);
        let in_place_of_a_list = [("Items", Value::from("{{ .Vars.Items }}"))];
        assert_eq!(check_at(Stage::Template, &in_place_of_a_list), ["Items: expected a list"], "it stays a string");
    }

    #[test]
    fn all_keys_are_listed_with_what_they_hold() {
        let all: Vec<String> = keys(&MEMBERS[1..3]).into_iter().map(|(path, what)| format!("{path}: {what}")).collect();
        assert_eq!(
            all,
            [
                "Mode: \"fast\"",
                "Mode: \"slow\"",
                "Items: list",
                "Items[0]: object",
                "Items[0].Size: integer",
                "Items[0].On: boolean",
                "Items[0].Old: string",
            ]
        );
    }

    #[test]
    fn null_is_absent_in_settings_and_no_value_in_args() {
        let null = [("Name", Value::Null)];
        assert_eq!(check_at(Stage::Settings, &null), [""; 0]);
        assert_eq!(check_at(Stage::Rendered, &null), ["Name: expected a string"]);
    }
}
