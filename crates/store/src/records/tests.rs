use std::{collections::BTreeMap, time::Duration};

use nstance_core::{
    ids::{GroupRef, InstanceId},
    instance::{Addresses, CertFact, CertPair, Drain, DrainReason, Inherited, Instance, OnDemandRequest, Registration},
};
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::{
    records::{
        groups::{GroupEntry, GroupsFile, StaticSeen, Tombstone, TombstoneReason},
        leader::LeaseRecord,
        nonce::NonceRecord,
    },
    testing::{instance, shard},
};

fn meta() -> Meta {
    Meta {
        version: VERSION,
        epoch: Epoch(7),
        writer: "a/s1".into(),
        write_id: "00112233445566778899aabbccddeeff".into(),
        updated_at: Timestamp::from_millis(1_700_000_000_000),
    }
}

fn full() -> Instance {
    let at = Timestamp::from_millis;
    let mut it = instance(1);
    it.epoch = Epoch(7);
    it.registration = Some(Registration {
        at: at(5),
        public_key: vec![1, 2, 255],
        addresses: Addresses { ip4: Some("10.0.0.1".into()), ..Addresses::default() },
        agent_version: "1.0".into(),
    });
    let cert =
        |serial: &str| CertFact { serial: serial.into(), issuer: "fp".into(), not_before: at(1), not_after: at(2) };
    it.cert = Some(CertPair { current: cert("aa"), previous: Some(cert("bb")) });
    it.drain = Some(Drain {
        reason: DrainReason::ScaleDown,
        started_at: at(6),
        deadline: at(7),
        replacement: Some(instance(2).id),
        acked_at: None,
        acked_by: None,
        cancelled_at: None,
    });
    it.request = Some(OnDemandRequest {
        request_id: Some("r1".into()),
        template: Some("gpu".into()),
        vars: [("A".into(), "1".into())].into(),
        by: "operator".into(),
        inherits: Inherited {
            subnet_pool: Some("main".into()),
            vars: [("B".into(), "2".into())].into(),
            ..Inherited::default()
        },
        ..OnDemandRequest::default()
    });
    it
}

fn key_of(it: &Instance) -> String {
    instance_key(&it.shard, &it.group.tenant, &it.id)
}

#[test]
fn an_instance_comes_back_with_all_its_facts() {
    for it in [Instance { epoch: Epoch(7), ..instance(1) }, full()] {
        let body = encode(&it, &meta(), &Extra::default());
        let (back, read, extra) = decode::<Instance>(&key_of(&it), &body).unwrap();
        assert_eq!(back, it);
        assert_eq!(read, meta());
        assert!(extra.is_empty(), "{extra:?}");
    }
}

/// Both ways to write agree to the letter, and what was written is recognised as our own.
fn is_spelled_alike<T: Record>(it: &T) {
    let body = encode(it, &meta(), &Extra::default());
    assert_eq!(String::from_utf8_lossy(&body), Value::Object(known(&it.to_form(), &meta())).to_string());
    assert!(read_own::<T>(&body).is_some());
}

#[test]
fn a_record_of_ours_is_recognised_and_nothing_else_is() {
    is_spelled_alike(&instance(1));
    is_spelled_alike(&full());
    let key = key_of(&full());
    let body = String::from_utf8(encode(&full(), &meta(), &Extra::default())).unwrap();
    let foreign = [
        body.replacen(r#"{"version":1,"#, r#"{"version":1,"mood":"calm","#, 1),
        body.replacen(r#""drain":{"#, r#""drain":{"mood":"calm","#, 1),
        body.replacen(r#","writer""#, r#", "writer""#, 1),
        format!("{body}\n"),
    ];
    for text in foreign {
        assert_ne!(text, body);
        assert!(read_own::<Instance>(text.as_bytes()).is_none(), "{text}");
        assert_eq!(decode::<Instance>(&key, text.as_bytes()).unwrap().0, full(), "{text}");
    }
    // Twice the same field, or a list in the place of the object, is no record whichever way it is read.
    let twice = body.replacen(r#"{"version":1,"#, r#"{"version":1,"epoch":7,"#, 1);
    for text in [twice.as_str(), r#"[1, 7, "w", "i", null]"#] {
        assert!(decode::<Instance>(&key, text.as_bytes()).is_err(), "{text}");
    }
}

#[test]
fn the_stored_form_of_an_instance_is_as_documented() {
    let body = encode(&full(), &meta(), &Extra::default());
    let json: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(json["version"], 1);
    assert_eq!(json["epoch"], 7);
    assert_eq!(json["status"], "draining");
    assert_eq!(json["kind"], "knc");
    assert_eq!(json["reason"], "scale-up");
    assert_eq!(json["drain"]["reason"], "scale-down");
    assert_eq!(json["registration"]["public_key"], "AQL/");
    assert_eq!(json["request"]["request_id"], "r1");
    assert_eq!(json["request"]["inherits"], json!({ "subnet_pool": "main", "vars": { "B": "2" } }));
    assert_eq!(json["updated_at"], "2023-11-14T22:13:20.000Z");
    assert!(json.get("delete").is_none(), "facts not set are not written");
}

#[test]
fn status_is_written_and_never_read() {
    let it = full();
    let mut json: Value = serde_json::from_slice(&encode(&it, &meta(), &Extra::default())).unwrap();
    for status in [json!("deleted"), json!(7), Value::Null] {
        json["status"] = status;
        let (back, _, extra) = decode::<Instance>(&key_of(&it), json.to_string().as_bytes()).unwrap();
        assert_eq!(back, it);
        let rewritten: Value = serde_json::from_slice(&encode(&back, &meta(), &extra)).unwrap();
        assert_eq!(rewritten["status"], "draining");
    }
}

#[test]
fn unknown_fields_survive_a_rewrite_at_every_depth() {
    let it = full();
    let mut json: Value = serde_json::from_slice(&encode(&it, &meta(), &Extra::default())).unwrap();
    json["future"] = json!({ "deep": [1, { "er": true }] });
    json["drain"]["mood"] = json!("calm");
    json["cert"]["previous"]["colour"] = json!("green");
    json["delete"] = Value::Null;
    let (back, _, extra) = decode::<Instance>(&key_of(&it), json.to_string().as_bytes()).unwrap();
    let mut changed = back.clone();
    changed.drain.as_mut().unwrap().acked_by = Some("operator".into());
    changed.cert.as_mut().unwrap().previous = None;
    let rewritten: Value = serde_json::from_slice(&encode(&changed, &meta(), &extra)).unwrap();
    assert_eq!(rewritten["future"], json["future"]);
    assert_eq!(rewritten["drain"]["mood"], "calm");
    assert_eq!(rewritten["drain"]["acked_by"], "operator");
    assert!(rewritten["cert"].get("previous").is_none(), "what was removed does not come back as a torso");
    assert!(rewritten.get("delete").is_none());
    let (_, _, again) = decode::<Instance>(&key_of(&it), rewritten.to_string().as_bytes()).unwrap();
    assert_eq!(again.0.len(), 2);
}

#[test]
fn newer_and_broken_records_are_told_apart_with_key_and_place() {
    let it = full();
    let key = key_of(&it);
    let text = String::from_utf8(encode(&it, &meta(), &Extra::default())).unwrap();
    let newer = text.replacen("\"version\":1", "\"version\":2", 1);
    assert_eq!(
        decode::<Instance>(&key, newer.as_bytes()).unwrap_err(),
        DecodeError::TooNew { key: key.clone(), version: 2 }
    );
    let newer_and_strange = r#"{"version": 9, "epoch": 1, "reason": 17, "x": {}}"#;
    assert!(matches!(
        decode::<Instance>(&key, newer_and_strange.as_bytes()),
        Err(DecodeError::TooNew { version: 9, .. })
    ));
    let broken = "{\n  \"version\": 1,\n  \"epoch\": x }";
    match decode::<Instance>(&key, broken.as_bytes()).unwrap_err() {
        DecodeError::Corrupt { key: named, line, column, .. } => {
            assert_eq!((named, line, column), (key.clone(), 3, 12))
        }
        other => panic!("{other}"),
    }
    for bad in [
        String::new(),
        "[]".into(),
        "{}".into(),
        text.replacen("scale-up", "just-because", 1),
        text.replacen("\"version\":1,", "", 1),
        text.replacen("2023-11-14", "yesterday", 1),
    ] {
        let error = decode::<Instance>(&key, bad.as_bytes()).unwrap_err();
        assert!(matches!(error, DecodeError::Corrupt { .. }), "{bad}");
        assert!(error.to_string().contains(&key));
    }
}

#[test]
fn a_record_under_anothers_key_is_corrupt() {
    let it = full();
    let body = encode(&it, &meta(), &Extra::default());
    let other = instance_key(&shard(), &it.group.tenant, &instance(9).id);
    assert!(decode::<Instance>(&other, &body).is_err());
}

#[test]
fn a_record_without_intent_epoch_takes_its_writers() {
    let it = full();
    let mut json: Value = serde_json::from_slice(&encode(&it, &meta(), &Extra::default())).unwrap();
    json.as_object_mut().unwrap().remove("intent_epoch");
    let (back, ..) = decode::<Instance>(&key_of(&it), json.to_string().as_bytes()).unwrap();
    assert_eq!(back.intent_epoch, Epoch(7));
}

fn group(name: &str) -> GroupRef {
    GroupRef::new("default".parse().unwrap(), name.parse().unwrap())
}

#[test]
fn groups_come_back_and_are_pretty() {
    let entry = GroupEntry {
        template: Some("knc".into()),
        size: Some(3),
        vars: Some(BTreeMap::from([("A".into(), "b".into())])),
        drain_timeout: Some(Duration::from_secs(90)),
        preferred_victims: vec![instance(1).id],
        generation: 4,
        updated_by: Some("operator".into()),
        ..GroupEntry::default()
    };
    let file = GroupsFile {
        epoch: Epoch(7),
        groups: BTreeMap::from([(group("web"), entry)]),
        deleted: BTreeMap::from([(
            group("old"),
            Tombstone { at: Timestamp::from_millis(1), by: "x".into(), reason: TombstoneReason::Config },
        )]),
        static_groups: Some(StaticSeen { etag: "e".into(), groups: [group("web"), group("db")].into() }),
    };
    let body = encode(&file, &meta(), &Extra::default());
    assert!(String::from_utf8_lossy(&body).contains("\n        \"drain_timeout\": \"90s\""), "two spaces a step");
    let (back, _, extra) = decode::<GroupsFile>(&groups_key(&shard()), &body).unwrap();
    assert_eq!(back, file);
    assert!(extra.is_empty());
}

#[test]
fn a_hand_written_map_of_groups_is_read() {
    let text = r#"{
        // just sizes
        "default": {
            "web": { "template": "knc", "size": 3, "mood": "calm", "drain_timeout": "1h30m", },
            "db": { "size": 1, "drain_timeout": 0 },
        },
    }"#;
    let (file, read, extra) = decode::<GroupsFile>("shard/a/groups.jsonc", text.as_bytes()).unwrap();
    assert_eq!(read.epoch, Epoch(0));
    assert_eq!(file.groups[&group("web")].size, Some(3));
    assert_eq!(file.groups[&group("web")].drain_timeout, Some(Duration::from_secs(5400)));
    assert_eq!(file.groups[&group("db")].drain_timeout, Some(Duration::ZERO));
    let rewritten: Value = serde_json::from_slice(&encode(&file, &meta(), &extra)).unwrap();
    assert_eq!(rewritten["groups"]["default"]["web"]["mood"], "calm");
    assert_eq!(rewritten["version"], 1);
    let error = decode::<GroupsFile>("shard/a/groups.jsonc", text.replace(": 3", ": \"3\"").as_bytes()).unwrap_err();
    assert!(matches!(error, DecodeError::Corrupt { line: 4, .. }), "{error}");
    let error = decode::<GroupsFile>("k", br#"{ "default": { "BAD": {} } }"#).unwrap_err();
    assert!(error.to_string().contains("BAD"), "{error}");
}

#[test]
fn lease_and_nonce_come_back() {
    let lease = LeaseRecord {
        epoch: Epoch(7),
        holder: "s1".into(),
        process: "p".into(),
        addr: "10.0.0.1:8991".into(),
        health_addr: "10.0.0.1:8990".into(),
        direct: true,
        boot_id: "b".into(),
        provider_id: None,
        ttl: Duration::from_secs(6),
        acquired_at: Timestamp::from_millis(1),
        renewed_at: Timestamp::from_millis(2),
        released: false,
        previous: None,
    };
    is_spelled_alike(&lease);
    let body = encode(&lease, &meta(), &Extra::default());
    assert_eq!(serde_json::from_slice::<Value>(&body).unwrap()["ttl_ms"], 6000);
    assert_eq!(decode::<LeaseRecord>("k", &body).unwrap().0, lease);
    let nonce = NonceRecord {
        jti: "j".into(),
        kind: "operator".into(),
        subject: "opr".into(),
        tenant: "default".parse().unwrap(),
        public_key_sha256: "00".into(),
        consumed_at: Timestamp::from_millis(1),
        expires_at: Timestamp::from_millis(2),
    };
    is_spelled_alike(&nonce);
    assert_eq!(decode::<NonceRecord>("k", &encode(&nonce, &meta(), &Extra::default())).unwrap().0, nonce);
}

proptest! {
    #[test]
    fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode::<Instance>("k", &bytes);
        let _ = decode::<GroupsFile>("k", &bytes);
        let _ = decode::<LeaseRecord>("k", &bytes);
    }

    #[test]
    fn no_damage_to_a_record_makes_the_reader_panic(at in 0_usize..2000, byte: u8) {
        let it = full();
        let mut body = encode(&it, &meta(), &Extra::default());
        let at = at % body.len();
        body[at] = byte;
        let _ = decode::<Instance>(&key_of(&it), &body);
        let _: Option<(_, _, InstanceId)> = parse_instance_key(&key_of(&it));
    }
}
