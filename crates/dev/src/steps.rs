//! The lines of a start: each turns from `..` to `ok` with its time on a terminal, and is a plain line elsewhere.

use std::{
    io::{self, IsTerminal as _, Write as _},
    time::Duration,
};

use nstance_core::{ports::clock::Clock as _, time::Mono};
use nstance_rt::clock::SystemClock;

/// How long a gate may take, and how often it is tried.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
const PERIOD: Duration = Duration::from_millis(20);

pub(crate) struct Steps {
    terminal: bool,
}

/// What a gate waits for next.
pub(crate) enum Tried<T> {
    Done(T),
    /// Not yet, and why.
    Wait(String),
    /// Not yet, but so many of the way: each one more lets the patience begin anew.
    Closer(usize, String),
    /// It will never be.
    Failed(String),
}

/// A gate that did not open in time.
#[derive(Debug)]
pub(crate) struct Late {
    pub(crate) gate: String,
    pub(crate) why: String,
    /// Rather than failed for good.
    pub(crate) timed_out: bool,
}

impl Steps {
    pub(crate) fn new() -> Self {
        Self { terminal: io::stdout().is_terminal() }
    }

    pub(crate) fn say(&self, line: &str) {
        let mut out = io::stdout().lock();
        let _ = writeln!(out, "{line}");
        let _ = out.flush();
    }

    fn show(&self, mark: &str, gate: &str, rest: &str, end: &str) {
        let begin = if self.terminal { "\r\x1b[K" } else { "" };
        let mut out = io::stdout().lock();
        let _ = write!(out, "{begin}{mark}  {gate:<14} {rest}{end}");
        let _ = out.flush();
    }

    /// Tries until it works.
    pub(crate) async fn gate<T>(&self, gate: &str, mut attempt: impl AsyncFnMut() -> Tried<T>) -> Result<T, Late> {
        let begin = SystemClock.monotonic();
        if self.terminal {
            self.show("..", gate, "", "");
        }
        let (mut why, mut since, mut best) = (String::new(), begin, 0);
        loop {
            // Within the limit too: an attempt that hangs is as late as one that fails.
            let tried = tokio::time::timeout(PATIENCE, attempt()).await;
            let now = SystemClock.monotonic();
            let reason = match tried {
                Ok(Tried::Done(done)) => {
                    self.show("ok", gate, &seconds(begin, now), "\n");
                    return Ok(done);
                }
                Ok(Tried::Closer(n, reason)) => {
                    if best < n {
                        (best, since) = (n, now);
                    }
                    reason
                }
                Ok(Tried::Wait(reason)) => reason,
                Ok(Tried::Failed(why)) => {
                    self.show("no", gate, &seconds(begin, now), "\n");
                    return Err(Late { gate: gate.to_owned(), why, timed_out: false });
                }
                Err(_) => why.clone(),
            };
            if self.terminal && reason != why {
                self.show("..", gate, first_line(&reason), "");
            }
            why = reason;
            if PATIENCE <= now.since(since) {
                self.show("no", gate, &seconds(begin, now), "\n");
                return Err(Late { gate: gate.to_owned(), why, timed_out: true });
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// Ends a line that was left half-way.
    pub(crate) fn break_off(&self) {
        if self.terminal {
            self.say("");
        }
    }
}

fn first_line(text: &str) -> &str {
    let line = text.lines().next().unwrap_or_default();
    line.char_indices().nth(90).map_or(line, |(at, _)| &line[..at])
}

fn seconds(from: Mono, to: Mono) -> String {
    format!("{:.2} s", to.since(from).as_secs_f64())
}
