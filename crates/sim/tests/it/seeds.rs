//! The simulation itself: a seed is one story, stories keep their promises, and a planner that is wrong is found out.

use std::time::Duration;

use nstance_sim::{Beginning, Mutation, Plane, Setup, report, run, run_many, simulate};

/// Runs seeds and fails with the story of the first that breaks a promise.
fn hold(seeds: std::ops::Range<u64>) {
    let setup = Setup::default();
    let summary = run_many(seeds, setup, 2, 1, |_, _| {}).expect("the simulation runs");
    let broken: Vec<String> = summary.broken.iter().map(|outcome| report(outcome, setup, 100)).collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    println!("{}", summary.line());
}

#[test]
fn one_seed_tells_one_story() {
    let [first, again, other] = [11, 11, 12].map(|seed| run(seed, Setup::default()).expect("a run"));
    assert_eq!(first.trace, again.trace);
    assert_eq!(first, again);
    assert_ne!(first.digest, other.digest);
}

/// Whether this is an optimised build with time to spare, as `make sim` makes it: then all of it is run, else a sample.
fn is_full() -> bool {
    std::env::var_os("NSTANCE_SIM_FULL").is_some()
}

#[test]
fn seeds_keep_every_promise() {
    hold(if is_full() { 1..1001 } else { 1..9 });
}

/// The lowest seed that finds a mutation, and what it says.
fn found(mutation: Mutation, hears_checker: bool) -> (u64, String) {
    let setup = Setup { mutation: Some(mutation), hears_checker, ..Setup::default() };
    let summary = run_many(1..201, setup, 2, 1, |_, _| {}).expect("the simulation runs");
    let first = summary.broken.first().unwrap_or_else(|| panic!("{mutation:?} was not noticed in 200 seeds"));
    (first.seed, first.violations[0].clone())
}

#[test]
fn a_broken_planner_is_found_by_the_plans_it_makes() {
    let sample = [Mutation::PendingIsNobody, Mutation::OnDemandIsManaged];
    for mutation in if is_full() { Mutation::ALL.to_vec() } else { sample.to_vec() } {
        let (seed, what) = found(mutation, true);
        println!("{mutation:?}: seed {seed}, {what}");
    }
}

/// The second opinion on plans could be wrong in the same way as the planner: what comes of the plans tells, too.
#[test]
fn a_broken_planner_is_found_by_what_it_does() {
    // The sample is one that shows soon: an unoptimised build has no time for a hundred stories.
    for mutation in if is_full() { Mutation::ALL.to_vec() } else { vec![Mutation::PendingIsNobody] } {
        let (seed, what) = found(mutation, false);
        println!("{mutation:?}: seed {seed}, {what}");
        assert!(!what.starts_with("plan:"), "{what}");
    }
}

#[test]
fn a_plane_left_alone_makes_what_is_asked_for_and_nothing_else() {
    simulate(async {
        let plane = Plane::start(Beginning::new(1)).await.expect("a plane");
        plane.settle().await;
        let made = plane.cloud().n_calls();
        let standing = plane.running("default", "web");
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(plane.running("default", "web"), standing);
        let effects = plane.cloud().calls().split_off(made);
        assert!(effects.iter().all(|call| !call.op.is_effect()), "{effects:?}");
        plane.finish().await;
    });
}
