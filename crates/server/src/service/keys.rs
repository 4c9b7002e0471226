//! Keys that instances make for their certificates. Only the public halves come here.
//!
//! Level-based: what is needed and not held is asked for, whoever forgot it. Nothing of it is durable; a new leader asks
//! again.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use data_encoding::{BASE64, HEXLOWER};
use nstance_config::Code as ProblemCode;
use nstance_core::{ids::InstanceId, ports::clock::random};
use nstance_identity::keys::{KeyError, PublicKey};
use nstance_proto::v1;

use super::{
    files::{Opened, Teller, decide::wait, wanted},
    groups::problem,
    register::stalled,
};
use crate::{grpc::status::Refusal, term::Term};

/// Keys of one call.
const MAX_KEYS: usize = 32;

/// Keys that were asked for and did not come are asked for again after this, then after twice as long …
const AGAIN: Duration = Duration::from_secs(30);

/// While it is in doubt whether we lead, nobody is asked for anything; looked at again after this.
const STALLED: Duration = Duration::from_secs(1);

/// The names of files and keys, as agents take them.
pub fn is_name(name: &str) -> bool {
    (1..=128).contains(&name.len())
        && !name.starts_with('.')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// Asks for what is missing, for as long as the stream lives.
pub async fn ask(term: &Arc<Term>, instance: InstanceId, stream: &Opened, out: &Teller<v1::KeyGenerationRequest>) {
    let (mut asked, mut tries, mut next) = (BTreeSet::new(), 0, term.now());
    loop {
        let now = term.now();
        let missing = missing(term, instance, stream);
        if missing != asked {
            (tries, next) = (0, now);
        }
        let mut wake_at = (!missing.is_empty()).then_some(next);
        if wake_at.is_some_and(|at| at <= now) {
            if term.guard.is_open() {
                let request = v1::KeyGenerationRequest {
                    key_names: missing.iter().cloned().collect(),
                    request_id: HEXLOWER.encode(&random::<8>(term.shared.entropy.as_ref())),
                    epoch: term.epoch().0,
                };
                if out.send(Box::new(Ok(request))).await.is_err() {
                    return;
                }
                tries += 1;
                next = now.plus(wait(AGAIN, tries));
                wake_at = Some(next);
            } else {
                wake_at = Some(now.plus(STALLED));
            }
        }
        asked = missing;
        tokio::select! {
            biased;
            () = stream.wake.notified() => {}
            () = super::files::sleep_until(term, wake_at) => {}
        }
    }
}

fn missing(term: &Arc<Term>, instance: InstanceId, stream: &Opened) -> BTreeSet<String> {
    let Some(wanted) = wanted(term, instance) else { return BTreeSet::new() };
    let held = stream.delivery.lock().held();
    wanted.keys().difference(&held).cloned().collect()
}

/// Takes public keys in: all of them, or none. Those that nobody needs are not kept.
pub fn submit(term: &Arc<Term>, instance: InstanceId, request: &v1::PublicKeysRequest) -> Result<(), Refusal> {
    if request.instance_id != instance.to_string() {
        let message = format!("certificate names {instance}, the keys are for {:.64}", request.instance_id);
        return Err(Refusal::denied("NOT_YOUR_INSTANCE", message));
    }
    let mut keys = parse(&request.keys)?;
    stalled(term)?;
    let needed = wanted(term, instance).map(|it| it.keys()).unwrap_or_default();
    keys.retain(|name, _| needed.contains(name));
    let delivery = term.world.lock().entries.get(&instance).map(|entry| entry.delivery.clone());
    let Some(delivery) = delivery else {
        return Err(Refusal::denied("INSTANCE_DELETED", format!("instance {instance} is gone")));
    };
    if delivery.lock().take_keys(&keys) {
        let keys = keys.iter().map(|(name, key)| (name.clone(), key.to_der())).collect();
        term.shared.cache.put_keys(instance, keys);
    }
    Ok(())
}

fn parse(submitted: &[v1::PublicKeySubmission]) -> Result<BTreeMap<String, PublicKey>, Refusal> {
    if submitted.is_empty() || MAX_KEYS < submitted.len() {
        let message = format!("{} keys; a call has 1 to {MAX_KEYS}", submitted.len());
        return Err(Refusal::bad_request(vec![problem(ProblemCode::Limit, "keys", message)]));
    }
    let mut problems = Vec::new();
    let mut keys = BTreeMap::new();
    for (n, it) in submitted.iter().enumerate() {
        let given = &it.filename;
        let name = given.strip_suffix(".pub").or(given.strip_suffix(".key")).unwrap_or(given);
        if !is_name(name) {
            let message = format!("{given:.64?} is no name of a key; use letters, digits and `._-`");
            problems.push(problem(ProblemCode::BadValue, &format!("keys[{n}].filename"), message));
        }
        match read(&it.public_key_pem) {
            Ok(key) if keys.insert(name.to_owned(), key).is_some() => {
                let message = format!("`{name:.64}` is there twice");
                problems.push(problem(ProblemCode::Conflict, &format!("keys[{n}].filename"), message));
            }
            Ok(_) => {}
            Err(error) => {
                problems.push(problem(ProblemCode::BadValue, &format!("keys[{n}].public_key_pem"), error.to_string()));
            }
        }
    }
    if problems.is_empty() { Ok(keys) } else { Err(Refusal::bad_request(problems)) }
}

/// PEM, or the DER in it, as it is or in base64.
fn read(bytes: &[u8]) -> Result<PublicKey, KeyError> {
    PublicKey::from_pem(bytes).or_else(|_| PublicKey::from_der(bytes)).or_else(|error| {
        let der = BASE64.decode(bytes.trim_ascii()).map_err(|_| error)?;
        PublicKey::from_der(&der)
    })
}

#[cfg(test)]
mod tests {
    use nstance_identity::keys::KeyPair;
    use nstance_rt::entropy::SeededEntropy;

    use super::*;

    fn key(filename: &str, public_key_pem: Vec<u8>) -> v1::PublicKeySubmission {
        v1::PublicKeySubmission { filename: filename.to_owned(), public_key_pem }
    }

    #[test]
    fn a_public_key_is_read_in_every_spelling() {
        let key = KeyPair::generate(&SeededEntropy::new(1)).public_key();
        let base64 = BASE64.encode(&key.to_der());
        for bytes in
            [key.to_pem().into_bytes(), key.to_der(), base64.clone().into_bytes(), format!("{base64}\n").into()]
        {
            assert_eq!(read(&bytes).unwrap(), key);
        }
        assert!(read(b"").is_err() && read(b"AAAA").is_err());
    }

    #[test]
    fn every_bad_entry_is_named_and_nothing_is_taken() {
        let good = KeyPair::generate(&SeededEntropy::new(1)).public_key_pem().into_bytes();
        let refusal = parse(&[
            key("fine.pub", good.clone()),
            key("../etc/passwd", good.clone()),
            key(".hidden", good.clone()),
            key("fine.key", good.clone()),
            key(
                "rsa",
                b"-----BEGIN PUBLIC KEY-----\nMCwwDQYJKoZIhvcNAQEBBQADGwAwGAIRAL\n-----END PUBLIC KEY-----".to_vec(),
            ),
            key("", good),
        ])
        .unwrap_err();
        let paths: Vec<_> = refusal.problems.iter().map(|it| it.path.as_str()).collect();
        let bad =
            ["keys[1].filename", "keys[2].filename", "keys[3].filename", "keys[4].public_key_pem", "keys[5].filename"];
        assert_eq!(paths, bad);
    }
}
