//! What the first machine of a group will bring: asked of the provider once for each instance type, and shown with the
//! group.

use std::{collections::HashMap, time::Duration};

use crate::common::{Shard, Site, operator::Operator, wait_for, wait_until};
use nstance_core::ports::provider::{ErrorClass, InstanceType};
use nstance_proto::v1;
use nstance_providers::fake::{FakeOptions, Op, Outcome, Rule, When};
use serde_json::json;

/// A cloud that knows the types `small` and `gpu`.
fn site() -> Site {
    let size = |cpu, memory_bytes, gpus| InstanceType {
        arch: Some("amd64".to_owned()),
        cpu,
        memory_bytes,
        ephemeral_storage_bytes: (0 < gpus).then_some(100 << 30),
        gpus,
    };
    let types = [("small", size(2, 3 << 29, 0)), ("gpu", size(16, 64 << 30, 4))];
    let instance_types = types.map(|(name, size)| (name.to_owned(), size)).into();
    Site::with(FakeOptions { instance_types, ..FakeOptions::default() })
}

async fn with_type(instance_type: &'static str) -> (Shard, Operator) {
    let shard = Shard::start_on(site(), 0, |config| {
        config["templates"]["knc"]["instance_type"] = json!(instance_type);
    })
    .await;
    let operator = Operator::on(&shard).await;
    (shard, operator)
}

fn map(entries: &[(&str, &str)]) -> HashMap<String, String> {
    entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

async fn upsert(operator: &Operator, key: &str, instance_type: &str) {
    let config = Some(v1::GroupConfig {
        template: "knc".to_owned(),
        instance_type: instance_type.to_owned(),
        size: Some(0),
        ..v1::GroupConfig::default()
    });
    let request = v1::UpsertGroupRequest { key: key.to_owned(), config, ..v1::UpsertGroupRequest::default() };
    operator.client().upsert_group(request).await.unwrap();
}

#[tokio::test]
async fn an_empty_group_shows_the_capacity_of_its_instance_type() {
    let (shard, operator) = with_type("small").await;
    let small = map(&[("cpu", "2"), ("memory", "1536Mi")]);
    wait_until("its capacity is shown", async || operator.group("web").await.capacity == small).await;
    assert_eq!(operator.group("web").await.arch, "amd64");
    upsert(&operator, "train", "gpu").await;
    let gpu = map(&[("cpu", "16"), ("memory", "64Gi"), ("ephemeral-storage", "100Gi"), ("nvidia.com/gpu", "4")]);
    wait_until("that of a new group too", async || operator.group("train").await.capacity == gpu).await;
    upsert(&operator, "more", "small").await;
    assert_eq!(operator.group("more").await.capacity, small, "a known type is known at once");
    assert_eq!(shard.site.calls(Op::InstanceType).len(), 2, "each type was asked for once, whoever lists");
}

#[tokio::test]
async fn a_type_that_the_provider_does_not_know_has_no_capacity_and_is_not_asked_for_at_every_change() {
    let (shard, operator) = with_type("odd").await;
    wait_for("it is asked for", || shard.site.calls(Op::InstanceType).len() == 1).await;
    upsert(&operator, "more", "odd").await;
    upsert(&operator, "known", "small").await;
    wait_until("the other is known", async || !operator.group("known").await.capacity.is_empty()).await;
    assert!(operator.group("web").await.capacity.is_empty());
    assert_eq!(shard.site.calls(Op::InstanceType).len(), 2);
    operator.leap(&shard.site, Duration::from_secs(3600)).await;
    wait_for("it is asked for again", || shard.site.calls(Op::InstanceType).len() == 3).await;
}

#[tokio::test]
async fn watchers_are_told_a_capacity_that_becomes_known_later() {
    let site = site();
    let refusal = Outcome::Refuse(ErrorClass::Unavailable);
    site.cloud.script(Rule::always(Op::InstanceType, When::Always, refusal));
    let shard = Shard::start_on(site, 0, |config| config["templates"]["knc"]["instance_type"] = json!("small")).await;
    let operator = Operator::on(&shard).await;
    wait_for("it is refused", || !shard.site.calls(Op::InstanceType).is_empty()).await;
    assert!(operator.group("web").await.capacity.is_empty());
    assert!(operator.events("ProviderFailing").is_empty(), "it says nothing about the provider as a whole");
    let mut stream = operator.client().watch_groups(v1::WatchRequest::default()).await.unwrap().into_inner();
    shard.site.cloud.clear_script();
    operator.leap(&shard.site, Duration::from_secs(3600)).await;
    let told = tokio::time::timeout(Duration::from_secs(30), async {
        loop {
            let event = stream.message().await.unwrap().expect("no end");
            if event.group.is_some_and(|group| group.capacity == map(&[("cpu", "2"), ("memory", "1536Mi")])) {
                return;
            }
        }
    });
    told.await.expect("told in time");
}
