//! Import: groups that shards have and Kubernetes does not become pools.
//!
//! A pool's first number of replicas is the sum over all shards, so that it is made only when every shard has told what it
//! has. Nothing else waits for that.

use std::collections::{BTreeMap, BTreeSet};

use super::observed::{Group, GroupLayer, ShardView};

/// A pool that is to be made.
#[derive(Debug, Clone, PartialEq)]
pub struct NewPool {
    pub group: String,
    /// In the order of the config, where the group was found.
    pub shards: Vec<String>,
    pub replicas: i32,
    pub layer: GroupLayer,
}

impl NewPool {
    pub fn name(&self) -> String {
        format!("nstance-{}", self.group)
    }
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct ImportPlan {
    pub pools: Vec<NewPool>,
    /// Shards that have not told what they have.
    pub waiting: Vec<String>,
    /// Groups that differ between shards, with the words for a person.
    pub different: Vec<String>,
}

/// `has_pool` says whether any pool of the namespace has this group. `ignored` are shards that import does not wait for.
pub fn import(views: &[ShardView], ignored: &BTreeSet<String>, has_pool: impl Fn(&str) -> bool) -> ImportPlan {
    let mut plan = ImportPlan::default();
    let mut found: BTreeMap<&str, Vec<(&str, &Group)>> = BTreeMap::new();
    for view in views {
        let Some(picture) = view.picture.as_deref() else {
            if !ignored.contains(&view.name) {
                plan.waiting.push(view.name.clone());
            }
            continue;
        };
        for group in picture.groups.values().filter(|it| !it.is_deleting && !has_pool(&it.key)) {
            found.entry(&group.key).or_default().push((&view.name, group));
        }
    }
    if !plan.waiting.is_empty() {
        return plan;
    }
    for (key, places) in found {
        let layers: Vec<GroupLayer> = places.iter().map(|(_, group)| layer_of(group)).collect();
        let Some(first) = layers.first().cloned() else { continue };
        if let Some(other) = layers.iter().position(|it| *it != first) {
            plan.different.push(format!(
                "group {key} has other overrides on {} than on {}; make them alike, or make its NstanceMachinePools by hand",
                places[other].0, places[0].0
            ));
            continue;
        }
        plan.pools.push(NewPool {
            group: key.to_owned(),
            shards: places.iter().map(|(shard, _)| (*shard).to_owned()).collect(),
            replicas: places.iter().map(|(_, group)| group.size).sum(),
            layer: first,
        });
    }
    plan
}

/// What the pool takes over: of a group in the config only the overrides.
fn layer_of(group: &Group) -> GroupLayer {
    let set = |text: &str| Some(text.to_owned()).filter(|it| !it.is_empty());
    let layer = match &group.layer {
        Some(layer) => layer.clone(),
        None if group.is_static => GroupLayer::default(),
        None => GroupLayer {
            size: None,
            template: set(&group.template),
            instance_type: set(&group.instance_type),
            subnet_pool: set(&group.subnet_pool),
            vars: group.vars.clone(),
        },
    };
    GroupLayer { size: None, ..layer }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::decide::observed::{Picture, Reach};

    fn view(name: &str, groups: Option<&[(&str, i32)]>) -> ShardView {
        let picture = groups.map(|groups| {
            let group = |(key, size): &(&str, i32)| {
                let it = Group { key: (*key).to_owned(), size: *size, is_static: true, ..Group::default() };
                ((*key).to_owned(), Arc::new(it))
            };
            Arc::new(Picture { groups: groups.iter().map(group).collect(), ..Picture::default() })
        });
        ShardView { name: name.to_owned(), reach: Reach::Ready, picture, last_contact: None }
    }

    #[test]
    fn a_pool_is_made_only_when_every_shard_has_told() {
        let views = [view("a", Some(&[("web", 2)])), view("b", None)];
        let plan = import(&views, &BTreeSet::new(), |_| false);
        assert_eq!((plan.waiting.as_slice(), plan.pools.len()), (&["b".to_owned()][..], 0));
        let ignored = import(&views, &["b".to_owned()].into(), |_| false);
        assert_eq!(ignored.pools[0].replicas, 2);
        let views = [view("a", Some(&[("web", 2)])), view("b", Some(&[("web", 3), ("db", 1)]))];
        let plan = import(&views, &BTreeSet::new(), |group| group == "db");
        assert_eq!(plan.pools.len(), 1);
        let pool = &plan.pools[0];
        assert_eq!((pool.name().as_str(), pool.replicas), ("nstance-web", 5));
        assert_eq!(pool.shards, ["a", "b"]);
        assert_eq!(pool.layer, GroupLayer::default(), "a group of the config brings no overrides");
    }

    #[test]
    fn a_group_with_other_overrides_per_shard_is_not_imported() {
        let mut views = [view("a", Some(&[("web", 2)])), view("b", Some(&[("web", 3)]))];
        let mut picture = Picture::clone(views[1].picture.as_deref().unwrap());
        let layer = GroupLayer { instance_type: Some("large".into()), ..GroupLayer::default() };
        let web = Group { layer: Some(layer), ..Group::clone(&picture.groups["web"]) };
        picture.groups.insert("web".into(), Arc::new(web));
        views[1].picture = Some(Arc::new(picture));
        let plan = import(&views, &BTreeSet::new(), |_| false);
        assert!(plan.pools.is_empty());
        assert!(plan.different[0].contains("group web has other overrides on b than on a"), "{:?}", plan.different);
    }
}
