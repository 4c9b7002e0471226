//! A socket that can be cut from outside, at a moment that is known exactly.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
};

use async_trait::async_trait;
use nstance_agent::{
    link::{Net, Socket},
    settings::Address,
};
use rustix::net::Shutdown;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

/// Keeps a hand on the socket it opened.
#[derive(Default)]
pub(super) struct Tapped(Mutex<Option<Arc<TcpStream>>>);

impl Tapped {
    /// The hand on the last socket.
    pub(super) fn knife(&self) -> Knife {
        Knife(self.0.lock().unwrap_or_else(PoisonError::into_inner).take())
    }
}

#[async_trait]
impl Net for Tapped {
    async fn connect(&self, address: &Address) -> io::Result<Socket> {
        let stream = TcpStream::connect((address.host.as_str(), address.port)).await?;
        stream.set_nodelay(true)?;
        let local = stream.local_addr().ok();
        let stream = Arc::new(stream);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream.clone());
        Ok(Socket { stream: Box::new(Shared(stream)), local })
    }
}

/// Ends a connection as the kernel of a dying process does: the other side reads its end, with nothing said before.
#[derive(Default)]
pub(super) struct Knife(Option<Arc<TcpStream>>);

impl Knife {
    pub(super) fn cut(&self) {
        if let Some(stream) = &self.0 {
            // One that has ended already is cut, too.
            let _ = rustix::net::shutdown(&**stream, Shutdown::Both);
        }
    }
}

/// A stream with two owners and one file descriptor: thousands of them would need twice as many otherwise.
struct Shared(Arc<TcpStream>);

impl AsyncRead for Shared {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(cx))?;
            match self.0.try_read(buf.initialize_unfilled()) {
                Ok(n) => {
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Shared {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(cx))?;
            match self.0.try_write(buf) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(rustix::net::shutdown(&*self.0, Shutdown::Write).map_err(Into::into))
    }
}
