//! `nstance-dev server N`: one server in the foreground, in the place that it has in the environment; and how `up` starts
//! it.

use std::{
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process::{Command, ExitCode},
};

use anyhow::{Context, bail};
use clap::Args;

use crate::{
    layout::Layout,
    records::{self, RunFile},
    shape::Place,
    stored,
    up::beside,
};

#[derive(Debug, Args)]
pub(crate) struct ServerArgs {
    /// Directory of the environment
    #[arg(long, default_value = "temp")]
    pub(crate) dir: PathBuf,
    /// Which, from 1
    #[arg(value_name = "N")]
    number: u16,
    /// Debug log
    #[arg(long, short = 'v')]
    debug: bool,
}

/// Becomes the server.
pub(crate) fn run(layout: &Layout, args: &ServerArgs) -> anyhow::Result<ExitCode> {
    let (shape, flag) = (records::shape(layout), layout.dir_flag());
    let Some(place) = shape.places().find(|it| it.number == args.number) else {
        bail!("there is no server {}; there are 1 to {}", args.number, shape.n_servers());
    };
    let name = place.name();
    if let Some(running) = RunFile::read(layout, &name).filter(|it| it.process.lives()) {
        let pid = running.process.pid;
        bail!("{name} runs already (pid {pid}); `nstance-dev kill server/{} --no-restart{flag}` ends it", args.number);
    }
    let store = RunFile::read(layout, records::STORE).filter(|it| it.process.lives());
    let port = store.and_then(|it| it.port("s3")).with_context(|| {
        format!("the store of {} is not running; start it with `nstance-dev up{flag}`", layout.shown())
    })?;
    let program = beside("nstance-server")?;
    let mut arguments = arguments(layout, &place);
    if args.debug {
        arguments.push("--debug".to_owned());
    }
    let variables = stored::variables(port, &format!("dev-{name}"));
    let error = Command::new(&program).args(arguments).envs(variables).current_dir(layout.dir()).exec();
    Err(error).with_context(|| format!("start {}", program.display()))
}

/// How a server of this environment is started.
pub(crate) fn arguments(layout: &Layout, place: &Place) -> Vec<String> {
    let mut arguments: Vec<String> =
        ["--storage", "s3", "--bucket", stored::BUCKET, "--shard"].map(str::to_owned).into();
    arguments.extend([place.shard.to_string(), "--id".to_owned(), place.name()]);
    arguments.extend(["--cachedir".to_owned(), layout.cache_of(place.number).display().to_string()]);
    if 0 < place.port_offset {
        arguments.extend(["--port-offset".to_owned(), place.port_offset.to_string()]);
    }
    arguments
}
