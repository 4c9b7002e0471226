//! `partition`: the way between two is cut or slowed; and `heal`, which ends every fault.
//!
//! What servers and the store say to each other is lost in the store, by the name a server goes by there. What agents and
//! operators and a leader say to each other is lost in the links.

use std::{fs, io, process::ExitCode, time::Duration};

use anyhow::{Context, bail};
use nstance_config::duration::format;
use nstance_core::{ids::Shard, ports::clock::Clock as _};
use nstance_providers::process::power;
use nstance_rt::{clock::SystemClock, shutdown::StopSignals};
use rustix::process::Signal;

use crate::{
    cli::PartitionArgs,
    faults::{self, Cut, Effect, Fault, Who},
    http,
    layout::Layout,
    records::{self, RunFile},
    recovery::{self, Watched},
    s3::FaultRule,
    target::{self, Target, signal},
};

const PATIENCE: Duration = Duration::from_secs(60);

/// What can be parted.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Pair {
    Store(Target),
    Link(Who, Shard),
}

/// Which of the two was named first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    AsMeant,
    Reversed,
}

fn pair(from: &str, to: &str) -> anyhow::Result<(Pair, Order)> {
    if let Some(pair) = pair_in_order(from, to)? {
        return Ok((pair, Order::AsMeant));
    }
    if let Some(pair) = pair_in_order(to, from)? {
        return Ok((pair, Order::Reversed));
    }
    bail!(
        "{from} and {to} cannot be parted; pairs are server/N and s3, agents and shard/NAME, operators and shard/NAME"
    )
}

fn pair_in_order(from: &str, to: &str) -> anyhow::Result<Option<Pair>> {
    let who = Who::ALL.into_iter().find(|it| it.name() == from);
    let to: Option<Target> = to.parse().ok();
    let from: Option<Target> = from.parse().ok();
    Ok(match (who, from, to) {
        (Some(who), _, Some(Target::Shard(shard))) => Some(Pair::Link(who, shard)),
        (Some(who), _, Some(Target::Server(_))) => {
            bail!("a link leads to whoever leads; name the shard, as in `partition {} shard/dev-1`", who.name())
        }
        (None, Some(from @ (Target::Server(_) | Target::Shard(_))), Some(Target::Store)) => Some(Pair::Store(from)),
        (None, Some(Target::Instance(_)), Some(Target::Server(_) | Target::Shard(_))) => bail!(
            "links are cut for all agents of a shard, as in `partition agents shard/dev-1`; for a single one use \
             `pause instance/ID`"
        ),
        (None, Some(Target::Server(_)), Some(Target::Server(_))) => bail!(
            "servers reach each other directly on this machine, and that cannot be cut here; use `pause server/N` for a \
             peer that falls silent, `partition server/N s3` for a leader that cannot renew, and `nstance-dev sim` for \
             peers that are cut off from each other"
        ),
        _ => None,
    })
}

/// How a fault is put in force and ended.
struct Made {
    fault: Fault,
    store: Option<u16>,
}

impl Made {
    async fn end(&self, layout: &Layout) -> anyhow::Result<()> {
        if let Some(port) = self.store {
            let path = format!("/-/faults/{}", self.fault.id);
            http::send(port, "DELETE", &path, "").await.context("end the fault in the store")?;
        }
        self.fault.remove(layout).map(|_| ())
    }
}

pub(crate) async fn run(layout: &Layout, args: &PartitionArgs) -> anyhow::Result<ExitCode> {
    let mut signals = StopSignals::listen().context("listen for signals")?;
    let (pair, order) = pair(&args.from, &args.to)?;
    let (made, watched) = match &pair {
        Pair::Store(server) => {
            let server = target::component(layout, server).await?;
            let watched = Watched::begin(layout, &server).await;
            (from_store(layout, &server, order, args).await?, Some(watched))
        }
        Pair::Link(who, shard) => (cut_link(layout, *who, shard, order, args)?, None),
    };
    let since = SystemClock.monotonic();
    let taken_over = async {
        if let Some(watched) =
            watched.filter(|it| !args.no_wait && args.latency.is_none() && it.led() && it.has_others())
        {
            watched.new_leader(layout, since).await;
        }
    };
    let Some(lasts) = args.lasts else {
        say!("{} until `nstance-dev heal{}`", made.fault.what, layout.dir_flag());
        return Ok(recovery::within(layout, PATIENCE, taken_over).await);
    };
    say!("{} for {}", made.fault.what, format(lasts));
    tokio::select! {
        biased;
        _ = signals.next() => {}
        () = tokio::time::sleep(lasts) => {}
        () = async { taken_over.await; std::future::pending().await } => {}
    }
    made.end(layout).await?;
    say!("healed");
    if args.no_wait {
        return Ok(ExitCode::SUCCESS);
    }
    let healed = SystemClock.monotonic();
    Ok(recovery::within(layout, PATIENCE, recovery::all_healthy(layout, healed)).await)
}

fn what(args: &PartitionArgs, from: &str, to: &str) -> String {
    match args.latency {
        Some(latency) => format!("{from} and {to} hear each other {} late", format(latency)),
        None if args.one_way => format!("{to} does not hear {from}"),
        None => format!("{from} and {to} do not hear each other"),
    }
}

fn latency_ms(args: &PartitionArgs) -> u64 {
    args.latency.map_or(0, |it| u64::try_from(it.as_millis()).unwrap_or(u64::MAX))
}

async fn from_store(layout: &Layout, server: &RunFile, order: Order, args: &PartitionArgs) -> anyhow::Result<Made> {
    let store = target::component(layout, &Target::Store).await?;
    let port = store.port("s3").context("the store's port is not recorded")?;
    let name = &server.name;
    let what = match order {
        Order::AsMeant => what(args, name, "s3"),
        Order::Reversed => what(args, "s3", name),
    };
    let effect = Effect::Store { server: name.clone(), latency_ms: latency_ms(args) };
    let fault = Fault::new(format!("partition-{name}-s3"), what, effect);
    // What the store answers is lost only after it did what it was asked.
    let answers_lost = args.one_way && order == Order::Reversed;
    let rule = FaultRule {
        id: Some(fault.id.clone()),
        access_key: Some(format!("dev-{name}")),
        latency_ms: latency_ms(args),
        black_hole: args.latency.is_none() && !answers_lost,
        drop_after_apply: args.latency.is_none() && answers_lost,
        ..FaultRule::default()
    };
    let made = Made { fault, store: Some(port) };
    made.fault.write(layout)?;
    let asked = http::send(port, "POST", "/-/faults", &serde_json::to_string(&rule)?).await;
    match asked.context("ask the store for a fault") {
        Ok(answer) if answer.code == 200 => Ok(made),
        Ok(answer) => {
            made.fault.remove(layout)?;
            bail!("the store refuses the fault: {}", answer.body.trim())
        }
        Err(error) => {
            made.fault.remove(layout)?;
            Err(error)
        }
    }
}

fn cut_link(layout: &Layout, who: Who, shard: &Shard, order: Order, args: &PartitionArgs) -> anyhow::Result<Made> {
    let shape = records::shape(layout);
    if !shape.shards().any(|it| it == *shard) {
        let known: Vec<String> = shape.shards().map(|it| format!("shard/{it}")).collect();
        bail!("there is no shard/{shard}; there is {}", known.join(", "));
    }
    if records::supervisor(layout).is_none() {
        bail!("no `nstance-dev up` is running, and links live in it");
    }
    if !shape.links {
        bail!(
            "there are no links here: restart with --links, in a new environment (`nstance-dev clean` ends this one)"
        );
    }
    let place = format!("shard/{shard}");
    let (what, one_way) = match order {
        Order::AsMeant => (what(args, who.name(), &place), Cut::ToServer),
        Order::Reversed => (what(args, &place, who.name()), Cut::ToClient),
    };
    let cut = match args.latency {
        Some(_) => Cut::Nothing,
        None if args.one_way => one_way,
        None => Cut::Everything,
    };
    let effect = Effect::Link { who, shard: shard.to_string(), cut, latency_ms: latency_ms(args) };
    let fault = Fault::new(format!("partition-{}-{shard}", who.name()), what, effect);
    fault.write(layout)?;
    Ok(Made { fault, store: None })
}

/// Ends every fault, whoever made it, and waits until all is healthy.
pub(crate) async fn heal(layout: &Layout) -> anyhow::Result<ExitCode> {
    let since = SystemClock.monotonic();
    let found = faults::all(layout);
    // All of them, recorded as faulty or not: what runs is not harmed, and a lost note must not leave it frozen.
    let mut processes: Vec<_> = records::all(layout).into_iter().map(|it| it.process).collect();
    processes.extend(power::agents(&layout.instances()).await.context("find the agents")?);
    for process in processes {
        signal(process, Signal::CONT).with_context(|| format!("resume pid {}", process.pid))?;
    }
    let store = RunFile::read(layout, records::STORE).filter(|it| it.process.lives());
    if let Some(port) = store.and_then(|it| it.port("s3")) {
        http::send(port, "DELETE", "/-/faults", "").await.context("end the faults of the store")?;
    }
    for fault in &found {
        match &fault.effect {
            Effect::Held { target } => {
                let path = records::hold_path(layout, target);
                match fs::remove_file(&path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(error).with_context(|| format!("remove {}", path.display()));
                    }
                    _ => {}
                }
                say!("{target} is started again");
            }
            Effect::Pause { target } => {
                fault.remove(layout)?;
                say!("{target} goes on");
            }
            Effect::Store { .. } | Effect::Link { .. } => {
                fault.remove(layout)?;
                say!("healed: {}", fault.what);
            }
        }
    }
    if found.is_empty() {
        say!("nothing was broken on purpose");
    }
    if found.is_empty() || records::supervisor(layout).is_none() {
        return Ok(ExitCode::SUCCESS);
    }
    Ok(recovery::within(layout, PATIENCE, recovery::all_healthy(layout, since)).await)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::shard;

    #[test]
    fn pairs_are_known_in_either_order() {
        assert_eq!(pair("server/2", "s3").unwrap(), (Pair::Store(Target::Server(2)), Order::AsMeant));
        assert_eq!(pair("s3", "server/2").unwrap(), (Pair::Store(Target::Server(2)), Order::Reversed));
        assert_eq!(pair("agents", "shard/dev-1").unwrap(), (Pair::Link(Who::Agents, shard(1)), Order::AsMeant));
        assert_eq!(pair("shard/dev-2", "operators").unwrap(), (Pair::Link(Who::Operators, shard(2)), Order::Reversed));
    }

    #[test]
    fn what_cannot_be_parted_is_answered_with_what_can() {
        for (from, to, hint) in [
            ("server/1", "server/2", "pause server/N"),
            ("agents", "server/1", "partition agents shard/dev-1"),
            ("instance/x", "shard/dev-1", "partition agents shard/dev-1"),
            ("moon", "s3", "pairs are"),
            ("agents", "operators", "pairs are"),
        ] {
            let error = pair(from, to).unwrap_err().to_string();
            assert!(error.contains(hint), "{error}");
        }
    }
}
