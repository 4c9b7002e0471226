//! Configs of shards.

use std::sync::Arc;

use http::StatusCode;
use nstance_proto::v1::RefreshConfigRequest;

use super::{
    super::{
        App,
        reply::{Done, Reply, Trouble, gather},
        route::Call,
    },
    chosen, looked_at,
};
use crate::view;

pub(in super::super) async fn status(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let shards = looked_at(&app, &call)?;
    let answers = shards.each(|mut client| async move {
        let status = client.config_status().await?;
        Ok(Done::new(StatusCode::OK, view::config_status(&client.shard, &status)))
    });
    gather("shards", answers.await)
}

/// Updated is 200, unchanged 304. A dry run updates nothing, so there it is another etag that says what would be.
pub(in super::super) async fn refresh(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let shards = chosen(&app, &call)?;
    let request = RefreshConfigRequest { confirm_removals: call.is("confirm_removals"), dry_run: call.is("dry_run") };
    let answers = shards.each(|mut client| async move {
        let done = client.service.refresh_config(request).await?.into_inner();
        // Removals that the brake holds may be let go without another config.
        let would = done.prev_etag != done.etag || !done.changed_groups.is_empty() || !done.removed_groups.is_empty();
        let differs = done.updated || would;
        let status = if differs { StatusCode::OK } else { StatusCode::NOT_MODIFIED };
        Ok(Done::new(status, view::refreshed(&client.shard, &done)))
    });
    gather("shards", answers.await)
}
