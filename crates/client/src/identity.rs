//! The operator identity that calls are made with: CA bundle, private key and certificate.
//!
//! An [`Identity`] lives in memory. Where it comes from and where a renewed one is saved is the caller's decision
//! ([`SaveIdentity`]): the admin tool uses files, the operator Kubernetes Secrets. A renewed certificate is used only after
//! it was saved, and from the bytes in memory, never read back.

use std::{
    error::Error,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use nstance_core::{
    ids::Tenant,
    ports::clock::{Clock, Entropy},
    time::Timestamp,
};
use nstance_identity::{
    ca::{Bundle, CaError},
    keys::{KeyError, KeyPair},
    peer::{Peer, PeerName},
    renew::{renew_after, renew_at},
    tls::client_config,
};
use nstance_proto::v1::RenewCertificateRequest;
use rustls::{ClientConfig, pki_types::CertificateDer, pki_types::pem::PemObject as _};

use crate::{RenewError, ShardClient, ShardError};

/// Who calls.
pub struct Identity {
    key: KeyPair,
    clock: Arc<dyn Clock>,
    current: Mutex<Current>,
}

/// The part that changes with a renewal.
struct Current {
    bundle: Bundle,
    certificate_pem: Vec<u8>,
    leaf: CertificateDer<'static>,
    peer: Peer,
    tls: Arc<ClientConfig>,
}

/// Why an identity cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("parse the CA bundle")]
    Bundle(#[source] CaError),
    #[error("parse the private key")]
    Key(#[source] KeyError),
    #[error("use the certificate")]
    Certificate(#[source] Box<dyn Error + Send + Sync>),
    #[error("the certificate belongs to {name}, which is no operator")]
    NotAnOperator { name: String },
    #[error("the certificate was made for another key")]
    OtherKey,
}

/// What a renewal changes. The key stays the same.
#[derive(Debug, Clone)]
pub struct RenewedIdentity {
    pub ca_bundle_pem: Vec<u8>,
    pub certificate_pem: Vec<u8>,
}

/// Where renewed identities are saved.
#[async_trait]
pub trait SaveIdentity: Send + Sync {
    /// Makes the renewed identity durable, the CA bundle first: a certificate of a new CA is of no use to a process that
    /// does not know that CA. On an error the old identity stays in use.
    async fn save(&self, renewed: &RenewedIdentity) -> Result<(), Box<dyn Error + Send + Sync>>;
}

impl Identity {
    pub fn from_pem(
        ca_bundle: &[u8],
        key: &[u8],
        certificate: &[u8],
        clock: Arc<dyn Clock>,
    ) -> Result<Self, IdentityError> {
        let bundle = Bundle::parse(ca_bundle).map_err(IdentityError::Bundle)?;
        let key = KeyPair::from_pkcs8_pem(key).map_err(IdentityError::Key)?;
        let current = Current::new(bundle, certificate, &key, &clock)?;
        Ok(Self { key, clock, current: Mutex::new(current) })
    }

    pub(crate) fn tls(&self) -> Arc<ClientConfig> {
        self.current().tls.clone()
    }

    pub fn tenant(&self) -> Option<Tenant> {
        self.current().peer.tenant().cloned()
    }

    /// What the certificate says about its holder.
    pub fn peer(&self) -> Peer {
        self.current().peer.clone()
    }

    /// Whether the certificate was issued by a CA of this bundle.
    pub fn is_issued_by(&self, bundle: &Bundle) -> bool {
        bundle.signed(&self.current().leaf)
    }

    /// The CAs of the cluster, as of the last renewal.
    pub fn ca_bundle(&self) -> Bundle {
        self.current().bundle.clone()
    }

    /// The operator's id.
    pub fn name(&self) -> String {
        self.current().peer.common_name()
    }

    pub fn valid_until(&self) -> Timestamp {
        self.current().peer.not_after
    }

    /// Whether servers would refuse it now because of its age.
    pub fn is_expired(&self) -> bool {
        self.valid_until() <= self.clock.now()
    }

    pub fn is_renewal_due(&self) -> bool {
        let current = self.current();
        renew_after(current.peer.not_before, current.peer.not_after) <= self.clock.now()
    }

    /// When the certificate is renewed: with a third of its life left, a little earlier by chance.
    pub fn renew_at(&self, entropy: &dyn Entropy) -> Timestamp {
        let current = self.current();
        renew_at(None, current.peer.not_before, current.peer.not_after, entropy)
    }

    /// The private key. It never changes.
    pub fn key(&self) -> &KeyPair {
        &self.key
    }

    /// Uses a certificate that was issued for the same key, for example by a new registration. It is not saved here.
    pub fn replace(&self, renewed: &RenewedIdentity) -> Result<(), IdentityError> {
        let bundle = Bundle::parse(&renewed.ca_bundle_pem).map_err(IdentityError::Bundle)?;
        let next = Current::new(bundle, &renewed.certificate_pem, &self.key, &self.clock)?;
        *self.current() = next;
        Ok(())
    }

    /// Trusts these CAs from now on. The certificate stays.
    pub fn replace_ca_bundle(&self, bundle: Bundle) -> Result<(), IdentityError> {
        let certificate = self.current().certificate_pem.clone();
        let next = Current::new(bundle, &certificate, &self.key, &self.clock)?;
        *self.current() = next;
        Ok(())
    }

    /// Asks a leader for the next certificate, saves it and uses it from then on. The old certificate stays valid until
    /// the new one is used.
    pub async fn renew(&self, client: &mut ShardClient, save: &dyn SaveIdentity) -> Result<(), RenewError> {
        let request = RenewCertificateRequest { public_key_pem: self.key.public_key_pem().into_bytes() };
        let answer = client.service.renew_certificate(request).await;
        let answer = answer.map_err(|status| ShardError::from_status(&client.shard, &status))?.into_inner();
        let bundle =
            Bundle::parse(&answer.ca_bundle_pem).map_err(|error| RenewError::Unusable(IdentityError::Bundle(error)))?;
        let renewed = RenewedIdentity {
            ca_bundle_pem: bundle.pem().as_bytes().to_vec(),
            certificate_pem: answer.client_certificate_pem,
        };
        let next =
            Current::new(bundle, &renewed.certificate_pem, &self.key, &self.clock).map_err(RenewError::Unusable)?;
        save.save(&renewed).await.map_err(RenewError::NotSaved)?;
        *self.current() = next;
        Ok(())
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Current {
    fn new(bundle: Bundle, certificate: &[u8], key: &KeyPair, clock: &Arc<dyn Clock>) -> Result<Self, IdentityError> {
        let unusable = |error: Box<dyn Error + Send + Sync>| IdentityError::Certificate(error);
        let leaf = CertificateDer::from_pem_slice(certificate)
            .map_err(|error| unusable(format!("parse the certificate: {error}").into()))?;
        let peer = Peer::from_der(&leaf).map_err(|error| unusable(error.into()))?;
        if !matches!(peer.name, PeerName::Operator { .. }) {
            return Err(IdentityError::NotAnOperator { name: peer.common_name() });
        }
        if peer.public_key_der() != key.public_key_der() {
            return Err(IdentityError::OtherKey);
        }
        let tls =
            client_config(&bundle, Some((certificate, key)), clock.clone()).map_err(|error| unusable(error.into()))?;
        Ok(Self { bundle, certificate_pem: certificate.to_vec(), leaf, peer, tls })
    }
}

#[cfg(test)]
mod tests {
    use nstance_rt::clock::TokioClock;

    use super::*;
    use crate::testing::{Parts, T0, VALIDITY, identity, parts};

    fn load(parts: &Parts) -> Result<Identity, IdentityError> {
        let clock = Arc::new(TokioClock::starting_at(T0));
        Identity::from_pem(&parts.ca_bundle, &parts.key, &parts.certificate, clock)
    }

    #[tokio::test(start_paused = true)]
    async fn renewal_is_due_before_the_certificate_expires() {
        let identity = identity();
        assert!(!identity.is_renewal_due() && !identity.is_expired());
        tokio::time::advance(VALIDITY * 9 / 10).await;
        assert!(identity.is_renewal_due() && !identity.is_expired());
        tokio::time::advance(VALIDITY / 10).await;
        assert!(identity.is_expired());
    }

    #[tokio::test]
    async fn a_new_certificate_of_the_same_key_is_used_and_one_of_another_key_is_not() {
        let (identity, other) = (identity(), parts(2));
        let before = identity.tls();
        let own = parts(1);
        let renewed = |it: &Parts| RenewedIdentity {
            ca_bundle_pem: it.ca_bundle.clone(),
            certificate_pem: it.certificate.clone(),
        };
        assert!(matches!(identity.replace(&renewed(&other)), Err(IdentityError::OtherKey)));
        assert!(Arc::ptr_eq(&before, &identity.tls()));
        identity.replace(&renewed(&own)).unwrap();
        assert!(!Arc::ptr_eq(&before, &identity.tls()));
        identity.replace_ca_bundle(Bundle::parse(&other.ca_bundle).unwrap()).unwrap();
        assert!(!identity.is_issued_by(&identity.ca_bundle()), "trust changed, the certificate did not");
    }

    #[tokio::test]
    async fn an_unusable_part_is_named() {
        let error = |parts: Parts| load(&parts).err().unwrap();
        assert!(load(&parts(1)).is_ok());
        assert!(matches!(error(Parts { ca_bundle: b"x".to_vec(), ..parts(1) }), IdentityError::Bundle(_)));
        assert!(matches!(error(Parts { key: b"x".to_vec(), ..parts(1) }), IdentityError::Key(_)));
        assert!(matches!(error(Parts { certificate: b"x".to_vec(), ..parts(1) }), IdentityError::Certificate(_)));
        assert!(matches!(error(Parts { key: parts(2).key, ..parts(1) }), IdentityError::OtherKey));
    }
}
