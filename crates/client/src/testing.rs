//! A CA, operator identities and networks for the tests of this crate.

use std::{io, sync::Arc, time::Duration};

use async_trait::async_trait;
use nstance_core::{ports::clock::Clock, time::Timestamp};
use nstance_identity::{
    ca::{Ca, CaProfile, make_ca_certificate},
    keys::KeyPair,
    link::{Address, Net, Socket},
};
use nstance_rt::{clock::TokioClock, entropy::SeededEntropy};

use crate::Identity;

pub(crate) const T0: Timestamp = Timestamp::from_millis(1_700_000_000_000);

/// How long the certificates are valid.
pub(crate) const VALIDITY: Duration = Duration::from_secs(30 * 86_400);

/// The parts of an operator's identity, issued at [`T0`].
pub(crate) struct Parts {
    pub(crate) ca_bundle: Vec<u8>,
    pub(crate) key: Vec<u8>,
    pub(crate) certificate: Vec<u8>,
}

/// Identities of the same seed are equal.
pub(crate) fn parts(seed: u64) -> Parts {
    let entropy = SeededEntropy::new(seed);
    let ca_key = KeyPair::generate(&entropy);
    let issued = make_ca_certificate(&ca_key, &CaProfile::of("demo".parse().unwrap()), T0, &entropy);
    let ca = Ca::load(issued.chain_pem.as_bytes(), [ca_key]).unwrap();
    let key = KeyPair::generate(&entropy);
    let operator = "opr06bgm7733st2576nx5jht4ecjw".parse().unwrap();
    let tenant = "default".parse().unwrap();
    let issued = ca.issue_operator(&operator, &tenant, &key.public_key(), T0, VALIDITY, &entropy).unwrap();
    Parts {
        ca_bundle: ca.bundle_pem().as_bytes().to_vec(),
        key: key.to_pkcs8_pem().as_bytes().to_vec(),
        certificate: issued.chain_pem.into_bytes(),
    }
}

/// An identity whose clock is the paused clock of the test.
pub(crate) fn identity() -> Identity {
    let (parts, clock) = (parts(1), TokioClock::starting_at(T0));
    let clock: Arc<dyn Clock> = Arc::new(clock);
    Identity::from_pem(&parts.ca_bundle, &parts.key, &parts.certificate, clock).unwrap()
}

/// Hosts named `refuses` refuse connections; all others never answer.
pub(crate) struct DeadNetwork;

#[async_trait]
impl Net for DeadNetwork {
    async fn connect(&self, address: &Address) -> io::Result<Socket> {
        if address.host == "refuses" {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        std::future::pending().await
    }
}
