//! The provider contract on a provider that has no optional ability.

use std::{sync::Arc, time::Duration};

use nstance_core::ports::provider::Provider as _;
use nstance_providers::{
    contract,
    fake::FakeOptions,
    faulty::{Faults, FaultyProvider},
};
use nstance_rt::entropy::SeededEntropy;

use crate::fake_subject::FakeSubject;

#[tokio::test(start_paused = true)]
async fn a_provider_without_optional_abilities_keeps_the_contract() {
    let options = FakeOptions { latency: Duration::from_millis(30), page_size: 10, ..FakeOptions::default() };
    contract::run(async || FakeSubject::minimal(options.clone(), Faults::default(), 1)).await;
    let faults = Faults { lose_before: 100, lose_after: 100, ..Faults::default() };
    contract::run(async || FakeSubject::minimal(options.clone(), faults.clone(), 1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_minimal_provider_hands_out_no_ability() {
    let provider = FakeSubject::minimal(FakeOptions::default(), Faults::default(), 1).provider();
    assert!(provider.balancers().is_none());
    assert!(provider.leader_address().is_none());
    assert!(provider.images().is_none());
    let behind = FaultyProvider::new(provider, Arc::new(SeededEntropy::new(1)), Faults::default());
    assert!(behind.balancers().is_none() && behind.leader_address().is_none() && behind.images().is_none());
}
