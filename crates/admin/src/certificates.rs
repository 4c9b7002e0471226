//! Every certificate that was ever issued, from the log, and what became of it, from the records and the CA bundle.

use std::collections::{BTreeMap, BTreeSet};

use nstance_core::{
    instance::{CertPair, Instance, Phase},
    ports::objects::StoreError,
    time::Timestamp,
};
use nstance_store::records::{
    certlog::{CertlogRecord, LoggedCertificate},
    operator::OperatorRecord,
    parse_instance_key,
};

use crate::storage::Cluster;

/// What a certificate is worth now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    Valid,
    /// Still passes until its successor is used.
    Previous,
    /// A newer one took its place.
    Superseded,
    Revoked,
    /// Its holder is gone.
    Ended,
    Expired,
}

impl State {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Valid => "valid",
            Self::Previous => "previous",
            Self::Superseded => "superseded",
            Self::Revoked => "revoked",
            Self::Ended => "ended",
            Self::Expired => "expired",
        }
    }

    /// Whether somebody who shows it may still be let in.
    pub fn is_live(self) -> bool {
        matches!(self, Self::Valid | Self::Previous)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    pub logged: LoggedCertificate,
    /// Id of an instance, an operator, a server; the fingerprint of a CA.
    pub subject_id: String,
    /// The shard that issued it; none if the admin tool or a first server did.
    pub shard: Option<String>,
    pub tenant: Option<String>,
    pub issued_at: Timestamp,
    pub state: State,
}

impl Certificate {
    /// `ca`, `server`, `agent`, `operator`; or `file`.
    pub fn kind(&self) -> &str {
        &self.logged.role
    }
}

/// All certificates, the youngest last; and what could not be read.
#[derive(Debug, Default)]
pub struct Certificates {
    pub all: Vec<Certificate>,
    pub problems: Vec<String>,
}

/// What the records say of those who hold certificates.
#[derive(Default)]
struct Holders {
    agents: BTreeMap<String, Holder>,
    operators: BTreeMap<String, Holder>,
    trusted: BTreeSet<String>,
}

struct Holder {
    pair: Option<CertPair>,
    ended: Option<State>,
}

pub async fn read(cluster: &Cluster) -> Result<Certificates, StoreError> {
    let mut problems = Vec::new();
    let mut holders = Holders::default();
    let instances = cluster.all::<Instance>("shard/", |key| parse_instance_key(key).is_some());
    let (instances, operators, shards, own, ca) = tokio::try_join!(
        instances,
        cluster.operators(),
        cluster.log("shard/"),
        cluster.log("cluster/certlog/"),
        cluster.get("cluster/ca.crt"),
    )?;
    for read in instances {
        match read {
            Ok(it) => {
                let it = it.value;
                let gone = matches!(it.phase(), Phase::Deleted | Phase::Failed);
                let holder = Holder { ended: gone.then_some(State::Ended), pair: it.cert.clone() };
                holders.agents.insert(it.id.to_string(), holder);
            }
            Err(problem) => problems.push(problem),
        }
    }
    for read in operators {
        match read {
            Ok(it) => {
                let OperatorRecord { operator_id, cert, revoked, .. } = it.value;
                let holder = Holder { ended: revoked.map(|_| State::Revoked), pair: Some(cert) };
                holders.operators.insert(operator_id.to_string(), holder);
            }
            Err(problem) => problems.push(problem),
        }
    }
    if let Some(bundle) = ca.and_then(|it| nstance_identity::ca::Bundle::parse(&it.body).ok()) {
        holders.trusted = bundle.certificates().iter().map(|it| it.fingerprint.clone()).collect();
    }
    let mut entries = Vec::new();
    for read in shards.into_iter().chain(own) {
        match read {
            Ok(entry) => entries.push(entry),
            Err(problem) => problems.push(problem),
        }
    }
    Ok(Certificates { all: judge(entries, &holders, cluster.clock.now()), problems })
}

fn judge(mut entries: Vec<CertlogRecord>, holders: &Holders, now: Timestamp) -> Vec<Certificate> {
    entries.sort_by_key(|entry| entry.issued_at);
    let mut newest: BTreeMap<(String, String), String> = BTreeMap::new();
    for entry in &entries {
        for it in &entry.certificates {
            newest.insert((entry.subject_id.clone(), it.name.clone()), it.serial.clone());
        }
    }
    let mut all = Vec::new();
    for entry in entries {
        for logged in entry.certificates {
            let last = newest.get(&(entry.subject_id.clone(), logged.name.clone())) == Some(&logged.serial);
            let state = holders.state(&entry.subject_id, &logged, last);
            let state = if state.is_live() && logged.not_after <= now { State::Expired } else { state };
            all.push(Certificate {
                subject_id: entry.subject_id.clone(),
                shard: entry.shard.as_ref().map(ToString::to_string),
                tenant: entry.tenant.as_ref().map(ToString::to_string),
                issued_at: entry.issued_at,
                state,
                logged,
            });
        }
    }
    all
}

impl Holders {
    fn state(&self, subject: &str, logged: &LoggedCertificate, last: bool) -> State {
        let by_order = if last { State::Valid } else { State::Superseded };
        let by_record = |holder: Option<&Holder>| {
            let Some(holder) = holder else { return State::Ended };
            if let Some(ended) = holder.ended {
                return ended;
            }
            match &holder.pair {
                Some(pair) if pair.current.serial == logged.serial => State::Valid,
                Some(pair) if pair.previous.as_ref().is_some_and(|it| it.serial == logged.serial) => State::Previous,
                // Logged and not committed, or replaced since.
                _ => State::Superseded,
            }
        };
        match logged.role.as_str() {
            "agent" => by_record(self.agents.get(subject)),
            "operator" => by_record(self.operators.get(subject)),
            "ca" if self.trusted.contains(&logged.issuer) => by_order,
            "ca" => State::Ended,
            "server" => by_order,
            // A file's certificate is worth something for as long as its machine is there.
            _ => match self.agents.get(subject) {
                Some(holder) if holder.ended.is_none() => by_order,
                _ => State::Ended,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use nstance_core::instance::CertFact;

    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_millis(seconds * 1000)
    }

    fn entry(subject: &str, role: &str, serial: &str, issued: i64) -> CertlogRecord {
        let logged = LoggedCertificate {
            name: role.to_owned(),
            role: role.to_owned(),
            serial: serial.to_owned(),
            subject: format!("CN={subject}"),
            sans: Vec::new(),
            not_before: at(issued),
            not_after: at(issued + 1000),
            sha256: String::new(),
            issuer: "aa".to_owned(),
        };
        CertlogRecord {
            cluster: "demo".parse().unwrap(),
            shard: None,
            tenant: None,
            subject_id: subject.to_owned(),
            issued_at: at(issued),
            certificates: vec![logged],
        }
    }

    fn pair(current: &str, previous: Option<&str>) -> CertPair {
        let fact = |serial: &str| CertFact {
            serial: serial.to_owned(),
            issuer: "aa".to_owned(),
            not_before: at(0),
            not_after: at(9000),
        };
        CertPair { current: fact(current), previous: previous.map(fact) }
    }

    fn states(now: i64, holders: &Holders) -> BTreeMap<String, State> {
        let entries = vec![
            entry("opr1", "operator", "o3", 30),
            entry("opr1", "operator", "o1", 10),
            entry("opr1", "operator", "o2", 20),
            entry("opr2", "operator", "r1", 10),
            entry("i1", "agent", "a1", 10),
            entry("i1", "demo.crt", "f1", 10),
            entry("i1", "demo.crt", "f2", 20),
            entry("gone", "demo.crt", "g1", 10),
            entry("s1", "server", "s1", 10),
            entry("aa", "ca", "c1", 5),
        ];
        judge(entries, holders, at(now)).into_iter().map(|it| (it.logged.serial.clone(), it.state)).collect()
    }

    #[test]
    fn state_of_a_certificate_is_that_of_its_holder() {
        let mut holders = Holders { trusted: ["aa".to_owned()].into(), ..Holders::default() };
        let holder = |current, previous, ended| Holder { pair: Some(pair(current, previous)), ended };
        holders.operators.insert("opr1".into(), holder("o3", Some("o2"), None));
        holders.operators.insert("opr2".into(), holder("r1", None, Some(State::Revoked)));
        holders.agents.insert("i1".into(), holder("a1", None, None));
        let now = states(100, &holders);
        let expected = [
            ("o1", State::Superseded),
            ("o2", State::Previous),
            ("o3", State::Valid),
            ("r1", State::Revoked),
            ("a1", State::Valid),
            ("f1", State::Superseded),
            ("f2", State::Valid),
            ("g1", State::Ended),
            ("s1", State::Valid),
            ("c1", State::Valid),
        ];
        assert_eq!(now, expected.map(|(serial, state)| (serial.to_owned(), state)).into());
        let later = states(5000, &holders);
        assert_eq!((later["o3"], later["f2"], later["r1"]), (State::Expired, State::Expired, State::Revoked));
    }
}
