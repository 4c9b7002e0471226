//! What a shown certificate says about its holder.
//!
//! TLS has already proved the chain and that the peer holds the key. Here the words are read, strictly: a certificate
//! that says anything twice, or in another grammar than ours, says nothing. Whether the holder is still welcome is
//! decided against live records by the server.

use std::time::Duration;

use data_encoding::HEXLOWER;
use nstance_core::{
    ids::{ClusterId, InstanceId, OperatorId, ServerId, Shard, Tenant},
    time::Timestamp,
};
use x509_parser::{prelude::X509Certificate, x509::AttributeTypeAndValue};

use crate::{
    der, issue,
    keys::PublicKey,
    role::{ROLE_OID, Role},
};

/// How far a peer's clock may be off before its certificate is called expired or early.
pub const LEEWAY: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    #[error("certificate is not one of ours: {why}")]
    Malformed { why: &'static str },
    #[error("certificate {serial} expired at {at}; rejoin with the same key, or register again")]
    Expired { serial: String, at: Timestamp },
    #[error("certificate {serial} cannot be used: {why}")]
    Invalid { serial: String, why: &'static str },
}

impl PeerError {
    /// The reason on the wire; the code is Unauthenticated for all of them.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Malformed { .. } => "CERT_MALFORMED",
            Self::Expired { .. } => "CERT_EXPIRED",
            Self::Invalid { .. } => "CERT_INVALID",
        }
    }
}

/// Whom a certificate names, by role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerName {
    Server { server: ServerId, cluster: ClusterId, shard: Shard },
    Agent { instance: InstanceId, tenant: Tenant },
    Operator { operator: OperatorId, tenant: Tenant },
}

/// The holder of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    pub name: PeerName,
    /// 32 hex digits.
    pub serial: String,
    pub public_key: PublicKey,
    pub not_before: Timestamp,
    pub not_after: Timestamp,
    pub client_auth: bool,
}

impl Peer {
    /// Reads a leaf certificate. Time and usage are not judged: see [`Peer::check_validity`].
    pub fn from_der(leaf: &[u8]) -> Result<Self, PeerError> {
        let malformed = |why| PeerError::Malformed { why };
        let parsed = parse(leaf).map_err(malformed)?;
        let frame = Frame::of(&parsed).map_err(malformed)?;
        let name = peer_name(&parsed).map_err(malformed)?;
        Ok(Self {
            name,
            serial: frame.serial,
            public_key: frame.public_key,
            not_before: frame.not_before,
            not_after: frame.not_after,
            client_auth: frame.client_auth,
        })
    }

    /// Reads the leaf of a client and judges it in the order that calls are authorised: usage and time, then words. So
    /// that one who is merely late is told so, and can rejoin.
    pub fn accept(leaf: &[u8], now: Timestamp) -> Result<Self, PeerError> {
        let parsed = parse(leaf).map_err(|why| PeerError::Malformed { why })?;
        Frame::of(&parsed).map_err(|why| PeerError::Malformed { why })?.check(now)?;
        Self::from_der(leaf)
    }

    /// Usage as a client and validity, with [`LEEWAY`] on both ends.
    pub fn check_validity(&self, now: Timestamp) -> Result<(), PeerError> {
        let Self { serial, public_key, not_before, not_after, client_auth, .. } = self.clone();
        Frame { serial, public_key, not_before, not_after, client_auth }.check(now)
    }

    pub fn role(&self) -> Role {
        match self.name {
            PeerName::Server { .. } => Role::Server,
            PeerName::Agent { .. } => Role::Agent,
            PeerName::Operator { .. } => Role::Operator,
        }
    }

    pub fn common_name(&self) -> String {
        match &self.name {
            PeerName::Server { server, .. } => server.to_string(),
            PeerName::Agent { instance, .. } => instance.to_string(),
            PeerName::Operator { operator, .. } => operator.to_string(),
        }
    }

    /// The tenant of an agent or operator.
    pub fn tenant(&self) -> Option<&Tenant> {
        match &self.name {
            PeerName::Server { .. } => None,
            PeerName::Agent { tenant, .. } | PeerName::Operator { tenant, .. } => Some(tenant),
        }
    }

    pub fn public_key_der(&self) -> Vec<u8> {
        self.public_key.to_der()
    }
}

/// The parts of a certificate that have nothing to do with names.
struct Frame {
    serial: String,
    public_key: PublicKey,
    not_before: Timestamp,
    not_after: Timestamp,
    client_auth: bool,
}

impl Frame {
    fn of(parsed: &X509Certificate<'_>) -> Result<Self, &'static str> {
        let raw = parsed.raw_serial();
        let serial = &raw[raw.iter().take_while(|byte| **byte == 0).count()..];
        if 16 < serial.len() {
            return Err("its serial is longer than 16 bytes");
        }
        Ok(Self {
            serial: format!("{:0>32}", HEXLOWER.encode(serial)),
            public_key: PublicKey::from_der(parsed.public_key().raw).map_err(|_| "its key is not Ed25519")?,
            not_before: issue::from_asn1(parsed.validity().not_before),
            not_after: issue::from_asn1(parsed.validity().not_after),
            client_auth: matches!(parsed.extended_key_usage(), Ok(Some(usage)) if usage.value.client_auth),
        })
    }

    fn check(self, now: Timestamp) -> Result<(), PeerError> {
        if !self.client_auth {
            return Err(PeerError::Invalid { serial: self.serial, why: "it is not meant for clients" });
        }
        if self.not_after.plus(LEEWAY) < now {
            return Err(PeerError::Expired { serial: self.serial, at: self.not_after });
        }
        if now.plus(LEEWAY) < self.not_before {
            return Err(PeerError::Invalid { serial: self.serial, why: "it is not valid yet; check the clocks" });
        }
        Ok(())
    }
}

fn parse(leaf: &[u8]) -> Result<X509Certificate<'_>, &'static str> {
    match x509_parser::parse_x509_certificate(leaf) {
        Ok(([], parsed)) => Ok(parsed),
        Ok(_) => Err("bytes follow it"),
        Err(_) => Err("it is not X.509"),
    }
}

fn peer_name(parsed: &X509Certificate<'_>) -> Result<PeerName, &'static str> {
    let role = role_of(parsed)?;
    let subject = parsed.subject();
    let common_name = only(subject.iter_common_name()).ok_or("it has not exactly one CN")?;
    let organization = only(subject.iter_organization()).ok_or("it has not exactly one O")?;
    let tenant = || organization.parse().map_err(|_| "its O is not a tenant");
    Ok(match role {
        Role::Agent => PeerName::Agent {
            instance: common_name.parse().map_err(|_| "its CN is not an instance id")?,
            tenant: tenant()?,
        },
        Role::Operator => PeerName::Operator {
            operator: common_name.parse().map_err(|_| "its CN is not an operator id")?,
            tenant: tenant()?,
        },
        Role::Server => PeerName::Server {
            server: common_name.parse().map_err(|_| "its CN is not a server id")?,
            cluster: organization.parse().map_err(|_| "its O is not a cluster id")?,
            shard: only(subject.iter_organizational_unit())
                .and_then(|unit| unit.parse().ok())
                .ok_or("its OU is not exactly one shard")?,
        },
    })
}

fn only<'a>(mut values: impl Iterator<Item = &'a AttributeTypeAndValue<'a>>) -> Option<&'a str> {
    let first = values.next()?;
    if values.next().is_some() {
        return None;
    }
    first.as_str().ok()
}

fn role_of(parsed: &X509Certificate<'_>) -> Result<Role, &'static str> {
    let oid = der::oid(&ROLE_OID);
    let mut roles = parsed.extensions().iter().filter(|extension| extension.oid.as_bytes() == &oid[2..]);
    match (roles.next(), roles.next()) {
        (Some(role), None) => Role::from_der(role.value).ok_or("its role is none we know"),
        (None, _) => Err("it carries no role"),
        (Some(_), Some(_)) => Err("it carries more than one role"),
    }
}

/// Whether `leaf` is a server's own certificate, as clients ask before they speak.
pub(crate) fn is_server(leaf: &[u8]) -> bool {
    parse(leaf).and_then(|parsed| role_of(&parsed)) == Ok(Role::Server)
}

/// From when to when `leaf` is valid.
pub(crate) fn validity(leaf: &[u8]) -> Option<(Timestamp, Timestamp)> {
    let validity = parse(leaf).ok()?.validity().clone();
    Some((issue::from_asn1(validity.not_before), issue::from_asn1(validity.not_after)))
}

#[cfg(test)]
#[path = "peer/tests.rs"]
mod tests;
