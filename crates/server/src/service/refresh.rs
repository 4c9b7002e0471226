//! RefreshConfig: a new config comes into force without a restart, or leaves the old one as it was.
//!
//! Read, validate (against live state too), brake, commit, swap: one refresh at a time, each step before anything of
//! the next. What is durable (the copy in the cache directory, then the groups file) precedes what is in memory, so
//! that a crash in between is a take-over with the new config, which settles the same things again.
//!
//! Nobody polls a config into force. A newer stored one is noticed and told; it is taken by a refresh, a restart or a
//! take-over. Only a server that had to begin with an old copy goes on asking for the real one.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use nstance_config::{Config, Problem, Severity, model::Server, owner::Owners};
use nstance_core::{
    ids::{Epoch, GroupRef, Tenant},
    instance::Phase,
    ports::objects::Object,
    time::Timestamp,
};
use nstance_rt::{backoff::Backoff, chain::Chain};
use nstance_store::records::{config_keys, groups::GroupsFile};
use tokio::sync::oneshot;

use super::{
    config::{Applied, ConfigError, Stored, applied, asked_of, check, layer, read_other},
    groups::{self, Decide, Swap, differing},
    statics::{Census, Losses, losses_of_refresh, losses_of_takeover, settled, unapplied, unsettled},
};
use crate::{
    events::{Reason, Tell},
    grpc::{auth::record_refusal, status::Refusal},
    tasks::tombstones,
    term::{Shared, Term, UpdateError},
};

/// How often a leader looks whether a newer config lies in the store.
const LOOK: Duration = Duration::from_secs(600);

/// A config is read beside a take-over, which must not wait for long.
const TAKEOVER: Duration = Duration::from_secs(5);

/// Refreshes take turns.
#[derive(Default)]
pub struct Turn(tokio::sync::Mutex<()>);

/// RefreshConfig, parsed.
pub struct Refresh {
    pub tenant: Tenant,
    pub actor: String,
    /// The word that the removal brake asks for.
    pub confirm_removals: bool,
    pub dry_run: bool,
}

/// What a refresh did, or would do, as far as its caller's tenant may know.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Refreshed {
    pub updated: bool,
    pub prev_etag: String,
    pub etag: String,
    pub changed_groups: Vec<String>,
    pub removed_groups: Vec<String>,
    /// Parts that were made anew for it.
    pub restarted: Vec<String>,
    pub warnings: Vec<String>,
}

/// Goes on when the caller hangs up: what began to be committed must reach memory.
pub async fn refresh(term: &Arc<Term>, refresh: Refresh) -> Result<Refreshed, Refusal> {
    let (answer, answered) = oneshot::channel();
    let term = term.clone();
    term.tasks.clone().spawn("refresh config", async move {
        let _turn = term.refreshing.0.lock().await;
        // Nobody waits any more: the refresh stands all the same.
        let _ = answer.send(run(&term, &refresh).await);
    });
    let ended = |_| Refusal::unavailable("LEADER_CHANGED", "this server leads no more; retry");
    answered.await.unwrap_or_else(|gone| Err(ended(gone)))
}

async fn run(term: &Arc<Term>, refresh: &Refresh) -> Result<Refreshed, Refusal> {
    let in_force = term.applied();
    let other = read(term, &in_force).await?;
    let Some((key, object)) = other else { return unchanged(term, refresh, &in_force).await };
    let loaded = check(&key, &object.body, Some(&term.shared.shard));
    let owners = Owners::of(&object.body);
    let Some(config) = loaded.config else {
        let n_more = loaded.report.n_errors();
        return Err(rejected(term, refresh, (&key, &object), &owners, (errors(&loaded.report.problems), n_more)));
    };
    let file = term.groups.file().unwrap_or_default();
    let immutable = in_force.config.immutable_changes(&config, &in_use(term, &file));
    if !immutable.is_empty() {
        let n = immutable.len();
        return Err(rejected(term, refresh, (&key, &object), &owners, (immutable, n)));
    }
    let next = applied(config, &key, &object, term.now());
    let mut warnings: Vec<String> = (loaded.report.problems.iter())
        .filter(|it| it.severity == Severity::Warning && owners.may_see(&refresh.tenant, it))
        .map(|it| format!("{}: {}", it.path, it.message))
        .collect();
    warnings.extend(two_configs(term, &key).await);
    warnings.extend(misfits(&next.config, &file, &refresh.tenant));
    let mut answer = apply(term, refresh, &in_force, next, Some(&object)).await?;
    answer.warnings.splice(0..0, warnings);
    Ok(answer)
}

async fn read(term: &Term, in_force: &Applied) -> Result<Option<(String, Object)>, Refusal> {
    let limit = in_force.config.server.request_timeout;
    let reading = read_other(term.shared.store.as_ref(), in_force, &term.shared.shard);
    let unavailable = |cause: String| {
        let message = format!("{cause}; config {} {} stays in force", in_force.key, in_force.etag);
        Refusal::unavailable("STORE_UNAVAILABLE", message)
    };
    match tokio::time::timeout(limit, reading).await {
        Ok(Ok(other)) => Ok(other),
        Ok(Err(error)) => Err(unavailable(format!("{}", Chain(&error)))),
        Err(_) => Err(unavailable("config not read in time".to_owned())),
    }
}

/// The stored config is the one in force. There may be a word to it all the same: removals that the brake holds.
async fn unchanged(term: &Arc<Term>, refresh: &Refresh, in_force: &Arc<Applied>) -> Result<Refreshed, Refusal> {
    if !refresh.dry_run {
        fresh(&term.shared, in_force);
    }
    let held: Vec<GroupRef> = term.world.lock().mass_removal.keys().cloned().collect();
    if !held.is_empty() && refresh.confirm_removals {
        let next = Applied { stale: false, ..in_force.as_ref().clone() };
        return apply(term, refresh, in_force, next, None).await;
    }
    let etag = in_force.etag.to_string();
    let warnings = if held.is_empty() {
        Vec::new()
    } else {
        let held: BTreeSet<&GroupRef> = held.iter().collect();
        vec![format!("{} held by the removal brake; refresh with confirm_removals to let them go", own(&held, refresh))]
    };
    Ok(Refreshed { prev_etag: etag.clone(), etag, warnings, ..Refreshed::default() })
}

/// From a valid config to one in force. A dry run stops before anything changes.
async fn apply(
    term: &Arc<Term>,
    refresh: &Refresh,
    in_force: &Arc<Applied>,
    next: Applied,
    object: Option<&Object>,
) -> Result<Refreshed, Refusal> {
    let file = term.groups.file().unwrap_or_default();
    let losses = braked(term, refresh, in_force, &next.config, &file).inspect_err(|refusal| {
        if !refresh.dry_run {
            let told = Tell::tenant(Reason::ConfigRejected, &refresh.tenant, refusal.message.clone());
            term.tell(told.by(&refresh.actor));
            note(&term.shared, Stored { pending: Some(next.etag.clone()), unread: false });
        }
    })?;
    let after = settled(&file, (&next.config, &next.etag.0), &losses.vanished, (term.now(), &refresh.actor));
    let changed = differing(
        (&in_force.config, &file),
        (&next.config, after.as_ref().unwrap_or(&file)),
        &term.shared.authority.bundle_pem(),
    );
    let unapplied = unapplied_under(term, &next.config.server);
    let restarts = restarts(&in_force.config.server, &next.config.server);
    let keys = |groups: &mut dyn Iterator<Item = &GroupRef>| {
        groups.filter(|group| group.tenant == refresh.tenant).map(|group| group.group.to_string()).collect()
    };
    let mut answer = Refreshed {
        updated: false,
        prev_etag: in_force.etag.to_string(),
        etag: next.etag.to_string(),
        changed_groups: keys(&mut changed.difference(&losses.vanished)),
        removed_groups: keys(&mut losses.vanished.iter()),
        restarted: restarts.iter().map(|part| (*part).to_owned()).collect(),
        warnings: unapplied.clone(),
    };
    if refresh.dry_run {
        return Ok(answer);
    }
    // Before anything is written down: without the lease nothing of it would stand.
    let stalled = |error| record_refusal(&UpdateError::Record(nstance_store::RecordError::Stalled(error)));
    term.guard.permit().map_err(stalled)?;
    if let Some(object) = object {
        term.shared.last_good.remember(&next.key, object);
    }
    let (config, etag, key) = (next.config.clone(), next.etag.clone(), next.key.clone());
    let (deciding, before) = (term.clone(), in_force.clone());
    let by = Refresh { tenant: refresh.tenant.clone(), actor: refresh.actor.clone(), ..*refresh };
    // Runs on what is really stored: a group that was made meanwhile is seen, and the brake asked again.
    let decide: Box<Decide> = Box::new(move |file| {
        let losses = braked(&deciding, &by, &before, &config, file)?;
        Ok(settled(file, (&config, &etag.0), &losses.vanished, (deciding.now(), &by.actor)))
    });
    // Whatever it takes away was confirmed, or is little.
    let swap = Swap { applied: next, held: |_, _, _| BTreeMap::new() };
    groups::commit(term, decide.as_ref(), Some(swap)).await?;
    if restarts.contains(&"collector") {
        term.want_listing();
    }
    fresh(&term.shared, &term.applied());
    term.shared.metrics.config_unapplied.set(i64::try_from(unapplied.len()).unwrap_or(i64::MAX));
    tell_applied(term, refresh, (&key, &answer.etag), (&changed, &losses));
    for message in unapplied {
        tracing::warn!(message, "setting waits");
    }
    answer.updated = true;
    Ok(answer)
}

/// What the config takes away, or why that is too much.
fn braked(
    term: &Term,
    refresh: &Refresh,
    in_force: &Applied,
    next: &Config,
    file: &GroupsFile,
) -> Result<Losses, Refusal> {
    let (held, census) = {
        let state = term.world.lock();
        (state.mass_removal.clone(), Census::of(&state))
    };
    let losses = losses_of_refresh(&in_force.config, next, file, &held);
    // By the rules in force: an edit does not lift the brake that is to stop it.
    if refresh.confirm_removals || !census.needs_a_word(&losses, &in_force.config.server.safety) {
        return Ok(losses);
    }
    let groups = own(&census.inhabited(&losses), refresh);
    let (lost, all) = census.count(&losses);
    let message = format!(
        "the new config would remove {lost} of {all} instances: {groups} leave it or go to size 0; nothing was \
         applied; refresh with confirm_removals if that is meant"
    );
    Err(Refusal::precondition("MASS_REMOVAL", message))
}

/// Names the groups of the caller's tenant, counts the others.
fn own(groups: &BTreeSet<&GroupRef>, refresh: &Refresh) -> String {
    let mine: Vec<&str> =
        groups.iter().filter(|group| group.tenant == refresh.tenant).map(|group| group.group.as_str()).collect();
    match (mine.is_empty(), groups.len() - mine.len()) {
        (false, 0) => format!("groups {}", mine.join(", ")),
        (false, n) => format!("groups {} and {n} of other tenants", mine.join(", ")),
        (true, n) => format!("{n} groups of other tenants"),
    }
}

fn errors(problems: &[Problem]) -> Vec<Problem> {
    problems.iter().filter(|it| it.severity == Severity::Error).cloned().collect()
}

/// An invalid config changes nothing. Its problems are told to whom they concern.
fn rejected(
    term: &Term,
    refresh: &Refresh,
    (key, object): (&str, &Object),
    owners: &Owners,
    (problems, n_errors): (Vec<Problem>, usize),
) -> Refusal {
    let n_listed = problems.len();
    let mine: Vec<Problem> = problems.into_iter().filter(|it| owners.may_see(&refresh.tenant, it)).collect();
    let n_hidden = n_listed - mine.len();
    let mut refusal = Refusal::bad_request(mine);
    refusal.reason = "CONFIG_INVALID";
    if 0 < n_hidden {
        let joint = if refusal.message.is_empty() { "" } else { "; " };
        refusal.message.push_str(&format!("{joint}{n_hidden} problems in groups of other tenants"));
    }
    if n_listed < n_errors {
        refusal.message.push_str(&format!("; and {} more", n_errors - n_listed));
    }
    let message = format!("config {key} {} has {n_errors} errors, the one in force stays", object.etag);
    if !refresh.dry_run {
        term.tell(Tell::shard(Reason::ConfigRejected, message));
        let audit = Tell::tenant(Reason::ConfigRejected, &refresh.tenant, refusal.message.clone());
        term.tell(audit.by(&refresh.actor));
        let pending = Some(object.etag.clone());
        note(&term.shared, Stored { pending, unread: false });
    }
    refusal
}

/// Groups and instances by tenant, as people know them: a tenant that has any is in use.
fn in_use(term: &Term, file: &GroupsFile) -> BTreeMap<Tenant, Vec<String>> {
    let mut used: BTreeMap<Tenant, Vec<String>> = BTreeMap::new();
    for (group, _) in file.groups.iter().filter(|(_, entry)| entry.template.is_some()) {
        used.entry(group.tenant.clone()).or_default().push(format!("group {}", group.group));
    }
    let state = term.world.lock();
    for instance in state.entries.values().map(|entry| entry.instance()) {
        if !matches!(instance.phase(), Phase::Deleted | Phase::Failed) {
            used.entry(instance.group.tenant.clone()).or_default().push(format!("instance {}", instance.id));
        }
    }
    used
}

/// A config at the second place has no effect while there is one at the first.
async fn two_configs(term: &Term, key: &str) -> Option<String> {
    let [first, second] = config_keys(&term.shared.shard);
    let both = key == first && term.shared.store.get(&second).await.is_ok();
    both.then(|| format!("configs {first} and {second} are both there; the first is in force, remove the second"))
}

/// What the API set of a tenant's groups, where it does not fit a config.
fn misfits(config: &Config, file: &GroupsFile, tenant: &Tenant) -> Vec<String> {
    let stored = file.groups.iter().filter(|(group, _)| group.tenant == *tenant);
    let misfit = |(group, entry): (&GroupRef, &nstance_store::records::groups::GroupEntry)| {
        if let Some(problem) = asked_of(config, Some(file), group, "").and_then(|asked| asked.problem) {
            return Some(format!("group {}: {problem}; its instances stay as they are", group.group));
        }
        let unused = layer(entry).ok().and_then(|layer| config.unused_override(group, &layer))?;
        Some(unused.message)
    };
    stored.filter_map(misfit).collect()
}

/// Parts that must begin anew to follow changed settings.
fn restarts(old: &Server, new: &Server) -> Vec<&'static str> {
    let collector = old.garbage_collection.interval != new.garbage_collection.interval
        || old.request_timeout != new.request_timeout;
    collector.then_some("collector").into_iter().collect()
}

fn unapplied_under(term: &Term, now: &Server) -> Vec<String> {
    unapplied(&term.shared.config.first().config.server, &term.began_with.config.server, now)
}

/// Settings of the config in force that wait for a restart, or for the next leader.
pub fn apply_errors(term: &Term) -> Vec<String> {
    unapplied_under(term, &term.applied().config.server)
}

fn tell_applied(
    term: &Term,
    refresh: &Refresh,
    (key, etag): (&str, &str),
    (changed, losses): (&BTreeSet<GroupRef>, &Losses),
) {
    term.tell(Tell::shard(Reason::ConfigApplied, format!("config {key} in force")).detail("etag", etag));
    let audit = Tell::tenant(Reason::ConfigApplied, &refresh.tenant, "config refreshed by an operator");
    term.tell(audit.detail("etag", etag).by(&refresh.actor));
    for group in changed.difference(&losses.vanished) {
        term.tell(Tell::group(Reason::GroupChanged, group, "changed by the config"));
    }
    for group in &losses.vanished {
        term.tell(Tell::group(Reason::GroupDeleted, group, "left the config; its instances leave"));
    }
}

/// The config in force is the stored one: whatever was said of it is over.
fn fresh(shared: &Shared, in_force: &Applied) {
    if in_force.stale {
        shared.config.set(Applied { stale: false, ..in_force.clone() });
    }
    shared.vitals.set_config(&in_force.etag.0, false);
    shared.vitals.clear("config");
    note(shared, Stored::default());
}

/// The config in force may not be the stored one, and why.
fn stale(shared: &Shared, in_force: &Applied, stored: Stored, why: String) {
    if !in_force.stale {
        shared.config.set(Applied { stale: true, ..in_force.clone() });
    }
    shared.vitals.set_config(&in_force.etag.0, true);
    shared.vitals.problem("config", why);
    note(shared, stored);
}

fn note(shared: &Shared, stored: Stored) {
    shared.metrics.config_pending.set(i64::from(stored.pending.is_some()));
    shared.config.note_stored(stored);
}

/// Takes up the newest config before a term begins: a standby must not lead by what was true when it started. What
/// cannot be taken up leaves the last good one in force.
pub async fn latest(shared: &Shared, epoch: Epoch) {
    let in_force = shared.config.get();
    let reading = read_other(shared.store.as_ref(), &in_force, &shared.shard);
    let other = match tokio::time::timeout(TAKEOVER, reading).await {
        Ok(Ok(other)) => other,
        failed => {
            let why = failed.map_or_else(|_| "config not read in time".to_owned(), |read| words(read.err().as_ref()));
            tracing::warn!(error = why, "config not read, the last good one stays in force");
            stale(shared, &in_force, Stored { pending: None, unread: true }, why);
            return;
        }
    };
    let Some((key, object)) = other else { return fresh(shared, &in_force) };
    match usable(shared, &in_force, &key, &object, shared.clock.now()) {
        Ok(next) => {
            shared.last_good.remember(&key, &object);
            fresh(shared, &next);
            let told = Tell::shard(Reason::ConfigApplied, format!("config {key} in force")).detail("etag", &next.etag);
            shared.config.set(next);
            shared.events.tell(shared.clock.now(), epoch, told);
        }
        Err(why) => refuse(shared, epoch, &in_force, &object, why),
    }
}

fn words(error: Option<&ConfigError>) -> String {
    error.map(|error| format!("{}", Chain(error))).unwrap_or_default()
}

/// A stored config that can replace the one in force without anybody being asked.
fn usable(shared: &Shared, in_force: &Applied, key: &str, object: &Object, now: Timestamp) -> Result<Applied, String> {
    let loaded = check(key, &object.body, Some(&shared.shard));
    let config = loaded.config.ok_or_else(|| loaded.report.text())?;
    let changes = in_force.config.immutable_changes(&config, &BTreeMap::new());
    match changes.first() {
        Some(change) => Err(change.message.clone()),
        None => Ok(applied(config, key, object, now)),
    }
}

/// Told once: the health port goes on saying it.
fn refuse(shared: &Shared, epoch: Epoch, in_force: &Applied, object: &Object, why: String) {
    let told = in_force.stale || shared.config.stored().pending.as_ref() == Some(&object.etag);
    tracing::error!(error = why, "stored config is not usable, the last good one stays in force");
    stale(shared, in_force, Stored { pending: Some(object.etag.clone()), unread: false }, why);
    if !told {
        let message = format!("stored config {} is not usable, the last good one stays in force", object.etag);
        shared.events.tell(shared.clock.now(), epoch, Tell::shard(Reason::ConfigRejected, message));
    }
}

/// Begins what a term needs of this: holds of the removal brake at once, the rest in tasks of its own.
pub fn begin(term: &Arc<Term>) {
    hold(term);
    term.tasks.spawn_droppable("settle static groups", settle(term.clone()));
    term.tasks.spawn_droppable("watch config", watch(term.clone()));
    term.tasks.spawn_droppable("tombstones", tombstones::work(term.clone()));
}

/// What the config takes away that nobody confirmed, if the brake stops it.
fn held_back(term: &Term, config: &Config, etag: &str, file: &GroupsFile) -> Result<Losses, Losses> {
    let losses = losses_of_takeover(config, etag, file);
    let census = Census::of(&term.world.lock());
    if census.needs_a_word(&losses, &config.server.safety) { Err(losses) } else { Ok(losses) }
}

/// The groups that nothing may be taken from before somebody says so: those that a config would take away, if together
/// they are too much. Under a config that is older than the last one applied, that is everybody: what it seems to take
/// away may never have been meant to go.
fn held(term: &Term, applied: &Applied, file: &GroupsFile) -> BTreeMap<GroupRef, Timestamp> {
    let now = term.now();
    let outdated = applied.stale
        && file.static_groups.as_ref().is_some_and(|seen| !seen.etag.is_empty() && seen.etag != applied.etag.0);
    if outdated {
        let stored = file.groups.keys().filter(|group| !file.deleted.contains_key(*group));
        return applied.config.groups.keys().chain(stored).map(|group| (group.clone(), now)).collect();
    }
    let losses = held_back(term, &applied.config, &applied.etag.0, file).err().unwrap_or_default();
    losses.groups().map(|group| (group.clone(), now)).collect()
}

/// Brings the holds up to date with the groups file.
fn hold(term: &Arc<Term>) {
    let Some(file) = term.groups.file() else { return };
    let held = held(term, &term.applied(), &file);
    let woken: BTreeSet<GroupRef> = {
        let mut state = term.world.lock();
        let before = std::mem::take(&mut state.mass_removal);
        let groups = held.keys().chain(before.keys()).cloned().collect();
        state.mass_removal =
            held.into_iter().map(|(group, now)| (group.clone(), before.get(&group).copied().unwrap_or(now))).collect();
        groups
    };
    for group in &woken {
        term.wake(group);
    }
}

/// Stores which static groups there are now, with tombstones for those that left while nobody led.
async fn settle(term: Arc<Term>) {
    let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
    loop {
        // An old copy may lack what a newer config has: nothing is concluded from it.
        if term.applied().stale {
            return;
        }
        match groups::commit(&term, settling(&term, None).as_ref(), None).await {
            Ok(_) => {
                hold(&term);
                return;
            }
            Err(refusal) if refusal.reason == "GROUPS_UNREADABLE" => {
                tracing::warn!(error = %refusal, "static groups not noted");
                return;
            }
            Err(refusal) => tracing::warn!(error = %refusal, "static groups not noted yet"),
        }
        tokio::time::sleep(backoff.next(term.shared.entropy.as_ref()) + Duration::from_millis(100)).await;
    }
}

/// The take-over's decision on the groups file, by the config that comes with it or else by the one in force when its
/// turn comes: a refresh may have been faster.
fn settling(term: &Arc<Term>, next: Option<Arc<Applied>>) -> Box<Decide> {
    let term = term.clone();
    Box::new(move |file| {
        let applied = next.clone().unwrap_or_else(|| term.applied());
        if applied.stale {
            return Ok(None);
        }
        let (config, etag) = (&applied.config, &applied.etag.0);
        Ok(match held_back(&term, config, etag, file) {
            Ok(losses) => settled(file, (config, etag), &losses.vanished, (term.now(), term.shared.id.as_str())),
            Err(_) => unsettled(file, config),
        })
    })
}

/// Looks at the stored config: seldom, unless the one in force is an old copy because the store was silent.
async fn watch(term: Arc<Term>) {
    let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(300));
    loop {
        let wait = if term.shared.config.stored().unread {
            backoff.next(term.shared.entropy.as_ref()) + Duration::from_millis(100)
        } else {
            backoff.reset();
            LOOK
        };
        tokio::time::sleep(wait).await;
        let _turn = term.refreshing.0.lock().await;
        look(&term).await;
    }
}

async fn look(term: &Arc<Term>) {
    let (shared, in_force) = (&term.shared, term.applied());
    let stored = shared.config.stored();
    let other = match read_other(shared.store.as_ref(), &in_force, &shared.shard).await {
        Ok(other) => other,
        Err(error) => {
            tracing::warn!(error = %Chain(&error), "config not read");
            if stored.unread {
                shared.vitals.problem("config", format!("{}", Chain(&error)));
            }
            return;
        }
    };
    match other {
        None => {
            fresh(shared, &in_force);
            if stored.unread {
                // It was not known to be the stored one before.
                settle(term.clone()).await;
            }
        }
        Some((key, object)) if stored.unread => match usable(shared, &in_force, &key, &object, term.now()) {
            Ok(next) => adopt(term, next, &object).await,
            Err(why) => refuse(shared, term.epoch(), &in_force, &object, why),
        },
        Some((_, object)) => {
            if stored.pending.as_ref() != Some(&object.etag) {
                tracing::info!(etag = %object.etag, "a newer config waits for a refresh");
            }
            note(shared, Stored { pending: Some(object.etag), unread: false });
        }
    }
}

/// The config this term should have begun with has come: as at a take-over, nobody confirmed what it takes away.
async fn adopt(term: &Arc<Term>, next: Applied, object: &Object) {
    term.shared.last_good.remember(&next.key, object);
    let (key, etag) = (next.key.clone(), next.etag.clone());
    let decide = settling(term, Some(Arc::new(next.clone())));
    if let Err(refusal) = groups::commit(term, decide.as_ref(), Some(Swap { applied: next, held })).await {
        // It stays unread, so it is tried again.
        tracing::warn!(error = %refusal, "config not taken up yet");
        return;
    }
    fresh(&term.shared, &term.applied());
    term.tell(Tell::shard(Reason::ConfigApplied, format!("config {key} in force")).detail("etag", etag));
}
