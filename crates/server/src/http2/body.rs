//! What a client says in a call, on its way from the connection to the handler.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use futures::task::AtomicWaker;
use hyper::body::{Body, Frame, SizeHint};

use super::machine::PORTION;

/// What stands before a message: a flag and its length. Handed out by itself, because tonic sets a message's length aside
/// *besides* what it holds already, rounds it up, and keeps that for as long as the stream is open.
const HEAD: usize = 5;

/// The call ended before everything was said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the client gave up the call, or its connection ended")]
pub(super) struct Lost;

/// The body of a request. Dropped before its end, the rest is not waited for.
pub(super) struct Incoming(Arc<Inbox>);

/// Where the connection puts what comes. The client's window bounds how much that is.
pub(super) struct Inbox {
    state: Mutex<State>,
    connection: Arc<AtomicWaker>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Bytes>,
    /// The first in the queue is without its head, which was read.
    beheaded: bool,
    end: Option<Result<(), Lost>>,
    reader: Option<Waker>,
    /// Read since the connection last asked.
    read: u32,
    unwanted: bool,
}

impl Inbox {
    /// Both ends. `connection` is woken when much was read.
    pub(super) fn new(connection: Arc<AtomicWaker>) -> (Arc<Self>, Incoming) {
        let inbox = Arc::new(Self { state: Mutex::default(), connection });
        (inbox.clone(), Incoming(inbox))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn put(&self, bytes: Bytes) {
        let reader = {
            let mut state = self.lock();
            if state.unwanted {
                state.read += length(&bytes);
                return;
            }
            state.queue.push_back(bytes);
            state.reader.take()
        };
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// Nothing more comes. The first word counts.
    pub(super) fn finish(&self, end: Result<(), Lost>) {
        let reader = {
            let mut state = self.lock();
            state.end.get_or_insert(end);
            state.reader.take()
        };
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// How much was read since this was last asked.
    pub(super) fn take_read(&self) -> u32 {
        std::mem::take(&mut self.lock().read)
    }
}

/// A window at most, for there is never more than that.
fn length(bytes: &Bytes) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX)
}

impl Body for Incoming {
    type Data = Bytes;
    type Error = Lost;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Lost>>> {
        let mut state = self.0.lock();
        let next = if state.beheaded { None } else { state.queue.front_mut().filter(|bytes| HEAD < bytes.len()) };
        let head = next.map(|bytes| bytes.split_to(HEAD));
        state.beheaded = head.is_some();
        let Some(bytes) = head.or_else(|| state.queue.pop_front()) else {
            return match state.end {
                Some(Ok(())) => Poll::Ready(None),
                Some(Err(lost)) => Poll::Ready(Some(Err(lost))),
                None => {
                    match &mut state.reader {
                        Some(reader) => reader.clone_from(cx.waker()),
                        reader => *reader = Some(cx.waker().clone()),
                    }
                    Poll::Pending
                }
            };
        };
        let before = state.read;
        state.read += length(&bytes);
        // Whoever waits for its window is told in time; nobody is woken for each message.
        let tell = before < PORTION && PORTION <= state.read;
        drop(state);
        if tell {
            self.0.connection.wake();
        }
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        let state = self.0.lock();
        state.queue.is_empty() && state.end == Some(Ok(()))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        let tell = {
            let mut state = self.0.lock();
            state.unwanted = true;
            let unread: u32 = state.queue.drain(..).map(|bytes| length(&bytes)).sum();
            state.read += unread;
            PORTION <= state.read
        };
        if tell {
            self.0.connection.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    #[tokio::test]
    async fn a_message_comes_head_first_and_whole() {
        let (inbox, mut incoming) = Inbox::new(Arc::default());
        for text in ["12345rest", "small", "head!more", "x"] {
            inbox.put(Bytes::from_static(text.as_bytes()));
        }
        inbox.finish(Ok(()));
        inbox.finish(Err(Lost));
        let mut parts = Vec::new();
        while let Some(frame) = incoming.frame().await {
            assert!(!incoming.is_end_stream() || parts.len() == 5);
            parts.push(frame.unwrap().into_data().unwrap());
        }
        assert_eq!(parts, ["12345", "rest", "small", "head!", "more", "x"]);
        assert_eq!(inbox.take_read(), 9 + 5 + 9 + 1);
    }

    #[tokio::test]
    async fn what_nobody_reads_counts_as_read() {
        let (inbox, mut incoming) = Inbox::new(Arc::default());
        inbox.put(Bytes::from_static(b"12345rest"));
        incoming.frame().await.unwrap().unwrap();
        drop(incoming);
        inbox.put(Bytes::from_static(b"more"));
        assert_eq!((inbox.take_read(), inbox.take_read()), (13, 0));
    }
}
