//! Several servers and several shards: one leads each shard, the others stand by, and agents stay whoever leads.

use crate::e2e_common::{Env, group, ids, pids, server};
use rustix::process::Signal;
use serde_json::Value;

fn epoch(status: &Value) -> u64 {
    status["shards"][0]["epoch"].as_u64().unwrap_or(0)
}

#[tokio::test]
async fn two_servers_one_leads_the_other_stands_by() {
    let env = Env::new();
    let said = env.up(&["--servers-per-shard", "2"]).await;
    assert!(said.contains("ok  standby dev-1"), "{said}");
    let status = env.healthy().await;
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
    let status = env.healthy().await;
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
    assert_eq!(pids(&env.healthy().await).len(), 2);

    env.ok(&["down"]).await;
    let said = env.fails(&["up", "--servers-per-shard", "2"]).await;
    assert!(said.contains("server.bind.registration_addr") && said.contains("nstance-dev clean"), "{said}");
    assert_eq!(env.processes().await, []);
}

/// Seconds from the fault to the new leader, by the word of the command that made it.
fn led_after(said: &str) -> f64 {
    let line = said.lines().find(|line| line.contains(" leads ")).unwrap_or_else(|| panic!("nobody leads: {said}"));
    let after = line.rsplit_once(" after ").and_then(|(_, after)| after.split_once(' '));
    let seconds = after.and_then(|(number, unit)| {
        let number: f64 = number.parse().ok()?;
        Some(if unit == "ms" { number / 1000.0 } else { number })
    });
    seconds.unwrap_or_else(|| panic!("no time: {line}"))
}

#[tokio::test]
async fn killing_the_leader_keeps_the_agents() {
    let env = Env::new();
    env.up(&["--servers-per-shard", "2"]).await;
    let before = env.healthy().await;
    let agents = env.agents().await;
    let said = env.ok(&["kill", "shard/dev-1", "--no-restart"]).await;
    assert!(said.contains("killed server-1") && said.contains("server-2 leads dev-1"), "{said}");
    assert!(said.contains("all healthy after"), "{said}");
    let ttl = before["shards"][0]["lease"]["ttl_seconds"].as_f64().unwrap();
    assert!(led_after(&said) < ttl + 5.0, "{said}");

    let after = env.healthy().await;
    assert_eq!(after["shards"][0]["leader"], "server-2", "{after:#}");
    assert!(epoch(&before) < epoch(&after));
    assert_eq!(pids(&after), pids(&before), "nothing is replaced");
    assert_eq!(env.agents().await, agents);
    assert_eq!(server(&after, "server-1")["state"], "down");
    assert_eq!(after["faults"][0]["kind"], "held");

    // Back again, it stands by.
    env.ok(&["heal"]).await;
    let healed = env.until("server-1 stands by", |it| server(it, "server-1")["role"] == "following").await;
    assert_eq!((&healed["shards"][0]["leader"], epoch(&healed)), (&"server-2".into(), epoch(&after)));
    let said = env.ok(&["kill", "server/1"]).await;
    assert!(said.contains("server-2 goes on leading dev-1") && said.contains("server-1 runs again after"), "{said}");
    assert_eq!(pids(&env.healthy().await), pids(&before));
}

#[tokio::test]
async fn what_a_dead_supervisor_left_is_taken_over_or_stopped() {
    let env = Env::new();
    env.up(&["--servers-per-shard", "2", "--size", "test=1"]).await;
    let before = env.healthy().await;
    let kill_supervisor = async || {
        let up = env.recorded("up").unwrap();
        crate::e2e_common::signal(&up, Signal::KILL);
        up.ended().await.unwrap();
    };
    kill_supervisor().await;
    let lives_on = |it: &Value| it["healthy"] == false && it["shards"][0]["leader"] == "server-1";
    env.until("all but the supervisor lives on", lives_on).await;
    let said = env.up(&["--servers-per-shard", "2"]).await;
    for name in ["server-1", "server-2"] {
        assert!(said.contains(&format!("{name} was left over")), "{said}");
    }
    assert_eq!(pids(&env.healthy().await), pids(&before), "its agent never noticed");

    kill_supervisor().await;
    let all = env.processes().await;
    assert_eq!(all.len(), 4);
    let said = env.ok(&["down"]).await;
    let at = |what: &str| said.find(what).unwrap_or_else(|| panic!("{what} is missing in {said}"));
    assert!(at("stopped server-2") < at("stopped server-1"), "the standby first: {said}");
    assert!(at("stopped server-1") < at("switched off 1 agents"), "{said}");
    assert!(all.iter().all(|it| !it.lives()), "{all:?}");
}

#[tokio::test]
async fn stopping_the_leader_hands_over() {
    let env = Env::new();
    env.up(&["--servers-per-shard", "2"]).await;
    let before = env.healthy().await;
    let said = env.ok(&["kill", "shard/dev-1", "--signal", "TERM", "--no-restart"]).await;
    assert!(said.contains("asked server-1") && said.contains("server-2 leads dev-1"), "{said}");
    let ttl = before["shards"][0]["lease"]["ttl_seconds"].as_f64().unwrap();
    assert!(led_after(&said) < ttl + 5.0, "{said}");
    let after = env.healthy().await;
    assert_eq!(after["shards"][0]["leader"], "server-2");
    assert!(epoch(&before) < epoch(&after));
    assert_eq!(pids(&after), pids(&before), "nothing is replaced");
}

#[tokio::test]
async fn a_leader_that_stands_still_is_followed_and_wakes_up_as_a_standby() {
    let env = Env::new();
    env.up(&["--servers-per-shard", "2"]).await;
    let before = env.healthy().await;
    let said = env.ok(&["pause", "shard/dev-1"]).await;
    assert!(said.contains("server-1 (pid ") && said.contains("server-2 leads dev-1"), "{said}");
    let paused = env.until("agents are with the new leader", |it| it["healthy"] == true).await;
    assert_eq!((&paused["faults"][0]["kind"], paused["faults"].as_array().unwrap().len()), (&"pause".into(), 1));
    assert_eq!(server(&paused, "server-1")["state"], "paused");
    assert_eq!(pids(&paused), pids(&before), "nothing is replaced");

    assert!(env.ok(&["heal"]).await.contains("server-1 goes on"));
    let healed = env.until("it stands by", |it| server(it, "server-1")["role"] == "following").await;
    assert_eq!(healed["shards"][0]["leader"], "server-2");
    assert_eq!(healed["faults"], serde_json::json!([]));
    assert_eq!(pids(&env.healthy().await), pids(&before));
}

#[tokio::test]
async fn a_leader_without_its_store_is_followed_by_the_other() {
    let env = Env::new();
    env.up(&["--servers-per-shard", "2"]).await;
    let before = env.healthy().await;
    let said = env.ok(&["partition", "shard/dev-1", "s3"]).await;
    assert!(said.contains("server-1 and s3 do not hear each other until"), "{said}");
    assert!(said.contains("server-2 leads dev-1"), "{said}");
    let status = env.healthy().await;
    assert_eq!(status["faults"][0]["kind"], "store");
    let said = env.ok(&["heal"]).await;
    assert!(said.contains("healed: server-1 and s3"), "{said}");
    let healed = env.until("it stands by", |it| server(it, "server-1")["role"] == "following").await;
    assert_eq!(pids(&healed), pids(&before), "nothing is replaced");
}

#[tokio::test]
async fn a_cut_link_heals() {
    let env = Env::new();
    // As many as make the server think of the network rather than of their hosts.
    env.up(&["--links", "--size", "test=4"]).await;
    let before = env.healthy().await;
    let said = env.ok(&["partition", "agents", "shard/dev-1"]).await;
    assert!(said.contains("agents and shard/dev-1 do not hear each other until"), "{said}");
    // They report every second.
    let silent = |status: &Value| {
        let instances = status["instances"].as_array().unwrap();
        instances.iter().all(|it| it["last_report_seconds"].as_f64().is_some_and(|it| 3.0 < it))
    };
    let cut = env.until("no agent is heard", silent).await;
    assert_eq!(cut["links"][0]["state"], "cut");
    assert_eq!(cut["links"][1]["state"], "open");
    assert_eq!(cut["faults"][0]["kind"], "link");
    assert_eq!(cut["shards"][0]["reachable"], true);
    let said = env.ok(&["heal"]).await;
    assert!(said.contains("healed: agents and shard/dev-1"), "{said}");
    let heard = |status: &Value| {
        let instances = status["instances"].as_array().unwrap();
        instances.iter().all(|it| it["last_report_seconds"].as_f64().is_some_and(|it| it < 2.0))
    };
    let healed = env.until("all are heard", |it| it["healthy"] == true && heard(it)).await;
    assert_eq!(healed["links"][0]["state"], "open");
    assert_eq!(pids(&healed), pids(&before), "nothing is replaced");

    for (from, to, hint) in [
        ("server/1", "server/1", "cannot be cut here"),
        ("agents", "shard/dev-7", "there is no shard/dev-7; there is shard/dev-1"),
        ("moon", "s3", "cannot be parted"),
    ] {
        let said = env.fails(&["partition", from, to]).await;
        assert!(said.contains(hint), "{said}");
    }
    let said = env.ok(&["partition", "operators", "shard/dev-1", "--latency", "5ms", "--for", "50ms"]).await;
    assert!(said.contains("hear each other 5ms late for 50ms") && said.contains("healed"), "{said}");
    assert_eq!(env.healthy().await["faults"], serde_json::json!([]));
}

#[tokio::test]
async fn a_killed_store_is_started_again_and_nothing_is_lost() {
    let env = Env::new();
    env.up(&["--size", "test=1"]).await;
    let before = env.healthy().await;
    let said = env.ok(&["kill", "s3"]).await;
    assert!(said.contains("dev-s3 runs again after") && said.contains("all healthy after"), "{said}");
    let said = env.ok(&["pause", "s3", "--for", "200ms"]).await;
    assert!(said.contains("stands still for 200ms") && said.contains("goes on"), "{said}");
    assert_eq!(pids(&env.healthy().await), pids(&before));
    assert!(env.fails(&["partition", "agents", "shard/dev-1"]).await.contains("restart with --links"));
}
