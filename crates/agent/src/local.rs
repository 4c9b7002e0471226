//! The local HTTP port, off unless asked for: `/healthz` for whoever restarts things, `/metrics` for whoever draws them.
//!
//! It is as small as HTTP goes: a few connections at a time, one request each, bounded in size and time. A port that
//! cannot be had is a warning and is tried again; it never stops the agent.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nstance_core::time::Mono;
use nstance_rt::chain::Chain;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpListener,
    time::{sleep, timeout},
};

use crate::context::{Context, State};

mod metrics;

/// A session that is looked for this long is not well any more.
const CONNECTING_LIMIT: Duration = Duration::from_secs(60);

/// From the first byte to the last.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);

const MAX_HEADER: usize = 2048;

/// Between two tries for the port.
const BIND_PAUSE: Duration = Duration::from_secs(10);

/// After a connection that could not be taken: there may be too many files open.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

pub(crate) async fn serve(ctx: &Context) -> Infallible {
    let Some(address) = ctx.settings.health_addr else { return std::future::pending().await };
    let life = Life::new(ctx);
    let (never, _) = tokio::join!(life.follow(ctx), listen(ctx, &life, address));
    never
}

/// What the states came to over time.
struct Life(Mutex<Course>);

#[derive(Debug, Clone)]
struct Course {
    state: State,
    since: Mono,
    n_reconnects: u64,
}

impl Life {
    fn new(ctx: &Context) -> Self {
        let state = ctx.control.state().borrow().clone();
        Self(Mutex::new(Course { state, since: ctx.parts.clock.monotonic(), n_reconnects: 0 }))
    }

    fn course(&self) -> MutexGuard<'_, Course> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn follow(&self, ctx: &Context) -> Infallible {
        let mut states = ctx.control.state();
        loop {
            {
                let state = states.borrow_and_update();
                let mut course = self.course();
                if course.state != *state {
                    course.n_reconnects += u64::from(course.state == State::Serving && *state == State::Connecting);
                    course.state = state.clone();
                    course.since = ctx.parts.clock.monotonic();
                }
            }
            if states.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    fn is_well(&self, now: Mono) -> bool {
        let course = self.course();
        match course.state {
            State::Serving => true,
            State::Connecting => now.since(course.since) < CONNECTING_LIMIT,
            _ => false,
        }
    }
}

async fn listen(ctx: &Context, life: &Life, address: SocketAddr) -> Infallible {
    if !address.ip().is_loopback() {
        tracing::warn!(%address, "health and metrics are open to the network");
    }
    let mut complained = None;
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) => {
                let text = Chain(&error).to_string();
                if complained.as_ref() != Some(&text) {
                    tracing::warn!(%address, error = text, "health port not opened, trying on");
                    complained = Some(text);
                }
            }
        }
        sleep(BIND_PAUSE).await;
    };
    tracing::info!(%address, "health and metrics are served");
    // Few at a time, so that one slow client keeps nobody else waiting, and many keep only each other.
    let (never, ..) = tokio::join!(
        accept(ctx, life, &listener),
        accept(ctx, life, &listener),
        accept(ctx, life, &listener),
        accept(ctx, life, &listener),
    );
    never
}

async fn accept(ctx: &Context, life: &Life, listener: &TcpListener) -> Infallible {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Whoever is too slow or goes away has no answer, and that is all.
                let _ = timeout(REQUEST_LIMIT, converse(ctx, life, stream)).await;
            }
            Err(error) => {
                tracing::debug!(error = %Chain(&error), "connection not taken");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// One request and its answer.
async fn converse(ctx: &Context, life: &Life, mut stream: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<()> {
    let mut header = [0; MAX_HEADER];
    let mut n_read = 0;
    let answer = loop {
        if has_end(&header[..n_read]) {
            break answer(ctx, life, &header[..n_read]);
        }
        if n_read == MAX_HEADER {
            break Answer::new("431 Request Header Fields Too Large", "too large\n");
        }
        match stream.read(&mut header[n_read..]).await? {
            0 => return Ok(()),
            n => n_read += n,
        }
    };
    let head = format!(
        "HTTP/1.1 {}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        answer.status,
        answer.body.len(),
    );
    stream.write_all(head.as_bytes()).await?;
    if answer.with_body {
        stream.write_all(answer.body.as_bytes()).await?;
    }
    stream.shutdown().await
}

fn has_end(header: &[u8]) -> bool {
    header.windows(4).any(|window| window == b"\r\n\r\n") || header.windows(2).any(|window| window == b"\n\n")
}

struct Answer {
    status: &'static str,
    body: String,
    with_body: bool,
}

impl Answer {
    fn new(status: &'static str, body: impl Into<String>) -> Self {
        Self { status, body: body.into(), with_body: true }
    }
}

/// What is asked of a path.
type Handler = fn(&Context, &Life) -> Answer;

/// Every path and who answers it, to GET and HEAD.
const ROUTES: [(&str, Handler); 2] = [
    ("/healthz", health),
    ("/metrics", |ctx, life| Answer::new("200 OK", metrics::Figures::of(ctx, &life.course().clone()).text())),
];

/// The paths of the local port.
pub fn paths() -> impl Iterator<Item = &'static str> {
    ROUTES.into_iter().map(|(path, _)| path)
}

/// `/metrics` of an agent that has something to say under every name.
pub fn example_metrics() -> String {
    metrics::Figures::example().text()
}

fn answer(ctx: &Context, life: &Life, header: &[u8]) -> Answer {
    let line = header.split(|byte| matches!(byte, b'\r' | b'\n')).next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let mut words = line.split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = target.split('?').next().unwrap_or_default();
    let route = ROUTES.iter().find(|(known, _)| *known == path);
    let mut answer = match (method, route) {
        ("GET" | "HEAD", Some((_, handler))) => handler(ctx, life),
        ("GET" | "HEAD", None) => Answer::new("404 Not Found", "there are /healthz and /metrics\n"),
        _ => Answer::new("405 Method Not Allowed", "use GET\n"),
    };
    answer.with_body = method != "HEAD";
    answer
}

fn health(ctx: &Context, life: &Life) -> Answer {
    if life.is_well(ctx.parts.clock.monotonic()) {
        return Answer::new("200 OK", "ok\n");
    }
    let state = life.course().state.clone();
    let why = match &state {
        State::Parked(why) => format!(": {why}"),
        _ => String::new(),
    };
    Answer::new("503 Service Unavailable", format!("{}{why}\n", state.as_str()))
}

#[cfg(test)]
#[path = "local/tests.rs"]
mod tests;
