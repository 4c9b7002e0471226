//! Where everything of one environment is, and the mark by which we know the directory as ours.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use nstance_core::ids::InstanceId;
use nstance_providers::process::{Process, VmFile};

/// Says to people and to `clean` that the directory may be removed as a whole.
const MARKER: &str = ".nstance-dev";

const MARKER_TEXT: &str = "This directory belongs to nstance-dev. `nstance-dev clean` removes all of it.\n";

/// What `up` makes below its directory. A directory that holds nothing else is ours even if its marker was removed.
const OURS: [&str; 9] =
    [MARKER, "cache", "dev-s3", "dev-k8s", "instances", "operator", "cli-operator-identity", "logs", "run"];

/// The directory of one environment, absolute and without symbolic links: agents are found by the path in their
/// environment, so it must always be spelled alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    dir: PathBuf,
    /// As the person wrote it, for messages.
    shown: PathBuf,
}

impl Layout {
    /// Makes the directory, or takes it over if it is ours.
    pub fn make(dir: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
        let layout = Self::at(dir)?;
        if !layout.is_marked() {
            if let Some(stranger) = layout.stranger().with_context(|| format!("read {}", dir.display()))? {
                bail!(
                    "{} is not an environment of nstance-dev: it holds {stranger:?}; give --dir an empty or new directory",
                    dir.display()
                );
            }
            layout.mark()?;
        }
        for dir in [layout.run(), layout.logs(), layout.cache(), layout.bucket(), layout.instances(), layout.operator()]
        {
            fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        }
        Ok(layout)
    }

    /// An environment that is there.
    pub fn open(dir: &Path) -> anyhow::Result<Self> {
        if !dir.is_dir() {
            bail!("there is no environment in {}; start one with `nstance-dev up`", dir.display());
        }
        let layout = Self::at(dir)?;
        let is_ours = layout.is_marked() || (layout.bucket().is_dir() && matches!(layout.stranger(), Ok(None)));
        if !is_ours {
            bail!("{} is not an environment of nstance-dev; name the right one with --dir", dir.display());
        }
        Ok(layout)
    }

    fn at(dir: &Path) -> anyhow::Result<Self> {
        let absolute = dir.canonicalize().with_context(|| format!("find {}", dir.display()))?;
        Ok(Self { dir: absolute, shown: dir.to_owned() })
    }

    /// Whether the marker is there; nothing else lets `clean` remove the directory.
    pub fn is_marked(&self) -> bool {
        self.dir.join(MARKER).is_file()
    }

    pub(crate) fn mark(&self) -> anyhow::Result<()> {
        let marker = self.dir.join(MARKER);
        fs::write(&marker, MARKER_TEXT).with_context(|| format!("write {}", marker.display()))
    }

    fn stranger(&self) -> io::Result<Option<String>> {
        for entry in fs::read_dir(&self.dir)? {
            let name = entry?.file_name();
            if !name.to_str().is_some_and(|name| OURS.contains(&name)) {
                return Ok(Some(name.to_string_lossy().into_owned()));
            }
        }
        Ok(None)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// For messages and for commands a person may copy.
    pub fn shown(&self) -> std::path::Display<'_> {
        self.shown.display()
    }

    /// ` --dir X`, or nothing where the default does.
    pub fn dir_flag(&self) -> String {
        if self.shown == Path::new("temp") { String::new() } else { format!(" --dir {}", self.shown()) }
    }

    pub fn run(&self) -> PathBuf {
        self.dir.join("run")
    }

    pub fn logs(&self) -> PathBuf {
        self.dir.join("logs")
    }

    pub fn log(&self, component: &str) -> PathBuf {
        self.logs().join(format!("{component}.log"))
    }

    pub fn cache(&self) -> PathBuf {
        self.dir.join("cache")
    }

    /// The cache of one server. The first one's holds those of the others.
    pub(crate) fn cache_of(&self, number: u16) -> PathBuf {
        if number == 1 { self.cache() } else { self.cache().join(format!("server-{number}")) }
    }

    pub fn bucket(&self) -> PathBuf {
        self.dir.join("dev-s3")
    }

    pub fn instances(&self) -> PathBuf {
        self.dir.join("instances")
    }

    /// The objects of the API server for development.
    pub fn objects(&self) -> PathBuf {
        self.dir.join("dev-k8s")
    }

    pub fn operator(&self) -> PathBuf {
        self.dir.join("operator")
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.operator().join("kubeconfig")
    }

    pub fn operator_config(&self) -> PathBuf {
        self.operator().join("config.yaml")
    }

    pub fn nodes(&self) -> PathBuf {
        self.dir.join("dev-k8s/nodes")
    }

    pub fn identity(&self) -> PathBuf {
        self.dir.join("cli-operator-identity")
    }

    /// A path below the directory as a person would write it.
    pub fn short(&self, path: &Path) -> String {
        match path.strip_prefix(&self.dir) {
            Ok(inside) => self.shown.join(inside).display().to_string(),
            Err(_) => path.display().to_string(),
        }
    }

    /// What an instance's directory says of its VM; `None` if it says nothing.
    pub fn vm(&self, instance: &str) -> Option<VmFile> {
        let instance: InstanceId = instance.parse().ok()?;
        let bytes = fs::read(self.instances().join(instance.to_string()).join("vm.json")).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// The living agent of an instance.
    pub fn agent(&self, instance: &str) -> Option<Process> {
        self.vm(instance)?.process.filter(|process| process.lives())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_with_foreign_files_is_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("thesis.tex"), "years of work").unwrap();
        let error = Layout::make(dir.path()).unwrap_err().to_string();
        assert!(error.contains("thesis.tex"), "{error}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(Layout::open(dir.path()).is_err());
    }

    #[test]
    fn an_environment_without_its_marker_is_still_ours() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::make(dir.path()).unwrap();
        for gone in [layout.dir.join(MARKER), layout.run().join("x")] {
            let _ = fs::remove_file(gone);
        }
        fs::remove_dir_all(layout.run()).unwrap();
        assert!(Layout::open(dir.path()).is_ok());
        assert!(Layout::make(dir.path()).unwrap().is_marked());
    }

    #[test]
    fn a_directory_that_is_not_there_tells_how_to_begin() {
        let dir = tempfile::tempdir().unwrap();
        let error = Layout::open(&dir.path().join("temp")).unwrap_err().to_string();
        assert!(error.contains("nstance-dev up"), "{error}");
    }
}
