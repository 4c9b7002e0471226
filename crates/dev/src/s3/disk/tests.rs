use super::*;

fn open(durable: bool) -> (tempfile::TempDir, Disk) {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::open(dir.path(), durable).unwrap();
    (dir, disk)
}

fn key(text: &str) -> Key {
    Key::parse(text).unwrap()
}

fn put(disk: &Disk, text: &str, bytes: &str) {
    disk.put(&key(text), bytes.as_bytes(), &Meta::default(), &Conditions::default()).unwrap();
}

fn get(disk: &Disk, text: &str) -> Option<String> {
    let mut found = String::new();
    let mut object = disk.find(&key(text)).unwrap()?;
    io::Read::read_to_string(&mut object.file, &mut found).unwrap();
    Some(found)
}

fn keys(disk: &Disk) -> Vec<String> {
    disk.snapshot().unwrap().into_iter().map(|it| it.key.as_str().to_owned()).collect()
}

#[test]
fn an_object_may_share_its_name_with_a_directory() {
    let (dir, disk) = open(true);
    put(&disk, "a", "1");
    put(&disk, "a/b", "2");
    put(&disk, "a/b/c", "3");
    assert_eq!(keys(&disk), ["a", "a/b", "a/b/c"]);
    assert_eq!([get(&disk, "a"), get(&disk, "a/b"), get(&disk, "a/b/c")].map(Option::unwrap), ["1", "2", "3"]);
    assert!(dir.path().join("a%").is_file());
    put(&disk, "a", "4");
    assert_eq!(get(&disk, "a").unwrap(), "4");

    disk.delete(&key("a/b/c"), &Conditions::default()).unwrap();
    disk.delete(&key("a/b"), &Conditions::default()).unwrap();
    put(&disk, "a", "5");
    assert_eq!(keys(&disk), ["a"]);
    assert_eq!(get(&disk, "a").unwrap(), "5");
    disk.delete(&key("a"), &Conditions::default()).unwrap();
    assert_eq!((keys(&disk).len(), get(&disk, "a")), (0, None));
    put(&disk, "a", "6");
    assert!(dir.path().join("a").is_file());
}

#[test]
fn deleting_leaves_no_empty_directories() {
    let (dir, disk) = open(false);
    put(&disk, "x/y/z/1", "");
    put(&disk, "x/2", "");
    disk.delete(&key("x/y/z/1"), &Conditions::default()).unwrap();
    assert!(!dir.path().join("x/y").exists());
    assert!(dir.path().join("x/2").exists());
}

#[test]
fn writers_of_clashing_names_do_not_lose_each_others_objects() {
    let (_dir, disk) = open(false);
    std::thread::scope(|scope| {
        for n in 0..8 {
            let disk = &disk;
            scope.spawn(move || {
                for round in 0..50 {
                    put(disk, "k", &format!("{n}-{round}"));
                    put(disk, &format!("k/{n}/leaf"), &round.to_string());
                    assert_eq!(get(disk, &format!("k/{n}/leaf")).unwrap(), round.to_string());
                    assert!(get(disk, "k").is_some());
                    disk.delete(&key(&format!("k/{n}/leaf")), &Conditions::default()).unwrap();
                }
            });
        }
    });
    assert_eq!(keys(&disk), ["k"]);
}

#[test]
fn a_second_server_is_kept_off_until_the_first_closes() {
    let (dir, disk) = open(false);
    assert!(Disk::open(dir.path(), false).is_err());
    disk.close();
    let late = disk.put(&key("a"), b"late", &Meta::default(), &Conditions::default());
    assert!(matches!(late, Err(DiskError::Closed)));
    let next = Disk::open(dir.path(), false).unwrap();
    assert!(keys(&next).is_empty());
}

#[test]
fn what_a_crash_left_half_written_is_swept() {
    let (dir, disk) = open(false);
    let half = dir.path().join(".s3/tmp/99");
    fs::write(&half, "half").unwrap();
    disk.close();
    let next = Disk::open(dir.path(), false).unwrap();
    assert!(!half.exists());
    assert!(keys(&next).is_empty());
}

#[test]
fn a_listing_never_shows_a_later_write_without_the_earlier() {
    let (_dir, disk) = open(false);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..400 {
                put(&disk, &format!("{}/{n:04}", ["z", "a"][n % 2]), "");
            }
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) {
            let mut numbers: Vec<usize> = keys(&disk).iter().map(|key| key[2..].parse().unwrap()).collect();
            numbers.sort_unstable();
            assert!(numbers.iter().enumerate().all(|(at, n)| at == *n), "holes in {numbers:?}");
        }
    });
}
