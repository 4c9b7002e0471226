use nstance_core::{ids::Epoch, ports::peers::Election, time::Timestamp};

use super::*;
use crate::records::{Extra, Meta, VERSION};

const S: fn(u64) -> Duration = Duration::from_secs;
const MS: fn(u64) -> Duration = Duration::from_millis;

fn at(s: u64) -> Mono {
    Mono::from_start(S(s))
}

fn own() -> Identity {
    Identity {
        server_id: "us".into(),
        process: "ours".into(),
        addr: "10.0.0.1:8991".into(),
        health_addr: "10.0.0.1:8990".into(),
        direct: true,
        exclusive: true,
        boot_id: "boot".into(),
        provider_id: None,
    }
}

/// The lease of process "theirs", elsewhere, for 6 s.
fn lease(etag: &str) -> Versioned<LeaseRecord> {
    let value = LeaseRecord {
        epoch: Epoch(3),
        holder: "they".into(),
        process: "theirs".into(),
        addr: "10.0.0.2:8991".into(),
        health_addr: "10.0.0.2:8990".into(),
        direct: true,
        boot_id: "other".into(),
        provider_id: None,
        ttl: S(6),
        acquired_at: Timestamp::EPOCH,
        renewed_at: Timestamp::EPOCH,
        released: false,
        previous: None,
    };
    let meta = Meta {
        version: VERSION,
        epoch: value.epoch,
        writer: String::new(),
        write_id: etag.to_owned(),
        updated_at: Timestamp::EPOCH,
    };
    Versioned { value, etag: ETag(etag.to_owned()), meta, extra: Extra::default() }
}

fn released(etag: &str) -> Versioned<LeaseRecord> {
    let mut lease = lease(etag);
    lease.value.released = true;
    lease
}

fn view(role: PeerRole, etag: &str) -> PeerView {
    PeerView {
        election: Election::Shard,
        cluster: "c".into(),
        shard: "a".into(),
        server_id: "they".into(),
        process: "theirs".into(),
        role,
        epoch: Epoch(3),
        etag: Some(ETag(etag.to_owned())),
        renewed_ago: Some(S(1)),
        ttl: S(6),
        ready: true,
        version: String::new(),
    }
}

/// A follower that saw the lease at 100 s.
fn follower(lease: Option<Versioned<LeaseRecord>>) -> Follower {
    let mut follower = Follower::new(own(), None);
    assert_eq!(follower.wish(at(100)), Wish::Look, "first of all");
    follower.looked(lease, at(100), at(100));
    follower
}

fn sees(follower: &mut Follower, etag: &str, s: u64) {
    follower.looked(Some(lease(etag)), at(s), at(s));
}

#[track_caller]
fn bids(follower: &Follower, now: Mono, why: TakeOver) {
    match follower.wish(now) {
        Wish::Bid { reason, .. } => assert_eq!(reason, why),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn waits(follower: &Follower, now: Mono, for_: Mono) {
    assert_eq!(follower.wish(now), Wish::Wait { until: for_ });
}

const ALL_REFUSED: [Knock; 5] = [Knock::Refused; 5];

#[test]
fn an_absent_lease_is_bid_for() {
    bids(&follower(None), at(100), TakeOver::Absent);
}

#[test]
fn a_released_lease_is_bid_for() {
    bids(&follower(Some(released("e1"))), at(100), TakeOver::Released);
}

#[test]
fn a_predecessor_on_our_very_address_is_bid_against() {
    let mut before = lease("e1");
    (before.value.addr, before.value.boot_id) = (own().addr, own().boot_id);
    bids(&follower(Some(before)), at(100), TakeOver::SameHost);
}

#[test]
fn a_failed_bid_or_look_is_followed_by_a_look_not_before_its_time() {
    for lease in [None, Some(released("e1"))] {
        let mut follower = follower(lease.clone());
        follower.bid_failed(at(101));
        waits(&follower, at(100), at(101));
        assert_eq!(follower.wish(at(101)), Wish::Look);
        follower.look_failed(at(103));
        waits(&follower, at(101), at(103));
        assert_eq!(follower.wish(at(103)), Wish::Look);
        follower.looked(lease, at(103), at(103));
        assert!(matches!(follower.wish(at(103)), Wish::Bid { .. }));
    }
}

#[test]
fn an_expired_lease_is_bid_for_only_after_a_look_that_began_later() {
    let mut follower = follower(Some(lease("e1")));
    waits(&follower, at(100), at(106));
    assert_eq!(follower.wish(at(106)), Wish::Look);
    follower.looked(Some(lease("e1")), at(105), at(107));
    assert_eq!(follower.wish(at(107)), Wish::Look, "that one began too early");
    sees(&mut follower, "e1", 107);
    bids(&follower, at(107), TakeOver::Expired);
}

#[test]
fn the_ttl_in_the_object_is_obeyed() {
    let mut long = lease("e1");
    long.value.ttl = S(30);
    let mut follower = follower(Some(long));
    waits(&follower, at(100), at(130));
    let mut said = view(PeerRole::Leading, "e2");
    said.ttl = S(6);
    follower.heard(&said, at(110));
    waits(&follower, at(110), at(116));
}

#[test]
fn each_answer_with_a_new_version_begins_the_time_anew() {
    let mut follower = follower(Some(lease("e1")));
    follower.heard(&view(PeerRole::Leading, "e2"), at(104));
    waits(&follower, at(104), at(110));
    follower.heard(&view(PeerRole::Leading, "e2"), at(108));
    waits(&follower, at(108), at(110));
    assert_eq!(follower.holder().unwrap().known, Some((PeerRole::Leading, Some(ETag("e2".into())))));
}

#[test]
fn while_the_link_works_the_lease_is_looked_at_every_minute() {
    let mut follower = follower(Some(lease("e0")));
    for n in 1..30 {
        follower.heard(&view(PeerRole::Leading, &format!("e{n}")), at(100 + 2 * n));
        assert!(matches!(follower.wish(at(100 + 2 * n)), Wish::Wait { .. }), "{n}");
    }
    follower.heard(&view(PeerRole::Leading, "e30"), at(160));
    assert_eq!(follower.wish(at(160)), Wish::Look);
}

#[test]
fn the_word_released_is_bid_on_at_once_with_the_version_it_names() {
    let mut follower = follower(Some(lease("e1")));
    follower.heard(&view(PeerRole::Released, "e2"), at(101));
    match follower.wish(at(101)) {
        Wish::Bid { seen, reason: TakeOver::Released } => {
            assert_eq!((seen.epoch(), seen.lease.unwrap().etag), (Epoch(3), ETag("e2".into())));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_look_that_was_under_way_does_not_undo_what_was_heard_meanwhile() {
    let mut follower = follower(Some(lease("e1")));
    follower.heard(&view(PeerRole::Released, "e2"), at(102));
    follower.looked(Some(lease("e1")), at(101), at(103));
    bids(&follower, at(103), TakeOver::Released);
    let mut other = lease("e9");
    other.value.process = "somebody".into();
    follower.looked(Some(other), at(101), at(104));
    waits(&follower, at(104), at(110));
}

#[test]
fn whoever_does_not_hold_what_we_saw_makes_us_look_once() {
    let mut follower = follower(Some(lease("e1")));
    let following = PeerView { etag: None, ..view(PeerRole::Following, "") };
    for (view, s) in [(following, 101), (PeerView { process: "another".into(), ..view(PeerRole::Leading, "x") }, 103)] {
        follower.heard(&view, at(s));
        assert_eq!(follower.wish(at(s)), Wish::Look);
        sees(&mut follower, "e1", s);
        follower.heard(&view, at(s));
        waits(&follower, at(s), at(106));
        let known = follower.holder().unwrap().known;
        assert_eq!(known, Some((view.role, view.etag)), "so the next question waits for news");
    }
}

#[test]
fn a_differing_holder_in_the_store_wins_over_what_the_peer_says() {
    let mut follower = follower(Some(lease("e1")));
    follower.heard(&view(PeerRole::Leading, "e2"), at(101));
    let mut other = lease("e9");
    other.value.process = "somebody".into();
    follower.looked(Some(other), at(102), at(102));
    assert_eq!(follower.holder().unwrap().process, "somebody");
    follower.heard(&view(PeerRole::Leading, "e3"), at(103));
    assert_eq!(follower.seen().unwrap().lease.as_ref().unwrap().etag, ETag("e9".into()), "a late answer of the former");
}

#[test]
fn a_broken_link_or_a_late_renewal_makes_us_look_now_and_every_second() {
    let broken = |follower: &mut Follower| assert!(follower.link_broke(at(101)));
    let late = |follower: &mut Follower| {
        follower.heard(&PeerView { renewed_ago: Some(S(7)), ..view(PeerRole::Stalled, "e1") }, at(101));
    };
    for doubt in [&broken as &dyn Fn(&mut Follower), &late] {
        let mut follower = follower(Some(lease("e1")));
        doubt(&mut follower);
        assert_eq!(follower.wish(at(101)), Wish::Look);
        sees(&mut follower, "e1", 101);
        waits(&follower, at(101), at(102));
        assert_eq!(follower.wish(at(102)), Wish::Look);
    }
}

#[test]
fn a_renewal_ends_the_suspicion_unless_the_link_is_broken() {
    let mut follower = follower(Some(lease("e1")));
    follower.heard(&PeerView { renewed_ago: Some(S(7)), ..view(PeerRole::Leading, "e1") }, at(101));
    sees(&mut follower, "e2", 101);
    waits(&follower, at(101), at(107));
    assert!(follower.link_broke(at(102)));
    sees(&mut follower, "e3", 102);
    waits(&follower, at(102), at(103));
    // After a minute of it, with the holder alive, looks become rarer.
    sees(&mut follower, "e40", 162);
    waits(&follower, at(162), at(165));
    follower.heard(&view(PeerRole::Leading, "e41"), at(163));
    waits(&follower, at(163), at(169));
}

#[test]
fn a_holder_that_does_not_know_of_its_last_put_is_waited_for_once_not_for_ever() {
    let mut follower = follower(Some(lease("e1")));
    follower.heard(&view(PeerRole::Leading, "e1"), at(100));
    // Its put landed as e2, unknown to it; then it is cut off from the store and says e1 for ever.
    follower.heard(&PeerView { renewed_ago: Some(S(7)), ..view(PeerRole::Stalled, "e1") }, at(102));
    for s in 102..108 {
        sees(&mut follower, "e2", s);
        follower.heard(&PeerView { renewed_ago: Some(S(s)), ..view(PeerRole::Stalled, "e1") }, at(s));
    }
    sees(&mut follower, "e2", 108);
    bids(&follower, at(108), TakeOver::Expired);
}

#[test]
fn five_refusals_and_an_unchanged_lease_prove_the_holders_death() {
    let mut follower = follower(Some(lease("e1")));
    assert!(follower.holder().unwrap().provable);
    assert!(follower.link_broke(at(101)));
    sees(&mut follower, "e1", 101);
    follower.knocked("theirs", at(101), &ALL_REFUSED, at(101) + MS(600));
    assert_eq!(follower.wish(at(101) + MS(600)), Wish::Look, "the look before the knocks does not count");
    follower.looked(Some(lease("e1")), at(102), at(102));
    bids(&follower, at(102), TakeOver::ProofOfDeath);
}

#[test]
fn anything_but_five_refusals_proves_nothing() {
    let mut one_accepted = ALL_REFUSED;
    one_accepted[3] = Knock::Unknown;
    let cases: [(&str, &str, u64, &[Knock]); 4] = [
        ("one accepted", "theirs", 101, &one_accepted),
        ("only four", "theirs", 101, &ALL_REFUSED[..4]),
        ("of another process", "another", 101, &ALL_REFUSED),
        ("begun before the link broke", "theirs", 100, &ALL_REFUSED),
    ];
    for (name, process, began, knocks) in cases {
        let mut follower = follower(Some(lease("e1")));
        follower.link_broke(at(101));
        follower.knocked(process, at(began), knocks, at(102));
        sees(&mut follower, "e1", 102);
        assert!(matches!(follower.wish(at(102)), Wish::Wait { .. }), "{name}");
    }
    let mut mended = follower(Some(lease("e1")));
    mended.link_broke(at(101));
    mended.heard(&view(PeerRole::Leading, "e1"), at(101));
    mended.knocked("theirs", at(101), &ALL_REFUSED, at(102));
    sees(&mut mended, "e1", 102);
    waits(&mended, at(102), at(106));
}

#[test]
fn no_proof_where_the_address_is_not_the_holders_own() {
    let mut indirect = lease("e1");
    indirect.value.direct = false;
    let moving = Follower::new(own(), Some("10.0.0.2".parse().unwrap()));
    for (mut follower, lease) in [(Follower::new(own(), None), indirect), (moving, lease("e1"))] {
        follower.looked(Some(lease.clone()), at(100), at(100));
        assert!(!follower.holder().unwrap().provable);
        follower.link_broke(at(101));
        follower.knocked("theirs", at(101), &ALL_REFUSED, at(102));
        follower.looked(Some(lease), at(102), at(102));
        assert!(matches!(follower.wish(at(102)), Wish::Wait { .. }));
    }
}

#[test]
fn a_version_seen_since_the_link_broke_needs_knocks_of_its_own() {
    let mut follower = follower(Some(lease("e1")));
    assert!(follower.link_broke(at(101)));
    assert!(!follower.link_broke(at(101)), "one knocking at a time");
    sees(&mut follower, "e2", 102);
    follower.knocked("theirs", at(101), &ALL_REFUSED, at(103));
    sees(&mut follower, "e2", 103);
    waits(&follower, at(103), at(104));
    assert!(follower.link_broke(at(104)), "and may have them");
    follower.knocked("theirs", at(104), &ALL_REFUSED, at(105));
    sees(&mut follower, "e2", 105);
    bids(&follower, at(105), TakeOver::ProofOfDeath);
    sees(&mut follower, "e3", 106);
    assert!(matches!(follower.wish(at(106)), Wish::Wait { .. }), "a renewal after the proof undoes it");
}

#[test]
fn whoever_gave_up_stands_back_ten_seconds_unless_the_lease_stays_free_for_two() {
    let mut follower = Follower::new(own(), None).gave_up(at(100));
    follower.looked(Some(released("e1")), at(100), at(101));
    waits(&follower, at(101), at(103));
    bids(&follower, at(103), TakeOver::Released);
    let mut follower = Follower::new(own(), None).gave_up(at(100));
    follower.looked(Some(released("e1")), at(109), at(109));
    waits(&follower, at(109), at(110));
    bids(&follower, at(110), TakeOver::Released);
}
