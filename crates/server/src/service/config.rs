//! The config of the shard: fetched, validated, kept.
//!
//! A stored config that is invalid, or a store that does not answer, leaves the last good copy in force. Without any
//! copy the server says why and tries for ever; it never hangs mutely and never exits for it.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use nstance_config::{Checks, Config, GroupLayer, Loaded, Report, load};
use nstance_core::{
    group::Desired,
    ids::{GroupRef, Shard},
    ports::objects::{ETag, Object, ObjectStore, StoreError},
    time::Timestamp,
};
use nstance_store::records::{
    config_keys,
    groups::{GroupEntry, GroupsFile},
};
use serde::{Deserialize, Serialize};

use crate::world::Asked;

/// The config in force.
#[derive(Clone)]
pub struct Applied {
    pub config: Config,
    pub key: String,
    pub etag: ETag,
    pub size: usize,
    pub modified: Option<Timestamp>,
    pub loaded_at: Timestamp,
    /// The store could not be asked for a newer one, or its newer one is invalid.
    pub stale: bool,
}

/// Holds the config in force; a refresh puts another in its place, and whoever still holds the old one ends with it.
pub struct InForce {
    now: RwLock<Arc<Applied>>,
    /// What the process began with: some settings are read only then.
    first: Arc<Applied>,
    stored: Mutex<Stored>,
}

/// What is known of the stored config besides what is in force.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stored {
    /// Version of another one that lies in the store and waits for a refresh.
    pub pending: Option<ETag>,
    /// The store did not say what it has.
    pub unread: bool,
}

impl InForce {
    pub fn new(applied: Applied) -> Self {
        let first = Arc::new(applied);
        Self { now: RwLock::new(first.clone()), first, stored: Mutex::default() }
    }

    pub fn get(&self) -> Arc<Applied> {
        self.now.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn set(&self, applied: Applied) {
        *self.now.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(applied);
    }

    pub fn first(&self) -> &Applied {
        &self.first
    }

    pub fn stored(&self) -> Stored {
        self.stored.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn note_stored(&self, stored: Stored) {
        *self.stored.lock().unwrap_or_else(PoisonError::into_inner) = stored;
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("config {0} and {1} are both missing; upload one")]
    Missing(String, String),
    #[error("config not read")]
    Store(#[source] StoreError),
    #[error("config {key} is not valid:\n{}", report.text())]
    Invalid { key: String, report: Box<Report> },
}

/// Validates a config as the admin tool does: with every provider kind, whichever this build can run.
pub fn check(object: &str, bytes: &[u8], shard: Option<&Shard>) -> Loaded {
    load(object, bytes, &Checks { schemas: nstance_schemas::ALL, shard })
}

/// Reads the stored config; if it cannot be used, the last good copy. An error means that there is neither.
pub async fn fetch(
    store: &dyn ObjectStore,
    last_good: &LastGood,
    shard: &Shard,
    now: Timestamp,
) -> Result<(Applied, Option<ConfigError>), ConfigError> {
    let failure = match read(store, last_good, shard).await {
        Ok((key, object)) => match apply(&key, &object, shard, now, false) {
            Ok(applied) => {
                last_good.remember(&key, &object);
                return Ok((applied, None));
            }
            Err(error) => error,
        },
        Err(error) => error,
    };
    match last_good.applied(shard, now) {
        Some(applied) => Ok((applied, Some(failure))),
        None => Err(failure),
    }
}

async fn read(store: &dyn ObjectStore, last_good: &LastGood, shard: &Shard) -> Result<(String, Object), ConfigError> {
    let kept = last_good.read();
    for key in config_keys(shard) {
        let read = match kept.as_ref().filter(|kept| kept.key == key) {
            Some(kept) => store.get_if_changed(&key, &kept.etag()).await.map(|changed| {
                changed.unwrap_or_else(|| Object {
                    body: kept.body.clone().into_bytes(),
                    etag: kept.etag(),
                    modified: None,
                })
            }),
            None => store.get(&key).await,
        };
        match read {
            Ok(object) => return Ok((key, object)),
            // Only the store's own word that it is absent leads to the second place.
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(ConfigError::Store(error)),
        }
    }
    let [first, second] = config_keys(shard);
    Err(ConfigError::Missing(first, second))
}

/// A stored config that is not the one in force: where it lies, and what it says. `None` if it is the same.
pub async fn read_other(
    store: &dyn ObjectStore,
    in_force: &Applied,
    shard: &Shard,
) -> Result<Option<(String, Object)>, ConfigError> {
    for key in config_keys(shard) {
        let read = if key == in_force.key {
            store.get_if_changed(&key, &in_force.etag).await
        } else {
            store.get(&key).await.map(Some)
        };
        match read {
            // A store may know no conditional reads.
            Ok(other) => {
                let other = other.filter(|object| key != in_force.key || object.etag != in_force.etag);
                return Ok(other.map(|object| (key, object)));
            }
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(ConfigError::Store(error)),
        }
    }
    let [first, second] = config_keys(shard);
    Err(ConfigError::Missing(first, second))
}

fn apply(key: &str, object: &Object, shard: &Shard, now: Timestamp, stale: bool) -> Result<Applied, ConfigError> {
    let Loaded { report, config } = check(key, &object.body, Some(shard));
    match config {
        Some(config) => Ok(Applied { stale, ..applied(config, key, object, now) }),
        None => Err(ConfigError::Invalid { key: key.to_owned(), report: Box::new(report) }),
    }
}

/// A valid config, as it is in force from now on.
pub fn applied(config: Config, key: &str, object: &Object, now: Timestamp) -> Applied {
    Applied {
        config,
        key: key.to_owned(),
        etag: object.etag.clone(),
        size: object.body.len(),
        modified: object.modified,
        loaded_at: now,
        stale: false,
    }
}

/// The last config that was found valid, as a file in the cache directory: it must be readable before anything else
/// is known, even which cluster this is.
pub struct LastGood {
    path: PathBuf,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    key: String,
    etag: String,
    body: String,
}

impl Kept {
    fn etag(&self) -> ETag {
        ETag(self.etag.clone())
    }
}

impl LastGood {
    pub fn new(cachedir: &Path, shard: &Shard) -> Self {
        Self { path: cachedir.join(format!("config-{shard}.json")) }
    }

    fn read(&self) -> Option<Kept> {
        serde_json::from_slice(&std::fs::read(&self.path).ok()?).ok()
    }

    pub fn applied(&self, shard: &Shard, now: Timestamp) -> Option<Applied> {
        let kept = self.read()?;
        let object = Object { body: kept.body.clone().into_bytes(), etag: kept.etag(), modified: None };
        apply(&kept.key, &object, shard, now, true).ok()
    }

    pub fn remember(&self, key: &str, object: &Object) {
        let write = || -> std::io::Result<()> {
            if let Some(dir) = self.path.parent() {
                std::fs::create_dir_all(dir)?;
            }
            let kept = Kept {
                key: key.to_owned(),
                etag: object.etag.to_string(),
                body: String::from_utf8_lossy(&object.body).into_owned(),
            };
            let temporary = self.path.with_extension("tmp");
            std::fs::write(&temporary, serde_json::to_vec(&kept)?)?;
            std::fs::rename(&temporary, &self.path)
        };
        if let Err(error) = write() {
            tracing::warn!(%error, path = %self.path.display(), "last good config not kept");
        }
    }
}

/// What is asked of every group: config and groups file, merged.
pub fn asked(config: &Config, groups: Option<&GroupsFile>, ca_bundle: &str) -> BTreeMap<GroupRef, Asked> {
    let stored = groups.into_iter().flat_map(|groups| groups.groups.keys().chain(groups.deleted.keys()));
    let named: BTreeSet<&GroupRef> = config.groups.keys().chain(stored).collect();
    let one = |group: &GroupRef| Some((group.clone(), asked_of(config, groups, group, ca_bundle)?));
    named.into_iter().filter_map(one).collect()
}

/// The same of one group; `None` if neither of the two names it.
pub fn asked_of(config: &Config, groups: Option<&GroupsFile>, group: &GroupRef, ca_bundle: &str) -> Option<Asked> {
    let entry = groups.and_then(|groups| groups.groups.get(group));
    let is_static = config.groups.contains_key(group);
    let etag = group_etag(groups, group);
    // The config bringing a group back is a word as explicit as the tombstone.
    if !is_static && groups.is_some_and(|groups| groups.deleted.contains_key(group)) {
        return Some(tombstoned(etag));
    }
    if !is_static && entry.is_none() {
        return None;
    }
    let merged = entry.map(layer).transpose().and_then(|layer| {
        config.group(group, layer.as_ref()).map_err(|problems| {
            problems.first().map(|problem| format!("{}: {}", problem.path, problem.message)).unwrap_or_default()
        })
    });
    Some(match merged {
        Ok(merged) => {
            let (infra_hash, runtime_hash) = (merged.infra_hash(), merged.runtime_hash(Some(ca_bundle.as_bytes())));
            Asked {
                desired: Desired::Known(merged.size),
                merged: Some(Arc::new(merged)),
                infra_hash,
                runtime_hash,
                victims: entry.map(|entry| entry.preferred_victims.clone()).unwrap_or_default(),
                etag,
                problem: None,
            }
        }
        // The group is there, but how big it shall be nobody can say: its members stay as they are.
        Err(problem) => Asked {
            desired: Desired::Unknown,
            merged: None,
            infra_hash: String::new(),
            runtime_hash: String::new(),
            victims: Vec::new(),
            etag,
            problem: Some(problem),
        },
    })
}

/// The version of what the API set of a group. Changes of other groups leave it alone.
pub fn group_etag(groups: Option<&GroupsFile>, group: &GroupRef) -> String {
    let millis = |at: Option<Timestamp>| at.map_or(0, |at| at.as_millis());
    let stored = groups.and_then(|groups| groups.groups.get(group));
    let deleted = groups.and_then(|groups| groups.deleted.get(group));
    match (stored, deleted) {
        (Some(entry), _) => format!("{}-{}", entry.generation, millis(entry.updated_at)),
        (None, Some(tombstone)) => format!("deleted-{}", millis(Some(tombstone.at))),
        (None, None) => "none".to_owned(),
    }
}

fn tombstoned(etag: String) -> Asked {
    Asked {
        desired: Desired::Tombstoned,
        merged: None,
        infra_hash: String::new(),
        runtime_hash: String::new(),
        victims: Vec::new(),
        etag,
        problem: None,
    }
}

/// What is stored of a group, as the config's merge takes it.
pub fn layer(entry: &GroupEntry) -> Result<GroupLayer, String> {
    let subnet_pool = entry.subnet_pool.as_deref().map(str::parse).transpose();
    let load_balancers =
        entry.load_balancers.as_ref().map(|keys| keys.iter().map(|key| key.parse()).collect()).transpose();
    let words = |error: nstance_core::ids::IdError| error.to_string();
    Ok(GroupLayer {
        template: entry.template.clone(),
        size: entry.size,
        instance_type: entry.instance_type.clone(),
        subnet_pool: subnet_pool.map_err(words)?,
        vars: entry.vars.clone(),
        drain_timeout: entry.drain_timeout,
        load_balancers: load_balancers.map_err(words)?,
        rollout_paused: entry.rollout_paused,
    })
}
