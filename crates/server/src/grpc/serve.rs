//! The three gRPC ports of a leader. They open last, and close when the term ends.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use nstance_identity::tls::{ClientAuth, TlsError, server_config};
use nstance_proto::v1::{
    agent_service_server::AgentServiceServer, operator_service_server::OperatorServiceServer,
    registration_service_server::RegistrationServiceServer,
};
use tokio::net::TcpListener;
use tonic::{body::Body, transport::Server};
use tower::{Layer, util::BoxCloneSyncService};

use super::{
    agent::Agents,
    auth::{Auth, Port},
    conn::{PortLimits, accept},
    envelope::Envelope,
    operator::Operator,
    registration::Registrations,
};
use crate::term::Term;

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
    let incoming = accept(tasks, ports.agent, mutual, limits);
    let (auth, service) = agents(term);
    let router = Server::builder()
        .http2_keepalive_interval(Some(Duration::from_secs(10)))
        .http2_keepalive_timeout(Some(Duration::from_secs(5)))
        .max_concurrent_streams(16)
        .layer(Envelope::fixed(term))
        .layer(auth)
        .add_service(service);
    let stop = tasks.token().clone();
    tasks.spawn("agent port", async move {
        ended(router.serve_with_incoming_shutdown(incoming, stop.cancelled_owned()).await, "agent");
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

fn agents(term: &Arc<Term>) -> (Auth, AgentServiceServer<Agents>) {
    let auth = Auth { term: term.clone(), port: Port::Agent };
    (auth, AgentServiceServer::new(Agents { term: term.clone() }).max_decoding_message_size(AGENT_MESSAGE))
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
        let (agent_auth, agents) = agents(term);
        Self {
            registration: BoxCloneSyncService::new(Envelope::fixed(term).layer(registrations(term))),
            operator: BoxCloneSyncService::new(Envelope::configured(term).layer(operator_auth.layer(operators))),
            agent: BoxCloneSyncService::new(Envelope::fixed(term).layer(agent_auth.layer(agents))),
        }
    }
}

fn ended(result: Result<(), tonic::transport::Error>, port: &str) {
    if let Err(error) = result {
        tracing::error!(error = %nstance_rt::chain::Chain(&error), port, "port ended");
    }
}
