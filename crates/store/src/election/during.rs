//! Work that is done under a lease: wait for it, keep it for as long as the work takes, give it back.

use std::time::Duration;

use nstance_core::{ids::Epoch, ports::clock::Clock};
use nstance_rt::chain::Chain;

use super::{Bid, ElectionError, Held, LeaseKeeper, Observation, Renewal, may_bid};

/// How often somebody who waits for the lease looks at it.
const FOLLOW: Duration = Duration::from_secs(1);

/// A lease could not be held for as long as some work took.
#[derive(Debug, thiserror::Error)]
pub enum HoldError {
    #[error("take the cluster lease")]
    Election(#[source] ElectionError),
    #[error("the cluster lease was lost meanwhile; look at what became of the work, and repeat it")]
    Lost,
}

/// Waits for a lease, does `work` while holding it, and gives it back.
pub async fn while_holding<T>(
    keeper: &LeaseKeeper,
    clock: &dyn Clock,
    work: impl Future<Output = T>,
) -> Result<T, HoldError> {
    let mut seen: Option<Observation> = None;
    let mut held = loop {
        let look = keeper.look(seen.as_ref()).await.map_err(HoldError::Election)?;
        match may_bid(&look, clock.monotonic(), keeper.identity()) {
            Bid::Yes { reason, .. } => match keeper.acquire(&look, reason, Epoch(0)).await {
                Ok(held) => break held,
                Err(ElectionError::Taken { .. } | ElectionError::Gone { .. }) => {}
                Err(error) => return Err(HoldError::Election(error)),
            },
            Bid::No { .. } => {}
        }
        seen = Some(look);
        tokio::time::sleep(FOLLOW).await;
    };
    let done = renewing(keeper, &mut held, work).await.ok_or(HoldError::Lost)?;
    // Not giving it back only makes the next one wait.
    if let Err(error) = keeper.release(held).await {
        tracing::warn!(error = %Chain(&error), "cluster lease not released");
    }
    Ok(done)
}

/// Does `work` while the lease is kept. `None` if the lease was lost meanwhile.
async fn renewing<T>(keeper: &LeaseKeeper, held: &mut Held, work: impl Future<Output = T>) -> Option<T> {
    tokio::pin!(work);
    let mut wait = keeper.timing().renew_interval;
    loop {
        tokio::select! {
            biased;
            done = &mut work => return Some(done),
            () = tokio::time::sleep(wait) => {}
        }
        wait = match keeper.renew(held).await {
            Renewal::Extended { .. } => keeper.timing().renew_interval,
            Renewal::Retry { after, .. } => after,
            Renewal::Lost => return None,
        };
    }
}
