//! `pause`: a process stands still, as if its host were frozen: its connections stay open and nobody answers on them.

use std::{process::ExitCode, time::Duration};

use anyhow::{Context, bail};
use nstance_config::duration::format;
use nstance_core::ports::clock::Clock as _;
use nstance_providers::process::Process;
use nstance_rt::{clock::SystemClock, shutdown::StopSignals};
use rustix::process::Signal;

use crate::{
    cli::PauseArgs,
    faults::{Effect, Fault},
    layout::Layout,
    recovery::{self, Watched},
    target::{self, Target, signal},
};

const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) async fn run(layout: &Layout, args: &PauseArgs) -> anyhow::Result<ExitCode> {
    let mut signals = StopSignals::listen().context("listen for signals")?;
    let target: Target = args.target.parse().map_err(anyhow::Error::msg)?;
    let (name, process, watched) = match &target {
        Target::Instance(id) => (format!("instance/{id}"), target::agent(layout, id)?, None),
        _ => {
            let record = target::component(layout, &target).await?;
            let watched = Watched::begin(layout, &record).await;
            (record.name.clone(), record.process, Some(watched))
        }
    };
    let what = format!("{name} (pid {}) stands still", process.pid);
    let id = format!("pause-{}", name.replace('/', "-"));
    let fault = Fault::new(id, what.clone(), Effect::Pause { target: name.clone() });
    // Written first: who is interrupted now leaves a trace that `heal` can follow.
    fault.write(layout)?;
    let since = SystemClock.monotonic();
    if !signal(process, Signal::STOP).with_context(|| format!("stop {name}"))? {
        fault.remove(layout)?;
        bail!("{name} (pid {}) ended by itself just now", process.pid);
    }
    let flag = layout.dir_flag();
    let lasts = match args.lasts {
        Some(lasts) => lasts,
        None => {
            say!("{what} until `nstance-dev heal{flag}`");
            if args.no_wait {
                return Ok(ExitCode::SUCCESS);
            }
            // Nobody else can lead in the place of a server that is alone, and nothing else is to come.
            return match watched.filter(|it| it.led() && it.has_others()) {
                Some(watched) => Ok(recovery::within(layout, PATIENCE, watched.new_leader(layout, since)).await),
                None => Ok(ExitCode::SUCCESS),
            };
        }
    };
    say!("{what} for {}", format(lasts));
    let taken_over = async {
        if let Some(watched) = watched.as_ref().filter(|it| !args.no_wait && it.led() && it.has_others()) {
            watched.new_leader(layout, since).await;
        }
        std::future::pending::<()>().await
    };
    tokio::select! {
        biased;
        _ = signals.next() => {}
        () = tokio::time::sleep(lasts) => {}
        () = taken_over => {}
    }
    resume(process, &name)?;
    fault.remove(layout)?;
    if args.no_wait {
        return Ok(ExitCode::SUCCESS);
    }
    let resumed = SystemClock.monotonic();
    Ok(recovery::within(layout, PATIENCE, recovery::all_healthy(layout, resumed)).await)
}

/// Lets it go on; one that died meanwhile is left to whoever starts it again.
pub(crate) fn resume(process: Process, name: &str) -> anyhow::Result<()> {
    if signal(process, Signal::CONT).with_context(|| format!("resume {name}"))? {
        say!("{name} (pid {}) goes on", process.pid);
    }
    Ok(())
}
