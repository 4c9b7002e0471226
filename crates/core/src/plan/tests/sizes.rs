//! Groups above and below their size.

use expect_test::expect;

use crate::plan::fixture::planned;

#[test]
fn a_group_below_its_size_grows() {
    planned(
        "
        group web size=3
          a running
        ",
        expect![[r#"
            6 create scale-up
            6 create scale-up
        "#]],
    );
}

#[test]
fn a_group_at_its_size_rests() {
    planned(
        "
        group web size=2
          a running
          b running
        ",
        expect![[""]],
    );
}

#[test]
fn creates_in_flight_are_members() {
    planned(
        "
        group web size=3
          a running
          b pending creating
          c pending creating
        ",
        expect![[r#"
            wake +270s
        "#]],
    );
}

#[test]
fn a_group_above_its_size_drains_the_oldest() {
    planned(
        "
        group web size=1
          a running age=1h
          b running age=3h
          c running age=2h
        ",
        expect![[r#"
            1 drain b scale-down until +300s
            1 drain c scale-down until +300s
        "#]],
    );
}

#[test]
fn surplus_that_was_never_in_use_goes_first_and_undrained() {
    planned(
        "
        group web size=1
          a running age=3h
          b provisioning age=1m
        ",
        expect![[r#"
            1 delete b scale-down
            wake +240s
        "#]],
    );
}

#[test]
fn victims_go_by_hint_mark_illness_use_drift_and_age() {
    planned(
        "
        group web size=1 victims=f hash=h1
          a running age=9h
          b running age=1h hash=h2
          c provisioning age=1m
          d running age=1h lost=20s
          e running age=1h marked=10s
          f running age=1h
          g running age=1h
        ",
        expect![[r#"
            1 drain a scale-down until +300s
            1 drain b scale-down until +300s
            1 delete c scale-down
            1 drain d scale-down until +300s
            1 drain e scale-down until +300s
            1 drain f scale-down until +300s
            wake +240s
        "#]],
    );
}

#[test]
fn one_of_many_victims_is_the_hinted_one() {
    planned(
        "
        group web size=2 victims=c
          a running age=9h
          b running age=2h marked=5s
          c running age=1h
        ",
        expect![[r#"
            1 drain c scale-down until +300s
            4 create rotation
        "#]],
    );
}

/// The hinted one goes even while a rotation would cover the surplus (T89).
#[test]
fn the_chosen_machine_is_the_one_that_goes() {
    planned(
        "
        group web size=2 victims=b
          a running age=9h hash=h2
          b running age=2h
          c running age=1m rotation
        ",
        expect![[r#"
            1 drain b scale-down until +300s
            hold WaitingForDrain a
        "#]],
    );
}

#[test]
fn a_hint_removes_nobody_from_a_group_at_its_size() {
    planned(
        "
        group web size=2 victims=a
          a running
          b running
        ",
        expect![[""]],
    );
}

#[test]
fn a_busy_victim_is_waited_for_and_nobody_goes_in_its_place() {
    planned(
        "
        group web size=1
          a running age=3h busy
          b running age=1h
        ",
        expect![[r#"
            hold InProgress a
        "#]],
    );
}

#[test]
fn a_create_in_flight_is_surplus_once_it_is_answered() {
    planned(
        "
        group web size=1
          a running age=3h
          b pending creating
        ",
        expect![[r#"
            hold InProgress b
            wake +270s
        "#]],
    );
}

#[test]
fn unseen_members_are_never_victims() {
    planned(
        "
        group web size=1
          a running age=9h seen=unknown
          b running age=1h
        ",
        expect![[r#"
            hold UncertainMembers
        "#]],
    );
}

#[test]
fn unseen_members_keep_their_slots() {
    planned(
        "
        group web size=2
          a running seen=unknown
          b running seen=not-asked
        ",
        expect![[r#"
            hold UncertainMembers
        "#]],
    );
}

#[test]
fn surplus_behind_the_unseen_is_held() {
    planned(
        "
        group web size=1
          a running seen=unknown
          b running seen=unknown
        ",
        expect![[r#"
            hold UncertainMembers
        "#]],
    );
}

/// The one that drains is no member, so what is left is exactly the size (T42).
#[test]
fn a_drain_never_costs_a_second_machine() {
    planned(
        "
        group web size=2
          a draining
          b running
          c running
        ",
        expect![[r#"
            hold WaitingForDrain a until +240s
            wake +240s
        "#]],
    );
}

#[test]
fn a_machine_leaving_for_size_comes_back_before_one_is_made() {
    planned(
        "
        group web size=3
          a draining begun=2m
          b draining begun=1m
          c running
        ",
        expect![[r#"
            6 undrain a
            6 undrain b
        "#]],
    );
}

#[test]
fn nobody_comes_back_who_is_acknowledged_ill_drifted_hinted_or_on_the_threshold() {
    planned(
        "
        group web size=7 victims=e
          a draining acked lb=www:registered
          b draining lost=20s
          c draining hash=h2
          d draining until=+9s
          e draining
          f draining why=requested
          g running
        ",
        expect![[r#"
            1 deregister a from www
            6 create scale-up
            6 create scale-up
            6 create scale-up
            6 create scale-up
            6 create scale-up
            6 create scale-up
            hold WaitingForDrain b until +240s
            hold WaitingForDrain c until +240s
            hold WaitingForDrain d until +9s
            hold WaitingForDrain e until +240s
            hold WaitingForDrain f until +240s
            hold WaitingForLb a until +240s
            wake +9s
        "#]],
    );
}

#[test]
fn a_group_that_returns_calls_back_what_its_deletion_drained() {
    planned(
        "
        group web size=1
          a draining why=group-deleted
        ",
        expect![[r#"
            6 undrain a
        "#]],
    );
}

#[test]
fn size_zero_drains_everybody() {
    planned(
        "
        group web size=0
          a running
          b running
        ",
        expect![[r#"
            1 drain a scale-down until +300s
            1 drain b scale-down until +300s
        "#]],
    );
}

#[test]
fn a_tombstone_drains_all_at_once_the_unseen_too() {
    planned(
        "
        group web tombstoned
          a running
          b running seen=unknown
          c provisioning
          d pending
          e running seen=stopped
          f running silent=70s
          g running notice=+60s
          h running busy
          i running ondemand
        ",
        expect![[r#"
            0 drain g spot-terminating until +60s
            1 drain a group-deleted until +300s
            1 drain b group-deleted until +300s
            1 delete c group-deleted
            1 delete d group-deleted
            1 drain f group-deleted until +300s
            3 delete e dead
            hold InProgress h
        "#]],
    );
}

/// Nothing is made and nothing removed, whatever happens to them (T44).
#[test]
fn an_unreadable_group_keeps_its_members() {
    planned(
        "
        group web unknown lbs=www
          a running
          b running silent=70s
          c running notice=+60s
          d running seen=stopped
          e running seen=gone
          f provisioning age=1h
          g running marked=1m lb=old:registered
        ",
        expect![[r#"
            3 delete e dead
            hold GroupUnknown
        "#]],
    );
}

#[test]
fn a_corrupt_record_is_a_member_nobody_touches() {
    planned(
        "
        group web size=2
          a running
          ! web.key
        ",
        expect![[r#"
            hold RecordCorrupt
            hold UncertainMembers
        "#]],
    );
}

#[test]
fn a_corrupt_record_is_no_victim() {
    planned(
        "
        group web size=1
          a running
          ! web.key
        ",
        expect![[r#"
            hold RecordCorrupt
            hold UncertainMembers
        "#]],
    );
}

/// (T38)
#[test]
fn equal_group_names_of_two_tenants_do_not_touch() {
    planned(
        "
        group blue/web size=2
          a running
        group green/web size=1
          b running
          c running
          d running
        ",
        expect![[r#"
            green/web: 1 drain b scale-down until +300s
            green/web: 1 drain c scale-down until +300s
            blue/web: 6 create scale-up
        "#]],
    );
}

#[test]
fn an_incomplete_snapshot_makes_and_removes_nothing() {
    planned(
        "
        shard no-listing
        group web size=3
          a running seen=stopped
          b running silent=70s
          c running notice=+60s
          d draining acked
          e provisioning age=1h
        group db size=0
          f running
        group old tombstoned
          g running
          ? h age=1h
        ",
        expect![[r#"
            default/db: hold SnapshotIncomplete
            default/old: hold SnapshotIncomplete
            default/web: hold SnapshotIncomplete
            wake +240s
        "#]],
    );
}

#[test]
fn an_incomplete_snapshot_still_finishes_facts() {
    planned(
        "
        shard no-listing
        group web size=0
          a deleting seen=gone
          b deleted ended=31m
          c failed ended=31m
          d deleting
          e pending
        ",
        expect![[r#"
            3 mark-deleted a
            3 delete d drained for requested
            6 forget b
            6 forget c
            6 resolve e
            hold SnapshotIncomplete
        "#]],
    );
}

#[test]
fn nothing_is_asked_again_before_the_records_are_read() {
    planned(
        "
        shard no-records
        group web size=1
          a pending
          ? b
        ",
        expect![[r#"
            hold SnapshotIncomplete
        "#]],
    );
}

#[test]
fn an_unavailable_provider_holds_creates_but_no_drain() {
    planned(
        "
        shard unavailable
        group web size=2
          a running seen=stopped
          b pending
          c deleting next=5s
        group db size=0
          d running
        ",
        expect![[r#"
            default/db: 1 drain d scale-down until +300s
            default/web: 3 delete a dead
            default/web: hold UncertainMembers
            default/web: hold ProviderUnavailable
            default/web: hold ProviderUnavailable b
            default/web: hold ProviderUnavailable c
            wake +270s
        "#]],
    );
}

#[test]
fn an_unauthorized_provider_holds_creates() {
    planned(
        "
        shard unauthorized
        group web size=1
        ",
        expect![[r#"
            hold ProviderAuth
        "#]],
    );
}

#[test]
fn a_block_holds_creates_until_it_ends() {
    planned(
        "
        group web size=2 block=capacity:+15s block=quota:+30s
          a running
        ",
        expect![[r#"
            hold NoCapacity until +15s
            hold Quota until +30s
            wake +15s
        "#]],
    );
}

#[test]
fn a_block_without_end_waits_for_a_change() {
    planned(
        "
        group web size=1 block=invalid
        ",
        expect![[r#"
            hold InvalidRequest
        "#]],
    );
}

#[test]
fn a_block_whose_time_is_over_holds_nothing() {
    planned(
        "
        group web size=1 block=backoff:1s
        ",
        expect![[r#"
            6 create scale-up
        "#]],
    );
}

#[test]
fn a_blocked_group_still_calls_back_and_shrinks() {
    planned(
        "
        group web size=2 block=image
          a running
          b draining
        group db size=0 block=image
          c running
        ",
        expect![[r#"
            default/db: 1 drain c scale-down until +300s
            default/web: 6 undrain b
        "#]],
    );
}

#[test]
fn creates_stop_at_the_cap_of_the_window() {
    planned(
        "
        shard runaway=5
        group web size=4 creates=3 frees=+40s
        ",
        expect![[r#"
            6 create scale-up
            6 create scale-up
            hold Runaway until +40s
            wake +40s
        "#]],
    );
}

#[test]
fn a_mass_removal_is_held_until_somebody_confirms() {
    planned(
        "
        group web size=0 mass-removal
          a running
          b running seen=gone
        group db tombstoned mass-removal
          c running
          ? d age=1h
        ",
        expect![[r#"
            default/web: 3 delete b dead
            default/db: hold MassRemoval
            default/web: hold MassRemoval
        "#]],
    );
}
