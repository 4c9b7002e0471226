//! Links: relays between agents or operators and whichever server of a shard leads.
//!
//! A link listens where a shard's leader is told to be and passes every connection on to the server that leads. It stands
//! in for the fixed leader address of production: like that, it goes over to a new leader as soon as there is one, even
//! if the old one still listens because it stands still or cannot reach the store, and what was connected to the old one
//! is reset. It is also where that way is cut or slowed. A cut link behaves like a network that loses everything: what was sent waits, nobody is told, and when it is
//! healed what waited goes through. Links live in the process of `up`, and obey the files of [`faults`].

use std::{io, net::Ipv4Addr, sync::Arc, time::Duration};

use anyhow::Context;
use futures::future::join_all;
use nstance_rt::tasks::Tasks;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::watch,
    time::timeout,
};

use crate::{
    faults::{self, Cut, Effect, Fault, Who},
    http,
    layout::Layout,
};

/// How soon a link obeys.
const LOOK: Duration = Duration::from_millis(50);
/// How soon it goes over to a new leader.
const LEADER_LOOK: Duration = Duration::from_millis(100);
/// A server that needs longer to say that it leads is asked again.
const LEADER_LIMIT: Duration = Duration::from_millis(500);
/// A server on this machine accepts or refuses at once.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
/// After one side has said its last, the other may finish. Who lost its peer must learn of it soon, so not for long.
const HALF_CLOSED: Duration = Duration::from_millis(500);
const BUFFER: usize = 64 * 1024;

/// All links of one shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Crossing {
    pub(crate) shard: String,
    /// The health port of each server.
    pub(crate) health: Vec<u16>,
    pub(crate) doors: Vec<Door>,
}

/// One port of a shard's leader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Door {
    pub(crate) who: Who,
    pub(crate) listen: u16,
    /// The same port of each server, in the order of the health ports.
    pub(crate) servers: Vec<u16>,
}

/// How a link is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) cut: Cut,
    pub(crate) latency: Duration,
}

impl State {
    const OPEN: Self = Self { cut: Cut::Nothing, latency: Duration::ZERO };

    /// What the faults in force make of one link.
    pub(crate) fn of(faults: &[Fault], who: Who, shard: &str) -> Self {
        let mine = faults.iter().find_map(|it| match &it.effect {
            Effect::Link { who: other, shard: place, cut, latency_ms } if *other == who && place == shard => {
                Some(Self { cut: *cut, latency: Duration::from_millis(*latency_ms) })
            }
            _ => None,
        });
        mine.unwrap_or(Self::OPEN)
    }

    pub(crate) fn name(self) -> &'static str {
        match self.cut {
            Cut::Everything => "cut",
            Cut::ToServer => "cut to the server",
            Cut::ToClient => "cut from the server",
            Cut::Nothing if self.latency.is_zero() => "open",
            Cut::Nothing => "slow",
        }
    }

    fn passes(self, way: Way) -> bool {
        match self.cut {
            Cut::Nothing => true,
            Cut::Everything => false,
            Cut::ToServer => way == Way::ToClient,
            Cut::ToClient => way == Way::ToServer,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    ToServer,
    ToClient,
}

/// Which of the servers leads, once that is known.
type Leader = watch::Receiver<Option<usize>>;

/// Opens the doors and keeps them until the scope ends.
pub(crate) async fn start(tasks: &Tasks, layout: &Layout, crossings: Vec<Crossing>) -> anyhow::Result<()> {
    let mut states = Vec::new();
    for Crossing { shard, health, doors } in crossings {
        let leader = follow_leader(tasks, health);
        for door in doors {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, door.listen)).await;
            let listener = listener.with_context(|| format!("bind port {} of a link", door.listen))?;
            let (sender, state) = watch::channel(State::OPEN);
            serve(tasks, listener, Behind { servers: door.servers.into(), leader: leader.clone(), state });
            states.push((door.who, shard.clone(), sender));
        }
    }
    let layout = layout.clone();
    tasks.spawn_droppable("link faults", async move {
        loop {
            let faults = faults::all(&layout);
            for (who, shard, state) in &states {
                let wanted = State::of(&faults, *who, shard);
                state.send_if_modified(|it| std::mem::replace(it, wanted) != wanted);
            }
            tokio::time::sleep(LOOK).await;
        }
    });
    Ok(())
}

/// Asks the servers who of them leads, again and again. Nobody's word leaves the last leader in its place: an address
/// does not move before somebody takes it.
fn follow_leader(tasks: &Tasks, health: Vec<u16>) -> Leader {
    let (sender, leader) = watch::channel(None);
    tasks.spawn_droppable("link leader", async move {
        loop {
            let claims = join_all(health.iter().map(|port| claim(*port))).await;
            let newest = (0..).zip(claims).filter_map(|(index, epoch)| Some((epoch?, index))).max();
            if let Some((_, index)) = newest {
                sender.send_if_modified(|it| it.replace(index) != Some(index));
            }
            tokio::time::sleep(LEADER_LOOK).await;
        }
    });
    leader
}

/// The epoch in which a server serves as the leader.
async fn claim(health: u16) -> Option<u64> {
    let answer = http::get_within(health, "/leader", LEADER_LIMIT).await.ok()?;
    if answer.code != 200 {
        return None;
    }
    let ready = http::get_within(health, "/ready", LEADER_LIMIT).await.ok()?;
    serde_json::from_str::<serde_json::Value>(&ready.body).ok()?["epoch"].as_u64()
}

/// What one door leads to.
#[derive(Clone)]
struct Behind {
    servers: Arc<[u16]>,
    leader: Leader,
    state: watch::Receiver<State>,
}

impl Behind {
    /// Tries the leader, then the others: a leader that died this moment may have its follower already.
    async fn connect(&self) -> Option<(TcpStream, usize)> {
        let leader = *self.leader.borrow();
        let mut order: Vec<usize> = (0..self.servers.len()).collect();
        order.sort_by_key(|index| Some(*index) != leader);
        for index in order {
            let address = (Ipv4Addr::LOCALHOST, self.servers[index]);
            if let Ok(Ok(stream)) = timeout(CONNECT_LIMIT, TcpStream::connect(address)).await {
                return Some((stream, index));
            }
        }
        None
    }

    /// Resolves when another server than this one leads.
    async fn is_deposed(&mut self, index: usize) {
        if self.leader.wait_for(|leader| leader.is_some_and(|leader| leader != index)).await.is_err() {
            std::future::pending().await
        }
    }
}

fn serve(tasks: &Tasks, listener: TcpListener, behind: Behind) {
    let inner = tasks.clone();
    tasks.spawn_droppable("link", async move {
        loop {
            match listener.accept().await {
                Ok((client, _)) => inner.spawn_droppable("link connection", relay(client, behind.clone())),
                // Out of files, most likely; some connection will end.
                Err(_) => tokio::time::sleep(LOOK).await,
            }
        }
    });
}

async fn relay(mut client: TcpStream, mut behind: Behind) {
    // Not even the first packet gets through a cut link, and its answer must come back.
    let both = |it: &State| it.passes(Way::ToServer) && it.passes(Way::ToClient);
    if behind.state.wait_for(both).await.is_err() {
        return;
    }
    let Some((mut server, index)) = behind.connect().await else {
        // As if nobody listened: the client tries again without waiting for anything.
        let _ = client.set_zero_linger();
        return;
    };
    // Small frames wait for nobody.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let state = behind.state.clone();
    let ended = {
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        let there = pump(from_client, to_server, state.clone(), Way::ToServer);
        let back = pump(from_server, to_client, state.clone(), Way::ToClient);
        tokio::pin!(there, back);
        tokio::select! {
            biased;
            ended = &mut back => match ended {
                Ok(()) => timeout(HALF_CLOSED, there).await.unwrap_or(Ok(())),
                Err(error) => Err(error),
            },
            ended = &mut there => match ended {
                Ok(()) => timeout(HALF_CLOSED, back).await.unwrap_or(Ok(())),
                Err(error) => Err(error),
            },
            () = behind.is_deposed(index) => {
                // Through a cut link not even a reset gets.
                let mut state = state;
                let _ = state.wait_for(both).await;
                Err(io::ErrorKind::ConnectionReset.into())
            }
        }
    };
    if ended.is_err() {
        let _ = (client.set_zero_linger(), server.set_zero_linger());
    }
}

/// Passes bytes on in one direction until there are no more.
async fn pump(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    mut state: watch::Receiver<State>,
    way: Way,
) -> io::Result<()> {
    let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
    let mut buffer = vec![0; BUFFER];
    loop {
        state.wait_for(|it| it.passes(way)).await.map_err(gone)?;
        let n = tokio::select! {
            biased;
            changed = state.changed() => {
                changed.map_err(gone)?;
                continue;
            }
            n = from.read(&mut buffer) => n?,
        };
        let latency = state.borrow().latency;
        if !latency.is_zero() {
            tokio::time::sleep(latency).await;
        }
        // What was on its way when the link was cut stays there.
        state.wait_for(|it| it.passes(way)).await.map_err(gone)?;
        if n == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..n]).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Rig {
        tasks: Tasks,
        door: u16,
        state: watch::Sender<State>,
        leader: watch::Sender<Option<usize>>,
    }

    impl Drop for Rig {
        fn drop(&mut self) {
            self.tasks.cancel();
        }
    }

    async fn listener() -> (TcpListener, u16) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        (listener, port)
    }

    async fn rig(servers: Vec<u16>) -> Rig {
        let (tasks, (listener, door)) = (Tasks::new(), listener().await);
        let (state, of_state) = watch::channel(State::OPEN);
        let (leader, of_leader) = watch::channel(None);
        serve(&tasks, listener, Behind { servers: servers.into(), leader: of_leader, state: of_state });
        Rig { tasks, door, state, leader }
    }

    impl Rig {
        /// A connection through the link: the client's end and the server's.
        async fn connect(&self, server: &TcpListener) -> (TcpStream, TcpStream) {
            let client = TcpStream::connect((Ipv4Addr::LOCALHOST, self.door)).await.unwrap();
            let (server, _) = server.accept().await.unwrap();
            (client, server)
        }
    }

    async fn carries(from: &mut TcpStream, to: &mut TcpStream) {
        from.write_all(b"ping").await.unwrap();
        let mut bytes = [0; 4];
        to.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes, b"ping");
    }

    #[tokio::test]
    async fn a_link_leads_to_whoever_accepts() {
        let ((first, one), (second, two)) = (listener().await, listener().await);
        let rig = rig(vec![one, two]).await;
        let (mut client, mut server) = rig.connect(&first).await;
        carries(&mut client, &mut server).await;
        carries(&mut server, &mut client).await;

        drop(first);
        let (mut client, mut server) = rig.connect(&second).await;
        carries(&mut client, &mut server).await;

        drop(second);
        let mut client = TcpStream::connect((Ipv4Addr::LOCALHOST, rig.door)).await.unwrap();
        assert!(client.read(&mut [0; 1]).await.is_err(), "nobody accepts: reset");
    }

    #[tokio::test]
    async fn a_link_goes_over_to_a_new_leader_though_the_old_one_still_listens() {
        let ((first, one), (second, two)) = (listener().await, listener().await);
        let rig = rig(vec![one, two]).await;
        rig.leader.send_replace(Some(0));
        let (mut client, mut server) = rig.connect(&first).await;
        carries(&mut client, &mut server).await;
        rig.leader.send_replace(Some(1));
        assert!(client.read(&mut [0; 1]).await.is_err(), "reset");
        assert!(server.read(&mut [0; 1]).await.is_err(), "reset");
        let (mut client, mut server) = rig.connect(&second).await;
        carries(&mut client, &mut server).await;
    }

    #[tokio::test]
    async fn one_side_that_ends_ends_the_other() {
        let (listener, port) = listener().await;
        let rig = rig(vec![port]).await;
        let (mut client, server) = rig.connect(&listener).await;
        drop(server);
        assert_eq!(client.read(&mut [0; 1]).await.unwrap(), 0);

        let (client, mut server) = rig.connect(&listener).await;
        drop(client);
        assert_eq!(server.read(&mut [0; 1]).await.unwrap(), 0);

        // A client that has said its last still hears the answer.
        let (mut client, mut server) = rig.connect(&listener).await;
        client.write_all(b"question").await.unwrap();
        client.shutdown().await.unwrap();
        let mut question = String::new();
        server.read_to_string(&mut question).await.unwrap();
        server.write_all(b"answer").await.unwrap();
        drop(server);
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert_eq!((question.as_str(), answer.as_str()), ("question", "answer"));
    }

    #[tokio::test]
    async fn what_is_sent_into_a_cut_link_comes_out_when_it_is_healed() {
        let (listener, port) = listener().await;
        let rig = rig(vec![port]).await;
        let (mut client, mut server) = rig.connect(&listener).await;
        carries(&mut client, &mut server).await;

        rig.state.send_replace(State { cut: Cut::ToServer, latency: Duration::ZERO });
        client.write_all(b"lost").await.unwrap();
        carries(&mut server, &mut client).await;
        assert!(server.try_read(&mut [0; 4]).is_err(), "the other direction is cut");

        rig.state.send_replace(State { cut: Cut::Everything, latency: Duration::ZERO });
        let mut late = TcpStream::connect((Ipv4Addr::LOCALHOST, rig.door)).await.unwrap();
        late.write_all(b"hello").await.unwrap();
        rig.state.send_replace(State::OPEN);
        let mut bytes = [0; 4];
        server.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes, b"lost");
        let (mut server, _) = listener.accept().await.unwrap();
        let mut bytes = [0; 5];
        server.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes, b"hello");
    }

    #[test]
    fn a_link_is_as_its_fault_says() {
        let effect = Effect::Link { who: Who::Agents, shard: "dev-1".into(), cut: Cut::Nothing, latency_ms: 40 };
        let faults = [Fault::new("x".into(), "slow".into(), effect)];
        let state = State::of(&faults, Who::Agents, "dev-1");
        assert_eq!((state.name(), state.latency), ("slow", Duration::from_millis(40)));
        for (who, shard) in [(Who::Operators, "dev-1"), (Who::Agents, "dev-2")] {
            assert_eq!(State::of(&faults, who, shard), State::OPEN);
        }
    }
}
