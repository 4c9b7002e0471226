//! What is measured. One step each; whatever a step needs is made before.

use std::time::Duration;

use anyhow::Context;
use nstance_core::{check::check, instance::Seen, plan::plan};
use nstance_identity::{
    ca::{Ca, CaProfile, make_ca_certificate},
    keys::KeyPair,
};
use nstance_proto::v1;
use nstance_rt::entropy::SeededEntropy;
use nstance_server::{
    term_clock::TermClock,
    world::{BrakeMemory, World},
};
use nstance_sim::simulate;
use nstance_store::{cache::Cache, rebuild::rebuild};
use prost::Message as _;

use crate::{
    fleet::{Fleet, SEED, report},
    measure::{How, Timed, measure},
};

const DAY: Duration = Duration::from_secs(86_400);

type Outcome = anyhow::Result<Option<Timed>>;

pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    /// How many are counted: enough that what else a program does is lost in them.
    pub(crate) steps: u32,
    pub(crate) run: fn(usize, How) -> Outcome,
}

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "snapshot",
        what: "the planner's view of one group of all instances",
        steps: 20,
        run: |n, how| simulate(snapshot(n, how)),
    },
    Case {
        name: "snapshot-lost",
        what: "the same when all their agents are lost, and counted anew for the brake",
        steps: 20,
        run: |n, how| simulate(snapshot_lost(n, how)),
    },
    Case {
        name: "plan-steady",
        what: "plan of that group, nothing to do",
        steps: 20,
        run: |n, how| simulate(plans(n, 0, how)),
    },
    Case {
        name: "plan-losses",
        what: "plan of that group with a hundred VMs gone",
        steps: 20,
        run: |n, how| simulate(plans(n, 100, how)),
    },
    Case { name: "check", what: "the second opinion on that plan", steps: 20, run: |n, how| simulate(checks(n, how)) },
    Case {
        name: "report",
        what: "one health report: decoded and taken in",
        steps: 2000,
        run: |n, how| simulate(reports(n, how)),
    },
    Case {
        name: "certificate",
        what: "one agent certificate issued",
        steps: 200,
        run: |_, how| simulate(certificates(how)),
    },
    Case {
        name: "rebuild-cold",
        what: "all records read, parsed and written into an empty SQLite cache",
        steps: 2,
        run: |n, how| simulate(rebuilds(n, Warmth::Cold, how)),
    },
    Case {
        name: "rebuild-warm",
        what: "the same with a cache that has them all",
        steps: 2,
        run: |n, how| simulate(rebuilds(n, Warmth::Warm, how)),
    },
    Case {
        name: "take-over",
        what: "the leader's picture in memory made from all records",
        steps: 5,
        run: |n, how| simulate(take_overs(n, how)),
    },
];

async fn snapshot(n: usize, how: How) -> Outcome {
    let fleet = Fleet::led(n).await?;
    Ok(measure(how, async || {
        std::hint::black_box(fleet.term.world.snapshot(Some(&fleet.group)));
    })
    .await)
}

async fn snapshot_lost(n: usize, how: How) -> Outcome {
    let fleet = Fleet::led(n).await?;
    let now = fleet.term.world.now();
    {
        let mut state = fleet.term.world.lock();
        for record in &fleet.records {
            state.lost.insert(record.id);
            let entry = state.entries.get_mut(&record.id).context("an instance that the world does not know")?;
            entry.link.stream = None;
            entry.link.lost_at = Some(now);
        }
        state.n_connected = 0;
    }
    let (snapshot, _) = fleet.term.world.snapshot(Some(&fleet.group));
    let n_held = snapshot.shard.brake.held.len();
    anyhow::ensure!(n_held == n, "the brake holds {n_held} of {n}");
    Ok(measure(how, async || {
        fleet.term.world.lock().brake_memory = BrakeMemory::default();
        std::hint::black_box(fleet.term.world.snapshot(Some(&fleet.group)));
    })
    .await)
}

async fn plans(n: usize, n_gone: usize, how: How) -> Outcome {
    let fleet = Fleet::led(n).await?;
    let (mut snapshot, now) = fleet.term.world.snapshot(Some(&fleet.group));
    let view = snapshot.groups.get_mut(&fleet.group).context("the group")?;
    for it in view.instances.values_mut().take(n_gone) {
        it.seen = Seen::Gone;
    }
    let n_actions = plan(&snapshot, now).actions.len();
    anyhow::ensure!((n_gone == 0) == (n_actions == 0), "{n_actions} actions for {n_gone} VMs gone");
    Ok(measure(how, async || {
        std::hint::black_box(plan(std::hint::black_box(&snapshot), now));
    })
    .await)
}

async fn checks(n: usize, how: How) -> Outcome {
    let fleet = Fleet::led(n).await?;
    let (snapshot, now) = fleet.term.world.snapshot(Some(&fleet.group));
    let plan = plan(&snapshot, now);
    Ok(measure(how, async || {
        std::hint::black_box(check(&snapshot, std::hint::black_box(&plan), now));
    })
    .await)
}

async fn reports(n: usize, how: How) -> Outcome {
    let fleet = Fleet::led(n).await?;
    let sent: Vec<Vec<u8>> = fleet.records.iter().map(|it| report(it.id).encode_to_vec()).collect();
    let mut next = sent.iter().zip(&fleet.sessions).cycle();
    Ok(measure(how, async || {
        if let Some((bytes, session)) = next.next()
            && let Ok(report) = v1::HealthReportRequest::decode(bytes.as_slice())
        {
            session.report(&report);
        }
    })
    .await)
}

async fn certificates(how: How) -> Outcome {
    let fleet = Fleet::recorded(1).await?;
    let record = fleet.records.first().context("a record")?;
    let (entropy, now) = (SeededEntropy::new(SEED), fleet.term.world.now());
    let key = KeyPair::generate(&entropy);
    let made = make_ca_certificate(&key, &CaProfile::of(record.cluster.clone()), now, &entropy);
    let ca = Ca::load(made.chain_pem.as_bytes(), [key])?;
    let public = KeyPair::generate(&entropy).public_key();
    Ok(measure(how, async || {
        let issued = ca.issue_agent(&record.id, &record.group.tenant, &public, now, DAY, &entropy);
        std::hint::black_box(issued.is_ok());
    })
    .await)
}

#[derive(Clone, Copy)]
enum Warmth {
    Cold,
    Warm,
}

async fn rebuilds(n: usize, warmth: Warmth, how: How) -> Outcome {
    let fleet = Fleet::recorded(n).await?;
    let store = fleet.store().await?;
    let (entropy, shard) = (SeededEntropy::new(SEED), &fleet.term.shared.shard);
    let fresh = || Cache::in_memory(&fleet.term.shared.cluster, shard);
    let kept = fresh()?;
    rebuild(&store, Some(&kept), shard, &entropy).await?;
    Ok(measure(how, async || {
        let rebuilt = match (warmth, fresh()) {
            (Warmth::Cold, Ok(empty)) => rebuild(&store, Some(&empty), shard, &entropy).await,
            _ => rebuild(&store, Some(&kept), shard, &entropy).await,
        };
        std::hint::black_box(rebuilt.is_ok());
    })
    .await)
}

async fn take_overs(n: usize, how: How) -> Outcome {
    let fleet = Fleet::recorded(n).await?;
    let store = fleet.store().await?;
    let term = &fleet.term;
    let rebuilt = rebuild(&store, None, &term.shared.shard, &SeededEntropy::new(SEED)).await?;
    let applied = term.applied();
    Ok(measure(how, async || {
        let world = World::new(TermClock::start(term.shared.clock.clone()), &applied.config.server);
        world.load(rebuilt.instances.clone(), Vec::new());
        std::hint::black_box(&world);
    })
    .await)
}
