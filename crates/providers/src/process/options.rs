//! The settings of the providers `process` and `tmux`, as a config gives them.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use nstance_core::{
    ports::{provider::Owner, schema::SchemaProblem},
    value::{Object, Value},
};
use nstance_schemas::{capacities, duration, find};

use super::tmux::TmuxSession;

/// The session where windows are, if the config names no other.
const SESSION: &str = "nstance-dev-agents";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessOptions {
    pub owner: Owner,
    /// A path, or a bare name to be looked up in `PATH`.
    pub agent_binary: PathBuf,
    pub work_dir: PathBuf,
    /// Where fake Kubernetes nodes are shown; unset means none.
    pub node_dir: Option<PathBuf>,
    /// How long a create takes before anything exists.
    pub create_delay: Duration,
    /// How long a VM takes from its creation to its agent's start.
    pub boot_delay: Duration,
    /// VMs each subnet has room for; a subnet not named here has no limit.
    pub subnet_capacity: BTreeMap<String, u64>,
    pub metrics_interval: Duration,
    /// Agents run in windows of this session: that is the provider `tmux`. Unset, they have no terminal: `process`.
    pub tmux: Option<TmuxSession>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} of the {kind} provider's options cannot be used; the first is `{}`", problems.len(), first(problems))]
pub struct OptionsError {
    pub kind: &'static str,
    pub problems: Vec<SchemaProblem>,
}

fn first(problems: &[SchemaProblem]) -> String {
    problems.first().map(|problem| problem.path.join(".")).unwrap_or_default()
}

impl ProcessOptions {
    /// Everything by default, in `work_dir`.
    pub fn new(owner: Owner, agent_binary: impl Into<PathBuf>, work_dir: impl Into<PathBuf>) -> Self {
        Self {
            owner,
            agent_binary: agent_binary.into(),
            work_dir: work_dir.into(),
            node_dir: None,
            create_delay: Duration::ZERO,
            boot_delay: Duration::ZERO,
            subnet_capacity: BTreeMap::new(),
            metrics_interval: Duration::from_secs(1),
            tmux: None,
        }
    }

    /// The same with agents in windows of tmux.
    #[must_use]
    pub fn in_tmux(self, session: TmuxSession) -> Self {
        Self { tmux: Some(session), ..self }
    }

    /// How a config names the provider with these options.
    pub fn kind(&self) -> &'static str {
        if self.tmux.is_some() { "tmux" } else { "process" }
    }

    /// Reads `server.provider.options` of the kind `tmux`, as [`Self::from_options`] those of `process`. The tmux
    /// server is the one that this process's environment names.
    pub fn from_tmux_options(
        options: &Object,
        owner: Owner,
        default_agent_binary: &Path,
        base_dir: &Path,
    ) -> Result<Self, OptionsError> {
        let session = options.get("session").and_then(Value::as_str).unwrap_or(SESSION);
        let read = Self::read("tmux", options, owner, default_agent_binary, base_dir)?;
        Ok(read.in_tmux(TmuxSession::from_env(session)))
    }

    /// Reads `server.provider.options`. Relative paths are taken from `base_dir`; an `agent_binary` without a slash is
    /// looked up in `PATH`.
    pub fn from_options(
        options: &Object,
        owner: Owner,
        default_agent_binary: &Path,
        base_dir: &Path,
    ) -> Result<Self, OptionsError> {
        Self::read("process", options, owner, default_agent_binary, base_dir)
    }

    fn read(
        kind: &'static str,
        options: &Object,
        owner: Owner,
        default_agent_binary: &Path,
        base_dir: &Path,
    ) -> Result<Self, OptionsError> {
        let problems = find(kind).map(|schema| schema.check_options(options)).unwrap_or_default();
        if !problems.is_empty() {
            return Err(OptionsError { kind, problems });
        }
        let path = |key: &str| options.get(key).and_then(Value::as_str).map(|text| base_dir.join(text));
        let agent_binary = match options.get("agent_binary").and_then(Value::as_str) {
            Some(name) if !name.contains('/') => name.into(),
            Some(name) => base_dir.join(name),
            None => default_agent_binary.to_owned(),
        };
        let work_dir = path("work_dir").unwrap_or_else(|| base_dir.join("temp/instances"));
        let delay = |key: &str| options.get(key).and_then(duration::parse);
        Ok(Self {
            node_dir: path("node_dir"),
            create_delay: delay("create_delay").unwrap_or_default(),
            boot_delay: delay("boot_delay").unwrap_or_default(),
            subnet_capacity: capacities(options),
            metrics_interval: delay("metrics_interval").unwrap_or(Duration::from_secs(1)),
            ..Self::new(owner, agent_binary, work_dir)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner() -> Owner {
        Owner { cluster: "c".parse().unwrap(), shard: "s".parse().unwrap() }
    }

    #[test]
    fn options_fall_back_to_their_defaults_and_resolve_against_the_base() {
        let read = |options: &Object| {
            ProcessOptions::from_options(options, owner(), Path::new("/bin/agent"), Path::new("/base"))
        };
        let plain = read(&Object::new()).unwrap();
        assert_eq!(plain, ProcessOptions::new(owner(), "/bin/agent", "/base/temp/instances"));

        let mut options = Object::new();
        options.insert("agent_binary", Value::from("my-agent"));
        options.insert("work_dir", Value::from("/elsewhere"));
        options.insert("node_dir", Value::from("nodes"));
        options.insert("boot_delay", Value::from("1.5s"));
        options.insert("subnet_capacity", Value::Object([("a".to_owned(), Value::Int(2))].into_iter().collect()));
        let read_back = read(&options).unwrap();
        assert_eq!(read_back.agent_binary, Path::new("my-agent"), "a bare name is for PATH");
        assert_eq!(read_back.work_dir, Path::new("/elsewhere"));
        assert_eq!(read_back.node_dir.as_deref(), Some(Path::new("/base/nodes")));
        assert_eq!(read_back.boot_delay, Duration::from_millis(1500));
        assert_eq!(read_back.subnet_capacity, BTreeMap::from([("a".to_owned(), 2)]));

        options.insert("sessions", Value::Null);
        assert_eq!(read(&options).unwrap_err().problems.len(), 1);
    }

    #[test]
    fn a_tmux_session_has_a_default_name_and_is_an_option_of_tmux_only() {
        let read = |options: &Object| {
            ProcessOptions::from_tmux_options(options, owner(), Path::new("/bin/agent"), Path::new("/base"))
        };
        let plain = read(&Object::new()).unwrap();
        assert_eq!((plain.kind(), plain.tmux.unwrap().name.as_str()), ("tmux", "nstance-dev-agents"));
        let mut options = Object::new();
        options.insert("session", Value::from("mine"));
        assert_eq!(read(&options).unwrap().tmux.unwrap().name, "mine");
        let refused =
            ProcessOptions::from_options(&options, owner(), Path::new("/bin/agent"), Path::new("/base")).unwrap_err();
        assert!(refused.to_string().contains("process provider's options"), "{refused}");
        options.insert("session", Value::from("a:b"));
        assert!(read(&options).unwrap_err().to_string().contains("tmux provider's options"));
    }
}
