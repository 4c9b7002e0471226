//! As much HTTP/1.1 as a metadata service needs: one request, one answer, one connection.
//!
//! It knows no proxy and follows no redirect: whoever could send the agent elsewhere could make up the end of a
//! machine. Everything has a bound: the time to connect, the time in all, and what is read.

use std::{io, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::timeout,
};

use crate::{link::Net, settings::Address};

/// Metadata services are one hop away; one that does not answer the first packet is not there.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);

/// From the first packet to the last byte, unless a request says otherwise.
pub(crate) const LIMIT: Duration = Duration::from_secs(2);

const MAX_BODY: usize = 16 * 1024;
const MAX_HEAD: usize = 8 * 1024;

/// Head, body, and the marks between the pieces of a chunked body.
const MAX_READ: usize = MAX_HEAD + 2 * MAX_BODY;

#[derive(Debug, thiserror::Error)]
pub(crate) enum HttpError {
    #[error("connect to {address}")]
    Connect { address: String, source: io::Error },
    #[error("{address} did not answer in time")]
    Late { address: String },
    #[error("connection to {address} broke")]
    Broken { address: String, source: io::Error },
    #[error("{address} does not speak HTTP as it should: {what}")]
    Malformed { address: String, what: &'static str },
}

impl HttpError {
    pub(crate) fn is_late(&self) -> bool {
        matches!(self, Self::Late { .. })
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Request<'a> {
    pub(crate) method: &'static str,
    pub(crate) path: &'a str,
    pub(crate) headers: &'a [(&'static str, &'a str)],
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Response {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Response {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(its, _)| its.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// The body as text, without white space around it.
    pub(crate) fn text(&self) -> Option<&str> {
        std::str::from_utf8(&self.body).ok().map(str::trim)
    }
}

/// Asks one host, within `limit`.
pub(crate) async fn call(
    net: &dyn Net,
    address: &Address,
    request: &Request<'_>,
    limit: Duration,
) -> Result<Response, HttpError> {
    let late = || HttpError::Late { address: address.to_string() };
    timeout(limit, exchange(net, address, request)).await.unwrap_or_else(|_| Err(late()))
}

async fn exchange(net: &dyn Net, address: &Address, request: &Request<'_>) -> Result<Response, HttpError> {
    let shown = || address.to_string();
    let mut stream = timeout(CONNECT_LIMIT, net.connect(address))
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
        .map_err(|source| HttpError::Connect { address: shown(), source })?
        .stream;
    let broken = |source| HttpError::Broken { address: shown(), source };
    stream.write_all(&head(address, request)).await.map_err(broken)?;
    let mut bytes = Vec::with_capacity(1024);
    loop {
        let ended = stream.read_buf(&mut bytes).await.map_err(broken)? == 0;
        match parse(&bytes, ended) {
            Ok(Some(response)) => return Ok(response),
            Ok(None) if ended => return Err(broken(io::ErrorKind::UnexpectedEof.into())),
            Ok(None) if MAX_READ < bytes.len() => {
                return Err(HttpError::Malformed { address: shown(), what: "answer too long" });
            }
            Ok(None) => {}
            Err(what) => return Err(HttpError::Malformed { address: shown(), what }),
        }
    }
}

fn head(address: &Address, request: &Request<'_>) -> Vec<u8> {
    // Port 80 goes unsaid, as clients do it: some metadata services compare the name.
    let mut host = address.to_string();
    if address.port == 80 {
        host.truncate(host.len() - ":80".len());
    }
    let Request { method, path, headers } = request;
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\nConnection: close\r\n");
    if *method == "PUT" {
        head.push_str("Content-Length: 0\r\n");
    }
    for (name, value) in *headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    head.into_bytes()
}

/// What has come so far: a whole answer, none yet, or nonsense. Pure, so that every cut of the bytes can be tried.
fn parse(bytes: &[u8], ended: bool) -> Result<Option<Response>, &'static str> {
    let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else {
        return if MAX_HEAD < bytes.len() { Err("head too long") } else { Ok(None) };
    };
    if MAX_HEAD < end {
        return Err("head too long");
    }
    let head = std::str::from_utf8(&bytes[..end]).map_err(|_| "head is not text")?;
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(status_of).ok_or("no status line")?;
    let mut headers = Vec::new();
    for line in lines {
        let (name, value) = line.split_once(':').ok_or("header without a colon")?;
        if name.is_empty() || name.contains([' ', '\t']) {
            return Err("bad header name");
        }
        headers.push((name.to_owned(), value.trim().to_owned()));
    }
    let mut response = Response { status, headers, body: Vec::new() };
    let rest = &bytes[end + 4..];
    let body = match framing(&response)? {
        Framing::Chunked => chunked(rest)?,
        Framing::Length(length) => rest.get(..length).map(<[u8]>::to_vec),
        Framing::ToTheEnd if MAX_BODY < rest.len() => return Err("body too long"),
        Framing::ToTheEnd => ended.then(|| rest.to_vec()),
    };
    Ok(body.map(|body| {
        response.body = body;
        response
    }))
}

fn status_of(line: &str) -> Option<u16> {
    let rest = line.strip_prefix("HTTP/1.1 ").or_else(|| line.strip_prefix("HTTP/1.0 "))?;
    let code = rest.split(' ').next().filter(|code| code.len() == 3)?;
    code.parse().ok().filter(|code| (200..600).contains(code))
}

enum Framing {
    Length(usize),
    Chunked,
    ToTheEnd,
}

fn framing(response: &Response) -> Result<Framing, &'static str> {
    let all = |name: &'static str| {
        response.headers.iter().filter(move |(its, _)| its.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    };
    let lengths: Vec<&str> = all("content-length").collect();
    let codings: Vec<&str> = all("transfer-encoding").collect();
    match (lengths.as_slice(), codings.as_slice()) {
        _ if matches!(response.status, 204 | 304) => Ok(Framing::Length(0)),
        ([], []) => Ok(Framing::ToTheEnd),
        ([], [coding]) if coding.eq_ignore_ascii_case("chunked") => Ok(Framing::Chunked),
        ([length], []) => {
            let digits = !length.is_empty() && length.bytes().all(|byte| byte.is_ascii_digit());
            match length.parse().ok().filter(|_| digits) {
                Some(length) if length <= MAX_BODY => Ok(Framing::Length(length)),
                Some(_) => Err("body too long"),
                None => Err("bad content length"),
            }
        }
        _ => Err("unclear where the body ends"),
    }
}

/// A chunked body; none while it is not whole. Trailers are not read, for nothing in them is wanted.
fn chunked(mut rest: &[u8]) -> Result<Option<Vec<u8>>, &'static str> {
    let mut body = Vec::new();
    loop {
        let Some(end) = rest.windows(2).position(|window| window == b"\r\n") else {
            return if 256 < rest.len() { Err("chunk size too long") } else { Ok(None) };
        };
        let line = std::str::from_utf8(&rest[..end]).map_err(|_| "bad chunk size")?;
        let digits = line.split(';').next().unwrap_or_default().trim();
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err("bad chunk size");
        }
        let size = usize::from_str_radix(digits, 16).map_err(|_| "body too long")?;
        if size == 0 {
            return Ok(Some(body));
        }
        if MAX_BODY < size || MAX_BODY < body.len() + size {
            return Err("body too long");
        }
        rest = &rest[end + 2..];
        let (Some(piece), Some(mark)) = (rest.get(..size), rest.get(size..size + 2)) else { return Ok(None) };
        if mark != b"\r\n" {
            return Err("chunk longer than it says");
        }
        body.extend_from_slice(piece);
        rest = &rest[size + 2..];
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use tokio::time::{Instant, sleep};
    use tokio_stream::StreamExt as _;
    use tokio_util::io::StreamReader;

    use super::*;
    use crate::link::Socket;

    fn check(text: &str, expected: Result<(u16, &str), &str>) {
        let bytes = text.as_bytes();
        let parsed = parse(bytes, true).map(|response| response.expect("a whole answer"));
        let parsed = parsed.map(|it| (it.status, it.text().unwrap_or("not text").to_owned()));
        assert_eq!(parsed, expected.map(|(status, body)| (status, body.to_owned())), "{text:?}");
        // Torn anywhere before its end, it is never taken for a whole answer, nor for nonsense that it is not.
        if expected.is_ok() {
            for cut in 0..bytes.len() {
                match parse(&bytes[..cut], false) {
                    Ok(None) => {}
                    // After the last chunk only trailers can come.
                    Ok(Some(_)) => assert!(bytes.len() <= cut + 2, "{text:?} at {cut}"),
                    Err(what) => panic!("{what}: {text:?} at {cut}"),
                }
            }
        }
    }

    #[test]
    fn answers_are_framed_by_length_by_chunks_or_by_the_end() {
        check("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", Ok((200, "hello")));
        check("HTTP/1.0 404 Not Found\r\n\r\nnothing here", Ok((404, "nothing here")));
        check("HTTP/1.1 200\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n", {
            Ok((200, "hello world"))
        });
        assert_eq!(parse(b"HTTP/1.1 204 No Content\r\n\r\n", false).unwrap().unwrap().status, 204);
    }

    #[test]
    fn nonsense_is_no_answer() {
        for (text, what) in [
            ("SSH-2.0-OpenSSH_9.9\r\n\r\n", "no status line"),
            ("HTTP/2 200 OK\r\n\r\n", "no status line"),
            ("HTTP/1.1 2000 OK\r\n\r\n", "no status line"),
            ("HTTP/1.1 100 Continue\r\n\r\n", "no status line"),
            ("HTTP/1.1 200 OK\r\nnonsense\r\n\r\n", "header without a colon"),
            ("HTTP/1.1 200 OK\r\nContent Length: 1\r\n\r\nx", "bad header name"),
            ("HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\nhello", "bad content length"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 16385\r\n\r\n", "body too long"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", "unclear where the body ends"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nx", {
                "unclear where the body ends"
            }),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nx", "unclear where the body ends"),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", "bad chunk size"),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4001\r\n", "body too long"),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n", "body too long"),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nhello\r\n", "chunk longer than it says"),
        ] {
            check(text, Err(what));
        }
    }

    #[test]
    fn what_is_too_long_is_refused_before_it_is_read() {
        let endless_head = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(MAX_HEAD));
        assert_eq!(parse(endless_head.as_bytes(), false), Err("head too long"));
        let endless_body = format!("HTTP/1.1 200 OK\r\n\r\n{}", "y".repeat(MAX_BODY + 1));
        assert_eq!(parse(endless_body.as_bytes(), false), Err("body too long"));
        let endless_size = format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{}", "0".repeat(300));
        assert_eq!(parse(endless_size.as_bytes(), false), Err("chunk size too long"));
    }

    /// A host that takes the connection or not, and then says a byte now and then.
    struct Slow {
        connects: bool,
    }

    #[async_trait]
    impl Net for Slow {
        async fn connect(&self, _: &Address) -> io::Result<Socket> {
            if !self.connects {
                std::future::pending::<()>().await;
            }
            let drip = tokio_stream::iter(0..10).then(|_| async {
                sleep(Duration::from_millis(300)).await;
                Ok::<_, io::Error>(io::Cursor::new(b"H"))
            });
            let stream = tokio::io::join(StreamReader::new(Box::pin(drip)), tokio::io::sink());
            Ok(Socket { stream: Box::new(stream), local: None })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn host_has_a_second_to_connect_and_two_to_answer() {
        let address = Address { host: "192.0.2.1".into(), port: 80 };
        let request = Request { method: "GET", path: "/", headers: &[] };
        for (connects, limit, expected) in [(false, LIMIT, 1000), (true, LIMIT, 2000), (true, LIMIT / 4, 500)] {
            let began = Instant::now();
            let error = call(&Slow { connects }, &address, &request, limit).await.unwrap_err();
            assert_eq!(began.elapsed().as_millis(), expected);
            assert_eq!(matches!(error, HttpError::Late { .. }), connects, "{error}");
        }
    }

    #[test]
    fn request_names_its_host_without_the_usual_port() {
        let request = Request { method: "PUT", path: "/latest/api/token", headers: &[("X-Ttl", "21600")] };
        let text = |host: &str, port| {
            String::from_utf8(head(&Address { host: host.into(), port }, &request)).expect("plain text")
        };
        assert_eq!(
            text("fd00:ec2::254", 80),
            "PUT /latest/api/token HTTP/1.1\r\nHost: [fd00:ec2::254]\r\nAccept: */*\r\nConnection: close\r\n\
             Content-Length: 0\r\nX-Ttl: 21600\r\n\r\n"
        );
        assert!(text("127.0.0.1", 8080).contains("Host: 127.0.0.1:8080\r\n"));
    }
}
