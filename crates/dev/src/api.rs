//! The operator API as we use it: look at everything, listen to what happens.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use anyhow::{Context, bail};
use nstance_agent::{
    link::{TcpNet, dial},
    settings::Address,
};
use nstance_config::Config;
use nstance_core::ids::Shard;
use nstance_proto::v1::{
    ConfigStatusResponse, Event, GroupConfig, GroupStatus, InstanceStatusResponse, ListInstancesRequest,
    RefreshConfigRequest, RefreshConfigResponse, UpsertGroupRequest, WatchEventsRequest,
    operator_service_client::OperatorServiceClient,
};
use nstance_store::s3::S3Store;
use tokio::net::TcpStream;
use tonic::{Code, Status, Streaming, transport::Channel};

use crate::{identity, layout::Layout, records, records::RunFile, roles, stored};

/// A call that takes longer than this is no answer; the server reads from memory.
const CALL_LIMIT: Duration = Duration::from_secs(3);

/// It reads the store, and may wait for its turn.
const REFRESH_LIMIT: Duration = Duration::from_secs(30);

const PAGE: i32 = 500;

/// The leader's picture of its shard at one moment.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub(crate) leader: ConfigStatusResponse,
    pub(crate) groups: Vec<GroupStatus>,
    pub(crate) instances: Vec<InstanceStatusResponse>,
}

impl View {
    /// Every group at its size, every member of it heard from.
    pub(crate) fn is_healthy(&self) -> bool {
        self.groups.iter().all(|it| it.actual_size == it.size && it.ready_size == it.size)
    }

    pub(crate) fn n_ready(&self) -> usize {
        self.groups.iter().map(|it| usize::try_from(it.ready_size).unwrap_or(0)).sum()
    }
}

#[derive(Clone)]
pub(crate) struct Client {
    service: OperatorServiceClient<Channel>,
}

/// Dials the operator port of a shard's leader, with an identity made if needed.
pub(crate) async fn connect(layout: &Layout, shard: &Shard) -> anyhow::Result<Client> {
    let Some(store) = RunFile::read(layout, records::STORE).filter(|it| it.process.lives()) else {
        bail!("the store of {} is not running", layout.shown());
    };
    let bucket = stored::open(store.port("s3").context("the store's port is not recorded")?)?;
    let config = stored::read_config(&bucket, shard).await?.context("the bucket holds no config yet")?.config;
    connect_to(layout, &bucket, &config).await
}

pub(crate) async fn connect_to(layout: &Layout, bucket: &Arc<S3Store>, config: &Config) -> anyhow::Result<Client> {
    match attempt(layout, bucket, config).await {
        // The kept identity was good by the record and is not by the server: a new one settles it.
        Err(Refused::ByServer(_)) => {
            identity::discard(layout);
            attempt(layout, bucket, config).await.map_err(Refused::into_error)
        }
        other => other.map_err(Refused::into_error),
    }
}

enum Refused {
    ByServer(Status),
    Other(anyhow::Error),
}

impl Refused {
    fn into_error(self) -> anyhow::Error {
        match self {
            Self::ByServer(status) => anyhow::Error::new(status).context("the server refuses our identity"),
            Self::Other(error) => error,
        }
    }
}

async fn attempt(layout: &Layout, bucket: &Arc<S3Store>, config: &Config) -> Result<Client, Refused> {
    let tls = identity::obtain(layout, bucket, config).await.map_err(Refused::Other)?;
    let port = leader_port(layout, &config.server.shard).await.map_err(Refused::Other)?;
    let address = Address { host: "127.0.0.1".to_owned(), port };
    let link = dial(&TcpNet, &tls, &address).await.map_err(|error| Refused::Other(error.into()))?;
    let service = OperatorServiceClient::new(link.channel).max_decoding_message_size(64 * 1024 * 1024);
    let mut client = Client { service };
    match client.config().await {
        Ok(_) => Ok(client),
        Err(status) if matches!(status.code(), Code::Unauthenticated | Code::PermissionDenied) => {
            Err(Refused::ByServer(status))
        }
        Err(status) => Err(Refused::Other(status.into())),
    }
}

/// Past the links, which may be cut. Who leads but cannot act just now says that it does not lead, and still answers.
async fn leader_port(layout: &Layout, shard: &Shard) -> anyhow::Result<u16> {
    let servers = records::servers_of(layout, shard.as_str());
    if servers.is_empty() {
        bail!("no server of {shard} runs");
    }
    for (server, leads) in roles::asked(servers).await {
        let Some(port) = server.port("operator") else { continue };
        if leads || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.is_ok() {
            return Ok(port);
        }
    }
    bail!("no server of {shard} leads")
}

async fn within<T>(call: impl Future<Output = Result<tonic::Response<T>, Status>>) -> Result<T, Status> {
    match tokio::time::timeout(CALL_LIMIT, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => Err(Status::deadline_exceeded("the server did not answer within 3 s")),
    }
}

impl Client {
    pub(crate) async fn config(&mut self) -> Result<ConfigStatusResponse, Status> {
        within(self.service.get_config_status(())).await
    }

    /// The leader takes the config that lies in the store.
    pub(crate) async fn refresh(&mut self, confirm_removals: bool) -> Result<RefreshConfigResponse, Status> {
        let request = RefreshConfigRequest { confirm_removals, dry_run: false };
        match tokio::time::timeout(REFRESH_LIMIT, self.service.refresh_config(request)).await {
            Ok(answer) => answer.map(tonic::Response::into_inner),
            Err(_) => Err(Status::deadline_exceeded("the server did not answer within 30 s")),
        }
    }

    pub(crate) async fn groups(&mut self) -> Result<Vec<GroupStatus>, Status> {
        Ok(within(self.service.list_groups(())).await?.groups)
    }

    /// Asks for another size of a group, and for nothing else.
    pub(crate) async fn resize(&mut self, key: String, size: i32) -> Result<(), Status> {
        let config = GroupConfig { size: Some(size), ..GroupConfig::default() };
        let request = UpsertGroupRequest { key, config: Some(config), ..UpsertGroupRequest::default() };
        match tokio::time::timeout(REFRESH_LIMIT, self.service.upsert_group(request)).await {
            Ok(answer) => answer.map(|_| ()),
            Err(_) => Err(Status::deadline_exceeded("the server did not answer within 30 s")),
        }
    }

    pub(crate) async fn view(&mut self) -> Result<View, Status> {
        let leader = self.config().await?;
        let groups = self.groups().await?;
        let mut instances = Vec::new();
        let mut page_token = String::new();
        loop {
            let request = ListInstancesRequest { page_size: PAGE, page_token, ..ListInstancesRequest::default() };
            let page = within(self.service.list_instances(request)).await?;
            instances.extend(page.instances);
            page_token = page.next_page_token;
            if page_token.is_empty() {
                break;
            }
        }
        Ok(View { leader, groups, instances })
    }

    /// Everything that happened in this leader's term, then what happens.
    pub(crate) async fn events_from_start(&mut self) -> Result<Streaming<Event>, Status> {
        let epoch = self.config().await?.epoch;
        self.events_after(format!("{epoch}-0")).await
    }

    /// Only what happens from now on.
    pub(crate) async fn events(&mut self) -> Result<Streaming<Event>, Status> {
        self.events_after(String::new()).await
    }

    async fn events_after(&mut self, resume_token: String) -> Result<Streaming<Event>, Status> {
        let request = WatchEventsRequest { resume_token, min_severity: 1, ..WatchEventsRequest::default() };
        within(self.service.watch_events(request)).await
    }
}

/// Milliseconds since 1970.
pub(crate) fn millis(at: Option<&prost_types::Timestamp>) -> Option<i64> {
    at.map(|at| at.seconds * 1000 + i64::from(at.nanos) / 1_000_000)
}
