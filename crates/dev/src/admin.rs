//! The admin tool, pointed at an environment.

use std::{ffi::OsString, os::unix::process::CommandExt as _, process::Command, process::ExitCode};

use anyhow::{Context, bail};

use crate::{
    layout::Layout,
    records::{self, RunFile},
    stored,
};

/// What the admin tool, or a shell, needs to know of an environment. Each of its flags has a variable.
pub(crate) async fn variables(layout: &Layout) -> anyhow::Result<Vec<(String, String)>> {
    let store = RunFile::read(layout, records::STORE).filter(|it| it.process.lives());
    let port = store.and_then(|it| it.port("s3")).with_context(|| {
        format!("nothing is up in {}; start it with `nstance-dev up{}`", layout.shown(), layout.dir_flag())
    })?;
    let mut variables: Vec<(String, String)> = stored::variables(port, "dev-cli").into_iter().collect();
    // Where leaders are told to be: links with several servers, the one server otherwise.
    let (mut servers, bucket) = (Vec::new(), stored::open(port)?);
    for shard in records::shape(layout).shards() {
        match stored::read_config(&bucket, &shard).await {
            Ok(there) => servers.extend(there.map(|it| (shard, it.config.server.advertise.operator.port))),
            // A config that somebody broke is when the admin tool is needed: it asks all servers, and the leader answers.
            Err(_) => {
                let living = records::servers_of(layout, shard.as_str());
                servers.extend(living.iter().filter_map(|it| Some((shard.clone(), it.port("operator")?))));
            }
        }
    }
    let servers: Vec<String> = servers.iter().map(|(shard, port)| format!("{shard}=127.0.0.1:{port}")).collect();
    let ours = [
        ("NSTANCE_TEMP_DIR", layout.dir().display().to_string()),
        ("NSTANCE_IDENTITY_DIR", layout.identity().display().to_string()),
        ("NSTANCE_STORAGE_PROVIDER", "s3".to_owned()),
        ("NSTANCE_STORAGE_BUCKET", stored::BUCKET.to_owned()),
        ("NSTANCE_KEY_PROVIDER", "env".to_owned()),
        ("NSTANCE_SERVERS", servers.join(",")),
    ];
    variables.extend(ours.map(|(name, value)| (name.to_owned(), value)));
    Ok(variables)
}

/// Becomes the admin tool.
pub(crate) async fn run(layout: &Layout, words: &[OsString]) -> anyhow::Result<ExitCode> {
    let beside = std::env::current_exe().context("find the own program")?.with_file_name("nstance-admin");
    if !beside.exists() {
        bail!("{} is not there; build it with `make build`", beside.display());
    }
    let error = Command::new(&beside).args(words).envs(variables(layout).await?).exec();
    Err(error).with_context(|| format!("start {}", beside.display()))
}
