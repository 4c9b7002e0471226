//! Registers a new operator with a nonce, at the registration port of any shard's leader.
//!
//! The same nonce may be presented again with the same key, for example after a crash between the answer and its storage.
//! With another key it is refused.

use std::{sync::Arc, time::Duration};

use nstance_core::ports::clock::Clock;
use nstance_identity::{ca::Bundle, keys::KeyPair, link::Net, tls::client_config};
use nstance_proto::v1::{
    RegisterClientRequest, RegisterClientResponse, registration_service_client::RegistrationServiceClient,
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
        let shard = target.shard.as_str();
        let tls = client_config(self.ca_bundle, None, self.clock.clone())
            .map_err(|error| ShardError::new(shard, Code::InvalidArgument, error.to_string()))?;
        let answer = async {
            let link = dial::first_that_accepts(network, &tls, target).await?;
            let request = RegisterClientRequest {
                registration_nonce_jwt: self.nonce.to_owned(),
                public_key_pem: self.key.public_key_pem().into_bytes(),
                client_version: self.client_version.to_owned(),
                ..RegisterClientRequest::default()
            };
            let answer = RegistrationServiceClient::new(link.channel).register_operator(request).await;
            Ok(answer.map_err(|status| ShardError::from_status(shard, &status))?.into_inner())
        };
        tokio::time::timeout(timeout, answer).await.map_err(|_| ShardError::timed_out(shard, timeout)).flatten()
    }
}
