//! What ends a stream of an agent, whatever it is about.

use std::{pin::Pin, sync::Arc};

use nstance_core::ids::InstanceId;
use nstance_identity::peer::{LEEWAY, Peer};
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Status};

use super::{conn::ConnInfo, status::Refusal};
use crate::term::Term;

pub struct Ends {
    term: Arc<Term>,
    instance: InstanceId,
    serial: String,
    /// The connection ended.
    closed: CancellationToken,
    /// The term ended.
    stop: CancellationToken,
    /// A newer stream of the same kind took over.
    superseded: CancellationToken,
    /// The instance is gone.
    cut: CancellationToken,
    /// Its certificate ran out.
    expiry: Pin<Box<Sleep>>,
}

impl Ends {
    pub fn of<T>(term: &Arc<Term>, request: &Request<T>, instance: InstanceId, peer: &Peer) -> Self {
        let left = peer.not_after.plus(LEEWAY).since(term.shared.clock.now());
        Self {
            term: term.clone(),
            instance,
            serial: peer.serial.clone(),
            closed: request.extensions().get::<ConnInfo>().map(|info| info.closed.clone()).unwrap_or_default(),
            stop: term.tasks.token().clone(),
            superseded: CancellationToken::new(),
            cut: CancellationToken::new(),
            expiry: Box::pin(tokio::time::sleep(left)),
        }
    }

    /// What ends the stream once it is open.
    pub fn with(&mut self, superseded: &CancellationToken, cut: &CancellationToken) {
        (self.superseded, self.cut) = (superseded.clone(), cut.clone());
    }

    pub fn closed(&self) -> &CancellationToken {
        &self.closed
    }

    /// Resolves with how the stream ends.
    pub async fn next(&mut self) -> Status {
        tokio::select! {
            biased;
            () = self.closed.cancelled() => Status::unavailable("connection ended"),
            () = self.stop.cancelled() => {
                let ended = Refusal::unavailable("LEADER_CHANGED", "this server leads no more; reconnect");
                ended.within(self.term.parting()).into()
            }
            () = self.superseded.cancelled() => {
                let message = "a newer stream of this instance took over";
                Refusal::new(Code::Aborted, "SUPERSEDED", message).into()
            }
            () = self.cut.cancelled() => gone(self.instance),
            () = &mut self.expiry => {
                let message = format!("certificate {} expired; rejoin", self.serial);
                Refusal::unauthenticated("CERT_EXPIRED", message).into()
            }
        }
    }
}

/// The instance does not exist any more.
pub fn gone(instance: InstanceId) -> Status {
    Refusal::denied("INSTANCE_DELETED", format!("instance {instance} is gone")).into()
}
