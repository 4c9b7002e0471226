//! The real binary, killed for good (SIGKILL) at many moments of its registration, of file batches, and of its renewal:
//! whatever it leaves on disk is whole, and the next start ends registered, with all files and a good certificate.
//!
//! Moments are found by what can be seen from outside, and a little chance from a seed on top. `agent_registration.rs`,
//! `agent_files.rs` and `agent_renewal.rs` go through every single step of the disk instead, without a process.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File, OpenOptions},
    io::Read as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use crate::common::{
    DAY, Seen, World,
    files::{commit, file},
};
use nstance_core::ports::clock::{Clock as _, random};
use nstance_identity::{keys::KeyPair, peer::Peer};
use nstance_proto::v1;
use nstance_rt::{clock::SystemClock, entropy::SeededEntropy};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use tokio::{net::TcpListener, sync::mpsc};

/// Nothing that is waited for takes a tenth of this.
const PATIENCE: Duration = Duration::from_secs(60);

/// More than an agent opens in all its lives here.
const STREAMS: usize = 600;

/// The files of every batch. Each tells its number, so that a reader knows what all of it must be.
const FILES: [&str; 3] = ["a.env", "b.json", "c"];

fn content(name: &str, n: u64) -> Vec<u8> {
    let lines = |line: &dyn Fn(usize) -> String| (0..300).map(line).collect::<String>();
    let text = match name {
        "a.env" => format!("N={n}\n{}", lines(&|at| format!("LINE_{at}={n}\n"))),
        "b.json" => format!("{{\"n\": {n},\n\"all\": [{}0]}}\n", lines(&|_| format!("{n},\n"))),
        _ => format!("{n}\n{}", lines(&|at| format!("{at} of {n}\n"))),
    };
    text.into_bytes()
}

/// The number of a whole file; a torn one is of no number.
fn number(name: &str, found: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(found);
    let digits: String = text.chars().skip_while(|it| !it.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
    let n = digits.parse().unwrap_or_else(|_| panic!("{name} has no number: {text:.40}"));
    assert!(found == content(name, n), "{name} is torn: {} bytes, not those of {n}", found.len());
    n
}

/// What lies under a name, with its mode, as any reader would find it.
fn look(path: &Path) -> Option<(Vec<u8>, u32)> {
    let mut file = File::open(path).ok()?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).unwrap();
    Some((bytes, file.metadata().unwrap().mode() & 0o777))
}

/// The machine's directories, as the agent left them.
#[derive(Clone)]
struct Place(PathBuf);

impl Place {
    fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn has(&self, name: &str) -> bool {
        self.at(name).exists()
    }

    fn text(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.at(name)).ok()
    }

    fn key(&self) -> Option<KeyPair> {
        let (bytes, mode) = look(&self.at("identity/identity.key"))?;
        assert_eq!(mode, 0o600, "a private key is nobody else's at any time");
        Some(KeyPair::from_pkcs8_pem(&bytes).expect("a whole key"))
    }

    fn certificate(&self) -> Option<Peer> {
        let (bytes, _) = look(&self.at("identity/identity.crt"))?;
        let leaf = CertificateDer::from_pem_slice(&bytes).expect("a whole certificate");
        Some(Peer::from_der(&leaf).expect("a certificate of ours"))
    }

    fn numbers(&self) -> BTreeMap<&'static str, u64> {
        let number = |name: &'static str| {
            let (bytes, mode) = look(&self.at("recv").join(name))?;
            assert_eq!(mode, 0o640, "{name} is seen with its final mode only");
            Some((name, number(name, &bytes)))
        };
        FILES.into_iter().filter_map(number).collect()
    }

    fn hash(&self) -> Option<u64> {
        self.text("identity/config.hash")?.trim().strip_prefix("sha256:n")?.parse().ok()
    }

    /// What any reader sees at any moment, alive or dead.
    fn check(&self) {
        // Of two files the one that is written first is read last.
        let (hash, numbers) = (self.hash(), self.numbers());
        if let Some(hash) = hash {
            let behind: Vec<_> = FILES.iter().filter(|name| numbers.get(*name).is_none_or(|n| *n < hash)).collect();
            assert!(behind.is_empty(), "the hash says {hash}, but {behind:?} are older: {numbers:?}");
        }
        let nonce = self.has("identity/nonce.jwt");
        let certificate = self.certificate();
        if let Some(certificate) = &certificate {
            let key = self.key().expect("a certificate is of a key");
            assert_eq!(certificate.public_key, key.public_key());
        }
        assert!(nonce || certificate.is_some(), "a nonce goes only when there is a certificate");
    }

    fn check_keys(&self) {
        for name in self.keys() {
            let (bytes, mode) = look(&self.at("keys").join(&name)).unwrap();
            assert_eq!(mode, 0o600, "{name}");
            KeyPair::from_pkcs8_pem(&bytes).unwrap_or_else(|_| panic!("{name} is torn"));
        }
    }

    /// Private keys of pairs, by the names of their files.
    fn keys(&self) -> Vec<String> {
        let names = fs::read_dir(self.at("keys")).into_iter().flatten().flatten();
        let names = names.map(|entry| entry.file_name().into_string().unwrap());
        names.filter(|name| !name.starts_with('.') && name.ends_with(".key")).collect()
    }

    fn n_keys(&self) -> usize {
        self.keys().len()
    }

    /// As before the first boot.
    fn wipe(&self, nonce: &str) {
        for directory in ["keys", "recv"] {
            let _ = fs::remove_dir_all(self.at(directory));
        }
        for entry in fs::read_dir(self.at("identity")).unwrap().flatten() {
            if entry.file_name() != "ca.crt" {
                fs::remove_file(entry.path()).unwrap();
            }
        }
        fs::write(self.at("identity/nonce.jwt"), nonce).unwrap();
    }
}

/// Reads without pause what others may read, and fails if something of it is not whole.
struct Reader {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<usize>>,
}

impl Reader {
    fn on(place: Place) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut n_looks = 0;
            while !stopped.load(Ordering::Relaxed) {
                place.check();
                n_looks += 1;
                std::thread::park_timeout(Duration::from_micros(500));
            }
            n_looks
        });
        Self { stop, thread: Some(thread) }
    }

    /// How often it looked; panics if it saw anything torn.
    fn end(mut self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().expect("the reader saw nothing torn")
    }
}

/// What the server heard.
#[derive(Default)]
struct Heard {
    /// Registrations, rejoins and renewals.
    n_calls: AtomicUsize,
    /// The keys that came with each nonce: a real server takes one, ever.
    keys_of: Mutex<BTreeMap<String, BTreeSet<Vec<u8>>>>,
    counters: Mutex<Vec<(u64, Vec<u8>)>>,
    serials: Mutex<Vec<String>>,
}

impl Heard {
    fn take(&self, seen: Seen) {
        match seen {
            Seen::Registered { request, .. } => {
                if let Some(proof) = request.rejoin {
                    self.counters.lock().unwrap().push((proof.counter, proof.signature));
                } else {
                    let mut keys_of = self.keys_of.lock().unwrap();
                    keys_of.entry(request.registration_nonce_jwt).or_default().insert(request.public_key_pem);
                }
                self.n_calls.fetch_add(1, Ordering::SeqCst);
            }
            Seen::Renewed { .. } => drop(self.n_calls.fetch_add(1, Ordering::SeqCst)),
            Seen::StreamOpened { serial, .. } => self.serials.lock().unwrap().push(serial),
            Seen::Report { .. } | Seen::HalfClosed { .. } => {}
        }
    }

    fn n_calls(&self) -> usize {
        self.n_calls.load(Ordering::SeqCst)
    }

    fn last_serial(&self) -> Option<String> {
        self.serials.lock().unwrap().last().cloned()
    }
}

struct Stand {
    world: World,
    place: Place,
    heard: Arc<Heard>,
    addresses: Vec<String>,
    batches: Arc<AtomicU64>,
    dice: SeededEntropy,
    child: Option<Child>,
}

impl Drop for Stand {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Stand {
    async fn new(seed: u64) -> Self {
        let mut world = World::with(seed, Arc::new(SystemClock));
        // In memory, where there is such a place: a killed process takes nothing of it along.
        if let Ok(directory) = tempfile::tempdir_in("/dev/shm") {
            fs::create_dir(directory.path().join("identity")).unwrap();
            fs::copy(world.path("identity/ca.crt"), directory.path().join("identity/ca.crt")).unwrap();
            world.directory = directory;
        }
        let mut addresses = Vec::new();
        for mutual in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            addresses.push(listener.local_addr().unwrap().to_string());
            let (sender, incoming) = mpsc::channel(16);
            world.tasks.spawn_droppable("listen", async move {
                while let Ok((stream, _)) = listener.accept().await {
                    let _ = sender.send(stream).await;
                }
            });
            world.plane.serve(&world.tasks, mutual, incoming);
        }
        let heard = Arc::<Heard>::default();
        let (mut seen, hearing) = (std::mem::replace(&mut world.seen, mpsc::channel(1).1), heard.clone());
        world.tasks.spawn_droppable("hear", async move {
            while let Some(seen) = seen.recv().await {
                hearing.take(seen);
            }
        });
        let batches = Arc::new(AtomicU64::new(0));
        for stream in 0..STREAMS {
            let voice = world.feed_files();
            let numbers = batches.clone();
            // Says nothing, and is taken when the stream is opened: then comes batch after batch, each of all files.
            voice.try_send(Ok(v1::FileTransfer::default())).unwrap();
            world.tasks.spawn_droppable("files", async move {
                while let Ok(room) = voice.reserve_many(voice.max_capacity()).await {
                    let n = numbers.fetch_add(1, Ordering::SeqCst);
                    let id = format!("{stream}-{n}");
                    let all = FILES.iter().map(|name| file(&id, name, content(name, n)));
                    for (room, message) in room.zip(all.chain([commit(&id, &format!("sha256:n{n}"))])) {
                        room.send(Ok(message));
                    }
                }
            });
            let key_names = (0..3).map(|n| format!("key-{stream}-{n}")).collect();
            let request = v1::KeyGenerationRequest { key_names, ..v1::KeyGenerationRequest::default() };
            let voice = world.feed_keys();
            voice.try_send(Ok(request)).unwrap();
            world.tasks.spawn_droppable("keys", async move { voice.closed().await });
        }
        let place = Place(world.directory.path().to_owned());
        let dice = SeededEntropy::new(seed);
        Self { world, place, heard, addresses, batches, dice, child: None }
    }

    fn start(&mut self) {
        let log = OpenOptions::new().create(true).append(true).open(self.place.at("agent.log")).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_nstance-agent"))
            .env_clear()
            .envs(crate::common::environment(&self.place.0))
            .env("NSTANCE_SERVER_REGISTRATION_ADDR", &self.addresses[0])
            .env("NSTANCE_SERVER_AGENT_ADDR", &self.addresses[1])
            .env("NSTANCE_NEW_SESSION", "1")
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(Stdio::null())
            .spawn();
        self.child = Some(child.unwrap());
    }

    /// SIGKILL: it has no say in it.
    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Looks again and again until it is so.
    async fn until(&self, what: &str, mut holds: impl FnMut(&Place, &Heard) -> bool) {
        let waited = tokio::time::timeout(PATIENCE, async {
            while !holds(&self.place, &self.heard) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        if waited.await.is_err() {
            let log = self.place.text("agent.log").unwrap_or_default();
            let tail: Vec<_> = log.lines().rev().take(20).collect();
            panic!("in vain: {what}; the agent said last:\n{}", tail.into_iter().rev().collect::<Vec<_>>().join("\n"));
        }
    }

    /// Starts the agent, and kills it up to three milliseconds after `moment`.
    async fn kill_at(&mut self, what: &str, moment: fn(&Place, &Heard, Before) -> bool) {
        let before = Before {
            n_calls: self.heard.n_calls(),
            n_keys: self.place.n_keys(),
            batch: self.batches.load(Ordering::SeqCst),
        };
        self.start();
        self.until(what, |place, heard| moment(place, heard, before)).await;
        let [byte] = random::<1>(&self.dice);
        tokio::time::sleep(Duration::from_millis(u64::from(byte % 4))).await;
        self.kill();
        self.place.check();
        self.place.check_keys();
    }

    /// Starts the agent once more and waits until it is all there: registered, with files, on its present certificate.
    async fn recover(&mut self) {
        let after = self.batches.load(Ordering::SeqCst);
        self.start();
        self.until("registered, with new files, on its certificate", |place, heard| {
            !place.has("identity/nonce.jwt")
                && place.hash().is_some_and(|hash| after <= hash)
                && place.certificate().is_some_and(|it| Some(it.serial) == heard.last_serial())
        })
        .await;
        self.place.check();
    }
}

/// How far everything was before a start.
#[derive(Clone, Copy)]
struct Before {
    n_calls: usize,
    n_keys: usize,
    batch: u64,
}

/// What to wait for, by what lies on disk and what the server heard.
type Moment = (&'static str, fn(&Place, &Heard, Before) -> bool);

#[tokio::test]
async fn killed_while_it_registers_it_ends_registered_with_the_key_it_began_with() {
    let moments: [Moment; 5] = [
        ("a key", |place, _, _| place.has("identity/identity.key")),
        ("a hash", |place, _, _| place.has("identity/config.hash")),
        ("a call", |_, heard, before| before.n_calls < heard.n_calls()),
        ("a certificate", |place, _, _| place.has("identity/identity.crt")),
        ("no nonce", |place, _, _| !place.has("identity/nonce.jwt")),
    ];
    let mut stand = Stand::new(21).await;
    for (what, moment) in moments.into_iter().chain(moments) {
        stand.place.wipe(&stand.world.plane.nonce(DAY));
        let reader = Reader::on(stand.place.clone());
        stand.kill_at(what, moment).await;
        let key = stand.place.key().expect("a key comes before everything else").public_key();
        stand.recover().await;
        assert_eq!(stand.place.key().unwrap().public_key(), key);
        stand.kill();
        reader.end();
    }
    for keys in stand.heard.keys_of.lock().unwrap().values() {
        assert_eq!(keys.len(), 1, "a nonce is never shown with a second key");
    }
}

#[tokio::test]
async fn killed_amid_batches_and_keys_it_ends_with_whole_files() {
    let moments: [Moment; 5] = [
        ("a staged file", |place, _, _| fs::read_dir(place.at("recv/.stage")).is_ok_and(|it| 0 < it.count())),
        ("a first file", |place, _, before| place.numbers().get("a.env").is_some_and(|n| before.batch <= *n)),
        ("a last file", |place, _, before| place.numbers().get("c").is_some_and(|n| before.batch <= *n)),
        ("its hash", |place, _, before| place.hash().is_some_and(|hash| before.batch <= hash)),
        ("a key", |place, _, before| before.n_keys < place.n_keys()),
    ];
    let mut stand = Stand::new(22).await;
    stand.place.wipe(&stand.world.plane.nonce(DAY));
    let reader = Reader::on(stand.place.clone());
    stand.recover().await;
    stand.kill();
    for (what, moment) in moments.into_iter().cycle().take(20) {
        stand.kill_at(what, moment).await;
    }
    stand.recover().await;
    stand.kill();
    assert!(!stand.place.has("recv/errors"), "nothing is left to complain about");
    println!("{} batches, {} looks at the disk", stand.batches.load(Ordering::SeqCst), reader.end());
}

#[tokio::test]
async fn killed_while_it_renews_it_ends_with_a_good_certificate() {
    let moments: [Moment; 3] = [
        ("a call", |_, heard, before| before.n_calls < heard.n_calls()),
        ("another certificate", |place, heard, before| {
            before.n_calls < heard.n_calls() && place.certificate().map(|it| it.serial) != heard.last_serial()
        }),
        ("a stream with it", |place, heard, before| {
            before.n_calls < heard.n_calls() && place.certificate().map(|it| it.serial) == heard.last_serial()
        }),
    ];
    let mut stand = Stand::new(23).await;
    // Time to renew within a second or so, and over soon after.
    *stand.world.plane.ttl.lock().unwrap() = Duration::from_secs(2);
    stand.place.wipe(&stand.world.plane.nonce(DAY));
    let reader = Reader::on(stand.place.clone());
    stand.recover().await;
    stand.kill();
    for (n, (what, moment)) in moments.into_iter().cycle().take(9).enumerate() {
        if n % 4 == 1 {
            // This life begins with a rejoin.
            stand
                .until("the certificate is over", |place, _| {
                    place.certificate().expect("a certificate").not_after < SystemClock.now()
                })
                .await;
        }
        stand.kill_at(what, moment).await;
    }
    *stand.world.plane.ttl.lock().unwrap() = DAY;
    stand.recover().await;
    stand
        .until("a stream on a certificate for a day", |place, heard| {
            let certificate = place.certificate().expect("a certificate");
            SystemClock.now().plus(DAY / 2) < certificate.not_after && heard.last_serial() == Some(certificate.serial)
        })
        .await;
    stand.kill();
    reader.end();
    let mut last = (0, Vec::new());
    let rejoins = std::mem::take(&mut *stand.heard.counters.lock().unwrap());
    assert!(2 <= rejoins.len(), "{} rejoins", rejoins.len());
    for (counter, signature) in rejoins {
        let repeats = (counter, &signature) == (last.0, &last.1);
        assert!(repeats || counter == last.0 + 1, "counter {counter} after {}", last.0);
        last = (counter, signature);
    }
    assert_eq!(stand.heard.keys_of.lock().unwrap().len(), 1, "the nonce was needed once");
}
