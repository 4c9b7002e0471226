use proptest::prelude::*;

use super::*;
use crate::{
    issue::{Draft, FileUsage, Issued, Usage, role_extension},
    pem,
    subject::Subject,
    testing::{DAY, Fixture, NOW, cluster, instance, operator, tenant},
};

fn der_of(issued: &Issued) -> Vec<u8> {
    pem::certificates(issued.chain_pem.as_bytes()).unwrap()[0].to_vec()
}

#[test]
fn certificates_name_their_holders() {
    let fixture = Fixture::new();
    let agent = fixture.agent();
    let peer = Peer::from_der(&der_of(&agent)).unwrap();
    assert_eq!(peer.name, PeerName::Agent { instance: instance(), tenant: tenant() });
    assert_eq!((peer.role(), peer.tenant()), (Role::Agent, Some(&tenant())));
    assert_eq!(peer.serial, agent.serial);
    assert_eq!(peer.public_key_der(), fixture.key.public_key_der());
    assert!(peer.client_auth);

    let peer = Peer::from_der(&der_of(&fixture.operator())).unwrap();
    assert_eq!(peer.name, PeerName::Operator { operator: operator(), tenant: tenant() });
    let peer = Peer::from_der(&der_of(&fixture.server())).unwrap();
    let (server, shard) = ("srv-1".parse().unwrap(), "s1".parse().unwrap());
    assert_eq!(peer.name, PeerName::Server { server, cluster: cluster(), shard });
    assert_eq!(peer.common_name(), "srv-1");
}

#[test]
fn file_certificates_name_nobody() {
    let fixture = Fixture::new();
    for usage in [FileUsage::Client, FileUsage::Server, FileUsage::Peer] {
        let der = der_of(&fixture.file(usage));
        assert_eq!(Peer::from_der(&der).unwrap_err().to_string(), "certificate is not one of ours: it carries no role");
        assert!(!is_server(&der));
    }
}

#[test]
fn time_and_usage_are_refused_by_name() {
    let fixture = Fixture::new();
    let der = der_of(&fixture.agent());
    let end = NOW.plus(DAY);
    assert!(Peer::accept(&der, end.plus(LEEWAY)).is_ok());
    let late = end.plus(Duration::from_secs(61));
    assert_eq!(Peer::accept(&der, late).unwrap_err().reason(), "CERT_EXPIRED");
    assert_eq!(Peer::from_der(&der).unwrap().check_validity(late).unwrap_err().reason(), "CERT_EXPIRED");
    let start = NOW.minus(issue::BACKDATING);
    assert!(Peer::accept(&der, start.minus(LEEWAY)).is_ok());
    assert_eq!(Peer::accept(&der, start.minus(Duration::from_secs(61))).unwrap_err().reason(), "CERT_INVALID");
    assert_eq!(Peer::accept(&der_of(&fixture.file(FileUsage::Server)), NOW).unwrap_err().reason(), "CERT_INVALID");
    assert_eq!(Peer::accept(&der_of(&fixture.file(FileUsage::Client)), NOW).unwrap_err().reason(), "CERT_MALFORMED");
}

/// A client certificate by our CA that says whatever the test wants.
fn odd(subject: &Subject, roles: &[&[u8]]) -> Result<Peer, PeerError> {
    let fixture = Fixture::new();
    let ca = fixture.ca.bundle().issuer();
    let draft = Draft {
        issuer: &ca.subject,
        issuer_key_id: &ca.key_id,
        subject,
        key: &fixture.public(),
        not_before: NOW,
        not_after: NOW.plus(DAY),
        sans: &[],
        profile: Usage::Client,
        role: None,
    };
    let mut extensions = draft.extensions();
    extensions.extend(roles.iter().map(|role| role_extension(role)));
    Peer::from_der(&draft.to_der([1; 16], extensions, fixture.ca.key()))
}

#[test]
fn certificates_that_say_too_much_or_too_little_are_malformed() {
    let good =
        Subject { common_name: instance().to_string(), organization: vec!["default".to_owned()], ..Subject::default() };
    let agent = Role::Agent.to_der();
    assert!(odd(&good, &[&agent]).is_ok());
    // Other issuers write a PrintableString.
    assert!(odd(&good, &[b"\x13\x05agent"]).is_ok());

    let refused = |subject: &Subject, roles: &[&[u8]], why: &str| {
        let error = odd(subject, roles).unwrap_err();
        assert_eq!(error.reason(), "CERT_MALFORMED");
        assert!(error.to_string().contains(why), "{error}");
    };
    refused(&good, &[], "no role");
    refused(&good, &[&agent, &agent], "more than one role");
    refused(&good, &[&agent, &Role::Operator.to_der()], "more than one role");
    let bad_roles: [&[u8]; 6] = [b"", b"\x0c", b"\x0c\x05agen", b"\x0c\x05agentx", b"\x04\x05agent", b"\x0c\x06agents"];
    for role in bad_roles {
        refused(&good, &[role], "none we know");
    }
    let two = Subject { organization: vec!["default".into(), "other".into()], ..good.clone() };
    refused(&two, &[&agent], "exactly one O");
    refused(&Subject { organization: vec![], ..good.clone() }, &[&agent], "exactly one O");
    refused(&Subject { organization: vec!["A:b".into()], ..good.clone() }, &[&agent], "tenant");
    refused(&Subject { common_name: String::new(), ..good.clone() }, &[&agent], "exactly one CN");
    refused(&Subject { common_name: "web".into(), ..good.clone() }, &[&agent], "instance id");
    refused(&good, &[&Role::Operator.to_der()], "operator id");
    refused(&good, &[&Role::Server.to_der()], "shard");
    refused(&Subject { common_name: operator().to_string(), ..good }, &[&agent], "instance id");
}

proptest! {
    #[test]
    fn no_bytes_make_the_reader_panic(bytes: Vec<u8>, place in 0_usize..400, value: u8, cut in 0_usize..400) {
        let _ = Peer::from_der(&bytes);
        let mut der = der_of(&Fixture::new().agent());
        let place = place % der.len();
        der[place] = value;
        let _ = Peer::accept(&der, NOW);
        let _ = Peer::from_der(&der[..cut.min(der.len())]);
        let _ = validity(&der);
    }
}
