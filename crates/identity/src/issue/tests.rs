use std::{collections::BTreeSet, fs};

use x509_parser::{extensions::GeneralName, prelude::X509Certificate};

use super::*;
use crate::{
    peer::Peer,
    testing::{DAY, Dice, Fixture, NOW, openssl, tenant},
};

fn der_of(issued: &Issued) -> Vec<u8> {
    pem::certificates(issued.chain_pem.as_bytes()).unwrap()[0].to_vec()
}

fn parsed(der: &[u8]) -> X509Certificate<'_> {
    let (rest, parsed) = x509_parser::parse_x509_certificate(der).unwrap();
    assert!(rest.is_empty());
    parsed
}

/// What holds for every leaf.
fn check_leaf(fixture: &Fixture, issued: &Issued, server: bool, client: bool) {
    let der = der_of(issued);
    let leaf = parsed(&der);
    let constraints = leaf.basic_constraints().unwrap().unwrap();
    assert!(constraints.critical && !constraints.value.ca);
    let usage = leaf.key_usage().unwrap().unwrap();
    assert!(usage.critical && usage.value.digital_signature() && !usage.value.key_cert_sign());
    let purposes = leaf.extended_key_usage().unwrap().unwrap();
    assert_eq!((purposes.value.server_auth, purposes.value.client_auth), (server, client));
    assert!(!purposes.critical);
    assert_eq!(issued.not_before, NOW.minus(BACKDATING));
    assert_eq!(from_asn1(leaf.validity().not_before), issued.not_before);
    assert_eq!(from_asn1(leaf.validity().not_after), issued.not_after);
    assert_eq!(
        HEXLOWER.encode(&leaf.serial.to_bytes_be()).trim_start_matches('0'),
        issued.serial.trim_start_matches('0')
    );
    assert_eq!(issued.sha256_der_hex, HEXLOWER.encode(digest(&SHA256, &der).as_ref()));
    assert_eq!(issued.issuer_fingerprint, fixture.ca.fingerprint());
    let ids: Vec<_> = leaf
        .extensions()
        .iter()
        .filter_map(|it| match it.parsed_extension() {
            x509_parser::extensions::ParsedExtension::SubjectKeyIdentifier(id) => Some(id.0.to_vec()),
            x509_parser::extensions::ParsedExtension::AuthorityKeyIdentifier(id) => {
                Some(id.key_identifier.as_ref().unwrap().0.to_vec())
            }
            _ => None,
        })
        .collect();
    assert_eq!(ids, [key_id(&fixture.public()), fixture.ca.bundle().issuer().key_id.clone()]);
}

#[test]
fn every_leaf_follows_its_profile() {
    let fixture = Fixture::new();
    check_leaf(&fixture, &fixture.server(), true, true);
    check_leaf(&fixture, &fixture.agent(), false, true);
    check_leaf(&fixture, &fixture.operator(), false, true);
    check_leaf(&fixture, &fixture.file(FileUsage::Client), false, true);
    check_leaf(&fixture, &fixture.file(FileUsage::Server), true, false);
    check_leaf(&fixture, &fixture.file(FileUsage::Peer), true, true);
}

#[test]
fn subjects_and_names_are_those_of_the_profile() {
    let fixture = Fixture::new();
    let server = fixture.server();
    assert_eq!(server.subject, "CN=srv-1, OU=s1, O=demo");
    assert_eq!(server.sans.join(" "), "DNS:nstance-server DNS:localhost IP:127.0.0.1 IP:::1 DNS:nstance.example.com");
    assert_eq!(server.not_after, NOW.plus(SERVER_TTL));
    let der = der_of(&server);
    assert_eq!(parsed(&der).subject_alternative_name().unwrap().unwrap().value.general_names.len(), 5);

    let agent = fixture.agent();
    assert_eq!(agent.subject, "CN=knc06bgm7733st2576nx5jht4ecjw, O=default");
    assert!(agent.sans.is_empty());
    assert!(parsed(&der_of(&agent)).subject_alternative_name().unwrap().is_none());
    assert_eq!(agent.not_after, NOW.plus(DAY));

    assert_eq!(fixture.operator().subject, "CN=opr06bgm7733st2576nx5jht4ecjw, O=default");

    let file = fixture.file(FileUsage::Peer);
    let der = der_of(&file);
    let leaf = parsed(&der);
    let organizations: Vec<_> = leaf.subject().iter_organization().map(|it| it.as_str().unwrap()).collect();
    assert_eq!(organizations, ["system:nodes", "demo"]);
    let names = leaf.subject_alternative_name().unwrap().unwrap().value;
    assert!(names.general_names.contains(&GeneralName::URI("spiffe://demo/web")));
    assert!(names.general_names.contains(&GeneralName::IPAddress(&[127, 0, 0, 1])));
}

#[test]
fn openssl_reads_and_verifies_what_we_issue() {
    let fixture = Fixture::new();
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("ca.crt"), fixture.ca.bundle_pem()).unwrap();
    let at = (NOW.as_millis() / 1000).to_string();
    for (issued, purpose, shows) in [
        (fixture.server(), "sslserver", "DNS:nstance-server, DNS:localhost, IP Address:127.0.0.1"),
        (fixture.server(), "sslclient", "OU = s1"),
        (fixture.agent(), "sslclient", "O = default, CN = knc06bgm7733st2576nx5jht4ecjw"),
        (fixture.operator(), "sslclient", "1.3.6.1.4.1.999999.1"),
        (fixture.file(FileUsage::Peer), "sslserver", "URI:spiffe://demo/web"),
        (fixture.file(FileUsage::Server), "sslserver", "TLS Web Server Authentication"),
    ] {
        let Some(text) = openssl(&["x509", "-noout", "-text"], issued.chain_pem.as_bytes()) else { return };
        assert!(text.contains(shows), "{text}");
        assert!(text.contains("CA:FALSE") && text.contains("X509v3 Authority Key Identifier"), "{text}");
        fs::write(path("leaf.crt"), &issued.chain_pem).unwrap();
        let arguments = [
            "verify",
            "-x509_strict",
            "-attime",
            &at,
            "-purpose",
            purpose,
            "-CAfile",
            &path("ca.crt"),
            &path("leaf.crt"),
        ];
        assert!(openssl(&arguments, b"").unwrap().contains("OK"));
    }
}

#[test]
fn openssl_finds_the_right_one_of_two_cas_with_one_name() {
    let (old, new) = (Fixture::seeded(1), Fixture::seeded(2));
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("ca.crt"), [old.ca.bundle_pem(), new.ca.bundle_pem()].concat()).unwrap();
    let at = (NOW.as_millis() / 1000).to_string();
    for fixture in [old, new] {
        fs::write(path("leaf.crt"), fixture.agent_chain()).unwrap();
        let arguments = ["verify", "-attime", &at, "-CAfile", &path("ca.crt"), &path("leaf.crt")];
        let Some(answer) = openssl(&arguments, b"") else { return };
        assert!(answer.contains("OK"));
    }
}

#[test]
fn serials_are_random_and_backdated() {
    let fixture = Fixture::new();
    let serials: BTreeSet<_> = (0..200).map(|_| fixture.agent().serial).collect();
    assert_eq!(serials.len(), 200);
    for serial in &serials {
        assert_eq!(serial.len(), 32);
        assert!(serial.as_bytes()[0] < b'8', "{serial}");
    }
    assert_eq!(fixture.agent().not_before, NOW.minus(Duration::from_secs(300)));

    struct Zeros;
    impl Entropy for Zeros {
        fn fill(&self, bytes: &mut [u8]) {
            bytes.fill(0);
        }
    }
    assert_eq!(HEXLOWER.encode(&new_serial(&Zeros)), format!("{}1", "0".repeat(31)));
}

#[test]
fn short_serials_are_still_read_as_32_digits() {
    let fixture = Fixture::new();
    struct Ends;
    impl Entropy for Ends {
        fn fill(&self, bytes: &mut [u8]) {
            bytes.fill(0);
            bytes[15] = 0x80;
        }
    }
    let issued =
        fixture.ca.issue_agent(&crate::testing::instance(), &tenant(), &fixture.public(), NOW, DAY, &Ends).unwrap();
    assert_eq!(Peer::from_der(&der_of(&issued)).unwrap().serial, issued.serial);
    assert_eq!(issued.serial, format!("{}80", "0".repeat(30)));
}

#[test]
fn nothing_outlives_the_ca() {
    let fixture = Fixture::new();
    let end = fixture.ca.not_after();
    let late = end.minus(DAY / 2);
    let id = crate::testing::instance();
    let issued = fixture.ca.issue_agent(&id, &tenant(), &fixture.public(), late, DAY, &Dice::new(1)).unwrap();
    assert_eq!(issued.not_after, end);
    let error = fixture.ca.issue_agent(&id, &tenant(), &fixture.public(), end, DAY, &Dice::new(1)).unwrap_err();
    assert!(error.to_string().contains("rotate-ca"), "{error}");
}

#[test]
fn records_say_what_the_certificate_says_to_the_second() {
    let fixture = Fixture::new();
    let odd = Timestamp::from_millis(NOW.as_millis() + 789);
    let issued = fixture
        .ca
        .issue_agent(&crate::testing::instance(), &tenant(), &fixture.public(), odd, DAY, &Dice::new(1))
        .unwrap();
    let peer = Peer::from_der(&der_of(&issued)).unwrap();
    assert_eq!((peer.not_before, peer.not_after), (issued.not_before, issued.not_after));
    assert_eq!(issued.not_after, NOW.plus(DAY));
}

#[test]
fn times_stay_inside_what_x509_can_spell() {
    assert_eq!(whole_seconds(Timestamp::from_millis(i64::MAX)), Timestamp::from_millis(der::END_OF_TIME));
    assert_eq!(whole_seconds(Timestamp::from_millis(-5)), Timestamp::EPOCH);
}
