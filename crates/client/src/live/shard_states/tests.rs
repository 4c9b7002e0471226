use super::*;

const T0: Timestamp = Timestamp::from_millis(1_000_000);

fn later(seconds: u64) -> Timestamp {
    T0.plus(std::time::Duration::from_secs(seconds))
}

fn group(key: &str, size: i32) -> GroupStatus {
    GroupStatus { key: key.into(), size, ..GroupStatus::default() }
}

fn instance(id: &str, status: &str) -> InstanceStatusResponse {
    InstanceStatusResponse { instance_id: id.into(), status: status.into(), ..InstanceStatusResponse::default() }
}

fn event(token: &str) -> Update {
    Update::Event(Box::new(Event { resume_token: token.into(), reason: "Something".into(), ..Event::default() }))
}

fn snapshot(groups: &[(&str, i32)], instances: &[&str]) -> Update {
    let state = Box::new(ShardState {
        status: Arc::new(ConfigStatusResponse { epoch: 7, ..ConfigStatusResponse::default() }),
        groups: groups.iter().map(|(key, size)| ((*key).to_owned(), Arc::new(group(key, *size)))).collect(),
        instances: instances.iter().map(|id| ((*id).to_owned(), Arc::new(instance(id, "running")))).collect(),
    });
    Update::Snapshot(state, SnapshotStart::default())
}

fn disconnected(message: &str) -> Update {
    Update::Disconnected(ShardError::new("dev-1", Code::Unavailable, message))
}

fn states() -> ShardStates {
    ShardStates::new(["dev-1".to_owned(), "dev-2".to_owned()])
}

/// A few words per entry of the log.
fn logged(states: &ShardStates) -> Vec<String> {
    let entries = states.log.after(0, usize::MAX).unwrap();
    let words = |change: &Change| match change {
        Change::Connected(view) => {
            let state = view.state.as_ref().unwrap();
            let (n_groups, n_instances) = (state.groups.len(), state.instances.len());
            format!("snapshot {n_groups} {n_instances} {}", view.events.len())
        }
        Change::Status(it) => format!("status {}", it.etag),
        Change::Group(it) => format!("group {} {}", it.key, it.size),
        Change::GroupDeleted(key) => format!("no {key}"),
        Change::Instance(it) => format!("instance {} {}", it.instance_id, it.status),
        Change::Event(it) if 0 < it.dropped => format!("{} events missing", it.dropped),
        Change::Event(it) => format!("event {}", it.resume_token),
        Change::Disconnected(error) => format!("lost: {}", error.message),
    };
    entries.iter().map(|it| format!("{} {}", it.shard, words(&it.change))).collect()
}

#[test]
fn changes_are_logged_in_order_and_make_up_the_state() {
    let mut states = states();
    states.apply(0, snapshot(&[("web", 2), ("db", 1)], &["a", "b"]), T0);
    states.apply(0, Update::Group(Box::new(group("web", 3)), None), T0);
    states.apply(0, Update::GroupDeleted("db".into(), None), T0);
    states.apply(0, Update::Instance(Box::new(instance("a", "draining")), None), T0);
    states.apply(0, Update::Instance(Box::new(instance("b", "deleted")), None), later(5));
    let etag = ConfigStatusResponse { etag: "e2".into(), ..ConfigStatusResponse::default() };
    states.apply(0, Update::Status(Box::new(etag)), later(6));
    assert_eq!(
        logged(&states),
        [
            "dev-1 snapshot 2 2 0",
            "dev-1 group web 3",
            "dev-1 no db",
            "dev-1 instance a draining",
            "dev-1 instance b deleted",
            "dev-1 status e2",
        ]
    );
    let view = &states.views()[0];
    let state = view.state.as_ref().unwrap();
    assert_eq!(state.groups.values().map(|it| it.size).collect::<Vec<_>>(), [3]);
    assert_eq!(state.instances.values().map(|it| it.status.as_str()).collect::<Vec<_>>(), ["draining"]);
    assert_eq!((view.as_of, state.status.etag.as_str()), (Some(later(6)), "e2"));
}

#[test]
fn a_lost_connection_is_logged_once_and_keeps_the_last_known_state() {
    let mut states = states();
    states.apply(0, snapshot(&[("web", 2)], &["a"]), T0);
    states.apply(0, Update::Alive, later(4));
    states.apply(0, disconnected("gone"), later(9));
    states.apply(0, disconnected("gone"), later(10));
    let view = &states.views()[0];
    assert_eq!((view.disconnected.is_some(), view.as_of), (true, Some(later(4))), "as old as its last message");
    assert_eq!(view.state.as_ref().unwrap().instances.len(), 1, "unreachable is not empty");
    states.apply(0, disconnected("refused"), later(11));
    states.apply(0, snapshot(&[], &[]), later(12));
    let expected = ["dev-1 snapshot 1 1 0", "dev-1 lost: gone", "dev-1 lost: refused", "dev-1 snapshot 0 0 0"];
    assert_eq!(logged(&states), expected);
    let view = &states.views()[0];
    assert!(view.disconnected.is_none() && view.state.as_ref().unwrap().instances.is_empty());
}

#[test]
fn a_shard_that_was_never_reached_is_unknown_and_not_empty() {
    let mut states = states();
    states.apply(0, disconnected("refused"), T0);
    for view in states.views() {
        assert!(view.disconnected.is_some() && view.state.is_none() && view.as_of.is_none(), "{view:?}");
    }
}

#[test]
fn past_events_are_part_of_the_first_snapshot_and_later_ones_are_logged() {
    let mut states = states();
    states.apply(0, event("7-1"), T0);
    states.apply(0, event("7-2"), T0);
    states.apply(0, snapshot(&[], &[]), T0);
    states.apply(0, event("7-3"), T0);
    states.apply(0, disconnected("gone"), T0);
    // Events of the time without a connection are logged when they are read, before the new snapshot.
    states.apply(0, event("7-4"), T0);
    states.apply(0, snapshot(&[], &[]), T0);
    states.apply(0, event("7-9"), T0);
    states.apply(0, event("8-1"), T0);
    assert_eq!(
        logged(&states),
        [
            "dev-1 snapshot 0 0 2",
            "dev-1 event 7-3",
            "dev-1 lost: gone",
            "dev-1 event 7-4",
            "dev-1 snapshot 0 0 4",
            "dev-1 4 events missing",
            "dev-1 event 7-9",
            "dev-1 event 8-1",
        ]
    );
    assert_eq!(states.last_token(0), ResumeToken::parse("8-1"));
    assert_eq!((states.history("dev-1").len(), states.history("dev-2").len()), (6, 0));
}

#[test]
fn a_view_does_not_change_after_it_was_taken() {
    let mut states = states();
    states.apply(0, snapshot(&[("web", 2)], &[]), T0);
    let before = states.views();
    states.apply(0, Update::Group(Box::new(group("web", 9)), None), T0);
    assert_eq!(before[0].state.as_ref().unwrap().groups["web"].size, 2);
    let entries = states.log.after(0, 1).unwrap();
    let Change::Connected(view) = &entries[0].change else { panic!("{entries:?}") };
    assert_eq!(view.state.as_ref().unwrap().groups["web"].size, 2);
}

#[test]
fn a_list_of_groups_completes_the_state_and_its_changes_are_logged() {
    let mut states = states();
    states.apply(0, snapshot(&[("web", 2), ("db", 1), ("new", 1)], &[]), T0);
    let token = |text: &str| ResumeToken::parse(text);
    states.apply(0, Update::Group(Box::new(group("new", 5)), token("7-9")), T0);
    states.record_write(0);
    assert!(states.groups("dev-1", T0).is_none());
    let request = states.begin_list("dev-1").unwrap();
    states.merge_groups(request, &[group("web", 3), group("new", 4), group("other", 1)], token("6-8").unwrap());
    assert!(states.groups("dev-1", T0).is_none(), "of an earlier leader");
    states.merge_groups(request, &[group("web", 3), group("new", 4), group("other", 1)], token("7-8").unwrap());
    let (as_of, groups) = states.groups("dev-1", T0).unwrap();
    let sizes: Vec<_> = groups.iter().map(|it| (it.key.as_str(), it.size)).collect();
    assert_eq!((as_of, sizes), (T0, vec![("new", 5), ("other", 1), ("web", 3)]));
    let expected =
        ["dev-1 snapshot 3 0 0", "dev-1 group new 5", "dev-1 group web 3", "dev-1 group other 1", "dev-1 no db"];
    assert_eq!(logged(&states), expected);
    assert!(states.n_instances("dev-1", T0).is_none());
    states.note_instances_token(request, token("7-3").unwrap());
    states.apply(0, Update::Instance(Box::new(instance("a", "running")), token("7-4")), later(1));
    assert_eq!(states.n_instances("dev-1", later(2)), Some((later(1), 1)));
    assert_eq!(states.n_instances("dev-1", later(11)), None, "nothing received for 10 s");
}
