//! Use cases, one family per file: what a request means, without its wire form.

pub(crate) mod audit;
pub mod certificates;
pub mod config;
pub mod explain;
pub mod files;
pub mod groups;
pub mod health;
pub mod instances;
pub mod keys;
pub mod on_demand;
pub mod operators;
pub mod refresh;
pub mod register;
pub mod rejoin;
pub mod report;
pub mod statics;
pub mod status;
