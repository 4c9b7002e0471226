use super::*;
use crate::testing::{instance, shard};

fn cluster() -> ClusterId {
    "c".parse().unwrap()
}

fn open(dir: &Path) -> Cache {
    Cache::open_at(dir, &cluster(), &shard(), Timestamp::from_millis(77)).unwrap()
}

fn count(cache: &Cache, table: &str) -> i64 {
    cache.connection().query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0)).unwrap()
}

#[test]
fn objects_come_back_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    {
        let cache = open(dir.path());
        assert!(cache.is_empty().unwrap());
        assert_eq!(cache.highest_epoch().unwrap(), Epoch(0));
        cache.put_object("cluster/ca.crt", &ETag("1".into()), b"pem", Epoch(0)).unwrap();
        cache.put_object("a", &ETag("2".into()), b"x", Epoch(9)).unwrap();
        cache.put_object("a", &ETag("3".into()), b"y", Epoch(8)).unwrap();
        cache.put_object("b", &ETag("4".into()), b"z", Epoch(5)).unwrap();
        cache.remove_object("b").unwrap();
    }
    let cache = open(dir.path());
    assert!(!cache.is_empty().unwrap());
    assert_eq!(cache.get_object("a").unwrap(), Some((ETag("3".into()), b"y".to_vec())));
    assert_eq!(cache.get_object("b").unwrap(), None);
    assert_eq!(cache.objects().unwrap().len(), 2);
    assert_eq!(cache.highest_epoch().unwrap(), Epoch(8));
}

#[test]
fn the_file_is_private_and_in_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let _cache = open(dir.path());
    let mode = |path: &str| fs::metadata(dir.path().join(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("db"), mode("db/nstance.db")), (0o700, 0o600));
}

#[test]
fn purging_an_instance_removes_all_its_rows() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let (gone, stays) = (instance(1), instance(2));
    for it in [&gone, &stays] {
        cache.put_instance(it).unwrap();
        let key = crate::records::instance_key(&it.shard, &it.group.tenant, &it.id);
        cache.put_object(&key, &ETag("1".into()), b"{}", Epoch(1)).unwrap();
        let id = it.id.to_string();
        let connection = cache.connection();
        connection.execute("INSERT INTO observed VALUES (?1, 'running', x'', 0)", [&id]).unwrap();
        connection.execute("INSERT INTO health VALUES (?1, 'healthy', x'', 0)", [&id]).unwrap();
        connection.execute("INSERT INTO public_keys VALUES (?1, 'k', x'', NULL, NULL)", [&id]).unwrap();
        connection.execute("INSERT INTO lb_members VALUES ('www', ?1, 'registered')", [&id]).unwrap();
    }
    cache.purge_instance(&gone).unwrap();
    for table in ["instances", "objects", "observed", "health", "public_keys", "lb_members"] {
        assert_eq!(count(&cache, table), 1, "{table}");
    }
    // A change of the one that stays takes nothing with it.
    cache.put_instance(&stays).unwrap();
    assert_eq!(count(&cache, "health"), 1);
    assert_eq!(cache.instances_of(&stays.group).unwrap(), [stays.id.to_string()]);
}

#[test]
fn what_does_not_fit_is_set_aside_and_begun_anew() {
    type Spoil = fn(&Path);
    let cases: [(&str, Spoil); 3] = [
        ("another schema", |path| {
            Connection::open(path).unwrap().execute_batch("PRAGMA user_version = 99").unwrap();
        }),
        ("no database at all", |path| {
            for side in ["-wal", "-shm"] {
                let _ = fs::remove_file(format!("{}{side}", path.display()));
            }
            fs::write(path, b"this is not a database, and long enough to be sure of it".repeat(50)).unwrap();
        }),
        ("another shard", |path| {
            Connection::open(path).unwrap().execute("UPDATE identity SET shard = 'elsewhere'", []).unwrap();
        }),
    ];
    for (name, spoil) in cases {
        let dir = tempfile::tempdir().unwrap();
        open(dir.path()).put_object("a", &ETag("1".into()), b"x", Epoch(1)).unwrap();
        spoil(&dir.path().join("db/nstance.db"));
        let cache = open(dir.path());
        assert!(cache.is_empty().unwrap(), "{name}");
        assert!(dir.path().join("db/nstance.db.bad-77").exists(), "{name}");
        cache.put_object("b", &ETag("1".into()), b"x", Epoch(1)).unwrap();
        drop(cache);
        assert_eq!(open(dir.path()).objects().unwrap().len(), 1, "{name}");
    }
}

#[test]
fn settings_hold_on_the_connection_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let connection = cache.connection();
    let keys: i64 = connection.query_row("PRAGMA foreign_keys", [], |row| row.get(0)).unwrap();
    let journal: String = connection.query_row("PRAGMA journal_mode", [], |row| row.get(0)).unwrap();
    assert_eq!((keys, journal.as_str()), (1, "wal"));
}

#[test]
fn the_last_good_image_is_kept_with_the_question_it_answers() {
    let dir = tempfile::tempdir().unwrap();
    let image =
        |name: &str, query: &str, id: &str| CachedImage { name: name.into(), query: query.into(), id: id.into() };
    let cache = open(dir.path());
    for it in [image("web", "q1", "ami-1"), image("db", "q", "ami-9"), image("web", "q2", "ami-2")] {
        cache.put_image(&it, Timestamp::EPOCH).unwrap();
    }
    drop(cache);
    assert_eq!(open(dir.path()).images().unwrap(), [image("db", "q", "ami-9"), image("web", "q2", "ami-2")]);
}

#[test]
fn old_events_make_room_for_new_ones() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    for n in 0..20 {
        let number = cache.append_event(Timestamp::from_millis(n), &[u8::try_from(n).unwrap()]).unwrap();
        assert_eq!(number, u64::try_from(n).unwrap() + 1);
    }
    cache.connection().execute("UPDATE sqlite_sequence SET seq = 10005 WHERE name = 'events'", []).unwrap();
    assert_eq!(cache.append_event(Timestamp::from_millis(99), b"z").unwrap(), 10_006);
    let last = cache.last_events(3).unwrap();
    assert_eq!(last.iter().map(|it| it.n).collect::<Vec<_>>(), [19, 20, 10_006], "oldest first");
    assert_eq!(cache.last_events(usize::MAX).unwrap().len(), 15, "those older than the last ten thousand went");
}
