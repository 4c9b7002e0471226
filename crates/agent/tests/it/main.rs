//! The agent against a real server of its protocol, over real sockets and real files.
//!
//! All modules are one program, so that it is linked once.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

mod agent_boot;
mod agent_cli;
mod agent_files;
mod agent_keys;
mod agent_kill;
mod agent_local;
mod agent_metadata;
mod agent_registration;
mod agent_renewal;
mod agent_session;
