//! Shards in memory: pictures that a test sets, a log of wishes, and answers that a test gives.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use k8s_openapi::jiff::Timestamp;
use nstance_client::ShardError;

use crate::{
    decide::observed::{Group, Instance, Picture, Reach, ShardView},
    ports::{Answer, InstanceChange, Progress, ShardChange, ShardListener, ShardPort, Wish, WishKey},
};

/// A wish as it was put down, in the order in which they came. The same wish again is not a new one.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    pub shard: String,
    pub key: WishKey,
    pub wish: Wish,
}

type Script = Box<dyn FnMut(&str, &WishKey, &Wish) -> Progress + Send>;

#[derive(Default)]
struct State {
    names: Vec<String>,
    views: BTreeMap<String, ShardView>,
    wishes: BTreeMap<(String, WishKey), (Wish, Progress)>,
    asked: Vec<Asked>,
    script: Option<Script>,
}

#[derive(Default)]
pub struct FakeShards {
    state: Mutex<State>,
    listeners: Mutex<Vec<ShardListener>>,
}

impl FakeShards {
    /// Shards in this order, all ready, each with an empty picture.
    pub fn new(names: &[&str]) -> Self {
        let fake = Self::default();
        for name in names {
            fake.state().names.push((*name).to_owned());
            let picture = Picture { leader: format!("{name}-1"), epoch: 1, ..Picture::default() };
            let view = ShardView {
                name: (*name).to_owned(),
                reach: Reach::Ready,
                picture: Some(Arc::new(picture)),
                last_contact: None,
            };
            fake.state().views.insert((*name).to_owned(), view);
        }
        fake
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells all listeners of a change.
    pub fn tell(&self, change: &ShardChange) {
        for listener in self.listeners.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            listener(change);
        }
    }

    /// The shards that are configured from now on; new ones are connecting and have no picture.
    pub fn configure(&self, names: &[&str]) {
        let known: BTreeSet<String> = {
            let state = &mut *self.state();
            let known = state.names.iter().cloned().collect();
            state.names = names.iter().map(|it| (*it).to_owned()).collect();
            state.views.retain(|name, _| names.contains(&name.as_str()));
            for name in names {
                state.views.entry((*name).to_owned()).or_insert_with(|| ShardView {
                    name: (*name).to_owned(),
                    reach: Reach::Connecting,
                    picture: None,
                    last_contact: None,
                });
            }
            known
        };
        let changed = known.iter().filter(|it| !names.contains(&it.as_str())).map(String::as_str);
        let added = names.iter().copied().filter(|it| !known.contains(*it));
        for shard in changed.chain(added) {
            self.tell(&ShardChange { shard: shard.to_owned(), reach: true, ..ShardChange::default() });
        }
    }

    /// Replaces what is known of a shard, picture included, and tells what changed.
    pub fn set(&self, view: ShardView) {
        let shard = view.name.clone();
        let old = self.state().views.insert(shard.clone(), view.clone());
        let old_picture = old.as_ref().and_then(|it| it.picture.clone());
        let new_picture = view.picture.clone();
        let first = old_picture.is_none() != new_picture.is_none();
        let reach = first || old.is_none_or(|it| it.reach != view.reach);
        let (old, new) = (old_picture.unwrap_or_default(), new_picture.unwrap_or_default());
        let groups = changed_keys(&old.groups, &new.groups);
        let instances = changed_keys(&old.instances, &new.instances)
            .into_iter()
            .map(|id| InstanceChange { old: old.instances.get(&id).cloned(), new: new.instances.get(&id).cloned(), id })
            .collect();
        self.tell(&ShardChange { shard, reach, groups, instances, answered: Vec::new() });
    }

    /// Changes the picture of a shard and tells what changed. One without a picture gets its first.
    pub fn edit(&self, shard: &str, change: impl FnOnce(&mut Picture)) {
        let Some(mut view) = self.view(shard) else { panic!("shard {shard} is not configured") };
        let mut picture = view.picture.as_deref().cloned().unwrap_or_default();
        change(&mut picture);
        view.picture = Some(Arc::new(picture));
        self.set(view);
    }

    pub fn put_instance(&self, shard: &str, instance: Instance) {
        self.edit(shard, |it| {
            it.instances.insert(instance.id.clone(), Arc::new(Instance { shard: shard.to_owned(), ..instance }));
        });
    }

    /// Changes an instance. Panics if the picture does not have it.
    pub fn edit_instance(&self, shard: &str, id: &str, change: impl FnOnce(&mut Instance)) {
        self.edit(shard, |it| {
            let Some(instance) = it.instances.get_mut(id) else { panic!("shard {shard} has no instance {id}") };
            change(Arc::make_mut(instance));
        });
    }

    pub fn remove_instance(&self, shard: &str, id: &str) {
        self.edit(shard, |it| {
            it.instances.remove(id);
        });
    }

    pub fn put_group(&self, shard: &str, group: Group) {
        self.edit(shard, |it| {
            it.groups.insert(group.key.clone(), Arc::new(group));
        });
    }

    pub fn remove_group(&self, shard: &str, key: &str) {
        self.edit(shard, |it| {
            it.groups.remove(key);
        });
    }

    /// The shard does not answer any more; its picture stays.
    pub fn take_down(&self, shard: &str, since: Timestamp) {
        let Some(mut view) = self.view(shard) else { panic!("shard {shard} is not configured") };
        view.reach = Reach::Down { since, why: "connection refused".to_owned() };
        self.set(view);
    }

    pub fn bring_back(&self, shard: &str) {
        let Some(mut view) = self.view(shard) else { panic!("shard {shard} is not configured") };
        view.reach = Reach::Ready;
        self.set(view);
    }

    /// Answers every new wish from now on. Without a script a new wish waits for [`Self::answer`]. It is not asked for shards
    /// that are down or not configured, and must not call these fakes.
    pub fn script(&self, script: impl FnMut(&str, &WishKey, &Wish) -> Progress + Send + 'static) {
        self.state().script = Some(Box::new(script));
    }

    /// Answers the wish that stands for this key, and tells it. Panics if there is none.
    pub fn answer(&self, shard: &str, key: &WishKey, progress: Progress) {
        {
            let state = &mut *self.state();
            let Some(wish) = state.wishes.get_mut(&(shard.to_owned(), key.clone())) else {
                panic!("shard {shard} has no wish of {key:?}")
            };
            wish.1 = progress;
        }
        let answered = vec![key.clone()];
        self.tell(&ShardChange { shard: shard.to_owned(), answered, ..ShardChange::default() });
    }

    /// [`Self::answer`] with a success.
    pub fn grant(&self, shard: &str, key: &WishKey, answer: Answer) {
        self.answer(shard, key, Progress::Answered(answer));
    }

    /// [`Self::answer`] with a refusal.
    pub fn refuse(&self, shard: &str, key: &WishKey, error: ShardError) {
        self.answer(shard, key, Progress::Refused(error));
    }

    /// The wishes that stand now.
    pub fn wishes(&self) -> Vec<Asked> {
        let state = self.state();
        let asked = |((shard, key), (wish, _)): (&(String, WishKey), &(Wish, Progress))| Asked {
            shard: shard.clone(),
            key: key.clone(),
            wish: wish.clone(),
        };
        state.wishes.iter().map(asked).collect()
    }

    /// Every wish that was ever put down.
    pub fn asked(&self) -> Vec<Asked> {
        self.state().asked.clone()
    }

    /// Forgets all wishes and answers, as a restart of the operator does; the log stays.
    pub fn forget_wishes(&self) {
        self.state().wishes.clear();
    }
}

fn changed_keys<T: PartialEq>(old: &BTreeMap<String, Arc<T>>, new: &BTreeMap<String, Arc<T>>) -> Vec<String> {
    let keys: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    keys.into_iter().filter(|it| old.get(*it) != new.get(*it)).cloned().collect()
}

impl ShardPort for FakeShards {
    fn names(&self) -> Vec<String> {
        self.state().names.clone()
    }

    fn view(&self, shard: &str) -> Option<ShardView> {
        self.state().views.get(shard).cloned()
    }

    fn ask(&self, shard: &str, key: &WishKey, wish: Wish) -> Progress {
        let state = &mut *self.state();
        let Some(view) = state.views.get(shard) else { return Progress::NotConfigured };
        let is_ready = view.reach.is_ready();
        let place = (shard.to_owned(), key.clone());
        if let Some((known, progress)) = state.wishes.get(&place)
            && *known == wish
            && !matches!(progress, Progress::Down(_))
        {
            return progress.clone();
        }
        let progress = match (&mut state.script, is_ready) {
            (_, false) => Progress::Down("connection refused".to_owned()),
            (Some(script), true) => script(shard, key, &wish),
            (None, true) => Progress::Waiting,
        };
        state.asked.push(Asked { shard: shard.to_owned(), key: key.clone(), wish: wish.clone() });
        state.wishes.insert(place, (wish, progress.clone()));
        progress
    }

    fn withdraw(&self, shard: &str, key: &WishKey) {
        self.state().wishes.remove(&(shard.to_owned(), key.clone()));
    }

    fn on_change(&self, listener: ShardListener) {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).push(listener);
    }
}
