//! One watch per kind: list, then watch, with backoff, into a [`Feed`]. A new list replaces what was known, for it brings
//! no deletions.

use std::{pin::pin, time::Duration};

use futures::StreamExt as _;
use kube::{
    Api, Client,
    api::DynamicObject,
    runtime::watcher::{self, Event, watcher},
};
use nstance_rt::{backoff::Backoff, chain::Chain, entropy::SystemEntropy, tasks::Tasks};

use crate::{
    kinds::Kind,
    object::Object,
    picture::{Feed, Objects},
};

/// The server ends a watch after this time, so a connection that died silently costs no more.
const WATCH_SECONDS: u32 = 60;

/// A page of a list takes no longer than this, or the watch starts over.
const LIST_DEADLINE: Duration = Duration::from_secs(30);

#[derive(Clone)]
pub(crate) struct Source {
    pub(crate) client: Client,
    pub(crate) kind: Kind,
    /// `None`: all namespaces.
    pub(crate) namespace: Option<String>,
    /// Whether a kind that is not served counts as one without objects. Else it counts as unknown.
    pub(crate) unserved: Unserved,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unserved {
    IsUnknown,
    IsEmpty,
}

impl Source {
    pub(crate) fn api(&self) -> Api<DynamicObject> {
        let resource = self.kind.resource();
        match (&self.namespace, self.kind.scope()) {
            (Some(namespace), kube::discovery::Scope::Namespaced) => {
                Api::namespaced_with(self.client.clone(), namespace, &resource)
            }
            _ => Api::all_with(self.client.clone(), &resource),
        }
    }
}

/// Keeps `feed` up to date with one kind until the scope ends.
pub(crate) fn follow(tasks: &Tasks, source: Source, feed: Feed) {
    tasks.spawn_droppable("watch", async move {
        let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
        let mut last_error = String::new();
        loop {
            follow_until_stuck(&source, &feed, &mut backoff, &mut last_error).await;
        }
    });
}

async fn follow_until_stuck(source: &Source, feed: &Feed, backoff: &mut Backoff, last_error: &mut String) {
    let config = watcher::Config::default().timeout(WATCH_SECONDS);
    let mut events = pin!(watcher(source.api(), config));
    let mut listed: Option<Objects> = Some(Objects::new());
    let kind = source.kind;
    loop {
        let next = match listed {
            None => events.next().await,
            Some(_) => match tokio::time::timeout(LIST_DEADLINE, events.next()).await {
                Ok(next) => next,
                Err(_) => {
                    tracing::warn!(kind = kind.kind(), "list not answered in time, starting over");
                    return;
                }
            },
        };
        let event = match next {
            None => return,
            Some(Err(error)) => {
                if source.unserved == Unserved::IsEmpty && is_not_served(&error) {
                    feed.send_if_modified(|picture| picture.set_empty_if_unknown(kind));
                }
                // A kind that is not served is asked for again and again; that is said once.
                let text = Chain(&error).to_string();
                if *last_error != text {
                    tracing::warn!(kind = kind.kind(), error = text, "watch interrupted, trying again");
                    *last_error = text;
                }
                tokio::time::sleep(backoff.next(&SystemEntropy::new())).await;
                continue;
            }
            Some(Ok(event)) => event,
        };
        match event {
            Event::Init => listed = Some(Objects::new()),
            Event::InitApply(object) => {
                let object = Object::of(object);
                if let Some(listed) = &mut listed {
                    listed.insert(object.key(), object.into());
                }
            }
            Event::InitDone => {
                let objects = listed.take().unwrap_or_default();
                feed.send_modify(|picture| picture.replace(kind, objects));
                backoff.reset();
                last_error.clear();
            }
            Event::Apply(object) => {
                feed.send_modify(|picture| picture.apply(kind, Object::of(object)));
                backoff.reset();
            }
            Event::Delete(object) => {
                let key = Object::of(object).key();
                feed.send_modify(|picture| picture.delete(kind, &key));
                backoff.reset();
            }
        }
    }
}

fn is_not_served(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::InitialListFailed(kube::Error::Api(status)) if status.is_not_found())
}
