//! Rotation: expiry, requests, drift and advice.

use expect_test::expect;

use crate::plan::fixture::planned;

#[test]
fn a_drifted_member_gets_its_successor_first() {
    planned(
        "
        group web size=2
          a running age=2h hash=h0
          b running age=3h hash=h0
        ",
        expect![[r#"
            5 create rotation
        "#]],
    );
}

#[test]
fn a_rotation_waits_for_its_successor() {
    planned(
        "
        group web size=2
          a running age=3h hash=h0
          b running age=2h hash=h0
          c provisioning rotation
        ",
        expect![[r#"
            hold WaitingForReplacement a
            wake +270s
        "#]],
    );
}

#[test]
fn a_rotation_waits_until_the_load_balancer_serves_the_successor() {
    planned(
        "
        group web size=1 lbs=www
          a running age=3h hash=h0
          b running age=1m rotation lb=www:coming
        ",
        expect![[r#"
            hold WaitingForReplacement a
            wake +240s
        "#]],
    );
}

#[test]
fn a_successor_that_its_load_balancer_does_not_serve_in_time_is_told() {
    planned(
        "
        group web size=1 lbs=www
          a running age=3h hash=h0
          b running age=6m rotation lb=www:coming
        ",
        expect![[r#"
            hold WaitingForReplacement a
            hold WaitingForLb b
        "#]],
    );
}

#[test]
fn a_health_check_that_passes_for_no_member_is_not_waited_for() {
    planned(
        "
        group web size=1 lbs=www
          a running age=3h hash=h0 lb=www:coming
          b running age=6m rotation lb=www:coming
        ",
        expect![[r#"
            5 drain a config-drift until +300s for b
        "#]],
    );
}

#[test]
fn a_rotation_waits_for_the_load_balancer() {
    planned(
        "
        group web size=1 lbs=www
          a running age=3h hash=h0
          b running age=1m rotation lb=www:registering next=+1s
        ",
        expect![[r#"
            hold WaitingForReplacement a
            wake +1s
        "#]],
    );
}

#[test]
fn a_ready_successor_lets_the_oldest_go() {
    planned(
        "
        group web size=2
          a running age=3h hash=h0
          b running age=2h hash=h0
          c running age=1m rotation
        ",
        expect![[r#"
            5 drain a config-drift until +300s for c
            hold WaitingForDrain b
        "#]],
    );
}

#[test]
fn the_next_rotation_waits_for_the_drain() {
    planned(
        "
        group web size=2
          a draining why=config-drift hash=h0
          b running age=2h hash=h0
          c running age=1m rotation
        ",
        expect![[r#"
            hold WaitingForDrain a until +240s
            hold WaitingForDrain b
            wake +240s
        "#]],
    );
}

#[test]
fn the_next_rotation_waits_for_the_lost() {
    planned(
        "
        group web size=2
          a running age=2h hash=h0
          b running lost=1s
        ",
        expect![[r#"
            hold WaitingForReplacement a
        "#]],
    );
}

#[test]
fn the_next_rotation_waits_for_the_unseen() {
    planned(
        "
        group web size=2
          a running age=2h hash=h0
          b running seen=unknown
        ",
        expect![[r#"
            hold UncertainMembers
            hold UncertainMembers a
        "#]],
    );
}

#[test]
fn the_next_rotation_waits_for_growth() {
    planned(
        "
        group web size=3
          a running age=2h hash=h0
          b running
        ",
        expect![[r#"
            6 create scale-up
            hold WaitingForReplacement a
        "#]],
    );
}

#[test]
fn a_loss_midway_takes_the_successor_as_replacement() {
    planned(
        "
        group web size=2
          a running age=3h hash=h0
          b running age=2h seen=gone
          c provisioning rotation
        ",
        expect![[r#"
            3 delete b dead
            hold WaitingForReplacement a
            wake +270s
        "#]],
    );
}

#[test]
fn a_cause_that_vanishes_leaves_ordinary_surplus() {
    planned(
        "
        group web size=1
          a running age=3h
          b running age=1m rotation
        ",
        expect![[r#"
            1 drain a scale-down until +300s
        "#]],
    );
}

#[test]
fn a_paused_rollout_starts_nothing() {
    planned(
        "
        group web size=1 paused
          a running hash=h0
        ",
        expect![[r#"
            hold RolloutPaused a
        "#]],
    );
}

#[test]
fn a_rollout_paused_midway_drops_the_newcomer() {
    planned(
        "
        group web size=1 paused
          a running hash=h0 age=3h
          b provisioning rotation
        ",
        expect![[r#"
            1 delete b scale-down
            hold RolloutPaused a
            wake +270s
        "#]],
    );
}

#[test]
fn a_failing_rollout_waits_for_its_probe() {
    planned(
        "
        group web size=1 failed-rollouts=3 probe=+10m
          a running hash=h0
        ",
        expect![[r#"
            hold RolloutFailing a until +600s
            wake +600s
        "#]],
    );
}

#[test]
fn a_failing_rollout_tries_one_probe() {
    planned(
        "
        group web size=1 failed-rollouts=3 probe=0s
          a running hash=h0
        ",
        expect![[r#"
            5 create rotation
        "#]],
    );
}

#[test]
fn a_failed_replacement_is_retried_later() {
    planned(
        "
        group web size=1 retry=+60s
          a running hash=h0
        ",
        expect![[r#"
            hold BackingOff a until +60s
            wake +60s
        "#]],
    );
}

#[test]
fn an_eligible_member_rotates() {
    planned(
        "
        shard eligible=21d
        group web size=2
          a running age=22d
          b running age=20d
        ",
        expect![[r#"
            5 create rotation
            wake +86400s
        "#]],
    );
}

#[test]
fn an_advised_member_rotates_before_the_drifted() {
    planned(
        "
        group web size=2
          a running age=9h hash=h0
          b running age=1h advised=30s
        ",
        expect![[r#"
            5 create rotation
        "#]],
    );
}

#[test]
fn forced_expiry_does_not_wait_for_a_quiet_group() {
    planned(
        "
        shard forced=30d
        group web size=2 paused
          a running age=31d
          b running lost=20s
          c draining
        ",
        expect![[r#"
            2 create rotation
            hold WaitingForDrain c until +240s
            wake +240s
        "#]],
    );
}

#[test]
fn forced_expiry_needs_only_the_youngest_ready() {
    planned(
        "
        shard forced=30d
        group web size=2
          a running age=31d
          b running age=2d unreported
          c running age=1m rotation
        ",
        expect![[r#"
            2 drain a forced-expiry until +300s for c
            wake +2419200s
        "#]],
    );
}

#[test]
fn forced_expiry_goes_on_with_the_next_at_once() {
    planned(
        "
        shard forced=30d
        group web size=2
          a running age=32d
          b running age=31d
          c running age=1m rotation
        ",
        expect![[r#"
            2 drain a forced-expiry until +300s for c
            2 create rotation
            wake +2591940s
        "#]],
    );
}

#[test]
fn forced_expiry_after_two_failures_goes_without() {
    planned(
        "
        shard forced=30d
        group web size=2 failed-replacements=2 retry=+60s block=capacity:+15s
          a running age=32d
          b running age=31d
        ",
        expect![[r#"
            2 drain a forced-expiry until +300s
            hold NoCapacity until +15s
            hold BackingOff b until +60s
            wake +15s
        "#]],
    );
}

#[test]
fn forced_expiry_without_replacement_takes_one_at_a_time() {
    planned(
        "
        shard forced=30d
        group web size=2 failed-replacements=2 retry=+60s
          a draining why=forced-expiry age=32d
          b running age=31d
          c running age=1m
        ",
        expect![[r#"
            hold BackingOff b until +60s
            hold WaitingForDrain a until +240s
            wake +60s
        "#]],
    );
}

#[test]
fn a_requested_replacement_starts_at_once() {
    planned(
        "
        group web size=2
          a running marked=10s
          b provisioning
        ",
        expect![[r#"
            4 create rotation
            wake +270s
        "#]],
    );
}

#[test]
fn a_requested_replacement_follows_its_successor() {
    planned(
        "
        group web size=1
          a running marked=10s
          b running age=1m rotation
        ",
        expect![[r#"
            4 drain a replaced until +300s for b
        "#]],
    );
}

#[test]
fn a_requested_replacement_of_one_never_in_use_needs_no_drain() {
    planned(
        "
        group web size=1
          a provisioning age=4m marked=10s
          b running age=1m rotation
        ",
        expect![[r#"
            4 delete a never-registered
            wake +60s
        "#]],
    );
}

#[test]
fn forced_goes_before_requested_before_drift() {
    planned(
        "
        shard forced=30d
        group web size=3
          a running hash=h0 age=5d
          b running marked=10s age=5d
          c running age=31d
        ",
        expect![[r#"
            2 create rotation
            wake +2160000s
        "#]],
    );
}

#[test]
fn an_unseen_member_is_not_rotated() {
    planned(
        "
        group web size=1
          a running hash=h0 seen=unknown
        ",
        expect![[r#"
            hold UncertainMembers
        "#]],
    );
}

#[test]
fn a_record_without_hash_is_no_drift() {
    planned(
        "
        group web size=1
          a running hash=
        ",
        expect![[""]],
    );
}

#[test]
fn surplus_and_rotation_leave_together() {
    planned(
        "
        group web size=1
          a running age=3h hash=h0
          b running age=2h hash=h0
          c running age=1m rotation
        ",
        expect![[r#"
            1 drain a scale-down until +300s
            5 drain b config-drift until +300s for c
        "#]],
    );
}

#[test]
fn nothing_begins_while_a_victim_still_fills_its_slot() {
    planned(
        "
        shard forced=30d
        group web size=1 victims=a
          a running busy
          b running age=31d
        ",
        expect![[r#"
            hold InProgress a
            wake +2588400s
        "#]],
    );
}
