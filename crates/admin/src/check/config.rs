//! Are all shards configured, and do their configs agree?

use std::collections::{BTreeMap, BTreeSet};

use nstance_client::Targets;
use nstance_core::ids::{ClusterId, Shard};
use nstance_rt::chain::Chain;
use nstance_store::records::{decode_object, groups::GroupsFile, groups_key};

use super::Section;
use crate::storage::Cluster;

pub async fn check(mut section: Section<'_>, cluster: &Cluster, targets: Option<&Targets>) {
    let mut shards = match cluster.shards().await {
        Ok(shards) => shards,
        Err(error) => return section.fail("shards", Chain(&error).to_string(), "nstance-admin check --only store"),
    };
    shards.extend(targets.iter().flat_map(|it| &it.0).filter_map(|it| it.shard.parse::<Shard>().ok()));
    if shards.is_empty() {
        let detail = "the bucket has no config of any shard";
        return section.fail("shards", detail, "upload config/SHARD.jsonc; examples/ has some to begin with");
    }
    let mut ids: BTreeMap<ClusterId, BTreeSet<Shard>> = BTreeMap::new();
    for shard in &shards {
        if let Some(id) = one(&mut section, cluster, shard).await {
            ids.entry(id).or_default().insert(shard.clone());
        }
        groups(&mut section, cluster, shard).await;
    }
    match ids.len() {
        0 => section.skip("cluster-id", "no config is valid"),
        1 => section.ok("cluster-id", ids.keys().map(ToString::to_string).collect::<String>()),
        _ => {
            let said = ids.iter().map(|(id, shards)| {
                format!("{id} in {}", shards.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
            });
            let detail = format!("the shards name several: {}", said.collect::<Vec<_>>().join("; "));
            section.fail(
                "cluster-id",
                detail,
                "write the same server.cluster_id into every config, or use two buckets",
            );
        }
    }
}

async fn one(section: &mut Section<'_>, cluster: &Cluster, shard: &Shard) -> Option<ClusterId> {
    let name = format!("{shard}/config");
    let found = match cluster.config(shard).await {
        Ok(found) => found,
        Err(error) => {
            section.fail(&name, Chain(&error).to_string(), "nstance-admin check --only store");
            return None;
        }
    };
    let Some(found) = found else {
        section.fail(&name, format!("config/{shard}.jsonc is missing"), format!("upload config/{shard}.jsonc"));
        return None;
    };
    match found.config {
        Ok(config) => {
            section.ok(&name, format!("{} is valid", found.key));
            Some(config.server.cluster_id.clone())
        }
        Err(report) => {
            section.fail(&name, report, "correct it: nstance-admin config validate FILE");
            None
        }
    }
}

async fn groups(section: &mut Section<'_>, cluster: &Cluster, shard: &Shard) {
    let (name, key) = (format!("{shard}/groups"), groups_key(shard));
    match cluster.get(&key).await {
        Ok(None) => section.ok(&name, "no group was made over the API yet"),
        Ok(Some(object)) => match decode_object::<GroupsFile>(&key, object) {
            Ok(_) => section.ok(&name, ""),
            Err(error) => section.fail(&name, error.to_string(), format!("repair {key}, or restore an older version")),
        },
        Err(error) => section.fail(&name, Chain(&error).to_string(), "nstance-admin check --only store"),
    }
}
