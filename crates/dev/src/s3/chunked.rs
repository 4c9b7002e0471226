//! The `aws-chunked` body format, read without regard to its signatures.
//!
//! `<hex size>[;chunk-signature=…]\r\n<bytes>\r\n` over and over, a chunk of size 0, then trailers, each
//! `name:value\r\n`, and an empty line.

use bytes::{Bytes, BytesMut};
use hyper::{HeaderMap, header};

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the body is not a whole aws-chunked stream")]
pub(super) struct BadChunks;

/// Whether these headers announce such a body. SDKs do so by the payload hash, a few only by the encoding.
pub(super) fn is_chunked(headers: &HeaderMap) -> bool {
    let hash = headers.get("x-amz-content-sha256").map(|value| value.as_bytes());
    let encodings = headers.get_all(header::CONTENT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    hash.is_some_and(|hash| hash.starts_with(b"STREAMING-"))
        || encodings.flat_map(|it| it.split(',')).any(|it| it.trim().eq_ignore_ascii_case("aws-chunked"))
}

/// The bytes that were meant, and the trailers behind them.
pub(super) fn decode(mut body: Bytes) -> Result<(Bytes, HeaderMap), BadChunks> {
    let mut whole = BytesMut::with_capacity(body.len());
    loop {
        let line = take_line(&mut body)?;
        let line = std::str::from_utf8(&line).map_err(|_| BadChunks)?;
        let size =
            usize::from_str_radix(line.split(';').next().unwrap_or_default().trim(), 16).map_err(|_| BadChunks)?;
        if size == 0 {
            break;
        }
        if body.len() < size {
            return Err(BadChunks);
        }
        whole.extend_from_slice(&body.split_to(size));
        if !take_line(&mut body)?.is_empty() {
            return Err(BadChunks);
        }
    }
    Ok((whole.freeze(), trailers(body)?))
}

fn trailers(mut rest: Bytes) -> Result<HeaderMap, BadChunks> {
    let mut trailers = HeaderMap::new();
    while !rest.is_empty() {
        let line = take_line(&mut rest)?;
        let Some(colon) = line.iter().position(|byte| *byte == b':') else {
            if line.is_empty() {
                continue;
            }
            return Err(BadChunks);
        };
        let name = header::HeaderName::from_bytes(&line[..colon]).map_err(|_| BadChunks)?;
        let value = header::HeaderValue::from_bytes(line[colon + 1..].trim_ascii()).map_err(|_| BadChunks)?;
        trailers.insert(name, value);
    }
    Ok(trailers)
}

fn take_line(body: &mut Bytes) -> Result<Bytes, BadChunks> {
    let at = body.windows(2).position(|pair| pair == b"\r\n").ok_or(BadChunks)?;
    let line = body.split_to(at);
    let _ = body.split_to(2);
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_join_and_trailers_follow() {
        let body = "5;chunk-signature=00\r\nhello\r\n6\r\n world\r\n0\r\nx-amz-checksum-crc32: DUoRhQ==\r\n\r\n";
        let (whole, trailers) = decode(Bytes::from(body)).unwrap();
        assert_eq!(whole, "hello world");
        assert_eq!(trailers["x-amz-checksum-crc32"], "DUoRhQ==");
        assert_eq!(decode(Bytes::from("0;chunk-signature=00\r\n\r\n")).unwrap().0, "");
    }

    #[test]
    fn anything_short_or_shapeless_is_refused() {
        for body in
            ["", "5\r\nhel", "5\r\nhello", "5\r\nhello\r\n", "5\r\nhello!\r\n0\r\n\r\n", "x\r\n", "0\r\njunk\r\n"]
        {
            assert_eq!(decode(Bytes::from(body)), Err(BadChunks), "{body:?}");
        }
    }
}
