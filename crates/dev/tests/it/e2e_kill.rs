//! Things die, and the rest gets over it.

use std::fs;

use crate::e2e_common::{Env, group, ids};

#[tokio::test]
async fn a_killed_instance_is_replaced_and_no_process_leaks() {
    let env = Env::new();
    env.up(&[]).await;
    let before = ids(&env.healthy().await);
    let victim = before.iter().next().unwrap();
    let old = env.agents().await;
    let said = env.ok(&["kill", &format!("instance/{victim}")]).await;
    assert!(said.contains("replacement requested after ") && said.contains(" ms, ready after "), "{said}");

    let status = env.until("back to size", |status| status["healthy"] == true && !ids(status).contains(victim)).await;
    assert_eq!(group(&status), [2, 2, 2]);
    let after = ids(&status);
    assert_eq!(after.intersection(&before).count(), 1, "the other one was left alone");
    env.until_agents(2).await;
    assert_eq!(env.agents().await.iter().filter(|it| old.contains(it)).count(), 1);

    let said = env.fails(&["kill", &format!("instance/{victim}")]).await;
    assert!(said.contains("no living instance"), "{said}");
    let said = env.fails(&["kill", "instance/web-1"]).await;
    assert!(after.iter().all(|id| said.contains(id.as_str())), "{said}");
    let near = after.iter().next().unwrap();
    let said = env.fails(&["kill", &format!("instance/{}", &near[..near.len() - 1])]).await;
    assert!(said.contains("did you mean"), "{said}");
    assert!(env.fails(&["kill", "server/2"]).await.contains("there is no server/2"));
    assert!(env.fails(&["kill", "moon"]).await.contains("is no target"));
    assert_eq!(ids(&env.healthy().await), after, "a mistake kills nobody");
}

#[tokio::test]
async fn a_killed_server_is_started_again_and_keeps_its_instances() {
    let env = Env::new();
    env.up(&[]).await;
    let before = env.healthy().await;
    let said = env.ok(&["kill", "server/1"]).await;
    assert!(said.contains("runs again after "), "{said}");
    let after = env.healthy().await;
    assert_eq!(ids(&after), ids(&before));
    let server = |status: &serde_json::Value| status["components"][1]["pid"].as_u64();
    assert_ne!(server(&after), server(&before));
    assert_eq!(after["components"][1]["restarts"], 1);
    assert!(before["shards"][0]["epoch"].as_u64() < after["shards"][0]["epoch"].as_u64());
    assert!(env.ok(&["logs", "up"]).await.contains("was killed (SIGKILL)"));

    env.ok(&["kill", "server/1", "--no-restart"]).await;
    let down = env.until("it stays down", |_| {
        fs::read_to_string(env.dir().join("logs/up.log")).is_ok_and(|said| said.contains("it stays down until"))
    });
    assert_eq!(down.await["healthy"], false);
    assert!(env.recorded("server-1").is_none());
    env.until_agents(2).await;
    env.ok(&["heal"]).await;
    let healed = env.healthy().await;
    assert_eq!(ids(&healed), ids(&before));
}

#[tokio::test]
async fn removing_an_instances_directory_is_its_death_and_is_healed() {
    let env = Env::new();
    env.up(&[]).await;
    let before = ids(&env.healthy().await);
    let victim = before.iter().next().unwrap();
    // Its agent writes there until it notices, so one try may find the directory filled again.
    let directory = env.instances().join(victim);
    env.until("its directory is gone", |_| fs::remove_dir_all(&directory).is_ok() || !directory.exists()).await;
    let status = env.until("replaced", |status| status["healthy"] == true && !ids(status).contains(victim)).await;
    assert_eq!(group(&status), [2, 2, 2]);
    env.until_agents(2).await;
    assert!(!directory.exists());
}
