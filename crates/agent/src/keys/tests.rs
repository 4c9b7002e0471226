use std::{
    fs,
    os::unix::fs::{MetadataExt as _, symlink},
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use nstance_rt::entropy::SeededEntropy;

use super::*;
use crate::{
    context::{Components, Control},
    disk::Disk,
};

fn name(text: &str) -> KeyName {
    KeyName::parse(text).unwrap()
}

fn at(ctx: &Context, file: &str) -> PathBuf {
    ctx.settings.keys.path.join(file)
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

fn request(names: &[&str]) -> KeyGenerationRequest {
    KeyGenerationRequest { key_names: names.iter().map(|name| (*name).to_owned()).collect(), ..Default::default() }
}

#[test]
fn keys_are_private() {
    let (_outer, ctx) = Context::for_tests(&[]);
    let (key, made) = pair(&ctx, &name("demo")).unwrap();
    assert_eq!(made, Made::Now);
    assert_eq!((mode(&at(&ctx, "demo.key")), mode(&at(&ctx, "demo.pub"))), (0o600, 0o644));
    assert_eq!(fs::read_to_string(at(&ctx, "demo.pub")).unwrap(), key.to_pem());
    let private = KeyPair::from_pkcs8_pem(&fs::read(at(&ctx, "demo.key")).unwrap()).unwrap();
    assert_eq!(private.public_key(), key);
    assert_eq!(fs::read_dir(&ctx.settings.keys.path).unwrap().count(), 2);
}

#[test]
fn mode_and_group_are_those_of_the_settings() {
    let group = rustix::process::getegid().as_raw().to_string();
    let (_outer, ctx) = Context::for_tests(&[("KEYS_MODE", "0640"), ("KEYS_GROUP", &group)]);
    pair(&ctx, &name("demo")).unwrap();
    assert_eq!((mode(&at(&ctx, "demo.key")), mode(&at(&ctx, "demo.pub"))), (0o640, 0o644));
    assert_eq!(fs::metadata(at(&ctx, "demo.key")).unwrap().gid().to_string(), group);
}

#[test]
fn pair_that_is_there_is_used_again_and_its_public_half_repaired() {
    let (_outer, ctx) = Context::for_tests(&[]);
    let (key, _) = pair(&ctx, &name("demo")).unwrap();
    let repairs: [&dyn Fn(&Path); 4] = [
        &|path| fs::remove_file(path).unwrap(),
        &|path| fs::write(path, "half").unwrap(),
        &|path| fs::write(path, KeyPair::generate(&SeededEntropy::new(9)).public_key_pem()).unwrap(),
        &|_| {},
    ];
    for damage in repairs {
        damage(&at(&ctx, "demo.pub"));
        assert_eq!(pair(&ctx, &name("demo")).unwrap(), (key, Made::Before));
        assert_eq!(fs::read_to_string(at(&ctx, "demo.pub")).unwrap(), key.to_pem());
    }
}

#[test]
fn what_is_no_key_is_replaced() {
    let (outer, ctx) = Context::for_tests(&[]);
    let outside = outer.path().join("outside");
    // A good key even, but not one of this directory.
    let precious = KeyPair::generate(&SeededEntropy::new(9)).to_pkcs8_pem();
    fs::write(&outside, precious.as_bytes()).unwrap();
    fs::write(at(&ctx, "a.key"), "nonsense").unwrap();
    symlink(&outside, at(&ctx, "b.key")).unwrap();
    symlink(&outside, at(&ctx, "b.pub")).unwrap();
    symlink(&outside, at(&ctx, ".b.key.tmp")).unwrap();
    for text in ["a", "b"] {
        let (key, made) = pair(&ctx, &name(text)).unwrap();
        assert_eq!(made, Made::Now);
        assert_eq!(pair(&ctx, &name(text)).unwrap(), (key, Made::Before));
    }
    assert!(fs::symlink_metadata(at(&ctx, "b.key")).unwrap().is_file());
    assert_eq!(fs::read_to_string(outside).unwrap(), *precious);
}

#[tokio::test(start_paused = true)]
async fn bad_names_are_told_and_the_good_ones_answered() {
    let (outer, ctx) = Context::for_tests(&[]);
    let keys = prepare(&ctx, &request(&["demo.pub", "../evil", "", "demo", ".hidden", "other.key"])).await;
    assert_eq!(keys.keys().map(KeyName::as_str).collect::<Vec<_>>(), ["demo", "other"]);
    let errors = errors::all(&ctx);
    assert_eq!(errors.keys().collect::<Vec<_>>(), ["_", "_._evil", "_hidden"]);
    assert!(errors["_._evil"].starts_with("key ../evil was not made: "), "{errors:?}");
    assert_eq!(fs::read_dir(outer.path()).unwrap().count(), 3, "nothing lies beside the three directories");
    assert_eq!(fs::read_dir(&ctx.settings.keys.path).unwrap().count(), 4);
    assert_eq!(ctx.board.due().await, nstance_proto::v1::ReportKind::Change);
}

#[tokio::test]
async fn key_that_cannot_be_written_is_told_until_it_can() {
    let (_outer, ctx) = Context::for_tests(&[]);
    // A directory in the place of the key: nobody, root included, renames a file over it.
    fs::create_dir(at(&ctx, "demo.key")).unwrap();
    assert_eq!(prepare(&ctx, &request(&["demo", "other"])).await.len(), 1);
    assert!(errors::all(&ctx)["demo.key"].starts_with("key demo was not made: "));
    fs::remove_dir(at(&ctx, "demo.key")).unwrap();
    assert_eq!(prepare(&ctx, &request(&["demo", "other"])).await.len(), 2);
    assert!(errors::all(&ctx).is_empty());
}

#[tokio::test]
async fn nobody_gets_thousands_of_keys() {
    let (_directories, ctx) = crate::files::in_memory();
    let names: Vec<String> = (0..10_000).map(|n| format!("../{n}")).collect();
    let all = KeyGenerationRequest { key_names: names, ..Default::default() };
    assert!(prepare(&ctx, &all).await.is_empty());
    assert_eq!(errors::all(&ctx).len(), MAX_NAMES);
}

#[test]
fn crash_at_any_step_leaves_a_whole_key_or_none() {
    let mut n_crashes = 0;
    for crash_at in 0.. {
        let (_outer, ctx) = Context::for_tests(&[]);
        let n_steps = Arc::new(AtomicUsize::new(0));
        let counted = n_steps.clone();
        let disk = Disk::watched(Arc::new(move |_, _| {
            if counted.fetch_add(1, Ordering::SeqCst) == crash_at {
                std::panic::resume_unwind(Box::new("crash"));
            }
        }));
        let dying = Context::new(ctx.settings.clone(), Components { disk, ..ctx.parts.clone() }, Control::new());
        let died = catch_unwind(AssertUnwindSafe(|| pair(&dying, &name("demo")))).is_err();
        let left = read_key(&at(&ctx, "demo.key")).unwrap().map(|key| key.public_key());
        if left.is_some() {
            assert_eq!(mode(&at(&ctx, "demo.key")), 0o600);
        }
        let (key, made) = pair(&ctx, &name("demo")).unwrap();
        assert_eq!(left.is_some(), made == Made::Before, "step {crash_at}");
        assert!(left.is_none_or(|left| left == key), "step {crash_at}");
        assert_eq!(fs::read_to_string(at(&ctx, "demo.pub")).unwrap(), key.to_pem());
        assert_eq!(fs::read_dir(&ctx.settings.keys.path).unwrap().count(), 2, "step {crash_at}");
        if !died {
            break;
        }
        n_crashes += 1;
    }
    assert_eq!(n_crashes, 6, "three steps for each of two files");
}

#[test]
fn read_key_tells_a_silent_disk_from_a_missing_key() {
    let (_outer, ctx) = Context::for_tests(&[]);
    assert!(read_key(&at(&ctx, "none.key")).unwrap().is_none());
    // A path through a file is an error that says nothing about the key.
    fs::write(at(&ctx, "file"), "").unwrap();
    assert!(read_key(&at(&ctx, "file").join("none.key")).is_err());
}
