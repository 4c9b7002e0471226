use std::{future::Ready, sync::Mutex};

use http_body_util::{BodyExt as _, Full, StreamBody, channel::Channel};
use hyper::{body::Frame, client::conn::http2::SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
    sync::mpsc,
    task::JoinHandle,
};
use tokio_util::io::InspectWriter;
use tower::util::BoxCloneSyncService;

use super::*;

const KEEPALIVE: Keepalive = Keepalive { interval: Duration::from_secs(10), timeout: Duration::from_secs(5) };

type Callable = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Infallible>;

fn service<F>(handle: impl Fn(http::Request<Body>) -> F + Clone + Send + Sync + 'static) -> Callable
where
    F: Future<Output = http::Response<Body>> + Send + 'static,
{
    BoxCloneSyncService::new(tower::service_fn(move |request| {
        let handling = handle(request);
        async move { Ok(handling.await) }
    }))
}

/// Sends back what comes, as it comes, and ends with trailers.
fn echo() -> Callable {
    service(async |request| {
        let mut trailers = http::HeaderMap::new();
        trailers.insert("grpc-status", "0".parse().unwrap());
        let body = request.into_body().into_data_stream();
        let frames = futures::StreamExt::map(body, |it| it.map(Frame::data));
        let end = futures::stream::iter([Ok(Frame::trailers(trailers))]);
        http::Response::new(Body::new(StreamBody::new(futures::StreamExt::chain(frames, end))))
    })
}

struct Served {
    serving: JoinHandle<io::Result<()>>,
    stop: CancellationToken,
}

#[expect(clippy::disallowed_methods, reason = "a test joins its own tasks")]
fn start(service: Callable, io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Served {
    let stop = CancellationToken::new();
    Served { serving: tokio::spawn(serve(io, service, "info", KEEPALIVE, stop.clone())), stop }
}

type Sender = SendRequest<Channel<Bytes>>;

#[expect(clippy::disallowed_methods, reason = "a test's client ends with its test")]
async fn connect(service: Callable) -> (Sender, Served) {
    let (ours, theirs) = tokio::io::duplex(64 * 1024);
    let served = start(service, ours);
    let mut client = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    let (sender, connection) = client.max_header_list_size(64 * 1024).handshake(TokioIo::new(theirs)).await.unwrap();
    tokio::spawn(connection);
    (sender, served)
}

fn request(body: Channel<Bytes>) -> http::Request<Channel<Bytes>> {
    http::Request::post("https://server/service/Method").body(body).unwrap()
}

#[tokio::test]
async fn a_stream_goes_both_ways() {
    let (mut sender, served) = connect(echo()).await;
    let (mut say, body) = Channel::new(1);
    let answer = sender.send_request(request(body)).await.unwrap();
    let mut answer = answer.into_body();
    for n in 0..100_u32 {
        say.send_data(Bytes::copy_from_slice(&n.to_be_bytes())).await.unwrap();
        let frame = answer.frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap().as_ref(), n.to_be_bytes());
    }
    drop(say);
    let trailers = answer.frame().await.unwrap().unwrap().into_trailers().unwrap();
    assert_eq!(trailers["grpc-status"], "0");
    assert!(answer.frame().await.is_none());
    drop((sender, answer));
    served.serving.await.unwrap().unwrap_err();
}

/// More than all windows and buffers together, in many calls at once.
#[tokio::test]
async fn large_bodies_pass_both_ways() {
    const SIZE: usize = 1_000_000;
    let (sender, _served) = connect(echo()).await;
    let calls = (0..8_u8).map(|n| {
        let mut sender = sender.clone();
        async move {
            let (mut say, body) = Channel::<Bytes>::new(1);
            let answer = sender.send_request(request(body)).await.unwrap().into_body();
            let saying = async move {
                for _ in 0..10 {
                    say.send_data(Bytes::from(vec![n; SIZE / 10])).await.unwrap();
                }
            };
            let (heard, ()) = tokio::join!(answer.collect(), saying);
            let heard = heard.unwrap().to_bytes();
            assert_eq!((heard.len(), heard.iter().all(|it| *it == n)), (SIZE, true));
        }
    });
    futures::future::join_all(calls).await;
}

#[tokio::test]
async fn a_request_brings_its_connection_along_and_may_be_refused_at_once() {
    let refuse = service(async |request: http::Request<Body>| {
        assert_eq!(request.extensions().get(), Some(&"info"));
        assert_eq!((request.uri().path(), request.version()), ("/service/Method", http::Version::HTTP_2));
        let long = "x".repeat(20_000);
        http::Response::builder().status(418).header("long", long).body(Body::default()).unwrap()
    });
    let (mut sender, _served) = connect(refuse).await;
    for _ in 0..40 {
        // The client is not through, and is told that nobody listens; its place is free for the next call.
        let (say, body) = Channel::new(1);
        let answer = sender.send_request(request(body)).await.unwrap();
        assert_eq!((answer.status(), answer.headers()["long"].len()), (http::StatusCode::IM_A_TEAPOT, 20_000));
        drop(say);
    }
}

/// Says when it is dropped.
struct Told(mpsc::UnboundedSender<&'static str>);

impl Drop for Told {
    fn drop(&mut self) {
        let _ = self.0.send("dropped");
    }
}

#[expect(clippy::disallowed_methods, reason = "a test hears a handful of words")]
fn endless() -> (Callable, mpsc::UnboundedReceiver<&'static str>) {
    let (tell, told) = mpsc::unbounded_channel();
    let service = service(move |request: http::Request<Body>| {
        let told = Told(tell.clone());
        let _ = tell.send("called");
        async move {
            let (_told, mut body) = (told, request.into_body());
            let end = body.frame().await;
            assert!(end.is_none_or(|it| it.is_err()));
            std::future::pending().await
        }
    });
    (service, told)
}

#[tokio::test]
async fn a_call_that_is_given_up_ends_its_handler_and_nothing_else() {
    let (service, mut told) = endless();
    let (mut sender, served) = connect(service).await;
    let (_say, body) = Channel::new(1);
    let calling = sender.send_request(request(body));
    tokio::select! {
        _ = calling => panic!("nobody answers"),
        word = told.recv() => assert_eq!(word, Some("called")),
    }
    assert_eq!(told.recv().await, Some("dropped"));
    let (_say, body) = Channel::new(1);
    tokio::select! {
        _ = sender.send_request(request(body)) => panic!("nobody answers"),
        word = told.recv() => assert_eq!(word, Some("called")),
    }
    assert!(!served.serving.is_finished());
}

#[tokio::test]
async fn the_end_of_a_connection_ends_its_calls() {
    let (service, mut told) = endless();
    let (mut sender, served) = connect(service).await;
    let (_say, body) = Channel::new(1);
    tokio::select! {
        _ = sender.send_request(request(body)) => panic!("nobody answers"),
        word = told.recv() => assert_eq!(word, Some("called")),
    }
    drop(sender);
    assert_eq!(told.recv().await, Some("dropped"));
    served.serving.await.unwrap().unwrap_err();
}

#[tokio::test]
async fn whoever_stops_lets_calls_come_to_their_end() {
    let (mut sender, served) = connect(echo()).await;
    let (mut say, body) = Channel::new(1);
    let mut answer = sender.send_request(request(body)).await.unwrap().into_body();
    say.send_data(Bytes::from_static(b"one")).await.unwrap();
    answer.frame().await.unwrap().unwrap();
    served.stop.cancel();
    say.send_data(Bytes::from_static(b"two")).await.unwrap();
    assert_eq!(answer.frame().await.unwrap().unwrap().into_data().unwrap(), "two");
    assert!(!served.serving.is_finished());
    drop(say);
    assert!(answer.collect().await.unwrap().trailers().is_some());
    served.serving.await.unwrap().unwrap();
    let (_say, body) = Channel::new(1);
    sender.send_request(request(body)).await.unwrap_err();
}

#[tokio::test]
async fn an_idle_connection_ends_at_once_when_told_to_stop() {
    let (_sender, served) = connect(echo()).await;
    served.stop.cancel();
    served.serving.await.unwrap().unwrap();
}

/// A client by hand, of which nothing but the greeting comes.
async fn greeted() -> (DuplexStream, Served) {
    let (ours, mut theirs) = tokio::io::duplex(64 * 1024);
    let served = start(echo(), ours);
    theirs.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    let mut settings = [0; 9 + 18 + 9];
    theirs.read_exact(&mut settings).await.unwrap();
    (theirs, served)
}

#[tokio::test(start_paused = true)]
async fn whoever_gives_no_sign_of_life_is_given_up() {
    let (mut client, served) = greeted().await;
    let began = Instant::now();
    let mut ping = [0; 17];
    // Asked after ten seconds; whatever comes is a sign.
    for n in 1..4 {
        client.read_exact(&mut ping).await.unwrap();
        assert_eq!((ping[3], ping[4], began.elapsed().as_secs()), (6, 0, 10 * n));
        ping[4] = 1;
        client.write_all(&ping).await.unwrap();
    }
    client.read_exact(&mut ping).await.unwrap();
    let error = served.serving.await.unwrap().unwrap_err();
    assert_eq!((error.kind(), began.elapsed().as_secs()), (io::ErrorKind::TimedOut, 45));
}

#[tokio::test(start_paused = true)]
async fn whoever_never_greets_is_given_up() {
    let (ours, _theirs) = tokio::io::duplex(1024);
    let error = start(echo(), ours).serving.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
}

#[tokio::test]
async fn whoever_breaks_the_protocol_hears_why() {
    let (mut client, served) = greeted().await;
    client.write_all(b"\0\0\x01\0\0\0\0\0\x01x").await.unwrap();
    let mut word = Vec::new();
    client.read_to_end(&mut word).await.unwrap();
    assert!(word.ends_with(b"frame of a stream that was not begun"), "{word:?}");
    let error = served.serving.await.unwrap().unwrap_err();
    assert_eq!(error.to_string(), "HTTP/2: frame of a stream that was not begun (Protocol)");
}

/// A client that asks and asks and takes no answers is not read any further.
#[tokio::test]
async fn whoever_takes_nothing_is_not_listened_to() {
    let (ours, mut client) = tokio::io::duplex(1024);
    let answering = service(async |_| http::Response::new(Body::new(Full::new(Bytes::from(vec![0; 60_000])))));
    let served = start(answering, ours);
    let mut request = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    for n in (1_u8..31).step_by(2) {
        request.extend_from_slice(&[0, 0, 3, 1, 5, 0, 0, 0, n, 0x83, 0x84, 0x87]);
    }
    client.write_all(&request).await.unwrap();
    let pings = b"\0\0\x08\x06\0\0\0\0\0 pings! ".repeat(100);
    let mut taken = 0;
    while let Ok(Ok(n)) = tokio::time::timeout(Duration::from_millis(50), client.write(&pings)).await {
        taken += n;
        assert!(taken < 1_000_000, "it reads on and on");
    }
    assert!(!served.serving.is_finished());
}

/// A handler in another task reads what comes, and its window opens again.
#[tokio::test]
#[expect(clippy::disallowed_methods, reason = "the handler of this test is a task")]
async fn a_body_may_be_read_elsewhere() {
    let sizes = Arc::new(Mutex::new(0));
    let counted = sizes.clone();
    let elsewhere = service(move |request: http::Request<Body>| {
        let counted = counted.clone();
        async move {
            let reading = tokio::spawn(async move {
                let mut body = request.into_body();
                while let Some(frame) = body.frame().await {
                    *counted.lock().unwrap() += frame.unwrap().into_data().unwrap().len();
                    tokio::task::yield_now().await;
                }
            });
            reading.await.unwrap();
            http::Response::new(Body::default())
        }
    });
    let (mut sender, _served) = connect(elsewhere).await;
    let (mut say, body) = Channel::new(1);
    let saying = async move {
        for _ in 0..30 {
            say.send_data(Bytes::from(vec![0; 10_000])).await.unwrap();
        }
    };
    let (answer, ()) = tokio::join!(sender.send_request(request(body)), saying);
    answer.unwrap();
    assert_eq!(*sizes.lock().unwrap(), 300_000);
}

/// What is written by whom is never mixed up: the service is asked in the order of the calls.
#[tokio::test]
async fn calls_are_begun_in_their_order() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = seen.clone();
    let noting = BoxCloneSyncService::new(tower::service_fn(move |request: http::Request<Body>| {
        noted.lock().unwrap().push(request.headers()["n"].to_str().unwrap().to_owned());
        let done: Ready<Result<_, Infallible>> = std::future::ready(Ok(http::Response::new(Body::default())));
        done
    }));
    let (mut sender, _served) = connect(noting).await;
    for n in 0..5 {
        let mut request = request(Channel::new(1).1);
        request.headers_mut().insert("n", n.into());
        assert!(sender.send_request(request).await.unwrap().into_body().collect().await.unwrap().to_bytes().is_empty());
    }
    assert_eq!(*seen.lock().unwrap(), ["0", "1", "2", "3", "4"]);
}

/// Every write is a packet and wakes the other side.
#[tokio::test]
async fn what_follows_from_one_reading_is_written_at_once() {
    let (ours, mut client) = tokio::io::duplex(64 * 1024);
    let mut said = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    for n in [1, 3, 5] {
        said.extend_from_slice(&[0, 0, 3, 1, 5, 0, 0, 0, n, 0x83, 0x84, 0x87]);
    }
    client.write_all(&said).await.unwrap();
    let writes = Arc::new(Mutex::new(0));
    let counted = writes.clone();
    let ours = InspectWriter::new(ours, move |_: &[u8]| *counted.lock().unwrap() += 1);
    let hello = service(async |_| http::Response::new(Body::new(Full::new(Bytes::from("hello")))));
    let served = start(hello, ours);
    // Ours and theirs of settings, then three times fields, a body of five bytes, and an end.
    let mut heard = vec![0; 9 + 18 + 9];
    client.read_exact(&mut heard).await.unwrap();
    for n in [1, 3, 5] {
        let mut fields = [0; 9];
        client.read_exact(&mut fields).await.unwrap();
        assert_eq!((fields[3], fields[8]), (1, n));
        let mut rest = vec![0; usize::from(fields[2]) + 9 + 5 + 9];
        client.read_exact(&mut rest).await.unwrap();
    }
    assert_eq!(*writes.lock().unwrap(), 1);
    served.stop.cancel();
    served.serving.await.unwrap().unwrap();
}
