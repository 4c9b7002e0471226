//! A server to test, calls to it, and watches that are waited for.

use std::{io::Write as _, path::PathBuf, pin::Pin, time::Duration};

use futures::{AsyncBufReadExt as _, Stream, StreamExt as _};
use kube::{
    Client, Config,
    client::Body,
    config::{KubeConfigOptions, Kubeconfig},
};
use nstance_devk8s::{Options, Running, Server};
use nstance_rt::{entropy::SystemEntropy, tasks::Tasks};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Much longer than anything takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) const MERGE: &str = "application/merge-patch+json";
pub(crate) const JSON_PATCH: &str = "application/json-patch+json";
pub(crate) const STRATEGIC: &str = "application/strategic-merge-patch+json";
pub(crate) const APPLY: &str = "application/apply-patch+yaml";

/// Says what was not tested, also when the test runner keeps the output of tests that pass.
pub(crate) fn say(text: &str) {
    std::io::stderr().write_all(format!("{text}\n").as_bytes()).unwrap();
}

/// A name that no other test has.
pub(crate) fn unique(prefix: &str) -> String {
    format!("{prefix}-{}", nstance_rt::entropy::hex(&SystemEntropy::new(), 5))
}

/// A client that retries nothing.
pub(crate) async fn client(kubeconfig: &str) -> Client {
    // An error means that it is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let kubeconfig = Kubeconfig::from_yaml(kubeconfig).unwrap();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    config.default_retry = false;
    Client::try_from(config).unwrap()
}

/// One of our servers, with a directory of its own.
pub(crate) struct Dev {
    pub(crate) running: Running,
    pub(crate) cluster: Cluster,
    pub(crate) dir: TempDir,
    _tasks: Tasks,
}

impl Dev {
    pub(crate) async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    pub(crate) async fn start_with(set: impl FnOnce(&mut Options)) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), set).await
    }

    pub(crate) async fn start_in(dir: TempDir, set: impl FnOnce(&mut Options)) -> Self {
        let (tasks, mut options) = (Tasks::new(), Options::new(dir.path().join("dev-k8s")));
        set(&mut options);
        let running = Server::start(&tasks, options).await.unwrap();
        let cluster = Cluster { client: client(&running.kubeconfig()).await };
        Self { running, cluster, dir, _tasks: tasks }
    }

    /// Ends the server and says where its files are.
    pub(crate) async fn stop(self) -> TempDir {
        self.running.stop().await;
        self.dir
    }

    pub(crate) fn file(&self, path: &str) -> PathBuf {
        self.dir.path().join("dev-k8s").join(path)
    }

    pub(crate) fn write(&self, path: &str, text: &str) {
        let path = self.file(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub(crate) fn read(&self, path: &str) -> Value {
        serde_json::from_slice(&std::fs::read(self.file(path)).unwrap()).unwrap()
    }
}

/// Any API server.
pub(crate) struct Cluster {
    pub(crate) client: Client,
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) body: Value,
    pub(crate) retry_after: Option<String>,
}

impl Answer {
    /// The body, if the code is this one.
    #[track_caller]
    pub(crate) fn expect(self, code: u16) -> Value {
        assert_eq!(self.code, code, "{}", self.body);
        self.body
    }

    /// The refusal, whichever it is.
    #[track_caller]
    pub(crate) fn expect_refusal(self) -> Value {
        assert!(400 <= self.code, "{}", self.body);
        self.body
    }

    /// The refusal, if code and reason are these.
    #[track_caller]
    pub(crate) fn refused(self, code: u16, reason: &str) -> Value {
        assert_eq!((self.code, self.body["reason"].as_str()), (code, Some(reason)), "{}", self.body);
        assert_eq!((&self.body["kind"], &self.body["status"]), (&json!("Status"), &json!("Failure")));
        self.body
    }
}

impl Cluster {
    pub(crate) async fn call(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Vec<u8>) -> Answer {
        let mut request = http::Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let sent = self.client.send(request.body(Body::from(body)).unwrap());
        let response = tokio::time::timeout(PATIENCE, sent).await.expect("an answer").expect("an answer");
        let code = response.status().as_u16();
        let retry_after = response.headers().get("retry-after").map(|it| it.to_str().unwrap().to_owned());
        let bytes = response.into_body().collect_bytes().await.unwrap();
        let body = serde_json::from_slice(&bytes)
            .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).into_owned()));
        Answer { code, body, retry_after }
    }

    async fn send(&self, method: &str, path: &str, content_type: &str, body: &Value) -> Answer {
        self.call(method, path, &[("content-type", content_type)], body.to_string().into_bytes()).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.call("GET", path, &[], Vec::new()).await
    }

    pub(crate) async fn get_as(&self, path: &str, accept: &str) -> Answer {
        self.call("GET", path, &[("accept", accept)], Vec::new()).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send("POST", path, "application/json", body).await
    }

    pub(crate) async fn put(&self, path: &str, body: &Value) -> Answer {
        self.send("PUT", path, "application/json", body).await
    }

    pub(crate) async fn patch(&self, path: &str, content_type: &str, body: &Value) -> Answer {
        self.send("PATCH", path, content_type, body).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Answer {
        self.call("DELETE", path, &[], Vec::new()).await
    }

    pub(crate) async fn delete_with(&self, path: &str, options: &Value) -> Answer {
        self.send("DELETE", path, "application/json", options).await
    }

    /// Server-side apply for a manager.
    pub(crate) async fn apply(&self, path: &str, manager: &str, body: &Value) -> Answer {
        self.patch(&format!("{path}?fieldManager={manager}"), APPLY, body).await
    }

    /// A new namespace.
    pub(crate) async fn namespace(&self) -> String {
        let name = unique("conformance");
        let namespace = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } });
        self.post("/api/v1/namespaces", &namespace).await.expect(201);
        name
    }

    pub(crate) async fn watch(&self, path: &str) -> Events {
        self.watch_as(path, "application/json").await
    }

    pub(crate) async fn watch_as(&self, path: &str, accept: &str) -> Events {
        let request = http::Request::get(path).header("accept", accept).body(Vec::new()).unwrap();
        let stream = self.client.request_stream(request).await.unwrap();
        Events(Box::pin(stream.lines()))
    }
}

type Lines = dyn Stream<Item = std::io::Result<String>> + Send;

pub(crate) struct Events(Pin<Box<Lines>>);

impl Events {
    /// The next event; `None` at the end of the stream.
    pub(crate) async fn next(&mut self) -> Option<Value> {
        let line = tokio::time::timeout(PATIENCE, self.0.next()).await.expect("an event in time")?;
        Some(serde_json::from_str(&line.unwrap()).unwrap())
    }

    /// The next event that is no bookmark, as type and object.
    pub(crate) async fn expect(&mut self) -> (String, Value) {
        loop {
            let event = self.next().await.expect("an event, not the end");
            if event["type"] != "BOOKMARK" {
                return (event["type"].as_str().unwrap().to_owned(), event["object"].clone());
            }
        }
    }

    /// The next event as type and name.
    pub(crate) async fn named(&mut self) -> (String, String) {
        let (kind, object) = self.expect().await;
        (kind, object["metadata"]["name"].as_str().unwrap_or_default().to_owned())
    }
}

/// Asks again until the answer is there.
pub(crate) async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut ask: impl FnMut() -> F) -> T {
    let asked = async {
        let mut ticks = tokio::time::interval(Duration::from_millis(20));
        loop {
            ticks.tick().await;
            if let Some(answer) = ask().await {
                return answer;
            }
        }
    };
    match tokio::time::timeout(PATIENCE, asked).await {
        Ok(answer) => answer,
        Err(_) => panic!("not in time: {what}"),
    }
}
