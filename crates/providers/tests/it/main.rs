//! The provider contract on every adapter of this room.
//!
//! All modules are one program, so that it is linked once.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod fake_subject;

mod contract_fake;
mod contract_faulty;
mod contract_minimal;
mod contract_process;
