//! How fast the other end hears that a server tells nothing any more, and how it is asked.

use std::{net::SocketAddr, time::Duration};

use nstance_core::ports::{
    clock::Clock as _,
    peers::{Election, Knock, PeerRole, Peers as _},
};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpSocket, TcpStream},
    sync::watch,
    task::JoinSet,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{Cluster, LIMIT, knowing, plain, soon, until};

/// A runtime of its own dies like a process: everything in it is dropped where it stands, and the kernel hangs up.
#[test]
fn a_killed_server_is_heard_at_once() {
    let cluster = Cluster::new();
    let theirs = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let ours = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let server = theirs.block_on(cluster.server());
    server.leads("e1", cluster.clock.monotonic());
    ours.block_on(async {
        let peers = cluster.peers("srv-2", "s1");
        let mut arrivals = server.desk.arrivals();
        let ask = knowing(PeerRole::Leading, "e1", Duration::from_secs(10));
        let kill = async {
            arrivals.changed().await.unwrap();
            theirs.shutdown_background();
            Instant::now()
        };
        let (answer, killed) = tokio::join!(soon(peers.ask(&server.addr, &ask)), kill);
        let error = answer.unwrap_err();
        assert_eq!(error.addr, server.addr);
        assert!(error.message.contains("link broke"), "{error}");
        assert!(killed.elapsed() < Duration::from_secs(8), "a broken line is no timeout, which would be ten seconds");
        // Sockets of a dying process are closed one by one; the listening one may be the last.
        let buried = async { while peers.knock(&server.addr).await != Knock::Refused {} };
        timeout(LIMIT, buried).await.expect("nobody listens any more");
        let error = soon(peers.ask(&server.addr, &ask)).await.unwrap_err();
        assert!(error.message.contains("connect") && error.message.contains("refused"), "{error}");
    });
}

/// Carries bytes between two sockets until it is told to hold them back.
struct Wire {
    addr: String,
    cut: CancellationToken,
    _tasks: JoinSet<()>,
}

impl Wire {
    async fn to(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let (cut, target) = (CancellationToken::new(), target.to_owned());
        let is_cut = cut.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let (mut near, _) = listener.accept().await.unwrap();
            let mut far = TcpStream::connect(target).await.unwrap();
            tokio::select! {
                biased;
                () = is_cut.cancelled() => {}
                _ = copy_bidirectional(&mut near, &mut far) => return,
            }
            // Both sockets stay open: this is silence, not an end.
            std::future::pending::<()>().await;
        });
        Self { addr, cut, _tasks: tasks }
    }
}

/// The one test that waits for real, because HTTP/2 pings go by the machine's time.
#[tokio::test]
async fn a_silent_peer_is_noticed_in_time() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    server.leads("e1", cluster.clock.monotonic());
    let ask = knowing(PeerRole::Leading, "e1", Duration::from_secs(10));

    let mute = async {
        // Accepts, by the kernel's hand, and says nothing.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let began = Instant::now();
        let error = soon(cluster.peers("srv-2", "s1").ask(&addr, &ask)).await.unwrap_err();
        assert!(error.message.contains("no connection within 1s"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(8), "the answer itself may take ten");
    };
    let frozen = async {
        // Falls silent amid a long poll, as a frozen machine does.
        let wire = Wire::to(&server.addr).await;
        let peers = cluster.peers("srv-3", "s1");
        let mut arrivals = server.desk.arrivals();
        let freeze = async {
            arrivals.changed().await.unwrap();
            wire.cut.cancel();
            Instant::now()
        };
        let (answer, silent) = tokio::join!(soon(peers.ask(&wire.addr, &ask)), freeze);
        let error = answer.unwrap_err();
        assert!(error.message.contains("link broke"), "{error}");
        assert!(silent.elapsed() < Duration::from_secs(8), "noticed after {:?}", silent.elapsed());
        // And its place is free again.
        until(|| {
            cluster.clock.advance(Duration::from_secs(4));
            server.desk.standbys().is_empty()
        })
        .await;
    };
    tokio::join!(mute, frozen);
}

#[tokio::test]
async fn only_a_refusal_answers_a_knock() {
    let cluster = Cluster::new();
    let peers = cluster.peers("srv-2", "s1");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    assert_eq!(peers.knock(&addr).await, Knock::Unknown, "somebody is there");
    drop(listener);
    assert_eq!(peers.knock(&addr).await, Knock::Refused);
    assert_eq!(peers.knock("no such place").await, Knock::Unknown);

    // A full queue: the kernel lets further SYNs fall, as a frozen or unplugged host would.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let full = socket.listen(1).unwrap();
    let addr = full.local_addr().unwrap();
    let mut waiting = Vec::new();
    while let Ok(stream) = timeout(Duration::from_millis(100), TcpStream::connect(addr)).await {
        waiting.push(stream.unwrap());
    }
    let began = Instant::now();
    assert_eq!(peers.knock(&addr.to_string()).await, Knock::Unknown);
    // The kernel by itself would try for minutes.
    assert!(Duration::from_millis(300) <= began.elapsed() && began.elapsed() < LIMIT, "{:?}", began.elapsed());
}

#[tokio::test]
async fn questions_to_one_address_share_a_line() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let (counted, n_lines) = watch::channel(0);
    let (target, cut) = (server.addr.clone(), CancellationToken::new());
    let is_cut = cut.clone();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        loop {
            let (mut near, _) = listener.accept().await.unwrap();
            counted.send_modify(|n| *n += 1);
            let mut far = TcpStream::connect(&target).await.unwrap();
            tokio::select! {
                _ = copy_bidirectional(&mut near, &mut far) => {}
                () = is_cut.cancelled(), if *counted.borrow() == 1 => {}
            }
        }
    });
    let peers = cluster.peers("srv-2", "s1");
    for election in [Election::Shard, Election::Cluster, Election::Shard] {
        soon(peers.ask(&addr, &plain(election))).await.unwrap();
    }
    assert_eq!(*n_lines.borrow(), 1);
    // A line that broke is replaced by the next question that finds it so.
    cut.cancel();
    let again = async { while peers.ask(&addr, &plain(Election::Shard)).await.is_err() {} };
    timeout(LIMIT, again).await.expect("a new line");
    assert_eq!(*n_lines.borrow(), 2);
}
