//! All agents of a run, and the cloud's journal that says which there are.
//!
//! Machines come to life as the journal names them, and die as it names them or as a phase wants it. Reports are sent
//! by one task in turn, so that they can be stopped and counted.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, bail};
use nstance_core::ports::clock::Clock as _;
use nstance_proto::v1::ReportKind;
use nstance_providers::fake::journal::{Journal, Line, Made};
use nstance_rt::{chain::Chain, clock::SystemClock, tasks::Tasks};
use tokio::sync::Semaphore;
use tonic::Status;

use super::agent::{Agent, Counts, Doors, is_passing};

/// How often the journal is read. What happened when is written in it, so this delays only what comes of it.
const READ: Duration = Duration::from_millis(2);
/// How often the next reports are sent.
const TURN: Duration = Duration::from_millis(10);
/// Before a session that the server put off is opened anew.
const REOPEN: Duration = Duration::from_millis(500);
/// Between two looks of a wait.
const PERIOD: Duration = Duration::from_millis(2);

/// What an agent was told to suffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Blow {
    /// Its machine dies: the cloud knows, and the connection breaks.
    Loss,
    /// It tells its server that its machine will be taken.
    Notice,
}

#[derive(Clone)]
pub(super) struct Fleet {
    shared: Arc<Shared>,
    tasks: Tasks,
}

struct Shared {
    doors: Doors,
    counts: Counts,
    state: Mutex<State>,
    /// Registrations and handshakes at a time: even a storm comes through a door.
    storm: Semaphore,
    is_awake: AtomicBool,
    is_reporting: AtomicBool,
    /// When an agent was last registered, on the boot clock.
    registered_at: AtomicU64,
    connected_at: AtomicU64,
}

#[derive(Default)]
struct State {
    /// Every create call there was: group and nanoseconds of the boot clock, in the order of the journal.
    creates: Vec<(String, u64)>,
    /// Made, and not alive while the fleet sleeps.
    asleep: Vec<Made>,
    /// With a session and all files.
    alive: BTreeMap<String, Arc<Agent>>,
    /// By the cloud's word. A machine that was asked for twice, because an answer came late, is one.
    made: BTreeSet<String>,
    gone: BTreeSet<String>,
    /// On its way to one.
    n_coming: usize,
    trouble: Option<String>,
}

pub(super) fn boot_nanos() -> u64 {
    u64::try_from(SystemClock.monotonic().elapsed().as_nanos()).unwrap_or(u64::MAX)
}

impl Fleet {
    pub(super) fn start(doors: Doors, journal: &Path, storm: usize) -> anyhow::Result<Self> {
        let shared = Shared {
            doors,
            counts: Counts::default(),
            state: Mutex::default(),
            storm: Semaphore::new(storm),
            is_awake: AtomicBool::new(false),
            is_reporting: AtomicBool::new(false),
            registered_at: AtomicU64::new(0),
            connected_at: AtomicU64::new(0),
        };
        let fleet = Self { shared: Arc::new(shared), tasks: Tasks::new() };
        let mut journal = Journal::open(journal).context("open the cloud's journal")?;
        let reader = fleet.clone();
        fleet.tasks.spawn_droppable("journal", async move {
            loop {
                match journal.news() {
                    Ok(lines) => reader.take(lines),
                    Err(error) => reader.trouble(format!("the cloud's journal cannot be read: {error}")),
                }
                tokio::time::sleep(READ).await;
            }
        });
        let reporter = fleet.clone();
        fleet.tasks.spawn_droppable("reports", async move { reporter.report().await });
        Ok(fleet)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.shared.counts
    }

    fn trouble(&self, what: String) {
        self.state().trouble.get_or_insert(what);
    }

    fn take(&self, lines: Vec<Line>) {
        for line in lines {
            match line {
                Line::Made(made) => {
                    let mut state = self.state();
                    if !state.made.insert(made.instance.clone()) {
                        continue;
                    }
                    state.creates.push((made.group.clone(), made.asked_nanos));
                    if self.shared.is_awake.load(Ordering::Relaxed) {
                        drop(state);
                        self.bring_up(*made);
                    } else {
                        state.asleep.push(*made);
                    }
                }
                Line::Gone(instance) => {
                    let gone = {
                        let mut state = self.state();
                        let gone = state.alive.remove(&instance);
                        state.gone.insert(instance);
                        gone
                    };
                    if let Some(agent) = gone {
                        agent.cut();
                    }
                }
            }
        }
    }

    /// All machines that were made so far come to life at once, and later ones as they are made.
    pub(super) fn wake(&self) {
        let asleep = {
            let mut state = self.state();
            self.shared.is_awake.store(true, Ordering::Relaxed);
            std::mem::take(&mut state.asleep)
        };
        for made in asleep {
            self.bring_up(made);
        }
    }

    fn bring_up(&self, made: Made) {
        self.state().n_coming += 1;
        let fleet = self.clone();
        self.tasks.spawn_droppable("agent", async move {
            let agent = Arc::new(Agent::new(made));
            let ended = fleet.lead_life(&agent).await;
            fleet.state().alive.remove(&agent.instance);
            let Err(error) = ended else { return };
            // A server ends the session of a deleted machine sooner than we read of it.
            tokio::time::sleep(100 * READ).await;
            if !agent.is_cut() && !fleet.state().gone.contains(&agent.instance) {
                fleet.trouble(format!("agent {}: {}", agent.instance, Chain(error.as_ref())));
            }
        });
    }

    async fn lead_life(&self, agent: &Arc<Agent>) -> anyhow::Result<()> {
        let ended = self.sessions(agent).await;
        if !agent.is_furnished() {
            self.state().n_coming -= 1;
        }
        ended
    }

    /// One session after the other, until the machine is dead or the server wants nothing more of it.
    async fn sessions(&self, agent: &Arc<Agent>) -> anyhow::Result<()> {
        let Shared { doors, counts, storm, registered_at, connected_at, .. } = &*self.shared;
        let furnished = || {
            let mut state = self.state();
            state.n_coming -= 1;
            if !agent.is_cut() {
                state.alive.insert(agent.instance.clone(), agent.clone());
            }
        };
        let place = storm.acquire().await.context("the fleet is gone")?;
        let chain = agent.register(doors, counts).await?;
        registered_at.fetch_max(boot_nanos(), Ordering::Relaxed);
        let mut session = agent.connect(doors, counts, &chain).await?;
        connected_at.fetch_max(boot_nanos(), Ordering::Relaxed);
        drop(place);
        loop {
            let ended = agent.live(doors, counts, session, &furnished).await;
            let passes = |error: &anyhow::Error| error.downcast_ref::<Status>().is_some_and(is_passing);
            if agent.is_cut() || !ended.as_ref().is_err_and(passes) {
                return ended;
            }
            // A server that could not renew its lease in time says so, and is itself again soon.
            counts.reopened.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(REOPEN).await;
            session = agent.connect(doors, counts, &chain).await?;
        }
    }

    /// Sends reports in turn, each agent one per interval.
    async fn report(&self) {
        let Shared { doors, counts, is_reporting, .. } = &*self.shared;
        let (mut next, mut owed) = (String::new(), 0.0);
        let mut last = SystemClock.monotonic();
        loop {
            tokio::time::sleep(TURN).await;
            let now = SystemClock.monotonic();
            let passed = now.since(last);
            last = now;
            if !is_reporting.load(Ordering::Relaxed) {
                owed = 0.0;
                continue;
            }
            let batch = {
                let state = self.state();
                #[expect(clippy::cast_precision_loss, reason = "counts of a bench are small")]
                let n = state.alive.len() as f64;
                owed = (owed + n * passed.as_secs_f64() / doors.interval.as_secs_f64()).min(n);
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most all agents")]
                let due = owed as usize;
                let turn =
                    state.alive.range::<str, _>((std::ops::Bound::Excluded(next.as_str()), std::ops::Bound::Unbounded));
                turn.chain(&state.alive).take(due).map(|(_, agent)| agent.clone()).collect::<Vec<_>>()
            };
            for agent in batch {
                agent.report_in_turn(doors, counts);
                next.clone_from(&agent.instance);
                owed -= 1.0;
            }
        }
    }

    pub(super) fn report_from_now_on(&self, on: bool) {
        self.shared.is_reporting.store(on, Ordering::Relaxed);
    }

    /// Every agent sends one report out of turn, as fast as its stream takes it; so many times.
    pub(super) async fn flood(&self, rounds: usize) {
        let agents = self.alive();
        for _ in 0..rounds {
            for agent in &agents {
                while !agent.is_cut() && !agent.say(&self.shared.doors, &self.shared.counts, ReportKind::Periodic) {
                    tokio::task::yield_now().await;
                }
            }
        }
    }

    pub(super) fn alive(&self) -> Vec<Arc<Agent>> {
        self.state().alive.values().cloned().collect()
    }

    /// Create calls so far.
    pub(super) fn n_creates(&self) -> usize {
        self.state().creates.len()
    }

    /// When the last of the create calls began.
    pub(super) fn last_create(&self) -> u64 {
        self.state().creates.iter().map(|(_, at)| *at).max().unwrap_or(0)
    }

    pub(super) fn registered_at(&self) -> u64 {
        self.shared.registered_at.load(Ordering::Relaxed)
    }

    pub(super) fn connected_at(&self) -> u64 {
        self.shared.connected_at.load(Ordering::Relaxed)
    }

    /// Waits until there are exactly so many agents with a session and nobody is on the way.
    pub(super) async fn is_whole(&self, n: usize, limit: Duration) -> anyhow::Result<()> {
        let look = || {
            let state = self.state();
            let done = state.alive.len() == n && state.n_coming == 0;
            (done, format!("{} of {n} agents have their files, {} are on their way", state.alive.len(), state.n_coming))
        };
        self.until(limit, look).await
    }

    /// Waits for something, and says how far it came if it does not come.
    pub(super) async fn until(&self, limit: Duration, look: impl Fn() -> (bool, String)) -> anyhow::Result<()> {
        let begin = SystemClock.monotonic();
        loop {
            let (done, shown) = look();
            if done {
                return Ok(());
            }
            if let Some(trouble) = self.state().trouble.clone() {
                bail!("{shown}; {trouble}");
            }
            if limit < SystemClock.monotonic().since(begin) {
                bail!("{shown} after {} s", limit.as_secs());
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// Strikes so many agents at one moment, of as many groups as there are, and answers how long after each blow the
    /// create call of a replacement began.
    pub(super) async fn strike(
        &self,
        blow: Blow,
        n: usize,
        journal: &mut Journal,
        limit: Duration,
    ) -> anyhow::Result<Vec<Duration>> {
        // Whoever has its notice is being replaced already, and would not be a second time.
        let alive: Vec<Arc<Agent>> = self.alive().into_iter().filter(|it| !it.is_leaving()).collect();
        let step = (alive.len() / n.max(1)).max(1);
        // The youngest of them are not struck again and again: where it begins moves on with every create.
        let begin = self.n_creates() % step;
        let victims: Vec<Arc<Agent>> = alive.into_iter().skip(begin).step_by(step).take(n).collect();
        let known = self.n_creates();
        // A machine takes seconds to boot. One that came up at once would take the processors while the others' create
        // calls are still to come, so they come up when all calls are in.
        self.shared.is_awake.store(false, Ordering::Relaxed);
        match blow {
            Blow::Loss => {
                let gone: Vec<Line> = victims.iter().map(|it| Line::Gone(it.instance.clone())).collect();
                // The fleet's own reader must not break them before we do.
                {
                    let mut state = self.state();
                    victims.iter().for_each(|it| drop(state.alive.remove(&it.instance)));
                }
                journal.append(&gone).context("tell the cloud who died")?;
            }
            Blow::Notice => victims.iter().for_each(|it| it.note(Duration::from_secs(120))),
        }
        let mut blows: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for agent in &victims {
            blows.entry(agent.group.clone()).or_default().push(boot_nanos());
            match blow {
                Blow::Loss => agent.cut(),
                Blow::Notice => {
                    while !agent.say(&self.shared.doors, &self.shared.counts, ReportKind::Notice) {
                        tokio::task::yield_now().await;
                    }
                }
            }
        }
        let look = || {
            let n_made = self.n_creates() - known;
            (victims.len() <= n_made, format!("{n_made} create calls for {} replacements", victims.len()))
        };
        let all = self.until(limit, look).await;
        self.wake();
        all?;
        let creates: Vec<(String, u64)> = self.state().creates[known..].to_vec();
        pair(&blows, &creates)
    }

    /// Breaks every connection and forgets everybody.
    pub(super) async fn disband(&self) {
        self.report_from_now_on(false);
        let alive = std::mem::take(&mut self.state().alive);
        alive.values().for_each(|agent| agent.cut());
        self.tasks.end(Duration::from_secs(5)).await;
    }
}

/// The nth blow to a group is answered by its nth create call.
fn pair(blows: &BTreeMap<String, Vec<u64>>, creates: &[(String, u64)]) -> anyhow::Result<Vec<Duration>> {
    let mut found = Vec::new();
    for (group, blows) in blows {
        let mut answers: Vec<u64> = creates.iter().filter(|(it, _)| it == group).map(|(_, at)| *at).collect();
        answers.sort_unstable();
        if answers.len() < blows.len() {
            bail!("group {group} was struck {} times and made {} replacements", blows.len(), answers.len());
        }
        found
            .extend(blows.iter().zip(answers).map(|(blow, answer)| Duration::from_nanos(answer.saturating_sub(*blow))));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_blow_is_paired_with_a_create_of_its_own_group() {
        let blows = [("a".to_owned(), vec![10, 20]), ("b".to_owned(), vec![15])].into();
        let made = |group: &str, at| (group.to_owned(), at);
        let found = pair(&blows, &[made("b", 18), made("a", 40), made("a", 12)]).unwrap();
        assert_eq!(found, [2, 20, 3].map(Duration::from_nanos));
        let error = pair(&blows, &[made("b", 18), made("a", 40)]).unwrap_err().to_string();
        assert!(error.contains("group a was struck 2 times and made 1"), "{error}");
    }
}
