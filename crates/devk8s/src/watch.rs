//! Watches: a stream of events from a version on, without gaps.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};

use crate::{
    error::ApiError,
    faults::Faults,
    list::{forbidden_option, invalid_version},
    object::set_metadata,
    query::Query,
    render::{Shape, TableHead},
    resources::Served,
    selector::Selection,
    store::{Change, Event, News, Store},
};

/// The longest life of a watch whose client names none.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// Events that wait for a slow client in its connection; more of them stay in the history.
pub(crate) const BUFFERED: usize = 16;

/// One watch, with all that it needs to run by itself.
pub(crate) struct Watch {
    pub(crate) store: Arc<Store>,
    pub(crate) faults: Faults,
    pub(crate) caller: String,
    pub(crate) served: Served,
    pub(crate) selection: Selection,
    pub(crate) shape: Shape,
    pub(crate) bookmark_every: Duration,
    since: Option<u64>,
    bookmarks: bool,
    timeout: Duration,
}

/// The parts of a watch that come from its request.
pub(crate) struct Wanted {
    since: Option<u64>,
    bookmarks: bool,
    timeout: Duration,
}

impl Wanted {
    pub(crate) fn parse(query: &Query) -> Result<Self, ApiError> {
        if !query.get("sendInitialEvents").is_empty() {
            return Err(forbidden_option(
                "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch unless the WatchList feature \
                 gate is enabled",
            ));
        }
        if !query.get("resourceVersionMatch").is_empty() {
            return Err(forbidden_option(
                "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden for watch unless sendInitialEvents \
                 is provided",
            ));
        }
        let since = match query.get("resourceVersion") {
            "" | "0" => None,
            text => Some(text.parse().map_err(|_| invalid_version(text))?),
        };
        let timeout = query.get("timeoutSeconds").parse().ok().filter(|it| *it != 0);
        Ok(Self {
            since,
            bookmarks: query.is_set("allowWatchBookmarks"),
            timeout: timeout.map_or(DEFAULT_TIMEOUT, Duration::from_secs),
        })
    }
}

/// Why a watch stopped sending.
enum End {
    /// The client is gone, or the server ends.
    Closed,
    Failed(ApiError),
}

impl Watch {
    #[expect(clippy::too_many_arguments, reason = "it collects what one request brings together")]
    pub(crate) fn new(
        store: Arc<Store>,
        faults: Faults,
        caller: String,
        served: Served,
        selection: Selection,
        shape: Shape,
        bookmark_every: Duration,
        wanted: Wanted,
    ) -> Self {
        let Wanted { since, bookmarks, timeout } = wanted;
        Self { store, faults, caller, served, selection, shape, bookmark_every, since, bookmarks, timeout }
    }

    /// Sends lines until the time is over or the client is gone.
    pub(crate) async fn run(self, lines: mpsc::Sender<Result<Bytes, std::io::Error>>) {
        if let Err(End::Failed(error)) = self.send_all(&lines).await {
            let line = line("ERROR", &error.to_status());
            // The client may be gone; then it needs no error.
            let _ = lines.send(Ok(line)).await;
        }
    }

    async fn send_all(&self, lines: &mpsc::Sender<Result<Bytes, std::io::Error>>) -> Result<(), End> {
        let deadline = Instant::now() + self.timeout;
        let mut next_bookmark = Instant::now() + self.bookmark_every;
        let mut head = TableHead::Shown;
        let mut position = match self.since {
            Some(since) => since,
            None => {
                let (objects, version) = self.store.transact(|txn| {
                    let all = txn.list(&self.served.resource.id, self.selection.namespace.as_deref());
                    (all, txn.version())
                });
                for object in objects.iter().filter(|it| self.selection.matches(it)) {
                    self.send(lines, "ADDED", object, &mut head).await?;
                }
                version
            }
        };
        loop {
            let (news, mut changed) = self.store.transact(|txn| txn.news(&self.served.resource.id, position));
            let (events, version) = match news {
                News::Events(events, version) => (events, version),
                News::Forgotten => {
                    let message = format!("too old resource version: {position}");
                    return Err(End::Failed(ApiError::expired(message)));
                }
            };
            for event in &events {
                self.delay(event, lines).await?;
                if let Some((kind, object)) = self.seen(event) {
                    self.send(lines, kind, &object, &mut head).await?;
                }
            }
            position = version;
            tokio::select! {
                biased;
                () = lines.closed() => return Err(End::Closed),
                () = sleep_until(deadline) => {
                    return if self.bookmarks { self.bookmark(lines, position).await } else { Ok(()) };
                }
                _ = changed.changed() => {}
                () = sleep_until(next_bookmark), if self.bookmarks => {
                    // The version of this moment: events that came meanwhile must go before it.
                    let (news, _) = self.store.transact(|txn| txn.news(&self.served.resource.id, position));
                    if let News::Events(events, version) = news && events.is_empty() {
                        position = version;
                        self.bookmark(lines, position).await?;
                        next_bookmark = Instant::now() + self.bookmark_every;
                    }
                }
            }
        }
    }

    /// Waits as long as a test wants the events of this resource to be late.
    async fn delay(&self, event: &Event, lines: &mpsc::Sender<Result<Bytes, std::io::Error>>) -> Result<(), End> {
        let Some(delay) = self.faults.watch_delay(&self.served.resource) else { return Ok(()) };
        tokio::select! {
            biased;
            () = lines.closed() => Err(End::Closed),
            () = sleep_until(event.at + delay) => Ok(()),
        }
    }

    /// How an event looks to this watch, whose selection an object may enter or leave.
    fn seen(&self, event: &Event) -> Option<(&'static str, Arc<Value>)> {
        let now = event.change != Change::Deleted && self.selection.matches(&event.object);
        let before = event.before.as_ref().filter(|it| self.selection.matches(it));
        match (before, now) {
            (None, true) => Some(("ADDED", event.object.clone())),
            (Some(_), true) => Some(("MODIFIED", event.object.clone())),
            (Some(_), false) if event.change == Change::Deleted => Some(("DELETED", event.object.clone())),
            (Some(before), false) => {
                let mut last = (**before).clone();
                set_metadata(&mut last, "resourceVersion", Some(json!(event.version.to_string())));
                Some(("DELETED", Arc::new(last)))
            }
            (None, false) => None,
        }
    }

    async fn send(
        &self,
        lines: &mpsc::Sender<Result<Bytes, std::io::Error>>,
        kind: &str,
        object: &Value,
        head: &mut TableHead,
    ) -> Result<(), End> {
        let shown = self.shape.one(object, &self.served, *head, &*self.store.clock);
        *head = TableHead::Hidden;
        self.push(lines, line(kind, &shown)).await
    }

    async fn bookmark(&self, lines: &mpsc::Sender<Result<Bytes, std::io::Error>>, version: u64) -> Result<(), End> {
        let object = json!({
            "kind": self.served.resource.kind, "apiVersion": self.served.api_version(),
            "metadata": { "resourceVersion": version.to_string(), "creationTimestamp": null },
        });
        let shown = match self.shape {
            Shape::Full => object,
            _ => self.shape.one(&object, &self.served, TableHead::Hidden, &*self.store.clock),
        };
        self.push(lines, line("BOOKMARK", &shown)).await
    }

    /// Sends a line, unless the caller is cut off.
    async fn push(&self, lines: &mpsc::Sender<Result<Bytes, std::io::Error>>, line: Bytes) -> Result<(), End> {
        tokio::select! {
            biased;
            () = lines.closed() => return Err(End::Closed),
            refused = self.faults.pass(&self.caller) => refused.map_err(|_| End::Closed)?,
        }
        lines.send(Ok(line)).await.map_err(|_| End::Closed)
    }
}

fn line(kind: &str, object: &Value) -> Bytes {
    let mut text = json!({ "type": kind, "object": object }).to_string();
    text.push('\n');
    Bytes::from(text)
}
