//! The kinds of objects that the stand-ins read and write: group, version, kind, plural, scope. Kinds of Cluster API and
//! of Nstance are written by hand here, so that this crate depends on no controller.

use kube::{api::ApiResource, discovery::Scope};

/// Group of Cluster API's own kinds.
pub const CAPI_GROUP: &str = "cluster.x-k8s.io";
/// Group of infrastructure providers, ours among them.
pub const INFRA_GROUP: &str = "infrastructure.cluster.x-k8s.io";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Cluster,
    MachinePool,
    Machine,
    MachineSet,
    MachineDeployment,
    MachineHealthCheck,
    MachineDrainRule,
    NstanceCluster,
    NstanceMachinePool,
    NstanceShardGroup,
    NstanceMachine,
    NstanceMachineTemplate,
    Node,
    Pod,
    Namespace,
    Secret,
    ConfigMap,
    ServiceAccount,
    Event,
    DaemonSet,
    PodDisruptionBudget,
    Lease,
    VolumeAttachment,
}

impl Kind {
    pub const ALL: [Self; 23] = [
        Self::Cluster,
        Self::MachinePool,
        Self::Machine,
        Self::MachineSet,
        Self::MachineDeployment,
        Self::MachineHealthCheck,
        Self::MachineDrainRule,
        Self::NstanceCluster,
        Self::NstanceMachinePool,
        Self::NstanceShardGroup,
        Self::NstanceMachine,
        Self::NstanceMachineTemplate,
        Self::Node,
        Self::Pod,
        Self::Namespace,
        Self::Secret,
        Self::ConfigMap,
        Self::ServiceAccount,
        Self::Event,
        Self::DaemonSet,
        Self::PodDisruptionBudget,
        Self::Lease,
        Self::VolumeAttachment,
    ];

    /// What the Cluster API stand-in watches.
    pub const CAPI: [Self; 7] = [
        Self::Cluster,
        Self::MachinePool,
        Self::Machine,
        Self::MachineDrainRule,
        Self::NstanceCluster,
        Self::NstanceMachinePool,
        Self::NstanceMachine,
    ];

    /// Group, version, kind, plural.
    const fn names(self) -> (&'static str, &'static str, &'static str, &'static str) {
        const CAPI: (&str, &str) = (CAPI_GROUP, "v1beta2");
        const INFRA: (&str, &str) = (INFRA_GROUP, "v1beta1");
        const CORE: (&str, &str) = ("", "v1");
        let ((group, version), kind, plural) = match self {
            Self::Cluster => (CAPI, "Cluster", "clusters"),
            Self::MachinePool => (CAPI, "MachinePool", "machinepools"),
            Self::Machine => (CAPI, "Machine", "machines"),
            Self::MachineSet => (CAPI, "MachineSet", "machinesets"),
            Self::MachineDeployment => (CAPI, "MachineDeployment", "machinedeployments"),
            Self::MachineHealthCheck => (CAPI, "MachineHealthCheck", "machinehealthchecks"),
            Self::MachineDrainRule => (CAPI, "MachineDrainRule", "machinedrainrules"),
            Self::NstanceCluster => (INFRA, "NstanceCluster", "nstanceclusters"),
            Self::NstanceMachinePool => (INFRA, "NstanceMachinePool", "nstancemachinepools"),
            Self::NstanceShardGroup => (INFRA, "NstanceShardGroup", "nstanceshardgroups"),
            Self::NstanceMachine => (INFRA, "NstanceMachine", "nstancemachines"),
            Self::NstanceMachineTemplate => (INFRA, "NstanceMachineTemplate", "nstancemachinetemplates"),
            Self::Node => (CORE, "Node", "nodes"),
            Self::Pod => (CORE, "Pod", "pods"),
            Self::Namespace => (CORE, "Namespace", "namespaces"),
            Self::Secret => (CORE, "Secret", "secrets"),
            Self::ConfigMap => (CORE, "ConfigMap", "configmaps"),
            Self::ServiceAccount => (CORE, "ServiceAccount", "serviceaccounts"),
            Self::Event => (CORE, "Event", "events"),
            Self::DaemonSet => (("apps", "v1"), "DaemonSet", "daemonsets"),
            Self::PodDisruptionBudget => (("policy", "v1"), "PodDisruptionBudget", "poddisruptionbudgets"),
            Self::Lease => (("coordination.k8s.io", "v1"), "Lease", "leases"),
            Self::VolumeAttachment => (("storage.k8s.io", "v1"), "VolumeAttachment", "volumeattachments"),
        };
        (group, version, kind, plural)
    }

    pub const fn group(self) -> &'static str {
        self.names().0
    }

    pub const fn kind(self) -> &'static str {
        self.names().2
    }

    pub fn api_version(self) -> String {
        match self.names() {
            ("", version, ..) => version.to_owned(),
            (group, version, ..) => format!("{group}/{version}"),
        }
    }

    pub const fn scope(self) -> Scope {
        match self {
            Self::Node | Self::Namespace | Self::VolumeAttachment => Scope::Cluster,
            _ => Scope::Namespaced,
        }
    }

    pub fn resource(self) -> ApiResource {
        let (group, version, kind, plural) = self.names();
        ApiResource {
            group: group.to_owned(),
            version: version.to_owned(),
            api_version: self.api_version(),
            kind: kind.to_owned(),
            plural: plural.to_owned(),
        }
    }

    /// The kind that a reference of group and kind means; `None`: not one of ours.
    pub fn of(group: &str, kind: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.group() == group && it.kind() == kind)
    }

    /// The kind that an owner reference names by `apiVersion` and `kind`.
    pub fn of_api_version(api_version: &str, kind: &str) -> Option<Self> {
        Self::of(group_of(api_version), kind)
    }
}

/// The group in an `apiVersion`; empty for the core group.
pub fn group_of(api_version: &str) -> &str {
    api_version.split_once('/').map_or("", |(group, _)| group)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn references_lead_to_their_kind_and_foreign_ones_to_none() {
        for kind in Kind::ALL {
            assert_eq!(Kind::of_api_version(&kind.api_version(), kind.kind()), Some(kind));
        }
        assert_eq!(Kind::of(INFRA_GROUP, "AWSMachine"), None);
        assert_eq!(Kind::of("", "Machine"), None);
        let plurals: BTreeSet<String> = Kind::ALL.into_iter().map(|it| it.resource().plural).collect();
        assert_eq!(plurals.len(), Kind::ALL.len());
    }
}
