//! One object of every kind that lies in the bucket, and where it lies.
//!
//! `tests/baseline/stored/` holds each as JSON, with everything in it that can be in it. It is made again by today's code:
//! a key may come, none may change or go. And what was stored is read by today's code as what it was.

use std::{collections::BTreeMap, fmt::Debug, fs, path::Path, time::Duration};

use data_encoding::{BASE64URL_NOPAD, HEXLOWER};
use nstance_core::{
    ids::{Epoch, GroupRef, InstanceId, OperatorId, Shard, Tenant},
    instance::{
        Addresses, CertFact, CertPair, CreateFailure, CreateReason, Delete, Drain, DrainReason, Inherited, Instance,
        NonceFact, OnDemandRequest, Ownership, ProviderFact, Registration, Rejoin, ReplaceMark,
    },
    time::Timestamp,
};
use nstance_identity::{
    ca::{CA_KEY_SECRET, Ca, CaProfile, NONCE_KEY_SECRET, ca_key_secret, make_ca_certificate},
    keys::KeyPair,
    nonce::{AgentNonce, NonceKeys, OperatorNonce, sign_agent_nonce, sign_operator_nonce},
};
use nstance_rt::entropy::SeededEntropy;
use nstance_store::{
    keys::EncryptionKey,
    records::{
        self, Extra, Meta, Record,
        certlog::{CertlogRecord, LoggedCertificate},
        groups::{GroupEntry, GroupsFile, StaticSeen, Tombstone, TombstoneReason},
        key,
        leader::{LeaseRecord, Previous, TakeOver},
        nonce::NonceRecord,
        operator::{OperatorRecord, Revoked},
    },
    seal,
    secrets::DEFAULT_PREFIX,
};
use serde_json::{Value, json};

use super::{Mode, directory, hold, mode};

/// What `released` says and `today` does not, by its path.
fn lost(at: &str, released: &Value, today: &Value, found: &mut Vec<String>) {
    match (released, today) {
        (Value::Object(released), Value::Object(today)) => {
            for (key, value) in released {
                let at = format!("{at}.{key}");
                match today.get(key) {
                    Some(today) => lost(&at, value, today, found),
                    None => found.push(format!("{at} is not written any more")),
                }
            }
        }
        (Value::Array(released), Value::Array(today)) if released.len() == today.len() => {
            for (n, (released, today)) in released.iter().zip(today).enumerate() {
                lost(&format!("{at}[{n}]"), released, today, found);
            }
        }
        _ if released == today => {}
        _ => found.push(format!("{at} was {released} and is {today}")),
    }
}

/// Holds an object against the file of its kind, and answers what is in the file.
fn hold_object(name: &str, today: &Value) -> Value {
    let path = directory().join("stored").join(format!("{name}.json"));
    match hold_object_in(&path, today, mode()) {
        Ok(released) => released,
        Err(problem) => panic!("{problem}"),
    }
}

fn hold_object_in(path: &Path, today: &Value, mode: Mode) -> Result<Value, String> {
    let file = path.file_name().unwrap_or_default().display();
    let text = fs::read_to_string(path).ok();
    let released: Value = match &text {
        Some(text) => serde_json::from_str(text).map_err(|error| format!("{file}: {error}"))?,
        None => json!({}),
    };
    let mut found = Vec::new();
    lost("", &released, today, &mut found);
    if !found.is_empty() {
        return Err(format!(
            "the code no longer stores what is in tests/baseline/stored/{file}:\n  {}\n\
             Changing or removing a key needs an issue's word.",
            found.join("\n  ")
        ));
    }
    match mode {
        _ if released == *today => Ok(released),
        Mode::Check => {
            lost("", today, &released, &mut found);
            Err(format!(
                "the code stores keys that are not in tests/baseline/stored/{file} yet:\n  {}\nRun with UPDATE_EXPECT=1 to add it.",
                found.join("\n  ").replace(" is not written any more", "")
            ))
        }
        Mode::Add => {
            fs::write(path, format!("{today:#}\n")).map_err(|error| format!("{file}: {error}"))?;
            Ok(today.clone())
        }
    }
}

/// A record is written as the file says, and the file is read as this record.
fn hold_record<T: Record + PartialEq + Debug>(name: &str, key: &str, value: &T) {
    let meta = Meta {
        version: records::VERSION,
        epoch: Epoch(7),
        writer: "dev-1/s1".into(),
        write_id: "00112233445566778899aabbccddeeff".into(),
        updated_at: at(9),
    };
    let body = records::encode(value, &meta, &Extra::default());
    let released = hold_object(name, &serde_json::from_slice(&body).unwrap());
    let (read, read_meta, extra) = records::decode::<T>(key, released.to_string().as_bytes()).unwrap();
    assert_eq!((&read, read_meta), (value, meta), "what was stored is read as something else");
    assert!(extra.is_empty(), "of what was stored nobody knows {extra:?}");
}

/// The first second of a day, and milliseconds after it.
fn at(millis: i64) -> Timestamp {
    Timestamp::from_millis(1_700_000_000_000 + millis)
}

fn shard() -> Shard {
    "dev-1".parse().unwrap()
}

fn tenant() -> Tenant {
    "default".parse().unwrap()
}

fn group(name: &str) -> GroupRef {
    GroupRef::new(tenant(), name.parse().unwrap())
}

fn id() -> InstanceId {
    "knc06bgm7733st2576nx5jht4ecjw".parse().unwrap()
}

fn operator_id() -> OperatorId {
    OperatorId::new([7; 16])
}

fn text(text: &str) -> Option<String> {
    Some(text.to_owned())
}

fn addresses() -> Addresses {
    Addresses { ip4: text("10.0.0.1"), ip6: text("fd00::1"), hostname: text("host"), fqdn: text("host.example") }
}

fn certificates() -> CertPair {
    let fact = |serial: &str| CertFact {
        serial: serial.repeat(16),
        issuer: "issuer".into(),
        not_before: at(1),
        not_after: at(2),
    };
    CertPair { current: fact("0a"), previous: Some(fact("0b")) }
}

fn rejoin() -> Rejoin {
    Rejoin { count: 3, at: at(3), proof_sha256: "00".repeat(32) }
}

/// With every fact that there is, whether they go together or not.
fn instance() -> Instance {
    Instance {
        id: id(),
        group: group("web"),
        cluster: "demo".parse().unwrap(),
        shard: shard(),
        epoch: Epoch(7),
        intent_epoch: Epoch(6),
        ownership: Ownership::OnDemand,
        created_at: at(0),
        reason: CreateReason::OnDemand,
        request: Some(OnDemandRequest {
            request_id: text("r1"),
            template: text("gpu"),
            instance_type: text("t3.large"),
            subnet_pool: text("workers"),
            vars: [("A".into(), "1".into())].into(),
            by: "operator".into(),
            inherits: Inherited {
                template: text("knc"),
                instance_type: text("t3.small"),
                subnet_pool: text("main"),
                vars: [("B".into(), "2".into())].into(),
            },
        }),
        arch: "amd64".into(),
        template: "gpu".into(),
        infra_hash: "infra".into(),
        runtime_hash: "runtime".into(),
        config_etag: "etag".into(),
        instance_type: text("t3.large"),
        subnet: "subnet-1".into(),
        image: text("ami-1"),
        nonce: NonceFact { jti: "0".repeat(32), expires_at: at(4), used_at: Some(at(3)) },
        provider: ProviderFact {
            kind: "fake".into(),
            reserved_id: text("vm-1"),
            id: text("vm-1"),
            confirmed_at: Some(at(2)),
            addresses: addresses(),
        },
        create_failure: Some(CreateFailure { at: at(2), class: "quota".into(), message: "no more".into() }),
        registration: Some(Registration {
            at: at(3),
            public_key: vec![1, 2, 255],
            addresses: addresses(),
            agent_version: "0.1.0".into(),
        }),
        cert: Some(certificates()),
        rejoin: Some(rejoin()),
        replace: Some(ReplaceMark { at: at(5), by: "operator".into(), reason: "why".into() }),
        drain: Some(Drain {
            reason: DrainReason::Requested,
            started_at: at(5),
            deadline: at(6),
            replacement: Some(id()),
            acked_at: Some(at(6)),
            acked_by: text("operator"),
            cancelled_at: Some(at(6)),
        }),
        delete: Some(Delete {
            reason: "requested".into(),
            by: "operator".into(),
            requested_at: at(7),
            gone_at: Some(at(8)),
        }),
        adopted_at: Some(at(1)),
    }
}

#[test]
fn an_instance() {
    hold_record("instance", &key::instance_key(&shard(), &tenant(), &id()), &instance());
}

#[test]
fn the_groups() {
    let entry = GroupEntry {
        template: text("knc"),
        size: Some(3),
        instance_type: text("t3.small"),
        subnet_pool: text("workers"),
        vars: Some(BTreeMap::from([("A".into(), "b".into())])),
        drain_timeout: Some(Duration::from_secs(90)),
        load_balancers: Some(vec!["front".into()]),
        rollout_paused: Some(true),
        preferred_victims: vec![id()],
        generation: 4,
        updated_at: Some(at(1)),
        updated_by: text("operator"),
    };
    let gone = |reason| Tombstone { at: at(2), by: "operator".into(), reason };
    let groups = GroupsFile {
        epoch: Epoch(7),
        groups: BTreeMap::from([(group("web"), entry)]),
        deleted: BTreeMap::from([
            (group("old"), gone(TombstoneReason::Api)),
            (group("older"), gone(TombstoneReason::Config)),
        ]),
        static_groups: Some(StaticSeen { etag: "etag".into(), groups: [group("db")].into() }),
    };
    hold_record("groups", &key::groups_key(&shard()), &groups);
}

#[test]
fn the_lease() {
    let lease = LeaseRecord {
        epoch: Epoch(7),
        holder: "s1".into(),
        process: "0".repeat(32),
        addr: "10.0.0.1:8991".into(),
        health_addr: "10.0.0.1:8990".into(),
        direct: true,
        boot_id: "boot".into(),
        provider_id: text("vm-1"),
        ttl: Duration::from_secs(6),
        acquired_at: at(1),
        renewed_at: at(2),
        released: false,
        previous: Some(Previous {
            holder: "s2".into(),
            process: "1".repeat(32),
            epoch: Epoch(6),
            provider_id: text("vm-2"),
            reason: TakeOver::Expired,
        }),
    };
    hold_record("lease", &key::lease_key(Some(&shard())), &lease);
}

#[test]
fn why_a_lease_was_taken() {
    let next = |reason: Option<TakeOver>| match reason {
        None => Some(TakeOver::Released),
        Some(TakeOver::Released) => Some(TakeOver::Expired),
        Some(TakeOver::Expired) => Some(TakeOver::ProofOfDeath),
        Some(TakeOver::ProofOfDeath) => Some(TakeOver::SameHost),
        Some(TakeOver::SameHost) => Some(TakeOver::Absent),
        Some(TakeOver::Absent) => None,
    };
    let word = |reason: TakeOver| serde_json::to_value(reason).unwrap().as_str().unwrap().to_owned();
    hold("lease-take-overs", std::iter::successors(next(None), |it| next(Some(*it))).map(word));
}

#[test]
fn an_operator() {
    let operator = OperatorRecord {
        operator_id: operator_id(),
        tenant: tenant(),
        cluster: "demo".parse().unwrap(),
        public_key: vec![1, 2, 255],
        cert: certificates(),
        registered_at: at(1),
        nonce_jti: text("0"),
        renewed_at: Some(at(2)),
        rejoin: Some(rejoin()),
        revoked: Some(Revoked { at: at(4), by: "admin/host".into(), reason: "why".into() }),
    };
    hold_record("operator", &key::operator_key(&tenant(), &operator_id()), &operator);
}

#[test]
fn a_consumed_nonce() {
    let nonce = NonceRecord {
        jti: "0".repeat(32),
        kind: "operator".into(),
        subject: operator_id().to_string(),
        tenant: tenant(),
        public_key_sha256: "00".repeat(32),
        consumed_at: at(1),
        expires_at: at(2),
    };
    hold_record("nonce", &key::nonce_key(&nonce.jti), &nonce);
}

#[test]
fn an_entry_of_the_certificate_log() {
    let entry = CertlogRecord {
        cluster: "demo".parse().unwrap(),
        shard: Some(shard()),
        tenant: Some(tenant()),
        subject_id: id().to_string(),
        issued_at: at(1),
        certificates: vec![LoggedCertificate {
            name: "agent".into(),
            role: "agent".into(),
            serial: "0a".repeat(16),
            subject: "CN=it".into(),
            sans: vec!["DNS:host".into()],
            not_before: at(1),
            not_after: at(2),
            sha256: "00".repeat(32),
            issuer: "issuer".into(),
        }],
    };
    hold_record("certlog", &key::certlog_key(&shard(), Some(&tenant()), at(1), &entry.subject_id), &entry);
    let of_system = CertlogRecord { shard: None, tenant: None, ..entry };
    hold_record("certlog-system", &key::cluster_certlog_key(None, at(1), &of_system.subject_id), &of_system);
}

/// Sealed with a key of zeros.
#[test]
fn a_sealed_secret() {
    let keys = [EncryptionKey::new([0; 32])];
    let sealed = seal::seal(&keys[0], "ca.key", b"secret", &SeededEntropy::new(1));
    let object = json!({ "name": "ca.key", "sealed": HEXLOWER.encode(&sealed) });
    let released = hold_object("secret", &object);
    let blob = HEXLOWER.decode(released["sealed"].as_str().unwrap().as_bytes()).unwrap();
    let (plain, opened) = seal::open(&keys, "ca.key", &blob).unwrap();
    assert_eq!((&plain[..], opened.bound), (&b"secret"[..], true));
}

/// The CA's certificate, and its key as it lies in a secrets store. The key is of a seed, and nobody's.
#[test]
fn a_ca() {
    let entropy = SeededEntropy::new(1);
    let key = KeyPair::generate(&entropy);
    let made = make_ca_certificate(&key, &CaProfile::of("demo".parse().unwrap()), at(0), &entropy);
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let object = json!({ "ca.crt": lines(&made.chain_pem), "ca.key": lines(&key.to_pkcs8_pem()) });
    let released = hold_object("ca", &object);
    let text = |name: &str| {
        let lines = released[name].as_array().unwrap().iter().map(|line| line.as_str().unwrap());
        lines.map(|line| format!("{line}\n")).collect::<String>()
    };
    let key = KeyPair::from_pkcs8_pem(text("ca.key").as_bytes()).unwrap();
    let ca = Ca::load(text("ca.crt").as_bytes(), [key]).unwrap();
    assert_eq!(ca.trusted().len(), 1);
}

fn claims(token: &str) -> Value {
    let parts: Vec<_> = token.split('.').take(2).map(|it| BASE64URL_NOPAD.decode(it.as_bytes()).unwrap()).collect();
    let [header, claims] = [0, 1].map(|n: usize| serde_json::from_slice::<Value>(&parts[n]).unwrap());
    json!({ "header": header, "claims": claims })
}

fn token(key: &KeyPair, stored: &Value) -> String {
    let [header, claims] = ["header", "claims"].map(|it| BASE64URL_NOPAD.encode(stored[it].to_string().as_bytes()));
    let signed = format!("{header}.{claims}");
    format!("{signed}.{}", BASE64URL_NOPAD.encode(&key.sign(signed.as_bytes())))
}

/// It lies in the userdata of machines that boot while servers are upgraded.
#[test]
fn a_nonce_of_an_agent() {
    let key = KeyPair::generate(&SeededEntropy::new(1));
    let nonce = AgentNonce {
        instance: id(),
        jti: "0".repeat(32),
        issued_at: at(0),
        expires_at: at(60_000),
        cluster: "demo".parse().unwrap(),
        tenant: tenant(),
        shard: shard(),
        group: "web".parse().unwrap(),
        on_demand: true,
        config_hash: "hash".into(),
    };
    let released = hold_object("registration-nonce-agent", &claims(&sign_agent_nonce(&key, &nonce)));
    let read = NonceKeys::new([key.public_key()]).verify_agent(&token(&key, &released), at(1));
    assert_eq!(read, Ok(nonce));
}

#[test]
fn a_nonce_of_an_operator() {
    let key = KeyPair::generate(&SeededEntropy::new(1));
    let nonce = OperatorNonce {
        operator: operator_id(),
        jti: "0".repeat(32),
        issued_at: at(0),
        expires_at: at(60_000),
        cluster: "demo".parse().unwrap(),
        tenant: tenant(),
    };
    let released = hold_object("registration-nonce-operator", &claims(&sign_operator_nonce(&key, &nonce)));
    let read = NonceKeys::new([key.public_key()]).verify_operator(&token(&key, &released), at(1));
    assert_eq!(read, Ok(nonce));
}

#[test]
fn where_each_object_lies() {
    let (shard, tenant) = (shard(), tenant());
    let [config, old_config] = key::config_keys(&shard);
    let secret = |name: &str| format!("{DEFAULT_PREFIX}{name}");
    let keys = [
        ("config", config),
        ("config-of-before", old_config),
        ("ca", key::ca_crt_key()),
        ("lease", key::lease_key(Some(&shard))),
        ("lease-cluster", key::lease_key(None)),
        ("groups", key::groups_key(&shard)),
        ("instance", key::instance_key(&shard, &tenant, &id())),
        ("operator", key::operator_key(&tenant, &operator_id())),
        ("nonce", key::nonce_key("0a0b")),
        ("certlog", key::certlog_key(&shard, Some(&tenant), at(7), "subject")),
        ("certlog-system", key::certlog_key(&shard, None, at(7), "subject")),
        ("certlog-cluster", key::cluster_certlog_key(Some(&tenant), at(7), "subject")),
        ("probe", key::probe_key(&shard, &"s1".parse().unwrap(), "0a0b")),
        ("secret-ca", secret(CA_KEY_SECRET)),
        ("secret-ca-rotated", secret(&ca_key_secret("0a0b"))),
        ("secret-nonce", secret(NONCE_KEY_SECRET)),
    ];
    hold("stored-keys", keys.map(|(kind, key)| format!("{kind} {key}")));
}

#[test]
fn what_changed_or_went_is_named_and_what_came_is_not_lost() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("it.json");
    let hold = |today: Value, mode| hold_object_in(&path, &today, mode);
    let first = json!({ "a": 1, "b": { "c": [1, { "d": null }] } });
    assert!(hold(first.clone(), Mode::Check).unwrap_err().contains("UPDATE_EXPECT=1"));
    assert_eq!(hold(first.clone(), Mode::Add), Ok(first.clone()));
    assert_eq!(hold(first.clone(), Mode::Check), Ok(first.clone()));
    let changes = [
        (json!({ "a": 2, "b": { "c": [1, { "d": null }] } }), ".a was 1 and is 2"),
        (json!({ "a": 1, "b": { "c": [1] } }), ".b.c was "),
        (json!({ "a": 1, "b": { "c": [1, {}] } }), ".b.c[1].d is not written any more"),
        (json!({ "a": 1 }), ".b is not written any more"),
    ];
    for (today, expected) in changes {
        for mode in [Mode::Check, Mode::Add] {
            let problem = hold(today.clone(), mode).unwrap_err();
            assert!(problem.contains(expected) && problem.contains("an issue's word"), "{problem}");
        }
    }
    let grown = json!({ "a": 1, "b": { "c": [1, { "d": null, "e": 2 }] } });
    let problem = hold(grown.clone(), Mode::Check).unwrap_err();
    assert!(problem.contains(".b.c[1].e\n"), "{problem}");
    assert_eq!(hold(grown.clone(), Mode::Add), Ok(grown.clone()));
    assert_eq!(hold(grown.clone(), Mode::Check), Ok(grown));
}
