//! The plain HTTP port: read-only answers from memory, no secrets, no ids.

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{MethodRouter, get},
};
use nstance_rt::tasks::Tasks;
use tokio::net::TcpListener;

use crate::{metrics::Metrics, vitals::Vitals};

#[derive(Clone)]
struct Shown {
    vitals: Arc<Vitals>,
    metrics: Arc<Metrics>,
}

/// A path and its handler.
type Route = (&'static str, fn() -> MethodRouter<Shown>);

/// All routes; all answer GET.
const ROUTES: [Route; 5] = [
    ("/", || get(health)),
    ("/health", || get(health)),
    ("/ready", || get(ready)),
    ("/leader", || get(leader)),
    ("/metrics", || get(text)),
];

/// The paths of the health port.
pub fn paths() -> impl Iterator<Item = &'static str> {
    ROUTES.into_iter().map(|(path, _)| path)
}

/// Serves the health port until the scope ends.
pub fn serve(tasks: &Tasks, listener: TcpListener, vitals: Arc<Vitals>, metrics: Arc<Metrics>) {
    let routes = ROUTES.into_iter().fold(Router::new(), |app, (path, handler)| app.route(path, handler()));
    let app = routes.with_state(Shown { vitals, metrics });
    let token = tasks.token().clone();
    tasks.spawn("health port", async move {
        let served = axum::serve(listener, app).with_graceful_shutdown(token.cancelled_owned()).await;
        if let Err(error) = served {
            tracing::error!(%error, "health port ended");
        }
    });
}

async fn health(State(shown): State<Shown>) -> Response {
    if shown.vitals.is_loaded() {
        (StatusCode::OK, "OK\n").into_response()
    } else {
        let problems = shown.vitals.ready().problems;
        let reason = if problems.is_empty() { "booting".to_owned() } else { problems.join("\n") };
        (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response()
    }
}

async fn ready(State(shown): State<Shown>) -> Response {
    let ready = shown.vitals.ready();
    let code = if ready.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, Json(ready)).into_response()
}

async fn leader(State(shown): State<Shown>) -> Response {
    if shown.vitals.is_serving_leader() {
        (StatusCode::OK, "leader\n").into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "not the leader\n").into_response()
    }
}

async fn text(State(shown): State<Shown>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], shown.metrics.text()).into_response()
}
