//! Records that were lost, broken or overtaken: what a leader makes of them, and that no machine pays for it.

use std::{net::Ipv4Addr, time::Duration};

use crate::common::{
    Shard, Site, assert_refused,
    fleet::{Agent, Fleet},
    operator::Operator,
    overwrite, shard_id, tenant, wait_for, wait_until,
    wire::{new_key, register_agent, registrar, request},
};
use nstance_core::{
    ids::{Epoch, InstanceId},
    instance::{Instance, Phase},
};
use nstance_identity::{rejoin::RejoinClaim, role::Role};
use nstance_proto::v1;
use nstance_providers::fake::Op;
use nstance_server::vitals;
use nstance_store::records::{self, Meta, instance_key};
use tonic::{Code, Status};

fn key_of(id: InstanceId) -> String {
    instance_key(&shard_id(), &tenant(), &id)
}

fn assert_nobody_was_replaced(site: &Site, n: usize) {
    assert_eq!((site.calls(Op::Create).len(), site.calls(Op::Delete).len()), (n, 0));
}

#[tokio::test]
async fn a_record_lost_while_we_lead_is_put_back() {
    let shard = Shard::start(1).await;
    let id = shard.only_vm().await;
    let operator = Operator::on(&shard).await;
    shard.site.bucket.delete(&key_of(id)).await.unwrap();
    Agent::register(&shard, id).await;
    operator.hears_of("RecordRepaired", id).await;
    assert_eq!(shard.site.phase(id).await, Some(Phase::Running), "with what was known and what is new");
    assert_nobody_was_replaced(&shard.site, 1);
}

#[tokio::test]
async fn a_record_lost_while_nobody_led_is_put_back_from_the_cache() {
    let shard = Shard::start(2).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 2).await;
    let site = shard.site.clone();
    let before = site.records().await;
    shard.server.stop(Duration::from_secs(5)).await;
    site.bucket.delete(&key_of(before[0].id)).await.unwrap();
    let shard = site.lead("srv-1").await;
    fleet.follow(&shard);
    let operator = Operator::on(&shard).await;
    operator.hears_of("RecordRepaired", before[0].id).await;
    wait_until("all are ready", async || operator.group("web").await.ready_size == 2).await;
    let again = site.record(before[0].id).await.unwrap();
    assert_eq!((again.registration, again.nonce), (before[0].registration.clone(), before[0].nonce.clone()));
    assert_nobody_was_replaced(&site, 2);
}

#[tokio::test]
async fn an_adopted_machine_keeps_its_agent() {
    let shard = Shard::start(1).await;
    let id = shard.only_vm().await;
    let agent = Agent::register(&shard, id).await;
    let site = shard.site.clone();
    let thief = new_key(site.entropy.as_ref());
    shard.server.stop(Duration::from_secs(5)).await;
    site.bucket.delete(&key_of(id)).await.unwrap();
    // Another machine, which remembers nothing: the VM's own tags are all there is.
    let shard = site.lead("srv-2").await;
    let operator = Operator::on(&shard).await;
    operator.hears_of("InstanceAdopted", id).await;
    let _stream = agent.report(&shard.leader).await;
    wait_until("its certificate is pinned", async || operator.health(id).await == "healthy").await;
    let record = site.record(id).await.unwrap();
    assert_eq!(record.phase(), Phase::Running);
    assert_eq!(record.registration.unwrap().public_key, agent.key.public_key_der());
    let nonce = site.spec(id).bootstrap.nonce_jwt;
    assert_refused(register_agent(&shard, &nonce, &thief).await, Code::Unauthenticated, "NONCE_USED");
    assert_nobody_was_replaced(&site, 1);
}

#[tokio::test]
async fn a_machine_without_record_registers_after_its_adoption() {
    let shard = Shard::start(1).await;
    let id = shard.only_vm().await;
    let site = shard.site.clone();
    shard.server.stop(Duration::from_secs(5)).await;
    site.bucket.delete(&key_of(id)).await.unwrap();
    let shard = site.lead("srv-2").await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&site, 1).await;
    assert_eq!(site.phase(id).await, Some(Phase::Running));
    assert_nobody_was_replaced(&site, 1);
}

/// Asks for a new certificate with the agent's key, for the first time.
async fn rejoin(shard: &Shard, agent: &Agent) -> Result<v1::RegisterClientResponse, Status> {
    let (cluster, client_id, counter) = ("demo".parse().unwrap(), agent.id.to_string(), 1);
    let claim = RejoinClaim { cluster: &cluster, role: Role::Agent, tenant: &tenant(), client_id: &client_id, counter };
    let signature = claim.sign(&agent.key);
    let proof = v1::RejoinProof { client_id, tenant: tenant().to_string(), counter, signature };
    let (mut client, _line) = registrar(shard, Ipv4Addr::LOCALHOST).await;
    let asked = v1::RegisterClientRequest { rejoin: Some(proof), ..request("", &agent.key) };
    client.register_agent(asked).await.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn a_corrupt_record_keeps_its_place() {
    let shard = Shard::start(2).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 2).await;
    let site = shard.site.clone();
    let id = site.standing()[0];
    let key = key_of(id);
    let whole = site.bucket.get(&key).await.unwrap().body;
    shard.server.stop(Duration::from_secs(5)).await;
    let broken = String::from_utf8(whole).unwrap().replace("\"created_at\"", "\"created_at");
    overwrite(site.bucket.as_ref(), &key, broken.into_bytes()).await;
    let shard = site.lead("srv-2").await;
    fleet.follow(&shard);
    let operator = Operator::on(&shard).await;
    wait_until("it says so", async || operator.holds("web").await.contains(&"RecordCorrupt".to_owned())).await;
    wait_for("the other is back", || shard.server.metrics.agents_connected.get() == 1).await;
    let agent = fleet.take(id);
    let refused = agent.knock(&shard.leader).await;
    assert!(refused.message().contains(&key) && refused.message().contains("restore"), "{refused}");
    assert_refused(Err::<(), _>(refused), Code::Unavailable, "NOT_READY");
    assert_refused(rejoin(&shard, &agent).await, Code::Unavailable, "NOT_READY");
    assert_nobody_was_replaced(&site, 2);
    assert_eq!(site.standing().len(), 2);
}

#[tokio::test]
async fn meeting_a_higher_epoch_ends_the_term() {
    let shard = Shard::start(1).await;
    let id = shard.only_vm().await;
    let site = shard.site.clone();
    let key = key_of(id);
    let there = records::decode_object::<Instance>(&key, site.bucket.get(&key).await.unwrap()).unwrap();
    // A leader after us wrote this: whatever our lease says, our time is over.
    let epoch = Epoch(shard.leader.epoch.0 + 7);
    let meta = Meta { epoch, write_id: "theirs".to_owned(), ..there.meta.clone() };
    let body = records::encode(&Instance { epoch, ..there.value.clone() }, &meta, &there.extra);
    overwrite(site.bucket.as_ref(), &key, body.clone()).await;
    let nonce = site.spec(id).bootstrap.nonce_jwt;
    let ours = new_key(site.entropy.as_ref());
    let answer = register_agent(&shard, &nonce, &ours).await;
    assert_refused(answer, Code::Unavailable, "LEASE_STALLED");
    assert_eq!(site.bucket.get(&key).await.unwrap().body, body, "theirs is not overwritten");
    // It may lead again, above what it met.
    let old = shard.leader.epoch;
    wait_for("the term ended", || shard.server.vitals.role() != vitals::Role::Leading || old < current(&shard)).await;
    let shard = Shard::of(site.clone(), shard.server).await;
    wait_for("it leads above it", || epoch < current(&shard)).await;
    let shard = Shard::of(site.clone(), shard.server).await;
    register_agent(&shard, &nonce, &ours).await.expect("served by the next term");
    assert_nobody_was_replaced(&site, 1);
}

fn current(shard: &Shard) -> Epoch {
    Epoch(shard.server.vitals.ready().epoch)
}
