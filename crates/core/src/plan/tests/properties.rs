//! What holds for every shard, whatever its state: drawn at random, with all the contradictions a bad day brings.

use std::{collections::BTreeMap, time::Duration};

use proptest::{prelude::*, sample::select};

use crate::{
    check,
    group::Desired,
    instance::{CreateReason, DrainReason, Health, LbState, Ownership, Phase, Seen},
    model,
    plan::{
        Action, DeleteReason, Plan, counts,
        fixture::{NOW, empty, group_ref, id, settings, show},
        plan,
    },
    ports::provider::VmRef,
    snapshot::{
        BlockKind, Brake, Busy, Candidate, Completeness, CreateBlock, DrainView, Failures, GroupView, InstanceView,
        ProviderView, ShardView, Snapshot,
    },
    time::Timestamp,
};

const SEEN: [Seen; 14] = [
    Seen::NotAsked,
    Seen::Unknown,
    Seen::Pending,
    Seen::Running,
    Seen::Running,
    Seen::Running,
    Seen::Running,
    Seen::Stopping,
    Seen::Stopped,
    Seen::Suspended,
    Seen::Deleting,
    Seen::Repairing,
    Seen::HostDown,
    Seen::Gone,
];

const DRAINS: [DrainReason; 6] = [
    DrainReason::ScaleDown,
    DrainReason::ScaleDown,
    DrainReason::GroupDeleted,
    DrainReason::Requested,
    DrainReason::ForcedExpiry,
    DrainReason::Unhealthy,
];

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// Moments around now, with the edges of every timer among them.
fn moment() -> impl Strategy<Value = Timestamp> {
    select(vec![-90_000, -40_000, -3600, -1800, -300, -299, -61, -60, -11, -1, 0, 1, 9, 10, 60, 300_i64])
        .prop_map(|at| Timestamp::from_millis(NOW.as_millis() + at * 1000))
}

fn past() -> impl Strategy<Value = Timestamp> {
    moment().prop_map(|at| at.min(NOW))
}

fn health() -> impl Strategy<Value = Health> {
    prop_oneof![
        4 => Just(Health::Healthy),
        1 => Just(Health::Starting),
        1 => past().prop_map(|since| Health::Lost { since }),
        1 => past().prop_map(|since| Health::Silent { since }),
        1 => (past(), prop::option::of(moment()))
            .prop_map(|(noticed_at, deadline)| Health::Terminating { noticed_at, deadline }),
    ]
}

fn drain() -> impl Strategy<Value = DrainView> {
    (select(DRAINS.to_vec()), past(), moment(), any::<bool>())
        .prop_map(|(reason, started_at, delete_at, acked)| DrainView { reason, started_at, delete_at, acked })
}

fn lb_state() -> impl Strategy<Value = LbState> {
    select(vec![
        LbState::Absent,
        LbState::Registering,
        LbState::Coming,
        LbState::Registered,
        LbState::Registered,
        LbState::Deregistering,
        LbState::DrainingOut,
    ])
}

fn phase() -> impl Strategy<Value = Phase> {
    prop_oneof![
        1 => Just(Phase::Pending),
        1 => Just(Phase::Failed),
        2 => Just(Phase::Provisioning),
        8 => Just(Phase::Running),
        2 => Just(Phase::Draining),
        1 => Just(Phase::Deleting),
        1 => Just(Phase::Deleted),
    ]
}

fn rarely<T: std::fmt::Debug + Clone + 'static>(what: impl Strategy<Value = T>) -> impl Strategy<Value = Option<T>> {
    prop::option::weighted(0.15, what)
}

fn instance() -> impl Strategy<Value = InstanceView> {
    let life = (phase(), select(SEEN.to_vec()), prop::option::of(past()), health(), past(), any::<bool>());
    let origin = (
        prop::bool::weighted(0.15),
        prop::bool::weighted(0.15),
        select(vec![CreateReason::ScaleUp, CreateReason::Replacement, CreateReason::Rotation]),
        select(vec!["h1", "h1", "h0", ""]),
    );
    let plight = (
        drain(),
        rarely(past()),
        rarely(past()),
        prop::option::weighted(0.5, lb_state()),
        rarely(select(vec![Busy::Other, Busy::Creating])),
        rarely(moment()),
        past(),
    );
    (life, origin, plight).prop_map(|(life, origin, plight)| {
        let (phase, seen, seen_since, health, created_at, reported) = life;
        let (on_demand, adopted, reason, hash) = origin;
        let (drain, marked, advised, lb, busy, next_attempt_at, ended) = plight;
        let registered = match phase {
            Phase::Running => true,
            Phase::Pending | Phase::Failed | Phase::Provisioning => false,
            Phase::Draining | Phase::Deleting | Phase::Deleted => reported,
        };
        InstanceView {
            ownership: if on_demand { Ownership::OnDemand } else { Ownership::Managed },
            phase,
            reason: if on_demand { CreateReason::OnDemand } else { reason },
            created_at,
            timers_from: created_at,
            adopted: adopted && phase != Phase::Pending,
            confirmed: phase != Phase::Pending,
            registered_at: registered.then_some(created_at),
            infra_hash: hash.to_owned(),
            seen,
            seen_since,
            health,
            reported: reported && registered,
            drain: (phase == Phase::Draining).then_some(drain),
            delete_requested_at: matches!(phase, Phase::Deleting | Phase::Deleted).then_some(ended),
            delete_gone_at: (phase == Phase::Deleted).then_some(ended),
            create_failed_at: (phase == Phase::Failed).then_some(ended),
            replace_marked_at: marked,
            advised_at: advised,
            load_balancers: lb.into_iter().map(|state| ("www".parse().unwrap(), state)).collect(),
            busy: busy.filter(|it| *it == Busy::Other || phase == Phase::Pending),
            next_attempt_at,
        }
    })
}

fn candidate(name: usize) -> impl Strategy<Value = Candidate> {
    (select(SEEN.to_vec()), prop::bool::weighted(0.2), prop::option::of(past())).prop_map(
        move |(seen, on_demand, created_at)| Candidate {
            vm: VmRef { instance: id(&format!("x{name}")), provider_id: None },
            seen,
            ownership: if on_demand { Ownership::OnDemand } else { Ownership::Managed },
            created_at,
        },
    )
}

fn block() -> impl Strategy<Value = CreateBlock> {
    (select(vec![BlockKind::NoCapacity, BlockKind::Quota, BlockKind::BackingOff]), past(), prop::option::of(moment()))
        .prop_map(|(kind, since, until)| CreateBlock { kind, message: format!("{kind:?}"), since, until })
}

fn failures() -> impl Strategy<Value = Failures> {
    (0_u32..4, rarely(moment()), 0_u32..3, rarely(moment())).prop_map(|(rollouts, probe, replacements, retry)| {
        Failures {
            rollout_in_a_row: rollouts,
            rollout_probe_at: probe,
            replacement_in_a_row: replacements,
            replacement_retry_at: retry,
        }
    })
}

fn group(name: usize) -> impl Strategy<Value = GroupView> {
    let size = prop_oneof![
        8 => (0_u32..6).prop_map(Desired::Known),
        1 => Just(Desired::Tombstoned),
        1 => Just(Desired::Unknown),
    ];
    let people = (
        prop::collection::vec(instance(), 0..9),
        prop::collection::vec(0_usize..9, 0..3),
        prop::option::weighted(0.2, candidate(name)),
        prop::bool::weighted(0.1),
    );
    let state = (
        select(vec![secs(0), secs(60), secs(300)]),
        any::<bool>(),
        prop::bool::weighted(0.1),
        prop::option::weighted(0.15, block()),
        failures(),
        0_u32..14,
        prop::bool::weighted(0.1),
    );
    (size, people, state).prop_map(move |(desired, people, state)| {
        let (instances, victims, candidate, corrupt) = people;
        let (drain_timeout, balanced, rollout_paused, block, failures, n_creates, mass_removal) = state;
        let named = |i: usize| id(&format!("g{name}i{i}"));
        let mut view = GroupView {
            desired,
            drain_timeout,
            load_balancers: if balanced { vec!["www".parse().unwrap()] } else { vec![] },
            rollout_paused,
            victims: victims.into_iter().map(named).collect(),
            create_blocks: block.into_iter().collect(),
            failures,
            instances: instances.into_iter().enumerate().map(|(i, it)| (named(i), it)).collect(),
            candidates: candidate.into_iter().collect(),
            corrupt: if corrupt { vec!["some.key".to_owned()] } else { vec![] },
            mass_removal: mass_removal.then_some(NOW),
            ..empty()
        };
        view.window.n_creates = n_creates;
        view
    })
}

fn shard_view() -> impl Strategy<Value = ShardView> {
    let complete = prop_oneof![
        12 => Just(Completeness::ALL),
        1 => (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>())
            .prop_map(|(config, groups, records, listing)| Completeness { config, groups, records, listing }),
    ];
    let provider = prop_oneof![
        12 => Just(ProviderView::Available),
        1 => Just(ProviderView::Unavailable { since: NOW, message: String::new() }),
        1 => Just(ProviderView::Unauthorized { since: NOW, message: String::new() }),
    ];
    let ids = prop::collection::btree_set((0_usize..3, 0_usize..9), 0..6);
    let ages = (
        select(vec![secs(0), secs(3600)]),
        select(vec![secs(0), secs(40_000)]),
        select(vec![secs(0), secs(40_000)]),
        select(vec![secs(0), secs(300)]),
    );
    (complete, provider, ids.clone(), ids, ages).prop_map(|(complete, provider, held, released, ages)| {
        let named = |(g, i): (usize, usize)| id(&format!("g{g}i{i}"));
        let mut settings = settings();
        (settings.eligible_age, settings.forced_age, settings.ondemand_age, settings.registration_timeout) = ages;
        settings.runaway_factor = 1;
        ShardView {
            complete,
            provider,
            brake: Brake {
                held: held.into_iter().map(named).collect(),
                released: released.into_iter().map(named).collect(),
                since: None,
            },
            settings,
        }
    })
}

fn shard() -> impl Strategy<Value = Snapshot> {
    (shard_view(), group(0), group(1), group(2)).prop_map(|(shard, a, b, c)| Snapshot {
        shard,
        groups: BTreeMap::from([(group_ref("blue/web"), a), (group_ref("green/web"), b), (group_ref("db"), c)]),
    })
}

/// A shard on a good day: everything is readable and nothing is held back.
fn calm(mut snapshot: Snapshot) -> Snapshot {
    snapshot.shard.complete = Completeness::ALL;
    snapshot.shard.provider = ProviderView::Available;
    snapshot.shard.brake = Brake::default();
    snapshot.shard.settings.registration_timeout = secs(300);
    snapshot.shard.settings.runaway_base = 1000;
    for view in snapshot.groups.values_mut() {
        view.create_blocks.clear();
        view.failures = Failures::default();
        view.corrupt.clear();
        view.mass_removal = None;
        view.rollout_paused = false;
        if view.desired == Desired::Unknown {
            view.desired = Desired::Known(3);
        }
        for candidate in view.candidates.iter_mut().filter(|candidate| candidate.seen.is_uncertain()) {
            candidate.seen = Seen::Running;
        }
        for candidate in &mut view.candidates {
            candidate.created_at = candidate.created_at.or(Some(NOW));
        }
        for it in view.instances.values_mut() {
            it.busy = None;
            it.next_attempt_at = None;
            if it.seen.is_uncertain() || matches!(it.seen, Seen::Repairing | Seen::HostDown) {
                it.seen = Seen::Running;
            }
            if matches!(it.health, Health::Lost { .. } | Health::Starting) && it.phase == Phase::Running {
                it.health = Health::Healthy;
            }
            if it.phase == Phase::Running {
                it.reported = true;
                it.seen = if it.seen == Seen::Pending { Seen::Running } else { it.seen };
            }
        }
    }
    snapshot
}

fn is_decision(action: &Action) -> bool {
    matches!(action, Action::Create { .. } | Action::StartDrain { .. } | Action::CancelDrain { .. })
}

/// Whether the plan itself brings news on which the next one may decide: a VM found, a boot given up, a place in a
/// load balancer, a drain that is over as it begins; or an extra member, which makes room for a hint.
fn brings_news(snapshot: &Snapshot, plan: &Plan) -> bool {
    plan.actions.iter().any(|it| {
        let hinted = !snapshot.groups[&it.group].victims.is_empty();
        match &it.action {
            Action::Adopt { .. } | Action::ResolveCreate { .. } | Action::LbRegister { .. } => true,
            Action::Delete { reason, .. } => {
                matches!(reason, DeleteReason::NeverRegistered | DeleteReason::Unresolved)
            }
            Action::StartDrain { delete_at, .. } => *delete_at <= NOW,
            Action::Create { reason } => hinted && *reason == CreateReason::Rotation,
            _ => false,
        }
    })
}

/// Few enough for every commit; the nightly run asks for more by `PROPTEST_CASES`.
fn config(cases: u32) -> ProptestConfig {
    let default = ProptestConfig::default();
    if std::env::var_os("PROPTEST_CASES").is_some() { default } else { ProptestConfig { cases, ..default } }
}

proptest! {
    #![proptest_config(config(256))]

    #[test]
    fn the_checker_finds_nothing(snapshot in shard()) {
        let plan = plan(&snapshot, NOW);
        let found = check::check(&snapshot, &plan, NOW);
        prop_assert!(found.is_empty(), "{found:#?}\n{}", show(&snapshot, &plan));
    }

    /// I6: what was decided need not be decided again.
    #[test]
    fn planning_an_executed_plan_decides_nothing_more(mut snapshot in shard()) {
        for it in snapshot.groups.values_mut().flat_map(|view| view.instances.values_mut()) {
            it.busy = None; // an effect under way is news to come
        }
        let first = plan(&snapshot, NOW);
        let mut state = model::apply(&snapshot, &first, NOW);
        let second = plan(&state, NOW);
        if !brings_news(&snapshot, &first) {
            let again = second.actions.iter().any(|it| is_decision(&it.action));
            prop_assert!(!again, "{}then\n{}", show(&snapshot, &first), show(&state, &second));
        }
        for _ in 0..8 {
            let next = plan(&state, NOW);
            if next.actions.is_empty() {
                return Ok(());
            }
            state = model::apply(&state, &next, NOW);
        }
        let rest = plan(&state, NOW);
        prop_assert!(false, "no rest after many rounds:\n{}", show(&state, &rest));
    }

    /// I7.
    #[test]
    fn input_order_does_not_matter(snapshot in shard(), more in block(), other in candidate(9)) {
        let mut one = snapshot;
        for view in one.groups.values_mut() {
            view.create_blocks.push(more.clone());
            view.candidates.push(other.clone());
            view.corrupt.push("another.key".to_owned());
            view.load_balancers.push("api".parse().unwrap());
        }
        let mut two = one.clone();
        for view in two.groups.values_mut() {
            view.create_blocks.reverse();
            view.candidates.reverse();
            view.corrupt.reverse();
            view.load_balancers.reverse();
            view.victims.reverse();
        }
        prop_assert_eq!(plan(&one, NOW), plan(&two, NOW));
    }

    /// I8.
    #[test]
    fn a_group_alone_gets_its_part_of_the_whole(snapshot in shard()) {
        let whole = plan(&snapshot, NOW);
        let mut wake_at = None;
        for (group, view) in &snapshot.groups {
            let alone = Snapshot {
                shard: snapshot.shard.clone(),
                groups: BTreeMap::from([(group.clone(), view.clone())]),
            };
            let part = plan(&alone, NOW);
            let actions: Vec<_> = whole.actions.iter().filter(|it| it.group == *group).cloned().collect();
            let holds: Vec<_> = whole.holds.iter().filter(|it| it.group == *group).cloned().collect();
            prop_assert_eq!(&part.actions, &actions);
            prop_assert_eq!(&part.holds, &holds);
            wake_at = [wake_at, part.wake_at].into_iter().flatten().min();
        }
        prop_assert_eq!(whole.wake_at, wake_at);
    }

    #[test]
    fn a_plan_wakes_only_in_the_future(snapshot in shard()) {
        prop_assert!(plan(&snapshot, NOW).wake_at.is_none_or(|at| NOW < at));
    }

    /// Neither the plan nor the next ones bring a group above its size and one.
    #[test]
    fn members_never_grow_past_size_and_surge(snapshot in shard()) {
        let mut state = snapshot;
        for _ in 0..4 {
            let after = model::apply(&state, &plan(&state, NOW), NOW);
            for (group, view) in &after.groups {
                let Desired::Known(size) = view.desired else { continue };
                let n_before = counts(&state.shard, group, &state.groups[group], NOW).actual;
                let n_after = counts(&after.shard, group, view, NOW).actual;
                prop_assert!(n_after <= n_before.max(size + 1), "{group}: {n_before} to {n_after} of {size}");
            }
            state = after;
        }
    }

    /// Not knowing moves nobody: only an explicit word, a notice or a timer may.
    #[test]
    fn nobody_is_removed_for_not_being_seen(snapshot in shard()) {
        let plan = plan(&snapshot, NOW);
        for planned in &plan.actions {
            let view = &snapshot.groups[&planned.group];
            let (id, why) = match &planned.action {
                Action::StartDrain { instance, reason, .. } => (instance, Ok(*reason)),
                Action::Delete { instance, reason } => (instance, Err(*reason)),
                _ => continue,
            };
            let it = &view.instances[id];
            if !it.seen.is_uncertain() || matches!(it.phase, Phase::Draining | Phase::Deleting) {
                continue;
            }
            let told = match why {
                Ok(reason) => matches!(reason, DrainReason::SpotTerminating | DrainReason::GroupDeleted),
                Err(reason) => matches!(
                    reason,
                    DeleteReason::NeverRegistered | DeleteReason::Unresolved | DeleteReason::GroupDeleted
                ),
            };
            prop_assert!(told, "{why:?}");
        }
    }

}

proptest! {
    #![proptest_config(config(48))]

    /// From any state, once nothing holds it back, a shard comes to rest at its sizes, new and ready throughout.
    #[test]
    fn a_shard_left_alone_comes_to_rest(snapshot in shard()) {
        let mut state = calm(snapshot);
        let mut now = NOW;
        for _ in 0..120 {
            let next = plan(&state, now);
            let found = check::check(&state, &next, now);
            prop_assert!(found.is_empty(), "{found:#?}\n{}", show(&state, &next));
            state = model::settle(&model::apply(&state, &next, now), now);
            for view in state.groups.values_mut() {
                view.window.n_creates = 0;
            }
            now = now.plus(secs(20));
        }
        for (group, view) in &state.groups {
            let size = match view.desired {
                Desired::Known(size) => size,
                _ => 0,
            };
            let counts = counts(&state.shard, group, view, now);
            let last = plan(&state, now);
            prop_assert_eq!(
                (counts.actual, counts.draining),
                (size, 0),
                "{} {}\n{}", group, size, show(&state, &last)
            );
            prop_assert_eq!(counts.updated, size, "{}\n{}", group, show(&state, &last));
        }
    }
}

#[test]
fn the_generator_draws_what_the_tests_are_about() {
    use proptest::{strategy::ValueTree, test_runner::TestRunner};
    let mut runner = TestRunner::deterministic();
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let strategy = shard();
    for _ in 0..2000 {
        let snapshot = strategy.new_tree(&mut runner).unwrap().current();
        for planned in plan(&snapshot, NOW).actions {
            let text = match planned.action {
                Action::StartDrain { reason, .. } => format!("drain {}", reason.as_str()),
                Action::Create { reason } => format!("create {}", reason.as_str()),
                Action::Delete { reason, .. } => format!("delete {reason}"),
                other => format!("{other:?}").split(' ').next().unwrap().to_owned(),
            };
            *seen.entry(text).or_default() += 1;
        }
    }
    let want = [
        "create replacement",
        "create rotation",
        "create scale-up",
        "drain scale-down",
        "drain unhealthy",
        "drain spot-terminating",
        "drain group-deleted",
        "drain forced-expiry",
        "drain eligible-expiry",
        "drain config-drift",
        "drain replaced",
        "drain ondemand-expiry",
        "delete never-registered",
        "delete unresolved",
        "delete dead",
        "CancelDrain",
        "MarkDeleted",
        "Forget",
        "Adopt",
        "TerminateOrphan",
        "ResolveCreate",
        "LbRegister",
        "LbDeregister",
    ];
    for kind in want {
        assert!(seen.contains_key(kind), "never drawn: {kind}; drawn: {seen:?}");
    }
}
