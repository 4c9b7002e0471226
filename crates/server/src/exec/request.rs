//! The request that makes an instance: a pure function of its record and the config.

use std::{collections::BTreeMap, sync::Arc};

use nstance_config::{
    GroupLayer, MergedGroup, OnDemandLayer,
    render::{InstanceData, RenderData, render_args, render_userdata},
};
use nstance_core::{
    instance::{Instance, OnDemandRequest, Ownership},
    ports::provider::{Bootstrap, ReserveSpec, Tags, Userdata, VmSpec},
};
use nstance_rt::chain::Chain;

use crate::term::Term;

/// Between the ids of several images in a record, which has one field for them. No provider uses it in an id.
pub(super) const IMAGES: &str = ",";

/// What an on-demand instance was asked for with, from its record and the config alone: its group may be another now,
/// or gone.
pub(crate) fn asked_for(
    term: &Term,
    instance: &Instance,
    request: &OnDemandRequest,
) -> Result<Arc<MergedGroup>, String> {
    let pool = |text: &Option<String>| {
        let parsed = text.as_deref().map(str::parse).transpose();
        parsed.map_err(|error: nstance_core::ids::IdError| error.to_string())
    };
    let inherits = &request.inherits;
    let group = GroupLayer {
        template: inherits.template.clone(),
        instance_type: inherits.instance_type.clone(),
        subnet_pool: pool(&inherits.subnet_pool)?,
        vars: Some(inherits.vars.clone()),
        ..GroupLayer::default()
    };
    let own = OnDemandLayer {
        template: request.template.clone(),
        instance_type: request.instance_type.clone(),
        subnet_pool: pool(&request.subnet_pool)?,
        vars: request.vars.clone(),
    };
    let merged = term.applied().config.merge_on_demand(&instance.group, Some(&group), &own);
    merged.map(Arc::new).map_err(|problems| {
        let texts: Vec<_> = problems.iter().map(|it| format!("{}: {}", it.path, it.message)).collect();
        texts.join("; ")
    })
}

/// What templates of an instance see, wherever they stand. Nonce and addresses are for some of them only.
pub(crate) fn render_data(term: &Term, instance: &Instance, merged: &MergedGroup) -> RenderData {
    let applied = term.applied();
    let server = &applied.config.server;
    RenderData {
        cluster_id: term.shared.cluster.to_string(),
        ca_cert: term.shared.authority.bundle_pem(),
        shard: term.shared.shard.to_string(),
        registration_addr: term.advertised.registration.clone(),
        agent_addr: term.advertised.agent.clone(),
        operator_addr: term.advertised.operator.clone(),
        provider_kind: server.provider.kind.as_str().to_owned(),
        region: server.provider.region.clone(),
        zone: server.provider.zone.clone(),
        instance: InstanceData {
            id: instance.id.to_string(),
            kind: instance.id.kind().to_string(),
            arch: instance.arch.clone(),
            instance_type: instance.instance_type.clone().unwrap_or_default(),
            group: instance.group.group.to_string(),
            tenant: instance.group.tenant.to_string(),
            on_demand: instance.ownership == Ownership::OnDemand,
            subnet_id: instance.subnet.clone(),
            subnet_pool: merged.subnet_pool.to_string(),
            ..InstanceData::default()
        },
        vars: merged.vars.clone(),
        images: images(term, instance, merged),
        nonce: String::new(),
    }
}

fn tags(instance: &Instance) -> Tags {
    Tags {
        cluster: instance.cluster.clone(),
        shard: instance.shard.clone(),
        instance: instance.id,
        tenant: instance.group.tenant.clone(),
        group: instance.group.group.clone(),
        on_demand: instance.ownership == Ownership::OnDemand,
        epoch: instance.intent_epoch,
        template: instance.template.clone(),
        infra_hash: instance.infra_hash.clone(),
    }
}

/// What a provider needs to reserve an id and places: the request without what depends on the time of the create.
pub(super) fn reserve_spec(term: &Term, instance: &Instance, merged: &MergedGroup) -> Result<ReserveSpec, String> {
    let data = render_data(term, instance, merged);
    let args = render_args(merged, &data).map_err(|error| format!("args: {}", Chain(&error)))?;
    Ok(ReserveSpec {
        instance: instance.id,
        tags: tags(instance),
        instance_type: instance.instance_type.clone(),
        subnet: instance.subnet.clone(),
        args,
    })
}

/// The request of an instance: a pure function of its record and the config, so that a successor builds the same one.
pub(super) fn spec(term: &Term, instance: &Instance, merged: &MergedGroup) -> Result<VmSpec, String> {
    let nonce = term.shared.authority.agent_nonce(instance);
    let bundle = term.shared.authority.bundle_pem();
    let data = RenderData { nonce: nonce.clone(), ..render_data(term, instance, merged) };
    let args = render_args(merged, &data).map_err(|error| format!("args: {}", Chain(&error)))?;
    let userdata = render_userdata(merged, &data).map_err(|error| format!("userdata: {}", Chain(&error)))?;
    Ok(VmSpec {
        instance: instance.id,
        tags: tags(instance),
        instance_type: instance.instance_type.clone(),
        subnet: instance.subnet.clone(),
        args,
        userdata: userdata.map(Userdata),
        bootstrap: Bootstrap {
            ca_bundle_pem: bundle,
            nonce_jwt: nonce,
            registration_addr: term.advertised.registration.clone(),
            agent_addr: term.advertised.agent.clone(),
        },
        reserved_id: instance.provider.reserved_id.clone(),
    })
}

/// The images an instance is made from: those of its record, whatever their names stand for by now. One whose record
/// tells nothing takes what there is; a name that is not known is left out, and so cannot be rendered.
fn images(term: &Term, instance: &Instance, merged: &MergedGroup) -> BTreeMap<String, String> {
    let names = &merged.images;
    if names.is_empty() {
        return BTreeMap::new();
    }
    let recorded: Vec<String> =
        instance.image.iter().flat_map(|ids| ids.split(IMAGES)).map(ToOwned::to_owned).collect();
    let ids = Some(recorded)
        .filter(|ids| ids.len() == names.len() && ids.iter().all(|id| !id.is_empty()))
        .or_else(|| term.world.lock().images.ids(names));
    names.iter().cloned().zip(ids.unwrap_or_default()).collect()
}
