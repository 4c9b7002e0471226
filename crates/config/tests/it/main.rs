//! Whole config files: examples, reports of problems, settings, userdata, hostile input.
//!
//! All modules are one program, so that it is linked once.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod examples;
mod reports;
mod robustness;
mod settings;
mod userdata;
