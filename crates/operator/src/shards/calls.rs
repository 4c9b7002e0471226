//! The calls by which wishes are granted. Each names an end state or carries an id, so that it may be repeated.

use nstance_client::{Connection, ShardError};
use nstance_proto::v1;

use super::snapshot;
use crate::ports::{Answer, GroupWish, InstanceWish, Wish};

/// The fields of a group that a pool can express. What a request names and leaves empty falls back to the shard's config.
/// Others of the API's layer (a paused rollout, a drain timeout, load balancers) are set by other clients and stay.
const GROUP_FIELDS: [&str; 5] = ["template", "size", "instance_type", "subnet_pool", "vars"];

/// The name of the call, for metrics.
pub fn method(wish: &Wish) -> &'static str {
    match wish {
        Wish::UpsertGroup(_) => "UpsertGroup",
        Wish::DeleteGroup { .. } => "DeleteGroup",
        Wish::CreateInstance(_) => "CreateInstance",
        Wish::DeleteInstance { .. } => "DeleteInstance",
        Wish::ReplaceInstance { .. } => "ReplaceInstance",
        Wish::InstanceStatus { .. } => "GetInstanceStatus",
        Wish::AcknowledgeDrained { .. } => "AcknowledgeDrained",
    }
}

/// Brings one wish to the shard, within the connection's deadline.
pub async fn grant(connection: &Connection, wish: Wish) -> Result<Answer, ShardError> {
    match wish {
        Wish::UpsertGroup(wish) => {
            let request = upsert(wish);
            let call = |mut client: nstance_client::ShardClient| {
                let request = request.clone();
                async move { client.service.upsert_group(request).await }
            };
            let group = connection.call(call).await?.into_inner();
            Ok(Answer::Group(Box::new(snapshot::group(&group))))
        }
        Wish::DeleteGroup { key } => {
            let request = v1::DeleteGroupRequest { key, ..v1::DeleteGroupRequest::default() };
            let call = |mut client: nstance_client::ShardClient| {
                let request = request.clone();
                async move { client.service.delete_group(request).await }
            };
            connection.call(call).await?;
            Ok(Answer::Done)
        }
        Wish::CreateInstance(wish) => {
            let request = create(wish);
            let call = |mut client: nstance_client::ShardClient| {
                let request = request.clone();
                async move { client.service.create_instance(request).await }
            };
            let it = connection.call(call).await?.into_inner();
            Ok(Answer::Instance { id: it.instance_id, status: it.status })
        }
        Wish::DeleteInstance { id } => {
            let request = v1::DeleteInstanceRequest { instance_id: id.clone(), ..v1::DeleteInstanceRequest::default() };
            let call = |mut client: nstance_client::ShardClient| {
                let request = request.clone();
                async move { client.service.delete_instance(request).await }
            };
            let status = connection.call(call).await?.into_inner().status;
            Ok(Answer::Instance { id, status })
        }
        Wish::ReplaceInstance { id, reason } => {
            let request = v1::ReplaceInstanceRequest { instance_id: id.clone(), reason };
            let call = |mut client: nstance_client::ShardClient| {
                let request = request.clone();
                async move { client.service.replace_instance(request).await }
            };
            let status = connection.call(call).await?.into_inner().status;
            Ok(Answer::Instance { id, status })
        }
        Wish::InstanceStatus { id } => {
            let request = v1::GetInstanceStatusRequest { instance_id: id, ..v1::GetInstanceStatusRequest::default() };
            let call = |mut client: nstance_client::ShardClient| {
                let request = request.clone();
                async move { client.service.get_instance_status(request).await }
            };
            let it = connection.call(call).await?.into_inner();
            Ok(Answer::InstanceStatus(Box::new(snapshot::instance(connection.shard(), &it))))
        }
        Wish::AcknowledgeDrained { id, drain_id } => {
            let request = v1::DrainAckRequest { instance_id: id, drain_id };
            let call = |mut client: nstance_client::ShardClient| {
                let request = request.clone();
                async move { client.service.acknowledge_drained(request).await }
            };
            connection.call(call).await?;
            Ok(Answer::Done)
        }
    }
}

fn upsert(wish: GroupWish) -> v1::UpsertGroupRequest {
    v1::UpsertGroupRequest {
        key: wish.key,
        config: Some(v1::GroupConfig {
            template: wish.template.unwrap_or_default(),
            size: Some(wish.size),
            instance_type: wish.instance_type.unwrap_or_default(),
            subnet_pool: wish.subnet_pool.unwrap_or_default(),
            vars: wish.vars.into_iter().collect(),
            ..v1::GroupConfig::default()
        }),
        update_mask: Some(prost_types::FieldMask { paths: GROUP_FIELDS.map(str::to_owned).to_vec() }),
        preferred_victims: wish.preferred_victims,
        ..v1::UpsertGroupRequest::default()
    }
}

fn create(wish: InstanceWish) -> v1::CreateInstanceRequest {
    v1::CreateInstanceRequest {
        request_id: wish.request_id,
        config: Some(v1::InstanceConfig {
            group: wish.group,
            instance_type: wish.instance_type.unwrap_or_default(),
            subnet_pool: wish.subnet_pool.unwrap_or_default(),
            vars: wish.vars.into_iter().collect(),
            ..v1::InstanceConfig::default()
        }),
        ..v1::CreateInstanceRequest::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_sent_as_the_whole_layer() {
        let wish = GroupWish { key: "web".into(), size: 0, ..GroupWish::default() };
        let request = upsert(wish);
        let paths = request.update_mask.unwrap().paths;
        assert!(paths.contains(&"vars".to_owned()) && paths.contains(&"template".to_owned()));
        assert!(!paths.contains(&"rollout_paused".to_owned()), "a rollout that a person paused stays paused");
        assert_eq!(request.config.unwrap().size, Some(0), "zero is a size, not a missing one");
        assert_eq!(request.expected_etag, "");
    }
}
