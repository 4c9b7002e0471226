//! The SQLite cache: what the bucket said last, so that a start fetches only what changed.
//!
//! Nothing here is durable on purpose. The file may be deleted, lost or wrong at any moment; the bucket is the truth and
//! the cache is made again from it. So it is written without syncing, and whatever does not fit (another schema, cluster
//! or shard, a damaged file) is set aside and begun anew. Plain secrets never come here; encrypted blobs may.
//!
//! One connection under one mutex: settings of SQLite belong to a connection, and a pool would apply them to one of many.

mod boot;
mod remembered;

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use nstance_core::{
    ids::{ClusterId, Epoch, GroupRef, InstanceId, Shard},
    instance::{Instance, Ownership},
    ports::objects::ETag,
    time::Timestamp,
};
use rusqlite::{Connection, OptionalExtension as _, Transaction, params};

pub use self::remembered::{Remembered, remembered};
use crate::records::groups::GroupsFile;

/// Raised with every change of the tables below; an older file is set aside, not migrated.
const SCHEMA: i64 = 2;

/// Events kept; older ones go.
const MAX_EVENTS: i64 = 10_000;

const TABLES: &str = "
    CREATE TABLE identity (cluster TEXT NOT NULL, shard TEXT NOT NULL);
    CREATE TABLE objects (key TEXT PRIMARY KEY, etag TEXT NOT NULL, body BLOB NOT NULL, epoch INTEGER NOT NULL DEFAULT 0)
        WITHOUT ROWID;
    CREATE TABLE groups (
        tenant TEXT NOT NULL, grp TEXT NOT NULL, size INTEGER, template TEXT, deleted INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (tenant, grp)) WITHOUT ROWID;
    CREATE TABLE instances (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, grp TEXT NOT NULL, phase TEXT NOT NULL, on_demand INTEGER NOT NULL,
        epoch INTEGER NOT NULL, created_at INTEGER NOT NULL, infra_hash TEXT NOT NULL, provider_id TEXT) WITHOUT ROWID;
    CREATE INDEX instances_by_group ON instances (tenant, grp);
    CREATE INDEX instances_by_provider_id ON instances (provider_id);
    CREATE TABLE observed (
        id TEXT PRIMARY KEY REFERENCES instances (id) ON DELETE CASCADE, state TEXT NOT NULL, body BLOB NOT NULL,
        at INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE health (
        id TEXT PRIMARY KEY REFERENCES instances (id) ON DELETE CASCADE, state TEXT NOT NULL, body BLOB NOT NULL,
        at INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE public_keys (
        id TEXT NOT NULL REFERENCES instances (id) ON DELETE CASCADE, name TEXT NOT NULL, spki BLOB NOT NULL,
        serial TEXT, not_after INTEGER, PRIMARY KEY (id, name)) WITHOUT ROWID;
    CREATE TABLE lb_members (
        lb TEXT NOT NULL, id TEXT NOT NULL REFERENCES instances (id) ON DELETE CASCADE, state TEXT NOT NULL,
        PRIMARY KEY (lb, id)) WITHOUT ROWID;
    CREATE INDEX lb_members_by_instance ON lb_members (id);
    CREATE TABLE operators (
        tenant TEXT NOT NULL, id TEXT NOT NULL, etag TEXT NOT NULL, body BLOB NOT NULL, fetched_at INTEGER NOT NULL,
        PRIMARY KEY (tenant, id)) WITHOUT ROWID;
    CREATE TABLE images (
        name TEXT PRIMARY KEY, query TEXT NOT NULL, id TEXT NOT NULL, resolved_at INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE userdata (
        url TEXT PRIMARY KEY, etag TEXT, body BLOB NOT NULL, fetched_at INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE events (n INTEGER PRIMARY KEY AUTOINCREMENT, at INTEGER NOT NULL, body BLOB NOT NULL);
";

#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    #[error("cache {}", path.display())]
    Sqlite {
        path: PathBuf,
        #[source]
        source: rusqlite::Error,
    },
    #[error("cache {} has schema {schema}; read it with the program that wrote it", path.display())]
    Schema { path: PathBuf, schema: i64 },
    #[error("cache directory {}; make it writable or choose another with --cachedir", path.display())]
    Directory {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

/// One object as it was when last read or written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedObject {
    pub key: String,
    pub etag: ETag,
    pub body: Vec<u8>,
    /// Of a record; zero for other objects.
    pub epoch: Epoch,
}

/// An event and its number, which grows and is never used twice in one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedEvent {
    pub n: u64,
    pub at: Timestamp,
    pub body: Vec<u8>,
}

/// The last good answer to the lookup of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedImage {
    pub name: String,
    /// What was asked: the answer is to this question and no other.
    pub query: String,
    pub id: String,
}

pub struct Cache {
    path: PathBuf,
    connection: Mutex<Connection>,
}

/// Why an existing file was not used. Not an error: the cache is disposable.
enum Unfit {
    Damaged(rusqlite::Error),
    Schema(i64),
    Foreign,
}

impl Cache {
    /// Opens `{dir}/db/nstance.db` or makes it. A file of another schema, cluster or shard, or one that is damaged, is
    /// set aside as `.bad-{time}` and a fresh one begun. `now` names the file set aside.
    pub fn open_at(dir: &Path, cluster: &ClusterId, shard: &Shard, now: Timestamp) -> Result<Self, CacheError> {
        let db = dir.join("db");
        let path = db.join("nstance.db");
        let directory = |source| CacheError::Directory { path: db.clone(), source };
        fs::create_dir_all(&db).map_err(directory)?;
        fs::set_permissions(&db, fs::Permissions::from_mode(0o700)).map_err(directory)?;
        // Made by us before SQLite makes it, so that it is never readable by others, not for a moment.
        fs::OpenOptions::new().create(true).append(true).mode(0o600).open(&path).map_err(directory)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(directory)?;
        let connection = match try_open(&path, cluster, shard) {
            Ok(connection) => connection,
            Err(unfit) => {
                let aside = set_aside(&path, now).map_err(directory)?;
                let reason = match &unfit {
                    Unfit::Damaged(error) => error.to_string(),
                    Unfit::Schema(version) => format!("schema {version}, ours is {SCHEMA}"),
                    Unfit::Foreign => "of another cluster or shard".to_owned(),
                };
                tracing::warn!(path = %path.display(), aside = %aside.display(), reason, "cache set aside");
                fs::OpenOptions::new().create(true).append(true).mode(0o600).open(&path).map_err(directory)?;
                match try_open(&path, cluster, shard) {
                    Ok(connection) => connection,
                    Err(Unfit::Damaged(source)) => return Err(CacheError::Sqlite { path, source }),
                    Err(Unfit::Schema(_) | Unfit::Foreign) => unreachable!("a fresh file has our schema and identity"),
                }
            }
        };
        Ok(Self { path, connection: Mutex::new(connection) })
    }

    /// [`Self::open_at`] with the machine's time.
    pub fn open(dir: &Path, cluster: &ClusterId, shard: &Shard) -> Result<Self, CacheError> {
        let now = nstance_core::ports::clock::Clock::now(&nstance_rt::clock::SystemClock);
        Self::open_at(dir, cluster, shard, now)
    }

    /// One in memory, for simulations: it lives as long as whoever holds it, and a server that is started again with it
    /// finds what the one before it wrote.
    pub fn in_memory(cluster: &ClusterId, shard: &Shard) -> Result<Self, CacheError> {
        let path = PathBuf::from(":memory:");
        match try_open(&path, cluster, shard) {
            Ok(connection) => Ok(Self { path, connection: Mutex::new(connection) }),
            Err(Unfit::Damaged(source)) => Err(CacheError::Sqlite { path, source }),
            Err(Unfit::Schema(_) | Unfit::Foreign) => unreachable!("a fresh one has our schema and identity"),
        }
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        // A panic inside leaves a transaction that SQLite rolled back.
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn told<T>(&self, done: rusqlite::Result<T>) -> Result<T, CacheError> {
        done.map_err(|source| CacheError::Sqlite { path: self.path.clone(), source })
    }

    /// Runs `work` in one transaction: all of it is seen, or nothing.
    fn transact<T>(&self, work: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T>) -> Result<T, CacheError> {
        let mut connection = self.connection();
        self.told((|| {
            let transaction = connection.transaction()?;
            let done = work(&transaction)?;
            transaction.commit()?;
            Ok(done)
        })())
    }

    /// Every cached object with its version and body.
    pub fn objects(&self) -> Result<BTreeMap<String, (ETag, Vec<u8>)>, CacheError> {
        let connection = self.connection();
        self.told((|| {
            let mut statement = connection.prepare_cached("SELECT key, etag, body FROM objects")?;
            let rows = statement.query_map([], |row| Ok((row.get(0)?, (ETag(row.get(1)?), row.get(2)?))))?;
            rows.collect()
        })())
    }

    pub fn get_object(&self, key: &str) -> Result<Option<(ETag, Vec<u8>)>, CacheError> {
        let connection = self.connection();
        self.told(
            connection
                .query_row("SELECT etag, body FROM objects WHERE key = ?1", [key], |row| {
                    Ok((ETag(row.get(0)?), row.get(1)?))
                })
                .optional(),
        )
    }

    pub fn put_object(&self, key: &str, etag: &ETag, body: &[u8], epoch: Epoch) -> Result<(), CacheError> {
        let object = CachedObject { key: key.to_owned(), etag: etag.clone(), body: body.to_vec(), epoch };
        self.put_objects(&[object])
    }

    pub fn put_objects(&self, objects: &[CachedObject]) -> Result<(), CacheError> {
        self.transact(|transaction| insert_objects(transaction, objects))
    }

    pub fn remove_object(&self, key: &str) -> Result<(), CacheError> {
        self.transact(|transaction| transaction.execute("DELETE FROM objects WHERE key = ?1", [key]).map(drop))
    }

    /// Notes instances together with their objects, in one transaction.
    pub fn put_recorded<'a>(
        &self,
        objects: &[CachedObject],
        instances: impl Iterator<Item = &'a Instance>,
    ) -> Result<(), CacheError> {
        self.transact(|transaction| {
            insert_objects(transaction, objects)?;
            insert_instances(transaction, instances)
        })
    }

    /// Notes one instance; what hangs on it (health, keys and the like) stays.
    pub fn put_instance(&self, instance: &Instance) -> Result<(), CacheError> {
        self.transact(|transaction| insert_instances(transaction, [instance]))
    }

    /// Forgets an instance, its object and everything that hangs on it.
    pub fn purge_instance(&self, instance: &Instance) -> Result<(), CacheError> {
        let key = crate::records::instance_key(&instance.shard, &instance.group.tenant, &instance.id);
        self.transact(|transaction| {
            transaction.execute("DELETE FROM instances WHERE id = ?1", [instance.id.to_string()])?;
            transaction.execute("DELETE FROM objects WHERE key = ?1", [key])?;
            Ok(())
        })
    }

    /// Notes public keys (SPKI) that an instance made. It must be known here; they go with it.
    pub fn put_public_keys(&self, instance: &InstanceId, keys: &[(String, Vec<u8>)]) -> Result<(), CacheError> {
        self.transact(|transaction| {
            let mut statement = transaction
                .prepare_cached("INSERT OR REPLACE INTO public_keys (id, name, spki) VALUES (?1, ?2, ?3)")?;
            for (name, spki) in keys {
                statement.execute(params![instance.to_string(), name, spki])?;
            }
            Ok(())
        })
    }

    /// The public keys of every instance: its id, the key's name, its SPKI.
    pub fn public_keys(&self) -> Result<Vec<(String, String, Vec<u8>)>, CacheError> {
        let connection = self.connection();
        self.told((|| {
            let mut statement =
                connection.prepare_cached("SELECT id, name, spki FROM public_keys ORDER BY id, name")?;
            let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
            rows.collect()
        })())
    }

    /// Puts a finished rebuild in the place of what was there, in one transaction: `objects` below `prefix` become
    /// exactly the given ones, `instances` and `groups` are derived anew. Rows of instances that are still there keep
    /// what hangs on them.
    pub fn replace_derived<'a>(
        &self,
        prefix: &str,
        changed: &[CachedObject],
        present: impl IntoIterator<Item = &'a str>,
        instances: impl IntoIterator<Item = &'a Instance>,
        groups: Option<&GroupsFile>,
    ) -> Result<(), CacheError> {
        self.transact(|transaction| {
            insert_objects(transaction, changed)?;
            transaction.execute_batch(
                "CREATE TEMP TABLE IF NOT EXISTS present (name TEXT PRIMARY KEY) WITHOUT ROWID; DELETE FROM present;",
            )?;
            {
                let mut statement = transaction.prepare_cached("INSERT OR IGNORE INTO present VALUES (?1)")?;
                for key in present {
                    statement.execute([key])?;
                }
            }
            // `substr` and not LIKE: a prefix may hold characters that mean something to LIKE.
            transaction.execute(
                "DELETE FROM objects WHERE substr(key, 1, length(?1)) = ?1 AND key NOT IN (SELECT name FROM present)",
                [prefix],
            )?;
            let instances: Vec<&Instance> = instances.into_iter().collect();
            transaction.execute("DELETE FROM present", [])?;
            {
                let mut statement = transaction.prepare_cached("INSERT OR IGNORE INTO present VALUES (?1)")?;
                for instance in &instances {
                    statement.execute([instance.id.to_string()])?;
                }
            }
            transaction.execute("DELETE FROM instances WHERE id NOT IN (SELECT name FROM present)", [])?;
            transaction.execute("DELETE FROM present", [])?;
            insert_instances(transaction, instances)?;
            replace_groups(transaction, groups)
        })
    }

    /// Derives the table of groups anew.
    pub fn replace_groups(&self, groups: Option<&GroupsFile>) -> Result<(), CacheError> {
        self.transact(|transaction| replace_groups(transaction, groups))
    }

    /// The highest epoch any cached record bears. The next term's must be higher, even if the lease was deleted.
    pub fn highest_epoch(&self) -> Result<Epoch, CacheError> {
        let connection = self.connection();
        let highest: i64 =
            self.told(connection.query_row("SELECT coalesce(max(epoch), 0) FROM objects", [], |row| row.get(0)))?;
        Ok(Epoch(u64::try_from(highest).unwrap_or(0)))
    }

    /// Nothing of a cluster was ever seen here. An empty bucket is a first start then, and not a lost one.
    pub fn is_empty(&self) -> Result<bool, CacheError> {
        let connection = self.connection();
        self.told(connection.query_row("SELECT NOT EXISTS (SELECT 1 FROM objects)", [], |row| row.get(0)))
    }

    pub fn put_image(&self, image: &CachedImage, now: Timestamp) -> Result<(), CacheError> {
        self.transact(|transaction| {
            let CachedImage { name, query, id } = image;
            let row = params![name, query, id, now.as_millis()];
            transaction.execute("INSERT OR REPLACE INTO images VALUES (?1, ?2, ?3, ?4)", row).map(drop)
        })
    }

    /// Every image that was ever found, in the order of their names.
    pub fn images(&self) -> Result<Vec<CachedImage>, CacheError> {
        let connection = self.connection();
        self.told((|| {
            let mut statement = connection.prepare_cached("SELECT name, query, id FROM images ORDER BY name")?;
            let rows = statement
                .query_map([], |row| Ok(CachedImage { name: row.get(0)?, query: row.get(1)?, id: row.get(2)? }))?;
            rows.collect()
        })())
    }

    pub fn append_event(&self, at: Timestamp, body: &[u8]) -> Result<u64, CacheError> {
        self.transact(|transaction| {
            transaction.execute("INSERT INTO events (at, body) VALUES (?1, ?2)", params![at.as_millis(), body])?;
            let n = transaction.last_insert_rowid();
            transaction.execute("DELETE FROM events WHERE n <= ?1", [n - MAX_EVENTS])?;
            Ok(u64::try_from(n).unwrap_or(0))
        })
    }

    /// The newest events, oldest first.
    pub fn last_events(&self, max: usize) -> Result<Vec<CachedEvent>, CacheError> {
        let connection = self.connection();
        self.told((|| {
            let mut statement = connection.prepare_cached(
                "SELECT n, at, body FROM (SELECT n, at, body FROM events ORDER BY n DESC LIMIT ?1) ORDER BY n",
            )?;
            let max = i64::try_from(max).unwrap_or(i64::MAX);
            let rows = statement.query_map([max], |row| {
                let n: i64 = row.get(0)?;
                Ok(CachedEvent {
                    n: u64::try_from(n).unwrap_or(0),
                    at: Timestamp::from_millis(row.get(1)?),
                    body: row.get(2)?,
                })
            })?;
            rows.collect()
        })())
    }

    /// Ids of the cached instances of a group, for tools that look without a server.
    pub fn instances_of(&self, group: &GroupRef) -> Result<Vec<String>, CacheError> {
        let connection = self.connection();
        self.told((|| {
            let mut statement =
                connection.prepare_cached("SELECT id FROM instances WHERE tenant = ?1 AND grp = ?2 ORDER BY id")?;
            let rows = statement.query_map([group.tenant.as_str(), group.group.as_str()], |row| row.get(0))?;
            rows.collect()
        })())
    }
}

fn try_open(path: &Path, cluster: &ClusterId, shard: &Shard) -> Result<Connection, Unfit> {
    let damaged = Unfit::Damaged;
    let connection = Connection::open(path).map_err(damaged)?;
    connection
        .execute_batch(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; PRAGMA foreign_keys = ON; PRAGMA temp_store = MEMORY;
             PRAGMA busy_timeout = 1000;",
        )
        .map_err(damaged)?;
    connection.set_prepared_statement_cache_capacity(32);
    let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(damaged)?;
    let n_tables: i64 =
        connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0)).map_err(damaged)?;
    if version == 0 && n_tables == 0 {
        connection
            .execute_batch(&format!("BEGIN; {TABLES} PRAGMA user_version = {SCHEMA}; COMMIT;"))
            .and_then(|()| {
                connection.execute("INSERT INTO identity VALUES (?1, ?2)", [cluster.as_str(), shard.as_str()])
            })
            .map_err(damaged)?;
        return Ok(connection);
    }
    if version != SCHEMA {
        return Err(Unfit::Schema(version));
    }
    let healthy: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(damaged)?;
    if healthy != "ok" {
        return Err(Unfit::Damaged(rusqlite::Error::InvalidParameterName(healthy)));
    }
    let (its_cluster, its_shard): (String, String) = connection
        .query_row("SELECT cluster, shard FROM identity", [], |row| Ok((row.get(0)?, row.get(1)?)))
        .map_err(damaged)?;
    if its_cluster != cluster.as_str() || its_shard != shard.as_str() {
        return Err(Unfit::Foreign);
    }
    Ok(connection)
}

/// Moves the database and its side files away; what cannot be moved is removed, for it must not be found again.
fn set_aside(path: &Path, now: Timestamp) -> std::io::Result<PathBuf> {
    let aside = path.with_file_name(format!("nstance.db.bad-{}", now.as_millis()));
    for suffix in ["-wal", "-shm"] {
        let side = path.with_file_name(format!("nstance.db{suffix}"));
        let target = aside.with_file_name(format!("nstance.db.bad-{}{suffix}", now.as_millis()));
        if side.exists() {
            fs::rename(&side, target).or_else(|_| fs::remove_file(&side))?;
        }
    }
    fs::rename(path, &aside)?;
    Ok(aside)
}

fn insert_objects(transaction: &Transaction<'_>, objects: &[CachedObject]) -> rusqlite::Result<()> {
    let mut statement = transaction
        .prepare_cached("INSERT OR REPLACE INTO objects (key, etag, body, epoch) VALUES (?1, ?2, ?3, ?4)")?;
    for object in objects {
        let epoch = i64::try_from(object.epoch.0).unwrap_or(i64::MAX);
        statement.execute(params![object.key, object.etag.0, object.body, epoch])?;
    }
    Ok(())
}

fn insert_instances<'a>(
    transaction: &Transaction<'_>,
    instances: impl IntoIterator<Item = &'a Instance>,
) -> rusqlite::Result<()> {
    // An upsert and not REPLACE: replacing deletes first, and the cascade would take what hangs on the row.
    let mut statement = transaction.prepare_cached(
        "INSERT INTO instances (id, tenant, grp, phase, on_demand, epoch, created_at, infra_hash, provider_id)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)
         ON CONFLICT (id) DO UPDATE SET tenant = ?2, grp = ?3, phase = ?4, on_demand = ?5, epoch = ?6, created_at = ?7,
             infra_hash = ?8, provider_id = ?9",
    )?;
    for instance in instances {
        statement.execute(params![
            instance.id.to_string(),
            instance.group.tenant.as_str(),
            instance.group.group.as_str(),
            instance.phase().as_str(),
            instance.ownership == Ownership::OnDemand,
            i64::try_from(instance.epoch.0).unwrap_or(i64::MAX),
            instance.created_at.as_millis(),
            instance.infra_hash,
            instance.provider.id,
        ])?;
    }
    Ok(())
}

fn replace_groups(transaction: &Transaction<'_>, groups: Option<&GroupsFile>) -> rusqlite::Result<()> {
    transaction.execute("DELETE FROM groups", [])?;
    groups.map_or(Ok(()), |groups| insert_groups(transaction, groups))
}

fn insert_groups(transaction: &Transaction<'_>, groups: &GroupsFile) -> rusqlite::Result<()> {
    let mut statement = transaction.prepare_cached(
        "INSERT OR REPLACE INTO groups (tenant, grp, size, template, deleted) VALUES (?1, ?2, ?3, ?4, ?5)",
    )?;
    for (group, entry) in &groups.groups {
        statement.execute(params![group.tenant.as_str(), group.group.as_str(), entry.size, entry.template, false])?;
    }
    for group in groups.deleted.keys() {
        let nothing: Option<u32> = None;
        statement.execute(params![group.tenant.as_str(), group.group.as_str(), nothing, nothing, true])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
