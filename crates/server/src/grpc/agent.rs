//! Port 8994.

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use nstance_core::ids::InstanceId;
use nstance_identity::peer::Peer;
use nstance_proto::v1::{self, agent_service_server::AgentService};
use tokio::sync::mpsc;
use tokio_stream::{StreamExt as _, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use super::{
    auth::Caller,
    conn::ConnInfo,
    ends::{Ends, gone},
    status::{Refusal, cut},
};
use crate::{
    service::{
        certificates,
        files::{self, Hello, Opened, Stream, Teller},
        health::Session,
        keys,
    },
    term::Term,
};

/// How long the word that ends a stream waits for room.
const LAST_WORD: Duration = Duration::from_millis(200);
/// What is told back of an id that is not the caller's.
const MAX_NAMED: usize = 64;

pub struct Agents {
    pub term: Arc<Term>,
}

impl Agents {
    /// Opens a stream on which an agent is told something.
    fn open(
        &self,
        request: &Request<v1::AgentStreamRequest>,
        stream: Stream,
    ) -> Result<(InstanceId, Opened, Ends), Status> {
        let caller = Caller::of(request)?;
        let (instance, peer) = agent(&caller)?;
        let found = {
            let state = self.term.world.lock();
            state.entries.get(&instance).map(|entry| (entry.delivery.clone(), entry.cut.clone()))
        };
        let Some((delivery, cut)) = found else { return Err(gone(instance)) };
        let mut ends = Ends::of(&self.term, request, instance, peer);
        let opened = delivery.open(stream, self.term.now());
        ends.with(&opened.superseded, &cut);
        Ok((instance, opened, ends))
    }
}

/// The agent that calls; the layer lets nobody else through.
fn agent(caller: &Caller) -> Result<(InstanceId, &Peer), Status> {
    match caller {
        Caller::Agent { instance, peer, .. } => Ok((*instance, peer)),
        Caller::Operator { .. } => Err(Refusal::denied("WRONG_ROLE", "this port serves agents").into()),
    }
}

/// A stream that `tell` fills, in a task of the term, until something ends it. There is room for one message: what
/// nobody takes is not made.
fn told<T, F>(term: &Term, mut ends: Ends, tell: impl FnOnce(Teller<T>) -> F) -> Out<T>
where
    T: Send + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let (out, told) = mpsc::channel(1);
    let telling = tell(out.clone());
    term.tasks.spawn("agent stream", async move {
        tokio::select! {
            biased;
            status = ends.next() => {
                // One that takes nothing is not waited for: its stream ends without a word.
                let _ = out.send_timeout(Box::new(Err(status)), LAST_WORD).await;
            }
            () = out.closed() => {}
            () = telling => {}
        }
    });
    Box::pin(ReceiverStream::new(told).map(|it| *it))
}

type Out<T> = Pin<Box<dyn tokio_stream::Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl AgentService for Agents {
    type KeyGenRequestsStream = Out<v1::KeyGenerationRequest>;
    type ReceiveFilesStream = Out<v1::FileTransfer>;

    async fn report_health(
        &self,
        request: Request<Streaming<v1::HealthReportRequest>>,
    ) -> Result<Response<()>, Status> {
        // What is known of the caller is not kept for as long as it reports.
        let (instance, mut ends) = {
            let caller = Caller::of(&request)?;
            let (instance, peer) = agent(&caller)?;
            (instance, Ends::of(&self.term, &request, instance, peer))
        };
        let mut reports = request.into_inner();
        let Some(session) = Session::open(&self.term, instance, ends.closed().clone()) else {
            return Err(gone(instance));
        };
        ends.with(&session.superseded, &session.cut);
        loop {
            // Biased: what ends the stream is looked at before what it says.
            tokio::select! {
                biased;
                status = ends.next() => return Err(status),
                report = reports.message() => match report {
                    Ok(Some(report)) => {
                        if report.instance_id != instance.to_string() {
                            let named = cut(&report.instance_id, MAX_NAMED);
                            let message = format!("certificate names {instance}, the report {named}");
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
        request: Request<v1::AgentStreamRequest>,
    ) -> Result<Response<Self::KeyGenRequestsStream>, Status> {
        let (instance, stream, ends) = self.open(&request, Stream::Keys)?;
        let term = self.term.clone();
        Ok(Response::new(told(&self.term, ends, async move |out| keys::ask(&term, instance, &stream, &out).await)))
    }

    async fn submit_public_keys(&self, request: Request<v1::PublicKeysRequest>) -> Result<Response<()>, Status> {
        let caller = Caller::of(&request)?;
        let (instance, _) = agent(&caller)?;
        keys::submit(&self.term, instance, request.get_ref())?;
        Ok(Response::new(()))
    }

    async fn receive_files(
        &self,
        request: Request<v1::AgentStreamRequest>,
    ) -> Result<Response<Self::ReceiveFilesStream>, Status> {
        let (instance, stream, ends) = self.open(&request, Stream::Files)?;
        let v1::AgentStreamRequest { session_id, config_hash, .. } = request.into_inner();
        let hello = Hello { session: session_id, hash: config_hash };
        let term = self.term.clone();
        let serve = async move |out| files::serve(&term, instance, &stream, &hello, &out).await;
        Ok(Response::new(told(&self.term, ends, serve)))
    }

    async fn renew_certificate(
        &self,
        request: Request<v1::RenewCertificateRequest>,
    ) -> Result<Response<v1::RenewCertificateResponse>, Status> {
        let caller = Caller::of(&request)?;
        let renewed =
            certificates::renew(&self.term, &caller, ConnInfo::remote_of(&request), &request.get_ref().public_key_pem);
        Ok(Response::new(renewed.await?))
    }
}
