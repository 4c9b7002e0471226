//! Registers an operator at the registration port of any shard's leader: with a nonce, or again with the key of an earlier
//! registration.
//!
//! The same nonce may be presented again with the same key, for example after a crash between the answer and its storage.
//! With another key it is refused.

use std::{sync::Arc, time::Duration};

use nstance_core::{
    ids::{ClusterId, Tenant},
    ports::clock::Clock,
};
use nstance_identity::{ca::Bundle, keys::KeyPair, link::Net, rejoin::RejoinClaim, role::Role, tls::client_config};
use nstance_proto::v1::{
    RegisterClientRequest, RegisterClientResponse, RejoinProof, registration_service_client::RegistrationServiceClient,
};
use tonic::Code;

use crate::{ShardError, Target, dial};

/// What a registration is made with.
pub struct Registration<'a> {
    /// The CAs by which servers are trusted.
    pub ca_bundle: &'a Bundle,
    pub nonce: &'a str,
    pub key: &'a KeyPair,
    /// The version that the server logs.
    pub client_version: &'a str,
    pub clock: Arc<dyn Clock>,
}

impl Registration<'_> {
    /// Registers with the leader of one shard, whose target names registration ports. The timeout includes connecting.
    pub async fn register(
        &self,
        network: &dyn Net,
        target: &Target,
        timeout: Duration,
    ) -> Result<RegisterClientResponse, ShardError> {
        let request = RegisterClientRequest {
            registration_nonce_jwt: self.nonce.to_owned(),
            public_key_pem: self.key.public_key_pem().into_bytes(),
            client_version: self.client_version.to_owned(),
            ..RegisterClientRequest::default()
        };
        send(request, self.ca_bundle, &self.clock, network, target, timeout).await
    }
}

/// What an operator that is registered, but whose certificate is not accepted any more, gets a new one with.
pub struct Rejoining<'a> {
    pub ca_bundle: &'a Bundle,
    pub key: &'a KeyPair,
    pub cluster: &'a ClusterId,
    pub tenant: &'a Tenant,
    /// The operator's id.
    pub client_id: &'a str,
    /// One more than at the last rejoin that was answered. The same number may be sent again until it is answered. It must
    /// be stored before it is sent.
    pub counter: u64,
    pub client_version: &'a str,
    pub clock: Arc<dyn Clock>,
}

impl Rejoining<'_> {
    /// Rejoins at the leader of one shard, whose target names registration ports. The timeout includes connecting.
    pub async fn rejoin(
        &self,
        network: &dyn Net,
        target: &Target,
        timeout: Duration,
    ) -> Result<RegisterClientResponse, ShardError> {
        let Self { cluster, tenant, client_id, counter, .. } = *self;
        let signature = RejoinClaim { cluster, role: Role::Operator, tenant, client_id, counter }.sign(self.key);
        let proof = RejoinProof { client_id: client_id.to_owned(), tenant: tenant.to_string(), counter, signature };
        let request = RegisterClientRequest {
            rejoin: Some(proof),
            public_key_pem: self.key.public_key_pem().into_bytes(),
            client_version: self.client_version.to_owned(),
            ..RegisterClientRequest::default()
        };
        send(request, self.ca_bundle, &self.clock, network, target, timeout).await
    }
}

async fn send(
    request: RegisterClientRequest,
    ca_bundle: &Bundle,
    clock: &Arc<dyn Clock>,
    network: &dyn Net,
    target: &Target,
    timeout: Duration,
) -> Result<RegisterClientResponse, ShardError> {
    let shard = target.shard.as_str();
    let tls = client_config(ca_bundle, None, clock.clone())
        .map_err(|error| ShardError::new(shard, Code::InvalidArgument, error.to_string()))?;
    let answer = async {
        let link = dial::first_that_accepts(network, &tls, target).await?;
        let answer = RegistrationServiceClient::new(link.channel).register_operator(request).await;
        Ok(answer.map_err(|status| ShardError::from_status(shard, &status))?.into_inner())
    };
    tokio::time::timeout(timeout, answer).await.map_err(|_| ShardError::timed_out(shard, timeout)).flatten()
}
