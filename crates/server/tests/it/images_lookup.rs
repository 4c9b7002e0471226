//! Images: what a name stands for is looked up, remembered, and never empty.

use std::time::Duration;

use crate::common::{Shard, Site, fleet::Fleet, operator::Operator, wait_for, wait_until};
use nstance_core::{ids::InstanceId, ports::provider::ErrorClass};
use nstance_providers::fake::{Op, Outcome, Rule, When};
use serde_json::{Value, json};

/// Groups are made from the newest image whose name begins with `al-`, which is looked for every other second.
fn from_image(config: &mut Value) {
    config["server"]["image_refresh_interval"] = "2s".into();
    config["images"] = json!({ "web": { "provider": "fake", "filters": [{ "name": "name", "values": ["al-*"] }] } });
    config["templates"]["knc"]["userdata"] = json!({ "templateString": "image={{ .Image.web }}" });
}

fn userdata(site: &Site, id: InstanceId) -> String {
    site.spec(id).userdata.unwrap().0
}

fn no_lookups(site: &Site, outcome: Outcome) {
    site.cloud.script(Rule::always(Op::ResolveImage, When::Always, outcome));
}

#[tokio::test]
async fn a_new_image_is_for_new_instances_only() {
    let site = Site::new();
    site.cloud.publish_image("al-1", "ami-1");
    let shard = Shard::start_on(site, 2, from_image).await;
    let operator = Operator::on(&shard).await;
    let fleet = Fleet::on(&shard);
    let site = shard.site.clone();
    fleet.is_whole(&site, 2).await;
    wait_until("ready", async || operator.group("web").await.ready_size == 2).await;
    let old = site.standing();
    for id in &old {
        assert_eq!(userdata(&site, *id), "image=ami-1");
        assert_eq!(site.record(*id).await.unwrap().image.as_deref(), Some("ami-1"));
    }
    let hash = operator.group("web").await.infra_hash;
    site.cloud.publish_image("al-2", "ami-2");
    wait_for("it is found", || {
        operator.events("ImageResolved").iter().any(|event| event.message == "image web is ami-2")
    })
    .await;
    let group = operator.group("web").await;
    assert_eq!((group.infra_hash, group.updated_size), (hash, 2), "no drift");
    site.cloud.kill(old[0]);
    fleet.is_whole(&site, 2).await;
    let new = site.standing().into_iter().find(|id| !old.contains(id)).unwrap();
    assert_eq!(userdata(&site, new), "image=ami-2");
    assert!(site.standing().contains(&old[1]), "nobody is rotated for it");
    assert_eq!(operator.events("ImageResolved").len(), 2, "told when it changed, and not with every lookup");
}

#[tokio::test]
async fn an_image_that_is_not_found_holds_its_groups_and_no_others() {
    let shard = Shard::start_with(1, |config| {
        from_image(config);
        config["templates"]["plain"] = json!({ "kind": "knc", "arch": "amd64", "subnet_pool": "main" });
        config["groups"]["default"]["other"] = json!({ "template": "plain", "size": 1 });
    })
    .await;
    let operator = Operator::on(&shard).await;
    let told = operator.hears("ImageFailed").await;
    assert!(told.message.contains("image web") && told.message.contains("held"), "{}", told.message);
    assert!(told.group.is_empty(), "it is nobody's own");
    wait_until("the hold is shown", async || operator.holds("web").await == ["ImageUnresolved"]).await;
    let other = shard.only_vm().await;
    assert_eq!(shard.site.record(other).await.unwrap().group.group.as_str(), "other");
    assert!(operator.holds("other").await.is_empty());
    shard.site.cloud.publish_image("al-1", "ami-1");
    shard.vms(2).await;
    wait_until("the hold is over", async || operator.holds("web").await.is_empty()).await;
    assert_eq!(shard.site.calls(Op::Create).len(), 2, "nothing was tried without it");
}

#[tokio::test]
async fn a_fallback_is_taken_when_the_lookup_fails() {
    let site = Site::new();
    no_lookups(&site, Outcome::Refuse(ErrorClass::Auth));
    let shard = Shard::start_on(site, 1, |config| {
        from_image(config);
        config["images"]["web"]["fallback"] = "ami-0".into();
    })
    .await;
    let operator = Operator::on(&shard).await;
    let id = shard.only_vm().await;
    assert_eq!(userdata(&shard.site, id), "image=ami-0");
    let told = operator.hears("ImageFailed").await;
    assert!(told.message.contains("ami-0 is used, from fallback"), "{}", told.message);
    assert!(operator.events("ProviderFailing").is_empty(), "it says nothing about the provider as a whole");
    shard.site.cloud.clear_script();
    shard.site.cloud.publish_image("al-1", "ami-1");
    operator.hears("ImageResolved").await;
}

#[tokio::test]
async fn the_last_good_image_survives_a_restart() {
    let site = Site::new();
    site.cloud.publish_image("al-1", "ami-1");
    let shard = Shard::start_on(site, 1, |config| {
        from_image(config);
        config["images"]["web"]["fallback"] = "ami-0".into();
    })
    .await;
    let first = shard.only_vm().await;
    let site = shard.site.clone();
    shard.server.stop(Duration::from_secs(5)).await;
    // Lookups hang from here on: nothing waits for them.
    no_lookups(&site, Outcome::Hang);
    site.cloud.kill(first);
    let shard = site.lead("srv-1").await;
    let operator = Operator::on(&shard).await;
    wait_for("it is replaced", || site.standing().len() == 1 && site.standing() != [first]).await;
    assert_eq!(userdata(&site, site.standing()[0]), "image=ami-1", "from the cache, which goes before the fallback");
    assert!(operator.events("ImageResolved").is_empty(), "it was told before");
    // A server that never saw it has neither.
    let second = site.standing()[0];
    site.cloud.kill(second);
    let shard = shard.restart("srv-2").await;
    let operator = Operator::on(&shard).await;
    wait_until("the hold is shown", async || operator.holds("web").await == ["ImageUnresolved"]).await;
    assert!(site.standing().is_empty());
}

#[tokio::test]
async fn a_create_is_repeated_with_the_image_it_began_with() {
    let site = Site::new();
    site.cloud.publish_image("al-1", "ami-1");
    site.cloud.script(Rule::always(Op::Create, When::Always, Outcome::Refuse(ErrorClass::Ambiguous)));
    let shard = Shard::start_on(site, 1, from_image).await;
    let operator = Operator::on(&shard).await;
    wait_for("it is asked for", || !shard.site.calls(Op::Create).is_empty()).await;
    shard.site.cloud.publish_image("al-2", "ami-2");
    wait_for("the newer one is found", || {
        operator.events("ImageResolved").iter().any(|event| event.message == "image web is ami-2")
    })
    .await;
    shard.site.cloud.clear_script();
    let id = shard.only_vm().await;
    let asked: Vec<_> = shard.site.calls(Op::Create).into_iter().filter_map(|call| call.instance).collect();
    assert!(asked.iter().all(|it| *it == id), "one instance, asked for again");
    assert_eq!(userdata(&shard.site, id), "image=ami-1");
}
