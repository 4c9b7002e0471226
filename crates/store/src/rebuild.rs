//! The records of a shard, read whole or not at all.
//!
//! A partial picture is worse than none: machines missing from it would be replaced. So a page or object that cannot be
//! read fails the whole rebuild, and neither the caller nor the cache sees anything of it. A record that is there but
//! does not parse is reported, because its instance stays a member that nobody touches. A record that is in the cache
//! and no longer in the bucket is reported too: the cache may hold the last copy of it, and keeps it.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt as _, TryStreamExt as _, channel::mpsc, future};
use nstance_core::{
    ids::{Epoch, GroupRef, InstanceId, Shard, Tenant},
    instance::{Instance, Phase},
    ports::{
        clock::Entropy,
        objects::{ETag, Listed, Object, ObjectStore, StoreError},
    },
};
use nstance_rt::chain::Chain;
use serde_json::Value;

use crate::{
    cache::{Cache, CacheError, CachedObject},
    records::{self, DecodeError, Versioned, groups::GroupsFile, groups_key, instance_prefix, parse_instance_key},
    retry,
};

/// Gets in flight at once: a cold start of 10 000 records at 30 ms each takes under 3 s.
const PARALLEL: usize = 128;

#[derive(Debug, thiserror::Error)]
pub enum RebuildError {
    #[error("read of {key} failed, so the shard's state is not known; it is tried again")]
    Store {
        key: String,
        #[source]
        source: StoreError,
    },
    #[error("record {key} has version {version}, written by a newer nstance; upgrade this server")]
    TooNew { key: String, version: u32 },
    #[error("write the rebuilt state to the cache")]
    Cache(#[source] CacheError),
}

/// A record that is there and does not parse. Its instance is a member that is neither replaced nor removed, and its
/// group is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorruptRecord {
    pub key: String,
    pub instance: InstanceId,
    /// From the key.
    pub tenant: Tenant,
    /// As far as the broken text still tells. Without it, every group of the tenant may be the one to hold.
    pub group: Option<GroupRef>,
    /// With line and column.
    pub message: String,
}

#[derive(Debug, Clone, PartialEq)]
pub enum GroupsState {
    /// The store itself said that there is none.
    Absent,
    Present(Box<Versioned<GroupsFile>>),
    /// It is there and does not parse: writes are refused with this, a remembered copy may serve reads.
    Unreadable(DecodeError),
}

impl GroupsState {
    pub fn present(&self) -> Option<&Versioned<GroupsFile>> {
        match self {
            Self::Present(groups) => Some(groups),
            Self::Absent | Self::Unreadable(_) => None,
        }
    }
}

/// The whole of a shard's records at one look.
#[derive(Debug, Clone, PartialEq)]
pub struct Rebuilt {
    /// By key.
    pub instances: Vec<Versioned<Instance>>,
    pub corrupt: Vec<CorruptRecord>,
    pub groups: GroupsState,
    /// The cached groups file, if the present one is absent or unreadable.
    pub remembered_groups: Option<Box<Versioned<GroupsFile>>>,
    /// Cached records of instances that were not at their end, and that are missing from the bucket. The leader puts
    /// them back, or proves their VMs gone and purges them; until then the cache keeps them.
    pub vanished: Vec<Versioned<Instance>>,
    /// Keys below `instance/` that name no instance. Reported and left alone.
    pub foreign_keys: Vec<String>,
    /// Of all records read here. Higher than our own: raise the lease before the first action.
    pub highest_epoch: Epoch,
    pub n_listed: usize,
    /// How many bodies came from the store.
    pub n_fetched: usize,
}

impl Rebuilt {
    /// The groups file as far as it is known.
    fn groups_file(&self) -> Option<&GroupsFile> {
        self.groups.present().or(self.remembered_groups.as_deref()).map(|it| &it.value)
    }
}

type Cached = BTreeMap<String, (ETag, Vec<u8>)>;

/// Reads the records of `shard`, fetching only bodies whose version differs from the cached one, and puts the result
/// into the cache in one transaction.
pub async fn rebuild(
    store: &dyn ObjectStore,
    cache: Option<&Cache>,
    shard: &Shard,
    entropy: &dyn Entropy,
) -> Result<Rebuilt, RebuildError> {
    let cached = match cache {
        // A cache that cannot be read is an empty one.
        Some(cache) => cache.objects().unwrap_or_else(|error| {
            tracing::warn!(error = %Chain(&error), "cache not readable, everything is read from the store");
            Cached::new()
        }),
        None => Cached::new(),
    };
    let (groups, bodies) =
        future::try_join(read_groups(store, &cached, shard, entropy), read_bodies(store, &cached, shard, entropy))
            .await?;
    let rebuilt = assemble(shard, &cached, &groups, &bodies)?;
    if let Some(cache) = cache {
        let written = if has_news(shard, &cached, &rebuilt, &groups, &bodies) {
            write_cache(cache, shard, &rebuilt, &groups, &bodies)
        } else {
            cache.replace_groups(rebuilt.groups_file())
        };
        written.map_err(RebuildError::Cache)?;
    }
    Ok(rebuilt)
}

/// Whether the cache lacks anything of what was read, or has more. Its records and what is derived of them are always
/// written together, so what is the same here is the same there.
fn has_news(shard: &Shard, cached: &Cached, rebuilt: &Rebuilt, groups: &Option<Body>, read: &Bodies) -> bool {
    let prefix = instance_prefix(shard);
    let n_cached = cached.keys().filter(|key| key.starts_with(&prefix)).count();
    n_cached != read.bodies.len() + rebuilt.vanished.len()
        || !rebuilt.corrupt.is_empty()
        || read.bodies.iter().chain(groups).any(|it| it.fetched)
}

/// One object as it is now, wherever its body came from.
struct Body {
    key: String,
    object: Object,
    fetched: bool,
}

struct Bodies {
    n_listed: usize,
    bodies: Vec<Body>,
    foreign_keys: Vec<String>,
}

async fn read_groups(
    store: &dyn ObjectStore,
    cached: &Cached,
    shard: &Shard,
    entropy: &dyn Entropy,
) -> Result<Option<Body>, RebuildError> {
    let key = groups_key(shard);
    let read = retry::read(retry::READ_TRIES, entropy, || async {
        match cached.get(&key) {
            Some((etag, body)) => Ok(match store.get_if_changed(&key, etag).await? {
                Some(object) => (object, true),
                None => (Object { body: body.clone(), etag: etag.clone(), modified: None }, false),
            }),
            None => Ok((store.get(&key).await?, true)),
        }
    })
    .await;
    match read {
        Ok((object, fetched)) => Ok(Some(Body { key, object, fetched })),
        Err(error) if error.is_not_found() => Ok(None),
        Err(source) => Err(RebuildError::Store { key, source }),
    }
}

/// Lists the records, and reads each as soon as it is named: a listing of thousands takes as long as their bodies do.
async fn read_bodies(
    store: &dyn ObjectStore,
    cached: &Cached,
    shard: &Shard,
    entropy: &dyn Entropy,
) -> Result<Bodies, RebuildError> {
    let prefix = instance_prefix(shard);
    let (tell, told) = mpsc::unbounded::<Listed>();
    let listing = async move {
        let listed = retry::read(retry::READ_TRIES, entropy, || async {
            let mut show = |page: &[Listed]| page.iter().for_each(|it| drop(tell.unbounded_send(it.clone())));
            store.list_pages(&prefix, &mut show).await
        })
        .await;
        listed.map_err(|source| RebuildError::Store { key: prefix.clone(), source })
    };
    let is_ours = |it: &Listed| parse_instance_key(&it.key).is_some_and(|(its, ..)| its == *shard);
    // A listing that is tried again names them again.
    let mut seen = BTreeSet::new();
    let reading = told
        .filter(|it| future::ready(is_ours(it) && seen.insert((it.key.clone(), it.etag.0.clone()))))
        .map(|it| read_body(store, cached, it, entropy))
        // In order, so that the same store gives the same result, and the last of several versions is kept.
        .buffered(PARALLEL)
        .try_collect::<BTreeMap<String, Option<Body>>>();
    let (listed, mut read) = future::try_join(listing, reading).await?;
    let n_listed = listed.len();
    let (ours, foreign): (Vec<_>, Vec<_>) = listed.into_iter().partition(is_ours);
    Ok(Bodies {
        n_listed,
        bodies: ours.iter().filter_map(|it| read.remove(&it.key).flatten()).collect(),
        foreign_keys: foreign.into_iter().map(|it| it.key).collect(),
    })
}

/// One listed object; none if it is gone since.
async fn read_body(
    store: &dyn ObjectStore,
    cached: &Cached,
    it: Listed,
    entropy: &dyn Entropy,
) -> Result<(String, Option<Body>), RebuildError> {
    let Listed { key, etag, .. } = it;
    if let Some((_, body)) = cached.get(&key).filter(|(cached, _)| *cached == etag) {
        let object = Object { body: body.clone(), etag, modified: None };
        return Ok((key.clone(), Some(Body { key, object, fetched: false })));
    }
    match fetch(store, &key, entropy).await {
        Ok(object) => Ok((key.clone(), object.map(|object| Body { key, object, fetched: true }))),
        Err(source) => Err(RebuildError::Store { key, source }),
    }
}

/// Reads a listed object. It was there a moment ago, so its absence is believed only when told twice.
async fn fetch(store: &dyn ObjectStore, key: &str, entropy: &dyn Entropy) -> Result<Option<Object>, StoreError> {
    for _ in 0..2 {
        match retry::read(retry::READ_TRIES, entropy, || store.get(key)).await {
            Ok(object) => return Ok(Some(object)),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

fn assemble(shard: &Shard, cached: &Cached, groups: &Option<Body>, read: &Bodies) -> Result<Rebuilt, RebuildError> {
    let too_new = |key: String, version| RebuildError::TooNew { key, version };
    let groups_state = match groups {
        None => GroupsState::Absent,
        Some(body) => match records::decode_object(&body.key, body.object.clone()) {
            Ok(groups) => GroupsState::Present(Box::new(groups)),
            Err(DecodeError::TooNew { key, version }) => return Err(too_new(key, version)),
            Err(error) => GroupsState::Unreadable(error),
        },
    };
    let remembered_groups = match &groups_state {
        GroupsState::Present(_) => None,
        GroupsState::Absent | GroupsState::Unreadable(_) => remembered(cached, &groups_key(shard)).map(Box::new),
    };
    let mut rebuilt = Rebuilt {
        instances: Vec::with_capacity(read.bodies.len()),
        corrupt: Vec::new(),
        groups: groups_state,
        remembered_groups,
        vanished: Vec::new(),
        foreign_keys: read.foreign_keys.clone(),
        highest_epoch: Epoch(0),
        n_listed: read.n_listed,
        n_fetched: read.bodies.iter().chain(groups).filter(|it| it.fetched).count(),
    };
    for body in &read.bodies {
        match records::decode_object::<Instance>(&body.key, body.object.clone()) {
            Ok(instance) => rebuilt.instances.push(instance),
            Err(DecodeError::TooNew { key, version }) => return Err(too_new(key, version)),
            Err(error) => rebuilt.corrupt.extend(describe_corrupt(&body.key, &body.object.body, &error)),
        }
    }
    let present: BTreeSet<&str> = read.bodies.iter().map(|it| it.key.as_str()).collect();
    rebuilt.vanished = cached
        .keys()
        .filter(|key| key.starts_with(&instance_prefix(shard)) && !present.contains(key.as_str()))
        .filter_map(|key| remembered::<Instance>(cached, key))
        .filter(|it| !matches!(it.value.phase(), Phase::Deleted | Phase::Failed))
        .collect();
    let epochs = rebuilt.instances.iter().map(|it| it.meta.epoch);
    rebuilt.highest_epoch = epochs.chain(rebuilt.groups.present().map(|it| it.meta.epoch)).max().unwrap_or(Epoch(0));
    Ok(rebuilt)
}

fn remembered<T: records::Record>(cached: &Cached, key: &str) -> Option<Versioned<T>> {
    let (etag, body) = cached.get(key)?;
    let object = Object { body: body.clone(), etag: etag.clone(), modified: None };
    records::decode_object(key, object).ok()
}

fn describe_corrupt(key: &str, body: &[u8], error: &DecodeError) -> Option<CorruptRecord> {
    let (_, tenant, instance) = parse_instance_key(key)?;
    let group = salvage_group(body).map(|group| GroupRef::new(tenant.clone(), group));
    Some(CorruptRecord { key: key.to_owned(), instance, tenant, group, message: error.to_string() })
}

/// The group a broken record names, if that much of it can still be read.
fn salvage_group(body: &[u8]) -> Option<nstance_core::ids::GroupKey> {
    if let Ok(value) = serde_json::from_slice::<Value>(body) {
        return value.get("group")?.as_str()?.parse().ok();
    }
    let text = String::from_utf8_lossy(body);
    let (_, rest) = text.split_once("\"group\"")?;
    let quoted = rest.trim_start().strip_prefix(':')?.trim_start().strip_prefix('"')?;
    quoted.split_once('"')?.0.parse().ok()
}

fn write_cache(
    cache: &Cache,
    shard: &Shard,
    rebuilt: &Rebuilt,
    groups: &Option<Body>,
    read: &Bodies,
) -> Result<(), CacheError> {
    let epochs: BTreeMap<String, Epoch> = rebuilt
        .instances
        .iter()
        .map(|it| (records::instance_key(shard, &it.value.group.tenant, &it.value.id), it.meta.epoch))
        .chain(rebuilt.groups.present().map(|it| (groups_key(shard), it.meta.epoch)))
        .collect();
    // An unreadable groups file must not push the last good copy out.
    let groups = groups.iter().filter(|_| rebuilt.groups.present().is_some());
    let changed: Vec<CachedObject> = read
        .bodies
        .iter()
        .chain(groups)
        .filter(|it| it.fetched)
        .map(|it| CachedObject {
            key: it.key.clone(),
            etag: it.object.etag.clone(),
            body: it.object.body.clone(),
            epoch: epochs.get(&it.key).copied().unwrap_or_default(),
        })
        .collect();
    let vanished: Vec<String> =
        rebuilt.vanished.iter().map(|it| records::instance_key(shard, &it.value.group.tenant, &it.value.id)).collect();
    let present = read.bodies.iter().map(|it| it.key.as_str()).chain(vanished.iter().map(String::as_str));
    let instances = rebuilt.instances.iter().map(|it| &it.value);
    cache.replace_derived(&instance_prefix(shard), &changed, present, instances, rebuilt.groups_file())
}

#[cfg(test)]
mod tests;
