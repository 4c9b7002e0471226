//! Keys and files of on-demand instances: they go by the config and the group of today, under what their request says.

use crate::common::{
    Shard,
    fleet::Agent,
    machine::{Batch, Machine},
    operator::Operator,
};
use nstance_core::instance::Ownership;
use nstance_proto::v1;
use serde_json::{Value, json};
use x509_parser::prelude::*;

const ALL: [&str; 2] = ["node.crt", "node.env"];

/// A group of nobody, whose template has a text of vars and a certificate; another template without it.
fn config(shard_config: &mut Value) {
    let env = json!({ "kind": "env", "template": {
        "ID": "{{ .Instance.ID }}", "ON_DEMAND": "{{ .Instance.OnDemand }}", "POOL": "{{ .Instance.Subnet.Pool }}",
        "COLOR": "{{ .Vars.Color }}", "SIZE": "{{ .Vars.Size }}",
    } });
    shard_config["certificates"] =
        json!({ "node": { "kind": "server", "cn": "{{ .Instance.ID }}", "dns": ["localhost"], "ttl": "30d" } });
    shard_config["defaults"] = json!({ "vars": { "Color": "grey", "Size": "small" } });
    shard_config["server"]["subnet_pools"]["side"] = json!(["subnet-2"]);
    shard_config["templates"]["knc"]["files"] =
        json!({ "node.env": env, "node.crt": { "kind": "certificate", "template": "node" } });
    shard_config["templates"]["other"] = json!({ "kind": "oth", "arch": "amd64", "subnet_pool": "side" });
}

/// An on-demand instance that has the color of its request, and everything its template asks for.
async fn settled(group: &str, prepare: impl AsyncFnOnce(&Operator)) -> (Shard, Operator, Machine) {
    let shard = Shard::start_with(0, config).await;
    let operator = Operator::on(&shard).await;
    prepare(&operator).await;
    let asked = v1::InstanceConfig {
        group: group.to_owned(),
        vars: [("Color".to_owned(), "red".to_owned())].into(),
        ..v1::InstanceConfig::default()
    };
    let request = v1::CreateInstanceRequest {
        request_id: "r1".to_owned(),
        config: Some(asked),
        ..v1::CreateInstanceRequest::default()
    };
    operator.client().create_instance(request).await.unwrap();
    let id = shard.only_vm().await;
    let record = shard.site.record(id).await.unwrap();
    assert_eq!(record.ownership, Ownership::OnDemand);
    let mut machine = Machine::on(Agent::register(&shard, id).await, &shard.leader, &record.runtime_hash).await;
    machine.make_keys().await;
    let hash = machine.hash.clone();
    machine.settle(&hash, &ALL).await;
    (shard, operator, machine)
}

async fn refresh(shard: &Shard, operator: &Operator, change: impl FnOnce(&mut Value)) {
    let mut next = shard.site.config(0);
    config(&mut next);
    change(&mut next);
    shard.site.upload(&next).await;
    let request = v1::RefreshConfigRequest { confirm_removals: true, ..v1::RefreshConfigRequest::default() };
    operator.client().refresh_config(request).await.unwrap();
}

async fn upsert(operator: &Operator, key: &str, vars: &[(&str, &str)]) {
    let config = v1::GroupConfig {
        template: if key == "web" { String::new() } else { "knc".to_owned() },
        size: Some(0),
        vars: vars.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        ..v1::GroupConfig::default()
    };
    let request =
        v1::UpsertGroupRequest { key: key.to_owned(), config: Some(config), ..v1::UpsertGroupRequest::default() };
    operator.client().upsert_group(request).await.unwrap();
}

fn env(machine: &Machine, color: &str, size: &str) -> String {
    format!("COLOR={color}\nID={}\nON_DEMAND=true\nPOOL=main\nSIZE={size}\n", machine.id())
}

/// The next batch is the env file alone, and completes.
async fn only_env(machine: &mut Machine) -> String {
    let before = machine.hash.clone();
    let batch: Batch = machine.apply().await;
    assert_eq!((batch.names(), batch.removed.len()), (vec!["node.env"], 0));
    assert_ne!(batch.hash, before, "it has everything again");
    batch.text("node.env")
}

#[tokio::test]
async fn an_on_demand_instance_gets_keys_and_files_like_any_other() {
    let (shard, operator, machine) = settled("web", async |_| {}).await;
    assert_eq!(String::from_utf8(machine.disk["node.env"].clone()).unwrap(), env(&machine, "red", "small"));
    let (_, pem) = parse_x509_pem(&machine.disk["node.crt"]).unwrap();
    let certificate = pem.parse_x509().unwrap();
    assert_eq!(certificate.subject().to_string(), format!("CN={}", machine.id()));
    assert_eq!(certificate.public_key().raw, machine.keys["node"].public_key_der(), "for the key it made");
    assert_eq!(machine.hash, shard.site.record(machine.id()).await.unwrap().runtime_hash);
    assert_ne!(machine.hash, operator.group("web").await.runtime_hash, "its vars are its own");
    assert!(operator.events("FileDeliveryFailed").is_empty());
}

#[tokio::test]
async fn a_changed_config_reaches_it_under_what_its_request_says() {
    let (shard, operator, mut machine) = settled("web", async |_| {}).await;
    refresh(&shard, &operator, |config| config["defaults"]["vars"] = json!({ "Color": "blue", "Size": "large" })).await;
    assert_eq!(only_env(&mut machine).await, env(&machine, "red", "large"));
    upsert(&operator, "web", &[("Color", "green"), ("Size", "huge")]).await;
    assert_eq!(only_env(&mut machine).await, env(&machine, "red", "huge"), "the group's word too");
    assert_eq!(shard.site.standing(), [machine.id()], "and nobody is replaced for it");
}

#[tokio::test]
async fn of_a_group_that_is_gone_it_keeps_the_vars_and_follows_its_template() {
    let (shard, operator, mut machine) =
        settled("batch", async |operator| upsert(operator, "batch", &[("Size", "odd")]).await).await;
    assert_eq!(String::from_utf8(machine.disk["node.env"].clone()).unwrap(), env(&machine, "red", "odd"));
    let removal = v1::DeleteGroupRequest { key: "batch".to_owned(), ..v1::DeleteGroupRequest::default() };
    operator.client().delete_group(removal).await.unwrap();
    refresh(&shard, &operator, |config| {
        config["defaults"]["vars"]["Size"] = "large".into();
        config["templates"]["knc"]["files"]["node.env"]["template"]["MORE"] = "{{ .Vars.Size }}".into();
    })
    .await;
    let text = only_env(&mut machine).await;
    assert!(text.contains("MORE=odd\n") && text.contains("SIZE=odd\n") && text.contains("COLOR=red\n"), "{text}");
}

#[tokio::test]
async fn neither_another_template_of_its_group_nor_a_closed_pool_takes_its_files_away() {
    let (shard, operator, mut machine) = settled("web", async |_| {}).await;
    refresh(&shard, &operator, |config| {
        config["groups"]["default"]["web"]["template"] = "other".into();
        config["server"]["dynamic_subnet_pools"] = json!(["side"]);
        config["defaults"]["vars"]["Size"] = "large".into();
    })
    .await;
    assert_eq!(only_env(&mut machine).await, env(&machine, "red", "large"));
}

#[tokio::test]
async fn that_its_template_is_gone_is_told_once_and_its_files_stay() {
    let (shard, operator, mut machine) = settled("web", async |_| {}).await;
    refresh(&shard, &operator, |config| {
        let template = config["templates"].as_object_mut().unwrap().remove("knc").unwrap();
        config["templates"]["new"] = template;
        config["groups"]["default"]["web"]["template"] = "new".into();
    })
    .await;
    let told = operator.hears_of("FileDeliveryFailed", machine.id()).await;
    assert!(told.message.contains("template `knc` does not exist") && told.message.contains("replace"), "{told:?}");
    machine.report(v1::ReportKind::Periodic).await;
    refresh(&shard, &operator, |config| config["defaults"]["vars"]["Size"] = "large".into()).await;
    assert_eq!(only_env(&mut machine).await, env(&machine, "red", "large"), "it is back");
    assert_eq!(operator.events("FileDeliveryFailed").len(), 1);
}
