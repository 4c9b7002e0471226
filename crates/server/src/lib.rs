//! The server of one shard.
//!
//! Requests change what is asked and wake; workers plan; executors act, under the lease. `boot` starts, `lead` owns
//! what runs while this server leads, `wiring` alone chooses adapters.

pub mod args;

pub mod wiring;

pub mod validate;

pub mod boot;

pub mod lead;

pub mod peer;

pub mod vitals;

pub mod http;

pub mod http2;

pub mod metrics;

pub mod events;

pub mod authority;

pub mod cache;

pub mod counted;

pub mod term_clock;

pub mod term;

pub mod world;

pub mod watch;

pub mod pace;

pub mod service;

pub mod grpc;

pub mod tasks;

pub mod exec;
