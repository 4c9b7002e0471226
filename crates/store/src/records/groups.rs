//! `groups.jsonc`: what the API set, what was deleted on purpose, and which static groups the last config had.
//!
//! The three together decide what a group named by an instance record *is*. Absence from all of them never removes a
//! machine; only a tombstone does.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use nstance_core::{
    ids::{Epoch, GroupKey, GroupRef, InstanceId, Tenant},
    time::Timestamp,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::{Map, Value};

use super::{MAX_GROUPS, Meta, Record, duration, text};

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GroupsFile {
    /// Of the last writer.
    pub epoch: Epoch,
    /// Dynamic groups, and overrides of static ones.
    pub groups: BTreeMap<GroupRef, GroupEntry>,
    /// Removed by an explicit word: their members leave.
    pub deleted: BTreeMap<GroupRef, Tombstone>,
    /// The static groups of the last applied config; what left since gets a tombstone.
    pub static_groups: Option<StaticSeen>,
}

/// The API layer of one group: only what was set. `None` falls back to the config.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GroupEntry {
    pub template: Option<String>,
    pub size: Option<u32>,
    pub instance_type: Option<String>,
    pub subnet_pool: Option<String>,
    pub vars: Option<BTreeMap<String, String>>,
    pub drain_timeout: Option<Duration>,
    pub load_balancers: Option<Vec<String>>,
    pub rollout_paused: Option<bool>,
    /// Whom the operator wants to see go first, written together with the size.
    pub preferred_victims: Vec<InstanceId>,
    /// Grows with every change of the entry.
    pub generation: u64,
    pub updated_at: Option<Timestamp>,
    pub updated_by: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tombstone {
    pub at: Timestamp,
    pub by: String,
    pub reason: TombstoneReason,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TombstoneReason {
    /// DeleteGroup.
    Api,
    /// The group left the config.
    Config,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StaticSeen {
    /// Version of the config that was applied.
    pub etag: String,
    pub groups: BTreeSet<GroupRef>,
}

type ByTenant<T> = BTreeMap<TenantName, BTreeMap<GroupName, T>>;

#[derive(Serialize, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(transparent)]
struct TenantName(#[serde(with = "text")] Tenant);

#[derive(Serialize, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(transparent)]
struct GroupName(#[serde(with = "text")] GroupKey);

#[derive(Serialize, Deserialize)]
pub struct GroupsForm {
    #[serde(default)]
    groups: ByTenant<EntryForm>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    deleted: ByTenant<TombstoneForm>,
    #[serde(rename = "static", default, skip_serializing_if = "Option::is_none")]
    static_groups: Option<StaticForm>,
}

#[derive(Serialize, Deserialize)]
struct EntryForm {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    template: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    size: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    instance_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    subnet_pool: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    vars: Option<BTreeMap<String, String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    drain_timeout: Option<Span>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    load_balancers: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rollout_paused: Option<bool>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    preferred_victims: Vec<IdForm>,
    #[serde(default)]
    generation: u64,
    #[serde(default, with = "text::option", skip_serializing_if = "Option::is_none")]
    updated_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    updated_by: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(transparent)]
struct IdForm(#[serde(with = "text")] InstanceId);

/// A duration as in the config: text with a unit, or the number 0.
struct Span(Duration);

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&duration::format(self.0))
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let parsed = match &value {
            Value::String(text) => duration::parse(text),
            Value::Number(number) if number.as_u64() == Some(0) => Some(Duration::ZERO),
            _ => None,
        };
        parsed.map(Self).ok_or_else(|| D::Error::custom(format!("{value} is not a duration: write \"90s\" or \"5m\"")))
    }
}

#[derive(Serialize, Deserialize)]
struct TombstoneForm {
    #[serde(with = "text")]
    at: Timestamp,
    by: String,
    reason: ReasonForm,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ReasonForm {
    Api,
    Config,
}

#[derive(Serialize, Deserialize)]
struct StaticForm {
    etag: String,
    #[serde(default)]
    groups: BTreeMap<TenantName, Vec<GroupName>>,
}

fn by_tenant<T, F>(map: &BTreeMap<GroupRef, T>, form: impl Fn(&T) -> F) -> ByTenant<F> {
    let mut out = ByTenant::new();
    for (group, value) in map {
        out.entry(TenantName(group.tenant.clone())).or_default().insert(GroupName(group.group.clone()), form(value));
    }
    out
}

fn by_group<F, T>(map: ByTenant<F>, value: impl Fn(F) -> T) -> BTreeMap<GroupRef, T> {
    map.into_iter()
        .flat_map(|(tenant, groups)| groups.into_iter().map(move |(group, form)| (tenant.0.clone(), group.0, form)))
        .map(|(tenant, group, form)| (GroupRef::new(tenant, group), value(form)))
        .collect()
}

impl Record for GroupsFile {
    type Form = GroupsForm;
    const BY_HAND: bool = true;
    const MAX_BYTES: usize = MAX_GROUPS;

    fn to_form(&self) -> GroupsForm {
        GroupsForm {
            groups: by_tenant(&self.groups, |it| EntryForm {
                template: it.template.clone(),
                size: it.size,
                instance_type: it.instance_type.clone(),
                subnet_pool: it.subnet_pool.clone(),
                vars: it.vars.clone(),
                drain_timeout: it.drain_timeout.map(Span),
                load_balancers: it.load_balancers.clone(),
                rollout_paused: it.rollout_paused,
                preferred_victims: it.preferred_victims.iter().copied().map(IdForm).collect(),
                generation: it.generation,
                updated_at: it.updated_at,
                updated_by: it.updated_by.clone(),
            }),
            deleted: by_tenant(&self.deleted, |it| TombstoneForm {
                at: it.at,
                by: it.by.clone(),
                reason: match it.reason {
                    TombstoneReason::Api => ReasonForm::Api,
                    TombstoneReason::Config => ReasonForm::Config,
                },
            }),
            static_groups: self.static_groups.as_ref().map(|it| {
                let mut groups: BTreeMap<TenantName, Vec<GroupName>> = BTreeMap::new();
                for group in &it.groups {
                    groups.entry(TenantName(group.tenant.clone())).or_default().push(GroupName(group.group.clone()));
                }
                StaticForm { etag: it.etag.clone(), groups }
            }),
        }
    }

    fn stamp(&mut self, epoch: Epoch) {
        self.epoch = epoch;
    }

    fn from_form(form: GroupsForm, meta: &Meta, _key: &str) -> Result<Self, String> {
        Ok(Self {
            epoch: meta.epoch,
            groups: by_group(form.groups, |it| GroupEntry {
                template: it.template,
                size: it.size,
                instance_type: it.instance_type,
                subnet_pool: it.subnet_pool,
                vars: it.vars,
                drain_timeout: it.drain_timeout.map(|it| it.0),
                load_balancers: it.load_balancers,
                rollout_paused: it.rollout_paused,
                preferred_victims: it.preferred_victims.into_iter().map(|it| it.0).collect(),
                generation: it.generation,
                updated_at: it.updated_at,
                updated_by: it.updated_by,
            }),
            deleted: by_group(form.deleted, |it| Tombstone {
                at: it.at,
                by: it.by,
                reason: match it.reason {
                    ReasonForm::Api => TombstoneReason::Api,
                    ReasonForm::Config => TombstoneReason::Config,
                },
            }),
            static_groups: form.static_groups.map(|it| StaticSeen {
                etag: it.etag,
                groups: it
                    .groups
                    .into_iter()
                    .flat_map(|(tenant, groups)| {
                        groups.into_iter().map(move |it| GroupRef::new(tenant.0.clone(), it.0))
                    })
                    .collect(),
            }),
        })
    }

    /// A hand-written file is just tenant → group → fields.
    fn bare(text: &[u8]) -> Option<serde_json::Result<GroupsForm>> {
        let groups = serde_json::from_slice(text);
        Some(groups.map(|groups| GroupsForm { groups, deleted: BTreeMap::new(), static_groups: None }))
    }

    fn dress(bare: Map<String, Value>) -> Map<String, Value> {
        Map::from_iter([("groups".to_owned(), Value::Object(bare))])
    }
}
