//! Just enough DER writing for our certificates.
//!
//! A certificate library was refused here: the usual one keeps one value per name attribute, and a file certificate
//! may carry several organisations. What is written is read back in tests by two independent parsers.

use nstance_core::time::Timestamp;

pub(crate) const SEQUENCE: u8 = 0x30;
pub(crate) const SET: u8 = 0x31;
pub(crate) const UTF8: u8 = 0x0c;
pub(crate) const PRINTABLE: u8 = 0x13;

/// 9999-12-30: RFC 5280 could spell almost two days more, the library that formats our times could not.
pub(crate) const END_OF_TIME: i64 = 253_402_128_000_000;

pub(crate) fn tlv(tag: u8, content: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(content.len() + 6);
    out.push(tag);
    match u8::try_from(content.len()) {
        Ok(short) if short < 0x80 => out.push(short),
        _ => {
            let bytes = content.len().to_be_bytes();
            let skip = bytes.iter().take_while(|byte| **byte == 0).count();
            let n_bytes = u8::try_from(bytes.len() - skip).expect("a length has at most eight bytes");
            out.push(0x80 | n_bytes);
            out.extend_from_slice(&bytes[skip..]);
        }
    }
    out.extend_from_slice(content);
    out
}

pub(crate) fn sequence(parts: &[Vec<u8>]) -> Vec<u8> {
    tlv(SEQUENCE, &parts.concat())
}

/// `[number] EXPLICIT`.
pub(crate) fn explicit(number: u8, content: &[u8]) -> Vec<u8> {
    tlv(0xa0 | number, content)
}

/// `[number] IMPLICIT` of a primitive type.
pub(crate) fn implicit(number: u8, content: &[u8]) -> Vec<u8> {
    tlv(0x80 | number, content)
}

/// An object identifier. The first two arcs share a byte.
pub(crate) fn oid(arcs: &[u32]) -> Vec<u8> {
    let [first, second, rest @ ..] = arcs else { return tlv(0x06, &[]) };
    let mut content = Vec::new();
    for arc in std::iter::once(first * 40 + second).chain(rest.iter().copied()) {
        let n_groups = (32 - arc.leading_zeros()).div_ceil(7).max(1);
        for group in (0..n_groups).rev() {
            let bits = u8::try_from((arc >> (7 * group)) & 0x7f).expect("seven bits fit a byte");
            content.push(if group == 0 { bits } else { bits | 0x80 });
        }
    }
    tlv(0x06, &content)
}

/// An unsigned integer of big-endian bytes.
pub(crate) fn unsigned(bytes: &[u8]) -> Vec<u8> {
    let skip = bytes.iter().take_while(|byte| **byte == 0).count();
    let mut content = bytes[skip..].to_vec();
    if content.first().is_none_or(|byte| byte & 0x80 != 0) {
        content.insert(0, 0);
    }
    tlv(0x02, &content)
}

pub(crate) fn boolean(value: bool) -> Vec<u8> {
    tlv(0x01, &[if value { 0xff } else { 0 }])
}

pub(crate) fn octets(content: &[u8]) -> Vec<u8> {
    tlv(0x04, content)
}

/// Whole bytes as a bit string.
pub(crate) fn bits(content: &[u8]) -> Vec<u8> {
    tlv(0x03, &[&[0], content].concat())
}

/// A named bit list of up to eight bits, trailing zeros dropped as DER wants.
pub(crate) fn flags(byte: u8) -> Vec<u8> {
    let unused = u8::try_from(byte.trailing_zeros().min(7)).expect("at most seven");
    tlv(0x03, &[unused, byte])
}

/// `UTCTime` before 2050, `GeneralizedTime` from then on, as RFC 5280 demands. The caller keeps the time inside
/// 1970 and [`END_OF_TIME`].
pub(crate) fn time(at: Timestamp) -> Vec<u8> {
    // RFC 3339 has the same digits in the same order.
    let text: String = at.to_string().chars().take("2026-01-31T12:00:00".len()).filter(char::is_ascii_digit).collect();
    if text.as_str() < "2050" {
        tlv(0x17, format!("{}Z", &text[2..]).as_bytes())
    } else {
        tlv(0x18, format!("{text}Z").as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_encodings_come_out() {
        assert_eq!(oid(&[1, 2, 840, 113_549]), [0x06, 0x06, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d]);
        assert_eq!(oid(&[2, 5, 4, 3]), [0x06, 0x03, 0x55, 0x04, 0x03]);
        assert_eq!(unsigned(&[0, 0, 0x80]), [0x02, 0x02, 0x00, 0x80]);
        assert_eq!(unsigned(&[0, 0]), [0x02, 0x01, 0x00]);
        assert_eq!(flags(0b1000_0000), [0x03, 0x02, 0x07, 0x80]);
        assert_eq!(flags(0b0000_0110), [0x03, 0x02, 0x01, 0x06]);
        assert_eq!(tlv(0x04, &[7; 200])[..3], [0x04, 0x81, 200]);
        assert_eq!(tlv(0x04, &[7; 300])[..4], [0x04, 0x82, 1, 44]);
    }

    #[test]
    fn times_change_their_form_in_2050() {
        assert_eq!(time("2049-12-31T23:59:59.9Z".parse().unwrap()), [b"\x17\x0d" as &[u8], b"491231235959Z"].concat());
        assert_eq!(time("2050-01-01T00:00:00Z".parse().unwrap()), [b"\x18\x0f" as &[u8], b"20500101000000Z"].concat());
        assert_eq!(time(Timestamp::from_millis(END_OF_TIME)), [b"\x18\x0f" as &[u8], b"99991230000000Z"].concat());
    }
}
