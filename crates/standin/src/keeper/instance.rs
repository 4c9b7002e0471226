//! What the disk tells of an instance: whether its agent lives, and which labels its kubelet was told to set.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use serde::Deserialize;

/// One process: pids are used again, the pair with the start time is not.
#[derive(Debug, Deserialize)]
struct Process {
    pid: u32,
    /// Clock ticks after boot.
    start_time: u64,
}

/// Whether the agent of an instance lives, by the `vm.json` of its directory. No directory, no agent.
pub(crate) fn is_agent_alive(instances: &Path, instance: &str) -> bool {
    let Some(dir) = directory(instances, instance) else { return false };
    let Ok(text) = fs::read(dir.join("vm.json")) else { return false };
    let Ok(process) = serde_json::from_slice::<Process>(&text) else { return false };
    is_alive(&process)
}

fn is_alive(process: &Process) -> bool {
    let Ok(line) = fs::read_to_string(format!("/proc/{}/stat", process.pid)) else { return false };
    // The name in field 2 may hold anything; only its last bracket is sure.
    let Some((_, rest)) = line.rsplit_once(") ") else { return false };
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next().unwrap_or_default();
    let start_time = fields.nth(18).and_then(|it| it.parse().ok());
    !matches!(state, "Z" | "X" | "x" | "") && start_time == Some(process.start_time)
}

/// The labels of `NODE_LABELS` (`a=b,c=d`) in any environment file that the agent received; those of `instance.env` win.
pub(crate) fn node_labels(instances: &Path, instance: &str) -> BTreeMap<String, String> {
    let Some(dir) = directory(instances, instance) else { return BTreeMap::new() };
    let mut files: Vec<PathBuf> = match fs::read_dir(dir.join("recv")) {
        Ok(entries) => entries.filter_map(Result::ok).map(|it| it.path()).collect(),
        Err(_) => return BTreeMap::new(),
    };
    files.retain(|it| it.extension().is_some_and(|it| it == "env"));
    files.sort_by_key(|it| (it.file_name().is_some_and(|it| it == "instance.env"), it.clone()));
    files.iter().filter_map(|it| fs::read_to_string(it).ok()).flat_map(|text| labels_in(&text)).collect()
}

fn labels_in(text: &str) -> Vec<(String, String)> {
    let value = text.lines().find_map(|line| line.trim().strip_prefix("NODE_LABELS="));
    let value = value.unwrap_or_default().trim().trim_matches(['"', '\'']);
    let pairs = value.split(',').filter_map(|it| it.trim().split_once('='));
    pairs.filter(|(name, _)| !name.is_empty()).map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// An instance is named by what came from the API, so nothing but a plain name leads to a directory.
fn directory(instances: &Path, instance: &str) -> Option<PathBuf> {
    let is_plain = !instance.is_empty() && !instance.starts_with('.') && !instance.contains(['/', '\0']);
    is_plain.then(|| instances.join(instance))
}

/// The node files of a directory, by name. A file that is no JSON object is left for later.
pub(crate) fn node_files(dir: &Path) -> io::Result<BTreeMap<String, serde_json::Value>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        other => other?,
    };
    let mut files = BTreeMap::new();
    for path in entries.filter_map(Result::ok).map(|it| it.path()) {
        let name = path.file_name().and_then(|it| it.to_str()).and_then(|it| it.strip_suffix(".json"));
        let Some(name) = name.filter(|it| !it.starts_with('.')) else { continue };
        let text = fs::read(&path).unwrap_or_default();
        if let Ok(node) = serde_json::from_slice::<serde_json::Value>(&text)
            && node.is_object()
        {
            files.insert(name.to_owned(), node);
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn me() -> (u32, u64) {
        let line = fs::read_to_string("/proc/self/stat").unwrap();
        let rest = line.rsplit_once(") ").unwrap().1;
        (std::process::id(), rest.split_ascii_whitespace().nth(19).unwrap().parse().unwrap())
    }

    #[test]
    fn an_agent_lives_only_with_its_own_start_time() {
        let dir = tempfile::tempdir().unwrap();
        let (pid, start_time) = me();
        let write = |instance: &str, start_time: u64| {
            fs::create_dir_all(dir.path().join(instance)).unwrap();
            let text = format!(r#"{{"state":"running","pid":{pid},"start_time":{start_time}}}"#);
            fs::write(dir.path().join(instance).join("vm.json"), text).unwrap();
        };
        write("tst1", start_time);
        write("tst2", start_time + 1);
        assert!(is_agent_alive(dir.path(), "tst1"));
        assert!(!is_agent_alive(dir.path(), "tst2"));
        assert!(!is_agent_alive(dir.path(), "tst3"));
        assert!(!is_agent_alive(dir.path(), "../tst1"));
    }

    #[test]
    fn labels_are_read_from_every_env_file_and_instance_env_wins() {
        let dir = tempfile::tempdir().unwrap();
        let recv = dir.path().join("tst1/recv");
        fs::create_dir_all(&recv).unwrap();
        fs::write(recv.join("node.env"), "A=1\nNODE_LABELS=\"job=demo,x=1\"\n").unwrap();
        fs::write(recv.join("instance.env"), "NODE_LABELS=x=2\n").unwrap();
        fs::write(recv.join("other.txt"), "NODE_LABELS=y=1\n").unwrap();
        let labels = node_labels(dir.path(), "tst1");
        let expected = [("job", "demo"), ("x", "2")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(labels, BTreeMap::from(expected));
        assert_eq!(node_labels(dir.path(), "tst2"), BTreeMap::new());
        assert_eq!(labels_in("NODE_LABELS=\n"), []);
    }
}
