//! `nstance-admin serve` before a real environment, and one who asks it.
#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

use std::{
    process::Stdio,
    sync::{Arc, Mutex},
    time::Duration,
};

use reqwest::{Client, Method, Response};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
};

use super::e2e_common::{DEV, Env, PATIENCE};

pub(crate) const TOKEN: &str = "token-of-this-test-0123456789";

/// `nstance-admin serve` in an environment.
pub(crate) struct Served {
    child: Child,
    pub(crate) base: String,
    pub(crate) client: Client,
    /// What it wrote to standard error.
    pub(crate) log: Arc<Mutex<String>>,
}

impl Served {
    pub(crate) async fn start(env: &Env, args: &[&str]) -> Self {
        let mut command = Command::new(DEV);
        command.arg("admin").arg("--dir").arg(env.dir()).arg("--").args(["serve", "--bind", "127.0.0.1:0"]).args(args);
        command.env("NSTANCE_ADMIN_TOKEN", TOKEN).stdin(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let base = tokio::time::timeout(PATIENCE, async {
            while let Some(line) = lines.next_line().await.unwrap() {
                if let Some(base) = line.strip_prefix("listening on ") {
                    return base.to_owned();
                }
            }
            panic!("it ended without listening");
        });
        let base = base.await.expect("it listens");
        let log = Arc::new(Mutex::new(String::new()));
        let kept = log.clone();
        // Ends with the process's standard error.
        #[expect(clippy::disallowed_methods, reason = "a test's own reader")]
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                kept.lock().unwrap().push_str(&format!("{line}\n"));
            }
        });
        let client = Client::builder().no_proxy().timeout(PATIENCE).build().unwrap();
        Self { child, base, client, log }
    }

    pub(crate) fn ask(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.client.request(method, format!("{}{path}", self.base)).bearer_auth(TOKEN)
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, Value) {
        read(self.ask(Method::GET, path).send().await.unwrap()).await
    }

    pub(crate) async fn send(&self, method: Method, path: &str, body: Value) -> (u16, Value) {
        read(self.ask(method, path).json(&body).send().await.unwrap()).await
    }

    /// Waits for what it writes.
    pub(crate) async fn until_logged(&self, holds: impl Fn(&str) -> bool) {
        let wait = async {
            while !holds(&self.log.lock().unwrap()) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, wait).await;
        waited.unwrap_or_else(|_| panic!("not logged: {}", self.log.lock().unwrap()));
    }

    /// Asks until the answer is as wanted.
    pub(crate) async fn until(&self, path: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let wait = async {
            loop {
                let (_, document) = self.get(path).await;
                if holds(&document) {
                    return document;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("{path} is not as wanted"))
    }
}

pub(crate) async fn read(response: Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or(Value::Null))
}

/// Reads lines of a stream until one is as wanted.
pub(crate) async fn lines_until(response: &mut Response, holds: impl Fn(&str) -> bool) -> Vec<String> {
    let (mut lines, mut rest) = (Vec::new(), String::new());
    while let Some(chunk) = tokio::time::timeout(PATIENCE, response.chunk()).await.unwrap().unwrap() {
        rest.push_str(std::str::from_utf8(&chunk).unwrap());
        while let Some((line, after)) = rest.split_once('\n') {
            lines.push(line.to_owned());
            let after = after.to_owned();
            if holds(lines.last().unwrap()) {
                return lines;
            }
            rest = after;
        }
    }
    panic!("the stream ended: {lines:?}");
}

/// One who reads a stream of server-sent events.
pub(crate) struct Reading {
    response: Response,
    rest: String,
    /// The last that was said.
    pub(crate) id: String,
}

impl Reading {
    pub(crate) async fn open(served: &Served, path: &str, id: Option<&str>) -> Self {
        let request = served.ask(Method::GET, path).header("accept", "text/event-stream").timeout(4 * PATIENCE);
        let request = id.into_iter().fold(request, |request, id| request.header("last-event-id", id));
        let response = request.send().await.unwrap();
        assert_eq!(
            (response.status().as_u16(), response.headers()["content-type"].as_bytes()),
            (200, &b"text/event-stream"[..])
        );
        Self { response, rest: String::new(), id: String::new() }
    }

    pub(crate) async fn next(&mut self) -> Value {
        while !self.rest.contains("\n\n") {
            let chunk = tokio::time::timeout(PATIENCE, self.response.chunk()).await.expect("it goes on").unwrap();
            self.rest.push_str(std::str::from_utf8(&chunk.expect("it has no end")).unwrap());
        }
        let (message, rest) = self.rest.split_once("\n\n").unwrap();
        let field = |name: &str| message.lines().find_map(|it| it.strip_prefix(name)).map(str::to_owned);
        let value = field("data: ").map_or(Value::Null, |it| serde_json::from_str(&it).unwrap());
        self.id = field("id: ").unwrap_or_else(|| self.id.clone());
        self.rest = rest.to_owned();
        value
    }

    /// Reads until a message is as wanted; answers all that came.
    pub(crate) async fn until(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Vec<Value> {
        let mut read = Vec::new();
        let reading = async {
            loop {
                read.push(self.next().await);
                if read.last().is_some_and(&wanted) {
                    return;
                }
            }
        };
        let waited = tokio::time::timeout(PATIENCE, reading).await;
        waited.unwrap_or_else(|_| panic!("not told: {what}: {read:#?}"));
        read
    }
}

/// A message of this type.
pub(crate) fn is(kind: &'static str) -> impl Fn(&Value) -> bool {
    move |it| it["type"] == kind
}

pub(crate) async fn it_stops_when_told(mut served: Served) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(served.child.id().unwrap()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let ended = tokio::time::timeout(PATIENCE, served.child.wait()).await.expect("it stops").unwrap();
    assert_eq!(ended.code(), Some(0));
}
