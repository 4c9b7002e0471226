//! Keys and certificates of one server: a CA, the server's own, and one for each caller.

use std::{fmt, net::Ipv4Addr, path::Path, time::Duration};

use anyhow::Context as _;
use data_encoding::BASE64;
use nstance_core::ports::clock::Clock as _;
use nstance_identity::{
    ca::{Ca, CaProfile, make_ca_certificate},
    issue::{FileProfile, FileUsage},
    keys::KeyPair,
    subject::{San, Subject},
};
use nstance_rt::{clock::SystemClock, entropy::SystemEntropy};
use ring::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair as _},
};
use serde_json::json;

use super::write_private;

/// Longer than any test; the CA lives longer still.
const TTL: Duration = Duration::from_secs(30 * 86_400);

/// The first address of the service range, by which pods know the API server.
const SERVICE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

/// What precedes the 65 bytes of a P-256 point in a `SubjectPublicKeyInfo` (RFC 5480).
const P256_SPKI_PREFIX: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce,
    0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];

pub(super) struct Pki {
    ca: Ca,
}

impl Pki {
    /// Makes everything anew and writes the files that the programs read.
    pub(super) fn create(dir: &Path) -> anyhow::Result<Self> {
        let entropy = SystemEntropy::new();
        let key = KeyPair::generate(&entropy);
        let profile = CaProfile::of("test".parse().context("name the CA")?);
        let certificate = make_ca_certificate(&key, &profile, SystemClock.now(), &entropy).chain_pem;
        write_private(&dir.join("ca.crt"), certificate.as_bytes())?;
        write_private(&dir.join("ca.key"), key.to_pkcs8_pem().as_bytes())?;
        let pki = Self { ca: Ca::load(certificate.as_bytes(), [key])? };

        let names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"];
        let mut sans = vec![San::ip(Ipv4Addr::LOCALHOST.into()), San::ip(SERVICE_ADDRESS.into())];
        for name in names {
            sans.push(San::dns(name)?);
        }
        let subject = Subject { common_name: "kube-apiserver".to_owned(), ..Subject::default() };
        let (certificate, key) = pki.issue(FileProfile { subject, sans, usage: FileUsage::Server })?;
        write_private(&dir.join("server.crt"), certificate.as_bytes())?;
        write_private(&dir.join("server.key"), key.as_bytes())?;

        let (private, public) = service_account_key()?;
        write_private(&dir.join("sa.key"), private.as_bytes())?;
        write_private(&dir.join("sa.pub"), public.as_bytes())?;
        Ok(pki)
    }

    pub(super) fn ca_pem(&self) -> &str {
        self.ca.bundle_pem()
    }

    /// Certificate and key of a caller: the name is the user, each organisation a group.
    fn client(&self, user: &str, groups: &[&str]) -> anyhow::Result<(String, String)> {
        let organization = groups.iter().map(|&it| it.to_owned()).collect();
        let subject = Subject { common_name: user.to_owned(), organization, ..Subject::default() };
        self.issue(FileProfile { subject, sans: Vec::new(), usage: FileUsage::Client })
    }

    pub(super) fn client_pem(&self, user: &str, groups: &[&str]) -> anyhow::Result<String> {
        let (certificate, key) = self.client(user, groups)?;
        Ok(format!("{certificate}{key}"))
    }

    /// Everything inline, so that the file can be copied anywhere. JSON is YAML.
    pub(super) fn kubeconfig(&self, server: &str, user: &str, groups: &[&str]) -> anyhow::Result<String> {
        let (certificate, key) = self.client(user, groups)?;
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {
                "server": server,
                "certificate-authority-data": BASE64.encode(self.ca_pem().as_bytes()),
            }}],
            "users": [{"name": user, "user": {
                "client-certificate-data": BASE64.encode(certificate.as_bytes()),
                "client-key-data": BASE64.encode(key.as_bytes()),
            }}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        });
        Ok(format!("{config:#}\n"))
    }

    fn issue(&self, profile: FileProfile) -> anyhow::Result<(String, String)> {
        let entropy = SystemEntropy::new();
        let key = KeyPair::generate(&entropy);
        let issued = self.ca.issue_file(&profile, &key.public_key(), SystemClock.now(), TTL, &entropy)?;
        Ok((issued.chain_pem, key.to_pkcs8_pem().to_string()))
    }
}

impl fmt::Debug for Pki {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pki")
    }
}

/// Signs tokens of service accounts. P-256, because kube-apiserver refuses Ed25519 there.
fn service_account_key() -> anyhow::Result<(String, String)> {
    let random = SystemRandom::new();
    let algorithm = &ECDSA_P256_SHA256_ASN1_SIGNING;
    let document = EcdsaKeyPair::generate_pkcs8(algorithm, &random).ok().context("make a P-256 key")?;
    let key = EcdsaKeyPair::from_pkcs8(algorithm, document.as_ref(), &random).ok().context("read a P-256 key")?;
    let public = [&P256_SPKI_PREFIX[..], key.public_key().as_ref()].concat();
    Ok((pem("PRIVATE KEY", document.as_ref()), pem("PUBLIC KEY", &public)))
}

fn pem(label: &str, der: &[u8]) -> String {
    let body = BASE64.encode(der);
    let lines: Vec<&str> = (0..body.len()).step_by(64).map(|at| &body[at..body.len().min(at + 64)]).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_that_the_programs_read_is_written() {
        let dir = tempfile::tempdir().unwrap();
        Pki::create(dir.path()).unwrap();
        let mut names: Vec<String> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["ca.crt", "ca.key", "sa.key", "sa.pub", "server.crt", "server.key"]);
    }

    #[test]
    fn kubeconfig_holds_a_certificate_of_the_ca_for_the_user_and_its_groups() {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::create(dir.path()).unwrap();
        let text = pki.kubeconfig("https://127.0.0.1:1", "alice", &["developers", "owners"]).unwrap();
        let config: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(config["clusters"][0]["cluster"]["server"], "https://127.0.0.1:1");
        assert_eq!(config["contexts"][0]["context"]["user"], "alice");
        let data = config["users"][0]["user"]["client-certificate-data"].as_str().unwrap();
        let certificate = String::from_utf8(BASE64.decode(data.as_bytes()).unwrap()).unwrap();
        let body: String = certificate.lines().filter(|line| !line.starts_with('-')).collect();
        let der = BASE64.decode(body.as_bytes()).unwrap();
        assert!(pki.ca.bundle().signed(&der));
        for name in ["alice", "developers", "owners"] {
            assert!(der.windows(name.len()).any(|it| it == name.as_bytes()), "{name}");
        }
    }
}
