//! Writes the manifests below `config/`, or below the directory that is given. `make crds` calls it.

use std::{fs, path::PathBuf};

use anyhow::Context as _;
use nstance_operator::api::manifests;

fn main() -> anyhow::Result<()> {
    let root = std::env::args_os().nth(1).map_or_else(|| PathBuf::from("config"), PathBuf::from);
    for (path, text) in manifests::files()? {
        let path = root.join(path);
        if fs::read_to_string(&path).is_ok_and(|it| it == text) {
            continue;
        }
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
        }
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        println!("{}", path.display());
    }
    Ok(())
}
