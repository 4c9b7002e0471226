//! Looks images up: at take-over, when the config changes, every `image_refresh_interval`, and soon again after a
//! failure.
//!
//! The last good id of each name is kept in the cache. A new leader goes by it until the provider has answered, so that
//! no replacement waits for a lookup whose answer was known before. A newly found id is for new instances only: no
//! infra hash contains it, so nobody is rotated for it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use nstance_config::model::{ImageOrder, ImageSort, ImageSpec};
use nstance_core::{
    ports::provider::{ErrorClass, ImageQuery, ProviderError},
    snapshot::BlockKind,
};
use nstance_rt::{backoff::Backoff, chain::Chain};
use nstance_store::cache::{Cache, CachedImage};
use tokio::sync::Notify;

use crate::{
    events::{Reason, Tell},
    tasks::observe::observe_call,
    term::Term,
};

/// Wakes the lookups of a term.
#[derive(Default)]
pub struct ImageLookups {
    wake: Notify,
}

impl ImageLookups {
    /// The config may name other images now: they are looked up at once.
    pub fn refresh(&self) {
        self.wake.notify_one();
    }
}

/// Begins with what the cache remembers; the lookups run beside everything else.
pub fn start(term: &Arc<Term>, cache: Arc<Cache>) {
    recall(term, &cache);
    term.wake_all();
    term.tasks.spawn("images", work(term.clone(), cache));
}

async fn work(term: Arc<Term>, cache: Arc<Cache>) {
    let token = term.tasks.token().clone();
    let mut backoff = Backoff::new(Duration::from_secs(5), Duration::from_secs(300));
    loop {
        let all_found = tokio::select! {
            biased;
            () = token.cancelled() => return,
            all_found = look_up_all(&term, &cache) => all_found,
        };
        let period = term.applied().config.server.image_refresh_interval;
        let period = if period.is_zero() { Duration::MAX } else { period };
        let wait = if all_found {
            backoff.reset();
            period
        } else {
            period.min(backoff.next(term.shared.entropy.as_ref()) + Duration::from_secs(1))
        };
        tokio::select! {
            biased;
            () = token.cancelled() => return,
            () = term.images.wake.notified() => {
                recall(&term, &cache);
                term.wake_all();
            }
            () = sleep(wait) => {}
        }
    }
}

async fn sleep(wait: Duration) {
    if wait == Duration::MAX { std::future::pending().await } else { tokio::time::sleep(wait).await }
}

/// Goes by the questions of the config in force, and by the answers to them that the cache has.
fn recall(term: &Term, cache: &Cache) {
    let applied = term.applied();
    let queries: BTreeMap<String, String> =
        applied.config.images.iter().map(|(name, spec)| (name.clone(), key(spec))).collect();
    let cached = cache.images().unwrap_or_else(|error| {
        tracing::warn!(error = %Chain(&error), "cached images not read, they are looked up");
        Vec::new()
    });
    let mut state = term.world.lock();
    state.images.ask(&queries);
    for CachedImage { name, query, id } in cached {
        state.images.recall(&name, &query, &id);
    }
}

/// One round over all names, beside each other. Answers whether all were found.
async fn look_up_all(term: &Arc<Term>, cache: &Cache) -> bool {
    let applied = term.applied();
    let images = &applied.config.images;
    let answers = futures::future::join_all(images.values().map(|spec| look_up(term, spec))).await;
    let mut all_found = true;
    let mut changed = false;
    for ((name, spec), answer) in images.iter().zip(answers) {
        all_found &= answer.is_ok();
        changed |= take_in(term, cache, name, spec, answer);
    }
    if changed {
        term.wake_all();
    }
    all_found
}

async fn look_up(term: &Arc<Term>, spec: &ImageSpec) -> Result<String, String> {
    let started = term.world.clock().monotonic();
    let Some(images) = term.shared.provider.images() else {
        return Err(format!("provider {} resolves no images", term.shared.provider.kind()));
    };
    let limit = term.shared.provider.capabilities().deadlines.other;
    let answer = match tokio::time::timeout(limit, images.resolve_image(&query(spec))).await {
        Ok(answer) => answer,
        Err(_) => Err(ProviderError::new("resolve_image", ErrorClass::Unavailable, "no answer in time")),
    };
    observe_call(term, "resolve_image", started, answer.as_ref().err());
    // A lookup that fails says nothing about the provider as a whole: creates go on with the id there is.
    match answer {
        Ok(Some(image)) if !image.id.is_empty() => Ok(image.id),
        Ok(_) => Err("nothing fits its filters and owners".to_owned()),
        Err(error) => Err(format!("{}", Chain(&error))),
    }
}

/// Notes one answer and tells what changed. Answers whether the name stands for another id now.
fn take_in(term: &Term, cache: &Cache, name: &str, spec: &ImageSpec, answer: Result<String, String>) -> bool {
    let now = term.now();
    let query = key(spec);
    let found = answer.as_ref().ok().cloned();
    let why = answer.as_ref().err().cloned().unwrap_or_default();
    let (change, value) = {
        let mut state = term.world.lock();
        let change = state.images.answer(name, &query, answer, spec.fallback.as_deref(), now);
        if change.value {
            // A request that was refused with the old id may pass with the new one.
            for it in state.groups.values_mut().filter(|it| it.needs_image(name)) {
                it.unblock(BlockKind::InvalidRequest);
                it.revision += 1;
            }
        }
        (change, state.images.get(name).map(|(id, source)| (id.to_owned(), source)))
    };
    if let Some(id) = &found {
        let image = CachedImage { name: name.to_owned(), query, id: id.clone() };
        if let Err(error) = cache.put_image(&image, now) {
            tracing::warn!(image = name, error = %Chain(&error), "image not cached, the next leader looks it up");
        }
        if change.value || change.health {
            term.tell(Tell::shard(Reason::ImageResolved, format!("image {name} is {id}")).detail("image", name));
        }
    } else if change.health {
        let instead = match &value {
            Some((id, source)) => format!("{id} is used, from {}", source.as_str()),
            None => "groups that use it are held; mend its filters or give it a fallback".to_owned(),
        };
        let message = format!("image {name} was not found: {why}; {instead}");
        term.tell(Tell::shard(Reason::ImageFailed, message).detail("image", name));
    }
    change.value
}

pub(crate) fn query(spec: &ImageSpec) -> ImageQuery {
    ImageQuery {
        filters: spec.filters.iter().map(|filter| (filter.name.clone(), filter.values.clone())).collect(),
        owners: spec.owners.clone(),
        by_name: spec.sort == ImageSort::Name,
        ascending: spec.order == ImageOrder::Asc,
    }
}

/// What tells one question from another.
fn key(spec: &ImageSpec) -> String {
    format!("{:?}", query(spec))
}
