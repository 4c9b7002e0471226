//! Asks the provider whether it can do what the config needs: when a term begins and when another config is in force.
//!
//! What it finds stops nothing by itself. Credentials and reachability hold the provider as a whole; a subnet, an
//! instance type or a load balancer that cannot work holds the groups that have no other choice.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use nstance_config::{Config, MergedGroup};
use nstance_core::{
    ids::GroupRef,
    ports::provider::{CheckProblem, CheckSeverity, ErrorClass, LeaderNetwork, Need, Needs, Provider, ProviderError},
    snapshot::BlockKind,
};
use nstance_rt::chain::Chain;

use crate::{
    tasks::{images, observe::provider_failed},
    term::Term,
};

/// A group whose need cannot be met is asked for again after this: what is wrong may be mended at the provider.
const AGAIN: Duration = Duration::from_secs(600);

/// A check asks for many things one after another.
const LIMIT: Duration = Duration::from_secs(120);

/// What the config needs of the provider. Templates are left out where a group says otherwise: what no group uses is
/// not needed.
pub fn needs<'a>(config: &Config, groups: impl Iterator<Item = &'a MergedGroup>) -> Needs {
    let server = &config.server;
    let mut needs = Needs {
        subnets: server.subnet_pools.values().flatten().cloned().collect(),
        images: config.images.iter().map(|(name, spec)| (name.clone(), images::query(spec))).collect(),
        load_balancers: config.load_balancers.values().cloned().collect(),
        leader_network: server
            .leader_network
            .as_ref()
            .map(|it| LeaderNetwork { ip: it.ip, interface_id: it.interface_id.clone() }),
        ..Needs::default()
    };
    for group in groups {
        needs.instance_types.extend(group.instance_type.iter().chain(&group.instance_type_fallbacks).cloned());
        if !group.load_balancers.is_empty() {
            let least = needs.drain_timeout.map_or(group.drain_timeout, |least| least.min(group.drain_timeout));
            needs.drain_timeout = Some(least);
        }
    }
    needs
}

/// Asks, within a limit.
pub async fn check(provider: &dyn Provider, needs: &Needs) -> Vec<CheckProblem> {
    let problems = match tokio::time::timeout(LIMIT, provider.check(needs)).await {
        Ok(problems) => problems,
        Err(_) => {
            let error = ProviderError::new("check", ErrorClass::Unavailable, "no answer in time");
            vec![CheckProblem { need: Need::Account, severity: CheckSeverity::Error, error }]
        }
    };
    for CheckProblem { need, severity, error } in &problems {
        tracing::warn!(?need, ?severity, error = %Chain(error), "provider check");
    }
    problems
}

/// Checks what the config in force needs, and holds the groups that cannot be served.
pub async fn work(term: Arc<Term>) {
    let groups: BTreeMap<GroupRef, Arc<MergedGroup>> = {
        let state = term.world.lock();
        let merged = state.groups.iter().filter_map(|(group, it)| Some((group.clone(), it.merged.clone()?)));
        merged.collect()
    };
    let applied = term.applied();
    let needs = needs(&applied.config, groups.values().map(Arc::as_ref));
    let problems = check(term.shared.provider.as_ref(), &needs).await;
    // What fails for one need says nothing about the provider as a whole.
    for problem in problems.iter().filter(|it| it.need == Need::Account) {
        provider_failed(&term, &problem.error);
    }
    let now = term.now();
    for (group, message) in held(&groups, &problems) {
        // A newer config has a check of its own.
        if !Arc::ptr_eq(&applied, &term.applied()) {
            return;
        }
        let mut state = term.world.lock();
        state.group(&group).block(BlockKind::InvalidRequest, message, now, Some(now.plus(AGAIN)));
        drop(state);
        term.wake(&group);
    }
}

/// The groups that cannot work, each with the reason: a load balancer of theirs is wrong, or every subnet, or every
/// instance type.
fn held(groups: &BTreeMap<GroupRef, Arc<MergedGroup>>, problems: &[CheckProblem]) -> Vec<(GroupRef, String)> {
    let wrong: Vec<(&Need, &ProviderError)> = problems
        .iter()
        .filter(|it| it.severity == CheckSeverity::Error)
        .filter(|it| matches!(it.error.class, ErrorClass::Invalid | ErrorClass::NotFound))
        .map(|it| (&it.need, &it.error))
        .collect();
    let find = |is: &dyn Fn(&Need) -> bool| wrong.iter().find(|(need, _)| is(need)).map(|(_, error)| *error);
    let all_wrong = |names: &BTreeSet<&String>, need: fn(String) -> Need| {
        let errors: Option<Vec<_>> = names.iter().map(|name| find(&|it| *it == need((*name).clone()))).collect();
        errors.and_then(|errors| errors.first().copied())
    };
    let reason = |group: &MergedGroup| {
        let types = group.instance_type.iter().chain(&group.instance_type_fallbacks).collect();
        all_wrong(&group.subnets.iter().collect(), Need::Subnet)
            .or_else(|| all_wrong(&types, Need::InstanceType))
            .or_else(|| group.load_balancers.iter().find_map(|lb| find(&|it| *it == Need::LoadBalancer(lb.clone()))))
    };
    groups.iter().filter_map(|(group, merged)| Some((group.clone(), format!("{}", Chain(reason(merged)?))))).collect()
}
