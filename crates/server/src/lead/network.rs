//! The address that moves with leadership. Taken by force as soon as the lease is ours; given up only after it is not,
//! and never waited for by anything that matters.

use std::{net::IpAddr, sync::Arc, time::Duration};

use nstance_core::{
    ports::provider::{LeaderAddress, LeaderNetwork, ProviderError},
    term::Guard,
};
use nstance_rt::{backoff::Backoff, chain::Chain, tasks::Tasks};

use crate::{
    events::{Reason, Tell},
    term::Shared,
};

/// After this an address that cannot be had is a reason to let somebody else try.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often we look whether the address has come.
const BIND_TEST: Duration = Duration::from_millis(250);
/// Giving up is worth this much time and no more.
const GIVE_UP: Duration = Duration::from_secs(10);

/// As the provider port has it.
pub(crate) fn of(shared: &Shared) -> Option<LeaderNetwork> {
    let applied = shared.config.get();
    let network = applied.config.server.leader_network.as_ref()?;
    shared.provider.leader_address()?; // its schema allows no such config; an address cannot move here
    Some(LeaderNetwork { ip: network.ip, interface_id: network.interface_id.clone() })
}

/// Takes the address. Fails only if it cannot be had for a minute while somebody else could try; alone it is tried for
/// ever.
pub(crate) async fn take(
    shared: &Shared,
    guard: &Guard,
    network: &LeaderNetwork,
    previous: Option<String>,
    binds: bool,
) -> Result<(), String> {
    let began = shared.clock.monotonic();
    let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(8));
    let mut previous = previous;
    let Some(address) = shared.provider.leader_address() else {
        return Err(format!("provider {} cannot move an address", shared.provider.kind()));
    };
    let deadlines = shared.provider.capabilities().deadlines;
    loop {
        if previous.is_none() {
            // Not knowing whom to take it from is no reason not to try.
            let holder = tokio::time::timeout(deadlines.other, address.net_holder(network)).await;
            previous = holder.ok().and_then(Result::ok).flatten();
        }
        let assigned = match (own_id(address, deadlines.other).await, guard.permit()) {
            (Ok(me), Ok(permit)) => {
                let call = address.net_assign(permit, &me, network, previous.as_deref());
                match tokio::time::timeout(deadlines.assign, call).await {
                    Ok(done) => done.map_err(|error| format!("{}", Chain(&error))),
                    Err(_) => Err("no answer in time".to_owned()),
                }
            }
            (Err(unknown), _) => Err(unknown),
            (_, Err(stalled)) => Err(stalled.to_string()),
        };
        let why = match assigned {
            Ok(()) if !binds => return Ok(()),
            Ok(()) if is_here_soon(network.ip).await => return Ok(()),
            Ok(()) => format!("{} was assigned, but no interface of this machine has it", network.ip),
            Err(why) => why,
        };
        shared.vitals.problem("leader network", why.clone());
        tracing::warn!(ip = %network.ip, error = why, "leader address not taken yet");
        let message = format!("leader address {} not taken yet: {why}", network.ip);
        shared.events.tell(shared.clock.now(), guard.epoch(), Tell::shard(Reason::LeaderNetworkFailing, message));
        if PATIENCE <= shared.clock.monotonic().since(began) && !shared.desk.standbys().is_empty() {
            return Err(format!("leader address {} could not be had within a minute: {why}", network.ip));
        }
        tokio::time::sleep(backoff.next(shared.entropy.as_ref())).await;
    }
}

/// The provider id of the machine we run on, or why it is not known.
async fn own_id(address: &dyn LeaderAddress, limit: Duration) -> Result<String, String> {
    match tokio::time::timeout(limit, address.self_id()).await {
        Ok(id) => id.map_err(|error| format!("which machine this is, is not known: {}", Chain(&error))),
        Err(_) => Err("which machine this is, is not known: no answer in time".to_owned()),
    }
}

/// Whether the address is one of ours within a few seconds: attaching takes effect with a delay.
async fn is_here_soon(ip: IpAddr) -> bool {
    for _ in 0..40 {
        if std::net::TcpListener::bind((ip, 0)).is_ok() {
            return true;
        }
        tokio::time::sleep(BIND_TEST).await;
    }
    false
}

/// Gives the address up in the background, if it is still ours. Called only after the lease is released or lost.
pub(crate) fn give_up(tasks: &Tasks, shared: &Arc<Shared>) {
    let Some(network) = of(shared) else { return };
    let shared = shared.clone();
    tasks.spawn("leader address", async move {
        let Some(address) = shared.provider.leader_address() else { return };
        let release = async {
            let me = address.self_id().await?;
            address.net_release(&me, &network).await
        };
        let released = tokio::time::timeout(GIVE_UP, release).await;
        let told =
            |error: &ProviderError| tracing::info!(error = %Chain(error), ip = %network.ip, "address not released");
        match released {
            Ok(Ok(())) => tracing::info!(ip = %network.ip, "leader address released"),
            // The successor takes it by force.
            Ok(Err(error)) => told(&error),
            Err(_) => tracing::info!(ip = %network.ip, "address not released in time"),
        }
        shared.vitals.clear("leader network");
    });
}
