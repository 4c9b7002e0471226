//! Can the secrets be opened, and do the keys in them fit?

use nstance_core::ports::secrets::Secrets;
use nstance_identity::{
    ca::NONCE_KEY_SECRET,
    vault::{read_ca_key, read_nonce_key},
};
use nstance_rt::chain::Chain;

use super::Section;
use crate::storage::{Cluster, StoreArgs};

const RESTORE: &str =
    "give the key of server.secrets.encryption_key by --key-provider and --key-source; if it is lost, restore it";

pub async fn check(mut section: Section<'_>, cluster: &Cluster, args: &StoreArgs) {
    let rest = |section: &mut Section<'_>, why: &str| {
        ["ca-key", "nonce-key", "ca-key-fits"].iter().for_each(|name| section.skip(name, why));
    };
    match args.keys() {
        Ok((keys, None)) => section.ok("encryption-key", format!("{} of 32 bytes", keys.len())),
        Ok((_, Some(warning))) => section.warn("encryption-key", warning, "chmod 600 the file"),
        Err(failure) => {
            section.fail("encryption-key", failure.lines(false)[0].trim_start_matches("error: "), RESTORE);
            return rest(&mut section, "there is no encryption key");
        }
    }
    let secrets = match args.secrets(cluster.store.clone(), Vec::new()) {
        Ok(secrets) => secrets,
        Err(failure) => {
            section.fail("ca-key", failure.lines(false)[0].trim_start_matches("error: "), RESTORE);
            return;
        }
    };
    keys(section, cluster, secrets.as_ref()).await;
}

async fn keys(mut section: Section<'_>, cluster: &Cluster, secrets: &dyn Secrets) {
    const START: &str = "start a nstance-server: its first start makes the CA and the nonce key";
    let bundle = match cluster.bundle().await {
        Ok(bundle) => bundle,
        Err(failure) => {
            let detail = failure.lines(false)[0].trim_start_matches("error: ").to_owned();
            section.fail("ca-key", detail, failure.next.clone().unwrap_or_else(|| START.to_owned()));
            section.skip("nonce-key", "there is no CA");
            section.skip("ca-key-fits", "there is no CA");
            return;
        }
    };
    let issuer = bundle.issuer();
    let key = read_ca_key(secrets, &issuer.fingerprint).await;
    match &key {
        Ok(Some(_)) => section.ok("ca-key", ""),
        Ok(None) => section.fail(
            "ca-key",
            "it is missing",
            "restore secret ca.key, or nstance-admin cluster rotate-ca --lost-key",
        ),
        Err(error) => section.fail("ca-key", Chain(error).to_string(), RESTORE),
    }
    match read_nonce_key(secrets).await {
        Ok(Some(_)) => section.ok("nonce-key", ""),
        Ok(None) => section.fail("nonce-key", format!("{NONCE_KEY_SECRET} is missing"), START),
        Err(error) => section.fail("nonce-key", Chain(&error).to_string(), RESTORE),
    }
    match key {
        Ok(Some(key)) if key.public_key() == issuer.public_key => {
            section.ok("ca-key-fits", format!("CA {} until {}", issuer.fingerprint, issuer.not_after));
        }
        Ok(Some(key)) => section.fail(
            "ca-key-fits",
            format!("ca.crt is of key {}, the secret is key {}", issuer.fingerprint, key.fingerprint()),
            "restore the CA's key, or nstance-admin cluster rotate-ca --lost-key",
        ),
        _ => section.skip("ca-key-fits", "the CA's key could not be read"),
    }
}
