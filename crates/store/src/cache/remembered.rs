//! What a server's cache remembers, for whoever has lost the bucket. The file is only read: it may be the last copy.

use std::{collections::BTreeMap, path::Path};

use rusqlite::{Connection, OpenFlags};

use super::{CacheError, SCHEMA};

/// The objects of one server's cache, and whose they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remembered {
    pub cluster: String,
    pub shard: String,
    /// Bodies by key.
    pub objects: BTreeMap<String, Vec<u8>>,
}

/// Reads `{dir}/db/nstance.db`. Nothing is made, moved or set aside.
pub fn remembered(dir: &Path) -> Result<Remembered, CacheError> {
    let path = dir.join("db").join("nstance.db");
    let read = || -> rusqlite::Result<Result<Remembered, i64>> {
        let connection = Connection::open_with_flags(&path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
        let schema: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        if schema != SCHEMA {
            return Ok(Err(schema));
        }
        let (cluster, shard) =
            connection.query_row("SELECT cluster, shard FROM identity", [], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let mut statement = connection.prepare("SELECT key, body FROM objects")?;
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        Ok(Ok(Remembered { cluster, shard, objects: rows.collect::<rusqlite::Result<_>>()? }))
    };
    match read() {
        Ok(Ok(remembered)) => Ok(remembered),
        Ok(Err(schema)) => Err(CacheError::Schema { path, schema }),
        Err(source) => Err(CacheError::Sqlite { path, source }),
    }
}

#[cfg(test)]
mod tests {
    use nstance_core::{ids::Epoch, ports::objects::ETag};

    use super::*;
    use crate::cache::Cache;

    #[test]
    fn remembered_objects_are_read_while_a_server_writes() {
        let dir = tempfile::tempdir().unwrap();
        let missing = remembered(dir.path()).unwrap_err();
        assert!(missing.to_string().contains("nstance.db"), "{missing}");
        assert!(!dir.path().join("db").exists(), "nothing is made");
        let cache = Cache::open(dir.path(), &"demo".parse().unwrap(), &"a".parse().unwrap()).unwrap();
        cache.put_object("cluster/ca.crt", &ETag("1".into()), b"pem", Epoch(3)).unwrap();
        let there = remembered(dir.path()).unwrap();
        assert_eq!((there.cluster.as_str(), there.shard.as_str()), ("demo", "a"));
        assert_eq!(there.objects, BTreeMap::from([("cluster/ca.crt".to_owned(), b"pem".to_vec())]));
        drop(cache);
        assert_eq!(remembered(dir.path()).unwrap(), there, "nor does it need the server");
    }
}
