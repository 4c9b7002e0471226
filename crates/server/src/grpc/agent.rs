//! Port 8994.

use std::{pin::Pin, sync::Arc};

use nstance_proto::v1::{self, agent_service_server::AgentService};
use tokio_stream::Stream;
use tonic::{Code, Request, Response, Status, Streaming};

use super::{auth::Caller, conn::ConnInfo, status::Refusal};
use crate::{
    service::{certificates, health::Session},
    term::Term,
};

pub struct Agents {
    pub term: Arc<Term>,
}

type Out<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl AgentService for Agents {
    type KeyGenRequestsStream = Out<v1::KeyGenerationRequest>;
    type ReceiveFilesStream = Out<v1::FileTransfer>;

    async fn report_health(
        &self,
        request: Request<Streaming<v1::HealthReportRequest>>,
    ) -> Result<Response<()>, Status> {
        let caller = Caller::of(&request)?;
        let Caller::Agent { instance, peer, .. } = &caller else {
            return Err(Refusal::denied("WRONG_ROLE", "only agents report health").into());
        };
        let closed = request.extensions().get::<ConnInfo>().map(|info| info.closed.clone()).unwrap_or_default();
        let mut reports = request.into_inner();
        let Some(session) = Session::open(&self.term, *instance, closed.clone()) else {
            return Err(Refusal::denied("INSTANCE_DELETED", format!("instance {instance} is gone")).into());
        };
        let left = peer.not_after.plus(nstance_identity::peer::LEEWAY).since(self.term.shared.clock.now());
        let expiry = tokio::time::sleep(left);
        tokio::pin!(expiry);
        let stop = self.term.tasks.token().clone();
        loop {
            // Biased: what ends the stream is looked at before what it says.
            tokio::select! {
                biased;
                () = closed.cancelled() => return Err(Status::unavailable("connection ended")),
                () = stop.cancelled() => {
                    return Err(Refusal::unavailable("LEADER_CHANGED", "this server leads no more; reconnect").into());
                }
                () = session.superseded.cancelled() => {
                    let message = "a newer stream of this instance took over";
                    return Err(Refusal::new(Code::Aborted, "SUPERSEDED", message).into());
                }
                () = session.cut.cancelled() => {
                    return Err(Refusal::denied("INSTANCE_DELETED", format!("instance {instance} is gone")).into());
                }
                () = &mut expiry => {
                    let message = format!("certificate {} expired; rejoin", peer.serial);
                    return Err(Refusal::unauthenticated("CERT_EXPIRED", message).into());
                }
                report = reports.message() => match report {
                    Ok(Some(report)) => {
                        if report.instance_id != instance.to_string() {
                            let message = format!("certificate names {instance}, the report {}", report.instance_id);
                            return Err(Refusal::denied("NOT_YOUR_INSTANCE", message).into());
                        }
                        session.report(&report);
                    }
                    // Half-closed: it says that it goes, and waits for our answer.
                    Ok(None) => return Ok(Response::new(())),
                    Err(status) => return Err(status),
                },
            }
        }
    }

    async fn key_gen_requests(
        &self,
        _: Request<v1::AgentStreamRequest>,
    ) -> Result<Response<Self::KeyGenRequestsStream>, Status> {
        Err(Status::unimplemented("keys for files are not served by this build"))
    }

    async fn submit_public_keys(&self, _: Request<v1::PublicKeysRequest>) -> Result<Response<()>, Status> {
        Err(Status::unimplemented("keys for files are not served by this build"))
    }

    async fn receive_files(
        &self,
        _: Request<v1::AgentStreamRequest>,
    ) -> Result<Response<Self::ReceiveFilesStream>, Status> {
        Err(Status::unimplemented("files are not served by this build"))
    }

    async fn renew_certificate(
        &self,
        request: Request<v1::RenewCertificateRequest>,
    ) -> Result<Response<v1::RenewCertificateResponse>, Status> {
        let caller = Caller::of(&request)?;
        let renewed = certificates::renew(&self.term, &caller, &request.get_ref().public_key_pem);
        Ok(Response::new(renewed.await?))
    }
}
