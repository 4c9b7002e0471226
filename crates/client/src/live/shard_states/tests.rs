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

fn event(token: &str) -> News {
    News::Event(Box::new(Event { resume_token: token.into(), reason: "Something".into(), ..Event::default() }))
}

fn whole(groups: &[(&str, i32)], instances: &[&str]) -> News {
    let picture = Box::new(Picture {
        status: Arc::new(ConfigStatusResponse { epoch: 7, ..ConfigStatusResponse::default() }),
        groups: groups.iter().map(|(key, size)| ((*key).to_owned(), Arc::new(group(key, *size)))).collect(),
        instances: instances.iter().map(|id| ((*id).to_owned(), Arc::new(instance(id, "running")))).collect(),
    });
    News::Whole(picture, Begun::default())
}

fn lost(message: &str) -> News {
    News::Lost(ShardError::new("dev-1", Code::Unavailable, message))
}

fn board() -> Board {
    Board::new(["dev-1".to_owned(), "dev-2".to_owned()])
}

/// One word per entry.
fn told(board: &Board) -> Vec<String> {
    let entries = board.journal.after(0, usize::MAX).unwrap();
    let word = |delta: &Delta| match delta {
        Delta::Snapshot(seen) => {
            let picture = seen.picture.as_ref().unwrap();
            let (n_groups, n_instances) = (picture.groups.len(), picture.instances.len());
            format!("snapshot {n_groups} {n_instances} {}", seen.events.len())
        }
        Delta::Status(it) => format!("status {}", it.etag),
        Delta::Group(it) => format!("group {} {}", it.key, it.size),
        Delta::GroupGone(key) => format!("no {key}"),
        Delta::Instance(it) => format!("instance {} {}", it.instance_id, it.status),
        Delta::Event(it) if 0 < it.dropped => format!("{} events missing", it.dropped),
        Delta::Event(it) => format!("event {}", it.resume_token),
        Delta::Lost(error) => format!("lost: {}", error.message),
    };
    entries.iter().map(|it| format!("{} {}", it.shard, word(&it.delta))).collect()
}

#[test]
fn changes_are_told_in_their_order_and_make_the_picture() {
    let mut board = board();
    board.take(0, whole(&[("web", 2), ("db", 1)], &["a", "b"]), T0);
    board.take(0, News::Group(Box::new(group("web", 3)), None), T0);
    board.take(0, News::GroupGone("db".into(), None), T0);
    board.take(0, News::Instance(Box::new(instance("a", "draining")), None), T0);
    board.take(0, News::Instance(Box::new(instance("b", "deleted")), None), later(5));
    let etag = ConfigStatusResponse { etag: "e2".into(), ..ConfigStatusResponse::default() };
    board.take(0, News::Status(Box::new(etag)), later(6));
    assert_eq!(
        told(&board),
        [
            "dev-1 snapshot 2 2 0",
            "dev-1 group web 3",
            "dev-1 no db",
            "dev-1 instance a draining",
            "dev-1 instance b deleted",
            "dev-1 status e2",
        ]
    );
    let seen = &board.seen()[0];
    let picture = seen.picture.as_ref().unwrap();
    assert_eq!(picture.groups.values().map(|it| it.size).collect::<Vec<_>>(), [3]);
    assert_eq!(picture.instances.values().map(|it| it.status.as_str()).collect::<Vec<_>>(), ["draining"]);
    assert_eq!((seen.as_of, picture.status.etag.as_str()), (Some(later(6)), "e2"));
}

#[test]
fn a_lost_shard_is_told_once_keeps_what_was_known_and_comes_back_whole() {
    let mut board = board();
    board.take(0, whole(&[("web", 2)], &["a"]), T0);
    board.take(0, News::Alive, later(4));
    board.take(0, lost("gone"), later(9));
    board.take(0, lost("gone"), later(10));
    let seen = &board.seen()[0];
    assert_eq!((seen.lost.is_some(), seen.as_of), (true, Some(later(4))), "as old as its last word");
    assert_eq!(seen.picture.as_ref().unwrap().instances.len(), 1, "unreachable is not empty");
    board.take(0, lost("refused"), later(11));
    board.take(0, whole(&[], &[]), later(12));
    let expected = ["dev-1 snapshot 1 1 0", "dev-1 lost: gone", "dev-1 lost: refused", "dev-1 snapshot 0 0 0"];
    assert_eq!(told(&board), expected);
    let seen = &board.seen()[0];
    assert!(seen.lost.is_none() && seen.picture.as_ref().unwrap().instances.is_empty());
}

#[test]
fn a_shard_that_was_never_reached_is_unknown_and_not_empty() {
    let mut board = board();
    board.take(0, lost("refused"), T0);
    for seen in board.seen() {
        assert!(seen.lost.is_some() && seen.picture.is_none() && seen.as_of.is_none(), "{seen:?}");
    }
}

#[test]
fn events_of_the_past_come_with_the_first_snapshot_and_all_others_by_themselves() {
    let mut board = board();
    board.take(0, event("7-1"), T0);
    board.take(0, event("7-2"), T0);
    board.take(0, whole(&[], &[]), T0);
    board.take(0, event("7-3"), T0);
    board.take(0, lost("gone"), T0);
    // Of the time without a connection: told as they are heard again, before the new snapshot.
    board.take(0, event("7-4"), T0);
    board.take(0, whole(&[], &[]), T0);
    board.take(0, event("7-9"), T0);
    board.take(0, event("8-1"), T0);
    assert_eq!(
        told(&board),
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
    assert_eq!(board.position(0), Position::parse("8-1"));
    assert_eq!((board.past("dev-1").len(), board.past("dev-2").len()), (6, 0));
}

#[test]
fn a_reader_of_the_past_does_not_see_what_changed_since() {
    let mut board = board();
    board.take(0, whole(&[("web", 2)], &[]), T0);
    let before = board.seen();
    board.take(0, News::Group(Box::new(group("web", 9)), None), T0);
    assert_eq!(before[0].picture.as_ref().unwrap().groups["web"].size, 2);
    let entries = board.journal.after(0, 1).unwrap();
    let Delta::Snapshot(seen) = &entries[0].delta else { panic!("{entries:?}") };
    assert_eq!(seen.picture.as_ref().unwrap().groups["web"].size, 2);
}

#[test]
fn a_list_completes_the_picture_and_is_told_to_readers() {
    let mut board = board();
    board.take(0, whole(&[("web", 2), ("db", 1), ("new", 1)], &[]), T0);
    let place = |text: &str| Position::parse(text);
    board.take(0, News::Group(Box::new(group("new", 5)), place("7-9")), T0);
    board.wrote(0);
    assert!(board.groups("dev-1", T0).is_none());
    let asked = board.asked("dev-1").unwrap();
    board.listed(asked, &[group("web", 3), group("new", 4), group("other", 1)], place("6-8").unwrap());
    assert!(board.groups("dev-1", T0).is_none(), "of a leader that was");
    board.listed(asked, &[group("web", 3), group("new", 4), group("other", 1)], place("7-8").unwrap());
    let (as_of, groups) = board.groups("dev-1", T0).unwrap();
    let sizes: Vec<_> = groups.iter().map(|it| (it.key.as_str(), it.size)).collect();
    assert_eq!((as_of, sizes), (T0, vec![("new", 5), ("other", 1), ("web", 3)]));
    let expected =
        ["dev-1 snapshot 3 0 0", "dev-1 group new 5", "dev-1 group web 3", "dev-1 group other 1", "dev-1 no db"];
    assert_eq!(told(&board), expected);
    assert!(board.n_instances("dev-1", T0).is_none());
    board.listed_instances(asked, place("7-3").unwrap());
    board.take(0, News::Instance(Box::new(instance("a", "running")), place("7-4")), later(1));
    assert_eq!(board.n_instances("dev-1", later(2)), Some((later(1), 1)));
    assert_eq!(board.n_instances("dev-1", later(11)), None, "not heard of for 10 s");
}
