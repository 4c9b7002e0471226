//! Every setting is read: each changes what comes out of a load.

use std::collections::BTreeSet;

use nstance_config::{Checks, Config, load};
use nstance_schemas::ANY;

/// A config with holes in each block.
fn text(server: &str, rest: &str, template: &str, group: &str) -> String {
    format!(
        r#"{{
  "server": {{ "cluster_id": "c", "shard": "s", "provider": {{ "kind": "fake", "region": "r", "zone": "z" }},
    "subnet_pools": {{ "one": ["a"], "two": ["b"] }}, "secrets": {{ "provider": "memory" }}{server} }},
  {rest}
  "templates": {{ "tst": {{ "kind": "tst", "arch": "amd64", "subnet_pool": "one"{template} }} }},
  "groups": {{ "web": {{ "template": "tst"{group} }} }}
}}"#
    )
}

fn seen(text: &str) -> String {
    let loaded = load("settings", text.as_bytes(), &Checks::offline(ANY));
    let config: Config = loaded.config.unwrap_or_else(|| panic!("{text}\n{}", loaded.report.text()));
    format!(
        "{:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?}",
        config.server,
        config.tenants,
        config.images,
        config.certificates,
        config.load_balancers,
        config.defaults,
        config.templates,
        config.groups
    )
}

#[test]
fn every_setting_has_an_effect() {
    let mut all = BTreeSet::from([seen(&text("", "", "", ""))]);
    let mut expect_new = |text: String| assert!(all.insert(seen(&text)), "no effect: {text}");
    for server in [
        r#""dynamic_subnet_pools": ["two"]"#,
        r#""bind": { "health_addr": "127.0.0.1:1" }"#,
        r#""bind": { "election_addr": "127.0.0.1:1" }"#,
        r#""bind": { "registration_addr": "127.0.0.1:1" }"#,
        r#""bind": { "operator_addr": "127.0.0.1:1" }"#,
        r#""bind": { "agent_addr": "[::1]:0" }"#,
        r#""advertise": { "health_addr": "h:1" }"#,
        r#""advertise": { "election_addr": "h:1" }"#,
        r#""advertise": { "registration_addr": "h:1" }"#,
        r#""advertise": { "operator_addr": "h:1" }"#,
        r#""advertise": { "agent_addr": "h:1" }"#,
        r#""advertise": { "extra_sans": ["h"] }"#,
        r#""leader_network": { "ip": "10.0.0.1" }"#,
        r#""leader_election": { "ttl": "7s" }"#,
        r#""leader_election": { "renew_interval": "1s" }"#,
        r#""leader_election": { "margin": "500ms" }"#,
        r#""garbage_collection": { "interval": "1m" }"#,
        r#""garbage_collection": { "registration_timeout": "6m" }"#,
        r#""garbage_collection": { "deleted_record_retention": "1m" }"#,
        r#""expiry": { "eligible_age": "1d" }"#,
        r#""expiry": { "forced_age": "1d" }"#,
        r#""expiry": { "ondemand_age": "1d" }"#,
        r#""create_rate_limit": 0"#,
        r#""create_burst": 1"#,
        r#""max_parallel_creates": 1"#,
        r#""health_check_interval": "1s""#,
        r#""shutdown_grace": "1s""#,
        r#""default_drain_timeout": "1s""#,
        r#""image_refresh_interval": "1s""#,
        r#""request_timeout": "1s""#,
        r#""shutdown_timeout": "1s""#,
        r#""error_exit_jitter": { "min_delay": 0 }"#,
        r#""error_exit_jitter": { "max_delay": "1m" }"#,
        r#""safety": { "mass_disconnect_min": 1 }"#,
        r#""safety": { "mass_disconnect_percent": 1 }"#,
        r#""safety": { "mass_disconnect_window": "1s" }"#,
        r#""safety": { "runaway_base": 1 }"#,
        r#""safety": { "runaway_factor": 1 }"#,
        r#""safety": { "runaway_window": "1s" }"#,
        r#""safety": { "max_removal_min": 1 }"#,
        r#""safety": { "max_removal_percent": 1 }"#,
    ] {
        expect_new(text(&format!(", {server}"), "", "", ""));
    }
    for rest in [
        r#""tenants": { "t": {} }"#,
        r#""images": { "i": { "provider": "fake", "filters": [{ "name": "n", "values": ["v"] }] } }"#,
        r#""images": { "i": { "provider": "fake", "filters": [{ "name": "m", "values": ["v"] }] } }"#,
        r#""images": { "i": { "provider": "fake", "filters": [{ "name": "n", "values": ["w"] }] } }"#,
        r#""images": { "i": { "provider": "fake", "filters": [{ "name": "n", "values": ["v"] }], "owners": ["o"] } }"#,
        r#""images": { "i": { "provider": "fake", "filters": [{ "name": "n", "values": ["v"] }], "sort": "name" } }"#,
        r#""images": { "i": { "provider": "fake", "filters": [{ "name": "n", "values": ["v"] }], "order": "asc" } }"#,
        r#""images": { "i": { "provider": "fake", "filters": [{ "name": "n", "values": ["v"] }], "fallback": "f" } }"#,
        r#""certificates": { "agent": { "ttl": "1h" } }"#,
        r#""certificates": { "operator": { "ttl": "1h" } }"#,
        r#""certificates": { "ca": { "ttl": "30d" } }"#,
        r#""certificates": { "ca": { "cn": "x" } }"#,
        r#""certificates": { "ca": { "organization": ["x"] } }"#,
        r#""certificates": { "c": { "kind": "server", "cn": "x" } }"#,
        r#""certificates": { "c": { "kind": "client", "cn": "x" } }"#,
        r#""certificates": { "c": { "kind": "peer", "cn": "x" } }"#,
        r#""certificates": { "c": { "kind": "server", "cn": "y" } }"#,
        r#""certificates": { "c": { "kind": "server", "cn": "x", "ttl": "5s" } }"#,
        r#""certificates": { "c": { "kind": "server", "cn": "x", "organization": ["x"] } }"#,
        r#""certificates": { "c": { "kind": "server", "cn": "x", "dns": ["x"] } }"#,
        r#""certificates": { "c": { "kind": "server", "cn": "x", "ip": ["x"] } }"#,
        r#""certificates": { "c": { "kind": "server", "cn": "x", "uri": ["x"] } }"#,
        r#""certificates": { "c": { "kind": "server", "cn": "x", "country": ["x"] } }"#,
        r#""certificates": { "c": { "kind": "server", "cn": "x", "province": ["x"] } }"#,
        r#""certificates": { "c": { "kind": "server", "cn": "x", "locality": ["x"] } }"#,
        r#""certificates": { "c": { "kind": "server", "cn": "x", "street": ["x"] } }"#,
        r#""certificates": { "c": { "kind": "server", "cn": "x", "postal_code": ["x"] } }"#,
        r#""load_balancers": { "l": {} }"#,
        r#""defaults": { "args": { "A": 1 } }"#,
        r#""defaults": { "vars": { "A": "1" } }"#,
        r#""defaults": { "userdata": { "content": "x" } }"#,
        r#""defaults": { "userdata": { "content": "eA==", "encoding": "base64" } }"#,
        r#""defaults": { "userdata": { "templateUrl": "https://x/" } }"#,
        r#""defaults": { "userdata": { "source": "url", "content": "https://x/", "encoding": "gzip" } }"#,
    ] {
        expect_new(text("", &format!("{rest},"), "", ""));
    }
    let sha256 = "0".repeat(64);
    expect_new(text(
        "",
        &format!(r#""defaults": {{ "userdata": {{ "templateUrl": "https://x/", "sha256": "{sha256}" }} }},"#),
        "",
        "",
    ));
    for template in [
        r#""instance_type": "x""#,
        r#""instance_type_fallbacks": ["x"]"#,
        r#""size": 2"#,
        r#""args": { "A": 1 }"#,
        r#""vars": { "A": "1" }"#,
        r#""userdata": { "templateString": "x" }"#,
        r#""trust_agent_addresses": false"#,
        r#""files": { "f": { "kind": "secret", "source": "x" } }"#,
        r#""files": { "f": { "kind": "storage", "source": "x" } }"#,
        r#""files": { "f": { "kind": "env", "template": { "A": "x" } } }"#,
        r#""files": { "f": { "kind": "json", "template": [null] } }"#,
        r#""files": { "f": { "kind": "string", "template": "x" } }"#,
    ] {
        expect_new(text("", "", &format!(", {template}"), ""));
    }
    let certificate = r#""certificates": { "c": { "kind": "server", "cn": "x" } },"#;
    for key in
        ["", r#", "key": { "source": "agent", "name": "k.pub" }"#, r#", "key": { "from": "agent", "name": "l" }"#]
    {
        let file = format!(r#", "files": {{ "f.crt": {{ "kind": "certificate", "template": "c"{key} }} }}"#);
        expect_new(text("", certificate, &file, ""));
    }
    for group in [
        r#""size": 0"#,
        r#""instance_type": "x""#,
        r#""instance_type_fallbacks": []"#,
        r#""subnet_pool": "two""#,
        r#""vars": { "A": "1" }"#,
        r#""drain_timeout": 0"#,
        r#""rollout_paused": true"#,
        r#""args": { "A": null }"#,
    ] {
        expect_new(text("", "", "", &format!(", {group}")));
    }
    expect_new(text("", r#""load_balancers": { "l": {} },"#, "", r#", "load_balancers": ["l"]"#));
}

#[test]
fn settings_of_stores_and_keys_have_an_effect() {
    let mut all = BTreeSet::new();
    for secrets in [
        r#""encryption_key": { "provider": "env" }"#,
        r#""encryption_key": { "provider": "env", "source": "X" }"#,
        r#""encryption_key": { "provider": "file", "source": "/x" }"#,
        r#""encryption_key": { "provider": "google-secret-manager", "source": "x" }"#,
        r#""encryption_key": { "provider": "google-secret-manager", "source": "x", "options": { "project_id": "p" } }"#,
        r#""encryption_key": { "provider": "env" }, "old_encryption_keys": [{ "provider": "file", "source": "/y" }]"#,
        r#""encryption_key": { "provider": "env" }, "cache_ttl": 0"#,
        r#""encryption_key": { "provider": "env" }, "prefix": "p/""#,
        r#""provider": "aws-secrets-manager""#,
        r#""provider": "aws-parameter-store""#,
        r#""provider": "google-secret-manager""#,
        r#""provider": "memory""#,
    ] {
        let text = text("", "", "", "").replace(r#""provider": "memory""#, secrets);
        assert!(all.insert(seen(&text)), "no effect: {secrets}");
    }
}

#[test]
fn null_is_absent_but_for_args_and_json_files() {
    let plain = seen(&text("", "", "", ""));
    for (server, template, group) in [
        (r#", "bind": null, "expiry": { "forced_age": null }"#, "", ""),
        ("", r#", "instance_type": null, "files": { "x": null }, "vars": { "A": null }"#, ""),
        ("", "", r#", "size": null"#),
    ] {
        assert_eq!(seen(&text(server, "", template, group)), plain);
    }
    assert_ne!(seen(&text("", "", r#", "args": { "A": null }"#, "")), plain);
}
