//! The leader's address, where a provider can move one.

use nstance_core::ports::provider::LeaderAddress;

use super::*;

/// This machine and another one.
fn machines(subject: &dyn Subject) -> Option<[Arc<dyn Provider>; 2]> {
    let machines = [subject.provider(), subject.other_machine()?];
    machines.iter().all(|it| it.leader_address().is_some()).then_some(machines)
}

fn address(provider: &Arc<dyn Provider>) -> &dyn LeaderAddress {
    provider.leader_address().expect("it was there before")
}

async fn me(address: &dyn LeaderAddress) -> String {
    address.self_id().await.expect("a machine knows itself")
}

async fn holder(subject: &dyn Subject, address: &dyn LeaderAddress) -> Option<String> {
    for _ in 0..TRIES {
        match address.net_holder(&subject.leader_network()).await {
            Ok(holder) => return holder,
            Err(error) => assert!(is_passing(&error), "{error}"),
        }
        tokio::time::sleep(PAUSE).await;
    }
    panic!("the holder was never told");
}

async fn assign(subject: &dyn Subject, address: &dyn LeaderAddress, previous: Option<&str>) {
    let (me, network) = (me(address).await, subject.leader_network());
    retry(async || address.net_assign(permit(subject), &me, &network, previous).await).await;
}

async fn release(subject: &dyn Subject, address: &dyn LeaderAddress) {
    let (me, network) = (me(address).await, subject.leader_network());
    retry(async || address.net_release(&me, &network).await).await;
}

pub async fn leader_address_moves(subject: &dyn Subject) {
    let Some(machines) = machines(subject) else { return };
    let [here, there] = [address(&machines[0]), address(&machines[1])];
    assert_eq!(holder(subject, here).await, None);
    let (our_id, their_id) = (me(here).await, me(there).await);
    assert_ne!(our_id, their_id);
    for (machine, id, previous) in
        [(here, &our_id, None), (there, &their_id, Some(&our_id)), (here, &our_id, Some(&their_id))]
    {
        for _ in 0..2 {
            assign(subject, machine, previous.map(String::as_str)).await;
        }
        assert_eq!(holder(subject, here).await.as_ref(), Some(id));
        assert_eq!(holder(subject, there).await.as_ref(), Some(id));
    }
}

pub async fn address_is_taken_from_a_dead_holder(subject: &dyn Subject) {
    let Some(machines) = machines(subject) else { return };
    let [here, there] = [address(&machines[0]), address(&machines[1])];
    assign(subject, there, None).await;
    // The holder is dead and will release nothing, and we do not even know which machine it was.
    assign(subject, here, None).await;
    assert_eq!(holder(subject, here).await, Some(me(here).await));
}

pub async fn release_is_harmless_if_not_ours(subject: &dyn Subject) {
    let Some(machines) = machines(subject) else { return };
    let [here, there] = [address(&machines[0]), address(&machines[1])];
    assign(subject, here, None).await;
    release(subject, there).await;
    assert_eq!(holder(subject, here).await, Some(me(here).await));
    for _ in 0..2 {
        release(subject, here).await;
    }
    assert_eq!(holder(subject, here).await, None);
}

pub async fn self_id_is_known_or_an_error(subject: &dyn Subject) {
    let provider = subject.provider();
    let Some(address) = provider.leader_address() else { return };
    match address.self_id().await {
        Ok(id) => {
            assert!(!id.is_empty());
            assert_eq!(address.self_id().await, Ok(id), "it does not change");
        }
        Err(error) => assert!(!error.message.is_empty(), "why it is not known"),
    }
}
