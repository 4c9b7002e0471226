//! The planner by pictures.
use super::fixture::planned;
use expect_test::expect;

#[test]
fn a_group_below_its_size_grows() {
    planned("group web size=3\n a running", expect![[""]]);
}
