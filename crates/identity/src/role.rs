//! What a certificate is for. The role stands in an extension of its own, so that no subject, SAN or usage that a
//! template author can choose ever opens one of our ports.

use std::fmt;

use crate::der;

/// `1.3.6.1.4.1.999999.1`, a DER UTF8String.
pub(crate) const ROLE_OID: [u32; 8] = [1, 3, 6, 1, 4, 1, 999_999, 1];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    Server,
    Agent,
    Operator,
}

impl Role {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Agent => "agent",
            Self::Operator => "operator",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        [Self::Server, Self::Agent, Self::Operator].into_iter().find(|it| it.as_str() == text)
    }

    pub(crate) fn to_der(self) -> Vec<u8> {
        der::tlv(der::UTF8, self.as_str().as_bytes())
    }

    /// Reads the extension's value: a UTF8String, or the PrintableString that other issuers write. The names are short,
    /// so the length is always one byte.
    pub(crate) fn from_der(value: &[u8]) -> Option<Self> {
        let [der::UTF8 | der::PRINTABLE, len, text @ ..] = value else { return None };
        if usize::from(*len) != text.len() {
            return None;
        }
        Self::parse(std::str::from_utf8(text).ok()?)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
