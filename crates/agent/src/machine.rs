//! What can be said about this machine without asking anybody: its names, addresses and size.

use std::{
    fs,
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Duration,
};

use nstance_proto::v1::MachineInfo;

use crate::{host::Host, link::is_host, settings::Overrides};

/// Names and addresses as they are reported; empty where unknown.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Addresses {
    pub ipv4: String,
    pub ipv6: String,
    pub hostname: String,
    pub fqdn: String,
}

impl Addresses {
    /// Detects what is not overridden. `local` is our end of a connection to the server: the address of the interface
    /// that routes to it.
    pub fn detect(overrides: &Overrides, host: &Host, local: Option<IpAddr>) -> Self {
        let (ipv4, ipv6) = match local.map(|it| it.to_canonical()) {
            Some(IpAddr::V4(ours)) => (Some(ours.to_string()), route("[::]:0", "[2001:db8::1]:9")),
            Some(IpAddr::V6(ours)) => (route("0.0.0.0:0", "192.0.2.1:9"), Some(ours.to_string())),
            None => (None, None),
        };
        let (hostname, fqdn) = names(&host.name());
        let or = |told: &Option<String>, found: Option<String>| told.clone().or(found).unwrap_or_default();
        Self {
            ipv4: or(&overrides.ipv4, ipv4),
            ipv6: or(&overrides.ipv6, ipv6),
            fqdn: or(&overrides.fqdn, fqdn),
            hostname: or(&overrides.hostname, hostname),
        }
    }
}

/// Host name and full name out of what the kernel calls the machine. The kernel takes any bytes for a name; the server
/// takes none but names of RFC 1123, and a registration must not fail for a name that nobody chose.
fn names(kernel: &str) -> (Option<String>, Option<String>) {
    let fit = |name: &str| is_host(name).then(|| name.to_owned());
    (kernel.split('.').next().and_then(fit), kernel.contains('.').then(|| fit(kernel)).flatten())
}

/// The address the kernel would send from. Connecting a datagram socket sends nothing, it only asks the routing table;
/// the target is one of those set aside for documentation.
fn route(from: &str, to: &str) -> Option<String> {
    let socket = UdpSocket::bind(from).ok()?;
    socket.connect(to).ok()?;
    socket
        .local_addr()
        .ok()
        .map(|address: SocketAddr| address.ip())
        .filter(|ip| !ip.is_loopback())
        .map(|ip| ip.to_string())
}

/// Facts that do not change while the machine runs. What cannot be read is left out.
pub fn facts() -> MachineInfo {
    let names = rustix::system::uname();
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpus = read("/proc/stat").lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu ")).count();
    let memory_kib: u64 = read("/proc/meminfo")
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse().ok())
        .unwrap_or(0);
    let disk = rustix::fs::statvfs("/").map_or(0, |root| root.f_blocks.saturating_mul(root.f_frsize));
    let os = read("/etc/os-release")
        .lines()
        .find_map(|line| Some(line.strip_prefix("PRETTY_NAME=")?.trim_matches('"').to_owned()))
        .unwrap_or_default();
    MachineInfo {
        cpu_count: u32::try_from(cpus).unwrap_or(u32::MAX),
        memory_bytes: memory_kib.saturating_mul(1024),
        disk_bytes: disk,
        arch: std::env::consts::ARCH.to_owned(),
        os,
        kernel: names.release().to_string_lossy().into_owned(),
        boot_id: read("/proc/sys/kernel/random/boot_id").trim().to_owned(),
    }
}

/// How long the machine has been up.
pub fn uptime() -> Duration {
    Duration::from_secs(u64::try_from(rustix::system::sysinfo().uptime).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_of_this_machine_are_found() {
        let facts = facts();
        assert!(0 < facts.cpu_count && 0 < facts.memory_bytes && 0 < facts.disk_bytes);
        assert!(!facts.kernel.is_empty() && !facts.boot_id.is_empty());
        assert!(Duration::ZERO < uptime());
    }

    #[test]
    fn names_that_no_server_takes_are_not_told() {
        let long = "a".repeat(64);
        for (kernel, hostname, fqdn) in [
            ("web-1", Some("web-1"), None),
            ("web-1.example.com", Some("web-1"), Some("web-1.example.com")),
            ("my_host", None, None),
            ("(none)", None, None),
            ("", None, None),
            (long.as_str(), None, None),
            ("a..b", Some("a"), None),
            ("web.my_zone", Some("web"), None),
            ("-web.example.com", None, None),
        ] {
            let found = names(kernel);
            assert_eq!((found.0.as_deref(), found.1.as_deref()), (hostname, fqdn), "{kernel}");
        }
    }

    #[test]
    fn what_is_told_is_not_detected() {
        let overrides = Overrides {
            hostname: Some("web-1".into()),
            fqdn: Some("web-1.example.com".into()),
            ipv4: Some("10.0.0.1".into()),
            ipv6: Some("fd00::1".into()),
        };
        let told = Addresses::detect(&overrides, &Host::machine(), None);
        assert_eq!((told.hostname.as_str(), told.ipv6.as_str()), ("web-1", "fd00::1"));
        let found = Addresses::detect(&Overrides::default(), &Host::machine(), Some("10.1.2.3".parse().unwrap()));
        assert_eq!(found.ipv4, "10.1.2.3");
        assert!(!found.hostname.is_empty());
    }
}
