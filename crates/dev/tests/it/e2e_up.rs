//! Up and down again: what is started is shown, and exactly that is stopped.

use std::{fs, net::TcpListener, process::Stdio, time::Duration};

use crate::e2e_common::{Env, exit, group, ids, signal, text};
use nstance_providers::process::Process;
use rustix::process::Signal;
use tokio::process::Command;

#[tokio::test]
async fn up_shows_the_group_at_its_size_with_every_agent_healthy() {
    let env = Env::new();
    let said = env.up(&["--size", "test=3"]).await;
    for gate in ["store", "config", "server", "ca", "leader", "agents"] {
        assert!(said.contains(&format!("ok  {gate}")), "{said}");
    }
    assert!(said.contains("not built yet: AWS"), "{said}");

    let status = env.healthy().await;
    assert_eq!(status["healthy"], true, "{status:#}");
    assert_eq!(group(&status), [3, 3, 3]);
    let shard = &status["shards"][0];
    assert_eq!(
        (&shard["name"], &shard["leader"], &shard["reachable"]),
        (&"dev-1".into(), &"server-1".into(), &true.into())
    );
    assert_eq!(status["shards"][0]["groups"][0]["tenant"], "default");
    let instances = status["instances"].as_array().unwrap();
    assert_eq!(instances.len(), 3);
    for it in instances {
        assert_eq!((&it["state"], &it["health"]), (&"running".into(), &"healthy".into()), "{it:#}");
        assert!(it["pid"].is_u64() && it["age_seconds"].is_f64() && it["timeline"][0]["stage"] == "created", "{it:#}");
    }
    let names: Vec<&str> =
        status["components"].as_array().unwrap().iter().filter_map(|it| it["name"].as_str()).collect();
    assert_eq!(names, ["dev-s3", "server-1", "up"]);
    assert!(status["components"][1]["ports"]["operator"].is_u64());

    let said = env.fails(&["up"]).await;
    assert!(said.contains("is up already"), "{said}");

    let all = env.processes().await;
    assert_eq!(all.len(), 6);
    env.ok(&["down"]).await;
    assert!(all.iter().all(|it| !it.lives()), "{all:?}");
    assert_eq!(env.agents().await, []);
    assert!(env.ok(&["down"]).await.contains("nothing was running"));
    let output = env.dev(&["status"]).await;
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
}

#[tokio::test]
async fn ctrl_c_ends_every_process_it_started_and_nothing_else() {
    let mut env = Env::new();
    let other = Env::new();
    other.up(&["--size", "test=1"]).await;
    let others = other.processes().await;
    let mut bystander = Command::new("sleep").arg("600").kill_on_drop(true).stdin(Stdio::null()).spawn().unwrap();

    let mut up = env.up_in_foreground(&[]).await;
    env.healthy().await;
    let ours = env.processes().await;
    assert_eq!(ours.len(), 5);
    let supervisor = Process::find(up.id().unwrap()).unwrap().unwrap();
    signal(&supervisor, Signal::INT);
    assert!(exit(&mut up).await.success());
    assert!(ours.iter().all(|it| !it.lives()), "{ours:?}");
    assert_eq!(env.agents().await, []);
    let said = fs::read_to_string(env.dir().join("../foreground.log")).unwrap();
    let at = |what: &str| said.find(what).unwrap_or_else(|| panic!("{what} is missing in {said}"));
    assert!(at("stopped server-1") < at("switched off 2 agents"), "{said}");
    assert!(at("switched off 2 agents") < at("stopped dev-s3"), "{said}");

    assert!(bystander.try_wait().unwrap().is_none());
    assert!(others.iter().all(|it| it.lives()), "another environment is not ours to stop");
    assert_eq!(other.status().await["healthy"], true);
}

#[tokio::test]
async fn a_second_ctrl_c_kills_at_once() {
    let mut env = Env::new();
    let mut up = env.up_in_foreground(&["--size", "test=1"]).await;
    env.healthy().await;
    let ours = env.processes().await;
    // A server that cannot hear SIGTERM would hold us up for its whole grace.
    signal(&env.recorded("server-1").unwrap(), Signal::STOP);
    let supervisor = Process::find(up.id().unwrap()).unwrap().unwrap();
    signal(&supervisor, Signal::INT);
    env.until("it stops", |_| {
        fs::read_to_string(env.dir().join("../foreground.log")).is_ok_and(|said| said.contains("SIGINT: stopping"))
    })
    .await;
    signal(&supervisor, Signal::INT);
    let ended = tokio::time::timeout(Duration::from_secs(8), up.wait()).await;
    assert!(ended.expect("it waits for the grace of the server").unwrap().success());
    assert!(ours.iter().all(|it| !it.lives()), "{ours:?}");
    // Killed, but not dead: the next start finds its VM.
    let before: Vec<_> = fs::read_dir(env.instances()).unwrap().flatten().map(|it| it.file_name()).collect();
    env.up(&[]).await;
    assert_eq!(ids(&env.healthy().await), before.iter().map(|it| it.to_str().unwrap().to_owned()).collect());
}

#[tokio::test]
async fn a_start_that_fails_says_why_and_leaves_nothing_behind() {
    let env = Env::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap().port();
    // The store is one below the base.
    let said = env.fails(&["up", "--port-base", &(taken + 1).to_string()]).await;
    assert!(said.contains(&format!("port {taken} (s3) is taken")) && said.contains("--port-base"), "{said}");
    assert_eq!(env.processes().await, []);

    let config = env.dir().join("../bad.jsonc");
    fs::write(&config, "{ \"sever\": {} }").unwrap();
    let said = env.fails(&["up", "--port-base", "0", "--config", config.to_str().unwrap()]).await;
    assert!(said.contains("config failed") && said.contains("did you mean `server`?"), "{said}");
    assert!(said.contains("stopped dev-s3"), "{said}");
    assert_eq!(env.processes().await, []);

    let said = env.fails(&["up", "--port-base", "0", "--size", "tset=1"]).await;
    assert!(said.contains("there is default/test"), "{said}");
    assert_eq!(env.processes().await, []);
}

#[tokio::test]
async fn a_foreign_directory_is_neither_used_nor_cleaned() {
    let env = Env::new();
    fs::create_dir(env.dir()).unwrap();
    fs::write(env.dir().join("thesis.tex"), "years of work").unwrap();
    for command in ["up", "clean", "down", "status"] {
        let said = env.fails(&[command]).await;
        assert!(said.contains("not an environment of nstance-dev"), "{command}: {said}");
    }
    assert_eq!(fs::read_dir(env.dir()).unwrap().count(), 1);

    // Ours by its contents, but without the marker: too little to remove it all.
    fs::remove_file(env.dir().join("thesis.tex")).unwrap();
    fs::create_dir(env.dir().join("dev-s3")).unwrap();
    let said = env.fails(&["clean"]).await;
    assert!(said.contains("no marker"), "{said}");
    assert!(env.dir().join("dev-s3").is_dir());
}

#[tokio::test]
async fn clean_leaves_neither_process_nor_directory() {
    let env = Env::new();
    env.up(&["--size", "test=1"]).await;
    let all = env.processes().await;
    assert!(env.ok(&["clean"]).await.contains("removed"));
    assert!(all.iter().all(|it| !it.lives()), "{all:?}");
    assert!(!env.dir().exists());
    assert!(env.ok(&["clean"]).await.contains("nothing to clean"));
}

#[tokio::test]
async fn logs_and_variables_are_those_of_the_environment() {
    let env = Env::new();
    env.up(&["--size", "test=1"]).await;
    let status = env.healthy().await;
    let id = ids(&status).into_iter().next().unwrap();
    let said = env.ok(&["logs"]).await;
    for source in ["server-1   | ", "dev-s3     | ", "up         | ", &format!("{id} | ")] {
        assert!(said.contains(source), "{source} is missing in {said}");
    }
    let said = env.ok(&["logs", "server-1"]).await;
    assert!(said.lines().all(|line| line.starts_with("server-1   | ")), "{said}");
    assert!(env.fails(&["logs", "server-7"]).await.contains("there is no log of \"server-7\""));
    let port = status["components"][0]["ports"]["s3"].as_u64().unwrap();
    let said = env.ok(&["env"]).await;
    assert!(said.contains(&format!("export AWS_ENDPOINT_URL='http://127.0.0.1:{port}'")), "{said}");
}
