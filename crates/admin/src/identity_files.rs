//! The operator identity in a directory: `ca.crt`, `identity.key`, `identity.crt`.

use std::{
    error::Error,
    fs, io,
    io::Write as _,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use nstance_client::{Identity, IdentityError, RenewError, RenewedIdentity, SaveIdentity};
use nstance_identity::keys::KeyPair;
use nstance_rt::clock::SystemClock;

use crate::{exit::Exit, failure::Failure};

const CA: &str = "ca.crt";
const KEY: &str = "identity.key";
const CERTIFICATE: &str = "identity.crt";

/// The directory of an identity.
#[derive(Debug, Clone)]
pub struct IdentityFiles {
    dir: PathBuf,
}

impl IdentityFiles {
    pub fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn load(&self) -> Result<Identity, Failure> {
        let register = "nstance-admin cluster register-operator, which makes an identity, or --identity-dir";
        let read = |name: &str| {
            let path = self.dir.join(name);
            fs::read(&path).map_err(|error| {
                let what = format!("read {} of the operator identity", path.display());
                Failure::new(Exit::Denied, what).because(error).next(register)
            })
        };
        let (ca, key, certificate) = (read(CA)?, read(KEY)?, read(CERTIFICATE)?);
        Identity::from_pem(&ca, &key, &certificate, Arc::new(SystemClock)).map_err(|error| {
            let name = match &error {
                IdentityError::Bundle(_) => CA,
                IdentityError::Key(_) => KEY,
                IdentityError::Certificate(_) | IdentityError::NotAnOperator { .. } | IdentityError::OtherKey => {
                    CERTIFICATE
                }
            };
            let what = format!("use {} of the operator identity", self.dir.join(name).display());
            Failure::new(Exit::Denied, what).because(cause(error)).next(register)
        })
    }

    /// A renewal that failed.
    pub(crate) fn renewal_failure(&self, error: RenewError) -> Failure {
        let not_taken = || Failure::failed(format!("take the renewed certificate into {}", self.dir.display()));
        match error {
            RenewError::Shard(error) => error.into(),
            RenewError::TimedOut { .. } => Failure::failed(error.to_string()),
            RenewError::Unusable(error) => not_taken().because(cause(error)),
            RenewError::NotSaved(error) => not_taken().because(error),
        }
    }
}

/// What is wrong, in the words of this directory.
fn cause(error: IdentityError) -> Box<dyn Error + Send + Sync> {
    match error {
        IdentityError::Bundle(error) => error.into(),
        IdentityError::Key(error) => error.into(),
        IdentityError::Certificate(error) => error,
        IdentityError::NotAnOperator { name } => format!("it belongs to {name}, which is no operator").into(),
        IdentityError::OtherKey => format!("it was made for another key than {KEY}").into(),
    }
}

#[async_trait]
impl SaveIdentity for IdentityFiles {
    async fn save(&self, renewed: &RenewedIdentity) -> Result<(), Box<dyn Error + Send + Sync>> {
        place(&self.dir, CA, &renewed.ca_bundle_pem)?;
        place(&self.dir, CERTIFICATE, &renewed.certificate_pem)?;
        Ok(())
    }
}

/// Replaces the identity in a directory. The old certificate is removed first and the new one is written last: without a
/// certificate the other files are not used, so the key of one identity is never found beside the certificate of another.
pub fn write(dir: &Path, ca: &str, key: Option<&KeyPair>, chain: &str) -> io::Result<()> {
    make_dir(dir)?;
    match fs::remove_file(dir.join(CERTIFICATE)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    place(dir, CA, ca.as_bytes())?;
    if let Some(key) = key {
        place(dir, KEY, key.to_pkcs8_pem().as_bytes())?;
    }
    place(dir, CERTIFICATE, chain.as_bytes())
}

/// Makes a directory that only its owner can read.
pub(crate) fn make_dir(dir: &Path) -> io::Result<()> {
    if dir.is_dir() { Ok(()) } else { fs::DirBuilder::new().recursive(true).mode(0o700).create(dir) }
}

/// Writes a file that only its owner can read, as a whole or not at all.
pub(crate) fn place(dir: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let aside = dir.join(format!(".{name}.{}", std::process::id()));
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&aside, dir.join(name))
}
