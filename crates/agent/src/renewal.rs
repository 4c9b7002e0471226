//! A new certificate while the old one is still good: asked for on the open session, written, and a second connection
//! opened with it before the first is given up. At every moment the disk holds one certificate that can be used.

use std::time::Duration;

use nstance_core::time::Timestamp;
use nstance_identity::{keys::KeyPair, peer::Peer, renew::renew_at};
use nstance_proto::v1::{RenewCertificateRequest, RenewCertificateResponse};
use nstance_rt::{backoff::Backoff, chain::Chain};
use tokio::time::{sleep, timeout};
use tonic::{Request, Status};

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
/// in it must not be drawn again with every connection.
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    serial: String,
    at: Option<Timestamp>,
}

impl Schedule {
    fn at(&mut self, ctx: &Context, peer: &Peer) -> Timestamp {
        if self.serial != peer.serial || self.at.is_none() {
            let told = ctx.told_renewal(&peer.serial);
            self.serial.clone_from(&peer.serial);
            self.at = Some(renew_at(told, peer.not_before, peer.not_after, ctx.entropy()));
        }
        self.at.unwrap_or(peer.not_after)
    }
}

/// Waits for the time, renews, and opens the next connection. Never gives up: a certificate that runs out meanwhile is
/// the server's to refuse, and then it is time to rejoin.
pub(crate) async fn renew(ctx: &Context, client: &Client, schedule: &mut Schedule) -> Renewed {
    let mut backoff = Backoff::new(RETRY_BASE, RETRY_CAP);
    loop {
        let wait = match current(ctx) {
            None => LOOK,
            Some((key, peer)) => match schedule.at(ctx, &peer) {
                at if ctx.now() < at => at.since(ctx.now()).min(LOOK),
                _ => match once(ctx, client, &key).await {
                    Ok(link) => return Renewed::Moved(link),
                    Err(Failed::Ended(ended)) => return Renewed::Ended(*ended),
                    Err(Failed::Later(retry)) => retry.unwrap_or_else(|| backoff.next(ctx.entropy())),
                },
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
    let later = |error: &(dyn std::error::Error + 'static)| {
        tracing::warn!(error = %Chain(error), "certificate not renewed yet");
        Failed::Later(None)
    };
    let answer = call(client.clone(), key).await.map_err(|error| match error {
        CallError::Refused(refusal) if refusal.on_session() != Verdict::Retry => {
            Failed::Ended(Box::new(Ended::Refused(refusal)))
        }
        CallError::Refused(refusal) => {
            tracing::warn!(error = %refusal, "certificate not renewed yet");
            Failed::Later(refusal.retry)
        }
        lost @ CallError::Lost(_) => Failed::Ended(Box::new(Ended::Lost(lost))),
    })?;
    let taken = take(ctx, key, &answer);
    taken.map_err(|error| later(&error))?;
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
    let answer = timeout(CALL_LIMIT, client.renew_certificate(request))
        .await
        .unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer in time")));
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
