//! `serve`: the shards over HTTP, for scripts, dashboards and whoever has no operator identity of their own.
//!
//! `routes` is the one table of what can be asked; `door` is the way of every request; the rest is what they need.

mod ask;
mod audit;
mod auth;
mod door;
mod handle;
mod listen;
mod metrics;
mod openapi;
mod recall;
mod reply;
mod route;
mod routes;
mod schema;
mod schemas;
mod stall;
mod tokens;

#[cfg(test)]
pub(crate) mod tests;

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use clap::Args;
use http::HeaderMap;
use nstance_client::{Shards, live::LiveState};
use nstance_core::ports::clock::{Clock, Entropy};
use nstance_rt::{
    clock::SystemClock,
    entropy::{SystemEntropy, hex},
    shutdown::StopSignals,
    tasks::Tasks,
    telemetry::{self, LogForm},
};
use serde_json::{Map, Value};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use self::{
    auth::{Auth, Hosts, Tokens},
    door::Peer,
    metrics::Metrics,
    route::Route,
};
use crate::{
    args::{Context, ShardArgs, keep_identity_renewed},
    exit::Exit,
    failure::Failure,
};

#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    shards: ShardArgs,
    /// Where to listen; other addresses than loopback need TLS
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8080")]
    bind: SocketAddr,
    /// File with the token that may do everything [default: NSTANCE_ADMIN_TOKEN, else admin-token below --temp-dir, made if it is missing]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// File with a token that may only look
    #[arg(long, value_name = "FILE")]
    viewer_token_file: Option<PathBuf>,
    /// Certificate chain for TLS
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key for TLS
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// CA whose client certificates are let in without a token; of the cluster's own only those of operators of our tenant
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    client_ca: Option<PathBuf>,
    /// Another name under which this server may be called; repeatable
    #[arg(long, value_name = "HOST", value_delimiter = ',')]
    allowed_host: Vec<String>,
    /// Refuse everything that changes something
    #[arg(long)]
    read_only: bool,
    /// Let everybody on this machine do everything
    #[arg(long, conflicts_with_all = ["token_file", "viewer_token_file", "client_ca"])]
    insecure_no_auth: bool,
    /// A proxy before this server speaks TLS and tells the caller's address in X-Forwarded-For
    #[arg(long)]
    behind_proxy: bool,
}

/// How long requests may take to their end when we stop.
const GRACE: Duration = Duration::from_secs(5);

/// What all requests share.
pub(crate) struct App {
    shards: Shards,
    routes: Vec<Route>,
    schemas: Map<String, Value>,
    document: Value,
    auth: Auth,
    hosts: Hosts,
    behind_proxy: bool,
    live: Arc<LiveState>,
    metrics: Metrics,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    /// Tells ids of this process from those of others.
    life: String,
    stop: CancellationToken,
    /// Where changes come to their end, whether their callers wait for it or not.
    tasks: Tasks,
}

impl App {
    fn new(tasks: &Tasks, live: Arc<LiveState>, shards: Shards, auth: Auth, hosts: Hosts, behind_proxy: bool) -> Self {
        let names: Vec<String> = shards.names().map(str::to_owned).collect();
        let (routes, schemas) = (routes::all(&names), schemas::all());
        let (clock, entropy): (Arc<dyn Clock>, _) = (Arc::new(SystemClock), SystemEntropy::new());
        Self {
            document: openapi::document(&routes, &schemas),
            live,
            shards,
            routes,
            schemas,
            auth,
            hosts,
            behind_proxy,
            metrics: Metrics::default(),
            clock,
            life: hex(&entropy, 6),
            entropy: Arc::new(entropy),
            stop: tasks.token().clone(),
            tasks: tasks.clone(),
        }
    }

    /// Whose guesses are counted. A proxy appends the address that called it; what stands before that, anybody may have
    /// written.
    fn address(&self, peer: &Peer, headers: &HeaderMap) -> IpAddr {
        let told = headers.get_all("x-forwarded-for").iter().next_back().filter(|_| self.behind_proxy);
        let last = told.and_then(|it| it.to_str().ok()?.rsplit(',').next()?.trim().parse().ok());
        last.unwrap_or(peer.address)
    }
}

/// The OpenAPI document, as a server of these shards answers it.
pub fn openapi_document(shards: &[String]) -> Value {
    openapi::document(&routes::all(shards), &schemas::all())
}

/// `/metrics` after one request, with one shard.
pub fn example_metrics() -> String {
    let metrics = Metrics::default();
    metrics.count(&http::Method::GET, "/metrics", http::StatusCode::OK);
    metrics.text(&[("dev-1".to_owned(), true)])
}

pub async fn run(context: &Context, args: ServeArgs) -> Result<Exit, Failure> {
    check(&args)?;
    let form = if context.output.progress { LogForm::Text } else { LogForm::Json };
    telemetry::start(form, context.debug);
    let shards = args.shards.shards(context).await?.keeping_connections();
    let files = args.shards.identity_files(context);
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(certificate), Some(key)) => Some(listen::tls(certificate, key, args.client_ca.as_deref())?),
        _ => None,
    };
    let scheme = if tls.is_some() { "https" } else { "http" };
    let tokens = if args.insecure_no_auth { None } else { Some(tokens::find(context, &args)?) };
    let listener = TcpListener::bind(args.bind).await.map_err(|error| {
        Failure::failed(format!("listen on {}", args.bind))
            .because(error)
            .next("another address: --bind 127.0.0.1:PORT")
    })?;
    let bound = listener.local_addr().map_err(|error| Failure::failed("listen").because(error))?;
    let mut signals = StopSignals::listen().map_err(|error| Failure::failed("listen for signals").because(error))?;
    let tasks = Tasks::new();
    let auth = Auth::new(tokens.as_ref().map(|it| &it.tokens), args.read_only, &SystemEntropy::new());
    let hosts = Hosts::new(bound.ip(), &args.allowed_host);
    let live = LiveState::start(&tasks, &shards, Arc::new(SystemClock));
    let app = Arc::new(App::new(&tasks, live, shards.clone(), auth, hosts, args.behind_proxy));
    tasks.spawn_droppable("operator identity", keep_identity_renewed(context.clone(), files, shards));
    tasks.spawn("listener", listen::accept(app, tasks.clone(), listener, tls));
    greet(context, &format!("{scheme}://{bound}"), tokens.as_ref());
    let signal = tokio::select! {
        biased;
        failure = tasks.failure() => return Err(Failure::failed("serve").because(failure)),
        signal = signals.next() => signal,
    };
    context.output.note(&format!("{signal}: stopping"));
    let ended = tokio::select! {
        biased;
        n_cut = tasks.end(GRACE) => n_cut,
        _ = signals.next() => return Ok(Exit::Interrupted),
    };
    if 0 < ended {
        context.output.note(&format!("{ended} connections were cut off after {} s", GRACE.as_secs()));
    }
    Ok(Exit::Done)
}

/// What must not be, however it was meant.
fn check(args: &ServeArgs) -> Result<(), Failure> {
    let loopback = args.bind.ip().is_loopback();
    if args.insecure_no_auth && !loopback {
        return Err(Failure::usage(format!("--insecure-no-auth would let everybody in who reaches {}", args.bind))
            .next("--bind 127.0.0.1:8080, or a token"));
    }
    if !loopback && args.tls_cert.is_none() && !args.behind_proxy {
        let what = format!("tokens would cross the network in the clear to {}", args.bind);
        return Err(Failure::usage(what).next(
            "--tls-cert and --tls-key, or --behind-proxy if a proxy before this server speaks TLS, or --bind 127.0.0.1:8080",
        ));
    }
    Ok(())
}

fn greet(context: &Context, url: &str, tokens: Option<&tokens::Found>) {
    // For programs that asked for port 0.
    context.output.note(&format!("listening on {url}"));
    match tokens {
        None => context.output.note("warning: --insecure-no-auth: everybody on this machine may do everything"),
        Some(found) => {
            context.output.note(&format!("token: {}", found.place));
            if let Some(path) = &found.file {
                let path = path.display();
                context
                    .output
                    .note(&format!("try: curl -H \"Authorization: Bearer $(cat {path})\" {url}/api/v1/shards"));
            }
        }
    }
}
