//! The provider contract behind a bad network: every call may be delayed, lost on either way, or refused.

use std::time::Duration;

use crate::fake_subject::FakeSubject;
use nstance_core::ports::provider::ErrorClass;
use nstance_providers::{contract, fake::FakeOptions, faulty::Faults};

#[tokio::test(start_paused = true)]
async fn a_bad_network_breaks_no_clause_of_the_contract() {
    let options = FakeOptions {
        latency: Duration::from_millis(50),
        page_size: 10,
        hosts: 4,
        lb_targets: 2,
        ..FakeOptions::default()
    };
    let faults = Faults {
        delay: Duration::from_millis(30),
        lose_before: 150,
        lose_after: 150,
        refuse: [(ErrorClass::Throttled, 100), (ErrorClass::Unavailable, 100)].into(),
        ..Faults::default()
    };
    for seed in 0..8 {
        println!("seed {seed}");
        contract::run(async || FakeSubject::behind(options.clone(), faults.clone(), seed * 1000)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_bad_network_before_a_cloud_without_idempotency_breaks_no_clause_either() {
    let options =
        FakeOptions { idempotent_create: false, reserve: true, page_size: 10, lb_targets: 2, ..FakeOptions::default() };
    let faults = Faults { lose_before: 100, lose_after: 100, ..Faults::default() };
    contract::run(async || FakeSubject::behind(options.clone(), faults.clone(), 7)).await;
}

#[tokio::test(start_paused = true)]
async fn refusals_of_what_has_landed_break_no_clause_either() {
    let options =
        FakeOptions { latency: Duration::from_millis(50), page_size: 10, lb_targets: 2, ..FakeOptions::default() };
    let land_then_refuse =
        [(ErrorClass::Throttled, 100), (ErrorClass::Unavailable, 100), (ErrorClass::Ambiguous, 100)].into();
    let faults = Faults { lose_before: 100, land_then_refuse, ..Faults::default() };
    for seed in 0..8 {
        println!("seed {seed}");
        contract::run(async || FakeSubject::behind(options.clone(), faults.clone(), seed * 1000)).await;
    }
}
