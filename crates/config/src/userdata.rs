//! Encodings of userdata: what is written or fetched may be base64, gzip, or gzip in base64.

use miniz_oxide::inflate::decompress_to_vec_with_limit;

use crate::model::UserdataEncoding;

/// Largest userdata, decoded. Providers take far less; this bounds what a small archive can grow to.
pub(crate) const MAX_USERDATA: usize = 1024 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DecodeError {
    #[error("it is not base64")]
    Base64,
    #[error("it is not a gzip file")]
    NoGzip,
    #[error("the gzip file is damaged or cut off")]
    BrokenGzip,
    #[error("it is larger than 1 MiB")]
    TooLarge,
    #[error("it is not UTF-8 text")]
    NoText,
}

/// Undoes the encoding.
pub(crate) fn decode(encoding: UserdataEncoding, bytes: &[u8]) -> Result<String, DecodeError> {
    let bytes = match encoding {
        UserdataEncoding::Plain => bytes.to_vec(),
        UserdataEncoding::Base64 => unbase64(bytes)?,
        UserdataEncoding::Gzip => gunzip(bytes)?,
        UserdataEncoding::Base64Gzip => gunzip(&unbase64(bytes)?)?,
    };
    if MAX_USERDATA < bytes.len() {
        return Err(DecodeError::TooLarge);
    }
    String::from_utf8(bytes).map_err(|_| DecodeError::NoText)
}

/// Base64 with or without line breaks and padding: tools differ, and neither changes the meaning.
fn unbase64(bytes: &[u8]) -> Result<Vec<u8>, DecodeError> {
    let mut text: Vec<u8> = bytes.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).collect();
    while text.last() == Some(&b'=') {
        text.pop();
    }
    data_encoding::BASE64_NOPAD.decode(&text).map_err(|_| DecodeError::Base64)
}

const FLAG_CRC: u8 = 2;
const FLAG_EXTRA: u8 = 4;
const FLAG_NAME: u8 = 8;
const FLAG_COMMENT: u8 = 16;

/// One member of RFC 1952. The checksum is verified: a damaged boot script must not run.
fn gunzip(bytes: &[u8]) -> Result<Vec<u8>, DecodeError> {
    let header = bytes.get(..10).filter(|it| it.starts_with(&[0x1f, 0x8b, 8])).ok_or(DecodeError::NoGzip)?;
    let flags = header[3];
    let mut rest = &bytes[10..];
    if flags & FLAG_EXTRA != 0 {
        let length = rest.get(..2).map(|it| usize::from(u16::from_le_bytes([it[0], it[1]])));
        rest = length.and_then(|it| rest.get(2 + it..)).ok_or(DecodeError::BrokenGzip)?;
    }
    for _ in 0..(flags & FLAG_NAME).count_ones() + (flags & FLAG_COMMENT).count_ones() {
        let end = rest.iter().position(|byte| *byte == 0).ok_or(DecodeError::BrokenGzip)?;
        rest = &rest[end + 1..];
    }
    if flags & FLAG_CRC != 0 {
        rest = rest.get(2..).ok_or(DecodeError::BrokenGzip)?;
    }
    let (body, trailer) = rest.split_last_chunk::<8>().ok_or(DecodeError::BrokenGzip)?;
    let plain = decompress_to_vec_with_limit(body, MAX_USERDATA).map_err(|error| match error.status {
        miniz_oxide::inflate::TINFLStatus::HasMoreOutput => DecodeError::TooLarge,
        _ => DecodeError::BrokenGzip,
    })?;
    let crc = u32::from_le_bytes([trailer[0], trailer[1], trailer[2], trailer[3]]);
    let size = u32::from_le_bytes([trailer[4], trailer[5], trailer[6], trailer[7]]);
    if crc != crc32(&plain) || u32::try_from(plain.len()) != Ok(size) {
        return Err(DecodeError::BrokenGzip);
    }
    Ok(plain)
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 == 0 { crc >> 1 } else { (crc >> 1) ^ 0xedb8_8320 })
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// `printf 'hello {{ .Instance.ID }}\n' | gzip -9 | base64`, with a file name in the header.
    const GZIP: &str = "H4sICAAAAAAC/2hlbGxvAMtIzcnJV6iuVtDzzCsuScxLTtXzdFGoreUCACS+mnAZAAAA";

    #[test]
    fn every_encoding_is_undone() {
        let text = "hello {{ .Instance.ID }}\n";
        assert_eq!(decode(UserdataEncoding::Plain, text.as_bytes()).as_deref(), Ok(text));
        let base64 = data_encoding::BASE64.encode(text.as_bytes());
        assert_eq!(decode(UserdataEncoding::Base64, format!("{base64}\n").as_bytes()).as_deref(), Ok(text));
        assert_eq!(decode(UserdataEncoding::Base64Gzip, GZIP.as_bytes()).as_deref(), Ok(text));
        let gzip = data_encoding::BASE64.decode(GZIP.as_bytes()).unwrap();
        assert_eq!(decode(UserdataEncoding::Gzip, &gzip).as_deref(), Ok(text));
    }

    #[test]
    fn damage_is_noticed() {
        let mut gzip = data_encoding::BASE64.decode(GZIP.as_bytes()).unwrap();
        assert_eq!(decode(UserdataEncoding::Gzip, &gzip[..20]), Err(DecodeError::BrokenGzip));
        let at = gzip.len() - 6;
        gzip[at] ^= 1;
        assert_eq!(decode(UserdataEncoding::Gzip, &gzip), Err(DecodeError::BrokenGzip));
        assert_eq!(decode(UserdataEncoding::Gzip, b"#!/bin/sh\n"), Err(DecodeError::NoGzip));
        assert_eq!(decode(UserdataEncoding::Base64, b"not base64!"), Err(DecodeError::Base64));
        assert_eq!(decode(UserdataEncoding::Plain, b"\xff"), Err(DecodeError::NoText));
        assert_eq!(decode(UserdataEncoding::Plain, &vec![b'x'; MAX_USERDATA + 1]), Err(DecodeError::TooLarge));
    }

    proptest! {
        #[test]
        fn no_bytes_upset_the_decoder(mut bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = gunzip(&bytes);
            bytes.splice(0..0, [0x1f, 0x8b, 8]);
            let _ = gunzip(&bytes);
        }
    }
}
