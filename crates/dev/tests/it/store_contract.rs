//! The S3 adapter passes the same contract as every other store, over the wire, against the embedded server.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use nstance_core::ports::objects::ObjectStore;
use nstance_dev::s3::{FaultRule, S3Options, S3Server};
use nstance_rt::entropy::SystemEntropy;
use nstance_store::{
    contract,
    qualify::qualify,
    s3::{S3Settings, S3Store},
    upkeep::{Access, Answer, Retention, Upkeep as _, Versioning},
};

async fn server(dir: &std::path::Path) -> S3Server {
    S3Server::start(S3Options { durable: false, ..S3Options::new(dir) }).await.unwrap()
}

fn store(server: &S3Server, prefix: &str) -> S3Store {
    S3Store::new(S3Settings {
        bucket: "dev".into(),
        prefix: prefix.into(),
        endpoint: Some(server.endpoint()),
        region: Some("dev".into()),
        access_key: Some("test".into()),
        secret_key: Some("dev".into()),
        path_style: Some(true),
        ..S3Settings::default()
    })
    .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s3_keeps_the_contract_of_every_store() {
    let dir = tempfile::tempdir().unwrap();
    let server = server(dir.path()).await;
    let n_stores = AtomicU32::new(0);
    contract::suite(async || {
        // Each rule gets an empty store: a prefix nobody used before.
        let n = n_stores.fetch_add(1, Ordering::Relaxed);
        Arc::new(store(&server, &format!("rule-{n}"))) as Arc<dyn ObjectStore>
    })
    .await;
    assert!(0 < n_stores.load(Ordering::Relaxed));
    server.stop().await;
}

#[tokio::test]
async fn embedded_server_qualifies_and_a_lying_one_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let server = server(dir.path()).await;
    let (shard, id) = ("dev-1".parse().unwrap(), "server-1".parse().unwrap());
    let entropy = SystemEntropy::new();
    qualify(&store(&server, ""), &shard, &id, &entropy).await.unwrap();
    let lie: FaultRule = serde_json::from_str(r#"{"operation": "PutObject", "ignore_conditions": true}"#).unwrap();
    server.add_faults(vec![lie]).await.unwrap();
    let error = qualify(&store(&server, ""), &shard, &id, &entropy).await.unwrap_err();
    assert!(error.is_unsafe(), "{error}");
    server.stop().await;
}

/// Signatures are verified here, so what is known was asked for as the protocol wants it.
#[tokio::test]
async fn a_bucket_tells_how_it_is_kept_to_whom_it_knows() {
    let dir = tempfile::tempdir().unwrap();
    let options = S3Options { durable: false, require_auth: true, ..S3Options::new(dir.path()) };
    let server = S3Server::start(options).await.unwrap();
    let kept = store(&server, "some/prefix");
    assert_eq!(kept.versioning().await, Answer::Known(Versioning::Off));
    assert_eq!(kept.retention().await, Answer::Known(Retention::default()));
    assert_eq!(kept.access().await, Answer::Known(Access::Closed));
    let settings = S3Settings {
        bucket: "dev".into(),
        endpoint: Some(server.endpoint()),
        access_key: Some("test".into()),
        secret_key: Some("wrong".into()),
        ..S3Settings::default()
    };
    let stranger = S3Store::new(settings).unwrap();
    let denied = "the store denies it (403 SignatureDoesNotMatch)".to_owned();
    assert_eq!(stranger.versioning().await, Answer::Unknown(denied.clone()));
    assert_eq!(stranger.retention().await, Answer::Unknown(denied.clone()));
    assert_eq!(stranger.access().await, Answer::Unknown(denied));
    server.stop().await;
}
