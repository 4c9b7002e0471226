//! What is seen, what is absent, and what is merely unknown.

use futures::future::join_all;
use nstance_core::{
    instance::Seen,
    ports::provider::{Described, ErrorClass, Owner},
};

use super::*;

pub async fn throttled_or_forbidden_is_unknown(subject: &dyn Subject) {
    use ErrorClass::*;
    let made = create(subject, 1).await;
    let other = create(subject, 2).await;
    settle(subject).await;
    until("listed", async || list(subject).await.len() == 2).await;
    for class in [Throttled, Auth, Unavailable, Ambiguous, Invalid, Quota, Capacity] {
        if !subject.fail_reads(instance(1), Some(class)) {
            return;
        }
        let described = subject.provider().describe(&[made.vm.clone(), other.vm.clone()]).await;
        assert_eq!(described.len(), 2);
        assert!(matches!(described[0], Described::Unknown(_)), "{class:?} became {:?}", described[0]);
        assert_ne!(described[1], Described::NotFound, "one failing look does not fail the others");
        match subject.provider().list().await {
            Err(error) => assert_ne!(error.class, NotFound),
            Ok(listing) => assert!(
                listing.missing.is_some() || listing.vms.iter().any(|vm| vm.vm.instance == instance(1)),
                "a failed look made the listing shorter"
            ),
        }
        subject.fail_reads(instance(1), None);
        assert_eq!(seen(subject, &made.vm).await, Some(Seen::Running));
    }
}

pub async fn a_purged_vm_is_absent(subject: &dyn Subject) {
    let made = create(subject, 1).await;
    create(subject, 2).await;
    settle(subject).await;
    subject.purge(instance(1)).await;
    for vm in [&made.vm, &by_name(1)] {
        assert_eq!(look(subject, vm).await, Described::NotFound);
    }
    until("not listed", async || list(subject).await.keys().copied().collect::<Vec<_>>() == [instance(2)]).await;
    delete(subject, &made.vm, DeleteHow::Now).await;
}

pub async fn a_dead_vm_is_seen_dead(subject: &dyn Subject) {
    let made = create(subject, 1).await;
    settle(subject).await;
    until("it runs", async || seen(subject, &made.vm).await == Some(Seen::Running)).await;
    subject.kill(instance(1)).await;
    until("it is seen dead", async || {
        matches!(look(subject, &made.vm).await, Described::NotFound)
            || seen(subject, &made.vm).await == Some(Seen::Gone)
    })
    .await;
}

pub async fn list_is_complete_or_says_not(subject: &dyn Subject) {
    join_all((1..=25).map(|n| create(subject, n))).await;
    settle(subject).await;
    until("all pages are there", async || list(subject).await.len() == 25).await;
    if !subject.fail_page(Some(1)) {
        return;
    }
    match subject.provider().list().await {
        Ok(listing) => assert!(listing.missing.is_some(), "silently shorter by {}", 25 - listing.vms.len()),
        Err(error) => assert_ne!(error.class, ErrorClass::NotFound),
    }
    subject.fail_page(None);
    assert_eq!(list(subject).await.len(), 25);
}

pub async fn an_unanswering_node_loses_no_vm(subject: &dyn Subject) {
    let made = join_all((1..=4).map(|n| create(subject, n))).await;
    settle(subject).await;
    if !subject.silence(&made[0], true) {
        return;
    }
    let described = subject.provider().describe(std::slice::from_ref(&made[0].vm)).await;
    assert!(matches!(described[0], Described::Unknown(_)), "{:?}", described[0]);
    if let Ok(listing) = subject.provider().list().await {
        assert!(listing.missing.is_some() || listing.vms.len() == 4);
    }
    subject.silence(&made[0], false);
    until("all are back", async || list(subject).await.len() == 4).await;
}

pub async fn foreign_vms_are_invisible(subject: &dyn Subject) {
    let owner = subject.owner();
    let elsewhere = Owner { shard: "elsewhere".parse().expect("a shard"), ..owner.clone() };
    let others = Owner { cluster: "others".parse().expect("a cluster"), ..owner };
    create(subject, 1).await;
    for (n, owner) in [(2, elsewhere), (3, others)] {
        let theirs = subject.provider_of(owner.clone());
        let mut spec = spec(&owner, n);
        spec.reserved_id = theirs.reserve(spec.instance).await.expect("an id is reserved");
        let made = create_as(subject, &theirs, &spec).await.expect("it is made");
        settle(subject).await;
        for vm in [&made.vm, &by_name(n)] {
            assert_eq!(look(subject, vm).await, Described::NotFound);
            delete(subject, vm, DeleteHow::Now).await;
            let provider = subject.provider();
            retry(async || provider.clean(permit(subject), vm).await).await;
        }
        let Described::Vm(still) = look_by(&theirs, &made.vm).await else { panic!("we removed what is not ours") };
        assert!(matches!(still.seen, Seen::Pending | Seen::Running));
        until("theirs is listed there", async || list_by(&theirs).await.contains_key(&instance(n))).await;
        assert_eq!(list_by(&theirs).await.len(), 1);
    }
    subject.add_untagged("stranger");
    until("only ours is listed", async || list(subject).await.len() == 1).await;
}
