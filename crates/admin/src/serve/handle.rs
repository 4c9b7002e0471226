//! What the routes do. A handler picks its shards, asks, and puts the answers into the form of the API.

pub(super) mod config;
pub(super) mod events;
pub(super) mod groups;
pub(super) mod instances;
pub(super) mod plans;
pub(super) mod stream;
pub(super) mod this;

use http::StatusCode;
use nstance_client::Shards;
use serde_json::Value;

use super::{App, reply::Trouble, reply::problem, route::Call};
use crate::failure::unknown_shard;

fn names(call: &Call) -> Vec<String> {
    let names = call.params.get("shard").and_then(Value::as_array).into_iter().flatten();
    names.filter_map(|it| Some(it.as_str()?.to_owned())).collect()
}

/// The shards that are named, else all: for routes that only look.
pub(super) fn looked_at(app: &App, call: &Call) -> Result<Shards, Trouble> {
    let names = names(call);
    if names.is_empty() {
        return Ok(app.shards.clone());
    }
    app.shards.only(&names).map_err(|error| Trouble::new(StatusCode::NOT_FOUND, "no_such_shard", unknown_shard(&error)))
}

/// The same for routes that change something: which shards must be said, unless there is but one.
fn chosen(app: &App, call: &Call) -> Result<Shards, Trouble> {
    let shards = looked_at(app, call)?;
    if !names(call).is_empty() && call.flag("all_shards") {
        // One of the two was not meant, and it is not for us to say which.
        return Err(Trouble::bad_request(vec![problem("all_shards", "is said together with shard")]));
    }
    if names(call).is_empty() && !call.flag("all_shards") && 1 < shards.len() {
        return Err(Trouble::bad_request(vec![problem("shard", &which(app))])
            .hint("add ?shard=NAME (repeatable) or ?all_shards=true"));
    }
    Ok(shards)
}

/// Exactly one.
fn one(app: &App, call: &Call) -> Result<Shards, Trouble> {
    let shards = looked_at(app, call)?;
    if shards.len() != 1 {
        return Err(Trouble::bad_request(vec![problem("shard", &which(app))]).hint("add ?shard=NAME, once"));
    }
    Ok(shards)
}

fn which(app: &App) -> String {
    let names: Vec<&str> = app.shards.names().collect();
    format!("say which of {} shards: {}", names.len(), names.join(", "))
}
