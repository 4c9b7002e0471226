//! Files of instances: what a template asks for arrives, whatever of it changes arrives again, and nothing else does.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use crate::common::{
    LIMIT, Shard, Site, assert_refused,
    fleet::Agent,
    machine::{Batch, Machine},
    meddler::Meddler,
    operator::Operator,
    overwrite, shard_id, wait_for, wait_until,
};
use nstance_proto::v1;
use nstance_providers::fake::FakeOptions;
use nstance_server::vitals::Role;
use nstance_store::{memory::MemoryStore, records::groups_key};
use serde_json::{Value, json};
use tonic::{Code, Status};
use x509_parser::prelude::*;

const ALL: [&str; 6] = ["bootstrap.sh", "kubelet.json", "motd", "node.crt", "node.env", "tunnel.json"];

/// A template with a file of every kind.
fn every_kind(config: &mut Value) {
    config["certificates"] = json!({ "node.server": {
        "kind": "server", "cn": "system:node:{{ .Instance.ID }}", "organization": ["system:nodes"], "ttl": "30d",
        "dns": ["localhost", "{{ .Instance.Hostname }}"], "ip": ["127.0.0.1", "{{ .Instance.IP4 }}", "{{ .Instance.IP6 }}"],
    } });
    config["defaults"] = json!({ "vars": { "Greeting": "hello", "Label": "a b" } });
    config["templates"]["knc"]["files"] = json!({
        "node.crt": { "kind": "certificate", "template": "node.server" },
        "tunnel.json": { "kind": "secret", "source": "tunnel" },
        "bootstrap.sh": { "kind": "storage", "source": "files/bootstrap.sh" },
        "node.env": { "kind": "env", "template": { "LABEL": "{{ .Vars.Label }}", "ID": "{{ .Instance.ID }}" } },
        "kubelet.json": { "kind": "json", "template": { "address": "{{ .Instance.IP4 }}", "port": 10250 } },
        "motd": { "kind": "string", "template": "{{ .Vars.Greeting }} from {{ .Cluster.ID }}\n" },
    });
}

async fn site() -> Site {
    stocked(Site::new()).await
}

async fn stocked(site: Site) -> Site {
    site.put_secret("tunnel", "{\"token\": \"s3cret\"}").await;
    overwrite(site.bucket.as_ref(), "files/bootstrap.sh", b"#!/bin/sh\n".to_vec()).await;
    site
}

/// A group of one with this config, whose agent has nothing yet.
async fn one_with(site: Site, change: impl FnOnce(&mut Value)) -> (Shard, Machine) {
    let shard = Shard::start_on(site, 1, |config| {
        every_kind(config);
        change(config);
    })
    .await;
    let id = shard.only_vm().await;
    let hash = shard.claims(id).await.config_hash;
    let machine = Machine::on(Agent::register(&shard, id).await, &shard.leader, &hash).await;
    (shard, machine)
}

/// The same once it has all its files.
async fn settled(change: impl FnOnce(&mut Value)) -> (Shard, Machine) {
    let (shard, mut machine) = one_with(site().await, change).await;
    machine.make_keys().await;
    let hash = machine.hash.clone();
    machine.settle(&hash, &ALL).await;
    (shard, machine)
}

async fn refresh(shard: &Shard, operator: &Operator, change: impl FnOnce(&mut Value)) -> String {
    let mut config = shard.site.config(1);
    every_kind(&mut config);
    change(&mut config);
    shard.site.upload(&config).await;
    operator.client().refresh_config(v1::RefreshConfigRequest::default()).await.unwrap();
    operator.group("web").await.runtime_hash
}

/// Waits until the leader has asked the provider where its machines are.
async fn vm_is_seen(operator: &Operator) {
    wait_until("the VM is seen", async || operator.instances().await.iter().all(|it| it.provider_state_at.is_some()))
        .await;
}

fn sans(pem: &[u8]) -> BTreeSet<String> {
    let (_, pem) = parse_x509_pem(pem).unwrap();
    let certificate = pem.parse_x509().unwrap();
    let names = certificate.subject_alternative_name().unwrap().unwrap();
    let shown = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) => format!("DNS:{name}"),
        GeneralName::IPAddress([a, b, c, d]) => format!("IP:{a}.{b}.{c}.{d}"),
        other => other.to_string(),
    };
    names.value.general_names.iter().map(shown).collect()
}

/// As it is logged: with all its digits. A certificate leaves out those it can do without, one time in 256.
fn serial(pem: &[u8]) -> String {
    let (_, pem) = parse_x509_pem(pem).unwrap();
    format!("{:0>32}", data_encoding::HEXLOWER.encode(pem.parse_x509().unwrap().raw_serial()))
}

/// Lets time pass, and has the agent report until that brings a batch: a sleeper does not notice that time leapt.
async fn leapt(shard: &Shard, machine: &mut Machine, by: Duration) -> Batch {
    shard.site.clock.leap(by);
    wait_for("the lease is renewed", || shard.server.vitals.role() == Role::Leading).await;
    loop {
        machine.report(v1::ReportKind::Periodic).await;
        if let Some(batch) = machine.receive_within(Duration::from_millis(500)).await {
            return batch;
        }
    }
}

/// How the stream of files ends.
async fn end(machine: &mut Machine) -> Result<(), Status> {
    let ended = async {
        while machine.files.message().await?.is_some() {}
        Ok(())
    };
    tokio::time::timeout(LIMIT, ended).await.expect("the stream ends")
}

#[tokio::test]
async fn files_of_every_kind_arrive_as_documented() {
    let (shard, machine) = settled(|_| {}).await;
    let id = machine.id().to_string();
    let text = |name: &str| String::from_utf8(machine.disk[name].clone()).unwrap();
    assert_eq!(text("node.env"), format!("ID={id}\nLABEL=\"a b\"\n"));
    assert_eq!(text("kubelet.json"), "{\n  \"address\": \"10.1.2.3\",\n  \"port\": 10250\n}\n");
    assert_eq!(text("motd"), "hello from demo\n");
    assert_eq!(text("tunnel.json"), "{\"token\": \"s3cret\"}");
    assert_eq!(text("bootstrap.sh"), "#!/bin/sh\n");
    let (_, pem) = parse_x509_pem(&machine.disk["node.crt"]).unwrap();
    let certificate = pem.parse_x509().unwrap();
    assert_eq!(certificate.subject().to_string(), format!("O=system:nodes, CN=system:node:{id}"));
    assert_eq!(certificate.public_key().raw, machine.keys["node"].public_key_der());
    let names = ["DNS:localhost", "DNS:node-1", "IP:10.1.2.3", "IP:127.0.0.1"];
    assert_eq!(Vec::from_iter(sans(&machine.disk["node.crt"])), names, "what renders empty is left out");
    let operator = Operator::on(&shard).await;
    assert_eq!(operator.group("web").await.runtime_hash, machine.hash);
    assert!(operator.events("FileDeliveryFailed").is_empty());
}

#[tokio::test]
async fn certificates_of_a_batch_are_logged_in_one_entry_with_their_serials() {
    let (shard, mut machine) = one_with(site().await, |config| {
        config["templates"]["knc"]["files"]["a.crt"] = json!({ "kind": "certificate", "template": "node.server" });
        let of_a =
            json!({ "kind": "certificate", "template": "node.server", "key": { "source": "agent", "name": "a" } });
        config["templates"]["knc"]["files"]["b.crt"] = of_a;
    })
    .await;
    machine.make_keys().await;
    let mut batch = machine.apply().await;
    while !batch.files.contains_key("a.crt") {
        batch = machine.apply().await;
    }
    let certificates: Vec<_> = batch.files.iter().filter(|(name, _)| name.ends_with(".crt")).collect();
    assert_eq!(certificates.len(), 3);
    let of_files = |it: &nstance_store::records::certlog::CertlogRecord| it.certificates[0].role == "file";
    let logged: Vec<_> = shard.site.certlog().await.into_iter().filter(of_files).collect();
    assert_eq!(logged.len(), 1, "one entry for the batch");
    let expected: BTreeMap<String, String> =
        certificates.iter().map(|(name, pem)| ((*name).clone(), serial(pem))).collect();
    let found: BTreeMap<String, String> =
        logged[0].certificates.iter().map(|it| (it.name.clone(), it.serial.clone())).collect();
    assert_eq!(found, expected);
    assert_eq!(logged[0].subject_id, machine.id().to_string());
}

/// More certificates than one entry of the log has room for.
#[tokio::test]
async fn many_certificates_come_in_several_batches_and_the_hash_with_the_last() {
    let many = |cn: &'static str| {
        move |config: &mut Value| {
            config["certificates"]["many"] = json!({ "kind": "client", "cn": cn, "ttl": "30d" });
            let key = json!({ "source": "agent", "name": "node" });
            let files = (0..70).map(|n| {
                (format!("c{n:02}.crt"), json!({ "kind": "certificate", "template": "many", "key": key.clone() }))
            });
            config["templates"]["knc"]["files"] = files.collect();
        }
    };
    let names: Vec<String> = (0..70).map(|n| format!("c{n:02}.crt")).collect();
    let all: Vec<&str> = names.iter().map(String::as_str).collect();
    let (shard, mut machine) = one_with(site().await, many("first")).await;
    machine.make_keys().await;
    let old = machine.hash.clone();
    machine.settle(&old, &all).await;
    let operator = Operator::on(&shard).await;
    let hash = refresh(&shard, &operator, many("second")).await;
    let mut arrived = BTreeSet::new();
    while machine.hash != hash {
        let batch = machine.apply().await;
        arrived.extend(batch.names().into_iter().map(ToOwned::to_owned));
    }
    assert_eq!(Vec::from_iter(arrived), names, "whoever has the hash has everything");
}

#[tokio::test]
async fn a_changed_var_sends_exactly_the_changed_file_and_replaces_nobody() {
    let (shard, mut machine) = settled(|_| {}).await;
    let operator = Operator::on(&shard).await;
    let issued = shard.site.certlog().await.len();
    let new = |config: &mut Value| config["defaults"]["vars"]["Greeting"] = "good evening".into();
    let hash = refresh(&shard, &operator, new).await;
    let batch = machine.receive_within(Duration::from_secs(2)).await.expect("within two seconds");
    assert_eq!(batch.names(), ["motd"]);
    assert_eq!(batch.text("motd"), "good evening from demo\n");
    assert_eq!(batch.hash, hash);
    machine.write(&batch).await;

    // A var that no file uses moves the hash alone. It comes next: nothing else was sent in between.
    let request = v1::UpsertGroupRequest {
        key: "web".to_owned(),
        config: Some(v1::GroupConfig { vars: [("Unused".into(), "x".into())].into(), ..v1::GroupConfig::default() }),
        ..v1::UpsertGroupRequest::default()
    };
    operator.client().upsert_group(request).await.unwrap();
    let batch = machine.apply().await;
    assert_eq!((batch.names(), batch.removed.len()), (vec![], 0));
    assert_eq!(batch.hash, operator.group("web").await.runtime_hash);
    assert_ne!(batch.hash, hash);
    assert_eq!(shard.site.standing(), [machine.id()], "the machine stays");
    assert!(operator.events("DrainStarted").is_empty());
    assert_eq!(shard.site.certlog().await.len(), issued, "no certificate was made for it");
}

#[tokio::test]
async fn a_file_that_left_the_template_is_removed() {
    let (shard, mut machine) = settled(|_| {}).await;
    let operator = Operator::on(&shard).await;
    let without = |config: &mut Value| {
        config["templates"]["knc"]["files"].as_object_mut().unwrap().remove("motd");
    };
    let hash = refresh(&shard, &operator, without).await;
    let batch = machine.apply().await;
    assert!(batch.files.is_empty());
    assert_eq!((batch.removed, batch.hash), (["motd".to_owned()].into(), hash));
}

#[tokio::test]
async fn without_the_groups_file_nobody_loses_what_it_said() {
    let (shard, mut machine) = settled(|_| {}).await;
    let operator = Operator::on(&shard).await;
    let vars = [("Greeting".to_owned(), "good night".to_owned())].into();
    let request = v1::UpsertGroupRequest {
        key: "web".to_owned(),
        config: Some(v1::GroupConfig { vars, ..v1::GroupConfig::default() }),
        ..v1::UpsertGroupRequest::default()
    };
    operator.client().upsert_group(request).await.unwrap();
    assert_eq!(machine.apply().await.text("motd"), "good night from demo\n");
    let (agent, disk, hash) = (machine.agent.clone(), machine.disk.clone(), machine.hash.clone());
    let (key, store) = (groups_key(&shard_id()), shard.site.bucket.clone());
    let good = store.get(&key).await.unwrap().body;
    overwrite(store.as_ref(), &key, b"{ oops".to_vec()).await;

    let shard = shard.restart("srv-2").await;
    let mut machine = Machine::with(agent.clone(), &shard.leader, &hash, disk.clone(), true).await;
    // What it takes in, it would send for: its files are looked at when the keys are there.
    machine.make_keys().await;
    assert!(machine.receive_within(Duration::from_millis(500)).await.is_none(), "who knows what they should be?");

    overwrite(store.as_ref(), &key, good).await;
    let shard = shard.restart("srv-3").await;
    vm_is_seen(&Operator::on(&shard).await).await;
    let mut machine = Machine::with(agent, &shard.leader, &hash, disk, true).await;
    let batch = machine.apply().await;
    let unvouched = vec!["bootstrap.sh", "kubelet.json", "tunnel.json"];
    assert_eq!((batch.names(), &batch.hash), (unvouched, &hash), "as it was");
}

#[tokio::test]
async fn a_secret_change_reaches_an_open_stream() {
    let (shard, mut machine) = settled(|_| {}).await;
    shard.site.put_secret("tunnel", "another").await;
    let batch = leapt(&shard, &mut machine, Duration::from_secs(301)).await;
    assert_eq!(batch.names(), ["tunnel.json"]);
    assert_eq!(batch.text("tunnel.json"), "another");
}

#[tokio::test]
async fn a_missing_secret_is_told_the_rest_is_sent_and_the_hash_stays() {
    let (shard, mut machine) = settled(|_| {}).await;
    let operator = Operator::on(&shard).await;
    let before = machine.hash.clone();
    let hash = refresh(&shard, &operator, |config| {
        config["defaults"]["vars"]["Greeting"] = "bye".into();
        config["templates"]["knc"]["files"]["tunnel.json"]["source"] = "missing".into();
    })
    .await;
    let batch = machine.apply().await;
    assert_eq!(batch.names(), ["motd"]);
    assert_eq!(batch.hash, before, "committed, and not advanced");
    let told = operator.hears_of("FileDeliveryFailed", machine.id()).await;
    assert!(
        told.message.contains("tunnel.json") && told.message.contains("secret `missing` does not exist"),
        "{told:?}"
    );
    shard.site.put_secret("missing", "found").await;
    operator.leap(&shard.site, Duration::from_secs(11)).await;
    let batch = machine.apply().await;
    assert_eq!(batch.text("tunnel.json"), "found");
    let now = operator.group("web").await.runtime_hash;
    assert_ne!(batch.hash, before);
    assert!(batch.hash == hash || batch.hash == now, "everything is there");
}

#[tokio::test]
async fn a_file_that_an_agent_cannot_write_is_sent_again() {
    let (shard, mut machine) = one_with(site().await, |_| {}).await;
    let operator = Operator::on(&shard).await;
    machine.broken.insert("motd".to_owned(), "disk full".to_owned());
    machine.make_keys().await;
    let hash = machine.hash.clone();
    let rest: Vec<&str> = ALL.into_iter().filter(|name| *name != "motd").collect();
    machine.settle(&hash, &rest).await;
    let told = operator.hears_of("FileDeliveryFailed", machine.id()).await;
    assert!(told.message.contains("motd") && told.message.contains("disk full"), "{told:?}");
    machine.broken.clear();
    operator.leap(&shard.site, Duration::from_secs(11)).await;
    let batch = machine.apply().await;
    assert!(batch.files.contains_key("motd"), "{:?}", batch.names());
    assert_eq!(operator.events("FileDeliveryFailed").len(), 1, "told once");
}

#[tokio::test]
async fn an_agent_that_keeps_its_old_hash_is_sent_everything_again() {
    let (shard, mut machine) = settled(|_| {}).await;
    let operator = Operator::on(&shard).await;
    refresh(&shard, &operator, |config| config["defaults"]["vars"]["Greeting"] = "bye".into()).await;
    assert_eq!(machine.receive().await.names(), ["motd"]);
    // It says nothing of it, and that it is as before.
    machine.report(v1::ReportKind::Periodic).await;
    let again = leapt(&shard, &mut machine, Duration::from_secs(61)).await;
    assert_eq!(again.names(), ALL);
}

#[tokio::test]
async fn a_certificate_with_a_third_of_its_life_left_is_made_anew() {
    let (shard, mut machine) = settled(|config| config["certificates"]["node.server"]["ttl"] = "1h".into()).await;
    let operator = Operator::on(&shard).await;
    let old = serial(&machine.disk["node.crt"]);
    operator.leap(&shard.site, Duration::from_secs(40 * 60)).await;
    let batch = machine.apply().await;
    assert_eq!(batch.names(), ["node.crt"], "and nothing else");
    assert_ne!(serial(&batch.files["node.crt"]), old);
}

#[tokio::test]
async fn without_a_report_the_whole_set_is_sent() {
    let (shard, machine) = settled(|_| {}).await;
    let operator = Operator::on(&shard).await;
    let (agent, disk, hash) = (machine.agent.clone(), machine.disk.clone(), machine.hash.clone());
    let mut mute = Machine::with(agent, &shard.leader, &hash, disk, false).await;
    operator.leap(&shard.site, Duration::from_secs(6)).await;
    assert_eq!(mute.receive().await.names(), ALL);
}

#[tokio::test]
async fn certificates_wait_for_their_log_and_nothing_else_does() {
    let store = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let site = stocked(Site::on(store.clone(), FakeOptions::default())).await;
    let (shard, mut machine) = one_with(site, |_| {}).await;
    let operator = Operator::on(&shard).await;
    store.cut(&["/certlog/"]);
    machine.make_keys().await;
    while !machine.disk.contains_key("motd") {
        machine.apply().await;
    }
    let told = operator.hears_of("FileDeliveryFailed", machine.id()).await;
    assert!(told.message.contains("node.crt") && told.message.contains("certificate log"), "{told:?}");
    assert!(!machine.disk.contains_key("node.crt"));
    store.cut(&[]);
    operator.leap(&shard.site, Duration::from_secs(11)).await;
    while !machine.disk.contains_key("node.crt") {
        machine.apply().await;
    }
}

#[tokio::test]
async fn reported_address_does_not_reach_san() {
    let (shard, mut machine) =
        one_with(site().await, |config| config["templates"]["knc"]["trust_agent_addresses"] = false.into()).await;
    let operator = Operator::on(&shard).await;
    let lie = v1::HealthReportRequest {
        private_ipv4: "10.66.66.66".to_owned(),
        hostname: "kubernetes".to_owned(),
        ..machine.state(v1::ReportKind::Change)
    };
    machine.say(lie).await;
    machine.make_keys().await;
    while !machine.disk.contains_key("node.crt") {
        machine.apply().await;
    }
    let seen = shard.site.cloud.vms()[0].ip4.clone().unwrap();
    let expected = BTreeSet::from(["DNS:localhost".to_owned(), "IP:127.0.0.1".to_owned(), format!("IP:{seen}")]);
    assert_eq!(sans(&machine.disk["node.crt"]), expected, "the provider's address, and no other");
    let told = operator.hears_of("AddressMismatch", machine.id()).await;
    assert!(told.message.contains(&seen), "{told:?}");
}

#[tokio::test]
async fn a_trusted_agent_gets_no_reserved_name_either() {
    let (shard, mut machine) = one_with(site().await, |_| {}).await;
    let operator = Operator::on(&shard).await;
    let lie =
        v1::HealthReportRequest { hostname: "kubernetes.default".to_owned(), ..machine.state(v1::ReportKind::Change) };
    machine.say(lie).await;
    machine.make_keys().await;
    operator.hears_of("AddressMismatch", machine.id()).await;
    while !machine.disk.contains_key("node.crt") {
        machine.apply().await;
    }
    assert!(!sans(&machine.disk["node.crt"]).iter().any(|name| name.contains("kubernetes")));
}

#[tokio::test]
async fn a_newer_stream_of_files_supersedes_the_older() {
    let (shard, mut older) = settled(|_| {}).await;
    let operator = Operator::on(&shard).await;
    let (agent, disk, hash) = (older.agent.clone(), older.disk.clone(), older.hash.clone());
    let mut newer = Machine::with(agent, &shard.leader, &hash, disk, true).await;
    assert_refused(end(&mut older).await, Code::Aborted, "SUPERSEDED");
    refresh(&shard, &operator, |config| config["defaults"]["vars"]["Greeting"] = "bye".into()).await;
    assert_eq!(newer.apply().await.names(), ["motd"], "what was sent on the older one is known");
}

#[tokio::test]
async fn what_was_sent_into_a_dead_connection_comes_on_the_next() {
    let (shard, mut machine) = settled(|_| {}).await;
    let operator = Operator::on(&shard).await;
    shard.site.put_secret("tunnel", "another").await;
    refresh(&shard, &operator, |config| config["defaults"]["vars"]["Greeting"] = "bye".into()).await;
    assert_eq!(machine.receive().await.names(), ["motd", "tunnel.json"]);
    // Nothing of it reached the disk: the connection had died, and only the agent knows.
    shard.site.clock.leap(Duration::from_secs(6));
    wait_for("the lease is renewed", || shard.server.vitals.role() == Role::Leading).await;
    machine.broken.insert("node.env".to_owned(), "the report is in".to_owned());
    let heard = async || drop(operator.hears_of("FileDeliveryFailed", machine.id()).await);
    let mut again = machine.again(&shard.leader, heard).await;
    again.apply().await;
    let hash = operator.group("web").await.runtime_hash;
    again.settle(&hash, &ALL).await;
    assert_eq!(again.disk["motd"], b"bye from demo\n");
    assert_eq!(again.disk["tunnel.json"], b"another");
}

/// A secret has no hash that a report could lack: only the batch's name tells whether it arrived.
#[tokio::test]
async fn a_secret_that_crossed_a_report_is_not_lost_with_its_connection() {
    let (shard, mut machine) = settled(|_| {}).await;
    let operator = Operator::on(&shard).await;
    shard.site.put_secret("tunnel", "another").await;
    let batch = leapt(&shard, &mut machine, Duration::from_secs(301)).await;
    assert_eq!(batch.names(), ["tunnel.json"]);
    // The agent spoke of something else before the batch reached it, and then its connection died.
    machine.broken.insert("node.env".to_owned(), "the report is in".to_owned());
    machine.report(v1::ReportKind::Change).await;
    operator.hears_of("FileDeliveryFailed", machine.id()).await;
    machine.broken.clear();
    let mut again = machine.again(&shard.leader, async || ()).await;
    assert_eq!(again.apply().await.text("tunnel.json"), "another");

    // Once more, and this time it had arrived.
    let mut last = again.again(&shard.leader, async || ()).await;
    refresh(&shard, &operator, |config| config["defaults"]["vars"]["Greeting"] = "bye".into()).await;
    assert_eq!(last.apply().await.names(), ["motd"]);
}

#[tokio::test]
async fn a_new_leader_sends_only_what_no_hash_vouches_for() {
    let (shard, machine) = settled(|_| {}).await;
    let (agent, disk, hash) = (machine.agent.clone(), machine.disk.clone(), machine.hash.clone());
    let shard = shard.restart("srv-2").await;
    let operator = Operator::on(&shard).await;
    vm_is_seen(&operator).await;
    let mut machine = Machine::with(agent, &shard.leader, &hash, disk, true).await;
    let batch = machine.apply().await;
    assert_eq!(batch.names(), ["bootstrap.sh", "kubelet.json", "tunnel.json"], "an address may be another by now");
    assert_eq!(batch.hash, hash);
    machine.make_keys().await;
    refresh(&shard, &operator, |config| config["defaults"]["vars"]["Greeting"] = "bye".into()).await;
    assert_eq!(machine.apply().await.names(), ["motd"]);
}

#[tokio::test]
async fn a_new_leader_sends_the_files_that_say_where_it_is() {
    let leader_env = |config: &mut Value| {
        config["templates"]["knc"]["files"]["leader.env"] =
            json!({ "kind": "env", "template": { "AGENT_ADDR": "{{ .Server.AgentAddr }}" } });
    };
    let (shard, mut machine) = settled(leader_env).await;
    let shown = |shard: &Shard| format!("AGENT_ADDR={}\n", shard.leader.advertised.agent);
    let hash = machine.hash.clone();
    machine.settle(&hash, &["leader.env"]).await;
    let old = shown(&shard);
    assert_eq!(machine.disk["leader.env"], old.as_bytes());
    let (agent, disk) = (machine.agent.clone(), machine.disk.clone());
    let shard = shard.restart("srv-2").await;
    let mut machine = Machine::with(agent, &shard.leader, &hash, disk, true).await;
    let batch = machine.apply().await;
    assert_ne!(shown(&shard), old, "it has ports of its own");
    assert_eq!(batch.text("leader.env"), shown(&shard));
    assert!(!batch.files.contains_key("motd") && !batch.files.contains_key("node.env"), "{:?}", batch.names());
}

#[tokio::test]
async fn what_left_while_nobody_led_is_removed_and_a_foreign_file_is_not() {
    let (shard, machine) = settled(|_| {}).await;
    let (agent, mut disk, hash) = (machine.agent.clone(), machine.disk.clone(), machine.hash.clone());
    let without = |config: &mut Value| {
        config["templates"]["knc"]["files"].as_object_mut().unwrap().remove("motd");
    };
    let mut config = shard.site.config(1);
    every_kind(&mut config);
    without(&mut config);
    shard.site.upload(&config).await;
    let shard = shard.restart("srv-2").await;
    let operator = Operator::on(&shard).await;
    disk.insert("notes".to_owned(), b"of the machine's owner".to_vec());
    let mut machine = Machine::with(agent, &shard.leader, &hash, disk, false).await;
    machine.foreign.insert("notes".to_owned());
    machine.report(v1::ReportKind::First).await;
    let batch = machine.apply().await;
    assert_eq!(batch.removed, ["motd".to_owned()].into());
    assert!(machine.disk.contains_key("notes"));
    machine.make_keys().await;
    let hash = operator.group("web").await.runtime_hash;
    machine.settle(&hash, &["node.crt", "tunnel.json"]).await;
    assert!(!machine.disk.contains_key("motd"));
}
