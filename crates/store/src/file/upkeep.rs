//! A directory has no settings but its mode.

use std::{fs, io, os::unix::fs::PermissionsExt as _, path::Path};

use async_trait::async_trait;

use super::FileStore;
use crate::upkeep::{Access, Answer, Retention, Upkeep, Versioning};

#[async_trait]
impl Upkeep for FileStore {
    async fn versioning(&self) -> Answer<Versioning> {
        Answer::Known(Versioning::None)
    }

    async fn retention(&self) -> Answer<Retention> {
        Answer::Known(Retention::default())
    }

    async fn access(&self) -> Answer<Access> {
        match access(&self.inner.root) {
            Ok(access) => Answer::Known(access),
            Err(error) => Answer::Unknown(error.to_string()),
        }
    }
}

/// Whether everybody on this machine may look into a directory. One that they cannot get to is shut, whatever its mode.
fn access(root: &Path) -> io::Result<Access> {
    let root = root.canonicalize()?;
    let mode = |path: &Path| io::Result::Ok(fs::metadata(path)?.permissions().mode() & 0o7777);
    let own = mode(&root)?;
    if own & 0o007 == 0 {
        return Ok(Access::Closed);
    }
    for above in root.ancestors().skip(1) {
        if mode(above)? & 0o001 == 0 {
            return Ok(Access::Closed);
        }
    }
    Ok(Access::Open(format!("everybody on this machine, by mode {own:04o} of {}", root.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_directory_is_open_if_everybody_gets_to_it_and_into_it() {
        let dir = tempfile::tempdir().unwrap();
        let chmod = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        let root = dir.path().join("objects");
        let store = FileStore::open(&root, "").unwrap();
        assert_eq!(store.access().await, Answer::Known(Access::Closed), "as it is made");
        chmod(&root, 0o755);
        chmod(dir.path(), 0o700);
        assert_eq!(store.access().await, Answer::Known(Access::Closed), "nobody gets there");
        chmod(dir.path(), 0o711);
        let expected = format!("everybody on this machine, by mode 0755 of {}", root.canonicalize().unwrap().display());
        assert_eq!(store.access().await, Answer::Known(Access::Open(expected)));
        fs::remove_dir_all(&root).unwrap();
        assert!(matches!(store.access().await, Answer::Unknown(_)));
    }
}
