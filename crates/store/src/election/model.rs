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
//! `walk::cases`. The guard's watch over the wall clock is not part of it. From a sample of the states a world that fails no
//! more is followed until somebody leads. States are told apart by a hash of 64 bits.
//! `NSTANCE_MODEL=n` allows `n` more of each.

mod steps;
mod walk;

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    rc::Rc,
    time::Duration,
};

use nstance_core::{
    ids::Epoch,
    ports::{
        objects::{Condition, ETag},
        peers::{Election, PeerRole, PeerView},
    },
    term::Moment,
    time::{Mono, Timestamp},
};

use super::{
    Identity, LeaseRecord, Timing,
    follow::Follower,
    hold::{Answer, Candidacy, Put, Sight, Tenure},
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
            world = walk::settle(case, world, |world| world.leader(case).is_some()).expect("a first leader");
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
