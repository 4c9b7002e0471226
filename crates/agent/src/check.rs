//! `nstance-agent check`: what a person asks first on a machine that did not join.

use std::sync::Arc;

use nstance_core::{ports::clock::Clock as _, time::Timestamp};
use nstance_identity::{ca::Bundle, nonce::peek_claims, tls::client_config};
use nstance_rt::{chain::Chain, clock::SystemClock};

use crate::{
    disk::Disk,
    enrol::certificate_of,
    identity_dir::{IdentityDir, directory_problems, inspect},
    link::{DialError, TcpNet, dial},
    settings::{Address, Problem, Settings},
};

/// One line of the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub ok: bool,
    pub text: String,
}

fn good(text: impl Into<String>) -> Line {
    Line { ok: true, text: text.into() }
}

fn bad(text: impl Into<String>) -> Line {
    Line { ok: false, text: text.into() }
}

/// Looks at everything, in the order the agent would need it. Nothing is changed.
pub async fn check(settings: Result<Settings, Vec<Problem>>) -> Vec<Line> {
    let settings = match settings {
        Ok(settings) => settings,
        Err(mut problems) => {
            problems.extend(directory_problems());
            return problems.iter().map(|problem| bad(problem.to_string())).collect();
        }
    };
    let mut lines = vec![good("environment")];
    match inspect(&settings) {
        Ok(()) => lines.push(good("directories")),
        Err(problems) => lines.extend(problems.iter().map(|problem| bad(problem.to_string()))),
    }
    let dir = IdentityDir::new(&settings.identity, Disk::default());
    let now = SystemClock.now();
    let bundle = dir.ca();
    lines.push(match &bundle {
        Ok(bundle) => ca_line(bundle, now),
        Err(error) => bad(Chain(error).to_string()),
    });
    lines.push(identity_line(&settings, &dir, now));
    if let Ok(bundle) = &bundle {
        for (what, addresses) in [("registration", &settings.registration), ("agent", &settings.agent)] {
            lines.extend(reach_any(bundle, what, addresses).await);
        }
    }
    lines
}

/// One server leads, and the others may not listen at all: that one address answers is enough. That excuses nobody who
/// does answer, and is not one of our servers.
async fn reach_any(bundle: &Bundle, what: &str, addresses: &[Address]) -> Vec<Line> {
    let tls = match client_config(bundle, None, Arc::new(SystemClock)) {
        Ok(tls) => tls,
        Err(error) => return vec![bad(format!("{what}: {}", Chain(&error)))],
    };
    let mut found = Vec::new();
    for address in addresses {
        // A port that asks for a client certificate still completes the handshake's server half, which is all that is
        // asked.
        found.push((address, dial(&TcpNet, &tls, address).await.map(drop)));
    }
    let reached = found.iter().any(|(_, reached)| reached.is_ok());
    let line = |(address, result)| match result {
        Ok(()) => good(format!("{what} {address}")),
        Err(error @ DialError::Connect { .. }) if reached => {
            good(format!("{what} {address}: not needed, another answers: {}", Chain(&error)))
        }
        Err(error) => bad(format!("{what} {address}: {}", Chain(&error))),
    };
    found.into_iter().map(line).collect()
}

fn ca_line(bundle: &Bundle, now: Timestamp) -> Line {
    let names: Vec<_> = bundle.certificates().iter().map(|it| it.fingerprint.as_str()).collect();
    let text = format!("CA {}", names.join(" "));
    if bundle.certificates().iter().all(|it| it.not_after < now) { bad(format!("{text}: expired")) } else { good(text) }
}

fn identity_line(settings: &Settings, dir: &IdentityDir, now: Timestamp) -> Line {
    let (key, chain) = match dir.key().and_then(|key| Ok((key, dir.certificate()?))) {
        Ok(found) => found,
        Err(error) => return bad(Chain(&error).to_string()),
    };
    let has_certificate = chain.is_some();
    if let Some(peer) = key.zip(chain).and_then(|(key, chain)| certificate_of(settings, &key, &chain)) {
        return if peer.not_after < now {
            bad(format!("certificate ran out at {}: the agent asks for another one with its key", peer.not_after))
        } else {
            good(format!("certificate until {}", peer.not_after))
        };
    }
    match dir.nonce() {
        Err(error) => bad(Chain(&error).to_string()),
        Ok(None) if has_certificate => {
            bad("identity.crt is not of this instance and identity.key, and there is no nonce.jwt to register with")
        }
        Ok(None) => bad("neither certificate nor nonce.jwt: the userdata of this machine did not write one"),
        Ok(Some(nonce)) => match peek_claims(&nonce) {
            Err(error) => bad(format!("nonce.jwt: {error}")),
            Ok(claims) if claims.expires_at < now => bad(format!("nonce.jwt: expired at {}", claims.expires_at)),
            Ok(claims) => good(format!("nonce for {} until {}", claims.subject, claims.expires_at)),
        },
    }
}
