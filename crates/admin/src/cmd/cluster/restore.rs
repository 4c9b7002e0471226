//! `cluster restore`: a bucket that was lost, made again from what a server's cache remembers.

use std::{collections::BTreeMap, path::PathBuf};

use clap::Args;
use nstance_core::ports::objects::{Condition, ObjectStore};
use nstance_rt::chain::Chain;
use nstance_store::cache::{Remembered, remembered};
use serde_json::json;

use crate::{
    args::Context,
    exit::Exit,
    failure::Failure,
    output::{Shown, Table},
    storage::StoreArgs,
};

#[derive(Debug, Args)]
pub struct RestoreArgs {
    /// The server's --cachedir
    #[arg(long, value_name = "DIR")]
    cachedir: PathBuf,
    /// Only say what would be put back, even with --yes
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    store: StoreArgs,
}

/// What became of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    WouldRestore,
    Restored,
    /// Something is there already, and stays.
    There,
    Failed(String),
}

impl Outcome {
    fn as_str(&self) -> &'static str {
        match self {
            Self::WouldRestore => "would be restored",
            Self::Restored => "restored",
            Self::There => "there already",
            Self::Failed(_) => "failed",
        }
    }
}

pub(super) async fn run(context: &Context, args: RestoreArgs) -> Result<Exit, Failure> {
    let cluster = args.store.open()?;
    let cache = remembered(&args.cachedir).map_err(|error| {
        Failure::failed(format!("read the cache {}", args.cachedir.display()))
            .because(error)
            .next("--cachedir of a server of this cluster; every server has its own")
    })?;
    // The name of a cluster decides whose machines they are.
    if let Ok(id) = cluster.id().await
        && id.as_str() != cache.cluster
    {
        return Err(Failure::failed(format!("the cache is of cluster {}, the bucket of {id}", cache.cluster))
            .next("another --cachedir, or another --storage-bucket"));
    }
    let dry_run = args.dry_run || !context.yes;
    let done = restore(cluster.store.as_ref(), &cache, dry_run).await;
    let mut table = Table::new(&["OBJECT", "RESULT"]);
    for (key, result) in &done {
        table.row([key.as_str(), result.as_str()]);
    }
    for (key, result) in &done {
        if let Outcome::Failed(why) = result {
            table.note(format!("{key}: {why}"));
        }
    }
    let objects = done.iter().map(|(key, it)| json!({"key": key, "result": it.as_str().replace(' ', "_")}));
    context.output.show(&Shown {
        document: json!({
            "cluster_id": cache.cluster,
            "shard": cache.shard,
            "dry_run": dry_run,
            "objects": objects.collect::<Vec<_>>(),
        }),
        table,
        names: done.keys().cloned().collect(),
    });
    let n_failed = done.values().filter(|it| matches!(it, Outcome::Failed(_))).count();
    if 0 < n_failed {
        return Err(Failure::failed(format!("{n_failed} of {} objects could not be restored", done.len()))
            .next("repeat it: what is there already is left alone"));
    }
    let next = if dry_run {
        "nothing was written; repeat it with --yes".to_owned()
    } else {
        format!(
            "next: the same with a cache of every other shard than {}; upload the configs; and restore the secrets, which no \
             cache has, from a backup, else nstance-admin cluster rotate-ca --lost-key",
            cache.shard
        )
    };
    context.output.note(&next);
    Ok(Exit::Done)
}

/// Only what is an object of the layout, and no lease: an old one would say who leads.
fn is_kept(key: &str) -> bool {
    let ours = ["cluster/", "config/", "shard/"].iter().any(|prefix| key.starts_with(prefix));
    ours && !key.ends_with("/leader.json")
}

/// Creates what is missing, `ca.crt` last: where it is, servers go on.
async fn restore(store: &dyn ObjectStore, cache: &Remembered, dry_run: bool) -> BTreeMap<String, Outcome> {
    let mut objects: Vec<(&String, &Vec<u8>)> = cache.objects.iter().filter(|(key, _)| is_kept(key)).collect();
    objects.sort_by_key(|(key, _)| (key.as_str() == "cluster/ca.crt", key.as_str()));
    let mut done = BTreeMap::new();
    for (key, body) in objects {
        let result = match store.get(key).await {
            Ok(_) => Outcome::There,
            Err(error) if !error.is_not_found() => Outcome::Failed(Chain(&error).to_string()),
            Err(_) if dry_run => Outcome::WouldRestore,
            Err(_) => match store.put(key, body.clone(), Condition::Create).await {
                Ok(_) => Outcome::Restored,
                Err(error) if error.is_precondition() => Outcome::There,
                Err(error) => Outcome::Failed(Chain(&error).to_string()),
            },
        };
        done.insert(key.clone(), result);
    }
    done
}

#[cfg(test)]
mod tests {
    use nstance_store::memory::MemoryStore;

    use super::*;

    #[tokio::test]
    async fn restoring_creates_what_is_missing_and_touches_nothing_else() {
        let store = MemoryStore::new();
        store.put("config/a.jsonc", b"newer".to_vec(), Condition::Create).await.unwrap();
        let keys = ["cluster/ca.crt", "config/a.jsonc", "shard/a/groups.jsonc", "shard/a/leader.json", "led"];
        let objects = keys.map(|key| (key.to_owned(), b"old".to_vec())).into();
        let cache = Remembered { cluster: "demo".into(), shard: "a".into(), objects };

        let told = restore(&store, &cache, true).await;
        assert_eq!(told["cluster/ca.crt"], Outcome::WouldRestore);
        assert_eq!(store.list("").await.unwrap().len(), 1, "a dry run writes nothing");
        let done = restore(&store, &cache, false).await;
        let expected = [
            ("cluster/ca.crt", Outcome::Restored),
            ("config/a.jsonc", Outcome::There),
            ("shard/a/groups.jsonc", Outcome::Restored),
        ];
        assert_eq!(done, expected.map(|(key, it)| (key.to_owned(), it)).into());
        assert_eq!(store.get("config/a.jsonc").await.unwrap().body, b"newer");
        assert!(store.get("shard/a/leader.json").await.is_err(), "no lease comes back");
    }
}
