//! The cluster through its bucket, by the admin tool, while a server runs: what it makes is good with the server, what it
//! revokes is not, and `check` finds what is wrong.
//!
//! One environment and one test, for starting it is most of the time.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use crate::e2e_common::{Env, ids, text};
use nstance_client::{Registration, ShardError, Target};
use nstance_config::{Checks, Config, load};
use nstance_identity::{
    ca::Bundle,
    keys::KeyPair,
    link::{Address, TcpNet},
};
use nstance_proto::v1::RegisterClientResponse;
use nstance_rt::{clock::SystemClock, entropy::SystemEntropy};
use serde_json::{Value, json};

/// How the tool ended, and what it said.
struct Said {
    exit: i32,
    stdout: String,
    all: String,
}

impl Said {
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {}", self.all))
    }
}

async fn admin(env: &Env, args: &[&str]) -> Said {
    let output = env.dev(&[&["admin"], args].concat()).await;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    Said { exit: output.status.code().unwrap(), stdout, all: text(&output) }
}

async fn ok(env: &Env, args: &[&str]) -> Said {
    let said = admin(env, args).await;
    assert_eq!(said.exit, 0, "{args:?}: {}", said.all);
    said
}

/// `group/name` of every line with this result, and the fix.
fn lines<'a>(checked: &'a Value, result: &str) -> Vec<(String, &'a Value)> {
    let of = checked["checks"].as_array().unwrap().iter().filter(|it| it["result"] == result);
    of.map(|it| (format!("{}/{}", it["group"].as_str().unwrap(), it["name"].as_str().unwrap()), it)).collect()
}

fn names(checked: &Value, result: &str) -> Vec<String> {
    lines(checked, result).into_iter().map(|it| it.0).collect()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn config(env: &Env) -> Config {
    fn find(dir: &Path) -> Option<PathBuf> {
        fs::read_dir(dir)
            .ok()?
            .flatten()
            .map(|it| it.path())
            .find_map(|path| if path.ends_with("config/dev-1.jsonc") { Some(path) } else { find(&path) })
    }
    let bytes = fs::read(find(&env.dir()).expect("a config in the bucket")).unwrap();
    load("config", &bytes, &Checks::offline(nstance_schemas::ALL)).config.unwrap()
}

async fn register(env: &Env, nonce: &str, key: &KeyPair) -> Result<RegisterClientResponse, ShardError> {
    let bundle = Bundle::parse(&fs::read(env.dir().join("cli-operator-identity/ca.crt")).unwrap()).unwrap();
    let address = Address { host: "127.0.0.1".into(), port: config(env).server.advertise.registration.port };
    let target = Target { shard: "dev-1".to_owned(), addresses: vec![address] };
    let clock = Arc::new(SystemClock);
    let registration = Registration { ca_bundle: &bundle, nonce, key, client_version: "test", clock };
    registration.register(&TcpNet, &target, Duration::from_secs(10)).await
}

#[tokio::test]
async fn cluster_commands_work_beside_a_running_server() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let env = Env::new();
    env.up(&["--size", "test=1"]).await;
    env.healthy().await;
    let temp = tempfile::tempdir().unwrap();

    a_healthy_environment_passes_every_check(&env).await;
    the_doctor_looks_at_the_bucket_too(&env).await;
    a_nonce_registers_one_operator_once(&env, temp.path()).await;
    a_made_identity_is_served_until_it_is_revoked(&env, temp.path()).await;
    a_rotation_goes_by_its_steps(&env).await;
    secrets_and_info_are_read_from_the_bucket(&env).await;
    what_is_broken_fails_and_says_how_to_repair_it(&env, temp.path()).await;
    revoking_an_agents_certificate_replaces_its_instance(&env).await;
    // Last: whoever was there before is cut off.
    a_forced_rotation_says_whom_it_cuts_off(&env, temp.path()).await;
    a_lost_key_is_replaced_and_none_that_is_there(&env).await;
    let _ = env.dev(&["clean"]).await;
}

/// The embedded store keeps one version of everything, has no rules, and lets everybody in.
async fn the_doctor_looks_at_the_bucket_too(env: &Env) {
    let looked = ok(env, &["cluster", "doctor", "-o", "json"]).await.json();
    assert_eq!((&looked["failed"], &looked["skipped"]), (&json!(0), &json!(0)), "{looked:#}");
    assert_eq!(names(&looked, "warn"), ["bucket/versioning", "bucket/public-access"], "{looked:#}");
    assert!(names(&looked, "ok").contains(&"bucket/retention".to_owned()), "{looked:#}");
    assert!(lines(&looked, "warn").iter().all(|(_, it)| it["fix"].is_string()), "{looked:#}");
    let said = admin(env, &["cluster", "doctor"]).await;
    assert!(said.stdout.contains("fix: aws s3api put-bucket-versioning --bucket dev"), "{}", said.stdout);
}

async fn a_healthy_environment_passes_every_check(env: &Env) {
    let checked = ok(env, &["check", "-o", "json"]).await.json();
    assert_eq!(
        (&checked["ok"], &checked["failed"], &checked["skipped"]),
        (&json!(true), &json!(0), &json!(0)),
        "{checked:#}"
    );
    let passed = names(&checked, "ok");
    for wanted in [
        "environment/clock-store",
        "environment/clock-dev-1",
        "environment/dns 127.0.0.1",
        "store/create-refuses-existing",
        "store/update-refuses-missing",
        "store/racing-writers",
        "store/clean-up",
        "secrets/ca-key-fits",
        "secrets/nonce-key",
        "config/dev-1/config",
        "config/cluster-id",
        "identity/trusted",
        "identity/record",
        "shards/dev-1/mtls",
        "shards/dev-1/config",
        "fleet/dev-1/groups",
    ] {
        assert!(passed.iter().any(|it| it == wanted), "{wanted} is missing: {checked:#}");
    }
    let pre = ok(env, &["check", "--pre", "-o", "json"]).await.json();
    assert!(names(&pre, "ok").iter().all(|it| !it.starts_with("shards/") && !it.starts_with("identity/")), "{pre:#}");
}

async fn a_nonce_registers_one_operator_once(env: &Env, temp: &Path) {
    let cluster = config(env).server.cluster_id.to_string();
    let file = temp.join("nonce/nonce.jwt");
    let args = ["cluster", "nonce", "--cluster-id", &cluster, "--output", file.to_str().unwrap(), "-o", "json"];
    let said = ok(env, &args).await;
    assert_eq!((mode(&file), mode(file.parent().unwrap())), (0o600, 0o700));
    let nonce = fs::read_to_string(&file).unwrap();
    assert!(!said.all.contains(&nonce), "it is a secret");
    let printed = ok(env, &["cluster", "nonce", "--cluster-id", &cluster, "--output", "-"]).await;
    assert_eq!(printed.stdout.trim().split('.').count(), 3, "the token and nothing else");

    let (key, other) = (KeyPair::generate(&SystemEntropy::new()), KeyPair::generate(&SystemEntropy::new()));
    let answer = register(env, &nonce, &key).await.unwrap();
    assert_eq!(json!(answer.subject), said.json()["operator_id"]);
    let dir = temp.join("by-nonce");
    nstance_admin::identity_files::write(
        &dir,
        std::str::from_utf8(&answer.ca_bundle_pem).unwrap(),
        Some(&key),
        std::str::from_utf8(&answer.client_certificate_pem).unwrap(),
    )
    .unwrap();
    ok(env, &["shards", "--identity-dir", dir.to_str().unwrap()]).await;
    let refused = register(env, &nonce, &other).await.unwrap_err();
    assert_eq!(refused.reason, "NONCE_USED", "{refused}");

    let said = admin(env, &["cluster", "nonce", "--cluster-id", "another", "--output", "-"]).await;
    assert_eq!(said.exit, 64, "{}", said.all);
    assert!(said.all.contains(&format!("this bucket is of cluster {cluster}")), "{}", said.all);
}

async fn a_made_identity_is_served_until_it_is_revoked(env: &Env, temp: &Path) {
    let dir = temp.join("made");
    let shown = dir.to_str().unwrap();
    let made = ok(env, &["cluster", "register-operator", "--output-dir", shown, "-o", "json"]).await.json();
    let (id, serial) = (made["operator_id"].as_str().unwrap(), made["serial"].as_str().unwrap());
    assert!(id.starts_with("opr"), "{id}");
    assert_eq!((mode(&dir), mode(&dir.join("identity.key"))), (0o700, 0o600));
    ok(env, &["shards", "--identity-dir", shown]).await;
    let again = admin(env, &["cluster", "register-operator", "--operator-id", id, "--output-dir", shown]).await;
    assert_eq!(again.exit, 1, "{}", again.all);
    assert!(again.all.contains("exists already"), "{}", again.all);

    // Of a key whose private half stays where it is.
    let public = temp.join("public.pem");
    fs::write(&public, KeyPair::generate(&SystemEntropy::new()).public_key_pem()).unwrap();
    let theirs = temp.join("theirs");
    let args = ["--public-key-file", public.to_str().unwrap(), "--output-dir", theirs.to_str().unwrap()];
    ok(env, &[&["cluster", "register-operator"], &args[..]].concat()).await;
    assert!(theirs.join("identity.crt").exists() && !theirs.join("identity.key").exists());

    let listed = ok(env, &["cert", "list", "--operator", id, "-o", "json"]).await.json();
    let states: Vec<&Value> = listed["certificates"].as_array().unwrap().iter().map(|it| &it["state"]).collect();
    // The second try was logged before it was refused: more than was delivered, never less.
    assert_eq!(states.iter().filter(|it| **it == "valid").count(), 1, "{listed:#}");

    let needs = admin(env, &["operator", "revoke", id]).await;
    assert_eq!(needs.exit, 64, "{}", needs.all);
    assert!(needs.all.contains("--yes"), "{}", needs.all);
    ok(env, &["operator", "revoke", id, "--dry-run"]).await;
    ok(env, &["shards", "--identity-dir", shown]).await;
    let colons: Vec<&str> = serial.as_bytes().chunks(2).map(|it| std::str::from_utf8(it).unwrap()).collect();
    ok(env, &["cert", "revoke", &colons.join(":"), "--reason", "left the team", "--yes"]).await;
    let refused = admin(env, &["shards", "--identity-dir", shown, "-o", "json"]).await;
    assert_eq!(refused.exit, 6, "at once: {}", refused.all);
    assert_eq!(refused.json()["errors"][0]["code"], "operator_revoked", "{}", refused.all);

    let operators = ok(env, &["operator", "list", "-o", "json"]).await.json();
    let record = operators["operators"].as_array().unwrap().iter().find(|it| it["operator_id"] == id).unwrap();
    assert_eq!((&record["state"], &record["revoked"]["reason"]), (&json!("revoked"), &json!("left the team")));
    let checked = admin(env, &["check", "--only", "identity", "--identity-dir", shown, "-o", "json"]).await;
    assert_eq!(checked.exit, 1);
    assert_eq!(names(&checked.json(), "fail"), ["identity/record"]);
    let missing = admin(env, &["operator", "revoke", "opr00000000000000000000000000", "--yes"]).await;
    assert_eq!(missing.exit, 5, "{}", missing.all);
}

async fn a_rotation_goes_by_its_steps(env: &Env) {
    let status = ok(env, &["cluster", "rotate-ca", "--status", "-o", "json"]).await.json();
    assert_eq!((&status["stage"], status["cas"].as_array().unwrap().len()), (&json!("settled"), 1), "{status:#}");
    assert!(3 <= status["cas"][0]["certificates_in_use"].as_u64().unwrap(), "{status:#}");
    ok(env, &["cluster", "rotate-ca", "--dry-run"]).await;
    let started = ok(env, &["cluster", "rotate-ca", "--yes", "-o", "json"]).await.json();
    assert_eq!((&started["stage"], started["cas"].as_array().unwrap().len()), (&json!("started"), 2), "{started:#}");
    assert_eq!(started["cas"][0]["fingerprint"], status["cas"][0]["fingerprint"], "the old one still issues");
    assert!(started["next_from"].is_string(), "{started:#}");
    let early = admin(env, &["cluster", "rotate-ca", "--activate", "--yes"]).await;
    assert_eq!(early.exit, 1, "{}", early.all);
    assert!(early.all.contains("15 minutes") && early.all.contains("next: wait until"), "{}", early.all);
    let wrong = admin(env, &["cluster", "rotate-ca", "--retire", "--yes"]).await;
    assert_eq!(wrong.exit, 1, "{}", wrong.all);
    ok(env, &["shards"]).await;
    let aborted = ok(env, &["cluster", "rotate-ca", "--abort", "--yes", "-o", "json"]).await.json();
    assert_eq!((&aborted["stage"], &aborted["cas"]), (&json!("settled"), &status["cas"]), "{aborted:#}");
}

/// Fingerprints of the bundle, who issues first.
fn cas(rotation: &Value) -> Vec<String> {
    let cas = rotation["cas"].as_array().unwrap();
    assert_eq!(cas[0]["issues"], true, "{rotation:#}");
    cas.iter().map(|it| it["fingerprint"].as_str().unwrap().to_owned()).collect()
}

/// Nobody waits 15 minutes here, so every step is forced; that it has to be is what is seen first.
async fn a_forced_rotation_says_whom_it_cuts_off(env: &Env, temp: &Path) {
    let rotate = async |args: &[&str]| admin(env, &[&["cluster", "rotate-ca", "-o", "json"], args].concat()).await;
    let done = async |args: &[&str]| {
        let said = rotate(&[args, &["--yes"]].concat()).await;
        assert_eq!(said.exit, 0, "{args:?}: {}", said.all);
        said
    };
    let [old] = &cas(&rotate(&["--status"]).await.json())[..] else { panic!("one CA") };
    let started = cas(&done(&[]).await.json());
    assert_eq!((started.len(), &started[0]), (2, old));
    let new = &started[1];

    let would = rotate(&["--activate", "--dry-run"]).await;
    assert_eq!((would.exit, cas(&would.json())), (1, started.clone()), "{}", would.all);
    let in_the_way = would.json()["in_the_way"].as_array().unwrap().clone();
    assert!(in_the_way[0].as_str().unwrap().contains("15 minutes"), "{in_the_way:?}");
    let unasked = rotate(&["--activate", "--force"]).await;
    assert_eq!((unasked.exit, unasked.all.contains("--yes")), (64, true), "{}", unasked.all);
    let active = done(&["--activate", "--force"]).await;
    assert!(active.all.contains("cannot be aborted") && active.all.contains("cuts off"), "{}", active.all);
    let document = active.json();
    assert_eq!((&document["stage"], cas(&document)), (&json!("active"), vec![new.clone(), old.clone()]));
    assert_eq!(document["cut_off"].as_array().unwrap().len(), in_the_way.len(), "{document:#}");
    assert_eq!(document["next"], "nstance-admin cluster rotate-ca --retire");
    for late in ["--abort", "--activate", "--lost-key"] {
        let said = rotate(&[late, "--yes", "--force"]).await;
        assert_eq!(said.exit, 1, "{late}: {}", said.all);
        assert!(said.all.contains("the new CA issues already"), "{late}: {}", said.all);
    }
    // The old one is trusted still, and what is issued now is by the new one.
    ok(env, &["shards"]).await;
    let made = temp.join("by-the-new-ca");
    ok(env, &["cluster", "register-operator", "--output-dir", made.to_str().unwrap()]).await;
    let status = rotate(&["--status"]).await.json();
    assert_eq!(
        (&status["cas"][0]["certificates_in_use"], &status["stage"]),
        (&json!(1), &json!("active")),
        "{status:#}"
    );
    assert!(1 < status["cas"][1]["certificates_in_use"].as_u64().unwrap(), "{status:#}");

    let refused = rotate(&["--retire", "--yes"]).await;
    assert_eq!(refused.exit, 1, "{}", refused.all);
    assert!(refused.all.contains("refused to retire the old CA") && refused.all.contains("--force"), "{}", refused.all);
    let retired = done(&["--retire", "--force"]).await.json();
    assert_eq!((&retired["stage"], cas(&retired)), (&json!("settled"), vec![new.clone()]));
    let cut_off = retired["cut_off"].as_array().unwrap();
    assert_eq!(json!(cut_off), status["in_the_way"], "those that were named before");
    assert!(cut_off.iter().any(|it| it.as_str().unwrap().contains("opr")), "{cut_off:?}");
    assert_eq!(files(&env.dir(), &format!("ca-{old}.key")), Vec::<PathBuf>::new());
    assert!(!files(&env.dir(), &format!("ca-{new}.key")).is_empty());
}

async fn a_lost_key_is_replaced_and_none_that_is_there(env: &Env) {
    let lost = async || admin(env, &["cluster", "rotate-ca", "--lost-key", "--yes", "-o", "json"]).await;
    let there = lost().await;
    assert_eq!(there.exit, 1, "{}", there.all);
    assert!(there.all.contains("rotate the CA the ordinary way"), "{}", there.all);
    let status = ok(env, &["cluster", "rotate-ca", "--status", "-o", "json"]).await.json();
    let old = cas(&status).remove(0);
    for file in files(&env.dir(), &format!("ca-{old}.key")) {
        fs::remove_file(file).unwrap();
    }
    let checked = admin(env, &["check", "--only", "secrets", "-o", "json"]).await;
    assert_eq!((checked.exit, names(&checked.json(), "fail")), (1, vec!["secrets/ca-key".to_owned()]));
    let start = admin(env, &["cluster", "rotate-ca", "--yes"]).await;
    assert_eq!((start.exit, start.all.contains("--lost-key")), (1, true), "{}", start.all);
    let replaced = lost().await;
    assert_eq!(replaced.exit, 0, "{}", replaced.all);
    assert!(replaced.all.contains("hold certificates of the CA whose key is lost"), "{}", replaced.all);
    let now = cas(&replaced.json());
    assert_eq!((now.len(), &now[1], &replaced.json()["stage"]), (2, &old, &json!("active")), "{}", replaced.all);
    ok(env, &["check", "--only", "secrets"]).await;
}

/// Whatever of this name, or with it at its beginning, lies below a directory.
fn files(dir: &Path, name: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten().map(|it| it.path());
    let found = entries.flat_map(|path| match path.is_dir() {
        true => files(&path, name),
        false => Some(path).filter(|it| it.file_name().unwrap().to_string_lossy().contains(name)).into_iter().collect(),
    });
    found.collect()
}

async fn secrets_and_info_are_read_from_the_bucket(env: &Env) {
    let sealed = ok(env, &["cluster", "reencrypt", "-o", "json"]).await.json();
    let secrets = sealed["secrets"].as_array().unwrap();
    assert!(2 <= secrets.len() && secrets.iter().all(|it| it["result"] == "current"), "{sealed:#}");
    let info = ok(env, &["cluster", "info", "-o", "json"]).await.json();
    assert_eq!(info["cluster_id"], json!(config(env).server.cluster_id.to_string()));
    let shard = &info["shards"][0];
    assert_eq!((&shard["shard"], &shard["config"]), (&json!("dev-1"), &json!("valid")), "{info:#}");
    assert!(shard["leader"].is_string() && 1 <= shard["epoch"].as_u64().unwrap(), "{info:#}");
    assert_eq!(info["operators"]["revoked"], 1, "{info:#}");
}

async fn what_is_broken_fails_and_says_how_to_repair_it(env: &Env, temp: &Path) {
    let fails = async |args: &[&str]| {
        let said = admin(env, &[&["check", "-o", "json"], args].concat()).await;
        assert_eq!(said.exit, 1, "{args:?}: {}", said.all);
        let checked = said.json();
        assert!(lines(&checked, "fail").iter().all(|(_, it)| it["fix"].is_string()), "{checked:#}");
        checked
    };
    let no_bucket = fails(&["--storage-bucket", "no-such-bucket", "--pre"]).await;
    assert!(names(&no_bucket, "fail").contains(&"store/reachable".to_owned()), "{no_bucket:#}");
    assert!(names(&no_bucket, "skip").contains(&"secrets/all".to_owned()), "{no_bucket:#}");
    let no_key = fails(&["--only", "secrets", "--key-source", "NSTANCE_NO_SUCH_KEY"]).await;
    assert_eq!(names(&no_key, "fail"), ["secrets/encryption-key"]);
    let wrong_key = temp.join("wrong.key");
    fs::write(&wrong_key, [b'x'; 32]).unwrap();
    fs::set_permissions(&wrong_key, fs::Permissions::from_mode(0o600)).unwrap();
    let args = ["--only", "secrets", "--key-provider", "file", "--key-source", wrong_key.to_str().unwrap()];
    assert_eq!(names(&fails(&args).await, "fail"), ["secrets/ca-key", "secrets/nonce-key"]);
    let nobody = fails(&["--only", "shards", "--servers", "dev-1=127.0.0.1:1"]).await;
    assert_eq!(names(&nobody, "fail"), ["shards/dev-1/tcp"]);
    assert_eq!(names(&nobody, "skip").len(), 5, "{nobody:#}");
    let unknown = fails(&["--only", "config", "--servers", "dev-9=127.0.0.1:1"]).await;
    assert_eq!(names(&unknown, "fail"), ["config/dev-9/config"]);
    let nowhere = temp.join("nowhere");
    let no_files = fails(&["--only", "identity", "--identity-dir", nowhere.to_str().unwrap()]).await;
    assert_eq!(names(&no_files, "fail"), ["identity/files"]);

    // A store that ignores conditions, for us alone.
    let variables = env.ok(&["env"]).await;
    let line = variables.lines().find(|it| it.contains("AWS_ENDPOINT_URL")).unwrap();
    let endpoint = line.split_once('=').unwrap().1.trim_matches(['"', '\'']);
    let rules = format!("{endpoint}/-/faults");
    let rule = r#"[{"id": "lax", "client": "dev-cli", "ignore-conditions": true}]"#;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    assert!(http.post(&rules).body(rule).send().await.unwrap().status().is_success());
    let lax = fails(&["--only", "store"]).await;
    assert_eq!(names(&lax, "fail"), ["store/create-refuses-existing"], "{lax:#}");
    assert!(names(&lax, "skip").contains(&"store/racing-writers".to_owned()), "{lax:#}");
    assert!(http.delete(format!("{rules}/lax")).send().await.unwrap().status().is_success());
    let waited = ok(env, &["check", "--only", "store", "--wait", "20s", "-o", "json"]).await.json();
    assert_eq!(waited["failed"], 0);
    let late = admin(env, &["check", "--only", "shards", "--servers", "dev-1=127.0.0.1:1", "--wait", "1s"]).await;
    assert_eq!(late.exit, 4, "{}", late.all);
    assert!(late.stdout.contains("FAIL  dev-1/tcp") && late.stdout.contains("fix: "), "{}", late.stdout);
}

async fn revoking_an_agents_certificate_replaces_its_instance(env: &Env) {
    let before = ids(&env.healthy().await);
    let id = before.first().unwrap().as_str();
    let listed = ok(env, &["cert", "list", "--instance", id, "--valid", "-o", "json"]).await.json();
    let serial = |kind: &str| {
        let of = listed["certificates"].as_array().unwrap().iter().find(|it| it["kind"] == kind);
        of.unwrap_or_else(|| panic!("no {kind} in {listed:#}"))["serial"].as_str().unwrap().to_owned()
    };
    let file = admin(env, &["cert", "revoke", &serial("file"), "--yes"]).await;
    assert_eq!(file.exit, 1, "{}", file.all);
    assert!(file.all.contains("cannot be revoked") && file.all.contains("rotate-ca"), "{}", file.all);
    ok(env, &["cert", "revoke", &serial("agent"), "--yes", "--reason", "seen elsewhere"]).await;
    env.until("it is replaced", |status| {
        let now = ids(status);
        status["healthy"] == true && now.len() == 1 && now.is_disjoint(&before)
    })
    .await;
    let listed = ok(env, &["cert", "list", "--instance", id, "--valid", "-o", "json"]).await.json();
    assert_eq!(listed["certificates"], json!([]), "its identity ended with it");
    let unknown = admin(env, &["cert", "revoke", "00", "--yes"]).await;
    assert_eq!(unknown.exit, 5, "{}", unknown.all);
}
