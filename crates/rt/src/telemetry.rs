//! Log lines: JSON for machines, short text for a terminal.

use std::{
    collections::VecDeque,
    io::{self, Write},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tracing_subscriber::fmt::MakeWriter;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogForm {
    Text,
    Json,
}

/// Starts logging to standard error. A second call changes nothing, so tests may race for it.
pub fn start(form: LogForm, debug: bool) {
    begin(form, if debug { "debug" } else { "info" }, io::stderr);
}

/// The same, at `error`, `warn`, `info` or `debug`.
pub fn start_at(form: LogForm, level: &str) {
    begin(form, level, io::stderr);
}

/// Starts logging to standard output, and remembers the last lines. For a process whose standard error is the machine's
/// console.
pub fn start_on_stdout(form: LogForm, debug: bool) -> LogRing {
    let ring = LogRing::default();
    begin(form, if debug { "debug" } else { "info" }, Tee(ring.clone()));
    ring
}

fn begin<W>(form: LogForm, level: &str, writer: W)
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    #[cfg(feature = "env-filter")]
    {
        // Ours at the wanted level, the libraries' only when they complain.
        let others = if level == "error" { "error" } else { "warn" };
        let filter = tracing_subscriber::EnvFilter::try_from_env("NSTANCE_LOG").unwrap_or_else(|_| {
            tracing_subscriber::EnvFilter::new(format!(
                "{others},nstance_server={level},nstance_store={level},nstance_providers={level},nstance_rt={level},\
                 nstance_agent={level},nstance_dev={level},nstance_identity={level},nstance_client={level},\
                 nstance_admin={level},nstance_operator={level}"
            ))
        });
        let builder = tracing_subscriber::fmt().with_writer(writer).with_env_filter(filter);
        let _ = match form {
            LogForm::Text => builder.with_target(false).with_ansi(false).try_init(),
            LogForm::Json => builder.json().flatten_event(true).with_current_span(false).try_init(),
        };
    }
    #[cfg(not(feature = "env-filter"))]
    {
        let level = level.parse().unwrap_or(tracing::Level::INFO);
        let builder = tracing_subscriber::fmt().with_writer(writer).with_max_level(level);
        let _ = match form {
            LogForm::Text => builder.with_target(false).with_ansi(false).try_init(),
            LogForm::Json => builder.json().flatten_event(true).with_current_span(false).try_init(),
        };
    }
}

/// Some forty lines: enough to see how it came to this, little enough to always keep.
const RING_BYTES: usize = 8 * 1024;

/// The last lines of a process's own log. All clones are one.
#[derive(Clone, Default)]
pub struct LogRing(Arc<Mutex<VecDeque<u8>>>);

impl LogRing {
    fn bytes(&self) -> MutexGuard<'_, VecDeque<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, line: &[u8]) {
        let line = &line[line.len().saturating_sub(RING_BYTES)..];
        let mut bytes = self.bytes();
        let excess = (bytes.len() + line.len()).saturating_sub(RING_BYTES);
        bytes.drain(..excess);
        bytes.extend(line);
    }

    /// What is remembered, in whole lines.
    pub fn text(&self) -> String {
        let bytes = self.bytes();
        let cut = if bytes.len() < RING_BYTES {
            0
        } else {
            bytes.iter().position(|byte| *byte == b'\n').map_or(0, |at| at + 1)
        };
        let kept: Vec<u8> = bytes.iter().skip(cut).copied().collect();
        String::from_utf8_lossy(&kept).into_owned()
    }
}

struct Tee(LogRing);

impl<'a> MakeWriter<'a> for Tee {
    type Writer = TeeWriter<'a>;

    fn make_writer(&'a self) -> TeeWriter<'a> {
        TeeWriter(&self.0)
    }
}

struct TeeWriter<'a>(&'a LogRing);

impl Write for TeeWriter<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.push(line);
        // A reader that went away costs the line there, not here.
        let _ = io::stdout().write_all(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_keeps_the_last_whole_lines() {
        let ring = LogRing::default();
        ring.push(b"first\n");
        assert_eq!(ring.text(), "first\n");
        for n in 0..2000 {
            ring.push(format!("line {n}\n").as_bytes());
        }
        let text = ring.text();
        assert!(text.len() <= RING_BYTES && RING_BYTES - 20 < text.len(), "{}", text.len());
        assert!(text.starts_with("line ") && text.ends_with("line 1999\n"), "{text}");
        ring.push(&[b'x'; 3 * RING_BYTES]);
        assert_eq!(ring.bytes().len(), RING_BYTES);
    }
}
