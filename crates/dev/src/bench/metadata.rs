//! The metadata service of a spot machine that nobody takes away, where such a service is: at a link-local address.

use std::{
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use anyhow::Context;
use nstance_rt::tasks::Tasks;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
};

const ADDRESS: (Ipv4Addr, u16) = (Ipv4Addr::new(169, 254, 169, 254), 80);

const TOKEN: &str = "dev-metadata-token";

/// Serves it, and counts how often it is asked whether the machine will be taken.
pub(super) async fn serve(tasks: &Tasks) -> anyhow::Result<Arc<AtomicU64>> {
    let listener = TcpListener::bind(ADDRESS).await.context(
        "listen on 169.254.169.254:80, where a spot machine asks; run this in a network of its own, as in \
         unshare -rn sh -c 'ip link set lo up && ip address add 169.254.169.254/32 dev lo && nstance-dev bench agent --spot'",
    )?;
    let asked = Arc::<AtomicU64>::default();
    let (scope, counted) = (tasks.clone(), asked.clone());
    tasks.spawn_droppable("metadata", async move {
        while let Ok((stream, _)) = listener.accept().await {
            let counted = counted.clone();
            scope.spawn_droppable("metadata-call", async move { answer(stream, &counted).await });
        }
    });
    Ok(asked)
}

/// One request for each connection, as the agent has it.
async fn answer(stream: TcpStream, asked: &AtomicU64) {
    let (reader, mut writer) = stream.into_split();
    let mut lines = BufReader::new(reader).lines();
    let Ok(Some(request)) = lines.next_line().await else { return };
    let mut has_token = false;
    while let Ok(Some(line)) = lines.next_line().await
        && !line.is_empty()
    {
        has_token |= line.split_once(':').is_some_and(|(name, value)| {
            name.eq_ignore_ascii_case("x-aws-ec2-metadata-token") && value.trim() == TOKEN
        });
    }
    let mut words = request.split_whitespace();
    let (code, body) = match (words.next(), words.next()) {
        (Some("PUT"), Some("/latest/api/token")) => ("200 OK", TOKEN),
        _ if !has_token => ("401 Unauthorized", ""),
        (Some("GET"), Some("/latest/meta-data/instance-id")) => ("200 OK", "i-0123456789abcdef0"),
        (Some("GET"), Some("/latest/meta-data/instance-life-cycle")) => ("200 OK", "spot"),
        (Some("GET"), Some("/latest/meta-data/placement/availability-zone")) => ("200 OK", "dev-1a"),
        (Some("GET"), Some("/latest/meta-data/spot/instance-action")) => {
            asked.fetch_add(1, Ordering::Relaxed);
            ("404 Not Found", "")
        }
        _ => ("404 Not Found", ""),
    };
    let ttl = if body == TOKEN { "X-aws-ec2-metadata-token-ttl-seconds: 21600\r\n" } else { "" };
    let head = format!("HTTP/1.1 {code}\r\nContent-Length: {}\r\n{ttl}Connection: close\r\n\r\n", body.len());
    // An agent that went away needs no answer.
    let _ = writer.write_all(format!("{head}{body}").as_bytes()).await;
}
