//! A server over real TLS sockets: every port, every answer, and how it heals a shard.
//!
//! All modules are one program, so that it is linked once.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

mod agent_access;
mod agent_files;
mod agent_files_on_demand;
mod agent_keys;
mod agent_reports;
mod api_map;
mod boot_health;
mod boot_lead;
mod boot_records;
mod ca_rotation;
mod healing_balancers;
mod healing_brake;
mod healing_creates;
mod healing_losses;
mod healing_notices;
mod healing_placement;
mod healing_sweeps;
mod images_lookup;
mod openssl;
mod operator_audit;
mod operator_capacity;
mod operator_certificates;
mod operator_config;
mod operator_explain;
mod operator_groups;
mod operator_instances;
mod operator_on_demand;
mod operator_streams;
mod operator_watch;
mod peer_port;
mod provider_port;
mod registration_nonces;
mod registration_rejoin;
mod rollouts;
mod rpc_cases;
mod rpc_matrix;
mod validate_cli;
