use super::*;

const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);

fn after(seconds: u64) -> Timestamp {
    NOW.plus(Duration::from_secs(seconds))
}

/// A template with a text, a secret and a certificate of an hour; its hash is whatever it is said to be.
fn wanted(hash: &str) -> Wanted {
    wanted_without(hash, "nothing")
}

fn wanted_without(hash: &str, file: &str) -> Wanted {
    wanted_with(hash, |files| {
        files.remove(file);
    })
}

fn wanted_with(hash: &str, change: impl FnOnce(&mut serde_json::Map<String, serde_json::Value>)) -> Wanted {
    let mut config = serde_json::json!({
        "server": {
            "cluster_id": "demo", "shard": "s1", "provider": { "kind": "fake", "region": "r1", "zone": "z1" },
            "subnet_pools": { "main": ["subnet-1"] }, "secrets": { "provider": "memory" },
        },
        "certificates": { "node": { "kind": "peer", "cn": "node", "ttl": "1h" } },
        "templates": { "knc": { "kind": "knc", "arch": "amd64", "subnet_pool": "main", "files": {
            "motd": { "kind": "string", "template": "hello" },
            "token": { "kind": "secret", "source": "token" },
            "node.crt": { "kind": "certificate", "template": "node" },
        } } },
        "groups": { "default": { "web": { "template": "knc", "size": 1 } } },
    });
    change(config["templates"]["knc"]["files"].as_object_mut().unwrap());
    let loaded = crate::service::config::check("test", config.to_string().as_bytes(), None);
    let config = loaded.config.unwrap_or_else(|| panic!("{:?}", loaded.report));
    let group = config.groups.keys().next().unwrap().clone();
    Wanted { merged: Arc::new(config.group(&group, None).unwrap()), hash: hash.to_owned() }
}

fn held() -> BTreeSet<String> {
    ["node".to_owned()].into()
}

fn report(hash: &str, written: &[&str]) -> Reported {
    let files = written.iter().map(|name| ((*name).to_owned(), Shown::Written(NOW))).collect();
    Reported { hash: hash.to_owned(), files, ..Reported::default() }
}

fn failing(hash: &str, name: &str) -> Reported {
    let mut report = report(hash, &ALL);
    report.files.insert(name.to_owned(), Shown::Failed("disk full".to_owned()));
    report
}

/// The same, by one who has committed this batch.
fn naming(batch: &str, report: &Reported) -> Reported {
    Reported { batch: batch.to_owned(), ..report.clone() }
}

const ALL: [&str; 3] = ["motd", "node.crt", "token"];

fn names(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn known(n: u8) -> Known {
    Known { print: [n; 32], renew_at: None }
}

/// One to whom everything was sent for this hash, and who has shown it.
fn settled(hash: &str) -> Memory {
    let (wanted, mut memory) = (wanted(hash), Memory::default());
    memory.opened(NOW);
    memory.look(&wanted, None);
    let order = Order { all: true, ..Order::default() };
    memory.checked(&order, &wanted, NOW);
    memory.sent("first", ALL.iter().map(|name| ((*name).to_owned(), known(1))).collect(), &wanted, true, NOW);
    memory.reported(&naming("first", &report(hash, &ALL)), NOW);
    memory
}

/// What is sent now, after every content was compared.
fn sends(memory: &mut Memory, wanted: &Wanted, now: Timestamp, report: &Reported, prints: u8) -> Vec<String> {
    let Due::Batch(order) = memory.decide(now, wanted, &held(), Heard::Report(report)) else { return Vec::new() };
    memory.begun();
    let mut sent = Vec::new();
    for name in wanted.merged.files.keys() {
        let sends = match memory.verdict(&order, wanted, name, now) {
            Verdict::Leave => false,
            Verdict::Send => true,
            Verdict::Compare => memory.differs(wanted, name, [prints; 32], Some(report), now),
        };
        if sends {
            sent.push(name.clone());
        }
    }
    sent
}

#[test]
fn keys_are_those_of_certificates() {
    assert_eq!(wanted("h").keys(), names(&["node"]));
    assert_eq!(wanted_without("h", "node.crt").keys(), names(&[]));
}

#[test]
fn a_new_stream_waits_for_a_report_and_then_gets_everything() {
    let (wanted, mut memory) = (wanted("h"), settled("h"));
    memory.opened(NOW);
    let waiting = Heard::Waiting { until: after(5) };
    assert_eq!(memory.decide(NOW, &wanted, &held(), waiting), Due::Wait(Some(after(5))));
    let Due::Batch(order) = memory.decide(after(5), &wanted, &held(), Heard::Nothing) else { panic!() };
    assert!(order.all);
    memory.checked(&order, &wanted, after(5));
    let Due::Wait(_) = memory.decide(after(5), &wanted, &held(), Heard::Nothing) else { panic!("once") };
}

#[test]
fn what_is_missing_or_without_a_key_is_told_apart() {
    let (wanted, mut memory) = (wanted("h"), Memory::default());
    memory.opened(NOW);
    let nothing = report("h", &[]);
    let Due::Batch(order) = memory.decide(NOW, &wanted, &BTreeSet::new(), Heard::Report(&nothing)) else { panic!() };
    assert_eq!(order.names, names(&["motd", "token"]), "the certificate waits for its key");
    assert!(!memory.is_complete(
        &wanted,
        &BTreeMap::from([("motd".into(), known(1)), ("token".into(), known(1))]),
        None
    ));
    let Due::Batch(order) = memory.decide(NOW, &wanted, &held(), Heard::Report(&nothing)) else { panic!() };
    assert_eq!(order.names, names(&ALL));
}

#[test]
fn a_settled_agent_is_left_alone_until_contents_are_compared_anew() {
    let (wanted, mut memory) = (wanted("h"), settled("h"));
    let all = report("h", &ALL);
    assert_eq!(memory.decide(after(1), &wanted, &held(), Heard::Report(&all)), Due::Wait(Some(after(300))));
    assert_eq!(sends(&mut memory, &wanted, after(300), &all, 1), [""; 0], "nothing differs");
    assert_eq!(sends(&mut memory, &wanted, after(300), &all, 2), ALL, "everything does");
}

#[test]
fn a_settled_agent_that_says_the_same_again_changes_nothing() {
    let (wanted, mut memory) = (wanted("h"), settled("h"));
    let all = report("h", &ALL);
    assert!(!memory.is_settled(), "what was sent may still be lost");
    memory.reported(&all, after(10));
    assert!(memory.is_settled());
    let due = |memory: &Memory| {
        [10, 299, 300, 9000].map(|seconds| memory.decide(after(seconds), &wanted, &held(), Heard::Report(&all)))
    };
    let before = due(&memory);
    assert_eq!(memory.reported(&all, after(60)), []);
    assert_eq!(due(&memory), before);
    assert!(memory.is_settled());
}

#[test]
fn whoever_waits_for_something_is_not_settled() {
    let check = |what: &str, change: fn(&mut Memory)| {
        let mut memory = settled("h");
        memory.reported(&report("h", &ALL), after(10));
        change(&mut memory);
        assert!(!memory.is_settled(), "{what}");
    };
    check("a key or an address changed", Memory::look_again);
    check("a file was not made", |memory| {
        memory.failed("token", after(11));
    });
    check("a file left the template", |memory| {
        memory.look(&wanted_without("h", "token"), None);
    });
    check("something was sent", |memory| {
        memory.sent("next", [("motd".to_owned(), known(2))].into(), &wanted("h"), true, after(11));
    });
    check("its stream broke after something was sent", |memory| {
        memory.sent("next", [("motd".to_owned(), known(2))].into(), &wanted("h"), false, after(11));
        memory.closed();
    });
    check("it was told the hash and has another", |memory| {
        memory.sent("next", BTreeMap::new(), &wanted("h"), true, after(11));
    });
}

#[test]
fn another_hash_sends_what_differs_at_once() {
    let mut memory = settled("old");
    let all = report("old", &ALL);
    assert_eq!(sends(&mut memory, &wanted("new"), after(1), &all, 2), ALL);
    assert_eq!(sends(&mut memory, &wanted("new"), after(1), &all, 1), [""; 0]);
    assert!(memory.is_complete(&wanted("new"), &BTreeMap::new(), Some(&all)), "then only the hash is owed");
}

#[test]
fn an_agent_that_keeps_its_old_hash_is_sent_everything_after_growing_waits() {
    let (wanted, mut memory) = (wanted("new"), settled("new"));
    let old = report("old", &ALL);
    memory.sent("next", BTreeMap::new(), &wanted, true, NOW);
    let mut at = NOW;
    for wait in [60, 120, 240, 480, 600, 600] {
        let before = at.plus(Duration::from_secs(wait - 1));
        at = at.plus(Duration::from_secs(wait));
        if let Due::Batch(order) = memory.decide(before, &wanted, &held(), Heard::Report(&old)) {
            assert!(!order.all, "{wait}");
        }
        let Due::Batch(order) = memory.decide(at, &wanted, &held(), Heard::Report(&old)) else { panic!("{wait}") };
        assert!(order.all, "{wait}");
        memory.checked(&order, &wanted, at);
        memory.sent("next", BTreeMap::new(), &wanted, true, at);
    }
    memory.reported(&report("new", &ALL), at);
    memory.sent("next", BTreeMap::new(), &wanted, true, at);
    let Due::Wait(next) = memory.decide(at, &wanted, &held(), Heard::Report(&old)) else { panic!() };
    assert_eq!(next, Some(at.plus(Duration::from_secs(60))), "one that followed begins anew");
}

#[test]
fn a_file_in_error_is_sent_again_after_growing_waits_and_told_each_time() {
    let (wanted, mut memory) = (wanted("h"), settled("h"));
    let broken = failing("h", "motd");
    let mut at = after(10);
    for wait in [10_u64, 20, 40, 80, 160, 320, 600, 600] {
        assert_eq!(memory.reported(&broken, at), [("motd".to_owned(), "disk full".to_owned())]);
        assert_eq!(memory.reported(&broken, at), [], "once");
        let Due::Batch(order) = memory.decide(at, &wanted, &held(), Heard::Report(&broken)) else { panic!("{wait}") };
        assert!(order.names.contains("motd"), "{wait}");
        memory.checked(&order, &wanted, at);
        memory.sent("next", [("motd".to_owned(), known(1))].into(), &wanted, true, at);
        let before = at.plus(Duration::from_secs(wait - 1));
        if let Due::Batch(order) = memory.decide(before, &wanted, &held(), Heard::Report(&broken)) {
            assert!(!order.names.contains("motd"), "{wait}");
        }
        at = at.plus(Duration::from_secs(wait));
    }
}

#[test]
fn other_words_for_an_error_are_told_with_the_next_try() {
    let (wanted, mut memory) = (wanted("h"), settled("h"));
    let failing = |why: &str| {
        let mut report = report("h", &ALL);
        report.files.insert("motd".to_owned(), Shown::Failed(why.to_owned()));
        report
    };
    let told = |why: &str| vec![("motd".to_owned(), why.to_owned())];
    assert_eq!(memory.reported(&failing("0 bytes left"), after(10)), told("0 bytes left"));
    for n in 1..100 {
        assert_eq!(memory.reported(&failing(&format!("{n} bytes left")), after(10)), []);
    }
    memory.sent("next", [("motd".to_owned(), known(1))].into(), &wanted, true, after(10));
    assert_eq!(memory.reported(&failing("no disk"), after(10)), told("no disk"));
    assert_eq!(memory.reported(&failing("0 bytes left"), after(11)), []);
}

#[test]
fn what_an_agent_could_not_write_keeps_the_hash_back() {
    let (wanted, mut memory) = (wanted("new"), settled("old"));
    let broken = failing("old", "motd");
    memory.reported(&broken, after(1));
    let others = BTreeMap::from([("token".to_owned(), known(2))]);
    assert!(!memory.is_complete(&wanted, &others, Some(&broken)));
    let this_one = BTreeMap::from([("motd".to_owned(), known(2))]);
    assert!(memory.is_complete(&wanted, &this_one, Some(&broken)), "sent along, the agent judges it itself");
}

#[test]
fn a_file_that_was_not_made_is_tried_again_and_keeps_the_hash_back() {
    let (wanted, mut memory) = (wanted("new"), settled("old"));
    let all = report("old", &ALL);
    let order = Order { compare: true, ..Order::default() };
    assert_eq!(memory.failed("token", after(1)), Duration::from_secs(10));
    memory.checked(&order, &wanted, after(1));
    assert!(!memory.is_complete(&wanted, &BTreeMap::new(), Some(&all)));
    memory.sent("next", BTreeMap::new(), &wanted, false, after(1));
    assert_eq!(memory.decide(after(2), &wanted, &held(), Heard::Report(&all)), Due::Wait(Some(after(11))));
    let Due::Batch(order) = memory.decide(after(11), &wanted, &held(), Heard::Report(&all)) else { panic!() };
    assert_eq!(order, Order { names: names(&["token"]), ..Order::default() }, "and nothing else");
    assert_eq!(memory.failed("token", after(11)), Duration::from_secs(20));
    let Due::Batch(_) = memory.decide(after(31), &wanted, &held(), Heard::Report(&all)) else { panic!() };
    memory.sent("next", [("token".to_owned(), known(2))].into(), &wanted, false, after(31));
    // The agent has it all and was not told so: that alone is owed now.
    memory.reported(&all, after(32));
    let Due::Batch(order) = memory.decide(after(32), &wanted, &held(), Heard::Report(&all)) else { panic!() };
    assert!(memory.is_complete(&wanted, &BTreeMap::new(), Some(&all)) && memory.owes_hash(&order, &wanted));
}

#[test]
fn a_certificate_is_due_with_a_third_of_its_life_left() {
    let (wanted, mut memory) = (wanted("h"), settled("h"));
    let all = report("h", &ALL);
    memory.known.insert("node.crt".to_owned(), Known { print: [1; 32], renew_at: Some(after(250)) });
    assert_eq!(memory.decide(after(1), &wanted, &held(), Heard::Report(&all)), Due::Wait(Some(after(250))));
    let Due::Batch(order) = memory.decide(after(250), &wanted, &held(), Heard::Report(&all)) else { panic!() };
    assert_eq!(order, Order { names: names(&["node.crt"]), ..Order::default() });
}

#[test]
fn a_new_leader_goes_by_the_hash_and_by_the_time_a_file_was_written() {
    let (wanted, mut memory) = (wanted("h"), Memory::default());
    let all = report("h", &ALL);
    memory.opened(after(1));
    assert_eq!(sends(&mut memory, &wanted, after(1), &all, 1), ["token"], "no hash vouches for a secret");
    let renew_at = memory.known["node.crt"].renew_at;
    assert_eq!(renew_at, Some(after(40 * 60)), "two thirds of an hour after it was written");
    memory.look_again();
    memory.sent("next", [("token".to_owned(), known(1))].into(), &wanted, true, after(1));
    assert_eq!(sends(&mut memory, &wanted, after(400), &all, 2), ALL, "what it took over is known from then on");
}

#[test]
fn a_machine_whose_clock_is_ahead_does_not_put_its_renewal_off() {
    let (wanted, mut memory) = (wanted("h"), Memory::default());
    let mut all = report("h", &ALL);
    all.files.insert("node.crt".to_owned(), Shown::Written(after(365 * 24 * 3600)));
    memory.opened(after(1));
    assert_eq!(sends(&mut memory, &wanted, after(1), &all, 1), ["token"]);
    let renew_at = memory.known["node.crt"].renew_at;
    assert_eq!(renew_at, Some(after(1 + 40 * 60)), "it cannot be younger than this");
}

#[test]
fn a_new_leader_sends_what_may_be_another_under_the_same_hash() {
    let wanted = wanted_with("h", |files| {
        files.insert(
            "leader".to_owned(),
            serde_json::json!({ "kind": "string", "template": "{{ .Server.AgentAddr }}" }),
        );
    });
    let mut memory = Memory::default();
    let all = report("h", &["leader", "motd", "node.crt", "token"]);
    memory.opened(after(1));
    assert_eq!(sends(&mut memory, &wanted, after(1), &all, 1), ["leader", "token"]);
    let sent = ["leader", "token"].map(|name| (name.to_owned(), known(1)));
    memory.checked(&Order { compare: true, ..Order::default() }, &wanted, after(1));
    memory.sent("next", sent.into(), &wanted, true, after(1));
    assert_eq!(sends(&mut memory, &wanted, after(400), &all, 1), [""; 0], "once");
}

#[test]
fn a_new_leader_says_nothing_of_where_a_machine_is_until_its_provider_has() {
    let wanted = wanted_with("h", |files| {
        files.insert("place".to_owned(), serde_json::json!({ "kind": "string", "template": "{{ .Instance.IP4 }}" }));
    });
    let mut memory = Memory::default();
    let all = report("h", &["motd", "node.crt", "place", "token"]);
    memory.opened(after(1));
    let Due::Batch(order) = memory.decide(after(1), &wanted, &held(), Heard::Report(&all)) else { panic!() };
    assert_eq!(sends(&mut memory, &wanted, after(1), &all, 1), ["token"]);
    memory.checked(&order, &wanted, after(1));
    memory.sent("next", [("token".to_owned(), known(1))].into(), &wanted, true, after(1));
    memory.reported(&naming("next", &all), after(20));
    assert!(!memory.is_settled(), "the next report has it looked at again");
    assert_eq!(sends(&mut memory, &wanted, after(20), &all, 1), [""; 0]);
    memory.located();
    assert_eq!(sends(&mut memory, &wanted, after(20), &all, 1), ["place"]);
}

#[test]
fn what_was_sent_on_a_stream_that_broke_is_sent_again() {
    let (wanted, mut memory) = (wanted("h"), settled("h"));
    let all = report("h", &ALL);
    memory.sent("next", [("token".to_owned(), known(2))].into(), &wanted, true, after(20));
    memory.closed();
    memory.opened(after(60));
    assert_eq!(sends(&mut memory, &wanted, after(60), &all, 1), ["token"]);

    let mut proved = settled("h");
    proved.sent("next", [("token".to_owned(), known(1))].into(), &wanted, true, after(20));
    proved.reported(&naming("next", &all), after(20));
    proved.closed();
    proved.opened(after(60));
    assert_eq!(sends(&mut proved, &wanted, after(60), &all, 1), [""; 0], "unless the agent named it since");
}

/// No hash tells of a secret, and an agent has more than one reason to speak.
#[test]
fn a_report_that_does_not_name_the_batch_proves_nothing_however_late_it_comes() {
    let (wanted, mut memory) = (wanted("h"), settled("h"));
    let all = report("h", &ALL);
    memory.sent("next", [("token".to_owned(), known(2))].into(), &wanted, true, after(20));
    for batch in ["", "first", "another"] {
        memory.reported(&naming(batch, &all), after(600));
        assert!(!memory.is_settled(), "{batch}");
    }
    memory.closed();
    memory.opened(after(601));
    assert_eq!(sends(&mut memory, &wanted, after(601), &all, 1), ["token"]);
}

#[test]
fn a_batch_is_proved_with_those_before_it_and_without_those_after_it() {
    let (wanted, mut memory) = (wanted("h"), settled("h"));
    let all = report("h", &ALL);
    for (batch, name) in [("second", "motd"), ("third", "node.crt"), ("fourth", "token")] {
        memory.sent(batch, [(name.to_owned(), known(2))].into(), &wanted, true, after(20));
    }
    memory.reported(&naming("third", &all), after(21));
    memory.closed();
    assert_eq!(memory.doubtful, names(&["token"]));
}

#[test]
fn a_file_that_was_sent_twice_is_proved_by_the_second_batch_alone() {
    let (wanted, mut memory) = (wanted("h"), settled("h"));
    let all = report("h", &ALL);
    for batch in ["second", "third"] {
        memory.sent(batch, [("token".to_owned(), known(2))].into(), &wanted, true, after(20));
    }
    memory.reported(&naming("second", &all), after(21));
    memory.closed();
    assert_eq!(memory.doubtful, names(&["token"]));
}

#[test]
fn an_agent_that_names_no_batch_fills_no_memory() {
    let (wanted, mut memory) = (wanted("h"), settled("h"));
    for n in 0..100_u64 {
        let name = ALL[usize::try_from(n % 3).unwrap()].to_owned();
        memory.sent(&n.to_string(), [(name, known(2))].into(), &wanted, true, after(n));
        memory.sent(&format!("{n} without files"), BTreeMap::new(), &wanted, true, after(n));
        memory.reported(&report("h", &ALL), after(n));
    }
    assert!(memory.unproven.len() <= ALL.len() + 1, "{}", memory.unproven.len());
}

#[test]
fn a_batch_that_no_report_names_may_be_lost_with_its_stream() {
    let (wanted, mut memory) = (wanted("new"), settled("old"));
    let (all, both) = (report("old", &ALL), ["node.crt", "token"]);
    memory.sent("next", both.map(|name| (name.to_owned(), known(2))).into(), &wanted, true, after(20));
    memory.reported(&all, after(60));
    memory.closed();
    memory.opened(after(62));
    assert!(!memory.is_complete(&wanted, &BTreeMap::new(), Some(&all)), "the hash alone would be a lie");
    assert_eq!(sends(&mut memory, &wanted, after(62), &all, 2), ALL, "and the third differs");
    memory.sent("again", both.map(|name| (name.to_owned(), known(2))).into(), &wanted, true, after(62));
    memory.reported(&naming("again", &report("new", &ALL)), after(70));
    memory.closed();
    assert!(memory.is_complete(&wanted, &BTreeMap::new(), Some(&all)), "this one was shown");
}

#[test]
fn what_failed_has_not_arrived_however_the_hash_stands() {
    let (wanted, mut memory) = (wanted("new"), settled("old"));
    memory.sent("next", ALL.map(|name| (name.to_owned(), known(2))).into(), &wanted, true, after(20));
    let broken = failing("old", "motd");
    memory.reported(&broken, after(21));
    assert!(memory.is_complete(&wanted, &BTreeMap::new(), Some(&broken)), "it may have failed before");
    memory.reported(&naming("next", &broken), after(30));
    assert!(!memory.is_complete(&wanted, &BTreeMap::new(), Some(&broken)));
}

#[test]
fn what_left_the_template_is_not_missed_when_its_stream_breaks() {
    let mut memory = settled("old");
    memory.sent("next", [("motd".to_owned(), known(2))].into(), &wanted("old"), true, after(20));
    memory.look(&wanted_without("new", "motd"), None);
    memory.closed();
    memory.look(&wanted("old"), None);
    assert!(!memory.doubtful.contains("motd"));
}

#[test]
fn a_key_that_changes_again_and_again_is_not_signed_for_each_time() {
    let (wanted, mut memory) = (wanted("h"), settled("h"));
    let all = report("h", &ALL);
    memory.look_again();
    assert_eq!(sends(&mut memory, &wanted, after(1), &all, 2), [""; 0], "sent just now under the same config");
    memory.checked(&Order { compare: true, ..Order::default() }, &wanted, after(1));
    assert_eq!(memory.decide(after(2), &wanted, &held(), Heard::Report(&all)), Due::Wait(Some(after(10))));
    assert_eq!(sends(&mut memory, &wanted, after(10), &all, 2), ALL, "but soon");
}

#[test]
fn what_changes_while_a_batch_is_made_is_compared_after_it() {
    let (wanted, mut memory) = (wanted("h"), settled("h"));
    let all = report("h", &ALL);
    memory.look_again();
    let Due::Batch(order) = memory.decide(after(20), &wanted, &held(), Heard::Report(&all)) else { panic!() };
    memory.begun();
    // Another key, or another address.
    memory.look_again();
    memory.checked(&order, &wanted, after(20));
    let Due::Batch(order) = memory.decide(after(20), &wanted, &held(), Heard::Report(&all)) else {
        panic!("forgotten")
    };
    assert!(order.compare);
    memory.begun();
    memory.checked(&order, &wanted, after(20));
    let Due::Wait(_) = memory.decide(after(20), &wanted, &held(), Heard::Report(&all)) else { panic!("once") };
}

#[test]
fn what_did_not_fit_keeps_the_hash_back_and_comes_next() {
    let (wanted, mut memory) = (wanted("new"), settled("old"));
    let all = report("old", &ALL);
    memory.opened(after(20));
    memory.begun();
    memory.postponed("node.crt");
    let sent = BTreeMap::from([("motd".to_owned(), known(2))]);
    assert!(!memory.is_complete(&wanted, &sent, Some(&all)));
    memory.checked(&Order { compare: true, ..Order::default() }, &wanted, after(20));
    memory.sent("next", sent, &wanted, false, after(20));
    let Due::Batch(order) = memory.decide(after(20), &wanted, &held(), Heard::Report(&all)) else { panic!("at once") };
    assert_eq!(order.names, names(&["node.crt"]));
}

#[test]
fn what_left_the_template_is_removed_until_it_is_gone() {
    let mut memory = settled("old");
    let without = wanted_without("new", "motd");
    memory.look(&without, None);
    assert_eq!(memory.left(), names(&["motd"]));
    memory.sent("next", BTreeMap::new(), &without, true, after(10));
    for files in [&ALL[..], &["node.crt", "token"]] {
        memory.reported(&naming("first", &report("old", files)), after(11));
        assert_eq!(memory.left(), names(&["motd"]), "that report crossed the batch, in which the file may be");
    }
    memory.reported(&naming("next", &report("new", &["node.crt", "token"])), after(20));
    assert_eq!(memory.left(), names(&[]));
    memory.look(&wanted("old"), None);
    assert_eq!(memory.left(), names(&[]), "wanted again");
}

#[test]
fn what_left_is_gone_also_for_an_agent_that_names_no_batch() {
    let mut memory = settled("old");
    let without = wanted_without("new", "motd");
    memory.look(&without, None);
    memory.sent("next", BTreeMap::new(), &without, true, after(10));
    memory.reported(&report("old", &["node.crt", "token"]), after(11));
    assert_eq!(memory.left(), names(&["motd"]), "that report crossed the batch");
    memory.reported(&report("new", &ALL), after(12));
    assert_eq!(memory.left(), names(&["motd"]), "it is still there");
    memory.reported(&report("new", &["node.crt", "token"]), after(20));
    assert_eq!(memory.left(), names(&[]));
}

/// A report in which these of its files were received from a server.
fn having_received(report: Reported, names: &[&str]) -> Reported {
    Reported { received: names.iter().map(|name| (*name).to_owned()).collect(), ..report }
}

#[test]
fn what_left_under_another_leader_is_removed_and_a_foreign_file_is_not() {
    let (wanted, mut memory) = (wanted_without("new", "motd"), Memory::default());
    memory.opened(NOW);
    let before = having_received(report("old", &["foreign", "motd", "node.crt", "token"]), &ALL);
    memory.look(&wanted, None);
    assert_eq!(memory.left(), names(&[]), "nothing is concluded without a report");
    memory.look(&wanted, Some(&before));
    assert_eq!(memory.left(), names(&["motd"]));
    let Due::Batch(_) = memory.decide(NOW, &wanted, &held(), Heard::Report(&before)) else { panic!("at once") };
    memory.sent("next", BTreeMap::new(), &wanted, true, NOW);
    let after = having_received(report("new", &["foreign", "node.crt", "token"]), &["node.crt", "token"]);
    let after = naming("next", &after);
    memory.reported(&after, NOW);
    memory.look(&wanted, Some(&after));
    assert_eq!(memory.left(), names(&[]));
}

#[test]
fn an_agent_that_names_other_files_each_time_fills_no_memory() {
    let (wanted, mut memory) = (wanted("h"), settled("h"));
    for n in 0..100 {
        let name = format!("file-{n}");
        let said = having_received(report("h", &[&name]), &[&name]);
        memory.sent("next", BTreeMap::new(), &wanted, true, after(n));
        memory.reported(&said, after(n));
        memory.look(&wanted, Some(&said));
        assert_eq!(memory.left(), names(&[&name]));
    }
}

#[test]
fn an_agent_that_has_the_hash_still_loses_what_is_not_in_the_template() {
    let (wanted, mut memory) = (wanted_without("h", "motd"), Memory::default());
    memory.opened(NOW);
    let all = having_received(report("h", &ALL), &ALL);
    memory.look(&wanted, Some(&all));
    let Due::Batch(_) = memory.decide(NOW, &wanted, &held(), Heard::Report(&all)) else { panic!("a new stream") };
    assert_eq!(memory.left(), names(&["motd"]));
}

#[test]
fn an_agent_that_has_the_hash_in_every_other_report_is_not_sent_everything_each_time() {
    let (wanted, mut memory) = (wanted("h"), settled("h"));
    let mut n_sent = 0;
    for second in 1..=180 {
        let hash = if second % 2 == 0 { "h" } else { "other" };
        let report = naming("first", &report(hash, &ALL));
        memory.reported(&report, after(second));
        let sent = sends(&mut memory, &wanted, after(second), &report, 1);
        if !sent.is_empty() {
            n_sent += 1;
            let sent = sent.into_iter().map(|name| (name, known(1))).collect();
            memory.sent("first", sent, &wanted, true, after(second));
        }
    }
    assert_eq!(n_sent, 2, "once a minute");
}

#[test]
fn an_agent_that_drops_its_stream_again_and_again_is_not_signed_for_each_time() {
    let (wanted, mut memory) = (wanted("h"), Memory::default());
    memory.look(&wanted, None);
    let report = naming("", &report("", &[]));
    let mut moments = Vec::new();
    for second in 1..=60 {
        memory.closed();
        memory.opened(after(second));
        memory.reported(&report, after(second));
        let sent = sends(&mut memory, &wanted, after(second), &report, 1);
        if !sent.is_empty() {
            moments.push(second);
            let sent = sent.into_iter().map(|name| (name, known(1))).collect();
            memory.sent("lost", sent, &wanted, true, after(second));
        }
    }
    // What was lost a few times comes at once; then after ten seconds, after twenty …
    assert_eq!(moments, (1..=9).chain([19, 39]).collect::<Vec<_>>());
    // A batch that arrives makes up for all of it.
    assert_eq!(sends(&mut memory, &wanted, after(100), &report, 1), ALL);
    memory.sent("kept", ALL.iter().map(|name| ((*name).to_owned(), known(1))).collect(), &wanted, true, after(100));
    memory.reported(&naming("kept", &report), after(101));
    assert_eq!(memory.n_lost, 0);
}
