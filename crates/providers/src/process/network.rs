//! The address that moves with leadership, in the development environment: a table of who has it, one file for each
//! address, `{work_dir}/net/{ip}.json`. Every address of the loopback network is local to every server, so the table is
//! all there is to move.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io,
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::vm_file::write_json;

#[derive(Debug, Serialize, Deserialize)]
struct Held {
    holder: String,
    /// Under which it was taken, for people.
    epoch: u64,
}

fn dir(work_dir: &Path) -> PathBuf {
    work_dir.join("net")
}

fn file(work_dir: &Path, ip: IpAddr) -> PathBuf {
    // A colon is no letter for a file name everywhere.
    dir(work_dir).join(format!("{}.json", ip.to_string().replace(':', "-")))
}

/// An address that nobody ever took has no holder; one whose file cannot be read is an error.
fn read(work_dir: &Path, ip: IpAddr) -> io::Result<Option<Held>> {
    match fs::read(file(work_dir, ip)) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Servers of all shards share the table; each holds it for microseconds.
async fn lock(work_dir: &Path) -> io::Result<File> {
    fs::create_dir_all(dir(work_dir))?;
    let lock = OpenOptions::new().create(true).append(true).open(dir(work_dir).join(".lock"))?;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::WouldBlock) => tokio::time::sleep(Duration::from_millis(1)).await,
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

pub(super) fn holder(work_dir: &Path, ip: IpAddr) -> io::Result<Option<String>> {
    Ok(read(work_dir, ip)?.map(|held| held.holder))
}

/// Takes the address, whoever has it, as clouds do it.
pub(super) async fn take(work_dir: &Path, ip: IpAddr, holder: &str, epoch: u64) -> io::Result<()> {
    let _lock = lock(work_dir).await?;
    let held = Held { holder: holder.to_owned(), epoch };
    write_json(&file(work_dir, ip), &dir(work_dir).join(".tmp"), &held)
}

/// Gives the address up, only if it is `holder`'s.
pub(super) async fn release(work_dir: &Path, ip: IpAddr, holder: &str) -> io::Result<()> {
    let _lock = lock(work_dir).await?;
    match read(work_dir, ip)? {
        Some(held) if held.holder == holder => fs::remove_file(file(work_dir, ip)),
        _ => Ok(()),
    }
}
