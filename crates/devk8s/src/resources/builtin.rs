//! The resources that are there without a definition.

use super::{Column, Resource, ScalePaths, Version};

#[derive(Clone, Copy, PartialEq)]
enum Scope {
    Cluster,
    Namespaced,
}
use Scope::{Cluster, Namespaced};

/// Which subresources a kind has.
#[derive(Clone, Copy, PartialEq)]
enum Parts {
    Plain,
    Status,
    StatusAndScale,
}
use Parts::{Plain, Status, StatusAndScale};

/// plural, kind, short names, scope, subresources
type Row = (&'static str, &'static str, &'static [&'static str], Scope, Parts);

const CORE: &[Row] = &[
    ("namespaces", "Namespace", &["ns"], Cluster, Status),
    ("secrets", "Secret", &[], Namespaced, Plain),
    ("configmaps", "ConfigMap", &["cm"], Namespaced, Plain),
    ("nodes", "Node", &["no"], Cluster, Status),
    ("pods", "Pod", &["po"], Namespaced, Status),
    ("events", "Event", &["ev"], Namespaced, Plain),
    ("serviceaccounts", "ServiceAccount", &["sa"], Namespaced, Plain),
];
const APPS: &[Row] = &[("daemonsets", "DaemonSet", &["ds"], Namespaced, Status)];
const POLICY: &[Row] = &[("poddisruptionbudgets", "PodDisruptionBudget", &["pdb"], Namespaced, Status)];
const COORDINATION: &[Row] = &[("leases", "Lease", &[], Namespaced, Plain)];
const STORAGE: &[Row] = &[("volumeattachments", "VolumeAttachment", &[], Cluster, Status)];
const EXTENSIONS: &[Row] =
    &[("customresourcedefinitions", "CustomResourceDefinition", &["crd", "crds"], Cluster, Status)];
const CLUSTER_API: &[Row] = &[
    ("clusters", "Cluster", &["cl"], Namespaced, Status),
    ("machinepools", "MachinePool", &["mp"], Namespaced, StatusAndScale),
    ("machines", "Machine", &["ma"], Namespaced, Status),
    ("machinesets", "MachineSet", &["ms"], Namespaced, StatusAndScale),
    ("machinedeployments", "MachineDeployment", &["md"], Namespaced, StatusAndScale),
    ("machinehealthchecks", "MachineHealthCheck", &["mhc", "mhcs"], Namespaced, Status),
    ("machinedrainrules", "MachineDrainRule", &[], Namespaced, Plain),
];
const OURS: &[Row] = &[
    ("nstanceclusters", "NstanceCluster", &["ncl"], Namespaced, Status),
    ("nstancemachinepools", "NstanceMachinePool", &["nmp"], Namespaced, Status),
    ("nstanceshardgroups", "NstanceShardGroup", &["nsg"], Namespaced, Status),
    ("nstancemachines", "NstanceMachine", &["nm"], Namespaced, Status),
    ("nstancemachinetemplates", "NstanceMachineTemplate", &["nmt"], Namespaced, Status),
];

struct Group {
    name: &'static str,
    version: &'static str,
    rows: &'static [Row],
    category: Option<&'static str>,
    origin: Origin,
}

const fn group(
    name: &'static str,
    version: &'static str,
    rows: &'static [Row],
    category: Option<&'static str>,
) -> Group {
    Group { name, version, rows, category, origin: Origin::Server }
}

/// A group that a definition brings on a real API server.
const fn defined(name: &'static str, version: &'static str, rows: &'static [Row]) -> Group {
    Group { name, version, rows, category: Some("cluster-api"), origin: Origin::Definition }
}

const GROUPS: [Group; 8] = [
    group("", "v1", CORE, None),
    group("apps", "v1", APPS, Some("all")),
    group("policy", "v1", POLICY, None),
    group("coordination.k8s.io", "v1", COORDINATION, None),
    group("storage.k8s.io", "v1", STORAGE, None),
    group("apiextensions.k8s.io", "v1", EXTENSIONS, Some("api-extensions")),
    defined("cluster.x-k8s.io", "v1beta2", CLUSTER_API),
    defined("infrastructure.cluster.x-k8s.io", "v1beta1", OURS),
];

#[derive(Clone, Copy, PartialEq)]
enum Origin {
    Server,
    Definition,
}

pub(super) fn all() -> impl Iterator<Item = Resource> {
    GROUPS.iter().flat_map(|group| group.rows.iter().map(|row| resource(group, row)))
}

fn resource(of: &Group, row: &Row) -> Resource {
    let (plural, kind, short_names, scope, parts) = *row;
    let id = if of.name.is_empty() { plural.to_owned() } else { format!("{plural}.{}", of.name) };
    let category = if id == "pods" { Some("all") } else { of.category };
    Resource {
        versions: vec![Version { name: of.version.to_owned(), columns: columns(&id) }],
        selectable: selectable(&id).iter().map(|it| (*it).to_owned()).collect(),
        group: of.name.to_owned(),
        plural: plural.to_owned(),
        singular: kind.to_lowercase(),
        kind: kind.to_owned(),
        list_kind: format!("{kind}List"),
        short_names: short_names.iter().map(|it| (*it).to_owned()).collect(),
        categories: category.into_iter().map(str::to_owned).collect(),
        namespaced: scope == Namespaced,
        has_status: parts != Plain,
        scale: (parts == StatusAndScale).then(|| ScalePaths {
            replicas: "/spec/replicas".to_owned(),
            status_replicas: "/status/replicas".to_owned(),
            selector: Some("/status/selector".to_owned()),
        }),
        custom: of.origin == Origin::Definition,
        dir: plural.to_owned(),
        id,
    }
}

fn selectable(id: &str) -> &'static [&'static str] {
    match id {
        "pods" => &[
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "status.phase",
            "status.podIP",
            "status.nominatedNodeName",
        ],
        "nodes" => &["spec.unschedulable"],
        "namespaces" => &["status.phase"],
        "secrets" => &["type"],
        "events" => &[
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "involvedObject.apiVersion",
            "involvedObject.resourceVersion",
            "involvedObject.fieldPath",
            "reason",
            "reportingComponent",
            "source",
            "type",
        ],
        _ => &[],
    }
}

/// Columns that are plain paths; nodes, pods and events have code of their own.
fn columns(id: &str) -> Option<Vec<Column>> {
    let rows: &[(&str, &str, &str)] = match id {
        "namespaces" => &[("Status", "string", ".status.phase"), ("Age", "date", ".metadata.creationTimestamp")],
        "leases.coordination.k8s.io" => {
            &[("Holder", "string", ".spec.holderIdentity"), ("Age", "date", ".metadata.creationTimestamp")]
        }
        "poddisruptionbudgets.policy" => &[
            ("Min Available", "string", ".spec.minAvailable"),
            ("Max Unavailable", "string", ".spec.maxUnavailable"),
            ("Allowed Disruptions", "integer", ".status.disruptionsAllowed"),
            ("Age", "date", ".metadata.creationTimestamp"),
        ],
        "secrets" => &[("Type", "string", ".type"), ("Age", "date", ".metadata.creationTimestamp")],
        _ => return None,
    };
    let column = |(name, kind, path): &(&str, &str, &str)| Column {
        name: (*name).to_owned(),
        kind: (*kind).to_owned(),
        description: String::new(),
        path: (*path).to_owned(),
        priority: 0,
    };
    Some(rows.iter().map(column).collect())
}
