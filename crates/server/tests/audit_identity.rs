//! Every identity that is given or refused leaves one line by which people can tell who, from where and why; and nothing
//! in it that opens a door.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "it/common/mod.rs"]
mod common;

use std::{
    io,
    net::Ipv4Addr,
    sync::{Arc, Mutex},
};

use common::{
    Shard, assert_refused,
    fleet::Agent,
    operator::{Operator, claims},
    tenant,
    wire::{new_key, register_agent, register_operator, registrar, request},
};
use nstance_identity::{keys::KeyPair, nonce::sign_operator_nonce, peer::Peer, rejoin::RejoinClaim, role::Role};
use nstance_proto::v1::{self, agent_service_client::AgentServiceClient};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde_json::Value;
use tonic::Code;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// The last line of the audit, which is about this subject and key.
    fn last(&self, subject: &str, key: &KeyPair) -> Value {
        let text = self.text();
        let mut lines = text.lines().map(|it| serde_json::from_str::<Value>(it).unwrap());
        let line = lines.rfind(|it| it["audit"] == true).expect("a line of the audit");
        assert_eq!(line["subject"], subject, "{line}");
        assert_eq!(line["tenant"], if subject.is_empty() { "" } else { "default" }, "{line}");
        assert_eq!(line["key"], key.fingerprint(), "{line}");
        assert!(line["remote"].as_str().unwrap().starts_with("127.0.0.1:"), "{line}");
        assert_eq!(line["epoch"], "1", "{line}");
        line
    }
}

fn serial(chain: &[u8]) -> String {
    Peer::from_der(&CertificateDer::from_pem_slice(chain).unwrap()).unwrap().serial
}

#[tokio::test]
async fn every_identity_given_or_refused_is_audited() {
    let log = Log::default();
    let own = log.clone();
    let lines = tracing_subscriber::fmt().json().flatten_event(true).with_writer(move || own.clone());
    tracing::subscriber::set_global_default(lines.finish()).unwrap();
    let said = |line: &Value| ["what", "role", "reason"].map(|it| line[it].as_str().unwrap_or_default().to_owned());

    let shard = Shard::start(1).await;
    let id = shard.only_vm().await;
    let agent = Agent::register(&shard, id).await;
    let nonce = shard.site.spec(id).bootstrap.nonce_jwt;
    let line = log.last(&id.to_string(), &agent.key);
    assert_eq!(said(&line), ["registration", "agent", ""]);
    assert_eq!(line["serial"], serial(&agent.chain));
    assert_eq!(line["jti"].as_str().unwrap().len(), 32, "{line}");

    let other = new_key(shard.site.entropy.as_ref());
    assert_refused(register_agent(&shard, &nonce, &other).await, Code::Unauthenticated, "NONCE_USED");
    assert_eq!(said(&log.last(&id.to_string(), &other)), ["registration", "agent", "NONCE_USED"]);
    // Whose it is, is anybody's word until the signature holds.
    let forged = sign_operator_nonce(&other, &claims(&shard.site));
    assert_refused(register_operator(&shard, &forged, &other).await, Code::Unauthenticated, "NONCE_INVALID");
    assert_eq!(said(&log.last("", &other)), ["registration", "operator", "NONCE_INVALID"]);

    let line = agent.dial(&shard.leader.advertised.agent).await.unwrap();
    let mut client = AgentServiceClient::new(line.channel.clone());
    let renewal = |key: &KeyPair| v1::RenewCertificateRequest { public_key_pem: key.public_key_pem().into_bytes() };
    assert_refused(client.renew_certificate(renewal(&other)).await, Code::InvalidArgument, "KEY_CHANGE");
    assert_eq!(said(&log.last(&id.to_string(), &agent.key)), ["renewal", "agent", "KEY_CHANGE"]);
    let renewed = client.renew_certificate(renewal(&agent.key)).await.unwrap().into_inner();
    let line = log.last(&id.to_string(), &agent.key);
    assert_eq!(said(&line), ["renewal", "agent", ""]);
    assert_eq!(line["serial"], serial(&renewed.client_certificate_pem));

    // Once the new one was used, the old one is turned away at the door.
    let newer = Agent { chain: renewed.client_certificate_pem, ..agent.clone() };
    let line = newer.dial(&shard.leader.advertised.agent).await.unwrap();
    let empty = v1::PublicKeysRequest::default();
    AgentServiceClient::new(line.channel.clone()).submit_public_keys(empty).await.unwrap_err();
    assert_refused(client.renew_certificate(renewal(&agent.key)).await, Code::Unauthenticated, "CERT_SUPERSEDED");
    assert_eq!(said(&log.last(&id.to_string(), &agent.key)), ["renewal", "agent", "CERT_SUPERSEDED"]);

    let (cluster, tenant, client_id) = ("demo".parse().unwrap(), tenant(), id.to_string());
    let mut proofs = Vec::new();
    for (counter, reason) in [(1, ""), (7, "REJOIN_COUNTER")] {
        let claim =
            RejoinClaim { cluster: &cluster, role: Role::Agent, tenant: &tenant, client_id: &client_id, counter };
        let signature = claim.sign(&agent.key);
        proofs.push(signature.clone());
        let proof = v1::RejoinProof { client_id: client_id.clone(), tenant: tenant.to_string(), counter, signature };
        let (mut client, _line) = registrar(&shard, Ipv4Addr::LOCALHOST).await;
        let asking = v1::RegisterClientRequest { rejoin: Some(proof), ..request("", &agent.key) };
        assert_eq!(client.register_agent(asking).await.is_ok(), reason.is_empty());
        assert_eq!(said(&log.last(&client_id, &agent.key)), ["rejoin", "agent", reason]);
    }

    let operator = Operator::on(&shard).await;
    let line = log.last(&operator.id.to_string(), &operator.key);
    assert_eq!(said(&line), ["registration", "operator", ""]);
    assert_eq!(line["serial"], serial(&operator.chain));

    let text = log.text();
    for secret in [&nonce, &forged, agent.key.to_pkcs8_pem().lines().nth(1).unwrap()] {
        assert!(!text.contains(secret), "{secret} is in the log");
    }
    for proof in proofs {
        assert!(!text.contains(&data_encoding::HEXLOWER.encode(&proof)) && !text.contains(&format!("{proof:?}")));
    }
}
