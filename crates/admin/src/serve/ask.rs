//! From JSON that fits its schema to the messages of the operators' service.

use std::collections::HashMap;

use nstance_proto::v1::{CreateInstanceRequest, GroupConfig, InstanceConfig, PlanRequest, UpsertGroupRequest};
use serde_json::Value;

use super::route::Call;

fn texts(value: &Value) -> HashMap<String, String> {
    let fields = value.as_object().into_iter().flatten();
    fields.filter_map(|(name, it)| Some((name.clone(), it.as_str()?.to_owned()))).collect()
}

fn list(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(|it| Some(it.as_str()?.to_owned())).collect()
}

/// Numbers of our schemas are whole, but may be written as `3.0`.
pub(super) fn whole(value: &Value) -> Option<i64> {
    #[expect(clippy::cast_possible_truncation, reason = "schemas bound it")]
    let whole = |it: f64| it as i64;
    value.as_i64().or_else(|| value.as_f64().map(whole))
}

fn size(value: &Value) -> Option<i32> {
    whole(value).and_then(|it| i32::try_from(it).ok())
}

/// What a group is to be. What is not said stays as it is.
pub(super) fn upsert(group: &str, call: &Call, etag: &str) -> UpsertGroupRequest {
    let body = &call.body;
    UpsertGroupRequest {
        key: group.to_owned(),
        config: Some(GroupConfig {
            template: call.said("template"),
            size: size(&body["size"]),
            instance_type: call.said("instance_type"),
            subnet_pool: call.said("subnet_pool"),
            vars: texts(&body["vars"]),
            args: HashMap::new(),
            drain_timeout: whole(&body["drain_timeout_seconds"])
                .map(|seconds| prost_types::Duration { seconds, nanos: 0 }),
            load_balancers: list(&body["load_balancers"]),
            rollout_paused: body["rollout_paused"].as_bool(),
        }),
        expected_etag: etag.to_owned(),
        update_mask: None,
        preferred_victims: Vec::new(),
    }
}

/// Only the size changes.
pub(super) fn scale(group: &str, size: i32, victims: &[String]) -> UpsertGroupRequest {
    UpsertGroupRequest {
        key: group.to_owned(),
        config: Some(GroupConfig { size: Some(size), ..GroupConfig::default() }),
        preferred_victims: victims.to_vec(),
        ..UpsertGroupRequest::default()
    }
}

pub(super) fn create(call: &Call, request_id: &str) -> CreateInstanceRequest {
    CreateInstanceRequest {
        instance_id: String::new(),
        config: Some(InstanceConfig {
            group: call.said("group"),
            template: call.said("template"),
            instance_type: call.said("instance_type"),
            subnet_pool: call.said("subnet_pool"),
            vars: texts(&call.body["vars"]),
        }),
        request_id: request_id.to_owned(),
    }
}

pub(super) fn plan(call: &Call) -> PlanRequest {
    let sizes = call.body["sizes"].as_object().into_iter().flatten();
    PlanRequest {
        group: call.text("group").map_or_else(|| call.said("group"), str::to_owned),
        sizes: sizes.filter_map(|(group, it)| Some((group.clone(), size(it)?))).collect(),
        candidate_config: call.said("config").into_bytes(),
    }
}

pub(super) fn scaled_size(call: &Call) -> i32 {
    size(&call.body["size"]).unwrap_or_default()
}

pub(super) fn victims(call: &Call) -> Vec<String> {
    list(&call.body["victims"])
}

/// Parts a total among shards with these sizes: growth goes one by one to the smallest (the first of equals), shrinking
/// takes one by one from a shard that still has a hint, else from the largest (the last of equals).
pub(super) fn distribute(total: i32, mut sizes: Vec<i32>, mut hints: Vec<usize>) -> Vec<i32> {
    let sum = |sizes: &[i32]| sizes.iter().map(|it| i64::from(*it)).sum::<i64>();
    while sum(&sizes) < i64::from(total) {
        let Some(smallest) = (0..sizes.len()).min_by_key(|at| sizes[*at]) else { break };
        sizes[smallest] += 1;
    }
    while i64::from(total) < sum(&sizes) {
        let hinted = (0..sizes.len()).filter(|at| 0 < hints[*at] && 0 < sizes[*at]).max_by_key(|at| sizes[*at]);
        let Some(at) = hinted.or_else(|| (0..sizes.len()).max_by_key(|at| sizes[*at])) else { break };
        hints[at] = hints[at].saturating_sub(1);
        sizes[at] -= 1;
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_are_parted_by_the_rule() {
        assert_eq!(distribute(5, vec![0; 3], vec![0; 3]), [2, 2, 1]);
        assert_eq!(distribute(5, vec![1, 1, 1], vec![0; 3]), [2, 2, 1]);
        assert_eq!(distribute(3, vec![2, 2, 1], vec![0; 3]), [1, 1, 1]);
        assert_eq!(distribute(4, vec![2, 2, 1], vec![0; 3]), [2, 1, 1], "the last of the largest");
        assert_eq!(distribute(4, vec![2, 2, 1], vec![0, 0, 1]), [2, 2, 0], "where the hint is");
        assert_eq!(distribute(0, vec![2, 0], vec![0, 3]), [0, 0]);
    }
}
