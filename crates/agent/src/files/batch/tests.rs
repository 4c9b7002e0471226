use std::{
    fs::Permissions,
    os::unix::fs::{PermissionsExt as _, symlink},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::*;
use crate::{
    context::{Components, Control},
    disk::Disk,
    files::in_memory,
};

fn file(batch: &str, name: &str, content: impl AsRef<[u8]>) -> FileTransfer {
    FileTransfer {
        batch_id: batch.to_owned(),
        filename: name.to_owned(),
        content: content.as_ref().to_vec(),
        ..Default::default()
    }
}

fn removal(batch: &str, name: &str) -> FileTransfer {
    FileTransfer { remove: true, ..file(batch, name, "") }
}

fn commit(batch: &str, hash: &str) -> FileTransfer {
    FileTransfer { batch_id: batch.to_owned(), config_hash: hash.to_owned(), ..Default::default() }
}

/// One whole batch on a stream that is open.
fn send(receiver: &mut Receiver<'_>, batch: &str, files: &[(&str, &str)], hash: &str) {
    for (name, content) in files {
        receiver.take(file(batch, name, content));
    }
    receiver.take(commit(batch, hash));
}

fn path(ctx: &Context, name: &str) -> PathBuf {
    ctx.settings.recv.path.join(name)
}

fn content(ctx: &Context, name: &str) -> Option<String> {
    fs::read_to_string(path(ctx, name)).ok()
}

fn hash(ctx: &Context) -> String {
    ctx.dir.config_hash().unwrap_or_default()
}

fn error(ctx: &Context, name: &str) -> String {
    errors::all(ctx).remove(name).unwrap_or_default()
}

fn n_staged(ctx: &Context) -> usize {
    fs::read_dir(path(ctx, STAGE)).unwrap().count()
}

/// Everything that lies beside or below the directories, so that a test sees what it did not expect.
fn names(directory: &Path) -> BTreeSet<String> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn nothing_is_seen_before_the_commit_and_all_of_it_after() {
    let (_outer, ctx) = Context::for_tests(&[]);
    let mut receiver = Receiver::open(&ctx);
    receiver.take(file("1", "a.json", "{}"));
    receiver.take(file("1", "empty", ""));
    assert_eq!(content(&ctx, "a.json"), None);
    assert_eq!((n_staged(&ctx), hash(&ctx).as_str()), (2, ""));
    receiver.take(commit("1", "h1"));
    assert_eq!(content(&ctx, "a.json").as_deref(), Some("{}"));
    assert_eq!(content(&ctx, "empty").as_deref(), Some(""));
    assert_eq!(fs::metadata(path(&ctx, "a.json")).unwrap().mode() & 0o7777, 0o640);
    assert_eq!((n_staged(&ctx), hash(&ctx).as_str()), (0, "h1"));
    let last = fs::read_to_string(ctx.settings.identity.path.join("write-files.last")).unwrap();
    assert!(0 < last.trim().parse::<i64>().unwrap());
}

#[test]
fn message_with_name_and_hash_is_the_last_of_its_batch() {
    let (_outer, ctx) = Context::for_tests(&[]);
    let mut receiver = Receiver::open(&ctx);
    receiver.take(file("1", "a", "1"));
    receiver.take(FileTransfer { config_hash: "h1".into(), ..file("1", "b", "2") });
    assert_eq!((content(&ctx, "a"), content(&ctx, "b")), (Some("1".into()), Some("2".into())));
    assert_eq!(hash(&ctx), "h1");
    receiver.take(FileTransfer::default());
    assert_eq!(hash(&ctx), "h1", "a message that says nothing does nothing");
}

#[test]
fn new_batch_drops_what_the_last_one_staged() {
    let (_outer, ctx) = Context::for_tests(&[]);
    let mut receiver = Receiver::open(&ctx);
    receiver.take(file("1", "old", "1"));
    receiver.take(file("1", "bad.json", "{"));
    receiver.take(file("1", "../bad", ""));
    send(&mut receiver, "2", &[("new", "2")], "h2");
    assert_eq!((content(&ctx, "old"), content(&ctx, "new").as_deref()), (None, Some("2")));
    assert_eq!((hash(&ctx).as_str(), n_staged(&ctx)), ("h2", 0));
    assert!(errors::all(&ctx).is_empty());
}

#[test]
fn lost_stream_drops_what_was_staged() {
    let (_outer, ctx) = Context::for_tests(&[]);
    Receiver::open(&ctx).take(file("1", "a", "1"));
    assert_eq!(n_staged(&ctx), 1);
    let mut receiver = Receiver::open(&ctx);
    assert_eq!(n_staged(&ctx), 0);
    receiver.take(commit("1", "h1"));
    assert_eq!(content(&ctx, "a"), None);
}

#[test]
fn later_word_on_a_name_wins_within_a_batch() {
    let (_outer, ctx) = Context::for_tests(&[]);
    let mut receiver = Receiver::open(&ctx);
    send(&mut receiver, "1", &[("a.json", "{"), ("a.json", "1"), ("b.json", "1"), ("b.json", "2")], "h1");
    assert_eq!((content(&ctx, "a.json").as_deref(), content(&ctx, "b.json").as_deref()), (Some("1"), Some("2")));
    assert_eq!(hash(&ctx), "h1");
    receiver.take(file("2", "a.json", "3"));
    receiver.take(removal("2", "a.json"));
    receiver.take(removal("2", "b.json"));
    receiver.take(file("2", "b.json", "2"));
    receiver.take(commit("2", "h2"));
    assert_eq!((content(&ctx, "a.json"), content(&ctx, "b.json").as_deref()), (None, Some("2")));
    assert_eq!(n_staged(&ctx), 0, "nothing is left behind");
}

#[test]
fn removal_takes_name_and_error_entry_at_the_commit() {
    let (_outer, ctx) = Context::for_tests(&[]);
    let mut receiver = Receiver::open(&ctx);
    send(&mut receiver, "1", &[("a", "1")], "h1");
    errors::tell(&ctx, "a", "wrong");
    receiver.take(removal("2", "a"));
    receiver.take(removal("2", "never-there"));
    assert!(content(&ctx, "a").is_some());
    receiver.take(commit("2", "h2"));
    assert_eq!((content(&ctx, "a"), error(&ctx, "a").as_str(), hash(&ctx).as_str()), (None, "", "h2"));
}

#[test]
fn same_bytes_and_mode_are_not_written_again() {
    let (_outer, ctx) = Context::for_tests(&[]);
    let mut receiver = Receiver::open(&ctx);
    let long = "x".repeat(20_000);
    send(&mut receiver, "1", &[("a", &long)], "h1");
    let inode = || fs::metadata(path(&ctx, "a")).unwrap().ino();
    let first = inode();
    errors::tell(&ctx, "a", "was wrong once");
    receiver.take(file("2", "a", &long));
    assert_eq!(n_staged(&ctx), 0);
    receiver.take(commit("2", "h2"));
    assert_eq!((inode(), hash(&ctx).as_str(), error(&ctx, "a").as_str()), (first, "h2", ""));
    fs::set_permissions(path(&ctx, "a"), Permissions::from_mode(0o600)).unwrap();
    send(&mut receiver, "3", &[("a", &long)], "h3");
    assert_ne!(inode(), first);
    assert_eq!(fs::metadata(path(&ctx, "a")).unwrap().mode() & 0o7777, 0o640);
    let second = inode();
    send(&mut receiver, "4", &[("a", &(long.clone() + "y"))], "h4");
    assert_ne!(inode(), second);
}

#[test]
fn file_that_vanishes_while_its_batch_comes_in_is_sent_anew() {
    let (_outer, ctx) = Context::for_tests(&[]);
    let mut receiver = Receiver::open(&ctx);
    send(&mut receiver, "1", &[("a", "1")], "h1");
    receiver.take(file("2", "a", "1"));
    fs::remove_file(path(&ctx, "a")).unwrap();
    receiver.take(commit("2", "h2"));
    assert_eq!(hash(&ctx), "h1");
    assert!(error(&ctx, "a").contains("somebody changed it"));
    send(&mut receiver, "3", &[("a", "1")], "h2");
    assert_eq!((content(&ctx, "a").as_deref(), hash(&ctx).as_str()), (Some("1"), "h2"));
}

#[test]
fn bad_file_keeps_its_old_content_and_the_hash() {
    let (_outer, ctx) = Context::for_tests(&[]);
    let mut receiver = Receiver::open(&ctx);
    send(&mut receiver, "1", &[("a.json", "1"), ("b.json", "1")], "h1");
    send(&mut receiver, "2", &[("a.json", "{"), ("b.json", "2")], "h2");
    assert_eq!((content(&ctx, "a.json").as_deref(), content(&ctx, "b.json").as_deref()), (Some("1"), Some("2")));
    assert_eq!(error(&ctx, "a.json"), "file a.json was not written: it is not JSON: line 1, column 2");
    assert_eq!((error(&ctx, "b.json").as_str(), hash(&ctx).as_str()), ("", "h1"));
}

#[test]
fn hash_waits_for_the_file_that_failed() {
    let (_outer, ctx) = Context::for_tests(&[]);
    let mut receiver = Receiver::open(&ctx);
    send(&mut receiver, "1", &[("a.json", "{")], "h1");
    for (batch, hash_sent) in [("2", "h1"), ("3", "h2")] {
        send(&mut receiver, batch, &[("b", "2")], hash_sent);
        assert_eq!(hash(&ctx), "", "{hash_sent}");
    }
    let mut receiver = Receiver::open(&ctx);
    send(&mut receiver, "4", &[], "h1");
    assert_eq!(hash(&ctx), "", "a new stream does not make the file whole");
    send(&mut receiver, "5", &[("a.json", "{}")], "h1");
    assert_eq!((hash(&ctx).as_str(), error(&ctx, "a.json").as_str()), ("h1", ""));
    send(&mut receiver, "6", &[("a.json", "{")], "h2");
    receiver.take(removal("7", "a.json"));
    receiver.take(commit("7", "h2"));
    assert_eq!(hash(&ctx), "h2", "a file that is wanted no longer holds nothing back");
    send(&mut receiver, "8", &[("../x", "")], "h3");
    receiver.take(removal("9", "../x"));
    receiver.take(commit("9", "h3"));
    assert_eq!((hash(&ctx).as_str(), errors::all(&ctx).len()), ("h3", 0), "nor does a name that is none");
}

#[test]
fn damage_on_the_way_is_noticed() {
    let (_outer, ctx) = Context::for_tests(&[]);
    let mut receiver = Receiver::open(&ctx);
    receiver.take(FileTransfer { sha256: sha256(b"1").to_vec(), ..file("1", "good", "1") });
    receiver.take(FileTransfer { sha256: sha256(b"2").to_vec(), ..file("1", "bad", "1") });
    receiver.take(FileTransfer { sha256: vec![7], ..file("1", "short", "1") });
    receiver.take(commit("1", "h1"));
    assert_eq!(content(&ctx, "good").as_deref(), Some("1"));
    assert!(error(&ctx, "bad").contains("damaged") && error(&ctx, "short").contains("damaged"));
    assert_eq!((content(&ctx, "bad"), hash(&ctx).as_str()), (None, ""));
}

#[test]
fn hostile_names_touch_nothing() {
    let (outer, ctx) = Context::for_tests(&[]);
    let mut receiver = Receiver::open(&ctx);
    let absolute = outer.path().join("absolute").display().to_string();
    let long = "x".repeat(129);
    let bad = [
        "../up",
        "../identity/identity.key",
        "..",
        ".",
        "/etc/nstance",
        &absolute,
        ".hidden",
        ".stage",
        "errors",
        "errors/x",
        "a/b",
        "a\0b",
        "a\nb",
        &long,
        "ü",
    ];
    for name in bad {
        receiver.take(file("1", name, "x"));
        receiver.take(removal("2", name));
        receiver.take(commit("2", "h"));
    }
    for name in bad {
        receiver.take(file("3", name, "x"));
    }
    receiver.take(file("3", "good", "x"));
    receiver.take(commit("3", "h3"));
    assert_eq!(names(outer.path()), ["identity", "keys", "recv"].map(str::to_owned).into());
    assert_eq!(names(&ctx.settings.identity.path), ["config.hash", "write-files.last"].map(str::to_owned).into());
    assert_eq!(names(&ctx.settings.recv.path), [".received", ".stage", "errors", "good"].map(str::to_owned).into());
    let entries: BTreeSet<String> = errors::all(&ctx).into_keys().collect();
    assert_eq!(entries, bad.iter().map(|name| made_safe(name)).collect());
    assert!(errors::all(&ctx).values().all(|text| !text.contains('\n')));
    assert_eq!(hash(&ctx), "h", "of the removals; a bad name fails its batch");
}

#[test]
fn no_flood_of_names_hides_a_failure() {
    let (_directories, ctx) = in_memory();
    let mut receiver = Receiver::open(&ctx);
    for n in 0..MAX_FILES {
        receiver.take(removal("1", &format!("../{n}")));
    }
    receiver.take(file("1", "../bad", "x"));
    receiver.take(commit("1", "h1"));
    assert_eq!((hash(&ctx).as_str(), errors::all(&ctx).len()), ("", 1));
    for n in 0..2 * MAX_FILES {
        receiver.take(file("2", &format!("../{n}"), "x"));
    }
    receiver.take(commit("2", "h1"));
    assert_eq!((hash(&ctx).as_str(), errors::all(&ctx).len()), ("", MAX_FILES));
}

#[test]
fn limits_are_told_and_the_rest_is_taken() {
    let (_directories, ctx) = in_memory();
    let mut receiver = Receiver::open(&ctx);
    let most = vec![b'x'; usize::try_from(MAX_FILE_BYTES).unwrap()];
    receiver.take(file("1", "most", &most));
    receiver.take(file("1", "more", [&most[..], b"x"].concat()));
    receiver.take(commit("1", "h1"));
    assert_eq!(fs::metadata(path(&ctx, "most")).unwrap().len(), MAX_FILE_BYTES);
    assert!(error(&ctx, "more").contains("3145729 bytes"));
    // 21 times 3 MiB fit into 64 MiB; the second time they are there already, and count all the same.
    for batch in ["2", "3"] {
        for n in 0..22 {
            receiver.take(file(batch, &format!("f{n:02}"), &most));
        }
        receiver.take(file(batch, "small", "1"));
        receiver.take(commit(batch, batch));
        assert!(error(&ctx, "f21").contains("67108864 bytes"), "{}", error(&ctx, "f21"));
        assert_eq!((error(&ctx, "small").as_str(), hash(&ctx).as_str()), ("", ""));
    }
}

#[test]
fn file_number_513_is_one_too_many() {
    let (_directories, ctx) = in_memory();
    let mut receiver = Receiver::open(&ctx);
    for n in 0..MAX_FILES + 3 {
        receiver.take(file("1", &format!("f{n:03}"), "1"));
    }
    receiver.take(file("1", "f000", "2"));
    receiver.take(commit("1", "h1"));
    assert_eq!(content(&ctx, "f000").as_deref(), Some("2"), "a name that is there may still change");
    assert_eq!((content(&ctx, "f511").as_deref(), content(&ctx, "f512")), (Some("1"), None));
    assert!(error(&ctx, "f512").contains("at most 512 files"));
    // Nor do several batches make more of them, unless some go.
    send(&mut receiver, "2", &[("one-more", "1")], "h2");
    assert!(error(&ctx, "one-more").contains("more than 512 files"));
    receiver.take(file("3", "one-more", "1"));
    for n in 509..MAX_FILES + 3 {
        receiver.take(removal("3", &format!("f{n:03}")));
    }
    receiver.take(commit("3", "h2"));
    assert_eq!((content(&ctx, "one-more").as_deref(), hash(&ctx).as_str()), (Some("1"), "h2"));
}

#[test]
fn planted_links_are_replaced_and_never_followed() {
    let (outer, ctx) = Context::for_tests(&[]);
    let outside = outer.path().join("outside");
    fs::create_dir(&outside).unwrap();
    for name in ["a", "b", "victim"] {
        fs::write(outside.join(name), "precious").unwrap();
        // As a received file would have it: a link to the same bytes is not the same file.
        fs::set_permissions(outside.join(name), Permissions::from_mode(0o640)).unwrap();
    }
    symlink(&outside, path(&ctx, STAGE)).unwrap();
    symlink(&outside, path(&ctx, "errors")).unwrap();
    symlink(outside.join("victim"), path(&ctx, "a")).unwrap();
    symlink(outside.join("victim"), path(&ctx, "same")).unwrap();
    symlink(outside.join("victim"), path(&ctx, "gone")).unwrap();
    let mut receiver = Receiver::open(&ctx);
    // Planted again while the batch comes in.
    fs::remove_dir(path(&ctx, STAGE)).unwrap();
    symlink(&outside, path(&ctx, STAGE)).unwrap();
    receiver.take(file("1", "a", "new"));
    receiver.take(file("1", "b.json", "{"));
    receiver.take(file("1", "same", "precious"));
    receiver.take(removal("1", "gone"));
    receiver.take(removal("1", "victim"));
    receiver.take(commit("1", "h1"));
    for name in ["a", "same"] {
        assert!(fs::symlink_metadata(path(&ctx, name)).unwrap().is_file(), "{name}");
    }
    assert_eq!(content(&ctx, "a").as_deref(), Some("new"));
    assert!(fs::symlink_metadata(path(&ctx, "gone")).is_err());
    assert!(error(&ctx, "b.json").contains("JSON"));
    assert_eq!(names(&outside), ["a", "b", "victim"].map(str::to_owned).into());
    for name in names(&outside) {
        assert_eq!(fs::read_to_string(outside.join(name)).unwrap(), "precious");
    }
}

#[test]
fn what_cannot_be_written_is_told_and_the_rest_goes_on() {
    let (_outer, ctx) = Context::for_tests(&[]);
    let mut receiver = Receiver::open(&ctx);
    // Directories in the way: nobody, root included, renames a file over them or unlinks them.
    for name in ["a", "b"] {
        fs::create_dir(path(&ctx, name)).unwrap();
    }
    receiver.take(file("1", "a", "1"));
    receiver.take(removal("1", "b"));
    receiver.take(file("1", "c", "1"));
    receiver.take(commit("1", "h1"));
    assert!(error(&ctx, "a").starts_with("file a was not written: "), "{}", error(&ctx, "a"));
    assert!(error(&ctx, "b").starts_with("file b was not removed: "), "{}", error(&ctx, "b"));
    assert_eq!((content(&ctx, "c").as_deref(), hash(&ctx).as_str()), (Some("1"), ""));
}

#[test]
fn reports_name_the_last_batch_that_was_committed_and_is_safe() {
    let (_outer, ctx) = Context::for_tests(&[]);
    let named = || ctx.files.batch().clone();
    let mut receiver = Receiver::open(&ctx);
    receiver.take(file("1", "a", "1"));
    assert_eq!(named(), "", "not yet");
    receiver.take(commit("1", "h1"));
    assert_eq!(named(), "1");
    send(&mut receiver, "2", &[("b.json", "{")], "h2");
    assert_eq!(named(), "2", "what is wrong with a file is told beside it");
    let report = crate::health::Reports::new(&ctx).make(&ctx, nstance_proto::v1::ReportKind::Periodic);
    assert_eq!((report.batch_id.as_str(), report.config_hash.as_str()), ("2", "h1"));
    send(&mut receiver, &"3".repeat(65), &[("a", "3")], "h3");
    assert_eq!(named(), "", "too long to be repeated");

    send(&mut receiver, "4", &[("a", "4")], "h4");
    receiver.take(file("5", "a", "5"));
    fs::rename(&ctx.settings.recv.path, ctx.settings.recv.path.with_extension("away")).unwrap();
    receiver.take(commit("5", "h5"));
    assert_eq!(named(), "4", "its directory cannot be made safe");
}

#[test]
fn nonsense_is_not_taken_for_a_hash() {
    let (_outer, ctx) = Context::for_tests(&[]);
    let mut receiver = Receiver::open(&ctx);
    for bad in ["two words", "line\n", "ü", &"x".repeat(257)] {
        send(&mut receiver, "1", &[("a", "1")], bad);
        assert_eq!(hash(&ctx), "");
    }
}

#[test]
fn readers_never_see_a_torn_file() {
    let (_directories, ctx) = in_memory();
    let (a, b) = ("a".repeat(16_384), "b".repeat(8192));
    let mut receiver = Receiver::open(&ctx);
    send(&mut receiver, "0", &[("f", &a)], "h");
    let read_here = path(&ctx, "f");
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for n in 1..=1000 {
                let next = if n % 2 == 0 { &a } else { &b };
                send(&mut receiver, &n.to_string(), &[("f", next)], "h");
            }
        });
        let mut n_reads = 0;
        while !writer.is_finished() {
            let seen = fs::read_to_string(&read_here).unwrap();
            assert!(seen == a || seen == b, "torn at {} bytes", seen.len());
            assert_eq!(fs::metadata(&read_here).unwrap().mode() & 0o7777, 0o640);
            n_reads += 1;
        }
        assert!(100 < n_reads, "{n_reads}");
    });
    assert_eq!(content(&ctx, "f"), Some(a));
}

/// The batch that is interrupted: files new, changed, unchanged, bad and removed, with an old error and a program.
fn interrupted(receiver: &mut Receiver<'_>) {
    for transfer in [
        file("2", "changed", "new"),
        file("2", "new", "new"),
        file("2", "same", "same"),
        file("2", "well.json", "{}"),
        removal("2", "gone"),
        commit("2", "h2"),
    ] {
        receiver.take(transfer);
    }
}

#[test]
fn crash_at_any_step_leaves_whole_files_and_the_batch_comes_again() {
    let mut n_crashes = 0;
    for crash_at in 0.. {
        let (_outer, ctx) = Context::for_tests(&[("ON_CHANGE", "/bin/true")]);
        let mut receiver = Receiver::open(&ctx);
        send(&mut receiver, "1", &[("changed", "old"), ("same", "same"), ("gone", "old"), ("well.json", "{")], "h1");
        // The first batch is told of; what counts is the second.
        fs::remove_file(path(&ctx, ".on-change")).unwrap();
        ctx.dir.write_config_hash("h1").unwrap();
        let restart =
            |disk| Context::new(ctx.settings.clone(), Components { disk, ..ctx.parts.clone() }, Control::new());

        let n_steps = Arc::new(AtomicUsize::new(0));
        let dying = restart(Disk::watched(Arc::new(move |_, _| {
            if n_steps.fetch_add(1, Ordering::SeqCst) == crash_at {
                std::panic::resume_unwind(Box::new("crash"));
            }
        })));
        let died = catch_unwind(AssertUnwindSafe(|| interrupted(&mut Receiver::open(&dying)))).is_err();
        for (name, allowed) in [("changed", ["old", "new"]), ("same", ["same", "same"]), ("well.json", ["", "{}"])] {
            let found = content(&ctx, name).unwrap_or_default();
            assert!(allowed.contains(&found.as_str()), "step {crash_at}: {name} is {found:?}");
        }
        if hash(&ctx) == "h2" {
            assert_eq!(content(&ctx, "new").as_deref(), Some("new"), "step {crash_at}: the hash came first");
            assert_eq!((content(&ctx, "gone"), error(&ctx, "well.json")), (None, String::new()));
        }
        let moved = content(&ctx, "new").is_some() || content(&ctx, "gone").is_none();
        assert!(!moved || path(&ctx, ".on-change").exists(), "step {crash_at}: nobody would be told");

        // The server sends again what the report does not show as current; unchanged files cost nothing.
        let again = restart(Disk::default());
        interrupted(&mut Receiver::open(&again));
        let found = ["changed", "new", "same", "well.json"].map(|name| content(&ctx, name).unwrap());
        assert_eq!(found, ["new", "new", "same", "{}"], "step {crash_at}");
        assert_eq!((hash(&ctx).as_str(), content(&ctx, "gone")), ("h2", None), "step {crash_at}");
        assert!(errors::all(&ctx).is_empty(), "step {crash_at}");
        let ours = ["changed", "new", "same", "well.json"].map(str::to_owned);
        assert_eq!(crate::files::received::names(&ctx), ours.into(), "step {crash_at}");
        let expected = [".on-change", ".received", ".stage", "changed", "errors", "new", "same", "well.json"];
        assert_eq!(names(&ctx.settings.recv.path), expected.map(str::to_owned).into(), "step {crash_at}");
        if !died {
            break;
        }
        n_crashes += 1;
    }
    // Three staged, names noted (3), one removed, three placed, directory, what is ours (3), error entry, hash (3),
    // time (3).
    assert_eq!(n_crashes, 21);
}
