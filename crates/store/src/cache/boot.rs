//! The last black box of each instance: why a machine did not come up is asked after its agent fell silent, and then
//! nobody can tell it again.

use nstance_core::{ids::InstanceId, time::Timestamp};
use rusqlite::params;

use super::{Cache, CacheError};

impl Cache {
    /// Notes the last black box of an instance in the place of the one before it. It goes with its instance; one that
    /// nobody knows any more gets none.
    pub fn put_boot(&self, instance: InstanceId, failed: bool, body: &[u8], at: Timestamp) -> Result<(), CacheError> {
        let state = if failed { "boot-failed" } else { "boot" };
        self.transact(|transaction| {
            let row = params![instance.to_string(), state, body, at.as_millis()];
            let insert = "INSERT OR REPLACE INTO health (id, state, body, at)
                SELECT ?1, ?2, ?3, ?4 WHERE EXISTS (SELECT 1 FROM instances WHERE id = ?1)";
            transaction.execute(insert, row).map(drop)
        })
    }

    /// Every black box there is, in the order of the instances' ids.
    pub fn boots(&self) -> Result<Vec<(InstanceId, Vec<u8>)>, CacheError> {
        let connection = self.connection();
        self.told((|| {
            let mut statement =
                connection.prepare_cached("SELECT id, body FROM health WHERE state LIKE 'boot%' ORDER BY id")?;
            let rows = statement.query_map([], |row| Ok((row.get::<_, String>(0)?, row.get(1)?)))?;
            let rows: Vec<(String, Vec<u8>)> = rows.collect::<rusqlite::Result<_>>()?;
            Ok(rows.into_iter().filter_map(|(id, body)| Some((id.parse().ok()?, body))).collect())
        })())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::instance;

    const T0: Timestamp = Timestamp::from_millis(1_800_000_000_000);

    #[test]
    fn a_black_box_stays_with_its_instance_and_goes_with_it() {
        let (first, second) = (instance(1), instance(2));
        let cache = Cache::in_memory(&first.cluster, &first.shard).unwrap();
        cache.put_boot(first.id, false, b"nobody", T0).unwrap();
        assert!(cache.boots().unwrap().is_empty(), "an instance that is not there has none");
        for it in [&first, &second] {
            cache.put_instance(it).unwrap();
            cache.put_boot(it.id, false, b"one", T0).unwrap();
            cache.put_boot(it.id, true, b"two", T0).unwrap();
            cache.put_instance(it).unwrap();
        }
        let mut both = vec![(first.id, b"two".to_vec()), (second.id, b"two".to_vec())];
        both.sort();
        assert_eq!(cache.boots().unwrap(), both);
        cache.purge_instance(&first).unwrap();
        assert_eq!(cache.boots().unwrap(), [(second.id, b"two".to_vec())]);
    }
}
