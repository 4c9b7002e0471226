//! Where the programs are.

use std::{
    env, fmt,
    path::{Path, PathBuf},
};

/// The variable that names the programs' directory; other Kubernetes test kits use the same.
const VARIABLE: &str = "KUBEBUILDER_ASSETS";

/// A program that a server consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    Etcd,
    ApiServer,
    ControllerManager,
    Scheduler,
}

impl Program {
    pub fn file_name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::ApiServer => "kube-apiserver",
            Self::ControllerManager => "kube-controller-manager",
            Self::Scheduler => "kube-scheduler",
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.file_name())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AssetsError {
    #[error("KUBEBUILDER_ASSETS is not set; `make kubernetes-tools` builds the programs and prints its value")]
    Unset,
    #[error("{name} is missing in KUBEBUILDER_ASSETS ({}); `make kubernetes-tools` goes on building it", dir.display())]
    Missing { name: String, dir: PathBuf },
}

/// The directory that `make kubernetes-tools` fills.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assets {
    dir: PathBuf,
}

impl Assets {
    pub fn from_env() -> Result<Self, AssetsError> {
        match env::var_os(VARIABLE).filter(|it| !it.is_empty()) {
            Some(dir) => Ok(Self::at(dir)),
            None => Err(AssetsError::Unset),
        }
    }

    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn program(&self, program: Program) -> Result<PathBuf, AssetsError> {
        self.entry(program.file_name())
    }

    /// Cluster API's core manager.
    pub fn core_manager(&self) -> Result<PathBuf, AssetsError> {
        self.entry("cluster-api-core-manager")
    }

    /// The directory of Cluster API's CRDs, one file each.
    pub fn capi_crds(&self) -> Result<PathBuf, AssetsError> {
        self.entry("capi/crds")
    }

    /// The manifest of the core manager's webhooks.
    pub fn capi_webhooks(&self) -> Result<PathBuf, AssetsError> {
        self.entry("capi/webhooks.yaml")
    }

    /// The kubectl of this directory, else the machine's.
    pub fn kubectl(&self) -> Result<PathBuf, AssetsError> {
        self.entry("kubectl").or_else(|missing| on_path("kubectl").ok_or(missing))
    }

    /// The helm of this directory, else the machine's.
    pub fn helm(&self) -> Result<PathBuf, AssetsError> {
        self.entry("helm").or_else(|missing| on_path("helm").ok_or(missing))
    }

    fn entry(&self, name: &str) -> Result<PathBuf, AssetsError> {
        let path = self.dir.join(name);
        if path.exists() {
            Ok(path)
        } else {
            Err(AssetsError::Missing { name: name.to_owned(), dir: self.dir.clone() })
        }
    }
}

fn on_path(name: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|dir| dir.join(name)).find(|it| it.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named_with_the_next_step() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("etcd"), "").unwrap();
        let assets = Assets::at(dir.path());
        assert_eq!(assets.program(Program::Etcd).unwrap(), dir.path().join("etcd"));
        let missing = assets.program(Program::ApiServer).unwrap_err().to_string();
        let expected = format!(
            "kube-apiserver is missing in KUBEBUILDER_ASSETS ({}); `make kubernetes-tools` goes on building it",
            dir.path().display()
        );
        assert_eq!(missing, expected);
    }

    #[test]
    fn kubectl_of_the_directory_comes_before_the_machines() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("kubectl"), "").unwrap();
        assert_eq!(Assets::at(dir.path()).kubectl().unwrap(), dir.path().join("kubectl"));
    }
}
