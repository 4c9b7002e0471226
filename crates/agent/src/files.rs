//! Files that the server sends: staged, judged, and put into their places together.
//!
//! Nothing a server sends reaches beyond the directory of received files, and nothing it sends wrongly ends the stream:
//! what is wrong with a file is kept beside it and told in reports.

pub(crate) mod names;

mod json;

mod validate;

pub(crate) mod errors;

mod failures;

mod received;

mod batch;

mod on_change;

use std::{
    collections::{BTreeMap, btree_map::Entry},
    convert::Infallible,
    fs,
    os::unix::fs::MetadataExt as _,
    sync::{Mutex, MutexGuard, PoisonError},
};

use nstance_proto::v1::{FileStatus, file_status::Status};

use crate::{
    context::Context,
    files::{
        batch::{MAX_FILES, Receiver},
        failures::Failures,
        on_change::Hook,
    },
    keys::hello,
    session::{Client, Ended, Stream, Streams},
};

/// What outlives a stream.
#[derive(Default)]
pub(crate) struct Shared {
    failures: Mutex<Failures>,
    /// The last batch that was committed.
    batch: Mutex<String>,
    hook: Hook,
}

impl Shared {
    fn failures(&self) -> MutexGuard<'_, Failures> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn batch(&self) -> MutexGuard<'_, String> {
        self.batch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What goes on whether there is a stream or not.
pub(crate) async fn watch(ctx: &Context) -> Infallible {
    batch::empty_stage(ctx);
    batch::catch_up(ctx);
    on_change::watch(ctx).await
}

/// One stream of files, from its opening to its end.
pub(crate) async fn stream(ctx: &Context, mut client: Client, open: &Streams<'_>) -> Ended {
    let mut files = match client.receive_files(hello(ctx)).await {
        Ok(answer) => answer.into_inner(),
        Err(status) => return status.into(),
    };
    open.opened(Stream::Files);
    let mut receiver = Receiver::open(ctx);
    loop {
        match files.message().await {
            Ok(Some(file)) if !ctx.obeys(file.epoch) => return Ended::Deposed,
            Ok(Some(file)) => receiver.take(file),
            Ok(None) => return Ended::Clean,
            Err(status) => return status.into(),
        }
        // Each file costs a few syncs, and there is one thread for everything.
        tokio::task::yield_now().await;
    }
}

/// What all errors of a report may say together, and what each of them may say in any case. A report that is too large
/// for its server is as good as none, and a machine that is not heard is replaced.
const MAX_ERROR_BYTES: usize = 64 * 1024;
const LEAST_ERROR_BYTES: usize = 64;

/// The received files and what went wrong, as reports tell them. An error hides the time of the file it is about: the
/// server must not take the old content for what it sent.
///
/// There is room for so many names: first come those that the server sent, for it would send again what it does not
/// find, then errors, then whatever else lies there.
pub(crate) fn status(ctx: &Context) -> BTreeMap<String, FileStatus> {
    let ours = received::names(ctx);
    let entries = fs::read_dir(&ctx.settings.recv.path).into_iter().flatten().flatten();
    let times = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok().filter(|name| !name.starts_with('.'))?;
        // Of the entry itself: links are not followed.
        let found = entry.metadata().ok().filter(fs::Metadata::is_file)?;
        let nanos = i32::try_from(found.mtime_nsec()).unwrap_or(0);
        Some((name, Status::LastModified(prost_types::Timestamp { seconds: found.mtime(), nanos })))
    });
    let (received, others): (BTreeMap<_, _>, BTreeMap<_, _>) = times.partition(|(name, _)| ours.contains(name));
    let mut room = MAX_ERROR_BYTES;
    let errors = errors::all(ctx).into_iter().map(|(name, mut text)| {
        text.truncate(text.floor_char_boundary(room.max(LEAST_ERROR_BYTES)));
        room = room.saturating_sub(text.len());
        (name, Status::Error(text))
    });
    let mut told = BTreeMap::new();
    for (name, status) in received.into_iter().chain(errors).chain(others) {
        let (is_full, received) = (MAX_FILES <= told.len(), ours.contains(&name));
        match told.entry(name) {
            Entry::Vacant(_) if is_full => {}
            Entry::Vacant(place) => drop(place.insert(FileStatus { status: Some(status), received })),
            // Whatever came first says more, but for an error.
            Entry::Occupied(mut place) if matches!(status, Status::Error(_)) => place.get_mut().status = Some(status),
            Entry::Occupied(_) => {}
        }
    }
    told
}

/// A context in memory, where there is such a place, for tests that write by the hundred: what they ask is what a reader
/// sees, not what a power cut leaves.
#[cfg(test)]
pub(crate) fn in_memory() -> ([tempfile::TempDir; 2], Context) {
    let inner = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
    let at = |leaf: &str| inner.path().join(leaf).display().to_string();
    let (outer, ctx) =
        Context::for_tests(&[("IDENTITY_DIR", &at("identity")), ("KEYS_DIR", &at("keys")), ("RECV_DIR", &at("recv"))]);
    ([inner, outer], ctx)
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::symlink, time::Duration, time::SystemTime};

    use nstance_proto::v1::HealthReportRequest;
    use prost::Message as _;

    use super::*;
    use crate::files::{batch::Receiver, names::made_safe};

    #[test]
    fn a_report_is_bounded_and_foreign_files_do_not_hide_what_was_received() {
        let (_directories, ctx) = in_memory();
        let mut receiver = Receiver::open(&ctx);
        let long = |n: usize| format!("{n:03}-{}", "x".repeat(120));
        for n in 0..MAX_FILES - 12 {
            fs::write(ctx.settings.recv.path.join(long(n)), "foreign").unwrap();
        }
        for n in 0..10 {
            let transfer = nstance_proto::v1::FileTransfer {
                batch_id: "1".into(),
                filename: format!("zz-{n}"),
                config_hash: if n == 9 { "h".into() } else { String::new() },
                ..Default::default()
            };
            receiver.take(transfer);
        }
        let told = status(&ctx);
        assert_eq!(told.len(), MAX_FILES - 2);
        for n in 0..MAX_FILES {
            errors::tell(&ctx, &long(n), "ä".repeat(2000));
        }
        let told = status(&ctx);
        assert_eq!(told.len(), MAX_FILES);
        assert!((0..10).all(|n| told[&format!("zz-{n}")].received));
        assert!(matches!(&told[&made_safe(&long(0))].status, Some(Status::Error(text)) if 1000 < text.len()));
        let report = HealthReportRequest { files: told.into_iter().collect(), ..Default::default() };
        assert!(report.encoded_len() < 200 * 1024, "{} bytes", report.encoded_len());
    }

    #[test]
    fn report_shows_plain_files_with_their_times_and_errors_before_them() {
        let (_outer, ctx) = Context::for_tests(&[]);
        let recv = &ctx.settings.recv.path;
        assert!(status(&ctx).is_empty());
        for name in ["a.crt", "b.env", ".hidden"] {
            let file = fs::File::create(recv.join(name)).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_millis(1500)).unwrap();
        }
        fs::create_dir(recv.join("dir")).unwrap();
        symlink("/etc/passwd", recv.join("link")).unwrap();
        errors::tell(&ctx, "b.env", "line 3 is wrong");
        errors::tell(&ctx, "../x", "bad name");
        let told: Vec<_> = status(&ctx).into_iter().map(|(name, status)| (name, status.status.unwrap())).collect();
        let at = prost_types::Timestamp { seconds: 1, nanos: 500_000_000 };
        assert_eq!(
            told,
            [
                ("_._x".to_owned(), Status::Error("bad name".into())),
                ("a.crt".to_owned(), Status::LastModified(at)),
                ("b.env".to_owned(), Status::Error("line 3 is wrong".into())),
            ]
        );
    }
}
