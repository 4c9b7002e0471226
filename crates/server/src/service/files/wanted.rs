//! What the files of an instance are made from.
//!
//! A member goes by its group. An on-demand instance goes by the config and the group of today, with its own request on
//! top: what it was made as is settled, what it is told is not. Of a group that is gone the record remembers the vars.

use std::sync::Arc;

use nstance_config::{GroupLayer, MergedGroup, OnDemandLayer};
use nstance_core::{
    ids::InstanceId,
    instance::{Instance, OnDemandRequest, Ownership},
};
use nstance_store::records::groups::GroupEntry;

use super::decide::Wanted;
use crate::{
    events::{Reason, Tell},
    service::config::{Applied, layer},
    term::Term,
};

/// What an on-demand instance asks for, or why nobody can say; and what that was made from.
pub struct Asked {
    applied: Arc<Applied>,
    ca_bundle: String,
    /// The words of the groups file for its group.
    group: Option<GroupEntry>,
    wanted: Option<Wanted>,
}

/// What the template of an instance asks for; `None` while nobody can say.
pub fn wanted(term: &Arc<Term>, instance: InstanceId) -> Option<Wanted> {
    let (it, delivery) = {
        let state = term.world.lock();
        let entry = state.entries.get(&instance)?;
        let it = entry.instance();
        if it.ownership == Ownership::Managed {
            let group = state.groups.get(&it.group)?;
            return Some(Wanted { merged: group.merged.clone()?, hash: group.runtime_hash.clone() });
        }
        (it.clone(), entry.delivery.clone())
    };
    let request = it.request.as_ref()?;
    let (applied, ca_bundle) = (term.applied(), term.shared.authority.bundle_pem());
    let group = term.groups.entry(&it.group);
    let merged = {
        let mut state = delivery.lock();
        if let Some(known) = &state.on_demand
            && Arc::ptr_eq(&known.applied, &applied)
            && known.ca_bundle == ca_bundle
            && known.group == group
        {
            return known.wanted.clone();
        }
        let merged = merge(&applied, group.as_ref(), &it, request).map(|merged| {
            let hash = merged.runtime_hash(Some(ca_bundle.as_bytes()));
            Wanted { merged: Arc::new(merged), hash }
        });
        // Kept also if it failed: that is told once, not at every look.
        state.on_demand = Some(Asked { applied, ca_bundle, group, wanted: merged.clone().ok() });
        merged
    };
    if let Err(why) = &merged {
        let message = format!("files are not sent: {why}; bring that back, or replace the instance");
        term.tell(Tell::instance(Reason::FileDeliveryFailed, &it.group, it.id, message));
    }
    merged.ok()
}

fn merge(
    applied: &Applied,
    group: Option<&GroupEntry>,
    it: &Instance,
    request: &OnDemandRequest,
) -> Result<MergedGroup, String> {
    let pool = request.subnet_pool.as_deref().or(request.inherits.subnet_pool.as_deref());
    let pool = pool.map(str::parse).transpose();
    let own = OnDemandLayer {
        // Its group may have another by now, for machines of another kind.
        template: Some(it.template.clone()),
        instance_type: it.instance_type.clone(),
        subnet_pool: pool.map_err(|error: nstance_core::ids::IdError| error.to_string())?,
        vars: request.vars.clone(),
    };
    let is_gone = group.is_none() && !applied.config.groups.contains_key(&it.group);
    let below = match group {
        Some(entry) => Some(layer(entry)?),
        None => is_gone.then(|| GroupLayer { vars: Some(request.inherits.vars.clone()), ..GroupLayer::default() }),
    };
    applied.config.merge_standing(&it.group, below.as_ref(), &own).map_err(|problems| {
        let texts: Vec<_> = problems.iter().map(|it| it.message.as_str()).collect();
        texts.join("; ")
    })
}
