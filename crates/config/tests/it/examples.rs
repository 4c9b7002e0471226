//! The configs of the documentation: they parse, render in full, and hash as documented.

use expect_test::{Expect, expect};
use nstance_config::{
    Checks, Config, MergedGroup, load,
    model::FileSpec,
    render::{InstanceData, RenderData, render_args, render_certificate, render_file, render_userdata},
};
use nstance_core::ids::GroupRef;

const AWS: &str = include_str!("../../../../examples/config-aws.jsonc");
const TMUX: &str = include_str!("../../../../examples/config-tmux.jsonc");

fn config(text: &str) -> Config {
    let loaded = load("example", text.as_bytes(), &Checks::offline(nstance_schemas::ALL));
    assert!(loaded.report.problems.is_empty(), "{}", loaded.report.text());
    loaded.config.expect("a report without problems comes with a config")
}

fn group(config: &Config, tenant: &str, group: &str) -> MergedGroup {
    let valid = "the names in these tests are valid";
    let group = GroupRef::new(tenant.parse().expect(valid), group.parse().expect(valid));
    config.group(&group, None).expect("the examples have no problems")
}

fn data(config: &Config, group: &MergedGroup) -> RenderData {
    let mut data = RenderData::for_group(config, group);
    data.ca_cert = "-----CA-----".to_owned();
    data.nonce = "header.claims.signature".to_owned();
    data.images.insert("debian_13_arm64".to_owned(), "ami-0123".to_owned());
    data.instance = InstanceData {
        id: format!("{}06bgm7733st2576nx5jht4ecjw", group.kind),
        subnet_id: group.subnets[0].clone(),
        hostname: "ip-10-0-0-7".to_owned(),
        ip4: "10.0.0.7".to_owned(),
        ..data.instance
    };
    data
}

/// Everything an instance of the group would get.
fn check(config: &Config, group: &MergedGroup, expected: Expect) {
    let data = data(config, group);
    let mut out = format!("args: {:?}\n", render_args(group, &data).expect("args render"));
    if let Some(userdata) = render_userdata(group, &data).expect("userdata renders") {
        out.push_str(&format!("--- userdata\n{userdata}"));
    }
    for (name, file) in &group.files {
        match file {
            FileSpec::Env { .. } | FileSpec::Json { .. } | FileSpec::String { .. } => {
                let bytes = render_file(group, name, &data).expect("files render");
                out.push_str(&format!("--- {name}\n{}", String::from_utf8_lossy(&bytes)));
            }
            FileSpec::Certificate { template, key } => {
                let certificate =
                    render_certificate(&group.certificates[template], &data).expect("certificates render");
                let (cn, dns, ip) = (&certificate.cn, &certificate.dns, &certificate.ip);
                out.push_str(&format!(
                    "--- {name}\nkey {key}, cn {cn}, dns {dns:?}, ip {ip:?}, {:?}\n",
                    certificate.ttl
                ));
            }
            other => out.push_str(&format!("--- {name}\n{other:?}\n")),
        }
    }
    out.push_str(&format!("--- infra {}\n", group.infra_hash()));
    out.push_str(&format!("--- runtime {}\n", group.runtime_hash(Some(b"bundle"))));
    expected.assert_eq(&out);
}

#[test]
fn every_example_in_the_documents_parses() {
    assert_eq!(config(AWS).groups.len(), 3);
    assert_eq!(config(TMUX).groups.len(), 1);
}

#[test]
fn the_documented_hashes_come_out() {
    let group = group(&config(TMUX), "default", "test");
    assert_eq!(group.infra_hash(), "sha256:904571ba3668fe7f61ffdc517d79c4f028d260b385ea83cdb78ea0cd59c6fd64");
    assert_eq!(group.runtime_hash(None), "sha256:0da6650b277dfd398f7719e98bc23c3550682b1cba5d810f6ad40a0e9cbb4924");
}

#[test]
fn a_flat_and_a_nested_group_of_the_default_tenant_are_the_same() {
    let config = config(AWS);
    let names: Vec<String> = config.groups.keys().map(ToString::to_string).collect();
    assert_eq!(names, ["default/control-plane", "default/ingress", "staging/apps"]);
    let ingress = group(&config, "default", "ingress");
    assert_eq!((ingress.size, ingress.subnet_pool.as_str()), (2, "ingress"));
    assert_eq!(ingress.drain_timeout.as_secs(), 600);
}

#[test]
fn advertised_addresses_follow_the_leader_network() {
    let advertise = config(AWS).server.advertise;
    assert_eq!(advertise.agent.to_string(), "10.0.0.100:8994");
    assert_eq!(advertise.registration.to_string(), "10.0.0.100:8992");
    assert_eq!((advertise.health.host.as_str(), advertise.health.port), ("", 8990));
}

#[test]
fn the_control_plane_of_the_aws_example_renders() {
    let config = config(AWS);
    check(
        &config,
        &group(&config, "default", "control-plane"),
        expect![[r#"
        args: {"MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}, "IamInstanceProfile": {"Name": "nstance-agent"}, "ImageId": "ami-0123", "SecurityGroupIds": ["sg-0aaa000000000001"]}
        --- userdata
        #!/bin/sh
        set -eu; umask 077; systemctl stop nstance-agent || :; d=/opt/nstance-agent; mkdir -p $d/identity /etc/nstance
        printf %s 'header.claims.signature' > $d/identity/nonce.jwt
        cat > $d/identity/ca.crt <<'PEM'
        -----CA-----
        PEM
        cat > /etc/nstance/agent.env <<'ENV'
        NSTANCE_INSTANCE_ID=knc06bgm7733st2576nx5jht4ecjw
        NSTANCE_SERVER_REGISTRATION_ADDR=10.0.0.100:8992
        NSTANCE_SERVER_AGENT_ADDR=10.0.0.100:8994
        ENV
        chown -R nstance-agent $d
        systemctl enable --now nstance-agent
        --- kubelet.client.crt
        key kubelet.client, cn system:node:knc06bgm7733st2576nx5jht4ecjw, dns [], ip [], 2592000s
        --- node.env
        CLUSTER_FQDN=example-cluster.example.net
        NODE_LABELS=role=control-plane
        --- tunnel.json
        Secret { source: "tunnel-2026.json" }
        --- infra sha256:5470b4de53c0858509383a0215797a6d093eb34b8adaaab303a9e8b64651b89f
        --- runtime sha256:b7727069181aad477e383b5a331f24c6178e929475595ec6c51420a4c5989de3
    "#]],
    );
}

#[test]
fn the_workers_of_the_aws_example_render() {
    let config = config(AWS);
    check(
        &config,
        &group(&config, "staging", "apps"),
        expect![[r#"
        args: {"MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}, "IamInstanceProfile": {"Name": "nstance-agent"}, "ImageId": "ami-0123", "SecurityGroupIds": ["sg-0bbb000000000001"], "InstanceMarketOptions": {"MarketType": "spot"}}
        --- userdata
        #!/bin/sh
        set -eu; umask 077; systemctl stop nstance-agent || :; d=/opt/nstance-agent; mkdir -p $d/identity /etc/nstance
        printf %s 'header.claims.signature' > $d/identity/nonce.jwt
        cat > $d/identity/ca.crt <<'PEM'
        -----CA-----
        PEM
        cat > /etc/nstance/agent.env <<'ENV'
        NSTANCE_INSTANCE_ID=knd06bgm7733st2576nx5jht4ecjw
        NSTANCE_SERVER_REGISTRATION_ADDR=10.0.0.100:8992
        NSTANCE_SERVER_AGENT_ADDR=10.0.0.100:8994
        ENV
        chown -R nstance-agent $d
        systemctl enable --now nstance-agent
        --- bootstrap.sh
        Storage { source: "files/bootstrap.sh" }
        --- kubelet-config.json
        {
          "kind": "KubeletConfiguration",
          "address": "10.0.0.7",
          "port": 10250
        }
        --- kubelet.server.crt
        key kubelet.server, cn kubelet, dns ["localhost", "knd06bgm7733st2576nx5jht4ecjw", "ip-10-0-0-7"], ip [127.0.0.1, 10.0.0.7], 2592000s
        --- motd
        nstance knd06bgm7733st2576nx5jht4ecjw
        --- infra sha256:b03b993faa87d8e8dd03c6c7e88bb7cbe6c0ce979b4587f16faad8aac74d6a87
        --- runtime sha256:980ff4ed4bec287bce96d0b0f9832369840954b5e7d00f4ffe22610852f246ae
    "#]],
    );
}

#[test]
fn the_development_example_renders() {
    let config = config(TMUX);
    check(
        &config,
        &group(&config, "default", "test"),
        expect![[r#"
        args: {}
        --- demo.crt
        key demo, cn tst06bgm7733st2576nx5jht4ecjw, dns ["localhost", "ip-10-0-0-7"], ip [], 86400s
        --- instance.env
        GREETING=hello
        INSTANCE_ID=tst06bgm7733st2576nx5jht4ecjw
        --- infra sha256:904571ba3668fe7f61ffdc517d79c4f028d260b385ea83cdb78ea0cd59c6fd64
        --- runtime sha256:a6eb9ac12737317fb99763395e436c06485b4299c3c2d79bd18da8a45ce674bc
    "#]],
    );
}

#[test]
fn hashes_move_with_what_they_cover_and_with_nothing_else() {
    let base = group(&config(TMUX), "default", "test");
    let changed = |from: &str, to: &str| {
        let text = TMUX.replacen(from, to, 1);
        assert_ne!(text, TMUX, "{from}");
        let other = group(&config(&text), "default", "test");
        (other.infra_hash() != base.infra_hash(), other.runtime_hash(None) != base.runtime_hash(None))
    };
    assert_eq!(
        changed("\"size\": 2", "\"size\": 3, \"drain_timeout\": \"9s\", \"rollout_paused\": true"),
        (false, false)
    );
    assert_eq!(changed("\"arch\": \"amd64\"", "\"arch\": \"arm64\""), (true, false));
    assert_eq!(
        changed("\"arch\": \"amd64\"", "\"arch\": \"amd64\", \"instance_type_fallbacks\": [\"x\"]"),
        (false, false)
    );
    assert_eq!(changed("\"arch\": \"amd64\"", "\"arch\": \"amd64\", \"instance_type\": \"x\""), (true, false));
    assert_eq!(
        changed("\"arch\": \"amd64\"", "\"arch\": \"amd64\", \"userdata\": { \"content\": \"x\" }"),
        (true, false)
    );
    assert_eq!(changed("\"Greeting\": \"hello\"", "\"Greeting\": \"hi\""), (false, true));
    assert_eq!(changed("\"ttl\": 24", "\"ttl\": \"25h\""), (false, true));
    assert_eq!(changed("\"ttl\": 24", "\"ttl\": \"1d\""), (false, false));
    assert_ne!(base.runtime_hash(None), base.runtime_hash(Some(b"")));
    assert_ne!(base.runtime_hash(Some(b"a")), base.runtime_hash(Some(b"b")));
}
