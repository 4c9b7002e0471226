//! The provider contract on the cloud in memory: quick and sure, slow and late, and without idempotency.

use std::time::Duration;

use crate::fake_subject::FakeSubject;
use nstance_providers::{
    contract,
    fake::{FakeOptions, Op},
    faulty::Faults,
};

#[tokio::test(start_paused = true)]
async fn a_sure_cloud_keeps_the_contract() {
    let options = FakeOptions { page_size: 10, hosts: 4, lb_targets: 2, ..FakeOptions::default() };
    contract::run(async || FakeSubject::behind(options.clone(), Faults::default(), 1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_slow_and_late_cloud_keeps_the_contract() {
    let options = FakeOptions {
        latencies: [(Op::Create, Duration::from_millis(100))].into(),
        latency: Duration::from_millis(30),
        jitter: Duration::from_millis(5),
        boot_time: Duration::from_secs(1),
        delete_time: Duration::from_secs(1),
        visibility_delay: Duration::from_secs(2),
        listing_delay: Duration::from_secs(3),
        page_size: 3,
        hosts: 4,
        lb_drain_time: Duration::from_secs(2),
        lb_warmup: Duration::from_secs(2),
        lb_targets: 3,
        address_move_time: Duration::from_secs(1),
        ..FakeOptions::default()
    };
    contract::run(async || FakeSubject::behind(options.clone(), Faults::default(), 1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_cloud_without_idempotent_creates_keeps_the_contract() {
    let options = FakeOptions {
        idempotent_create: false,
        reserve: true,
        latency: Duration::from_millis(100),
        page_size: 10,
        lb_targets: 2,
        ..FakeOptions::default()
    };
    contract::run(async || FakeSubject::behind(options.clone(), Faults::default(), 1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_cloud_that_gives_numbers_and_few_places_keeps_the_contract() {
    let options = FakeOptions {
        idempotent_create: false,
        reserve_numbers: true,
        places: 2,
        delete_time: Duration::from_secs(2),
        latency: Duration::from_millis(100),
        page_size: 10,
        hosts: 4,
        lb_targets: 2,
        ..FakeOptions::default()
    };
    contract::run(async || FakeSubject::behind(options.clone(), Faults::default(), 1)).await;
}
