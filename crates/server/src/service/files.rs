//! Files of instances: whoever is connected gets what its template asks for, and again whatever of it changes.
//!
//! Nothing is queued. Each stream looks at the whole of what its instance is owed, sends what is missing, and sleeps
//! until somebody wakes it: a report, a key, a config, a time. A batch ends with a message that commits it by naming a
//! hash: the group's, if the agent then has everything; otherwise the one the agent has already, so that its files are
//! taken and its hash stays.

mod addresses;
mod batch;
pub mod decide;
mod delivery;
mod sources;
mod wanted;

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use data_encoding::HEXLOWER;
use nstance_core::{
    ids::{GroupRef, InstanceId},
    instance::Ownership,
    ports::clock::random,
    time::Timestamp,
};
use nstance_proto::v1;
use tokio::sync::{Semaphore, mpsc};
use tonic::Status;

use self::{
    batch::{Look, make, sha256},
    decide::{Due, FIRST_REPORT, Heard},
    sources::Sources,
};
pub use self::{
    delivery::{Delivery, Opened, Stream},
    wanted::wanted,
};
use super::status::timestamp;
use crate::{
    events::{Reason, Tell},
    term::Term,
};

/// Batches that are being made at once: a change for all must neither flood the store nor fill the memory.
const MAKING: usize = 256;

/// While it is in doubt whether we lead nothing is sent; looked at again after this.
const STALLED: Duration = Duration::from_secs(1);

/// Without a time to wait for, a stream looks again after this.
const RESYNC: Duration = Duration::from_secs(30);

/// Commits the files of an agent that has no hash at all and cannot be given ours: something of it is missing.
const INCOMPLETE: &str = "incomplete";

/// What all streams of a term share.
pub struct Files {
    sources: Sources,
    making: Semaphore,
}

impl Default for Files {
    fn default() -> Self {
        Self { sources: Sources::default(), making: Semaphore::new(MAKING) }
    }
}

/// What an agent said when it opened its stream.
pub struct Hello {
    pub session: String,
    pub hash: String,
}

/// Where messages for an agent go. Boxed: a channel has room for dozens at once, whatever its bound, and nearly all are
/// empty nearly always.
pub type Teller<T> = mpsc::Sender<Box<Result<T, Status>>>;

type Out = Teller<v1::FileTransfer>;

/// Nobody takes what we send any more.
struct Gone;

/// Another config is in force: everybody looks, and what comes from elsewhere is read again.
pub fn refreshed(term: &Term) {
    term.files.sources.forget();
    let state = term.world.lock();
    for entry in state.entries.values() {
        entry.delivery.look_again();
    }
}

/// The groups file has other words for these groups. Their members were woken with what is asked of them; who goes by
/// the words themselves looks again.
pub fn reworded(term: &Term, groups: &BTreeSet<GroupRef>) {
    let state = term.world.lock();
    let members = groups.iter().filter_map(|group| state.groups.get(group)).flat_map(|it| &it.members);
    for entry in members.filter_map(|id| state.entries.get(id)) {
        if entry.instance().ownership == Ownership::OnDemand {
            entry.delivery.wake();
        }
    }
}

/// Takes in what a report says of files.
pub fn reported(
    term: &Term,
    group: &GroupRef,
    instance: InstanceId,
    delivery: &Delivery,
    report: &v1::HealthReportRequest,
) {
    for (name, why) in delivery.reported(report, term.now()) {
        let message = format!("file {name} was not written by the agent: {why}");
        term.tell(Tell::instance(Reason::FileDeliveryFailed, group, instance, message).detail("file", name));
    }
}

/// Sleeps until this time of the term; for ever without one.
pub async fn sleep_until(term: &Term, at: Option<Timestamp>) {
    match at {
        Some(at) => tokio::time::sleep(at.since(term.now())).await,
        None => std::future::pending().await,
    }
}

/// Sends an instance what it is owed, for as long as the stream lives.
pub async fn serve(term: &Arc<Term>, instance: InstanceId, stream: &Opened, hello: &Hello, out: &Out) {
    let patience = term.now().plus(FIRST_REPORT);
    loop {
        let wake_at = match begin(term, instance, stream, hello, patience, out) {
            Ok(delivery) => match delivery.await {
                Ok(()) => continue,
                Err(Gone) => return,
            },
            Err(wake_at) => wake_at,
        };
        // Nobody can say what is owed while the group is unknown: who could says so, and losing that costs half a minute.
        let wake_at = wake_at.unwrap_or_else(|| term.now().plus(RESYNC));
        tokio::select! {
            biased;
            () = stream.wake.notified() => {}
            () = sleep_until(term, Some(wake_at)) => {}
        }
    }
}

/// A delivery under way. Boxed: nearly all streams sleep, and each would hold the room that one takes.
type Delivering<'a> = Pin<Box<dyn Future<Output = Result<(), Gone>> + Send + 'a>>;

/// Looks at what an instance is owed and begins to deliver it, or says until when to wait.
fn begin<'a>(
    term: &'a Arc<Term>,
    instance: InstanceId,
    stream: &'a Opened,
    hello: &'a Hello,
    patience: Timestamp,
    out: &'a Out,
) -> Result<Delivering<'a>, Option<Timestamp>> {
    let now = term.now();
    let look = look(term, instance, stream, hello, patience, now)?;
    if !term.guard.is_open() {
        return Err(Some(now.plus(STALLED)));
    }
    Ok(Box::pin(async move { deliver(term, stream, hello, &look, out).await }))
}

/// What to send now, or until when to wait.
fn look(
    term: &Arc<Term>,
    instance: InstanceId,
    stream: &Opened,
    hello: &Hello,
    patience: Timestamp,
    now: Timestamp,
) -> Result<Look, Option<Timestamp>> {
    let wanted = wanted(term, instance).ok_or(None)?;
    let (groups_known, is_located) = {
        let state = term.world.lock();
        (state.complete.groups, state.entries.get(&instance).is_some_and(|entry| entry.vm.is_some()))
    };
    // From an old copy of the config nobody concludes that a file left.
    let is_old = term.applied().stale;
    let mut state = stream.own().ok_or(None)?;
    let report = state.reported.clone().filter(|report| report.session == hello.session);
    // Nobody can read what the API set of the groups: only one whose hash is ours is known to be owed just this.
    if !groups_known && report.as_ref().is_none_or(|report| report.hash != wanted.hash) {
        return Err(None);
    }
    state.memory.look(&wanted, report.as_deref().filter(|_| !is_old));
    if is_located {
        state.memory.located();
    }
    let heard = match &report {
        Some(report) => Heard::Report(report),
        None if now < patience => Heard::Waiting { until: patience },
        None => Heard::Nothing,
    };
    let order = match state.memory.decide(now, &wanted, &state.held(), heard) {
        Due::Wait(at) => return Err(at),
        Due::Batch(order) => order,
    };
    state.memory.begun();
    let keys = state.keys.clone();
    drop(state);
    let it = term.world.lock().entries.get(&instance).map(|entry| entry.instance().clone()).ok_or(None)?;
    Ok(Look { instance: it, wanted, order, report, keys })
}

/// Makes a batch and sends it.
async fn deliver(term: &Arc<Term>, stream: &Opened, hello: &Hello, look: &Look, out: &Out) -> Result<(), Gone> {
    let delivery = &stream.delivery;
    let mut batch = {
        let _one_of_many = term.files.making.acquire().await;
        make(term, delivery, look).await
    };
    let message = v1::FileTransfer {
        batch_id: HEXLOWER.encode(&random::<8>(term.shared.entropy.as_ref())),
        epoch: term.epoch().0,
        ..v1::FileTransfer::default()
    };
    let mut sent = BTreeMap::new();
    for file in std::mem::take(&mut batch.files) {
        // An agent would drop it by its epoch; better it is not said at all.
        if !term.guard.is_open() {
            return Ok(());
        }
        let (content, known) = match batch.content(term, look, &file).await {
            Ok(found) => found,
            Err(why) => {
                batch.failures.push((file.name, why));
                continue;
            }
        };
        let transfer = v1::FileTransfer {
            filename: file.name.clone(),
            sha256: sha256(&content).to_vec(),
            content,
            last_modified: Some(timestamp(term.now())),
            ..message.clone()
        };
        out.send(Box::new(Ok(transfer))).await.map_err(|_| Gone)?;
        sent.insert(file.name, known);
    }
    let left = delivery.lock().memory.left();
    for name in &left {
        let transfer = v1::FileTransfer { filename: name.clone(), remove: true, ..message.clone() };
        out.send(Box::new(Ok(transfer))).await.map_err(|_| Gone)?;
    }
    if !term.guard.is_open() {
        return Ok(());
    }
    let commit = {
        let now = term.now();
        // What a stream that was superseded has sent may never arrive.
        let mut state = stream.own().ok_or(Gone)?;
        let mut told = Vec::new();
        for (name, why) in batch.failures {
            told.push((state.memory.failed(&name, now), name, why));
        }
        state.memory.checked(&look.order, &look.wanted, now);
        let report = look.report.as_deref();
        let complete = state.memory.is_complete(&look.wanted, &sent, report);
        let has_hash = report.is_some_and(|it| it.hash == look.wanted.hash);
        let owed = complete && !has_hash && state.memory.owes_hash(&look.order, &look.wanted);
        let commits = !sent.is_empty() || !left.is_empty() || owed;
        if commits {
            // Before it is sent: the answer may be faster than we are.
            state.memory.sent(&message.batch_id, sent, &look.wanted, complete, now);
        }
        drop(state);
        tell_failures(term, look, told);
        commits.then(|| match complete {
            true => look.wanted.hash.clone(),
            false => own_hash(report.map(|it| it.hash.as_str()), hello),
        })
    };
    let Some(config_hash) = commit else { return Ok(()) };
    out.send(Box::new(Ok(v1::FileTransfer { config_hash, ..message }))).await.map_err(|_| Gone)
}

/// The hash an agent has, to commit files without telling it that it has everything.
fn own_hash(reported: Option<&str>, hello: &Hello) -> String {
    let own = reported.filter(|hash| !hash.is_empty()).unwrap_or(&hello.hash);
    if own.is_empty() { INCOMPLETE.to_owned() } else { own.to_owned() }
}

fn tell_failures(term: &Term, look: &Look, failures: Vec<(Duration, String, String)>) {
    for (retry_after, name, why) in failures {
        let message = format!("file {name} was not sent: {why}");
        let told = Tell::instance(Reason::FileDeliveryFailed, &look.instance.group, look.instance.id, message);
        term.tell(told.detail("file", name).retry_after(retry_after));
    }
}
