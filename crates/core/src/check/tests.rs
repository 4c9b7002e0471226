//! Each rule of the checker against a plan that was broken by hand, and one plan it has nothing to say about.

use super::{Invariant, check};
use crate::{
    ids::InstanceId,
    instance::{CreateReason, DrainReason},
    plan::{
        Action, DeleteReason, Hold, HoldKind, Plan, Planned, Priority,
        fixture::{NOW, group_ref, id, shard},
    },
    ports::provider::VmRef,
    snapshot::Snapshot,
};

/// What the checker says to these actions, all for the picture's first group.
fn found(picture: &str, actions: Vec<Action>) -> Vec<(Invariant, Option<InstanceId>)> {
    let snapshot = shard(picture);
    let group = snapshot.groups.keys().next().unwrap().clone();
    let actions =
        actions.into_iter().map(|action| Planned { priority: Priority::ScaleUp, group: group.clone(), action });
    objections(&snapshot, Plan { actions: actions.collect(), ..Plan::default() })
}

fn objections(snapshot: &Snapshot, plan: Plan) -> Vec<(Invariant, Option<InstanceId>)> {
    check(snapshot, &plan, NOW).into_iter().map(|it| (it.invariant, it.instance)).collect()
}

#[track_caller]
fn catches(invariant: Invariant, picture: &str, actions: Vec<Action>) {
    let found = found(picture, actions);
    assert!(found.iter().any(|(it, _)| *it == invariant), "{invariant:?} is not among {found:?}");
}

fn create() -> Action {
    Action::Create { reason: CreateReason::ScaleUp }
}

fn drain(name: &str, reason: DrainReason) -> Action {
    Action::StartDrain { instance: id(name), reason, delete_at: NOW, replacement: None }
}

fn delete(name: &str, reason: DeleteReason) -> Action {
    Action::Delete { instance: id(name), reason }
}

fn vm(name: &str) -> VmRef {
    VmRef { instance: id(name), provider_id: None }
}

#[test]
fn a_good_plan_is_not_objected_to() {
    assert_eq!(found("group web size=1", vec![create()]), vec![]);
}

#[test]
fn surplus_that_stays_is_noticed() {
    catches(Invariant::I1, "group web size=1\n a running\n b running", vec![]);
    catches(Invariant::I1, "group web tombstoned\n a running", vec![]);
}

#[test]
fn the_lost_that_stay_are_noticed() {
    catches(Invariant::I1, "group web size=1\n a running seen=stopped", vec![create()]);
    catches(Invariant::I1, "group web size=1\n a running notice=+60s", vec![create()]);
    catches(Invariant::I1, "group web size=1\n a running silent=9s", vec![create()]);
}

#[test]
fn a_create_above_the_size_is_noticed() {
    catches(Invariant::I2, "group web size=1\n a running", vec![create()]);
    catches(Invariant::I2, "group web size=1\n a running seen=unknown", vec![create()]);
    catches(Invariant::I2, "group web size=1\n ! key", vec![create()]);
    catches(Invariant::I2, "group web size=1\n ? a", vec![create()]);
    catches(Invariant::I2, "group web size=1\n a pending creating", vec![create()]);
    catches(Invariant::I2, "group web unknown", vec![create()]);
    catches(Invariant::I2, "group web tombstoned", vec![create()]);
}

#[test]
fn a_create_against_a_block_is_noticed() {
    catches(Invariant::I2, "group web size=1 block=quota", vec![create()]);
    catches(Invariant::I2, "shard unavailable\n group web size=1", vec![create()]);
}

#[test]
fn growing_and_shrinking_at_once_is_noticed() {
    let both = vec![drain("a", DrainReason::ScaleDown), create()];
    catches(Invariant::I2, "group web size=1\n a running\n b running", both);
}

#[test]
fn acting_on_an_incomplete_picture_is_noticed() {
    for missing in ["no-config", "no-groups", "no-records", "no-listing"] {
        let picture = |group: &str| format!("shard {missing}\n {group}");
        catches(Invariant::I3, &picture("group web size=1"), vec![create()]);
        catches(Invariant::I3, &picture("group web size=0\n a running"), vec![drain("a", DrainReason::ScaleDown)]);
        let dead = vec![delete("a", DeleteReason::Dead)];
        catches(Invariant::I3, &picture("group web size=0\n a running seen=stopped"), dead);
        let orphan = vec![Action::TerminateOrphan { vm: vm("a") }];
        catches(Invariant::I3, &picture("group web size=0\n ? a seen=stopped"), orphan);
    }
}

#[test]
fn deciding_from_not_knowing_is_noticed() {
    let unseen = "group web size=0\n a running seen=unknown";
    catches(Invariant::I4, unseen, vec![drain("a", DrainReason::ScaleDown)]);
    catches(Invariant::I4, unseen, vec![delete("a", DeleteReason::Dead)]);
    catches(
        Invariant::I4,
        "group web size=0\n a deleting seen=unknown",
        vec![Action::MarkDeleted { instance: id("a") }],
    );
    catches(Invariant::I4, "group web size=1\n a running", vec![drain("a", DrainReason::SpotTerminating)]);
    catches(Invariant::I4, "group web size=1\n a running", vec![drain("a", DrainReason::Unhealthy)]);
    let early = vec![delete("a", DeleteReason::NeverRegistered)];
    catches(Invariant::I4, "group web size=0\n a provisioning seen=unknown", early);
    let young_host = "group web size=1\n a running seen=host-down:30s lost=30s";
    catches(Invariant::I4, young_host, vec![delete("a", DeleteReason::Dead)]);
}

#[test]
fn deleting_undrained_is_noticed() {
    let drained = DeleteReason::Drained(DrainReason::ScaleDown);
    catches(Invariant::I5, "group web size=0\n a running", vec![delete("a", DeleteReason::ScaleDown)]);
    catches(Invariant::I5, "group web tombstoned\n a running", vec![delete("a", DeleteReason::GroupDeleted)]);
    catches(Invariant::I5, "group web size=0\n a draining", vec![delete("a", drained)]);
    catches(Invariant::I5, "group web size=0\n a provisioning adopted", vec![delete("a", DeleteReason::ScaleDown)]);
}

#[test]
fn touching_on_demand_instances_is_noticed() {
    let one = "group web size=0\n a running ondemand";
    catches(Invariant::I13, one, vec![drain("a", DrainReason::ScaleDown)]);
    catches(Invariant::I13, one, vec![drain("a", DrainReason::OndemandExpiry)]);
    catches(Invariant::I13, "group web tombstoned\n a running ondemand", vec![drain("a", DrainReason::GroupDeleted)]);
    catches(Invariant::I13, "group web size=0\n a running", vec![drain("a", DrainReason::OndemandExpiry)]);
    catches(Invariant::I13, "group web size=1", vec![Action::Create { reason: CreateReason::OnDemand }]);
    let unused = vec![delete("a", DeleteReason::ScaleDown)];
    catches(Invariant::I13, "group web size=0\n a provisioning ondemand", unused);
}

#[test]
fn a_rotation_that_shrinks_the_group_is_noticed() {
    catches(Invariant::I14, "group web size=1\n a running hash=h0", vec![drain("a", DrainReason::ConfigDrift)]);
    let unready = "group web size=1\n a running hash=h0\n b provisioning rotation";
    catches(Invariant::I14, unready, vec![drain("a", DrainReason::ConfigDrift)]);
    let causeless = "group web size=1\n a running\n b running age=1m rotation";
    catches(Invariant::I14, causeless, vec![drain("a", DrainReason::Replaced)]);
    let two = "group web size=1\n a running hash=h0\n b running hash=h0\n c running age=1m rotation";
    let both = vec![drain("a", DrainReason::ConfigDrift), drain("b", DrainReason::ConfigDrift)];
    catches(Invariant::I14, two, both);
}

#[test]
fn replacing_whom_the_brake_holds_is_noticed() {
    let held = "shard held=a\n group web size=1\n a running silent=60s";
    catches(Invariant::I15, held, vec![drain("a", DrainReason::Unhealthy), create()]);
}

#[test]
fn creates_above_the_cap_are_noticed() {
    catches(Invariant::I16, "shard runaway=2\n group web size=3 creates=1", vec![create(), create()]);
}

#[test]
fn emptying_a_group_without_a_word_is_noticed() {
    catches(Invariant::I17, "group web size=1\n a running", vec![drain("a", DrainReason::ScaleDown)]);
    catches(Invariant::I17, "group web size=1\n a running", vec![drain("a", DrainReason::GroupDeleted)]);
    catches(Invariant::I17, "group web unknown\n a running", vec![drain("a", DrainReason::ScaleDown)]);
    catches(Invariant::I17, "group web unknown\n a running seen=stopped", vec![delete("a", DeleteReason::Dead)]);
    catches(Invariant::I17, "group web size=0 mass-removal\n a running", vec![drain("a", DrainReason::ScaleDown)]);
    let unused = vec![delete("a", DeleteReason::GroupDeleted)];
    catches(Invariant::I17, "group web tombstoned mass-removal\n a provisioning", unused);
    catches(Invariant::I17, "group web size=0\n ? a", vec![Action::TerminateOrphan { vm: vm("a") }]);
}

#[test]
fn disregard_of_load_balancers_is_noticed() {
    let drained = vec![delete("a", DeleteReason::Drained(DrainReason::ScaleDown))];
    catches(Invariant::I18, "group web size=0 lbs=www\n a draining acked", drained);
    let register = || Action::LbRegister { lb: "www".parse().unwrap(), instance: id("a") };
    catches(Invariant::I18, "group web size=1 lbs=www\n a running lb=www:deregistering", vec![register()]);
    let leaving = vec![register(), drain("a", DrainReason::ScaleDown)];
    catches(Invariant::I18, "group web size=0 lbs=www\n a running lb=www:absent", leaving);
}

#[test]
fn silence_is_noticed() {
    catches(Invariant::I20, "group web size=1 block=quota", vec![]);
    catches(Invariant::I20, "group web unknown", vec![]);
    let snapshot = shard("group web size=1 block=quota");
    let hold = Hold {
        kind: HoldKind::Quota,
        group: group_ref("web"),
        instance: None,
        message: String::new(),
        since: None,
        until: None,
    };
    assert_eq!(objections(&snapshot, Plan { holds: vec![hold], ..Plan::default() }), vec![]);
}

#[test]
fn a_loss_that_is_not_made_good_is_noticed() {
    let noticed = "group web size=1\n a running notice=+60s";
    catches(Invariant::I21, noticed, vec![drain("a", DrainReason::SpotTerminating)]);
    let dead = "group web size=2\n a running seen=gone\n b running seen=gone";
    let half = vec![delete("a", DeleteReason::Dead), delete("b", DeleteReason::Dead), create()];
    catches(Invariant::I21, dead, half);
}

#[test]
fn a_removal_because_creates_fail_is_noticed() {
    let silent = "group web size=1 block=capacity\n a running silent=60s";
    catches(Invariant::I22, silent, vec![drain("a", DrainReason::Unhealthy)]);
}

#[test]
fn malformed_plans_are_noticed() {
    let web = "group web size=1\n a running\n b running busy\n c deleted";
    catches(Invariant::Form, web, vec![delete("x", DeleteReason::Dead)]);
    catches(Invariant::Form, web, vec![drain("b", DrainReason::ScaleDown)]);
    catches(Invariant::Form, web, vec![drain("a", DrainReason::ScaleDown), delete("a", DeleteReason::ScaleDown)]);
    catches(Invariant::Form, web, vec![Action::ResolveCreate { instance: id("a") }]);
    catches(Invariant::Form, web, vec![Action::CancelDrain { instance: id("a") }]);
    catches(Invariant::Form, web, vec![Action::Forget { instance: id("c") }]);
    catches(Invariant::Form, web, vec![Action::Adopt { vm: vm("z") }]);
    catches(
        Invariant::Form,
        "group web size=0\n a draining until=+60s",
        vec![Action::StartDrain {
            instance: id("a"),
            reason: DrainReason::ScaleDown,
            delete_at: NOW.plus(std::time::Duration::from_secs(61)),
            replacement: None,
        }],
    );
}

#[test]
fn an_action_of_one_tenant_on_the_instance_of_another_is_noticed() {
    let picture = "group blue/web size=0\n a running\n group green/web size=1\n b running";
    catches(Invariant::Form, picture, vec![drain("a", DrainReason::ScaleDown), drain("b", DrainReason::ScaleDown)]);
}

#[test]
fn a_wrong_order_and_a_foreign_group_are_noticed() {
    let snapshot = shard("group web size=2");
    let planned = |priority, group: &str| Planned { priority, group: group_ref(group), action: create() };
    let plan = Plan {
        actions: vec![planned(Priority::ScaleUp, "web"), planned(Priority::Unhealthy, "web")],
        ..Plan::default()
    };
    assert_eq!(objections(&snapshot, plan), vec![(Invariant::Form, None)]);
    let plan = Plan { actions: vec![planned(Priority::ScaleUp, "db")], ..Plan::default() };
    assert!(objections(&snapshot, plan).contains(&(Invariant::Form, None)));
}
