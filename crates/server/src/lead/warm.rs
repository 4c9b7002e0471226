//! A standby that could act at once: its cache follows the bucket, its config the stored one.

use std::{sync::Arc, time::Duration};

use nstance_core::ids::Epoch;
use nstance_rt::{chain::Chain, entropy::jitter};
use nstance_store::{cache::Cache, rebuild::rebuild};
use tokio::sync::Notify;

use crate::{service::refresh, term::Shared};

const EVERY: Duration = Duration::from_secs(600);
/// Standbys that began together should not ask together.
const SPREAD: Duration = Duration::from_secs(30);

/// Brings the cache up to date every ten minutes, and when told that a take-over is near. Never ends.
pub(crate) async fn keep_warm(shared: &Arc<Shared>, cache: &Cache, wake: &Notify) {
    loop {
        let wait = EVERY + jitter(shared.entropy.as_ref(), SPREAD);
        let told = tokio::select! {
            biased;
            () = wake.notified() => true,
            () = tokio::time::sleep(wait) => false,
        };
        match rebuild(shared.store.as_ref(), Some(cache), &shared.shard, shared.entropy.as_ref()).await {
            Ok(rebuilt) => {
                tracing::debug!(records = rebuilt.n_listed, fetched = rebuilt.n_fetched, "cache follows the bucket");
            }
            // The take-over reads everything again, and waits for it.
            Err(error) => tracing::warn!(error = %Chain(&error), "cache not brought up to date"),
        }
        if !told {
            refresh::latest(shared, Epoch(0)).await;
        }
    }
}
