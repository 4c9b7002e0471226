//! What lies on the machines: files and certificates as the config says, and what a changed config does to them.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use crate::e2e_common::{Env, ids, pids};
use tokio::time::Instant;

const PATIENCE: Duration = Duration::from_secs(60);

/// Files that changed reach agents that are connected within this time of the answer to whoever changed them.
const PUSHED_WITHIN: Duration = Duration::from_secs(2);

/// One environment at a time: what is measured here is not how well a machine carries four of them.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

fn read(env: &Env, id: &str, name: &str) -> Option<String> {
    fs::read_to_string(env.instances().join(id).join(name)).ok()
}

/// Waits until every instance has a file that is as wanted.
async fn until_all(env: &Env, all: &[String], name: &str, holds: impl Fn(&str) -> bool) {
    let began = Instant::now();
    while !all.iter().all(|id| read(env, id, name).is_some_and(|text| holds(&text))) {
        let there: Vec<_> = all.iter().map(|id| read(env, id, name)).collect();
        assert!(began.elapsed() < PATIENCE, "{name} is not as wanted: {there:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The shard's config as it lies in the bucket.
fn config(dir: &Path) -> PathBuf {
    fn find(dir: &Path) -> Option<PathBuf> {
        fs::read_dir(dir).ok()?.flatten().map(|it| it.path()).find_map(|path| {
            let is_it = path.ends_with("config/dev-1.jsonc");
            if is_it { Some(path) } else { find(&path) }
        })
    }
    find(dir).expect("a config in the bucket")
}

fn edit(env: &Env, from: &str, to: &str) {
    let path = config(&env.dir());
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{text}");
    fs::write(&path, text.replace(from, to)).unwrap();
}

#[tokio::test]
async fn a_changed_var_reaches_every_agent_and_replaces_nobody() {
    let _alone = ALONE.lock().await;
    let env = Env::new();
    env.up(&["--size", "test=3"]).await;
    let status = env.healthy().await;
    let all: Vec<String> = ids(&status).into_iter().collect();
    assert_eq!(all.len(), 3);
    until_all(&env, &all, "recv/instance.env", |text| text.contains("GREETING=hello\n")).await;
    until_all(&env, &all, "recv/demo.crt", |text| text.starts_with("-----BEGIN CERTIFICATE-----")).await;
    for id in &all {
        assert!(read(&env, id, "recv/instance.env").unwrap().contains(&format!("INSTANCE_ID={id}\n")));
        assert!(read(&env, id, "keys/demo.key").unwrap().contains("PRIVATE KEY"), "made there");
        verify(&env, id);
    }
    let before: BTreeMap<&String, (Option<String>, Option<String>)> =
        all.iter().map(|id| (id, (read(&env, id, "identity/config.hash"), read(&env, id, "recv/demo.crt")))).collect();
    let said = env.ok(&["refresh"]).await;
    assert!(said.contains("dev-1: unchanged"), "{said}");

    edit(&env, r#""Greeting": "hello""#, r#""Greeting": "good day""#);
    let said = env.ok(&["refresh"]).await;
    assert!(said.contains("dev-1: in force; changed") && said.contains("test"), "{said}");
    let began = Instant::now();
    until_all(&env, &all, "recv/instance.env", |text| text.contains("GREETING=\"good day\"\n")).await;
    until_all(&env, &all, "identity/config.hash", |hash| !before.values().any(|(old, _)| old.as_deref() == Some(hash)))
        .await;
    let took = began.elapsed();
    println!("every agent has the new files {took:?} after the answer");
    assert!(took <= PUSHED_WITHIN, "it took {took:?} until every agent had the new files");
    for (id, (_, certificate)) in &before {
        assert_eq!(read(&env, id, "recv/demo.crt"), *certificate, "only what changed is sent");
        assert!(!env.instances().join(id).join("recv/errors/instance.env").exists());
    }
    let after = env.healthy().await;
    assert_eq!(pids(&after), pids(&status), "nobody is replaced or restarted for it");
}

#[tokio::test]
async fn an_on_demand_instance_gets_its_files_and_follows_the_config() {
    let _alone = ALONE.lock().await;
    let env = Env::new();
    env.up(&["--size", "test=1"]).await;
    let members = ids(&env.healthy().await);
    edit(&env, r#""GREETING": "#, r#""CITY": "{{ .Vars.City | default \"nowhere\" }}", "GREETING": "#);
    env.ok(&["refresh"]).await;
    env.ok(&["admin", "instance", "create", "--group", "test", "--var", "City=Bergen", "--wait"]).await;
    let names = fs::read_dir(env.instances()).unwrap().flatten().filter_map(|it| it.file_name().into_string().ok());
    let on_disk: Vec<String> = names.filter(|it| it.starts_with("tst") && !members.contains(it)).collect();
    let [id] = on_disk.as_slice() else { panic!("one more than {members:?}: {on_disk:?}") };
    until_all(&env, &on_disk, "recv/instance.env", |text| text.contains("CITY=Bergen\nGREETING=hello\n")).await;
    until_all(&env, &on_disk, "recv/demo.crt", |text| text.starts_with("-----BEGIN CERTIFICATE-----")).await;
    verify(&env, id);
    let hash = read(&env, id, "identity/config.hash");

    edit(&env, r#""Greeting": "hello""#, r#""Greeting": "good day""#);
    env.ok(&["refresh"]).await;
    until_all(&env, &on_disk, "recv/instance.env", |text| text.contains("CITY=Bergen\nGREETING=\"good day\"\n")).await;
    until_all(&env, &on_disk, "identity/config.hash", |now| Some(now) != hash.as_deref()).await;
}

/// A second opinion on what was issued.
fn verify(env: &Env, id: &str) {
    let at = |name: &str| env.instances().join(id).join(name);
    let openssl = |args: &[&str]| Command::new("openssl").args(args).output();
    let ca = at("identity/ca.crt");
    let (ca, leaf) = (ca.to_str().unwrap(), at("recv/demo.crt"));
    let Ok(output) = openssl(&["verify", "-CAfile", ca, leaf.to_str().unwrap()]) else {
        println!("openssl is not installed; certificates were not verified by it");
        return;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let key = at("keys/demo.key");
    let public = openssl(&["pkey", "-in", key.to_str().unwrap(), "-pubout"]).unwrap().stdout;
    let certified = openssl(&["x509", "-in", leaf.to_str().unwrap(), "-noout", "-pubkey"]).unwrap().stdout;
    assert_eq!(String::from_utf8_lossy(&public), String::from_utf8_lossy(&certified));
}

#[tokio::test]
async fn a_changed_machine_type_rotates_the_group() {
    let _alone = ALONE.lock().await;
    let env = Env::new();
    env.up(&["--size", "test=2"]).await;
    let before = ids(&env.healthy().await);
    edit(&env, r#""kind": "tst","#, r#""kind": "tst", "instance_type": "large","#);
    env.ok(&["refresh"]).await;
    env.until("both are replaced", |status| {
        let now = ids(status);
        status["healthy"] == true && now.len() == 2 && now.is_disjoint(&before)
    })
    .await;
}

#[tokio::test]
async fn a_notice_is_answered_with_a_replacement() {
    let _alone = ALONE.lock().await;
    let env = Env::new();
    env.up(&["--size", "test=2"]).await;
    let before = ids(&env.healthy().await);
    let taken = before.first().unwrap();
    let said = env.ok(&["notice", &format!("instance/{taken}"), "--in", "3s"]).await;
    assert!(said.contains("terminate, in 3 s") && said.contains("replacement requested after"), "{said}");
    env.until("the one that was taken is gone", |status| {
        let now = ids(status);
        status["healthy"] == true && now.len() == 2 && !now.contains(taken)
    })
    .await;
    let said = env.fails(&["notice", "server/1"]).await;
    assert!(said.contains("only an instance gets a notice"), "{said}");
}
