//! One place for "wait, then try again": 100 ms to 5 s with full jitter, and never sooner than the store asked for.

use std::time::Duration;

use nstance_core::ports::{
    clock::Entropy,
    objects::{StoreError, StoreFault, Unavailable},
};
use nstance_rt::backoff::Backoff;

const BASE: Duration = Duration::from_millis(100);
const CAP: Duration = Duration::from_secs(5);

/// How often a read is tried before it fails.
pub(crate) const READ_TRIES: u32 = 4;

pub(crate) fn backoff() -> Backoff {
    Backoff::new(BASE, CAP)
}

/// The wait before the next try. A store that named a time is believed, up to a minute.
pub(crate) fn next_wait(backoff: &mut Backoff, entropy: &dyn Entropy, error: &StoreError) -> Duration {
    let asked = error.retry_after.unwrap_or_default().min(Duration::from_secs(60));
    backoff.next(entropy).max(asked)
}

pub(crate) async fn pause(backoff: &mut Backoff, entropy: &dyn Entropy, error: &StoreError) {
    tokio::time::sleep(next_wait(backoff, entropy, error)).await;
}

/// Whether the same request may succeed later.
pub(crate) fn is_passing(error: &StoreError) -> bool {
    match error.fault {
        StoreFault::Ambiguous => true,
        StoreFault::Unavailable(why) => why != Unavailable::Invalid,
        StoreFault::NotFound | StoreFault::Precondition => false,
    }
}

/// Tries a read until it answers, `tries` times at most. Permission problems are told at once: a person must act.
pub(crate) async fn read<T, F: Future<Output = Result<T, StoreError>>>(
    tries: u32,
    entropy: &dyn Entropy,
    mut attempt: impl FnMut() -> F,
) -> Result<T, StoreError> {
    let mut backoff = backoff();
    loop {
        match attempt().await {
            Err(error)
                if is_passing(&error)
                    && error.fault != StoreFault::Unavailable(Unavailable::Denied)
                    && backoff.n_tries() + 1 < tries =>
            {
                pause(&mut backoff, entropy, &error).await;
            }
            done => return done,
        }
    }
}
