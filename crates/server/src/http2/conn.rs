//! The task of one connection: it reads, lets handlers work, writes, and asks now and then whether anybody is there.

use std::{
    convert::Infallible,
    future::Future,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures::task::AtomicWaker;
use hyper::body::Body as _;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep},
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::body::Body;
use tower::Service;

use super::{
    body::{Inbox, Incoming, Lost},
    frame::Reason,
    machine::{ENOUGH, Event, Machine},
};

/// What is read at once. It lies on the stack, so a connection that is silent has none.
const READ: usize = 4096;

/// When a connection on which nothing comes is asked for a sign of life, and how long that may take.
#[derive(Debug, Clone, Copy)]
pub struct Keepalive {
    pub interval: Duration,
    pub timeout: Duration,
}

/// Serves one connection until it ends, or until `stop` is cancelled and the calls that run have come to their end.
/// Each request brings `info` along. The service must always be ready, as those of tonic are. Whoever drops the future
/// ends the connection at once. It is no `async fn`, for that would keep room for all of this twice.
pub fn serve<IO, S, I>(
    io: IO,
    service: S,
    info: I,
    keepalive: Keepalive,
    stop: CancellationToken,
) -> Connection<IO, S, I>
where
    S: Service<http::Request<Body>>,
{
    let now = Instant::now();
    Connection {
        io,
        service,
        info,
        machine: Machine::default(),
        exchanges: Vec::new(),
        waker: Arc::default(),
        stop: Some(Box::pin(stop.cancelled_owned())),
        written: 0,
        unflushed: false,
        ending: None,
        keepalive,
        began: now,
        heard: now,
        asked: false,
        alarm: Box::pin(tokio::time::sleep(keepalive.interval)),
    }
}

/// The socket comes first: fields are dropped in order, and handlers that are dropped ask whether it ended.
#[must_use = "a connection is served while this is polled"]
pub struct Connection<IO, S: Service<http::Request<Body>>, I> {
    io: IO,
    service: S,
    info: I,
    machine: Machine,
    exchanges: Vec<Exchange<S::Future>>,
    /// Wakes this task.
    waker: Arc<AtomicWaker>,
    stop: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
    /// How much of what is to be written was.
    written: usize,
    unflushed: bool,
    /// Nothing more is read: what is left is written, then it is over.
    ending: Option<Ending>,
    keepalive: Keepalive,
    began: Instant,
    heard: Instant,
    /// A sign of life was asked for, and nothing has come since.
    asked: bool,
    alarm: Pin<Box<Sleep>>,
}

#[derive(Debug, Clone, Copy)]
enum Ending {
    /// As it should.
    Left,
    /// The client broke the protocol.
    Fault(super::machine::Fault),
}

/// One call.
struct Exchange<F> {
    stream: u32,
    /// Until the client has said everything.
    inbox: Option<Arc<Inbox>>,
    work: Work<F>,
}

enum Work<F> {
    Answering(F),
    /// The answer began; `chunk` is what of it waits for windows.
    Telling {
        body: Body,
        chunk: Bytes,
    },
    Over,
}

impl<F> Drop for Exchange<F> {
    fn drop(&mut self) {
        if let Some(inbox) = &self.inbox {
            inbox.finish(Err(Lost));
        }
    }
}

impl<IO, S, I> Future for Connection<IO, S, I>
where
    IO: AsyncRead + AsyncWrite + Unpin,
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible> + Unpin,
    S::Future: Unpin,
    I: Clone + Send + Sync + Unpin + 'static,
{
    type Output = io::Result<()>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().poll_all(cx)
    }
}

impl<IO, S, I> Connection<IO, S, I>
where
    IO: AsyncRead + AsyncWrite + Unpin,
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible> + Unpin,
    S::Future: Unpin,
    I: Clone + Send + Sync + Unpin + 'static,
{
    fn poll_all(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.waker.register(cx.waker());
        if self.stop.as_mut().is_some_and(|stop| stop.as_mut().poll(cx).is_ready()) {
            self.stop = None;
            self.machine.leave();
        }
        loop {
            let read = self.poll_read(cx)?;
            let worked = self.ending.is_none() && self.poll_exchanges(cx);
            if self.stop.is_none() && self.exchanges.is_empty() && self.ending.is_none() {
                self.ending = Some(Ending::Left);
            }
            // What follows from all that came goes out together.
            if (read || worked) && self.ending.is_none() && self.machine.out().len() < ENOUGH {
                continue;
            }
            let full = !self.machine.out().is_empty();
            let written = self.poll_write(cx)?.is_ready();
            if let Some(ending) = self.ending.filter(|_| written) {
                return self.poll_end(cx, ending);
            }
            // What was written makes room for handlers that had to stop; what cannot be written stops only them.
            if !read && !(written && (worked || full)) {
                break;
            }
        }
        self.poll_alarm(cx)
    }

    /// Reads once, and says whether something came. Nothing is read while much waits to be written: a client that
    /// takes no answers gets none to wait for.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        if self.ending.is_some() || ENOUGH <= self.machine.out().len() {
            return Ok(false);
        }
        let mut place = [0; READ];
        let mut buffer = ReadBuf::new(&mut place);
        match Pin::new(&mut self.io).poll_read(cx, &mut buffer) {
            Poll::Pending => return Ok(false),
            Poll::Ready(Err(error)) => return Err(error),
            Poll::Ready(Ok(())) => {}
        }
        if buffer.filled().is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.heard = Instant::now();
        self.asked = false;
        let mut events = Vec::new();
        let fed = self.machine.feed(buffer.filled(), self.heard - self.began, &mut events);
        for event in events {
            self.take(event);
        }
        if let Err(fault) = fed {
            // Handlers end with their connection, and this one says no more than why.
            self.exchanges = Vec::new();
            self.ending = Some(Ending::Fault(fault));
        }
        Ok(true)
    }

    fn take(&mut self, event: Event) {
        let find = |exchanges: &[Exchange<S::Future>], stream| exchanges.iter().position(|it| it.stream == stream);
        match event {
            Event::Opened { stream, request, ended } => {
                let (inbox, incoming) = Inbox::new(self.waker.clone());
                if ended {
                    inbox.finish(Ok(()));
                }
                let answering = self.call(request, incoming);
                let inbox = (!ended).then_some(inbox);
                self.exchanges.push(Exchange { stream, inbox, work: Work::Answering(answering) });
            }
            Event::Data { stream, bytes } => {
                if let Some(at) = find(&self.exchanges, stream)
                    && let Some(inbox) = &self.exchanges[at].inbox
                {
                    inbox.put(bytes);
                }
            }
            Event::Ended { stream } => {
                if let Some(at) = find(&self.exchanges, stream)
                    && let Some(inbox) = self.exchanges[at].inbox.take()
                {
                    inbox.finish(Ok(()));
                }
            }
            Event::Reset { stream } => {
                if let Some(at) = find(&self.exchanges, stream) {
                    self.exchanges.swap_remove(at);
                }
            }
        }
    }

    fn call(&mut self, request: http::Request<()>, incoming: Incoming) -> S::Future {
        let (parts, ()) = request.into_parts();
        let mut request = http::Request::from_parts(parts, Body::new(incoming));
        request.extensions_mut().insert(self.info.clone());
        self.service.call(request)
    }

    /// Lets every handler work, and says whether one had something to say.
    fn poll_exchanges(&mut self, cx: &mut Context<'_>) -> bool {
        let before = self.machine.out().len();
        for exchange in &mut self.exchanges {
            exchange.poll(&mut self.machine, cx);
        }
        self.exchanges.retain(|it| !matches!(it.work, Work::Over));
        if self.exchanges.is_empty() {
            self.exchanges = Vec::new();
        }
        before != self.machine.out().len()
    }

    fn poll_write(&mut self, cx: &mut Context<'_>) -> io::Result<Poll<()>> {
        while self.written < self.machine.out().len() {
            let rest = &self.machine.out()[self.written..];
            match Pin::new(&mut self.io).poll_write(cx, rest) {
                Poll::Pending => return Ok(Poll::Pending),
                Poll::Ready(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(Ok(n)) => {
                    self.written += n;
                    self.unflushed = true;
                }
                Poll::Ready(Err(error)) => return Err(error),
            }
        }
        *self.machine.out() = Vec::new();
        self.written = 0;
        if self.unflushed {
            match Pin::new(&mut self.io).poll_flush(cx) {
                Poll::Pending => return Ok(Poll::Pending),
                Poll::Ready(flushed) => flushed?,
            }
            self.unflushed = false;
        }
        Ok(Poll::Ready(()))
    }

    fn poll_end(&mut self, cx: &mut Context<'_>, ending: Ending) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.io).poll_shutdown(cx) {
            Poll::Ready(closed) => Poll::Ready(match ending {
                Ending::Left => closed,
                Ending::Fault(fault) => Err(io::Error::new(io::ErrorKind::InvalidData, fault)),
            }),
            Poll::Pending => self.poll_alarm(cx),
        }
    }

    /// Ends a connection whose peer gives no sign of life.
    fn poll_alarm(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.alarm.as_mut().poll(cx));
            let next = self.heard + self.keepalive.interval;
            let at = if self.asked || self.ending.is_some() {
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "no sign of life")));
            } else if Instant::now() < next {
                next
            } else {
                self.asked = true;
                self.machine.ping();
                // If the peer takes nothing now, it goes out with the rest.
                let _ = self.poll_write(cx)?;
                Instant::now() + self.keepalive.timeout
            };
            self.alarm.as_mut().reset(at);
        }
    }
}

impl<F> Exchange<F>
where
    F: Future<Output = Result<http::Response<Body>, Infallible>> + Unpin,
{
    fn poll(&mut self, machine: &mut Machine, cx: &mut Context<'_>) {
        self.poll_work(machine, cx);
        if let Some(inbox) = &self.inbox {
            machine.was_read(self.stream, inbox.take_read());
        }
    }

    fn poll_work(&mut self, machine: &mut Machine, cx: &mut Context<'_>) {
        loop {
            match &mut self.work {
                Work::Answering(answering) => {
                    let Poll::Ready(Ok(response)) = Pin::new(answering).poll(cx) else { return };
                    let (parts, body) = response.into_parts();
                    let ended = body.is_end_stream();
                    machine.respond(self.stream, &parts, ended);
                    self.work = if ended { Work::Over } else { Work::Telling { body, chunk: Bytes::new() } };
                }
                Work::Telling { body, chunk } => {
                    machine.data(self.stream, chunk);
                    if !chunk.is_empty() || ENOUGH <= machine.out().len() {
                        return;
                    }
                    let Poll::Ready(frame) = Pin::new(body).poll_frame(cx) else { return };
                    match frame.map(|frame| frame.map(hyper::body::Frame::into_data)) {
                        Some(Ok(Ok(data))) => *chunk = data,
                        Some(Ok(Err(other))) => {
                            if let Ok(trailers) = other.into_trailers() {
                                machine.trailers(self.stream, &trailers);
                                self.work = Work::Over;
                            }
                        }
                        Some(Err(_)) => {
                            machine.reset(self.stream, Reason::Internal);
                            self.work = Work::Over;
                        }
                        None => {
                            machine.end(self.stream);
                            self.work = Work::Over;
                        }
                    }
                }
                Work::Over => return,
            }
        }
    }
}

#[cfg(test)]
mod tests;
