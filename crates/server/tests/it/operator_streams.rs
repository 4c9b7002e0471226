//! How the streams of an operator end that may not watch any more.

use std::time::Duration;

use crate::common::{LIMIT, Shard, assert_refused, operator::Operator, wait_for};
use nstance_proto::v1;
use serde_json::json;
use tonic::{Code, Response, Status, Streaming};

/// How a stream ends, whatever it says before.
async fn end<T>(stream: Response<Streaming<T>>) -> Result<(), Status> {
    let mut stream = stream.into_inner();
    let reading = async {
        while stream.message().await?.is_some() {}
        Ok(())
    };
    tokio::time::timeout(LIMIT, reading).await.expect("the stream ends")
}

/// Has all four kinds of streams end with this.
async fn all_end(operator: &Operator, code: Code, reason: &str, why: impl AsyncFnOnce()) {
    let mut client = operator.client();
    let groups = client.watch_groups(v1::WatchRequest::default()).await.unwrap();
    let instances = client.watch_instances(v1::WatchRequest::default()).await.unwrap();
    let errors = client.watch_errors(v1::WatchRequest::default()).await.unwrap();
    let events = client.watch_events(v1::WatchEventsRequest::default()).await.unwrap();
    why().await;
    let (groups, instances, errors, events) = tokio::join!(end(groups), end(instances), end(errors), end(events));
    for ended in [groups, instances, errors, events] {
        assert_refused(ended, code, reason);
    }
}

#[tokio::test]
async fn revoked_operator_loses_streams() {
    let shard = Shard::start(0).await;
    let (revoked, other) = (Operator::on(&shard).await, Operator::on(&shard).await);
    let mut stays = other.client().watch_instances(v1::WatchRequest::default()).await.unwrap().into_inner();
    assert_eq!(stays.message().await.unwrap().unwrap().status, "snapshot_end");
    all_end(&revoked, Code::PermissionDenied, "OPERATOR_REVOKED", async || {
        revoked.revoke(&shard.site).await;
        // What the admin tool does after it has marked the record.
        other.client().refresh_config(v1::RefreshConfigRequest::default()).await.unwrap();
    })
    .await;
    assert_refused(revoked.client().list_groups(()).await, Code::PermissionDenied, "OPERATOR_REVOKED");
    let config = Some(v1::GroupConfig { size: Some(1), ..v1::GroupConfig::default() });
    let request = v1::UpsertGroupRequest { key: "web".to_owned(), config, ..v1::UpsertGroupRequest::default() };
    other.client().upsert_group(request).await.unwrap();
    assert_eq!(stays.message().await.unwrap().unwrap().group, "web", "others go on watching");
}

#[tokio::test]
async fn a_mark_that_nobody_told_of_is_seen_within_five_minutes() {
    let shard = Shard::start(0).await;
    let operator = Operator::on(&shard).await;
    all_end(&operator, Code::PermissionDenied, "OPERATOR_REVOKED", async || {
        operator.revoke(&shard.site).await;
        shard.site.clock.leap(Duration::from_secs(301));
    })
    .await;
}

#[tokio::test]
async fn a_stream_ends_with_the_certificate_it_was_opened_with() {
    let shard = Shard::start(0).await;
    let operator = Operator::on(&shard).await;
    all_end(&operator, Code::Unauthenticated, "CERT_EXPIRED", async || {
        shard.site.clock.leap(Duration::from_secs(24 * 3600 + 61));
    })
    .await;
}

#[tokio::test]
async fn a_tenant_that_left_the_config_watches_no_more() {
    let shard = Shard::start_with(0, |config| config["tenants"] = json!({ "other": {} })).await;
    let other = Operator::of(&shard, "other".parse().unwrap()).await;
    let mine = Operator::on(&shard).await;
    all_end(&other, Code::PermissionDenied, "TENANT_UNKNOWN", async || {
        shard.site.upload(&shard.site.config(0)).await;
        mine.client().refresh_config(v1::RefreshConfigRequest::default()).await.unwrap();
    })
    .await;
    wait_for("the refresh is told", || !mine.events("ConfigApplied").is_empty()).await;
}
