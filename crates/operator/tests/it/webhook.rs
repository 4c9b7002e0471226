//! The webhook over TLS, as an API server calls it.

use std::sync::Arc;

use data_encoding::BASE64;
use nstance_operator::{
    api::{NstanceMachinePool, names, pool::NstanceMachinePoolSpec},
    ports::{KubePort as _, ObjectRef, kinds},
    testing, webhook,
};
use nstance_rt::tasks::Tasks;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject as _},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;

use crate::support::until;

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_reaches_it_by_the_ca_in_the_configuration() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let world = testing::World::new(&["dev-1"]);
    let (tasks, ctx) = (Tasks::new(), &world.context);
    let configuration = ObjectRef::new(kinds::VALIDATING_WEBHOOK, "", names::webhook::CONFIGURATION);
    let body =
        json!({ "webhooks": [{ "name": "a", "clientConfig": { "service": { "name": names::webhook::SERVICE } } }] });
    world.kube.create(&configuration, &body, "test").await.unwrap();
    let spec = NstanceMachinePoolSpec { group: "web".to_owned(), ..NstanceMachinePoolSpec::default() };
    let mut pool = NstanceMachinePool::new("web", spec);
    pool.metadata.namespace = Some("default".to_owned());
    ctx.stores.pools.put(pool);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    webhook::start(&tasks, ctx, port, "").await.unwrap();
    let bundle = || async {
        let it = world.kube.get(&configuration).await.unwrap().unwrap();
        it["webhooks"][0]["clientConfig"]["caBundle"].as_str().map(str::to_owned)
    };
    until("the CA is announced", || async { bundle().await.is_some() }).await;
    let ca = BASE64.decode(bundle().await.unwrap().as_bytes()).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(&ca).unwrap()).unwrap();
    let tls = TlsConnector::from(Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth()));
    let host = format!("{}.{}.svc", names::webhook::SERVICE, ctx.settings.namespace);
    let socket = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let mut stream = tls.connect(host.try_into().unwrap(), socket).await.unwrap();
    let review = json!({ "request": {
        "uid": "7", "operation": "CREATE", "name": "other", "namespace": "default",
        "kind": { "kind": "NstanceMachinePool" },
        "object": { "spec": { "group": "web", "shards": ["dev-1"] } },
    } })
    .to_string();
    let head = format!(
        "POST {} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        names::webhook::PATH,
        review.len()
    );
    stream.write_all(format!("{head}{review}").as_bytes()).await.unwrap();
    let mut answer = String::new();
    // The server may end the connection without a goodbye.
    let _ = stream.read_to_string(&mut answer).await;
    let body: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!((&body["response"]["uid"], &body["response"]["allowed"]), (&json!("7"), &json!(false)));
    assert!(body["response"]["status"]["message"].as_str().unwrap().contains("NstanceMachinePool web"), "{body}");
    tasks.cancel();
}
