//! A follower, as a pure machine: told what the store showed, what the holder said and who answered a knock, it says what
//! to do next. It reads no clock and does no I/O, so every order of events can be tried.
//!
//! Only two things end a wait before the lease's time is over: the store's word that the lease is free, and a proof that
//! nobody is listening where the holder must listen to have a guard.

use std::{net::IpAddr, time::Duration};

use nstance_core::{
    ports::{
        objects::ETag,
        peers::{Knock, PeerRole, PeerView},
    },
    time::Mono,
};

use super::{Identity, LeaseRecord, Observation, TakeOver, is_same_host};
use crate::records::Versioned;

/// How often the lease is looked at while the holder's own word comes in.
const CALM: Duration = Duration::from_secs(60);
/// How often while there is reason to doubt the holder.
const SUSPICIOUS: Duration = Duration::from_secs(1);
/// After so long a doubt that came to nothing, looks become rarer: half the lease's time.
const PATIENCE: Duration = Duration::from_secs(60);
/// A server that gave up on purpose does not stand again so soon,
const STANDS_BACK: Duration = Duration::from_secs(10);
/// unless nobody else takes what is free.
const STAYS_FREE: Duration = Duration::from_secs(2);

/// When to knock after the link broke; the last goes with a knock at the health address.
pub const KNOCKS: [Duration; 4] =
    [Duration::ZERO, Duration::from_millis(100), Duration::from_millis(300), Duration::from_millis(600)];

/// What a follower wants to do now.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "one is made at a time, and a bid is what most of them lead to")]
pub enum Wish {
    /// Read the lease.
    Look,
    Bid {
        seen: Observation,
        reason: TakeOver,
    },
    /// Nothing before this moment, unless something is heard.
    Wait {
        until: Mono,
    },
}

/// Whom to keep a link with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    pub server_id: String,
    pub process: String,
    pub addr: String,
    pub health_addr: String,
    /// What was last said there, for the next question.
    pub known: Option<(PeerRole, Option<ETag>)>,
    /// Whether a refused connection there would prove anything.
    pub provable: bool,
}

#[derive(Debug, Clone)]
pub struct Follower {
    own: Identity,
    /// The address that moves with leadership: who answers there is not the holder of old.
    leader_ip: Option<IpAddr>,
    seen: Option<Observation>,
    /// The last word heard over the link.
    said: Option<Said>,
    /// When a version was last learned by word.
    told: Option<Mono>,
    /// Since when the holder is doubted.
    doubt: Option<Mono>,
    link: Link,
    /// No look before this: the last one failed.
    not_before: Option<Mono>,
    /// A look is due whatever the time.
    look_now: bool,
    gave_up: Option<Mono>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Link {
    /// Not tried yet, or in order.
    Fine,
    Broken {
        /// When it broke, or when a new version was seen after that: a proof is about the writer of what is known, so
        /// only knocks that began later count.
        since: Mono,
        /// Knocks that count are under way, or answered.
        knocking: bool,
        /// When the last of all refusals came in.
        proven: Option<Mono>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Said {
    process: String,
    role: PeerRole,
    etag: Option<ETag>,
}

impl Follower {
    pub fn new(own: Identity, leader_ip: Option<IpAddr>) -> Self {
        Self {
            own,
            leader_ip,
            seen: None,
            said: None,
            told: None,
            doubt: None,
            link: Link::Fine,
            not_before: None,
            look_now: true,
            gave_up: None,
        }
    }

    /// We led and gave it up on purpose at `now`: others go first.
    pub fn gave_up(mut self, now: Mono) -> Self {
        self.gave_up = Some(now);
        self
    }

    pub fn seen(&self) -> Option<&Observation> {
        self.seen.as_ref()
    }

    fn lease(&self) -> Option<&Versioned<LeaseRecord>> {
        self.seen.as_ref()?.lease.as_ref()
    }

    /// Whom to ask, if anybody holds the lease who is not us.
    pub fn holder(&self) -> Option<Holder> {
        let lease = &self.lease()?.value;
        if lease.released || lease.process == self.own.process {
            return None;
        }
        Some(Holder {
            server_id: lease.holder.clone(),
            process: lease.process.clone(),
            addr: lease.addr.clone(),
            health_addr: lease.health_addr.clone(),
            known: self.said.as_ref().map(|it| (it.role, it.etag.clone())),
            provable: lease.direct && !self.is_leader_address(&lease.addr),
        })
    }

    fn is_leader_address(&self, addr: &str) -> bool {
        let host = addr.rsplit_once(':').map_or(addr, |(host, _)| host).trim_matches(['[', ']']);
        self.leader_ip.is_some_and(|ip| host.parse() == Ok(ip))
    }

    /// A read of the lease from `began` to `ended` showed this.
    pub fn looked(&mut self, lease: Option<Versioned<LeaseRecord>>, began: Mono, ended: Mono) {
        let process = |it: Option<&Versioned<LeaseRecord>>| it.map(|it| it.value.process.clone());
        if process(self.lease()) != process(lease.as_ref()) {
            // Another holder: nothing that was said of or by the one before counts.
            self.said = None;
            self.told = None;
            self.link = Link::Fine;
            self.doubt = None;
        }
        self.look_now = false;
        self.not_before = None;
        if self.told.is_some_and(|at| began < at) && self.etag() != lease.as_ref().map(|it| &it.etag) {
            // Which of the two is newer, this or what the holder said while it was under way, only another look tells.
            self.look_now = true;
            return;
        }
        let before = self.etag().cloned();
        self.seen = Some(Observation::after(self.seen.as_ref(), lease, began, ended));
        if before.as_ref() != self.etag() {
            self.renewed(ended);
        }
    }

    /// A read failed; the next not before `again`.
    pub fn look_failed(&mut self, again: Mono) {
        self.not_before = Some(again);
    }

    /// A bid failed: what was seen is no ground for another.
    pub fn bid_failed(&mut self, again: Mono) {
        self.look_now = true;
        self.not_before = Some(again);
    }

    /// The holder gave a sign of life in the store.
    fn renewed(&mut self, now: Mono) {
        if let Link::Broken { .. } = self.link {
            // The link is still broken, but whoever was proven dead is not the one who wrote this.
            self.link = Link::Broken { since: now, knocking: false, proven: None };
        } else if self.doubt.is_some_and(|since| since <= now) {
            self.doubt = None;
        }
    }

    fn etag(&self) -> Option<&ETag> {
        Some(&self.lease()?.etag)
    }

    /// An answer that came in at `now` over the link to `holder`.
    pub fn heard(&mut self, view: &PeerView, now: Mono) {
        let Some(mut lease) = self.lease().cloned() else { return };
        let said = Said { process: view.process.clone(), role: view.role, etag: view.etag.clone() };
        let before = self.said.replace(said);
        let is_holder = view.process == lease.value.process && view.role != PeerRole::Following;
        let Some(etag) = view.etag.clone().filter(|_| is_holder) else {
            // Whoever answers there does not hold what we saw: the store knows better. It is asked once, for such an
            // answer may stay the same until the lease runs out.
            self.look_now |= before != self.said;
            if let Link::Broken { proven: None, .. } = self.link {
                self.link = Link::Fine;
            }
            return;
        };
        self.link = Link::Fine;
        // Only what it did not say before is a sign of life. A holder that does not know that its last put landed goes on
        // naming the version before, while the store shows the last.
        let is_new = before.and_then(|it| it.etag).as_ref() != Some(&etag);
        if is_new && etag != lease.etag {
            lease.etag = etag;
            lease.value.epoch = lease.value.epoch.max(view.epoch);
            lease.value.ttl = view.ttl;
            lease.value.released = view.role == PeerRole::Released;
            self.told = Some(now);
            if let Some(seen) = &mut self.seen {
                seen.first_seen = now;
                seen.lease = Some(lease);
            }
        }
        let is_late = view.renewed_ago.is_none_or(|ago| view.ttl < ago);
        match (is_late, self.doubt) {
            (false, _) => self.doubt = None,
            (true, None) => self.doubts(now),
            (true, Some(_)) => {}
        }
    }

    /// The link broke, was refused or went silent. Answers whether knocking should begin, anew if a version was seen since
    /// it last did.
    pub fn link_broke(&mut self, now: Mono) -> bool {
        if self.doubt.is_none() {
            self.doubts(now);
        }
        let is_known = match self.link {
            Link::Fine => false,
            Link::Broken { knocking: true, .. } => true,
            // A holder that renews and cannot be reached need not be knocked at with each renewal for ever.
            Link::Broken { knocking: false, .. } => self.doubt.is_some_and(|since| PATIENCE <= now.since(since)),
        };
        if !is_known {
            self.link = Link::Broken { since: now, knocking: true, proven: None };
        }
        !is_known
    }

    fn doubts(&mut self, now: Mono) {
        self.doubt = Some(now);
        self.look_now = true;
    }

    /// All knocks that began after the link broke at `began` are answered.
    pub fn knocked(&mut self, process: &str, began: Mono, knocks: &[Knock], now: Mono) {
        let holder = self.holder().is_some_and(|it| it.provable && it.process == process);
        let all = knocks.len() == KNOCKS.len() + 1 && knocks.iter().all(|it| *it == Knock::Refused);
        if let Link::Broken { since, knocking: true, proven } = &mut self.link
            && holder
            && all
            && *since <= began
        {
            *proven = Some(now);
        }
    }

    /// What to do at `now`.
    pub fn wish(&self, now: Mono) -> Wish {
        let Some(seen) = &self.seen else { return self.look(now) };
        let Some(lease) = &seen.lease else {
            return if self.look_now { self.look(now) } else { self.bid(seen, TakeOver::Absent, seen.first_seen, now) };
        };
        // The holder's own word that it let go is durable before it is said: no look is needed.
        if lease.value.released {
            return if self.not_before.is_some() && self.look_now {
                self.look(now)
            } else {
                self.bid(seen, TakeOver::Released, seen.first_seen, now)
            };
        }
        if self.look_now {
            return self.look(now);
        }
        if is_same_host(&lease.value, &self.own) {
            return Wish::Bid { seen: seen.clone(), reason: TakeOver::SameHost };
        }
        if let Link::Broken { proven: Some(proven), .. } = self.link {
            return if proven <= seen.looked_at {
                self.bid(seen, TakeOver::ProofOfDeath, proven, now)
            } else {
                self.look(now)
            };
        }
        let expiry = seen.first_seen + lease.value.ttl;
        // Knowing the version for long is not enough: it must have been *seen* again after its time was over.
        if expiry <= seen.looked_at {
            return self.bid(seen, TakeOver::Expired, expiry, now);
        }
        let next = (seen.looked_at + self.interval(lease.value.ttl, now)).min(expiry);
        if next <= now { self.look(now) } else { Wish::Wait { until: next } }
    }

    fn interval(&self, ttl: Duration, now: Mono) -> Duration {
        match self.doubt {
            None => CALM,
            Some(since) if now.since(since) < PATIENCE => SUSPICIOUS,
            Some(_) => (ttl / 2).max(SUSPICIOUS),
        }
    }

    fn look(&self, now: Mono) -> Wish {
        match self.not_before {
            Some(at) if now < at => Wish::Wait { until: at },
            _ => Wish::Look,
        }
    }

    /// A bid on what is free since `free`, unless we stand back.
    fn bid(&self, seen: &Observation, reason: TakeOver, free: Mono, now: Mono) -> Wish {
        let until = self.gave_up.map(|at| (at + STANDS_BACK).min(free + STAYS_FREE));
        match until {
            Some(until) if now < until => Wish::Wait { until },
            _ => Wish::Bid { seen: seen.clone(), reason },
        }
    }
}

#[cfg(test)]
impl Follower {
    /// All that bears on what this follower will ever do, for a search that must know where it has been. Times that only
    /// count by being set, or by being past, are told as such.
    pub(super) fn fingerprint(&self, now: Mono, into: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        if let Some(seen) = &self.seen {
            (seen.first_seen, seen.looked_at).hash(into);
            super::model::hash_lease(seen.lease.as_ref(), into);
        }
        if let Some(said) = &self.said {
            (&said.process, said.role, &said.etag).hash(into);
        }
        let link = match self.link {
            Link::Fine => None,
            Link::Broken { since, knocking, proven } => Some((since, knocking, proven)),
        };
        (link, self.told, self.doubt.is_some(), self.look_now, self.gave_up).hash(into);
        self.not_before.filter(|at| now < *at).hash(into);
    }
}

#[cfg(test)]
mod tests;
