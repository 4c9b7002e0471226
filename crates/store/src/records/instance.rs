//! The instance record: facts that are set once and only added.

use std::collections::BTreeMap;

use data_encoding::BASE64;
use nstance_core::{
    ids::{ClusterId, Epoch, GroupKey, GroupRef, InstanceId, Shard, Tenant},
    instance::{
        Addresses, CertFact, CertPair, CreateFailure, CreateReason, Delete, Drain, DrainReason, Inherited, Instance,
        NonceFact, OnDemandRequest, Ownership, ProviderFact, Registration, Rejoin, ReplaceMark,
    },
    time::Timestamp,
};
use serde::{Deserialize, Serialize};

use super::{Meta, Record, key::parse_instance_key, text};

#[derive(Serialize, Deserialize)]
pub struct InstanceForm {
    #[serde(with = "text")]
    instance_id: InstanceId,
    #[serde(with = "text")]
    tenant: Tenant,
    #[serde(with = "text")]
    group: GroupKey,
    #[serde(with = "text")]
    cluster_id: ClusterId,
    #[serde(with = "text")]
    shard: Shard,
    /// For people; the id says it too, and that is believed.
    #[serde(default)]
    kind: String,
    arch: String,
    template: String,
    on_demand: bool,
    #[serde(with = "text")]
    created_at: Timestamp,
    /// Missing in records of before it was stored; then the last writer's is the best guess.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    intent_epoch: Option<u64>,
    reason: ReasonForm,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    request: Option<RequestForm>,
    infra_hash: String,
    runtime_hash: String,
    config_etag: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    instance_type: Option<String>,
    subnet_id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    image_id: Option<String>,
    nonce: NonceForm,
    provider: ProviderForm,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    create_failure: Option<FailureForm>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    registration: Option<RegistrationForm>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cert: Option<CertPairForm>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rejoin: Option<RejoinForm>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    replace: Option<ReplaceForm>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    drain: Option<DrainForm>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    delete: Option<DeleteForm>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    adopted: Option<AdoptedForm>,
    /// For people. The phase is derived from the facts, so a wrong word here harms nobody.
    #[serde(default)]
    status: serde_json::Value,
}

/// A closed word, so that a wrong one is told with its place.
struct ReasonForm(CreateReason);
struct DrainReasonForm(DrainReason);

macro_rules! word {
    ($form:ident, $inner:ident, $what:literal) => {
        impl Serialize for $form {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.0.as_str())
            }
        }

        impl<'de> Deserialize<'de> for $form {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let word = String::deserialize(deserializer)?;
                $inner::parse(&word)
                    .map(Self)
                    .ok_or_else(|| serde::de::Error::custom(format!(concat!("`{}` is no ", $what), word)))
            }
        }
    };
}

word!(ReasonForm, CreateReason, "reason to create an instance");
word!(DrainReasonForm, DrainReason, "reason to drain an instance");

#[derive(Serialize, Deserialize)]
struct RequestForm {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    template: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    instance_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    subnet_pool: Option<String>,
    #[serde(default)]
    vars: BTreeMap<String, String>,
    by: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    inherits: Option<InheritedForm>,
}

#[derive(Serialize, Deserialize)]
struct InheritedForm {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    template: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    instance_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    subnet_pool: Option<String>,
    #[serde(default)]
    vars: BTreeMap<String, String>,
}

impl From<&Inherited> for InheritedForm {
    fn from(it: &Inherited) -> Self {
        let it = it.clone();
        Self { template: it.template, instance_type: it.instance_type, subnet_pool: it.subnet_pool, vars: it.vars }
    }
}

impl From<InheritedForm> for Inherited {
    fn from(it: InheritedForm) -> Self {
        Self { template: it.template, instance_type: it.instance_type, subnet_pool: it.subnet_pool, vars: it.vars }
    }
}

#[derive(Serialize, Deserialize)]
struct NonceForm {
    jti: String,
    #[serde(with = "text")]
    expires_at: Timestamp,
    #[serde(default, with = "text::option", skip_serializing_if = "Option::is_none")]
    used_at: Option<Timestamp>,
}

#[derive(Serialize, Deserialize)]
struct ProviderForm {
    kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reserved_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(default, with = "text::option", skip_serializing_if = "Option::is_none")]
    confirmed_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ip4: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ip6: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hostname: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fqdn: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct FailureForm {
    #[serde(with = "text")]
    at: Timestamp,
    class: String,
    message: String,
}

#[derive(Serialize, Deserialize)]
struct RegistrationForm {
    #[serde(with = "text")]
    at: Timestamp,
    #[serde(with = "base64")]
    public_key: Vec<u8>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ip4: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ip6: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hostname: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fqdn: Option<String>,
    agent_version: String,
}

/// SPKI DER as base64.
pub(super) mod base64 {
    use super::BASE64;
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(in super::super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64.encode(bytes))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(deserializer)?;
        BASE64.decode(text.as_bytes()).map_err(|_| D::Error::custom("expected base64"))
    }
}

#[derive(Serialize, Deserialize)]
pub(super) struct CertPairForm {
    current: CertForm,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    previous: Option<CertForm>,
}

#[derive(Serialize, Deserialize)]
struct CertForm {
    serial: String,
    issuer: String,
    #[serde(with = "text")]
    not_before: Timestamp,
    #[serde(with = "text")]
    not_after: Timestamp,
}

#[derive(Serialize, Deserialize)]
pub(super) struct RejoinForm {
    count: u64,
    #[serde(with = "text")]
    at: Timestamp,
    proof_sha256: String,
}

#[derive(Serialize, Deserialize)]
struct ReplaceForm {
    #[serde(with = "text")]
    at: Timestamp,
    by: String,
    reason: String,
}

#[derive(Serialize, Deserialize)]
struct DrainForm {
    reason: DrainReasonForm,
    #[serde(with = "text")]
    started_at: Timestamp,
    #[serde(with = "text")]
    deadline: Timestamp,
    #[serde(default, with = "text::option", skip_serializing_if = "Option::is_none")]
    replacement: Option<InstanceId>,
    #[serde(default, with = "text::option", skip_serializing_if = "Option::is_none")]
    acked_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    acked_by: Option<String>,
    #[serde(default, with = "text::option", skip_serializing_if = "Option::is_none")]
    cancelled_at: Option<Timestamp>,
}

#[derive(Serialize, Deserialize)]
struct DeleteForm {
    reason: String,
    by: String,
    #[serde(with = "text")]
    requested_at: Timestamp,
    #[serde(default, with = "text::option", skip_serializing_if = "Option::is_none")]
    gone_at: Option<Timestamp>,
}

#[derive(Serialize, Deserialize)]
struct AdoptedForm {
    #[serde(with = "text")]
    at: Timestamp,
}

impl From<&CertPair> for CertPairForm {
    fn from(pair: &CertPair) -> Self {
        let form = |it: &CertFact| CertForm {
            serial: it.serial.clone(),
            issuer: it.issuer.clone(),
            not_before: it.not_before,
            not_after: it.not_after,
        };
        Self { current: form(&pair.current), previous: pair.previous.as_ref().map(form) }
    }
}

impl From<CertPairForm> for CertPair {
    fn from(form: CertPairForm) -> Self {
        let fact = |it: CertForm| CertFact {
            serial: it.serial,
            issuer: it.issuer,
            not_before: it.not_before,
            not_after: it.not_after,
        };
        Self { current: fact(form.current), previous: form.previous.map(fact) }
    }
}

impl From<&Rejoin> for RejoinForm {
    fn from(it: &Rejoin) -> Self {
        Self { count: it.count, at: it.at, proof_sha256: it.proof_sha256.clone() }
    }
}

impl From<RejoinForm> for Rejoin {
    fn from(it: RejoinForm) -> Self {
        Self { count: it.count, at: it.at, proof_sha256: it.proof_sha256 }
    }
}

impl Record for Instance {
    type Form = InstanceForm;

    fn to_form(&self) -> InstanceForm {
        InstanceForm {
            instance_id: self.id,
            tenant: self.group.tenant.clone(),
            group: self.group.group.clone(),
            cluster_id: self.cluster.clone(),
            shard: self.shard.clone(),
            kind: self.id.kind().to_string(),
            arch: self.arch.clone(),
            template: self.template.clone(),
            on_demand: self.ownership == Ownership::OnDemand,
            created_at: self.created_at,
            intent_epoch: Some(self.intent_epoch.0),
            reason: ReasonForm(self.reason),
            request: self.request.as_ref().map(|it| RequestForm {
                request_id: it.request_id.clone(),
                template: it.template.clone(),
                instance_type: it.instance_type.clone(),
                subnet_pool: it.subnet_pool.clone(),
                vars: it.vars.clone(),
                by: it.by.clone(),
                inherits: (it.inherits != Inherited::default()).then(|| (&it.inherits).into()),
            }),
            infra_hash: self.infra_hash.clone(),
            runtime_hash: self.runtime_hash.clone(),
            config_etag: self.config_etag.clone(),
            instance_type: self.instance_type.clone(),
            subnet_id: self.subnet.clone(),
            image_id: self.image.clone(),
            nonce: NonceForm {
                jti: self.nonce.jti.clone(),
                expires_at: self.nonce.expires_at,
                used_at: self.nonce.used_at,
            },
            provider: ProviderForm {
                kind: self.provider.kind.clone(),
                reserved_id: self.provider.reserved_id.clone(),
                id: self.provider.id.clone(),
                confirmed_at: self.provider.confirmed_at,
                ip4: self.provider.addresses.ip4.clone(),
                ip6: self.provider.addresses.ip6.clone(),
                hostname: self.provider.addresses.hostname.clone(),
                fqdn: self.provider.addresses.fqdn.clone(),
            },
            create_failure: self.create_failure.as_ref().map(|it| FailureForm {
                at: it.at,
                class: it.class.clone(),
                message: it.message.clone(),
            }),
            registration: self.registration.as_ref().map(|it| RegistrationForm {
                at: it.at,
                public_key: it.public_key.clone(),
                ip4: it.addresses.ip4.clone(),
                ip6: it.addresses.ip6.clone(),
                hostname: it.addresses.hostname.clone(),
                fqdn: it.addresses.fqdn.clone(),
                agent_version: it.agent_version.clone(),
            }),
            cert: self.cert.as_ref().map(Into::into),
            rejoin: self.rejoin.as_ref().map(Into::into),
            replace: self.replace.as_ref().map(|it| ReplaceForm {
                at: it.at,
                by: it.by.clone(),
                reason: it.reason.clone(),
            }),
            drain: self.drain.as_ref().map(|it| DrainForm {
                reason: DrainReasonForm(it.reason),
                started_at: it.started_at,
                deadline: it.deadline,
                replacement: it.replacement,
                acked_at: it.acked_at,
                acked_by: it.acked_by.clone(),
                cancelled_at: it.cancelled_at,
            }),
            delete: self.delete.as_ref().map(|it| DeleteForm {
                reason: it.reason.clone(),
                by: it.by.clone(),
                requested_at: it.requested_at,
                gone_at: it.gone_at,
            }),
            adopted: self.adopted_at.map(|at| AdoptedForm { at }),
            status: self.phase().as_str().into(),
        }
    }

    fn stamp(&mut self, epoch: Epoch) {
        self.epoch = epoch;
    }

    fn from_form(form: InstanceForm, meta: &Meta, key: &str) -> Result<Self, String> {
        // A copy under another key would make two instances of one, or one of two.
        if let Some((shard, tenant, id)) = parse_instance_key(key)
            && (shard != form.shard || tenant != form.tenant || id != form.instance_id)
        {
            return Err(format!(
                "the record is of instance {} of tenant {} in shard {}, not of the one its key names",
                form.instance_id, form.tenant, form.shard
            ));
        }
        Ok(Self {
            id: form.instance_id,
            group: GroupRef::new(form.tenant, form.group),
            cluster: form.cluster_id,
            shard: form.shard,
            epoch: meta.epoch,
            intent_epoch: form.intent_epoch.map_or(meta.epoch, Epoch),
            ownership: if form.on_demand { Ownership::OnDemand } else { Ownership::Managed },
            created_at: form.created_at,
            reason: form.reason.0,
            request: form.request.map(|it| OnDemandRequest {
                request_id: it.request_id,
                template: it.template,
                instance_type: it.instance_type,
                subnet_pool: it.subnet_pool,
                vars: it.vars,
                by: it.by,
                inherits: it.inherits.map(Into::into).unwrap_or_default(),
            }),
            arch: form.arch,
            template: form.template,
            infra_hash: form.infra_hash,
            runtime_hash: form.runtime_hash,
            config_etag: form.config_etag,
            instance_type: form.instance_type,
            subnet: form.subnet_id,
            image: form.image_id,
            nonce: NonceFact { jti: form.nonce.jti, expires_at: form.nonce.expires_at, used_at: form.nonce.used_at },
            provider: ProviderFact {
                kind: form.provider.kind,
                reserved_id: form.provider.reserved_id,
                id: form.provider.id,
                confirmed_at: form.provider.confirmed_at,
                addresses: Addresses {
                    ip4: form.provider.ip4,
                    ip6: form.provider.ip6,
                    hostname: form.provider.hostname,
                    fqdn: form.provider.fqdn,
                },
            },
            create_failure: form.create_failure.map(|it| CreateFailure {
                at: it.at,
                class: it.class,
                message: it.message,
            }),
            registration: form.registration.map(|it| Registration {
                at: it.at,
                public_key: it.public_key,
                addresses: Addresses { ip4: it.ip4, ip6: it.ip6, hostname: it.hostname, fqdn: it.fqdn },
                agent_version: it.agent_version,
            }),
            cert: form.cert.map(Into::into),
            rejoin: form.rejoin.map(Into::into),
            replace: form.replace.map(|it| ReplaceMark { at: it.at, by: it.by, reason: it.reason }),
            drain: form.drain.map(|it| Drain {
                reason: it.reason.0,
                started_at: it.started_at,
                deadline: it.deadline,
                replacement: it.replacement,
                acked_at: it.acked_at,
                acked_by: it.acked_by,
                cancelled_at: it.cancelled_at,
            }),
            delete: form.delete.map(|it| Delete {
                reason: it.reason,
                by: it.by,
                requested_at: it.requested_at,
                gone_at: it.gone_at,
            }),
            adopted_at: form.adopted.map(|it| it.at),
        })
    }
}
