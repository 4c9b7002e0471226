//! From messages to commands. Parses all of a request before it refuses any of it.

use std::{collections::BTreeSet, time::Duration};

use nstance_config::{Code, GroupField, GroupLayer, OnDemandLayer, Problem, UpsertRequest};
use nstance_core::ids::{GroupRef, InstanceId, Tenant};
use nstance_proto::v1;

use super::status::Refusal;
use crate::service::{
    explain::Subject,
    groups::{Removal, Upsert, problem},
    on_demand::Wish,
};

const MAX_VICTIMS: usize = 1000;

pub fn upsert(tenant: &Tenant, actor: String, request: v1::UpsertGroupRequest) -> Result<Upsert, Refusal> {
    let mut problems = Vec::new();
    let group = noted(group(tenant, &request.key), &mut problems);
    let config = request.config.unwrap_or_default();
    let mask = request.update_mask.map(|mask| {
        let paths = mask.paths.iter().map(|path| path.strip_prefix("config.").unwrap_or(path));
        paths.filter_map(|path| noted(field(path), &mut problems)).collect::<BTreeSet<_>>()
    });
    let size = config.size.and_then(|size| {
        let negative = |_| problem(Code::BadValue, "size", format!("{size} is negative"));
        noted(u32::try_from(size).map_err(negative), &mut problems)
    });
    let subnet_pool = said(config.subnet_pool).and_then(|pool| {
        let bad = |error| problem(Code::BadValue, "subnet_pool", format!("{error}"));
        noted(pool.parse().map_err(|error: nstance_core::ids::IdError| bad(error)), &mut problems)
    });
    let load_balancers: Vec<_> = config
        .load_balancers
        .iter()
        .filter_map(|key| {
            let bad = |error: nstance_core::ids::IdError| problem(Code::BadValue, "load_balancers", error.to_string());
            noted(key.parse().map_err(bad), &mut problems)
        })
        .collect();
    let drain_timeout =
        config.drain_timeout.and_then(|timeout| noted(duration("drain_timeout", &timeout), &mut problems));
    if MAX_VICTIMS < request.preferred_victims.len() {
        problems.push(problem(Code::Limit, "preferred_victims", format!("more than {MAX_VICTIMS} ids")));
    }
    let victims: Vec<InstanceId> = request
        .preferred_victims
        .iter()
        .take(MAX_VICTIMS)
        .filter_map(|text| {
            let bad = |_| problem(Code::BadValue, "preferred_victims", format!("`{text}` is not an instance id"));
            noted(text.parse().map_err(bad), &mut problems)
        })
        .collect();
    let layer = GroupLayer {
        template: said(config.template),
        size,
        instance_type: said(config.instance_type),
        subnet_pool,
        vars: (!config.vars.is_empty()).then(|| config.vars.into_iter().collect()),
        drain_timeout,
        load_balancers: (!load_balancers.is_empty()).then_some(load_balancers),
        rollout_paused: config.rollout_paused,
    };
    let request_ = UpsertRequest { layer, has_args: !config.args.is_empty(), mask };
    match group {
        Some(group) if problems.is_empty() => {
            Ok(Upsert { group, request: request_, victims, expected_etag: request.expected_etag, actor })
        }
        _ => Err(Refusal::bad_request(problems)),
    }
}

/// Most characters of a request id.
const MAX_REQUEST_ID: usize = 64;

/// CreateInstance. Its problems travel along, so that they are told together with those of what it asks for.
pub fn wish(tenant: &Tenant, actor: String, request: v1::CreateInstanceRequest) -> Wish {
    let mut problems = Vec::new();
    let config = request.config.unwrap_or_default();
    let group = noted(named_group(tenant, "group", &config.group), &mut problems);
    let instance = said(request.instance_id).and_then(|text| {
        let bad = |error: nstance_core::ids::IdError| problem(Code::BadValue, "instance_id", error.to_string());
        noted(text.parse().map_err(bad), &mut problems)
    });
    let request_id = said(request.request_id);
    let is_printable = |c: char| c == ' ' || c.is_ascii_graphic();
    if request_id.as_ref().is_some_and(|id| MAX_REQUEST_ID < id.len() || !id.chars().all(is_printable)) {
        let message = format!("must be up to {MAX_REQUEST_ID} printable ASCII characters");
        problems.push(problem(Code::BadValue, "request_id", message));
    }
    let subnet_pool = said(config.subnet_pool).and_then(|pool| {
        let bad = |error: nstance_core::ids::IdError| problem(Code::BadValue, "subnet_pool", error.to_string());
        noted(pool.parse().map_err(bad), &mut problems)
    });
    let layer = OnDemandLayer {
        template: said(config.template),
        instance_type: said(config.instance_type),
        subnet_pool,
        vars: config.vars.into_iter().collect(),
    };
    Wish { tenant: tenant.clone(), actor, group, instance, request_id, layer, problems }
}

pub fn removal(tenant: &Tenant, actor: String, request: v1::DeleteGroupRequest) -> Result<Removal, Refusal> {
    let group = group(tenant, &request.key).map_err(|problem| Refusal::bad_request(vec![problem]))?;
    Ok(Removal { group, expected_etag: request.expected_etag, actor })
}

pub fn subject(tenant: &Tenant, request: v1::ExplainRequest) -> Result<Subject, Refusal> {
    use v1::explain_request::Target;
    match request.target {
        Some(Target::Group(key)) => {
            let missing = |_| Refusal::not_found(format!("there is no group {key}"));
            group(tenant, &key).map(Subject::Group).map_err(missing)
        }
        Some(Target::InstanceId(text)) => {
            let missing = |_| Refusal::not_found(format!("there is no instance {text}"));
            Ok(Subject::Instance(tenant.clone(), text.parse().map_err(missing)?))
        }
        None => Err(Refusal::bad_request(vec![problem(Code::Missing, "target", "name a group or an instance")])),
    }
}

pub fn group(tenant: &Tenant, key: &str) -> Result<GroupRef, Problem> {
    named_group(tenant, "key", key)
}

fn named_group(tenant: &Tenant, path: &str, key: &str) -> Result<GroupRef, Problem> {
    let bad = |error: nstance_core::ids::IdError| problem(Code::BadValue, path, error.to_string());
    Ok(GroupRef::new(tenant.clone(), key.parse().map_err(bad)?))
}

fn field(path: &str) -> Result<GroupField, Problem> {
    let message = || match path {
        "args" => "args could grant rights: they come from the config file only".to_owned(),
        path => format!("`{path}` is not a field of a group"),
    };
    GroupField::parse(path).ok_or_else(|| problem(Code::UnknownField, "update_mask", message()))
}

/// A span of time that is not negative.
pub fn duration(path: &str, it: &prost_types::Duration) -> Result<Duration, Problem> {
    let parts = u64::try_from(it.seconds).ok().zip(u32::try_from(it.nanos).ok().filter(|nanos| *nanos < 1_000_000_000));
    let (seconds, nanos) = parts.ok_or_else(|| problem(Code::BadValue, path, "is not a span of time"))?;
    Ok(Duration::new(seconds, nanos))
}

fn said(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

/// The value, or its problem among the others.
fn noted<T>(parsed: Result<T, Problem>, problems: &mut Vec<Problem>) -> Option<T> {
    parsed.map_err(|problem| problems.push(problem)).ok()
}
