//! The machine as the agent sees it: where its files are, and what the agent itself has logged.
//!
//! Agents that stand for machines they do not run on (simulations, load generators) see [`Host::nowhere`]: they take
//! no samples of this machine and keep no record of its boot.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

use nstance_rt::telemetry::LogRing;

/// Where a kubelet says that it is well.
const KUBELET: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 10248);

#[derive(Clone)]
pub struct Host {
    root: Option<PathBuf>,
    log: Option<LogRing>,
    pub(crate) kubelet: SocketAddr,
}

impl Host {
    /// The machine this process runs on.
    pub fn machine() -> Self {
        Self::at("/")
    }

    /// A machine whose files lie below `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: Some(root.into()), log: None, kubelet: KUBELET }
    }

    /// No machine at all.
    pub fn nowhere() -> Self {
        Self { root: None, log: None, kubelet: KUBELET }
    }

    /// Remembers the agent's own lines in the record of a failed boot.
    pub fn with_log(mut self, log: LogRing) -> Self {
        self.log = Some(log);
        self
    }

    pub fn with_kubelet(mut self, address: SocketAddr) -> Self {
        self.kubelet = address;
        self
    }

    pub(crate) fn is_somewhere(&self) -> bool {
        self.root.is_some()
    }

    /// Where `path`, an absolute one, is found here.
    pub(crate) fn path(&self, path: impl AsRef<Path>) -> Option<PathBuf> {
        let path = path.as_ref();
        let root = self.root.as_ref()?;
        Some(root.join(path.strip_prefix("/").unwrap_or(path)))
    }

    /// A small text file; `None` if it is not there or cannot be read.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        fs::read(self.path(path)?).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    pub(crate) fn own_log(&self) -> Option<String> {
        self.log.as_ref().map(LogRing::text)
    }

    /// What the kernel calls the machine.
    pub(crate) fn name(&self) -> String {
        let told = self.text("/proc/sys/kernel/hostname").map(|text| text.trim().to_owned());
        told.unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned())
    }

    /// Changes with every boot of the machine.
    pub(crate) fn boot_id(&self) -> String {
        self.text("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
    }
}
