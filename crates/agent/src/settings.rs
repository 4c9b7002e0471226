//! The agent's settings: all of them from the environment, all problems told together, each with its variable's name.
//!
//! Some are not used by the parts that exist today. They are read and judged all the same: a machine image is built
//! once, and a typing error must show on the first boot, not with some later version.

use std::{collections::BTreeMap, ffi::OsString, net::IpAddr, net::SocketAddr, path::PathBuf, time::Duration};

use nstance_core::ids::InstanceId;
pub use nstance_identity::link::Address;
use nstance_identity::link::is_host;

/// What stands before every variable.
const PREFIX: &str = "NSTANCE_";

/// One variable that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable}: {why}")]
pub struct Problem {
    pub variable: String,
    pub why: String,
}

impl Problem {
    pub(crate) fn new(name: &str, why: impl Into<String>) -> Self {
        Self { variable: format!("{PREFIX}{name}"), why: why.into() }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Provider {
    Auto,
    Aws,
    Gcp,
    Azure,
    Proxmox,
    Dev,
    None,
}

/// What a stop signal is taken for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaveOnStop {
    /// Ask the service manager.
    Auto,
    /// The machine goes down.
    Always,
    /// The agent alone stops, and will be back.
    Never,
}

/// Values that replace what the agent would find out by itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Overrides {
    pub hostname: Option<String>,
    pub fqdn: Option<String>,
    pub ipv4: Option<String>,
    pub ipv6: Option<String>,
}

/// A directory the agent writes, and the mode of the files in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Directory {
    pub path: PathBuf,
    pub file_mode: u32,
    pub group: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    pub debug: bool,
    pub environment: String,
    pub registration: Vec<Address>,
    pub agent: Vec<Address>,
    pub identity: Directory,
    pub keys: Directory,
    pub recv: Directory,
    pub instance: InstanceId,
    pub overrides: Overrides,
    /// Zero: no periodic reports.
    pub metrics_interval: Duration,
    /// Zero: metadata is not polled.
    pub spot_poll_interval: Duration,
    pub provider: Provider,
    pub notice_file: Option<PathBuf>,
    pub leave_on_stop: LeaveOnStop,
    pub on_change: Option<PathBuf>,
    pub boot_sentinel: PathBuf,
    pub boot_error_file: Option<PathBuf>,
    pub boot_logs: Vec<PathBuf>,
    pub boot_timeout: Duration,
    pub health_addr: Option<SocketAddr>,
}

impl Settings {
    /// Reads variables through `get`, which is given full names. An empty value counts as unset.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Result<Self, Vec<Problem>> {
        Self::read_raw(&|name| get(name).map(OsString::from))
    }

    pub fn from_env() -> Result<Self, Vec<Problem>> {
        Self::read_raw(&|name| std::env::var_os(name))
    }

    fn read_raw(get: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, Vec<Problem>> {
        let mut env = Env { get, problems: Vec::new() };
        let settings = env.settings();
        match settings {
            Some(settings) if env.problems.is_empty() => Ok(settings),
            _ => Err(env.problems),
        }
    }
}

/// Where the agent keeps its identity, for commands that need no other setting.
pub fn identity_path<V: Into<OsString>>(get: impl Fn(&str) -> Option<V>) -> Result<PathBuf, Problem> {
    let mut env = Env { get: &|name| get(name).map(Into::into), problems: Vec::new() };
    let directory = env.directory("IDENTITY", "identity", 0o600, Grouped::No);
    match env.problems.into_iter().find(|problem| problem.variable.ends_with("_DIR")) {
        Some(problem) => Err(problem),
        None => Ok(directory.path),
    }
}

/// The directories of the environment by their variables, whatever is wrong with other settings; without those whose
/// own variables are bad.
pub(crate) fn directories_from_env() -> Vec<(&'static str, Directory)> {
    let mut env = Env { get: &|name| std::env::var_os(name), problems: Vec::new() };
    let all = DIRECTORIES.into_iter().zip(env.directories());
    let is_good = |name: &str| env.problems.iter().all(|it| it.variable.strip_prefix(PREFIX) != Some(name));
    all.filter(|(name, _)| is_good(name)).collect()
}

/// The variables of the three directories.
pub(crate) const DIRECTORIES: [&str; 3] = ["IDENTITY_DIR", "KEYS_DIR", "RECV_DIR"];

struct Env<'a> {
    get: &'a dyn Fn(&str) -> Option<OsString>,
    problems: Vec<Problem>,
}

impl Env<'_> {
    fn settings(&mut self) -> Option<Settings> {
        let instance = self.instance();
        let registration = self.addresses("SERVER_REGISTRATION_ADDR");
        let agent = self.addresses("SERVER_AGENT_ADDR");
        let debug = self.or("DEBUG", false, parse_bool, "use true or false");
        let environment = self.text("ENVIRONMENT").unwrap_or_else(|| "development".to_owned());
        let [identity, keys, recv] = self.directories();
        Some(Settings {
            debug,
            environment,
            registration,
            agent,
            identity,
            keys,
            recv,
            overrides: Overrides {
                hostname: self.checked("INSTANCE_HOSTNAME", is_host, "use a host name of letters, digits, `-` and `.`"),
                fqdn: self.checked("INSTANCE_FQDN", is_host, "use a host name of letters, digits, `-` and `.`"),
                ipv4: self.checked(
                    "INSTANCE_IPV4",
                    |it| matches!(it.parse(), Ok(IpAddr::V4(_))),
                    "use an IPv4 address",
                ),
                ipv6: self.checked(
                    "INSTANCE_IPV6",
                    |it| matches!(it.parse(), Ok(IpAddr::V6(_))),
                    "use an IPv6 address",
                ),
            },
            metrics_interval: self.duration("METRICS_INTERVAL", Duration::from_secs(60)),
            spot_poll_interval: self.duration("SPOT_POLL_INTERVAL", Duration::from_secs(2)),
            provider: self.or(
                "PROVIDER",
                Provider::Auto,
                parse_provider,
                "use auto, aws, gcp, azure, proxmox, dev or none",
            ),
            notice_file: self.path("NOTICE_FILE"),
            leave_on_stop: self.or("LEAVE_ON_STOP", LeaveOnStop::Auto, parse_leave, "use auto, always or never"),
            on_change: self.path("ON_CHANGE"),
            boot_sentinel: self
                .path("BOOT_SENTINEL")
                .unwrap_or_else(|| PathBuf::from("/run/cluster-api/bootstrap-success.complete")),
            boot_error_file: self.path("BOOT_ERROR_FILE"),
            boot_logs: self.paths("BOOT_LOGS", "/var/log/cloud-init-output.log"),
            boot_timeout: self.duration("BOOT_TIMEOUT", Duration::from_secs(15 * 60)),
            health_addr: self
                .text("HEALTH_ADDR")
                .and_then(|text| self.keep("HEALTH_ADDR", text.parse().ok(), "use address:port")),
            // The last: without it there are no settings, and all others are to be judged before.
            instance: instance?,
        })
    }

    /// The first problem of a variable is the one to be told: others may follow from it.
    fn problem(&mut self, name: &str, why: impl Into<String>) {
        let problem = Problem::new(name, why);
        if self.problems.iter().all(|it| it.variable != problem.variable) {
            self.problems.push(problem);
        }
    }

    fn text(&mut self, name: &str) -> Option<String> {
        let value = (self.get)(&format!("{PREFIX}{name}")).filter(|value| !value.is_empty())?;
        match value.into_string() {
            Ok(text) => Some(text),
            Err(value) => {
                self.problem(name, format!("`{}` cannot be used: use UTF-8", value.display()));
                None
            }
        }
    }

    fn required(&mut self, name: &str) -> Option<String> {
        let value = self.text(name);
        if value.is_none() {
            self.problem(name, "must be set");
        }
        value
    }

    fn keep<T>(&mut self, name: &str, value: Option<T>, rule: &str) -> Option<T> {
        if value.is_none() {
            let given = self.text(name).unwrap_or_default();
            self.problem(name, format!("`{given}` cannot be used: {rule}"));
        }
        value
    }

    fn or<T>(&mut self, name: &str, default: T, parse: impl Fn(&str) -> Option<T>, rule: &str) -> T {
        match self.text(name) {
            None => default,
            Some(text) => self.keep(name, parse(&text), rule).unwrap_or(default),
        }
    }

    fn checked(&mut self, name: &str, fits: impl Fn(&str) -> bool, rule: &str) -> Option<String> {
        let text = self.text(name)?;
        let fitting = fits(&text).then_some(text);
        self.keep(name, fitting, rule)
    }

    fn duration(&mut self, name: &str, default: Duration) -> Duration {
        self.or(name, default, parse_duration, "use a duration such as 500ms, 60s or 1h30m, or 0")
    }

    fn path(&mut self, name: &str) -> Option<PathBuf> {
        let text = self.text(name)?;
        self.keep(name, absolute(&text), "use an absolute path")
    }

    fn paths(&mut self, name: &str, default: &str) -> Vec<PathBuf> {
        let text = self.text(name).unwrap_or_else(|| default.to_owned());
        let all = list(&text).map(absolute).collect();
        self.keep(name, all, "use absolute paths, joined by commas").unwrap_or_default()
    }

    fn addresses(&mut self, name: &str) -> Vec<Address> {
        let Some(text) = self.required(name) else { return Vec::new() };
        let all: Option<Vec<_>> = list(&text).map(Address::parse).collect();
        let rule = "use host:port or [v6]:port, port 1 to 65535, several joined by commas";
        self.keep(name, all.filter(|all| !all.is_empty()), rule).unwrap_or_default()
    }

    fn instance(&mut self) -> Option<InstanceId> {
        let kind = self.text("INSTANCE_KIND");
        let text = self.required("INSTANCE_ID")?;
        let rule = "use the id the server gave: three letters and 26 characters of 0-9 a-z without i, l, o, u";
        let id: InstanceId = self.keep("INSTANCE_ID", text.parse().ok(), rule)?;
        if let Some(kind) = kind
            && kind != id.kind().as_str()
        {
            self.problem("INSTANCE_KIND", format!("`{kind}` is not the kind of {id}; leave it out"));
        }
        Some(id)
    }

    fn directory(&mut self, name: &str, leaf: &str, file_mode: u32, grouped: Grouped) -> Directory {
        let path = self.path(&format!("{name}_DIR")).unwrap_or_else(|| PathBuf::from("/opt/nstance-agent").join(leaf));
        let rule = "use an octal mode of at most 0777";
        let file_mode = self.or(&format!("{name}_MODE"), file_mode, parse_mode, rule);
        let group = match grouped {
            Grouped::No => None,
            Grouped::Yes => {
                let variable = format!("{name}_GROUP");
                self.text(&variable).and_then(|text| {
                    self.keep(&variable, group_id(&text), "use the name or number of a group of this machine")
                })
            }
        };
        Directory { path, file_mode, group }
    }

    fn directories(&mut self) -> [Directory; 3] {
        let identity = self.directory("IDENTITY", "identity", 0o600, Grouped::No);
        let keys = self.directory("KEYS", "keys", 0o600, Grouped::Yes);
        let recv = self.directory("RECV", "recv", 0o640, Grouped::Yes);
        let all = [identity, keys, recv];
        self.check_directories(&all);
        all
    }

    fn check_directories(&mut self, all: &[Directory; 3]) {
        let mut names = BTreeMap::new();
        for (name, directory) in DIRECTORIES.into_iter().zip(all) {
            if let Some(other) = names.insert(directory.path.clone(), name) {
                let path = directory.path.display();
                self.problem(name, format!("`{path}` is {PREFIX}{other} too; use three different directories"));
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Grouped {
    Yes,
    No,
}

fn list(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty())
}

fn absolute(text: &str) -> Option<PathBuf> {
    Some(PathBuf::from(text)).filter(|path| path.is_absolute())
}

fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "true" | "1" => Some(true),
        "false" | "0" => Some(false),
        _ => None,
    }
}

fn parse_mode(text: &str) -> Option<u32> {
    u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777)
}

fn parse_provider(text: &str) -> Option<Provider> {
    Some(match text {
        "auto" => Provider::Auto,
        "aws" => Provider::Aws,
        "gcp" => Provider::Gcp,
        "azure" => Provider::Azure,
        "proxmox" => Provider::Proxmox,
        "dev" => Provider::Dev,
        "none" => Provider::None,
        _ => return None,
    })
}

fn parse_leave(text: &str) -> Option<LeaveOnStop> {
    Some(match text {
        "auto" => LeaveOnStop::Auto,
        "always" => LeaveOnStop::Always,
        "never" => LeaveOnStop::Never,
        _ => return None,
    })
}

/// `0`, or numbers each with its unit: `90s`, `1h30m`.
fn parse_duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut total = Duration::ZERO;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let (number, tail) = rest.split_at(digits);
        let end = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, next) = tail.split_at(end);
        let unit = match unit {
            "ms" => Duration::from_millis(1),
            "s" => Duration::from_secs(1),
            "m" => Duration::from_secs(60),
            "h" => Duration::from_secs(3600),
            "d" => Duration::from_secs(86_400),
            _ => return None,
        };
        total = total.checked_add(unit.checked_mul(number.parse().ok()?)?)?;
        rest = next;
    }
    (!text.is_empty()).then_some(total)
}

/// A group by number, or by its name in `/etc/group`: the agent runs before any directory service is reachable.
fn group_id(text: &str) -> Option<u32> {
    if let Ok(id) = text.parse() {
        return Some(id);
    }
    std::fs::read_to_string("/etc/group").ok()?.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next() != Some(text) {
            return None;
        }
        fields.nth(1)?.parse().ok()
    })
}

#[cfg(test)]
#[path = "settings/tests.rs"]
mod tests;
