//! Load balancers of the development environment: one file of members for each key, `{work_dir}/lb/{key}.json`.

use std::{
    collections::BTreeMap,
    fs::{self, OpenOptions, TryLockError},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use nstance_core::{
    ids::{InstanceId, LbKey},
    ports::provider::{LbMember, LbMemberState, VmRef},
};
use serde::{Deserialize, Serialize};

use super::{provider_id, vm_file::write_json};

#[derive(Debug, Default, Serialize, Deserialize)]
struct Members {
    /// Instance id to `in`. Nothing drains here: a deregistered member is out at once.
    members: BTreeMap<String, String>,
}

fn file(work_dir: &Path, key: &LbKey) -> PathBuf {
    work_dir.join("lb").join(format!("{key}.json"))
}

/// A balancer nobody registered at has no members; one that cannot be read is an error, never empty.
fn read(work_dir: &Path, key: &LbKey) -> io::Result<Members> {
    match fs::read(file(work_dir, key)) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Members::default()),
        Err(error) => Err(error),
    }
}

pub(super) fn members(work_dir: &Path, key: &LbKey) -> io::Result<Vec<LbMember>> {
    let instances = read(work_dir, key)?.members.into_keys().filter_map(|id| id.parse().ok());
    let member = |instance| LbMember {
        vm: VmRef { instance, provider_id: Some(provider_id(instance)) },
        state: LbMemberState::In,
    };
    Ok(instances.map(member).collect())
}

pub(super) async fn change(work_dir: &Path, key: &LbKey, instance: InstanceId, is_in: bool) -> io::Result<()> {
    let dir = work_dir.join("lb");
    fs::create_dir_all(&dir)?;
    let lock = OpenOptions::new().create(true).append(true).open(dir.join(format!(".{key}.lock")))?;
    // Servers of several shards share the file; each holds it for microseconds.
    loop {
        match lock.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) => tokio::time::sleep(Duration::from_millis(1)).await,
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    let mut members = read(work_dir, key)?;
    let id = instance.to_string();
    let changed = if is_in {
        members.members.insert(id, "in".to_owned()).is_none()
    } else {
        members.members.remove(&id).is_some()
    };
    if changed { write_json(&file(work_dir, key), &dir.join(format!(".{key}.tmp")), &members) } else { Ok(()) }
}
