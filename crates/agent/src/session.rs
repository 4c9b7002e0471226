//! The session: one connection to the shard's leader, kept for as long as the process lives.
//!
//! Streams are supervised one by one. A stream that ends is opened again on the same connection, at once the first
//! time, then after a pause; only a lost transport, or a word that concerns the whole server, ends the connection. Then
//! the rules of [`Reconnect`] decide when to come back. No server behaviour ends the process.

use std::{
    convert::Infallible,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use nstance_core::time::Mono;
use nstance_identity::{
    peer::{LEEWAY, Peer},
    tls::{TlsError, client_config},
};
use nstance_proto::v1::{HealthReportRequest, ReportKind, agent_service_client::AgentServiceClient};
use nstance_rt::{
    backoff::Backoff,
    chain::Chain,
    entropy::{hex, jitter},
};
use rustls::ClientConfig;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use crate::{
    context::{Context, State, Stopped},
    enrol::{DISK_PAUSE, HELP, Help, own_certificate},
    files,
    health::Reports,
    identity_dir::DirError,
    keys,
    link::{DialError, Distrust, Link, dial},
    notice::{Notice, stop_action},
    reconnect::{Reconnect, about},
    refusal::{CallError, Refusal, Verdict},
    renewal::{Renewed, Schedule, renew},
};

/// A stream nobody has objected to for this long is taken as accepted: its answer comes only at its end.
const SETTLED_AFTER: Duration = Duration::from_secs(1);

/// Deleted, or spoken for by somebody else: look again now and then.
const LONG_PAUSE: Duration = Duration::from_secs(60);

/// The whole farewell takes two seconds at most: half a second to decide and reach the server where there is a stream.
const FAREWELL_LIMIT: Duration = Duration::from_millis(1900);
const FAREWELL_ANSWER: Duration = Duration::from_secs(1);

/// To reach a server for the sake of a farewell or a notice.
const HASTY_DIAL: Duration = Duration::from_millis(1500);

/// A certificate that begins to be good only this far ahead means that our clock is wrong, not the issuer's.
const CLOCK_DOUBT: Duration = Duration::from_secs(3600);

/// Remarks on the session, or on the registration before it, for the boot record.
pub(crate) const CLOCK: &str = "clock";
const UNTRUSTED: &str = "server-not-trusted";

/// Whoever shares our identity takes it back within a minute; a session that stands for two is ours alone.
const REMARK_STANDS: Duration = Duration::from_secs(120);

/// Reports under way to the transport: one, and room for a notice that must not wait behind it.
const REPORT_SLOTS: usize = 2;

/// Why the agent stopped keeping a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SessionOver {
    /// The certificate is not accepted any more.
    Rejoin,
    Park {
        why: String,
        /// Whether the certificate was turned down, or is what cannot be used; if not, it is as good as before once the
        /// reason is gone.
        refused: bool,
    },
    /// The server no longer counts on this machine, and somebody brought it a new nonce or bundle.
    Helped,
    /// A stop was asked for, and the server has been told.
    Left,
}

/// How a stream, or one connection, ended.
pub(crate) enum Ended {
    Lost(CallError),
    /// The server ended the connection over the certificate that we showed it: it trusts another CA than its issuer.
    NotAccepted(CallError),
    Refused(Refusal),
    /// The server ended the stream without a complaint.
    Clean,
    /// The server speaks in an epoch that is over.
    Deposed,
    /// There is a connection with a newer certificate. The old one stands until the streams are on the new one.
    Moved(Link, Client),
    Left,
    /// A stop was asked for, and nobody on this connection has heard our farewell.
    Unheard,
}

impl From<Status> for Ended {
    fn from(status: Status) -> Self {
        match CallError::from(status) {
            CallError::Refused(refusal) => Self::Refused(refusal),
            lost => Self::Lost(lost),
        }
    }
}

pub(crate) async fn serve(ctx: &Context, reports: &mut Reports) -> SessionOver {
    match serve_until_stopped(ctx, reports).await {
        Ok(over) => over,
        Err(Stopped) => {
            farewell(ctx, reports).await;
            SessionOver::Left
        }
    }
}

async fn serve_until_stopped(ctx: &Context, reports: &mut Reports) -> Result<SessionOver, Stopped> {
    let clock = &ctx.parts.clock;
    let mut reconnect = Reconnect::new(clock.monotonic());
    let mut schedule = Schedule::new();
    let mut moved = None;
    let mut help = None;
    loop {
        let (link, old) = match moved.take() {
            Some((link, old)) => (link, Some(old)),
            None => {
                if !ctx.control.is(&State::Dismissed) {
                    ctx.control.set(State::Connecting);
                }
                // Read anew for every connection: a bundle may have been put there by hand meanwhile.
                let tls = match tls_of(ctx) {
                    Ok(tls) => tls,
                    // A disk may be mended; a machine must not need a restart for it.
                    Err(Unusable::ForNow(why)) => {
                        tracing::warn!(why, "cannot connect yet");
                        if pause(ctx, &mut help, about(DISK_PAUSE, ctx.entropy())).await? {
                            return Ok(SessionOver::Helped);
                        }
                        continue;
                    }
                    Err(Unusable::Bundle(why)) => return Ok(SessionOver::Park { why, refused: false }),
                    Err(Unusable::Gone(why)) => return Ok(SessionOver::Park { why, refused: true }),
                };
                match ctx.unless_stopped(open_unless_urgent(ctx, &tls)).await? {
                    Ok(link) => (link, None),
                    Err(NotOpened { remark }) => {
                        if remark.is_some() {
                            ctx.board.set_remark(remark);
                        }
                        // Nobody may be there to refuse it; but whoever is there will.
                        if is_run_out(ctx) {
                            tracing::warn!("certificate has run out while no server was reached");
                            return Ok(SessionOver::Rejoin);
                        }
                        let wait = reconnect.failed(None, clock.monotonic(), ctx.entropy());
                        if pause(ctx, &mut help, wait).await? {
                            return Ok(SessionOver::Helped);
                        }
                        continue;
                    }
                }
            }
        };
        let opened = clock.monotonic();
        let ended = converse(ctx, link, old, reports, &mut schedule).await;
        if !ctx.control.is(&State::Dismissed) {
            help = None;
        }
        let now = clock.monotonic();
        let served = now.since(opened);
        if SETTLED_AFTER <= served {
            reconnect.served(served, now);
        }
        let ended = match ended {
            Ended::Moved(link, old) => {
                moved = Some((link, old));
                continue;
            }
            Ended::Unheard => return Err(Stopped),
            ended => ended,
        };
        match after(ctx, ended, &mut reconnect, now) {
            Err(over) => return Ok(over),
            Ok(wait) if pause(ctx, &mut help, wait).await? => return Ok(SessionOver::Helped),
            Ok(_) => {}
        }
    }
}

/// Waits before the next connection. A dismissed agent waits long, for whatever reason it does, and takes help
/// meanwhile; the answer is whether some came.
async fn pause<'a>(ctx: &'a Context, help: &mut Option<Help<'a>>, wait: Duration) -> Result<bool, Stopped> {
    if ctx.control.is(&State::Dismissed) {
        let wait = wait.max(about(LONG_PAUSE, ctx.entropy()));
        return help.get_or_insert_with(|| Help::new(ctx)).came_within(wait).await;
    }
    // Before the pause, which may be long: there is no session any more.
    ctx.control.set(State::Connecting);
    ctx.pause_unless_urgent(wait).await.map(|()| false)
}

/// What to do once a connection has ended: wait that long, or stop trying.
fn after(ctx: &Context, ended: Ended, reconnect: &mut Reconnect, now: Mono) -> Result<Duration, SessionOver> {
    let refusal = match ended {
        Ended::Left | Ended::Unheard => return Err(SessionOver::Left),
        Ended::Deposed => {
            tracing::warn!("server speaks in an epoch that is over");
            // If epochs went back for good, nobody else is there to be found.
            return Ok(reconnect.failed(None, now, ctx.entropy()));
        }
        Ended::Moved(..) => return Ok(Duration::ZERO),
        Ended::Clean => {
            tracing::info!("server ended the session");
            return Ok(reconnect.handed_over(None, ctx.entropy()));
        }
        Ended::Lost(error) => {
            tracing::info!(error = %Chain(&error), "connection lost");
            return Ok(reconnect.failed(None, now, ctx.entropy()));
        }
        Ended::NotAccepted(error) => {
            tracing::warn!(error = %Chain(&error), "certificate not accepted");
            return Err(SessionOver::Rejoin);
        }
        Ended::Refused(refusal) => refusal,
    };
    match refusal.on_session() {
        Verdict::Rejoin => {
            tracing::warn!(error = %refusal, "certificate not accepted");
            Err(SessionOver::Rejoin)
        }
        Verdict::Park => {
            Err(SessionOver::Park { why: format!("{}: {}", refusal.reason, refusal.message), refused: true })
        }
        Verdict::Dismiss => {
            if !ctx.control.is(&State::Dismissed) {
                tracing::warn!(error = %refusal, next = HELP, "the server no longer counts on this machine");
            }
            ctx.control.set(State::Dismissed);
            // How long such a pause is does not depend on why it is made.
            Ok(Duration::ZERO)
        }
        Verdict::Shared => {
            tracing::error!(detail = "identity-shared", "another process uses this machine's identity");
            ctx.board.set_remark(Some("identity-shared"));
            Ok(about(LONG_PAUSE, ctx.entropy()))
        }
        Verdict::HandOver => {
            tracing::info!(reason = refusal.reason, "server hands over");
            Ok(reconnect.handed_over(refusal.retry, ctx.entropy()))
        }
        Verdict::Reconnect | Verdict::Retry => {
            tracing::info!(error = %refusal, "session refused for now");
            Ok(reconnect.failed(refusal.retry, now, ctx.entropy()))
        }
    }
}

/// Why there is nothing to connect with.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unusable {
    /// It is there, and cannot be read at the moment.
    #[error("{0}")]
    ForNow(String),
    /// The CA bundle is at fault; nobody has said anything against the certificate.
    #[error("{0}")]
    Bundle(String),
    /// The key or the certificate is at fault.
    #[error("{0}")]
    Gone(String),
}

impl From<DirError> for Unusable {
    fn from(error: DirError) -> Self {
        let text = Chain(&error).to_string();
        match error {
            error if error.may_pass() => Self::ForNow(text),
            DirError::Key { .. } => Self::Gone(text),
            // Of the files that are read, only the bundle has to be there.
            DirError::Ca { .. } | DirError::Read { .. } | DirError::Write { .. } => Self::Bundle(text),
        }
    }
}

fn is_clock_doubtful(ctx: &Context, own: &Peer) -> bool {
    ctx.now().plus(CLOCK_DOUBT) < own.not_before
}

pub(crate) fn tls_of(ctx: &Context) -> Result<Arc<ClientConfig>, Unusable> {
    let gone = |what: &str| Unusable::Gone(what.to_owned());
    let bundle = ctx.dir.ca()?;
    let key = ctx.dir.key()?.ok_or_else(|| gone("identity.key is gone"))?;
    let own = own_certificate(ctx, &key)?;
    let (chain, peer) = own.ok_or_else(|| gone("identity.crt is gone or not this machine's"))?;
    if is_clock_doubtful(ctx, &peer) {
        ctx.board.set_remark(Some(CLOCK));
    }
    client_config(&bundle, Some((&chain, &key)), ctx.parts.clock.clone()).map_err(|error| match error {
        // What follows the first certificate has not been looked at before.
        TlsError::Chain | TlsError::Mismatch => gone(&format!("identity.crt: {error}")),
        TlsError::Rejected(_) => Unusable::Bundle(Chain(&error).to_string()),
    })
}

/// Whether every server must take the certificate on disk for one that is over. One that cannot be read is not judged.
fn is_run_out(ctx: &Context) -> bool {
    let Ok(Some(key)) = ctx.dir.key() else { return false };
    matches!(own_certificate(ctx, &key), Ok(Some((_, peer))) if peer.not_after.plus(LEEWAY) < ctx.now())
}

/// No address answered.
pub(crate) struct NotOpened {
    /// What is worth telling of it beside the log.
    remark: Option<&'static str>,
}

/// As [`open`]. A notice that waits, or comes meanwhile, is worth one attempt in haste first: a round in which every
/// address gets its time may be longer than the machine has.
async fn open_unless_urgent(ctx: &Context, tls: &Arc<ClientConfig>) -> Result<Link, NotOpened> {
    let round = async {
        tokio::select! {
            biased;
            () = ctx.board.urgent() => None,
            opened = open(ctx, tls) => Some(opened),
        }
    };
    if !ctx.board.take_haste()
        && let Some(opened) = round.await
    {
        return opened;
    }
    ctx.board.take_haste();
    match open_in_haste(ctx, tls).await {
        Some(link) => {
            ctx.is_news("");
            Ok(link)
        }
        None => open(ctx, tls).await,
    }
}

/// Dials the addresses in order; the first that answers is it. All of them failing is one step of the backoff.
pub(crate) async fn open(ctx: &Context, tls: &Arc<ClientConfig>) -> Result<Link, NotOpened> {
    let mut failures = Vec::new();
    let mut remark = None;
    for address in &ctx.settings.agent {
        match dial(&*ctx.parts.net, tls, address).await {
            Ok(link) => {
                tracing::debug!(%address, "connected");
                ctx.is_news("");
                return Ok(link);
            }
            Err(error) => {
                tracing::debug!(%address, error = %Chain(&error), "not connected");
                match &error {
                    DialError::Untrusted { why: Distrust::NotYetValid, .. } => remark = Some(CLOCK),
                    DialError::Untrusted { .. } => remark = Some(UNTRUSTED),
                    DialError::Connect { .. } | DialError::Handshake { .. } | DialError::Http { .. } => {}
                }
                failures.push(Chain(&error).to_string());
            }
        }
    }
    let why = failures.join("; ");
    if ctx.is_news(&why) {
        tracing::warn!(error = why, "no server reached, trying on");
    }
    Err(NotOpened { remark })
}

pub(crate) type Client = AgentServiceClient<tonic::transport::Channel>;

/// Everything that happens on one connection: three streams, each with its own supervision, and the renewal of the
/// certificate. Whichever first finds the connection unusable ends them all.
async fn converse(
    ctx: &Context,
    link: Link,
    old: Option<Client>,
    reports: &mut Reports,
    schedule: &mut Schedule,
) -> Ended {
    ctx.find(link.local);
    let client = AgentServiceClient::new(link.channel);
    let open = Streams::new(ctx);
    let ended = tokio::select! {
        biased;
        ended = supervise_reports(ctx, client.clone(), reports, &open) => ended,
        ended = supervise(ctx, Stream::Keys, &client, &open) => ended,
        ended = supervise(ctx, Stream::Files, &client, &open) => ended,
        renewed = renew(ctx, &client, schedule) => match renewed {
            Renewed::Moved(link) => Ended::Moved(link, client.clone()),
            Renewed::Ended(ended) => ended,
        },
        never = async { tokio::join!(keep(old), reconsider(ctx)).0 } => match never {},
    };
    match ended {
        Ended::Lost(error) if link.certificate.is_refused() => Ended::NotAccepted(error),
        ended => ended,
    }
}

/// Holds the connection before this one until the streams are here, so that nobody sees this machine without one.
async fn keep(old: Option<Client>) -> Infallible {
    if let Some(old) = old {
        sleep(SETTLED_AFTER).await;
        drop(old);
    }
    std::future::pending().await
}

/// Takes back what was remarked of earlier connections, once this one has stood for long enough to prove it wrong.
async fn reconsider(ctx: &Context) -> Infallible {
    sleep(REMARK_STANDS).await;
    let own = ctx.dir.key().ok().flatten().and_then(|key| own_certificate(ctx, &key).ok().flatten());
    let doubtful = own.is_some_and(|(_, peer)| is_clock_doubtful(ctx, &peer));
    ctx.board.set_remark(doubtful.then_some(CLOCK));
    std::future::pending().await
}

/// The streams on which the server speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Keys,
    Files,
}

impl Stream {
    fn as_str(self) -> &'static str {
        match self {
            Self::Keys => "key requests",
            Self::Files => "files",
        }
    }
}

/// Which streams of a connection have been opened; with these two and the reports the agent serves.
pub(crate) struct Streams<'a> {
    ctx: &'a Context,
    open: AtomicU8,
}

impl<'a> Streams<'a> {
    fn new(ctx: &'a Context) -> Self {
        Self { ctx, open: AtomicU8::new(0) }
    }

    const REPORTS: u8 = 0b100;

    pub(crate) fn opened(&self, stream: Stream) {
        self.mark(match stream {
            Stream::Keys => 0b001,
            Stream::Files => 0b010,
        });
    }

    fn mark(&self, bit: u8) {
        if self.open.fetch_or(bit, Ordering::Relaxed) | bit == 0b111 {
            self.ctx.control.set(State::Serving);
            self.ctx.board.drop_remark(UNTRUSTED);
        }
    }
}

/// The waits before a stream is opened again on the same connection: none the first time, then more and more.
struct Reopening {
    backoff: Backoff,
    at_once: bool,
    opened: Mono,
}

impl Reopening {
    fn new(ctx: &Context) -> Self {
        let backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
        Self { backoff, at_once: true, opened: ctx.parts.clock.monotonic() }
    }

    fn opens(&mut self, ctx: &Context) {
        self.opened = ctx.parts.clock.monotonic();
    }

    /// Whether it is opened again at once.
    fn is_first(&mut self, ctx: &Context) -> bool {
        if Duration::from_secs(30) <= ctx.parts.clock.monotonic().since(self.opened) {
            self.at_once = true;
            self.backoff.reset();
        }
        self.at_once
    }

    fn wait(&mut self, ctx: &Context, told: Option<Duration>) -> Duration {
        self.is_first(ctx);
        let at_once = std::mem::take(&mut self.at_once);
        match told {
            Some(bound) => jitter(ctx.entropy(), bound),
            None if at_once => Duration::ZERO,
            None => self.backoff.next(ctx.entropy()),
        }
    }
}

/// Keeps a stream from the server open for as long as the connection is worth keeping.
async fn supervise(ctx: &Context, stream: Stream, client: &Client, open: &Streams<'_>) -> Ended {
    let mut reopening = Reopening::new(ctx);
    loop {
        reopening.opens(ctx);
        let ended = match stream {
            Stream::Files => files::stream(ctx, client.clone(), open).await,
            Stream::Keys => keys::stream(ctx, client.clone(), open).await,
        };
        let wait = match ended {
            Ended::Clean => reopening.wait(ctx, None),
            Ended::Refused(refusal) if refusal.code == Code::Unimplemented => {
                // A server that does not know it will not learn it soon, and is served without it.
                open.opened(stream);
                LONG_PAUSE
            }
            Ended::Refused(refusal) if refusal.on_session() == Verdict::Retry => {
                tracing::info!(stream = stream.as_str(), error = %refusal, "stream ended");
                reopening.wait(ctx, refusal.retry)
            }
            // A stream may be reset alone; and if the connection is gone, it tells by the next one.
            Ended::Lost(error) if reopening.is_first(ctx) => {
                tracing::info!(stream = stream.as_str(), error = %Chain(&error), "stream broken off");
                reopening.wait(ctx, None)
            }
            ended => return ended,
        };
        sleep(wait).await;
    }
}

/// Keeps the report stream open for as long as the connection is worth keeping.
async fn supervise_reports(ctx: &Context, client: Client, reports: &mut Reports, open: &Streams<'_>) -> Ended {
    let mut reopening = Reopening::new(ctx);
    loop {
        reopening.opens(ctx);
        let ended = report(ctx, client.clone(), reports, open).await;
        let Ended::Refused(refusal) = ended else { return ended };
        if refusal.on_session() != Verdict::Retry {
            return Ended::Refused(refusal);
        }
        tracing::info!(stream = "reports", error = %refusal, "stream ended");
        if ctx.pause_unless_urgent(reopening.wait(ctx, refusal.retry)).await.is_err() {
            // The connection is still good: the farewell gets a stream of its own on it.
            set_stop_notice(ctx).await;
            let first = reports.make(ctx, ReportKind::Notice);
            return if say_goodbye(client, first).await { Ended::Left } else { Ended::Unheard };
        }
    }
}

/// One report stream, from its first report, which goes out at once, to its end.
async fn report(ctx: &Context, mut client: Client, reports: &mut Reports, open: &Streams<'_>) -> Ended {
    let (sender, receiver) = mpsc::channel(REPORT_SLOTS);
    // Cannot fail: the channel is new and empty.
    let _ = sender.try_send(reports.make(ctx, ReportKind::First));
    let mut call = pin!(client.report_health(ReceiverStream::new(receiver)));
    let opened = Instant::now();
    let mut next = reports.pause(ctx.entropy()).map(|pause| opened + pause);
    let mut settled = false;
    let mut due = None;
    loop {
        tokio::select! {
            biased;
            () = ctx.control.stopped() => break,
            // Made when there is room for it, so that it says the newest. Periodic reports leave room.
            Ok(room) = sender.reserve(), if due.is_some() => {
                room.send(reports.make(ctx, due.take().unwrap_or(ReportKind::Change)));
            }
            kind = ctx.board.due(), if due.is_none() => due = Some(kind),
            answer = &mut call => return answer.map_or_else(Ended::from, |_| Ended::Clean),
            () = sleep_until(opened + SETTLED_AFTER), if !settled => {
                settled = true;
                open.mark(Streams::REPORTS);
            }
            () = sleep_until(next.unwrap_or(opened)), if next.is_some() => {
                // A server that does not read gets no queue of old reports: the next one says all that this one would.
                if sender.capacity() == sender.max_capacity() {
                    let _ = sender.try_send(reports.make(ctx, ReportKind::Periodic));
                }
                next = reports.pause(ctx.entropy()).map(|pause| Instant::now() + pause);
            }
        }
    }
    set_stop_notice(ctx).await;
    let notice = reports.make(ctx, ReportKind::Notice);
    // Half-closed once it is said: the server answers that it heard.
    let said = async move { sender.send(notice).await.is_ok() };
    match timeout(FAREWELL_ANSWER, async { tokio::join!(said, call) }).await {
        Ok((true, Ok(_))) => Ended::Left,
        _ => Ended::Unheard,
    }
}

/// Says that we go, once, and until when there is time to be heard.
async fn set_stop_notice(ctx: &Context) -> Instant {
    if let Some(until) = ctx.leave_by.get() {
        ctx.control.set(State::Leaving);
        return *until;
    }
    let (detected_at, until) = (ctx.now(), Instant::now() + FAREWELL_LIMIT);
    let action = stop_action(ctx.settings.leave_on_stop).await;
    tracing::info!(action = action.as_str(), "stop asked for");
    ctx.control.set(State::Leaving);
    ctx.board.set_notice(Notice { action, deadline: None, detected_at, id: hex(ctx.entropy(), 8) });
    *ctx.leave_by.get_or_init(|| until)
}

/// Tells a server we are not connected to, or no longer: one attempt in what is left of the time, then the process ends
/// in any case.
async fn farewell(ctx: &Context, reports: &mut Reports) {
    let until = set_stop_notice(ctx).await;
    let told = async {
        let Ok(tls) = tls_of(ctx) else { return false };
        let Some(link) = open_in_haste(ctx, &tls).await else { return false };
        ctx.find(link.local);
        let notice = reports.make(ctx, ReportKind::Notice);
        say_goodbye(AgentServiceClient::new(link.channel), notice).await
    };
    let told = timeout_at(until, told).await.unwrap_or(false);
    tracing::info!(told, "left without a session");
}

/// As [`open`], in the time that a farewell or a notice has: each address gets its share of what is left, so that one
/// that swallows everything does not take the time of the others.
async fn open_in_haste(ctx: &Context, tls: &Arc<ClientConfig>) -> Option<Link> {
    let until = Instant::now() + HASTY_DIAL;
    let until = ctx.leave_by.get().map_or(until, |leave_by| until.min(*leave_by));
    let mut n_left = u32::try_from(ctx.settings.agent.len()).unwrap_or(u32::MAX);
    for address in &ctx.settings.agent {
        let share = until.saturating_duration_since(Instant::now()) / n_left;
        if let Ok(Ok(link)) = timeout(share, dial(&*ctx.parts.net, tls, address)).await {
            return Some(link);
        }
        n_left -= 1;
    }
    None
}

/// One report on a stream of its own, half-closed at once.
async fn say_goodbye(mut client: Client, notice: HealthReportRequest) -> bool {
    let call = client.report_health(tokio_stream::once(notice));
    matches!(timeout(FAREWELL_ANSWER, call).await, Ok(Ok(_)))
}
