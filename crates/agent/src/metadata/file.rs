//! A notice made by hand: a file that appears. It stands in for a cloud in the development environment, and lets
//! anybody try out what a notice does.
//!
//! ```json
//! {"action": "terminate", "deadline": "2026-01-31T12:02:00Z"}
//! ```

use std::{
    convert::Infallible,
    fs::File,
    io::{self, Read as _},
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::Path,
    time::Duration,
};

use nstance_core::time::Timestamp;
use nstance_rt::chain::Chain;
use rustix::fs::inotify::{CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init};
use serde_json::Value;
use tokio::{io::unix::AsyncFd, time::sleep};

use super::{Found, service::Trouble, tell};
use crate::{context::Context, notice::Action, settings::Provider};

/// How often the file is looked for where the kernel does not tell.
const POLL: Duration = Duration::from_millis(200);

const MAX_FILE: u64 = 16 * 1024;

const SOURCE: &str = "notice file";

/// What the file holds: nothing if there is none, or why it cannot be read.
type Content = Result<Option<Vec<u8>>, io::ErrorKind>;

/// What the file says.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    found: Option<Found>,
    spot: Option<bool>,
}

pub(crate) async fn watch(ctx: &Context) -> Infallible {
    let Some(path) = &ctx.settings.notice_file else { return std::future::pending().await };
    // Elsewhere the file comes besides the cloud, and must not speak for it.
    if ctx.settings.provider == Provider::Dev {
        ctx.monitor.heard(&ctx.board, SOURCE, &Ok(()));
    }
    let mut before = Ok(None);
    loop {
        // The watch stands before the look: what is written between the two is seen by one of them.
        let watched = Changes::of(path);
        look(ctx, path, &mut before);
        match watched {
            Ok(changes) => {
                while let Ok(Still::Watched) = changes.next().await {
                    look(ctx, path, &mut before);
                }
            }
            Err(_) => sleep(POLL).await,
        }
    }
}

/// Reads the file, and tells what is new in it. `before` is what it was at the last look.
fn look(ctx: &Context, path: &Path, before: &mut Content) {
    let content = read(path).map_err(|error| error.kind());
    if content == *before {
        return;
    }
    let told = match &content {
        Ok(Some(bytes)) => parse(bytes),
        // A file that was taken away takes nothing back.
        Ok(None) => Ok(Told { found: None, spot: None }),
        Err(_) => Err("the file cannot be read"),
    };
    *before = content;
    let told = told.map_err(|what| Trouble::malformed(&path.display().to_string(), what));
    if let Ok(Told { found: Some(found), .. }) = &told {
        tell(ctx, found);
    }
    match &told {
        told if ctx.settings.provider == Provider::Dev => {
            if let Ok(Told { spot: Some(spot), .. }) = told {
                ctx.monitor.set_spot(&ctx.board, *spot);
            }
            ctx.monitor.heard(&ctx.board, SOURCE, told);
        }
        Ok(_) => {}
        Err(error) => {
            tracing::warn!(error = %Chain(error), "notice file of no use");
            ctx.monitor.count();
        }
    }
}

/// Nothing if there is no file.
fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

fn parse(bytes: &[u8]) -> Result<Told, &'static str> {
    if u64::try_from(bytes.len()).is_ok_and(|length| MAX_FILE < length) {
        return Err("too long");
    }
    let value: Value = serde_json::from_slice(bytes).map_err(|_| "not JSON")?;
    let spot = match value.get("spot") {
        None => None,
        Some(spot) => Some(spot.as_bool().ok_or("spot is neither true nor false")?),
    };
    let Some(action) = value.get("action") else {
        return spot.map(|_| Told { found: None, spot }).ok_or("no action");
    };
    let action = action.as_str().and_then(Action::parse).ok_or("no known action")?;
    let deadline: Option<Timestamp> = match value.get("deadline") {
        None | Some(Value::Null) => None,
        Some(text) => Some(text.as_str().and_then(|text| text.parse().ok()).ok_or("deadline is not a time")?),
    };
    Ok(Told { found: Some(Found { action, deadline }), spot })
}

/// The kernel's word that something in the file's directory was written to its end, or moved there.
struct Changes(AsyncFd<OwnedFd>);

enum Still {
    Watched,
    /// The directory is gone.
    Gone,
}

impl Changes {
    fn of(path: &Path) -> io::Result<Self> {
        let directory = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
        let queue = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let wanted = WatchFlags::CLOSE_WRITE | WatchFlags::MOVED_TO | WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF;
        add_watch(&queue, directory, wanted | WatchFlags::ONLYDIR)?;
        #[allow(
            deprecated,
            reason = "its successor is unsafe to call; what it warns of, a descriptor that its owner \
                                      replaces or closes, cannot happen to an OwnedFd"
        )]
        let queue = AsyncFd::new(queue)?;
        Ok(Self(queue))
    }

    async fn next(&self) -> io::Result<Still> {
        loop {
            let mut ready = self.0.readable().await?;
            let mut buffer = [MaybeUninit::uninit(); 1024];
            let mut events = Reader::new(self.0.get_ref(), &mut buffer);
            let (mut any, mut still) = (false, Still::Watched);
            loop {
                match events.next() {
                    Ok(event) => {
                        any = true;
                        // A directory that was moved is no longer the one that was asked for.
                        if event.events().intersects(ReadFlags::IGNORED | ReadFlags::MOVE_SELF) {
                            still = Still::Gone;
                        }
                    }
                    Err(rustix::io::Errno::WOULDBLOCK) => break,
                    Err(error) => return Err(error.into()),
                }
            }
            ready.clear_ready();
            if any {
                return Ok(still);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::monitor::{MonitorState, Place};

    #[test]
    fn file_that_cannot_be_read_is_counted_once_and_shown_until_it_is_gone() {
        let (outer, ctx) = Context::for_tests(&[("PROVIDER", "dev"), ("NOTICE_FILE", "/unused")]);
        ctx.monitor.begin(&ctx.board, Place::default());
        let (path, mut before) = (outer.path().join("notice.json"), Ok(None));
        std::fs::create_dir(&path).unwrap();
        for _ in 0..3 {
            look(&ctx, &path, &mut before);
            assert_eq!((ctx.monitor.state(), ctx.monitor.n_errors()), (MonitorState::Failing, 1));
        }
        std::fs::remove_dir(&path).unwrap();
        look(&ctx, &path, &mut before);
        assert_eq!((ctx.monitor.state(), ctx.board.notice()), (MonitorState::Ok, None));
    }

    #[test]
    fn file_says_an_action_perhaps_a_deadline_perhaps_that_the_machine_is_a_spot_one() {
        let deadline = Some(Timestamp::from_millis(1_769_860_920_000));
        for (text, found, spot) in [
            (r#"{"action":"terminate"}"#, Some((Action::Terminate, None)), None),
            (
                r#"{"action":"preempt","deadline":"2026-01-31T12:02:00Z","spot":true}"#,
                Some((Action::Preempt, deadline)),
                Some(true),
            ),
            (r#"{"action":"leave","deadline":null}"#, Some((Action::Leave, None)), None),
            (r#"{"spot":false}"#, None, Some(false)),
        ] {
            let found = found.map(|(action, deadline)| Found { action, deadline });
            assert_eq!(parse(text.as_bytes()), Ok(Told { found, spot }), "{text}");
        }
        for bad in ["", "{", "{}", "[]", r#"{"action":"dance"}"#, r#"{"action":"stop","deadline":"soon"}"#, "terminate"]
        {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
        let long = format!(r#"{{"action":"stop"}}{}"#, " ".repeat(16 * 1024));
        assert_eq!(parse(long.as_bytes()), Err("too long"));
    }
}
