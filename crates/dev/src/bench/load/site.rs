//! The environment of one run: a store and a server as processes of their own, a cloud that is a file, and what can be
//! read of them from outside.

use std::{
    collections::BTreeMap,
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, bail};
use nstance_agent::settings::Address;
use nstance_config::Config;
use nstance_core::ports::clock::Clock as _;
use nstance_identity::ca::Bundle;
use nstance_rt::clock::SystemClock;
use nstance_store::s3::S3Store;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::{LoadArgs, agent::Doors};
use crate::{
    api,
    component::{Component, Spec},
    http,
    layout::Layout,
    ports::{self, Ports},
    records::{self, Kind},
    shape::{self, Shape},
    stop, stored,
};

/// For a process to come up. Loading ten thousand records is part of it.
const START: Duration = Duration::from_secs(60);
const PERIOD: Duration = Duration::from_millis(2);
/// The kernel counts processor time in ticks of this many to the second, on every architecture we build for.
const TICKS: f64 = 100.0;
/// So many descriptors are left for everything but agents.
const SPARE_FILES: u64 = 1000;

pub(super) struct Site {
    pub(super) layout: Layout,
    ports: Ports,
    bucket: Option<Arc<S3Store>>,
    config: Option<Config>,
    store: Option<Component>,
    server: Option<Component>,
    server_program: PathBuf,
}

/// What a process has used.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Used {
    pub(super) rss_bytes: u64,
    pub(super) peak_rss_bytes: u64,
    /// On all processors.
    pub(super) cpu_seconds: f64,
}

/// Seconds of all processors so far.
#[derive(Debug, Clone, Copy)]
pub(super) struct Machine {
    ours: f64,
    busy: f64,
    all: f64,
}

impl Machine {
    /// How much of the machine others took since then.
    pub(super) fn others_percent(self, since: Self) -> f64 {
        let others = (self.busy - since.busy) - (self.ours - since.ours);
        (others / (self.all - since.all).max(f64::EPSILON) * 100.0).max(0.0)
    }
}

/// Lets this process, and those it starts, open enough files for so many agents.
pub(super) fn raise_file_limit(n_agents: usize) -> anyhow::Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let wanted = u64::try_from(n_agents).unwrap_or(u64::MAX).saturating_mul(2).saturating_add(SPARE_FILES);
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|it| wanted <= it) {
        return Ok(());
    }
    if limit.maximum.is_none_or(|it| wanted <= it) {
        return setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..limit })
            .context("raise the limit of files");
    }
    // Beyond the hard limit only with the right to; one descriptor for each agent may do without.
    let least = u64::try_from(n_agents).unwrap_or(u64::MAX).saturating_add(SPARE_FILES);
    let higher = Rlimit { current: Some(wanted), maximum: Some(wanted) };
    if setrlimit(Resource::Nofile, higher).is_ok() {
        return Ok(());
    }
    match limit.maximum {
        Some(hard) if hard < least => {
            bail!(
                "{n_agents} agents need {least} open files, the hard limit is {hard}; raise it with `ulimit -Hn {least}`"
            )
        }
        hard => {
            setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: hard }).context("raise the limit of files")
        }
    }
}

impl Site {
    /// Nothing runs yet; whatever is started is ended by [`Site::stop`].
    pub(super) fn new(args: &LoadArgs) -> anyhow::Result<Self> {
        let number = SystemClock.now().as_millis();
        let dir = std::env::temp_dir().join(format!("nstance-bench-load-{}-{number}", std::process::id()));
        let server_program = match &args.server {
            Some(program) => fs::canonicalize(program).with_context(|| format!("find {}", program.display()))?,
            None => std::env::current_exe().context("find the own program")?.with_file_name("nstance-server"),
        };
        Ok(Self {
            layout: Layout::make(&dir)?,
            ports: Ports::at(0, Shape::new(1, 1, false)?)?,
            bucket: None,
            config: None,
            store: None,
            server: None,
            server_program,
        })
    }

    pub(super) fn journal(&self) -> PathBuf {
        self.layout.instances().join("journal.jsonl")
    }

    pub(super) async fn start(&mut self, n_agents: usize, args: &LoadArgs) -> anyhow::Result<()> {
        self.start_store().await?;
        let bucket = stored::open(self.ports.store())?;
        let shard = shape::shard(1);
        let text = format!("{:#}\n", config(&self.journal(), self.ports, n_agents, args.group_size));
        stored::create_config(&bucket, &shard, text).await?;
        let stored = stored::read_config(&bucket, &shard).await?.context("the config that was stored is not there")?;
        self.config = Some(stored.config);
        self.bucket = Some(bucket);
        self.start_server().await?;
        Ok(())
    }

    async fn start_store(&mut self) -> anyhow::Result<()> {
        let port = self.ports.store();
        let dir = self.layout.bucket().display().to_string();
        // A store in a cloud is not slowed by one disk's syncs, and nothing of a bench need outlive a power cut.
        let args = ["s3", "--no-sync", "--dir", &dir, "--addr", &format!("{}:{port}", Ipv4Addr::LOCALHOST)];
        let spec = Spec {
            name: records::STORE.to_owned(),
            kind: Kind::Store,
            program: std::env::current_exe().context("find the own program")?,
            args: args.map(str::to_owned).into(),
            env: BTreeMap::new(),
            ports: [("s3".to_owned(), port)].into(),
            grace: stop::STORE_GRACE,
            shard: None,
        };
        self.store = Some(Component::start(&self.layout, spec, 0)?);
        self.serves("the store", port, "/-/health").await
    }

    /// Answers how long it took from the start of the process to the ports that serve.
    pub(super) async fn start_server(&mut self) -> anyhow::Result<Duration> {
        let named = |(index, name): (u16, &str)| (name.to_owned(), self.ports.bound(1, index));
        let shard = shape::shard(1).to_string();
        let cache = self.layout.cache().display().to_string();
        let args = ["--storage", "s3", "--bucket", stored::BUCKET, "--shard", &shard, "--id", "server-1"];
        let spec = Spec {
            name: "server-1".to_owned(),
            kind: Kind::Server,
            program: self.server_program.clone(),
            args: args.into_iter().chain(["--cachedir", &cache]).map(str::to_owned).collect(),
            env: stored::variables(self.ports.store(), "dev-server-1"),
            ports: (0..).zip(ports::SERVER).map(named).collect(),
            grace: stop::SERVER_GRACE,
            shard: Some(shard),
        };
        let begin = SystemClock.monotonic();
        self.server = Some(Component::start(&self.layout, spec, 0)?);
        self.serves("the server", self.ports.bound(1, 0), "/leader").await?;
        for index in 2..5 {
            let port = self.ports.bound(1, index);
            TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.with_context(|| format!("connect to port {port}"))?;
        }
        Ok(SystemClock.monotonic().since(begin))
    }

    async fn serves(&mut self, what: &str, port: u16, path: &str) -> anyhow::Result<()> {
        let begin = SystemClock.monotonic();
        loop {
            let why = match http::get(port, path).await {
                Ok(answer) if answer.code == 200 => return Ok(()),
                Ok(answer) => answer.body.trim().to_owned(),
                Err(error) => error.to_string(),
            };
            if START < SystemClock.monotonic().since(begin) {
                bail!("{what} does not serve within {} s: {why}", START.as_secs());
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// Ends the server in good order, so that its lease is free.
    pub(super) async fn stop_server(&mut self) -> anyhow::Result<()> {
        if let Some(mut server) = self.server.take() {
            server.stop(&self.layout, stop::SERVER_GRACE).await.context("stop the server")?;
        }
        Ok(())
    }

    pub(super) fn forget_cache(&self) -> anyhow::Result<()> {
        fs::remove_dir_all(self.layout.cache()).context("remove the server's cache")
    }

    pub(super) async fn operator(&self) -> anyhow::Result<api::Client> {
        let (Some(bucket), Some(config)) = (&self.bucket, &self.config) else { bail!("nothing was started") };
        api::connect_to(&self.layout, bucket, config).await
    }

    pub(super) async fn doors(&self, interval: Duration) -> anyhow::Result<Doors> {
        let bucket = self.bucket.as_ref().context("nothing was started")?;
        let bundle = stored::read_ca(bucket).await?.context("the cluster has no CA")?;
        let at = |index| Address { host: "127.0.0.1".to_owned(), port: self.ports.told(1, index) };
        let bundle = Bundle::parse(&bundle).context("read the CA's certificate")?;
        Ok(Doors { registration: at(2), agent: at(4), bundle, interval })
    }

    /// The server's own figures.
    pub(super) async fn metrics(&self) -> anyhow::Result<Scrape> {
        let limit = Duration::from_secs(10);
        let answer = http::get_within(self.ports.bound(1, 0), "/metrics", limit).await.context("read the metrics")?;
        Ok(Scrape(answer.body))
    }

    pub(super) fn used(&self) -> anyhow::Result<Used> {
        let pid = self.server.as_ref().context("no server runs")?.pid();
        used(pid)
    }

    /// Processor time of all that is ours, and of the whole machine.
    pub(super) fn machine(&self) -> anyhow::Result<Machine> {
        let ours = [
            Some(std::process::id()),
            self.store.as_ref().map(Component::pid),
            self.server.as_ref().map(Component::pid),
        ];
        let ours: Result<Vec<Used>, _> = ours.into_iter().flatten().map(used).collect();
        let stat = fs::read_to_string("/proc/stat").context("read /proc/stat")?;
        let (busy, all) = machine_ticks(&stat).context("read the processor time of the machine")?;
        Ok(Machine { ours: ours?.iter().map(|it| it.cpu_seconds).sum(), busy: busy / TICKS, all: all / TICKS })
    }

    /// The last lines of the server, for whoever must find out what went wrong.
    pub(super) fn last_words(&self) -> Vec<String> {
        self.server.as_ref().map(|it| it.tail(20)).unwrap_or_default()
    }

    /// Ends what was started and removes the directory.
    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        let server = self.stop_server().await;
        let store = match &mut self.store {
            Some(store) => store.stop(&self.layout, stop::STORE_GRACE).await.context("stop the store"),
            None => Ok(()),
        };
        let removed = fs::remove_dir_all(self.layout.dir()).context("remove the directory of the bench");
        server.and(store).and(removed)
    }
}

/// A config like one of production, but for what is said here.
fn config(journal: &Path, ports: Ports, n_agents: usize, group_size: usize) -> Value {
    let at = |index| json!(format!("127.0.0.1:{}", ports.told(1, index)));
    let addresses = json!({
        "health_addr": at(0), "election_addr": at(1), "registration_addr": at(2), "operator_addr": at(3), "agent_addr": at(4),
    });
    let groups: BTreeMap<String, Value> =
        sizes(n_agents, group_size).into_keys().map(|it| (it, json!({ "template": "tst", "size": 0 }))).collect();
    json!({
        "server": {
            "cluster_id": "bench", "shard": shape::shard(1).to_string(),
            "provider": { "kind": "fake", "region": "bench", "zone": "bench-a", "options": { "journal": journal } },
            "bind": addresses.clone(), "advertise": addresses,
            "subnet_pools": { "local": ["loopback"] },
            "secrets": {
                "provider": "object-storage",
                "encryption_key": { "provider": "env", "source": "NSTANCE_ENCRYPTION_KEY" },
            },
            // The cloud takes as many creates as it is asked for, so the server's own pace is not what is measured.
            "create_rate_limit": "0s", "create_burst": 10_000, "max_parallel_creates": 256,
            // Nobody acknowledges a drain here.
            "default_drain_timeout": "1s",
            // A storm may come late: machines sleep until it does.
            "garbage_collection": { "interval": "2m", "registration_timeout": "1h" },
            // Machines die here all the time.
            "safety": { "runaway_base": 10_000 },
            "error_exit_jitter": { "min_delay": "0s", "max_delay": "0s" },
        },
        "certificates": {
            "demo.server": { "kind": "server", "cn": "{{ .Instance.ID }}", "dns": ["localhost", "{{ .Instance.Hostname }}"], "ttl": 24 },
        },
        "defaults": { "vars": { "Greeting": "hello" } },
        "templates": {
            "tst": {
                "kind": "tst", "arch": "amd64", "subnet_pool": "local",
                "files": {
                    "demo.crt": { "kind": "certificate", "template": "demo.server" },
                    "instance.env": {
                        "kind": "env",
                        "template": { "INSTANCE_ID": "{{ .Instance.ID }}", "GREETING": "{{ .Vars.Greeting }}" },
                    },
                },
            },
        },
        "groups": { "default": groups },
    })
}

/// Groups of at most `group_size`, by name.
pub(super) fn sizes(n_agents: usize, group_size: usize) -> BTreeMap<String, usize> {
    let n_groups = n_agents.div_ceil(group_size.max(1)).max(1);
    let size = |n: usize| n_agents / n_groups + usize::from(n < n_agents % n_groups);
    (0..n_groups).map(|n| (format!("group-{n:04}"), size(n))).collect()
}

fn used(pid: u32) -> anyhow::Result<Used> {
    let read = |name: &str| {
        let path = format!("/proc/{pid}/{name}");
        fs::read_to_string(&path).with_context(|| format!("read {path}"))
    };
    let status = read("status")?;
    let kib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    let cpu = cpu_ticks(&read("stat")?).context("read the processor time")?;
    #[expect(clippy::cast_precision_loss, reason = "ticks of a bench are few")]
    let cpu_seconds = cpu as f64 / TICKS;
    Ok(Used { rss_bytes: kib("VmRSS"), peak_rss_bytes: kib("VmHWM"), cpu_seconds })
}

/// User and system time of `/proc/PID/stat`. The name before them may hold anything, also spaces and brackets.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace().skip(11).map(str::parse::<u64>);
    Some(fields.next()?.ok()? + fields.next()?.ok()?)
}

/// Busy ticks and all ticks of `/proc/stat`.
fn machine_ticks(stat: &str) -> Option<(f64, f64)> {
    let fields = stat.lines().next()?.strip_prefix("cpu ")?.split_ascii_whitespace();
    // Guests' time is in user time already.
    let ticks: Vec<f64> = fields.take(8).map_while(|it| it.parse().ok()).collect();
    let all: f64 = ticks.iter().sum();
    Some((all - ticks.get(3)? - ticks.get(4)?, all))
}

/// The text of the server's metrics.
pub(super) struct Scrape(String);

impl Scrape {
    /// The sum of all series of a counter, whatever their labels.
    pub(super) fn sum(&self, name: &str) -> u64 {
        let value = |line: &str| {
            let rest = line.strip_prefix(name)?;
            let (labels, value) = rest.split_once(' ')?;
            (labels.is_empty() || labels.starts_with('{')).then_some(value)?.parse::<u64>().ok()
        };
        self.0.lines().filter_map(value).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_as_even_as_can_be_and_not_too_large() {
        let sizes = |n, size| sizes(n, size).into_values().collect::<Vec<_>>();
        assert_eq!(sizes(20, 100), [20]);
        assert_eq!(sizes(250, 100), [84, 83, 83]);
        assert_eq!(sizes(10_000, 100).len(), 100);
    }

    #[test]
    fn processor_time_is_found_behind_any_name() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 5 0 100 1000 200";
        assert_eq!(cpu_ticks(stat), Some(300));
        assert_eq!(cpu_ticks("7 (x) S"), None);
    }

    #[test]
    fn what_others_took_is_what_was_busy_and_not_ours() {
        assert_eq!(machine_ticks("cpu  10 1 5 80 4 0 0 0 0 0\ncpu0 1"), Some((16.0, 100.0)));
        let at = |ours, busy, all| Machine { ours, busy, all };
        assert!((at(3.0, 9.0, 20.0).others_percent(at(1.0, 2.0, 10.0)) - 50.0).abs() < 1e-9);
    }

    #[test]
    fn counters_are_summed_over_their_labels_and_not_over_their_likes() {
        let text = "# TYPE a counter\na_total{op=\"get\",outcome=\"ok\"} 3\na_total{op=\"put\"} 4\na_total_more 9\n";
        assert_eq!(Scrape(text.to_owned()).sum("a_total"), 7);
        assert_eq!(Scrape("b_total 5\n".to_owned()).sum("b_total"), 5);
    }

    #[test]
    fn the_config_of_a_bench_is_valid() {
        let ports = Ports::at(4000, Shape::new(1, 1, false).unwrap()).unwrap();
        let text = config(Path::new("/x/journal"), ports, 250, 100).to_string();
        let config = crate::render::check("config", text.as_bytes(), Some(&shape::shard(1))).unwrap();
        assert_eq!(config.groups.len(), 3);
    }
}
