//! Who holds which certificate, in the whole cluster: from the records of all shards, of operators, and from the log.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt as _, TryStreamExt as _};
use nstance_core::{
    ids::InstanceId,
    instance::{CertFact, CertPair, Instance, Phase},
    ports::objects::{Object, ObjectStore, StoreError},
    time::Timestamp,
};
use nstance_identity::issue::BACKDATING;
use nstance_store::records::{
    self,
    certlog::{CertlogRecord, LoggedCertificate},
    operator::OperatorRecord,
    parse_instance_key, parse_operator_key,
};

/// Objects read beside each other.
const READS: usize = 32;

#[derive(Default)]
pub(super) struct Census {
    agents: BTreeMap<String, CertPair>,
    operators: BTreeMap<String, CertPair>,
    /// Instances that stand, also those of whose certificate nothing is known: adopted, and not heard since.
    standing: BTreeSet<String>,
    /// The last certificate of each subject and name in the log, but for CAs' and those of whom is gone.
    logged: BTreeMap<(String, String), LoggedCertificate>,
    /// Fingerprints of all CAs that the log tells of.
    issuers: BTreeSet<String>,
    /// What could not be read may be of anybody.
    unreadable: Vec<String>,
}

impl Census {
    pub(super) async fn read(store: &dyn ObjectStore) -> Result<Self, StoreError> {
        let mut census = Self::default();
        let mut gone = BTreeSet::new();
        let mut log: Vec<CertlogRecord> = Vec::new();
        for prefix in ["shard/", "cluster/"] {
            let keys = store.list(prefix).await?.into_iter().map(|listed| listed.key).filter(|key| is_told_of(key));
            let mut objects = futures::stream::iter(keys)
                .map(|key| async move {
                    match store.get(&key).await {
                        Ok(object) => Ok(Some((key, object))),
                        // Deleted since the listing.
                        Err(error) if error.is_not_found() => Ok(None),
                        Err(error) => Err(error),
                    }
                })
                .buffered(READS);
            while let Some(read) = objects.try_next().await? {
                if let Some((key, object)) = read
                    && !census.take(&key, object, &mut gone, &mut log)
                {
                    census.unreadable.push(format!("record {key} cannot be read"));
                }
            }
        }
        log.sort_by_key(|entry| entry.issued_at);
        for entry in log {
            census.issuers.extend(entry.certificates.iter().map(|it| it.issuer.clone()));
            let is_instance = entry.subject_id.parse::<InstanceId>().is_ok();
            // What an instance held went with its VM, and an operator's ends with its record.
            let is_gone = gone.contains(&entry.subject_id)
                || (is_instance && !census.standing.contains(&entry.subject_id))
                || (entry.subject_id.starts_with("opr") && !census.operators.contains_key(&entry.subject_id));
            if is_gone {
                continue;
            }
            for certificate in entry.certificates.into_iter().filter(|it| it.role != "ca") {
                census.logged.insert((entry.subject_id.clone(), certificate.name.clone()), certificate);
            }
        }
        Ok(census)
    }

    /// Takes one object in. Answers whether it could be read.
    fn take(&mut self, key: &str, object: Object, gone: &mut BTreeSet<String>, log: &mut Vec<CertlogRecord>) -> bool {
        if parse_instance_key(key).is_some() {
            let Ok(record) = records::decode_object::<Instance>(key, object) else { return false };
            let it = record.value;
            if matches!(it.phase(), Phase::Deleted | Phase::Failed) {
                gone.insert(it.id.to_string());
            } else {
                self.standing.insert(it.id.to_string());
                self.agents.extend(it.cert.map(|cert| (it.id.to_string(), cert)));
            }
            return true;
        }
        if parse_operator_key(key).is_some() {
            let Ok(record) = records::decode_object::<OperatorRecord>(key, object) else { return false };
            let it = record.value;
            if it.revoked.is_some() {
                gone.insert(it.operator_id.to_string());
            } else {
                self.operators.insert(it.operator_id.to_string(), it.cert);
            }
            return true;
        }
        match records::decode_object::<CertlogRecord>(key, object) {
            Ok(record) => {
                log.push(record.value);
                true
            }
            Err(_) => false,
        }
    }

    pub(super) fn issuers(&self) -> &BTreeSet<String> {
        &self.issuers
    }

    pub(super) fn n_agents(&self) -> usize {
        self.agents.len()
    }

    pub(super) fn n_operators(&self) -> usize {
        self.operators.len()
    }

    fn holders(&self) -> impl Iterator<Item = (&'static str, &String, &CertPair)> {
        let agents = self.agents.iter().map(|(id, cert)| ("agent", id, cert));
        agents.chain(self.operators.iter().map(|(id, cert)| ("operator", id, cert)))
    }

    /// Who has had no certificate since then, and with it no bundle.
    pub(super) fn without_bundle(&self, since: Timestamp, now: Timestamp) -> Vec<String> {
        let late = |(kind, id, cert): (&str, &String, &CertPair)| {
            let issued = |it: &CertFact| Some(it.not_before.plus(BACKDATING)).filter(|at| *at < since);
            let unused = || unused(cert, now).and_then(issued).map(|at| (at, ", for it has not used its new one yet,"));
            let (issued, why) = issued(&cert.current).map(|at| (at, "")).or_else(unused)?;
            Some(format!("{kind} {id} has a certificate of {issued}{why} and may not know the new CA"))
        };
        self.holders().filter_map(late).chain(self.unreadable.clone()).collect()
    }

    /// Who holds something by this CA that is valid and was not issued again since.
    pub(super) fn issued_by(&self, issuer: &str, now: Timestamp) -> Vec<String> {
        let mut found = BTreeSet::new();
        for (kind, id, cert) in self.holders() {
            if cert.current.issuer == issuer {
                found.insert(format!("{kind} {id} has a certificate by the old CA until {}", cert.current.not_after));
            } else if let Some(before) = unused(cert, now).filter(|it| it.issuer == issuer) {
                let why = "has not used its new certificate yet; the one before is by the old CA until";
                found.insert(format!("{kind} {id} {why} {}", before.not_after));
            }
        }
        for ((subject, _), it) in self.logged.iter().filter(|(_, it)| it.issuer == issuer && now < it.not_after) {
            // Their records were asked already, and know better.
            if it.role != "agent" && it.role != "operator" {
                found.insert(format!("{} {} of {subject} is by the old CA until {}", it.role, it.name, it.not_after));
            }
        }
        found.into_iter().chain(self.unreadable.clone()).collect()
    }

    pub(super) fn by_issuer(&self, now: Timestamp) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        let others = self.logged.values().filter(|it| it.role != "agent" && it.role != "operator");
        let issuers = self
            .holders()
            .flat_map(|(_, _, cert)| {
                let before = unused(cert, now).map(|it| &it.issuer).filter(|it| **it != cert.current.issuer);
                std::iter::once(&cert.current.issuer).chain(before)
            })
            .chain(others.filter(|it| now < it.not_after).map(|it| &it.issuer));
        for issuer in issuers {
            *counts.entry(issuer.clone()).or_default() += 1;
        }
        counts
    }
}

/// The certificate before, while nobody has seen the new one: its answer may have been lost on the way.
fn unused(cert: &CertPair, now: Timestamp) -> Option<&CertFact> {
    cert.previous.as_ref().filter(|it| now < it.not_after)
}

fn is_told_of(key: &str) -> bool {
    key.contains("/instance/") || key.starts_with("cluster/operator/") || key.contains("/certlog/")
}
