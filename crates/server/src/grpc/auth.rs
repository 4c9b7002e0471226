//! One layer before every call on the operator and agent ports: who calls, may it be here, and is it still alive?
//!
//! Order as specified: validity, form, role, readiness, live state. What could not be looked up answers Unavailable,
//! never a refusal. Handlers find the [`Caller`] in the request and never read a tenant from a message.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::{FutureExt as _, future::Either};
use nstance_core::{
    ids::{InstanceId, OperatorId, Tenant},
    instance::CertPair,
};
use nstance_identity::{
    peer::{Peer, PeerName},
    role::Role,
};
use nstance_rt::backoff::Backoff;
use nstance_store::rebuild::CorruptRecord;
use tonic::{Request, Status, body::Body};
use tower::{Layer, Service};

use super::{conn::ConnInfo, status::Refusal};
use crate::{
    events::{Reason, Tell},
    service::audit::Audit,
    term::{Term, UpdateError},
};

/// What a call that asks for another certificate is called.
const RENEWAL: &str = "/RenewCertificate";

/// Between two tries to take the old serial off a record, be it an agent's or an operator's; nobody is in a hurry for it.
pub const RETIRE_BASE: Duration = Duration::from_secs(1);
pub const RETIRE_CAP: Duration = Duration::from_secs(60);

/// Who calls, proved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Caller {
    Agent { instance: InstanceId, tenant: Tenant, peer: Peer },
    Operator { operator: OperatorId, tenant: Tenant, peer: Peer },
}

impl Caller {
    pub fn of<T>(request: &Request<T>) -> Result<Self, Status> {
        // The layer puts it there or does not let the request through.
        request.extensions().get::<Self>().cloned().ok_or_else(|| Status::internal("call was not authorised"))
    }

    pub fn tenant(&self) -> &Tenant {
        match self {
            Self::Agent { tenant, .. } | Self::Operator { tenant, .. } => tenant,
        }
    }

    /// Its id, as certificates and events name it.
    pub fn subject(&self) -> String {
        match self {
            Self::Agent { instance, .. } => instance.to_string(),
            Self::Operator { operator, .. } => operator.to_string(),
        }
    }

    pub fn peer(&self) -> &Peer {
        match self {
            Self::Agent { peer, .. } | Self::Operator { peer, .. } => peer,
        }
    }
}

#[derive(Clone)]
pub enum Port {
    Agent,
    Operator,
}

#[derive(Clone)]
pub struct Auth {
    pub term: Arc<Term>,
    pub port: Port,
}

impl Auth {
    async fn authorise(&self, info: &ConnInfo) -> Result<Caller, Refusal> {
        let Some(leaf) = &info.leaf else {
            return Err(Refusal::unauthenticated("CERT_INVALID", "this port asks for a client certificate"));
        };
        let now = self.term.shared.clock.now();
        let peer = match info.known.get() {
            // Its words were read before, and are as they were; time went on.
            Some(peer) => peer.check_validity(now).map(|()| peer.clone()),
            // Usage and time before words: one who is merely late is told so, whatever else its certificate says.
            None => Peer::accept(leaf, now).inspect(|peer| {
                // Another call was first: it read the same.
                let _ = info.known.set(peer.clone());
            }),
        };
        let peer = peer.map_err(|error| refuse(&error))?;
        let caller = match (&self.port, &peer.name) {
            (Port::Agent, PeerName::Agent { instance, tenant }) => {
                Caller::Agent { instance: *instance, tenant: tenant.clone(), peer: peer.clone() }
            }
            (Port::Operator, PeerName::Operator { operator, tenant }) => {
                Caller::Operator { operator: *operator, tenant: tenant.clone(), peer: peer.clone() }
            }
            (port, _) => {
                let (wanted, advertised) = match port {
                    Port::Agent => ("agents", &self.term.advertised.operator),
                    Port::Operator => ("operators", &self.term.advertised.agent),
                };
                let message = format!(
                    "this port serves {wanted}, the certificate has the role {}; its port is at {advertised}",
                    peer.role().as_str()
                );
                return Err(Refusal::denied("WRONG_ROLE", message));
            }
        };
        if self.term.tasks.is_stopping() {
            let ended = Refusal::unavailable("NOT_READY", "this server is not the leader any more; retry");
            return Err(ended.within(self.term.parting()));
        }
        match (&caller, &self.port) {
            (Caller::Agent { instance, tenant, peer }, _) => self.agent(*instance, tenant, peer, leaf).await?,
            (Caller::Operator { operator, tenant, peer }, Port::Operator) => {
                self.term.operators.authorise(&self.term, peer, *operator, tenant).await?;
            }
            (Caller::Operator { .. }, Port::Agent) => {
                return Err(Refusal::denied("WRONG_ROLE", "operators are not served here"));
            }
        }
        Ok(caller)
    }

    /// Who is turned away here never comes to the one who notes what came of a renewal.
    fn audit_renewal(&self, request: &http::Request<Body>, refusal: &Refusal) {
        let role = match self.port {
            Port::Agent => Role::Agent,
            Port::Operator => Role::Operator,
        };
        let info = request.extensions().get::<ConnInfo>();
        let mut audit = Audit::new(&self.term, "renewal", role, info.map(|info| info.remote));
        if let Some(peer) = info.and_then(|info| info.leaf.as_ref()).and_then(|leaf| Peer::from_der(leaf).ok()) {
            audit.key(&peer.public_key);
            match &peer.name {
                PeerName::Agent { instance, tenant } => audit.subject(instance, tenant),
                PeerName::Operator { operator, tenant } => audit.subject(operator, tenant),
                PeerName::Server { .. } => {}
            }
        }
        audit.close(&Err::<(), _>(refusal.clone()));
    }

    /// Live state of an agent: its instance stands, and this certificate is one of its two.
    async fn agent(&self, id: InstanceId, tenant: &Tenant, peer: &Peer, leaf: &[u8]) -> Result<(), Refusal> {
        let gone = || {
            let message = format!("instance {id} does not exist any more; this machine may be switched off");
            Refusal::denied("INSTANCE_DELETED", message)
        };
        let superseded = || {
            let message = format!("certificate {} of instance {id} is not its current one; rejoin", peer.serial);
            Refusal::unauthenticated("CERT_SUPERSEDED", message)
        };
        let retired = {
            let mut state = self.term.world.lock();
            if !state.entries.contains_key(&id)
                && let Some(record) = state.unreadable(id, tenant)
            {
                return Err(unreadable(record));
            }
            let entry = state.entries.get_mut(&id).ok_or_else(gone)?;
            let it = entry.instance();
            if it.group.tenant != *tenant || it.delete.as_ref().is_some_and(|delete| delete.gone_at.is_some()) {
                return Err(gone());
            }
            let registration = it.registration.as_ref();
            let key_fits = registration.is_some_and(|it| it.public_key == peer.public_key_der());
            match &it.cert {
                None if it.adopted_at.is_some() && registration.is_none() => None,
                Some(cert) if key_fits && cert.current.serial == peer.serial => {
                    let serial = cert.previous.is_some().then(|| cert.current.serial.clone());
                    if serial.is_some() {
                        entry.used_serial.clone_from(&serial);
                    }
                    // One at a time: while the store is slow every call would add a write to those that wait.
                    Some(serial.is_some() && !std::mem::replace(&mut entry.retiring, true))
                }
                // The one before it passes until the new one was used.
                Some(cert)
                    if key_fits
                        && cert.previous.as_ref().is_some_and(|it| it.serial == peer.serial)
                        && entry.used_serial.as_ref() != Some(&cert.current.serial) =>
                {
                    Some(false)
                }
                _ => return Err(superseded()),
            }
        };
        match retired {
            None => return self.pin(id, peer, leaf).await,
            Some(true) => self.retire_previous(id),
            Some(false) => {}
        }
        Ok(())
    }

    /// The new certificate is in use: the old one passes no longer. Memory knows already, the record follows in its own
    /// time; but it does, for a rotation of the CA waits for everybody of whom it does not say so.
    fn retire_previous(&self, id: InstanceId) {
        let term = self.term.clone();
        self.term.tasks.spawn_droppable("retire serial", async move {
            let mut backoff = Backoff::new(RETIRE_BASE, RETIRE_CAP);
            loop {
                // The one in use may be another by the time that the store answers.
                let used = match term.world.lock().entries.get_mut(&id) {
                    None => return,
                    Some(entry) => match &entry.instance().cert {
                        Some(CertPair { current, previous: Some(_) })
                            if entry.used_serial.as_ref() == Some(&current.serial) =>
                        {
                            current.serial.clone()
                        }
                        _ => {
                            entry.retiring = false;
                            return;
                        }
                    },
                };
                let retired = term.update(id, |it| {
                    let mut it = it.clone();
                    let cert = it.cert.as_mut().filter(|cert| cert.current.serial == used)?;
                    cert.previous.take()?;
                    Some(it)
                });
                if let Err(error) = retired.await {
                    tracing::debug!(instance = %id, %error, "old serial not retired yet");
                    tokio::time::sleep(backoff.next(term.shared.entropy.as_ref())).await;
                }
            }
        });
    }

    /// The record of this instance was made again from its VM's tags: the first valid certificate with its name binds.
    async fn pin(&self, id: InstanceId, peer: &Peer, leaf: &[u8]) -> Result<(), Refusal> {
        let now = self.term.now();
        // Amid a rotation it may be by the CA that is on its way out, which must not be retired before it is renewed.
        let issuer = self.term.shared.authority.signer(leaf).ok_or_else(|| {
            let message = format!("the certificate of instance {id} is by a CA that was retired; replace the instance");
            Refusal::unauthenticated("CERT_INVALID", message)
        })?;
        let pinned = self
            .term
            .update(id, |it| {
                if it.cert.is_some() {
                    return None;
                }
                let mut it = it.clone();
                it.registration = Some(nstance_core::instance::Registration {
                    at: now,
                    public_key: peer.public_key_der(),
                    addresses: it.provider.addresses.clone(),
                    agent_version: String::new(),
                });
                it.cert = Some(CertPair {
                    current: nstance_core::instance::CertFact {
                        serial: peer.serial.clone(),
                        issuer: issuer.clone(),
                        not_before: peer.not_before,
                        not_after: peer.not_after,
                    },
                    previous: None,
                });
                Some(it)
            })
            .await
            .map_err(|error| record_refusal(&error))?;
        if pinned.cert.as_ref().is_none_or(|cert| cert.current.serial != peer.serial) {
            let message = format!("instance {id} is bound to another certificate");
            return Err(Refusal::unauthenticated("CERT_SUPERSEDED", message));
        }
        let message = "agent of an adopted VM is back, its certificate is pinned";
        self.term.tell(Tell::instance(Reason::InstanceAdopted, &pinned.group, id, message));
        Ok(())
    }
}

fn refuse(error: &nstance_identity::peer::PeerError) -> Refusal {
    Refusal::unauthenticated(error.reason(), error.to_string())
}

/// Whoever has a record that nobody can read is neither let in nor sent away.
fn unreadable(record: &CorruptRecord) -> Refusal {
    let CorruptRecord { key, instance, message, .. } = record;
    let next = format!("restore {key} and restart the leader, which reads it then");
    let message = format!("whether instance {instance} stands is not known: {message}; {next}");
    Refusal::unavailable("NOT_READY", message)
}

/// A record that could not be changed, in the words of the wire.
pub fn record_refusal(error: &UpdateError) -> Refusal {
    use nstance_rt::chain::Chain;
    use nstance_store::cas::RecordError;
    match error {
        UpdateError::Record(RecordError::Stalled(_) | RecordError::Fenced { .. }) => {
            Refusal::unavailable("LEASE_STALLED", "this server may not act now; retry")
        }
        UpdateError::NotDurable(id) => {
            Refusal::unavailable("NOT_READY", format!("the record of {id} is being written; retry"))
        }
        UpdateError::Unknown(id) => Refusal::unavailable("NOT_READY", format!("instance {id} is changing; retry")),
        UpdateError::Record(error) => Refusal::unavailable("STORE_UNAVAILABLE", format!("{}", Chain(error))),
    }
}

impl<S> Layer<S> for Auth {
    type Service = Authorised<S>;

    fn layer(&self, inner: S) -> Authorised<S> {
        Authorised { inner, auth: self.clone() }
    }
}

#[derive(Clone)]
pub struct Authorised<S> {
    inner: S,
    auth: Auth,
}

impl<S> Service<http::Request<Body>> for Authorised<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        // The clone that was polled ready must be the one that is called.
        let ready = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, ready);
        let auth = self.auth.clone();
        // A box of its own, which is gone once the call is let through: a stream lives for as long as its agent, and
        // needs none of this any more.
        let admitted = Box::pin(async move {
            let authorised = match request.extensions().get::<ConnInfo>() {
                Some(info) => auth.authorise(info).await,
                None => Err(Refusal::unauthenticated("CERT_INVALID", "connection without identity")),
            };
            match authorised {
                Ok(caller) => {
                    request.extensions_mut().insert(caller);
                    Ok(request)
                }
                Err(refusal) => {
                    if request.uri().path().ends_with(RENEWAL) {
                        auth.audit_renewal(&request, &refusal);
                    }
                    tracing::debug!(reason = refusal.reason, message = refusal.message, "call refused");
                    Err(Status::from(refusal).into_http())
                }
            }
        });
        Box::pin(admitted.then(move |admitted| match admitted {
            Ok(request) => Either::Left(inner.call(request)),
            Err(refused) => Either::Right(std::future::ready(Ok(refused))),
        }))
    }
}
