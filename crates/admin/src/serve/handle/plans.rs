//! What the planner would do.

use std::sync::Arc;

use http::StatusCode;

use super::{
    super::{
        App, ask,
        reply::{Done, Reply, Trouble, gather, of_those_that_have_it},
        route::Call,
    },
    looked_at,
};
use crate::view;

/// As it is, or with other sizes or another config.
pub(in super::super) async fn plan(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let (shards, request) = (looked_at(&app, &call)?, &ask::plan(&call));
    let answers = shards.each(|mut client| async move {
        let plan = client.service.plan(request.clone()).await?.into_inner();
        Ok(Done::new(StatusCode::OK, view::plan(&client.shard, &plan)))
    });
    gather("plans", of_those_that_have_it(answers.await))
}
