//! Keys in a secrets store, under their names. Whoever has the store and its key may use them: servers and the admin tool.

use nstance_core::ports::{
    objects::StoreError,
    secrets::{Secret, Secrets},
};

use crate::{
    ca::{CA_KEY_SECRET, NONCE_KEY_SECRET, ca_key_secret},
    keys::{KeyError, KeyPair},
};

#[derive(Debug, thiserror::Error)]
pub enum VaultError {
    #[error("read or write {what}")]
    Store { what: String, source: StoreError },
    #[error("secret {name} does not hold a usable key; restore it")]
    Key { name: String, source: KeyError },
}

/// All keys under a name: the first signs, all verify, so that a key can be replaced while what it signed is still about.
/// The new one comes last until everybody knows it, then first. None on the store's own word only.
pub async fn read_keys(secrets: &dyn Secrets, name: &str) -> Result<Vec<KeyPair>, VaultError> {
    match secrets.get(name).await {
        Ok(secret) => {
            KeyPair::all_from_pkcs8_pem(&secret.0).map_err(|source| VaultError::Key { name: name.to_owned(), source })
        }
        Err(error) if error.is_not_found() => Ok(Vec::new()),
        Err(source) => Err(VaultError::Store { what: name.to_owned(), source }),
    }
}

/// The only key under a name; of several nobody could say which one belongs there.
pub async fn read_key(secrets: &dyn Secrets, name: &str) -> Result<Option<KeyPair>, VaultError> {
    let mut keys = read_keys(secrets, name).await?;
    if 1 < keys.len() {
        return Err(VaultError::Key { name: name.to_owned(), source: KeyError::Private });
    }
    Ok(keys.pop())
}

/// The key that signs nonces.
pub async fn read_nonce_key(secrets: &dyn Secrets) -> Result<Option<KeyPair>, VaultError> {
    Ok(read_keys(secrets, NONCE_KEY_SECRET).await?.into_iter().next())
}

/// A CA's key: under the certificate's own name, else under the first one's.
pub async fn read_ca_key(secrets: &dyn Secrets, fingerprint: &str) -> Result<Option<KeyPair>, VaultError> {
    match read_key(secrets, &ca_key_secret(fingerprint)).await? {
        Some(key) => Ok(Some(key)),
        None => read_key(secrets, CA_KEY_SECRET).await,
    }
}

/// Create-if-absent.
pub async fn store_key(secrets: &dyn Secrets, name: &str, key: &KeyPair) -> Result<(), VaultError> {
    let secret = Secret(key.to_pkcs8_pem().as_bytes().to_vec());
    let stored = secrets.create(name, &secret).await;
    stored.map_err(|source| VaultError::Store { what: name.to_owned(), source })
}
