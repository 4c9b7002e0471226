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
    config["templates"]["knc"]["files"].as_object_mut().unwrap().remove(file);
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
    memory.sent(ALL.iter().map(|name| ((*name).to_owned(), known(1))).collect(), &wanted, true, NOW);
    memory.reported(&report(hash, &ALL), true, NOW);
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
    memory.sent(BTreeMap::new(), &wanted, true, NOW);
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
        memory.sent(BTreeMap::new(), &wanted, true, at);
    }
    memory.reported(&report("new", &ALL), true, at);
    memory.sent(BTreeMap::new(), &wanted, true, at);
    let Due::Wait(next) = memory.decide(at, &wanted, &held(), Heard::Report(&old)) else { panic!() };
    assert_eq!(next, Some(at.plus(Duration::from_secs(60))), "one that followed begins anew");
}

#[test]
fn a_file_in_error_is_sent_again_after_growing_waits_and_told_each_time() {
    let (wanted, mut memory) = (wanted("h"), settled("h"));
    let broken = failing("h", "motd");
    let mut at = after(10);
    for wait in [10_u64, 20, 40, 80, 160, 320, 600, 600] {
        assert_eq!(memory.reported(&broken, true, at), [("motd".to_owned(), "disk full".to_owned())]);
        assert_eq!(memory.reported(&broken, true, at), [], "once");
        let Due::Batch(order) = memory.decide(at, &wanted, &held(), Heard::Report(&broken)) else { panic!("{wait}") };
        assert!(order.names.contains("motd"), "{wait}");
        memory.checked(&order, &wanted, at);
        memory.sent([("motd".to_owned(), known(1))].into(), &wanted, true, at);
        let before = at.plus(Duration::from_secs(wait - 1));
        if let Due::Batch(order) = memory.decide(before, &wanted, &held(), Heard::Report(&broken)) {
            assert!(!order.names.contains("motd"), "{wait}");
        }
        at = at.plus(Duration::from_secs(wait));
    }
}

#[test]
fn what_an_agent_could_not_write_keeps_the_hash_back() {
    let (wanted, mut memory) = (wanted("new"), settled("old"));
    let broken = failing("old", "motd");
    memory.reported(&broken, true, after(1));
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
    memory.sent(BTreeMap::new(), &wanted, false, after(1));
    assert_eq!(memory.decide(after(2), &wanted, &held(), Heard::Report(&all)), Due::Wait(Some(after(11))));
    let Due::Batch(order) = memory.decide(after(11), &wanted, &held(), Heard::Report(&all)) else { panic!() };
    assert_eq!(order, Order { names: names(&["token"]), ..Order::default() }, "and nothing else");
    assert_eq!(memory.failed("token", after(11)), Duration::from_secs(20));
    let Due::Batch(_) = memory.decide(after(31), &wanted, &held(), Heard::Report(&all)) else { panic!() };
    memory.sent([("token".to_owned(), known(2))].into(), &wanted, false, after(31));
    // The agent has it all and was not told so: that alone is owed now.
    memory.reported(&all, true, after(32));
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
    memory.sent([("token".to_owned(), known(1))].into(), &wanted, true, after(1));
    assert_eq!(sends(&mut memory, &wanted, after(400), &all, 2), ALL, "what it took over is known from then on");
}

#[test]
fn what_was_sent_on_a_stream_that_broke_is_sent_again() {
    let (wanted, mut memory) = (wanted("h"), settled("h"));
    let all = report("h", &ALL);
    memory.sent([("token".to_owned(), known(2))].into(), &wanted, true, after(20));
    memory.closed();
    memory.opened(after(60));
    assert_eq!(sends(&mut memory, &wanted, after(60), &all, 1), ["token"]);

    let mut proved = settled("h");
    proved.sent([("token".to_owned(), known(1))].into(), &wanted, true, after(20));
    proved.reported(&all, true, after(20));
    proved.closed();
    proved.opened(after(60));
    assert_eq!(sends(&mut proved, &wanted, after(60), &all, 1), [""; 0], "unless the agent spoke since");
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
    memory.sent(sent, &wanted, false, after(20));
    let Due::Batch(order) = memory.decide(after(20), &wanted, &held(), Heard::Report(&all)) else { panic!("at once") };
    assert_eq!(order.names, names(&["node.crt"]));
}

#[test]
fn what_left_the_template_is_removed_until_it_is_gone() {
    let mut memory = settled("old");
    let without = wanted_without("new", "motd");
    memory.look(&without, None);
    assert_eq!(memory.left(), names(&["motd"]));
    memory.sent(BTreeMap::new(), &without, true, after(10));
    memory.reported(&report("old", &ALL), false, after(11));
    assert_eq!(memory.left(), names(&["motd"]), "that report may have crossed the batch");
    memory.reported(&report("new", &["node.crt", "token"]), false, after(20));
    assert_eq!(memory.left(), names(&[]));
    memory.look(&wanted("old"), None);
    assert_eq!(memory.left(), names(&[]), "wanted again");
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
    memory.sent(BTreeMap::new(), &wanted, true, NOW);
    let after = having_received(report("new", &["foreign", "node.crt", "token"]), &["node.crt", "token"]);
    memory.reported(&after, true, after_crossing());
    memory.look(&wanted, Some(&after));
    assert_eq!(memory.left(), names(&[]));
}

fn after_crossing() -> Timestamp {
    NOW.plus(CROSSING)
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
