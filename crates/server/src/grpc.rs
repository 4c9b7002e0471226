//! The gRPC rim: connections, who stands behind them, and handlers that parse, ask and convert.

pub mod agent;
pub mod auth;
pub mod conn;
pub mod convert;
pub mod ends;
pub mod envelope;
pub mod limits;
pub mod operator;
pub mod registration;
pub mod serve;
pub mod status;
pub mod watch;
