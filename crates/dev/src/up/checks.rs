//! What is there before a start: configs, programs, free ports.

use std::{fs, path::PathBuf};

use anyhow::{Context, bail};
use nstance_config::Config;

use crate::{
    cli::UpArgs,
    layout::Layout,
    ports, render,
    shape::{self, MOST_SERVERS, Shape},
};

/// Shards of a new environment if nobody says how many.
const SHARDS: u16 = 2;

/// What is asked for, and what is there already.
pub(super) fn shape(args: &UpArgs, layout: &Layout) -> anyhow::Result<Shape> {
    let there: Vec<Config> = (1..=MOST_SERVERS).map_while(|number| config_on_disk(layout, number)).collect();
    let n_there = u16::try_from(there.len()).unwrap_or(MOST_SERVERS);
    let shards = args.shards.unwrap_or(if n_there == 0 { SHARDS } else { n_there });
    Shape::new(shards, args.servers_per_shard, args.links || there.iter().any(is_linked))
}

/// A shard's config, if there is one and it is in order.
pub(super) fn config_on_disk(layout: &Layout, number: u16) -> Option<Config> {
    let path = layout.bucket().join("config").join(format!("{}.jsonc", shape::shard(number)));
    fs::read(path).ok().and_then(|bytes| render::check("config", &bytes, None).ok())
}

/// Whether servers of this config leave the address of the leader to a link.
pub(super) fn is_linked(config: &Config) -> bool {
    config.server.bind.operator.port != config.server.advertise.operator.port
}

/// A program of ours, built beside this one.
pub(crate) fn beside(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("find our own program")?;
    let path = own.with_file_name(name);
    if !path.is_file() {
        bail!("there is no {}; build it with `cargo build -p {name}`", path.display());
    }
    Ok(path)
}

pub(super) fn check_free(named: &[(&str, u16)]) -> anyhow::Result<()> {
    let taken: Vec<String> = named
        .iter()
        .filter(|(_, port)| ports::is_taken(*port))
        .map(|(name, port)| format!("{port} ({name})"))
        .collect();
    if taken.is_empty() {
        return Ok(());
    }
    bail!(
        "port {} is taken by another program; end that, or give a new environment other ports with --port-base",
        taken.join(", ")
    )
}
