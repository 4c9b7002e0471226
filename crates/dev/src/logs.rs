//! `logs`: the logs of components and agents, merged by time, each line with its source.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::bail;

use crate::layout::Layout;

const PERIOD: Duration = Duration::from_millis(100);

/// All that there is, by name.
fn sources(layout: &Layout) -> BTreeMap<String, PathBuf> {
    let entries = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten();
    let components = entries(layout.logs()).filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        Some((name.strip_suffix(".log")?.to_owned(), entry.path()))
    });
    let agents = entries(layout.instances()).filter_map(|entry| {
        let log = entry.path().join("agent.log");
        log.is_file().then_some((entry.file_name().into_string().ok()?, log))
    });
    components.chain(agents).collect()
}

fn wanted(layout: &Layout, names: &[String]) -> BTreeMap<String, PathBuf> {
    let mut all = sources(layout);
    if !names.is_empty() {
        all.retain(|name, _| names.iter().any(|it| it == name || it.strip_prefix("instance/") == Some(name)));
    }
    all
}

pub(crate) async fn run(layout: &Layout, names: &[String], follow: bool) -> anyhow::Result<()> {
    for name in names {
        if wanted(layout, std::slice::from_ref(name)).is_empty() {
            let known: Vec<String> = sources(layout).into_keys().collect();
            bail!("there is no log of {name:?}; there is\n  {}", known.join("\n  "));
        }
    }
    let mut places: BTreeMap<String, u64> = BTreeMap::new();
    loop {
        let mut lines: Vec<(String, String, String)> = Vec::new();
        for (name, path) in wanted(layout, names) {
            let place = places.entry(name.clone()).or_default();
            let mut time = String::new();
            for line in news(&path, place, follow) {
                // A line without a time belongs to the one before it.
                if let Some(written) = time_of(&line) {
                    time = written;
                }
                lines.push((time.clone(), name.clone(), line));
            }
        }
        // Stable: within one source the order of writing stays.
        lines.sort_by(|a, b| a.0.cmp(&b.0));
        if print(&lines).is_err() || !follow {
            return Ok(()); // whoever closes the pipe has seen enough
        }
        tokio::time::sleep(PERIOD).await;
    }
}

fn print(lines: &[(String, String, String)]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for (_, name, line) in lines {
        writeln!(out, "{name:<10} | {line}")?;
    }
    out.flush()
}

/// Whole lines after `place`, which moves on. A last line without an end is left for later if there is a later.
fn news(path: &Path, place: &mut u64, follow: bool) -> Vec<String> {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = fs::File::open(path)?;
        if file.metadata()?.len() < *place {
            return Ok(Vec::new());
        }
        file.seek(SeekFrom::Start(*place))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let mut bytes = read().unwrap_or_default();
    if follow {
        bytes.truncate(bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1));
    }
    *place += u64::try_from(bytes.len()).unwrap_or(0);
    String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect()
}

/// When a line was written: it begins with that, or carries it as JSON.
fn time_of(line: &str) -> Option<String> {
    let text = match line.strip_prefix("{\"timestamp\":\"") {
        Some(rest) => rest.split('"').next()?,
        None => line.split_ascii_whitespace().next()?,
    };
    let is_time = 19 <= text.len() && text.as_bytes()[4] == b'-' && text.as_bytes()[10] == b'T';
    is_time.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_log_lines_tell_their_time() {
        let time = Some("2026-01-02T03:04:05.678Z".to_owned());
        assert_eq!(time_of("2026-01-02T03:04:05.678Z  INFO server starts"), time);
        assert_eq!(time_of(r#"{"timestamp":"2026-01-02T03:04:05.678Z","level":"INFO"}"#), time);
        assert_eq!(time_of("  at line 7"), None);
        assert_eq!(time_of(""), None);
    }

    #[test]
    fn a_line_being_written_waits_for_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.log");
        fs::write(&path, "one\ntw").unwrap();
        let mut place = 0;
        assert_eq!(news(&path, &mut place, true), ["one"]);
        fs::write(&path, "one\ntwo\n").unwrap();
        assert_eq!(news(&path, &mut place, true), ["two"]);
        assert_eq!(news(&path, &mut place, true), Vec::<String>::new());
    }
}
