//! Every kind of certificate as somebody else reads it: OpenSSL, which knows nothing of us.

use std::{
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use crate::common::{Shard, fleet::Agent, machine::Machine, operator::Operator};
use nstance_store::records::{
    self,
    certlog::{CertlogRecord, LoggedCertificate},
};
use serde_json::json;
use tempfile::TempDir;

/// Says what OpenSSL says; `None` where there is none.
fn openssl(arguments: &[&str], input: &[u8]) -> Option<(bool, String)> {
    let mut command = Command::new("openssl");
    let piped = command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match piped.spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        Err(error) => panic!("openssl: {error}"),
    };
    // A command that reads no input may be gone before it is written.
    let _ = child.stdin.take().unwrap().write_all(input);
    let output = child.wait_with_output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    Some((output.status.success(), String::from_utf8(text).unwrap()))
}

/// One certificate and all that must be true of it.
struct Case<'a> {
    what: &'a str,
    pem: Vec<u8>,
    /// As `openssl x509 -subject -nameopt RFC2253` writes it.
    subject: String,
    sans: Vec<String>,
    /// In the text of the certificate.
    has: Vec<&'a str>,
    has_not: Vec<&'a str>,
    /// What it is good for, as `openssl verify -purpose` names it, and what it is not.
    purposes: &'a [&'a str],
    no_purposes: &'a [&'a str],
    /// Its life in seconds, backdating included.
    life: i64,
    logged: LoggedCertificate,
}

const ROLE: &str = "1.3.6.1.4.1.999999.1";
const CLIENT: &str = "TLS Web Client Authentication";
const SERVER: &str = "TLS Web Server Authentication";
const BACKDATING: i64 = 300;
const DAY: i64 = 86_400;

fn check(case: &Case<'_>, ca: &Path) {
    let Case { what, pem, .. } = case;
    let (_, text) = openssl(&["x509", "-noout", "-text"], pem).unwrap();
    for wanted in &case.has {
        assert!(text.contains(wanted), "{what} lacks {wanted}:\n{text}");
    }
    for unwanted in &case.has_not {
        assert!(!text.contains(unwanted), "{what} has {unwanted}:\n{text}");
    }
    assert!(text.contains("ED25519"), "{what}: {text}");
    let (_, subject) = openssl(&["x509", "-noout", "-subject", "-nameopt", "RFC2253"], pem).unwrap();
    assert_eq!(subject.trim(), format!("subject={}", case.subject), "{what}");
    let (_, sans) = openssl(&["x509", "-noout", "-ext", "subjectAltName"], pem).unwrap();
    let mut sans: Vec<String> = match sans.lines().nth(1) {
        Some(line) if sans.contains("Alternative Name") => line.split(',').map(|it| it.trim().to_owned()).collect(),
        _ => Vec::new(),
    };
    sans.sort();
    let mut expected = case.sans.clone();
    expected.sort();
    assert_eq!(sans, expected, "{what}");

    let (_, serial) = openssl(&["x509", "-noout", "-serial"], pem).unwrap();
    let digits = serial.trim().strip_prefix("serial=").unwrap().to_ascii_lowercase();
    assert_eq!(format!("{digits:0>32}"), case.logged.serial, "{what}: the serial in the log is the real one");
    assert_eq!(case.logged.serial.len(), 32, "{what}");
    let (_, dates) = openssl(&["x509", "-noout", "-dates", "-dateopt", "iso_8601"], pem).unwrap();
    let date = |name: &str| {
        let line = dates.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{what}: {dates}"));
        line.trim().replace(' ', "T").parse::<nstance_core::time::Timestamp>().unwrap().as_millis() / 1000
    };
    let (from, until) = (date("notBefore="), date("notAfter="));
    assert_eq!(until - from, case.life, "{what}: {dates}");
    assert_eq!(from, case.logged.not_before.as_millis() / 1000, "{what}");
    assert_eq!(until, case.logged.not_after.as_millis() / 1000, "{what}");

    let ca = ca.to_str().unwrap();
    let verify = |purpose: &str| openssl(&["verify", "-CAfile", ca, "-x509_strict", "-purpose", purpose], pem).unwrap();
    for purpose in case.purposes {
        let (ok, said) = verify(purpose);
        assert!(ok, "{what} as {purpose}: {said}");
    }
    for purpose in case.no_purposes {
        let (ok, said) = verify(purpose);
        assert!(!ok, "{what} passes as {purpose}: {said}");
    }
}

fn certificates(config: &mut serde_json::Value) {
    let common =
        json!({ "cn": "node {{ .Instance.ID }}", "organization": ["system:nodes"], "country": ["DE"], "ttl": "30d" });
    let of = |kind: &str, more: serde_json::Value| {
        let mut it = common.clone();
        it["kind"] = kind.into();
        it.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        it
    };
    let names = json!({
        "dns": ["{{ .Instance.Hostname }}.example.net"], "ip": ["{{ .Instance.IP4 }}", "2001:db8::1"],
        "uri": ["spiffe://demo/{{ .Instance.Group }}"],
    });
    config["certificates"] = json!({
        "client": of("client", json!({})), "server": of("server", names), "peer": of("peer", json!({})),
    });
    config["templates"]["knc"]["files"] = json!({
        "client.crt": { "kind": "certificate", "template": "client" },
        "server.crt": { "kind": "certificate", "template": "server" },
        "peer.crt": { "kind": "certificate", "template": "peer" },
    });
}

/// The certificate that the agent port shows.
async fn shown_by_the_server(shard: &Shard) -> Vec<u8> {
    let address = shard.leader.advertised.registration.clone();
    let shown = tokio::task::spawn_blocking(move || {
        openssl(&["s_client", "-connect", &address, "-servername", "nstance-server", "-showcerts"], b"").unwrap().1
    });
    let shown = shown.await.unwrap();
    let (begin, end) = ("-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----\n");
    let from = shown.find(begin).unwrap_or_else(|| panic!("no certificate in {shown}"));
    let until = from + shown[from..].find(end).unwrap() + end.len();
    shown.as_bytes()[from..until].to_vec()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn openssl_agrees_about_every_kind_of_certificate() {
    if openssl(&["version"], b"").is_none() {
        eprintln!("skipped: openssl is not installed here");
        return;
    }
    let shard = Shard::start_with(1, certificates).await;
    let id = shard.only_vm().await;
    let operator = Operator::on(&shard).await;
    let agent = Agent::register(&shard, id).await;
    let chain = agent.chain.clone();
    let mut machine = Machine::on(agent, &shard.leader, "none").await;
    machine.make_keys().await;
    while !["client.crt", "server.crt", "peer.crt"].iter().all(|name| machine.disk.contains_key(*name)) {
        machine.apply().await;
    }
    let bundle = shard.site.bundle().await.pem().as_bytes().to_vec();
    let dir = TempDir::new().unwrap();
    let ca = dir.path().join("ca.crt");
    std::fs::write(&ca, &bundle).unwrap();

    let log = shard.site.certlog().await;
    let logged = |subject: &str, name: &str| {
        let mut entries = log.iter().filter(|it| it.subject_id == subject).flat_map(|it| &it.certificates);
        entries.rfind(|it| it.name == name).unwrap_or_else(|| panic!("{subject} {name}: {log:?}")).clone()
    };
    let (instance, opr) = (id.to_string(), operator.id.to_string());
    let ca_log = {
        let listed = shard.site.bucket.list("cluster/certlog/").await.unwrap();
        let object = shard.site.bucket.get(&listed[0].key).await.unwrap();
        records::decode_object::<CertlogRecord>(&listed[0].key, object).unwrap().value.certificates[0].clone()
    };
    let leaf = ["CA:FALSE", "Digital Signature", "Subject Key Identifier", "Authority Key Identifier"];
    let with = |more: &[&'static str]| [&leaf[..], more].concat();
    let file = |name: &'static str, has: &[&'static str], has_not: &[&'static str], sans: Vec<String>| Case {
        what: name,
        pem: machine.disk[name].clone(),
        subject: format!("CN=node {instance},O=system:nodes,C=DE"),
        sans,
        has: with(has),
        has_not: [&[ROLE][..], has_not].concat(),
        purposes: match name {
            "client.crt" => &["sslclient"],
            "server.crt" => &["sslserver"],
            _ => &["sslclient", "sslserver"],
        },
        no_purposes: match name {
            "client.crt" => &["sslserver"],
            "server.crt" => &["sslclient"],
            _ => &[],
        },
        life: 30 * DAY + BACKDATING,
        logged: logged(&instance, name),
    };
    let client = |what, pem: &[u8], subject: &str| Case {
        what,
        pem: pem.to_vec(),
        subject: format!("CN={subject},O=default"),
        sans: vec![],
        has: with(&[CLIENT, ROLE]),
        has_not: vec![SERVER],
        purposes: &["sslclient"],
        no_purposes: &["sslserver"],
        life: DAY + BACKDATING,
        logged: logged(subject, what),
    };
    let server = shown_by_the_server(&shard).await;
    let own = nstance_server::wiring::primary_address().to_string();
    let mut server_sans: Vec<String> =
        ["DNS:nstance-server", "DNS:localhost", "IP Address:127.0.0.1", "IP Address:0:0:0:0:0:0:0:1"]
            .map(str::to_owned)
            .to_vec();
    server_sans.push(format!("IP Address:{own}"));
    server_sans.sort();
    server_sans.dedup();
    let cases = [
        Case {
            what: "ca",
            pem: bundle.clone(),
            subject: "CN=Nstance CA,O=demo".to_owned(),
            sans: vec![],
            has: vec!["CA:TRUE, pathlen:0", "Certificate Sign, CRL Sign", "Subject Key Identifier"],
            has_not: vec![ROLE, CLIENT, SERVER],
            purposes: &["any"],
            no_purposes: &[],
            life: 3650 * DAY + 3600,
            logged: ca_log,
        },
        Case {
            what: "server",
            pem: server,
            subject: "CN=srv-1,OU=s1,O=demo".to_owned(),
            sans: server_sans,
            has: with(&[CLIENT, SERVER, ROLE]),
            has_not: vec![],
            purposes: &["sslserver", "sslclient"],
            no_purposes: &[],
            life: 7 * DAY + BACKDATING,
            logged: logged("srv-1", "server"),
        },
        client("agent", &chain, &instance),
        client("operator", &operator.chain, &opr),
        file("client.crt", &[CLIENT], &[SERVER], vec![]),
        file(
            "server.crt",
            &[SERVER],
            &[CLIENT],
            vec![
                "DNS:node-1.example.net".to_owned(),
                "IP Address:10.1.2.3".to_owned(),
                "IP Address:2001:DB8:0:0:0:0:0:1".to_owned(),
                "URI:spiffe://demo/web".to_owned(),
            ],
        ),
        file("peer.crt", &[CLIENT, SERVER], &[], vec![]),
    ];
    for case in &cases {
        check(case, &ca);
    }
    let role = |pem: &[u8]| openssl(&["asn1parse"], pem).unwrap().1;
    for (pem, word) in [(&chain, "agent"), (&operator.chain, "operator")] {
        // The value of the extension, in hex: a UTF8String.
        let hex =
            data_encoding::HEXUPPER.encode(&[&[0x0c, u8::try_from(word.len()).unwrap()], word.as_bytes()].concat());
        assert!(role(pem).contains(&hex), "{word}");
    }
}
