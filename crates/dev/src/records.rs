//! `run/{component}.json`: which processes are ours. A pid alone names nobody for long, so the start time goes with it,
//! and nothing is signalled whose start time is another.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::Context;
use nstance_providers::process::Process;
use serde::{Deserialize, Serialize};

use crate::{layout::Layout, shape::Shape};

/// Names of the components there are.
pub(crate) const UP: &str = "up";
pub(crate) const STORE: &str = "dev-s3";
pub(crate) const K8S: &str = "dev-k8s";
pub(crate) const OPERATOR: &str = "operator";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// The supervisor itself.
    Up,
    Store,
    Server,
    /// The API server for development, with its clients.
    Kubernetes,
    Operator,
}

/// How far a supervisor is; the others are `ready` as soon as they are started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Phase {
    Starting,
    Ready,
    Stopping,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RunFile {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) phase: Phase,
    #[serde(flatten)]
    pub(crate) process: Process,
    pub(crate) ports: BTreeMap<String, u16>,
    pub(crate) command: Vec<String>,
    pub(crate) log: PathBuf,
    /// RFC 3339.
    pub(crate) started_at: String,
    pub(crate) restarts: u32,
    /// Of a server: whose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) shard: Option<String>,
    /// Of a supervisor: what it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) shape: Option<Shape>,
    /// Of a supervisor: which of Kubernetes and operator it runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) extras: Vec<Kind>,
}

fn path(layout: &Layout, name: &str) -> PathBuf {
    layout.run().join(format!("{name}.json"))
}

impl RunFile {
    /// Written aside and renamed: a reader sees the old record or the new one.
    pub(crate) fn write(&self, layout: &Layout) -> anyhow::Result<()> {
        let path = path(layout, &self.name);
        let write = || -> io::Result<()> {
            fs::create_dir_all(layout.run())?;
            let aside = layout.run().join(format!(".{}.json", self.name));
            let mut bytes = serde_json::to_vec_pretty(self)?;
            bytes.push(b'\n');
            fs::write(&aside, bytes)?;
            fs::rename(&aside, &path)
        };
        write().with_context(|| format!("record {} in {}", self.name, path.display()))
    }

    /// Writes it again if somebody removed it: without it `down` would not know of us.
    pub(crate) fn keep(&self, layout: &Layout) -> anyhow::Result<()> {
        if path(layout, &self.name).exists() { Ok(()) } else { self.write(layout) }
    }

    pub(crate) fn read(layout: &Layout, name: &str) -> Option<Self> {
        read(&path(layout, name))
    }

    /// Only if it is still this process's.
    pub(crate) fn forget(&self, layout: &Layout) {
        if Self::read(layout, &self.name).is_some_and(|it| it.process == self.process) {
            let _ = fs::remove_file(path(layout, &self.name));
        }
    }

    pub(crate) fn port(&self, name: &str) -> Option<u16> {
        self.ports.get(name).copied()
    }
}

fn read(path: &Path) -> Option<RunFile> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// All components that are recorded, living or not, in the order of their names.
pub(crate) fn all(layout: &Layout) -> Vec<RunFile> {
    let mut files: Vec<RunFile> = fs::read_dir(layout.run())
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| {
            entry.file_name().to_str().is_some_and(|name| !name.starts_with('.') && name.ends_with(".json"))
        })
        .filter_map(|entry| read(&entry.path()))
        .collect();
    files.sort_by(|a, b| a.name.cmp(&b.name));
    files
}

/// The servers that are recorded, living or not, in the order of their numbers.
pub(crate) fn servers(layout: &Layout) -> Vec<RunFile> {
    let mut servers: Vec<RunFile> = all(layout).into_iter().filter(|it| it.kind == Kind::Server).collect();
    servers.sort_by_key(|it| number(&it.name));
    servers
}

/// Those of one shard that live.
pub(crate) fn servers_of(layout: &Layout, shard: &str) -> Vec<RunFile> {
    let living = servers(layout).into_iter().filter(|it| it.process.lives());
    living.filter(|it| it.shard.as_deref() == Some(shard)).collect()
}

/// The number in `server-7`.
fn number(name: &str) -> Option<u16> {
    name.strip_prefix("server-")?.parse().ok()
}

/// What runs here by the word of its supervisor, living or dead; one server of one shard if nobody says.
pub(crate) fn shape(layout: &Layout) -> Shape {
    let said = RunFile::read(layout, UP).and_then(|it| it.shape);
    said.unwrap_or(Shape { shards: 1, servers_per_shard: 1, links: false })
}

/// The living supervisor of this environment.
pub(crate) fn supervisor(layout: &Layout) -> Option<RunFile> {
    RunFile::read(layout, UP).filter(|it| it.process.lives())
}

/// While this file is there, a dead component is not started again.
pub(crate) fn hold_path(layout: &Layout, name: &str) -> PathBuf {
    layout.run().join(format!("{name}.hold"))
}
