//! The way in and the way out: creates, drains, deletions, orphans, load balancers.

use expect_test::expect;

use crate::plan::fixture::planned;

#[test]
fn a_create_without_answer_is_asked_again() {
    planned(
        "
        group web size=1
          a pending
        ",
        expect![[r#"
            6 resolve a
            hold UncertainMembers
            wake +270s
        "#]],
    );
}

#[test]
fn a_create_without_answer_is_asked_again_when_it_is_due() {
    planned(
        "
        group web size=1
          a pending next=+3s
        ",
        expect![[r#"
            hold UncertainMembers
            hold InProgress a until +3s
            wake +3s
        "#]],
    );
}

#[test]
fn an_on_demand_create_is_asked_again() {
    planned(
        "
        group web size=0
          a pending ondemand
        ",
        expect![[r#"
            4 resolve a
            wake +270s
        "#]],
    );
}

#[test]
fn a_create_nobody_could_resolve_is_deleted() {
    planned(
        "
        group web size=1
          a pending age=5m
        ",
        expect![[r#"
            3 delete a unresolved
        "#]],
    );
}

#[test]
fn a_machine_that_never_registers_is_deleted_undrained() {
    planned(
        "
        group web size=1
          a provisioning age=5m
        ",
        expect![[r#"
            3 delete a never-registered
        "#]],
    );
}

#[test]
fn with_the_sweep_off_nobody_is_overdue() {
    planned(
        "
        shard timeout=0s
        group web size=1
          a provisioning age=9h
        ",
        expect![[""]],
    );
}

#[test]
fn an_adopted_machine_is_never_overdue() {
    planned(
        "
        group web size=1
          a provisioning adopted age=9h lost=5s
        ",
        expect![[""]],
    );
}

#[test]
fn a_failed_create_counts_nowhere() {
    planned(
        "
        group web size=1
          a failed
        ",
        expect![[r#"
            6 create scale-up
            wake +1740s
        "#]],
    );
}

#[test]
fn a_failed_create_that_made_a_vm_all_the_same_is_ended() {
    planned(
        "
        group web size=0
          a failed ended=30m seen=running
        ",
        expect![[r#"
            3 delete a unresolved
        "#]],
    );
}

#[test]
fn a_failed_create_is_forgotten_after_retention() {
    planned(
        "
        group web size=0
          a failed ended=30m
          b failed ended=29m
        ",
        expect![[r#"
            6 forget a
            wake +60s
        "#]],
    );
}

#[test]
fn a_drain_waits_for_its_acknowledgement() {
    planned(
        "
        group web size=0
          a draining until=+100s
        ",
        expect![[r#"
            hold WaitingForDrain a until +100s
            wake +100s
        "#]],
    );
}

#[test]
fn an_acknowledged_drain_ends_in_deletion() {
    planned(
        "
        group web size=0
          a draining acked
        ",
        expect![[r#"
            1 delete a drained for scale-down
        "#]],
    );
}

#[test]
fn a_drain_ends_at_its_deadline() {
    planned(
        "
        group web size=0
          a draining until=+0s
        ",
        expect![[r#"
            1 delete a drained for scale-down
        "#]],
    );
}

#[test]
fn a_dead_machine_ends_its_drain() {
    planned(
        "
        group web size=0 lbs=www
          a draining seen=stopped
        ",
        expect![[r#"
            1 deregister a from www
            1 delete a dead
        "#]],
    );
}

#[test]
fn an_acknowledged_drain_waits_for_the_load_balancers() {
    planned(
        "
        group web size=0 lbs=www
          a draining acked lb=www:draining-out
        ",
        expect![[r#"
            hold WaitingForLb a until +240s
            wake +240s
        "#]],
    );
}

#[test]
fn an_acknowledged_drain_out_of_the_load_balancers_ends() {
    planned(
        "
        group web size=0 lbs=www
          a draining acked lb=www:absent
        ",
        expect![[r#"
            1 delete a drained for scale-down
        "#]],
    );
}

#[test]
fn the_deadline_ends_the_wait_for_the_load_balancers() {
    planned(
        "
        group web size=0 lbs=www
          a draining until=+0s lb=www:deregistering next=+5s
        ",
        expect![[r#"
            1 delete a drained for scale-down
            wake +5s
        "#]],
    );
}

#[test]
fn a_drain_goes_on_though_nobody_sees_the_machine() {
    planned(
        "
        group web size=0
          a draining acked seen=unknown
        ",
        expect![[r#"
            1 delete a drained for scale-down
        "#]],
    );
}

#[test]
fn a_delete_is_repeated_when_it_is_due() {
    planned(
        "
        group web size=0
          a deleting
          b deleting next=+7s
          c deleting seen=deleting
          d deleting why=scale-down
        ",
        expect![[r#"
            1 delete d drained for scale-down
            3 delete a drained for requested
            hold InProgress b until +7s
            hold InProgress c
            wake +7s
        "#]],
    );
}

#[test]
fn an_absent_machine_is_marked_deleted() {
    planned(
        "
        group web size=0
          a deleting seen=gone
        ",
        expect![[r#"
            3 mark-deleted a
        "#]],
    );
}

#[test]
fn a_deleted_record_is_forgotten_after_retention() {
    planned(
        "
        group web size=0
          a deleted ended=30m
          b deleted ended=10m
        ",
        expect![[r#"
            6 forget a
            wake +1200s
        "#]],
    );
}

#[test]
fn a_busy_instance_is_left_alone() {
    planned(
        "
        group web size=0
          a draining acked busy
          b deleting busy
          c deleted ended=40m busy
        ",
        expect![[""]],
    );
}

/// (T43) Scale-down, a deleted group and expiry: the checker, which reads along, refuses any other way.
#[test]
fn no_voluntary_action_deletes_undrained() {
    planned(
        "
        shard ondemand=1d forced=1d
        group down size=0
          a running
        group gone tombstoned
          b running
        group old size=1
          c running age=2d
          d running age=1m rotation
          e running ondemand age=2d
        ",
        expect![[r#"
            default/down: 1 drain a scale-down until +300s
            default/gone: 1 drain b group-deleted until +300s
            default/old: 2 drain c forced-expiry until +300s for d
            default/old: 5 drain e ondemand-expiry until +300s
            wake +82800s
        "#]],
    );
}

#[test]
fn a_vm_without_record_is_adopted() {
    planned(
        "
        group web size=1
          ? a
        ",
        expect![[r#"
            6 adopt a
            hold UncertainMembers
        "#]],
    );
}

#[test]
fn a_vm_without_record_of_an_unknown_group_is_adopted() {
    planned(
        "
        group web unknown
          ? a
        ",
        expect![[r#"
            6 adopt a
            hold GroupUnknown
        "#]],
    );
}

#[test]
fn a_vm_without_record_fills_a_slot_until_it_is_judged() {
    planned(
        "
        group web size=1
          ? a seen=pending
        ",
        expect![[r#"
            6 adopt a
            hold UncertainMembers
        "#]],
    );
}

#[test]
fn a_dead_vm_without_record_is_ended_at_once() {
    planned(
        "
        group web size=0
          ? a seen=stopped
          ? b seen=gone
          ? c seen=deleting
        ",
        expect![[r#"
            1 terminate a
        "#]],
    );
}

#[test]
fn a_vm_without_record_of_a_deleted_group_is_ended_when_due() {
    planned(
        "
        group web tombstoned
          ? a age=4m
          ? b age=5m
        ",
        expect![[r#"
            1 terminate b
            hold InProgress a until +60s
            wake +60s
        "#]],
    );
}

#[test]
fn a_registered_and_heard_machine_enters_its_load_balancers() {
    planned(
        "
        group web size=3 lbs=www,api
          a running lb=www:absent
          b running lb=www:absent lb=api:absent unreported
          c running lb=www:registering lb=api:registering next=+4s
        ",
        expect![[r#"
            6 register a in www
            wake +4s
        "#]],
    );
}

#[test]
fn a_leaving_machine_gets_out_of_its_load_balancers() {
    planned(
        "
        group web size=0 lbs=www
          a draining
          b deleting lb=www:registered next=+5s
          c deleting lb=www:registering next=+5s
        ",
        expect![[r#"
            1 deregister a from www
            1 deregister b from www
            1 deregister c from www
            hold WaitingForDrain a until +240s
            hold InProgress b until +5s
            hold InProgress c until +5s
            wake +5s
        "#]],
    );
}

#[test]
fn a_failed_deregistration_is_only_ever_repeated() {
    planned(
        "
        group web size=1 lbs=www
          a running lb=www:deregistering
        ",
        expect![[r#"
            1 deregister a from www
        "#]],
    );
}

#[test]
fn what_is_draining_out_waits() {
    planned(
        "
        group web size=1 lbs=www
          a running lb=www:draining-out
        ",
        expect![[""]],
    );
}

#[test]
fn a_load_balancer_the_group_no_longer_lists_is_left() {
    planned(
        "
        group web size=1
          a running lb=old:registered
        ",
        expect![[r#"
            1 deregister a from old
        "#]],
    );
}

#[test]
fn a_short_loss_leaves_no_load_balancer() {
    planned(
        "
        group web size=1 lbs=www
          a running lost=5s
        ",
        expect![[""]],
    );
}

#[test]
fn a_machine_that_leaves_with_this_plan_enters_nothing() {
    planned(
        "
        group web size=0 lbs=www
          a running lb=www:absent
        ",
        expect![[r#"
            1 drain a scale-down until +300s
        "#]],
    );
}

#[test]
fn with_the_sweep_off_a_vm_without_record_leaves_by_its_drain() {
    planned(
        "
        shard timeout=0s
        group web tombstoned
          ? a age=1h
        ",
        expect![[r#"
            6 adopt a
        "#]],
    );
}
