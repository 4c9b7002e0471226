//! Configuration of a shard: JSONC → validated types → merged groups → rendered requests and files.
//!
//! Pure: no I/O, no clock, no randomness. The same bytes give the same report, the same config and the same hashes on
//! every machine, which is why a follower can take over where a leader stopped.
//!
//! ```
//! use nstance_config::{Checks, load};
//!
//! let loaded = load("config/dev-1.jsonc", b"{ \"sever\": {} }", &Checks::offline(nstance_schemas::ALL));
//! assert!(loaded.config.is_none());
//! assert_eq!(loaded.report.problems[0].help.as_deref(), Some("did you mean `server`?"));
//! ```

pub mod jsonc;

mod path;

mod raw;

pub mod problems;

pub mod duration;

pub mod model;

mod userdata;

mod validate;

pub mod merge;

pub mod change;

pub mod owner;

pub mod render;

pub mod hash;

pub use crate::{
    change::{UpsertRequest, Upserted},
    merge::{GroupLayer, MergedGroup, OnDemandLayer},
    model::{Config, GroupField, ProviderKind},
    problems::{Code, Problem, Report, Severity},
    validate::{Checks, Loaded, asked, load},
};
