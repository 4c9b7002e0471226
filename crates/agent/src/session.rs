//! The session: one connection to the shard's leader, kept for as long as the process lives.
//!
//! Streams are supervised one by one. A stream that ends is opened again on the same connection, at once the first
//! time, then after a pause; only a lost transport, or a word that concerns the whole server, ends the connection. Then
//! the rules of [`Reconnect`] decide when to come back. No server behaviour ends the process.

use std::{pin::pin, sync::Arc, time::Duration};

use nstance_core::time::Mono;
use nstance_identity::tls::client_config;
use nstance_proto::v1::{HealthReportRequest, ReportKind, agent_service_client::AgentServiceClient};
use nstance_rt::{
    backoff::Backoff,
    chain::Chain,
    entropy::{hex, jitter},
};
use rustls::ClientConfig;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until, timeout},
};
use tokio_stream::wrappers::ReceiverStream;

use crate::{
    context::{Context, State},
    enrol::own_certificate,
    health::Reports,
    link::{Link, dial},
    machine::Addresses,
    notice::{Notice, stop_action},
    reconnect::{Reconnect, about},
    refusal::{CallError, Refusal, Verdict},
};

/// A stream nobody has objected to for this long is taken as accepted: its answer comes only at its end.
const SETTLED_AFTER: Duration = Duration::from_secs(1);

/// Deleted, or spoken for by somebody else: look again now and then.
const LONG_PAUSE: Duration = Duration::from_secs(60);

/// The whole farewell takes two seconds at most: half a second to decide and reach the server where there is a stream.
const FAREWELL_LIMIT: Duration = Duration::from_millis(1900);
const FAREWELL_DIAL: Duration = Duration::from_millis(1500);
const FAREWELL_ANSWER: Duration = Duration::from_secs(1);

/// Reports under way to the transport: one, and room for a notice that must not wait behind it.
const REPORT_SLOTS: usize = 2;

/// Why the agent stopped keeping a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SessionOver {
    /// The certificate is not accepted any more.
    Rejoin,
    Park(String),
    /// A stop was asked for, and the server has been told.
    Left,
}

/// How one connection ended.
enum Ended {
    Lost(CallError),
    Refused(Refusal),
    /// The server ended the stream without a complaint.
    Clean,
    Left,
}

pub(crate) async fn serve(ctx: &Context, reports: &mut Reports) -> SessionOver {
    let clock = &ctx.parts.clock;
    let mut reconnect = Reconnect::new(clock.monotonic());
    loop {
        if !ctx.control.is(&State::Dismissed) {
            ctx.control.set(State::Connecting);
        }
        // Read anew for every connection: a bundle may have been put there by hand meanwhile.
        let tls = match tls_of(ctx) {
            Ok(tls) => tls,
            Err(why) => return SessionOver::Park(why),
        };
        let Ok(dialled) = ctx.unless_stopped(open(ctx, &tls)).await else {
            farewell(ctx, &tls, reports).await;
            return SessionOver::Left;
        };
        let wait = match dialled {
            Err(()) => reconnect.failed(None, clock.monotonic(), ctx.entropy()),
            Ok(link) => {
                let opened = clock.monotonic();
                let ended = converse(ctx, link, reports).await;
                let now = clock.monotonic();
                let served = now.since(opened);
                if SETTLED_AFTER <= served {
                    reconnect.served(served, now);
                }
                match after(ctx, ended, &mut reconnect, now) {
                    Ok(wait) => wait,
                    Err(over) => return over,
                }
            }
        };
        if ctx.pause(wait).await.is_err() {
            farewell(ctx, &tls, reports).await;
            return SessionOver::Left;
        }
    }
}

/// What to do once a connection has ended: wait that long, or stop trying.
fn after(ctx: &Context, ended: Ended, reconnect: &mut Reconnect, now: Mono) -> Result<Duration, SessionOver> {
    let refusal = match ended {
        Ended::Left => return Err(SessionOver::Left),
        Ended::Clean => {
            tracing::info!("server ended the session");
            return Ok(reconnect.handed_over(None, ctx.entropy()));
        }
        Ended::Lost(error) => {
            tracing::info!(error = %Chain(&error), "connection lost");
            return Ok(reconnect.failed(None, now, ctx.entropy()));
        }
        Ended::Refused(refusal) => refusal,
    };
    match refusal.on_session() {
        Verdict::Rejoin => {
            tracing::warn!(error = %refusal, "certificate not accepted");
            Err(SessionOver::Rejoin)
        }
        Verdict::Park => Err(SessionOver::Park(format!("{}: {}", refusal.reason, refusal.message))),
        Verdict::Dismiss => {
            if !ctx.control.is(&State::Dismissed) {
                tracing::warn!(error = %refusal, "the server no longer counts on this machine");
            }
            ctx.control.set(State::Dismissed);
            Ok(about(LONG_PAUSE, ctx.entropy()))
        }
        Verdict::Shared => {
            tracing::error!(detail = "identity-shared", "another process uses this machine's identity");
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

fn tls_of(ctx: &Context) -> Result<Arc<ClientConfig>, String> {
    let text = |error: &(dyn std::error::Error + 'static)| Chain(error).to_string();
    let bundle = ctx.dir.ca().map_err(|error| text(&error))?;
    let key = ctx.dir.key().map_err(|error| text(&error))?.ok_or("identity.key is gone")?;
    let (chain, _) = own_certificate(ctx, &key).ok_or("identity.crt is gone or not this machine's")?;
    client_config(&bundle, Some((&chain, &key)), ctx.parts.clock.clone()).map_err(|error| text(&error))
}

/// Dials the addresses in order; the first that answers is it. All of them failing is one step of the backoff.
async fn open(ctx: &Context, tls: &Arc<ClientConfig>) -> Result<Link, ()> {
    for address in &ctx.settings.agent {
        match dial(&*ctx.parts.net, tls, address).await {
            Ok(link) => {
                tracing::debug!(%address, "connected");
                return Ok(link);
            }
            Err(error) => tracing::debug!(%address, error = %Chain(&error), "not connected"),
        }
    }
    Err(())
}

/// Everything that happens on one connection. The streams for key requests and files take their place beside the
/// reports here, each a future with its own supervision; whichever first finds the connection unusable ends them all.
async fn converse(ctx: &Context, link: Link, reports: &mut Reports) -> Ended {
    let addresses = Addresses::detect(&ctx.settings.overrides, link.local.map(|local| local.ip()));
    let client = AgentServiceClient::new(link.channel);
    supervise_reports(ctx, client, reports, &addresses).await
}

type Client = AgentServiceClient<tonic::transport::Channel>;

/// Keeps the report stream open for as long as the connection is worth keeping.
async fn supervise_reports(ctx: &Context, client: Client, reports: &mut Reports, addresses: &Addresses) -> Ended {
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
    let mut again_at_once = true;
    loop {
        let opened = ctx.parts.clock.monotonic();
        let ended = report(ctx, client.clone(), reports, addresses).await;
        let Ended::Refused(refusal) = ended else { return ended };
        if refusal.on_session() != Verdict::Retry {
            return Ended::Refused(refusal);
        }
        tracing::info!(error = %refusal, "report stream ended");
        if Duration::from_secs(30) <= ctx.parts.clock.monotonic().since(opened) {
            again_at_once = true;
            backoff.reset();
        }
        let wait = match refusal.retry {
            Some(bound) => jitter(ctx.entropy(), bound),
            None if again_at_once => Duration::ZERO,
            None => backoff.next(ctx.entropy()),
        };
        again_at_once = false;
        if ctx.pause(wait).await.is_err() {
            // The connection is still good: the farewell gets a stream of its own on it.
            set_stop_notice(ctx, reports).await;
            let first = reports.make(ReportKind::Notice, addresses);
            say_goodbye(client, first).await;
            return Ended::Left;
        }
    }
}

/// One report stream, from its first report, which goes out at once, to its end.
async fn report(ctx: &Context, mut client: Client, reports: &mut Reports, addresses: &Addresses) -> Ended {
    let (sender, receiver) = mpsc::channel(REPORT_SLOTS);
    // Cannot fail: the channel is new and empty.
    let _ = sender.try_send(reports.make(ReportKind::First, addresses));
    let mut call = pin!(client.report_health(ReceiverStream::new(receiver)));
    let opened = Instant::now();
    let mut next = reports.pause(ctx.entropy()).map(|pause| opened + pause);
    let mut settled = false;
    loop {
        tokio::select! {
            biased;
            () = ctx.control.stopped() => {
                set_stop_notice(ctx, reports).await;
                // A slot is always free for this one: periodic reports leave it alone.
                let _ = sender.try_send(reports.make(ReportKind::Notice, addresses));
                drop(sender);
                let _ = timeout(FAREWELL_ANSWER, call).await;
                return Ended::Left;
            }
            answer = &mut call => {
                return match answer.map_err(CallError::from) {
                    Ok(_) => Ended::Clean,
                    Err(CallError::Refused(refusal)) => Ended::Refused(refusal),
                    Err(lost) => Ended::Lost(lost),
                };
            }
            () = sleep_until(opened + SETTLED_AFTER), if !settled => {
                settled = true;
                ctx.control.set(State::Serving);
            }
            () = sleep_until(next.unwrap_or(opened)), if next.is_some() => {
                // A server that does not read gets no queue of old reports: the next one says all that this one would.
                if sender.capacity() == sender.max_capacity() {
                    let _ = sender.try_send(reports.make(ReportKind::Periodic, addresses));
                }
                next = reports.pause(ctx.entropy()).map(|pause| Instant::now() + pause);
            }
        }
    }
}

async fn set_stop_notice(ctx: &Context, reports: &mut Reports) {
    let detected_at = ctx.now();
    let action = stop_action(ctx.settings.leave_on_stop).await;
    tracing::info!(action = action.as_str(), "stop asked for");
    ctx.control.set(State::Leaving);
    reports.set_notice(Notice { action, deadline: None, detected_at, id: hex(ctx.entropy(), 8) });
}

/// Tells a server we are not connected to: one attempt, then the process ends in any case.
async fn farewell(ctx: &Context, tls: &Arc<ClientConfig>, reports: &mut Reports) {
    let told = async {
        set_stop_notice(ctx, reports).await;
        let Ok(Ok(link)) = timeout(FAREWELL_DIAL, open(ctx, tls)).await else { return false };
        let addresses = Addresses::detect(&ctx.settings.overrides, link.local.map(|local| local.ip()));
        let notice = reports.make(ReportKind::Notice, &addresses);
        say_goodbye(AgentServiceClient::new(link.channel), notice).await
    };
    let told = timeout(FAREWELL_LIMIT, told).await.unwrap_or(false);
    tracing::info!(told, "left without a session");
}

/// One report on a stream of its own, half-closed at once.
async fn say_goodbye(mut client: Client, notice: HealthReportRequest) -> bool {
    let call = client.report_health(tokio_stream::once(notice));
    matches!(timeout(FAREWELL_ANSWER, call).await, Ok(Ok(_)))
}
