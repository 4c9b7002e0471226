//! `nstance-admin`: the cluster through its bucket, the shards through the operators' service, and both over HTTP.
//!
//! A command reads its arguments, asks, and shows the answer. Shards are asked through `nstance_client`, the bucket through
//! `storage`; `output` shows the answer, and `view` is the JSON that commands share with the HTTP API.

pub mod exit;
pub mod failure;

pub mod args;
mod defaults;

pub mod identity_files;

pub mod drains;
mod rehearse;
pub mod wait;

pub mod storage;

pub mod issue;

pub mod rotation;

pub mod certificates;

pub mod check;

pub mod output;
pub mod report;
pub mod view;
pub mod words;

pub mod cmd;
pub mod serve;

pub mod cli;
