//! How a question and its answer look between servers: a path with a query, and a JSON object.
//!
//! Servers of two versions speak with each other during every upgrade. So fields and parameters that one does not know
//! are passed over, while a role that one does not know is an error: to guess at leadership is worse than to be silent.

use std::{fmt::Write as _, time::Duration};

use axum::extract::Query;
use http::Uri;
use nstance_core::{
    ids::Epoch,
    ports::{
        objects::ETag,
        peers::{Election, PeerAsk, PeerRole, PeerView},
    },
};
use serde::{Deserialize, Serialize};

use super::MAX_WAIT;

/// How long a question with something known waits if it does not say.
const DEFAULT_WAIT: Duration = Duration::from_secs(5);

const ELECTIONS: [Election; 2] = [Election::Shard, Election::Cluster];

/// The path of an election.
pub fn path(election: Election) -> &'static str {
    match election {
        Election::Shard => "/leadership/shard",
        Election::Cluster => "/leadership/cluster",
    }
}

/// The election of a path.
pub fn election(path_asked: &str) -> Option<Election> {
    ELECTIONS.into_iter().find(|election| path(*election) == path_asked)
}

#[derive(Deserialize)]
struct Params {
    etag: Option<String>,
    role: Option<String>,
    wait_ms: Option<u64>,
}

/// Path and query of a question.
pub fn ask_to_path(ask: &PeerAsk) -> String {
    let mut text = path(ask.election).to_owned();
    let Some((role, etag)) = &ask.known else { return text };
    // Writing into a string cannot fail.
    let _ = write!(text, "?role={}&wait_ms={}", role.as_str(), ask.wait.min(MAX_WAIT).as_millis());
    if let Some(etag) = etag {
        text.push_str("&etag=");
        percent_encode(&mut text, &etag.0);
    }
    text
}

/// The question in a query; says in words what is wrong with it. An ETag alone is what the leader was heard to have.
pub fn ask_from_uri(election: Election, uri: &Uri) -> Result<PeerAsk, String> {
    let Query(params) = Query::<Params>::try_from_uri(uri).map_err(|error| error.body_text())?;
    let role = params
        .role
        .map(|name| PeerRole::from_name(&name).ok_or_else(|| format!("role: `{name}` is no role we know")))
        .transpose()?;
    let known = match (role, params.etag) {
        (None, None) => None,
        (role, etag) => Some((role.unwrap_or(PeerRole::Leading), etag.map(ETag))),
    };
    let default = if known.is_some() { DEFAULT_WAIT } else { Duration::ZERO };
    let wait = params.wait_ms.map_or(default, Duration::from_millis);
    if MAX_WAIT < wait {
        return Err(format!("wait_ms: {} is more than {}", wait.as_millis(), MAX_WAIT.as_millis()));
    }
    Ok(PeerAsk { election, known, wait })
}

/// An ETag is opaque: quotes, slashes and plus signs are common in it.
fn percent_encode(text: &mut String, value: &str) {
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(char::from(byte));
        } else {
            let _ = write!(text, "%{byte:02X}");
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Answer {
    election: String,
    cluster_id: String,
    shard: String,
    server_id: String,
    process: String,
    role: String,
    epoch: u64,
    etag: Option<String>,
    renewed_ms_ago: Option<u64>,
    ttl_ms: u64,
    ready: bool,
    version: String,
}

#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    #[error("answer is not JSON of the form we know")]
    Form(#[source] serde_json::Error),
    #[error("answer has the unknown {field} `{value}`; the other server may be of a newer version")]
    Unknown { field: &'static str, value: String },
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

pub fn view_to_json(view: &PeerView) -> Vec<u8> {
    let answer = Answer {
        election: view.election.as_str().to_owned(),
        cluster_id: view.cluster.clone(),
        shard: view.shard.clone(),
        server_id: view.server_id.clone(),
        process: view.process.clone(),
        role: view.role.as_str().to_owned(),
        epoch: view.epoch.0,
        etag: view.etag.as_ref().map(|etag| etag.0.clone()),
        renewed_ms_ago: view.renewed_ago.map(millis),
        ttl_ms: millis(view.ttl),
        ready: view.ready,
        version: view.version.clone(),
    };
    serde_json::to_vec(&answer).expect("strings and numbers are JSON")
}

pub fn view_from_json(json: &[u8]) -> Result<PeerView, AnswerError> {
    let answer: Answer = serde_json::from_slice(json).map_err(AnswerError::Form)?;
    let Some(election) = ELECTIONS.into_iter().find(|election| election.as_str() == answer.election) else {
        return Err(AnswerError::Unknown { field: "election", value: answer.election });
    };
    let Some(role) = PeerRole::from_name(&answer.role) else {
        return Err(AnswerError::Unknown { field: "role", value: answer.role });
    };
    Ok(PeerView {
        election,
        cluster: answer.cluster_id,
        shard: answer.shard,
        server_id: answer.server_id,
        process: answer.process,
        role,
        epoch: Epoch(answer.epoch),
        etag: answer.etag.map(ETag),
        renewed_ago: answer.renewed_ms_ago.map(Duration::from_millis),
        ttl: Duration::from_millis(answer.ttl_ms),
        ready: answer.ready,
        version: answer.version,
    })
}

/// Why a question was not answered.
#[derive(Debug, Serialize, Deserialize)]
pub struct Refusal {
    pub reason: String,
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view() -> PeerView {
        PeerView {
            election: Election::Shard,
            cluster: "demo".to_owned(),
            shard: "s1".to_owned(),
            server_id: "srv-1".to_owned(),
            process: "00ff".to_owned(),
            role: PeerRole::Leading,
            epoch: Epoch(7),
            etag: Some(ETag("\"a+b/c d%\"".to_owned())),
            renewed_ago: Some(Duration::from_millis(1234)),
            ttl: Duration::from_secs(6),
            ready: true,
            version: "0.1.0".to_owned(),
        }
    }

    fn asked(text: &str) -> Result<PeerAsk, String> {
        ask_from_uri(Election::Shard, &text.parse().unwrap())
    }

    #[test]
    fn an_answer_survives_its_way() {
        for role in PeerRole::ALL {
            for election in ELECTIONS {
                let full = PeerView { role, election, ..view() };
                assert_eq!(view_from_json(&view_to_json(&full)).unwrap(), full);
                let bare = PeerView { etag: None, renewed_ago: None, ready: false, ..full };
                assert_eq!(view_from_json(&view_to_json(&bare)).unwrap(), bare);
            }
        }
    }

    #[test]
    fn an_answer_has_the_specified_fields_and_no_other() {
        let json: serde_json::Value =
            serde_json::from_slice(&view_to_json(&PeerView { etag: None, ..view() })).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "election": "shard", "cluster_id": "demo", "shard": "s1", "server_id": "srv-1", "process": "00ff",
                "role": "leading", "epoch": 7, "etag": null, "renewed_ms_ago": 1234, "ttl_ms": 6000, "ready": true,
                "version": "0.1.0",
            })
        );
    }

    #[test]
    fn unknown_fields_are_passed_over_and_unknown_roles_are_not() {
        let mut json: serde_json::Value = serde_json::from_slice(&view_to_json(&view())).unwrap();
        json["mood"] = "good".into();
        assert_eq!(view_from_json(json.to_string().as_bytes()).unwrap(), view());
        json["role"] = "presiding".into();
        let error = view_from_json(json.to_string().as_bytes()).unwrap_err();
        assert!(error.to_string().contains("unknown role `presiding`"), "{error}");
        json["role"] = "leading".into();
        json["election"] = "moon".into();
        assert!(view_from_json(json.to_string().as_bytes()).is_err());
        json["election"] = "shard".into();
        json.as_object_mut().unwrap().remove("epoch");
        assert!(matches!(view_from_json(json.to_string().as_bytes()), Err(AnswerError::Form(_))));
    }

    #[test]
    fn a_question_survives_its_way() {
        let wait = Duration::from_millis(1500);
        for known in [
            Some((PeerRole::Leading, view().etag)),
            Some((PeerRole::Following, None)),
            Some((PeerRole::Stalled, Some(ETag("é&=#?".to_owned())))),
        ] {
            for election in ELECTIONS {
                let ask = PeerAsk { election, known: known.clone(), wait };
                let uri: Uri = ask_to_path(&ask).parse().unwrap();
                assert_eq!(super::election(uri.path()), Some(election));
                assert_eq!(ask_from_uri(election, &uri).unwrap(), ask);
            }
        }
    }

    #[test]
    fn defaults_of_a_question() {
        let plain = PeerAsk { election: Election::Shard, known: None, wait: Duration::ZERO };
        assert_eq!(asked("/leadership/shard").unwrap(), plain);
        let known = Some((PeerRole::Leading, Some(ETag("e".to_owned()))));
        assert_eq!(asked("/x?etag=e").unwrap(), PeerAsk { known: known.clone(), wait: DEFAULT_WAIT, ..plain.clone() });
        let wait = Duration::from_secs(10);
        assert_eq!(asked("/x?etag=e&wait_ms=10000&new=1").unwrap(), PeerAsk { known, wait, ..plain });
    }

    #[test]
    fn bad_questions_are_told_why() {
        for (query, word) in [
            ("wait_ms=10001", "wait_ms"),
            ("wait_ms=-1", "wait_ms"),
            ("wait_ms=soon", "wait_ms"),
            ("role=presiding", "presiding"),
            ("etag=a&etag=b", "etag"),
        ] {
            let error = asked(&format!("/leadership/shard?{query}")).unwrap_err();
            assert!(error.contains(word), "{query}: {error}");
        }
    }
}
