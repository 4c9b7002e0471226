//! Key pairs for the certificates among this machine's files: made here, and only their public halves leave.
//!
//! The private half is the truth: the public one is always derived from it, so a pair cannot be half made. Requests say
//! what is wanted, not what to do, and may come twice; so does the answer.

use std::{
    collections::BTreeMap,
    fmt,
    io::{self, Read as _},
    path::Path,
    time::Duration,
};

use nstance_identity::keys::{KeyPair, PublicKey};
use nstance_proto::v1::{AgentStreamRequest, KeyGenerationRequest, PublicKeySubmission, PublicKeysRequest};
use nstance_rt::{backoff::Backoff, chain::Chain, entropy::jitter};
use rustix::io::Errno;
use tokio::time::{Instant, sleep_until, timeout};

use crate::{
    context::Context,
    disk::{Access, open_regular},
    files::{
        errors,
        names::{KeyName, shown},
    },
    health::AGENT_VERSION,
    refusal::{CallError, Refusal, Verdict},
    session::{Client, Ended, Stream, Streams},
};

const PUBLIC_MODE: u32 = 0o644;

/// As many as a template has files.
const MAX_NAMES: usize = 256;

/// What a server takes in one call.
const MAX_SUBMITTED: usize = 32;

/// A private key is some hundred bytes; what is longer is none.
const MAX_KEY_BYTES: u64 = 16 * 1024;

const SUBMIT_LIMIT: Duration = Duration::from_secs(10);
const SUBMIT_BASE: Duration = Duration::from_millis(200);
const SUBMIT_CAP: Duration = Duration::from_secs(30);

/// One stream of key requests, from its opening to its end.
pub(crate) async fn stream(ctx: &Context, mut client: Client, open: &Streams<'_>) -> Ended {
    let mut requests = match client.key_gen_requests(hello(ctx)).await {
        Ok(answer) => answer.into_inner(),
        Err(status) => return status.into(),
    };
    open.opened(Stream::Keys);
    let mut answer = Answer::new();
    loop {
        // A request that comes during a call ends it, unless it asks for nothing new: what is sent is all that is
        // wanted.
        tokio::select! {
            biased;
            message = next_request(ctx, &mut requests, &answer) => match message {
                Ok(request) => answer.want(prepare(ctx, &request).await),
                Err(ended) => return ended,
            },
            submitted = answer.submit(ctx, &client) => match submitted {
                Ok(names) => answer.taken(&names),
                Err(CallError::Refused(refusal)) if refusal.on_session() != Verdict::Retry => {
                    return Ended::Refused(refusal);
                }
                Err(error) => answer.not_taken(ctx, error),
            },
        }
    }
}

/// Waits for a request that asks for more than is being answered already.
async fn next_request(
    ctx: &Context,
    requests: &mut tonic::Streaming<KeyGenerationRequest>,
    answer: &Answer,
) -> Result<KeyGenerationRequest, Ended> {
    loop {
        match requests.message().await {
            Ok(Some(request)) if !ctx.obeys(request.epoch) => return Err(Ended::Deposed),
            Ok(Some(request)) if answer.covers(&request) => {
                tracing::debug!(request = shown(&request.request_id), "keys are being submitted already");
            }
            Ok(Some(request)) => return Ok(request),
            Ok(None) => return Err(Ended::Clean),
            Err(status) => return Err(status.into()),
        }
    }
}

/// What is wanted and has not been taken yet.
struct Answer {
    keys: BTreeMap<KeyName, PublicKey>,
    backoff: Backoff,
    due: Instant,
}

impl Answer {
    fn new() -> Self {
        Self { keys: BTreeMap::new(), backoff: Backoff::new(SUBMIT_BASE, SUBMIT_CAP), due: Instant::now() }
    }

    fn covers(&self, request: &KeyGenerationRequest) -> bool {
        !request.key_names.is_empty()
            && request.key_names.iter().all(|name| KeyName::parse(name).is_ok_and(|name| self.keys.contains_key(&name)))
    }

    fn want(&mut self, keys: BTreeMap<KeyName, PublicKey>) {
        self.keys.extend(keys);
        self.backoff.reset();
        self.due = Instant::now();
    }

    /// Sends what there is to send, once it is due, and says what that was. Never ends while there is nothing.
    async fn submit(&self, ctx: &Context, client: &Client) -> Result<Vec<KeyName>, CallError> {
        if self.keys.is_empty() {
            return std::future::pending().await;
        }
        sleep_until(self.due).await;
        let keys = || self.keys.iter().take(MAX_SUBMITTED);
        let submission = |(name, key): (&KeyName, &PublicKey)| PublicKeySubmission {
            filename: name.as_str().to_owned(),
            public_key_pem: key.to_pem().into_bytes(),
        };
        let request = PublicKeysRequest {
            instance_id: ctx.settings.instance.to_string(),
            keys: keys().map(submission).collect(),
        };
        let mut client = client.clone();
        timeout(SUBMIT_LIMIT, client.submit_public_keys(request)).await.map_err(|_| CallError::Late)??;
        Ok(keys().map(|(name, _)| name.clone()).collect())
    }

    fn taken(&mut self, names: &[KeyName]) {
        tracing::info!(n_keys = names.len(), "public keys submitted");
        self.keys.retain(|name, _| !names.contains(name));
        self.backoff.reset();
        self.due = Instant::now();
    }

    /// Whether the connection is gone for good, the stream will tell.
    fn not_taken(&mut self, ctx: &Context, error: CallError) {
        tracing::info!(error = %Chain(&error), "public keys not taken yet");
        let wait = match error {
            CallError::Refused(Refusal { retry: Some(bound), .. }) => jitter(ctx.entropy(), bound),
            _ => self.backoff.next(ctx.entropy()),
        };
        self.due = Instant::now() + wait;
    }
}

/// Finds or makes every pair that is asked for; what cannot be made is told in an error entry, and left out.
async fn prepare(ctx: &Context, request: &KeyGenerationRequest) -> BTreeMap<KeyName, PublicKey> {
    let mut keys = BTreeMap::new();
    let (mut n_made, mut n_bad) = (0, 0);
    for text in request.key_names.iter().take(MAX_NAMES) {
        let complain = |entry: &str, why: &dyn fmt::Display| {
            errors::tell(ctx, entry, format!("key {} was not made: {why}", shown(text)));
        };
        match KeyName::parse(text) {
            Err(error) => {
                n_bad += 1;
                complain(text, &error);
            }
            Ok(name) => {
                // Called as its file, so that it hides no complaint about a received file of the key's name.
                let entry = format!("{}.key", name.as_str());
                match pair(ctx, &name) {
                    Err(error) => {
                        n_bad += 1;
                        complain(&entry, &error);
                    }
                    Ok((key, made)) => {
                        n_made += usize::from(made == Made::Now);
                        if errors::clear(ctx, &entry) {
                            ctx.board.changed();
                        }
                        keys.insert(name, key);
                    }
                }
            }
        }
        // Each pair costs a few syncs, and there is one thread for everything.
        tokio::task::yield_now().await;
    }
    if MAX_NAMES < request.key_names.len() {
        tracing::warn!(
            n_names = request.key_names.len(),
            "more keys asked for than a machine needs; the rest is left out"
        );
    }
    tracing::info!(n_keys = keys.len(), n_made, n_bad, request = shown(&request.request_id), "keys asked for");
    if 0 < n_made + n_bad {
        ctx.board.changed();
    }
    keys
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Made {
    Before,
    Now,
}

/// The pair of a name: the one that is there, or a new one.
fn pair(ctx: &Context, name: &KeyName) -> io::Result<(PublicKey, Made)> {
    let directory = &ctx.settings.keys;
    let at = |extension: &str| directory.path.join(format!("{}.{extension}", name.as_str()));
    let disk = &ctx.parts.disk;
    let (key, made) = match read_key(&at("key"))? {
        Some(key) => (key, Made::Before),
        None => {
            let key = KeyPair::generate(ctx.entropy());
            let access = Access { mode: directory.file_mode, group: directory.group };
            disk.write(&at("key"), key.to_pkcs8_pem().as_bytes(), access)?;
            (key, Made::Now)
        }
    };
    let text = key.public_key_pem();
    if made == Made::Now || !holds(&at("pub"), text.as_bytes()) {
        let access = Access { mode: PUBLIC_MODE, group: directory.group };
        disk.write(&at("pub"), text.as_bytes(), access)?;
    }
    Ok((key.public_key(), made))
}

/// `None` if there is nothing that could be used: no file, a link, or something that is no key. A disk that does not
/// answer is another matter: the key on it may be a good one, and is not replaced.
fn read_key(path: &Path) -> io::Result<Option<KeyPair>> {
    let file = match open_regular(path) {
        Ok(file) => file,
        Err(error) if is_unusable(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = zeroize::Zeroizing::new(Vec::with_capacity(512));
    file.take(MAX_KEY_BYTES).read_to_end(&mut bytes)?;
    let key = KeyPair::from_pkcs8_pem(&bytes).ok();
    if key.is_none() {
        tracing::warn!(path = %path.display(), "not a key we can use; it will be replaced");
    }
    Ok(key)
}

fn is_unusable(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, NotFound, PermissionDenied};
    matches!(error.kind(), NotFound | InvalidInput | PermissionDenied)
        || Errno::from_io_error(error) == Some(Errno::LOOP)
}

fn holds(path: &Path, content: &[u8]) -> bool {
    let mut found = Vec::new();
    open_regular(path).and_then(|file| file.take(MAX_KEY_BYTES).read_to_end(&mut found)).is_ok() && found == content
}

/// What opens a stream from the server.
pub(crate) fn hello(ctx: &Context) -> AgentStreamRequest {
    AgentStreamRequest {
        agent_version: AGENT_VERSION.to_owned(),
        session_id: ctx.session_id.clone(),
        config_hash: ctx.dir.config_hash().unwrap_or_default(),
    }
}

#[cfg(test)]
#[path = "keys/tests.rs"]
mod tests;
