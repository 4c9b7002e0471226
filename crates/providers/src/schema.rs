//! What the development providers accept in a config, known without any of them running.

use std::collections::BTreeMap;

use nstance_core::{
    ports::schema::{ProviderSchema, SchemaFault, SchemaProblem, refuse_all},
    value::{Object, Value},
};

use crate::duration;

/// The schema of a provider kind, if this build has that provider.
pub fn schema(kind: &str) -> Option<&'static dyn ProviderSchema> {
    match kind {
        "process" => Some(&PROCESS),
        "fake" => Some(&FAKE),
        _ => None,
    }
}

/// What an option holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holds {
    /// Not empty.
    Text,
    Duration,
    /// Not below zero.
    Count,
    Flag,
    /// Subnet to number of places.
    Capacities,
}

struct Flat {
    options: &'static [(&'static str, Holds)],
}

static PROCESS: Flat = Flat {
    options: &[
        ("agent_binary", Holds::Text),
        ("work_dir", Holds::Text),
        ("node_dir", Holds::Text),
        ("create_delay", Holds::Duration),
        ("boot_delay", Holds::Duration),
        ("subnet_capacity", Holds::Capacities),
        ("metrics_interval", Holds::Duration),
    ],
};

static FAKE: Flat = Flat {
    options: &[
        ("idempotent_create", Holds::Flag),
        ("reserve", Holds::Flag),
        ("latency", Holds::Duration),
        ("create_latency", Holds::Duration),
        ("boot_time", Holds::Duration),
        ("stop_time", Holds::Duration),
        ("delete_time", Holds::Duration),
        ("visibility_delay", Holds::Duration),
        ("listing_delay", Holds::Duration),
        ("page_size", Holds::Count),
        ("subnet_capacity", Holds::Capacities),
        ("hosts", Holds::Count),
        ("throttle_rate", Holds::Count),
        ("lb_drain_time", Holds::Duration),
        ("address_move_time", Holds::Duration),
        ("journal", Holds::Text),
    ],
};

impl ProviderSchema for Flat {
    fn check_options(&self, options: &Object) -> Vec<SchemaProblem> {
        let known: Vec<&'static str> = self.options.iter().map(|(name, _)| *name).collect();
        let mut problems = refuse_all(options, &known);
        for (name, holds) in self.options {
            if let Some(value) = options.get(name) {
                problems.extend(holds.check(name, value));
            }
        }
        problems
    }

    fn check_args(&self, args: &Object) -> Vec<SchemaProblem> {
        refuse_all(args, &[])
    }
}

impl Holds {
    fn check(self, name: &str, value: &Value) -> Vec<SchemaProblem> {
        let problem =
            |path: &[&str], what| SchemaProblem { path: path.iter().map(|it| (*it).to_owned()).collect(), what };
        let wrong = |expected| vec![problem(&[name], SchemaFault::WrongType { expected })];
        match (self, value) {
            (Self::Text, Value::String(text)) if text.is_empty() => {
                vec![problem(&[name], SchemaFault::BadValue { message: "must not be empty".to_owned() })]
            }
            (Self::Text, Value::String(_)) | (Self::Flag, Value::Bool(_)) | (Self::Count, Value::Int(0..)) => vec![],
            (Self::Text, _) => wrong("a string"),
            (Self::Flag, _) => wrong("true or false"),
            (Self::Count, _) => wrong("a whole number, 0 or more"),
            (Self::Duration, value) if duration::parse(value).is_some() => vec![],
            (Self::Duration, Value::String(_)) => {
                let message = format!("expected {}", duration::EXPECTED);
                vec![problem(&[name], SchemaFault::BadValue { message })]
            }
            (Self::Duration, _) => wrong(duration::EXPECTED),
            (Self::Capacities, Value::Object(map)) => map
                .iter()
                .filter(|(_, value)| !matches!(value, Value::Int(0..)))
                .map(|(subnet, _)| {
                    problem(&[name, subnet], SchemaFault::WrongType { expected: "a whole number, 0 or more" })
                })
                .collect(),
            (Self::Capacities, _) => wrong("an object of subnet to number of places"),
        }
    }
}

/// Reads `subnet_capacity`, which was checked.
pub(crate) fn capacities(options: &Object) -> BTreeMap<String, u64> {
    let Some(map) = options.get("subnet_capacity").and_then(Value::as_object) else { return BTreeMap::new() };
    let place = |(subnet, value): (&str, &Value)| match value {
        Value::Int(n) => Some((subnet.to_owned(), u64::try_from(*n).ok()?)),
        _ => None,
    };
    map.iter().filter_map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(entries: &[(&str, Value)]) -> Object {
        entries.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect()
    }

    #[test]
    fn any_arg_of_a_development_provider_is_an_error() {
        for kind in ["process", "fake"] {
            let problems = schema(kind).unwrap().check_args(&object(&[("ImageId", Value::from("x"))]));
            assert_eq!(problems.len(), 1);
            assert_eq!(problems[0].path, ["ImageId"]);
            assert!(matches!(problems[0].what, SchemaFault::UnknownKey { .. }));
        }
        assert!(schema("aws").is_none());
    }

    #[test]
    fn every_fault_in_the_options_is_told_with_its_path() {
        let capacities = object(&[("a", Value::Int(3)), ("b", Value::from("many"))]);
        let options = object(&[
            ("work_dirr", Value::from("x")),
            ("work_dir", Value::from("")),
            ("create_delay", Value::from("1 hour")),
            ("boot_delay", Value::Int(5)),
            ("metrics_interval", Value::from("1s")),
            ("subnet_capacity", Value::Object(capacities)),
        ]);
        let problems = schema("process").unwrap().check_options(&options);
        let paths: Vec<String> = problems.iter().map(|it| it.path.join(".")).collect();
        assert_eq!(paths, ["work_dirr", "work_dir", "create_delay", "boot_delay", "subnet_capacity.b"]);
        let SchemaFault::UnknownKey { known } = &problems[0].what else { panic!("{problems:?}") };
        assert!(known.contains(&"work_dir"), "so that a suggestion can be made");
    }
}
