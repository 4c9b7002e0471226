//! Which Nodes were created already. A Node that was deleted must not come back, also after a restart of the keeper, so
//! each is noted by an empty file beside its node file.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use nstance_rt::chain::Chain;
use serde_json::Value;

const PREFIX: &str = ".registered-";

pub(crate) struct Registered {
    dir: Option<PathBuf>,
    names: BTreeSet<String>,
}

impl Registered {
    pub(crate) fn of(dir: Option<&Path>) -> Self {
        let entries = dir.and_then(|it| fs::read_dir(it).ok()).into_iter().flatten().filter_map(Result::ok);
        let names = entries.filter_map(|it| Some(it.file_name().to_str()?.strip_prefix(PREFIX)?.to_owned()));
        Self { dir: dir.map(Path::to_owned), names: names.collect() }
    }

    pub(crate) fn names(&self) -> &BTreeSet<String> {
        &self.names
    }

    pub(crate) fn note(&mut self, name: &str) {
        if !self.names.insert(name.to_owned()) {
            return;
        }
        if let Some(dir) = &self.dir
            && let Err(error) = fs::write(dir.join(format!("{PREFIX}{name}")), "")
        {
            let error = Chain(&error).to_string();
            tracing::warn!(node = name, error, "registration not noted; the node may come back after a restart");
        }
    }

    /// A node file that is gone ends the life of that node: its note goes too.
    pub(crate) fn forget_all_but(&mut self, files: &BTreeMap<String, Value>) {
        let gone: Vec<String> = self.names.iter().filter(|it| !files.contains_key(*it)).cloned().collect();
        for name in gone {
            if let Some(dir) = &self.dir {
                // A note that stays is removed by the next keeper.
                let _ = fs::remove_file(dir.join(format!("{PREFIX}{name}")));
            }
            self.names.remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registration_outlives_the_keeper_and_ends_with_its_file() {
        let dir = tempfile::tempdir().unwrap();
        Registered::of(Some(dir.path())).note("a");
        let mut next = Registered::of(Some(dir.path()));
        assert!(next.names().contains("a"));
        next.forget_all_but(&BTreeMap::from([("a".to_owned(), Value::Null)]));
        assert!(next.names().contains("a"));
        next.forget_all_but(&BTreeMap::new());
        assert!(Registered::of(Some(dir.path())).names().is_empty());
    }
}
