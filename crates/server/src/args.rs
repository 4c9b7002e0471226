//! The command line, and nothing but it.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use nstance_core::ids::{ServerId, Shard};

/// The server of one shard: keeps groups of VMs at their wanted size.
#[derive(Debug, Parser)]
#[command(name = "nstance-server", version)]
pub struct Args {
    /// Server id, different for every server of a shard
    #[arg(long, value_parser = parse_id, required_unless_present = "validate")]
    pub id: Option<ServerId>,
    /// Shard to serve; must equal server.shard of its config
    #[arg(long, value_parser = parse_shard, required_unless_present = "validate")]
    pub shard: Option<Shard>,
    /// Where all state lives
    #[arg(long, value_enum, required_unless_present = "validate")]
    pub storage: Option<Storage>,
    /// Bucket; for `file` a directory
    #[arg(long, required_unless_present = "validate")]
    pub bucket: Option<String>,
    /// Key prefix before the whole layout
    #[arg(long, default_value = "")]
    pub prefix: String,
    /// Place of the SQLite cache and the last good config; may be deleted at any time
    #[arg(long, default_value = "./cache")]
    pub cachedir: PathBuf,
    /// Host of the advertised health and election addresses
    #[arg(long)]
    pub advertise_host: Option<String>,
    /// Added to the ports this server binds: for several servers of one shard on one machine
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub port_offset: u16,
    /// Check a config file, or the stored config, print the report and exit with 0 or 1
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    pub validate: Option<PathBuf>,
    /// Form of the validation report
    #[arg(long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
    /// Debug log
    #[arg(long, short = 'v')]
    pub debug: bool,
    /// Log as JSON lines
    #[arg(long, env = "NSTANCE_LOG_JSON")]
    pub log_json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Storage {
    S3,
    File,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    Text,
    Json,
}

fn parse_id(text: &str) -> Result<ServerId, String> {
    text.parse().map_err(|error: nstance_core::ids::IdError| error.to_string())
}

fn parse_shard(text: &str) -> Result<Shard, String> {
    text.parse().map_err(|error: nstance_core::ids::IdError| error.to_string())
}
