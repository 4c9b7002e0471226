//! Getting a certificate: with the nonce on the first boot, with the old key after a long sleep.
//!
//! The key pair is made once and written before the first call; every try carries the same public key. So an answer
//! that was lost, or a crash at any point, costs nothing: the server gives the same key a certificate again.

use std::{sync::Arc, time::Duration};

use nstance_core::{
    ids::{ClusterId, Tenant},
    time::Timestamp,
};
use nstance_identity::{
    ca::Bundle,
    keys::KeyPair,
    nonce::{LEEWAY, peek_claims},
    peer::{Peer, PeerName},
    rejoin::RejoinClaim,
    role::Role,
    tls::{TlsError, client_config},
};
use nstance_proto::v1::{
    RegisterClientRequest, RegisterClientResponse, RejoinProof, registration_service_client::RegistrationServiceClient,
};
use nstance_rt::chain::Chain;
use rustls::{
    ClientConfig,
    pki_types::{CertificateDer, pem::PemObject as _},
};
use tokio::time::{sleep, timeout};
use tonic::Request;

use crate::{
    context::{Context, State, Stopped},
    health::AGENT_VERSION,
    identity_dir::{DirError, RejoinCounter},
    link::{DialError, Distrust, dial},
    reconnect::{Reconnect, about},
    refusal::{CallError, Refusal, Verdict},
    session::CLOCK,
    settings::{Address, Settings},
};

const CALL_LIMIT: Duration = Duration::from_secs(10);

/// A server we do not trust today may be a server whose CA bundle has not reached us, or an impostor. Neither is
/// helped by haste.
const UNTRUSTED_PAUSE: Duration = Duration::from_secs(30);

/// A machine that the server has given up looks again now and then: the record may be wrong, and a person may mend it.
const DISMISSED_PAUSE: Duration = Duration::from_secs(60);

/// Before a file that could not be read or written is tried again.
pub(crate) const DISK_PAUSE: Duration = Duration::from_secs(10);

const REJOIN_CAP: Duration = Duration::from_secs(60);

/// How enrolling came out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Enrolment {
    /// A certificate lies in the directory that nobody has refused yet.
    Ready,
    /// There is a key and an old certificate, and no better proof: rejoin.
    Rejoin,
    /// Somebody brought a nonce or a bundle, or asked to look for one: enrol with what is there now.
    Helped,
    /// Nothing will change by asking again.
    Fatal(String),
}

/// One failed attempt.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttemptError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("register with {address}")]
    Call { address: String, source: CallError },
    #[error("the answer of {address} is not a certificate for this machine and key")]
    Answer { address: String },
    #[error(transparent)]
    Dir(#[from] DirError),
    #[error("prepare TLS")]
    Tls(#[from] TlsError),
}

impl AttemptError {
    /// How much it says: what a server told is worth more than what became of a call to it, and that more than a server
    /// that is not to be trusted, or one that is not there.
    fn weight(&self) -> u8 {
        match self {
            Self::Call { source: CallError::Refused(_), .. } => 3,
            Self::Dial(DialError::Untrusted { .. }) => 1,
            Self::Dial(_) => 0,
            Self::Call { .. } | Self::Answer { .. } | Self::Dir(_) | Self::Tls(_) => 2,
        }
    }

    fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::Call { source: CallError::Refused(refusal), .. } => Some(refusal),
            _ => None,
        }
    }
}

/// The certificate that lies in the directory, if it is this machine's and the key's.
pub(crate) fn own_certificate(ctx: &Context, key: &KeyPair) -> Result<Option<(Vec<u8>, Peer)>, DirError> {
    let Some(chain) = ctx.dir.certificate()? else { return Ok(None) };
    Ok(read_certificate(ctx, key, &chain).map(|peer| (chain, peer)))
}

fn read_certificate(ctx: &Context, key: &KeyPair, chain: &[u8]) -> Option<Peer> {
    certificate_of(&ctx.settings, key, chain)
}

/// Whose certificate it is, if it is this machine's and the key's.
pub(crate) fn certificate_of(settings: &Settings, key: &KeyPair, chain: &[u8]) -> Option<Peer> {
    let leaf = CertificateDer::from_pem_slice(chain).ok()?;
    let peer = Peer::from_der(&leaf).ok()?;
    let ours = matches!(peer.name, PeerName::Agent { instance, .. } if instance == settings.instance);
    (ours && peer.public_key == key.public_key()).then_some(peer)
}

/// Brings a certificate into the directory. `refused` tells that the one there was turned down, however young it is;
/// `help` was made before, so that what is brought from now on counts as brought.
pub(crate) async fn enrol(ctx: &Context, help: &Help<'_>, refused: bool) -> Result<Enrolment, Stopped> {
    loop {
        match enrol_once(ctx, help, refused).await {
            Ok(enrolment) => return Ok(enrolment),
            Err(Hindrance::Stopped) => return Err(Stopped),
            Err(Hindrance::Dir(error @ DirError::Key { .. })) => {
                return Ok(Enrolment::Fatal(Chain(&error).to_string()));
            }
            Err(Hindrance::Dir(error)) => {
                // A full or read-only disk may be mended; a machine must not need a restart for it.
                tracing::warn!(error = %Chain(&error), "cannot enrol yet");
                ctx.pause_unless_urgent(about(DISK_PAUSE, ctx.entropy())).await?;
            }
        }
    }
}

/// What keeps enrolling from coming to an end of its own.
enum Hindrance {
    Stopped,
    Dir(DirError),
}

impl From<Stopped> for Hindrance {
    fn from(_: Stopped) -> Self {
        Self::Stopped
    }
}

impl From<DirError> for Hindrance {
    fn from(error: DirError) -> Self {
        Self::Dir(error)
    }
}

async fn enrol_once(ctx: &Context, help: &Help<'_>, refused: bool) -> Result<Enrolment, Hindrance> {
    let key = match ctx.dir.key()? {
        Some(key) => key,
        None => {
            let key = KeyPair::generate(ctx.entropy());
            ctx.dir.write_key(&key)?;
            key
        }
    };
    let known = own_certificate(ctx, &key)?;
    if let Some((_, peer)) = &known
        && !refused
        && ctx.now() <= peer.not_after
    {
        ctx.dir.remove_nonce()?;
        return Ok(Enrolment::Ready);
    }
    let nonce = ctx.dir.nonce()?;
    let claims = nonce.as_deref().map(peek_claims);
    match (nonce, claims) {
        // Beside an old certificate, a nonce counts only while it is good: it may be left from the first boot.
        (Some(nonce), Some(Ok(claims))) if known.is_none() || ctx.now() <= claims.expires_at => {
            if let Some(hash) = &claims.config_hash
                && ctx.dir.config_hash().is_none()
            {
                ctx.dir.write_config_hash(hash)?;
            }
            ctx.dir.write_cluster(&claims.cluster)?;
            Ok(register(ctx, help, &key, &nonce, claims.expires_at).await?)
        }
        _ if known.is_some() => Ok(Enrolment::Rejoin),
        (Some(_), Some(Err(error))) => Ok(Enrolment::Fatal(format!("nonce.jwt is malformed: {error}"))),
        _ => Ok(Enrolment::Fatal("there is neither a certificate nor nonce.jwt".to_owned())),
    }
}

/// Registers with the nonce, for as long as it is good. A clock that stands past its end before the first try may be
/// wrong: it has no say then, and the server's decides.
async fn register(
    ctx: &Context,
    help: &Help<'_>,
    key: &KeyPair,
    nonce: &str,
    expires_at: Timestamp,
) -> Result<Enrolment, Stopped> {
    let good_until = (ctx.now() <= expires_at).then(|| expires_at.plus(LEEWAY));
    let mut waits = Waits::new(ctx, None);
    loop {
        let request = |request| RegisterClientRequest { registration_nonce_jwt: nonce.to_owned(), ..request };
        match round(ctx, key, &request, Refusal::on_registration).await? {
            Ok(()) => {
                if let Err(error) = ctx.dir.remove_nonce() {
                    // It is used up, and the next start tries again to remove it.
                    tracing::warn!(error = %Chain(&error), "used nonce not removed");
                }
                return Ok(Enrolment::Ready);
            }
            Err(failed) => match failed.verdict {
                Verdict::Park => return Ok(Enrolment::Fatal(failed.text())),
                _ if good_until.is_some_and(|until| until < ctx.now()) => {
                    return Ok(Enrolment::Fatal("registration-expired".to_owned()));
                }
                _ if help.came_within(waits.next(ctx, &failed, "")).await? => return Ok(Enrolment::Helped),
                _ => {}
            },
        }
    }
}

/// Gets a new certificate for the old key. The counter is on disk before it is on the wire.
pub(crate) async fn rejoin(ctx: &Context, help: &Help<'_>) -> Result<Enrolment, Stopped> {
    let (key, tenant, cluster) = loop {
        match old_identity(ctx) {
            Ok(Ok(found)) => break found,
            Ok(Err(gone)) => return Ok(Enrolment::Fatal(gone.to_owned())),
            Err(error) if error.may_pass() => {
                tracing::warn!(error = %Chain(&error), "cannot rejoin yet");
                ctx.pause_unless_urgent(about(DISK_PAUSE, ctx.entropy())).await?;
            }
            Err(error) => return Ok(Enrolment::Fatal(Chain(&error).to_string())),
        }
    };
    let client_id = ctx.settings.instance.to_string();
    let mut waits = Waits::new(ctx, Some(REJOIN_CAP));
    let counter = loop {
        let stored = ctx.dir.rejoin_counter().and_then(|counter| {
            let counter = counter.next();
            ctx.dir.write_rejoin_counter(RejoinCounter::Sent(counter)).map(|()| counter)
        });
        match stored {
            Ok(counter) => break counter,
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "cannot rejoin yet");
                ctx.pause_unless_urgent(about(DISK_PAUSE, ctx.entropy())).await?;
            }
        }
    };
    let claim = RejoinClaim { cluster: &cluster, role: Role::Agent, tenant: &tenant, client_id: &client_id, counter };
    let proof =
        RejoinProof { client_id: client_id.clone(), tenant: tenant.to_string(), counter, signature: claim.sign(&key) };
    loop {
        let request = |request| RegisterClientRequest { rejoin: Some(proof.clone()), ..request };
        match round(ctx, &key, &request, Refusal::on_rejoin).await? {
            Ok(()) => {
                if let Err(error) = ctx.dir.write_rejoin_counter(RejoinCounter::Done(counter)) {
                    // Only a repeated counter, which the server knows how to answer.
                    tracing::warn!(error = %Chain(&error), "rejoin counter not closed");
                }
                // Whoever was dismissed is counted on again.
                ctx.control.set(State::Connecting);
                return Ok(Enrolment::Ready);
            }
            Err(failed) => match failed.verdict {
                Verdict::Park => return Ok(Enrolment::Fatal(failed.text())),
                Verdict::Dismiss => {
                    if !ctx.control.is(&State::Dismissed) {
                        tracing::warn!(
                            error = failed.text(),
                            next = HELP,
                            "the server no longer counts on this machine"
                        );
                    }
                    ctx.control.set(State::Dismissed);
                    if help.came_within(about(DISMISSED_PAUSE, ctx.entropy())).await? {
                        return Ok(Enrolment::Helped);
                    }
                }
                _ => {
                    let mut wait = waits.next(ctx, &failed, HELP);
                    // Only a server that takes us back ends that; one that is not there does not, nor one that is busy.
                    if ctx.control.is(&State::Dismissed) {
                        wait = wait.max(about(DISMISSED_PAUSE, ctx.entropy()));
                    }
                    if help.came_within(wait).await? {
                        return Ok(Enrolment::Helped);
                    }
                }
            },
        }
    }
}

/// What whoever looks after a machine can do that the servers know no more.
pub(crate) const HELP: &str = "if it lasts, put a new nonce.jwt into the identity directory, or replace this machine";

/// What somebody may do for an agent that cannot help itself: bring a nonce or a bundle, or tell it to look again.
pub(crate) struct Help<'a> {
    ctx: &'a Context,
    before: (Option<Vec<u8>>, Option<Vec<u8>>),
}

impl<'a> Help<'a> {
    pub(crate) fn new(ctx: &'a Context) -> Self {
        Self { ctx, before: ctx.dir.help() }
    }

    /// Waits that long, and says whether help came. A word cuts the wait short, and so does a notice: after the wait
    /// there may be no machine left to tell of it.
    pub(crate) async fn came_within(&self, wait: Duration) -> Result<bool, Stopped> {
        self.came_during(self.ctx.urgent_or(wait)).await
    }

    /// As [`Self::came_within`], for whoever has nobody to tell of a notice.
    pub(crate) async fn came_within_quietly(&self, wait: Duration) -> Result<bool, Stopped> {
        self.came_during(sleep(wait)).await
    }

    async fn came_during(&self, wait: impl Future<Output = ()>) -> Result<bool, Stopped> {
        let reloaded = async {
            tokio::select! {
                biased;
                () = self.ctx.control.reloaded() => true,
                () = wait => false,
            }
        };
        let reloaded = self.ctx.unless_stopped(reloaded).await?;
        let helped = reloaded || self.ctx.dir.help() != self.before;
        if helped {
            tracing::info!(reloaded, "trying again");
        }
        Ok(helped)
    }
}

/// What a rejoin is proved with, or what of it is gone.
fn old_identity(ctx: &Context) -> Result<Result<(KeyPair, Tenant, ClusterId), &'static str>, DirError> {
    let Some(key) = ctx.dir.key()? else { return Ok(Err("identity.key is gone; a new nonce is needed")) };
    let tenant = own_certificate(ctx, &key)?.and_then(|(_, peer)| peer.tenant().cloned());
    let cluster = ctx.dir.cluster()?.and_then(|text| text.parse().ok());
    let (Some(tenant), Some(cluster)) = (tenant, cluster) else {
        return Ok(Err("the old certificate or cluster.id is gone; a new nonce is needed"));
    };
    Ok(Ok((key, tenant, cluster)))
}

/// What one round over all addresses came to.
struct Failed {
    verdict: Verdict,
    retry: Option<Duration>,
    /// Of all failures the one that says most.
    error: AttemptError,
}

impl Failed {
    /// Why the server's certificate is not trusted, if that is what keeps us out: no other address led to a server that
    /// is. That another did not answer says nothing, for a follower may not listen at all.
    fn distrust(&self) -> Option<Distrust> {
        match self.error {
            AttemptError::Dial(DialError::Untrusted { why, .. }) => Some(why),
            _ => None,
        }
    }

    fn text(&self) -> String {
        match self.error.refusal() {
            Some(refusal) => format!("{}: {}", refusal.reason, refusal.message),
            None => Chain(&self.error).to_string(),
        }
    }
}

/// Tries every address once, in order. A final word ends the round; anything else goes on to the next address.
async fn round(
    ctx: &Context,
    key: &KeyPair,
    request: &(dyn Fn(RegisterClientRequest) -> RegisterClientRequest + Sync),
    judge: fn(&Refusal) -> Verdict,
) -> Result<Result<(), Failed>, Stopped> {
    let mut failed: Option<Failed> = None;
    for address in &ctx.settings.registration {
        let attempt = async {
            let bundle = ctx.dir.ca()?;
            let tls = client_config(&bundle, None, ctx.parts.clock.clone())?;
            let answer = call(ctx, key, &tls, address, request).await?;
            let renew_after = answer.renew_after.as_ref().map(from_wire);
            let answered = Answered {
                from: address.to_string(),
                certificate: &answer.client_certificate_pem,
                bundle: &answer.ca_bundle_pem,
                cluster: &answer.cluster_id,
                renew_after,
            };
            accept(ctx, key, &bundle, &answered)
        };
        let Err(error) = ctx.unless_stopped(attempt).await? else {
            ctx.board.drop_remark(CLOCK);
            return Ok(Ok(()));
        };
        tracing::debug!(%address, error = %Chain(&error), "registration attempt failed");
        let verdict = error.refusal().map_or(Verdict::Retry, judge);
        let retry = error.refusal().and_then(|refusal| refusal.retry);
        let earlier = failed.take();
        let now = Failed { verdict, retry: retry.or(earlier.as_ref().and_then(|it| it.retry)), error };
        if matches!(verdict, Verdict::Park | Verdict::Dismiss) {
            return Ok(Err(now));
        }
        failed = Some(earlier.filter(|it| now.error.weight() < it.error.weight()).unwrap_or(now));
    }
    Ok(Err(failed.expect("settings hold at least one address")))
}

async fn call(
    ctx: &Context,
    key: &KeyPair,
    tls: &Arc<ClientConfig>,
    address: &Address,
    request: &(dyn Fn(RegisterClientRequest) -> RegisterClientRequest + Sync),
) -> Result<RegisterClientResponse, AttemptError> {
    let link = dial(&*ctx.parts.net, tls, address).await?;
    let addresses = ctx.find(link.local);
    let message = request(RegisterClientRequest {
        public_key_pem: key.public_key_pem().into_bytes(),
        private_ipv4: addresses.ipv4,
        private_ipv6: addresses.ipv6,
        hostname: addresses.hostname,
        fqdn: addresses.fqdn,
        client_version: AGENT_VERSION.to_owned(),
        ..Default::default()
    });
    let mut message = Request::new(message);
    message.set_timeout(CALL_LIMIT);
    let mut client = RegistrationServiceClient::new(link.channel);
    let answer = timeout(CALL_LIMIT, client.register_agent(message)).await.map_err(|_| CallError::Late);
    answer
        .and_then(|answer| answer.map_err(CallError::from))
        .map(tonic::Response::into_inner)
        .map_err(|source| AttemptError::Call { address: address.to_string(), source })
}

/// A good answer to a registration, a rejoin or a renewal.
pub(crate) struct Answered<'a> {
    pub(crate) from: String,
    pub(crate) certificate: &'a [u8],
    pub(crate) bundle: &'a [u8],
    pub(crate) cluster: &'a str,
    pub(crate) renew_after: Option<Timestamp>,
}

/// Keeps what a good answer brought. The certificate comes last: once it lies there, everything it needs does.
pub(crate) fn accept(
    ctx: &Context,
    key: &KeyPair,
    present: &Bundle,
    answer: &Answered<'_>,
) -> Result<(), AttemptError> {
    let from = &answer.from;
    let Some(peer) = read_certificate(ctx, key, answer.certificate) else {
        return Err(AttemptError::Answer { address: from.clone() });
    };
    if !answer.cluster.is_empty() {
        ctx.dir.write_cluster(answer.cluster)?;
    }
    if !answer.bundle.is_empty() && answer.bundle != present.pem().as_bytes() {
        match Bundle::parse(answer.bundle) {
            Ok(newer) if present.may_become(&newer) => ctx.dir.write_ca(&newer)?,
            Ok(_) => tracing::warn!(from, "CA bundle of the answer shares nothing with ours, not taken"),
            Err(error) => tracing::warn!(from, error = %Chain(&error), "CA bundle of the answer not readable"),
        }
    }
    ctx.dir.write_certificate(answer.certificate)?;
    ctx.set_received(&peer.serial, answer.renew_after);
    tracing::info!(from, serial = peer.serial, not_after = %peer.not_after, "certificate received");
    Ok(())
}

pub(crate) fn from_wire(at: &prost_types::Timestamp) -> Timestamp {
    Timestamp::from_millis(at.seconds.saturating_mul(1000).saturating_add(i64::from(at.nanos) / 1_000_000))
}

/// The waits between rounds, and one log line per kind of failure.
struct Waits {
    reconnect: Reconnect,
    last: String,
}

impl Waits {
    fn new(ctx: &Context, cap: Option<Duration>) -> Self {
        let now = ctx.parts.clock.monotonic();
        let reconnect = cap.map_or_else(|| Reconnect::new(now), |cap| Reconnect::with_cap(now, cap));
        Self { reconnect, last: String::new() }
    }

    /// The next wait. `next` is what a person can do meanwhile.
    fn next(&mut self, ctx: &Context, failed: &Failed, next: &str) -> Duration {
        let text = Chain(&failed.error).to_string();
        if self.last != text {
            tracing::warn!(error = text, next, "not registered yet");
            self.last = text;
        }
        let distrust = failed.distrust();
        ctx.board.set_untrusted(distrust.is_some(), ctx.parts.clock.monotonic());
        match distrust {
            Some(Distrust::NotYetValid) => ctx.board.set_remark(Some(CLOCK)),
            _ => ctx.board.drop_remark(CLOCK),
        }
        if distrust.is_some() {
            about(UNTRUSTED_PAUSE, ctx.entropy())
        } else {
            self.reconnect.failed(failed.retry, ctx.parts.clock.monotonic(), ctx.entropy())
        }
    }
}
