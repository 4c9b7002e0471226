//! Renews the identity in a running process.
//!
//! Any shard's leader can renew it. A failed attempt costs nothing at first: renewal is due long before the certificate
//! expires.

use std::{error::Error, time::Duration};

use crate::{IdentityError, SaveIdentity, ShardError, Shards};

/// How often a running process checks whether renewal is due: often, compared with a third of a certificate's life.
const CHECK_PERIOD: Duration = Duration::from_secs(600);

/// How long one shard may take to renew.
const SHARD_TIMEOUT: Duration = Duration::from_secs(5);

/// Why the identity was not renewed.
#[derive(Debug, thiserror::Error)]
pub enum RenewError {
    #[error("the shard did not renew the certificate")]
    Shard(#[from] ShardError),
    #[error("{shard} did not answer within {} s", SHARD_TIMEOUT.as_secs())]
    TimedOut { shard: String },
    #[error("the renewed certificate cannot be used")]
    Unusable(#[source] IdentityError),
    #[error("the renewed identity could not be saved")]
    NotSaved(#[source] Box<dyn Error + Send + Sync>),
}

/// Renews the identity with the first shard that does it. The error is that of the last shard.
pub async fn renew(shards: &Shards, save: &dyn SaveIdentity) -> Result<(), RenewError> {
    let mut last = Ok(());
    for connection in shards.connections() {
        let renewed = async {
            let mut client = connection.client().await?;
            shards.identity().renew(&mut client, save).await
        };
        match tokio::time::timeout(SHARD_TIMEOUT, renewed).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => last = Err(error),
            Err(_) => last = Err(RenewError::TimedOut { shard: connection.shard().to_owned() }),
        }
    }
    last
}

/// Renews the identity whenever it is due, and never ends. Connections opened with the old certificate are not used for
/// further calls.
pub async fn keep_renewed(shards: &Shards, save: &dyn SaveIdentity, on_error: impl Fn(RenewError)) {
    loop {
        tokio::time::sleep(CHECK_PERIOD).await;
        if shards.identity().is_renewal_due() {
            if let Err(error) = renew(shards, save).await {
                on_error(error);
            }
            shards.forget_connections();
        }
    }
}
