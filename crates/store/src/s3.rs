//! Objects in S3, or in a store that speaks its language.
//!
//! The library underneath signs, encodes and pages. It does not retry for us: a retried write that had landed would
//! come back as 412, and the ambiguity would be hidden from the layer that can resolve it. What it tells of a failure
//! is too coarse to say whether a write may have landed, so a thin service under it notes how each request ended.

mod upkeep;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use futures::StreamExt as _;
use nstance_core::{
    ports::objects::{Condition, ETag, Listed, Object, ObjectStore, ShowPage, StoreError, StoreFault, Unavailable},
    time::Timestamp,
};
use nstance_rt::entropy::SystemEntropy;
use object_store::{
    ClientOptions, GetOptions, ObjectStore as _, PutMode, PutOptions, PutPayload, RetryConfig, UpdateVersion,
    aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey},
    client::{
        HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
    },
    list::{PaginatedListOptions, PaginatedListStore as _},
    path::Path,
};
use tokio::sync::Semaphore;

use crate::{
    key::{check_key, check_prefix, invalid, normal_prefix},
    retry,
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Requests under way at a time; the others wait for their turn. A fleet that comes up at once would open a connection
/// for each of its writes otherwise, and none of them would be faster for it.
const AT_A_TIME: usize = 128;

/// Where the bucket is, and as whom we come. Fields left out are taken from the machine (instance role, web identity).
#[derive(Clone, Default)]
pub struct S3Settings {
    pub bucket: String,
    pub prefix: String,
    /// `http://127.0.0.1:9000`; none = AWS.
    pub endpoint: Option<String>,
    pub region: Option<String>,
    pub access_key: Option<String>,
    pub secret_key: Option<String>,
    pub session_token: Option<String>,
    /// Bucket in the path instead of the host name. `None`: yes for an own endpoint or a bucket with dots, else no.
    pub path_style: Option<bool>,
    /// Variables that tell where role credentials are to be had, by name; see [`ROLE_VARIABLES`].
    pub role: Vec<(String, String)>,
}

/// How the platforms say which role this process has. Anything else of the environment is not looked at.
pub const ROLE_VARIABLES: [&str; 8] = [
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME",
    "AWS_ENDPOINT_URL_STS",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_METADATA_ENDPOINT",
];

impl S3Settings {
    /// The variables the AWS tools know. `lookup` is asked for each by name.
    pub fn from_lookup(bucket: &str, prefix: &str, lookup: impl Fn(&str) -> Option<String>) -> Self {
        let get = |name: &str| lookup(name).filter(|value| !value.is_empty());
        Self {
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
            endpoint: get("AWS_ENDPOINT_URL_S3").or_else(|| get("AWS_ENDPOINT_URL")),
            region: get("AWS_REGION").or_else(|| get("AWS_DEFAULT_REGION")),
            access_key: get("AWS_ACCESS_KEY_ID"),
            secret_key: get("AWS_SECRET_ACCESS_KEY"),
            session_token: get("AWS_SESSION_TOKEN"),
            path_style: get("AWS_S3_USE_PATH_STYLE")
                .map(|value| matches!(value.as_str(), "1" | "true" | "TRUE" | "yes")),
            role: ROLE_VARIABLES.iter().filter_map(|name| Some(((*name).to_owned(), get(name)?))).collect(),
        }
    }
}

/// Durable as far as the store is; linearizable per key if [`crate::qualify`] found its conditions honest.
pub struct S3Store {
    client: AmazonS3,
    prefix: String,
    name: String,
    entropy: SystemEntropy,
    bucket: Bucket,
}

/// Where the bucket itself is asked for its settings.
struct Bucket {
    url: String,
    region: String,
    options: ClientOptions,
}

impl S3Store {
    /// Settings from the environment; what it does not name (role credentials and the like) from the machine.
    pub fn from_env(bucket: &str, prefix: &str) -> Result<Self, StoreError> {
        Self::new(S3Settings::from_lookup(bucket, prefix, |name| std::env::var(name).ok()))
    }

    pub fn new(settings: S3Settings) -> Result<Self, StoreError> {
        // The HTTP client panics without a crypto provider; a second installation is refused, and that is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let prefix = normal_prefix(&settings.prefix)?;
        let plain = settings.endpoint.as_deref().is_some_and(|it| it.starts_with("http://"));
        let path_style = settings.path_style.unwrap_or(settings.endpoint.is_some() || settings.bucket.contains('.'));
        let options = ClientOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_timeout(REQUEST_TIMEOUT)
            .with_allow_http(plain);
        let region = settings.region.clone().unwrap_or_else(|| "us-east-1".to_owned());
        let bucket = Bucket { url: bucket_url(&settings, &region, path_style), region, options: options.clone() };
        let mut builder = AmazonS3Builder::new()
            .with_bucket_name(&settings.bucket)
            .with_region(&bucket.region)
            .with_client_options(options)
            .with_allow_http(plain)
            .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
            .with_virtual_hosted_style_request(!path_style)
            // One DELETE per object: the bulk call answers 200 with errors inside, and small stores lack it.
            .with_disable_bulk_delete(true)
            .with_http_connector(NotingConnector);
        for (name, value) in &settings.role {
            let key = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>();
            let key = key.map_err(|error| invalid("open", name, error.to_string()))?;
            builder = builder.with_config(key, value);
        }
        if let Some(endpoint) = &settings.endpoint {
            builder = builder.with_endpoint(bucket_endpoint(endpoint, &settings.bucket, path_style));
        }
        if let (Some(access), Some(secret)) = (&settings.access_key, &settings.secret_key) {
            builder = builder.with_access_key_id(access).with_secret_access_key(secret);
        }
        if let Some(token) = &settings.session_token {
            builder = builder.with_token(token);
        }
        let name = match &settings.endpoint {
            Some(endpoint) => format!("s3://{}/{prefix} at {endpoint}", settings.bucket),
            None => format!("s3://{}/{prefix}", settings.bucket),
        };
        let name = name.replace("/ at ", " at ").trim_end_matches('/').to_owned();
        let client = builder.build().map_err(|error| invalid("open", &name, error.to_string()))?;
        Ok(Self { client, prefix, name, entropy: SystemEntropy::new(), bucket })
    }

    fn path(&self, op: &'static str, key: &str) -> Result<Path, StoreError> {
        check_key(op, key)?;
        Path::parse(format!("{}{key}", self.prefix)).map_err(|error| invalid(op, key, error.to_string()))
    }

    async fn read(&self, op: &'static str, key: &str, etag: Option<&ETag>) -> Result<Option<Object>, StoreError> {
        let path = self.path(op, key)?;
        retry::read(retry::READ_TRIES, &self.entropy, || async {
            let options = GetOptions { if_none_match: etag.map(|it| it.0.clone()), ..GetOptions::default() };
            let (done, note) = noted(async {
                let found = self.client.get_opts(&path, options).await?;
                let (etag, modified) = (found.meta.e_tag.clone(), found.meta.last_modified);
                Ok::<_, object_store::Error>((etag, modified, found.bytes().await?))
            })
            .await;
            match done {
                Ok((Some(etag), modified, body)) => Ok(Some(Object {
                    body: body.to_vec(),
                    etag: ETag(etag),
                    modified: Some(Timestamp::from_millis(modified.timestamp_millis())),
                })),
                Ok((None, ..)) => Err(invalid(op, key, "the store gave no ETag")),
                Err(object_store::Error::NotModified { .. }) if etag.is_some() => Ok(None),
                Err(error) => Err(read_error(op, key, &error, &note)),
            }
        })
        .await
    }
}

/// With the bucket in the host name the library wants the whole host from us.
fn bucket_endpoint(endpoint: &str, bucket: &str, path_style: bool) -> String {
    let endpoint = endpoint.trim_end_matches('/');
    match endpoint.split_once("://") {
        Some((scheme, host)) if !path_style => format!("{scheme}://{bucket}.{host}"),
        _ => endpoint.to_owned(),
    }
}

/// Of the bucket, and of no object in it.
fn bucket_url(settings: &S3Settings, region: &str, path_style: bool) -> String {
    let aws = || format!("https://s3.{region}.amazonaws.com");
    let endpoint = settings.endpoint.clone().unwrap_or_else(aws);
    let endpoint = bucket_endpoint(&endpoint, &settings.bucket, path_style);
    if path_style { format!("{endpoint}/{}", settings.bucket) } else { format!("{endpoint}/") }
}

#[async_trait]
impl ObjectStore for S3Store {
    async fn get(&self, key: &str) -> Result<Object, StoreError> {
        match self.read("get", key, None).await? {
            Some(object) => Ok(object),
            None => Err(invalid("get", key, "the store said unchanged, though nobody asked")),
        }
    }

    async fn get_if_changed(&self, key: &str, etag: &ETag) -> Result<Option<Object>, StoreError> {
        // A store that ignores the condition sends the object all the same.
        Ok(self.read("get", key, Some(etag)).await?.filter(|object| object.etag != *etag))
    }

    async fn put(&self, key: &str, body: Vec<u8>, condition: Condition) -> Result<ETag, StoreError> {
        let path = self.path("put", key)?;
        let mode = match &condition {
            Condition::Create => PutMode::Create,
            Condition::Match(etag) => PutMode::Update(UpdateVersion { e_tag: Some(etag.0.clone()), version: None }),
        };
        let (done, note) = noted(self.client.put_opts(&path, PutPayload::from(body), PutOptions::from(mode))).await;
        match done {
            Ok(result) => match result.e_tag {
                Some(etag) => Ok(ETag(etag)),
                // It landed, but under which version only a read can tell.
                None => Err(StoreError::new("put", key, StoreFault::Ambiguous, "the store gave no ETag")),
            },
            Err(error) => Err(write_error("put", key, &error, &note)),
        }
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        let path = self.path("delete", key)?;
        let one = futures::stream::iter([Ok(path)]).boxed();
        let (done, note) = noted(async { self.client.delete_stream(one).next().await }).await;
        match done {
            None | Some(Ok(_)) => Ok(()),
            Some(Err(error)) => match write_error("delete", key, &error, &note) {
                gone if note.status == Some(404) && gone.is_precondition() => Ok(()),
                error => Err(error),
            },
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        self.list_pages(prefix, &mut |_| {}).await
    }

    async fn list_pages(&self, prefix: &str, show: ShowPage<'_>) -> Result<Vec<Listed>, StoreError> {
        check_prefix("list", prefix)?;
        let full = format!("{}{prefix}", self.prefix);
        let mut listed = Vec::new();
        let mut page_token = None;
        loop {
            let page = retry::read(retry::READ_TRIES, &self.entropy, || async {
                let options =
                    PaginatedListOptions { page_token: page_token.clone(), ..PaginatedListOptions::default() };
                let (done, note) = noted(self.client.list_paginated(Some(&full), options)).await;
                done.map_err(|error| match read_error("list", prefix, &error, &note) {
                    // An empty list is 200; 404 means that the bucket itself is not there, which proves no absence.
                    missing if missing.is_not_found() => invalid("list", prefix, missing.message),
                    error => error,
                })
            })
            .await?;
            let n_before = listed.len();
            for meta in page.result.objects {
                let Some(key) = meta.location.as_ref().strip_prefix(&self.prefix) else { continue };
                let Some(etag) = meta.e_tag else { return Err(invalid("list", key, "the store gave no ETag")) };
                listed.push(Listed { key: key.to_owned(), etag: ETag(etag), size: meta.size });
            }
            show(&listed[n_before..]);
            page_token = page.page_token;
            if page_token.is_none() {
                break;
            }
        }
        // Stores list in byte order; the contract promises it, so it is not left to them.
        listed.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(listed)
    }

    fn describe(&self) -> String {
        self.name.clone()
    }
}

/// How the last request to the store ended, as far as the wire shows.
#[derive(Debug, Clone, Default)]
struct Note {
    /// A request to the store (not one for credentials) was handed to the connection.
    sent: bool,
    status: Option<u16>,
    retry_after: Option<Duration>,
    broke: Option<Broke>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Broke {
    /// No connection came about: the request never left.
    Connecting,
    Later,
}

tokio::task_local! {
    static NOTE: Arc<Mutex<Note>>;
}

/// Runs one operation and says how its request ended.
async fn noted<T>(operation: impl Future<Output = T>) -> (T, Note) {
    let note = Arc::new(Mutex::new(Note::default()));
    let done = NOTE.scope(note.clone(), operation).await;
    let note = note.lock().unwrap_or_else(PoisonError::into_inner).clone();
    (done, note)
}

#[derive(Debug)]
struct NotingConnector;

impl HttpConnector for NotingConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let inner = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(NotingService { inner, places: Semaphore::new(AT_A_TIME) }))
    }
}

#[derive(Debug)]
struct NotingService {
    inner: HttpClient,
    places: Semaphore,
}

#[derive(Debug, thiserror::Error)]
#[error("{AT_A_TIME} requests to the store are under way and none has ended for {} s", REQUEST_TIMEOUT.as_secs())]
struct Crowded;

#[async_trait]
impl HttpService for NotingService {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        // Requests for credentials go through here too; only those to the store bear its payload hash.
        let is_ours = request.headers().contains_key("x-amz-content-sha256");
        let note = |change: &dyn Fn(&mut Note)| {
            if is_ours {
                // Outside of `noted` nobody wants to know.
                let _ = NOTE.try_with(|note| change(&mut note.lock().unwrap_or_else(PoisonError::into_inner)));
            }
        };
        // Who does not get its turn in time was never sent, and is told so.
        let late = || HttpError::new(HttpErrorKind::Connect, Crowded);
        let place = tokio::time::timeout(REQUEST_TIMEOUT, self.places.acquire()).await;
        let _place = place.map_err(|_| late())?.map_err(|_| late())?;
        note(&|it| *it = Note { sent: true, ..Note::default() });
        let answer = self.inner.execute(request).await;
        match &answer {
            Ok(response) => {
                let retry_after = response
                    .headers()
                    .get("retry-after")
                    .and_then(|it| it.to_str().ok()?.trim().parse().ok())
                    .map(Duration::from_secs);
                note(&|it| {
                    it.status = Some(response.status().as_u16());
                    it.retry_after = retry_after;
                });
            }
            Err(error) => {
                let broke = if never_connected(error) { Broke::Connecting } else { Broke::Later };
                note(&|it| it.broke = Some(broke));
            }
        }
        answer
    }
}

/// A connection that timed out is told as a time-out; only its inner error knows that nothing was sent.
fn never_connected(error: &HttpError) -> bool {
    if error.kind() == HttpErrorKind::Connect {
        return true;
    }
    let mut source = std::error::Error::source(error);
    while let Some(it) = source {
        if it.downcast_ref::<reqwest::Error>().is_some_and(reqwest::Error::is_connect) {
            return true;
        }
        source = it.source();
    }
    false
}

fn made(op: &'static str, key: &str, fault: StoreFault, error: &object_store::Error, note: &Note) -> StoreError {
    StoreError { retry_after: note.retry_after, ..StoreError::new(op, key, fault, text(error)) }
}

/// The store's own words, in one line and of a length for a log.
fn text(error: &object_store::Error) -> String {
    let text = error.to_string();
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() <= 400 { line } else { line.chars().take(400).chain(['…']).collect() }
}

/// A read changes nothing, so it is never ambiguous.
fn read_error(op: &'static str, key: &str, error: &object_store::Error, note: &Note) -> StoreError {
    let fault = match (error, note.status) {
        _ if !note.sent => StoreFault::Unavailable(before_sending(error)),
        // A missing bucket is a fault of the set-up and says nothing about the object.
        (_, Some(404)) if is_bucket_missing(error) => StoreFault::Unavailable(Unavailable::Invalid),
        (_, Some(404)) => StoreFault::NotFound,
        (_, Some(401 | 403)) => StoreFault::Unavailable(Unavailable::Denied),
        (_, Some(429 | 503)) => StoreFault::Unavailable(Unavailable::Throttled),
        (_, Some(400)) if error.to_string().contains("RequestTimeout") => StoreFault::Unavailable(Unavailable::Network),
        (_, Some(300..=399 | 400 | 402..=407 | 409..=428 | 430..=499 | 501)) => {
            StoreFault::Unavailable(Unavailable::Invalid)
        }
        _ => StoreFault::Unavailable(Unavailable::Network),
    };
    made(op, key, fault, error, note)
}

/// Anything that may have reached the store without a clear answer is ambiguous; the caller reads until it knows.
fn write_error(op: &'static str, key: &str, error: &object_store::Error, note: &Note) -> StoreError {
    let fault = match note.status {
        _ if !note.sent => StoreFault::Unavailable(before_sending(error)),
        None if note.broke == Some(Broke::Connecting) => StoreFault::Unavailable(Unavailable::Network),
        None => StoreFault::Ambiguous,
        Some(404) if is_bucket_missing(error) => StoreFault::Unavailable(Unavailable::Invalid),
        // 304 is how some stores refuse `If-None-Match: *`; 404 is S3's answer to If-Match on a missing key.
        Some(304 | 404 | 412) => StoreFault::Precondition,
        Some(401 | 403) => StoreFault::Unavailable(Unavailable::Denied),
        // Another conditional write to the key was under way; this one was not done.
        Some(409 | 429) => StoreFault::Unavailable(Unavailable::Throttled),
        Some(400) if error.to_string().contains("RequestTimeout") => StoreFault::Unavailable(Unavailable::Network),
        Some(501) => StoreFault::Unavailable(Unavailable::Invalid),
        Some(408 | 500..) => StoreFault::Ambiguous,
        // Success, and yet an error: the answer's body or headers were unreadable.
        Some(200..=299) => StoreFault::Ambiguous,
        Some(_) => StoreFault::Unavailable(Unavailable::Invalid),
    };
    made(op, key, fault, error, note)
}

/// Failed before a request left: credentials could not be had, or the request could not be built.
fn before_sending(error: &object_store::Error) -> Unavailable {
    match error {
        object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
            Unavailable::Denied
        }
        object_store::Error::InvalidPath { .. }
        | object_store::Error::NotImplemented { .. }
        | object_store::Error::NotSupported { .. } => Unavailable::Invalid,
        _ => Unavailable::Network,
    }
}

fn is_bucket_missing(error: &object_store::Error) -> bool {
    error.to_string().contains("NoSuchBucket")
}

#[cfg(test)]
mod tests;
