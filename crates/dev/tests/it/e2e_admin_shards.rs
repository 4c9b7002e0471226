//! The shard commands of the admin tool against real shards: what they show, what they change, how they end.
//!
//! One environment for all of it: its steps follow each other, each named.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use crate::e2e_common::{DEV, Env, PATIENCE};
use expect_test::{Expect, expect};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::Instant,
};

/// What a run of the admin tool ended with.
struct Ran {
    code: i32,
    out: String,
    err: String,
    took: Duration,
}

impl Ran {
    #[track_caller]
    fn ends(self, code: i32) -> Self {
        assert_eq!(self.code, code, "stdout:\n{}\nstderr:\n{}", self.out, self.err);
        self
    }

    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}", self.out))
    }

    /// Compares both streams, without what differs from run to run.
    #[track_caller]
    fn says(&self, expected: Expect) -> &Self {
        let mut text = plain(&self.out);
        if !self.err.is_empty() {
            text.push_str(&format!("-- stderr\n{}", plain(&self.err)));
        }
        expected.assert_eq(&text);
        self
    }
}

/// The admin tool, pointed at the environment as a shell would be.
struct Admin {
    variables: BTreeMap<String, String>,
}

impl Admin {
    async fn of(env: &Env) -> Self {
        let said = env.ok(&["env"]).await;
        let lines = said.lines().filter_map(|line| line.strip_prefix("export ")?.split_once('='));
        let variables = lines.map(|(name, value)| (name.to_owned(), value.trim_matches(['\'', '"']).to_owned()));
        Self { variables: variables.collect() }
    }

    fn command(&self, words: &str) -> Command {
        let mut command = Command::new(Path::new(DEV).with_file_name("nstance-admin"));
        command.args(words.split_whitespace()).envs(&self.variables).stdin(Stdio::null()).kill_on_drop(true);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    async fn run(&self, words: &str) -> Ran {
        let began = Instant::now();
        let child = self.command(words).spawn().unwrap();
        let ended = tokio::time::timeout(PATIENCE, child.wait_with_output()).await;
        let output = ended.unwrap_or_else(|_| panic!("{words}: does not end")).unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let code = output.status.code().unwrap_or(-1);
        Ran { code, out: text(&output.stdout), err: text(&output.stderr), took: began.elapsed() }
    }

    /// Runs on in the background.
    fn start(&self, words: &str) -> Running {
        let mut child = self.command(words).stderr(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Running { child, lines }
    }

    /// The instances of a group in a shard.
    async fn ids(&self, group: &str, shard: &str) -> Vec<String> {
        let listed = self.run(&format!("instance list --group {group} --shard {shard} -o name")).await.ends(0);
        listed.out.lines().map(str::to_owned).collect()
    }
}

struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    /// Reads JSON lines until one is as wanted; answers all that came.
    async fn until(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Vec<Value> {
        let mut read = Vec::new();
        let reading = async {
            while let Some(line) = self.lines.next_line().await.unwrap() {
                let value: Value = serde_json::from_str(&line).unwrap();
                let found = wanted(&value);
                read.push(value);
                if found {
                    return true;
                }
            }
            false
        };
        let found = tokio::time::timeout(PATIENCE, reading).await;
        assert_eq!(found, Ok(true), "{what} was not told: {read:#?}");
        read
    }
}

/// Without ids, times, versions, addresses and spans; columns apart by one blank.
fn plain(text: &str) -> String {
    let word = |word: &str| {
        let core = word.trim_matches([',', ';', ':', '(', ')', '"', '.']);
        let is_time = core.len() == 24 && core.ends_with('Z') && core.as_bytes()[10] == b'T';
        // Alone, or at the end of a name that is made of it.
        let tail = core.len().checked_sub(29).and_then(|at| core.get(at..)).unwrap_or_default();
        let is_id = tail.starts_with("tst") && tail.chars().all(|c| c.is_ascii_alphanumeric());
        let is_etag =
            12 <= core.len() && core.chars().all(|c| c.is_ascii_hexdigit() || c == '-') && !core.contains("--");
        let is_span = core.starts_with(|c: char| c.is_ascii_digit())
            && core.ends_with(['s', 'm', 'h'])
            && core.chars().all(|c| c.is_ascii_digit() || "smh.".contains(c));
        let is_number = 4 <= core.len() && core.chars().all(|c| c.is_ascii_digit());
        let shown = match core {
            _ if is_time => "<time>",
            _ if is_id => return word.replace(tail, "<id>"),
            _ if core.starts_with("127.0.0.1:") => "<address>",
            _ if is_span => "<span>",
            _ if is_etag => "<hash>",
            _ if is_number => "<n>",
            _ => return word.to_owned(),
        };
        word.replace(core, shown)
    };
    text.lines().map(|line| line.split_whitespace().map(word).collect::<Vec<_>>().join(" ") + "\n").collect()
}

/// The keys of a document, as deep as they go; of lists the first item's.
fn keys(value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let fields = map.iter().map(|(key, value)| match keys(value) {
                inner if inner.is_empty() => key.clone(),
                inner => format!("{key}{inner}"),
            });
            format!("{{{}}}", fields.collect::<Vec<_>>().join(" "))
        }
        Value::Array(list) => list.first().map(|it| format!("[{}]", keys(it))).unwrap_or_default(),
        _ => String::new(),
    }
}

/// A shard's config as it lies in the bucket.
fn config(dir: &Path, shard: &str) -> PathBuf {
    let name = format!("config/{shard}.jsonc");
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        for path in fs::read_dir(dir).unwrap().flatten().map(|it| it.path()) {
            if path.ends_with(&name) {
                return path;
            }
            if path.is_dir() {
                open.push(path);
            }
        }
    }
    panic!("no {name} in the bucket");
}

#[tokio::test]
async fn shard_commands_show_and_steer_a_running_cluster() {
    let env = Env::new();
    env.up(&["--shards", "2"]).await;
    env.healthy().await;
    let admin = Admin::of(&env).await;
    let mut events = admin.start("events --follow -o json");

    looking(&env, &admin).await;
    comparing(&env, &admin).await;
    refusing(&env, &admin).await;
    scaling(&admin).await;
    groups_of_their_own(&admin).await;
    one_instance(&env, &admin).await;
    draining(&env, &admin).await;
    configs(&env, &admin).await;
    losing_shards(&env, &admin).await;
    following(&env, &admin, &mut events).await;
}

async fn looking(env: &Env, admin: &Admin) {
    println!("every command that looks, in every form");
    admin.run("config status").await.ends(0).says(expect![[r#"
        SHARD ETAG LAST_MODIFIED SIZE
        dev-1 "<hash>" <time> <n>
        dev-2 "<hash>" <time> <n>
    "#]]);
    let status = admin.run("config status -o json").await.ends(0).json();
    expect!["{shards[{shard etag last_modified size loaded_at groups_etag cluster_id leader epoch provider region zone server_version stale pending_etag apply_errors}] errors}"].assert_eq(&keys(&status));
    let wide = admin.run("config status -o wide --shard dev-2").await.ends(0);
    wide.says(expect![[r#"
        SHARD ETAG LAST_MODIFIED SIZE LOADED_AT LEADER PENDING
        dev-2 "<hash>" <time> <n> <time> server-2 -
    "#]]);
    admin.run("group list").await.ends(0).says(expect![[r#"
        GROUP SHARD TEMPLATE SIZE ACTUAL READY DRAINING STATIC HOLDS
        test dev-1 tst 2 2 2 0 yes -
        test dev-2 tst 2 2 2 0 yes -
    "#]]);
    let groups = admin.run("group list -o json").await.ends(0).json();
    expect!["{groups[{group shard tenant template size actual_size ready_size pending_size registered_size draining_size unhealthy_size updated_size instance_type subnet_pool kind arch vars{Greeting NodeLabels} capacity{cpu ephemeral-storage memory} load_balancers drain_timeout_seconds is_static deleting etag runtime_hash infra_hash rollout{target_hash updated total paused failures reason} holds provider_ids[]}] errors}"].assert_eq(&keys(&groups));
    assert_eq!(groups["groups"][0]["group"], "test");
    let yaml = admin.run("group list -o yaml --shard dev-1").await.ends(0).out;
    assert!(
        yaml.starts_with("groups:\n  - group: test\n    shard: dev-1\n") && yaml.ends_with("errors: []\n"),
        "{yaml}"
    );
    assert_eq!(admin.run("group list -o name").await.ends(0).out, "dev-1/test\ndev-2/test\n");
    admin.run("instance list --group test").await.ends(0).says(expect![[r#"
        ID GROUP SHARD STATE HEALTH TYPE PROVIDER ID AGE
        <id> test dev-1 running healthy - nstance-agent-<id> <span>
        <id> test dev-1 running healthy - nstance-agent-<id> <span>
        <id> test dev-2 running healthy - nstance-agent-<id> <span>
        <id> test dev-2 running healthy - nstance-agent-<id> <span>
    "#]]);
    let instances = admin.run("instance list -o json --state running --sort age").await.ends(0).json();
    assert_eq!(instances["instances"].as_array().unwrap().len(), 4);
    expect!["{instances[{instance_id shard tenant group status health instance_type subnet spot on_demand provider_instance_id provider_state provider_state_at created_at registered_at last_seen deleted_at private_ipv4 private_ipv6 hostname k8s_provider_id infra_hash runtime_hash replaces replaced_by failure_reason failure_message drain notice machine{cpu_count memory_bytes disk_bytes arch os kernel} boot{failed reason stages[{name state started ended detail}] logs}}] errors}"].assert_eq(&keys(&instances));
    assert_eq!(admin.run("instance list --state draining -o name").await.ends(0).out, "");

    let id = admin.ids("test", "dev-1").await[0].clone();
    let shown = admin.run(&format!("instance show {id}")).await.ends(0);
    for part in ["in dev-1: running, healthy", "FACT", "provider_state", "InstanceRegistered"] {
        assert!(shown.out.contains(part), "{part}: {}", shown.out);
    }
    let shown = admin.run(&format!("instance show {id} -o json")).await.ends(0).json();
    assert_eq!(shown["status"], "running");
    assert!(3 < shown["timeline"].as_array().unwrap().len(), "{shown:#}");
    let why = admin.run(&format!("instance why {id}")).await.ends(0).out;
    assert!(why.contains("it runs; its agent reported") && why.contains("had fewer instances than asked"), "{why}");
    admin.run("group status test --shard dev-1").await.ends(0).says(expect![[r#"
        test in dev-1: 2 of 2 ready
        template tst, made by the config, version none
        rollout: 2 of 2 up to date
        INSTANCE STATE HEALTH TYPE AGE
        <id> running healthy - <span>
        <id> running healthy - <span>
    "#]]);
    admin.run("plan").await.ends(0).says(expect![[r#"
        nothing to do
    "#]]);
    let plan = admin.run("plan test -o json").await.ends(0).json();
    expect!["{plans[{shard actions holds snapshot_at complete epoch wake_at}] errors}"].assert_eq(&keys(&plan));
    let explained = admin.run("explain group test --shard dev-2").await.ends(0).out;
    assert!(explained.contains("dev-2: test: 2 members, 2 ready, wanted 2; nothing to do"), "{explained}");
    let explained = admin.run(&format!("explain instance {id} -o json")).await.ends(0).json();
    expect!["{explanations[{shard summary facts[{name value source at}] actions holds history[{at shard reason severity group instance_id message detail{} epoch actor dropped resume_token}]}] errors}"].assert_eq(&keys(&explained));
    admin.run("drains").await.ends(0).says(expect![[r#"
        INSTANCE GROUP SHARD REASON SINCE LEFT ACKNOWLEDGED
    "#]]);
    let past = admin.run("events -o json --shard dev-1 --group test").await.ends(0).json();
    let reasons: Vec<&str> =
        past["events"].as_array().unwrap().iter().map(|it| it["reason"].as_str().unwrap()).collect();
    assert_eq!(reasons.iter().filter(|it| **it == "InstanceRegistered").count(), 2, "{reasons:?}");
    assert_eq!(admin.run("events --since 0s -o name").await.ends(0).out, "");
    assert_eq!(admin.run("events --min-severity error -o name").await.ends(0).out, "");
    let through = env.ok(&["admin", "group", "list", "-o", "name"]).await;
    assert_eq!(through, "dev-1/test\ndev-2/test\n", "by nstance-dev it is the same");
}

/// Before anybody changed a group by hand, so that all of it is the config's.
async fn comparing(env: &Env, admin: &Admin) {
    println!("a config that only machines are told of is a change, too");
    let path = config(&env.dir(), "dev-1");
    let text = fs::read_to_string(&path).unwrap();
    admin.run(&format!("config diff {}", path.display())).await.ends(0).says(expect![[r#"
        nothing to do
    "#]]);
    let candidate = env.dir().join("candidate.jsonc");
    fs::write(&candidate, text.replace("\"Greeting\": \"hello\"", "\"Greeting\": \"good day\"")).unwrap();
    let diff = format!("config diff {}", candidate.display());
    admin.run(&diff).await.ends(2).says(expect![[r#"
        nothing to do but to tell machines
        changes in dev-1: test: vars
    "#]]);
    let document = admin.run(&format!("{diff} -o json")).await.ends(2).json();
    assert_eq!(document["plans"][0]["changed_groups"][0]["what"][0], "vars", "{document}");
    fs::write(&candidate, text.replace("\"GREETING\": ", "\"SALUTE\": ")).unwrap();
    let files = admin.run(&diff).await.ends(2).out;
    assert!(files.contains("changes in dev-1: test: files, certificates"), "{files}");
}

async fn refusing(env: &Env, admin: &Admin) {
    println!("what cannot be is told by its exit code");
    admin.run("group scale test 3").await.ends(64).says(expect![[r#"
        -- stderr
        error: there are 2 shards: dev-1, dev-2
        next: say which: --shard NAME (repeatable) or --all-shards
    "#]]);
    admin.run("group list --shard dev-7").await.ends(64).says(expect![[r#"
        -- stderr
        error: shard dev-7 is not in --servers, which has dev-1, dev-2
    "#]]);
    admin.run("group scale test 1 --all-shards").await.ends(64).says(expect![[r#"
        -- stderr
        2 instances of group test will be drained and deleted: dev-1 2 -> 1, dev-2 2 -> 1
        error: this takes something away and nobody can be asked
        next: repeat it with --yes
    "#]]);
    admin.run("group status moon").await.ends(5).says(expect![[r#"
        -- stderr
        error: dev-1, dev-2: there is no group moon
        next: nstance-admin group list
    "#]]);
    admin.run("group scale moon 3 --all-shards").await.ends(5).says(expect![[r#"
        -- stderr
        error: dev-1: there is no group moon in dev-1
        error: dev-2: there is no group moon in dev-2
        next: nstance-admin group list
    "#]]);
    let unknown = "tst00000000000000000000000000";
    admin.run(&format!("instance why {unknown}")).await.ends(5);
    admin.run(&format!("instance delete {unknown} --yes")).await.ends(5);
    admin.run(&format!("explain instance {unknown}")).await.ends(5);
    admin.run(&format!("group scale test 1 --victim {unknown} --shard dev-1 --yes")).await.ends(5);
    let other = admin.run("group scale test 3 --shard dev-1 --etag another --debug").await.ends(1).err;
    assert!(other.contains("  request id: ") && other.contains("next: nstance-admin group list -o wide"), "{other}");
    admin.run("group create test --template tst --shard dev-1").await.ends(1).says(expect![[r#"
        -- stderr
        error: dev-1: group test exists already, version none; change it with `group scale` or `group set`
        next: nstance-admin group list -o wide, which shows what is there and its version
    "#]]);
    let two = "group create a_b --template moon --size 1 --shard dev-1 --var Greeting=hi";
    admin.run(two).await.ends(1);
    rehearsing(admin).await;
    let nobody = env.dir().join("nobody");
    admin.run(&format!("group list --identity-dir {}", nobody.display())).await.ends(6);
}

/// Without an effect, and with a document whatever would be done.
async fn rehearsing(admin: &Admin) {
    admin.run("group create a_b --template=-moon --shard dev-1 --dry-run").await.ends(1).says(expect![[r#"
        -- stderr
        error: dev-1: 2 problems
        group: group `a_b` is not valid: use 1 to 32 lower-case letters and digits, parts joined by single `-`
        template: `-moon` is no valid template name: 1 to 32 of A-Z a-z 0-9 _ -, beginning with a letter or digit
    "#]]);
    let made = admin.run("group create new --template moon --shard dev-1 --dry-run -o json").await.ends(0);
    assert_eq!(
        (&made.json()["groups"][0]["group"], &made.json()["groups"][0]["template"]),
        (&"new".into(), &"moon".into())
    );
    assert!(made.err.contains("no group has template moon"), "{}", made.err);
    let set = admin.run("group set test --instance-type large --shard dev-1 --dry-run -o json").await.ends(0).json();
    assert_eq!(set["groups"][0]["instance_type"], "large");
    for words in [
        "group set test --instance-type large --etag 9-9",
        "group scale test 3 --etag 9-9",
        "group delete test --etag 9-9",
    ] {
        let refused = admin.run(&format!("{words} --shard dev-1 --dry-run")).await.ends(1);
        assert!(refused.err.contains("group test is at none, not 9-9"), "{}", refused.err);
    }
    let made =
        admin.run("instance create --group test --shard dev-1 --instance-type big --dry-run -o json").await.ends(0);
    assert_eq!(
        (&made.json()["instances"][0]["instance_type"], &made.json()["instances"][0]["dry_run"]),
        (&"big".into(), &true.into())
    );
    admin.run("instance create --group moon --shard dev-1 --dry-run -o json").await.ends(5).json();
    let id = admin.ids("test", "dev-1").await[0].clone();
    for word in ["delete", "replace", "drain", "ack"] {
        let document = admin.run(&format!("instance {word} {id} --dry-run -o json")).await.ends(0).json();
        let result = &document["results"][0];
        assert_eq!((&result["status"], &result["dry_run"]), (&"running".into(), &true.into()), "{word}: {result}");
        assert!(result["effect"].as_str().unwrap().contains(&id), "{word}: {result}");
    }
    assert_eq!(admin.run("group list --shard dev-1 -o name").await.ends(0).out, "dev-1/test\n");
}

async fn scaling(admin: &Admin) {
    println!("a group grows and shrinks, and one can watch");
    admin.run("group scale test 3 --shard dev-1 --dry-run").await.ends(0).says(expect![[r#"
        ACTION GROUP SHARD INSTANCE REASON
        Create test dev-1 - scale-up
    "#]]);
    admin.run("plan test --size test=4 --shard dev-1").await.ends(2).says(expect![[r#"
        ACTION GROUP SHARD INSTANCE REASON
        Create test dev-1 - scale-up
        Create test dev-1 - scale-up
    "#]]);
    let grown = admin.run("group scale test 3 --shard dev-1 --wait").await.ends(0);
    expect![[r#"
        GROUP SHARD TEMPLATE SIZE ACTUAL READY DRAINING STATIC HOLDS
        test dev-1 tst 3 3 3 0 yes -
    "#]]
    .assert_eq(&plain(&grown.out));
    // A store that stalls for a moment is told of, too; that is no news of the group.
    let lines: Vec<&str> = grown.err.lines().filter(|it| !it.starts_with("hold  dev-1  ")).collect();
    assert_eq!(lines.last(), Some(&"test  dev-1  3/3 ready"), "{lines:?}");
    assert!(1 < lines.len() && lines.iter().all(|it| it.starts_with("test  dev-1  ")), "{lines:?}");
    let unique: BTreeSet<&&str> = lines.iter().collect();
    assert_eq!(unique.len(), lines.len(), "one line per change: {lines:?}");

    let victim = admin.ids("test", "dev-1").await[1].clone();
    let words = format!("group scale test 4 --total --all-shards --victim {victim} --yes --wait -o json");
    let shrunk = admin.run(&words).await.ends(0).json();
    let sizes: Vec<_> = shrunk["groups"].as_array().unwrap().iter().map(|it| it["size"].clone()).collect();
    assert_eq!(sizes, [2, 2]);
    assert!(!admin.ids("test", "dev-1").await.contains(&victim), "the named one left");
}

async fn groups_of_their_own(admin: &Admin) {
    println!("a group of the API's own lives and ends");
    let made =
        admin.run("group create web --template tst --size 1 --all-shards --drain-timeout 5m --wait").await.ends(0);
    expect![[r#"
        GROUP SHARD TEMPLATE SIZE ACTUAL READY DRAINING STATIC HOLDS
        web dev-1 tst 1 1 1 0 no -
        web dev-2 tst 1 1 1 0 no -
    "#]]
    .assert_eq(&plain(&made.out));
    let set =
        admin.run("group set web --instance-type large --pause-rollout --shard dev-2 -o json").await.ends(0).json();
    assert_eq!(set["groups"][0]["instance_type"], "large");
    assert_eq!(set["groups"][0]["rollout"]["paused"], true);
    let unset =
        admin.run("group set web --unset instance-type --resume-rollout --shard dev-2 -o json").await.ends(0).json();
    assert_eq!(unset["groups"][0]["instance_type"], Value::Null);
    admin.run("group set moon --instance-type large --shard dev-2").await.ends(5);
}

async fn one_instance(env: &Env, admin: &Admin) {
    println!("single instances come, go, and are explained");
    let made =
        admin.run("instance create --group test --shard dev-2 --request-id once --wait -o json").await.ends(0).json();
    assert_eq!(made["instances"][0]["status"], "running");
    assert_eq!(made["instances"][0]["on_demand"], true);
    let id = made["instances"][0]["instance_id"].as_str().unwrap().to_owned();
    let again = admin.run("instance create --group test --shard dev-2 --request-id once -o json").await.ends(0).json();
    assert_eq!(again["instances"][0]["instance_id"], id.as_str(), "the same request makes no second one");
    admin.run(&format!("instance delete {id}")).await.ends(64);
    let dry = admin.run(&format!("instance delete {id} --dry-run")).await.ends(0);
    assert!(dry.err.contains("will be drained and deleted"), "{}", dry.err);
    let gone = admin.run(&format!("instance delete {id} --now --wait --yes")).await.ends(0);
    expect![[r#"
        ID GROUP SHARD RESULT REPLACEMENT
        <id> test dev-2 deleted -
    "#]]
    .assert_eq(&plain(&gone.out));

    let killed = admin.ids("test", "dev-1").await[0].clone();
    env.ok(&["kill", &format!("instance/{killed}")]).await;
    let why = admin.run(&format!("instance why {killed}")).await.ends(0).out;
    assert!(why.contains("its machine had died, so its place was given to another one"), "{why}");
    assert!(why.contains("InstanceDead"), "{why}");

    let old = admin.ids("test", "dev-2").await[0].clone();
    let replaced = admin.run(&format!("instance replace {old} --reason old --wait --yes -o json")).await.ends(0).json();
    assert_eq!(replaced["results"][0]["status"], "replaced");
    let new = replaced["results"][0]["replacement_id"].as_str().unwrap().to_owned();
    let now = admin.ids("test", "dev-2").await;
    assert!(now.contains(&new) && !now.contains(&old), "{old} by {new}: {now:?}");
}

async fn draining(env: &Env, admin: &Admin) {
    println!("drains wait for a word, or for a program's");
    let first = admin.ids("web", "dev-1").await[0].clone();
    let second = admin.ids("web", "dev-2").await[0].clone();
    let late = admin.run(&format!("instance drain {first} --yes --timeout 10s")).await.ends(4);
    assert!(late.err.contains("requested: waits for an acknowledgement"), "{}", late.err);
    assert!(late.err.contains(&format!("nstance-admin instance why {first}")), "{}", late.err);
    let drains = admin.run("drains").await.ends(0);
    drains.says(expect![[r#"
        INSTANCE GROUP SHARD REASON SINCE LEFT ACKNOWLEDGED
        <id> web dev-1 requested <span> <span> no
    "#]]);
    let document = admin.run("drains -o json").await.ends(0).json();
    expect!["{drains[{drain_id reason started_at delete_at acked_at instance_id group shard provider_instance_id private_ipv4 private_ipv6 hostname status blocked_by[{kind message}]}] errors}"].assert_eq(&keys(&document));
    assert_eq!(document["drains"][0]["blocked_by"][0]["kind"], "acknowledgement", "{document}");
    let wide = admin.run("drains -o wide").await.ends(0).out;
    assert!(wide.contains("nobody has acknowledged the drain; it ends without one at 20"), "{wide}");
    let why = admin.run(&format!("instance why {first}")).await.ends(0).out;
    assert!(why.contains("somebody asked for it") && why.contains("nstance-admin instance ack"), "{why}");
    admin.run(&format!("instance ack {first} --drain-id 7")).await.ends(1);
    admin.run(&format!("instance ack {first}")).await.ends(0);
    admin.run(&format!("instance ack {second}")).await.ends(1);

    let told = env.dir().join("told.json");
    let hook = env.dir().join("hook.sh");
    fs::write(&hook, format!("#!/bin/sh\ncat > {}\n", told.display())).unwrap();
    fs::set_permissions(&hook, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut hooked = admin.start(&format!("drains watch --exec {} -o json", hook.display()));
    let gone = admin.run(&format!("instance drain {second} --yes")).await.ends(0);
    assert!(gone.took < Duration::from_secs(60), "it did not wait for the deadline");
    hooked
        .until("the acknowledgement", |it| it["instance_id"] == second.as_str() && it["result"] == "acknowledged")
        .await;
    let heard: Value = serde_json::from_slice(&fs::read(&told).unwrap()).unwrap();
    assert_eq!((heard["instance_id"].as_str(), heard["reason"].as_str()), (Some(second.as_str()), Some("requested")));
    // Its members leave by the same program.
    let deleted = admin.run("group delete web --all-shards --yes --wait").await.ends(0);
    expect![[r#"
        GROUP SHARD STATIC INSTANCES EFFECT
        web dev-1 no 1 deleted
        web dev-2 no 1 deleted
    "#]]
    .assert_eq(&plain(&deleted.out));
    assert!(deleted.err.contains("group web is dynamic: it ends, and 1 instance will be drained"), "{}", deleted.err);
    hooked.child.kill().await.unwrap();
}

async fn configs(env: &Env, admin: &Admin) {
    println!("configs are compared, checked and refreshed");
    let path = config(&env.dir(), "dev-1");
    let text = fs::read_to_string(&path).unwrap();
    let candidate = env.dir().join("candidate.jsonc");
    let larger = text.replace("\"kind\": \"tst\",", "\"kind\": \"tst\", \"instance_type\": \"large\",");
    assert_ne!(larger, text);
    fs::write(&candidate, &larger).unwrap();
    let shown = candidate.display();
    admin.run(&format!("config validate {shown} --shard dev-1")).await.ends(0);
    admin.run(&format!("config validate {shown} --shard dev-2")).await.ends(1);
    let diff = admin.run(&format!("config diff {shown}")).await.ends(2);
    diff.says(expect![[r#"
        ACTION GROUP SHARD INSTANCE REASON
        Create test dev-1 - rotation
        changes in dev-1: test: kind of machine
    "#]]);
    admin.run(&format!("config diff {}", path.display())).await.ends(0);
    let bad = text.replace("\"node_dir\"", "\"moon_dir\"");
    assert_ne!(bad, text);
    fs::write(&candidate, &bad).unwrap();
    let judged = admin.run(&format!("config validate {shown} --shard dev-1")).await.ends(1);
    // The admin tool knows what each provider kind accepts: no shard has to be asked.
    assert!(judged.out.contains("unknown key `moon_dir`"), "{}", judged.out);

    admin.run("config refresh").await.ends(64);
    admin.run("config refresh --all-shards").await.ends(0).says(expect![[r#"
        SHARD RESULT ETAG CHANGED REMOVED RESTARTED
        dev-1 unchanged "<hash>" - - -
        dev-2 unchanged "<hash>" - - -
    "#]]);
    fs::write(&path, text.replace("\"Greeting\": \"hello\"", "\"Greeting\": \"good day\"")).unwrap();
    admin.run("config refresh --all-shards --dry-run").await.ends(0).says(expect![[r#"
        SHARD RESULT ETAG CHANGED REMOVED RESTARTED
        dev-1 would change "<hash>" -> "<hash>" test - -
        dev-2 unchanged "<hash>" - - -
    "#]]);
    let dry = admin.run("config refresh --all-shards --dry-run -o json").await.ends(0).json();
    assert_eq!((&dry["shards"][0]["updated"], &dry["shards"][0]["changed_groups"][0]), (&false.into(), &"test".into()));
    admin.run("config refresh --all-shards").await.ends(0).says(expect![[r#"
        SHARD RESULT ETAG CHANGED REMOVED RESTARTED
        dev-1 updated "<hash>" -> "<hash>" test - -
        dev-2 unchanged "<hash>" - - -
    "#]]);
    fs::write(&path, &bad).unwrap();
    let refused = admin.run("config refresh --all-shards").await.ends(3);
    refused.says(expect![[r#"
        SHARD RESULT ETAG CHANGED REMOVED RESTARTED
        dev-2 unchanged "<hash>" - - -
        dev-1 invalid - - - -
        -- stderr
        error: dev-1: 11:9: server.provider.options.moon_dir: unknown key `moon_dir` (known keys: agent_binary, work_dir, node_dir, create_delay, boot_delay, subnet_capacity, metrics_interval)
    "#]]);
    fs::write(&path, &text).unwrap();
    admin.run("config refresh --all-shards").await.ends(0);
}

async fn losing_shards(env: &Env, admin: &Admin) {
    println!("one dead shard hides nobody's answer");
    let hole = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let servers = &admin.variables["NSTANCE_SERVERS"];
    let first = servers.split(',').next().unwrap();
    let servers = format!("{first},dev-2={}", hole.local_addr().unwrap());
    let half = admin.run(&format!("group list --servers {servers} --timeout 2s")).await.ends(3);
    // The default is ten times as long.
    assert!(Duration::from_secs(2) <= half.took && half.took < Duration::from_secs(15), "{:?}", half.took);
    half.says(expect![[r#"
        GROUP SHARD TEMPLATE SIZE ACTUAL READY DRAINING STATIC HOLDS
        test dev-1 tst 2 2 2 0 yes -
        -- stderr
        error: dev-2: no answer within 2 s
        next: a longer --timeout, or nstance-admin check --only shards
    "#]]);
    let json = admin.run(&format!("group list --servers {servers} --timeout 2s -o json")).await.ends(3).json();
    assert_eq!(json["groups"][0]["shard"], "dev-1");
    assert_eq!(
        (json["errors"][0]["shard"].as_str(), json["errors"][0]["code"].as_str()),
        (Some("dev-2"), Some("deadline_exceeded"))
    );
    admin.run(&format!("group list --servers dev-2={} --timeout 300ms", hole.local_addr().unwrap())).await.ends(4);

    env.ok(&["kill", "server/2", "--no-restart"]).await;
    let half = admin.run("group list").await.ends(3);
    assert!(half.out.contains("dev-1") && !half.out.contains("dev-2"), "{}", half.out);
    assert!(half.err.contains("error: dev-2: ") && half.err.contains("next: nstance-admin check"), "{}", half.err);
    admin.run("group scale test 2 --all-shards").await.ends(3);
    let none = admin.run("group scale test 3 --all-shards --total").await.ends(1);
    assert!(none.err.contains("nothing was changed"), "{}", none.err);
    admin.run("group list --shard dev-2").await.ends(1);
    env.ok(&["heal"]).await;
    env.healthy().await;
}

/// Of both leaders everything, and nothing twice.
async fn following(env: &Env, admin: &Admin, events: &mut Running) {
    println!("events are followed over a change of leaders");
    let before = admin.run("events -o json --shard dev-1").await.ends(0).json();
    env.ok(&["kill", "server/1"]).await;
    env.healthy().await;
    admin.run("group scale test 3 --shard dev-1 --wait").await.ends(0);
    let after = admin.run("events -o json --shard dev-1").await.ends(0).json();
    let list = |value: &Value| value["events"].as_array().unwrap().clone();
    let last = list(&after).last().unwrap().clone();
    let told = events.until("the last event", |it| *it == last).await;
    let told: Vec<&Value> = told.iter().filter(|it| it["shard"] == "dev-1").collect();
    let tokens: BTreeSet<&str> = told.iter().map(|it| it["resume_token"].as_str().unwrap()).collect();
    assert_eq!(tokens.len(), told.len(), "nothing is told twice");
    let began = told.first().unwrap();
    let old = list(&before);
    let from = old.iter().position(|it| it == *began).expect("it began in the first term");
    let all: Vec<Value> = old[from..].iter().chain(&list(&after)).cloned().collect();
    // The old leader may have said something after we asked; the new one's is complete.
    let missed: Vec<&Value> = all.iter().filter(|it| !told.contains(it)).collect();
    assert!(missed.is_empty(), "{missed:#?}");
    let epochs: BTreeSet<u64> = told.iter().filter_map(|it| it["epoch"].as_u64()).filter(|it| 0 < *it).collect();
    assert_eq!(epochs.len(), 2, "{epochs:?}");
    events.child.kill().await.unwrap();
}
