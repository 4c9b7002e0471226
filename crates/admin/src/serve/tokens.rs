//! Where the tokens come from.

use std::{
    fs, io,
    io::Write as _,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use nstance_rt::entropy::{SystemEntropy, hex};

use super::{ServeArgs, Tokens};
use crate::{args::Context, failure::Failure};

const FILE: &str = "admin-token";
const VARIABLE: &str = "NSTANCE_ADMIN_TOKEN";

/// Shorter ones are guessed too soon.
const MIN_LENGTH: usize = 16;

pub(super) struct Found {
    pub tokens: Tokens,
    /// In words, without the token.
    pub place: String,
    pub file: Option<PathBuf>,
}

/// `--token-file`, else the variable, else a file of ours, which is made if it is missing.
pub(super) fn find(context: &Context, args: &ServeArgs) -> Result<Found, Failure> {
    let viewer = args.viewer_token_file.as_deref().map(|path| read(context, path)).transpose()?;
    let variable = std::env::var(VARIABLE).ok().filter(|it| !it.is_empty());
    let (full, place, file) = match (&args.token_file, variable) {
        (Some(path), _) => (read(context, path)?, path.display().to_string(), Some(path.clone())),
        (None, Some(token)) => (checked(&token, VARIABLE)?, VARIABLE.to_owned(), None),
        (None, None) => {
            let path = context.temp_dir.join(FILE);
            let made = make(&path).map_err(|error| {
                Failure::failed(format!("make {}", path.display()))
                    .because(error)
                    .next("--token-file FILE, or --temp-dir DIR")
            })?;
            let place = format!("{}{}", path.display(), if made { ", just made" } else { "" });
            (read(context, &path)?, place, Some(path))
        }
    };
    if viewer.as_ref() == Some(&full) {
        return Err(Failure::usage("the viewer's token is the full one").next("another token in --viewer-token-file"));
    }
    Ok(Found { tokens: Tokens { full, viewer }, place, file })
}

fn read(context: &Context, path: &Path) -> Result<String, Failure> {
    let shown = path.display().to_string();
    let failed = |error: io::Error| Failure::failed(format!("read the token in {shown}")).because(error);
    let text = fs::read_to_string(path).map_err(failed)?;
    let mode = fs::metadata(path).map_err(failed)?.permissions().mode();
    if mode & 0o077 != 0 {
        context.output.note(&format!("warning: others may read {shown}; chmod 600 {shown}"));
    }
    checked(&text, &shown)
}

fn checked(text: &str, place: &str) -> Result<String, Failure> {
    let token = text.trim();
    if token.len() < MIN_LENGTH || !token.bytes().all(|it| it.is_ascii_graphic()) {
        let what = format!("the token in {place} must be at least {MIN_LENGTH} printable characters without spaces");
        return Err(Failure::usage(what).next("openssl rand -hex 32 makes a good one"));
    }
    Ok(token.to_owned())
}

/// Says whether it was made now.
fn make(path: &Path) -> io::Result<bool> {
    if let Some(dir) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    }
    let opened = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    match opened {
        Ok(mut file) => {
            writeln!(file, "{}", hex(&SystemEntropy::new(), 32))?;
            file.sync_all()?;
            Ok(true)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_made_token_is_long_private_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("below").join(FILE);
        assert!(make(&path).unwrap());
        let token = fs::read_to_string(&path).unwrap();
        assert_eq!(checked(&token, "x").unwrap().len(), 64);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(!make(&path).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), token);
    }

    #[test]
    fn short_tokens_are_refused() {
        for bad in ["", "short", "fifteen-letters", "sixteen letters!"] {
            assert!(checked(bad, "x").is_err(), "{bad}");
        }
        assert!(checked(" sixteen-letters!\n", "x").is_ok());
    }
}
