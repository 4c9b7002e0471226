//! Port 8992: parse, ask, convert.

use std::{sync::Arc, time::Duration};

use nstance_proto::v1::{self, registration_service_server::RegistrationService};
use tokio::sync::Semaphore;
use tonic::{Code, Request, Response, Status};

use super::{conn::ConnInfo, limits::RegistrationLimits, status::Refusal};
use crate::{
    metrics::ReasonLabels,
    service::{
        audit::Audit,
        register::{self, Asking},
    },
    term::Term,
};

const IN_FLIGHT: usize = 200;
/// Who is turned away for lack of room should come again within this time: as long as it takes to work off a burst, and
/// until a source that failed too often may try twice more.
const LATER: Duration = Duration::from_secs(6);

pub struct Registrations {
    term: Arc<Term>,
    limits: RegistrationLimits,
    in_flight: Semaphore,
}

impl Registrations {
    pub fn new(term: Arc<Term>) -> Self {
        let limits = RegistrationLimits::new(term.shared.clock.clone());
        Self { term, limits, in_flight: Semaphore::new(IN_FLIGHT) }
    }

    async fn register(
        &self,
        request: Request<v1::RegisterClientRequest>,
        asking: Asking,
    ) -> Result<Response<v1::RegisterClientResponse>, Status> {
        let remote = ConnInfo::remote_of(&request);
        let limited = || {
            let limited = Refusal::new(Code::ResourceExhausted, "RATE_LIMITED", "too many registrations; retry later");
            let limited = Err(limited.within(LATER));
            Audit::new(&self.term, "registration", asking.role(), remote).close(&limited);
            limited
        };
        let outcome = async {
            if remote.is_some_and(|remote| !self.limits.admit(remote)) {
                return limited();
            }
            let Ok(_place) = self.in_flight.try_acquire() else { return limited() };
            register::register(&self.term, request.into_inner(), asking, remote).await
        };
        match outcome.await {
            Ok(answer) => {
                self.term.shared.metrics.registrations.inc();
                Ok(Response::new(answer))
            }
            Err(refusal) => {
                // Our own troubles are not the caller's failures.
                if let Some(remote) = remote
                    && !matches!(refusal.code, Code::Unavailable | Code::ResourceExhausted)
                {
                    self.limits.failed(remote);
                }
                let labels = ReasonLabels { reason: refusal.reason };
                self.term.shared.metrics.registration_rejected.get_or_create(&labels).inc();
                Err(refusal.into())
            }
        }
    }
}

#[tonic::async_trait]
impl RegistrationService for Registrations {
    async fn register_agent(
        &self,
        request: Request<v1::RegisterClientRequest>,
    ) -> Result<Response<v1::RegisterClientResponse>, Status> {
        self.register(request, Asking::Agent).await
    }

    async fn register_operator(
        &self,
        request: Request<v1::RegisterClientRequest>,
    ) -> Result<Response<v1::RegisterClientResponse>, Status> {
        self.register(request, Asking::Operator).await
    }
}
