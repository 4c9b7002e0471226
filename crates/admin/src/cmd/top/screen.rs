//! The terminal: taken on the way in, and given back as it was, however we leave.

use std::io::{self, Read as _, Write as _};

use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::sync::mpsc;

/// The other screen, so that what stood there before is there again afterwards; and no cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) width: usize,
    pub(super) height: usize,
}

/// What may be drawn on. The last column is none of it: from there a terminal would wipe the letter it has just drawn.
pub(super) fn size() -> Size {
    match tcgetwinsize(io::stdout()) {
        Ok(it) if 0 < it.ws_col && 0 < it.ws_row => {
            Size { width: usize::from(it.ws_col) - 1, height: it.ws_row.into() }
        }
        _ => Size { width: 79, height: 24 },
    }
}

pub(super) struct Screen {
    /// How keys were read; nothing if they do not come from a terminal.
    before: Option<Termios>,
}

impl Screen {
    pub(super) fn open() -> io::Result<Self> {
        let before = tcgetattr(io::stdin()).ok();
        // From here on it is given back.
        let screen = Self { before };
        if let Some(before) = &screen.before {
            let mut quiet = before.clone();
            // A key is read at once and not shown. Signals stay: Ctrl-C is one.
            quiet.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
            quiet.special_codes[SpecialCodeIndex::VMIN] = 1;
            quiet.special_codes[SpecialCodeIndex::VTIME] = 0;
            // Stopped in the midst, we would leave the terminal as it is now.
            quiet.special_codes[SpecialCodeIndex::VSUSP] = 0;
            tcsetattr(io::stdin(), OptionalActions::Now, &quiet)?;
        }
        write(ENTER)?;
        Ok(screen)
    }

    pub(super) fn show(&self, lines: &[String]) -> io::Result<()> {
        write(&frame(lines))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = write(LEAVE);
        if let Some(before) = &self.before {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
        }
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Over what stands there, line by line: a screen that is wiped first would flicker.
fn frame(lines: &[String]) -> String {
    format!("\x1b[H{}\x1b[K\x1b[J", lines.join("\x1b[K\r\n"))
}

/// What is typed.
pub(super) struct Keys {
    quit: mpsc::Receiver<()>,
}

impl Keys {
    /// A thread of its own reads, for nothing else can wait for a terminal; it is not waited for on the way out.
    pub(super) fn open() -> Self {
        let (sender, quit) = mpsc::channel(1);
        std::thread::spawn(move || {
            let mut typed = [0; 64];
            while let Ok(n @ 1..) = io::stdin().lock().read(&mut typed) {
                if typed[..n].iter().any(|key| matches!(key, b'q' | b'Q')) {
                    let _ = sender.blocking_send(());
                    return;
                }
            }
        });
        Self { quit }
    }

    /// Until somebody types `q`; for ever if nobody can.
    pub(super) async fn quit(&mut self) {
        if self.quit.recv().await.is_none() {
            std::future::pending().await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_covers_the_one_before() {
        let lines = ["a".to_owned(), "b".to_owned()];
        assert_eq!(frame(&lines), "\u{1b}[Ha\u{1b}[K\r\nb\u{1b}[K\u{1b}[J");
        assert_eq!(frame(&[]), "\u{1b}[H\u{1b}[K\u{1b}[J");
    }
}
