//! The address that moves with leadership. Taken by force as soon as the lease is ours; given up only after it is not,
//! and never waited for by anything that matters.

use std::{net::IpAddr, sync::Arc, time::Duration};

use nstance_core::{
    ports::provider::{LeaderNetwork, ProviderError},
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
/// One call may take this long: clouds move addresses slowly.
const CALL: Duration = Duration::from_secs(30);
/// Giving up is worth this much time and no more.
const GIVE_UP: Duration = Duration::from_secs(10);

/// As the provider port has it.
pub(crate) fn of(shared: &Shared) -> Option<LeaderNetwork> {
    let applied = shared.config.get();
    let network = applied.config.server.leader_network.as_ref()?;
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
    loop {
        if previous.is_none() {
            // Not knowing whom to take it from is no reason not to try.
            previous = shared.provider.net_holder(network).await.ok().flatten();
        }
        let assigned = match guard.permit() {
            Ok(permit) => {
                let call = shared.provider.net_assign(permit, network, previous.as_deref());
                match tokio::time::timeout(CALL, call).await {
                    Ok(done) => done.map_err(|error| format!("{}", Chain(&error))),
                    Err(_) => Err("no answer in time".to_owned()),
                }
            }
            Err(stalled) => Err(stalled.to_string()),
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
        let released = tokio::time::timeout(GIVE_UP, shared.provider.net_release(&network)).await;
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
