//! Probes and metrics: plain HTTP, answers from memory.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use nstance_rt::tasks::Tasks;
use tokio::net::TcpListener;

use crate::metrics::Metrics;

/// What the probes say.
#[derive(Default)]
pub struct Health {
    /// A task has panicked.
    is_broken: AtomicBool,
    /// On the leader, while the watches are not synced yet.
    is_syncing: AtomicBool,
}

impl Health {
    pub fn set_broken(&self) {
        self.is_broken.store(true, Ordering::Relaxed);
    }

    pub fn set_syncing(&self, is_syncing: bool) {
        self.is_syncing.store(is_syncing, Ordering::Relaxed);
    }
}

/// Serves `/healthz` and `/readyz` until the scope ends.
pub fn serve_probes(tasks: &Tasks, listener: TcpListener, health: Arc<Health>) {
    let app = Router::new().route("/healthz", get(healthz)).route("/readyz", get(readyz)).with_state(health);
    serve(tasks, "probes", listener, app);
}

/// Serves `/metrics` until the scope ends.
pub fn serve_metrics(tasks: &Tasks, listener: TcpListener, metrics: Arc<Metrics>) {
    let app = Router::new().route("/metrics", get(text)).with_state(metrics);
    serve(tasks, "metrics", listener, app);
}

fn serve(tasks: &Tasks, name: &'static str, listener: TcpListener, app: Router) {
    let token = tasks.token().clone();
    tasks.spawn(name, async move {
        let served = axum::serve(listener, app).with_graceful_shutdown(token.cancelled_owned()).await;
        if let Err(error) = served {
            tracing::error!(port = name, %error, "a port is not served any more");
        }
    });
}

async fn healthz(State(health): State<Arc<Health>>) -> Response {
    if health.is_broken.load(Ordering::Relaxed) {
        return (StatusCode::INTERNAL_SERVER_ERROR, "a task has failed; see the log\n").into_response();
    }
    (StatusCode::OK, "ok\n").into_response()
}

async fn readyz(State(health): State<Arc<Health>>) -> Response {
    if health.is_broken.load(Ordering::Relaxed) || health.is_syncing.load(Ordering::Relaxed) {
        return (StatusCode::SERVICE_UNAVAILABLE, "watches are not synced yet\n").into_response();
    }
    (StatusCode::OK, "ok\n").into_response()
}

async fn text(State(metrics): State<Arc<Metrics>>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], metrics.text()).into_response()
}
