//! What the health port says while a server starts, and what it takes to come up.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use crate::common::{
    LIMIT, Shard, Site,
    meddler::Meddler,
    operator::Operator,
    shard_id, wait_until,
    wire::{self, new_key},
};
use nstance_identity::ca::{CA_KEY_SECRET, CaProfile, make_ca_certificate};
use nstance_providers::fake::{FakeOptions, Op};
use nstance_rt::entropy::SeededEntropy;
use nstance_server::boot::Running;
use nstance_store::{
    faulty::{FaultPlan, FaultyStore},
    memory::MemoryStore,
    records::{ca_crt_key, config_keys},
};
use serde_json::Value;

async fn health_of(server: &mut Running) -> SocketAddr {
    tokio::time::timeout(LIMIT, server.health_addr()).await.expect("a health port").expect("a running server")
}

/// Waits until `/health` has this status and mentions all of these.
async fn says(addr: SocketAddr, code: u16, words: &[&str]) {
    let mut last = None;
    let met = tokio::time::timeout(LIMIT, async {
        loop {
            last = wire::get(addr, "/health").await.ok();
            if last.as_ref().is_some_and(|(got, body)| *got == code && words.iter().all(|word| body.contains(word))) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    let met = met.await.is_ok();
    assert!(met, "waited for {code} {words:?}, last answer {last:?}");
}

async fn ready(addr: SocketAddr) -> (u16, Value) {
    let (code, body) = wire::get(addr, "/ready").await.expect("an answer");
    (code, serde_json::from_str(&body).expect("JSON"))
}

#[tokio::test]
async fn health_follows_the_truth() {
    let site = Arc::new(Site::new());
    site.take_key();
    site.upload(&site.config(0)).await;
    let mut server = site.boot("srv-1");
    let addr = health_of(&mut server).await;
    let path = site.key_path();
    says(addr, 503, &["secrets", "encryption key", path.to_str().unwrap()]).await;
    let (code, body) = ready(addr).await;
    assert_eq!((code, &body["ready"], &body["leader"]), (503, &Value::Bool(false), &Value::Bool(false)));
    assert!(body["problems"][0].as_str().unwrap().contains(path.to_str().unwrap()), "{body}");
    assert_eq!(wire::get(addr, "/leader").await.unwrap().0, 503);
    assert_eq!(wire::get(addr, "/metrics").await.unwrap().0, 200, "metrics from the first moment on");

    site.give_key();
    says(addr, 200, &["OK"]).await;
    let shard = Shard::of(site, server).await;
    let (code, body) = ready(addr).await;
    assert_eq!((code, &body["ready"], &body["leader"]), (200, &Value::Bool(true), &Value::Bool(true)), "{body}");
    assert_eq!((&body["role"], &body["epoch"]), (&"leading".into(), &shard.leader.epoch.0.into()));
    assert_eq!(body["config"]["stale"], false);
    assert!(!body["config"]["etag"].as_str().unwrap().is_empty());
    assert_eq!(wire::get(addr, "/leader").await.unwrap().0, 200);
    let (_, metrics) = wire::get(addr, "/metrics").await.unwrap();
    assert!(metrics.contains("nstance_leading 1"), "{metrics}");
    assert_eq!(wire::get(addr, "/").await.unwrap().0, 200);

    shard.server.stop(Duration::from_secs(5)).await;
    assert!(wire::get(addr, "/health").await.is_err(), "nobody answers for a server that is gone");
}

#[tokio::test]
async fn a_missing_config_is_waited_for() {
    let site = Arc::new(Site::new());
    let mut server = site.boot("srv-1");
    let addr = health_of(&mut server).await;
    let [first, second] = config_keys(&shard_id());
    says(addr, 503, &["config", &first, &second]).await;
    site.upload(&site.config(1)).await;
    Shard::of(site, server).await.only_vm().await;
}

#[tokio::test]
async fn an_invalid_config_is_reported_and_its_repair_noticed() {
    let site = Arc::new(Site::new());
    let mut config = site.config(1);
    config["groups"]["default"]["web"]["template"] = "knx".into();
    config["server"]["leader_election"]["tttl"] = "1s".into();
    site.upload(&config).await;
    let mut server = site.boot("srv-1");
    let addr = health_of(&mut server).await;
    says(addr, 503, &["groups.default.web.template", "knc", "tttl"]).await;
    site.upload(&site.config(1)).await;
    Shard::of(site, server).await.only_vm().await;
}

#[tokio::test]
async fn a_lost_config_leaves_the_last_good_one_in_force() {
    let shard = Shard::start(2).await;
    shard.vms(2).await;
    let site = shard.site.clone();
    shard.server.stop(Duration::from_secs(5)).await;
    let [key, _] = config_keys(&shard_id());
    site.bucket.delete(&key).await.unwrap();
    let mut shard = site.lead("srv-1").await;
    let addr = health_of(&mut shard.server).await;
    assert_ne!(addr.port(), 0);
    says(addr, 200, &["OK"]).await;
    let (code, body) = ready(addr).await;
    assert_eq!(body["config"]["stale"], true);
    assert!(body["problems"][0].as_str().unwrap().contains(&key), "{body}");
    assert_eq!((code, &body["ready"]), (200, &Value::Bool(true)), "it is able to lead, and leads: {body}");
    assert_eq!(shard.vms(2).await.len(), 2);
    assert_eq!(site.calls(Op::Create).len(), 2);
}

#[tokio::test]
async fn a_broken_config_leaves_the_last_good_one_in_force() {
    let shard = Shard::start(1).await;
    let id = shard.only_vm().await;
    let site = shard.site.clone();
    shard.server.stop(Duration::from_secs(5)).await;
    site.upload_text("{ \"server\": { \"shrad\": 1 } }").await;
    let shard = site.lead("srv-1").await;
    let operator = Operator::on(&shard).await;
    let told = operator.hears("ConfigRejected").await;
    assert!(told.message.contains("shrad"), "{}", told.message);
    assert_eq!(site.standing(), [id]);
    assert!(site.calls(Op::Delete).is_empty());
}

#[tokio::test]
async fn a_store_that_updates_missing_keys_is_refused() {
    let site = Site::on(Arc::new(Meddler::careless(Arc::new(MemoryStore::new()))), FakeOptions::default());
    site.upload(&site.config(1)).await;
    let mut server = site.boot("srv-1");
    let why = tokio::time::timeout(LIMIT, server.failed()).await.expect("it gives up");
    assert!(why.contains("update of a missing key with If-Match was accepted"), "{why}");
    server.stop(Duration::from_secs(2)).await;
    assert!(site.cloud.calls().is_empty(), "and nothing was touched");
}

#[tokio::test]
async fn a_store_outage_at_start_is_waited_out() {
    let entropy = Arc::new(SeededEntropy::new(1));
    let store = Arc::new(FaultyStore::new(Arc::new(MemoryStore::new()), entropy, FaultPlan::default()));
    let site = Arc::new(Site::on(store.clone(), FakeOptions::default()));
    site.upload(&site.config(1)).await;
    store.set_unreachable(true);
    let mut server = site.boot("srv-1");
    let addr = health_of(&mut server).await;
    says(addr, 503, &["store", "no connection"]).await;
    store.set_unreachable(false);
    Shard::of(site, server).await.only_vm().await;
}

#[tokio::test]
async fn two_servers_starting_at_once_agree_on_one_ca() {
    let site = Arc::new(Site::new());
    site.upload(&site.config(1)).await;
    let (first, second) = (site.boot("srv-1"), site.boot("srv-2"));
    wait_until("both are loaded", async || first.vitals.is_loaded() && second.vitals.is_loaded()).await;
    let bundle = site.bundle().await;
    assert_eq!(bundle.certificates().len(), 1);
    let logged = site.bucket.list("cluster/certlog/").await.unwrap();
    assert!(!logged.is_empty());
    // Whoever leads first hands over to the other, and a client that trusts the one CA is served by both.
    let (mut first, mut second) = (first, second);
    let first_leads = tokio::select! {
        led = first.leading() => led.map(|_| true),
        led = second.leading() => led.map(|_| false),
    };
    let (leader, follower) = if first_leads.unwrap() { (first, second) } else { (second, first) };
    let shard = Shard::of(site.clone(), leader).await;
    drop(Operator::on(&shard).await);
    shard.server.stop(Duration::from_secs(5)).await;
    let shard = Shard::of(site.clone(), follower).await;
    drop(Operator::on(&shard).await);
    assert_eq!(site.bundle().await, bundle);
}

#[tokio::test]
async fn ca_creation_survives_a_crash_at_every_step() {
    // After the key.
    let site = Arc::new(Site::new());
    let key = new_key(site.entropy.as_ref());
    site.put_secret_key(CA_KEY_SECRET, &key).await;
    site.upload(&site.config(0)).await;
    drop(Operator::on(&site.lead("srv-1").await).await);
    assert_eq!(site.bundle().await.issuer().public_key, key.public_key(), "the stored key is the one that is used");

    // After the certificate, before the nonce key.
    let site = Arc::new(Site::new());
    let key = new_key(site.entropy.as_ref());
    site.put_secret_key(CA_KEY_SECRET, &key).await;
    let profile = CaProfile::of("demo".parse().unwrap());
    let made = make_ca_certificate(&key, &profile, site.now(), site.entropy.as_ref());
    crate::common::overwrite(site.bucket.as_ref(), &ca_crt_key(), made.chain_pem.clone().into_bytes()).await;
    site.upload(&site.config(0)).await;
    drop(Operator::on(&site.lead("srv-1").await).await);
    assert_eq!(site.bundle().await.pem(), made.chain_pem);
}

#[tokio::test]
async fn a_ca_without_its_key_is_not_replaced() {
    let site = Arc::new(Site::new());
    let (lost, other) = (new_key(site.entropy.as_ref()), new_key(site.entropy.as_ref()));
    let profile = CaProfile::of("demo".parse().unwrap());
    let made = make_ca_certificate(&lost, &profile, site.now(), site.entropy.as_ref());
    crate::common::overwrite(site.bucket.as_ref(), &ca_crt_key(), made.chain_pem.clone().into_bytes()).await;
    site.put_secret_key(CA_KEY_SECRET, &other).await;
    site.upload(&site.config(1)).await;
    let mut server = site.boot("srv-1");
    let addr = health_of(&mut server).await;
    says(addr, 503, &["ca", &lost.fingerprint(), "restore secret ca.key", "rotate-ca --lost-key"]).await;
    assert_eq!(site.bundle().await.pem(), made.chain_pem);
    assert!(site.calls(Op::Create).is_empty());
}

#[tokio::test]
async fn a_bucket_that_lost_everything_is_not_begun_anew() {
    let shard = Shard::start(1).await;
    shard.only_vm().await;
    let site = shard.site.clone();
    shard.server.stop(Duration::from_secs(5)).await;
    for listed in site.bucket.list("").await.unwrap() {
        site.bucket.delete(&listed.key).await.unwrap();
    }
    let mut server = site.boot("srv-1");
    let addr = health_of(&mut server).await;
    says(addr, 503, &["the store was lost"]).await;
    let left: Vec<_> = site.bucket.list("cluster/").await.unwrap();
    assert!(!left.iter().any(|it| it.key == ca_crt_key()), "no second CA");
    assert_eq!(site.calls(Op::Create).len(), 1);
}
