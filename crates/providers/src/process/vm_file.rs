//! `vm.json`: what is known of a VM beside its process. Always written beside its place and renamed into it, so that a
//! reader sees the old text or the new one. Not synced: what a power cut could tear, it has killed as well.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use nstance_core::{
    ids::{Epoch, InstanceId},
    ports::provider::{Owner, Tags, VmTags},
    time::Timestamp,
};
use serde::{Deserialize, Serialize};

use super::{proc::Process, tmux::TmuxSession};

/// What was decided about a VM. Whether its process lives is asked of the kernel, never read here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VmState {
    /// Accepted; no agent's start is recorded yet.
    Starting,
    /// Its agent was started, and lives or has died since.
    Running,
    /// Set by hand: the VM runs, its agent does not.
    AgentDown,
    /// Set by hand, or an agent that could not be started.
    Stopped,
    /// Switched off with the whole environment; it is started again, as it was, when that comes back.
    PoweredOff,
    Deleting,
    /// Its process is gone; `clean` removes the directory.
    Deleted,
}

/// Fields that a newer version may have added are ignored, a missing one makes the file unreadable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmFile {
    pub state: VmState,
    #[serde(flatten)]
    pub process: Option<Process>,
    /// By the words of the provider contract (`cluster-id`, `shard`, …).
    pub tags: BTreeMap<String, String>,
    /// Of the leader that asked for it.
    pub epoch: u64,
    pub subnet: String,
    pub instance_type: Option<String>,
    /// RFC 3339.
    pub created_at: String,
    /// When its agent is due, RFC 3339.
    pub boots_at: String,
    pub registration_addr: String,
    pub agent_addr: String,
    /// How often its agent reports, as in the config. Files of older versions lack it.
    #[serde(default = "one_second")]
    pub metrics_interval: String,
    /// Where the agent's window is; none for an agent without a window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tmux: Option<TmuxSession>,
    /// Whether its Kubernetes Node was shown. That happens once: Kubernetes may delete the Node while the VM lives.
    #[serde(default)]
    pub node_shown: bool,
}

fn one_second() -> String {
    "1s".to_owned()
}

pub(super) const NAME: &str = "vm.json";

/// What stands where a `vm.json` should.
#[derive(Debug)]
pub(super) enum Read {
    File(Box<VmFile>),
    /// The directory itself is not there: that VM is dead.
    NoDirectory,
    /// It is there and cannot be understood; why.
    Unreadable(io::Error),
}

pub(super) fn read(dir: &Path) -> Read {
    match fs::read(dir.join(NAME)) {
        Ok(bytes) => match serde_json::from_slice(&bytes) {
            Ok(file) => Read::File(Box::new(file)),
            Err(error) => Read::Unreadable(io::Error::new(io::ErrorKind::InvalidData, error)),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => match fs::symlink_metadata(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Read::NoDirectory,
            _ => Read::Unreadable(error),
        },
        Err(error) => Read::Unreadable(error),
    }
}

pub(super) fn write(dir: &Path, file: &VmFile) -> io::Result<()> {
    write_json(&dir.join(NAME), &dir.join(".vm.json.tmp"), file)
}

/// Writes `value` to `temporary` and renames it to `path`. Callers hold a lock, so one temporary name is enough.
pub(super) fn write_json(path: &Path, temporary: &PathBuf, value: &impl Serialize) -> io::Result<()> {
    let mut bytes = serde_json::to_vec_pretty(value)?;
    bytes.push(b'\n');
    fs::write(temporary, bytes)?;
    fs::rename(temporary, path)
}

/// Whose VM this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose {
    Ours,
    Foreign,
    /// The tags do not say.
    Unsaid,
}

impl VmFile {
    /// Whether its agent runs; one that was started in a window needs that too.
    pub(super) fn agent_lives(&self) -> io::Result<bool> {
        match (self.process, &self.tmux) {
            (Some(process), None) => process.is_alive(),
            (Some(process), Some(_)) => process.has_terminal(),
            (None, _) => Ok(false),
        }
    }

    /// A process that is left of the VM, whether it counts as alive or not.
    pub(super) fn is_process_left(&self) -> io::Result<bool> {
        self.process.map_or(Ok(false), Process::is_alive)
    }

    pub(super) fn whose(&self, owner: &Owner) -> Whose {
        match (self.tags.get("cluster-id"), self.tags.get("shard")) {
            (Some(cluster), Some(shard)) if cluster == owner.cluster.as_str() && shard == owner.shard.as_str() => {
                Whose::Ours
            }
            (Some(_), Some(_)) => Whose::Foreign,
            _ => Whose::Unsaid,
        }
    }

    /// `None` if any is missing or malformed, or if they are another instance's.
    pub fn tags(&self, instance: InstanceId) -> Option<Tags> {
        let tag = |name: &str| self.tags.get(name);
        let tags = Tags {
            cluster: tag("cluster-id")?.parse().ok()?,
            shard: tag("shard")?.parse().ok()?,
            instance: tag("instance-id")?.parse().ok()?,
            tenant: tag("tenant")?.parse().ok()?,
            group: tag("group")?.parse().ok()?,
            on_demand: tag("on-demand")?.parse().ok()?,
            epoch: Epoch(tag("epoch")?.parse().ok()?),
            template: tag("template")?.clone(),
            infra_hash: tag("infra-hash")?.clone(),
        };
        (tags.instance == instance && tag("managed")? == "true").then_some(tags)
    }

    /// What an answer about this VM says of its tags.
    pub(super) fn shown_tags(&self, instance: InstanceId) -> VmTags {
        const NEEDED: [&str; 10] = [
            "managed",
            "cluster-id",
            "shard",
            "instance-id",
            "tenant",
            "group",
            "on-demand",
            "epoch",
            "template",
            "infra-hash",
        ];
        match self.tags(instance) {
            Some(tags) => VmTags::Complete(tags),
            None if NEEDED.iter().all(|name| self.tags.contains_key(*name)) => VmTags::Foreign,
            None => VmTags::Absent,
        }
    }

    pub(super) fn created_at(&self) -> Option<Timestamp> {
        self.created_at.parse().ok()
    }

    /// Whether its agent should have been started by `now`. A time that cannot be read has passed.
    pub(super) fn is_due(&self, now: Timestamp) -> bool {
        self.boots_at.parse::<Timestamp>().map_or(true, |at| at <= now)
    }
}

pub(super) fn tag_words(tags: &Tags) -> BTreeMap<String, String> {
    [
        ("managed", "true".to_owned()),
        ("cluster-id", tags.cluster.to_string()),
        ("shard", tags.shard.to_string()),
        ("instance-id", tags.instance.to_string()),
        ("tenant", tags.tenant.to_string()),
        ("group", tags.group.to_string()),
        ("on-demand", tags.on_demand.to_string()),
        ("epoch", tags.epoch.to_string()),
        ("template", tags.template.clone()),
        ("instance-kind", tags.instance.kind().to_string()),
        ("infra-hash", tags.infra_hash.clone()),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .collect()
}
