//! Garbage collection, for API servers that run without a controller manager: owners and what they own, Namespaces and
//! what they hold.

mod graph;
mod namespaces;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use kube::{Client, api::ListParams};
use nstance_core::ports::clock::Clock;
use nstance_rt::{chain::Chain, tasks::Tasks};
use tokio::sync::Notify;

use self::graph::Suspect;
use crate::{
    execute::{Executor, api, request},
    kinds::Kind,
    object::Object,
    options::Options,
    picture::{Feed, Objects, Picture, feed},
    rounds::Rounds,
    watch::{Source, Unserved, follow},
};

pub(crate) fn start(tasks: &Tasks, client: &Client, options: &Options) {
    let picture = feed();
    for kind in Kind::ALL {
        let source = Source { client: client.clone(), kind, namespace: None, unserved: Unserved::IsEmpty };
        follow(tasks, source, Arc::clone(&picture));
    }
    let collector = Collector {
        executor: Executor::new(client.clone(), "kube-controller-manager"),
        clock: Arc::clone(&options.clock),
        resync: options.timing.resync,
        namespaces: BTreeSet::new(),
        ended: BTreeSet::new(),
    };
    tasks.spawn_droppable("garbage collection", collector.run(picture));
}

struct Collector {
    executor: Executor,
    clock: Arc<dyn Clock>,
    resync: Duration,
    /// Namespaces that were there at the last look.
    namespaces: BTreeSet<String>,
    /// Namespaces that were there once and are not now.
    ended: BTreeSet<String>,
}

impl Collector {
    async fn run(mut self, feed: Feed) {
        let mut rounds = Rounds::new(&feed, Arc::new(Notify::new()), self.resync);
        loop {
            let picture = rounds.next().await;
            self.round(&picture).await;
        }
    }

    async fn round(&mut self, picture: &Picture) {
        self.note_namespaces(picture);
        let mut gone = Vec::new();
        for suspect in graph::suspects(picture) {
            if self.is_gone(&suspect).await {
                gone.push(suspect);
            }
        }
        let mut planned = Vec::new();
        graph::collect(picture, &gone, self.clock.now(), &mut planned);
        namespaces::empty(picture, &self.ended, &mut planned);
        for (kind, owner) in graph::finishing(picture) {
            // Owners without a namespace own in all of them.
            let namespace = Some(owner.namespace()).filter(|it| !it.is_empty());
            if let Some(fresh) = self.list(namespace).await {
                graph::finish(&fresh, kind, owner, self.clock.now(), &mut planned);
            }
        }
        for namespace in namespaces::finishing(picture) {
            if let Some(fresh) = self.list(Some(namespace.name())).await {
                namespaces::finish(&fresh, namespace, &mut planned);
            }
        }
        self.executor.execute(planned, &BTreeMap::new()).await;
    }

    /// Everything that the server has now; `None` if it does not say.
    async fn list(&self, namespace: Option<&str>) -> Option<Picture> {
        let mut picture = Picture::default();
        for kind in Kind::ALL {
            let (client, namespace) = (self.executor.own().clone(), namespace.map(str::to_owned));
            let source = Source { client, kind, namespace, unserved: Unserved::IsEmpty };
            let objects = match request(source.api().list(&ListParams::default())).await {
                Ok(list) => list.into_iter().map(Object::of).map(|it| (it.key(), Arc::new(it))).collect(),
                Err(error) if error.is_not_found() => Objects::new(),
                Err(error) => {
                    tracing::debug!(kind = kind.kind(), error = %Chain(&error), "not listed, letting nothing go");
                    return None;
                }
            };
            picture.replace(kind, objects);
        }
        Some(picture)
    }

    fn note_namespaces(&mut self, picture: &Picture) {
        if !picture.is_complete(&[Kind::Namespace]) {
            return;
        }
        let now: BTreeSet<String> = picture.all(Kind::Namespace).map(|it| it.name().to_owned()).collect();
        self.ended.extend(self.namespaces.difference(&now).cloned());
        self.ended.retain(|it| !now.contains(it));
        self.namespaces = now;
    }

    /// The watch of the owner's kind may be behind, so the server is asked before anything goes.
    async fn is_gone(&self, suspect: &Suspect) -> bool {
        let owners = api(self.executor.own(), suspect.kind, &suspect.key.namespace);
        match request(owners.get_opt(&suspect.key.name)).await {
            Ok(None) => true,
            Ok(Some(found)) => Object::of(found).uid() != suspect.uid,
            Err(error) => {
                tracing::debug!(owner = %suspect.key, error = %Chain(&error), "owner not read, keeping what it owns");
                false
            }
        }
    }
}
