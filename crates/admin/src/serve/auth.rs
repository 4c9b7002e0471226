//! Who may come in: tokens, certificates, hosts, origins, and how often one may be wrong.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    net::{IpAddr, Ipv6Addr},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use http::{HeaderMap, StatusCode, header};
use nstance_client::Identity;
use nstance_core::{ports::clock::Entropy, time::Mono};
use nstance_identity::peer::{Peer, PeerName};
use ring::hmac;

use super::{reply::Trouble, route::Access};

/// Who calls, as the audit log names them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Caller {
    Token,
    Viewer,
    /// By the first bytes of its certificate's fingerprint.
    Certificate(String),
    /// With `--insecure-no-auth`, or at a route that is open.
    Anybody,
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Token => f.write_str("token"),
            Self::Viewer => f.write_str("viewer-token"),
            Self::Certificate(fingerprint) => write!(f, "certificate:{fingerprint}"),
            Self::Anybody => f.write_str("anybody"),
        }
    }
}

/// A certificate that `--client-ca` vouches for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Certificate {
    /// The first bytes of it.
    pub fingerprint: String,
    /// Why it is not good enough.
    pub refused: Option<String>,
}

impl Certificate {
    /// The cluster's own CA makes certificates for machines, servers and services, too, and for operators of all tenants.
    /// Of those only an operator of our tenant may do what we may. Whom another CA vouches for was for whoever named it
    /// to say.
    pub(super) fn of(leaf: &[u8], ours: &Identity) -> Self {
        let digest = ring::digest::digest(&ring::digest::SHA256, leaf);
        let fingerprint = data_encoding::HEXLOWER.encode(&digest.as_ref()[..8]);
        let refused = match Peer::from_der(leaf) {
            Ok(peer) => match &peer.name {
                PeerName::Operator { tenant, .. } if ours.tenant().as_ref() == Some(tenant) => None,
                PeerName::Operator { tenant, .. } => {
                    Some(format!("the certificate of operator {} is of tenant {tenant}", peer.common_name()))
                }
                PeerName::Agent { .. } | PeerName::Server { .. } => {
                    Some(format!("the certificate of {} is no operator's", peer.common_name()))
                }
            },
            Err(_) if ours.ca_bundle().signed(leaf) => {
                Some("the certificate is one that the cluster made for a service, and no operator's".to_owned())
            }
            Err(_) => None,
        };
        Self { fingerprint, refused }
    }
}

/// A token that can be recognised and not be read. Both sides are hashed with a key of this process first, so that the
/// time of a comparison says nothing about the token, nor about its length.
struct Known {
    key: hmac::Key,
    tag: hmac::Tag,
}

impl Known {
    fn new(token: &str, entropy: &dyn Entropy) -> Self {
        let mut key = [0; 32];
        entropy.fill(&mut key);
        let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
        let tag = hmac::sign(&key, token.as_bytes());
        Self { key, tag }
    }

    fn is(&self, token: &str) -> bool {
        hmac::verify(&self.key, token.as_bytes(), self.tag.as_ref()).is_ok()
    }
}

pub(super) struct Auth {
    full: Option<Known>,
    viewer: Option<Known>,
    open: bool,
    read_only: bool,
    failures: Failures,
}

/// The secrets in words.
pub(super) struct Tokens {
    pub full: String,
    pub viewer: Option<String>,
}

impl Auth {
    /// Without tokens, everybody is let in.
    pub(super) fn new(tokens: Option<&Tokens>, read_only: bool, entropy: &dyn Entropy) -> Self {
        let known = |token: &String| Known::new(token, entropy);
        Self {
            full: tokens.map(|it| known(&it.full)),
            viewer: tokens.and_then(|it| it.viewer.as_ref()).map(known),
            open: tokens.is_none(),
            read_only,
            failures: Failures::default(),
        }
    }

    /// Who calls. A certificate was verified by the listener.
    pub(super) fn caller(
        &self,
        headers: &HeaderMap,
        certificate: Option<&Certificate>,
        from: IpAddr,
        now: Mono,
    ) -> Result<Caller, Trouble> {
        if self.open {
            return Ok(Caller::Anybody);
        }
        let Some(value) = headers.get(header::AUTHORIZATION) else {
            let missing = || Trouble::new(StatusCode::UNAUTHORIZED, "unauthenticated", "no credentials were sent");
            return match certificate {
                Some(Certificate { fingerprint, refused: None }) => Ok(Caller::Certificate(fingerprint.clone())),
                Some(Certificate { refused: Some(why), .. }) => {
                    Err(Trouble::new(StatusCode::FORBIDDEN, "wrong_certificate", why.as_str())
                        .hint("show an operator's certificate of this tenant, or send Authorization: Bearer TOKEN"))
                }
                None => Err(missing().hint("send the header Authorization: Bearer TOKEN")),
            };
        };
        // Before the token is looked at: whoever guesses must not learn from a 200 what a 429 hides.
        if let Some(wait) = self.failures.wait(from, now) {
            let message = "too many wrong credentials came from this address";
            return Err(Trouble::new(StatusCode::TOO_MANY_REQUESTS, "rate_limited", message).retry_after(wait));
        }
        let token = value.to_str().ok().and_then(bearer).unwrap_or_default();
        // Both are compared, whichever it is.
        let is = |known: &Option<Known>| known.as_ref().is_some_and(|it| it.is(token));
        match (is(&self.full), is(&self.viewer)) {
            (true, _) => Ok(Caller::Token),
            (false, true) => Ok(Caller::Viewer),
            (false, false) => {
                self.failures.count(from, now);
                let message = "the credentials are not right";
                Err(Trouble::new(StatusCode::UNAUTHORIZED, "unauthenticated", message)
                    .hint("send the header Authorization: Bearer TOKEN, with the token that serve was started with"))
            }
        }
    }

    /// Whether this caller may.
    pub(super) fn allow(&self, caller: &Caller, access: Access) -> Result<(), Trouble> {
        let denied = |code: &str, message: &str| Err(Trouble::new(StatusCode::FORBIDDEN, code, message));
        match (access, caller) {
            (Access::Open | Access::Read, _) => Ok(()),
            (Access::Change, _) if self.read_only => denied("read_only", "this server was started with --read-only"),
            (Access::Change, Caller::Viewer) => denied("viewer", "a viewer's token changes nothing"),
            (Access::Change, _) => Ok(()),
        }
    }
}

fn bearer(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

const WINDOW: Duration = Duration::from_secs(60);
const MAX_FAILURES: usize = 10;
/// Addresses that are remembered; beyond, the whole memory is cleared rather than grown.
const MAX_ADDRESSES: usize = 10_000;

/// Wrong credentials of the last minute, by address.
#[derive(Default)]
struct Failures(Mutex<BTreeMap<IpAddr, VecDeque<Mono>>>);

impl Failures {
    /// How long an address has to wait, if it has to.
    fn wait(&self, from: IpAddr, now: Mono) -> Option<Duration> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let failures = all.get_mut(&network(from))?;
        failures.retain(|at| now.since(*at) < WINDOW);
        let first = failures.front().copied()?;
        (MAX_FAILURES <= failures.len()).then(|| WINDOW.saturating_sub(now.since(first)))
    }

    fn count(&self, from: IpAddr, now: Mono) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if MAX_ADDRESSES <= all.len() {
            all.clear();
        }
        all.entry(network(from)).or_default().push_back(now);
    }
}

/// Whoever has one address of IPv6 has 2⁶⁴ of them.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(it) => IpAddr::V6(Ipv6Addr::from_bits(it.to_bits() >> 64 << 64)),
        it => it,
    }
}

/// Under which names we may be called. A page of somebody else's whose name was pointed at us is none of them.
pub(super) struct Hosts {
    bind: IpAddr,
    allowed: Vec<String>,
}

impl Hosts {
    pub(super) fn new(bind: IpAddr, allowed: &[String]) -> Self {
        Self { bind, allowed: allowed.iter().map(|it| it.to_ascii_lowercase()).collect() }
    }

    pub(super) fn check(&self, authority: Option<&str>) -> Result<(), Trouble> {
        if authority.is_some_and(|it| self.knows(&host_of(it))) {
            return Ok(());
        }
        let message = format!("the host `{}` is none of ours", authority.unwrap_or_default().escape_debug());
        Err(Trouble::new(StatusCode::FORBIDDEN, "host_not_allowed", message)
            .hint("start serve with --allowed-host NAME"))
    }

    fn knows(&self, host: &str) -> bool {
        if host == "localhost" || self.allowed.iter().any(|it| it == host) {
            return true;
        }
        // Numbers cannot be pointed elsewhere; if we listen on all addresses, each of them is ours.
        host.parse::<IpAddr>().is_ok_and(|it| it.is_loopback() || it == self.bind || self.bind.is_unspecified())
    }
}

/// The host of `host:port`, in lower case and without brackets.
fn host_of(authority: &str) -> String {
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => authority.rsplit_once(':').map_or(authority, |(host, _)| host),
    };
    host.trim_end_matches('.').to_ascii_lowercase()
}

/// A page that sends a change must be one of ours. Schemes are not compared: a proxy before us may have taken TLS off.
pub(super) fn check_origin(headers: &HeaderMap, authority: Option<&str>) -> Result<(), Trouble> {
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let theirs = origin.to_str().ok().and_then(|it| it.split_once("://")).map(|(_, authority)| authority);
    if theirs.zip(authority).is_some_and(|(theirs, ours)| theirs.eq_ignore_ascii_case(ours)) {
        return Ok(());
    }
    Err(Trouble::new(StatusCode::FORBIDDEN, "foreign_origin", "a page of another origin sent this"))
}

#[cfg(test)]
mod tests {
    use nstance_rt::entropy::SeededEntropy;

    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn auth() -> Auth {
        let tokens = Tokens { full: "full-token-of-tests".into(), viewer: Some("viewer-token-of-tests".into()) };
        Auth::new(Some(&tokens), false, &SeededEntropy::new(1))
    }

    fn ask(auth: &Auth, token: &str, from: IpAddr, at: u64) -> Result<Caller, u16> {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, format!("Bearer {token}").parse().unwrap());
        let now = Mono::from_start(Duration::from_secs(at));
        auth.caller(&headers, None, from, now).map_err(|it| it.status.as_u16())
    }

    #[test]
    fn tokens_are_told_apart() {
        let auth = auth();
        assert_eq!(ask(&auth, "full-token-of-tests", HERE, 1), Ok(Caller::Token));
        assert_eq!(ask(&auth, "viewer-token-of-tests", HERE, 1), Ok(Caller::Viewer));
        for wrong in ["", "full-token-of-test", "full-token-of-tests2"] {
            assert_eq!(ask(&auth, wrong, HERE, 1), Err(401), "{wrong}");
        }
        assert!(auth.allow(&Caller::Viewer, Access::Change).is_err());
        assert!(auth.allow(&Caller::Viewer, Access::Read).is_ok());
    }

    #[test]
    fn ten_wrong_tokens_in_a_minute_shut_an_address_out_and_no_other() {
        let auth = auth();
        for _ in 0..10 {
            assert_eq!(ask(&auth, "wrong", HERE, 100), Err(401));
        }
        assert_eq!(ask(&auth, "wrong", HERE, 101), Err(429));
        assert_eq!(
            ask(&auth, "full-token-of-tests", HERE, 159),
            Err(429),
            "a guess that is right tells nothing either"
        );
        assert_eq!(ask(&auth, "full-token-of-tests", "10.0.0.9".parse().unwrap(), 101), Ok(Caller::Token));
        assert_eq!(ask(&auth, "full-token-of-tests", HERE, 160), Ok(Caller::Token));
    }

    #[test]
    fn one_network_of_ipv6_is_one_address() {
        let auth = auth();
        for n in 0..10 {
            assert_eq!(ask(&auth, "wrong", format!("2001:db8::{n:x}").parse().unwrap(), 100), Err(401));
        }
        assert_eq!(ask(&auth, "wrong", "2001:db8::ffff".parse().unwrap(), 100), Err(429));
    }

    #[test]
    fn only_our_own_names_are_hosts() {
        let hosts = Hosts::new("10.0.0.5".parse().unwrap(), &["Nstance.Example.com".to_owned()]);
        for good in ["localhost:8080", "127.0.0.1", "[::1]:8080", "10.0.0.5:1", "nstance.example.com", "LOCALHOST."] {
            assert!(hosts.check(Some(good)).is_ok(), "{good}");
        }
        for bad in [Some("evil.example.com"), Some("10.0.0.6"), Some("localhost.evil.com"), Some(""), None] {
            assert!(hosts.check(bad).is_err(), "{bad:?}");
        }
        let everywhere = Hosts::new("0.0.0.0".parse().unwrap(), &[]);
        assert!(everywhere.check(Some("10.0.0.6:80")).is_ok());
        assert!(everywhere.check(Some("evil.example.com")).is_err());
    }

    #[test]
    fn foreign_pages_change_nothing() {
        let check = |origin: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ORIGIN, origin.parse().unwrap());
            check_origin(&headers, Some("127.0.0.1:8080")).is_ok()
        };
        assert!(check("http://127.0.0.1:8080"));
        for foreign in ["http://127.0.0.1:8081", "http://evil.example.com", "null", "http://localhost:8080"] {
            assert!(!check(foreign), "{foreign}");
        }
        assert!(check_origin(&HeaderMap::new(), None).is_ok());
    }
}
