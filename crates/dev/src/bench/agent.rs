//! `agent`: one agent, as it runs on a machine where nothing happens, and what it costs there.

use std::{
    fs,
    net::SocketAddr,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, ensure};
use nstance_core::{ports::clock::Clock as _, time::Timestamp};
use nstance_rt::{clock::SystemClock, tasks::Tasks};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use super::{Bench, metadata};

const MAX_RSS_KIB: u64 = 4 * 1024;
const MAX_SIZE: u64 = 3_000_000;
const MAX_CORE_PERCENT: f64 = 0.1;
const MAX_WAKES: f64 = 1.0;
/// In a minute: what keeps the connection, and the one report.
const MAX_WIRE: f64 = 10.0 * 1024.0;
const MAX_START: Duration = Duration::from_millis(50);

/// How often a spot machine asks whether it will be taken.
const POLL: Duration = Duration::from_secs(2);

/// After this an agent has its files and told of them; only then it is idle, which is what is promised about.
const SETTLE: Duration = Duration::from_secs(10);

/// What each piece of data costs beside itself: the frame that carries it, and the one that acknowledges it.
const FRAMES: u64 = 2 * 66;

/// A look at a process.
#[derive(Debug, Clone, Copy)]
struct Look {
    rss_kib: u64,
    anon_kib: u64,
    threads: u64,
    /// Time on a processor.
    ran: Duration,
    /// How often it was woken.
    wakes: u64,
    /// What went over the wire of its session, both ways.
    wire: u64,
}

/// What was found in one run.
struct Found {
    before: Look,
    after: Look,
    /// From the start of the process to the first byte that it said after a handshake.
    start: Duration,
}

/// Watches an idle agent for a time, be it on a spot machine, and fails with `check` if it costs more than is promised.
pub(crate) async fn agent(watch: Duration, agent: Option<PathBuf>, spot: bool, check: bool) -> anyhow::Result<()> {
    let bench = Bench::new("agent")?;
    let agent = match agent {
        Some(agent) => fs::canonicalize(&agent).with_context(|| format!("find {}", agent.display()))?,
        None => bench.exe.with_file_name("nstance-agent"),
    };
    let size = fs::metadata(&agent).with_context(|| format!("look at {}", agent.display()))?.len();
    let tasks = Tasks::new();
    let programs = programs(&bench.dir);
    let registration = Relay::start(&tasks, programs.join("registration.addr")).await?;
    let session = Relay::start(&tasks, programs.join("agent.addr")).await?;
    let asked = if spot { Some(metadata::serve(&tasks).await?) } else { None };
    let provider = if spot { "aws" } else { "none" };
    let bench = beside(bench, &agent, provider, &registration, &session)?;
    let found = watch_one(&bench, watch, &registration, &session).await;
    // Whatever came of it, nothing stays behind.
    let cleaned = bench.dev(&["clean"]);
    let _ = fs::remove_dir_all(&programs);
    tasks.end(Duration::ZERO).await;
    let Found { before, after, start } = found?;
    cleaned?;
    let ran = after.ran.saturating_sub(before.ran);
    let percent = ran.as_secs_f64() / watch.as_secs_f64() * 100.0;
    #[expect(clippy::cast_precision_loss, reason = "counts of a bench are small")]
    let per_second = |before: u64, after: u64| after.saturating_sub(before) as f64 / watch.as_secs_f64();
    let (wakes, wire) = (per_second(before.wakes, after.wakes), 60.0 * per_second(before.wire, after.wire));
    println!("{}", agent.display());
    println!("  program     {size:>9} bytes   (at most {MAX_SIZE})");
    println!("  resident    {:>9} KiB     (at most {MAX_RSS_KIB}; {} KiB anonymous)", after.rss_kib, after.anon_kib);
    println!("  processor   {percent:>9.3} %       (at most {MAX_CORE_PERCENT} of one core; {watch:?} watched)");
    // Looking every two seconds takes wake-ups of its own: what is promised for it is the processor's time.
    let most = if spot { "as many as its looks take".to_owned() } else { format!("at most {MAX_WAKES}") };
    println!("  wake-ups    {wakes:>9.2} a second ({most}; {} thread(s))", after.threads);
    println!("  wire        {wire:>9.0} bytes a minute (at most {MAX_WIRE}; frames counted, reports once a minute)");
    println!(
        "  start       {:>9.1} ms      (at most {} until it registers)",
        start.as_secs_f64() * 1e3,
        MAX_START.as_millis()
    );
    if let Some(asked) = asked {
        let (n, due) = (asked.load(Ordering::Relaxed), watch.as_secs() / POLL.as_secs());
        println!("  spot        {n:>9} looks at the notice (one every {POLL:?})");
        ensure!(
            due <= n,
            "it asked {n} times whether it will be taken, not {due} times: this was not an idle spot machine"
        );
    }
    if check {
        ensure!(size <= MAX_SIZE, "the program is larger than {MAX_SIZE} bytes");
        ensure!(after.rss_kib <= MAX_RSS_KIB, "it holds more than {MAX_RSS_KIB} KiB");
        ensure!(percent <= MAX_CORE_PERCENT, "it uses more than {MAX_CORE_PERCENT} % of a core");
        ensure!(spot || wakes <= MAX_WAKES, "it wakes up more than {MAX_WAKES} times a second");
        ensure!(wire <= MAX_WIRE, "it takes more than {MAX_WIRE} bytes a minute on the wire");
        ensure!(start <= MAX_START, "it takes more than {MAX_START:?} to register");
    }
    Ok(())
}

fn programs(dir: &Path) -> PathBuf {
    dir.with_extension("programs")
}

/// The environment runs what lies beside its own program. Here that is an agent which is told what a machine of a user
/// would tell it, not what a development environment does.
fn beside(bench: Bench, agent: &Path, provider: &str, registration: &Relay, session: &Relay) -> anyhow::Result<Bench> {
    let programs = programs(&bench.dir);
    fs::create_dir_all(&programs).with_context(|| format!("make {}", programs.display()))?;
    for name in ["nstance-dev", "nstance-server"] {
        let from = bench.exe.with_file_name(name);
        fs::copy(&from, programs.join(name)).with_context(|| format!("copy {}", from.display()))?;
    }
    let idle = format!("NSTANCE_METRICS_INTERVAL=60s NSTANCE_PROVIDER={provider} NSTANCE_NOTICE_FILE=");
    let here = programs.display();
    let script = format!(
        "#!/bin/sh\n\
         printf %s \"$NSTANCE_SERVER_REGISTRATION_ADDR\" > '{here}/registration.addr'\n\
         printf %s \"$NSTANCE_SERVER_AGENT_ADDR\" > '{here}/agent.addr'\n\
         date +%s%3N > '{here}/started'\n\
         exec env {idle} NSTANCE_SERVER_REGISTRATION_ADDR={} NSTANCE_SERVER_AGENT_ADDR={} '{}' \"$@\"\n",
        registration.address,
        session.address,
        agent.display()
    );
    let wrapper = programs.join("nstance-agent");
    fs::write(&wrapper, script).context("write the agent's wrapper")?;
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).context("make the agent's wrapper run")?;
    Ok(Bench { exe: programs.join("nstance-dev"), ..bench })
}

async fn watch_one(bench: &Bench, watch: Duration, registration: &Relay, session: &Relay) -> anyhow::Result<Found> {
    bench.expect(&["up", "--detach", "--port-base", "0", "--shards", "1", "--no-k8s", "--size", "test=1"])?;
    let pid = bench.status()?["instances"][0]["pid"].as_u64().context("the agent has no process")?;
    let started = fs::read_to_string(programs(&bench.dir).join("started")).context("read when the agent started")?;
    let started = Timestamp::from_millis(started.trim().parse().context("read when the agent started")?);
    let spoken = registration.counts.spoken.get().context("the agent did not register through the relay")?;
    let look = || look(pid, session.counts.wire.load(Ordering::Relaxed));
    tokio::time::sleep(SETTLE).await;
    let before = look()?;
    tokio::time::sleep(watch).await;
    let after = look()?;
    ensure!(bench.status()?["healthy"] == true, "the environment is not healthy at the end");
    Ok(Found { before, after, start: spoken.since(started) })
}

/// Carries bytes between the agent and whom it was told to speak to, and counts them.
struct Relay {
    address: SocketAddr,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    wire: AtomicU64,
    /// When the agent first said something after a handshake.
    spoken: OnceLock<Timestamp>,
}

impl Relay {
    /// `upstream` is the file in which the agent's wrapper leaves where it would have gone.
    async fn start(tasks: &Tasks, upstream: PathBuf) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("listen for the agent")?;
        let address = listener.local_addr().context("find the own address")?;
        let counts = Arc::<Counts>::default();
        let (scope, counted) = (tasks.clone(), counts.clone());
        tasks.spawn_droppable("relay", async move {
            while let Ok((agent, _)) = listener.accept().await {
                let Ok(server) = fs::read_to_string(&upstream) else { continue };
                let Ok(server) = TcpStream::connect(server.trim()).await else { continue };
                let counts = counted.clone();
                scope.spawn_droppable("relayed", async move {
                    let ((agent_out, agent_in), (server_out, server_in)) = (agent.into_split(), server.into_split());
                    tokio::join!(
                        carry(agent_out, server_in, &counts, true),
                        carry(server_out, agent_in, &counts, false)
                    );
                });
            }
        });
        Ok(Self { address, counts })
    }
}

async fn carry(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, counts: &Counts, agent: bool) {
    let mut bytes = vec![0; 16 * 1024];
    // The first piece that the agent says begins the handshake, the second one comes after it.
    let mut n_pieces = 0_u32;
    while let Ok(n @ 1..) = from.read(&mut bytes).await {
        n_pieces += 1;
        if agent && n_pieces == 2 {
            counts.spoken.get_or_init(|| SystemClock.now());
        }
        counts.wire.fetch_add(FRAMES.saturating_add(n as u64), Ordering::Relaxed);
        if to.write_all(&bytes[..n]).await.is_err() {
            break;
        }
    }
    let _ = to.shutdown().await;
}

fn look(pid: u64, wire: u64) -> anyhow::Result<Look> {
    let read = |name: &str| {
        let path = format!("/proc/{pid}/{name}");
        fs::read_to_string(&path).with_context(|| format!("read {path}"))
    };
    let status = read("status")?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok())
    };
    let of = |name: &str| field(name).with_context(|| format!("{name} of process {pid}"));
    let schedstat = read("schedstat")?;
    let ran = schedstat.split_whitespace().next().and_then(|it| it.parse().ok()).context("read schedstat")?;
    Ok(Look {
        rss_kib: of("VmRSS")?,
        anon_kib: of("RssAnon")?,
        threads: of("Threads")?,
        ran: Duration::from_nanos(ran),
        wakes: of("voluntary_ctxt_switches")?,
        wire,
    })
}
