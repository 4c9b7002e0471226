//! The reasons in refusals, by which agents, operators and the admin tool decide what to do next.
//!
//! A reason is a text where the refusal is made, so this list is read from the sources: every reason that stands in a
//! constructor of `Refusal` (gRPC) or `Refused` (the port between servers), with the code it goes with.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use super::hold;

/// Constructors and the code of what they make; `None`: the first argument says it.
const GRPC: [(&str, Option<&str>); 9] = [
    ("Refusal::new(", None),
    ("Self::new(", None),
    ("Refusal::unauthenticated(", Some("Unauthenticated")),
    ("Refusal::denied(", Some("PermissionDenied")),
    ("Refusal::unavailable(", Some("Unavailable")),
    ("Refusal::invalid(", Some("InvalidArgument")),
    ("Self::invalid(", Some("InvalidArgument")),
    ("Refusal::precondition(", Some("FailedPrecondition")),
    // Of the claims of a nonce.
    ("same(", Some("InvalidArgument")),
];

const PEERS: [(&str, Option<&str>); 2] = [("Refused::new(", None), ("Refused::denied(", Some("FORBIDDEN"))];

fn sources(under: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(under).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|it| it == "rs") && !path.ends_with("tests.rs") {
            found.push(path);
        }
    }
}

/// The program's part of a source, without comments.
fn program(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).map(|line| format!("{line}\n")).collect()
}

/// `BAD_REQUEST`, if a text begins with that in quotes.
fn reason(text: &str) -> Option<&str> {
    let word = text.trim_start().strip_prefix('"')?.split('"').next()?;
    let is_reason = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
    is_reason.then_some(word)
}

fn calls(text: &str, constructors: &[(&str, Option<&str>)]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (constructor, code) in constructors {
        for (at, _) in text.match_indices(constructor) {
            let is_whole = !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
            let arguments = &text[at + constructor.len()..];
            let line = match code {
                Some(code) => reason(arguments).map(|reason| format!("{reason} {code}")),
                None => arguments.split_once(',').and_then(|(code, rest)| {
                    let code = code.trim().rsplit("::").next()?;
                    reason(rest).map(|reason| format!("{reason} {code}"))
                }),
            };
            found.extend(line.filter(|_| is_whole));
        }
    }
    found
}

/// Reasons that are given to a refusal, or to an error that becomes one, by themselves.
fn named(text: &str) -> BTreeSet<String> {
    let places = ["refusal.reason = ", "} => ", "Self::Invalid => "];
    let after = |place: &'static str| text.match_indices(place).map(move |(at, _)| at + place.len());
    places.into_iter().flat_map(after).filter_map(|at| reason(&text[at..])).map(str::to_owned).collect()
}

fn room(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name).join("src")
}

fn all() -> (BTreeSet<String>, BTreeSet<String>) {
    let (mut grpc, mut peers) = (BTreeSet::new(), BTreeSet::new());
    let mut server = Vec::new();
    sources(&room("server"), &mut server);
    for path in server {
        let text = program(&path);
        peers.extend(calls(&text, &PEERS));
        // Where nothing is refused, `Self::new` makes something else.
        if text.contains("Refusal") {
            grpc.extend(calls(&text, &GRPC));
            grpc.extend(named(&text));
        }
    }
    for error in ["nonce.rs", "peer.rs"] {
        grpc.extend(named(&program(&room("identity").join(error))));
    }
    (grpc, peers)
}

#[test]
fn reasons_of_refused_calls() {
    hold("refusals", all().0);
}

#[test]
fn reasons_of_refused_peers() {
    hold("refusals-peers", all().1);
}

#[test]
fn reasons_are_found_in_calls_of_one_line_and_of_several() {
    let text = r#"
        return Err(Refusal::denied("WRONG_ROLE", message));
        let it = Refusal::new(
            Code::Aborted,
            "ETAG_MISMATCH",
            message,
        );
        same("WRONG_SHARD", "shard", a, b)?;
        Refusal::denied(error.reason(), "NOT_THIS");
        is_same("NOR_THIS");
    "#;
    let found = ["ETAG_MISMATCH Aborted", "WRONG_ROLE PermissionDenied", "WRONG_SHARD InvalidArgument"];
    assert_eq!(calls(text, &GRPC), found.map(str::to_owned).into());
    let text = r#"refusal.reason = "CONFIG_INVALID"; Self::Expired { .. } => "CERT_EXPIRED","#;
    assert_eq!(named(text), ["CERT_EXPIRED", "CONFIG_INVALID"].map(str::to_owned).into());
}
