//! The ends of the logs that tell how a boot failed: few lines, redacted, bounded.

use std::{
    fs::{self, File},
    io::{self, Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
};

use nstance_proto::v1::LogTail;

use super::redact::redact;
use crate::host::Host;

const MAX_LINES: usize = 100;

/// Of all tails together. They travel in a report and are kept with the instance's record.
const MAX_BYTES: usize = 16 * 1024;

/// How much of a log's end is looked at: more than can be told, so that a key that began before the last lines is seen
/// as one.
const WINDOW: u64 = 64 * 1024;

/// What the agent's own lines are called.
const OWN: &str = "nstance-agent";

/// The ends of all logs there are. One that cannot be read says so in its place.
pub(crate) fn collect(host: &Host, logs: &[PathBuf]) -> Vec<LogTail> {
    let own = host.own_log().map(|text| (OWN.to_owned(), Ok(text)));
    let found: Vec<(String, io::Result<String>)> = own
        .into_iter()
        .chain(logs.iter().filter_map(|path| Some((path.display().to_string(), end_of(path).transpose()?))))
        .collect();
    let mut left = MAX_BYTES;
    let mut n_left = found.len();
    let mut tails = Vec::with_capacity(n_left);
    for (name, text) in found {
        let text = match text {
            Ok(text) => redact(&text),
            Err(error) => format!("cannot be read: {error}"),
        };
        // What one does not use of its share is the next one's.
        let share = (left / n_left).saturating_sub(name.len());
        let text = last_lines(&text, share).to_owned();
        left = left.saturating_sub(text.len() + name.len());
        n_left -= 1;
        tails.push(LogTail { name, text });
    }
    tails
}

/// The last part of a log, from a line's beginning on; `None` if there is no such log.
fn end_of(path: &Path) -> io::Result<Option<String>> {
    match fs::metadata(path) {
        // A pipe or a terminal would keep us waiting.
        Ok(found) if !found.is_file() => return Err(io::Error::other("not a regular file")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
        Ok(_) => {}
    }
    let mut file = File::open(path)?;
    let length = file.seek(SeekFrom::End(0))?;
    let from = length.saturating_sub(WINDOW);
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(WINDOW).read_to_end(&mut bytes)?;
    let cut = match from {
        0 => 0,
        // Half a line may be half a secret that nothing recognises.
        _ => bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |at| at + 1),
    };
    Ok(Some(String::from_utf8_lossy(&bytes[cut..]).into_owned()))
}

/// The last lines that fit.
fn last_lines(text: &str, max_bytes: usize) -> &str {
    let body = text.strip_suffix('\n').unwrap_or(text);
    let by_lines = body.rmatch_indices('\n').nth(MAX_LINES - 1).map_or(0, |(at, _)| at + 1);
    let by_bytes = text.len().saturating_sub(max_bytes);
    if by_bytes <= by_lines {
        return &text[by_lines..];
    }
    let by_bytes = (by_bytes..=text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
    // From a line's beginning, unless there is only one line.
    match text[by_bytes..].find('\n') {
        Some(at) if by_bytes + at + 1 < text.len() => &text[by_bytes + at + 1..],
        _ => &text[by_bytes..],
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    fn lines(range: std::ops::Range<usize>) -> String {
        range.fold(String::new(), |mut text, n| {
            let _ = writeln!(text, "line {n}");
            text
        })
    }

    #[test]
    fn last_hundred_lines_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        fs::write(&path, lines(0..250)).unwrap();
        let tails = collect(&Host::nowhere(), &[path.clone(), dir.path().join("none")]);
        assert_eq!(tails.len(), 1);
        assert_eq!(tails[0].name, path.display().to_string());
        assert_eq!(tails[0].text, lines(150..250));
    }

    #[test]
    fn tails_share_sixteen_kibibytes() {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<_> = ["a", "b", "c"].iter().map(|name| dir.path().join(name)).collect();
        fs::write(&paths[0], "short\n").unwrap();
        fs::write(&paths[1], "x".repeat(300_000)).unwrap();
        fs::write(&paths[2], format!("{}\n", "y".repeat(500)).repeat(90)).unwrap();
        let tails = collect(&Host::nowhere(), &paths);
        let all: usize = tails.iter().map(|tail| tail.text.len() + tail.name.len()).sum();
        assert!(all <= MAX_BYTES, "{all}");
        assert_eq!(tails[0].text, "short\n");
        assert!(tails[1].text.is_empty(), "one endless line, cut, is not told");
        assert!(12_000 < tails[2].text.len(), "what others do not use is left to the last");
        assert!(tails[2].text.lines().all(|line| line.len() == 500));
    }

    #[test]
    fn key_that_began_before_the_last_lines_is_not_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let body = "QUJD\n".repeat(200);
        fs::write(&path, format!("-----BEGIN PRIVATE KEY-----\n{body}-----END PRIVATE KEY-----\ndone\n")).unwrap();
        let tails = collect(&Host::nowhere(), &[path]);
        assert!(!tails[0].text.contains("QUJD"), "{}", tails[0].text);
        assert!(tails[0].text.ends_with("done\n"));
    }

    #[test]
    fn log_that_cannot_be_read_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let tails = collect(&Host::nowhere(), &[dir.path().to_owned()]);
        assert!(tails[0].text.contains("not a regular file"));
    }
}
