//! `cluster reencrypt`: after a new encryption key, every secret is sealed with it, so that the old one can go.

use std::collections::BTreeMap;

use clap::Args;
use nstance_config::model;
use nstance_rt::chain::Chain;
use nstance_store::{
    keys::{EncryptionKey, KeySource, load_key},
    secrets::ObjectSecrets,
};
use serde_json::json;

use crate::{
    args::Context,
    exit::Exit,
    failure::Failure,
    output::{Shown, Table},
    storage::{Cluster, StoreArgs},
};

#[derive(Debug, Args)]
pub struct ReencryptArgs {
    /// Only say which secrets would be written
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    store: StoreArgs,
}

pub(super) async fn run(context: &Context, args: ReencryptArgs) -> Result<Exit, Failure> {
    let cluster = args.store.open()?;
    let old_keys = old_keys(context, &cluster).await?;
    let secrets = args.store.secrets(cluster.store.clone(), old_keys)?;
    let results = reencrypt(&secrets, args.dry_run).await?;
    let n_failed = results.values().filter(|it| it.is_err()).count();
    let word = |result: &Result<bool, String>| match result {
        Ok(false) => "current",
        Ok(true) if args.dry_run => "would be sealed anew",
        Ok(true) => "sealed anew",
        Err(_) => "failed",
    };
    let mut table = Table::new(&["SECRET", "RESULT"]);
    for (name, result) in &results {
        table.row([name.clone(), word(result).to_owned()]);
    }
    for (name, error) in results.iter().filter_map(|(name, it)| Some((name, it.as_ref().err()?))) {
        table.note(format!("{name}: {error}"));
    }
    let documents = results.iter().map(|(name, result)| {
        json!({"secret": name, "result": word(result).replace(' ', "_"), "problem": result.as_ref().err()})
    });
    context.output.show(&Shown {
        document: json!({"secrets": documents.collect::<Vec<_>>(), "dry_run": args.dry_run}),
        table,
        names: results.keys().cloned().collect(),
    });
    if 0 < n_failed {
        return Err(Failure::failed(format!(
            "{n_failed} of {} secrets do not open or could not be written",
            results.len()
        ))
        .next(
            "give every key that was ever used: one per line of the key source, or server.secrets.old_encryption_keys",
        ));
    }
    if !args.dry_run {
        context.output.note("next: take the old key out of the config, then nstance-admin config refresh");
    }
    Ok(Exit::Done)
}

/// What became of each secret: whether it was, or would be, sealed anew; or why that failed.
async fn reencrypt(secrets: &ObjectSecrets, dry_run: bool) -> Result<BTreeMap<String, Result<bool, String>>, Failure> {
    let names = secrets.names().await.map_err(|error| Failure::failed("list the secrets").because(error))?;
    let mut results = BTreeMap::new();
    for name in names {
        let done = if dry_run { secrets.needs_sealing(&name).await } else { secrets.reseal(&name).await };
        results.insert(name, done.map_err(|error| Chain(&error).to_string()));
    }
    Ok(results)
}

/// The keys that the configs call old, as far as they can be had here.
async fn old_keys(context: &Context, cluster: &Cluster) -> Result<Vec<EncryptionKey>, Failure> {
    let configs = cluster.configs().await.map_err(|error| Failure::failed("read the configs").because(error))?;
    let mut sources: Vec<KeySource> = Vec::new();
    for key in configs.valid().flat_map(|config| &config.server.secrets.old_encryption_keys) {
        let source = match key.provider {
            model::KeyProvider::Env => KeySource::Env(key.source.clone()),
            model::KeyProvider::File => KeySource::File((&key.source).into()),
            _ => continue,
        };
        if !sources.contains(&source) {
            sources.push(source);
        }
    }
    let mut keys = Vec::new();
    for source in sources {
        match load_key(&source) {
            Ok(loaded) => keys.extend(loaded.keys),
            Err(error) => {
                context.output.note(&format!("note: an old key of the config is not here: {}", Chain(&error)))
            }
        }
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nstance_core::ports::secrets::{Secret, Secrets as _};
    use nstance_rt::entropy::SeededEntropy;
    use nstance_store::memory::MemoryStore;

    use super::*;

    fn secrets(store: &Arc<MemoryStore>, keys: &[u8]) -> ObjectSecrets {
        let keys = keys.iter().map(|byte| EncryptionKey::new([*byte; 32])).collect();
        ObjectSecrets::new(store.clone(), None, keys, Vec::new(), Arc::new(SeededEntropy::new(1))).unwrap()
    }

    #[tokio::test]
    async fn every_secret_is_sealed_with_the_first_key_and_the_old_one_can_go() {
        let store = Arc::new(MemoryStore::new());
        secrets(&store, &[1]).create("old", &Secret(b"a".to_vec())).await.unwrap();
        secrets(&store, &[2]).create("new", &Secret(b"b".to_vec())).await.unwrap();
        secrets(&store, &[9]).create("lost", &Secret(b"c".to_vec())).await.unwrap();
        let both = secrets(&store, &[2, 1]);

        let told = reencrypt(&both, true).await.unwrap();
        assert_eq!((&told["old"], &told["new"]), (&Ok(true), &Ok(false)));
        assert!(told["lost"].as_ref().unwrap_err().contains("no configured encryption key"), "{told:?}");
        assert!(secrets(&store, &[2]).get("old").await.is_err(), "a dry run writes nothing");

        assert_eq!(reencrypt(&both, false).await.unwrap()["old"], Ok(true));
        let alone = secrets(&store, &[2]);
        assert_eq!(alone.get("old").await.unwrap().0, b"a");
        assert_eq!(alone.get("new").await.unwrap().0, b"b");
        assert_eq!(reencrypt(&both, false).await.unwrap()["old"], Ok(false), "nothing is left to do");
        assert!(secrets(&store, &[9]).get("lost").await.is_ok(), "what does not open is left alone");
    }
}
