//! PEM, both ways. Reading is left to rustls' parser, which knows every oddity of the format; writing is ours, because
//! the encoded private key must not linger in a buffer somebody else made.

use data_encoding::BASE64;
use rustls::pki_types::{CertificateDer, pem::PemObject};
use zeroize::Zeroizing;

const LINE: usize = 64;

/// Wraps `der` in a PEM block. The result is wiped when dropped, for it may be a private key.
pub(crate) fn encode(label: &str, der: &[u8]) -> Zeroizing<String> {
    let body = Zeroizing::new(BASE64.encode(der));
    // Reserved at once: a string that grows leaves copies behind.
    let mut text = Zeroizing::new(String::with_capacity(body.len() + body.len() / LINE + 2 * label.len() + 40));
    text.push_str("-----BEGIN ");
    text.push_str(label);
    text.push_str("-----\n");
    let mut rest: &str = &body;
    while !rest.is_empty() {
        let (line, tail) = rest.split_at(LINE.min(rest.len()));
        text.push_str(line);
        text.push('\n');
        rest = tail;
    }
    text.push_str("-----END ");
    text.push_str(label);
    text.push_str("-----\n");
    text
}

pub(crate) fn certificate(der: &[u8]) -> String {
    String::clone(&encode("CERTIFICATE", der))
}

/// All certificates of a PEM text, in order; `None` if a block cannot be read or there is none.
pub(crate) fn certificates(text: &[u8]) -> Option<Vec<CertificateDer<'static>>> {
    let all: Vec<_> = CertificateDer::pem_slice_iter(text).collect::<Result<_, _>>().ok()?;
    (!all.is_empty()).then_some(all)
}
