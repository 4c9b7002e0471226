//! What the tests of this room share: dice with a seed, one instant, one cluster, and OpenSSL where it is installed.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    sync::Mutex,
    time::Duration,
};

use nstance_core::{
    ids::{ClusterId, InstanceId, OperatorId, Tenant},
    ports::clock::{Clock, Entropy},
    time::{Mono, Timestamp},
};
use ring::digest::{SHA256, digest};

use crate::{
    ca::{Ca, CaProfile, make_ca_certificate},
    issue::{FileProfile, FileUsage, Issued, SERVER_TTL, ServerProfile},
    keys::{KeyPair, PublicKey},
    subject::{San, Subject},
};

/// 2026-01-31T12:00:00Z and a bit: records keep whole seconds, so most tests begin on one.
pub(crate) const NOW: Timestamp = Timestamp::from_millis(1_769_860_800_000);

pub(crate) const DAY: Duration = Duration::from_secs(86_400);

pub(crate) fn cluster() -> ClusterId {
    "demo".parse().unwrap()
}

pub(crate) fn tenant() -> Tenant {
    Tenant::default_tenant()
}

pub(crate) fn instance() -> InstanceId {
    "knc06bgm7733st2576nx5jht4ecjw".parse().unwrap()
}

pub(crate) fn operator() -> OperatorId {
    "opr06bgm7733st2576nx5jht4ecjw".parse().unwrap()
}

/// Chance that repeats: a chain of hashes.
pub(crate) struct Dice(Mutex<[u8; 32]>);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        let mut state = [0; 32];
        state[..8].copy_from_slice(&seed.to_be_bytes());
        Self(Mutex::new(state))
    }
}

impl Entropy for Dice {
    fn fill(&self, bytes: &mut [u8]) {
        let mut state = self.0.lock().unwrap();
        for chunk in bytes.chunks_mut(32) {
            let next = digest(&SHA256, state.as_ref());
            state.copy_from_slice(next.as_ref());
            chunk.copy_from_slice(&state[..chunk.len()]);
        }
    }
}

/// A clock that stands still.
pub(crate) struct Still(pub(crate) Timestamp);

impl Clock for Still {
    fn now(&self) -> Timestamp {
        self.0
    }

    fn monotonic(&self) -> Mono {
        Mono::default()
    }
}

/// A CA and keys for all who may ask it.
pub(crate) struct Fixture {
    pub(crate) ca: Ca,
    pub(crate) key: KeyPair,
    pub(crate) dice: Dice,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        Self::seeded(7)
    }

    pub(crate) fn seeded(seed: u64) -> Self {
        let dice = Dice::new(seed);
        let ca_key = KeyPair::generate(&dice);
        let made = make_ca_certificate(&ca_key, &CaProfile::of(cluster()), NOW, &dice);
        let ca = Ca::load(made.chain_pem.as_bytes(), [ca_key]).unwrap();
        Self { ca, key: KeyPair::generate(&dice), dice }
    }

    pub(crate) fn public(&self) -> PublicKey {
        self.key.public_key()
    }

    pub(crate) fn server(&self) -> Issued {
        let profile = ServerProfile {
            server: "srv-1".parse().unwrap(),
            cluster: cluster(),
            shard: "s1".parse().unwrap(),
            sans: vec![San::host("nstance.example.com").unwrap(), San::host("localhost").unwrap()],
        };
        self.ca.issue_server(&profile, &self.public(), NOW, SERVER_TTL, &self.dice).unwrap()
    }

    pub(crate) fn agent(&self) -> Issued {
        self.ca.issue_agent(&instance(), &tenant(), &self.public(), NOW, DAY, &self.dice).unwrap()
    }

    pub(crate) fn agent_chain(&self) -> String {
        self.agent().chain_pem
    }

    pub(crate) fn operator(&self) -> Issued {
        self.ca.issue_operator(&operator(), &tenant(), &self.public(), NOW, DAY, &self.dice).unwrap()
    }

    /// A file certificate with everything a template may ask for, and all the names of a server.
    pub(crate) fn file(&self, usage: FileUsage) -> Issued {
        let subject = Subject {
            common_name: "srv-1".into(),
            organization: vec!["system:nodes".into(), "demo".into()],
            organizational_unit: vec!["s1".into()],
            country: vec!["DE".into()],
            locality: vec!["Köln".into()],
            street: vec!["Domkloster 4".into()],
            postal_code: vec!["50667".into()],
            ..Subject::default()
        };
        let sans = vec![
            San::host("nstance-server").unwrap(),
            San::host("localhost").unwrap(),
            San::host("127.0.0.1").unwrap(),
            San::uri("spiffe://demo/web").unwrap(),
        ];
        let profile = FileProfile { subject, sans, usage };
        self.ca.issue_file(&profile, &self.public(), NOW, DAY, &self.dice).unwrap()
    }
}

/// Runs OpenSSL with `input` at its standard input; `None` where it is not installed.
pub(crate) fn openssl(arguments: &[&str], input: &[u8]) -> Option<String> {
    let mut child = match Command::new("openssl")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
    {
        Ok(child) => child,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        Err(error) => panic!("openssl: {error}"),
    };
    // A command that reads no input may be gone before it is written.
    let _ = child.stdin.take().unwrap().write_all(input);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "openssl {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}
