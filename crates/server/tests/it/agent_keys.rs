//! Keys that agents make: asked for as long as they are missing, taken all or none.

use std::{collections::BTreeMap, time::Duration};

use crate::common::{
    LIMIT, Shard, assert_refused, fleet::Agent, machine::Machine, operator::Operator, wait_for, wait_until,
    wire::new_key,
};
use nstance_core::instance::Phase;
use nstance_proto::v1;
use nstance_server::grpc::status::problems_of;
use serde_json::{Value, json};
use tonic::{Code, Status};

/// A template with two certificates of one key, and a third of another.
fn certificates(config: &mut Value) {
    config["certificates"] = json!({ "node": { "kind": "peer", "cn": "{{ .Instance.ID }}", "ttl": "24h" } });
    config["templates"]["knc"]["files"] = json!({
        "a.crt": { "kind": "certificate", "template": "node" },
        "b.crt": { "kind": "certificate", "template": "node", "key": { "source": "agent", "name": "a.pub" } },
        "c.crt": { "kind": "certificate", "template": "node" },
    });
}

async fn one() -> (Shard, Machine) {
    let shard = Shard::start_with(1, certificates).await;
    let agent = Agent::register(&shard, shard.only_vm().await).await;
    let machine = Machine::on(agent, &shard.leader, "none").await;
    (shard, machine)
}

fn submission(filename: &str, key: Vec<u8>) -> v1::PublicKeySubmission {
    v1::PublicKeySubmission { filename: filename.to_owned(), public_key_pem: key }
}

async fn submit(machine: &Machine, keys: Vec<v1::PublicKeySubmission>) -> Result<(), Status> {
    let request = v1::PublicKeysRequest { instance_id: machine.id().to_string(), keys };
    machine.client.clone().submit_public_keys(request).await.map(|_| ())
}

/// How the stream of key requests ends.
async fn end(machine: &mut Machine) -> Result<(), Status> {
    let ended = async {
        while machine.asks.message().await?.is_some() {}
        Ok(())
    };
    tokio::time::timeout(LIMIT, ended).await.expect("the stream ends")
}

#[tokio::test]
async fn missing_keys_are_asked_for_until_they_are_there() {
    let (_shard, mut machine) = one().await;
    assert_eq!(machine.asked().await, ["a", "c"]);
    let key = new_key(&nstance_rt::entropy::SystemEntropy::new());
    submit(&machine, vec![submission("a", key.public_key_der())]).await.unwrap();
    assert_eq!(machine.asked().await, ["c"], "the set is another now");
    submit(&machine, vec![submission("c.key", key.public_key_pem().into_bytes())]).await.unwrap();
    let batch = machine.apply().await;
    let batch = if batch.files.contains_key("c.crt") { batch } else { machine.apply().await };
    assert!(batch.files.contains_key("c.crt"), "{:?}", batch.names());
}

#[tokio::test]
async fn a_changed_template_asks_for_its_new_key() {
    let (shard, mut machine) = one().await;
    machine.make_keys().await;
    let mut config = shard.site.config(1);
    certificates(&mut config);
    config["templates"]["knc"]["files"]["d.crt"] = json!({ "kind": "certificate", "template": "node" });
    shard.site.upload(&config).await;
    let operator = Operator::on(&shard).await;
    operator.client().refresh_config(v1::RefreshConfigRequest::default()).await.unwrap();
    assert_eq!(machine.asked().await, ["d"]);
}

#[tokio::test]
async fn keys_that_do_not_come_are_asked_for_again() {
    let (shard, mut machine) = one().await;
    let operator = Operator::on(&shard).await;
    assert_eq!(machine.asked().await, ["a", "c"]);
    operator.leap(&shard.site, Duration::from_secs(31)).await;
    assert_eq!(machine.asked().await, ["a", "c"], "after 30 s");
    operator.leap(&shard.site, Duration::from_secs(61)).await;
    assert_eq!(machine.asked().await, ["a", "c"], "after twice that");
}

#[tokio::test]
async fn keys_are_asked_for_again_after_a_failover() {
    let (shard, mut machine) = one().await;
    machine.make_keys().await;
    let agent = machine.agent.clone();
    let shard = shard.restart("srv-2").await;
    let mut machine = Machine::on(agent, &shard.leader, "none").await;
    assert_eq!(machine.asked().await, ["a", "c"]);
}

#[tokio::test]
async fn every_bad_submission_is_refused_as_a_whole() {
    let (shard, mut machine) = one().await;
    assert_eq!(machine.asked().await, ["a", "c"]);
    let good = new_key(shard.site.entropy.as_ref()).public_key_pem().into_bytes();

    let other = Agent { id: "knc06bgm7733st2576nx5jht4ecjw".parse().unwrap(), ..machine.agent.clone() };
    let foreign =
        v1::PublicKeysRequest { instance_id: other.id.to_string(), keys: vec![submission("a", good.clone())] };
    let answer = machine.client.clone().submit_public_keys(foreign).await;
    assert_refused(answer, Code::PermissionDenied, "NOT_YOUR_INSTANCE");

    assert_refused(submit(&machine, Vec::new()).await, Code::InvalidArgument, "BAD_REQUEST");
    let many = |n: usize, key: &[u8]| (0..n).map(|n| submission(&format!("k{n}"), key.to_vec())).collect::<Vec<_>>();
    assert_refused(submit(&machine, many(33, &good)).await, Code::InvalidArgument, "BAD_REQUEST");
    assert_refused(submit(&machine, many(10_000, b"k")).await, Code::InvalidArgument, "BAD_REQUEST");
    assert_refused(submit(&machine, many(10_000, &good)).await, Code::ResourceExhausted, "MESSAGE_TOO_LARGE");
    let oversized = submit(&machine, vec![submission("a", vec![b'x'; 200_000])]).await;
    assert_refused(oversized, Code::InvalidArgument, "BAD_REQUEST");

    // An RSA key of 2048 bits begins so; its kind is told before its numbers are read.
    let rsa = data_encoding::BASE64.decode(b"MIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8AMIIBCgKCAQEA").unwrap();
    let bad = vec![
        submission("a.pub", good.clone()),
        submission("../../etc/passwd", good.clone()),
        submission("/abs", good.clone()),
        submission(".hidden", good.clone()),
        submission(&"n".repeat(129), good.clone()),
        submission("c", rsa),
        submission("a.key", good.clone()),
    ];
    let status = submit(&machine, bad).await.unwrap_err();
    let paths: Vec<String> = problems_of(&status).into_iter().map(|it| it.path).collect();
    let named = ["keys[1].filename", "keys[2].filename", "keys[3].filename", "keys[4].filename"];
    assert_eq!(paths, [&named[..], &["keys[5].public_key_pem", "keys[6].filename"]].concat());

    // None of the good ones among them was taken.
    submit(&machine, vec![submission("c", good)]).await.unwrap();
    assert_eq!(machine.asked().await, ["a"]);
}

#[tokio::test]
async fn a_newer_stream_of_keys_supersedes_the_older() {
    let (shard, mut older) = one().await;
    assert_eq!(older.asked().await, ["a", "c"]);
    let mut newer = Machine::on(older.agent.clone(), &shard.leader, "none").await;
    assert_eq!(newer.asked().await, ["a", "c"]);
    assert_refused(end(&mut older).await, Code::Aborted, "SUPERSEDED");
    newer.keys = BTreeMap::from([("a".to_owned(), new_key(shard.site.entropy.as_ref()))]);
    newer.submit().await.unwrap();
    assert_eq!(newer.asked().await, ["c"], "the newer one lives on");
}

#[tokio::test]
async fn streams_to_an_agent_end_with_its_leader() {
    let (shard, mut machine) = one().await;
    assert_eq!(machine.asked().await, ["a", "c"]);
    shard.server.stop(Duration::from_secs(5)).await;
    assert_refused(end(&mut machine).await, Code::Unavailable, "LEADER_CHANGED");
    let files = async {
        while machine.files.message().await?.is_some() {}
        Ok::<(), Status>(())
    };
    assert_refused(files.await, Code::Unavailable, "LEADER_CHANGED");
}

#[tokio::test]
async fn streams_to_an_agent_end_with_its_instance() {
    let shard = Shard::start_with(1, |config| {
        certificates(config);
        config["server"]["garbage_collection"]["interval"] = "200ms".into();
    })
    .await;
    let id = shard.only_vm().await;
    let mut machine = Machine::on(Agent::register(&shard, id).await, &shard.leader, "none").await;
    assert_eq!(machine.asked().await, ["a", "c"]);
    shard.site.cloud.kill(id);
    wait_until("its record ends", async || shard.site.phase(id).await == Some(Phase::Deleted)).await;
    assert_refused(end(&mut machine).await, Code::PermissionDenied, "INSTANCE_DELETED");
    wait_for("nobody is connected", || shard.server.metrics.agents_connected.get() == 0).await;
}
