//! Faults in force: a file each below `run/`, so that every command knows those of the others, `status` shows them, and
//! `heal` ends them all, whoever made them. Links read theirs from here.

use std::{fs, io, path::PathBuf};

use anyhow::Context;
use nstance_core::ports::clock::Clock as _;
use nstance_rt::clock::SystemClock;
use serde::{Deserialize, Serialize};

use crate::layout::Layout;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fault {
    pub(crate) id: String,
    /// For a person.
    pub(crate) what: String,
    /// RFC 3339.
    pub(crate) since: String,
    #[serde(flatten)]
    pub(crate) effect: Effect,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub(crate) enum Effect {
    /// A process stands still.
    Pause { target: String },
    /// A server and the store do not reach each other, or do so late; a rule of the store's with the same id.
    Store { server: String, latency_ms: u64 },
    /// The same of agents or operators and a shard's leader.
    Link { who: Who, shard: String, cut: Cut, latency_ms: u64 },
    /// A component that died on purpose is not started again.
    Held { target: String },
}

/// On whose way to a shard's leader a link lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Who {
    Agents,
    Operators,
}

impl Who {
    pub(crate) const ALL: [Self; 2] = [Self::Agents, Self::Operators];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Agents => "agents",
            Self::Operators => "operators",
        }
    }
}

/// What does not get through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Cut {
    Nothing,
    Everything,
    ToServer,
    ToClient,
}

const SUFFIX: &str = ".fault";

fn path(layout: &Layout, id: &str) -> PathBuf {
    layout.run().join(format!("{id}{SUFFIX}"))
}

impl Fault {
    pub(crate) fn new(id: String, what: String, effect: Effect) -> Self {
        Self { id, what, since: SystemClock.now().to_string(), effect }
    }

    /// Written aside and renamed: links never read half of it.
    pub(crate) fn write(&self, layout: &Layout) -> anyhow::Result<()> {
        let path = path(layout, &self.id);
        let write = || -> io::Result<()> {
            let aside = layout.run().join(format!(".{}{SUFFIX}", self.id));
            fs::write(&aside, serde_json::to_vec_pretty(self)?)?;
            fs::rename(&aside, &path)
        };
        write().with_context(|| format!("write {}", path.display()))
    }

    /// Says whether it was still there.
    pub(crate) fn remove(&self, layout: &Layout) -> anyhow::Result<bool> {
        let path = path(layout, &self.id);
        match fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error).with_context(|| format!("remove {}", path.display())),
        }
    }
}

/// All of them, in the order of their ids.
pub(crate) fn all(layout: &Layout) -> Vec<Fault> {
    let entries = fs::read_dir(layout.run()).into_iter().flatten().flatten();
    let mut faults: Vec<Fault> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            if name.starts_with('.') {
                return None;
            }
            if let Some(target) = name.strip_suffix(".hold") {
                let what = format!("{target} is not started again");
                let effect = Effect::Held { target: target.to_owned() };
                let since = entry.metadata().and_then(|it| it.modified()).ok().and_then(text).unwrap_or_default();
                return Some(Fault { id: name.clone(), what, since, effect });
            }
            name.strip_suffix(SUFFIX)?;
            serde_json::from_slice(&fs::read(entry.path()).ok()?).ok()
        })
        .collect();
    faults.sort_by(|a, b| a.id.cmp(&b.id));
    faults
}

fn text(at: std::time::SystemTime) -> Option<String> {
    let since = at.duration_since(std::time::UNIX_EPOCH).ok()?;
    Some(nstance_core::time::Timestamp::from_millis(i64::try_from(since.as_millis()).ok()?).to_string())
}

/// Forgets what an earlier environment left.
pub(crate) fn forget_all(layout: &Layout) -> anyhow::Result<()> {
    let faults = all(layout).into_iter().filter(|it| !matches!(it.effect, Effect::Held { .. }));
    faults.map(|it| it.remove(layout)).try_for_each(|it| it.map(|_| ()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_known_to_every_command_until_they_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::make(dir.path()).unwrap();
        let effect = Effect::Link { who: Who::Agents, shard: "dev-1".into(), cut: Cut::Everything, latency_ms: 0 };
        let fault = Fault::new("link-agents-dev-1".into(), "cut".into(), effect);
        fault.write(&layout).unwrap();
        fs::write(layout.run().join("server-1.hold"), "").unwrap();
        let seen = all(&layout);
        assert_eq!(seen[0], fault);
        assert_eq!(seen[1].effect, Effect::Held { target: "server-1".into() });
        forget_all(&layout).unwrap();
        assert_eq!(all(&layout).len(), 1, "what is held stays so");
        assert!(!fault.remove(&layout).unwrap());
    }
}
