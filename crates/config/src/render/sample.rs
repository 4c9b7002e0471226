//! Data of an instance that does not exist, to see whether a config renders at all.

use nstance_core::ids::InstanceId;

use super::data::{InstanceData, RenderData};
use crate::{merge::MergedGroup, model::Config};

/// A fixed UUIDv7, so that two checks of the same config agree to the byte.
const SAMPLE_UUID: [u8; 16] =
    [0x01, 0x97, 0x0a, 0x1c, 0xe3, 0x1e, 0x74, 0x22, 0x9c, 0xd5, 0xe9, 0x65, 0x1d, 0x11, 0xcc, 0x97];

impl RenderData {
    /// What config and group alone decide. The caller fills in the rest: addresses, CA, images, nonce and the instance.
    pub fn for_group(config: &Config, group: &MergedGroup) -> Self {
        let server = &config.server;
        Self {
            cluster_id: server.cluster_id.to_string(),
            shard: server.shard.to_string(),
            registration_addr: server.advertise.registration.to_string(),
            agent_addr: server.advertise.agent.to_string(),
            operator_addr: server.advertise.operator.to_string(),
            provider_kind: server.provider.kind.to_string(),
            region: server.provider.region.clone(),
            zone: server.provider.zone.clone(),
            vars: group.vars.clone(),
            instance: InstanceData {
                kind: group.kind.to_string(),
                arch: group.arch.to_string(),
                instance_type: group.instance_type.clone().unwrap_or_default(),
                group: group.group.group.to_string(),
                tenant: group.group.tenant.to_string(),
                subnet_pool: group.subnet_pool.to_string(),
                ..InstanceData::default()
            },
            ..Self::default()
        }
    }
}

/// Data as a running instance of the group might have.
pub(crate) fn sample_data(config: &Config, group: &MergedGroup) -> RenderData {
    let mut data = RenderData::for_group(config, group);
    data.ca_cert = "-----BEGIN CERTIFICATE-----\nc2FtcGxl\n-----END CERTIFICATE-----\n".to_owned();
    data.nonce = "sample.nonce.jwt".to_owned();
    data.images = config.images.keys().map(|name| (name.clone(), "image-sample".to_owned())).collect();
    data.instance.id = InstanceId::new(group.kind, SAMPLE_UUID).to_string();
    data.instance.subnet_id = group.subnets.first().cloned().unwrap_or_default();
    data.instance.hostname = "sample".to_owned();
    data.instance.fqdn = "sample.example.net".to_owned();
    data.instance.ip4 = "192.0.2.10".to_owned();
    data.instance.ip6 = "2001:db8::10".to_owned();
    data
}
