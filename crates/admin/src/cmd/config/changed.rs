//! Which groups another config would make other than they are, beside what a planner does about it: variables and files are
//! pushed to machines that stay, so no plan has a word of them.
//!
//! A shard tells of each group what came out of all its layers, and hashes of it, but not what was set by hand. So a group
//! that nobody touched is compared exactly; of any other a variable with another value may have been set by hand, and then
//! it is said that it may change: a change too many is better than one that is not told.

use std::collections::BTreeMap;

use nstance_config::{Config, GroupLayer, MergedGroup};
use nstance_core::ids::{GroupRef, Tenant};
use nstance_proto::v1::GroupStatus;
use serde_json::{Value, json};

/// A group, and what of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Changed {
    pub(crate) group: String,
    pub(crate) what: Vec<String>,
    /// It is so; else it may be so.
    pub(crate) certain: bool,
}

impl Changed {
    fn surely(group: &str, what: Vec<String>) -> Option<Self> {
        (!what.is_empty()).then(|| Self { group: group.to_owned(), what, certain: true })
    }

    pub(crate) fn line(&self, shard: &str) -> String {
        let how = if self.certain { "changes" } else { "may change" };
        format!("{how} in {shard}: {}: {}", self.group, self.what.join(", "))
    }

    pub(crate) fn document(&self) -> Value {
        json!({"group": self.group, "what": self.what, "certain": self.certain})
    }
}

/// What of the tenant's groups the candidate changes. The bundle is the CAs that files of groups are hashed with.
pub(super) fn changed(candidate: &Config, tenant: &Tenant, groups: &[GroupStatus], bundle: &str) -> Vec<Changed> {
    let groups: BTreeMap<&str, &GroupStatus> =
        groups.iter().filter(|it| !it.deleting).map(|it| (it.key.as_str(), it)).collect();
    let look = Look { candidate, tenant, bundle, is_bundle_theirs: false };
    // One group whose hash comes out as theirs proves that we and they mean the same CAs.
    let is_same = |it: &&GroupStatus| look.plain(it).is_some_and(|merged| look.runtime(&merged) == it.runtime_hash);
    let look = Look { is_bundle_theirs: groups.values().any(is_same), ..look };
    let mut all: Vec<Changed> = groups.values().filter_map(|it| look.at(it)).collect();
    let new = candidate.groups.keys().filter(|it| it.tenant == *tenant && !groups.contains_key(it.group.as_str()));
    all.extend(new.filter_map(|it| Changed::surely(it.group.as_str(), vec!["is new".to_owned()])));
    all.sort_by(|left, right| left.group.cmp(&right.group));
    all
}

struct Look<'a> {
    candidate: &'a Config,
    tenant: &'a Tenant,
    bundle: &'a str,
    is_bundle_theirs: bool,
}

impl Look<'_> {
    fn name(&self, it: &GroupStatus) -> Option<GroupRef> {
        Some(GroupRef::new(self.tenant.clone(), it.key.parse().ok()?))
    }

    fn runtime(&self, merged: &MergedGroup) -> String {
        merged.runtime_hash(Some(self.bundle.as_bytes()))
    }

    /// As the config alone would have it.
    fn plain(&self, it: &GroupStatus) -> Option<MergedGroup> {
        self.candidate.group(&self.name(it)?, None).ok()
    }

    fn at(&self, it: &GroupStatus) -> Option<Changed> {
        let name = self.name(it)?;
        let stays = self.candidate.groups.contains_key(&name);
        match (it.is_static, stays) {
            (true, false) => return Changed::surely(&it.key, vec!["is not in it any more".to_owned()]),
            (false, true) => return Changed::surely(&it.key, vec!["becomes one of the config".to_owned()]),
            _ => {}
        }
        let untouched = it.is_static && matches!(it.etag.as_str(), "" | "none");
        let layer = if untouched { None } else { layer(it) };
        let merged = match self.candidate.group(&name, layer.as_ref()) {
            Ok(merged) => merged,
            Err(problems) => {
                let why = problems.first().map(|it| it.message.clone()).unwrap_or_default();
                return Changed::surely(&it.key, vec![format!("cannot be made: {why}")]);
            }
        };
        let what = self.differences(it, &merged);
        if !what.is_empty() || untouched {
            return Changed::surely(&it.key, what);
        }
        self.vars_below(it, &name)
    }

    /// Everything that the shard tells of a group, held against what would come out.
    fn differences(&self, it: &GroupStatus, merged: &MergedGroup) -> Vec<String> {
        let type_ = merged.instance_type.clone().unwrap_or_default();
        let span = |it: &prost_types::Duration| (it.seconds, it.nanos);
        let drain = nstance_client::wire_duration(merged.drain_timeout);
        let balancers: Vec<String> = merged.load_balancers.iter().map(ToString::to_string).collect();
        let machine = type_ != it.instance_type
            || merged.kind.as_str() != it.kind
            || merged.arch.as_str() != it.arch
            || merged.subnet_pool.as_str() != it.subnet_pool;
        let vars: BTreeMap<&String, &String> = it.vars.iter().collect();
        let vars = merged.vars.iter().collect::<BTreeMap<_, _>>() != vars;
        let runtime = self.runtime(merged) != it.runtime_hash;
        let files =
            if self.is_bundle_theirs { "files or certificates" } else { "files, certificates or the CA bundle" };
        let found = [
            (merged.template != it.template, "template"),
            (u32::try_from(it.size) != Ok(merged.size), "size"),
            (machine, "kind of machine"),
            (!machine && merged.infra_hash() != it.infra_hash, "args or userdata"),
            (vars, "vars"),
            (!vars && runtime, files),
            (it.drain_timeout.as_ref().map(span) != Some(span(&drain)), "drain timeout"),
            (balancers != it.load_balancers, "load balancers"),
            (it.rollout.as_ref().is_some_and(|it| it.paused != merged.rollout_paused), "rollout"),
        ];
        found.into_iter().filter(|(differs, _)| *differs).map(|(_, what)| what.to_owned()).collect()
    }

    /// Variables that come from below what was set by hand. One that is missing there is not looked for: it would be found
    /// in every group that was made with variables of its own.
    fn vars_below(&self, it: &GroupStatus, name: &GroupRef) -> Option<Changed> {
        let below = GroupLayer { vars: None, ..layer(it)? };
        let merged = self.candidate.group(name, Some(&below)).ok()?;
        let other: Vec<_> = merged.vars.iter().filter(|(key, value)| it.vars.get(*key) != Some(*value)).collect();
        if other.is_empty() {
            return None;
        }
        let names: Vec<&str> = other.iter().map(|(key, _)| key.as_str()).collect();
        let what = format!("vars, if they were not set by hand: {}", names.join(" "));
        Some(Changed { group: it.key.clone(), what: vec![what], certain: false })
    }
}

/// All that could have been set by hand, as if it had been.
fn layer(it: &GroupStatus) -> Option<GroupLayer> {
    Some(GroupLayer {
        template: Some(it.template.clone()),
        size: u32::try_from(it.size).ok(),
        instance_type: Some(it.instance_type.clone()).filter(|it| !it.is_empty()),
        subnet_pool: Some(it.subnet_pool.parse().ok()?),
        vars: Some(it.vars.clone().into_iter().collect()),
        drain_timeout: it.drain_timeout.and_then(|it| it.try_into().ok()),
        load_balancers: Some(it.load_balancers.iter().map(|it| it.parse()).collect::<Result<_, _>>().ok()?),
        rollout_paused: it.rollout.as_ref().map(|it| it.paused),
    })
}

#[cfg(test)]
mod tests {
    use nstance_config::{Checks, load};

    use super::*;

    fn config(template: &str, group: &str, more: &str) -> Config {
        let text = format!(
            r#"{{
              "server": {{ "cluster_id": "c", "shard": "s", "provider": {{ "kind": "fake", "region": "r", "zone": "z" }},
                "subnet_pools": {{ "one": ["a"] }}, "secrets": {{ "provider": "memory" }} }},
              "templates": {{ "tst": {{ "kind": "tst", "arch": "amd64", "subnet_pool": "one", {template} }} }},
              "groups": {{ "default": {{ "web": {{ "template": "tst", "size": 2{group} }}{more} }} }}
            }}"#
        );
        let loaded = load("test", text.as_bytes(), &Checks::offline(nstance_schemas::ALL));
        loaded.config.unwrap_or_else(|| panic!("{}", loaded.report.text()))
    }

    const FILES: &str = r#""vars": {"A": "1"}, "files": {"a.txt": {"kind": "string", "template": "a"}}"#;

    /// A group as its shard tells it.
    fn told(config: &Config, layer: Option<&GroupLayer>, etag: &str) -> GroupStatus {
        let name = GroupRef::new("default".parse().unwrap(), "web".parse().unwrap());
        let it = config.group(&name, layer).unwrap();
        GroupStatus {
            key: "web".into(),
            template: it.template.clone(),
            size: i32::try_from(it.size).unwrap(),
            instance_type: it.instance_type.clone().unwrap_or_default(),
            subnet_pool: it.subnet_pool.to_string(),
            vars: it.vars.clone().into_iter().collect(),
            is_static: it.is_static,
            etag: etag.into(),
            runtime_hash: it.runtime_hash(Some(b"ca")),
            infra_hash: it.infra_hash(),
            drain_timeout: Some(nstance_client::wire_duration(it.drain_timeout)),
            arch: it.arch.as_str().into(),
            kind: it.kind.to_string(),
            ..GroupStatus::default()
        }
    }

    fn lines(candidate: &Config, groups: &[GroupStatus], bundle: &str) -> Vec<String> {
        let all = changed(candidate, &"default".parse().unwrap(), groups, bundle);
        all.iter().map(|it| it.line("dev-1")).collect()
    }

    #[test]
    fn what_a_config_changes_of_a_group_is_named() {
        let now = config(FILES, "", "");
        let groups = [told(&now, None, "none")];
        assert_eq!(lines(&now, &groups, "ca"), [""; 0]);
        let other = FILES.replace("\"1\"", "\"2\"");
        assert_eq!(lines(&config(&other, "", ""), &groups, "ca"), ["changes in dev-1: web: vars"]);
        let other = FILES.replace("\"a\"}", "\"b\"}");
        let said = ["changes in dev-1: web: files, certificates or the CA bundle"];
        assert_eq!(lines(&config(&other, "", ""), &groups, "ca"), said);
        let userdata = format!(r#"{FILES}, "userdata": {{"templateString": "x"}}"#);
        let other = config(&userdata, r#", "drain_timeout": "7s""#, "");
        assert_eq!(lines(&other, &groups, "ca"), ["changes in dev-1: web: args or userdata, drain timeout"]);
        let more = config(FILES, "", r#", "db": {"template": "tst"}"#);
        assert_eq!(lines(&more, &groups, "ca"), ["changes in dev-1: db: is new"]);
        let renamed = GroupStatus { key: "old".into(), ..groups[0].clone() };
        let said = ["changes in dev-1: old: is not in it any more", "changes in dev-1: web: is new"];
        assert_eq!(lines(&now, &[renamed], "ca"), said);
    }

    #[test]
    fn what_may_have_been_set_by_hand_may_change() {
        let now = config(FILES, "", "");
        let sized = GroupLayer { size: Some(9), ..GroupLayer::default() };
        let groups = [told(&now, Some(&sized), "3-77")];
        assert_eq!(lines(&now, &groups, "ca"), [""; 0], "a size that was set by hand is no change of the config");
        let other = FILES.replace("\"1\"", "\"2\"");
        let said = ["may change in dev-1: web: vars, if they were not set by hand: A"];
        assert_eq!(lines(&config(&other, "", ""), &groups, "ca"), said);
        let more = FILES.replace("\"A\"", "\"B\": \"3\", \"A\"");
        assert_eq!(lines(&config(&more, "", ""), &groups, "ca"), ["changes in dev-1: web: vars"]);
    }
}
