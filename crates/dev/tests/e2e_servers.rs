//! Several servers and several shards: one leads each shard, the others stand by, and agents stay whoever leads.

mod e2e_common;

use e2e_common::{Env, group, ids, pids, server};
use serde_json::Value;

fn epoch(status: &Value) -> u64 {
    status["shards"][0]["epoch"].as_u64().unwrap_or(0)
}

#[tokio::test]
async fn two_servers_one_leads_the_other_stands_by() {
    let env = Env::new();
    let said = env.up(&["--servers-per-shard", "2"]).await;
    assert!(said.contains("ok  standby dev-1"), "{said}");
    let status = env.status().await;
    assert_eq!(status["healthy"], true, "a standby is no trouble: {status:#}");
    assert_eq!((&status["shards"][0]["leader"], group(&status)), (&"server-1".into(), [2, 2, 2]));
    let roles = ["server-1", "server-2"].map(|name| server(&status, name)["role"].as_str().unwrap_or("-").to_owned());
    assert_eq!(roles, ["leading", "following"]);
    assert_eq!(server(&status, "server-1")["epoch"].as_u64(), Some(epoch(&status)));
    let lease = &status["shards"][0]["lease"];
    assert_eq!(lease["holder"], "server-1");
    let (renewed, ttl) = (lease["renewed_seconds_ago"].as_f64().unwrap(), lease["ttl_seconds"].as_f64().unwrap());
    assert!(renewed < ttl, "{lease:#}");
    let links: Vec<(&str, &str)> = status["links"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|it| Some((it["from"].as_str()?, it["state"].as_str()?)))
        .collect();
    assert_eq!(links, [("agents", "open"), ("operators", "open")]);
    assert_eq!(status["faults"], serde_json::json!([]));
    let text = env.ok(&["status"]).await;
    assert!(text.contains("SHARD  LEADER    EPOCH  LEASE") && text.contains(" s ago  test"), "{text}");
    assert!(text.contains("server-2  dev-1  following      -"), "{text}");
    let ports = |name: &str| server(&status, name)["ports"]["health"].as_u64().unwrap();
    assert_eq!(ports("server-2"), ports("server-1") + 10);

    // A stop is no take-over, and leaves nobody.
    let all = env.processes().await;
    assert_eq!(all.len(), 6);
    let said = env.ok(&["clean"]).await;
    assert!(said.contains("removed"), "{said}");
    assert!(all.iter().all(|it| !it.lives()), "{all:?}");
    assert_eq!(env.agents().await, []);
}

#[tokio::test]
async fn two_shards_lead_each_their_own() {
    let env = Env::new();
    let said = env.up(&["--shards", "2", "--size", "test=1"]).await;
    for gate in ["server dev-1", "server dev-2", "leader dev-2", "agents dev-2"] {
        assert!(said.contains(&format!("ok  {gate}")), "{said}");
    }
    let status = env.status().await;
    assert_eq!(status["healthy"], true, "{status:#}");
    let shards = status["shards"].as_array().unwrap();
    let leaders: Vec<(&str, &str)> =
        shards.iter().filter_map(|it| Some((it["name"].as_str()?, it["leader"].as_str()?))).collect();
    assert_eq!(leaders, [("dev-1", "server-1"), ("dev-2", "server-2")]);
    let mut of: Vec<&str> =
        status["instances"].as_array().unwrap().iter().filter_map(|it| it["shard"].as_str()).collect();
    of.sort_unstable();
    assert_eq!(of, ["dev-1", "dev-2"], "one each");
    assert_eq!(status["links"], serde_json::json!([]), "one server per shard needs none");

    // What was stopped goes on, with as many shards as before.
    let before = ids(&status);
    env.ok(&["down"]).await;
    env.up(&[]).await;
    assert_eq!(ids(&env.healthy().await), before);
    assert_eq!(pids(&env.status().await).len(), 2);

    env.ok(&["down"]).await;
    let said = env.fails(&["up", "--servers-per-shard", "2"]).await;
    assert!(said.contains("server.bind.registration_addr") && said.contains("nstance-dev clean"), "{said}");
    assert_eq!(env.processes().await, []);
}
