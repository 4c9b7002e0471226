//! The whole plane: components as processes, the S3 server, the map of rooms and traps.
//!
//! All modules are one program, so that it is linked once.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod e2e_common;
mod http_common;
mod openapi_common;
mod s3_common;
mod terminal_common;

mod arrows;
mod baseline;
mod crash_server;
mod e2e_admin_cluster;
mod e2e_admin_http;
mod e2e_admin_live;
mod e2e_admin_shards;
mod e2e_files;
mod e2e_kill;
mod e2e_kubernetes;
mod e2e_resume;
mod e2e_servers;
mod e2e_up;
mod real_api;
mod s3_conformance;
mod s3_faults;
mod s3_linearizable;
mod store_contract;
mod trap_map;
mod validate_alike;
