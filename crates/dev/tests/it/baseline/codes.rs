//! The words of closed sets: in events, in records, in answers, in a shell's `$?`.

use std::collections::BTreeSet;

use nstance_admin::exit::Exit;
use nstance_agent::notice::Action;
use nstance_config::Code;
use nstance_core::{
    instance::{CreateReason, DrainReason, Health, Phase, Seen},
    plan::{DeleteReason, HoldKind},
    ports::{
        peers::{Election, PeerRole},
        provider::ErrorClass,
    },
    time::Timestamp,
};
use nstance_server::{events::Reason, watch::Told};

use super::hold;

fn owned<'a>(words: impl IntoIterator<Item = &'a str>) -> BTreeSet<String> {
    words.into_iter().map(str::to_owned).collect()
}

#[test]
fn event_reasons() {
    hold("event-reasons", Reason::ALL.iter().map(|it| format!("{} {:?}", it.as_str(), it.severity())));
}

#[test]
fn hold_kinds() {
    hold("hold-kinds", owned(HoldKind::ALL.iter().map(|it| it.as_str())));
}

#[test]
fn problem_codes_of_configs() {
    hold("problem-codes", Code::ALL.iter().map(|it| format!("{} {}", it.as_str(), it.severity().as_str())));
}

#[test]
fn create_reasons() {
    hold("create-reasons", owned(CreateReason::ALL.iter().map(|it| it.as_str())));
}

#[test]
fn drain_reasons() {
    hold("drain-reasons", owned(DrainReason::ALL.iter().map(|it| it.as_str())));
}

/// As records keep them and events tell them.
#[test]
fn delete_reasons() {
    let next = |reason: Option<DeleteReason>| match reason {
        None => Some(DeleteReason::Dead),
        Some(DeleteReason::Dead) => Some(DeleteReason::NeverRegistered),
        Some(DeleteReason::NeverRegistered) => Some(DeleteReason::Unresolved),
        Some(DeleteReason::Unresolved) => Some(DeleteReason::ScaleDown),
        Some(DeleteReason::ScaleDown) => Some(DeleteReason::GroupDeleted),
        Some(DeleteReason::GroupDeleted) => Some(DeleteReason::Drained(DrainReason::Requested)),
        Some(DeleteReason::Drained(_)) => None,
    };
    let own = std::iter::successors(next(None), |it| next(Some(*it)));
    let drained = DrainReason::ALL.iter().map(|it| DeleteReason::Drained(*it));
    hold("delete-reasons", own.chain(drained).map(|it| it.to_string()));
}

#[test]
fn provider_error_classes() {
    let next = |class: Option<ErrorClass>| match class {
        None => Some(ErrorClass::NotFound),
        Some(ErrorClass::NotFound) => Some(ErrorClass::Capacity),
        Some(ErrorClass::Capacity) => Some(ErrorClass::Quota),
        Some(ErrorClass::Quota) => Some(ErrorClass::Throttled),
        Some(ErrorClass::Throttled) => Some(ErrorClass::Auth),
        Some(ErrorClass::Auth) => Some(ErrorClass::Invalid),
        Some(ErrorClass::Invalid) => Some(ErrorClass::Unavailable),
        Some(ErrorClass::Unavailable) => Some(ErrorClass::Ambiguous),
        Some(ErrorClass::Ambiguous) => None,
    };
    let all = std::iter::successors(next(None), |it| next(Some(*it)));
    hold("provider-error-classes", all.map(|it| it.as_str().to_owned()));
}

#[test]
fn instance_phases() {
    hold("instance-phases", owned(Phase::ALL.iter().map(|it| it.as_str())));
}

#[test]
fn what_providers_show() {
    hold("instance-seen", owned(Seen::ALL.iter().map(|it| it.as_str())));
}

#[test]
fn what_watchers_are_told() {
    hold("watch-statuses", owned(Told::ALL.iter().map(|it| it.as_str())));
}

#[test]
fn health_of_instances() {
    let at = Timestamp::EPOCH;
    let next = |health: Option<Health>| match health {
        None => Some(Health::Starting),
        Some(Health::Starting) => Some(Health::Healthy),
        Some(Health::Healthy) => Some(Health::Lost { since: at }),
        Some(Health::Lost { .. }) => Some(Health::Silent { since: at }),
        Some(Health::Silent { .. }) => Some(Health::Terminating { noticed_at: at, deadline: None }),
        Some(Health::Terminating { .. }) => None,
    };
    hold("instance-health", std::iter::successors(next(None), |it| next(Some(*it))).map(|it| it.as_str().to_owned()));
}

#[test]
fn notices_of_agents() {
    hold("agent-notices", owned(Action::ALL.iter().map(|it| it.as_str())));
}

#[test]
fn states_of_agents() {
    hold("agent-states", owned(nstance_agent::State::NAMES));
}

/// What servers of two versions say to each other during an upgrade.
#[test]
fn roles_of_peers() {
    let elections = [Election::Shard, Election::Cluster].map(|it| format!("election {}", it.as_str()));
    hold("peer-roles", PeerRole::ALL.iter().map(|it| format!("role {}", it.as_str())).chain(elections));
}

#[test]
fn exit_codes_of_the_admin_tool() {
    let next = |exit: Option<Exit>| match exit {
        None => Some(Exit::Done),
        Some(Exit::Done) => Some(Exit::Failed),
        Some(Exit::Failed) => Some(Exit::Changes),
        Some(Exit::Changes) => Some(Exit::Partly),
        Some(Exit::Partly) => Some(Exit::TimedOut),
        Some(Exit::TimedOut) => Some(Exit::NotFound),
        Some(Exit::NotFound) => Some(Exit::Denied),
        Some(Exit::Denied) => Some(Exit::Usage),
        Some(Exit::Usage) => Some(Exit::Interrupted),
        Some(Exit::Interrupted) => None,
    };
    let all = std::iter::successors(next(None), |it| next(Some(*it)));
    hold("exit-codes", all.map(|it| format!("{} {it:?}", it as u8)));
}
