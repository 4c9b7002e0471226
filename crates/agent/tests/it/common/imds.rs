//! Metadata services of clouds to test agents against: real HTTP, over memory or over sockets, and a table that says
//! what is answered. The table changes while the agent runs, which is what there is to test.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    sync::{Arc, Mutex},
    time::Duration,
};

use nstance_agent::{
    Endpoints,
    link::{Net, Socket, TcpNet},
    settings::Address,
};
use nstance_rt::tasks::Tasks;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpListener,
    sync::{mpsc, watch},
    time::Instant,
};

use super::{MemNet, World};

pub const V4: &str = "169.254.169.254:80";
pub const V6: &str = "[fd00:ec2::254]:80";
pub const GOOGLE: &str = "metadata.google.internal:80";

/// All that there is to say of an Azure machine, in one document.
pub const AZURE_COMPUTE: &str = "/metadata/instance/compute?api-version=2021-02-01";

/// One thing of it, in plain text: the service has no other form for it, and 404 for what there is not.
pub fn azure_leaf(name: &str) -> String {
    format!("/metadata/instance/compute/{name}?api-version=2021-02-01&format=text")
}

/// How to answer a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// 200 with this body.
    Say(String),
    /// As [`Answer::Say`], in two chunks.
    Chunked(String),
    Status(u16),
    /// 302 to this address.
    Redirect(String),
    /// Bytes as they are, and the end.
    Raw(Vec<u8>),
    /// Nothing, for ever.
    Hang,
    /// 200 after this long.
    Late(Duration, String),
}

impl From<&str> for Answer {
    fn from(body: &str) -> Self {
        Self::Say(body.to_owned())
    }
}

/// What was asked, and when.
#[derive(Debug, Clone)]
pub struct Asked {
    pub at: Instant,
    pub method: String,
    pub path: String,
    pub headers: BTreeMap<String, String>,
}

/// Whether tokens are given and wanted, as Amazon's services do it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tokens {
    /// Nobody is asked for a token.
    None,
    /// Nothing without a token of this life.
    Wanted(Duration),
    /// There is no token endpoint; its path is answered with this status.
    Absent(u16),
    /// The token endpoint is silent, everything else answers anybody.
    Silent,
}

struct Table {
    tokens: Tokens,
    answers: BTreeMap<String, Answer>,
    asked: Vec<Asked>,
    /// Tokens that hold, and until when.
    given: BTreeMap<String, Instant>,
    /// Headers that every answer carries.
    headers: Vec<(String, String)>,
    /// Paths whose reads can wait for a change, as Google's can; with or without a tag.
    tagged: bool,
    /// Whether reads that wait are ever answered.
    deaf: bool,
    n_tokens: usize,
}

/// One metadata service. All clones are one.
#[derive(Clone)]
pub struct Imds {
    table: Arc<Mutex<Table>>,
    /// Moves whenever the table does.
    version: watch::Sender<u64>,
}

impl Imds {
    pub fn new() -> Self {
        let table = Table {
            tokens: Tokens::None,
            answers: BTreeMap::new(),
            asked: Vec::new(),
            given: BTreeMap::new(),
            headers: Vec::new(),
            tagged: true,
            deaf: false,
            n_tokens: 0,
        };
        Self { table: Arc::new(Mutex::new(table)), version: watch::Sender::new(1) }
    }

    /// An Amazon machine in peace, which wants tokens.
    pub fn aws(life_cycle: &str) -> Self {
        let imds = Self::new();
        imds.tokens(Tokens::Wanted(Duration::from_secs(21_600)));
        imds.set("/latest/meta-data/instance-id", "i-0123456789abcdef0");
        imds.set("/latest/meta-data/instance-life-cycle", life_cycle);
        imds.set("/latest/meta-data/placement/availability-zone", "eu-west-1b");
        imds
    }

    pub fn gcp(preemptible: &str) -> Self {
        let imds = Self::new();
        imds.header("Metadata-Flavor", "Google");
        let base = "/computeMetadata/v1/instance";
        imds.set(&format!("{base}/name"), "vm-1");
        imds.set(&format!("{base}/zone"), "projects/123/zones/europe-west1-b");
        imds.set(&format!("{base}/scheduling/preemptible"), preemptible);
        imds.set(&format!("{base}/preempted"), "FALSE");
        imds.set(&format!("{base}/maintenance-event"), "NONE");
        imds
    }

    pub fn azure(priority: &str) -> Self {
        let imds = Self::new();
        for (leaf, value) in [("name", "vm-1"), ("location", "westeurope"), ("zone", "2"), ("priority", priority)] {
            imds.set(&azure_leaf(leaf), value);
        }
        let compute = format!(r#"{{"name":"vm-1","location":"westeurope","zone":"2","priority":"{priority}"}}"#);
        imds.set(AZURE_COMPUTE, compute.as_str());
        imds.set("/metadata/scheduledevents?api-version=2020-07-01", r#"{"DocumentIncarnation":1,"Events":[]}"#);
        imds
    }

    pub fn set(&self, path: &str, answer: impl Into<Answer>) {
        self.table.lock().unwrap().answers.insert(path.to_owned(), answer.into());
        self.version.send_modify(|version| *version += 1);
    }

    pub fn unset(&self, path: &str) {
        self.table.lock().unwrap().answers.remove(path);
        self.version.send_modify(|version| *version += 1);
    }

    pub fn tokens(&self, tokens: Tokens) {
        self.table.lock().unwrap().tokens = tokens;
    }

    pub fn header(&self, name: &str, value: &str) {
        self.table.lock().unwrap().headers.push((name.to_owned(), value.to_owned()));
    }

    pub fn no_headers(&self) {
        self.table.lock().unwrap().headers.clear();
    }

    pub fn without_tags(&self) {
        self.table.lock().unwrap().tagged = false;
    }

    /// From now on a read that waits gets no answer, as from something in between that knows no long answers.
    pub fn swallow_waiting(&self) {
        self.table.lock().unwrap().deaf = true;
    }

    /// Every token that was given is forgotten.
    pub fn forget_tokens(&self) {
        self.table.lock().unwrap().given.clear();
    }

    pub fn n_tokens(&self) -> usize {
        self.table.lock().unwrap().n_tokens
    }

    /// What was asked since the last call.
    pub fn take_asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.table.lock().unwrap().asked)
    }

    pub fn paths(&self) -> BTreeSet<String> {
        self.take_asked().into_iter().map(|asked| asked.path).collect()
    }

    /// Listens in memory.
    pub fn listen(&self, world: &World, address: &str) {
        let (sender, mut incoming) = mpsc::channel(64);
        world.net.listeners.lock().unwrap().insert(address.to_owned(), sender);
        let (imds, tasks) = (self.clone(), world.tasks.clone());
        world.tasks.spawn_droppable("imds", async move {
            while let Some(stream) = incoming.recv().await {
                imds.answer_in(&tasks, stream);
            }
        });
    }

    /// Listens on a socket of this machine.
    pub async fn listen_at(&self, tasks: &Tasks, host: &str) -> Option<Address> {
        let listener = TcpListener::bind((host, 0)).await.ok()?;
        let port = listener.local_addr().unwrap().port();
        let (imds, scope) = (self.clone(), tasks.clone());
        tasks.spawn_droppable("imds", async move {
            while let Ok((stream, _)) = listener.accept().await {
                imds.answer_in(&scope, stream);
            }
        });
        Some(Address { host: host.to_owned(), port })
    }

    fn answer_in(&self, tasks: &Tasks, stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) {
        let imds = self.clone();
        tasks.spawn_droppable("imds-call", async move { imds.answer(stream).await });
    }

    async fn answer(&self, mut stream: impl AsyncRead + AsyncWrite + Send + Unpin) {
        let mut bytes = Vec::new();
        while !bytes.ends_with(b"\r\n\r\n") {
            if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
                return;
            }
        }
        let text = String::from_utf8(bytes).unwrap();
        let mut lines = text.lines();
        let mut words = lines.next().unwrap().split(' ').map(str::to_owned);
        let (method, path) = (words.next().unwrap(), words.next().unwrap());
        let headers = lines.filter_map(|line| line.split_once(": "));
        let headers = headers.map(|(name, value)| (name.to_lowercase(), value.to_owned())).collect();
        let asked = Asked { at: Instant::now(), method, path, headers };
        self.table.lock().unwrap().asked.push(asked.clone());
        let reply = self.reply(&asked).await;
        let _ = stream.write_all(&reply).await;
        let _ = stream.shutdown().await;
    }

    async fn reply(&self, asked: &Asked) -> Vec<u8> {
        if asked.method == "PUT" {
            return self.give_token(asked).await;
        }
        if !self.may_ask(asked) {
            return self.bytes(401, "Unauthorized", &[]);
        }
        let (path, query) = asked.path.split_once('?').unwrap_or((&asked.path, ""));
        let waits = query.contains("wait_for_change=true");
        if waits && self.table.lock().unwrap().deaf {
            return std::future::pending().await;
        }
        let mut changes = self.version.subscribe();
        let since = *changes.borrow_and_update();
        if waits && self.version_of(query).is_none_or(|known| known == since) {
            // As asked: until something changes, or sixty seconds have passed.
            assert!(query.contains("timeout_sec=60"), "{query}");
            let _ = tokio::time::timeout(Duration::from_secs(60), changes.changed()).await;
        }
        let tag = *changes.borrow();
        let answer = {
            let table = self.table.lock().unwrap();
            table.answers.get(&asked.path).or_else(|| table.answers.get(path)).cloned()
        };
        let tag = ("ETag".to_owned(), format!("{tag:016x}"));
        match answer {
            None => self.bytes(404, "not found", &[]),
            Some(Answer::Say(body)) => self.bytes(200, &body, &[tag]),
            Some(Answer::Chunked(body)) => self.chunks(&body),
            Some(Answer::Status(status)) => self.bytes(status, r#"{"action":"terminate"}"#, &[]),
            Some(Answer::Redirect(to)) => self.bytes(302, "", &[("Location".to_owned(), to)]),
            Some(Answer::Raw(bytes)) => bytes,
            Some(Answer::Hang) => std::future::pending().await,
            Some(Answer::Late(wait, body)) => {
                tokio::time::sleep(wait).await;
                self.bytes(200, &body, &[tag])
            }
        }
    }

    fn version_of(&self, query: &str) -> Option<u64> {
        let tag = query.split('&').find_map(|pair| pair.strip_prefix("last_etag="))?;
        Some(u64::from_str_radix(tag, 16).unwrap())
    }

    async fn give_token(&self, asked: &Asked) -> Vec<u8> {
        assert_eq!(asked.path, "/latest/api/token");
        assert_eq!(asked.headers.get("x-aws-ec2-metadata-token-ttl-seconds").map(String::as_str), Some("21600"));
        let tokens = self.table.lock().unwrap().tokens;
        match tokens {
            Tokens::None => self.bytes(405, "", &[]),
            Tokens::Absent(status) => self.bytes(status, "", &[]),
            Tokens::Silent => std::future::pending().await,
            Tokens::Wanted(life) => {
                let token = {
                    let mut table = self.table.lock().unwrap();
                    table.n_tokens += 1;
                    let token = format!("token-{}==", table.n_tokens);
                    table.given.insert(token.clone(), Instant::now() + life);
                    token
                };
                let ttl = ("X-Aws-Ec2-Metadata-Token-Ttl-Seconds".to_owned(), life.as_secs().to_string());
                self.bytes(200, &token, &[ttl])
            }
        }
    }

    fn may_ask(&self, asked: &Asked) -> bool {
        let table = self.table.lock().unwrap();
        if !matches!(table.tokens, Tokens::Wanted(_)) {
            return true;
        }
        let token = asked.headers.get("x-aws-ec2-metadata-token");
        token.and_then(|token| table.given.get(token)).is_some_and(|end| Instant::now() < *end)
    }

    fn bytes(&self, status: u16, body: &str, more: &[(String, String)]) -> Vec<u8> {
        let mut head = format!("HTTP/1.1 {status} Reason\r\nContent-Length: {}\r\n", body.len());
        let table = self.table.lock().unwrap();
        for (name, value) in table.headers.iter().chain(more) {
            if name != "ETag" || table.tagged {
                write!(head, "{name}: {value}\r\n").unwrap();
            }
        }
        format!("{head}\r\n{body}").into_bytes()
    }

    fn chunks(&self, body: &str) -> Vec<u8> {
        let (one, two) = body.split_at(body.len() / 2);
        let mut text = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n".to_owned();
        for (name, value) in &self.table.lock().unwrap().headers {
            write!(text, "{name}: {value}\r\n").unwrap();
        }
        write!(text, "\r\n{:x}\r\n{one}\r\n{:x}\r\n{two}\r\n0\r\n\r\n", one.len(), two.len()).unwrap();
        text.into_bytes()
    }
}

/// The plane in memory, everything else on this machine's sockets.
pub struct Mixed(pub Arc<MemNet>);

#[tonic::async_trait]
impl Net for Mixed {
    async fn connect(&self, address: &Address) -> std::io::Result<Socket> {
        if address.host == "localhost" { self.0.connect(address).await } else { TcpNet.connect(address).await }
    }
}

/// The real addresses, and a machine whose firmware says nothing.
pub fn endpoints() -> Endpoints {
    Endpoints { dmi: "/nowhere".into(), ..Endpoints::default() }
}
