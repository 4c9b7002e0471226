//! The network of the tests: in memory, so that nothing depends on a machine's speed, and as bad as a test wants it.

use std::{
    collections::{HashMap, HashSet},
    io,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use nstance_agent::{
    link::{Net, Socket},
    settings::Address,
};
use nstance_rt::tasks::Tasks;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, DuplexStream},
    sync::mpsc,
    time::Instant,
};
use tokio_util::sync::CancellationToken;

/// A network in memory: who listens where. Bytes pass through a relay, which can be frozen: then nothing comes through
/// any more, and neither side is told.
#[derive(Default)]
pub struct MemNet {
    pub listeners: Mutex<HashMap<String, mpsc::Sender<DuplexStream>>>,
    pub dialled: Mutex<Vec<(Instant, String)>>,
    relays: Tasks,
    frozen: Mutex<CancellationToken>,
    cut: Mutex<CancellationToken>,
    hanging: AtomicBool,
    holes: Mutex<HashSet<String>>,
    open: Arc<AtomicUsize>,
}

impl MemNet {
    /// Cuts every connection without telling anybody; new ones are refused.
    pub fn freeze(&self) {
        self.listeners.lock().unwrap().clear();
        self.frozen.lock().unwrap().cancel();
    }

    /// As [`Self::freeze`], but whoever listens later is reached.
    pub fn freeze_open(&self) {
        self.freeze();
        *self.frozen.lock().unwrap() = CancellationToken::new();
    }

    /// Ends every connection; new ones are refused.
    pub fn cut(&self) {
        self.listeners.lock().unwrap().clear();
        std::mem::take(&mut *self.cut.lock().unwrap()).cancel();
    }

    /// How many connections are open.
    pub fn n_open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }

    /// Whoever listens at one address listens at another instead; answers whether somebody does.
    pub fn move_listener(&self, from: &str, to: &str) -> bool {
        let mut listeners = self.listeners.lock().unwrap();
        let Some(listener) = listeners.remove(from) else { return false };
        listeners.insert(to.to_owned(), listener);
        true
    }

    /// New connections to this address are neither made nor refused.
    pub fn hang_at(&self, address: &str) {
        self.holes.lock().unwrap().insert(address.to_owned());
    }

    /// New connections are neither made nor refused.
    pub fn hang(&self) {
        self.hanging.store(true, Ordering::SeqCst);
    }
}

async fn carry(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
    let _ = tokio::io::copy(&mut from, &mut to).await;
    let _ = to.shutdown().await;
}

#[tonic::async_trait]
impl Net for MemNet {
    async fn connect(&self, address: &Address) -> io::Result<Socket> {
        let address = address.to_string();
        self.dialled.lock().unwrap().push((Instant::now(), address.clone()));
        if self.hanging.load(Ordering::SeqCst) || self.holes.lock().unwrap().contains(&address) {
            std::future::pending::<()>().await;
        }
        let listener = self.listeners.lock().unwrap().get(&address).cloned();
        let (ours, left) = tokio::io::duplex(64 * 1024);
        let (right, theirs) = tokio::io::duplex(64 * 1024);
        let ((left_out, left_in), (right_out, right_in)) = (tokio::io::split(left), tokio::io::split(right));
        let (frozen, cut) = (self.frozen.lock().unwrap().clone(), self.cut.lock().unwrap().clone());
        let open = self.open.clone();
        open.fetch_add(1, Ordering::SeqCst);
        self.relays.spawn_droppable("relay", async move {
            // Each way by itself: what a server said before it closed arrives, as it does over TCP. And kept when it is
            // frozen: whoever lost his end would be told.
            let mut carried = pin!(async { tokio::join!(carry(left_out, right_in), carry(right_out, left_in)) });
            tokio::select! {
                () = frozen.cancelled() => std::future::pending().await,
                () = cut.cancelled() => {}
                _ = &mut carried => {}
            }
            open.fetch_sub(1, Ordering::SeqCst);
        });
        match listener {
            Some(listener) if listener.send(theirs).await.is_ok() => {
                Ok(Socket { stream: Box::new(ours), local: Some("10.9.8.7:1".parse().unwrap()) })
            }
            _ => Err(io::ErrorKind::ConnectionRefused.into()),
        }
    }
}
