//! A block of lines at the foot of a terminal that is drawn over and over.
//!
//! No other screen and no raw mode: what was printed before stays above, the last picture stays when we end, and the
//! only thing to restore is the cursor.

use std::io::{self, IsTerminal as _, Write as _};

pub(crate) struct Screen {
    /// Lines of the last picture, which the next one covers.
    drawn: usize,
}

const HIDE: &str = "\x1b[?25l";
const SHOW: &str = "\x1b[?25h";
/// Terminals that know it show the picture as a whole; others ignore it.
const BEGIN: &str = "\x1b[?2026h";
const END: &str = "\x1b[?2026l";

impl Screen {
    /// `None` if nobody looks.
    pub(crate) fn on_terminal() -> Option<Self> {
        io::stdout().is_terminal().then(|| {
            print!("{HIDE}");
            Self { drawn: 0 }
        })
    }

    /// Columns and rows.
    pub(crate) fn size() -> (usize, usize) {
        match rustix::termios::tcgetwinsize(io::stdout()) {
            Ok(size) if 0 < size.ws_col && 0 < size.ws_row => (size.ws_col.into(), size.ws_row.into()),
            _ => (100, 40),
        }
    }

    pub(crate) fn draw(&mut self, lines: &[String]) {
        let (width, height) = Self::size();
        let mut text = format!("{BEGIN}{}", self.back());
        let shown = lines.len().min(height.saturating_sub(1));
        for line in &lines[..shown] {
            text.push_str(&cut(line, width));
            text.push_str("\x1b[K\n");
        }
        text.push_str("\x1b[J");
        text.push_str(END);
        self.drawn = shown;
        let mut out = io::stdout().lock();
        // A terminal that went away is noticed by the signal that says so.
        let _ = out.write_all(text.as_bytes());
        let _ = out.flush();
    }

    fn back(&self) -> String {
        if self.drawn == 0 { "\r".to_owned() } else { format!("\r\x1b[{}A", self.drawn) }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let mut out = io::stdout().lock();
        let _ = write!(out, "{SHOW}");
        let _ = out.flush();
    }
}

/// A wrapped line would take two rows and spoil the next picture.
fn cut(line: &str, width: usize) -> String {
    line.chars().take(width.saturating_sub(1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_never_wrap() {
        assert_eq!(cut("abcdef", 4), "abc");
        assert_eq!(cut("äöü", 80), "äöü");
    }
}
