//! The calls of the operators' service over one open connection.

use std::time::Duration;

use nstance_proto::v1::{
    ConfigStatusResponse, GroupStatus, InstanceStatusResponse, ListInstancesRequest,
    operator_service_client::OperatorServiceClient,
};
use tonic::{Code, Status, transport::Channel};

/// The most instances that a server returns per page.
const MAX_PAGE: i32 = 500;

/// One open connection to a shard's leader. Clones share the connection.
#[derive(Debug, Clone)]
pub struct ShardClient {
    pub shard: String,
    /// Every call of the operators' service.
    pub service: OperatorServiceClient<Channel>,
}

impl ShardClient {
    pub async fn config_status(&mut self) -> Result<ConfigStatusResponse, Status> {
        Ok(self.service.get_config_status(()).await?.into_inner())
    }

    pub async fn groups(&mut self) -> Result<Vec<GroupStatus>, Status> {
        Ok(self.service.list_groups(()).await?.into_inner().groups)
    }

    pub async fn group(&mut self, key: &str) -> Result<GroupStatus, Status> {
        let found = self.groups().await?.into_iter().find(|it| it.key == key);
        found.ok_or_else(|| Status::new(Code::NotFound, format!("there is no group {key} in {}", self.shard)))
    }

    /// The instances of all pages.
    pub async fn instances(&mut self, request: ListInstancesRequest) -> Result<Vec<InstanceStatusResponse>, Status> {
        Ok(self.instances_and_token(request).await?.0)
    }

    /// The instances of all pages, and the token after which a watch stream reports the changes since.
    pub async fn instances_and_token(
        &mut self,
        mut request: ListInstancesRequest,
    ) -> Result<(Vec<InstanceStatusResponse>, String), Status> {
        request.page_size = MAX_PAGE;
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

/// A duration as a message field. One that is too long for the wire becomes the longest possible.
pub fn wire_duration(duration: Duration) -> prost_types::Duration {
    duration.try_into().unwrap_or(prost_types::Duration { seconds: i64::MAX, nanos: 0 })
}
