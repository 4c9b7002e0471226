//! Names that a server gives to files and keys. They become names in a directory of this machine, so the rule is narrow
//! enough that nothing which passes it can mean another place.

/// Long enough for any name, short enough that what we add to it still fits a file system.
const MAX_BYTES: usize = 128;

/// Where errors lie among the received files.
pub(crate) const ERRORS: &str = "errors";

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NameError {
    #[error("a name has 1 to 128 bytes")]
    Length,
    #[error("a name does not begin with a dot")]
    Hidden,
    #[error("a name is made of letters, digits, `.`, `_` and `-`")]
    Characters,
    #[error("this name belongs to the directory of errors")]
    Reserved,
}

/// The name of a received file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FileName(String);

impl FileName {
    pub(crate) fn parse(text: &str) -> Result<Self, NameError> {
        check(text)?;
        if text == ERRORS {
            return Err(NameError::Reserved);
        }
        Ok(Self(text.to_owned()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// What follows the last dot; nothing if there is none.
    pub(crate) fn extension(&self) -> &str {
        self.0.rsplit_once('.').map_or("", |(_, extension)| extension)
    }
}

/// The name of a key pair, without the extensions of its files.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct KeyName(String);

impl KeyName {
    pub(crate) fn parse(text: &str) -> Result<Self, NameError> {
        check(text)?;
        let name = text.strip_suffix(".pub").or_else(|| text.strip_suffix(".key")).unwrap_or(text);
        check(name)?;
        Ok(Self(name.to_owned()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

fn check(text: &str) -> Result<(), NameError> {
    if text.is_empty() || MAX_BYTES < text.len() {
        return Err(NameError::Length);
    }
    if text.starts_with('.') {
        return Err(NameError::Hidden);
    }
    if !text.bytes().all(is_plain) {
        return Err(NameError::Characters);
    }
    Ok(())
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-')
}

/// A name under which a complaint about `text` can be filed: `text` itself if it is a good name.
pub(crate) fn made_safe(text: &str) -> String {
    let mut name: String =
        text.bytes().take(MAX_BYTES).map(|byte| if is_plain(byte) { char::from(byte) } else { '_' }).collect();
    if name.is_empty() || name.starts_with('.') {
        name.replace_range(..name.len().min(1), "_");
    }
    name
}

/// `text` as a person may be shown it: on one line, and not for ever.
pub(crate) fn shown(text: &str) -> String {
    text.chars().take(MAX_BYTES).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn plain_names_are_taken_as_they_are() {
        let longest = "x".repeat(MAX_BYTES);
        for good in ["a", "kubelet.crt", "A-b_c.d.e", "-", "a..b", "con", "errors.json", longest.as_str()] {
            assert_eq!(FileName::parse(good).unwrap().as_str(), good);
            assert_eq!(made_safe(good), good);
        }
    }

    #[test]
    fn hostile_names_are_refused() {
        let too_long = "x".repeat(MAX_BYTES + 1);
        for (bad, why) in [
            ("", NameError::Length),
            (too_long.as_str(), NameError::Length),
            (".", NameError::Hidden),
            ("..", NameError::Hidden),
            (".hidden", NameError::Hidden),
            (".stage", NameError::Hidden),
            ("../identity/identity.key", NameError::Hidden),
            ("/etc/passwd", NameError::Characters),
            ("a/../../b", NameError::Characters),
            ("errors/a", NameError::Characters),
            ("a\\b", NameError::Characters),
            ("a\0b", NameError::Characters),
            ("a b", NameError::Characters),
            ("a\nb", NameError::Characters),
            ("ä", NameError::Characters),
            ("%2e%2e", NameError::Characters),
        ] {
            assert_eq!(FileName::parse(bad), Err(why), "{bad:?}");
            assert_eq!(KeyName::parse(bad), Err(why), "{bad:?}");
        }
        assert_eq!(FileName::parse("errors"), Err(NameError::Reserved));
        assert!(KeyName::parse("errors").is_ok());
    }

    #[test]
    fn keys_lose_the_extensions_of_their_files() {
        for (given, expected) in [("demo", "demo"), ("demo.pub", "demo"), ("demo.key", "demo"), ("a.crt", "a.crt")] {
            assert_eq!(KeyName::parse(given).unwrap().as_str(), expected);
        }
        assert!(KeyName::parse(".pub").is_err());
        assert!(KeyName::parse("..key").is_err());
    }

    #[test]
    fn extension_is_what_follows_the_last_dot() {
        let of = |text| FileName::parse(text).unwrap().extension().to_owned();
        assert_eq!((of("a.tar.crt"), of("a"), of("a.")), ("crt".to_owned(), String::new(), String::new()));
    }

    proptest! {
        #[test]
        fn whatever_the_name_its_complaint_stays_in_the_directory(text: String) {
            let safe = made_safe(&text);
            prop_assert!(check(&safe).is_ok(), "{safe:?}");
            if check(&text).is_ok() {
                prop_assert_eq!(&safe, &text);
            }
            prop_assert!(!shown(&text).contains(char::is_control));
        }

        #[test]
        fn good_names_have_one_component(text in "[a-z./]{1,12}") {
            if FileName::parse(&text).is_ok() {
                let path = std::path::Path::new(&text);
                prop_assert!(path.is_relative() && path.components().count() == 1 && path.file_name().is_some());
            }
        }
    }
}
