//! What a provider accepts in a config, known without any provider running: pure, offline, strict.

use crate::value::{Object, Value};

/// One fault in the part of a config that belongs to a provider.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemaProblem {
    /// Path below the checked object, e.g. `MetadataOptions.HttpTokens`; empty for the object itself.
    pub path: Vec<String>,
    pub what: SchemaFault,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SchemaFault {
    /// The key is not known; `known` holds those that are, for a suggestion.
    UnknownKey {
        known: Vec<&'static str>,
    },
    /// Nstance fills this key in by itself.
    ManagedKey {
        instead: &'static str,
    },
    WrongType {
        expected: &'static str,
    },
    BadValue {
        message: String,
    },
    Missing {
        key: &'static str,
    },
}

/// The strict schema of one provider kind.
pub trait ProviderSchema: Send + Sync {
    /// Checks `server.provider.options`.
    fn check_options(&self, options: &Object) -> Vec<SchemaProblem>;
    /// Checks `args`, merged but not rendered: strings may still hold templates.
    fn check_args(&self, args: &Object) -> Vec<SchemaProblem>;
    /// Checks an instance type, e.g. Proxmox's `cpu:4,memory:8192`.
    fn check_instance_type(&self, _instance_type: &str) -> Option<String> {
        None
    }
}

/// A schema without a single key, for providers that take no args.
pub fn refuse_all(object: &Object, known: &[&'static str]) -> Vec<SchemaProblem> {
    object
        .iter()
        .filter(|(key, _)| !known.contains(key))
        .map(|(key, _): (&str, &Value)| SchemaProblem {
            path: vec![key.to_owned()],
            what: SchemaFault::UnknownKey { known: known.to_vec() },
        })
        .collect()
}
