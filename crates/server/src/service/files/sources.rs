//! Contents that come from elsewhere: secrets and objects. Read once for a whole group, and forgotten soon.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nstance_config::render::MAX_FILE;
use nstance_core::time::Mono;
use nstance_rt::chain::Chain;
use tokio::sync::Mutex as Turn;

use crate::term::Shared;

/// What may be held of contents, all together. What is over it is read again.
const MAX_HELD: usize = 64 * 1024 * 1024;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    Secret(String),
    Object(String),
}

/// One content, and whose turn it is to read it: of a thousand agents that want it, one reads.
#[derive(Default)]
struct Held {
    content: Turn<Option<(Mono, Arc<Vec<u8>>)>>,
}

#[derive(Default)]
pub(super) struct Sources {
    held: Mutex<BTreeMap<Source, Arc<Held>>>,
}

impl Sources {
    /// Everything is read again.
    pub(super) fn forget(&self) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// The content, no older than `max_age`; or why there is none, in words without any of it.
    pub(super) async fn read(
        &self,
        shared: &Shared,
        source: &Source,
        max_age: Duration,
    ) -> Result<Arc<Vec<u8>>, String> {
        // The config was checked for this; here it costs nothing to be sure.
        if let Some(why) = refused(source) {
            return Err(why);
        }
        let held = {
            let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
            held.entry(source.clone()).or_default().clone()
        };
        let mut content = held.content.lock().await;
        let now = shared.clock.monotonic();
        if let Some((at, body)) = content.as_ref()
            && now.since(*at) < max_age
        {
            return Ok(body.clone());
        }
        let (what, read) = match source {
            Source::Secret(name) => (format!("secret `{name}`"), shared.secrets.get(name).await.map(|secret| secret.0)),
            Source::Object(key) => (format!("object `{key}`"), shared.store.get(key).await.map(|object| object.body)),
        };
        let body = read.map_err(|error| match error.is_not_found() {
            true => format!("{what} does not exist; create it, or take the file out of the template"),
            false => format!("{what} cannot be read: {}", Chain(&error)),
        })?;
        if MAX_FILE < body.len() {
            return Err(format!("{what} has {} bytes, a file may have {MAX_FILE}", body.len()));
        }
        let body = Arc::new(body);
        *content = Some((now, body.clone()));
        drop(content);
        self.bound(source);
        Ok(body)
    }

    /// Drops everything but the newest content once too much is held.
    fn bound(&self, newest: &Source) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let size = |it: &Held| it.content.try_lock().ok().and_then(|it| it.as_ref().map(|(_, body)| body.len()));
        let total: usize = held.values().filter_map(|it| size(it)).sum();
        if MAX_HELD < total {
            held.retain(|source, _| source == newest);
        }
    }
}

fn refused(source: &Source) -> Option<String> {
    match source {
        Source::Secret(name) => {
            let own = name == "ca.key" || name.starts_with("ca-") || name.starts_with("registration-nonce.");
            own.then(|| format!("secret `{name}` never leaves the server"))
        }
        Source::Object(key) => {
            let own = ["config/", "cluster/", "shard/"].iter().any(|prefix| key.starts_with(prefix));
            let odd = key.starts_with('/') || key.split('/').any(|part| matches!(part, "." | ".."));
            (own || odd).then(|| format!("object `{key}` is no file for instances"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ca_key_cannot_be_a_file() {
        for name in ["ca.key", "ca-0011223344556677.key", "registration-nonce.key"] {
            assert!(refused(&Source::Secret(name.to_owned())).is_some(), "{name}");
        }
        assert_eq!(refused(&Source::Secret("tunnel.json".to_owned())), None);
        for key in ["cluster/secret/ca.key", "shard/s1/leader.json", "config/s1.jsonc", "/a", "a/../cluster/x"] {
            assert!(refused(&Source::Object(key.to_owned())).is_some(), "{key}");
        }
        assert_eq!(refused(&Source::Object("files/bootstrap.sh".to_owned())), None);
    }
}
