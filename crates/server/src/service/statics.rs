//! Static groups: which ones a config takes away, and how much of the shard may go at one edit.
//!
//! Pure functions. `groups.jsonc` remembers the static groups of the last applied config; what left since gets a
//! tombstone in the very write that stores the new list. One bad edit must not end a fleet: a change that would empty
//! too much of the shard needs a person's word (the removal brake).

use std::collections::{BTreeMap, BTreeSet};

use nstance_config::{
    Config,
    model::{Safety, Server},
};
use nstance_core::{
    ids::GroupRef,
    instance::{Ownership, Phase},
    time::Timestamp,
};
use nstance_store::records::groups::{GroupsFile, StaticSeen, Tombstone, TombstoneReason};

use crate::world::State;

/// What a config takes away.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Losses {
    /// Static groups that are in it no more.
    pub vanished: BTreeSet<GroupRef>,
    /// Static groups whose size it lowers to nothing.
    pub emptied: BTreeSet<GroupRef>,
}

impl Losses {
    pub fn groups(&self) -> impl Iterator<Item = &GroupRef> {
        self.vanished.iter().chain(&self.emptied)
    }
}

/// The static groups that are known of before a config is applied, and that it does not name. One that the API made
/// before the config took it over lives on as what it was; one that has a tombstone needs no second.
pub fn vanished<'a>(
    known: impl IntoIterator<Item = &'a GroupRef>,
    file: &GroupsFile,
    config: &Config,
) -> BTreeSet<GroupRef> {
    let stands_alone = |group: &GroupRef| file.groups.get(group).is_some_and(|entry| entry.template.is_some());
    known
        .into_iter()
        .filter(|group| !config.groups.contains_key(*group))
        .filter(|group| !file.deleted.contains_key(*group) && !stands_alone(group))
        .cloned()
        .collect()
}

/// Whether it is the config, and not the API, that wants nobody in a group.
pub fn is_emptied_by_config(config: &Config, file: &GroupsFile, group: &GroupRef) -> bool {
    let by_api = file.groups.get(group).is_some_and(|entry| entry.size.is_some());
    !by_api && config.groups.contains_key(group) && config.group(group, None).is_ok_and(|merged| merged.size == 0)
}

/// What a refresh takes away from what is in force. Groups that are `held` were not taken away yet.
pub fn losses_of_refresh(
    in_force: &Config,
    next: &Config,
    file: &GroupsFile,
    held: &BTreeMap<GroupRef, Timestamp>,
) -> Losses {
    let seen = file.static_groups.iter().flat_map(|seen| &seen.groups);
    let emptied = next
        .groups
        .keys()
        .filter(|group| is_emptied_by_config(next, file, group))
        .filter(|group| held.contains_key(*group) || !is_emptied_by_config(in_force, file, group))
        .cloned()
        .collect();
    Losses { vanished: vanished(seen.chain(in_force.groups.keys()), file, next), emptied }
}

/// What a config takes away that was not refreshed into force but found at take-over. What was in force before is not
/// known then, so every empty group counts unless this very config was settled before.
pub fn losses_of_takeover(config: &Config, etag: &str, file: &GroupsFile) -> Losses {
    let seen = file.static_groups.as_ref();
    if seen.is_some_and(|seen| seen.etag == etag) {
        return Losses::default();
    }
    Losses {
        vanished: vanished(seen.into_iter().flat_map(|seen| &seen.groups), file, config),
        emptied: config.groups.keys().filter(|group| is_emptied_by_config(config, file, group)).cloned().collect(),
    }
}

/// Managed instances of the shard that are not leaving already, by group.
pub struct Census(BTreeMap<GroupRef, usize>);

impl Census {
    pub fn of(state: &State) -> Self {
        let mut n_by_group = BTreeMap::new();
        for instance in state.entries.values().map(|entry| entry.instance()) {
            let stays = matches!(instance.phase(), Phase::Pending | Phase::Provisioning | Phase::Running);
            if stays && instance.ownership == Ownership::Managed {
                *n_by_group.entry(instance.group.clone()).or_default() += 1;
            }
        }
        Self(n_by_group)
    }

    /// How many of the shard would go, and how many there are.
    pub fn count(&self, losses: &Losses) -> (usize, usize) {
        let lost = losses.groups().filter_map(|group| self.0.get(group)).sum();
        (lost, self.0.values().sum())
    }

    /// Whether so much goes that a person must say so.
    pub fn needs_a_word(&self, losses: &Losses, safety: &Safety) -> bool {
        let (lost, all) = self.count(losses);
        let (lost, all) = (lost as u128, all as u128);
        u128::from(safety.max_removal_min) < lost && u128::from(safety.max_removal_percent) * all < lost * 100
    }

    /// Those of the groups that hold anybody: only they are worth naming.
    pub fn inhabited<'a>(&self, losses: &'a Losses) -> BTreeSet<&'a GroupRef> {
        losses.groups().filter(|group| self.0.contains_key(*group)).collect()
    }
}

/// The file once a config is applied: the new list, tombstones for who left, none for who is back. `None` if the file
/// says all that already.
pub fn settled(
    file: &GroupsFile,
    (config, etag): (&Config, &str),
    vanished: &BTreeSet<GroupRef>,
    (now, by): (Timestamp, &str),
) -> Option<GroupsFile> {
    let mut next = file.clone();
    for group in vanished {
        next.groups.remove(group);
        let tombstone = Tombstone { at: now, by: by.to_owned(), reason: TombstoneReason::Config };
        next.deleted.insert(group.clone(), tombstone);
    }
    next.deleted.retain(|group, _| !config.groups.contains_key(group));
    let groups = config.groups.keys().cloned().collect();
    next.static_groups = Some(StaticSeen { etag: etag.to_owned(), groups });
    (next != *file).then_some(next)
}

/// The file while the brake holds what a config takes away: newcomers are noted, nobody is crossed out, and the config
/// counts as not applied.
pub fn unsettled(file: &GroupsFile, config: &Config) -> Option<GroupsFile> {
    let mut next = file.clone();
    next.deleted.retain(|group, _| !config.groups.contains_key(group));
    let seen = next.static_groups.get_or_insert_default();
    seen.groups.extend(config.groups.keys().cloned());
    (next != *file).then_some(next)
}

/// Settings of a new config that this build only takes up later: those the process began with, and those its term
/// began with. In words, for the one who asks what is in force.
pub fn unapplied(process: &Server, term: &Server, now: &Server) -> Vec<String> {
    const RESTART: &str = "takes effect when this server is restarted; the old setting stays until then";
    const TERM: &str = "takes effect with the next leader; the old setting stays until then";
    let (bind, term_bind, new_bind) = (&process.bind, &term.bind, &now.bind);
    // The server's certificate is for the names it began with.
    let (told, new_told) = (&process.advertise, &now.advertise);
    let later = [
        ("bind.health_addr", bind.health != new_bind.health, RESTART),
        ("bind.election_addr", bind.election != new_bind.election, RESTART),
        ("bind.registration_addr", term_bind.registration != new_bind.registration, TERM),
        ("bind.operator_addr", term_bind.operator != new_bind.operator, TERM),
        ("bind.agent_addr", term_bind.agent != new_bind.agent, TERM),
        ("advertise.health_addr", told.health != new_told.health, RESTART),
        ("advertise.election_addr", told.election != new_told.election, RESTART),
        ("advertise.registration_addr", told.registration != new_told.registration, RESTART),
        ("advertise.operator_addr", told.operator != new_told.operator, RESTART),
        ("advertise.agent_addr", told.agent != new_told.agent, RESTART),
        ("advertise.extra_sans", told.extra_sans != new_told.extra_sans, RESTART),
        ("leader_election", process.leader_election != now.leader_election, RESTART),
        ("leader_network", process.leader_network != now.leader_network, RESTART),
        ("secrets", process.secrets != now.secrets, RESTART),
        ("provider.options", process.provider.options != now.provider.options, RESTART),
        ("shutdown_timeout", process.shutdown_timeout != now.shutdown_timeout, RESTART),
        ("error_exit_jitter", process.error_exit_jitter != now.error_exit_jitter, RESTART),
    ];
    later
        .into_iter()
        .filter(|(_, differs, _)| *differs)
        .map(|(path, _, when)| format!("server.{path} {when}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use nstance_store::records::groups::GroupEntry;

    use super::*;
    use crate::service::config::check;

    fn config(groups: &[(&str, u32)]) -> Config {
        let groups: Vec<_> =
            groups.iter().map(|(key, size)| format!(r#""{key}": {{ "template": "knc", "size": {size} }}"#)).collect();
        let text = format!(
            r#"{{
                "server": {{
                    "cluster_id": "demo", "shard": "s1",
                    "provider": {{ "kind": "fake", "region": "r1", "zone": "z1" }},
                    "subnet_pools": {{ "main": ["subnet-1"] }}, "secrets": {{ "provider": "memory" }}
                }},
                "templates": {{ "knc": {{ "kind": "knc", "arch": "amd64", "subnet_pool": "main" }} }},
                "groups": {{ "default": {{ {} }} }}
            }}"#,
            groups.join(", ")
        );
        let loaded = check("test", text.as_bytes(), None);
        loaded.config.unwrap_or_else(|| panic!("{}", loaded.report.text()))
    }

    fn group(key: &str) -> GroupRef {
        GroupRef::new("default".parse().unwrap(), key.parse().unwrap())
    }

    fn set(keys: &[&str]) -> BTreeSet<GroupRef> {
        keys.iter().map(|key| group(key)).collect()
    }

    fn seen(etag: &str, keys: &[&str]) -> GroupsFile {
        let seen = StaticSeen { etag: etag.to_owned(), groups: set(keys) };
        GroupsFile { static_groups: Some(seen), ..GroupsFile::default() }
    }

    const NOW: Timestamp = Timestamp::EPOCH;

    #[test]
    fn a_group_that_left_the_config_gets_a_tombstone_and_loses_its_override() {
        let mut file = seen("1", &["web", "db"]);
        file.groups.insert(group("web"), GroupEntry { size: Some(3), ..GroupEntry::default() });
        let (old, new) = (config(&[("web", 1), ("db", 1)]), config(&[("db", 1)]));
        let losses = losses_of_refresh(&old, &new, &file, &BTreeMap::new());
        assert_eq!(losses, Losses { vanished: set(&["web"]), emptied: set(&[]) });
        let next = settled(&file, (&new, "2"), &losses.vanished, (NOW, "me")).unwrap();
        assert_eq!(next.deleted.keys().cloned().collect::<BTreeSet<_>>(), set(&["web"]));
        assert_eq!(next.deleted[&group("web")].reason, TombstoneReason::Config);
        assert!(next.groups.is_empty());
        assert_eq!(next.static_groups, seen("2", &["db"]).static_groups);
        assert_eq!(losses_of_refresh(&new, &new, &next, &BTreeMap::new()), Losses::default(), "once is enough");
        assert_eq!(settled(&next, (&new, "2"), &set(&[]), (NOW, "me")), None);
    }

    #[test]
    fn a_group_that_comes_back_loses_its_tombstone() {
        let mut file = seen("1", &["db"]);
        let tombstone = Tombstone { at: NOW, by: "me".to_owned(), reason: TombstoneReason::Config };
        file.deleted.insert(group("web"), tombstone.clone());
        file.deleted.insert(group("other"), tombstone);
        let next = settled(&file, (&config(&[("web", 1), ("db", 1)]), "2"), &set(&[]), (NOW, "me")).unwrap();
        assert_eq!(next.deleted.keys().cloned().collect::<BTreeSet<_>>(), set(&["other"]));
        assert_eq!(next.static_groups.unwrap().groups, set(&["db", "web"]));
    }

    #[test]
    fn a_group_that_the_api_made_outlives_its_place_in_the_config() {
        let mut file = seen("1", &["web"]);
        let made = GroupEntry { template: Some("knc".to_owned()), ..GroupEntry::default() };
        file.groups.insert(group("web"), made);
        let losses = losses_of_refresh(&config(&[("web", 1)]), &config(&[]), &file, &BTreeMap::new());
        assert_eq!(losses, Losses::default());
    }

    #[test]
    fn only_a_size_that_the_config_lowers_to_nothing_is_a_loss() {
        let mut file = seen("1", &["web", "db", "old", "api"]);
        file.groups.insert(group("api"), GroupEntry { size: Some(0), ..GroupEntry::default() });
        let old = config(&[("web", 2), ("db", 2), ("old", 0), ("api", 2)]);
        let new = config(&[("web", 0), ("db", 1), ("old", 0), ("api", 0)]);
        let held = |keys: &[&str]| set(keys).into_iter().map(|group| (group, NOW)).collect();
        assert_eq!(losses_of_refresh(&old, &new, &file, &held(&[])).emptied, set(&["web"]));
        assert_eq!(losses_of_refresh(&new, &new, &file, &held(&["web"])).emptied, set(&["web"]), "it is held still");
    }

    #[test]
    fn at_takeover_a_settled_config_takes_nothing_away() {
        let file = seen("1", &["web", "db"]);
        let new = config(&[("db", 0)]);
        let losses = Losses { vanished: set(&["web"]), emptied: set(&["db"]) };
        assert_eq!(losses_of_takeover(&new, "2", &file), losses);
        assert_eq!(losses_of_takeover(&new, "1", &file), Losses::default());
        let first = losses_of_takeover(&new, "2", &GroupsFile::default());
        assert_eq!(first.vanished, set(&[]), "nothing is known to have been there");
    }

    #[test]
    fn a_held_config_crosses_nobody_out() {
        let file = seen("1", &["web"]);
        let next = unsettled(&file, &config(&[("db", 1)])).unwrap();
        assert_eq!(next.static_groups, seen("1", &["db", "web"]).static_groups);
        assert!(next.deleted.is_empty());
        assert_eq!(unsettled(&next, &config(&[("db", 1)])), None);
    }

    #[test]
    fn the_brake_needs_both_a_number_and_a_share() {
        let safety = config(&[]).server.safety;
        assert_eq!((safety.max_removal_min, safety.max_removal_percent), (3, 40));
        let needs = |lost: usize, rest: usize| {
            let census = Census(BTreeMap::from([(group("web"), lost), (group("db"), rest)]));
            let losses = Losses { vanished: set(&["web", "empty"]), emptied: set(&[]) };
            census.needs_a_word(&losses, &safety)
        };
        assert!(!needs(3, 0), "three are few, be they all");
        assert!(needs(4, 0));
        assert!(!needs(4, 6), "four of ten are forty percent, not more");
        assert!(needs(5, 7));
        assert!(!needs(40, 60));
        assert!(needs(41, 59));
    }

    #[test]
    fn settings_that_wait_for_a_restart_are_named() {
        let old = config(&[]).server;
        let mut new = old.clone();
        new.create_burst = Some(7);
        assert!(unapplied(&old, &old, &new).is_empty());
        new.bind.agent.port = 1;
        new.leader_election.ttl *= 2;
        let words = unapplied(&old, &old, &new);
        assert_eq!(words.len(), 2);
        assert!(words[0].starts_with("server.bind.agent_addr") && words[1].starts_with("server.leader_election"));
        assert_eq!(unapplied(&old, &new, &new).len(), 1, "the next term has bound the new address");
    }
}
