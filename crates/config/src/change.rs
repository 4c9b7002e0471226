//! Changes to what is in force: groups by the API, and one config after another.
//!
//! Both are decided here as pure functions of old and new, so that the answer to a request and the state that is stored
//! cannot differ.

use std::collections::{BTreeMap, BTreeSet};

use nstance_core::ids::{GroupRef, LbKey, SubnetPool, Tenant};

use crate::{
    jsonc::Pos,
    merge::{GroupLayer, MergedGroup, request_problem},
    model::{Config, GroupField, StaticGroup},
    problems::{Code, Problem},
};

/// What UpsertGroup asks for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UpsertRequest {
    pub layer: GroupLayer,
    /// Whether the request carried `args`, which only the config file may set.
    pub has_args: bool,
    /// Without a mask, set fields are changed and unset ones stay. With one, exactly the listed fields change, and
    /// an unset one goes back to what the config says.
    pub mask: Option<BTreeSet<GroupField>>,
}

/// An accepted change.
#[derive(Debug, Clone, PartialEq)]
pub struct Upserted {
    /// What is to be stored.
    pub layer: GroupLayer,
    pub merged: MergedGroup,
    /// Whether the layer differs from the stored one; if not, nothing needs to be written.
    pub changed: bool,
}

impl Config {
    /// Applies a request to the stored layer of a group, or says everything that is wrong with it.
    pub fn upsert(
        &self,
        group: &GroupRef,
        stored: Option<&GroupLayer>,
        request: &UpsertRequest,
    ) -> Result<Upserted, Vec<Problem>> {
        let mut problems = Vec::new();
        if request.has_args {
            let message = "args could grant rights: they come from the config file only".to_owned();
            problems.push(request_problem(Code::Conflict, "args", message, Some("leave `args` out".to_owned())));
        }
        let mut layer = overlay(stored.cloned().unwrap_or_default(), request);
        if let Some(fixed) = self.groups.get(group) {
            self.refuse_restricted(group, fixed, request, &mut problems);
            // What equals the static value is not stored: the config file stays the only one who says it.
            (layer.template, layer.subnet_pool, layer.load_balancers) = (None, None, None);
        }
        match self.group(group, Some(&layer)) {
            Ok(merged) if problems.is_empty() => {
                let nothing = GroupLayer::default();
                let known = stored.or_else(|| merged.is_static.then_some(&nothing));
                let changed = known != Some(&layer);
                Ok(Upserted { layer, merged, changed })
            }
            Ok(_) => Err(problems),
            Err(more) => {
                problems.extend(more);
                Err(problems)
            }
        }
    }

    fn refuse_restricted(
        &self,
        group: &GroupRef,
        fixed: &StaticGroup,
        request: &UpsertRequest,
        problems: &mut Vec<Problem>,
    ) {
        let mut refuse = |field: GroupField, value: String| {
            let message = format!("`{field}` of static group {group} is {value}: only the config file may change it");
            let help = Some(format!("leave `{field}` out, or change it in the config file"));
            problems.push(request_problem(Code::Conflict, field.as_str(), message, help));
        };
        let asked = &request.layer;
        if let Some(template) = asked.template.as_ref().filter(|_| request.touches(GroupField::Template))
            && *template != fixed.template
        {
            refuse(GroupField::Template, format!("`{}`", fixed.template));
        }
        if let Some(pool) = asked.subnet_pool.as_ref().filter(|_| request.touches(GroupField::SubnetPool)) {
            let inherited = self.templates.get(&fixed.template).and_then(|it| it.subnet_pool.as_ref());
            let own = fixed.subnet_pool.as_ref().or(inherited);
            if own != Some(pool) {
                refuse(GroupField::SubnetPool, format!("`{}`", own.map_or("", SubnetPool::as_str)));
            }
        }
        if let Some(keys) = asked.load_balancers.as_ref().filter(|_| request.touches(GroupField::LoadBalancers)) {
            let (asked, own): (BTreeSet<_>, BTreeSet<_>) =
                (keys.iter().collect(), fixed.load_balancers.iter().collect());
            if asked != own {
                let own: Vec<&str> = own.into_iter().map(LbKey::as_str).collect();
                refuse(GroupField::LoadBalancers, format!("[{}]", own.join(", ")));
            }
        }
    }

    /// A warning if a stored override of a static group holds fields that the config file decides.
    pub fn unused_override(&self, group: &GroupRef, layer: &GroupLayer) -> Option<Problem> {
        self.groups.get(group)?;
        let unused = [
            ("template", layer.template.is_some()),
            ("subnet_pool", layer.subnet_pool.is_some()),
            ("load_balancers", layer.load_balancers.is_some()),
        ];
        let unused: Vec<&str> = unused.into_iter().filter(|(_, set)| *set).map(|(name, _)| name).collect();
        if unused.is_empty() {
            return None;
        }
        let path = format!("groups.{}.{}", group.tenant, group.group);
        let message = format!("the stored override of {group} sets {}, which has no effect", unused.join(", "));
        let problem = Problem::new(Code::UnusedOverride, path, Pos::NOWHERE, message);
        Some(problem.with_help("it came from the API before the group was in the config file; delete the override"))
    }

    /// What may not change from this config, which is in force, to `next`. `in_use` names groups and instances by
    /// tenant, as people know them.
    pub fn immutable_changes(&self, next: &Self, in_use: &BTreeMap<Tenant, Vec<String>>) -> Vec<Problem> {
        let (old, new) = (&self.server, &next.server);
        let settings = [
            ("server.cluster_id", old.cluster_id.as_str(), new.cluster_id.as_str()),
            ("server.shard", old.shard.as_str(), new.shard.as_str()),
            ("server.provider.kind", old.provider.kind.as_str(), new.provider.kind.as_str()),
            ("server.provider.region", &old.provider.region, &new.provider.region),
            ("server.provider.zone", &old.provider.zone, &new.provider.zone),
        ];
        let mut problems: Vec<Problem> = settings
            .into_iter()
            .filter(|(_, old, new)| old != new)
            .map(|(path, old, new)| {
                let message = format!("`{path}` cannot change from `{old}` to `{new}` while instances live by it");
                Problem::new(Code::Immutable, path, Pos::NOWHERE, message).with_help(format!("set it back to `{old}`"))
            })
            .collect();
        for tenant in self.tenants.difference(&next.tenants) {
            const MAX_NAMED: usize = 10;
            let Some(users) = in_use.get(tenant).filter(|it| !it.is_empty()) else { continue };
            let named = users.iter().take(MAX_NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
            let more = users.len().saturating_sub(MAX_NAMED);
            let more = if more == 0 { String::new() } else { format!(" and {more} more") };
            let message = format!("tenant `{tenant}` is still in use by {named}{more}");
            let problem = Problem::new(Code::Immutable, format!("tenants.{tenant}"), Pos::NOWHERE, message);
            problems.push(problem.with_help("remove its groups first, and the tenant when their instances are gone"));
        }
        problems
    }
}

impl UpsertRequest {
    fn touches(&self, field: GroupField) -> bool {
        self.mask.as_ref().is_none_or(|mask| mask.contains(&field))
    }
}

fn overlay(stored: GroupLayer, request: &UpsertRequest) -> GroupLayer {
    let masked = request.mask.is_some();
    fn pick<T: Clone>(touches: bool, masked: bool, stored: Option<T>, asked: &Option<T>) -> Option<T> {
        match (touches, asked) {
            (false, _) => stored,
            (true, None) if !masked => stored,
            (true, asked) => asked.clone(),
        }
    }
    let asked = &request.layer;
    let on = |field| request.touches(field);
    GroupLayer {
        template: pick(on(GroupField::Template), masked, stored.template, &asked.template),
        size: pick(on(GroupField::Size), masked, stored.size, &asked.size),
        instance_type: pick(on(GroupField::InstanceType), masked, stored.instance_type, &asked.instance_type),
        subnet_pool: pick(on(GroupField::SubnetPool), masked, stored.subnet_pool, &asked.subnet_pool),
        vars: pick(on(GroupField::Vars), masked, stored.vars, &asked.vars),
        drain_timeout: pick(on(GroupField::DrainTimeout), masked, stored.drain_timeout, &asked.drain_timeout),
        load_balancers: pick(on(GroupField::LoadBalancers), masked, stored.load_balancers, &asked.load_balancers),
        rollout_paused: pick(on(GroupField::RolloutPaused), masked, stored.rollout_paused, &asked.rollout_paused),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::merge::tests::{config, group_ref};

    fn layer(size: Option<u32>, vars: Option<&[(&str, &str)]>) -> GroupLayer {
        let vars = vars.map(|it| it.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect());
        GroupLayer { size, vars, ..GroupLayer::default() }
    }

    fn request(layer: GroupLayer) -> UpsertRequest {
        UpsertRequest { layer, ..UpsertRequest::default() }
    }

    fn masked(layer: GroupLayer, mask: &[GroupField]) -> UpsertRequest {
        UpsertRequest { layer, has_args: false, mask: Some(mask.iter().copied().collect()) }
    }

    #[test]
    fn without_a_mask_set_fields_change_and_unset_ones_stay() {
        let (config, web) = (config(), group_ref("default", "web"));
        let stored = layer(Some(3), Some(&[("A", "a"), ("B", "b")]));
        let upserted = config.upsert(&web, Some(&stored), &request(layer(None, Some(&[("A", "c")])))).unwrap();
        assert_eq!(upserted.layer, layer(Some(3), Some(&[("A", "c")])));
        assert!(upserted.changed);
        let again = config.upsert(&web, Some(&upserted.layer), &request(layer(Some(3), None))).unwrap();
        assert!(!again.changed);
    }

    #[test]
    fn with_a_mask_unset_fields_go_back_to_the_config() {
        let (config, web) = (config(), group_ref("default", "web"));
        let stored = layer(Some(3), Some(&[("A", "a")]));
        let upserted = config.upsert(&web, Some(&stored), &masked(layer(Some(9), None), &[GroupField::Vars])).unwrap();
        assert_eq!(upserted.layer, layer(Some(3), None), "size is not in the mask");
        let all: Vec<GroupField> = GroupField::ALL.iter().map(|(_, field)| *field).collect();
        let upserted = config.upsert(&web, Some(&stored), &masked(layer(None, Some(&[("C", "c")])), &all)).unwrap();
        assert_eq!(upserted.layer, layer(None, Some(&[("C", "c")])));
        assert_eq!(upserted.merged.size, 7, "the template's size is back");
    }

    #[test]
    fn restricted_fields_of_a_static_group_may_only_repeat_the_config() {
        let (config, web) = (config(), group_ref("default", "web"));
        let same = GroupLayer {
            template: Some("tst".to_owned()),
            subnet_pool: "one".parse().ok(),
            load_balancers: Some(vec!["www".parse().unwrap()]),
            ..layer(Some(1), None)
        };
        assert_eq!(config.upsert(&web, None, &request(same)).unwrap().layer, layer(Some(1), None));
        let other = GroupLayer {
            template: Some("dyn".to_owned()),
            subnet_pool: "two".parse().ok(),
            load_balancers: Some(Vec::new()),
            ..layer(Some(20_000), None)
        };
        let problems = config.upsert(&web, None, &UpsertRequest { has_args: true, ..request(other) }).unwrap_err();
        let paths: Vec<&str> = problems.iter().map(|it| it.path.as_str()).collect();
        assert_eq!(paths, ["args", "template", "subnet_pool", "load_balancers", "size"]);
    }

    #[test]
    fn a_new_dynamic_group_needs_a_template_and_an_open_pool() {
        let (config, new) = (config(), group_ref("other", "new"));
        let problems = config.upsert(&new, None, &request(layer(Some(1), None))).unwrap_err();
        assert_eq!((problems[0].code, problems[0].path.as_str()), (Code::Missing, "template"));
        let with = |template: &str| GroupLayer { template: Some(template.to_owned()), ..GroupLayer::default() };
        assert_eq!(config.upsert(&new, None, &request(with("tst"))).unwrap_err()[0].path, "subnet_pool");
        let upserted = config.upsert(&new, None, &request(with("dyn"))).unwrap();
        assert_eq!((upserted.changed, upserted.merged.size), (true, 1));
        let again = config.upsert(&new, Some(&upserted.layer), &request(with("dyn"))).unwrap();
        assert!(!again.changed);
    }

    #[test]
    fn a_leftover_of_an_override_is_warned_about() {
        let (config, web) = (config(), group_ref("default", "web"));
        let stale = GroupLayer { template: Some("dyn".to_owned()), ..layer(Some(1), None) };
        assert_eq!(config.unused_override(&web, &stale).unwrap().code, Code::UnusedOverride);
        assert_eq!(config.unused_override(&web, &layer(Some(1), None)), None);
    }

    #[test]
    fn identity_and_used_tenants_are_immutable() {
        let (old, mut new) = (config(), config());
        let tenant: Tenant = "other".parse().unwrap();
        let in_use = BTreeMap::from([(tenant.clone(), vec!["group other/x".to_owned()])]);
        assert!(old.immutable_changes(&new, &in_use).is_empty());
        new.server.shard = "t".parse().unwrap();
        new.server.provider.zone = "y".to_owned();
        new.tenants.remove(&tenant);
        let paths: Vec<String> = old.immutable_changes(&new, &in_use).into_iter().map(|it| it.path).collect();
        assert_eq!(paths, ["server.shard", "server.provider.zone", "tenants.other"]);
        assert_eq!(old.immutable_changes(&new, &BTreeMap::new()).len(), 2);
    }
}
