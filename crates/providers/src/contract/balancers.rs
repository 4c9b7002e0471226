//! Load balancers, where a provider has them.

use nstance_core::ports::provider::{Balancers, LbMember, LbMemberState};

use super::*;

/// The state of each member.
async fn members(balancers: &dyn Balancers, lb: &LoadBalancer) -> BTreeMap<InstanceId, LbMemberState> {
    let members = member_list(balancers, lb).await;
    let n = members.len();
    let states: BTreeMap<_, _> = members.into_iter().map(|it| (it.vm.instance, it.state)).collect();
    assert_eq!(states.len(), n, "no instance is listed twice");
    states
}

async fn member_list(balancers: &dyn Balancers, lb: &LoadBalancer) -> Vec<LbMember> {
    for _ in 0..TRIES {
        match balancers.lb_members(lb).await {
            Ok(members) => {
                assert!(members.iter().all(|it| it.vm.provider_id.is_some()), "a member is named by its provider id");
                return members;
            }
            Err(error) => assert!(is_passing(&error), "{error}"),
        }
        tokio::time::sleep(PAUSE).await;
    }
    panic!("the members were never told");
}

async fn register(subject: &dyn Subject, balancers: &dyn Balancers, lb: &LoadBalancer, vm: &VmRef) {
    retry(async || balancers.lb_register(permit(subject), lb, vm).await).await;
}

async fn deregister(subject: &dyn Subject, balancers: &dyn Balancers, lb: &LoadBalancer, vm: &VmRef) {
    retry(async || balancers.lb_deregister(permit(subject), lb, vm).await).await;
}

/// Waits until the member is in; until then it is coming.
async fn comes_in(balancers: &dyn Balancers, lb: &LoadBalancer, instance: InstanceId) {
    until("the member is in", async || match members(balancers, lb).await.get(&instance) {
        Some(LbMemberState::In) => true,
        other => {
            assert_eq!(other, Some(&LbMemberState::Coming), "a registered member is coming or in");
            false
        }
    })
    .await;
}

/// Waits until the member is out; until then it drains.
async fn drains_out(balancers: &dyn Balancers, lb: &LoadBalancer, instance: InstanceId) {
    until("the member is out", async || match members(balancers, lb).await.get(&instance) {
        None => true,
        Some(state) => {
            assert_eq!(*state, LbMemberState::Draining, "a deregistered member drains or is out");
            false
        }
    })
    .await;
}

pub async fn lb_round_trip(subject: &dyn Subject) {
    let provider = subject.provider();
    let Some(balancers) = provider.balancers() else { return };
    let [web, api] = subject.load_balancers();
    let (one, two) = (create(subject, 1).await, create(subject, 2).await);
    assert!(members(balancers, &web).await.is_empty());
    for vm in [&one, &two, &one] {
        register(subject, balancers, &web, &vm.vm).await;
    }
    for n in [1, 2] {
        comes_in(balancers, &web, instance(n)).await;
    }
    let mut listed: Vec<VmRef> = member_list(balancers, &web).await.into_iter().map(|it| it.vm).collect();
    listed.sort();
    assert_eq!(listed, [one.vm.clone(), two.vm.clone()]);
    assert!(members(balancers, &api).await.is_empty());
    for _ in 0..2 {
        deregister(subject, balancers, &web, &one.vm).await;
    }
    drains_out(balancers, &web, instance(1)).await;
    assert_eq!(members(balancers, &web).await, BTreeMap::from([(instance(2), LbMemberState::In)]));
    deregister(subject, balancers, &api, &one.vm).await; // never was in
    register(subject, balancers, &web, &one.vm).await;
    comes_in(balancers, &web, instance(1)).await;
}

pub async fn partial_registration_is_not_in(subject: &dyn Subject) {
    let provider = subject.provider();
    let Some(balancers) = provider.balancers() else { return };
    let made = create(subject, 1).await;
    if !subject.register_in_part() {
        return;
    }
    let [lb, _] = subject.load_balancers();
    assert!(balancers.lb_register(permit(subject), &lb, &made.vm).await.is_err());
    // Behind a bad network the call may not have arrived at all.
    let state = members(balancers, &lb).await.get(&instance(1)).copied();
    assert!(matches!(state, None | Some(LbMemberState::Coming)), "{state:?}");
    register(subject, balancers, &lb, &made.vm).await;
    comes_in(balancers, &lb, instance(1)).await;
}

pub async fn initial_is_not_in(subject: &dyn Subject) {
    let provider = subject.provider();
    let Some(balancers) = provider.balancers() else { return };
    let made = create(subject, 1).await;
    if !subject.delay_registrations() {
        return;
    }
    let [lb, _] = subject.load_balancers();
    register(subject, balancers, &lb, &made.vm).await;
    assert_eq!(members(balancers, &lb).await, BTreeMap::from([(instance(1), LbMemberState::Coming)]));
    register(subject, balancers, &lb, &made.vm).await;
    comes_in(balancers, &lb, instance(1)).await;
}

pub async fn a_member_without_our_record_is_taken_out(subject: &dyn Subject) {
    let provider = subject.provider();
    let Some(balancers) = provider.balancers() else { return };
    let [lb, _] = subject.load_balancers();
    let made = create(subject, 1).await;
    register(subject, balancers, &lb, &made.vm).await;
    // Another process knows of it only by the list of members.
    let successor = subject.restarted();
    let balancers = successor.balancers().expect("an ability does not go away");
    let listed = member_list(balancers, &lb).await;
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].vm, made.vm);
    deregister(subject, balancers, &lb, &listed[0].vm).await;
    drains_out(balancers, &lb, instance(1)).await;
}
