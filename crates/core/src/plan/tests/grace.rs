//! When to look again.

use expect_test::expect;

use crate::plan::fixture::planned;

#[test]
fn the_next_moment_is_the_earliest_of_all() {
    planned(
        "
        shard forced=30d eligible=21d ondemand=7d
        group web size=4
          a running age=20d
          b provisioning age=4m
          c draining until=+200s
          d pending next=+2s
          e deleting next=+9s
          f deleted ended=29m
          g running ondemand
        ",
        expect![[r#"
            6 undrain c
            hold UncertainMembers
            hold InProgress d until +2s
            hold InProgress e until +9s
            wake +2s
        "#]],
    );
}

#[test]
fn an_age_is_a_moment_to_look() {
    planned(
        "
        shard eligible=21d forced=30d
        group web size=1
          a running age=20d
        ",
        expect![[r#"
            wake +86400s
        "#]],
    );
}

#[test]
fn a_forced_age_is_a_moment_to_look() {
    planned(
        "
        shard eligible=21d forced=30d
        group web size=1 paused
          a running age=22d
        ",
        expect![[r#"
            hold RolloutPaused a
            wake +691200s
        "#]],
    );
}

#[test]
fn retention_is_a_moment_to_look() {
    planned(
        "
        group web size=0
          a failed ended=29m
        ",
        expect![[r#"
            wake +60s
        "#]],
    );
}

#[test]
fn a_quiet_group_sleeps() {
    planned(
        "
        group web size=1
          a running
        ",
        expect![[""]],
    );
}
