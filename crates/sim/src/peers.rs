//! From server to server, without a socket: a question is answered at the desk of the server that has the address, in
//! that server's process. What a frozen, killed or unreachable one does to the asker is what a socket would do.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use nstance_core::ports::{
    clock::Entropy,
    peers::{Knock, PeerAsk, PeerError, PeerView, Peers},
};
use nstance_rt::entropy::jitter;

use crate::hosts::{Hosts, Server, port_of};

const LATENCY: Duration = Duration::from_millis(2);
/// How often a silent link is asked for a sign of life; the second time without one it is broken.
const PING: Duration = Duration::from_secs(1);
const KNOCK: Duration = Duration::from_millis(300);

/// The way from one server to the others.
pub(crate) struct SimPeers {
    pub(crate) n: usize,
    pub(crate) id: String,
    pub(crate) hosts: Arc<Hosts>,
    pub(crate) chance: Arc<dyn Entropy>,
}

impl SimPeers {
    /// The machine that has an address.
    fn machine(addr: &str) -> Option<usize> {
        let port: u16 = addr.rsplit_once(':')?.1.parse().ok()?;
        let n = usize::from(port.checked_sub(port_of(0))?);
        (0 < n).then_some(n)
    }

    fn is_joined(&self, n: usize) -> bool {
        self.hosts.reaches(self.n, n) && self.hosts.reaches(n, self.n) && !self.hosts.is_dark(n)
    }

    /// Resolves when there was no sign of life for two seconds.
    async fn silence(&self, server: &Server) {
        let mut missed = false;
        loop {
            tokio::time::sleep(PING).await;
            let silent = server.process.is_frozen() || !self.is_joined(server.n);
            if silent && missed {
                return;
            }
            missed = silent;
        }
    }
}

#[async_trait]
impl Peers for SimPeers {
    async fn ask(&self, addr: &str, ask: &PeerAsk) -> Result<PeerView, PeerError> {
        let failed = |message: &str| PeerError { addr: addr.to_owned(), message: message.to_owned() };
        tokio::time::sleep(jitter(self.chance.as_ref(), LATENCY)).await;
        let n = Self::machine(addr).ok_or_else(|| failed("no such host"))?;
        let arrives = self.hosts.reaches(self.n, n) && !self.hosts.is_dark(n);
        if !arrives {
            tokio::time::sleep(2 * PING).await;
            return Err(failed("no answer"));
        }
        let server = self.hosts.server(n).ok_or_else(|| failed("connection refused"))?;
        let desk = server.running.desk().ok_or_else(|| failed("connection reset"))?;
        let answered = async {
            let answer = server.process.answer(desk.answer(&self.id, true, ask)).await;
            if answer.is_some() && !self.is_joined(n) {
                // It is on its way for ever; the silence ends the wait.
                return std::future::pending().await;
            }
            tokio::time::sleep(jitter(self.chance.as_ref(), LATENCY)).await;
            answer.ok_or_else(|| failed("connection reset"))
        };
        tokio::select! {
            biased;
            answered = answered => answered,
            () = self.silence(&server) => Err(failed("no sign of life")),
        }
    }

    async fn knock(&self, addr: &str) -> Knock {
        let Some(n) = Self::machine(addr).filter(|n| self.is_joined(*n)) else {
            tokio::time::sleep(KNOCK).await;
            return Knock::Unknown;
        };
        tokio::time::sleep(Duration::from_millis(1)).await;
        // A process that stands still has its connections accepted by its kernel.
        if self.hosts.server(n).is_some() { Knock::Unknown } else { Knock::Refused }
    }
}
