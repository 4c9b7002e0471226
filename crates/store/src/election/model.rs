//! A model checker over the machines that decide elections: every interleaving of a small world is walked through.
//!
//! The world is one store (a register with compare-and-swap), two servers with the very [`Follower`], [`Candidacy`] and
//! [`Tenure`] that production runs, and a clock of whole seconds. In each state every step that could come next is tried:
//! a second passes; a put on its way lands; an answer arrives, is lost, or tells a refusal of what landed; a read takes
//! its sample or fails; a process dies, with its puts still under way, and comes back elsewhere or where it was; a peer's
//! answer arrives late; a link breaks; knocks are answered truthfully and reported late; a listener dies and returns; a
//! holder renews, shortens or lengthens its lease, or gives it back. Taking no step while the clock goes on is a pause, so
//! every pause at every step is among them.
//!
//! What is bounded: the time, the number of puts, of faults and of deaths; not all kinds of them are in one world, see
//! `cases`. The guard's watch over the wall clock is not part of it. From a sample of the states a world that fails no
//! more is followed until somebody leads. States are told apart by a hash of 64 bits.
//! `NSTANCE_MODEL=n` allows `n` more of each.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    hash::{DefaultHasher, Hash, Hasher},
    rc::Rc,
    time::Duration,
};

use nstance_core::{
    ids::Epoch,
    ports::{
        objects::{Condition, ETag},
        peers::{Election, Knock, PeerRole, PeerView},
    },
    term::Moment,
    time::{Mono, Timestamp},
};

use super::{
    Identity, LeaseRecord, Observation, TakeOver, Timing,
    follow::{Follower, KNOCKS, Wish},
    hold::{Answer, Candidacy, Put, Sight, Step, Tenure, Turn},
    next_epoch,
};
use crate::records::{Extra, Meta, VERSION, Versioned};

type Lease = Option<Rc<Versioned<LeaseRecord>>>;

const S: fn(u64) -> Duration = Duration::from_secs;

fn timing(ttl: u64, margin: u64) -> Timing {
    Timing { ttl: S(ttl), renew_interval: S(1), margin: S(margin) }
}

/// A rule broken on purpose: the search must find what comes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    /// The guard counts from the answer to a put, not from its start.
    CountsFromTheAnswer,
    /// A candidate takes silence for a yes.
    ActsOnHope,
    /// The guard is cut only when a shorter lease is known to have landed.
    CutsTooLate,
    /// A longer lease moves the guard's end when it is sent.
    ExtendsTooEarly,
    /// An unclear put is forgotten once the store still shows the version before.
    ForgetsWhatIsUnderWay,
    /// A follower waits for the ttl of its own config.
    ObeysItsOwnTtl,
    /// A follower counts from the beginning of the read that first showed the version, or from before.
    CountsFromBeforeTheRead,
    /// Knocks without an answer count as refused.
    TakesSilenceForDeath,
    /// Knocks prove something of a version that was seen after they began.
    KeepsAStaleProof,
    /// The guard stays open until the release is known to have landed.
    ReleasesBeforeItCloses,
    /// A dead listener leaves the guard open.
    ActsWithoutAListener,
    /// An expired version is bid on without a second look. The swap's condition is that look: nothing comes of it.
    LooksOnce,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    flaw: Option<Flaw>,
    timing: Timing,
    /// What a holder may change to.
    other: Option<Timing>,
    /// The first server's clock loses every fourth second.
    slow: bool,
    peers: bool,
    releases: bool,
    /// Nothing fails but listeners.
    only_listeners: bool,
    /// The first server holds the lease from the start.
    held: bool,
    servers: usize,
    seconds: u64,
    puts: u8,
    faults: u8,
    deaths: u8,
}

impl Case {
    const fn new(timing: Timing) -> Self {
        Self {
            flaw: None,
            timing,
            other: None,
            slow: false,
            peers: false,
            releases: false,
            only_listeners: false,
            held: true,
            servers: 2,
            seconds: 4,
            puts: 2,
            faults: 0,
            deaths: 0,
        }
    }

    fn has(&self, flaw: Flaw) -> bool {
        self.flaw == Some(flaw)
    }
}

#[derive(Clone)]
struct World {
    now: u64,
    store: Lease,
    n_versions: u8,
    flying: Vec<Flying>,
    servers: Vec<Rc<Server>>,
    /// What may still happen.
    puts: u8,
    faults: u8,
    deaths: u8,
    /// The highest epoch any effect bore. Whoever may act, does.
    acted: Epoch,
    broken: Option<&'static str>,
}

/// A put on its way to the store.
#[derive(Clone)]
struct Flying {
    seat: usize,
    body: Rc<Versioned<LeaseRecord>>,
    condition: Condition,
}

#[derive(Clone)]
struct Server {
    own: Identity,
    n_lives: u8,
    up: bool,
    listening: bool,
    n_ids: u8,
    follower: Follower,
    life: Life,
    /// Of the release that peers may be told of.
    released: Option<(ETag, Epoch)>,
    /// An answer on its way to us.
    hearing: Option<Rc<PeerView>>,
    knocking: Option<Knocking>,
}

#[derive(Clone, Hash)]
struct Knocking {
    process: String,
    addr: String,
    began: Mono,
    refused: bool,
    ended: bool,
}

#[derive(Clone)]
enum Life {
    Follow { reading: Option<(Mono, Lease)> },
    Bid { candidacy: Candidacy, record: LeaseRecord, wait: Wait },
    Hold { tenure: Tenure, record: LeaseRecord, end: Mono, wait: Wait },
    Release { candidacy: Candidacy, record: LeaseRecord, wait: Wait, still_open: Option<Mono> },
}

#[derive(Clone, PartialEq)]
enum Wait {
    Idle,
    Send,
    Answer { put: Put, answer: Option<Answer> },
    Read,
}

pub(super) fn hash_lease(lease: Option<&Versioned<LeaseRecord>>, into: &mut impl Hasher) {
    let it = lease.map(|it| {
        let value = &it.value;
        (&it.etag, &it.meta.write_id, value.epoch, &value.process, &value.addr, value.ttl, value.released)
    });
    it.hash(into);
}

fn hash_condition(condition: &Condition, into: &mut impl Hasher) {
    match condition {
        Condition::Create => 0.hash(into),
        Condition::Match(etag) => etag.hash(into),
    }
}

impl Wait {
    fn fingerprint(&self, into: &mut impl Hasher) {
        std::mem::discriminant(self).hash(into);
        match self {
            Self::Idle | Self::Send | Self::Read => {}
            Self::Answer { put, answer } => (put, answer).hash(into),
        }
    }
}

impl Server {
    fn fingerprint(&self, now: Mono, into: &mut impl Hasher) {
        (self.n_lives, self.up, &self.own.addr).hash(into);
        if !self.up {
            return;
        }
        (self.listening, self.n_ids, &self.released, &self.knocking).hash(into);
        if let Some(view) = &self.hearing {
            (&view.process, view.role, &view.etag, view.renewed_ago, view.ttl).hash(into);
        }
        std::mem::discriminant(&self.life).hash(into);
        match &self.life {
            Life::Follow { reading } => {
                if let Some((began, sample)) = reading {
                    began.hash(into);
                    hash_lease(sample.as_deref(), into);
                }
                self.follower.fingerprint(now, into);
            }
            Life::Bid { candidacy, wait, .. } => {
                candidacy.hash(into);
                wait.fingerprint(into);
                self.follower.fingerprint(now, into);
            }
            Life::Release { candidacy, wait, still_open, .. } => {
                (candidacy, still_open).hash(into);
                wait.fingerprint(into);
            }
            Life::Hold { tenure, end, wait, .. } => {
                (tenure, end).hash(into);
                wait.fingerprint(into);
            }
        }
    }
}

impl World {
    fn new(case: &Case) -> Self {
        let servers = (0..case.servers).map(|seat| Rc::new(Server::new(identity(seat, 0, false)))).collect();
        let mut world = Self {
            now: 0,
            store: None,
            n_versions: 0,
            flying: Vec::new(),
            servers,
            puts: case.puts,
            faults: case.faults,
            deaths: case.deaths,
            acted: Epoch(0),
            broken: None,
        };
        if case.held {
            // A quiet beginning, so that the search is spent on what comes after.
            world = settle(case, world, |world| world.leader(case).is_some()).expect("a first leader");
            assert!(world.open(case, 0).is_some());
            world.flying.clear();
            for seat in 1..case.servers {
                *world.server(seat) = Server::new(identity(seat, 0, false));
            }
        }
        world
    }

    fn fingerprint(&self, case: &Case) -> u64 {
        let mut into = DefaultHasher::new();
        (self.now, self.n_versions, self.puts, self.faults, self.deaths, self.acted).hash(&mut into);
        hash_lease(self.store.as_deref(), &mut into);
        for it in &self.flying {
            it.seat.hash(&mut into);
            hash_lease(Some(&it.body), &mut into);
            hash_condition(&it.condition, &mut into);
        }
        for (seat, server) in self.servers.iter().enumerate() {
            server.fingerprint(self.local(case, seat), &mut into);
        }
        into.finish()
    }

    /// What the server's own clock shows.
    fn local(&self, case: &Case, seat: usize) -> Mono {
        let lost = if case.slow && seat == 0 { self.now / 4 } else { 0 };
        Mono::from_start(S(100 + self.now - lost))
    }

    /// Under which epoch this server may act now.
    fn open(&self, case: &Case, seat: usize) -> Option<Epoch> {
        let server = &self.servers[seat];
        let now = self.local(case, seat);
        match &server.life {
            Life::Hold { tenure, end, .. } if server.up && now < *end => Some(tenure.landed().epoch),
            Life::Release { record, still_open: Some(end), .. } if server.up && now < *end => Some(record.epoch),
            _ => None,
        }
    }

    fn leader(&self, case: &Case) -> Option<usize> {
        (0..self.servers.len()).find(|seat| self.open(case, *seat).is_some())
    }

    /// Judges a state in which everybody acts who may.
    fn judged(mut self, case: &Case) -> Self {
        let open: Vec<Epoch> = (0..self.servers.len()).filter_map(|seat| self.open(case, seat)).collect();
        if 1 < open.len() {
            self.broken = Some("two guards are open");
        }
        for epoch in open {
            if epoch < self.acted {
                self.broken = Some("an effect of an earlier epoch came after one of a later");
            }
            self.acted = self.acted.max(epoch);
        }
        // A put on a version that will never be there again can only be refused; if nobody waits for that, it is gone.
        let (store, servers) = (&self.store, &self.servers);
        self.flying.retain(|it| condition_holds(&it.condition, store) || waits_for(&servers[it.seat], &it.body));
        self
    }

    fn listens(&self, addr: &str) -> Option<&Rc<Server>> {
        self.servers.iter().find(|it| it.up && it.listening && it.own.addr == addr)
    }

    fn server(&mut self, seat: usize) -> &mut Server {
        Rc::make_mut(&mut self.servers[seat])
    }

    /// The put reaches the store.
    fn arrive(mut self, at: usize) -> Self {
        let put = self.flying.remove(at);
        let answer = if condition_holds(&put.condition, &self.store) {
            self.n_versions += 1;
            let etag = ETag(format!("e{}", self.n_versions));
            let mut body = (*put.body).clone();
            body.etag = etag.clone();
            if self.store.as_ref().is_some_and(|it| body.value.epoch < it.value.epoch) {
                self.broken = Some("the lease's epoch fell");
            }
            self.store = Some(Rc::new(body));
            Answer::Landed(etag)
        } else {
            Answer::Refused
        };
        let server = self.server(put.seat);
        let is_awaited = waits_for(server, &put.body);
        if let Some(Wait::Answer { answer: slot, .. }) = server.wait()
            && is_awaited
        {
            *slot = Some(answer);
        }
        self
    }

    fn send(&mut self, seat: usize, put: Put, record: LeaseRecord, condition: Condition) {
        let meta = Meta {
            version: VERSION,
            epoch: put.epoch,
            writer: String::new(),
            write_id: put.write_id.clone(),
            updated_at: Timestamp::EPOCH,
        };
        let body = Versioned { value: record, etag: ETag(String::new()), meta, extra: Extra::default() };
        // Tries of one put are the same bytes: if one is on its way, another changes nothing.
        if !self.flying.iter().any(|it| it.body.meta.write_id == put.write_id && it.condition == condition) {
            self.flying.push(Flying { seat, body: Rc::new(body), condition });
        }
        if let Some(wait) = self.server(seat).wait() {
            *wait = Wait::Answer { put, answer: None };
        }
    }
}

fn condition_holds(condition: &Condition, store: &Lease) -> bool {
    match (condition, store) {
        (Condition::Create, store) => store.is_none(),
        (Condition::Match(etag), Some(there)) => there.etag == *etag,
        (Condition::Match(_), None) => false,
    }
}

fn waits_for(server: &Server, body: &Versioned<LeaseRecord>) -> bool {
    let wait = match &server.life {
        Life::Follow { .. } => return false,
        Life::Bid { wait, .. } | Life::Hold { wait, .. } | Life::Release { wait, .. } => wait,
    };
    server.up && matches!(wait, Wait::Answer { put, answer: None } if put.write_id == body.meta.write_id)
}

fn identity(seat: usize, n_lives: u8, elsewhere: bool) -> Identity {
    Identity {
        server_id: format!("s{seat}"),
        process: format!("p{seat}.{n_lives}"),
        addr: if elsewhere { format!("10.0.{n_lives}.{seat}:1") } else { format!("10.0.0.{seat}:1") },
        health_addr: String::new(),
        direct: true,
        exclusive: true,
        boot_id: format!("b{seat}"),
        provider_id: None,
    }
}

fn sight(lease: &Lease) -> Sight {
    match lease {
        Some(it) => Sight::Version { etag: it.etag.clone(), write_id: it.meta.write_id.clone() },
        None => Sight::Nothing,
    }
}

impl Server {
    fn new(own: Identity) -> Self {
        let follower = Follower::new(own.clone(), None);
        Self {
            own,
            n_lives: 0,
            up: true,
            listening: true,
            n_ids: 0,
            follower,
            life: Life::Follow { reading: None },
            released: None,
            hearing: None,
            knocking: None,
        }
    }

    fn wait(&mut self) -> Option<&mut Wait> {
        match &mut self.life {
            Life::Follow { .. } => None,
            Life::Bid { wait, .. } | Life::Hold { wait, .. } | Life::Release { wait, .. } => Some(wait),
        }
    }

    fn put(&mut self, now: Mono, timing: Timing, epoch: Epoch) -> Put {
        self.n_ids += 1;
        let write_id = format!("{}#{}", self.own.process, self.n_ids);
        Put { write_id, start: Moment { wall: Timestamp::EPOCH, mono: now }, timing, epoch }
    }

    fn follows(&mut self) {
        self.life = Life::Follow { reading: None };
        (self.hearing, self.knocking) = (None, None);
    }

    /// What it truly says to peers.
    fn view(&self, now: Mono) -> PeerView {
        let (role, epoch, etag, renewed_ago, ttl) = match (&self.life, &self.released) {
            (Life::Hold { tenure, .. }, _) => {
                let landed = tenure.landed();
                let ago = now.since(landed.start.mono);
                (PeerRole::Leading, landed.epoch, Some(tenure.etag().clone()), Some(ago), landed.timing.ttl)
            }
            (_, Some((etag, epoch))) => (PeerRole::Released, *epoch, Some(etag.clone()), Some(S(0)), S(0)),
            _ => (PeerRole::Following, Epoch(0), None, None, S(0)),
        };
        PeerView {
            election: Election::Shard,
            cluster: String::new(),
            shard: String::new(),
            server_id: self.own.server_id.clone(),
            process: self.own.process.clone(),
            role,
            epoch,
            etag,
            renewed_ago,
            ttl,
            ready: true,
            version: String::new(),
        }
    }
}

/// A step's name and the server that takes it, for the story of a violation.
type Label = (&'static str, usize);

/// Takes a step by its name and what it changes.
type Steps<'a> = &'a mut dyn FnMut(&'static str, &dyn Fn(&mut World));

/// Every state that may come next.
fn steps(case: &Case, world: &World) -> Vec<(Label, World)> {
    let mut next = Vec::new();
    if world.now < case.seconds {
        next.push((("a second passes", 9), World { now: world.now + 1, ..world.clone() }));
    }
    for at in 0..world.flying.len() {
        next.push((("a put arrives", world.flying[at].seat), world.clone().arrive(at)));
    }
    for seat in 0..world.servers.len() {
        if world.servers[seat].up {
            live_steps(case, world, seat, &mut next);
        } else {
            for elsewhere in [false, true] {
                let mut world = world.clone();
                let server = world.server(seat);
                let n_lives = server.n_lives + 1;
                *server = Server { n_lives, ..Server::new(identity(seat, n_lives, elsewhere)) };
                next.push(((if elsewhere { "restarts elsewhere" } else { "restarts" }, seat), world));
            }
        }
    }
    next
}

fn live_steps(case: &Case, world: &World, seat: usize, next: &mut Vec<(Label, World)>) {
    let server = &world.servers[seat];
    let now = world.local(case, seat);
    let mut to = |name, change: &dyn Fn(&mut World)| {
        let mut world = world.clone();
        change(&mut world);
        next.push(((name, seat), world));
    };
    if 0 < world.deaths {
        to("dies", &|world| {
            world.deaths -= 1;
            world.server(seat).up = false;
        });
    }
    let may_fail = 0 < world.faults && !case.only_listeners;
    let may_put = 0 < world.puts;
    if case.peers && server.listening && 0 < world.faults {
        to("loses its listener", &|world| {
            world.faults -= 1;
            let server = world.server(seat);
            server.listening = false;
            // The guard is closed before anything else, and that ends the term.
            if matches!(server.life, Life::Hold { .. }) && !case.has(Flaw::ActsWithoutAListener) {
                server.follower = Follower::new(server.own.clone(), None);
                server.follows();
            }
        });
    }
    if !server.listening {
        to("listens again", &|world| world.server(seat).listening = true);
    }
    match &server.life {
        Life::Follow { reading } => {
            match reading {
                None => match wish(case, server, now) {
                    // The sample is taken at once. Taken later, it could only be newer, and what is newer is later to
                    // run out; how late its answer comes is open.
                    Wish::Look => {
                        to("reads", &|world| {
                            let sample = world.store.clone();
                            world.server(seat).life = Life::Follow { reading: Some((now, sample)) };
                        });
                        if may_fail {
                            to("cannot read", &|world| {
                                world.faults -= 1;
                                world.server(seat).follower.look_failed(now + S(1));
                            });
                        }
                    }
                    Wish::Bid { seen, .. } if server.listening && may_put => {
                        to("bids", &|world| bid(case, world, seat, &seen));
                    }
                    Wish::Bid { .. } | Wish::Wait { .. } => {}
                },
                Some((began, sample)) => to("has looked", &|world| {
                    let server = world.server(seat);
                    let ended = if case.has(Flaw::CountsFromBeforeTheRead) { began.minus(S(2)) } else { now };
                    server.follower.looked(sample.as_deref().cloned(), *began, ended);
                    server.life = Life::Follow { reading: None };
                }),
            }
            if case.peers {
                peer_steps(case, world, seat, now, &mut to);
            }
        }
        Life::Bid { candidacy, record, wait } | Life::Release { candidacy, record, wait, .. } => {
            if *wait == Wait::Send && may_put {
                to("puts the same again", &|world| {
                    world.puts -= 1;
                    world.send(seat, candidacy.put().clone(), record.clone(), candidacy.condition().clone());
                });
            }
            answers(case, world, seat, wait, &mut to, &|world, said| {
                let server = world.server(seat);
                let (Life::Bid { candidacy, .. } | Life::Release { candidacy, .. }) = &mut server.life else { return };
                let turn = match said {
                    Said::Answer(Answer::Unclear) if case.has(Flaw::ActsOnHope) => Turn::Won(ETag("hoped".into())),
                    Said::Answer(answer) => candidacy.answered(&answer, now),
                    Said::Sight(sight) => candidacy.saw(&sight, now),
                };
                turned(server, turn, now);
            });
        }
        Life::Hold { tenure, record, end, wait } => {
            if *wait == Wait::Idle && may_put {
                for timing in [Some(case.timing), case.other].into_iter().flatten() {
                    // Renewing twice within one second tells nothing new.
                    if tenure.landed().start.mono < now || timing != tenure.landed().timing {
                        to("renews", &|world| renew(case, world, seat, timing, now));
                    }
                }
            }
            if case.releases && *wait == Wait::Idle && may_put {
                to("releases", &|world| {
                    world.puts -= 1;
                    let server = world.server(seat);
                    let put = server.put(now, tenure.landed().timing, tenure.landed().epoch);
                    let record = LeaseRecord { released: true, ..record.clone() };
                    let condition = Condition::Match(tenure.etag().clone());
                    server.life = Life::Release {
                        candidacy: Candidacy::new(put.clone(), condition.clone()),
                        record: record.clone(),
                        wait: Wait::Send,
                        still_open: case.has(Flaw::ReleasesBeforeItCloses).then_some(*end),
                    };
                    world.send(seat, put, record, condition);
                });
            }
            answers(case, world, seat, wait, &mut to, &|world, said| {
                let server = world.server(seat);
                let Life::Hold { tenure, wait, .. } = &mut server.life else { return };
                let Wait::Answer { put, .. } = wait.clone() else {
                    let Said::Sight(sight) = said else { return };
                    let was_there = matches!(&sight, Sight::Version { etag, .. } if etag == tenure.etag());
                    let step = tenure.saw(sight);
                    *wait = Wait::Idle;
                    if was_there && case.has(Flaw::ForgetsWhatIsUnderWay) {
                        *tenure = Tenure::new(tenure.landed().clone(), tenure.etag().clone());
                    }
                    held(case, server, step, now);
                    return;
                };
                let Said::Answer(answer) = said else { return };
                let step = tenure.answered(&put, answer);
                *wait = if step == Step::ReadBack { Wait::Read } else { Wait::Idle };
                held(case, server, step, now);
            });
        }
    }
}

fn wish(case: &Case, server: &Server, now: Mono) -> Wish {
    let wish = server.follower.wish(now);
    let Some(seen) = server.follower.seen() else { return wish };
    let Some(lease) = seen.lease.as_ref().filter(|_| !matches!(wish, Wish::Bid { .. })) else { return wish };
    let is_over = |ttl: Duration, at: Mono| seen.first_seen + ttl <= at;
    let bids = match case.flaw {
        Some(Flaw::ObeysItsOwnTtl) => is_over(case.timing.ttl, now),
        Some(Flaw::LooksOnce) => is_over(lease.value.ttl, now),
        _ => false,
    };
    if bids { Wish::Bid { seen: seen.clone(), reason: TakeOver::Expired } } else { wish }
}

enum Said {
    Answer(Answer),
    Sight(Sight),
}

/// All that may be said to whoever waits for the store.
fn answers(case: &Case, world: &World, seat: usize, wait: &Wait, to: Steps<'_>, say: &dyn Fn(&mut World, Said)) {
    let may_fail = 0 < world.faults && !case.only_listeners;
    match wait {
        Wait::Idle | Wait::Send => {}
        Wait::Answer { put, answer } => {
            if let Some(answer) = answer {
                to("is answered", &|world| say(world, Said::Answer(answer.clone())));
                if may_fail && matches!(answer, Answer::Landed(_)) {
                    to("is refused though it landed", &|world| {
                        world.faults -= 1;
                        say(world, Said::Answer(Answer::Refused));
                    });
                }
            } else if may_fail {
                to("is told that nothing was done", &|world| {
                    world.faults -= 1;
                    world.flying.retain(|it| it.seat != seat || it.body.meta.write_id != put.write_id);
                    say(world, Said::Answer(Answer::NotDone));
                });
            }
            if may_fail && *answer != Some(Answer::Refused) {
                // The put may be under way still, and land later.
                to("waits in vain", &|world| {
                    world.faults -= 1;
                    say(world, Said::Answer(Answer::Unclear));
                });
            }
        }
        Wait::Read => {
            to("reads back", &|world| {
                let there = sight(&world.store);
                say(world, Said::Sight(there));
            });
            if may_fail {
                to("cannot read back", &|world| {
                    world.faults -= 1;
                    say(world, Said::Sight(Sight::Failed));
                });
            }
        }
    }
}

fn bid(case: &Case, world: &mut World, seat: usize, seen: &Observation) {
    world.puts -= 1;
    let now = world.local(case, seat);
    let server = world.server(seat);
    let put = server.put(now, case.timing, next_epoch(seen.epoch(), Epoch(0), Epoch(0)));
    let record = LeaseRecord {
        epoch: put.epoch,
        holder: server.own.server_id.clone(),
        process: server.own.process.clone(),
        addr: server.own.addr.clone(),
        health_addr: String::new(),
        direct: true,
        boot_id: server.own.boot_id.clone(),
        provider_id: None,
        ttl: put.timing.ttl,
        acquired_at: Timestamp::EPOCH,
        renewed_at: Timestamp::EPOCH,
        released: false,
        previous: None,
    };
    let condition = seen.lease.as_ref().map_or(Condition::Create, |it| Condition::Match(it.etag.clone()));
    let candidacy = Candidacy::new(put.clone(), condition.clone());
    server.life = Life::Bid { candidacy, record: record.clone(), wait: Wait::Send };
    (server.hearing, server.knocking) = (None, None);
    world.send(seat, put, record, condition);
}

fn renew(case: &Case, world: &mut World, seat: usize, timing: Timing, now: Mono) {
    world.puts -= 1;
    let server = world.server(seat);
    let fresh = server.put(now, timing, Epoch(0)).write_id;
    let Life::Hold { tenure, record, end, .. } = &mut server.life else { return };
    let put = tenure.next(timing, Moment { wall: Timestamp::EPOCH, mono: now }, || fresh);
    match case.flaw {
        Some(Flaw::CutsTooLate | Flaw::CountsFromTheAnswer) => {}
        Some(Flaw::ExtendsTooEarly) => *end = put.end().max(*end),
        _ => *end = tenure.end(),
    }
    let record = LeaseRecord { epoch: put.epoch, ttl: put.timing.ttl, ..record.clone() };
    let condition = Condition::Match(tenure.etag().clone());
    world.send(seat, put, record, condition);
}

/// What a candidate, or one that gives up, makes of its machine's word.
fn turned(server: &mut Server, turn: Turn, now: Mono) {
    let is_release = matches!(server.life, Life::Release { .. });
    let (Life::Bid { candidacy, record, wait } | Life::Release { candidacy, record, wait, .. }) = &mut server.life
    else {
        return;
    };
    match turn {
        Turn::ReadBack => *wait = Wait::Read,
        Turn::PutAgain => *wait = Wait::Send,
        Turn::Won(etag) if is_release => {
            server.released = Some((etag, record.epoch));
            server.follower = Follower::new(server.own.clone(), None).gave_up(now);
            server.follows();
        }
        Turn::Won(etag) => {
            let put = candidacy.put().clone();
            let (end, record) = (put.end(), record.clone());
            server.life = Life::Hold { tenure: Tenure::new(put, etag), record, end, wait: Wait::Idle };
            server.released = None;
        }
        Turn::Lost | Turn::TooLate | Turn::Failed => {
            if is_release {
                server.follower = Follower::new(server.own.clone(), None).gave_up(now);
            } else {
                server.follower.bid_failed(now);
            }
            server.follows();
        }
    }
}

/// What a holder makes of its machine's word.
fn held(case: &Case, server: &mut Server, step: Step, now: Mono) {
    let Life::Hold { tenure, record, end, .. } = &mut server.life else { return };
    match step {
        Step::Landed => {
            *end =
                if case.has(Flaw::CountsFromTheAnswer) { now + tenure.landed().timing.act_for() } else { tenure.end() };
            record.ttl = tenure.landed().timing.ttl;
        }
        Step::Lost => {
            server.follower = Follower::new(server.own.clone(), None);
            server.follows();
        }
        Step::Again | Step::ReadBack => match case.flaw {
            Some(Flaw::CutsTooLate | Flaw::CountsFromTheAnswer | Flaw::ExtendsTooEarly) => {}
            _ => *end = tenure.end(),
        },
    }
}

/// The link to the holder: questions, breaks and knocks.
fn peer_steps(case: &Case, world: &World, seat: usize, now: Mono, to: Steps<'_>) {
    let server = &world.servers[seat];
    if let Some(view) = &server.hearing {
        to("hears", &|world| {
            let server = world.server(seat);
            server.hearing = None;
            server.follower.heard(view, now);
        });
    } else if let Some(holder) = server.follower.holder() {
        let there = world.listens(&holder.addr);
        if let Some(there) = there {
            let at = world.servers.iter().position(|it| Rc::ptr_eq(it, there)).unwrap_or_default();
            let view = there.view(world.local(case, at));
            // A question is answered when there is news, or after a while: then only if it makes a difference.
            if holder.known != Some((view.role, view.etag.clone())) || makes_a_difference(server, &view, now) {
                to("is told by its peer", &|world| world.server(seat).hearing = Some(Rc::new(view.clone())));
            }
        }
        if there.is_none() || (0 < world.faults && !case.only_listeners) {
            to("finds the link broken", &|world| {
                let refused = world.listens(&holder.addr).is_none();
                world.faults -= u8::from(!refused);
                let server = world.server(seat);
                if server.follower.link_broke(now) {
                    let (process, addr) = (holder.process.clone(), holder.addr.clone());
                    server.knocking = Some(Knocking { process, addr, began: now, refused, ended: false });
                }
            });
        }
    }
    match &server.knocking {
        Some(knocking) if !knocking.ended => to("ends its knocking", &|world| {
            let refused = knocking.refused && world.listens(&knocking.addr).is_none();
            world.server(seat).knocking = Some(Knocking { refused, ended: true, ..knocking.clone() });
        }),
        Some(knocking) => to("takes note of the knocks", &|world| {
            let server = world.server(seat);
            server.knocking = None;
            let counts = knocking.refused || case.has(Flaw::TakesSilenceForDeath);
            let knocks = [if counts { Knock::Refused } else { Knock::Unknown }; KNOCKS.len() + 1];
            let mut began = knocking.began;
            if counts && case.has(Flaw::KeepsAStaleProof) {
                // As if they had begun now.
                server.follower.link_broke(now);
                began = now;
            }
            server.follower.knocked(&knocking.process, began, &knocks, now);
        }),
        None => {}
    }
}

fn makes_a_difference(server: &Server, view: &PeerView, now: Mono) -> bool {
    let print = |follower: &Follower| {
        let mut into = DefaultHasher::new();
        follower.fingerprint(now, &mut into);
        into.finish()
    };
    let mut follower = server.follower.clone();
    follower.heard(view, now);
    print(&follower) != print(&server.follower)
}

/// Goes on without faults, one step after the other, until `done`. `None`: not within a minute, or with no end of steps
/// within one second.
fn settle(case: &Case, world: World, done: impl Fn(&World) -> bool) -> Option<World> {
    let case = &Case { seconds: u64::MAX, ..*case };
    let mut world = World { faults: 0, deaths: 0, puts: u8::MAX, ..world };
    let until = world.now + 60;
    let mut n_steps = 0;
    while !done(&world) {
        // Whoever is down comes back, and whoever can do something does, before time goes on.
        let print = world.fingerprint(case);
        let mut next: Vec<World> = steps(case, &world)
            .into_iter()
            .filter(|(label, _)| !matches!(label.0, "a second passes" | "renews" | "releases"))
            .map(|(_, next)| World { puts: u8::MAX, ..next }.judged(case))
            .collect();
        if !next.is_empty() {
            // Each in turn, lest one of them starve the others.
            let at = n_steps % next.len();
            next.rotate_left(at);
        }
        match next.into_iter().find(|next| next.fingerprint(case) != print) {
            Some(next) => {
                world = next;
                n_steps += 1;
            }
            None => {
                world = World { now: world.now + 1, ..world }.judged(case);
                n_steps = 0;
            }
        }
        if until < world.now || 100 < n_steps || world.broken.is_some() {
            return None;
        }
    }
    (world.puts, world.faults, world.deaths) = (case.puts, case.faults, case.deaths);
    Some(world)
}

/// Walks through all states. Answers how many there are, or the story of the first that is broken.
fn explore(case: &Case) -> Result<usize, String> {
    let more: u8 = std::env::var("NSTANCE_MODEL").ok().and_then(|it| it.parse().ok()).unwrap_or(0);
    let case = &Case {
        seconds: case.seconds + u64::from(more),
        puts: case.puts + more,
        faults: case.faults + more,
        deaths: case.deaths + more,
        ..*case
    };
    let first = World::new(case).judged(case);
    let root = first.fingerprint(case);
    let mut seen: HashMap<u64, (u64, Label)> = HashMap::from([(root, (root, ("the beginning", 9)))]);
    let mut queue = VecDeque::from([(root, first)]);
    while let Some((from, world)) = queue.pop_front() {
        for (label, world) in steps(case, &world) {
            let world = world.judged(case);
            let print = world.fingerprint(case);
            let Entry::Vacant(vacant) = seen.entry(print) else { continue };
            vacant.insert((from, label));
            if let Some(why) = world.broken {
                return Err(story(&seen, print, why));
            }
            // From one state in a thousand, by chance: that it does not end in waiting or in turning in circles.
            if case.flaw.is_none() && print.is_multiple_of(1009) {
                let leads = |world: &World| world.leader(case).is_some();
                if settle(case, world.clone(), leads).is_none() {
                    return Err(story(&seen, print, "nobody comes to lead from here"));
                }
            }
            queue.push_back((print, world));
        }
    }
    Ok(seen.len())
}

fn story(seen: &HashMap<u64, (u64, Label)>, mut at: u64, why: &str) -> String {
    let mut lines = vec![why.to_owned()];
    while let Some((from, (what, seat))) = seen.get(&at) {
        lines.push(if *seat == 9 { (*what).to_owned() } else { format!("server {seat} {what}") });
        if *from == at {
            break;
        }
        at = *from;
    }
    lines.reverse();
    lines.join("\n  ")
}

/// The parts of the world that are walked through, each with its own bounds.
fn cases() -> [(&'static str, Case); 11] {
    let plain = Case::new(timing(2, 1));
    [
        ("two first candidates", Case { held: false, seconds: 3, ..plain }),
        ("store", Case { faults: 2, ..plain }),
        ("death", Case { deaths: 1, seconds: 3, ..plain }),
        ("lengths", Case { other: Some(timing(4, 1)), ..plain }),
        ("lengths with a fault", Case { other: Some(timing(4, 1)), faults: 1, seconds: 3, ..plain }),
        ("peers", Case { peers: true, deaths: 1, puts: 1, seconds: 1, ..plain }),
        ("listener", Case { peers: true, faults: 1, only_listeners: true, seconds: 1, ..plain }),
        ("links", Case { peers: true, faults: 1, puts: 1, seconds: 1, ..plain }),
        ("hand-over", Case { releases: true, seconds: 3, ..plain }),
        ("hand-over by word", Case { releases: true, peers: true, seconds: 1, ..plain }),
        ("skew", Case { timing: timing(3, 1), slow: true, seconds: 6, ..plain }),
    ]
}

#[test]
fn no_interleaving_of_two_candidates_opens_two_guards() {
    for (name, case) in cases() {
        match explore(&case) {
            Ok(n) => println!("{name}: {n} states"),
            Err(story) => panic!("{name}:\n  {story}"),
        }
    }
}

#[test]
fn each_broken_rule_is_found_out() {
    let plain = Case::new(timing(2, 1));
    let peers = Case { peers: true, puts: 1, seconds: 1, ..plain };
    let shortens = Case { timing: timing(5, 1), other: Some(timing(2, 1)), ..plain };
    let lengthens = Case { other: Some(timing(5, 1)), ..plain };
    for (flaw, case) in [
        (Flaw::CountsFromTheAnswer, plain),
        (Flaw::ActsOnHope, Case { faults: 1, ..plain }),
        (Flaw::CutsTooLate, shortens),
        (Flaw::ForgetsWhatIsUnderWay, Case { faults: 1, ..shortens }),
        (Flaw::ExtendsTooEarly, lengthens),
        (Flaw::ObeysItsOwnTtl, lengthens),
        (Flaw::CountsFromBeforeTheRead, plain),
        (Flaw::TakesSilenceForDeath, Case { faults: 1, ..peers }),
        (Flaw::ActsWithoutAListener, Case { faults: 1, ..peers }),
        (Flaw::KeepsAStaleProof, Case { faults: 1, only_listeners: true, puts: 2, seconds: 2, ..peers }),
        (Flaw::ReleasesBeforeItCloses, Case { releases: true, ..plain }),
    ] {
        let case = Case { flaw: Some(flaw), ..case };
        let story = explore(&case).expect_err(&format!("{flaw:?} goes unnoticed"));
        println!("{flaw:?}:\n  {story}");
    }
}

#[test]
fn a_margin_covers_a_slow_clock_and_its_absence_does_not() {
    let slow = Case { slow: true, seconds: 6, ..Case::new(timing(3, 1)) };
    explore(&slow).unwrap_or_else(|story| panic!("{story}"));
    let story = explore(&Case { timing: timing(3, 0), ..slow }).expect_err("no margin");
    println!("{story}");
}

/// The swap's own condition is the second look: leaving the other out costs a refused put, not safety.
#[test]
fn a_bid_without_a_second_look_is_safe() {
    let case = Case { flaw: Some(Flaw::LooksOnce), ..Case::new(timing(2, 1)) };
    explore(&case).unwrap_or_else(|story| panic!("{story}"));
}
