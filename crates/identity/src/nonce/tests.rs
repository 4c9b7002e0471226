use std::collections::BTreeSet;

use proptest::prelude::*;
use ring::hmac;

use super::*;
use crate::testing::{Dice, NOW, cluster, instance, operator, tenant};

fn key() -> KeyPair {
    KeyPair::generate(&Dice::new(11))
}

fn keys() -> NonceKeys {
    NonceKeys::new([key().public_key()])
}

fn agent_nonce() -> AgentNonce {
    AgentNonce {
        instance: instance(),
        jti: new_jti(&Dice::new(3)),
        issued_at: NOW,
        expires_at: NOW.plus(Duration::from_secs(900)),
        cluster: cluster(),
        tenant: tenant(),
        shard: "s1".parse().unwrap(),
        group: "web".parse().unwrap(),
        on_demand: false,
        config_hash: "sha256:00".to_owned(),
    }
}

fn operator_nonce() -> OperatorNonce {
    OperatorNonce {
        operator: operator(),
        jti: new_jti(&Dice::new(4)),
        issued_at: NOW,
        expires_at: NOW.plus(Duration::from_secs(3 * 3600)),
        cluster: cluster(),
        tenant: tenant(),
    }
}

fn json(token: &str, n: usize) -> serde_json::Value {
    let part = token.split('.').nth(n).unwrap();
    serde_json::from_slice(&BASE64URL_NOPAD.decode(part.as_bytes()).unwrap()).unwrap()
}

/// Signs whatever it is given, as an attacker with some key would.
fn forge(key: &KeyPair, header: &serde_json::Value, claims: &serde_json::Value) -> String {
    let signed = format!("{}.{}", part(header), part(claims));
    let signature = BASE64URL_NOPAD.encode(&key.sign(signed.as_bytes()));
    format!("{signed}.{signature}")
}

#[test]
fn nonces_are_read_back_as_they_were_made() {
    let token = sign_agent_nonce(&key(), &agent_nonce());
    assert_eq!(keys().verify_agent(&token, NOW), Ok(agent_nonce()));
    assert_eq!(sign_agent_nonce(&key(), &agent_nonce()), token);
    assert_eq!(json(&token, 0), serde_json::json!({"alg": "EdDSA", "typ": "JWT", "kid": key().fingerprint()}));
    let claims = json(&token, 1);
    assert_eq!(claims["nbf"], claims["iat"].as_i64().unwrap() - 60);
    assert_eq!(claims["kind"], "agent");

    let token = sign_operator_nonce(&key(), &operator_nonce());
    assert_eq!(keys().verify_operator(&token, NOW), Ok(operator_nonce()));
    for absent in ["shard", "group", "on_demand", "config_hash"] {
        assert!(json(&token, 1).get(absent).is_none(), "{absent}");
    }
}

#[test]
fn nonces_are_unique_and_single_use() {
    // Single use is kept by the records; what this room owes them is that no two nonces share a jti.
    let dice = Dice::new(5);
    let all: BTreeSet<_> = (0..1000).map(|_| new_jti(&dice)).collect();
    assert_eq!(all.len(), 1000);
    assert!(all.iter().all(|jti| is_jti(jti)));
}

#[test]
fn forged_nonces_are_refused() {
    let genuine = sign_agent_nonce(&key(), &agent_nonce());
    let (header, claims) = (json(&genuine, 0), json(&genuine, 1));
    let other = KeyPair::generate(&Dice::new(99));
    let refused = |token: &str, what: &str| {
        assert_eq!(keys().verify_agent(token, NOW), Err(NonceError::Invalid), "{what}");
    };

    for alg in ["none", "None", "HS256", "EdDSa", "ES256", ""] {
        let mut header = header.clone();
        header["alg"] = alg.into();
        refused(&forge(&key(), &header, &claims), alg);
        refused(&format!("{}.{}.", part(&header), part(&claims)), alg);
        // The classic: HMAC, keyed with what everybody may know.
        for public in [key().public_key_der(), key().public_key_pem().into_bytes(), key().public_key().raw().to_vec()] {
            let signed = format!("{}.{}", part(&header), part(&claims));
            let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &public), signed.as_bytes());
            refused(&format!("{signed}.{}", BASE64URL_NOPAD.encode(tag.as_ref())), alg);
        }
    }
    refused(&forge(&other, &header, &claims), "other key under our kid");
    let mut foreign = header.clone();
    foreign["kid"] = other.fingerprint().into();
    refused(&forge(&other, &foreign, &claims), "other key under its own kid");
    let mut changed = claims.clone();
    changed["tenant"] = "other".into();
    let tail = genuine.rsplit('.').next().unwrap();
    refused(&format!("{}.{}.{tail}", part(&header), part(&changed)), "changed claims");
    let mut bytes = genuine.clone().into_bytes();
    let last = bytes.len() - 3;
    bytes[last] = if bytes[last] == b'A' { b'B' } else { b'A' };
    refused(&String::from_utf8(bytes).unwrap(), "changed signature");
    for broken in ["", ".", "..", "...", "a.b.c", &format!("{genuine}="), &format!("{genuine}.x"), &genuine[1..]] {
        refused(broken, broken);
    }
    assert_eq!(NonceKeys::new([]).verify_agent(&genuine, NOW), Err(NonceError::Invalid));
}

#[test]
fn claims_we_signed_must_still_be_whole() {
    let genuine = sign_agent_nonce(&key(), &agent_nonce());
    let (header, claims) = (json(&genuine, 0), json(&genuine, 1));
    for name in claims.as_object().unwrap().keys() {
        let mut without = claims.clone();
        without.as_object_mut().unwrap().remove(name);
        assert_eq!(keys().verify_agent(&forge(&key(), &header, &without), NOW), Err(NonceError::Invalid), "{name}");
    }
    for (name, value) in [("iss", "x"), ("aud", "x"), ("sub", "x"), ("jti", "x"), ("tenant", "A"), ("shard", "-")] {
        let mut wrong = claims.clone();
        wrong[name] = value.into();
        assert_eq!(keys().verify_agent(&forge(&key(), &header, &wrong), NOW), Err(NonceError::Invalid), "{name}");
    }
}

#[test]
fn kinds_do_not_stand_in_for_each_other() {
    let agent = sign_agent_nonce(&key(), &agent_nonce());
    let operator = sign_operator_nonce(&key(), &operator_nonce());
    let error = keys().verify_operator(&agent, NOW).unwrap_err();
    assert_eq!(error, NonceError::WrongKind { wanted: "operator", got: "agent".into() });
    assert_eq!(error.reason(), "NONCE_WRONG_KIND");
    assert_eq!(keys().verify_agent(&operator, NOW).unwrap_err().reason(), "NONCE_WRONG_KIND");
}

#[test]
fn time_is_judged_with_a_minute_of_leeway() {
    let token = sign_agent_nonce(&key(), &agent_nonce());
    let at = |seconds: i64| keys().verify_agent(&token, Timestamp::from_millis(NOW.as_millis() + seconds * 1000));
    assert!(at(900).is_ok());
    assert!(at(960).is_ok());
    assert_eq!(at(961).unwrap_err(), NonceError::Expired { at: agent_nonce().expires_at });
    // `nbf` lies a minute before the issue, and the leeway is one more.
    assert!(at(-120).is_ok());
    assert_eq!(at(-121).unwrap_err().reason(), "NONCE_NOT_YET_VALID");
}

#[test]
fn several_keys_verify_while_the_key_is_replaced() {
    let newer = KeyPair::generate(&Dice::new(12));
    let both = NonceKeys::new([newer.public_key(), key().public_key()]);
    assert!(both.verify_agent(&sign_agent_nonce(&key(), &agent_nonce()), NOW).is_ok());
    assert!(both.verify_agent(&sign_agent_nonce(&newer, &agent_nonce()), NOW).is_ok());
}

#[test]
fn long_tokens_are_not_looked_at() {
    let token = "a".repeat(MAX_NONCE + 1);
    assert_eq!(keys().verify_agent(&token, NOW).unwrap_err().reason(), "BAD_REQUEST");
    assert!(peek_claims(&token).is_err());
}

#[test]
fn bearer_can_read_what_it_cannot_verify() {
    let peeked = peek_claims(&sign_agent_nonce(&key(), &agent_nonce())).unwrap();
    assert_eq!(peeked.subject, instance().to_string());
    assert_eq!(peeked.expires_at, agent_nonce().expires_at);
    assert_eq!(peeked.cluster, "demo");
    assert_eq!(peeked.shard.as_deref(), Some("s1"));
    assert_eq!(peeked.config_hash.as_deref(), Some("sha256:00"));
    assert!(peek_claims("not.a.token").is_err());
}

proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text: String, parts in proptest::collection::vec("[A-Za-z0-9_-]{0,40}", 0..5)) {
        prop_assert!(keys().verify_agent(&text, NOW).is_err());
        prop_assert!(keys().verify_agent(&parts.join("."), NOW).is_err());
        let _ = peek_claims(&text);
        let _ = peek_claims(&parts.join("."));
    }
}
