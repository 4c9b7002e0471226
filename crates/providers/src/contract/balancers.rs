//! Load balancers and the leader's address, where a provider has them.

use nstance_core::{
    ids::LbKey,
    ports::provider::{LbMember, LeaderNetwork},
};

use super::*;

async fn members(subject: &dyn Subject, lb: &LbKey) -> BTreeMap<InstanceId, LbMember> {
    for _ in 0..TRIES {
        match subject.provider().lb_members(lb).await {
            Ok(members) => return members,
            Err(error) => assert!(is_passing(&error), "{error}"),
        }
        tokio::time::sleep(PAUSE).await;
    }
    panic!("no look at the members was answered");
}

pub async fn lb_round_trip(subject: &dyn Subject) {
    let provider = subject.provider();
    if !provider.capabilities().load_balancers {
        return;
    }
    let (web, api): (LbKey, LbKey) = ("web".parse().expect("a key"), "api".parse().expect("a key"));
    let (one, two) = (create(subject, 1).await, create(subject, 2).await);
    assert!(members(subject, &web).await.is_empty());
    for vm in [&one, &two, &one] {
        retry(async || provider.lb_register(permit(subject), &web, &vm.vm).await).await;
    }
    let both = BTreeMap::from([(instance(1), LbMember::In), (instance(2), LbMember::In)]);
    assert_eq!(members(subject, &web).await, both);
    assert!(members(subject, &api).await.is_empty());
    for _ in 0..2 {
        retry(async || provider.lb_deregister(permit(subject), &web, &one.vm).await).await;
    }
    assert_ne!(members(subject, &web).await.get(&instance(1)), Some(&LbMember::In));
    until("it has drained out", async || !members(subject, &web).await.contains_key(&instance(1))).await;
    assert_eq!(members(subject, &web).await, BTreeMap::from([(instance(2), LbMember::In)]));
    retry(async || provider.lb_deregister(permit(subject), &api, &one.vm).await).await; // never was in
}

pub async fn partial_registration_is_not_in(subject: &dyn Subject) {
    let made = create(subject, 1).await;
    if !subject.register_in_part() {
        return;
    }
    let (provider, lb): (_, LbKey) = (subject.provider(), "web".parse().expect("a key"));
    assert!(provider.lb_register(permit(subject), &lb, &made.vm).await.is_err());
    assert_eq!(members(subject, &lb).await.get(&instance(1)), None);
    retry(async || provider.lb_register(permit(subject), &lb, &made.vm).await).await;
    assert_eq!(members(subject, &lb).await.get(&instance(1)), Some(&LbMember::In));
}

fn network() -> LeaderNetwork {
    LeaderNetwork { ip: std::net::IpAddr::from([10, 0, 0, 9]), interface_id: Some("eni-1".to_owned()) }
}

async fn holder(provider: &Arc<dyn Provider>) -> Option<String> {
    for _ in 0..TRIES {
        match provider.net_holder(&network()).await {
            Ok(holder) => return holder,
            Err(error) => assert!(is_passing(&error), "{error}"),
        }
        tokio::time::sleep(PAUSE).await;
    }
    panic!("no look at the address was answered");
}

pub async fn leader_address_moves(subject: &dyn Subject) {
    let (here, Some(there)) = (subject.provider(), subject.other_machine()) else { return };
    assert_eq!(holder(&here).await, None);
    for (machine, previous) in [(&here, None), (&there, here.self_id().await), (&here, there.self_id().await)] {
        for _ in 0..2 {
            retry(async || machine.net_assign(permit(subject), &network(), previous.as_deref()).await).await;
        }
        assert_eq!(holder(&here).await, machine.self_id().await);
        assert_eq!(holder(&there).await, machine.self_id().await);
    }
}

pub async fn address_is_taken_from_a_dead_holder(subject: &dyn Subject) {
    let (here, Some(there)) = (subject.provider(), subject.other_machine()) else { return };
    retry(async || there.net_assign(permit(subject), &network(), None).await).await;
    // The holder is dead and will release nothing, and we do not even know who it was.
    retry(async || here.net_assign(permit(subject), &network(), None).await).await;
    assert_eq!(holder(&here).await, here.self_id().await);
}

pub async fn release_is_harmless_if_not_ours(subject: &dyn Subject) {
    let (here, Some(there)) = (subject.provider(), subject.other_machine()) else { return };
    retry(async || here.net_assign(permit(subject), &network(), None).await).await;
    retry(async || there.net_release(&network()).await).await;
    assert_eq!(holder(&here).await, here.self_id().await);
    for _ in 0..2 {
        retry(async || here.net_release(&network()).await).await;
    }
    assert_eq!(holder(&here).await, None);
}
