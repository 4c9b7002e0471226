//! A cloud's metadata service: one of several hosts, and what can go wrong with its answers.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use serde_json::Value;

use super::http::{HttpError, LIMIT, Request, Response, call};
use crate::{context::Context, settings::Address};

#[derive(Debug, thiserror::Error)]
pub(crate) enum Trouble {
    #[error("ask for {path}")]
    Http { path: String, source: HttpError },
    #[error("{path} was answered with status {status}")]
    Status { path: String, status: u16 },
    #[error("answer to {path} cannot be used: {what}")]
    Malformed { path: String, what: &'static str },
}

impl Trouble {
    /// Nothing was said in the time there was.
    pub(crate) fn is_late(&self) -> bool {
        matches!(self, Self::Http { source, .. } if source.is_late())
    }

    pub(crate) fn malformed(path: &str, what: &'static str) -> Self {
        Self::Malformed { path: path.to_owned(), what }
    }
}

pub(crate) struct Service<'a> {
    pub(crate) ctx: &'a Context,
    hosts: &'a [Address],
    /// The host that answered last is asked first.
    first: AtomicUsize,
}

impl<'a> Service<'a> {
    pub(crate) fn new(ctx: &'a Context, hosts: &'a [Address]) -> Self {
        Self { ctx, hosts, first: AtomicUsize::new(0) }
    }

    pub(crate) async fn get(&self, path: &str, headers: &[(&'static str, &str)]) -> Result<Response, Trouble> {
        self.ask(&Request { method: "GET", path, headers }, LIMIT).await
    }

    /// Asks the hosts one by one until one answers, whatever it says.
    pub(crate) async fn ask(&self, request: &Request<'_>, limit: Duration) -> Result<Response, Trouble> {
        let first = self.first.load(Ordering::Relaxed);
        let mut last = HttpError::Late { address: "no host".to_owned() };
        for n in 0..self.hosts.len() {
            let index = (first + n) % self.hosts.len();
            match call(&*self.ctx.parts.net, &self.hosts[index], request, limit).await {
                Ok(response) => {
                    self.first.store(index, Ordering::Relaxed);
                    return Ok(response);
                }
                Err(error) => {
                    last = error;
                    // A read that was to hang and hung too long would do so at the next host too, with nobody looking.
                    if LIMIT < limit && last.is_late() {
                        break;
                    }
                }
            }
        }
        Err(Trouble::Http { path: request.path.to_owned(), source: last })
    }
}

/// The body of a 200; nothing else is worth reading.
pub(crate) fn ok(path: &str, response: Response) -> Result<Response, Trouble> {
    match response.status {
        200 => Ok(response),
        status => Err(Trouble::Status { path: path.to_owned(), status }),
    }
}

/// As [`ok`], where 404 means that there is nothing.
pub(crate) fn ok_or_none(path: &str, response: Response) -> Result<Option<Response>, Trouble> {
    if response.status == 404 { Ok(None) } else { ok(path, response).map(Some) }
}

/// A word or name: not empty, and nothing in it that could not stand in a report or a header.
pub(crate) fn word(path: &str, response: &Response) -> Result<String, Trouble> {
    let printable = |text: &&str| {
        !text.is_empty() && text.len() <= 1024 && text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ')
    };
    let text = response.text().filter(printable);
    text.map(str::to_owned).ok_or_else(|| Trouble::malformed(path, "not a word"))
}

pub(crate) fn json(path: &str, response: &Response) -> Result<Value, Trouble> {
    serde_json::from_slice(&response.body).map_err(|_| Trouble::malformed(path, "not JSON"))
}
