//! `--validate`: the report, and nothing else. A local file needs no credentials and touches nothing.

use std::process::ExitCode;

use anyhow::Context;
use nstance_store::records::config_keys;

use crate::{
    args::{Args, Output},
    service::config,
    wiring,
};

pub async fn run(args: &Args) -> anyhow::Result<ExitCode> {
    nstance_rt::pipe::end_quietly_when_closed();
    let file = args.validate.as_deref().filter(|path| !path.as_os_str().is_empty());
    let (name, bytes) = match file {
        Some(path) => {
            let bytes = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
            (path.display().to_string(), bytes)
        }
        None => stored(args).await?,
    };
    let loaded = config::check(&name, &bytes, args.shard.as_ref());
    match args.output {
        Output::Text => println!("{}", loaded.report.text().trim_end()),
        Output::Json => println!("{}", loaded.report.json()),
    }
    Ok(if loaded.report.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn stored(args: &Args) -> anyhow::Result<(String, Vec<u8>)> {
    let shard = args.shard.as_ref().context("--validate without a file needs --shard, --storage and --bucket")?;
    let store = wiring::store(args)?;
    for key in config_keys(shard) {
        match store.get(&key).await {
            Ok(object) => return Ok((key, object.body)),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error).context("read the stored config"),
        }
    }
    let [first, second] = config_keys(shard);
    anyhow::bail!("neither {first} nor {second} exists in {}; upload one of them", store.describe())
}
