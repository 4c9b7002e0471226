//! The server over its port: what a real API server does too (`conformance`), what is only ours, and the real API server
//! that tests can start.
//!
//! All modules are one program, so that it is linked once.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod conformance;
mod faults;
mod files;
mod kube_rs;
mod kubectl;
mod kubernetes_tools;
mod ours;
mod real_api;
mod support;
