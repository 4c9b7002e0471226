//! What was stopped goes on where it was: same instances, whatever else was lost.

use std::fs;

use crate::e2e_common::{Env, group, ids};
use rustix::process::Signal;

#[tokio::test]
async fn a_second_up_resumes_with_the_same_instances() {
    let env = Env::new();
    env.up(&["--size", "test=3"]).await;
    let before = env.healthy().await;
    let identity = fs::read(env.dir().join("cli-operator-identity/identity.crt")).unwrap();
    env.ok(&["down"]).await;
    let said = env.up(&["--size", "test=7"]).await;
    assert!(said.contains("switched on 3 agents"), "{said}");
    assert!(said.contains("--size and --config are not applied"), "{said}");
    let after = env.healthy().await;
    assert_eq!(ids(&after), ids(&before));
    assert_eq!(group(&after), [3, 3, 3]);
    assert!(before["shards"][0]["epoch"].as_u64() < after["shards"][0]["epoch"].as_u64());
    assert_eq!(after["components"][1]["ports"], before["components"][1]["ports"]);
    assert_eq!(fs::read(env.dir().join("cli-operator-identity/identity.crt")).unwrap(), identity, "used again");
    env.until_agents(3).await;
}

#[tokio::test]
async fn everything_but_bucket_and_instances_may_be_lost() {
    let env = Env::new();
    env.up(&[]).await;
    let before = ids(&env.healthy().await);

    env.ok(&["down"]).await;
    fs::remove_dir_all(env.dir().join("cache")).unwrap();
    env.up(&[]).await;
    assert_eq!(ids(&env.healthy().await), before, "without the cache");

    env.ok(&["down"]).await;
    for entry in fs::read_dir(env.dir()).unwrap().flatten() {
        match entry.file_name().to_str() {
            Some("dev-s3" | "instances") => {}
            _ if entry.path().is_dir() => fs::remove_dir_all(entry.path()).unwrap(),
            _ => fs::remove_file(entry.path()).unwrap(),
        }
    }
    env.up(&[]).await;
    assert_eq!(ids(&env.healthy().await), before, "with nothing but bucket and instances");
    env.until_agents(2).await;
}

#[tokio::test]
async fn the_cache_may_be_lost_while_the_server_runs() {
    let env = Env::new();
    env.up(&[]).await;
    let before = ids(&env.healthy().await);
    fs::remove_dir_all(env.dir().join("cache")).unwrap();
    env.ok(&["kill", "server/1"]).await;
    assert_eq!(ids(&env.healthy().await), before);
    env.until_agents(2).await;
}

#[tokio::test]
async fn an_environment_whose_supervisor_died_is_stopped_or_taken_over() {
    let env = Env::new();
    env.up(&[]).await;
    let before = ids(&env.healthy().await);
    let agents = env.agents().await;

    let kill_supervisor = async || {
        let up = env.recorded("up").unwrap();
        crate::e2e_common::signal(&up, Signal::KILL);
        up.ended().await.unwrap();
    };
    kill_supervisor().await;
    env.until("all but the supervisor lives on", |it| it["healthy"] == false && group(it) == [2, 2, 2]).await;
    let said = env.up(&[]).await;
    assert!(said.contains("was left over from an `up` that died"), "{said}");
    assert_eq!(ids(&env.healthy().await), before);
    assert_eq!(env.agents().await, agents, "their agents never noticed");

    kill_supervisor().await;
    let all = env.processes().await;
    assert_eq!(all.len(), 4);
    let said = env.ok(&["down"]).await;
    assert!(said.contains("stopped server-1") && said.contains("switched off 2 agents"), "{said}");
    assert!(all.iter().all(|it| !it.lives()), "{all:?}");
    env.up(&[]).await;
    assert_eq!(ids(&env.healthy().await), before);
}

#[tokio::test]
async fn an_instance_that_died_while_nobody_looked_is_replaced_at_the_next_start() {
    let env = Env::new();
    env.up(&[]).await;
    let before = ids(&env.healthy().await);
    let victim = before.iter().next().unwrap();
    env.ok(&["down"]).await;
    fs::remove_dir_all(env.instances().join(victim)).unwrap();
    let said = env.up(&[]).await;
    assert!(said.contains("switched on 1 agents"), "{said}");
    let status = env.until("replaced", |status| status["healthy"] == true && !ids(status).contains(victim)).await;
    assert_eq!(ids(&status).intersection(&before).count(), 1);
    env.until_agents(2).await;
}
