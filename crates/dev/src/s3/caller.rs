//! Who a request says it is from, and how to make it one from nobody.
//!
//! Unless signatures are demanded, any is as good as none: the access key only names the client, for fault rules
//! and counts. The protocol library would refuse a signature it cannot verify, so it never gets to see it.

use hyper::{HeaderMap, Uri, header};

/// Query parameters that only sign, of all the versions there are.
const SIGNING: &[&str] = &[
    "X-Amz-Algorithm",
    "X-Amz-Credential",
    "X-Amz-Date",
    "X-Amz-Expires",
    "X-Amz-Region-Set",
    "X-Amz-Security-Token",
    "X-Amz-Signature",
    "X-Amz-SignedHeaders",
    "AWSAccessKeyId",
    "Expires",
    "Signature",
];

/// The access key, or the empty string if the request is not signed.
pub(super) fn access_key(headers: &HeaderMap, uri: &Uri) -> String {
    let authorization = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let scope = authorization
        .split_once("Credential=")
        .map(|(_, rest)| rest.split([',', ' ']).next().unwrap_or_default().to_owned())
        .or_else(|| authorization.strip_prefix("AWS ").and_then(|it| it.split(':').next()).map(str::to_owned))
        .or_else(|| query(uri, "X-Amz-Credential"))
        .or_else(|| query(uri, "AWSAccessKeyId"))
        .unwrap_or_default();
    // The key itself may contain slashes, the scope behind it has exactly four parts (three for SigV4A).
    let parts: Vec<&str> = scope.split('/').collect();
    let n_scope = match parts.len() {
        0 | 1 => 0,
        n if authorization.starts_with("AWS4-ECDSA") => 3.min(n - 1),
        n => 4.min(n - 1),
    };
    parts[..parts.len() - n_scope].join("/")
}

/// One decoded query parameter.
pub(super) fn query(uri: &Uri, name: &str) -> Option<String> {
    let pairs = uri.query()?.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    pairs.filter(|(key, _)| *key == name).map(|(_, value)| percent_decode(value)).next()
}

/// Removes every trace of a signature.
pub(super) fn strip_signature(headers: &mut HeaderMap, uri: &mut Uri) {
    headers.remove(header::AUTHORIZATION);
    headers.remove("x-amz-content-sha256");
    let Some(query) = uri.query() else { return };
    let signs = |pair: &&str| SIGNING.contains(&pair.split('=').next().unwrap_or_default());
    if !query.split('&').any(|pair| signs(&pair)) {
        return;
    }
    let kept: Vec<&str> = query.split('&').filter(|pair| !signs(pair)).collect();
    let path = if kept.is_empty() { uri.path().to_owned() } else { format!("{}?{}", uri.path(), kept.join("&")) };
    let mut parts = uri.clone().into_parts();
    // Made of pieces of a valid one, so it is valid; if not, the signature stays and is refused further on.
    parts.path_and_query = path.parse().ok();
    if let Ok(stripped) = Uri::from_parts(parts) {
        *uri = stripped;
    }
}

fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let code = (*first == b'%').then(|| tail.get(..2)).flatten();
        match code.and_then(|code| u8::from_str_radix(std::str::from_utf8(code).ok()?, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => {
                bytes.push(if *first == b'+' { b' ' } else { *first });
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Encodes as `encoding-type=url` listings do.
pub(super) fn percent_encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => out.push(char::from(byte)),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(authorization: &str, uri: &str, expected: &str) {
        let mut headers = HeaderMap::new();
        if !authorization.is_empty() {
            headers.insert(header::AUTHORIZATION, authorization.parse().unwrap());
        }
        assert_eq!(access_key(&headers, &uri.parse().unwrap()), expected);
    }

    #[test]
    fn every_kind_of_signature_names_its_caller() {
        check("", "/dev/k", "");
        check(
            "AWS4-HMAC-SHA256 Credential=dev-server-1/20260101/dev/s3/aws4_request, SignedHeaders=host",
            "/",
            "dev-server-1",
        );
        check(
            "AWS4-ECDSA-P256-SHA256 Credential=dev-server-2/20260101/s3/aws4_request,Signature=0",
            "/",
            "dev-server-2",
        );
        check("AWS old:c2ln", "/", "old");
        check("", "/dev/k?X-Amz-Credential=url%2F20260101%2Fdev%2Fs3%2Faws4_request&x=1", "url");
        check("", "/dev/k?AWSAccessKeyId=older&Signature=x", "older");
    }

    #[test]
    fn only_the_signature_is_taken_off_an_address() {
        let mut uri: Uri = "/dev/a%20b?list-type=2&X-Amz-Signature=0&prefix=x%2Fy&X-Amz-Date=1".parse().unwrap();
        strip_signature(&mut HeaderMap::new(), &mut uri);
        assert_eq!(uri, "/dev/a%20b?list-type=2&prefix=x%2Fy");
        let mut uri: Uri = "/dev/k?X-Amz-Signature=0".parse().unwrap();
        strip_signature(&mut HeaderMap::new(), &mut uri);
        assert_eq!(uri, "/dev/k");
    }
}
