//! What the operator's manifests say.
//!
//! All modules are one program, so that it is linked once.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod cel;

mod contract;

mod manifests;

mod rbac;
