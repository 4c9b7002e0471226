//! Who we are to the servers: files, key, certificate, and the record that makes it good.

use std::path::Path;

use nstance_core::time::Timestamp;
use nstance_identity::peer::PeerName;
use nstance_rt::chain::Chain;

use super::Section;
use crate::{identity_files::IdentityFiles, storage::Cluster};

const REGISTER: &str = "nstance-admin cluster register-operator";

pub async fn check(mut section: Section<'_>, cluster: &Cluster, dir: &Path) {
    let identity = match IdentityFiles::new(dir.to_owned()).load() {
        Ok(identity) => identity,
        Err(failure) => {
            section.fail("files", failure.lines(false)[0].trim_start_matches("error: "), REGISTER);
            ["valid", "trusted", "record"].iter().for_each(|name| section.skip(name, "there is no usable identity"));
            return;
        }
    };
    let peer = identity.peer();
    section.ok("files", format!("{} in {}; key and certificate fit", peer.common_name(), dir.display()));
    life(&mut section, peer.not_before, peer.not_after, cluster.clock.now());
    match cluster.bundle().await {
        Err(failure) => section.skip("trusted", failure.to_string()),
        Ok(bundle) => match identity.is_issued_by(&bundle) {
            true => section.ok("trusted", ""),
            false => section.fail("trusted", "it is by none of the CAs in cluster/ca.crt", REGISTER),
        },
    }
    let PeerName::Operator { operator, tenant } = &peer.name else { return };
    match cluster.records().read_operator(tenant, operator).await {
        Ok(None) => section.fail("record", format!("operator {operator} has no record in this cluster"), REGISTER),
        Ok(Some(record)) => {
            let (record, cert) = (&record.value, &record.value.cert);
            let known =
                cert.current.serial == peer.serial || cert.previous.as_ref().is_some_and(|it| it.serial == peer.serial);
            match &record.revoked {
                Some(it) => section.fail("record", format!("revoked at {}: {}", it.at, it.reason), REGISTER),
                None if !known => section.fail("record", "the record names another certificate", REGISTER),
                None => section.ok("record", format!("operator {operator} of tenant {tenant}")),
            }
        }
        Err(error) => section.skip("record", Chain(&error).to_string()),
    }
}

fn life(section: &mut Section<'_>, from: Timestamp, until: Timestamp, now: Timestamp) {
    if until <= now {
        section.fail("valid", format!("it expired at {until}"), REGISTER);
    } else if until.since(now) < until.since(from) / 3 {
        let detail = format!("less than a third of its life is left: until {until}");
        section.warn(
            "valid",
            detail,
            "any command that reaches a shard renews it; else nstance-admin cluster register-operator",
        );
    } else {
        section.ok("valid", format!("until {until}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Group, Sheet, Verdict};

    #[test]
    fn a_certificate_is_warned_of_in_the_last_third_of_its_life() {
        let at = |seconds: i64| Timestamp::from_millis(seconds * 1000);
        for (now, verdict) in [(100, Verdict::Ok), (200, Verdict::Ok), (201, Verdict::Warn), (300, Verdict::Fail)] {
            let mut sheet = Sheet::default();
            life(&mut sheet.of(Group::Identity), at(0), at(300), at(now));
            assert_eq!(sheet.lines[0].verdict, verdict, "{now}");
        }
    }
}
