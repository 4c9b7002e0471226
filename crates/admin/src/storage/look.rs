//! What is read from the bucket as a whole: configs, CA, leases, operators, the log of certificates.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt as _, TryStreamExt as _};
use nstance_config::{Checks, Config, load, render::render_ca};
use nstance_core::{
    ids::{ClusterId, Shard},
    ports::{
        objects::{ETag, Object, StoreError},
        secrets::Secrets,
    },
};
use nstance_identity::{
    ca::{Bundle, Ca, CaProfile},
    subject::Subject,
    vault::read_ca_key,
};
use nstance_store::records::{
    Record, Versioned, ca_crt_key, certlog::CertlogRecord, config_keys, decode_object, leader::LeaseRecord, lease_key,
    operator::OperatorRecord, parse_operator_key,
};

use super::Cluster;
use crate::{exit::Exit, failure::Failure};

/// Objects read beside each other.
const READS: usize = 32;

/// A shard's config as it is stored.
pub struct ShardConfig {
    pub shard: Shard,
    pub key: String,
    pub etag: ETag,
    /// The whole report if it is not valid.
    pub config: Result<Box<Config>, String>,
}

/// The configs of all shards that the bucket knows of.
pub struct Configs(pub Vec<ShardConfig>);

impl Configs {
    /// Those that are valid.
    pub fn valid(&self) -> impl Iterator<Item = &Config> {
        self.0.iter().filter_map(|it| it.config.as_ref().ok()).map(Box::as_ref)
    }
}

impl Cluster {
    /// Every shard that has a config, a lease or records.
    pub async fn shards(&self) -> Result<BTreeSet<Shard>, StoreError> {
        let (configs, below) = tokio::try_join!(self.store.list("config/"), self.store.list("shard/"))?;
        let named = configs.iter().filter_map(|it| it.key.strip_prefix("config/")?.strip_suffix(".jsonc"));
        let held = below.iter().filter_map(|it| Some(it.key.strip_prefix("shard/")?.split_once('/')?.0));
        Ok(named.chain(held).filter_map(|it| it.parse().ok()).collect())
    }

    /// `None` on the store's own word only.
    pub async fn get(&self, key: &str) -> Result<Option<Object>, StoreError> {
        match self.store.get(key).await {
            Ok(object) => Ok(Some(object)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A shard's config, from the first place that has one.
    pub async fn config(&self, shard: &Shard) -> Result<Option<ShardConfig>, StoreError> {
        for key in config_keys(shard) {
            let Some(object) = self.get(&key).await? else { continue };
            let checks = Checks { schemas: nstance_schemas::ALL, shard: Some(shard) };
            let loaded = load(&key, &object.body, &checks);
            let config = loaded.config.map(Box::new).ok_or_else(|| loaded.report.text().trim_end().to_owned());
            return Ok(Some(ShardConfig { shard: shard.clone(), key, etag: object.etag, config }));
        }
        Ok(None)
    }

    pub async fn configs(&self) -> Result<Configs, StoreError> {
        let mut configs = Vec::new();
        for shard in self.shards().await? {
            configs.extend(self.config(&shard).await?);
        }
        Ok(Configs(configs))
    }

    pub async fn bundle(&self) -> Result<Bundle, Failure> {
        let what = "read the CA's certificate cluster/ca.crt";
        let object = self.get(&ca_crt_key()).await.map_err(|error| Failure::failed(what).because(error))?;
        let Some(object) = object else {
            return Err(Failure::new(
                Exit::NotFound,
                format!("the cluster has no CA yet in {}", self.store.describe()),
            )
            .next("start a nstance-server, whose first start makes the CA and the nonce key; or check the bucket"));
        };
        Bundle::parse(&object.body).map_err(|error| Failure::failed(what).because(error))
    }

    /// The CA with its key: whoever has it may issue.
    pub async fn ca(&self, secrets: &dyn Secrets) -> Result<Ca, Failure> {
        let bundle = self.bundle().await?;
        let what = || Failure::failed("read the CA's key");
        let key = read_ca_key(secrets, &bundle.issuer().fingerprint).await.map_err(|error| what().because(error))?;
        Ca::load(bundle.pem().as_bytes(), key).map_err(|error| what().because(error))
    }

    /// The cluster's own name: as its configs say, else as the log of the CA says.
    pub async fn id(&self) -> Result<ClusterId, Failure> {
        Ok(self.profile().await?.cluster)
    }

    /// Who the CA is, as the configs say; without any, as the log says.
    pub async fn profile(&self) -> Result<CaProfile, Failure> {
        let what = || Failure::failed("find out the cluster's id");
        let configs = self.configs().await.map_err(|error| what().because(error))?;
        let mut ids: BTreeMap<&ClusterId, &Config> = BTreeMap::new();
        for config in configs.valid() {
            ids.entry(&config.server.cluster_id).or_insert(config);
        }
        match ids.len() {
            0 => {}
            1 => return ids.values().next().map(|config| ca_profile(config)).ok_or_else(what),
            _ => {
                let named: Vec<String> = ids.keys().map(ToString::to_string).collect();
                return Err(what()
                    .because(format!("the configs of this bucket name several: {}", named.join(", ")))
                    .next("nstance-admin check --only config"));
            }
        }
        let bundle = self.bundle().await?;
        let logged = self.log("cluster/certlog/_system.").await.map_err(|error| what().because(error))?;
        let made = logged.into_iter().flatten().find(|entry| entry.subject_id == bundle.issuer().fingerprint);
        made.map(|entry| CaProfile::of(entry.cluster)).ok_or_else(|| {
            what()
                .because("no valid config and no log entry of the CA names it")
                .next("nstance-admin check --only config")
        })
    }

    pub async fn lease(&self, shard: Option<&Shard>) -> Result<Option<(LeaseRecord, Object)>, Failure> {
        let key = lease_key(shard);
        let what = || Failure::failed(format!("read the lease {key}"));
        let Some(object) = self.get(&key).await.map_err(|error| what().because(error))? else { return Ok(None) };
        let record = decode_object::<LeaseRecord>(&key, object.clone()).map_err(|error| what().because(error))?;
        Ok(Some((record.value, object)))
    }

    /// All objects below a prefix, decoded; what cannot be read is told.
    pub async fn all<T: Record>(
        &self,
        prefix: &str,
        keep: impl Fn(&str) -> bool,
    ) -> Result<Vec<Result<Versioned<T>, String>>, StoreError> {
        let keys = self.store.list(prefix).await?.into_iter().map(|it| it.key).filter(|key| keep(key));
        let read = futures::stream::iter(keys)
            .map(|key| async move {
                let object = self.get(&key).await?;
                Ok(object.map(|object| decode_object::<T>(&key, object).map_err(|error| error.to_string())))
            })
            .buffered(READS)
            .try_filter_map(|it| async move { Ok::<_, StoreError>(it) });
        read.try_collect().await
    }

    pub async fn operators(&self) -> Result<Vec<Result<Versioned<OperatorRecord>, String>>, StoreError> {
        self.all("cluster/operator/", |key| parse_operator_key(key).is_some()).await
    }

    /// Entries of the log whose keys begin so.
    pub async fn log(&self, prefix: &str) -> Result<Vec<Result<CertlogRecord, String>>, StoreError> {
        let read = self.all::<CertlogRecord>(prefix, |key| key.contains("certlog/")).await?;
        Ok(read.into_iter().map(|it| it.map(|it| it.value)).collect())
    }
}

/// The same as a server makes of its config.
fn ca_profile(config: &Config) -> CaProfile {
    let mut profile = CaProfile::of(config.server.cluster_id.clone());
    profile.ttl = Some(config.certificates.ca.ttl);
    let Ok(ca) = render_ca(config) else { return profile };
    let Some(common_name) = ca.cn else { return profile };
    let organization = match ca.names.organization {
        none if none.is_empty() => vec![config.server.cluster_id.to_string()],
        some => some,
    };
    profile.subject = Some(Subject {
        common_name,
        organization,
        country: ca.names.country,
        province: ca.names.province,
        locality: ca.names.locality,
        street: ca.names.street,
        postal_code: ca.names.postal_code,
        ..Subject::default()
    });
    profile
}
