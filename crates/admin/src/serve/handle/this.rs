//! What this process says about itself, and which shards it reaches.

use std::sync::Arc;

use http::StatusCode;
use serde_json::{Value, json};

use super::{
    super::{
        App, recall,
        reply::{Reply, Trouble, shard_error, times},
        route::Call,
    },
    looked_at,
};
use crate::cmd::shards::document;

pub(in super::super) async fn health(_: Arc<App>, _: Call) -> Result<Reply, Trouble> {
    Ok(Reply::text("text/plain; charset=utf-8", "OK\n".to_owned()))
}

pub(in super::super) async fn openapi(app: Arc<App>, _: Call) -> Result<Reply, Trouble> {
    Ok(Reply::ok(app.document.clone()))
}

pub(in super::super) async fn metrics(app: Arc<App>, _: Call) -> Result<Reply, Trouble> {
    let text = app.metrics.text(&app.live.connected());
    Ok(Reply::text("text/plain; version=0.0.4; charset=utf-8", text))
}

/// A shard that is not reached is part of the answer, not a failure of it.
pub(in super::super) async fn shards(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let shards = looked_at(&app, &call)?;
    let answers = recall::looks(&app, &shards).await;
    let mut documents: Vec<Value> = answers.ok.iter().map(|(shard, seen)| document(shard, &seen.it)).collect();
    documents
        .extend(answers.errors.iter().map(|it| json!({"shard": it.shard, "reachable": false, "problem": it.message})));
    let errors: Vec<Value> = answers.errors.iter().map(shard_error).collect();
    Ok(Reply::json(StatusCode::OK, json!({"shards": documents, "errors": errors, "as_of": times(&answers.ok)})))
}
