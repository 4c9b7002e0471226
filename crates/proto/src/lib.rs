//! Wire forms of Nstance, generated from `proto/`, and how the details of a status are read.
//!
//! Numbers and names, once released, keep their meaning for ever; `tests/baseline.rs` holds them against a checked-in
//! list.

#![allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    unreachable_pub,
    reason = "generated code keeps its own style"
)]

/// Messages and services of package `nstance.v1`.
pub mod v1 {
    tonic::include_proto!("nstance.v1");
}

/// The gRPC error model.
pub mod rpc {
    tonic::include_proto!("google.rpc");
}

pub mod codec;
pub mod refusal;

/// The compiled descriptors, for reflection and for the baseline test.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
