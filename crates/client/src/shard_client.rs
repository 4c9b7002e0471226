//! One connection to a shard's leader.

use std::time::Duration;

use nstance_proto::v1::{
    ConfigStatusResponse, GroupStatus, InstanceStatusResponse, ListInstancesRequest,
    operator_service_client::OperatorServiceClient,
};
use tonic::{Code, Status, transport::Channel};

/// The most a page may hold.
const PAGE: i32 = 500;

/// Metadata of a stream of events: how many of its first messages are of the time before it began.
pub const N_REPLAYED: &str = "nstance-replayed";

#[derive(Debug, Clone)]
pub struct Client {
    pub shard: String,
    /// Every call of the operators' service.
    pub service: OperatorServiceClient<Channel>,
}

impl Client {
    pub async fn config(&mut self) -> Result<ConfigStatusResponse, Status> {
        Ok(self.service.get_config_status(()).await?.into_inner())
    }

    pub async fn groups(&mut self) -> Result<Vec<GroupStatus>, Status> {
        Ok(self.service.list_groups(()).await?.into_inner().groups)
    }

    pub async fn group(&mut self, key: &str) -> Result<GroupStatus, Status> {
        let found = self.groups().await?.into_iter().find(|it| it.key == key);
        found.ok_or_else(|| Status::new(Code::NotFound, format!("there is no group {key} in {}", self.shard)))
    }

    /// All pages.
    pub async fn instances(&mut self, request: ListInstancesRequest) -> Result<Vec<InstanceStatusResponse>, Status> {
        Ok(self.instances_and_token(request).await?.0)
    }

    /// The same, with the token after which a stream tells what has changed since.
    pub async fn instances_and_token(
        &mut self,
        mut request: ListInstancesRequest,
    ) -> Result<(Vec<InstanceStatusResponse>, String), Status> {
        request.page_size = PAGE;
        let mut instances = Vec::new();
        loop {
            let page = self.service.list_instances(request.clone()).await?.into_inner();
            instances.extend(page.instances);
            if page.next_page_token.is_empty() {
                return Ok((instances, page.resume_token));
            }
            request.page_token = page.next_page_token;
        }
    }
}

/// A duration of the wire; longer than any that means something is cut.
pub fn wire_duration(it: Duration) -> prost_types::Duration {
    it.try_into().unwrap_or(prost_types::Duration { seconds: i64::MAX, nanos: 0 })
}
