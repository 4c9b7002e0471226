//! What is chosen and held before a create: where a provider reserves nothing, nothing is asked of it.

use std::collections::BTreeSet;

use super::*;

pub async fn no_id_is_reserved_twice(subject: &dyn Subject) {
    let provider = subject.provider();
    let mut ids = BTreeSet::new();
    for n in 1..=10 {
        let (spec, places) = reserved(&provider, spec_of(subject, n)).await;
        drop(places);
        let Some(id) = spec.reserved_id.clone() else { return };
        assert!(ids.insert(id.clone()), "{id} was given away before");
        // Every other one is used, and its VM has that id.
        if n.is_multiple_of(2) {
            let made = create_as(subject, &provider, &spec).await.expect("the VM is made");
            assert_eq!(made.vm.provider_id, Some(id));
        }
    }
}

pub async fn two_leaders_do_not_share_a_reservation(subject: &dyn Subject) {
    let old = subject.provider();
    let mut recorded = BTreeSet::new();
    for n in 1..=5 {
        let (spec, places) = reserved(&old, spec_of(subject, n)).await;
        drop(places);
        let Some(id) = spec.reserved_id else { return };
        recorded.insert(id);
    }
    let new = subject.restarted();
    let all: Vec<String> = recorded.iter().cloned().collect();
    for part in [&all[..2], &all[2..], &all[..]] {
        new.restore(part);
    }
    for n in 6..=10 {
        let (spec, _places) = reserved(&new, spec_of(subject, n)).await;
        let id = spec.reserved_id.clone().expect("it reserved ids before");
        assert!(recorded.insert(id), "a record of the predecessor has this id");
    }
}

pub async fn a_dropped_reservation_frees_its_places(subject: &dyn Subject) {
    let Some(n_places) = subject.n_places() else { return };
    let provider = subject.provider();
    let spec = reserve_spec(&spec_of(subject, 1));
    let mut held = Vec::new();
    for _ in 0..n_places {
        held.push(provider.reserve(&spec).await.expect("there is a place"));
        assert!(held.iter().all(Reservation::holds_places));
    }
    // They are served in the order in which they asked.
    let (mut first, mut second) = (provider.reserve(&spec), provider.reserve(&spec));
    assert!(futures::poll!(&mut first).is_pending() && futures::poll!(&mut second).is_pending());
    held.pop();
    let first = tokio::time::timeout(PAUSE, first).await.expect("a place was freed").expect("there is a place");
    assert!(futures::poll!(&mut second).is_pending());
    drop(first);
    let second = tokio::time::timeout(PAUSE, second).await.expect("a place was freed").expect("there is a place");
    assert!(second.holds_places());
}
