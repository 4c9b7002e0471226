//! The Kubernetes Node that a development VM would have registered, as a file of the development API server.
//!
//! The file is that server's as soon as it is there: it writes into it, and removes it when somebody deletes the Node. So
//! it is made once in the life of a VM, never changed, and removed with the VM.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use nstance_core::{ids::InstanceId, time::Timestamp};
use nstance_schemas::quantities;
use rustix::{
    fs::{CWD, RenameFlags},
    io::Errno,
};
use serde_json::{Map, Value, json};

use super::size;

fn path(node_dir: &Path, instance: InstanceId) -> PathBuf {
    node_dir.join(format!("{instance}.json"))
}

fn node(instance: InstanceId, provider_id: &str, instance_type: &str, now: Timestamp) -> Value {
    let (name, now, arch) = (instance.to_string(), whole_seconds(now), size::arch());
    let quantities = quantities(&size::of(instance_type));
    let mut capacity: Map<String, Value> = quantities.into_iter().map(|(name, it)| (name, it.into())).collect();
    capacity.insert("pods".to_owned(), "110".into());
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "nstance.dev/instance-id": name,
                "kubernetes.io/hostname": name,
                "kubernetes.io/arch": arch,
                "kubernetes.io/os": "linux",
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
            "addresses": [
                { "type": "InternalIP", "address": "127.0.0.1" },
                { "type": "Hostname", "address": name },
            ],
            "nodeInfo": { "architecture": arch, "operatingSystem": "linux" },
        },
    })
}

/// Kubernetes writes its times so.
fn whole_seconds(at: Timestamp) -> String {
    let text = at.to_string();
    match text.split_once('.') {
        Some((seconds, _)) => format!("{seconds}Z"),
        None => text,
    }
}

/// Shows the node as ready, unless a file of its name is there: then that is its Node, with what others wrote into it.
/// The caller holds the VM's lock.
pub(super) fn show(
    node_dir: &Path,
    instance: InstanceId,
    provider_id: &str,
    instance_type: &str,
    now: Timestamp,
) -> io::Result<()> {
    let mut text = serde_json::to_vec_pretty(&node(instance, provider_id, instance_type, now))?;
    text.push(b'\n');
    let draft = node_dir.join(format!(".{instance}.tmp"));
    match fs::write(&draft, &text) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::DirBuilder::new().recursive(true).mode(0o755).create(node_dir)?;
            fs::write(&draft, &text)?;
        }
        other => other?,
    }
    // Readers see a whole file or none.
    match rustix::fs::renameat_with(CWD, &draft, CWD, path(node_dir, instance), RenameFlags::NOREPLACE) {
        Err(Errno::EXIST) => fs::remove_file(&draft),
        other => Ok(other?),
    }
}

pub(super) fn remove(node_dir: &Path, instance: InstanceId) -> io::Result<()> {
    match fs::remove_file(path(node_dir, instance)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_of_its_instances_type_and_machine() {
        let instance: InstanceId = "knc06bgm7733st2576nx5jht4ecjw".parse().unwrap();
        let now = Timestamp::from_millis(1_700_000_000_123);
        let node = node(instance, "dev:///nstance-agent-x", "cpu:8,gpu:1", now);
        assert_eq!(node["spec"]["providerID"], "dev:///nstance-agent-x");
        let labels = &node["metadata"]["labels"];
        assert_eq!(labels["kubernetes.io/hostname"], "knc06bgm7733st2576nx5jht4ecjw");
        assert_eq!(
            (&labels["kubernetes.io/os"], &labels["kubernetes.io/arch"]),
            (&json!("linux"), &json!(size::arch()))
        );
        let capacity = json!({
            "cpu": "8", "memory": "4Gi", "ephemeral-storage": "20Gi", "nvidia.com/gpu": "1", "pods": "110",
        });
        assert_eq!((&node["status"]["capacity"], &node["status"]["allocatable"]), (&capacity, &capacity));
        assert_eq!(node["status"]["conditions"][0]["lastTransitionTime"], "2023-11-14T22:13:20Z");
    }

    #[test]
    fn a_file_that_is_there_is_left_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let nodes = dir.path().join("k8s/nodes");
        let instance: InstanceId = "knc06bgm7733st2576nx5jht4ecjw".parse().unwrap();
        let show = || show(&nodes, instance, "dev:///x", "", Timestamp::EPOCH).unwrap();
        show();
        let file = path(&nodes, instance);
        let first: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        assert_eq!(first["kind"], "Node");
        fs::write(&file, "theirs").unwrap();
        show();
        assert_eq!(fs::read_to_string(&file).unwrap(), "theirs");
        assert_eq!(fs::read_dir(&nodes).unwrap().count(), 1, "no draft stays");
        remove(&nodes, instance).unwrap();
        remove(&nodes, instance).unwrap();
        assert_eq!(fs::read_dir(&nodes).unwrap().count(), 0);
    }
}
