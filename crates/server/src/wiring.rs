//! The one place that chooses adapters.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    path::PathBuf,
    sync::Arc,
};

use anyhow::{Context, bail};
use nstance_config::{
    Config,
    model::{Address, EncryptionKey, KeyProvider, SecretsProvider},
};
use nstance_core::ports::{
    clock::{Clock, Entropy},
    objects::ObjectStore,
    provider::{Owner, Provider},
    secrets::Secrets,
};
use nstance_providers::{
    fake::FakeProvider,
    process::{ProcessOptions, ProcessProvider},
};
use nstance_rt::tasks::Tasks;
use nstance_store::{
    file::FileStore,
    keys::{KeySource, load_key},
    s3::S3Store,
    secrets::{MemorySecrets, ObjectSecrets},
};

use crate::args::{Args, Storage};

pub fn store(args: &Args) -> anyhow::Result<Arc<dyn ObjectStore>> {
    let bucket = args.bucket.as_deref().context("--bucket is missing")?;
    Ok(match args.storage.context("--storage is missing")? {
        Storage::S3 => Arc::new(S3Store::from_env(bucket, &args.prefix).context("open the S3 bucket")?),
        Storage::File => Arc::new(FileStore::open(bucket, &args.prefix).context("open the directory")?),
    })
}

pub fn secrets(
    config: &Config,
    store: Arc<dyn ObjectStore>,
    entropy: Arc<dyn Entropy>,
) -> anyhow::Result<Arc<dyn Secrets>> {
    let secrets = &config.server.secrets;
    match secrets.provider {
        SecretsProvider::Memory => Ok(Arc::new(MemorySecrets::new())),
        SecretsProvider::ObjectStorage => {
            let Some(key) = &secrets.encryption_key else { bail!("server.secrets.encryption_key is missing") };
            let keys = encryption_keys(key)?;
            let mut old_keys = Vec::new();
            for old in &secrets.old_encryption_keys {
                old_keys.extend(encryption_keys(old)?);
            }
            let prefix = format!("cluster/{}", secrets.prefix(&config.server.cluster_id));
            Ok(Arc::new(ObjectSecrets::new(store, Some(&prefix), keys, old_keys, entropy)?))
        }
        other => bail!("secrets store {other} is not part of this build; use object-storage"),
    }
}

fn encryption_keys(key: &EncryptionKey) -> anyhow::Result<Vec<nstance_store::keys::EncryptionKey>> {
    let source = match key.provider {
        KeyProvider::Env => KeySource::Env(key.source.clone()),
        KeyProvider::File => KeySource::File(PathBuf::from(&key.source)),
        other => bail!("encryption keys from {other} are not part of this build; use env or file"),
    };
    let loaded = load_key(&source).context("load the encryption key")?;
    if let Some(warning) = &loaded.warning {
        tracing::warn!(warning, "encryption key");
    }
    Ok(loaded.keys)
}

/// Provider kinds that this build can run.
const PROVIDERS: [&str; 3] = ["process", "tmux", "fake"];

/// Refuses a provider that this build lacks. Validation accepts every kind, so that all builds give the same report.
pub fn check_provider(config: &Config) -> anyhow::Result<()> {
    let kind = config.server.provider.kind.as_str();
    if PROVIDERS.contains(&kind) { Ok(()) } else { Err(not_built(kind)) }
}

fn not_built(kind: &str) -> anyhow::Error {
    anyhow::anyhow!(
        "provider {kind} is not part of this build, which has {}; start a build of nstance-server that has it, or choose \
         another server.provider.kind",
        PROVIDERS.join(", ")
    )
}

pub fn provider(
    config: &Config,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    tasks: &Tasks,
    machine: &str,
) -> anyhow::Result<Arc<dyn Provider>> {
    let server = &config.server;
    let owner = Owner { cluster: server.cluster_id.clone(), shard: server.shard.clone() };
    match server.provider.kind.as_str() {
        kind @ ("process" | "tmux") => {
            let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("nstance-agent")));
            let agent = beside.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from("nstance-agent"));
            let base = std::env::current_dir().context("find the working directory")?;
            let read = if kind == "tmux" { ProcessOptions::from_tmux_options } else { ProcessOptions::from_options };
            let options = read(&server.provider.options, owner, &agent, &base).context("server.provider.options")?;
            Ok(Arc::new(ProcessProvider::new(options, clock, tasks.clone()).on_machine(machine)))
        }
        "fake" => {
            let options = nstance_providers::fake::FakeOptions::from_options(&server.provider.options)
                .context("server.provider.options")?;
            Ok(Arc::new(FakeProvider::new(owner, clock, entropy, options).with_self(machine)))
        }
        other => Err(not_built(other)),
    }
}

/// Where a listener binds.
pub fn socket_addr(address: &Address, port_offset: u16) -> anyhow::Result<SocketAddr> {
    let host = if address.host.is_empty() { "0.0.0.0" } else { &address.host };
    let ip: IpAddr = match host {
        "localhost" => Ipv4Addr::LOCALHOST.into(),
        host => host.parse().with_context(|| format!("bind address {address}: give an IP address"))?,
    };
    Ok(SocketAddr::new(ip, shifted(address.port, port_offset)?))
}

/// A port of the config as this server has it. Port 0 is any.
fn shifted(port: u16, by: u16) -> anyhow::Result<u16> {
    if port == 0 {
        return Ok(0);
    }
    port.checked_add(by).with_context(|| format!("--port-offset {by} moves port {port} above 65535"))
}

/// The address of the interface that packets leave by; no packet is sent to find out.
pub fn primary_address() -> IpAddr {
    let probe = || {
        let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
        // A documentation address: connecting a UDP socket only asks the routing table.
        socket.connect("192.0.2.1:9").ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    probe().filter(|ip| !ip.is_unspecified()).unwrap_or(Ipv4Addr::LOCALHOST.into())
}

/// What clients dial: the advertised host, or ours; the advertised port, or the one that was really bound.
pub fn advertised(address: &Address, bound: SocketAddr) -> String {
    let host = if address.is_any() { primary_address().to_string() } else { address.host.clone() };
    let port = if address.port == 0 { bound.port() } else { address.port };
    Address { host, port }.to_string()
}

/// The same of a port that is this server's own and moves with its offset.
pub fn advertised_own(address: &Address, bound: SocketAddr, port_offset: u16) -> anyhow::Result<String> {
    let port = shifted(address.port, port_offset)?;
    Ok(advertised(&Address { host: address.host.clone(), port }, bound))
}

#[cfg(test)]
mod tests {
    use nstance_config::{Checks, load};

    use super::*;

    #[test]
    fn a_provider_that_this_build_lacks_is_valid_and_refused_at_start() {
        let config =
            |text: &str| load("example", text.as_bytes(), &Checks::offline(nstance_schemas::ALL)).config.unwrap();
        let tmux = config(include_str!("../../../examples/config-tmux.jsonc"));
        assert_eq!(tmux.server.provider.kind.as_str(), "tmux");
        assert!(check_provider(&tmux).is_ok());
        let aws = config(include_str!("../../../examples/config-aws.jsonc"));
        assert_eq!(
            check_provider(&aws).unwrap_err().to_string(),
            "provider aws is not part of this build, which has process, tmux, fake; start a build of nstance-server that \
             has it, or choose another server.provider.kind"
        );
    }
}
