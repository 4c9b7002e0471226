//! Every metric with its type and the names of its labels, as it stands on the page that Prometheus reads.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use nstance_core::ids::GroupRef;
use nstance_server::{
    metrics::{
        CallLabels, FieldLabels, Metrics, ReasonLabels, StoreLabels,
        hosts::{Machines, Sizes},
    },
    world::Load,
};

use super::hold;

/// `name type label,label`, for every family of a page. A family without a sample does not say its labels.
fn families(page: &str) -> Vec<String> {
    let mut families: BTreeMap<&str, (&str, Option<BTreeSet<&str>>)> = BTreeMap::new();
    for line in page.lines() {
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|it| it.split_once(' ')) {
            families.insert(name, (kind, None));
        }
    }
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap_or_default();
        let of = |suffix: &str| name.strip_suffix(suffix).filter(|it| families.contains_key(it));
        let suffixes = ["", "_total", "_bucket", "_count", "_sum"];
        let family = suffixes.into_iter().find_map(of).unwrap_or_else(|| panic!("a sample of no family: {line}"));
        let labels = line.split_once('{').and_then(|(_, rest)| rest.rsplit_once('}')).map_or("", |(labels, _)| labels);
        // No value of these samples has a comma or an equals sign in it.
        let names = labels.split(',').filter_map(|it| it.split_once('=')).map(|(name, _)| name);
        let known = &mut families.get_mut(family).expect("found above").1;
        known.get_or_insert_default().extend(names.filter(|it| *it != "le"));
    }
    let line = |(name, (kind, labels)): (&str, (&str, Option<BTreeSet<&str>>))| {
        let labels = labels.unwrap_or_else(|| panic!("{name} has no sample: give it one here"));
        let labels: Vec<_> = labels.into_iter().collect();
        format!("{name} {kind} {{{}}}", labels.join(","))
    };
    families.into_iter().map(line).collect()
}

/// One group with one machine of which everything is known.
struct OneMachine;

impl OneMachine {
    fn group() -> GroupRef {
        GroupRef::new("default".parse().unwrap(), "web".parse().unwrap())
    }
}

impl Machines for OneMachine {
    fn loads(&self) -> Vec<(GroupRef, Load)> {
        let some = Some(0.5);
        let load = Load { cpu: some, memory: some, disk: some, sent: some, received: some, read: some, written: some };
        vec![(Self::group(), load)]
    }

    fn sizes(&self) -> Vec<(GroupRef, Sizes)> {
        vec![(Self::group(), Sizes { desired: Some(1), actual: 1, ready: 1 })]
    }
}

#[test]
fn of_the_server() {
    let metrics = Metrics::new();
    let machine: Arc<dyn Machines> = Arc::new(OneMachine);
    metrics.hosts.read_from(Arc::downgrade(&machine));
    metrics.provider_seconds.get_or_create(&CallLabels { provider: "p", op: "o", class: "c" }).observe(1.0);
    metrics.registration_rejected.get_or_create(&ReasonLabels { reason: "r" }).inc();
    metrics.report_fields_cut.get_or_create(&FieldLabels { field: "f" }).inc();
    metrics.events.get_or_create(&ReasonLabels { reason: "r" }).inc();
    metrics.store_requests.get_or_create(&StoreLabels { op: "o", outcome: "c" }).inc();
    hold("metrics-server", families(&metrics.text()));
}

#[test]
fn of_the_operator() {
    hold("metrics-operator", families(&nstance_operator::metrics::example_metrics()));
}

#[test]
fn of_the_agent() {
    hold("metrics-agent", families(&nstance_agent::local::example_metrics()));
}

#[test]
fn of_the_admin_server() {
    hold("metrics-admin", families(&nstance_admin::serve::example_metrics()));
}
