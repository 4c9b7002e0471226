//! From a shard to an open connection of its leader.

use nstance_identity::link::{DialError, TcpNet, dial};
use nstance_proto::v1::operator_service_client::OperatorServiceClient;
use nstance_rt::chain::Chain;
use tonic::Code;

use super::{Client, Identity, ShardError, Target};

const MAX_ANSWER: usize = 64 * 1024 * 1024;

/// Tries all addresses beside each other: followers keep their ports closed, so whoever accepts leads, and a dead host
/// holds up nobody.
pub(super) async fn connect(target: &Target, identity: &Identity) -> Result<Client, ShardError> {
    let tls = identity.tls();
    let dialled = futures::future::select_ok(target.addresses.iter().map(|address| {
        let tls = tls.clone();
        Box::pin(async move { dial(&TcpNet, &tls, address).await.map_err(Box::new) })
    }));
    let (link, _rest) = dialled.await.map_err(|error| explain(target, &error))?;
    let service = OperatorServiceClient::new(link.channel).max_decoding_message_size(MAX_ANSWER);
    Ok(Client { shard: target.shard.clone(), service })
}

fn explain(target: &Target, error: &DialError) -> ShardError {
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
