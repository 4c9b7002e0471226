use std::sync::Arc;

use expect_test::expect;
use nstance_client::{ShardError, live::ShardState};
use nstance_proto::v1::{BootReport, BootStage, ConfigStatusResponse, GroupStatus, PlanHold, Severity};
use proptest::prelude::*;
use tonic::Code;

use super::*;

/// 2023-11-14T22:13:20Z
const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);

fn ago(seconds: i64) -> Option<prost_types::Timestamp> {
    Some(prost_types::Timestamp { seconds: 1_700_000_000 - seconds, nanos: 0 })
}

fn instance(id: &str, status: &str, health: &str, age: i64) -> InstanceStatusResponse {
    InstanceStatusResponse {
        instance_id: id.into(),
        group: "web".into(),
        status: status.into(),
        health: health.into(),
        instance_type: "m1".into(),
        created_at: ago(age),
        ..InstanceStatusResponse::default()
    }
}

fn booting(id: &str) -> InstanceStatusResponse {
    let stage =
        BootStage { name: "cloud-init".into(), state: "running".into(), started: ago(12), ..BootStage::default() };
    let boot = Some(BootReport { stages: vec![stage], ..BootReport::default() });
    InstanceStatusResponse { boot, ..instance(id, "provisioning", "unknown", 20) }
}

fn event(seconds: i64, severity: Severity, reason: &str, message: &str) -> Arc<Event> {
    Arc::new(Event {
        at: ago(seconds),
        severity: severity.into(),
        reason: reason.into(),
        message: message.into(),
        group: "web".into(),
        ..Event::default()
    })
}

/// One shard with something of everything, one that is lost, one that never was there.
fn cluster() -> Vec<ShardView> {
    let hold = PlanHold { kind: "CreatePaused".into(), ..PlanHold::default() };
    let web = GroupStatus { key: "web".into(), size: 3, ready_size: 1, holds: vec![hold], ..GroupStatus::default() };
    let all = [
        instance("run", "running", "healthy", 4000),
        instance("ill", "running", "unhealthy", 300),
        booting("new"),
        instance("old", "draining", "healthy", 90_000),
    ];
    let status = ConfigStatusResponse {
        epoch: 7,
        leader_id: "server-1".into(),
        etag: "0123456789abcdef".into(),
        ..ConfigStatusResponse::default()
    };
    let state = ShardState {
        status: Arc::new(status),
        groups: [("web".to_owned(), Arc::new(web))].into(),
        instances: all.into_iter().map(|it| (it.instance_id.clone(), Arc::new(it))).collect(),
    };
    let live = ShardView {
        shard: "dev-1".into(),
        disconnected: None,
        as_of: Some(NOW.minus(std::time::Duration::from_secs(2))),
        state: Some(Arc::new(state)),
        events: vec![
            event(60, Severity::Info, "GroupChanged", "size 2 -> 3"),
            event(5, Severity::Warning, "InstanceUnhealthy", "no word since 30 s"),
        ],
    };
    let gone = instance("far", "running", "healthy", 60);
    let state = ShardState { instances: [("far".to_owned(), Arc::new(gone))].into(), ..ShardState::default() };
    let lost = ShardView {
        shard: "dev-2".into(),
        disconnected: Some(ShardError::new("dev-2", Code::Unavailable, "connection refused")),
        as_of: Some(NOW.minus(std::time::Duration::from_secs(75))),
        state: Some(Arc::new(state)),
        events: Vec::new(),
    };
    let never = ShardView { shard: "dev-3".into(), as_of: None, state: None, ..lost.clone() };
    vec![live, lost, never]
}

fn screen(width: usize, height: usize) -> String {
    draw(&cluster(), Size { width, height }, NOW).iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[test]
fn a_roomy_screen_shows_everything_and_troubles_first() {
    expect![[r#"
        3 shards (2 lost), 1 group, 5 instances - 2023-11-14T22:13:20Z - q quits

        SHARD  STATE  LEADER    EPOCH  CONFIG        GROUPS  INSTANCES  HEARD  PROBLEM
        dev-2  lost   -             0  -                  0          1  1m15s  connection refused
        dev-3  lost   -             -  -                  -          -      -  connection refused
        dev-1  ok     server-1      7  0123456789ab       1          4     2s  -

        GROUP  SHARD  STANDING                                           HELD BACK BY
        web    dev-1  1/3 ready, 1 booting (cloud-init 12s), 1 draining  CreatePaused

        INSTANCE  GROUP  SHARD         STATE         HEALTH     TYPE   AGE
        old       web    dev-1         draining      healthy    m1    1d1h
        new       web    dev-1         provisioning  unknown    m1     20s
        ill       web    dev-1         running       unhealthy  m1      5m
        far       web    dev-2 (lost)  running       healthy    m1      1m
        run       web    dev-1         running       healthy    m1    1h6m

        AGO  SEVERITY  SHARD  OF   REASON             MESSAGE
         5s  warning   dev-1  web  InstanceUnhealthy  no word since 30 s
         1m  info      dev-1  web  GroupChanged       size 2 -> 3
    "#]]
    .assert_eq(&screen(120, 40));
}

#[test]
fn a_small_screen_shows_something_of_everything() {
    expect![[r#"
        3 shards (2 lost), 1 group, 5 instances
        SHARD  STATE  LEADER    EPOCH  CONFIG
        dev-2  lost   -             0  -
        ... 2 more
        GROUP  SHARD  STANDING
        web    dev-1  1/3 ready, 1 booting (clou
        INSTANCE  GROUP  SHARD         STATE
        old       web    dev-1         draining
        ... 4 more
        AGO  SEVERITY  SHARD  OF   REASON
         5s  warning   dev-1  web  InstanceUnhea
         1m  info      dev-1  web  GroupChanged
    "#]]
    .assert_eq(&screen(40, 12));
}

#[test]
fn nothing_known_is_said_so() {
    let lines = draw(&[], Size { width: 80, height: 24 }, NOW);
    expect![[r#"
        0 shards, 0 groups, 0 instances - 2023-11-14T22:13:20Z - q quits

        SHARD  STATE  LEADER  EPOCH  CONFIG  GROUPS  INSTANCES  HEARD  PROBLEM

        no groups are known

        no instances are known

        no events yet"#]]
    .assert_eq(&lines.join("\n"));
}

#[test]
fn words_to_the_terminal_are_not_passed_on() {
    let mut seen = cluster();
    seen[0].events = vec![event(1, Severity::Info, "Said", "a\u{1b}[2Jb\r\nc\u{9b}d")];
    let lines = draw(&seen, Size { width: 200, height: 40 }, NOW);
    assert!(lines.iter().all(|line| line.chars().all(|it| !it.is_control())), "{lines:#?}");
    assert!(lines.iter().any(|line| line.contains("a [2Jb  c d")), "{lines:#?}");
}

#[test]
fn room_is_shared_fairly() {
    assert_eq!(share(&[3, 9, 2, 9], 100), [3, 9, 2, 9]);
    assert_eq!(share(&[3, 9, 2, 9], 12), [3, 4, 2, 3]);
    assert_eq!(share(&[3, 9], 1), [1, 0]);
    assert_eq!(share(&[], 5), Vec::<usize>::new());
    let lines = ["a", "b", "c"].map(str::to_owned).to_vec();
    assert_eq!(cut(lines.clone(), 3), ["a", "b", "c"]);
    assert_eq!(cut(lines.clone(), 2), ["a", "... 2 more"]);
    assert_eq!(cut(lines, 1), ["... 3 more"]);
}

proptest! {
    #[test]
    fn nothing_is_drawn_beyond_the_screen(width in 0_usize..200, height in 0_usize..60) {
        let lines = draw(&cluster(), Size { width, height }, NOW);
        prop_assert!(lines.len() <= height);
        prop_assert!(lines.iter().all(|line| line.chars().count() <= width));
    }
}
