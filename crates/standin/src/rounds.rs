//! When a loop decides anew: after any change, and at least so often. Changes that come together make one round.

use std::{sync::Arc, time::Duration};

use tokio::sync::{Notify, watch};

use crate::picture::{Feed, Picture};

/// Changes within this time after the first one belong to the same round.
const GATHER: Duration = Duration::from_millis(20);

pub(crate) struct Rounds {
    changes: watch::Receiver<Picture>,
    wake: Arc<Notify>,
    resync: Duration,
}

impl Rounds {
    pub(crate) fn new(feed: &Feed, wake: Arc<Notify>, resync: Duration) -> Self {
        Self { changes: feed.subscribe(), wake, resync }
    }

    /// Waits for the next round and gives the picture to decide on.
    pub(crate) async fn next(&mut self) -> Picture {
        tokio::select! {
            biased;
            () = self.wake.notified() => {}
            // The sender lives as long as the watches; if they end, the clock alone drives the rounds.
            changed = self.changes.changed() => if changed.is_err() {
                tokio::time::sleep(self.resync).await;
            },
            () = tokio::time::sleep(self.resync) => {}
        }
        tokio::time::sleep(GATHER).await;
        self.changes.borrow_and_update().clone()
    }
}
