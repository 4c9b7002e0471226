//! Whose business a problem of the config is.
//!
//! Tenants share a config file but must not learn of each other's groups. What is wrong in a part that everybody lives
//! by is told to everybody; what is wrong in a group, or only because of one, is told to its tenant.

use std::collections::BTreeSet;

use nstance_core::ids::Tenant;

use crate::{
    jsonc::{self, Json},
    problems::Problem,
};

/// Knows which entries right below `groups` are groups of tenant `default`, and which are tenants.
pub struct Owners {
    flat: BTreeSet<String>,
}

impl Owners {
    pub fn of(config: &[u8]) -> Self {
        let tree = jsonc::parse(config).0;
        let groups = tree.as_ref().and_then(|tree| tree.get("groups")).map(|groups| &groups.json);
        let Some(Json::Object(entries)) = groups else { return Self { flat: BTreeSet::new() } };
        let is_flat = |entry: &&jsonc::Entry| {
            matches!(entry.value.get("template").map(|template| &template.json), Some(Json::String(_)))
        };
        Self { flat: entries.iter().filter(is_flat).map(|entry| entry.key.clone()).collect() }
    }

    pub fn may_see(&self, tenant: &Tenant, problem: &Problem) -> bool {
        let steps = steps(&problem.path);
        let of_path = match steps.as_slice() {
            ["groups", group, ..] if self.flat.contains(*group) => Some("default"),
            ["groups" | "tenants", tenant, ..] => Some(*tenant),
            _ => None,
        };
        of_path.into_iter().chain(named(&problem.message)).all(|owner| owner == tenant.as_str())
    }
}

/// The first steps of a path that are keys.
fn steps(path: &str) -> Vec<&str> {
    path.split(['.', '[', ']', '"']).filter(|step| !step.is_empty()).take(2).collect()
}

/// Tenants of the groups that a message speaks of, which are always written `group {tenant}/{group}`.
fn named(message: &str) -> impl Iterator<Item = &str> {
    message.split("group ").skip(1).filter_map(|rest| {
        let word = rest.split_whitespace().next()?.trim_matches(['`', ',', ':', ';']);
        word.split_once('/').map(|(tenant, _)| tenant)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{jsonc::Pos, problems::Code};

    const CONFIG: &[u8] = br#"{ "groups": {
        "web": { "template": "knc" },
        "a": { "template": "knc" },      // named like a tenant
        "default": { "db": { "template": "knc" } },
        "b": { "apps": { "template": "knc" } }
    } }"#;

    #[track_caller]
    fn check(path: &str, message: &str, seen_by: &[&str]) {
        let owners = Owners::of(CONFIG);
        let problem = Problem::new(Code::BadValue, path, Pos::NOWHERE, message);
        let seen: Vec<_> =
            ["a", "b", "default"].into_iter().filter(|it| owners.may_see(&it.parse().unwrap(), &problem)).collect();
        assert_eq!(seen, seen_by, "{path}: {message}");
    }

    #[test]
    fn what_is_wrong_in_a_group_is_told_to_its_tenant() {
        check("groups.b.apps.size", "too big", &["b"]);
        check("groups.default.db.size", "too big", &["default"]);
        check("groups.web.size", "too big", &["default"]);
        check("groups.a.size", "too big", &["default"]);
        check("groups[\"b\"].apps", "bad", &["b"]);
        check("tenants.b", "still in use", &["b"]);
    }

    #[test]
    fn what_is_wrong_because_of_a_group_is_told_to_its_tenant() {
        check("templates.knc.files[\"x\"]", "group b/apps renders .Vars.X, which no layer defines", &["b"]);
        check("templates.knc.args", "for group default/web: no such key", &["default"]);
    }

    #[test]
    fn what_is_wrong_for_all_is_told_to_all() {
        check("server.shard", "missing", &["a", "b", "default"]);
        check("", "not UTF-8", &["a", "b", "default"]);
        check("groups", "wrong type", &["a", "b", "default"]);
        check("templates.knc", "subnet pool `x/y` of no group at all", &["a", "b", "default"]);
    }
}
