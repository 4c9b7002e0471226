//! What is seen, what is absent, and what is merely unknown.

use futures::future::join_all;
use nstance_core::{
    instance::Seen,
    ports::provider::{Described, Ended, ErrorClass, Owner, VmTags},
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

pub async fn tags_missing_once_is_unknown(subject: &dyn Subject) {
    let provider = subject.provider();
    let made = create(subject, 1).await;
    settle(subject).await;
    until("it runs", async || seen(subject, &made.vm).await == Some(Seen::Running)).await;
    until("it is listed", async || list(subject).await.contains_key(&instance(1))).await;
    if !subject.hide_tags(instance(1), true) {
        return;
    }
    let described = provider.describe(std::slice::from_ref(&made.vm)).await;
    assert!(matches!(described[..], [Described::Unknown(_)]), "{described:?}");
    if let Ok(Listing { vms, missing: None }) = provider.list().await {
        let tags: Vec<_> = vms.iter().map(|vm| &vm.tags).collect();
        assert_eq!(tags, [&VmTags::Absent], "a complete listing has it, and says that its tags are not there");
    }
    let refused = provider.delete(permit(subject), &made.vm, DeleteHow::Now).await;
    let error = refused.expect_err("nobody can tell whose it is");
    assert!(is_passing(&error), "to be tried again: {error:?}");
    subject.hide_tags(instance(1), false);
    assert_eq!(seen(subject, &made.vm).await, Some(Seen::Running), "nothing was ended");
    until("its tags are back", async || {
        list(subject).await.get(&instance(1)).is_some_and(|vm| vm.tags.complete().is_some())
    })
    .await;
}

pub async fn malformed_tags_are_foreign(subject: &dyn Subject) {
    let made = create(subject, 1).await;
    settle(subject).await;
    until("it runs", async || seen(subject, &made.vm).await == Some(Seen::Running)).await;
    until("it is listed", async || list(subject).await.contains_key(&instance(1))).await;
    if !subject.spoil_tags(instance(1), true) {
        return;
    }
    if let Described::Vm(vm) = look(subject, &made.vm).await {
        assert_eq!(vm.tags, VmTags::Foreign);
    }
    if let Ok(listing) = subject.provider().list().await {
        assert!(listing.vms.iter().all(|vm| vm.tags == VmTags::Foreign));
    }
    delete(subject, &made.vm, DeleteHow::Now).await;
    subject.spoil_tags(instance(1), false);
    assert_eq!(seen(subject, &made.vm).await, Some(Seen::Running), "it was not touched");
}

pub async fn an_acl_change_is_not_a_mass_death(subject: &dyn Subject) {
    let made = join_all((1..=3).map(|n| create(subject, n))).await;
    settle(subject).await;
    until("all are listed", async || list(subject).await.len() == 3).await;
    if !subject.forbid(instance(1), true) {
        return;
    }
    for vm in [&made[0].vm, &by_name(1)] {
        let described = subject.provider().describe(std::slice::from_ref(vm)).await;
        assert!(matches!(described[..], [Described::Unknown(_)]), "{described:?}");
    }
    subject.forbid(instance(1), false);
    until("it is back", async || list(subject).await.len() == 3).await;
}

pub async fn a_whole_batch_is_described(subject: &dyn Subject) {
    let provider = subject.provider();
    let made = create(subject, 1).await;
    settle(subject).await;
    let strangers = (1..provider.capabilities().describe_batch).map(|n| {
        let n = u8::try_from(n % 250).expect("it is below 250");
        by_name(n.saturating_add(2))
    });
    let refs: Vec<VmRef> = [made.vm.clone()].into_iter().chain(strangers).collect();
    for _ in 0..TRIES {
        let described = provider.describe(&refs).await;
        assert_eq!(described.len(), refs.len(), "one answer for each ref, in their order");
        let unknown = |it: &Described| match it {
            Described::Unknown(error) => Some(error.clone()),
            Described::Vm(_) | Described::NotFound => None,
        };
        let unknown: Vec<ProviderError> = described.iter().filter_map(unknown).collect();
        assert!(unknown.iter().all(is_passing), "{unknown:?}");
        if unknown.is_empty() {
            assert!(matches!(&described[0], Described::Vm(vm) if vm.vm == made.vm));
            assert!(described[1..].iter().all(|it| *it == Described::NotFound));
            assert!(provider.describe(&[]).await.is_empty());
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
    panic!("no batch was answered");
}

pub async fn died_in_pending_says_why(subject: &dyn Subject) {
    let ended = Ended {
        class: ErrorClass::Capacity,
        code: Some("Server.InsufficientInstanceCapacity".to_owned()),
        message: "there is no room for this type".to_owned(),
    };
    let made = create(subject, 1).await;
    settle(subject).await;
    assert!(seen(subject, &made.vm).await.is_some());
    if !subject.end(instance(1), &ended) {
        return;
    }
    until("it is seen dead", async || seen(subject, &made.vm).await == Some(Seen::Gone)).await;
    let Described::Vm(vm) = look(subject, &made.vm).await else { panic!("its end is told as long as it is known") };
    let told = vm.ended.expect("the cloud said why");
    assert_eq!((told.class, &told.code), (ended.class, &ended.code));
    assert!(!told.message.is_empty());
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
        let (spec, _places) = reserved(&theirs, subject.adjust(spec(&owner, n))).await;
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
