//! The server is killed hard, again and again, while its group grows from nothing to twenty and shrinks to five.
//! Afterwards there are exactly the wanted processes, each with one record, and nothing else.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use nstance_core::ports::clock::{Clock, Entropy};
use nstance_rt::{
    clock::SystemClock,
    entropy::{SeededEntropy, below},
};
use serde_json::Value;

/// Cycles of 0 → 20 → 5, and kills in each: fifty kills in all.
const CYCLES: u64 = 5;
const KILLS: u64 = 10;
const LIMIT: Duration = Duration::from_secs(90);
/// More than two sweeps.
const QUIET: Duration = Duration::from_millis(2500);

fn binary(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_BIN_EXE_nstance-dev")).with_file_name(name);
    assert!(path.exists(), "{} is missing: run `cargo build --bins` first, as `make test` does", path.display());
    path
}

/// A shard whose server runs as a process of its own, on a directory as its bucket.
struct Shard {
    dir: tempfile::TempDir,
    port: u16,
    server: Option<Child>,
}

impl Shard {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("bucket/config")).unwrap();
        Self { dir, port: free_ports(), server: None }
    }

    fn path(&self, below: &str) -> PathBuf {
        self.dir.path().join(below)
    }

    fn set_size(&self, size: u32) {
        let work_dir = self.path("instances");
        let port = |n: u16| format!("127.0.0.1:{}", self.port + n);
        let config = serde_json::json!({
            "server": {
                "cluster_id": "crash", "shard": "dev-1",
                "provider": { "kind": "process", "region": "dev", "zone": "deva",
                              "options": { "work_dir": work_dir, "agent_binary": binary("nstance-agent") } },
                "bind": { "health_addr": port(0), "election_addr": port(1), "registration_addr": port(2),
                          "operator_addr": port(3), "agent_addr": port(4) },
                "advertise": { "health_addr": port(0), "election_addr": port(1), "registration_addr": port(2),
                               "operator_addr": port(3), "agent_addr": port(4) },
                "subnet_pools": { "local": ["loopback"] },
                "secrets": { "encryption_key": { "provider": "env" } },
                "default_drain_timeout": "200ms", "health_check_interval": "5s",
                "garbage_collection": { "interval": "1s", "registration_timeout": "30s",
                                        "deleted_record_retention": "1s" },
                "leader_election": { "ttl": "3s", "renew_interval": "1s", "margin": "500ms" },
            },
            "templates": { "tst": { "kind": "tst", "arch": "amd64", "subnet_pool": "local" } },
            "groups": { "default": { "test": { "template": "tst", "size": size } } },
        });
        // As a person would replace it: whole, by rename.
        let (path, new) = (self.path("bucket/config/dev-1.jsonc"), self.path("new.jsonc"));
        fs::write(&new, config.to_string()).unwrap();
        fs::rename(new, path).unwrap();
    }

    fn start(&mut self) {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.path("server.log")).unwrap();
        let server = Command::new(binary("nstance-server"))
            .args(["--id", "server-1", "--shard", "dev-1", "--storage", "file"])
            .arg("--bucket")
            .arg(self.path("bucket"))
            .arg("--cachedir")
            .arg(self.path("cache"))
            .env("NSTANCE_ENCRYPTION_KEY", "thisisatest32bytekey123456789012")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.server = Some(server);
    }

    fn kill(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.kill().unwrap();
            server.wait().unwrap();
        }
    }

    /// Records by instance id, as they lie in the bucket.
    fn records(&self) -> BTreeMap<String, Value> {
        let mut records = BTreeMap::new();
        for entry in fs::read_dir(self.path("bucket/shard/dev-1/instance")).into_iter().flatten().flatten() {
            let Ok(text) = fs::read(entry.path()) else { continue };
            let Ok(record) = serde_json::from_slice::<Value>(&text) else { continue };
            let id = record["instance_id"].as_str().unwrap().to_owned();
            assert!(records.insert(id.clone(), record).is_none(), "{id} has two records");
        }
        records
    }

    /// Instance ids of living agent processes, one entry per process.
    fn agents(&self) -> Vec<String> {
        let mine = self.path("instances").canonicalize().unwrap_or_else(|_| self.path("instances"));
        let mut agents = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Ok(environ) = fs::read(entry.path().join("environ")) else { continue };
            let value = |name: &str| {
                environ
                    .split(|byte| *byte == 0)
                    .find_map(|pair| pair.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
                    .map(|value| String::from_utf8_lossy(value).into_owned())
            };
            let dead = fs::read_to_string(entry.path().join("stat"))
                .map_or(true, |stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['Z', 'X'])));
            let ours = value("NSTANCE_IDENTITY_DIR").is_some_and(|dir| Path::new(&dir).starts_with(&mine));
            if ours && !dead {
                agents.extend(value("NSTANCE_INSTANCE_ID"));
            }
        }
        agents.sort();
        agents
    }

    /// What is wrong with the shard if it shall have `size` instances; empty when all is as it should be.
    fn faults(&self, size: usize) -> Vec<String> {
        let mut faults = Vec::new();
        let agents = self.agents();
        let alive: BTreeSet<String> = agents.iter().cloned().collect();
        if alive.len() != agents.len() {
            faults.push(format!("an instance has two processes: {agents:?}"));
        }
        if agents.len() != size {
            faults.push(format!("{} processes live, {size} are wanted", agents.len()));
        }
        let records = self.records();
        let running: BTreeSet<String> = records
            .iter()
            .filter(|(_, record)| record["status"] == "running" && record["delete"].is_null())
            .map(|(id, _)| id.clone())
            .collect();
        for id in alive.difference(&running) {
            let status = records.get(id).map(|record| record["status"].to_string());
            faults.push(format!("process of {id} has the record {status:?}"));
        }
        for id in running.difference(&alive) {
            faults.push(format!("record of {id} has no process"));
        }
        let open: Vec<&String> = records
            .iter()
            .filter(|(id, record)| {
                !running.contains(*id) && record["status"] != "deleted" && record["status"] != "failed"
            })
            .map(|(id, _)| id)
            .collect();
        if !open.is_empty() {
            faults.push(format!("records not at their end: {open:?}"));
        }
        faults
    }

    fn metrics(&self) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        Some(text)
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        self.kill();
        // Agents outlive their server by design; here nobody would come back for them.
        let _ = nstance_providers::process::end_all(&self.path("instances"));
        if std::thread::panicking() {
            let log = fs::read_to_string(self.path("server.log")).unwrap_or_default();
            let tail: Vec<&str> = log.lines().rev().take(60).collect();
            eprintln!("last lines of the server:");
            for line in tail.into_iter().rev() {
                eprintln!("  {line}");
            }
        }
    }
}

/// The first of five ports in a row that nobody uses now.
fn free_ports() -> u16 {
    for _ in 0..1000 {
        let first = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let Some(last) = first.checked_add(4) else { continue };
        let all: Vec<_> = (first..=last).filter_map(|port| TcpListener::bind(("127.0.0.1", port)).ok()).collect();
        if all.len() == 5 {
            return first;
        }
    }
    panic!("no five free ports in a row");
}

/// Waits until a leader finds nothing left to do, and sees that it stays so over several sweeps.
async fn settles(shard: &Shard, size: usize, what: &str) {
    let began = SystemClock.monotonic();
    let mut quiet_since = None;
    loop {
        let mut faults = shard.faults(size);
        if !shard.metrics().is_some_and(|text| text.contains("nstance_leading 1")) {
            faults.push("the server does not lead yet".to_owned());
        }
        let now = SystemClock.monotonic();
        if faults.is_empty() {
            if QUIET <= now.since(*quiet_since.get_or_insert(now)) {
                return;
            }
        } else {
            quiet_since = None;
        }
        assert!(now.since(began) < LIMIT, "{what}: {faults:#?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn fifty_kills_of_the_server_lose_and_leak_nothing() {
    let seed = std::env::var("NSTANCE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| {
        let mut bytes = [0; 4];
        nstance_rt::entropy::SystemEntropy::new().fill(&mut bytes);
        u64::from(u32::from_le_bytes(bytes))
    });
    println!("NSTANCE_SEED={seed}");
    let chance = SeededEntropy::new(seed);
    for cycle in 0..CYCLES {
        let mut shard = Shard::new();
        for kill in 0..KILLS {
            // Half of the kills while it grows to twenty, half while it shrinks to five.
            shard.set_size(if kill < KILLS / 2 { 20 } else { 5 });
            shard.start();
            // The time itself is what is random here: any moment from before the lease to well into the work.
            tokio::time::sleep(Duration::from_millis(80 + below(&chance, 900))).await;
            shard.kill();
        }
        shard.start();
        settles(&shard, 5, &format!("cycle {cycle}, NSTANCE_SEED={seed}")).await;
        let metrics = shard.metrics().unwrap_or_default();
        assert!(metrics.contains("nstance_plan_violations_total 0"), "the checker objected to a plan");
    }
}
