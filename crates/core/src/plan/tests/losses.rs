//! The dead, the silent and the noticed.

use expect_test::expect;

use crate::plan::fixture::planned;

#[test]
fn a_dead_machine_is_replaced_at_once() {
    planned(
        "
        group web size=2
          a running
          b running seen=stopped
        ",
        expect![[r#"
            3 create replacement
            3 delete b dead
        "#]],
    );
}

/// (T51) All at once, however many.
#[test]
fn losing_k_machines_starts_k_creates() {
    planned(
        "
        group web size=4
          a running seen=gone
          b running seen=stopped
          c running seen=deleting
          d running seen=suspended
        ",
        expect![[r#"
            3 create replacement
            3 delete a dead
            3 create replacement
            3 delete b dead
            3 create replacement
            3 delete c dead
            3 create replacement
            3 delete d dead
        "#]],
    );
}

#[test]
fn every_dead_state_frees_its_slot() {
    planned(
        "
        group web size=1
          a running seen=stopping
        ",
        expect![[r#"
            3 create replacement
            3 delete a dead
        "#]],
    );
}

#[test]
fn dead_surplus_is_deleted_without_replacement() {
    planned(
        "
        group web size=1
          a running
          b running seen=stopped
        ",
        expect![[r#"
            3 delete b dead
        "#]],
    );
}

#[test]
fn a_dead_machine_with_an_effect_under_way_is_replaced_and_waited_for() {
    planned(
        "
        group web size=1
          a running seen=stopped busy
        ",
        expect![[r#"
            3 create replacement
        "#]],
    );
}

#[test]
fn a_dead_newcomer_is_replaced() {
    planned(
        "
        group web size=2
          a provisioning seen=stopped
          b pending seen=gone
        ",
        expect![[r#"
            3 create replacement
            3 delete a dead
            3 create replacement
            3 delete b dead
        "#]],
    );
}

#[test]
fn a_host_in_trouble_is_waited_for() {
    planned(
        "
        group web size=1
          a running seen=host-down:30s lost=25s
        ",
        expect![[r#"
            hold UncertainMembers
            wake +30s
        "#]],
    );
}

#[test]
fn a_host_in_trouble_whose_agent_speaks_is_no_loss() {
    planned(
        "
        group web size=1
          a running seen=repairing:10m
        ",
        expect![[r#"
            hold UncertainMembers
        "#]],
    );
}

#[test]
fn a_host_in_trouble_is_given_up_after_its_grace() {
    planned(
        "
        group web size=1
          a running seen=host-down:60s lost=50s
        ",
        expect![[r#"
            3 create replacement
            3 delete a dead
        "#]],
    );
}

#[test]
fn a_lost_agent_is_waited_for() {
    planned(
        "
        group web size=1
          a running lost=20s
        ",
        expect![[""]],
    );
}

#[test]
fn a_silent_machine_is_replaced_and_drained_in_one_plan() {
    planned(
        "
        group web size=2
          a running
          b running silent=10s
        ",
        expect![[r#"
            3 create replacement
            3 drain b unhealthy until +300s
        "#]],
    );
}

#[test]
fn a_silent_machine_nobody_sees_stays() {
    planned(
        "
        group web size=1
          a running silent=10s seen=unknown
        ",
        expect![[r#"
            hold UncertainMembers
        "#]],
    );
}

#[test]
fn a_silent_surplus_machine_is_only_drained() {
    planned(
        "
        group web size=1
          a running
          b running silent=10s
        ",
        expect![[r#"
            3 drain b unhealthy until +300s
        "#]],
    );
}

#[test]
fn a_silent_machine_is_kept_while_its_replacement_cannot_be_made() {
    planned(
        "
        group web size=2 block=capacity:+15s
          a running silent=20s
          b running silent=10s
        ",
        expect![[r#"
            hold NoCapacity until +15s
            hold WaitingForReplacement a
            hold WaitingForReplacement b
            wake +15s
        "#]],
    );
}

#[test]
fn of_the_silent_as_many_stay_as_slots_stay_empty() {
    planned(
        "
        shard runaway=1
        group web size=2
          a running silent=20s
          b running silent=10s
        ",
        expect![[r#"
            3 create replacement
            3 drain a unhealthy until +300s
            hold Runaway
            hold WaitingForReplacement b
        "#]],
    );
}

#[test]
fn the_brake_keeps_the_silent_and_lets_one_go() {
    planned(
        "
        shard held=a,b,c released=b
        group web size=3
          a running silent=30s
          b running silent=30s
          c running lost=20s
        ",
        expect![[r#"
            3 create replacement
            3 drain b unhealthy until +300s
            hold MassDisconnect a
        "#]],
    );
}

#[test]
fn the_brake_holds_neither_the_dead_nor_the_noticed() {
    planned(
        "
        shard held=a,b
        group web size=2
          a running seen=stopped
          b running notice=+90s
        ",
        expect![[r#"
            0 create replacement
            0 drain b spot-terminating until +90s
            3 create replacement
            3 delete a dead
        "#]],
    );
}

#[test]
fn a_notice_starts_the_replacement_and_a_short_drain() {
    planned(
        "
        group web size=1
          a running notice=+120s
        ",
        expect![[r#"
            0 create replacement
            0 drain a spot-terminating until +120s
        "#]],
    );
}

#[test]
fn a_notice_without_deadline_drains_as_long_as_the_group_says() {
    planned(
        "
        group web size=1
          a running notice
        ",
        expect![[r#"
            0 create replacement
            0 drain a spot-terminating until +300s
        "#]],
    );
}

#[test]
fn all_notices_are_answered_at_once() {
    planned(
        "
        group web size=3
          a running notice=+120s
          b running notice=+120s seen=unknown
          c running notice=+600s
        ",
        expect![[r#"
            0 create replacement
            0 drain a spot-terminating until +120s
            0 create replacement
            0 drain b spot-terminating until +120s
            0 create replacement
            0 drain c spot-terminating until +300s
        "#]],
    );
}

#[test]
fn a_notice_is_heeded_though_creates_are_held() {
    planned(
        "
        group web size=1 block=capacity:+15s
          a running notice=+120s
        ",
        expect![[r#"
            0 drain a spot-terminating until +120s
            hold NoCapacity until +15s
            wake +15s
        "#]],
    );
}

#[test]
fn a_notice_for_surplus_makes_nothing() {
    planned(
        "
        group web size=1
          a running
          b running notice=+120s
        ",
        expect![[r#"
            0 drain b spot-terminating until +120s
        "#]],
    );
}

#[test]
fn notices_go_first_then_losses_then_growth() {
    planned(
        "
        group web size=4
          a running silent=10s
          b running seen=stopped
          c running notice=+120s
        ",
        expect![[r#"
            0 create replacement
            0 drain c spot-terminating until +120s
            3 create replacement
            3 drain a unhealthy until +300s
            3 create replacement
            3 delete b dead
            6 create scale-up
        "#]],
    );
}

#[test]
fn a_slot_whose_replacement_failed_stays_urgent() {
    planned(
        "
        group web size=2
          a draining why=spot-terminating until=+60s
          b failed replacement
          c running
        ",
        expect![[r#"
            0 create replacement
            hold WaitingForDrain a until +60s
            wake +60s
        "#]],
    );
}

#[test]
fn a_drain_under_way_is_shortened_by_a_notice() {
    planned(
        "
        group web size=0
          a draining until=+240s notice=+100s
        ",
        expect![[r#"
            0 drain a scale-down until +100s
            wake +100s
        "#]],
    );
}

#[test]
fn a_drain_under_way_is_never_lengthened() {
    planned(
        "
        group web size=0
          a draining until=+60s notice=+100s
        ",
        expect![[r#"
            hold WaitingForDrain a until +60s
            wake +60s
        "#]],
    );
}

#[test]
fn an_adopted_machine_without_agent_is_drained_as_lost() {
    planned(
        "
        group web size=1
          a provisioning adopted age=1h silent=10s
        ",
        expect![[r#"
            3 create replacement
            3 drain a unhealthy until +300s
        "#]],
    );
}

/// (T50) Dead, silent or noticed: nobody is made in its place, and the silent is its owner's to judge.
#[test]
fn on_demand_never_becomes_managed() {
    planned(
        "
        group web size=0
          a running ondemand seen=stopped
          b running ondemand silent=70s
          c running ondemand notice=+60s
          d running ondemand
        ",
        expect![[r#"
            0 drain c spot-terminating until +60s
            3 delete a dead
        "#]],
    );
}

#[test]
fn on_demand_fills_no_slot() {
    planned(
        "
        group web size=1
          a running ondemand
          ? b ondemand
        ",
        expect![[r#"
            6 adopt b
            6 create scale-up
        "#]],
    );
}

/// (T49)
#[test]
fn expired_on_demand_is_not_replaced() {
    planned(
        "
        shard ondemand=7d
        group web size=0
          a running ondemand age=8d
          b running ondemand age=9d
          c running ondemand age=6d
          d running ondemand age=8d seen=unknown
        ",
        expect![[r#"
            5 drain b ondemand-expiry until +300s
            5 drain a ondemand-expiry until +300s
            hold UncertainMembers d
            wake +86400s
        "#]],
    );
}

#[test]
fn on_demand_outlives_its_group() {
    planned(
        "
        group web tombstoned
          a running ondemand
          b pending ondemand
          ? c ondemand age=1h
        ",
        expect![[r#"
            4 resolve b
            6 adopt c
            wake +270s
        "#]],
    );
}
