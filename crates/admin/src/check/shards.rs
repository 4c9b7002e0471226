//! Every shard from the socket up: does somebody listen, is it ours, does it let us in, and does it lead with the config
//! that is stored?

use std::time::Duration;

use futures::future::join_all;
use nstance_client::{Connection, ShardError, Shards, Target};
use nstance_core::ids::Shard;
use nstance_proto::v1::ConfigStatusResponse;
use tokio::{net::TcpStream, time::timeout};
use tonic::Code;

use super::{Section, Sheet};
use crate::{failure::next_step, storage::Cluster};

const CONNECT: Duration = Duration::from_secs(3);
/// A leader answers from memory.
const SLOW: Duration = Duration::from_millis(500);

pub async fn check(section: Section<'_>, cluster: &Cluster, shards: &Shards) {
    let looked = join_all(shards.connections().iter().map(|connection| async {
        let mut sheet = Sheet::default();
        one(sheet.of(section.group), cluster, connection).await;
        sheet.lines
    }));
    let lines = looked.await;
    section.sheet.lines.extend(lines.into_iter().flatten());
}

const REST: [&str; 5] = ["tls", "mtls", "leader", "round-trip", "config"];

async fn one(mut section: Section<'_>, cluster: &Cluster, connection: &Connection) {
    let target = connection.target();
    let name = |what: &str| format!("{}/{what}", target.shard);
    let skip = |section: &mut Section<'_>, from: usize, why: &str| {
        REST[from..].iter().for_each(|it| section.skip(&name(it), why));
    };
    let connects = target.addresses.iter().map(|address| async move {
        let connected = timeout(CONNECT, TcpStream::connect((address.host.as_str(), address.port))).await;
        match connected {
            Ok(Ok(_)) => Ok(address.to_string()),
            Ok(Err(error)) => Err(format!("{address}: {error}")),
            Err(_) => Err(format!("{address}: no answer within 3 s")),
        }
    });
    let connected = join_all(connects).await;
    // Followers keep their ports closed, so one that listens is enough.
    let listening: Vec<&str> = connected.iter().flatten().map(String::as_str).collect();
    if listening.is_empty() {
        let why: Vec<&str> = connected.iter().filter_map(|it| it.as_ref().err()).map(String::as_str).collect();
        let fix = "start its nstance-server, or correct --servers; only a leader opens this port, so look at its /healthz too";
        section.fail(&name("tcp"), why.join("; "), fix);
        return skip(&mut section, 0, "nobody listens");
    }
    section.ok(&name("tcp"), listening.join(", "));
    let mut client = match timeout(connection.timeout(), connection.client()).await {
        Ok(Ok(client)) => client,
        Ok(Err(error)) => {
            let fix = match error.code {
                Code::Unauthenticated => {
                    "the address is another's, or ca.crt is old: nstance-admin cluster register-operator; names in \
                     server.advertise or extra_sans"
                }
                _ => "look at the server's log",
            };
            section.fail(&name("tls"), error.message, fix);
            return skip(&mut section, 1, "there is no TLS connection");
        }
        Err(_) => {
            section.fail(&name("tls"), "no handshake in time", "look at the server's log");
            return skip(&mut section, 1, "there is no TLS connection");
        }
    };
    section.ok(&name("tls"), "certificate and names are trusted");
    let asked = cluster.clock.monotonic();
    let answer = timeout(connection.timeout(), client.config_status()).await;
    let took = cluster.clock.monotonic().since(asked);
    let status = match answer {
        Ok(Ok(status)) => status,
        Ok(Err(status)) => {
            let error = ShardError::from_status(&target.shard, &status);
            let fix = next_step(&error).unwrap_or_else(|| "look at the server's log".to_owned());
            section.fail(&name("mtls"), format!("{} ({})", error.message, crate::view::code_of(&error)), fix);
            return skip(&mut section, 2, "the server does not let us in");
        }
        Err(_) => {
            section.fail(&name("mtls"), "no answer in time", "look at the server's log, or give a longer --timeout");
            return skip(&mut section, 2, "the server does not answer");
        }
    };
    section.ok(&name("mtls"), "");
    leader(&mut section, &name("leader"), cluster, target, &status).await;
    let detail = format!("{:.1} ms", took.as_secs_f64() * 1000.0);
    if SLOW < took {
        section.warn(&name("round-trip"), detail, "look at the load of the server, and at the way to it");
    } else {
        section.ok(&name("round-trip"), detail);
    }
    config(&mut section, &name("config"), cluster, target, &status).await;
}

async fn leader(
    section: &mut Section<'_>,
    name: &str,
    cluster: &Cluster,
    target: &Target,
    status: &ConfigStatusResponse,
) {
    if status.shard != target.shard {
        let detail = format!("the server there serves shard {}", status.shard);
        return section.fail(name, detail, "correct --servers");
    }
    let detail = format!("{} in epoch {}, version {}", status.leader_id, status.epoch, status.server_version);
    let stored = match target.shard.parse::<Shard>() {
        Ok(shard) => cluster.lease(Some(&shard)).await.ok().flatten(),
        Err(_) => None,
    };
    match stored {
        Some((lease, _)) if status.epoch < lease.epoch.0 => {
            let said = format!("{detail}; the stored lease is of {} in epoch {}", lease.holder, lease.epoch);
            section.warn(name, said, "another server leads already: repeat the check");
        }
        _ => section.ok(name, detail),
    }
}

async fn config(
    section: &mut Section<'_>,
    name: &str,
    cluster: &Cluster,
    target: &Target,
    status: &ConfigStatusResponse,
) {
    let refresh = format!("nstance-admin config refresh --shard {}", target.shard);
    if !status.apply_errors.is_empty() {
        return section.warn(name, status.apply_errors.join("; "), refresh);
    }
    let Ok(shard) = target.shard.parse::<Shard>() else { return };
    match cluster.config(&shard).await {
        Ok(Some(stored)) if stored.etag.0 == status.etag => section.ok(name, "what is stored is in force"),
        Ok(Some(_)) => section.warn(name, "another config is stored than is in force", refresh),
        Ok(None) => section.fail(name, "its config is not in the bucket any more", "upload it again"),
        Err(error) => section.skip(name, error.to_string()),
    }
}
