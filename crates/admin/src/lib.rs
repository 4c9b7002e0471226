//! `nstance-admin`: the cluster through its bucket, the shards through the operators' service, and both over HTTP.
//!
//! A command reads its arguments, asks, and shows the answer; what it asks is in `shards` and `storage`, how it is shown in
//! `output`, and the JSON that it shares with the HTTP API in `view`.

pub mod exit;
pub mod failure;

pub mod args;
mod defaults;

pub mod drains;
#[path = "../../client/src/live.rs"]
mod live;
mod rehearse;
#[path = "../../client/src/shards.rs"]
pub mod shards;
pub mod wait;

pub mod storage;

pub mod issue;

pub mod rotation;

pub mod certificates;

pub mod check;

pub mod output;
pub mod told;
pub mod view;
pub mod words;

pub mod cmd;
pub mod serve;

pub mod cli;
