//! The lease: who leads, in which term, and how to reach it. Its ETag changes with every renewal, and that is the only
//! clock followers go by; the times in it are for people.

use std::time::Duration;

use nstance_core::{ids::Epoch, time::Timestamp};
use serde::{Deserialize, Serialize};

use super::{Meta, Record, text};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseRecord {
    /// Grows with every acquisition, also by the same server.
    pub epoch: Epoch,
    /// Server id. With `process` it is the holder's identity: a restarted server is somebody else.
    pub holder: String,
    /// 128 random bits of the process, as hex.
    pub process: String,
    /// Advertised election address.
    pub addr: String,
    pub health_addr: String,
    /// `addr` is an address of a local interface of the holder.
    pub direct: bool,
    /// Empty if unknown.
    pub boot_id: String,
    /// The holder's own VM, if known.
    pub provider_id: Option<String>,
    /// Lease length in force; followers obey this one, not their own config.
    pub ttl: Duration,
    pub acquired_at: Timestamp,
    pub renewed_at: Timestamp,
    /// Free: may be taken at once.
    pub released: bool,
    pub previous: Option<Previous>,
}

/// The holder before this one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Previous {
    pub holder: String,
    pub process: String,
    pub epoch: Epoch,
    pub provider_id: Option<String>,
    pub reason: TakeOver,
}

/// Why a lease could be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TakeOver {
    Released,
    Expired,
    ProofOfDeath,
    SameHost,
    Absent,
}

#[derive(Serialize, Deserialize)]
pub struct LeaseForm {
    holder: String,
    process: String,
    addr: String,
    health_addr: String,
    direct: bool,
    #[serde(default)]
    boot_id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    provider_id: Option<String>,
    ttl_ms: u64,
    #[serde(with = "text")]
    acquired_at: Timestamp,
    #[serde(with = "text")]
    renewed_at: Timestamp,
    #[serde(default)]
    released: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    previous: Option<PreviousForm>,
}

#[derive(Serialize, Deserialize)]
struct PreviousForm {
    holder: String,
    process: String,
    epoch: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    provider_id: Option<String>,
    reason: TakeOver,
}

impl Record for LeaseRecord {
    type Form = LeaseForm;

    fn to_form(&self) -> LeaseForm {
        LeaseForm {
            holder: self.holder.clone(),
            process: self.process.clone(),
            addr: self.addr.clone(),
            health_addr: self.health_addr.clone(),
            direct: self.direct,
            boot_id: self.boot_id.clone(),
            provider_id: self.provider_id.clone(),
            ttl_ms: u64::try_from(self.ttl.as_millis()).unwrap_or(u64::MAX),
            acquired_at: self.acquired_at,
            renewed_at: self.renewed_at,
            released: self.released,
            previous: self.previous.as_ref().map(|it| PreviousForm {
                holder: it.holder.clone(),
                process: it.process.clone(),
                epoch: it.epoch.0,
                provider_id: it.provider_id.clone(),
                reason: it.reason,
            }),
        }
    }

    fn stamp(&mut self, epoch: Epoch) {
        self.epoch = epoch;
    }

    fn from_form(form: LeaseForm, meta: &Meta, _key: &str) -> Result<Self, String> {
        Ok(Self {
            epoch: meta.epoch,
            holder: form.holder,
            process: form.process,
            addr: form.addr,
            health_addr: form.health_addr,
            direct: form.direct,
            boot_id: form.boot_id,
            provider_id: form.provider_id,
            ttl: Duration::from_millis(form.ttl_ms),
            acquired_at: form.acquired_at,
            renewed_at: form.renewed_at,
            released: form.released,
            previous: form.previous.map(|it| Previous {
                holder: it.holder,
                process: it.process,
                epoch: Epoch(it.epoch),
                provider_id: it.provider_id,
                reason: it.reason,
            }),
        })
    }
}
