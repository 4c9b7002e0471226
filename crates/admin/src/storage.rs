//! The bucket and its secrets, for commands that need no server.

mod look;

use std::{path::PathBuf, sync::Arc, time::Duration};

use clap::{Args, ValueEnum};
use nstance_core::ports::{
    clock::{Clock, Entropy},
    objects::ObjectStore,
};
use nstance_rt::{clock::SystemClock, entropy::SystemEntropy};
use nstance_store::{
    Records,
    file::FileStore,
    keys::{EncryptionKey, KeySource, load_key},
    s3::S3Store,
    secrets::ObjectSecrets,
    upkeep::Upkeep,
};

pub use self::look::{Configs, ShardConfig};
use crate::{exit::Exit, failure::Failure};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StorageProvider {
    S3,
    Gcs,
    Azure,
    /// A directory of this machine
    File,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SecretsProvider {
    ObjectStorage,
    AwsSecretsManager,
    AwsParameterStore,
    GoogleSecretManager,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KeyProvider {
    Env,
    File,
    AwsSecretsManager,
    GoogleSecretManager,
}

/// Of commands that work on the bucket. S3 honours the usual AWS variables.
#[derive(Debug, Clone, Args)]
pub struct StoreArgs {
    #[arg(
        long,
        value_enum,
        default_value_t = StorageProvider::S3,
        help_heading = "Storage",
        help = "Where the cluster's objects are; S3 goes by the usual AWS_ variables"
    )]
    pub storage_provider: StorageProvider,
    /// Name of the bucket; a directory with --storage-provider file
    #[arg(long, value_name = "BUCKET", help_heading = "Storage")]
    pub storage_bucket: Option<String>,
    /// Where `cluster/` is in the bucket: what stands before it is the server's --prefix
    #[arg(long, value_name = "PREFIX", default_value = "cluster/", help_heading = "Storage")]
    pub storage_prefix: String,
    /// Where secrets are kept
    #[arg(long, value_enum, default_value_t = SecretsProvider::ObjectStorage, help_heading = "Storage")]
    pub secrets_provider: SecretsProvider,
    /// Where secrets are below `cluster/`, as server.secrets.prefix
    #[arg(long, value_name = "PREFIX", default_value = "secret/", help_heading = "Storage")]
    pub secrets_prefix: String,
    /// Project of google-secret-manager
    #[arg(long, value_name = "PROJECT", help_heading = "Storage")]
    pub secrets_gcp_project: Option<String>,
    /// Where the encryption key of secrets comes from
    #[arg(long, value_enum, default_value_t = KeyProvider::Env, help_heading = "Storage")]
    pub key_provider: KeyProvider,
    /// Name of the variable, or path of the file, that holds the key [default for env: NSTANCE_ENCRYPTION_KEY]
    #[arg(long, value_name = "SOURCE", help_heading = "Storage")]
    pub key_source: Option<String>,
}

/// Every command ends sooner or later, whatever the store does.
pub const PATIENCE: Duration = Duration::from_secs(20);

const KEY_VARIABLE: &str = "NSTANCE_ENCRYPTION_KEY";

impl StoreArgs {
    /// The prefix of the whole layout: what stands before `cluster/`.
    fn layout_prefix(&self) -> Result<&str, Failure> {
        let trimmed = self.storage_prefix.trim_end_matches('/');
        match trimmed.strip_suffix("cluster") {
            Some("") => Ok(""),
            Some(before) if before.ends_with('/') => Ok(before),
            _ => Err(Failure::usage(format!("--storage-prefix {}: it must end with `cluster/`", self.storage_prefix))
                .next("the server's --prefix followed by cluster/, as in prod/cluster/")),
        }
    }

    /// Opens the store. Nothing is asked of it yet.
    pub fn store(&self) -> Result<Arc<dyn ObjectStore>, Failure> {
        self.opened(|it| Arc::new(it) as _, |it| Arc::new(it) as _)
    }

    /// The same, for questions about the bucket itself.
    pub fn upkeep(&self) -> Result<Arc<dyn Upkeep>, Failure> {
        self.opened(|it| Arc::new(it) as _, |it| Arc::new(it) as _)
    }

    fn opened<T>(&self, s3: impl FnOnce(S3Store) -> T, file: impl FnOnce(FileStore) -> T) -> Result<T, Failure> {
        let prefix = self.layout_prefix()?;
        let Some(bucket) = self.storage_bucket.as_deref().filter(|it| !it.is_empty()) else {
            return Err(Failure::usage("which bucket? --storage-bucket is missing")
                .next("--storage-bucket NAME, or NSTANCE_STORAGE_BUCKET, or `storage-bucket:` in admin.yaml"));
        };
        let what = || Failure::failed(format!("open the bucket {bucket}"));
        match self.storage_provider {
            StorageProvider::S3 => S3Store::from_env(bucket, prefix).map(s3).map_err(|error| what().because(error)),
            StorageProvider::File => {
                if !PathBuf::from(bucket).is_dir() {
                    // Opening would make it, and an empty cluster is never what somebody meant.
                    return Err(Failure::new(Exit::NotFound, format!("there is no directory {bucket}"))
                        .next("--storage-bucket with the directory that the server was given"));
                }
                FileStore::open(bucket, prefix).map(file).map_err(|error| what().because(error))
            }
            StorageProvider::Gcs | StorageProvider::Azure => Err(absent("storage provider", self.storage_provider)
                .next("--storage-provider s3, which many stores speak, or file")),
        }
    }

    /// The key source, before anything is read from it.
    pub fn key_source(&self) -> Result<KeySource, Failure> {
        match (self.key_provider, &self.key_source) {
            (KeyProvider::Env, source) => Ok(KeySource::Env(source.clone().unwrap_or_else(|| KEY_VARIABLE.to_owned()))),
            (KeyProvider::File, Some(path)) => Ok(KeySource::File(path.into())),
            (KeyProvider::File, None) => {
                Err(Failure::usage("which file holds the encryption key? --key-source is missing"))
            }
            (KeyProvider::AwsSecretsManager | KeyProvider::GoogleSecretManager, _) => {
                Err(absent("key provider", self.key_provider).next("--key-provider env or file"))
            }
        }
    }

    /// The encryption keys: the first encrypts, all decrypt.
    pub fn keys(&self) -> Result<(Vec<EncryptionKey>, Option<String>), Failure> {
        let source = self.key_source()?;
        let loaded = load_key(&source).map_err(|error| {
            Failure::failed("read the encryption key of the cluster's secrets")
                .because(error)
                .next("the key of server.secrets.encryption_key, by --key-provider and --key-source")
        })?;
        Ok((loaded.keys, loaded.warning))
    }

    /// The secrets of a store, with keys that only open in addition.
    pub fn secrets(
        &self,
        store: Arc<dyn ObjectStore>,
        old_keys: Vec<EncryptionKey>,
    ) -> Result<Arc<ObjectSecrets>, Failure> {
        if self.secrets_provider != SecretsProvider::ObjectStorage {
            return Err(absent("secrets provider", self.secrets_provider).next("--secrets-provider object-storage"));
        }
        let (keys, _) = self.keys()?;
        let prefix = format!("cluster/{}/", self.secrets_prefix.trim_matches('/'));
        let opened = ObjectSecrets::new(store, Some(&prefix), keys, old_keys, Arc::new(SystemEntropy::new()));
        opened.map(Arc::new).map_err(|error| Failure::failed("open the cluster's secrets").because(error))
    }

    pub fn open(&self) -> Result<Cluster, Failure> {
        Ok(Cluster::new(self.store()?, Arc::new(SystemClock), Arc::new(SystemEntropy::new())))
    }
}

/// The cluster as its bucket knows it.
pub struct Cluster {
    pub store: Arc<dyn ObjectStore>,
    pub clock: Arc<dyn Clock>,
    pub entropy: Arc<dyn Entropy>,
    /// Who writes, as records say it: `admin/{host}`.
    pub writer: String,
}

impl Cluster {
    pub fn new(store: Arc<dyn ObjectStore>, clock: Arc<dyn Clock>, entropy: Arc<dyn Entropy>) -> Self {
        Self { store, clock, entropy, writer: format!("admin/{}", host()) }
    }

    /// For records below `cluster/`.
    pub fn records(&self) -> Records {
        // Nothing of a shard is written by us; the name stands for none.
        let shard = "admin".parse().expect("a constant, well-formed shard");
        let (clock, entropy) = (self.clock.clone(), self.entropy.clone());
        Records::new(self.store.clone(), shard, self.writer.clone(), clock, entropy).within(PATIENCE)
    }
}

fn absent(what: &str, it: impl ValueEnum) -> Failure {
    let name = it.to_possible_value().map(|it| it.get_name().to_owned()).unwrap_or_default();
    Failure::usage(format!("{what} {name} is not part of this build"))
}

/// The name of this machine, for people.
fn host() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if name.is_empty() { "unknown".to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        store: StoreArgs,
    }

    fn args(words: &[&str]) -> StoreArgs {
        Line::try_parse_from([&["x"], words].concat()).unwrap().store
    }

    #[test]
    fn what_stands_before_cluster_is_the_prefix_of_the_layout() {
        for (written, layout) in
            [("cluster/", ""), ("cluster", ""), ("prod/cluster/", "prod/"), ("a/b/cluster", "a/b/")]
        {
            assert_eq!(args(&["--storage-prefix", written]).layout_prefix().unwrap(), layout, "{written}");
        }
        for wrong in ["prod/", "", "mycluster/"] {
            let failure = args(&["--storage-prefix", wrong]).layout_prefix().unwrap_err();
            assert_eq!(failure.exit, Exit::Usage, "{wrong}");
        }
    }

    #[test]
    fn what_this_build_does_not_have_is_refused_by_name() {
        let refusals = [
            args(&["--storage-bucket", "b", "--storage-provider", "gcs"]).store().err(),
            args(&["--key-provider", "aws-secrets-manager"]).key_source().err(),
        ];
        for (refused, name) in refusals.into_iter().zip(["gcs", "aws-secrets-manager"]) {
            let failure = refused.unwrap();
            assert_eq!(failure.exit, Exit::Usage);
            assert!(failure.what.contains(name) && failure.next.is_some(), "{failure}");
        }
    }

    #[test]
    fn a_directory_that_is_not_there_is_not_made() {
        let dir = tempfile::tempdir().unwrap();
        let gone = dir.path().join("gone");
        let failure = args(&["--storage-provider", "file", "--storage-bucket", gone.to_str().unwrap()]).store().err();
        assert_eq!(failure.unwrap().exit, Exit::NotFound);
        assert!(!gone.exists());
    }
}
