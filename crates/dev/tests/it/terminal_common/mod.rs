//! A terminal without a screen: what is drawn on it can be read, and typed into.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

use std::{
    fs::{File, OpenOptions},
    io::{Read as _, Write as _},
    os::fd::OwnedFd,
    sync::{Arc, Condvar, Mutex},
};

use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize},
};
use tokio::process::{Child, Command};

use super::e2e_common::PATIENCE;

pub(crate) struct Terminal {
    ours: File,
    /// The end of the program. We keep it open, so that its settings can be looked at afterwards.
    theirs: File,
    drawn: Arc<(Mutex<String>, Condvar)>,
}

impl Terminal {
    pub(crate) fn new(width: u16, height: u16) -> Self {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let name = ptsname(&ours, Vec::new()).unwrap();
        tcsetwinsize(&ours, Winsize { ws_row: height, ws_col: width, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let theirs = OpenOptions::new().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let ours = File::from(ours);
        let drawn: Arc<(Mutex<String>, Condvar)> = Arc::default();
        let (mut source, kept) = (ours.try_clone().unwrap(), drawn.clone());
        // Ends with the terminal.
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = source.read(&mut bytes) {
                kept.0.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..n]));
                kept.1.notify_all();
            }
        });
        Self { ours, theirs, drawn }
    }

    pub(crate) fn run(&self, mut command: Command) -> Child {
        let end = || OwnedFd::from(self.theirs.try_clone().unwrap());
        command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap()
    }

    /// What stands on the screen: the last picture that was drawn over the others.
    pub(crate) fn shown(&self) -> String {
        shown(&self.drawn.0.lock().unwrap())
    }

    /// Waits until what stands on the screen is as wanted.
    pub(crate) fn until(&self, what: &str, holds: impl Fn(&str) -> bool) {
        self.until_all(what, |all| holds(&shown(all)));
    }

    /// Waits until everything that was written to it is as wanted.
    pub(crate) fn until_all(&self, what: &str, holds: impl Fn(&str) -> bool) {
        let drawn = self.drawn.0.lock().unwrap();
        let (drawn, waited) = self.drawn.1.wait_timeout_while(drawn, PATIENCE, |drawn| !holds(drawn)).unwrap();
        assert!(!waited.timed_out(), "not drawn: {what}\n{drawn:?}");
    }

    pub(crate) fn type_in(&self, keys: &str) {
        (&self.ours).write_all(keys.as_bytes()).unwrap();
    }

    /// Whether what is typed is neither shown nor kept until the line ends.
    pub(crate) fn is_quiet(&self) -> bool {
        let modes = tcgetattr(&self.theirs).unwrap().local_modes;
        !modes.intersects(LocalModes::ICANON | LocalModes::ECHO)
    }
}

/// Every picture begins at the upper left corner.
fn shown(drawn: &str) -> String {
    let last = drawn.rsplit("\u{1b}[H").next().unwrap_or_default();
    ["\u{1b}[K", "\u{1b}[J", "\r"].iter().fold(last.to_owned(), |text, word| text.replace(word, ""))
}
