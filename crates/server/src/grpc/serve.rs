//! The three gRPC ports of a leader. They open last, and close when the term ends.
//!
//! Operators and newcomers are few, and tonic serves them whole. Agents are thousands, so their connections are served
//! by [`crate::http2`], which keeps next to nothing for each; what is called is tonic's service all the same.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use futures::FutureExt as _;
use nstance_identity::tls::{ClientAuth, TlsError, server_config};
use nstance_proto::v1::{
    agent_service_server::AgentServiceServer, operator_service_server::OperatorServiceServer,
    registration_service_server::RegistrationServiceServer,
};
use tokio::net::TcpListener;
use tokio_stream::StreamExt as _;
use tonic::{
    body::Body,
    transport::{Server, server::Connected as _},
};
use tower::{Layer, util::BoxCloneSyncService};

use super::{
    agent::Agents,
    auth::{Auth, Port},
    conn::{PortLimits, accept},
    envelope::Envelope,
    operator::Operator,
    registration::Registrations,
};
use crate::{
    http2::{self, Keepalive},
    term::Term,
};

/// The bound sockets, before anything is served on them.
pub struct Ports {
    pub registration: TcpListener,
    pub operator: TcpListener,
    pub agent: TcpListener,
}

impl Ports {
    pub async fn bind(registration: SocketAddr, operator: SocketAddr, agent: SocketAddr) -> std::io::Result<Self> {
        Ok(Self {
            registration: TcpListener::bind(registration).await?,
            operator: TcpListener::bind(operator).await?,
            agent: TcpListener::bind(agent).await?,
        })
    }
}

/// A report with its files map; nothing an agent sends is larger.
const AGENT_MESSAGE: usize = 256 * 1024;
const REGISTRATION_MESSAGE: usize = 16 * 1024;
const OPERATOR_MESSAGE: usize = 4 * 1024 * 1024;

/// A machine that stands still is noticed within these two.
const AGENT_KEEPALIVE: Keepalive = Keepalive { interval: Duration::from_secs(10), timeout: Duration::from_secs(5) };

/// Serves the ports until the term's scope ends.
pub fn serve(term: &Arc<Term>, ports: Ports) -> Result<(), TlsError> {
    let authority = &term.shared.authority;
    let clock = term.shared.clock.clone();
    let open = server_config(authority.identity.clone(), ClientAuth::None, clock.clone())?;
    let mutual = server_config(authority.identity.clone(), ClientAuth::Required(authority.trust.clone()), clock)?;
    let tasks = &term.tasks;

    let limits = PortLimits {
        max_connections: 1024,
        handshake: Duration::from_secs(5),
        user_timeout: None,
        idle: Some(Duration::from_secs(30)),
    };
    let incoming = accept(tasks, ports.registration, open, limits);
    let (reporter, health) = tonic_health::server::health_reporter();
    let service = registrations(term);
    let router = Server::builder()
        .max_connection_age(Duration::from_secs(60))
        .max_concurrent_streams(4)
        .layer(Envelope::fixed(term))
        .add_service(health)
        .add_service(service);
    let stop = tasks.token().clone();
    tasks.spawn("registration port", async move {
        reporter.set_serving::<RegistrationServiceServer<Registrations>>().await;
        ended(router.serve_with_incoming_shutdown(incoming, stop.cancelled_owned()).await, "registration");
    });

    let limits = PortLimits {
        max_connections: 1024,
        handshake: Duration::from_secs(10),
        user_timeout: Some(Duration::from_secs(20)),
        idle: None,
    };
    let incoming = accept(tasks, ports.operator, mutual.clone(), limits);
    let (auth, service) = operators(term);
    let router = Server::builder()
        .http2_keepalive_interval(Some(Duration::from_secs(15)))
        .http2_keepalive_timeout(Some(Duration::from_secs(5)))
        .max_concurrent_streams(128)
        .layer(Envelope::configured(term))
        .layer(auth)
        .add_service(service);
    let stop = tasks.token().clone();
    tasks.spawn("operator port", async move {
        ended(router.serve_with_incoming_shutdown(incoming, stop.cancelled_owned()).await, "operator");
    });

    let limits = PortLimits {
        max_connections: 20_000,
        handshake: Duration::from_secs(10),
        user_timeout: Some(Duration::from_secs(15)),
        idle: None,
    };
    let mut incoming = accept(tasks, ports.agent, mutual, limits);
    let service = agents(term);
    let scope = tasks.clone();
    tasks.spawn_droppable("agent port", async move {
        while let Some(Ok(conn)) = incoming.next().await {
            let (info, stop) = (conn.connect_info(), scope.token().clone());
            let remote = info.remote;
            let connection = http2::serve(conn, service.clone(), info, AGENT_KEEPALIVE, stop);
            scope.spawn(
                "agent connection",
                connection.map(move |ended| {
                    if let Err(error) = ended {
                        tracing::debug!(%remote, %error, "agent's connection ended");
                    }
                }),
            );
        }
    });
    Ok(())
}

fn registrations(term: &Arc<Term>) -> RegistrationServiceServer<Registrations> {
    RegistrationServiceServer::new(Registrations::new(term.clone())).max_decoding_message_size(REGISTRATION_MESSAGE)
}

fn operators(term: &Arc<Term>) -> (Auth, OperatorServiceServer<Operator>) {
    let auth = Auth { term: term.clone(), port: Port::Operator };
    (auth, OperatorServiceServer::new(Operator { term: term.clone() }).max_decoding_message_size(OPERATOR_MESSAGE))
}

fn agents(term: &Arc<Term>) -> Callable {
    let auth = Auth { term: term.clone(), port: Port::Agent };
    let service = AgentServiceServer::new(Agents { term: term.clone() }).max_decoding_message_size(AGENT_MESSAGE);
    BoxCloneSyncService::new(Envelope::fixed(term).layer(auth.layer(service)))
}

/// A service as one calls it: a request in, a response out. Requests bring a [`super::conn::ConnInfo`] along.
pub type Callable = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Infallible>;

/// The three services without their sockets, with the very layers that stand before them there. For a simulation, where
/// clients and servers live in one process.
#[derive(Clone)]
pub struct Inside {
    pub registration: Callable,
    pub operator: Callable,
    pub agent: Callable,
}

impl Inside {
    pub fn of(term: &Arc<Term>) -> Self {
        let (operator_auth, operators) = operators(term);
        Self {
            registration: BoxCloneSyncService::new(Envelope::fixed(term).layer(registrations(term))),
            operator: BoxCloneSyncService::new(Envelope::configured(term).layer(operator_auth.layer(operators))),
            agent: agents(term),
        }
    }
}

fn ended(result: Result<(), tonic::transport::Error>, port: &str) {
    if let Err(error) = result {
        tracing::error!(error = %nstance_rt::chain::Chain(&error), port, "port ended");
    }
}
