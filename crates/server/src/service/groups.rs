//! Groups as the API changes them: `groups.jsonc` by compare-and-swap first, then memory, then the group is woken.
//!
//! Writes take turns, and calls that wait for theirs travel together: whoever has the turn decides for all of them, one
//! after the other, and puts what comes of it once. Each is answered after that put, with its own answer.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nstance_config::{Code as ProblemCode, Config, GroupField, GroupLayer, Problem, UpsertRequest, jsonc::Pos};
use nstance_core::{
    ids::{GroupRef, InstanceId},
    instance::{Ownership, Phase},
    ports::objects::{StoreFault, Unavailable},
    time::Timestamp,
};
use nstance_rt::chain::Chain;
use nstance_store::{
    cas::RecordError,
    rebuild::GroupsState,
    records::{
        Versioned,
        groups::{GroupEntry, GroupsFile, Tombstone, TombstoneReason},
    },
};
use tokio::sync::oneshot;
use tonic::Code;

use super::{
    config::{Applied, asked_of, group_etag, layer},
    files,
    instances::is_leaving,
};
use crate::{
    events::{Reason, Tell},
    grpc::{auth::record_refusal, status::Refusal},
    pace::Pace,
    tasks::check,
    term::Term,
};

/// Most groups that the API may hold for one tenant.
const MAX_GROUPS: usize = 1000;

/// The groups file as this term last read or wrote it.
pub struct Groups {
    turn: tokio::sync::Mutex<()>,
    /// Changes that wait for the turn, first come first.
    waiting: Mutex<Vec<Waiting>>,
    held: Mutex<Held>,
}

struct Waiting {
    decide: Box<Decide>,
    answer: oneshot::Sender<Verdict>,
}

/// Whether a change was written, or why not.
pub type Verdict = Result<bool, Refusal>;

#[derive(Clone)]
enum Held {
    Absent,
    Present(Box<Versioned<GroupsFile>>),
    /// Remembered by the cache and missing from the store: put back before the next write.
    Lost(Box<Versioned<GroupsFile>>),
    /// There, and not to be parsed. Reads may have a remembered copy; nothing is written over it.
    Unreadable(String, Option<Box<Versioned<GroupsFile>>>),
}

impl Groups {
    pub fn new(read: GroupsState, remembered: Option<Box<Versioned<GroupsFile>>>) -> Self {
        let held = match (read, remembered) {
            (GroupsState::Present(file), _) => Held::Present(file),
            (GroupsState::Absent, Some(lost)) => Held::Lost(lost),
            (GroupsState::Absent, None) => Held::Absent,
            (GroupsState::Unreadable(error), remembered) => Held::Unreadable(error.to_string(), remembered),
        };
        Self { turn: tokio::sync::Mutex::default(), waiting: Mutex::default(), held: Mutex::new(held) }
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn held(&self) -> Held {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn versioned(&self) -> Option<Versioned<GroupsFile>> {
        match self.held() {
            Held::Present(file) | Held::Lost(file) | Held::Unreadable(_, Some(file)) => Some(*file),
            Held::Absent | Held::Unreadable(_, None) => None,
        }
    }

    /// What is known of the file, be it a remembered copy.
    pub fn file(&self) -> Option<GroupsFile> {
        self.versioned().map(|file| file.value)
    }

    /// What is known of one group of it.
    pub fn entry(&self, group: &GroupRef) -> Option<GroupEntry> {
        match &*self.held.lock().unwrap_or_else(PoisonError::into_inner) {
            Held::Present(file) | Held::Lost(file) | Held::Unreadable(_, Some(file)) => {
                file.value.groups.get(group).cloned()
            }
            Held::Absent | Held::Unreadable(_, None) => None,
        }
    }

    /// Whether what the file does not name is proven not to be there.
    pub fn readable(&self) -> Result<(), Refusal> {
        match self.held() {
            Held::Unreadable(error, _) => {
                let message = format!("groups file cannot be read before it is repaired: {error}");
                Err(Refusal::precondition("GROUPS_UNREADABLE", message))
            }
            Held::Absent | Held::Present(_) | Held::Lost(_) => Ok(()),
        }
    }

    /// The version of the whole file.
    pub fn etag(&self) -> String {
        self.versioned().map(|file| file.etag.to_string()).unwrap_or_default()
    }
}

/// A change of the file: what shall be there, nothing, or why not. Runs again on what others wrote meanwhile.
pub type Decide = dyn Fn(&GroupsFile) -> Result<Option<GroupsFile>, Refusal> + Send + Sync;

/// Changes the file and, after the commit, what is asked of every group that differs. Answers whether anything was
/// written. Goes on when the caller hangs up: memory must learn what the store has taken.
async fn change(term: &Arc<Term>, decide: Box<Decide>) -> Verdict {
    let (answer, answered) = oneshot::channel();
    term.groups.waiting().push(Waiting { decide, answer });
    let term = term.clone();
    term.tasks.clone().spawn("change groups", async move {
        let _turn = term.groups.turn.lock().await;
        // Whoever had the turn before may have taken ours along.
        let batch = std::mem::take(&mut *term.groups.waiting());
        if batch.is_empty() {
            return;
        }
        let (decides, answers): (Vec<_>, Vec<_>) = batch.into_iter().map(|it| (it.decide, it.answer)).unzip();
        for (verdict, answer) in commit_all(&term, &decides).await.into_iter().zip(answers) {
            // Nobody waits any more: the change stands all the same.
            let _ = answer.send(verdict);
        }
    });
    let ended = |_| Refusal::unavailable("LEADER_CHANGED", "this server leads no more; retry");
    answered.await.unwrap_or_else(|gone| Err(ended(gone)))
}

/// A config on its way into force.
pub struct Swap {
    pub applied: Applied,
    /// Groups that it takes away and that nobody confirmed, as the file stands then: they are held.
    pub held: fn(&Term, &Applied, &GroupsFile) -> BTreeMap<GroupRef, Timestamp>,
}

/// One change in a turn of its own. With a config to put in force, that happens after the commit and before anybody
/// else's turn, so that no decision is made on the one file and the other config.
pub async fn commit(term: &Arc<Term>, decide: &Decide, next: Option<Swap>) -> Verdict {
    let _turn = term.groups.turn.lock().await;
    let before = term.groups.file().unwrap_or_default();
    let mut verdicts = put(term, &before, &[decide], next).await.map_err(|failed| failed.refusal)?;
    verdicts.pop().unwrap_or(Ok(false))
}

/// Commits changes together, and answers each.
async fn commit_all(term: &Arc<Term>, batch: &[Box<Decide>]) -> Vec<Verdict> {
    let batch: Vec<&Decide> = batch.iter().map(AsRef::as_ref).collect();
    let before = term.groups.file().unwrap_or_default();
    match put(term, &before, &batch, None).await {
        Ok(verdicts) => verdicts,
        // Something in it cannot be stored, its size for one: that is told to whom it concerns.
        Err(Failed { alone: true, .. }) if 1 < batch.len() => {
            let mut verdicts = Vec::with_capacity(batch.len());
            for one in batch.chunks(1) {
                let before = term.groups.file().unwrap_or_default();
                match put(term, &before, one, None).await {
                    Ok(its) => verdicts.extend(its),
                    Err(failed) => verdicts.push(Err(failed.refusal)),
                }
            }
            verdicts
        }
        // Nothing is stored. Who was decided on what others wanted is decided anew on what there is.
        Err(failed) => batch
            .iter()
            .map(|decide| match decide(&before) {
                Ok(Some(_)) => Err(failed.refusal.clone()),
                Ok(None) => Ok(false),
                Err(refusal) => Err(refusal),
            })
            .collect(),
    }
}

/// A put that did not happen.
struct Failed {
    refusal: Refusal,
    /// Another content may be taken where this one is not.
    alone: bool,
}

impl From<Refusal> for Failed {
    fn from(refusal: Refusal) -> Self {
        Self { refusal, alone: false }
    }
}

/// All decisions, each on what the ones before it made of the file. `None` if nothing changes.
fn decide_all(term: &Term, batch: &[&Decide], file: &GroupsFile) -> (Option<GroupsFile>, Vec<Verdict>) {
    let mut next: Option<GroupsFile> = None;
    let mut verdicts = Vec::with_capacity(batch.len());
    for decide in batch {
        verdicts.push(decide(next.as_ref().unwrap_or(file)).map(|changed| {
            let changes = changed.is_some();
            next = changed.or(next.take());
            changes
        }));
    }
    if let Some(next) = &mut next {
        drop_departed(term, next);
    }
    (next, verdicts)
}

/// Takes hints off whose instance left. Only along with a write that happens anyway, and the group's own version stays:
/// nobody asked for this change.
fn drop_departed(term: &Term, file: &mut GroupsFile) {
    for (group, entry) in file.groups.iter_mut().filter(|(_, entry)| !entry.preferred_victims.is_empty()) {
        let left = managed_left(term, group);
        entry.preferred_victims.retain(|id| left.contains(id));
    }
}

async fn put(
    term: &Arc<Term>,
    before: &GroupsFile,
    batch: &[&Decide],
    swap: Option<Swap>,
) -> Result<Vec<Verdict>, Failed> {
    let held = term.groups.held();
    if let Held::Unreadable(error, _) = &held {
        let message = format!("groups file cannot be changed before it is repaired: {error}");
        let refusal = Refusal::precondition("GROUPS_UNREADABLE", message);
        return Ok(batch.iter().map(|_| Err(refusal.clone())).collect());
    }
    // Decided on what we hold first: a refusal, or nothing to do, costs no call.
    if let (None, verdicts) = decide_all(term, batch, before) {
        if let Some(swap) = swap.filter(|_| verdicts.iter().all(Result::is_ok)) {
            put_in_force(term, before, before, swap);
        }
        return Ok(verdicts);
    }
    let records = term.shared.records.within(term.applied().config.server.request_timeout);
    let failed = |error: RecordError| {
        let invalid = StoreFault::Unavailable(Unavailable::Invalid);
        let alone = matches!(&error, RecordError::Store(store) if store.fault == invalid);
        let refusal = match error {
            RecordError::Corrupt { .. } => Refusal::precondition("GROUPS_UNREADABLE", format!("{}", Chain(&error))),
            error => record_refusal(&term.failed(error)),
        };
        Failed { refusal, alone }
    };
    let current = match held {
        Held::Present(file) => Some(*file),
        Held::Lost(lost) => Some(records.put_back_groups(&term.guard, &lost).await.map_err(failed)?),
        Held::Absent | Held::Unreadable(..) => None,
    };
    // What the last run of the decisions said: the one that the answers are about.
    let said = Mutex::new(Vec::new());
    let decided = |file: &GroupsFile| {
        let (next, verdicts) = decide_all(term, batch, file);
        *said.lock().unwrap_or_else(PoisonError::into_inner) = verdicts;
        next
    };
    let written = match records.update_groups(&term.guard, current.as_ref(), decided).await {
        // Somebody removed the object: what we know of it is put back, with the change on it.
        Err(RecordError::Missing { .. }) => {
            let lost = current.unwrap_or_else(|| unreachable!("only an update can miss its object"));
            let back = records.put_back_groups(&term.guard, &lost).await.map_err(failed)?;
            records.update_groups(&term.guard, Some(&back), decided).await
        }
        written => written,
    };
    let written = written.map_err(failed)?;
    let verdicts = said.into_inner().unwrap_or_else(PoisonError::into_inner);
    match swap.filter(|_| verdicts.iter().all(Result::is_ok)) {
        Some(swap) => {
            put_in_force(term, before, &written.value, swap);
            let reworded = reworded(before, &written.value);
            note(term, written);
            files::reworded(term, &reworded);
        }
        None => take_in(term, before, written),
    }
    Ok(verdicts)
}

/// The file as it is known from now on.
fn note(term: &Arc<Term>, file: Versioned<GroupsFile>) {
    term.shared.cache.put_groups(term.shared.records.groups_key(), &file);
    *term.groups.held.lock().unwrap_or_else(PoisonError::into_inner) = Held::Present(Box::new(file));
}

/// Swaps the config and asks every group anew that it changes. All of them are woken, old and new.
fn put_in_force(term: &Arc<Term>, before: &GroupsFile, after: &GroupsFile, swap: Swap) {
    let Swap { applied: next, held } = swap;
    let (old, held) = (term.applied(), held(term, &next, after));
    let ca_bundle = term.shared.authority.bundle_pem();
    let changed = differing((&old.config, before), (&next.config, after), &ca_bundle);
    let named = named((&old.config, before), (&next.config, after));
    let asked: BTreeMap<_, _> =
        changed.iter().map(|group| (group.clone(), asked_of(&next.config, Some(after), group, &ca_bundle))).collect();
    term.world.configure(&next.config.server);
    term.gate.set_pace(Pace::of(&next.config.server, term.shared.provider.capabilities().create_pace));
    // Before anything is asked: a worker that wakes at once must not see a size of nothing without its hold.
    term.world.lock().mass_removal = held;
    term.world.forgive(changed.iter());
    term.shared.config.set(next);
    term.world.ask(asked);
    term.images.refresh();
    term.tasks.spawn_droppable("provider check", check::work(term.clone()));
    files::refreshed(term);
    for group in &named {
        term.wake(group);
    }
}

/// Every group that one of two pictures names.
fn named<'a>(old: (&'a Config, &'a GroupsFile), new: (&'a Config, &'a GroupsFile)) -> BTreeSet<GroupRef> {
    let of = |(config, file): (&'a Config, &'a GroupsFile)| {
        config.groups.keys().chain(file.groups.keys()).chain(file.deleted.keys())
    };
    of(old).chain(of(new)).cloned().collect()
}

/// The groups of which something else is asked.
pub fn differing(old: (&Config, &GroupsFile), new: (&Config, &GroupsFile), ca_bundle: &str) -> BTreeSet<GroupRef> {
    let differs = |group: &GroupRef| {
        asked_of(old.0, Some(old.1), group, ca_bundle) != asked_of(new.0, Some(new.1), group, ca_bundle)
    };
    named(old, new).into_iter().filter(differs).collect()
}

/// The groups for which two versions of the file have different words.
fn reworded(before: &GroupsFile, after: &GroupsFile) -> BTreeSet<GroupRef> {
    let differs = |group: &&GroupRef| {
        before.groups.get(*group) != after.groups.get(*group) || before.deleted.get(*group) != after.deleted.get(*group)
    };
    let named =
        before.groups.keys().chain(before.deleted.keys()).chain(after.groups.keys()).chain(after.deleted.keys());
    named.filter(differs).cloned().collect()
}

/// From the committed file into memory: every group whose part differs is asked for anew, and woken.
fn take_in(term: &Arc<Term>, before: &GroupsFile, file: Versioned<GroupsFile>) {
    let after = &file.value;
    let changed = reworded(before, after);
    let ca_bundle = term.shared.authority.bundle_pem();
    let asked: BTreeMap<_, _> = changed
        .iter()
        .map(|group| (group.clone(), asked_of(&term.applied().config, Some(after), group, &ca_bundle)))
        .collect();
    term.world.ask(asked);
    for group in &changed {
        if is_explicit(after, group) {
            term.world.release(group);
        }
    }
    note(term, file);
    files::reworded(term, &changed);
    for group in &changed {
        term.wake(group);
    }
}

/// Whether the API's own word decides on a group's size, or its end: the removal brake is about the config's.
fn is_explicit(file: &GroupsFile, group: &GroupRef) -> bool {
    let entry = file.groups.get(group);
    file.deleted.contains_key(group) || entry.is_some_and(|entry| entry.size.is_some() || entry.template.is_some())
}

fn same_etag(file: &GroupsFile, group: &GroupRef, expected: &str) -> Result<(), Refusal> {
    let found = group_etag(Some(file), group);
    if expected.is_empty() || expected == found {
        return Ok(());
    }
    let message = format!("group {} is at {found}, not {expected}; read it again", group.group);
    Err(Refusal::new(Code::Aborted, "ETAG_MISMATCH", message))
}

/// Managed instances of a group that are there, or may be.
fn managed_left(term: &Term, group: &GroupRef) -> BTreeSet<InstanceId> {
    let state = term.world.lock();
    let Some(it) = state.groups.get(group) else { return BTreeSet::new() };
    let entries = it.members.iter().filter_map(|id| state.entries.get(id)).map(|entry| entry.instance());
    entries
        .filter(|it| it.ownership == Ownership::Managed)
        .filter(|it| !matches!(it.phase(), Phase::Deleted | Phase::Failed))
        .map(|it| it.id)
        .collect()
}

/// UpsertGroup, parsed.
pub struct Upsert {
    pub group: GroupRef,
    pub request: UpsertRequest,
    pub victims: Vec<InstanceId>,
    pub expected_etag: String,
    pub actor: String,
}

pub async fn upsert(term: &Arc<Term>, upsert: Upsert) -> Result<(), Refusal> {
    let Upsert { group, actor, .. } = &upsert;
    let (group, actor) = (group.clone(), actor.clone());
    let deciding = term.clone();
    if change(term, Box::new(move |file| decide_upsert(&deciding, &upsert, file))).await? {
        let size = status_size(term, &group);
        term.tell(Tell::group(Reason::GroupChanged, &group, "changed by an operator").detail("size", size).by(actor));
    }
    Ok(())
}

fn status_size(term: &Term, group: &GroupRef) -> u32 {
    let state = term.world.lock();
    state.groups.get(group).and_then(|it| it.merged.as_ref()).map_or(0, |merged| merged.size)
}

fn decide_upsert(term: &Term, upsert: &Upsert, file: &GroupsFile) -> Result<Option<GroupsFile>, Refusal> {
    let Upsert { group, request, victims, expected_etag, actor } = upsert;
    same_etag(file, group, expected_etag)?;
    let config = &term.applied().config;
    let is_static = config.groups.contains_key(group);
    let left = managed_left(term, group);
    let tombstoned = file.deleted.contains_key(group);
    if tombstoned && !is_static && !left.is_empty() {
        let message =
            format!("group {} is being deleted, {} instances are left; wait for them", group.group, left.len());
        return Err(Refusal::precondition("GROUP_DELETING", message));
    }
    let entry = file.groups.get(group);
    let stored = entry.map(layer).transpose();
    let stored =
        stored.map_err(|error| Refusal::precondition("GROUPS_UNREADABLE", format!("stored group: {error}")))?;
    let upserted = config.upsert(group, stored.as_ref(), request).map_err(Refusal::bad_request)?;
    let n_of_tenant = file.groups.keys().filter(|it| it.tenant == group.tenant).count();
    if entry.is_none() && MAX_GROUPS <= n_of_tenant {
        let message = format!("tenant {} has {MAX_GROUPS} groups already", group.tenant);
        return Err(Refusal::bad_request(vec![problem(ProblemCode::Limit, "key", message)]));
    }
    // Hints belong to the size they came with; who has left needs none.
    let masked = request.mask.as_ref().is_some_and(|mask| mask.contains(&GroupField::Size));
    let sized = masked || request.layer.size.is_some() || !victims.is_empty();
    let kept = entry.map(|entry| entry.preferred_victims.as_slice()).unwrap_or_default();
    let kept: Vec<_> = kept.iter().copied().filter(|id| left.contains(id)).collect();
    let preferred_victims: Vec<_> =
        if sized { victims.iter().copied().filter(|id| left.contains(id)).collect() } else { kept.clone() };
    let same_victims = preferred_victims == kept;
    if !upserted.changed && same_victims && !tombstoned {
        return Ok(None);
    }
    let mut next = file.clone();
    next.deleted.remove(group);
    next.groups.insert(group.clone(), stamped(term, entry, upserted.layer, preferred_victims, actor));
    Ok(Some(next))
}

/// The layer as it is stored, one generation on.
fn stamped(
    term: &Term,
    before: Option<&GroupEntry>,
    layer: GroupLayer,
    preferred_victims: Vec<InstanceId>,
    actor: &str,
) -> GroupEntry {
    GroupEntry {
        template: layer.template,
        size: layer.size,
        instance_type: layer.instance_type,
        subnet_pool: layer.subnet_pool.map(|pool| pool.to_string()),
        vars: layer.vars,
        drain_timeout: layer.drain_timeout,
        load_balancers: layer.load_balancers.map(|keys| keys.iter().map(ToString::to_string).collect()),
        rollout_paused: layer.rollout_paused,
        preferred_victims,
        generation: before.map_or(0, |entry| entry.generation) + 1,
        updated_at: Some(term.now()),
        updated_by: Some(actor.to_owned()),
    }
}

/// Something wrong with a request, which has no place in a file.
pub fn problem(code: ProblemCode, path: &str, message: impl Into<String>) -> Problem {
    Problem::new(code, path, Pos::NOWHERE, message)
}

/// DeleteGroup, parsed.
pub struct Removal {
    pub group: GroupRef,
    pub expected_etag: String,
    pub actor: String,
}

/// A dynamic group, or one that only instances name, gets a tombstone: its members leave by the drain. Of a static one
/// only the override goes. What is absent, or on its way out, is deleted enough.
pub async fn delete(term: &Arc<Term>, removal: Removal) -> Result<(), Refusal> {
    let (group, actor) = (removal.group.clone(), removal.actor.clone());
    let deciding = term.clone();
    let changed = change(term, Box::new(move |file| decide_removal(&deciding, &removal, file))).await?;
    // Naming it is the word that the removal brake waits for.
    if term.world.release(&group) {
        term.wake(&group);
    }
    if term.applied().config.groups.contains_key(&group) {
        let message = "the config file holds this group: its override is dropped, the group stays";
        term.tell(Tell::group(Reason::GroupChanged, &group, message).warning().by(actor));
    } else if changed {
        term.tell(Tell::group(Reason::GroupDeleted, &group, "deleted by an operator; its instances leave").by(actor));
    }
    Ok(())
}

fn decide_removal(term: &Term, removal: &Removal, file: &GroupsFile) -> Result<Option<GroupsFile>, Refusal> {
    let Removal { group, expected_etag, actor } = removal;
    if file.deleted.contains_key(group) && !file.groups.contains_key(group) {
        return Ok(None); // a lost answer may be asked for again, whatever etag it names
    }
    same_etag(file, group, expected_etag)?;
    let mut next = file.clone();
    let stored = next.groups.remove(group).is_some();
    if term.applied().config.groups.contains_key(group) {
        return Ok(stored.then_some(next));
    }
    if !stored && !is_named(term, group) {
        return Ok(None);
    }
    let tombstone = Tombstone { at: term.now(), by: actor.clone(), reason: TombstoneReason::Api };
    next.deleted.insert(group.clone(), tombstone);
    Ok(Some(next))
}

/// Whether an instance that may have a VM, or a VM without a record, names the group.
fn is_named(term: &Term, group: &GroupRef) -> bool {
    let state = term.world.lock();
    let Some(it) = state.groups.get(group) else { return false };
    let lives = |id: &InstanceId| {
        state.entries.get(id).is_some_and(|entry| !matches!(entry.phase(), Phase::Deleted | Phase::Failed))
    };
    !it.candidates.is_empty() || it.members.iter().any(lives)
}

/// Takes one off a group's size and names who goes, in one write. An instance that was named before, or is leaving,
/// takes nothing off: the same call again shrinks nothing.
pub async fn shrink(term: &Arc<Term>, group: &GroupRef, victim: InstanceId, actor: &str) -> Result<(), Refusal> {
    let (deciding, of, by) = (term.clone(), group.clone(), actor.to_owned());
    let decide = move |file: &GroupsFile| decide_shrink(&deciding, &of, victim, &by, file);
    if change(term, Box::new(decide)).await? {
        let size = status_size(term, group);
        let told = Tell::group(Reason::GroupChanged, group, "shrunk by an operator").detail("size", size);
        term.tell(told.detail("victim", victim).by(actor));
    }
    Ok(())
}

fn decide_shrink(
    term: &Term,
    group: &GroupRef,
    victim: InstanceId,
    actor: &str,
    file: &GroupsFile,
) -> Result<Option<GroupsFile>, Refusal> {
    let leaving = {
        let state = term.world.lock();
        state.entries.get(&victim).is_none_or(|entry| is_leaving(entry.phase()))
    };
    let entry = file.groups.get(group);
    let named = entry.is_some_and(|entry| entry.preferred_victims.contains(&victim));
    let config = &term.applied().config;
    let stored = entry.map(layer).transpose();
    let stored =
        stored.map_err(|error| Refusal::precondition("GROUPS_UNREADABLE", format!("stored group: {error}")))?;
    // A group that is being deleted, that nobody asks for, or that is empty by wish refills nothing.
    let Ok(merged) = config.group(group, stored.as_ref()) else { return Ok(None) };
    if leaving || named || merged.size == 0 {
        return Ok(None);
    }
    let request = UpsertRequest {
        layer: GroupLayer { size: Some(merged.size - 1), ..GroupLayer::default() },
        ..UpsertRequest::default()
    };
    let upserted = config.upsert(group, stored.as_ref(), &request).map_err(Refusal::bad_request)?;
    let left = managed_left(term, group);
    let kept = entry.map(|entry| entry.preferred_victims.clone()).unwrap_or_default();
    let victims = kept.into_iter().filter(|id| left.contains(id)).chain([victim]).collect();
    let mut next = file.clone();
    next.groups.insert(group.clone(), stamped(term, entry, upserted.layer, victims, actor));
    Ok(Some(next))
}
