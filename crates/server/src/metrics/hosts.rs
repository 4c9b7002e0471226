//! Figures of groups and their machines: computed when somebody asks, from what whoever leads knows at that moment. With
//! a group its figures go, and all with the term.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Mutex, PoisonError, Weak},
};

use nstance_core::ids::GroupRef;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet},
    metrics::MetricType,
};

use super::{GroupLabels, Metrics};
use crate::world::Load;

/// Whoever knows the machines at present.
pub trait Machines: Send + Sync {
    /// The figures of every machine that spoke lately.
    fn loads(&self) -> Vec<(GroupRef, Load)>;
    /// The sizes of every group that is asked for, or not gone yet.
    fn sizes(&self) -> Vec<(GroupRef, Sizes)>;
}

/// How large a group is, and shall be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Nothing while nobody knows.
    pub desired: Option<u32>,
    pub actual: u32,
    pub ready: u32,
}

/// The way from a scrape to whoever leads. Nobody is held by it: with a term its figures go.
#[derive(Default)]
pub struct Hosts {
    machines: Mutex<Option<Weak<dyn Machines>>>,
}

impl Hosts {
    pub fn read_from(&self, machines: Weak<dyn Machines>) {
        *self.machines.lock().unwrap_or_else(PoisonError::into_inner) = Some(machines);
    }
}

impl fmt::Debug for Hosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hosts").finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ShareLabels {
    tenant: String,
    group: String,
    stat: &'static str,
}

/// Mean and maximum of a share, over those who told it.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct Share {
    n: u32,
    sum: f64,
    max: f64,
}

impl Share {
    fn add(&mut self, value: Option<f64>) {
        if let Some(value) = value {
            self.n += 1;
            self.sum += value;
            self.max = self.max.max(value);
        }
    }

    fn mean(&self) -> f64 {
        self.sum / f64::from(self.n)
    }
}

/// The figures of one group.
#[derive(Debug, Default, Clone, PartialEq)]
struct GroupLoad {
    n: u32,
    shares: [Share; SHARES.len()],
    rates: [f64; RATES.len()],
}

/// Name, help, and which figure of a machine it is of.
type Figure = (&'static str, &'static str, fn(&Load) -> Option<f64>);

const SHARES: [Figure; 3] = [
    ("group_cpu_usage_ratio", "Use of the processors of a group's machines in the last minute", |it| it.cpu),
    ("group_memory_usage_ratio", "Use of the memory of a group's machines", |it| it.memory),
    ("group_disk_usage_ratio", "Use of the root disks of a group's machines", |it| it.disk),
];

/// The same for a group.
type Size = (&'static str, &'static str, fn(&Sizes) -> Option<u32>);

const SIZES: [Size; 3] = [
    ("group_desired", "Wanted size of a group", |it| it.desired),
    ("group_actual", "Members of a group", |it| Some(it.actual)),
    ("group_ready", "Ready members of a group", |it| Some(it.ready)),
];

const RATES: [Figure; 4] = [
    ("group_network_sent_bytes_per_second", "Bytes sent by all machines of a group", |it| it.sent),
    ("group_network_received_bytes_per_second", "Bytes received by all machines of a group", |it| it.received),
    ("group_disk_read_bytes_per_second", "Bytes read from disks by all machines of a group", |it| it.read),
    ("group_disk_written_bytes_per_second", "Bytes written to disks by all machines of a group", |it| it.written),
];

fn by_group(loads: Vec<(GroupRef, Load)>) -> BTreeMap<GroupRef, GroupLoad> {
    let mut groups: BTreeMap<GroupRef, GroupLoad> = BTreeMap::new();
    for (group, load) in loads {
        let it = groups.entry(group).or_default();
        it.n += 1;
        for (share, (_, _, of)) in it.shares.iter_mut().zip(&SHARES) {
            share.add(of(&load));
        }
        for (rate, (_, _, of)) in it.rates.iter_mut().zip(&RATES) {
            *rate += of(&load).unwrap_or(0.0);
        }
    }
    groups
}

impl Collector for Hosts {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let machines = self.machines.lock().unwrap_or_else(PoisonError::into_inner).as_ref().and_then(Weak::upgrade);
        let sizes = machines.as_ref().map(|it| it.sizes()).unwrap_or_default();
        for (name, help, of) in &SIZES {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (group, sizes) in &sizes {
                if let Some(size) = of(sizes) {
                    family.encode_family(&Metrics::group(group))?.encode_gauge(&size)?;
                }
            }
        }
        let groups = by_group(machines.map(|it| it.loads()).unwrap_or_default());
        let labelled: Vec<(GroupLabels, GroupLoad)> =
            groups.into_iter().map(|(group, load)| (Metrics::group(&group), load)).collect();
        let help = "Machines of a group whose figures are counted";
        let mut family = encoder.encode_descriptor("group_machines_reporting", help, None, MetricType::Gauge)?;
        for (labels, load) in &labelled {
            family.encode_family(labels)?.encode_gauge(&load.n)?;
        }
        for (at, (name, help, _)) in SHARES.iter().enumerate() {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (GroupLabels { tenant, group }, load) in &labelled {
                let share = load.shares[at];
                // A figure that nobody told is missing and not zero.
                if share.n == 0 {
                    continue;
                }
                for (stat, value) in [("mean", share.mean()), ("max", share.max)] {
                    let labels = ShareLabels { tenant: tenant.clone(), group: group.clone(), stat };
                    family.encode_family(&labels)?.encode_gauge(&value)?;
                }
            }
        }
        for (at, (name, help, _)) in RATES.iter().enumerate() {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (labels, load) in &labelled {
                family.encode_family(labels)?.encode_gauge(&load.rates[at])?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    struct Two;

    impl Machines for Two {
        fn loads(&self) -> Vec<(GroupRef, Load)> {
            let group = GroupRef { tenant: "default".parse().unwrap(), group: "web".parse().unwrap() };
            let busy = Load { cpu: Some(0.75), memory: Some(0.5), sent: Some(100.0), ..Load::default() };
            let idle = Load { cpu: Some(0.25), sent: Some(20.0), ..Load::default() };
            vec![(group.clone(), busy), (group, idle)]
        }

        fn sizes(&self) -> Vec<(GroupRef, Sizes)> {
            let group = |name: &str| GroupRef { tenant: "default".parse().unwrap(), group: name.parse().unwrap() };
            let web = Sizes { desired: Some(3), actual: 2, ready: 1 };
            vec![(group("web"), web), (group("lost"), Sizes { desired: None, ..web })]
        }
    }

    #[test]
    fn figures_are_of_groups_and_of_whoever_leads() {
        let metrics = Metrics::new();
        let two: Arc<dyn Machines> = Arc::new(Two);
        metrics.hosts.read_from(Arc::downgrade(&two));
        let text = metrics.text();
        for line in [
            r#"nstance_group_cpu_usage_ratio{tenant="default",group="web",stat="mean"} 0.5"#,
            r#"nstance_group_cpu_usage_ratio{tenant="default",group="web",stat="max"} 0.75"#,
            // Only one of them told its memory.
            r#"nstance_group_memory_usage_ratio{tenant="default",group="web",stat="mean"} 0.5"#,
            r#"nstance_group_network_sent_bytes_per_second{tenant="default",group="web"} 120.0"#,
            r#"nstance_group_machines_reporting{tenant="default",group="web"} 2"#,
            r#"nstance_group_desired{tenant="default",group="web"} 3"#,
            r#"nstance_group_actual{tenant="default",group="web"} 2"#,
            r#"nstance_group_ready{tenant="default",group="web"} 1"#,
            r#"nstance_group_ready{tenant="default",group="lost"} 1"#,
        ] {
            assert!(text.lines().any(|it| it == line), "{line} is missing from {text}");
        }
        assert!(!text.contains("nstance_group_disk_usage_ratio{"), "nobody told it");
        assert!(!text.contains(r#"nstance_group_desired{tenant="default",group="lost"}"#), "nobody knows it");
        drop(two);
        assert!(!metrics.text().contains(r#"group="web""#), "who leads no more has no figures");
    }
}
