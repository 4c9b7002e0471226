//! The memory of a fake cloud as a file, for whoever is not in its process.
//!
//! Every VM that is made and every one that ends is a line of JSON, appended by one write. A cloud reads what others
//! appended before each of its calls: so a load generator ends a VM by appending [`Line::Gone`], reads from
//! [`Line::Made`] when its create call began and by which nonce its agent may register, and a server that is started
//! again finds the VMs it left. A deleted VM is gone at once, whatever `delete_time` says.

use std::{
    fs::{File, OpenOptions},
    io::{self, Seek as _, Write as _},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::Path,
};

use nstance_core::{
    ids::{Epoch, IdError},
    ports::provider::Tags,
};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    Made(Box<Made>),
    /// The instance whose VMs ended.
    Gone(String),
}

/// A VM as it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    pub instance: String,
    pub provider_id: String,
    /// When the create call began, on the machine's boot clock.
    pub asked_nanos: u64,
    /// Milliseconds since 1970.
    pub created_at: i64,
    pub cluster: String,
    pub shard: String,
    pub tenant: String,
    pub group: String,
    pub epoch: u64,
    pub on_demand: bool,
    pub template: String,
    pub infra_hash: String,
    pub subnet: Option<String>,
    pub instance_type: Option<String>,
    pub ip4: Option<String>,
    /// By which its agent registers.
    pub nonce: String,
}

impl Made {
    pub(super) fn tags(&self) -> Result<Tags, IdError> {
        Ok(Tags {
            cluster: self.cluster.parse()?,
            shard: self.shard.parse()?,
            instance: self.instance.parse()?,
            tenant: self.tenant.parse()?,
            group: self.group.parse()?,
            on_demand: self.on_demand,
            epoch: Epoch(self.epoch),
            template: self.template.clone(),
            infra_hash: self.infra_hash.clone(),
        })
    }
}

/// One end of a journal. Several processes may hold one at the same file.
#[derive(Debug)]
pub struct Journal {
    file: File,
    /// Lines that begin before it were read.
    read_to: u64,
}

impl Journal {
    /// Opens the file, or makes it.
    pub fn open(path: &Path) -> io::Result<Self> {
        // For its owner alone: nonces are in it.
        let file = OpenOptions::new().create(true).append(true).read(true).mode(0o600).open(path)?;
        Ok(Self { file, read_to: 0 })
    }

    /// Appends lines, all of them by one write.
    pub fn append(&mut self, lines: &[Line]) -> io::Result<()> {
        self.file.write_all(&written(lines)?)
    }

    /// Appends a line that is no news to us: we do not read it again, unless somebody else's came before it.
    pub fn note(&mut self, line: Line) -> io::Result<()> {
        let bytes = written(&[line])?;
        self.file.write_all(&bytes)?;
        let end = self.file.stream_position()?;
        if end.checked_sub(u64::try_from(bytes.len()).unwrap_or(u64::MAX)) == Some(self.read_to) {
            self.read_to = end;
        }
        Ok(())
    }

    /// The lines that were appended since it was last asked, by whomever.
    pub fn news(&mut self) -> io::Result<Vec<Line>> {
        let (mut bytes, mut chunk) = (Vec::new(), [0; 16 * 1024]);
        loop {
            let at = self.read_to + u64::try_from(bytes.len()).unwrap_or(u64::MAX);
            match self.file.read_at(&mut chunk, at)? {
                0 => break,
                n => bytes.extend_from_slice(&chunk[..n]),
            }
        }
        // A line that is still being written is read the next time.
        let Some(end) = bytes.iter().rposition(|byte| *byte == b'\n') else { return Ok(Vec::new()) };
        self.read_to += u64::try_from(end + 1).unwrap_or(u64::MAX);
        bytes[..end].split(|byte| *byte == b'\n').map(|line| serde_json::from_slice(line).map_err(Into::into)).collect()
    }
}

fn written(lines: &[Line]) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for line in lines {
        serde_json::to_writer(&mut bytes, line)?;
        bytes.push(b'\n');
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_half_written_is_read_once_it_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let (mut ours, mut theirs) = (Journal::open(&path).unwrap(), Journal::open(&path).unwrap());
        assert_eq!(ours.news().unwrap(), []);
        theirs.append(&[Line::Gone("a".to_owned()), Line::Gone("b".to_owned())]).unwrap();
        theirs.file.write_all(b"{\"gone\":").unwrap();
        assert_eq!(ours.news().unwrap(), [Line::Gone("a".to_owned()), Line::Gone("b".to_owned())]);
        assert_eq!(ours.news().unwrap(), []);
        theirs.file.write_all(b"\"c\"}\n").unwrap();
        assert_eq!(ours.news().unwrap(), [Line::Gone("c".to_owned())]);
        assert_eq!(theirs.news().unwrap().len(), 3, "each end reads all lines, its own too");
    }
    #[test]
    fn what_one_notes_oneself_is_no_news_but_hides_nobody_elses() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let (mut ours, mut theirs) = (Journal::open(&path).unwrap(), Journal::open(&path).unwrap());
        let gone = |id: &str| Line::Gone(id.to_owned());
        ours.note(gone("a")).unwrap();
        assert_eq!(ours.news().unwrap(), []);
        theirs.append(&[gone("b")]).unwrap();
        ours.note(gone("c")).unwrap();
        assert_eq!(ours.news().unwrap(), [gone("b"), gone("c")]);
        ours.note(gone("d")).unwrap();
        theirs.append(&[gone("e")]).unwrap();
        assert_eq!(ours.news().unwrap(), [gone("e")]);
        assert_eq!(theirs.news().unwrap().len(), 5);
    }
}
