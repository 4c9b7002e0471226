//! The admin tool as its users run it: its words, its help, where its settings come from.
//!
//! All modules are one program, so that it is linked once.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod commands;
mod help_cluster;
mod help_serve;
mod help_shards;
mod precedence;
