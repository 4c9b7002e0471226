//! A new certificate while the old one is still good: asked for on the open session, written, and a second connection
//! opened with it before the first is given up. At every moment the disk holds one certificate that can be used.

use std::time::Duration;

use nstance_core::time::{Mono, Timestamp};
use nstance_identity::{
    issue::BACKDATING,
    keys::KeyPair,
    peer::Peer,
    renew::{renew_after, renew_at},
};
use nstance_proto::v1::{RenewCertificateRequest, RenewCertificateResponse};
use nstance_rt::{backoff::Backoff, chain::Chain, entropy::jitter};
use tokio::time::{sleep, timeout};
use tonic::Request;

use crate::{
    context::Context,
    enrol::{Answered, AttemptError, accept, from_wire, own_certificate},
    link::Link,
    refusal::{CallError, Verdict},
    session::{Client, Ended, open, tls_of},
};

const CALL_LIMIT: Duration = Duration::from_secs(10);

/// Between two tries that failed.
const RETRY_BASE: Duration = Duration::from_secs(30);
const RETRY_CAP: Duration = Duration::from_secs(600);

/// The wall clock may be set while we sleep, so the time is looked at anew now and then.
const LOOK: Duration = Duration::from_secs(60);

/// What ends a session's wait for its renewal.
pub(crate) enum Renewed {
    /// A connection with the new certificate.
    Moved(Link),
    /// A word that concerns the whole session.
    Ended(Ended),
}

/// When the certificate on disk is to be renewed, told or computed. Settled once per certificate: the share of chance
/// in it must not be drawn again with every connection. So are the waits between tries that failed: a server that is
/// slow for a whole fleet must not be asked at once by whoever has lost his connection to it.
#[derive(Debug)]
pub(crate) struct Schedule {
    serial: String,
    due: Option<Due>,
    backoff: Backoff,
    /// When the last try was made, and how long the next one waits from then on.
    tried: Option<(Mono, Duration)>,
}

impl Schedule {
    pub(crate) fn new() -> Self {
        let backoff = Backoff::new(RETRY_BASE, RETRY_CAP);
        Self { serial: String::new(), due: None, backoff, tried: None }
    }

    /// How long until it is time; zero if it is.
    fn wait(&mut self, ctx: &Context, peer: &Peer) -> Duration {
        if self.serial != peer.serial {
            *self = Self { serial: peer.serial.clone(), ..Self::new() };
        }
        let now = ctx.parts.clock.monotonic();
        let again = self.tried.map(|(at, pause)| pause.saturating_sub(now.since(at)));
        self.until_due(ctx, peer).max(again.unwrap_or_default())
    }

    fn until_due(&mut self, ctx: &Context, peer: &Peer) -> Duration {
        let due = self.due.get_or_insert_with(|| {
            let received = ctx.received(&peer.serial);
            let told = received.as_ref().and_then(|it| it.renew_after);
            let at = renew_at(told, peer.not_before, peer.not_after, ctx.entropy());
            let issued = peer.not_before.plus(BACKDATING);
            let wanted = told.unwrap_or_else(|| renew_after(peer.not_before, peer.not_after)).since(issued);
            let (least, most) = (wanted / 2, at.since(issued).max(wanted / 2));
            Due { at, received: received.map(|it| Came { at: it.at, least, most }) }
        });
        due.wait(ctx.now(), ctx.parts.clock.monotonic())
    }

    /// Noted before it is known how the try ends: it may end with the connection, and nobody is left to note it then.
    fn tries(&mut self, ctx: &Context) {
        self.tried = Some((ctx.parts.clock.monotonic(), self.backoff.next(ctx.entropy())));
    }

    /// The wait counts from the end of a try, and a bound that the server told replaces ours.
    fn failed(&mut self, ctx: &Context, told: Option<Duration>) {
        if let Some((at, pause)) = &mut self.tried {
            *at = ctx.parts.clock.monotonic();
            if let Some(bound) = told {
                // It replaces the bound, as everywhere, but haste is never needed here.
                *pause = jitter(ctx.entropy(), bound.max(RETRY_BASE));
            }
        }
    }
}

/// When a certificate is due, by two clocks. The wall clock may be wrong: if it is far ahead, every certificate is due
/// as it comes, and if it is far behind, none before its end. The monotonic clock knows how long ago a certificate came
/// to this process, and thereby about its age.
#[derive(Debug)]
struct Due {
    at: Timestamp,
    /// Unknown of one that an earlier process got.
    received: Option<Came>,
}

/// When a certificate came, and for how long it is kept from then on, whatever the wall clock says: half of the time
/// that its issuer wants, and all of it. Half, because it may have been made some time before it came; so a wrong clock
/// costs the server twice the renewals at most.
#[derive(Debug, Clone, Copy)]
struct Came {
    at: Mono,
    least: Duration,
    most: Duration,
}

impl Due {
    fn wait(&self, now: Timestamp, mono: Mono) -> Duration {
        let wait = self.at.since(now);
        let Some(came) = self.received else { return wait };
        let had = mono.since(came.at);
        wait.clamp(came.least.saturating_sub(had), came.most.saturating_sub(had))
    }
}

/// Waits for the time, renews, and opens the next connection. Never gives up: a certificate that runs out meanwhile is
/// the server's to refuse, and then it is time to rejoin.
pub(crate) async fn renew(ctx: &Context, client: &Client, schedule: &mut Schedule) -> Renewed {
    loop {
        let wait = match current(ctx) {
            None => LOOK,
            Some((key, peer)) => match schedule.wait(ctx, &peer) {
                Duration::ZERO => {
                    schedule.tries(ctx);
                    match once(ctx, client, &key).await {
                        Ok(link) => return Renewed::Moved(link),
                        Err(Failed::Ended(ended)) => return Renewed::Ended(*ended),
                        Err(Failed::Later(told)) => schedule.failed(ctx, told),
                    }
                    continue;
                }
                wait => wait.min(LOOK),
            },
        };
        sleep(wait).await;
    }
}

fn current(ctx: &Context) -> Option<(KeyPair, Peer)> {
    let key = ctx.dir.key().ok()??;
    let (_, peer) = own_certificate(ctx, &key).ok()??;
    Some((key, peer))
}

enum Failed {
    Ended(Box<Ended>),
    Later(Option<Duration>),
}

async fn once(ctx: &Context, client: &Client, key: &KeyPair) -> Result<Link, Failed> {
    let later = |error: &(dyn std::error::Error + 'static), told| {
        tracing::warn!(error = %Chain(error), "certificate not renewed yet");
        Failed::Later(told)
    };
    let answer = call(client.clone(), key).await.map_err(|error| match error {
        CallError::Refused(refusal) if refusal.on_session() != Verdict::Retry => {
            Failed::Ended(Box::new(Ended::Refused(refusal)))
        }
        CallError::Refused(refusal) => later(&refusal, refusal.retry),
        // Whether the connection is gone with it, the streams will tell.
        error => later(&error, None),
    })?;
    let taken = take(ctx, key, &answer);
    taken.map_err(|error| later(&error, None))?;
    // From here on the new certificate is the one on disk; the old connection lives until the new one stands.
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(15));
    loop {
        match tls_of(ctx) {
            Ok(tls) => {
                if let Ok(link) = open(ctx, &tls).await {
                    tracing::info!("moving to a connection with the new certificate");
                    return Ok(link);
                }
            }
            Err(why) => tracing::warn!(%why, "new certificate cannot be used"),
        }
        sleep(backoff.next(ctx.entropy())).await;
    }
}

async fn call(mut client: Client, key: &KeyPair) -> Result<RenewCertificateResponse, CallError> {
    let mut request = Request::new(RenewCertificateRequest { public_key_pem: key.public_key_pem().into_bytes() });
    request.set_timeout(CALL_LIMIT);
    let answer = timeout(CALL_LIMIT, client.renew_certificate(request)).await.map_err(|_| CallError::Late)?;
    Ok(answer?.into_inner())
}

fn take(ctx: &Context, key: &KeyPair, answer: &RenewCertificateResponse) -> Result<(), AttemptError> {
    let present = ctx.dir.ca()?;
    let renew_after = answer.renew_after.as_ref().map(from_wire);
    let answered = Answered {
        from: "the session's server".to_owned(),
        certificate: &answer.client_certificate_pem,
        bundle: &answer.ca_bundle_pem,
        cluster: "",
        renew_after,
    };
    accept(ctx, key, &present, &answered)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);
    const NOW: Timestamp = Timestamp::from_millis(1_769_860_800_000);

    /// How long after it came a certificate is renewed that is planned for 16 hours, by a clock that is off.
    fn renewed_after(received: Option<Came>, clock: impl Fn(Timestamp) -> Timestamp) -> Duration {
        let due = Due { at: NOW.plus(HOUR * 16), received };
        let at = |had: Duration| due.wait(clock(NOW.plus(had)), Mono::from_start(HOUR + had));
        let wait = at(Duration::ZERO);
        assert_eq!(at(wait), Duration::ZERO, "what is waited for is the time");
        wait
    }

    #[test]
    fn wrong_clock_renews_twice_as_often_at_most_and_never_too_late() {
        let came = Some(Came { at: Mono::from_start(HOUR), least: HOUR * 8, most: HOUR * 16 });
        assert_eq!(renewed_after(came, |now| now), HOUR * 16);
        assert_eq!(renewed_after(came, |now| now.plus(HOUR * 4)), HOUR * 12);
        assert_eq!(renewed_after(came, |now| now.plus(HOUR * 9)), HOUR * 8);
        assert_eq!(renewed_after(came, |now| now.plus(HOUR * 9000)), HOUR * 8);
        assert_eq!(renewed_after(came, |now| now.minus(HOUR * 9000)), HOUR * 16);
    }

    #[test]
    fn certificate_of_an_earlier_process_is_renewed_by_the_wall_clock() {
        assert_eq!(renewed_after(None, |now| now.plus(HOUR * 12)), HOUR * 4);
        assert_eq!(renewed_after(None, |now| now.plus(HOUR * 20)), Duration::ZERO);
    }
}
