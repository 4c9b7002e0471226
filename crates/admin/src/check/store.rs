//! Is the store there, and does it keep its word? The same questions as a server asks at its start, one line each, and
//! those that need several writers.

use nstance_rt::chain::Chain;
use nstance_store::qualify::{QualifyError, STEPS, qualify_at, race, recognise};

use super::Section;
use crate::storage::Cluster;

const PROBES: &str = "cluster/.probe/";

pub(crate) fn probe_key(random: &str) -> String {
    format!("{PROBES}admin.{random}")
}

pub async fn check(mut section: Section<'_>, cluster: &Cluster) {
    let (store, entropy) = (cluster.store.as_ref(), cluster.entropy.as_ref());
    let shown = store.describe();
    if let Err(error) = store.list(PROBES).await {
        let fix =
            "check --storage-bucket, the AWS_ variables (credentials, AWS_ENDPOINT_URL) and the bucket's permissions";
        section.fail("reachable", format!("{shown}: {}", Chain(&error)), fix);
        STEPS.iter().chain(&REST).for_each(|name| section.skip(name, "the store is not reachable"));
        return;
    }
    section.ok("reachable", shown);
    match qualify_at(store, probe_key, entropy).await {
        Ok(()) => STEPS.iter().for_each(|name| section.ok(name, "")),
        Err(error) => {
            for (step, name) in (1..).zip(STEPS) {
                if step < error.step() {
                    section.ok(name, "");
                } else if step == error.step() {
                    told(&mut section, name, &error);
                } else {
                    section.skip(name, format!("{} failed", STEPS[usize::from(error.step()) - 1]));
                }
            }
            REST.iter().for_each(|name| section.skip(name, "the store does not keep its word"));
            return;
        }
    }
    match recognise(store, probe_key, entropy).await {
        Ok(()) => section.ok(REST[0], "a repeated create finds its own write"),
        Err(error) => told(&mut section, REST[0], &error),
    }
    match race(store, probe_key, entropy).await {
        Ok(()) => section.ok(REST[1], "exactly one wins"),
        Err(error) => told(&mut section, REST[1], &error),
    }
    match store.list(PROBES).await {
        Ok(left) if left.is_empty() => section.ok(REST[2], ""),
        Ok(left) => {
            let keys: Vec<&str> = left.iter().map(|it| it.key.as_str()).collect();
            let detail =
                format!("{} probes are left, of this check or another that runs: {}", keys.len(), keys.join(", "));
            section.warn(REST[2], detail, "delete them once no other check runs");
        }
        Err(error) => section.fail(REST[2], Chain(&error).to_string(), "repeat the check"),
    }
}

/// What is asked after the steps of a start.
const REST: [&str; 3] = ["retried-create", "racing-writers", "clean-up"];

fn told(section: &mut Section<'_>, name: &str, error: &QualifyError) {
    match error {
        QualifyError::Unsafe { finding, .. } => {
            let fix = "upgrade the store, or use another: leaders rest on conditional writes (docs: object stores)";
            section.fail(name, *finding, fix);
        }
        QualifyError::Unreachable { source, .. } => {
            section.fail(
                name,
                Chain(source).to_string(),
                "check permissions to read, write, list and delete below cluster/",
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nstance_rt::{clock::SystemClock, entropy::SeededEntropy};
    use nstance_store::{
        faulty::{Fault, FaultPlan, FaultyStore},
        memory::MemoryStore,
    };

    use super::*;
    use crate::check::{Group, Sheet, Verdict};

    async fn lines(faults: Vec<Fault>) -> Vec<(String, Verdict)> {
        let entropy = Arc::new(SeededEntropy::new(3));
        let store = Arc::new(FaultyStore::new(Arc::new(MemoryStore::new()), entropy.clone(), FaultPlan::default()));
        store.script_puts(faults);
        let cluster = Cluster::new(store, Arc::new(SystemClock), entropy);
        let mut sheet = Sheet::default();
        check(sheet.of(Group::Store), &cluster).await;
        sheet.lines.into_iter().map(|it| (it.name, it.verdict)).collect()
    }

    #[tokio::test]
    async fn an_honest_store_passes_every_line() {
        let lines = lines(Vec::new()).await;
        assert_eq!(lines.len(), 12);
        assert!(lines.iter().all(|(_, verdict)| *verdict == Verdict::Ok), "{lines:?}");
    }

    #[tokio::test]
    async fn a_broken_rule_fails_its_line_and_skips_the_rest() {
        // The third put is the update.
        let lines = lines(vec![Fault::None, Fault::None, Fault::Denied]).await;
        let verdicts: Vec<Verdict> = lines.iter().map(|(_, verdict)| *verdict).collect();
        assert_eq!(verdicts[..4], [Verdict::Ok, Verdict::Ok, Verdict::Ok, Verdict::Fail], "{lines:?}");
        assert_eq!(lines[3].0, "update");
        assert!(verdicts[4..].iter().all(|it| *it == Verdict::Skip), "{lines:?}");
    }
}
