//! How long planning takes: `cargo run --release -p nstance-core --example plan_speed`.
//!
//! Targets: a group of 1,000 within 1 ms, 10,000 instances in 100 groups within 20 ms.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use nstance_core::{
    check::check,
    group::Desired,
    ids::{GroupRef, InstanceId, Tenant, uuid_v7},
    instance::{CreateReason, Health, LbState, Ownership, Phase, Seen},
    plan::plan,
    snapshot::{
        Brake, Completeness, CreateWindow, Failures, GroupView, InstanceView, ProviderView, Settings, ShardView,
        Snapshot,
    },
    time::Timestamp,
};

const NOW: Timestamp = Timestamp::from_millis(1_800_000_000_000);

fn main() {
    report("1 group of 1,000, at rest", &shard(1, 1000, 1000, Health::Healthy));
    report("1 group of 1,000, half of it noticed", &shard(1, 1000, 1000, notice()));
    report("1 group of 1,000, shrinking to 100", &shard(1, 1000, 100, Health::Healthy));
    report("100 groups of 100, at rest", &shard(100, 100, 100, Health::Healthy));
    report("100 groups of 100, half of them noticed", &shard(100, 100, 100, notice()));
}

fn notice() -> Health {
    Health::Terminating { noticed_at: NOW, deadline: None }
}

#[expect(clippy::disallowed_methods, reason = "this program measures real time and nothing else")]
fn report(what: &str, snapshot: &Snapshot) {
    let mut best = [Duration::MAX; 2];
    let mut n_actions = 0;
    for _ in 0..20 {
        let begin = Instant::now();
        let plan = plan(snapshot, NOW);
        best[0] = best[0].min(begin.elapsed());
        n_actions = plan.actions.len();
        let begin = Instant::now();
        assert!(check(snapshot, &plan, NOW).is_empty());
        best[1] = best[1].min(begin.elapsed());
    }
    println!("{what}: planned in {:?}, checked in {:?}, {n_actions} actions", best[0], best[1]);
}

/// Every second instance is in `health`; a third of them drifted.
fn shard(n_groups: u32, n_instances: u32, size: u32, health: Health) -> Snapshot {
    let groups = (0..n_groups).map(|g| {
        let key = format!("g{g}").parse().expect("a letter and digits are a key");
        let instances =
            (0..n_instances).map(|i| instance(g, i, if i.is_multiple_of(2) { health } else { Health::Healthy }));
        let view = GroupView {
            desired: Desired::Known(size),
            infra_hash: "h1".to_owned(),
            drain_timeout: Duration::from_secs(300),
            load_balancers: vec!["www".parse().expect("a key")],
            rollout_paused: false,
            victims: vec![],
            create_blocks: vec![],
            failures: Failures::default(),
            window: CreateWindow::default(),
            instances: instances.collect(),
            candidates: vec![],
            corrupt: vec![],
            mass_removal: None,
        };
        (GroupRef::new(Tenant::default_tenant(), key), view)
    });
    Snapshot {
        shard: ShardView {
            complete: Completeness::ALL,
            provider: ProviderView::Available,
            brake: Brake { held: BTreeSet::new(), released: BTreeSet::new(), since: None },
            settings: Settings {
                registration_timeout: Duration::from_secs(300),
                deleted_record_retention: Duration::from_secs(1800),
                eligible_age: Duration::from_secs(21 * 86400),
                forced_age: Duration::from_secs(30 * 86400),
                ondemand_age: Duration::from_secs(7 * 86400),
                runaway_base: 10,
                runaway_factor: 3,
            },
        },
        groups: groups.collect(),
    }
}

fn instance(g: u32, i: u32, health: Health) -> (InstanceId, InstanceView) {
    let created_at = NOW.minus(Duration::from_secs(3600 + u64::from(i)));
    let mut chance = [0; 10];
    chance[2..6].copy_from_slice(&g.to_be_bytes());
    chance[6..].copy_from_slice(&i.to_be_bytes());
    let id = InstanceId::new("knd".parse().expect("a kind"), uuid_v7(created_at, chance));
    let view = InstanceView {
        ownership: Ownership::Managed,
        phase: Phase::Running,
        reason: CreateReason::ScaleUp,
        created_at,
        timers_from: created_at,
        adopted: false,
        confirmed: true,
        registered_at: Some(created_at),
        infra_hash: if i.is_multiple_of(3) { "h0" } else { "h1" }.to_owned(),
        seen: Seen::Running,
        seen_since: Some(created_at),
        health,
        reported: true,
        drain: None,
        delete_requested_at: None,
        delete_gone_at: None,
        create_failed_at: None,
        replace_marked_at: None,
        advised_at: None,
        load_balancers: BTreeMap::from([("www".parse().expect("a key"), LbState::Registered)]),
        busy: None,
        next_attempt_at: None,
    };
    (id, view)
}
