//! A thread of its own for the few things that must go on while everything else is busy.
//!
//! A lease that is renewed among ten thousand streams is late when it matters most. What runs in a lane has its own
//! thread, its own timers and its own sockets. A simulation has one thread only: there a lane is a scope like others.

use std::{future::Future, io};

use tokio_util::sync::{CancellationToken, DropGuard};

use crate::tasks::Tasks;

#[derive(Clone)]
pub enum Lane {
    Own(tokio::runtime::Handle),
    Common(Tasks),
}

/// Ends the thread of a lane, and whatever still runs in it, when it is dropped.
#[must_use = "the lane ends with it"]
pub struct LaneEnd {
    _end: DropGuard,
}

impl Lane {
    /// A lane with a thread of this name.
    pub fn own(name: &str) -> io::Result<(Self, LaneEnd)> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let end = CancellationToken::new();
        let ended = end.clone();
        std::thread::Builder::new().name(name.to_owned()).spawn(move || runtime.block_on(ended.cancelled()))?;
        Ok((Self::Own(handle), LaneEnd { _end: end.drop_guard() }))
    }

    /// Starts a task of the lane. Nobody waits for it: whoever needs to know its end has a channel to it.
    pub fn spawn<F>(&self, name: &'static str, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        match self {
            Self::Own(handle) => {
                handle.spawn(future);
            }
            Self::Common(tasks) => tasks.spawn(name, future),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn a_lane_goes_on_while_its_owner_is_stuck() {
        let (lane, end) = Lane::own("test").unwrap();
        let (send, told) = std::sync::mpsc::channel();
        lane.spawn("tick", async move {
            tokio::time::sleep(Duration::from_millis(1)).await;
            let _ = send.send(std::thread::current().name().map(str::to_owned));
        });
        // Blocks this runtime on purpose.
        assert_eq!(told.recv_timeout(Duration::from_secs(10)).unwrap().as_deref(), Some("test"));
        let (alive, ended) = oneshot::channel::<()>();
        lane.spawn("waits", async move {
            let _alive = alive;
            std::future::pending::<()>().await;
        });
        drop(end);
        assert!(ended.await.is_err(), "its tasks end with it");
    }
}
