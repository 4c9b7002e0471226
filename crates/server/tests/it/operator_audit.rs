//! Whoever changes something over the API is named in an event: who, what, when, in which epoch.

use std::collections::BTreeMap;

use crate::common::{Shard, fleet::Fleet, operator::Operator, wait_for, wait_until};
use nstance_proto::v1;
use prost::Message as _;
use serde_json::json;

/// Calls of operators that change nothing.
const READS: [&str; 10] = [
    "Explain",
    "GetConfigStatus",
    "GetInstanceStatus",
    "ListGroups",
    "ListInstances",
    "Plan",
    "WatchErrors",
    "WatchEvents",
    "WatchGroups",
    "WatchInstances",
];

/// The calls of operators that change something, by the service's own description.
fn mutations() -> Vec<String> {
    let files = prost_types::FileDescriptorSet::decode(nstance_proto::DESCRIPTORS).unwrap();
    let services = files.file.into_iter().flat_map(|file| file.service);
    let service = services.into_iter().find(|service| service.name() == "OperatorService").unwrap();
    let mut names: Vec<_> = service.method.iter().map(|method| method.name().to_owned()).collect();
    names.retain(|name| !READS.contains(&name.as_str()));
    names.sort_unstable();
    names
}

#[tokio::test]
async fn every_mutation_is_audited() {
    let shard = Shard::start_with(3, |config| config["server"]["default_drain_timeout"] = json!("60s")).await;
    let fleet = Fleet::on(&shard);
    let operator = Operator::on(&shard).await;
    fleet.is_whole(&shard.site, 3).await;
    wait_until("all are ready", async || operator.group("web").await.ready_size == 3).await;
    let ids: Vec<String> = shard.site.standing().iter().map(ToString::to_string).collect();
    let (group, me) = ("batch".to_owned(), operator.id.to_string());

    // Which event of which object tells of each call.
    let mut told: BTreeMap<&str, (&str, String, String)> = BTreeMap::new();
    let config = Some(v1::GroupConfig { template: "knc".to_owned(), size: Some(0), ..v1::GroupConfig::default() });
    let upsert = v1::UpsertGroupRequest { key: group.clone(), config, ..v1::UpsertGroupRequest::default() };
    operator.client().upsert_group(upsert).await.unwrap();
    told.insert("UpsertGroup", ("GroupChanged", group.clone(), String::new()));
    let delete = v1::DeleteGroupRequest { key: group.clone(), ..v1::DeleteGroupRequest::default() };
    operator.client().delete_group(delete).await.unwrap();
    told.insert("DeleteGroup", ("GroupDeleted", group, String::new()));
    let config = Some(v1::InstanceConfig { group: "web".to_owned(), ..v1::InstanceConfig::default() });
    let create = v1::CreateInstanceRequest { config, request_id: "r1".to_owned(), ..Default::default() };
    let made = operator.client().create_instance(create).await.unwrap().into_inner().instance_id;
    told.insert("CreateInstance", ("InstanceCreateRequested", "web".to_owned(), made));
    let replace = v1::ReplaceInstanceRequest { instance_id: ids[0].clone(), reason: "slow disk".to_owned() };
    operator.client().replace_instance(replace).await.unwrap();
    told.insert("ReplaceInstance", ("ReplaceRequested", "web".to_owned(), ids[0].clone()));
    let delete = v1::DeleteInstanceRequest { instance_id: ids[1].clone(), ..v1::DeleteInstanceRequest::default() };
    operator.client().delete_instance(delete).await.unwrap();
    told.insert("DeleteInstance", ("DrainStarted", "web".to_owned(), ids[1].clone()));
    let ack = v1::DrainAckRequest { instance_id: ids[1].clone(), drain_id: String::new() };
    operator.client().acknowledge_drained(ack).await.unwrap();
    told.insert("AcknowledgeDrained", ("DrainAcked", "web".to_owned(), ids[1].clone()));
    shard.site.upload(&shard.site.config(4)).await;
    operator.client().refresh_config(v1::RefreshConfigRequest::default()).await.unwrap();
    told.insert("RefreshConfig", ("ConfigApplied", String::new(), String::new()));
    let renew = v1::RenewCertificateRequest { public_key_pem: operator.key.public_key_pem().into_bytes() };
    operator.client().renew_certificate(renew).await.unwrap();
    told.insert("RenewCertificate", ("CertificateIssued", String::new(), String::new()));

    assert_eq!(told.keys().map(|it| (*it).to_owned()).collect::<Vec<_>>(), mutations(), "a call that is not tried");
    for (call, (reason, group, instance)) in told {
        let of = |event: &v1::Event| event.actor == me && event.group == group && event.instance_id == instance;
        let found = || operator.events(reason).into_iter().find(of);
        wait_for(&format!("{reason} by {me} after {call}"), || found().is_some()).await;
        let event = found().unwrap();
        assert_eq!(event.epoch, shard.leader.epoch.0, "{call}");
        assert!(event.at.is_some() && !event.resume_token.is_empty(), "{call}");
    }
}
