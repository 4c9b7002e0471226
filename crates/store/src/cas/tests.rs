use futures::FutureExt as _;
use nstance_core::{
    ids::OperatorId,
    instance::{CertFact, CertPair, Delete, Registration},
    time::Timestamp,
};

use super::*;
use crate::{
    faulty::{Fault, FaultPlan},
    records::{
        certlog::CertlogRecord,
        groups::GroupEntry,
        nonce::NonceRecord,
        operator::{OperatorRecord, Revoked},
    },
    testing::{Bench, instance, shard},
};

fn registered(it: &Instance) -> Option<Instance> {
    it.registration.is_none().then(|| Instance {
        registration: Some(Registration {
            at: Timestamp::from_millis(5),
            public_key: vec![1],
            addresses: Default::default(),
            agent_version: "1".into(),
        }),
        ..it.clone()
    })
}

fn deleting(it: &Instance) -> Option<Instance> {
    it.delete.is_none().then(|| Instance {
        delete: Some(Delete {
            reason: "requested".into(),
            by: "test".into(),
            requested_at: Timestamp::from_millis(9),
            gone_at: None,
        }),
        ..it.clone()
    })
}

#[tokio::test(start_paused = true)]
async fn a_retried_put_that_already_landed_is_ours() {
    for faults in [
        vec![Fault::LostAfter],
        vec![Fault::PreconditionAfter],
        vec![Fault::LostBefore],
        vec![Fault::LostBefore, Fault::LostAfter],
        vec![Fault::Throttled, Fault::LostAfter],
    ] {
        let bench = Bench::new();
        let link = bench.link(1);
        let (records, guard) = (bench.records(link.clone(), 1), bench.guard(3));
        link.script_puts(faults.clone());
        let made = records.create_instance(&guard, &instance(1)).await.unwrap_or_else(|e| panic!("{faults:?}: {e:?}"));
        link.script_puts(faults.clone());
        let changed = records.update_instance(&guard, &made, registered).await.unwrap();
        let stored = records.read_instance(&made.value.group.tenant, &made.value.id).await.unwrap().unwrap();
        assert_eq!(stored, changed, "{faults:?}");
        assert_eq!(stored.value.epoch, Epoch(3));
    }
}

#[tokio::test(start_paused = true)]
async fn an_unclear_write_is_read_back_until_known() {
    let bench = Bench::new();
    let link = bench.link(1);
    let (records, guard) = (bench.records(link.clone(), 1), bench.guard(3));
    link.script_puts([Fault::LostAfter]);
    link.script_gets([Fault::Unreachable, Fault::Throttled, Fault::Unreachable]);
    records.create_instance(&guard, &instance(1)).await.unwrap();
    assert_eq!(link.calls().put, 1, "it was recognised, not repeated");
}

#[tokio::test(start_paused = true)]
async fn a_taken_key_is_told_with_what_is_there() {
    let bench = Bench::new();
    let guard = bench.guard(3);
    let (first, second) = (bench.records(bench.link(1), 1), bench.records(bench.link(2), 2));
    let made = first.create_instance(&guard, &instance(1)).await.unwrap();
    match second.create_instance(&guard, &instance(1)).await {
        Err(RecordError::Taken(existing)) => assert_eq!(*existing, made),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_change_is_folded_into_what_is_there() {
    let bench = Bench::new();
    let guard = bench.guard(3);
    let (first, second) = (bench.records(bench.link(1), 1), bench.records(bench.link(2), 2));
    let made = first.create_instance(&guard, &instance(1)).await.unwrap();
    second.update_instance(&guard, &made, registered).await.unwrap();
    let both = first.update_instance(&guard, &made, deleting).await.unwrap();
    assert!(both.value.registration.is_some() && both.value.delete.is_some());
    let nothing = second.update_instance(&guard, &made, registered).await.unwrap();
    assert_eq!(nothing, both, "a fact that is there stays, and nothing is written");
}

#[tokio::test(start_paused = true)]
async fn a_lower_epoch_never_overwrites_a_higher_one() {
    let bench = Bench::new();
    let (old, new) = (bench.guard(3), bench.guard(4));
    let records = bench.records(bench.link(1), 1);
    let made = records.create_instance(&old, &instance(1)).await.unwrap();
    let theirs = records.update_instance(&new, &made, registered).await.unwrap();
    let fenced = RecordError::Fenced {
        key: records.instance_key(&made.value.group.tenant, &made.value.id),
        ours: Epoch(3),
        theirs: Epoch(4),
    };
    assert_eq!(records.update_instance(&old, &made, deleting).await, Err(fenced.clone()));
    assert_eq!(records.update_instance(&old, &theirs, deleting).await, Err(fenced.clone()));
    assert_eq!(records.create_instance(&old, &instance(1)).await, Err(fenced));
    let groups = records.update_groups(&new, None, |it| Some(it.clone())).await.unwrap();
    let refused = records.update_groups(&old, Some(&groups), |it| Some(it.clone())).await;
    assert!(matches!(refused, Err(RecordError::Fenced { .. })));
    assert_eq!(records.load_groups().await.unwrap().unwrap().value.epoch, Epoch(4));
}

#[tokio::test(start_paused = true)]
async fn a_missing_record_can_be_put_back() {
    let bench = Bench::new();
    let (guard, records) = (bench.guard(3), bench.records(bench.link(1), 1));
    let made = records.create_instance(&guard, &instance(1)).await.unwrap();
    records.forget_instance(&guard, &made.value.group.tenant, &made.value.id).await.unwrap();
    let missing = records.update_instance(&guard, &made, registered).await;
    assert!(matches!(missing, Err(RecordError::Missing { .. })), "{missing:?}");
    let back = records.put_back_instance(&guard, &made).await.unwrap();
    records.update_instance(&guard, &back, registered).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_without_a_permit() {
    let bench = Bench::new();
    let link = bench.link(1);
    let records = bench.records(link.clone(), 1);
    let guard = Guard::new(Epoch(3), bench.clock.clone(), bench.clock.monotonic() + Duration::from_secs(5));
    link.set_unreachable(true);
    let stalled = records.create_instance(&guard, &instance(1)).await;
    assert_eq!(stalled, Err(RecordError::Stalled(LeaseStalled { epoch: Epoch(3) })), "it tried while it might");
    link.set_unreachable(false);
    let n_puts = link.calls().put;
    assert!(1 < n_puts);
    let groups = records.update_groups(&guard, None, |it| Some(it.clone())).await;
    assert!(matches!(groups, Err(RecordError::Stalled(_))));
    let forgotten = records.forget_instance(&guard, &instance(1).group.tenant, &instance(1).id).await;
    assert!(matches!(forgotten, Err(RecordError::Stalled(_))));
    assert_eq!((link.calls().put, link.calls().delete), (n_puts, 0));
}

#[tokio::test(start_paused = true)]
async fn patience_ends_and_says_whether_the_write_may_have_landed() {
    let bench = Bench::new();
    let link = bench.link(1);
    let guard = bench.guard(3);
    let records = bench.records(link.clone(), 1).with_patience(Patience::Tries(3));
    link.set_unreachable(true);
    let error = records.create_instance(&guard, &instance(1)).await.unwrap_err();
    assert!(!error.is_ambiguous() && error.next() == Next::Retry, "{error:?}");
    assert_eq!(link.calls().put, 3);
    link.set_unreachable(false);
    link.script_puts([Fault::LostAfter]);
    link.script_gets([Fault::Unreachable; 9]);
    let error = records.create_instance(&guard, &instance(2)).await.unwrap_err();
    assert!(error.is_ambiguous(), "it landed, and nobody could say so: {error:?}");
    link.set_unreachable(true);
    let before = bench.clock.monotonic();
    let error = records.within(Duration::from_secs(2)).create_instance(&guard, &instance(3)).await.unwrap_err();
    assert!(matches!(error, RecordError::Store(_)));
    assert!(bench.clock.monotonic().since(before) <= Duration::from_secs(2));
    link.set_unreachable(false);
    link.script_gets([Fault::None; 0]);
    link.script_puts([Fault::Denied]);
    let denied = records.with_patience(Patience::Guard).create_instance(&guard, &instance(4)).await.unwrap_err();
    assert!(matches!(denied, RecordError::Store(_)), "a permission problem is told at once");
}

#[tokio::test(start_paused = true)]
async fn a_change_that_never_gets_through_ends_busy() {
    let bench = Bench::new();
    let guard = bench.guard(3);
    let records = bench.records(bench.link(1), 1);
    let made = records.create_instance(&guard, &instance(1)).await.unwrap();
    let bucket = bench.bucket.clone();
    let key = records.instance_key(&made.value.group.tenant, &made.value.id);
    let busy = records
        .update_instance(&guard, &made, |it| {
            // Somebody is always a moment earlier.
            let there = bucket.get(&key).now_or_never().unwrap().unwrap();
            bucket.put(&key, there.body, Condition::Match(there.etag)).now_or_never().unwrap().unwrap();
            registered(it)
        })
        .await;
    assert!(matches!(busy, Err(RecordError::Busy { .. })), "{busy:?}");
}

#[tokio::test(start_paused = true)]
async fn groups_are_made_changed_and_put_back() {
    let bench = Bench::new();
    let (guard, records) = (bench.guard(3), bench.records(bench.link(1), 1));
    assert_eq!(records.load_groups().await.unwrap(), None);
    let web = instance(1).group;
    let sized = |size: u32| {
        let web = web.clone();
        move |it: &GroupsFile| {
            let mut it = it.clone();
            it.groups.insert(web.clone(), GroupEntry { size: Some(size), ..GroupEntry::default() });
            Some(it)
        }
    };
    let first = records.update_groups(&guard, None, sized(3)).await.unwrap();
    let second = records.update_groups(&guard, Some(&first), sized(5)).await.unwrap();
    assert_eq!(second.value.groups[&web].size, Some(5));
    // Whoever believes that there is none, or knows an older one, changes the one that is there.
    let third = records.update_groups(&guard, None, sized(6)).await.unwrap();
    assert_eq!(records.load_groups().await.unwrap().unwrap(), third);
    let fourth = records.update_groups(&guard, Some(&first), sized(7)).await.unwrap();
    assert_eq!(fourth.value.groups[&web].size, Some(7));
    bench.bucket.delete(&records.groups_key()).await.unwrap();
    let missing = records.update_groups(&guard, Some(&fourth), sized(8)).await;
    assert!(matches!(missing, Err(RecordError::Missing { .. })));
    let back = records.put_back_groups(&guard, &fourth).await.unwrap();
    assert_eq!(back.value, fourth.value);
}

#[tokio::test(start_paused = true)]
async fn a_corrupt_record_is_an_error_and_stays() {
    let bench = Bench::new();
    let (guard, records) = (bench.guard(3), bench.records(bench.link(1), 1));
    let key = records.groups_key();
    bench.bucket.put(&key, b"{ \"version\": 1,\n oops".to_vec(), Condition::Create).await.unwrap();
    let error = records.load_groups().await.unwrap_err();
    assert!(matches!(error, RecordError::Corrupt { line: 2, .. }), "{error:?}");
    assert!(records.update_groups(&guard, None, |it| Some(it.clone())).await.is_err());
    assert_eq!(bench.bucket.get(&key).await.unwrap().body, b"{ \"version\": 1,\n oops");
}

#[tokio::test(start_paused = true)]
async fn a_record_beyond_its_limit_is_refused() {
    let bench = Bench::new();
    let (guard, records) = (bench.guard(3), bench.records(bench.link(1), 1));
    let huge = Instance { template: "x".repeat(70_000), ..instance(1) };
    let error = records.create_instance(&guard, &huge).await.unwrap_err();
    assert_eq!(error.next(), Next::Fix, "{error:?}");
}

fn nonce(key: &str) -> NonceRecord {
    NonceRecord {
        jti: "00ff".into(),
        kind: "operator".into(),
        subject: "opr".into(),
        tenant: "default".parse().unwrap(),
        public_key_sha256: key.into(),
        consumed_at: Timestamp::from_millis(1),
        expires_at: Timestamp::from_millis(2),
    }
}

#[tokio::test(start_paused = true)]
async fn a_nonce_is_consumed_once_whatever_the_network_does() {
    for faults in [vec![], vec![Fault::LostAfter], vec![Fault::PreconditionAfter], vec![Fault::LostBefore]] {
        let bench = Bench::new();
        let link = bench.link(1);
        link.script_puts(faults);
        let (guard, first) = (bench.guard(3), bench.records(link, 1));
        let second = bench.records(bench.link(2), 2);
        assert!(matches!(first.create_nonce(&guard, &nonce("mine")).await.unwrap(), Created::New(_)));
        // Another shard's leader, in an epoch of its own.
        match second.create_nonce(&bench.guard(1), &nonce("other")).await.unwrap() {
            Created::Existing(there) => assert_eq!(there.value.public_key_sha256, "mine"),
            other => panic!("{other:?}"),
        }
    }
}

fn operator(n: u8, tenant: &str) -> OperatorRecord {
    let at = Timestamp::from_millis(1);
    let current = CertFact { serial: "aa".into(), issuer: "fp".into(), not_before: at, not_after: at };
    OperatorRecord {
        operator_id: OperatorId::new([n; 16]),
        tenant: tenant.parse().unwrap(),
        cluster: "c".parse().unwrap(),
        public_key: vec![1, 2],
        cert: CertPair { current, previous: None },
        registered_at: at,
        nonce_jti: Some("00ff".into()),
        renewed_at: None,
        rejoin: None,
        revoked: None,
    }
}

#[tokio::test(start_paused = true)]
async fn operators_are_kept_per_tenant_and_changed_from_every_shard() {
    let bench = Bench::new();
    let records = bench.records(bench.link(1), 1);
    let (ours, theirs) = (bench.guard(3), bench.guard(9));
    let Created::New(made) = records.create_operator(&theirs, &operator(1, "a")).await.unwrap() else { panic!("new") };
    assert!(matches!(records.create_operator(&ours, &operator(1, "a")).await.unwrap(), Created::Existing(_)));
    records.create_operator(&ours, &operator(2, "a")).await.unwrap();
    records.create_operator(&ours, &operator(3, "ab")).await.unwrap();
    let revoke = |it: &OperatorRecord| {
        let revoked = Revoked { at: Timestamp::from_millis(5), by: "test".into(), reason: "lost".into() };
        Some(OperatorRecord { revoked: Some(revoked), ..it.clone() })
    };
    // Another shard's epoch is higher than ours, and that means nothing here.
    let revoked = records.update_operator(&ours, &made, revoke).await.unwrap();
    assert_eq!(records.refresh_operator(&made).await.unwrap(), Some(revoked.clone()), "a change is seen");
    assert_eq!(records.refresh_operator(&revoked).await.unwrap(), Some(revoked.clone()));
    bench.bucket.put("cluster/operator/a.broken.json", b"{".to_vec(), Condition::Create).await.unwrap();
    let list = records.list_operators(&"a".parse().unwrap()).await.unwrap();
    assert_eq!(
        list.operators.iter().map(|it| it.value.operator_id).collect::<Vec<_>>(),
        [1, 2].map(|n| OperatorId::new([n; 16]))
    );
    assert_eq!(list.problems.len(), 1, "what does not parse is told");
    let (tenant, id) = (&made.value.tenant, &made.value.operator_id);
    records.delete_operator(Fence::Epoch(Epoch(0)), tenant, id).await.unwrap();
    assert_eq!(records.refresh_operator(&revoked).await.unwrap(), None);
    assert_eq!(records.read_operator(tenant, id).await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn certlog_entries_of_one_moment_get_names_of_their_own() {
    let bench = Bench::new();
    let (guard, records) = (bench.guard(3), bench.records(bench.link(1), 1));
    let entry = CertlogRecord {
        cluster: "c".parse().unwrap(),
        shard: Some(shard()),
        tenant: None,
        subject_id: "s1".into(),
        issued_at: Timestamp::from_millis(1_700_000_000_007),
        certificates: vec![],
    };
    let first = records.write_certlog(&guard, &entry).await.unwrap();
    let second = records.write_certlog(Fence::Epoch(Epoch(0)), &entry).await.unwrap();
    assert_eq!(first, "shard/a/certlog/_system.20231114221320007.s1.json");
    assert_eq!(second, "shard/a/certlog/_system.20231114221320008.s1.json");
}

#[tokio::test(start_paused = true)]
async fn a_stormy_store_loses_no_acknowledged_write() {
    for seed in 0..40 {
        let bench = Bench::new();
        let (guard, link) = (bench.guard(3), bench.link(seed));
        link.set_plan(FaultPlan {
            max_delay: Duration::from_millis(50),
            lost_before: 150,
            lost_after: 150,
            precondition_after: 100,
            throttled: 100,
            failed_reads: 200,
            ..FaultPlan::default()
        });
        let records = bench.records(link.clone(), seed);
        let mut known = records.create_instance(&guard, &instance(1)).await.unwrap_or_else(|e| panic!("{seed}: {e:?}"));
        known = records.update_instance(&guard, &known, registered).await.unwrap();
        known = records.update_instance(&guard, &known, deleting).await.unwrap();
        let stored = bench.bucket.get(&records.instance_key(&known.value.group.tenant, &known.value.id)).await.unwrap();
        assert_eq!(stored.etag, known.etag, "seed {seed}");
        assert!(known.value.registration.is_some() && known.value.delete.is_some());
    }
}
