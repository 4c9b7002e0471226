//! The operator from outside: what its manifests say, what API servers make of them, and the program as a whole.
//!
//! All modules are one program, so that it is linked once.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod cel;

mod contract;

mod manifests;

mod rbac;

mod real_api;

mod fake_shard;

mod machines;

mod stories;

mod support;

mod kubernetes;

mod start;

mod webhook;
