//! `up --detach`: the same supervisor in a session of its own. We wait until it is up and show what it says meanwhile.

use std::{
    fs::{self, OpenOptions},
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    path::Path,
    process::{ExitCode, Stdio},
    time::Duration,
};

use anyhow::{Context, bail};
use nstance_rt::shutdown::StopSignals;
use tokio::process::Command;

use crate::{
    cli::UpArgs,
    layout::Layout,
    records::{self, Phase, RunFile},
};

const PERIOD: Duration = Duration::from_millis(30);

pub(crate) async fn run(args: &UpArgs) -> anyhow::Result<ExitCode> {
    let mut signals = StopSignals::listen().context("listen for signals")?;
    let layout = Layout::make(&args.dir)?;
    if let Some(up) = records::supervisor(&layout) {
        bail!(already(&layout, &up));
    }
    let path = layout.log(records::UP);
    let log = OpenOptions::new().create(true).append(true).open(&path);
    let log = log.with_context(|| format!("open {}", path.display()))?;
    let mut shown = log.metadata().map_or(0, |meta| meta.len());
    let program = std::env::current_exe().context("find our own program")?;
    let mut child = Command::new(program)
        .args(std::env::args_os().skip(1))
        .arg("--supervised")
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("share the log")?)
        .stderr(log)
        .spawn()
        .context("start the supervisor")?;
    let pid = child.id();
    loop {
        shown = copy(&path, shown);
        let ready = RunFile::read(&layout, records::UP)
            .is_some_and(|it| Some(it.process.pid) == pid && it.phase == Phase::Ready);
        if ready {
            copy(&path, shown);
            let flag = layout.dir_flag();
            say!("up in the background (pid {}); nstance-dev status|logs|down{flag}", pid.unwrap_or_default());
            return Ok(ExitCode::SUCCESS);
        }
        tokio::select! {
            biased;
            ended = child.wait() => {
                copy(&path, shown);
                let status = ended.context("wait for the supervisor")?;
                return Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
            }
            _ = signals.next() => {
                if let Some(up) = RunFile::read(&layout, records::UP).filter(|it| Some(it.process.pid) == pid) {
                    up.process.ask_to_end().context("stop the supervisor")?;
                } else {
                    let _ = child.start_kill();
                }
            }
            () = tokio::time::sleep(PERIOD) => {}
        }
    }
}

pub(crate) fn already(layout: &Layout, up: &RunFile) -> String {
    let flag = layout.dir_flag();
    format!(
        "{} is up already (pid {}, since {}); look with `nstance-dev status{flag}`, stop it with `nstance-dev down{flag}`",
        layout.shown(),
        up.process.pid,
        up.started_at
    )
}

/// Shows what was added to a file, and answers up to where.
fn copy(path: &Path, from: u64) -> u64 {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = fs::File::open(path)?;
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let mut out = io::stdout().lock();
    let _ = out.write_all(&bytes);
    let _ = out.flush();
    from + u64::try_from(bytes.len()).unwrap_or(0)
}
