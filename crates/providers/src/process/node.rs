//! The Kubernetes Node a dev VM would have registered, as a file of the development API server.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use nstance_core::{ids::InstanceId, time::Timestamp};
use serde_json::json;

use super::vm_file::write_json;

fn path(node_dir: &Path, instance: InstanceId) -> PathBuf {
    node_dir.join(format!("{instance}.json"))
}

/// Shows the node as ready. Written again, it is replaced.
pub(super) fn write(node_dir: &Path, instance: InstanceId, provider_id: &str, now: Timestamp) -> io::Result<()> {
    let now = now.to_string();
    let capacity = json!({ "cpu": "2", "memory": "4Gi", "ephemeral-storage": "20Gi", "pods": "110" });
    let node = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": instance.to_string(),
            "creationTimestamp": now,
            "labels": {
                "nstance.dev/instance-id": instance.to_string(),
                "kubernetes.io/hostname": instance.to_string(),
            },
        },
        "spec": { "providerID": provider_id },
        "status": {
            "capacity": capacity,
            "allocatable": capacity,
            "conditions": [{
                "type": "Ready",
                "status": "True",
                "reason": "KubeletReady",
                "message": "the agent's process was started",
                "lastHeartbeatTime": now,
                "lastTransitionTime": now,
            }],
        },
    });
    let draft = node_dir.join(format!(".{instance}.tmp"));
    match write_json(&path(node_dir, instance), &draft, &node) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::DirBuilder::new().recursive(true).mode(0o755).create(node_dir)?;
            write_json(&path(node_dir, instance), &draft, &node)
        }
        other => other,
    }
}

pub(super) fn remove(node_dir: &Path, instance: InstanceId) -> io::Result<()> {
    match fs::remove_file(path(node_dir, instance)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
