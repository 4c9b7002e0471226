//! One request over plain HTTP to a component on this machine.

use std::{io, net::Ipv4Addr, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

/// Components answer from memory; one that needs longer is not well.
const LIMIT: Duration = Duration::from_secs(2);
const MAX_ANSWER: u64 = 4 * 1024 * 1024;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) body: String,
}

pub(crate) async fn get(port: u16, path: &str) -> io::Result<Answer> {
    get_within(port, path, LIMIT).await
}

pub(crate) async fn get_within(port: u16, path: &str, limit: Duration) -> io::Result<Answer> {
    within(limit, port, "GET", path, "").await
}

/// Any other method, with a body of JSON.
pub(crate) async fn send(port: u16, method: &str, path: &str, body: &str) -> io::Result<Answer> {
    within(LIMIT, port, method, path, body).await
}

async fn within(limit: Duration, port: u16, method: &str, path: &str, body: &str) -> io::Result<Answer> {
    let late = |_| {
        let seconds = limit.as_secs();
        io::Error::new(io::ErrorKind::TimedOut, format!("no answer from 127.0.0.1:{port}{path} within {seconds} s"))
    };
    timeout(limit, exchange(port, method, path, body)).await.map_err(late)?
}

async fn exchange(port: u16, method: &str, path: &str, body: &str) -> io::Result<Answer> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    // 1.0: the answer ends with the connection, and nobody sends it in chunks.
    let head = format!("{method} {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n");
    let request = match body {
        "" => format!("{head}\r\n"),
        _ => {
            let n = body.len();
            format!("{head}Content-Type: application/json\r\nContent-Length: {n}\r\n\r\n{body}")
        }
    };
    stream.write_all(request.as_bytes()).await?;
    let mut bytes = Vec::new();
    stream.take(MAX_ANSWER).read_to_end(&mut bytes).await?;
    parse(&bytes).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("port {port} does not speak HTTP")))
}

fn parse(bytes: &[u8]) -> Option<Answer> {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let code = head.strip_prefix("HTTP/1.")?.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(Answer { code, body: body.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_code_and_body() {
        let answer = parse(b"HTTP/1.0 503 Service Unavailable\r\na: b\r\n\r\nbooting\n").unwrap();
        assert_eq!((answer.code, answer.body.as_str()), (503, "booting\n"));
        assert_eq!(parse(b"SSH-2.0-OpenSSH\r\n"), None);
    }
}
