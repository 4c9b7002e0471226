//! Links: relays between agents or operators and whichever server of a shard leads.
//!
//! A link listens where a shard's leader is told to be and passes every connection on to the server that accepts it,
//! which only the leader does. It stands in for the fixed leader address of production, and is where that way is cut or
//! slowed. A cut link behaves like a network that loses everything: what was sent waits, nobody is told, and when it is
//! healed what waited goes through. Links live in the process of `up`, and obey the files of [`faults`].

use std::{
    io,
    net::Ipv4Addr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::Context;
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
    layout::Layout,
};

/// How soon a link obeys.
const LOOK: Duration = Duration::from_millis(50);
/// A server on this machine accepts or refuses at once.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
/// One that accepts and then says nothing for so long stands still: another may lead by now.
const SILENT: Duration = Duration::from_secs(3);
/// After one side has said its last, the other may finish. Who lost its peer must learn of it soon, so not for long.
const HALF_CLOSED: Duration = Duration::from_millis(500);
const BUFFER: usize = 64 * 1024;

/// One port of one shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Door {
    pub(crate) shard: String,
    pub(crate) who: Who,
    pub(crate) listen: u16,
    /// The same port of each server.
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

/// Opens the doors and keeps them until the scope ends.
pub(crate) async fn start(tasks: &Tasks, layout: &Layout, doors: Vec<Door>) -> anyhow::Result<()> {
    let mut states = Vec::new();
    for door in doors {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, door.listen)).await;
        let listener = listener.with_context(|| format!("bind port {} of a link", door.listen))?;
        let (sender, state) = watch::channel(State::OPEN);
        serve(tasks, listener, door.servers, state);
        states.push((door.who, door.shard, sender));
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

fn serve(tasks: &Tasks, listener: TcpListener, servers: Vec<u16>, state: watch::Receiver<State>) {
    let (inner, servers) = (tasks.clone(), Arc::new(Servers(Mutex::new(servers))));
    tasks.spawn_droppable("link", async move {
        loop {
            match listener.accept().await {
                Ok((client, _)) => {
                    inner.spawn_droppable("link connection", relay(client, servers.clone(), state.clone()));
                }
                // Out of files, most likely; some connection will end.
                Err(_) => tokio::time::sleep(LOOK).await,
            }
        }
    });
}

/// The ports a door leads to, the one that accepted last in front.
struct Servers(Mutex<Vec<u16>>);

impl Servers {
    fn ports(&self) -> MutexGuard<'_, Vec<u16>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect(&self) -> Option<(TcpStream, u16)> {
        let ports = self.ports().clone();
        for port in ports {
            if let Ok(Ok(stream)) = timeout(CONNECT_LIMIT, TcpStream::connect((Ipv4Addr::LOCALHOST, port))).await {
                self.ports().sort_by_key(|it| *it != port);
                return Some((stream, port));
            }
        }
        None
    }

    /// Lets the others be tried first.
    fn put_last(&self, port: u16) {
        self.ports().sort_by_key(|it| *it == port);
    }
}

/// Whether something went by, in either direction.
#[derive(Default)]
struct Heard {
    client: AtomicBool,
    server: AtomicBool,
}

async fn relay(mut client: TcpStream, servers: Arc<Servers>, mut state: watch::Receiver<State>) {
    // Not even the first packet gets through a cut link, and its answer must come back.
    if state.wait_for(|it| it.passes(Way::ToServer) && it.passes(Way::ToClient)).await.is_err() {
        return;
    }
    let Some((mut server, port)) = servers.connect().await else {
        // As if nobody listened: the client tries again without waiting for anything.
        let _ = client.set_zero_linger();
        return;
    };
    // Small frames wait for nobody.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let heard = Heard::default();
    let ended = {
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        let there = pump(from_client, to_server, state.clone(), Way::ToServer, &heard.client);
        let back = pump(from_server, to_client, state.clone(), Way::ToClient, &heard.server);
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
            () = stands_still(&heard, &state) => {
                servers.put_last(port);
                Err(io::ErrorKind::TimedOut.into())
            }
        }
    };
    if ended.is_err() {
        let _ = (client.set_zero_linger(), server.set_zero_linger());
    }
}

/// Resolves if the server had something to answer and did not.
async fn stands_still(heard: &Heard, state: &watch::Receiver<State>) {
    loop {
        tokio::time::sleep(SILENT).await;
        if heard.server.load(Ordering::Relaxed) {
            return std::future::pending().await;
        }
        let is_open = *state.borrow() == State::OPEN;
        if heard.client.load(Ordering::Relaxed) && is_open {
            return;
        }
    }
}

/// Passes bytes on in one direction until there are no more.
async fn pump(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    mut state: watch::Receiver<State>,
    way: Way,
    heard: &AtomicBool,
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
        heard.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Rig {
        tasks: Tasks,
        door: u16,
        state: watch::Sender<State>,
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
        let (state, receiver) = watch::channel(State::OPEN);
        serve(&tasks, listener, servers, receiver);
        Rig { tasks, door, state }
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
