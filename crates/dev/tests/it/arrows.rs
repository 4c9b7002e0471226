//! Arrows between rooms go one way. This holds the list of ARCHITECTURE.md against the manifests.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use serde_json::Value;

const ALLOWED: [(&str, &[&str]); 17] = [
    ("core", &[]),
    ("proto", &[]),
    ("config", &["core"]),
    ("identity", &["core"]),
    ("rt", &["core"]),
    ("store", &["core", "rt"]),
    ("schemas", &["core"]),
    ("providers", &["core", "rt", "schemas"]),
    ("client", &["core", "identity", "proto", "rt"]),
    ("agent", &["core", "identity", "proto", "rt"]),
    ("admin", &["client", "config", "core", "identity", "proto", "rt", "schemas", "store"]),
    ("operator", &["client", "core", "identity", "proto", "rt"]),
    // A Kubernetes API server and Kubernetes clients: they know nothing of ours but certificates and tasks.
    ("devk8s", &["core", "identity", "rt"]),
    ("standin", &["core", "rt"]),
    ("server", &["config", "core", "identity", "proto", "providers", "rt", "schemas", "store"]),
    ("sim", &["core", "identity", "proto", "providers", "rt", "server", "store"]),
    (
        "dev",
        &[
            "admin",
            "agent",
            "client",
            "config",
            "core",
            "devk8s",
            "identity",
            "operator",
            "proto",
            "providers",
            "rt",
            "schemas",
            "server",
            "sim",
            "standin",
            "store",
        ],
    ),
];

/// What `core`, `config` and `schemas` must build without, whatever a dependency drags in.
const HEAVY: [&str; 12] = [
    "tokio",
    "serde",
    "serde_json",
    "tonic",
    "prost",
    "hyper",
    "reqwest",
    "rusqlite",
    "object_store",
    "rustls",
    "kube",
    "mio",
];

/// What `client` must build without: command lines, HTTP servers and clients, and Kubernetes belong to its users.
const NOT_IN_CLIENT: [&str; 6] = ["kube", "clap", "axum", "reqwest", "object_store", "rusqlite"];

fn cargo(args: &[&str]) -> String {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let output = Command::new(cargo).args(args).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Of our own manifests only: what crates for other systems use need not have been fetched here.
fn metadata() -> Value {
    serde_json::from_str(&cargo(&["metadata", "--format-version", "1", "--no-deps", "--offline"])).unwrap()
}

fn room(name: &str) -> Option<&str> {
    name.strip_prefix("nstance-")
}

#[test]
fn rooms_use_only_rooms_below_them() {
    let metadata = metadata();
    let allowed: BTreeMap<&str, BTreeSet<&str>> =
        ALLOWED.iter().map(|(room, uses)| (*room, uses.iter().copied().collect())).collect();
    let mut seen = BTreeSet::new();
    for package in metadata["packages"].as_array().unwrap() {
        let Some(from) = room(package["name"].as_str().unwrap()) else { continue };
        seen.insert(from.to_owned());
        let uses = allowed.get(from).unwrap_or_else(|| panic!("room {from} is not on the list"));
        for dependency in package["dependencies"].as_array().unwrap() {
            // Tests may look further; what ships may not.
            if dependency["kind"].is_null()
                && let Some(to) = room(dependency["name"].as_str().unwrap())
            {
                assert!(uses.contains(to), "{from} uses {to}, which is not below it");
            }
        }
    }
    let listed: BTreeSet<String> = ALLOWED.iter().map(|(room, _)| (*room).to_owned()).collect();
    assert_eq!(seen, listed);
}

#[test]
fn pure_rooms_build_without_runtime_network_or_sql() {
    for pure in ["nstance-core", "nstance-config", "nstance-schemas"] {
        assert_builds_without(pure, &HEAVY);
    }
}

#[test]
fn the_simulation_builds_without_admin_agent_and_the_s3_server() {
    assert_builds_without("nstance-sim", &["nstance-admin", "nstance-agent", "nstance-client", "nstance-dev", "s3s"]);
}

#[test]
fn client_builds_without_command_line_http_and_kubernetes() {
    assert_builds_without("nstance-client", &NOT_IN_CLIENT);
}

/// Of this package alone: features that other packages enable do not count.
fn assert_builds_without(package: &str, absent: &[&str]) {
    let tree = cargo(&["tree", "-p", package, "-e", "normal", "--prefix", "none", "--locked", "--offline"]);
    let names: BTreeSet<&str> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(names.contains(package), "{tree}");
    for it in absent {
        assert!(!names.contains(it), "{package} depends on {it}");
    }
}
