//! Names inside certificates: the subject, and the alternative names.

use std::{fmt, net::IpAddr};

use rustls::pki_types::DnsName;

use crate::der;

/// A distinguished name. Lists may hold several values, each an attribute of its own.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Subject {
    pub common_name: String,
    pub organization: Vec<String>,
    pub organizational_unit: Vec<String>,
    pub country: Vec<String>,
    pub province: Vec<String>,
    pub locality: Vec<String>,
    pub street: Vec<String>,
    pub postal_code: Vec<String>,
}

impl Subject {
    /// Attributes from the most general to the most special, with the short name and last arc of each.
    fn attributes(&self) -> impl Iterator<Item = (&'static str, u32, &str)> {
        [
            ("C", 6, &self.country),
            ("ST", 8, &self.province),
            ("L", 7, &self.locality),
            ("STREET", 9, &self.street),
            ("postalCode", 17, &self.postal_code),
            ("O", 10, &self.organization),
            ("OU", 11, &self.organizational_unit),
        ]
        .into_iter()
        .flat_map(|(name, arc, values)| values.iter().map(move |value| (name, arc, value.as_str())))
        .chain((!self.common_name.is_empty()).then_some(("CN", 3, self.common_name.as_str())))
    }

    pub(crate) fn to_der(&self) -> Vec<u8> {
        let names: Vec<_> = self
            .attributes()
            .map(|(name, arc, value)| {
                // X.520 wants a country as PrintableString; everything else is UTF-8.
                let printable = name == "C" && value.bytes().all(|byte| byte.is_ascii_alphanumeric());
                let value = der::tlv(if printable { der::PRINTABLE } else { der::UTF8 }, value.as_bytes());
                der::tlv(der::SET, &der::sequence(&[der::oid(&[2, 5, 4, arc]), value]))
            })
            .collect();
        der::sequence(&names)
    }
}

impl fmt::Display for Subject {
    /// As people read it, the common name first: `CN=web, O=default`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut attributes: Vec<_> = self.attributes().collect();
        attributes.reverse();
        for (n, (name, _, value)) in attributes.into_iter().enumerate() {
            write!(f, "{}{name}={value}", if n == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SanError {
    #[error("`{value}` is not a DNS name")]
    Dns { value: String },
    #[error("`{value}` is not an IP address")]
    Ip { value: String },
    #[error("`{value}` is not a URI: expected scheme and `:`, in ASCII")]
    Uri { value: String },
}

/// One subject alternative name, well-formed by construction.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct San(Kind);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Kind {
    Dns(String),
    Ip(IpAddr),
    Uri(String),
}

impl San {
    /// A host name; `*.` in front of it is allowed.
    pub fn dns(name: &str) -> Result<Self, SanError> {
        // The parser also takes a trailing dot, which no verifier matches in a certificate.
        match DnsName::try_from(name.strip_prefix("*.").unwrap_or(name)) {
            Ok(_) if !name.ends_with('.') => Ok(Self(Kind::Dns(name.to_ascii_lowercase()))),
            _ => Err(SanError::Dns { value: name.to_owned() }),
        }
    }

    pub fn ip(address: IpAddr) -> Self {
        Self(Kind::Ip(address))
    }

    pub fn parse_ip(text: &str) -> Result<Self, SanError> {
        text.parse().map(Self::ip).map_err(|_| SanError::Ip { value: text.to_owned() })
    }

    pub fn uri(text: &str) -> Result<Self, SanError> {
        let scheme = text.split_once(':').map_or("", |(scheme, _)| scheme);
        let scheme_fits = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
        if scheme_fits && text.bytes().all(|byte| byte.is_ascii_graphic()) {
            Ok(Self(Kind::Uri(text.to_owned())))
        } else {
            Err(SanError::Uri { value: text.to_owned() })
        }
    }

    /// A host as written in an address: an IP address, with or without brackets, or a DNS name.
    pub fn host(text: &str) -> Result<Self, SanError> {
        let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
        bare.parse().map(Self::ip).or_else(|_| Self::dns(text))
    }

    pub(crate) fn to_der(&self) -> Vec<u8> {
        match &self.0 {
            Kind::Dns(name) => der::implicit(2, name.as_bytes()),
            Kind::Uri(uri) => der::implicit(6, uri.as_bytes()),
            Kind::Ip(IpAddr::V4(address)) => der::implicit(7, &address.octets()),
            Kind::Ip(IpAddr::V6(address)) => der::implicit(7, &address.octets()),
        }
    }
}

impl fmt::Display for San {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Dns(name) => write!(f, "DNS:{name}"),
            Kind::Ip(address) => write!(f, "IP:{address}"),
            Kind::Uri(uri) => write!(f, "URI:{uri}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names_or_addresses() {
        for (text, shown) in [
            ("web-1.example.com", "DNS:web-1.example.com"),
            ("Web", "DNS:web"),
            ("*.example.com", "DNS:*.example.com"),
            ("10.0.0.1", "IP:10.0.0.1"),
            ("[::1]", "IP:::1"),
            ("fd00::2", "IP:fd00::2"),
        ] {
            assert_eq!(San::host(text).unwrap().to_string(), shown);
        }
        for bad in ["", "a b", "a..b", "web.", "-", "*", "*.*.x", "é", "a/b", "[10.0.0.1"] {
            assert!(San::host(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn addresses_and_uris_are_checked() {
        assert!(San::parse_ip("10.0.0.256").is_err());
        assert!(San::parse_ip("web").is_err());
        assert!(San::uri("spiffe://default/web").is_ok());
        for bad in ["", "web", "://x", "1a:b", "urn:a b", "urn:é"] {
            assert!(San::uri(bad).is_err(), "{bad}");
        }
    }
}
