//! Writes progress to stderr: lines that are redrawn on a terminal, one line per change elsewhere.

use std::io::{self, Write};

pub(super) struct Progress {
    /// How many lines were drawn last; `None` if nothing may be drawn over.
    drawn: Option<usize>,
}

impl Progress {
    pub(super) fn new(redraws: bool) -> Self {
        Self { drawn: redraws.then_some(0) }
    }

    /// Writes what changed: on a terminal problems above the redrawn lines, elsewhere only the changes.
    pub(super) fn show(&mut self, changes: &Changes, lines: impl FnOnce() -> Vec<String>) {
        let mut out = io::stderr().lock();
        let _ = self.write(&mut out, changes, lines);
    }

    /// Redraws the lines, because the elapsed times have changed.
    pub(super) fn redraw(&mut self, lines: impl FnOnce() -> Vec<String>) {
        if self.drawn.is_some_and(|drawn| 0 < drawn) {
            self.show(&Changes::default(), lines);
        }
    }

    fn write(&mut self, out: &mut dyn Write, changes: &Changes, lines: impl FnOnce() -> Vec<String>) -> io::Result<()> {
        let Some(drawn) = self.drawn else {
            for line in changes.problems.iter().chain(&changes.states) {
                writeln!(out, "{line}")?;
            }
            return out.flush();
        };
        if 0 < drawn {
            write!(out, "\r\x1b[{drawn}A\x1b[J")?;
        }
        for line in &changes.problems {
            writeln!(out, "{line}")?;
        }
        let lines = lines();
        let width = width();
        for line in &lines {
            // A wrapped line would take two rows, and the next redraw would not cover it.
            writeln!(out, "{}", line.chars().take(width.saturating_sub(1)).collect::<String>())?;
        }
        self.drawn = Some(lines.len());
        out.flush()
    }
}

fn width() -> usize {
    match rustix::termios::tcgetwinsize(io::stderr()) {
        Ok(size) if 0 < size.ws_col => size.ws_col.into(),
        _ => 120,
    }
}

/// The lines that one update added.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    /// The progress, for outputs that cannot be redrawn.
    pub(super) states: Vec<String>,
    /// Holds and errors: written once, and kept on the screen.
    pub(super) problems: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes(states: &[&str], problems: &[&str]) -> Changes {
        let owned = |lines: &[&str]| lines.iter().map(|it| (*it).to_owned()).collect();
        Changes { states: owned(states), problems: owned(problems) }
    }

    fn written(progress: &mut Progress, changes: &Changes, lines: &[&str]) -> String {
        let mut out = Vec::new();
        progress.write(&mut out, changes, || lines.iter().map(|it| (*it).to_owned()).collect()).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn terminal_is_redrawn_and_keeps_problems_above() {
        let mut terminal = Progress::new(true);
        assert_eq!(written(&mut terminal, &changes(&["a 1/2"], &[]), &["a 1/2", "b 0/2"]), "a 1/2\nb 0/2\n");
        let again = written(&mut terminal, &changes(&["a 2/2"], &["hold  a"]), &["a 2/2", "b 0/2"]);
        assert_eq!(again, "\r\u{1b}[2A\u{1b}[Jhold  a\na 2/2\nb 0/2\n");
    }

    #[test]
    fn pipe_gets_one_line_per_change() {
        let mut pipe = Progress::new(false);
        assert_eq!(written(&mut pipe, &changes(&["a 1/2"], &[]), &["a 1/2", "b 0/2"]), "a 1/2\n");
        assert_eq!(written(&mut pipe, &changes(&["a 2/2"], &["hold  a"]), &[]), "hold  a\na 2/2\n");
        assert_eq!(written(&mut pipe, &Changes::default(), &["x"]), "");
    }
}
