//! The agent on every instance: it proves who the machine is, keeps a session to its shard's leader, and says goodbye
//! before the machine goes.
//!
//! It is a library so that tests and load generators can run many of them in one process, each with its own settings,
//! clock, chance and network.

pub mod settings;

pub mod disk;

pub mod host;

pub mod identity_dir;

mod context;

pub use nstance_identity::link;

pub mod machine;

mod refusal;

mod reconnect;

mod enrol;

mod session;

mod renewal;

mod keys;

mod files;

mod board;

mod metadata;

pub mod boot;

mod sample;

pub mod local;

pub mod health;

pub mod notice;

mod agent;

pub mod check;

pub mod service;

pub mod cli;

pub use agent::run;
pub use context::{Components, Control, State};
pub use link::TcpNet;
pub use metadata::Endpoints;
