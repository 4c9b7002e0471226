//! Opens the mTLS connection to a shard's leader.

use std::sync::Arc;

use nstance_identity::link::{DialError, Link, Net, dial};
use nstance_proto::v1::operator_service_client::OperatorServiceClient;
use nstance_rt::chain::Chain;
use rustls::ClientConfig;
use tonic::Code;

use crate::{Identity, ShardClient, ShardError, Target};

const MAX_ANSWER_BYTES: usize = 64 * 1024 * 1024;

/// Opens a connection to the shard's operator port.
pub(crate) async fn open(network: &dyn Net, target: &Target, identity: &Identity) -> Result<ShardClient, ShardError> {
    let link = first_that_accepts(network, &identity.tls(), target).await?;
    let service = OperatorServiceClient::new(link.channel).max_decoding_message_size(MAX_ANSWER_BYTES);
    Ok(ShardClient { shard: target.shard.clone(), service })
}

/// Tries all addresses at the same time, so that a dead host delays nothing. Followers keep their ports closed, so the one
/// that accepts is the leader.
pub(crate) async fn first_that_accepts(
    network: &dyn Net,
    tls: &Arc<ClientConfig>,
    target: &Target,
) -> Result<Link, ShardError> {
    let attempts = futures::future::select_ok(target.addresses.iter().map(|address| {
        let tls = tls.clone();
        Box::pin(async move { dial(network, &tls, address).await.map_err(Box::new) })
    }));
    let (link, _others) = attempts.await.map_err(|error| shard_error(target, &error))?;
    Ok(link)
}

fn shard_error(target: &Target, error: &DialError) -> ShardError {
    let (code, reason) = match error {
        DialError::Untrusted { .. } => (Code::Unauthenticated, "UNTRUSTED_SERVER"),
        DialError::Connect { .. } | DialError::Handshake { .. } | DialError::Http { .. } => {
            (Code::Unavailable, "UNREACHABLE")
        }
    };
    let mut message = Chain(error).to_string();
    if 1 < target.addresses.len() {
        message.push_str(&format!(" (the last of {} addresses)", target.addresses.len()));
    }
    ShardError::new(&target.shard, code, message).with_reason(reason)
}
