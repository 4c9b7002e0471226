use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    task::JoinSet,
};

use super::*;

/// What the scripted server does with a request.
#[derive(Clone, Copy)]
pub(super) enum Reply {
    /// Status, headers, body.
    Say(u16, &'static str, &'static str),
    /// Reads the request and closes the connection.
    HangUp,
    /// Reads the request and says nothing.
    Silence,
}

/// A server that gives every request the same answer, and counts them.
pub(super) struct Server {
    pub(super) store: S3Store,
    n_requests: Arc<AtomicUsize>,
    n_connections: Arc<AtomicUsize>,
    pub(super) last: Arc<Mutex<String>>,
    _tasks: JoinSet<()>,
}

pub(super) async fn server(reply: Reply) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let (n_requests, last) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(String::new())));
    let mut tasks = JoinSet::new();
    let n_connections = Arc::new(AtomicUsize::new(0));
    let (count, seen, accepted) = (n_requests.clone(), last.clone(), n_connections.clone());
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            accepted.fetch_add(1, Ordering::SeqCst);
            let (count, seen) = (count.clone(), seen.clone());
            connections.spawn(async move {
                let mut buffer = vec![0; 65536];
                let mut text = String::new();
                loop {
                    let n = stream.read(&mut buffer).await.unwrap_or(0);
                    if n == 0 {
                        return;
                    }
                    text.push_str(&String::from_utf8_lossy(&buffer[..n]));
                    let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                    let length = head
                        .lines()
                        .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok())
                        .unwrap_or(0_usize);
                    if body.len() < length {
                        continue;
                    }
                    count.fetch_add(1, Ordering::SeqCst);
                    *seen.lock().unwrap() = std::mem::take(&mut text);
                    match reply {
                        Reply::HangUp => return,
                        Reply::Silence => std::future::pending().await,
                        Reply::Say(status, headers, body) => {
                            let answer = format!(
                                "HTTP/1.1 {status} x\r\ncontent-length: {}\r\nlast-modified: Tue, 14 Nov 2023 22:13:20 \
                                 GMT\r\n{headers}\r\n{body}",
                                body.len()
                            );
                            stream.write_all(answer.as_bytes()).await.unwrap();
                        }
                    }
                }
            });
        }
    });
    let store = S3Store::new(settings(format!("http://{addr}"))).unwrap();
    Server { store, n_requests, n_connections, last, _tasks: tasks }
}

fn settings(endpoint: String) -> S3Settings {
    S3Settings {
        bucket: "bucket".into(),
        prefix: "some/prefix".into(),
        endpoint: Some(endpoint),
        access_key: Some("key".into()),
        secret_key: Some("PLANTED".into()),
        ..S3Settings::default()
    }
}

const DENIED: StoreFault = StoreFault::Unavailable(Unavailable::Denied);
const THROTTLED: StoreFault = StoreFault::Unavailable(Unavailable::Throttled);
const INVALID: StoreFault = StoreFault::Unavailable(Unavailable::Invalid);
const NETWORK: StoreFault = StoreFault::Unavailable(Unavailable::Network);

#[tokio::test]
async fn answers_to_writes_mean_what_they_say_and_nothing_is_sent_twice() {
    let matching = || Condition::Match(ETag("\"e\"".into()));
    for (reply, condition, fault) in [
        (Reply::Say(412, "", ""), Condition::Create, StoreFault::Precondition),
        (Reply::Say(412, "", ""), matching(), StoreFault::Precondition),
        (Reply::Say(404, "", "<Error><Code>NoSuchKey</Code></Error>"), matching(), StoreFault::Precondition),
        (Reply::Say(404, "", "<Error><Code>NoSuchBucket</Code></Error>"), matching(), INVALID),
        (Reply::Say(404, "", "<Error><Code>NoSuchBucket</Code></Error>"), Condition::Create, INVALID),
        (Reply::Say(409, "", "<Code>ConditionalRequestConflict</Code>"), matching(), THROTTLED),
        (Reply::Say(409, "", "<Code>ConditionalRequestConflict</Code>"), Condition::Create, THROTTLED),
        (Reply::Say(429, "", ""), Condition::Create, THROTTLED),
        (Reply::Say(401, "", ""), Condition::Create, DENIED),
        (Reply::Say(403, "", ""), matching(), DENIED),
        (Reply::Say(400, "", ""), Condition::Create, INVALID),
        (Reply::Say(501, "", ""), Condition::Create, INVALID),
        (Reply::Say(500, "", ""), Condition::Create, StoreFault::Ambiguous),
        (Reply::Say(503, "", "<Code>SlowDown</Code>"), matching(), StoreFault::Ambiguous),
        (Reply::Say(408, "", ""), matching(), StoreFault::Ambiguous),
        (Reply::Say(200, "", ""), Condition::Create, StoreFault::Ambiguous), // no ETag
        (Reply::HangUp, Condition::Create, StoreFault::Ambiguous),
        (Reply::HangUp, matching(), StoreFault::Ambiguous),
    ] {
        let server = server(reply).await;
        let name = match reply {
            Reply::Say(status, _, body) => format!("{status} {body} to {condition:?}"),
            _ => format!("hang-up on {condition:?}"),
        };
        let error = server.store.put("k", b"x".to_vec(), condition).await.expect_err(&name);
        assert_eq!(error.fault, fault, "{name}: {error}");
        assert_eq!(server.n_requests.load(Ordering::SeqCst), 1, "{name}");
    }
}

#[tokio::test]
async fn answers_to_reads_mean_what_they_say() {
    for (reply, fault, n_tries) in [
        (Reply::Say(404, "", "<Error><Code>NoSuchKey</Code></Error>"), StoreFault::NotFound, 1),
        (Reply::Say(404, "", ""), StoreFault::NotFound, 1),
        (Reply::Say(404, "", "<Error><Code>NoSuchBucket</Code></Error>"), INVALID, 1),
        (Reply::Say(401, "", ""), DENIED, 1),
        (Reply::Say(403, "", "<Error><Code>AccessDenied</Code></Error>"), DENIED, 1),
        (Reply::Say(301, "", ""), INVALID, 1),
        (Reply::Say(500, "", ""), NETWORK, 4),
        (Reply::Say(503, "", ""), THROTTLED, 4),
        (Reply::HangUp, NETWORK, 4),
    ] {
        let server = server(reply).await;
        let name = match reply {
            Reply::Say(status, _, body) => format!("{status} {body}"),
            _ => "hang-up".to_owned(),
        };
        let error = server.store.get("k").await.expect_err(&name);
        assert_eq!(error.fault, fault, "{name}: {error}");
        assert_eq!(server.n_requests.load(Ordering::SeqCst), n_tries, "{name}");
    }
    let server = server(Reply::Say(404, "", "<Error><Code>NoSuchBucket</Code></Error>")).await;
    assert_eq!(server.store.list("x/").await.unwrap_err().fault, INVALID, "a missing bucket is no empty list");
}

#[tokio::test]
async fn a_store_that_is_not_there_is_surely_not_written() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    drop(listener);
    let store = S3Store::new(settings(format!("http://{addr}"))).unwrap();
    let error = store.put("k", b"x".to_vec(), Condition::Create).await.unwrap_err();
    assert_eq!(error.fault, NETWORK, "{error}");
    assert_eq!(store.delete("k").await.unwrap_err().fault, NETWORK);
}

#[tokio::test]
async fn a_store_that_says_nothing_leaves_the_write_unclear() {
    let server = server(Reply::Silence).await;
    let error = server.store.put("k", b"x".to_vec(), Condition::Create).await.unwrap_err();
    assert_eq!(error.fault, StoreFault::Ambiguous, "{error}");
}

#[tokio::test]
async fn deleting_what_is_gone_succeeds_and_denied_does_not() {
    for (status, body, fault) in [
        (204, "", None),
        (404, "<Error><Code>NoSuchKey</Code></Error>", None),
        (404, "<Error><Code>NoSuchBucket</Code></Error>", Some(INVALID)),
        (403, "", Some(DENIED)),
        (500, "", Some(StoreFault::Ambiguous)),
    ] {
        let server = server(Reply::Say(status, "", body)).await;
        let done = server.store.delete("k").await;
        assert_eq!(done.err().map(|it| it.fault), fault, "{status} {body}");
        assert!(server.last.lock().unwrap().starts_with("DELETE /bucket/some/prefix/k "));
    }
}

#[tokio::test]
async fn requests_carry_condition_and_prefix_and_the_store_is_named_without_secrets() {
    let server = server(Reply::Say(200, "etag: \"new\"\r\n", "")).await;
    let last = || server.last.lock().unwrap().clone();
    let etag = server.store.put("a/b", b"x".to_vec(), Condition::Create).await.unwrap();
    assert_eq!(etag, ETag("\"new\"".into()));
    assert!(last().starts_with("PUT /bucket/some/prefix/a/b ") && last().contains("if-none-match: *"), "{}", last());
    server.store.put("a/b", b"x".to_vec(), Condition::Match(etag.clone())).await.unwrap();
    assert!(last().contains("if-match: \"new\""), "{}", last());
    assert_eq!(
        server.store.get_if_changed("a/b", &etag).await.unwrap(),
        None,
        "though the store ignored the condition"
    );
    assert!(last().contains("if-none-match: \"new\""), "{}", last());
    let name = server.store.describe();
    assert!(name.starts_with("s3://bucket/some/prefix at http://127.0.0.1:"), "{name}");
    let refused = self::server(Reply::Say(403, "", "")).await.store.get("k").await.unwrap_err();
    assert!(!format!("{refused:?}").contains("PLANTED"));
}

#[tokio::test]
async fn a_throttling_store_is_asked_when_it_wants_to_be() {
    let server = server(Reply::Say(429, "retry-after: 7\r\n", "")).await;
    let error = server.store.put("k", b"x".to_vec(), Condition::Create).await.unwrap_err();
    assert_eq!(error.retry_after, Some(Duration::from_secs(7)));
}

#[test]
fn settings_come_from_the_usual_variables() {
    let variables = [
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9000"),
        ("AWS_REGION", "eu-west-1"),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_S3_USE_PATH_STYLE", "true"),
        ("AWS_SESSION_TOKEN", ""),
    ];
    let lookup = |name: &str| variables.iter().find(|(it, _)| *it == name).map(|(_, value)| (*value).to_owned());
    let settings = S3Settings::from_lookup("b", "p", lookup);
    assert_eq!(settings.endpoint.as_deref(), Some("http://127.0.0.1:9000"));
    assert_eq!(settings.region.as_deref(), Some("eu-west-1"));
    assert_eq!((settings.path_style, settings.session_token), (Some(true), None));
    let role = S3Settings::from_lookup("bucket", "", |name| ROLE_VARIABLES.contains(&name).then(|| "/x".to_owned()));
    assert_eq!(role.role.len(), ROLE_VARIABLES.len());
    assert!(S3Store::new(role).is_ok(), "every one of them is understood");
    assert_eq!(bucket_endpoint("https://s3.example/", "b", true), "https://s3.example");
    assert_eq!(bucket_endpoint("https://s3.example/", "b", false), "https://b.s3.example");
}

#[tokio::test]
async fn a_crowd_of_writes_shares_its_connections() {
    let server = server(Reply::Say(200, "etag: \"e\"\r\n", "")).await;
    let keys: Vec<String> = (0..1000).map(|n| format!("k{n}")).collect();
    let puts = keys.iter().map(|key| server.store.put(key, b"x".to_vec(), Condition::Create));
    for written in futures::future::join_all(puts).await {
        written.unwrap();
    }
    assert_eq!(server.n_requests.load(Ordering::SeqCst), 1000);
    // One that finds another free while it is being opened stays open beside it.
    let n_connections = server.n_connections.load(Ordering::SeqCst);
    assert!(n_connections <= 2 * AT_A_TIME, "{n_connections} connections");
}

#[test]
fn a_bucket_is_asked_where_it_is() {
    let url = |endpoint: Option<&str>, bucket: &str, path_style| {
        let (endpoint, bucket) = (endpoint.map(str::to_owned), bucket.to_owned());
        bucket_url(&S3Settings { endpoint, bucket, ..S3Settings::default() }, "eu-west-1", path_style)
    };
    assert_eq!(url(None, "b", false), "https://b.s3.eu-west-1.amazonaws.com/");
    assert_eq!(url(None, "a.b", true), "https://s3.eu-west-1.amazonaws.com/a.b");
    assert_eq!(url(Some("http://127.0.0.1:9000/"), "b", true), "http://127.0.0.1:9000/b");
    assert_eq!(url(Some("https://s3.example.com"), "b", false), "https://b.s3.example.com/");
}
