//! What a server tells of its leadership, at once and to those who wait for a change.

use std::time::Duration;

use nstance_core::{
    ids::Epoch,
    ports::{
        clock::Clock as _,
        objects::ETag,
        peers::{Election, Knock, PeerAsk, PeerRole, PeerView, Peers as _},
    },
};
use tokio::time::Instant;

use super::{Cluster, LIMIT, get, http, knowing, plain, soon, until};

/// T18. A server that cannot renew says so by the age of what is durable, however much it believes in itself.
#[tokio::test]
async fn peer_health_tells_the_durable_truth() {
    let cluster = Cluster::new();
    let (server, peers) = (cluster.server().await, cluster.peers("srv-2", "s1"));
    let nothing = soon(peers.ask(&server.addr, &plain(Election::Shard))).await.unwrap();
    assert_eq!((nothing.role, nothing.etag, nothing.renewed_ago), (PeerRole::Following, None, None));

    server.leads("\"e-1\"", cluster.clock.monotonic());
    for seconds in [0, 3, 4] {
        cluster.clock.advance(Duration::from_secs(seconds));
        let view = soon(peers.ask(&server.addr, &plain(Election::Shard))).await.unwrap();
        assert_eq!(
            view,
            PeerView {
                election: Election::Shard,
                cluster: "demo".to_owned(),
                shard: "s1".to_owned(),
                server_id: "srv-1".to_owned(),
                process: "00112233445566778899aabbccddeeff".to_owned(),
                role: PeerRole::Leading,
                epoch: Epoch(7),
                etag: Some(ETag("\"e-1\"".to_owned())),
                renewed_ago: Some(cluster.clock.went()),
                ttl: Duration::from_secs(6),
                ready: false,
                version: env!("CARGO_PKG_VERSION").to_owned(),
            }
        );
    }
    // The other election is told of by itself.
    let other = soon(peers.ask(&server.addr, &plain(Election::Cluster))).await.unwrap();
    assert_eq!((other.election, other.role, other.epoch), (Election::Cluster, PeerRole::Following, Epoch(0)));
    // Only the next durable renewal makes it young again.
    server.leads("\"e-2\"", cluster.clock.monotonic());
    let view = soon(peers.ask(&server.addr, &plain(Election::Shard))).await.unwrap();
    assert_eq!((view.etag, view.renewed_ago), (Some(ETag("\"e-2\"".to_owned())), Some(Duration::ZERO)));
}

#[tokio::test]
async fn what_differs_is_told_at_once() {
    let cluster = Cluster::new();
    let (server, peers) = (cluster.server().await, cluster.peers("srv-2", "s1"));
    server.leads("e/1", cluster.clock.monotonic());
    // Ten seconds are more than the limit of an answer here: none of these waits.
    let wait = Duration::from_secs(10);
    for known in [knowing(PeerRole::Leading, "e/0", wait), knowing(PeerRole::Stalled, "e/1", wait)] {
        let view = soon(peers.ask(&server.addr, &known)).await.unwrap();
        assert_eq!((view.role, view.etag), (PeerRole::Leading, Some(ETag("e/1".to_owned()))));
    }
    let known = PeerAsk { known: Some((PeerRole::Leading, None)), ..knowing(PeerRole::Leading, "", wait) };
    soon(peers.ask(&server.addr, &known)).await.unwrap();

    // Without a role, an ETag is what the leader had.
    let (sender, _line) = http(&server.addr, cluster.server_dials("srv-3", "demo", "s1")).await;
    server.stand(|standing| standing.role = PeerRole::Stopping);
    let (code, body) = get(&sender, "/leadership/shard?etag=e%2F1&wait_ms=10000").await;
    assert_eq!((code, body["role"].as_str()), (200, Some("stopping")));
}

#[tokio::test]
async fn two_who_wait_hear_of_every_change() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    let pollers = [cluster.peers("srv-2", "s1"), cluster.peers("srv-3", "s1")];
    server.leads("e1", cluster.clock.monotonic());
    let mut arrivals = server.desk.arrivals();
    let changes: [(PeerRole, &str, PeerRole, &str); 3] = [
        (PeerRole::Leading, "e1", PeerRole::Leading, "e2"),
        (PeerRole::Leading, "e2", PeerRole::Stopping, "e2"),
        (PeerRole::Stopping, "e2", PeerRole::Released, "e3"),
    ];
    for (role, etag, new_role, new_etag) in changes {
        let ask = knowing(role, etag, Duration::from_secs(10));
        let waiting = futures::future::join_all(pollers.iter().map(|peers| soon(peers.ask(&server.addr, &ask))));
        let change = async {
            // Those who asked before are not here any more, so each question is an arrival.
            while server.desk.standbys().len() < 2 {
                arrivals.changed().await.unwrap();
            }
            server.stand(|standing| {
                standing.role = new_role;
                standing.etag = Some(ETag(new_etag.to_owned()));
            });
        };
        let (heard, ()) = tokio::join!(waiting, change);
        for view in heard {
            let view = view.unwrap();
            assert_eq!((view.role, view.etag), (new_role, Some(ETag(new_etag.to_owned()))));
        }
        cluster.clock.advance(Duration::from_secs(4));
        assert!(server.desk.standbys().is_empty());
    }
}

#[tokio::test]
async fn a_wait_without_change_ends_with_the_present_state() {
    let cluster = Cluster::new();
    let (server, peers) = (cluster.server().await, cluster.peers("srv-2", "s1"));
    server.leads("e1", cluster.clock.monotonic());
    let (began, wait) = (Instant::now(), Duration::from_millis(60));
    let view = soon(peers.ask(&server.addr, &knowing(PeerRole::Leading, "e1", wait))).await.unwrap();
    assert_eq!((view.role, view.etag), (PeerRole::Leading, Some(ETag("e1".to_owned()))));
    assert!(wait <= began.elapsed());
}

#[tokio::test]
async fn a_caller_that_hangs_up_waits_no_longer() {
    let cluster = Cluster::new();
    let (server, peers) = (cluster.server().await, cluster.peers("srv-2", "s1"));
    server.leads("e1", cluster.clock.monotonic());
    let mut arrivals = server.desk.arrivals();
    let ask = knowing(PeerRole::Leading, "e1", Duration::from_secs(10));
    tokio::select! {
        biased;
        view = peers.ask(&server.addr, &ask) => panic!("nothing changed: {view:?}"),
        arrived = arrivals.changed() => arrived.unwrap(),
    }
    // While a question is open its caller is here, however late it is.
    until(|| {
        cluster.clock.advance(Duration::from_secs(4));
        server.desk.standbys().is_empty()
    })
    .await;
    // Only the question was given up, not the line.
    soon(peers.ask(&server.addr, &plain(Election::Shard))).await.unwrap();
}

#[tokio::test]
async fn a_stopping_server_answers_open_questions() {
    let cluster = Cluster::new();
    let (server, peers) = (cluster.server().await, cluster.peers("srv-2", "s1"));
    server.leads("e1", cluster.clock.monotonic());
    let mut arrivals = server.desk.arrivals();
    let ask = knowing(PeerRole::Leading, "e1", Duration::from_secs(10));
    let stop = async {
        arrivals.changed().await.unwrap();
        server.tasks.end(LIMIT).await
    };
    let (view, n_aborted) = tokio::join!(soon(peers.ask(&server.addr, &ask)), stop);
    assert_eq!((view.unwrap().role, n_aborted), (PeerRole::Leading, 0));
    assert_eq!(peers.knock(&server.addr).await, Knock::Refused);
}
