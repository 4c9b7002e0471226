//! The cluster's CA: how its certificate is made, how a bundle of them is read, and which step the CA needs at start.
//!
//! The order of a bundle is its state: the first certificate issues, all of them are trusted. So a rotation is a change
//! of one file, and a server that reads it late is merely late.

use std::{fmt, time::Duration};

use nstance_core::{ids::ClusterId, ports::clock::Entropy, time::Timestamp};
use rustls::pki_types::CertificateDer;
use x509_parser::{extensions::ParsedExtension, prelude::X509Certificate};

use crate::{
    issue::{self, Draft},
    keys::{KeyPair, PublicKey},
    pem,
    subject::Subject,
};

/// Life of a CA unless the config says otherwise: 10 years.
pub const DEFAULT_CA_TTL: Duration = Duration::from_secs(87_600 * 3600);

/// A CA is trusted an hour before it is made: the first machines of a new cluster may have clocks far behind.
const CA_BACKDATING: Duration = Duration::from_secs(3600);

/// Secret that holds the nonce key.
pub const NONCE_KEY_SECRET: &str = "registration-nonce.key";

/// Secret that holds the first CA's key.
pub const CA_KEY_SECRET: &str = "ca.key";

/// Secret that holds the key of the CA with this fingerprint.
pub fn ca_key_secret(fingerprint: &str) -> String {
    format!("ca-{fingerprint}.key")
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CaError {
    #[error("CA bundle holds no certificate that can be read; it must be one or more PEM blocks CERTIFICATE")]
    Unreadable,
    #[error("certificate {number} of the CA bundle is no CA of ours: {why}")]
    NotOurs { number: usize, why: &'static str },
    #[error(
        "ca.crt (fp {fingerprint}) has no matching key: restore secret ca.key, \
         or run nstance-admin cluster rotate-ca --lost-key"
    )]
    NoMatchingKey { fingerprint: String },
}

/// Who the CA is, as `certificates.ca` of the config says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaProfile {
    pub cluster: ClusterId,
    /// Overrides the whole name: `Nstance CA`, O = cluster id.
    pub subject: Option<Subject>,
    pub ttl: Option<Duration>,
}

impl CaProfile {
    pub fn of(cluster: ClusterId) -> Self {
        Self { cluster, subject: None, ttl: None }
    }

    fn subject(&self) -> Subject {
        self.subject.clone().unwrap_or_else(|| Subject {
            common_name: "Nstance CA".to_owned(),
            organization: vec![self.cluster.to_string()],
            ..Subject::default()
        })
    }
}

/// Makes the self-signed certificate of `key`.
pub fn make_ca_certificate(key: &KeyPair, profile: &CaProfile, now: Timestamp, entropy: &dyn Entropy) -> issue::Issued {
    let subject = profile.subject();
    let public = key.public_key();
    let key_id = issue::key_id(&public);
    let draft = Draft {
        issuer: &subject.to_der(),
        issuer_key_id: &key_id,
        subject: &subject,
        key: &public,
        not_before: now.minus(CA_BACKDATING),
        not_after: now.plus(profile.ttl.unwrap_or(DEFAULT_CA_TTL)),
        sans: &[],
        profile: issue::Usage::Ca,
        role: None,
    };
    draft.sign(key, entropy)
}

/// One certificate of a bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaCertificate {
    pub(crate) der: CertificateDer<'static>,
    /// The subject as it stands in the certificate: issuers are compared byte by byte.
    pub(crate) subject: Vec<u8>,
    pub(crate) key_id: Vec<u8>,
    pub public_key: PublicKey,
    pub fingerprint: String,
    pub not_before: Timestamp,
    pub not_after: Timestamp,
}

impl CaCertificate {
    fn parse(der: CertificateDer<'static>) -> Result<Self, &'static str> {
        let (rest, parsed) = x509_parser::parse_x509_certificate(&der).map_err(|_| "it is not X.509")?;
        if !rest.is_empty() {
            return Err("bytes follow it");
        }
        if !parsed.is_ca() {
            return Err("it is not marked as a CA");
        }
        let public_key = PublicKey::from_der(parsed.public_key().raw).map_err(|_| "its key is not Ed25519")?;
        Ok(Self {
            subject: parsed.subject().as_raw().to_vec(),
            key_id: subject_key_id(&parsed).unwrap_or_else(|| issue::key_id(&public_key)),
            fingerprint: public_key.fingerprint(),
            public_key,
            not_before: issue::from_asn1(parsed.validity().not_before),
            not_after: issue::from_asn1(parsed.validity().not_after),
            der,
        })
    }
}

impl CaCertificate {
    /// When it was made; it is valid from a little earlier.
    pub fn made_at(&self) -> Timestamp {
        self.not_before.plus(CA_BACKDATING)
    }

    pub fn pem(&self) -> String {
        pem::certificate(&self.der)
    }

    /// For people: `CN=…, O=…`.
    pub fn subject_text(&self) -> String {
        x509_parser::parse_x509_certificate(&self.der)
            .map(|(_, parsed)| parsed.subject().to_string())
            .unwrap_or_default()
    }
}

fn subject_key_id(certificate: &X509Certificate<'_>) -> Option<Vec<u8>> {
    certificate.extensions().iter().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::SubjectKeyIdentifier(id) => Some(id.0.to_vec()),
        _ => None,
    })
}

/// CA certificates that are trusted together; never empty.
#[derive(Clone, PartialEq, Eq)]
pub struct Bundle {
    pem: String,
    certificates: Vec<CaCertificate>,
}

impl Bundle {
    pub fn parse(text: &[u8]) -> Result<Self, CaError> {
        let certificates = pem::certificates(text)
            .ok_or(CaError::Unreadable)?
            .into_iter()
            .enumerate()
            .map(|(n, der)| CaCertificate::parse(der).map_err(|why| CaError::NotOurs { number: n + 1, why }))
            .collect::<Result<_, _>>()?;
        Ok(Self { pem: String::from_utf8_lossy(text).into_owned(), certificates })
    }

    /// The text it was read from, byte by byte: hashes of it are compared.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    pub fn certificates(&self) -> &[CaCertificate] {
        &self.certificates
    }

    /// The certificate that issues.
    pub fn issuer(&self) -> &CaCertificate {
        &self.certificates[0]
    }

    /// Whether a certificate was signed by one of these. Nothing else of it is judged.
    pub fn signed(&self, leaf: &[u8]) -> bool {
        self.signer(leaf).is_some()
    }

    /// The one of these that signed a certificate.
    pub fn signer(&self, leaf: &[u8]) -> Option<&CaCertificate> {
        let (_, parsed) = x509_parser::parse_x509_certificate(leaf).ok()?;
        let (statement, signature) = (parsed.tbs_certificate.as_ref(), parsed.signature_value.data.as_ref());
        self.certificates.iter().find(|ca| ca.public_key.verify(statement, signature))
    }

    /// Whether a client that trusts `self` may take `newer` in its place: one certificate at least must stay.
    pub fn may_become(&self, newer: &Self) -> bool {
        newer.certificates.iter().any(|new| self.certificates.iter().any(|old| old.der == new.der))
    }
}

impl fmt::Debug for Bundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.certificates.iter().map(|it| &it.fingerprint)).finish()
    }
}

/// The CA in use: what it trusts, and the key it signs with.
pub struct Ca {
    bundle: Bundle,
    key: KeyPair,
}

impl Ca {
    /// Puts the bundle together with the key of its first certificate, whichever of `keys` that is.
    pub fn load(bundle: &[u8], keys: impl IntoIterator<Item = KeyPair>) -> Result<Self, CaError> {
        let bundle = Bundle::parse(bundle)?;
        let issuer = bundle.issuer();
        match keys.into_iter().find(|key| key.public_key() == issuer.public_key) {
            Some(key) => Ok(Self { bundle, key }),
            None => Err(CaError::NoMatchingKey { fingerprint: issuer.fingerprint.clone() }),
        }
    }

    pub fn bundle(&self) -> &Bundle {
        &self.bundle
    }

    pub fn bundle_pem(&self) -> &str {
        self.bundle.pem()
    }

    /// Fingerprint of the certificate that issues.
    pub fn fingerprint(&self) -> &str {
        &self.bundle.issuer().fingerprint
    }

    pub fn trusted(&self) -> &[CaCertificate] {
        self.bundle.certificates()
    }

    pub fn not_after(&self) -> Timestamp {
        self.bundle.issuer().not_after
    }

    pub(crate) fn key(&self) -> &KeyPair {
        &self.key
    }
}

impl fmt::Debug for Ca {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ca({})", self.fingerprint())
    }
}

/// What the CA needs at start. Each step is taken under the cluster lease, and what it left is read again before the
/// next, so that a crash in between is only a step not yet taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CaStep {
    /// Certificate and key are there and belong together.
    GoOn,
    /// Nothing is there: create the secret `ca.key`, if it is still absent.
    MakeKey,
    /// Create `ca.crt` from the key that is stored.
    MakeCertificate,
    /// Not ready until a person restores the key or gives it up.
    KeyLost { fingerprint: String },
}

/// Decides from what was read: `ca.crt`, and the secret `ca-{fingerprint}.key` or else `ca.key`.
pub fn ca_step(ca_crt: Option<&Bundle>, key: Option<&KeyPair>) -> CaStep {
    match (ca_crt, key) {
        (None, None) => CaStep::MakeKey,
        (None, Some(_)) => CaStep::MakeCertificate,
        (Some(bundle), Some(key)) if key.public_key() == bundle.issuer().public_key => CaStep::GoOn,
        (Some(bundle), _) => CaStep::KeyLost { fingerprint: bundle.issuer().fingerprint.clone() },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{Dice, NOW, cluster, openssl};

    fn made(seed: u64) -> (KeyPair, String) {
        let dice = Dice::new(seed);
        let key = KeyPair::generate(&dice);
        let issued = make_ca_certificate(&key, &CaProfile::of(cluster()), NOW, &dice);
        (key, issued.chain_pem)
    }

    #[test]
    fn bundle_knows_what_its_cas_signed() {
        let ((_, a), (_, b)) = (made(1), made(2));
        let (a, both) = (Bundle::parse(a.as_bytes()).unwrap(), Bundle::parse(format!("{a}{b}").as_bytes()).unwrap());
        let other = &both.certificates()[1];
        assert!(a.signed(&a.issuer().der) && both.signed(&other.der), "each signed itself");
        assert!(!a.signed(&other.der) && !a.signed(b"nonsense"));
        assert_eq!(both.signer(&other.der).unwrap().fingerprint, other.fingerprint);
        assert_eq!(other.subject_text(), "O=demo, CN=Nstance CA");
    }

    #[test]
    fn ca_certificate_follows_its_profile() {
        let (key, text) = made(1);
        let bundle = Bundle::parse(text.as_bytes()).unwrap();
        let (_, parsed) = x509_parser::parse_x509_certificate(&bundle.issuer().der).unwrap();
        assert_eq!(parsed.subject().to_string(), "O=demo, CN=Nstance CA");
        assert_eq!(parsed.issuer(), parsed.subject());
        let constraints = parsed.basic_constraints().unwrap().unwrap();
        assert!(constraints.critical && constraints.value.ca);
        assert_eq!(constraints.value.path_len_constraint, Some(0));
        let usage = parsed.key_usage().unwrap().unwrap();
        assert!(usage.critical && usage.value.key_cert_sign() && usage.value.crl_sign());
        assert!(!usage.value.digital_signature());
        assert_eq!(bundle.issuer().not_before, NOW.minus(CA_BACKDATING));
        assert_eq!(bundle.issuer().not_after, NOW.plus(DEFAULT_CA_TTL));
        assert_eq!(bundle.issuer().fingerprint, key.fingerprint());

        let Some(shown) = openssl(&["x509", "-noout", "-text"], text.as_bytes()) else { return };
        assert!(shown.contains("CA:TRUE, pathlen:0") && shown.contains("Certificate Sign, CRL Sign"), "{shown}");
    }

    #[test]
    fn config_overrides_the_name_and_life_of_the_ca() {
        let dice = Dice::new(2);
        let key = KeyPair::generate(&dice);
        let subject = Subject {
            common_name: "Our own".into(),
            organization: vec!["one".into(), "two".into()],
            country: vec!["DE".into()],
            ..Subject::default()
        };
        let ttl = Duration::from_secs(40 * 86_400);
        let profile = CaProfile { cluster: cluster(), subject: Some(subject), ttl: Some(ttl) };
        let issued = make_ca_certificate(&key, &profile, NOW, &dice);
        assert_eq!(issued.subject, "CN=Our own, O=two, O=one, C=DE");
        assert_eq!(issued.not_after, NOW.plus(ttl));
    }

    #[test]
    fn first_certificate_of_a_bundle_issues_and_all_are_trusted() {
        let ((key_a, a), (key_b, b)) = (made(1), made(2));
        let names = [key_a.fingerprint(), key_b.fingerprint()];
        let ca = Ca::load([a.as_str(), &b].concat().as_bytes(), [key_b, key_a]).unwrap();
        assert_eq!(ca.fingerprint(), names[0]);
        assert_eq!(ca.trusted().iter().map(|it| it.fingerprint.clone()).collect::<Vec<_>>(), names);
        assert_eq!(ca.bundle_pem(), [a, b].concat());
    }

    #[test]
    fn bundle_without_its_key_says_what_to_do() {
        let ((key_a, a), (key_b, b)) = (made(1), made(2));
        let error = Ca::load([b, a].concat().as_bytes(), [key_a]).unwrap_err();
        assert_eq!(error, CaError::NoMatchingKey { fingerprint: key_b.fingerprint() });
        assert!(error.to_string().contains("rotate-ca --lost-key"));
    }

    #[test]
    fn what_is_no_ca_is_refused() {
        assert_eq!(Bundle::parse(b"").unwrap_err(), CaError::Unreadable);
        assert_eq!(Bundle::parse(b"-----BEGIN CERTIFICATE-----\nAAAA").unwrap_err(), CaError::Unreadable);
        let junk = pem::certificate(b"junk");
        assert!(matches!(Bundle::parse(junk.as_bytes()).unwrap_err(), CaError::NotOurs { number: 1, .. }));
        let leaf = crate::testing::Fixture::new().agent_chain();
        let both = [made(1).1, leaf].concat();
        assert!(matches!(Bundle::parse(both.as_bytes()).unwrap_err(), CaError::NotOurs { number: 2, .. }));
    }

    #[test]
    fn bundle_may_only_become_one_that_overlaps() {
        let parse = |parts: &[&str]| Bundle::parse(parts.concat().as_bytes()).unwrap();
        let ((_, a), (_, b), (_, c)) = (made(1), made(2), made(3));
        assert!(parse(&[&a]).may_become(&parse(&[&b, &a])));
        assert!(parse(&[&b, &a]).may_become(&parse(&[&b])));
        assert!(!parse(&[&b, &a]).may_become(&parse(&[&c])));
    }

    #[test]
    fn every_state_of_the_ca_has_its_step() {
        let ((key, text), (other, _)) = (made(1), made(2));
        let bundle = Bundle::parse(text.as_bytes()).unwrap();
        assert_eq!(ca_step(None, None), CaStep::MakeKey);
        assert_eq!(ca_step(None, Some(&key)), CaStep::MakeCertificate);
        assert_eq!(ca_step(Some(&bundle), Some(&key)), CaStep::GoOn);
        let lost = CaStep::KeyLost { fingerprint: key.fingerprint() };
        assert_eq!(ca_step(Some(&bundle), Some(&other)), lost);
        assert_eq!(ca_step(Some(&bundle), None), lost);
        assert_eq!(ca_key_secret("0011223344556677"), "ca-0011223344556677.key");
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_bundle_reader_panic(bytes: Vec<u8>) {
            let _ = Bundle::parse(&bytes);
            let _ = Bundle::parse(pem::certificate(&bytes).as_bytes());
        }
    }
}
