//! A store of its own for each test, and plain HTTP to speak to it.

#![allow(dead_code, reason = "each test binary uses its own part of this")]
#![allow(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

use std::sync::Once;

use nstance_dev::s3::{FaultRule, S3Options, S3Server};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use reqwest::{Client, Method, RequestBuilder, Response};

pub(crate) struct Store {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) server: S3Server,
    pub(crate) http: Client,
}

impl Store {
    pub(crate) async fn start() -> Store {
        Store::start_with(|options| options).await
    }

    pub(crate) async fn start_with(adjust: impl FnOnce(S3Options) -> S3Options) -> Store {
        let dir = tempfile::tempdir().unwrap();
        let options = S3Options { durable: false, ..S3Options::new(dir.path()) };
        let server = S3Server::start(adjust(options)).await.unwrap();
        Store { dir, server, http: client() }
    }

    pub(crate) async fn restart(self) -> Store {
        let Store { dir, server, http } = self;
        server.stop().await;
        let server = S3Server::start(S3Options { durable: false, ..S3Options::new(dir.path()) }).await.unwrap();
        Store { dir, server, http }
    }

    /// `path` is below the bucket and already encoded.
    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}/dev/{path}", self.server.endpoint()))
    }

    pub(crate) async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Response {
        let mut request = self.request(method.parse().unwrap(), path).body(body.to_owned());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.send().await.unwrap()
    }

    pub(crate) async fn put(&self, path: &str, body: &str) -> String {
        let answer = self.send("PUT", path, &[], body).await;
        assert_eq!(answer.status(), 200, "{path}");
        etag(&answer)
    }

    pub(crate) async fn get(&self, path: &str) -> String {
        let answer = self.send("GET", path, &[], "").await;
        assert_eq!(answer.status(), 200, "{path}");
        answer.text().await.unwrap()
    }

    pub(crate) async fn status(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> u16 {
        self.send(method, path, headers, "x").await.status().as_u16()
    }

    pub(crate) async fn fault(&self, rule: FaultRule) {
        self.server.add_faults(vec![rule]).await.unwrap();
    }

    pub(crate) fn object_store(&self, access_key: &str) -> AmazonS3 {
        object_store_at(&self.server.endpoint(), access_key, "any secret will do")
    }
}

pub(crate) fn object_store_at(endpoint: &str, access_key: &str, secret: &str) -> AmazonS3 {
    install_crypto();
    AmazonS3Builder::new()
        .with_endpoint(endpoint)
        .with_allow_http(true)
        .with_bucket_name("dev")
        .with_region("dev")
        .with_access_key_id(access_key)
        .with_secret_access_key(secret)
        .build()
        .unwrap()
}

pub(crate) fn client() -> Client {
    install_crypto();
    Client::builder().no_proxy().build().unwrap()
}

fn install_crypto() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

pub(crate) fn etag(answer: &Response) -> String {
    header(answer, "etag")
}

pub(crate) fn header(answer: &Response, name: &str) -> String {
    answer.headers().get(name).map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default()
}

/// The contents of all elements of this name.
pub(crate) fn elements(xml: &str, name: &str) -> Vec<String> {
    let (open, close) = (format!("<{name}>"), format!("</{name}>"));
    xml.split(&open).skip(1).map(|rest| rest.split(&close).next().unwrap().to_owned()).collect()
}

pub(crate) fn element(xml: &str, name: &str) -> String {
    elements(xml, name).into_iter().next().unwrap_or_default()
}
