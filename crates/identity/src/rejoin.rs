//! Proof that a client still holds the key its record names, for one whose certificate ran out.
//!
//! The proof is bound to cluster, role, tenant, id and a counter that only grows; no clock is involved, for a machine
//! that slept for a month may have none worth trusting. A captured proof is worthless: the answer is a certificate for
//! the key the attacker does not have.

use nstance_core::ids::{ClusterId, Tenant};

use crate::{
    keys::{KeyPair, PublicKey},
    role::Role,
};

const LABEL: &str = "nstance-rejoin-v1";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RejoinClaim<'a> {
    pub cluster: &'a ClusterId,
    pub role: Role,
    pub tenant: &'a Tenant,
    pub client_id: &'a str,
    pub counter: u64,
}

impl RejoinClaim<'_> {
    /// Each part preceded by its length, so that no two claims share their bytes.
    fn message(&self) -> Vec<u8> {
        let counter = self.counter.to_string();
        let parts =
            [LABEL, self.cluster.as_str(), self.role.as_str(), self.tenant.as_str(), self.client_id, counter.as_str()];
        let mut message = Vec::with_capacity(128);
        for part in parts {
            // A part beyond 4 GiB cannot come out of a message limit of 16 KiB.
            message.extend_from_slice(&u32::try_from(part.len()).unwrap_or(u32::MAX).to_be_bytes());
            message.extend_from_slice(part.as_bytes());
        }
        message
    }

    pub fn sign(&self, key: &KeyPair) -> Vec<u8> {
        key.sign(&self.message())
    }

    pub fn verify(&self, key: &PublicKey, signature: &[u8]) -> bool {
        key.verify(&self.message(), signature)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Dice, cluster, tenant};

    #[test]
    fn proof_holds_for_exactly_one_claim() {
        let key = KeyPair::generate(&Dice::new(1));
        let (cluster, tenant, other) = (cluster(), tenant(), "other".parse().unwrap());
        let claim =
            RejoinClaim { cluster: &cluster, role: Role::Agent, tenant: &tenant, client_id: "knc1", counter: 12 };
        let proof = claim.sign(&key);
        assert!(claim.verify(&key.public_key(), &proof));
        for changed in [
            RejoinClaim { counter: 13, ..claim.clone() },
            RejoinClaim { role: Role::Operator, ..claim.clone() },
            RejoinClaim { tenant: &other, ..claim.clone() },
            RejoinClaim { client_id: "knc11", counter: 2, ..claim.clone() },
        ] {
            assert!(!changed.verify(&key.public_key(), &proof), "{changed:?}");
        }
        assert!(!claim.verify(&KeyPair::generate(&Dice::new(2)).public_key(), &proof));
        assert!(!claim.verify(&key.public_key(), b""));
    }

    #[test]
    fn signed_bytes_are_those_of_the_specification() {
        let (cluster, tenant) = (cluster(), tenant());
        let claim = RejoinClaim { cluster: &cluster, role: Role::Agent, tenant: &tenant, client_id: "x", counter: 10 };
        let expected =
            b"\0\0\0\x11nstance-rejoin-v1\0\0\0\x04demo\0\0\0\x05agent\0\0\0\x07default\0\0\0\x01x\0\0\0\x0210";
        assert_eq!(claim.message(), expected);
    }
}
