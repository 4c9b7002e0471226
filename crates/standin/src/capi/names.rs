//! Labels, annotations and finalizers of Cluster API.

pub(crate) const CLUSTER_NAME: &str = "cluster.x-k8s.io/cluster-name";
pub(crate) const CLUSTER_NAMESPACE: &str = "cluster.x-k8s.io/cluster-namespace";
pub(crate) const OWNER_KIND: &str = "cluster.x-k8s.io/owner-kind";
pub(crate) const OWNER_NAME: &str = "cluster.x-k8s.io/owner-name";
pub(crate) const MACHINE: &str = "cluster.x-k8s.io/machine";
pub(crate) const POOL_NAME: &str = "cluster.x-k8s.io/pool-name";
pub(crate) const CONTROL_PLANE: &str = "cluster.x-k8s.io/control-plane";
pub(crate) const PAUSED: &str = "cluster.x-k8s.io/paused";
pub(crate) const DRAIN: &str = "cluster.x-k8s.io/drain";
pub(crate) const EXCLUDE_NODE_DRAINING: &str = "machine.cluster.x-k8s.io/exclude-node-draining";
pub(crate) const EXCLUDE_VOLUME_DETACH: &str = "machine.cluster.x-k8s.io/exclude-wait-for-node-volume-detach";
pub(crate) const PRE_DRAIN_HOOK: &str = "pre-drain.delete.hook.machine.cluster.x-k8s.io";
pub(crate) const PRE_TERMINATE_HOOK: &str = "pre-terminate.delete.hook.machine.cluster.x-k8s.io";
pub(crate) const AUTOSCALER_MIN: &str = "cluster.x-k8s.io/cluster-api-autoscaler-node-group-min-size";
pub(crate) const AUTOSCALER_MAX: &str = "cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size";
pub(crate) const UNINITIALIZED_TAINT: &str = "node.cluster.x-k8s.io/uninitialized";

pub(crate) const CLUSTER_FINALIZER: &str = "cluster.cluster.x-k8s.io";
pub(crate) const POOL_FINALIZER: &str = "machinepool.cluster.x-k8s.io";
pub(crate) const MACHINE_FINALIZER: &str = "machine.cluster.x-k8s.io";

/// A name as the value of a label: as it is where that is allowed, else a hash of it.
pub(crate) fn label_value(name: &str) -> String {
    if is_label_value(name) {
        return name.to_owned();
    }
    let hash = name.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    format!("hash_{}_z", base64_url(hash.to_be_bytes()))
}

fn is_label_value(text: &str) -> bool {
    let is_alphanumeric = |byte: Option<u8>| byte.is_none_or(|it| it.is_ascii_alphanumeric());
    text.len() <= 63
        && text.bytes().all(|it| it.is_ascii_alphanumeric() || b"-_.".contains(&it))
        && is_alphanumeric(text.bytes().next())
        && is_alphanumeric(text.bytes().last())
}

/// Four bytes in the URL alphabet of base64, without padding: the only length that is needed here.
fn base64_url(bytes: [u8; 4]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let bits = u64::from(u32::from_be_bytes(bytes)) << 4;
    (0..6)
        .rev()
        .map(|at| {
            let index = usize::try_from((bits >> (at * 6)) & 63).unwrap_or(0);
            char::from(ALPHABET[index])
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_no_label_values_are_hashed() {
        assert_eq!(label_value("nstance-test"), "nstance-test");
        assert_eq!(label_value(""), "");
        // FNV-32a of "a" is e40c292c, of "" 811c9dc5.
        assert_eq!(base64_url([0xe4, 0x0c, 0x29, 0x2c]), "5AwpLA");
        let long = "a".repeat(64);
        let hashed = label_value(&long);
        assert!(hashed.starts_with("hash_") && hashed.ends_with("_z") && hashed.len() == 13, "{hashed}");
        assert_ne!(hashed, label_value(&"b".repeat(64)));
    }
}
