//! The cloud in memory does what it is told to, and says so afterwards.

use nstance_core::{
    ids::Epoch,
    ports::provider::{
        Bootstrap, CreatePace, Deadlines, Image, ImageQuery, Landed, LeaderNetwork, LoadBalancer, Scope,
    },
    term::Guard,
    value::{Object, Value},
};
use nstance_rt::{clock::TokioClock, entropy::SeededEntropy};

use super::*;

const T0: Timestamp = Timestamp::from_millis(1_700_000_000_000);

fn owner(shard: &str) -> Owner {
    Owner { cluster: "dev".parse().unwrap(), shard: shard.parse().unwrap() }
}

fn fake(options: FakeOptions) -> FakeProvider {
    let clock = Arc::new(TokioClock::starting_at(T0));
    FakeProvider::new(owner("dev-1"), clock, Arc::new(SeededEntropy::new(1)), options)
}

fn permit(epoch: u64) -> Permit {
    Guard::unfenced(Epoch(epoch), Arc::new(TokioClock::starting_at(T0))).permit().unwrap()
}

fn instance(n: u8) -> InstanceId {
    InstanceId::new("knc".parse().unwrap(), [n; 16])
}

fn spec(n: u8) -> VmSpec {
    let Owner { cluster, shard } = owner("dev-1");
    VmSpec {
        instance: instance(n),
        tags: Tags {
            cluster,
            shard,
            instance: instance(n),
            tenant: "default".parse().unwrap(),
            group: if n.is_multiple_of(2) { "even" } else { "odd" }.parse().unwrap(),
            on_demand: false,
            epoch: Epoch(1),
            template: "knc".into(),
            infra_hash: "00".into(),
        },
        instance_type: None,
        subnet: format!("subnet-{n}"),
        args: Object::new(),
        userdata: None,
        bootstrap: Bootstrap {
            ca_bundle_pem: String::new(),
            nonce_jwt: String::new(),
            registration_addr: String::new(),
            agent_addr: String::new(),
        },
        reserved_id: None,
    }
}

fn of(n: u8) -> VmRef {
    VmRef { instance: instance(n), provider_id: None }
}

async fn create(fake: &FakeProvider, n: u8) -> Result<Vm, ErrorClass> {
    fake.create(permit(1), &spec(n)).await.map_err(|error| error.class)
}

async fn seen(fake: &FakeProvider, n: u8) -> Option<Seen> {
    match fake.describe(&[of(n)]).await.remove(0) {
        Described::Vm(vm) => Some(vm.seen),
        Described::NotFound => None,
        Described::Unknown(_) => Some(Seen::Unknown),
    }
}

async fn pass(seconds: u64) {
    tokio::time::advance(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn every_call_is_logged_with_epoch_and_time() {
    let fake = fake(FakeOptions { latency: Duration::from_secs(2), ..FakeOptions::default() });
    fake.create(permit(7), &spec(1)).await.unwrap();
    fake.script(Rule::once(Op::Delete, When::Always, Outcome::Refuse(ErrorClass::Auth)));
    fake.delete(permit(8), &of(1), DeleteHow::Now).await.unwrap_err();
    fake.list().await.unwrap();
    let log: Vec<_> =
        fake.calls().into_iter().map(|it| (it.op, it.n, it.epoch, it.at.since(T0), it.landed, it.answer)).collect();
    let second = Duration::from_secs;
    assert_eq!(
        log,
        [
            (Op::Create, 1, Some(Epoch(7)), second(0), true, Some(Ok(()))),
            (Op::Delete, 1, Some(Epoch(8)), second(2), false, Some(Err(ErrorClass::Auth))),
            (Op::List, 1, None, second(4), false, Some(Ok(()))),
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_call_lands_half_way() {
    let fake = fake(FakeOptions { latency: Duration::from_secs(2), ..FakeOptions::default() });
    let within = |millis, n| tokio::time::timeout(Duration::from_millis(millis), create(&fake, n));
    assert!(within(900, 1).await.is_err());
    assert!(within(1100, 2).await.is_err());
    assert_eq!(fake.standing(), [instance(2)]);
    let calls = fake.calls();
    assert_eq!(calls.iter().map(|it| (it.landed, it.answer)).collect::<Vec<_>>(), [(false, None), (true, None)]);
}

#[tokio::test(start_paused = true)]
async fn faults_come_by_call_instance_group_and_subnet() {
    use ErrorClass::*;
    let fake = fake(FakeOptions::default());
    fake.script(Rule::once(Op::Create, When::Call(2), Outcome::Refuse(Quota)));
    fake.script(Rule::always(Op::Create, When::Instance(instance(3)), Outcome::Refuse(Auth)));
    fake.script(Rule::once(Op::Create, When::Group(spec(4).tags.group_ref()), Outcome::LandThenFail(Ambiguous)));
    fake.script(Rule::always(Op::Create, When::Subnet("subnet-5".into()), Outcome::Refuse(Capacity)));
    fake.script(Rule::always(Op::Create, When::Instance(instance(7)), Outcome::Delay(Duration::from_secs(9))));
    assert!(create(&fake, 1).await.is_ok());
    assert_eq!(create(&fake, 1).await.unwrap_err(), Quota, "the second call");
    assert_eq!(create(&fake, 3).await.unwrap_err(), Auth);
    assert_eq!(create(&fake, 4).await.unwrap_err(), Ambiguous);
    assert_eq!(create(&fake, 5).await.unwrap_err(), Capacity);
    assert!(create(&fake, 6).await.is_ok(), "the group's rule is used up");
    let before = tokio::time::Instant::now();
    assert!(create(&fake, 7).await.is_ok());
    assert_eq!(before.elapsed(), Duration::from_secs(9));
    assert_eq!(fake.standing(), [instance(1), instance(4), instance(6), instance(7)], "what landed stands");
    let mut args = spec(8);
    args.args.insert("X", Value::Null);
    assert_eq!(fake.create(permit(1), &args).await.unwrap_err().class, Invalid);
    let mut other = spec(1);
    other.instance_type = Some("large".into());
    assert_eq!(fake.create(permit(1), &other).await.unwrap_err().class, Ambiguous, "the same id, another request");
}

#[tokio::test(start_paused = true)]
async fn a_vm_lives_through_its_times_and_listings_lag_behind() {
    let fake = fake(FakeOptions {
        boot_time: Duration::from_secs(10),
        stop_time: Duration::from_secs(5),
        delete_time: Duration::from_secs(20),
        visibility_delay: Duration::from_secs(2),
        listing_delay: Duration::from_secs(4),
        ..FakeOptions::default()
    });
    let listed = async || fake.list().await.unwrap().vms.first().map(|vm| vm.seen);
    assert_eq!(create(&fake, 1).await.unwrap().seen, Seen::Pending);
    assert_eq!((seen(&fake, 1).await, listed().await), (None, None));
    pass(2).await;
    assert_eq!((seen(&fake, 1).await, listed().await), (Some(Seen::Pending), None));
    pass(8).await;
    assert_eq!((seen(&fake, 1).await, listed().await), (Some(Seen::Running), Some(Seen::Pending)));
    fake.stop(instance(1));
    pass(4).await;
    assert_eq!((seen(&fake, 1).await, listed().await), (Some(Seen::Stopping), Some(Seen::Stopping)));
    pass(1).await;
    assert_eq!(seen(&fake, 1).await, Some(Seen::Stopped));
    fake.delete(permit(1), &of(1), DeleteHow::Graceful).await.unwrap();
    assert_eq!(seen(&fake, 1).await, Some(Seen::Deleting));
    pass(20).await;
    assert_eq!((seen(&fake, 1).await, listed().await), (Some(Seen::Gone), Some(Seen::Deleting)));
    assert_eq!(create(&fake, 1).await.unwrap_err(), ErrorClass::NotFound, "its token was used");
    pass(4).await;
    assert_eq!(listed().await, None);
    fake.clean(permit(1), &of(1)).await.unwrap();
    assert_eq!(seen(&fake, 1).await, None);
}

#[tokio::test(start_paused = true)]
async fn hosts_go_down_and_spot_vms_are_taken_back() {
    let fake = fake(FakeOptions { hosts: 2, ..FakeOptions::default() });
    let hosts: Vec<_> = [create(&fake, 1).await, create(&fake, 2).await].map(|vm| vm.unwrap().host.unwrap()).into();
    assert_eq!(hosts, ["host-0", "host-1"]);
    fake.host_down("host-0", true);
    assert_eq!(seen(&fake, 1).await, Some(Seen::HostDown));
    let refused = fake.delete(permit(1), &of(1), DeleteHow::Now).await.unwrap_err();
    assert_eq!(refused.class, ErrorClass::Unavailable);
    assert_eq!(create(&fake, 3).await.unwrap().host.unwrap(), "host-1");
    fake.host_down("host-1", true);
    assert_eq!(create(&fake, 4).await.unwrap_err(), ErrorClass::Capacity);
    fake.host_down("host-1", false);

    assert!(fake.reclaim(instance(2), Duration::from_secs(120)));
    assert_eq!(fake.notice_of(instance(2)), Some(T0.plus(Duration::from_secs(120))));
    pass(119).await;
    assert_eq!(seen(&fake, 2).await, Some(Seen::Running));
    pass(1).await;
    assert_eq!(seen(&fake, 2).await, Some(Seen::Gone));
}

#[tokio::test(start_paused = true)]
async fn limits_protection_and_outages_hold() {
    let fake = fake(FakeOptions {
        subnet_capacity: [("subnet-1".to_owned(), 0)].into(),
        throttle_rate: 3,
        images: vec![
            ("al-1".into(), "img-1".into()),
            ("al-2".into(), "img-2".into()),
            ("deb-1".into(), "img-3".into()),
        ],
        ..FakeOptions::default()
    });
    assert_eq!(create(&fake, 1).await.unwrap_err(), ErrorClass::Capacity);
    assert!(create(&fake, 2).await.is_ok());
    fake.protect(instance(2), true);
    assert_eq!(fake.delete(permit(1), &of(2), DeleteHow::Now).await.unwrap_err().class, ErrorClass::Invalid);
    let throttled = fake.probe().await.unwrap_err();
    assert_eq!((throttled.class, throttled.retry_after), (ErrorClass::Throttled, Some(Duration::from_secs(1))));
    assert_eq!(seen(&fake, 2).await, Some(Seen::Unknown), "a throttled look proves nothing");
    pass(1).await;
    let query = |ascending| ImageQuery {
        filters: [("name".to_owned(), vec!["al-*".to_owned()])].into(),
        owners: vec![],
        by_name: false,
        ascending,
    };
    assert_eq!(
        fake.images().unwrap().resolve_image(&query(false)).await.unwrap().map(|it| it.id).as_deref(),
        Some("img-2")
    );
    assert_eq!(
        fake.images().unwrap().resolve_image(&query(true)).await.unwrap().map(|it| it.id).as_deref(),
        Some("img-1")
    );
    pass(1).await;
    fake.publish_image("al-3", "img-4");
    assert_eq!(
        fake.images().unwrap().resolve_image(&query(false)).await.unwrap().map(|it| it.id).as_deref(),
        Some("img-4")
    );
    fake.withdraw_image("al-3");
    assert_eq!(
        fake.images().unwrap().resolve_image(&query(false)).await.unwrap().map(|it| it.id).as_deref(),
        Some("img-2")
    );
    let none = ImageQuery { filters: [("name".to_owned(), vec!["bsd-*".to_owned()])].into(), ..query(false) };
    assert_eq!(fake.images().unwrap().resolve_image(&none).await.unwrap(), None);
    fake.outage(true);
    assert_eq!(create(&fake, 3).await.unwrap_err(), ErrorClass::Unavailable);
    pass(5).await;
    assert_eq!(fake.list().await.unwrap_err().class, ErrorClass::Unavailable);
    assert_eq!(seen(&fake, 2).await, Some(Seen::Unknown));
    fake.outage(false);
    assert_eq!(seen(&fake, 2).await, Some(Seen::Running));
}

#[tokio::test(start_paused = true)]
async fn strangers_stand_beside_our_vms() {
    let fake = fake(FakeOptions::default());
    create(&fake, 1).await.unwrap();
    let mut tags = spec(2).tags;
    tags.shard = "dev-2".parse().unwrap();
    fake.add_foreign("theirs", Some(instance(2)), Some(tags));
    fake.add_foreign("nobodys", None, None);
    assert_eq!(fake.vms().len(), 3);
    assert_eq!(fake.list().await.unwrap().vms.len(), 1);
    assert_eq!(fake.with_owner(owner("dev-2")).list().await.unwrap().vms.len(), 1);
    fake.kill(instance(1));
    assert_eq!(fake.standing(), [instance(2)]);
}

#[tokio::test(start_paused = true)]
async fn options_are_read_from_a_config() {
    let mut options = Object::new();
    options.insert("create_latency", Value::from("500ms"));
    options.insert("page_size", Value::Int(7));
    options.insert("idempotent_create", Value::Bool(false));
    options.insert("create_burst", Value::Int(5));
    options.insert("create_refill", Value::from("500ms"));
    options.insert("lb_warmup", Value::from("30s"));
    options.insert("places", Value::Int(2));
    let read = FakeOptions::from_options(&options).unwrap();
    assert_eq!(read.latency_of(Op::Create), Duration::from_millis(500));
    assert_eq!((read.page_size, read.idempotent_create, read.places), (7, false, 2));
    assert_eq!(read.create_pace, CreatePace { burst: 5, refill: Duration::from_millis(500) });
    assert_eq!(read.lb_warmup, Duration::from_secs(30));
    options.insert("page_sizes", Value::Int(7));
    assert_eq!(FakeOptions::from_options(&options).unwrap_err().problems.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_cloud_with_a_journal_outlives_its_process_and_hears_of_deaths() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let options = FakeOptions { journal: Some(path.clone()), ..FakeOptions::default() };
    let cloud = fake(options.clone());
    let mut made = Vec::new();
    for n in 1..=3 {
        made.push(cloud.create(permit(1), &spec(n)).await.unwrap().vm);
    }
    let mut outside = journal::Journal::open(&path).unwrap();
    let lines = outside.news().unwrap();
    let asked = |line: &journal::Line| matches!(line, journal::Line::Made(it) if 0 < it.asked_nanos);
    assert!(lines.len() == 3 && lines.iter().all(asked), "{lines:?}");

    outside.append(&[journal::Line::Gone(instance(2).to_string())]).unwrap();
    let seen = |described: Vec<Described>| -> Vec<Seen> {
        described.into_iter().map(|it| if let Described::Vm(vm) = it { vm.seen } else { Seen::Unknown }).collect()
    };
    assert_eq!(seen(cloud.describe(&made).await), [Seen::Running, Seen::Gone, Seen::Running]);
    cloud.delete(permit(1), &made[0], DeleteHow::Now).await.unwrap();

    let after = fake(options);
    let listed: Vec<InstanceId> = after.list().await.unwrap().vms.iter().map(|it| it.vm.instance).collect();
    assert_eq!(listed, [instance(3)]);
    assert_eq!(seen(after.describe(&made).await), [Seen::Gone, Seen::Gone, Seen::Running]);
    let again = after.create(permit(2), &spec(3)).await.unwrap();
    assert_eq!(again.vm, made[2], "asked for twice, there is one");
    let fourth = after.create(permit(2), &spec(4)).await.unwrap();
    assert!(made.iter().all(|it| it.provider_id != fourth.vm.provider_id));
}

fn reserve_spec(n: u8) -> ReserveSpec {
    let VmSpec { instance, tags, instance_type, subnet, args, .. } = spec(n);
    ReserveSpec { instance, tags, instance_type, subnet, args }
}

async fn described(fake: &FakeProvider, n: u8) -> Described {
    fake.describe(&[of(n)]).await.remove(0)
}

fn balancer(key: &str) -> LoadBalancer {
    LoadBalancer { key: key.parse().unwrap(), spec: Object::new() }
}

fn ended(class: ErrorClass) -> Ended {
    Ended { class, code: Some("Server.NoRoom".into()), message: "there is no room".into() }
}

#[tokio::test(start_paused = true)]
async fn answers_without_tags_prove_nothing_and_end_nothing() {
    let fake = fake(FakeOptions::default());
    create(&fake, 1).await.unwrap();
    create(&fake, 2).await.unwrap();
    let tags_of_1 = async || fake.list().await.unwrap().vms[0].tags.clone();
    for op in [Op::Describe, Op::List, Op::Delete] {
        fake.script(Rule::once(op, When::Instance(instance(1)), Outcome::HideTags));
    }
    let both = fake.describe(&[of(1), of(2)]).await;
    let Described::Unknown(error) = &both[0] else { panic!("{both:?}") };
    assert_eq!((error.class, error.landed), (ErrorClass::Unavailable, Landed::No));
    assert!(matches!(&both[1], Described::Vm(vm) if vm.tags.complete().is_some()), "only one of them lacks its tags");
    let listed: Vec<VmTags> = fake.list().await.unwrap().vms.into_iter().map(|vm| vm.tags).collect();
    assert_eq!(listed, [VmTags::Absent, VmTags::Complete(spec(2).tags)]);
    let refused = fake.delete(permit(1), &of(1), DeleteHow::Now).await.unwrap_err();
    assert_eq!(refused.class, ErrorClass::Unavailable);
    assert_eq!(seen(&fake, 1).await, Some(Seen::Running), "the next answer has them again");
    assert_eq!(tags_of_1().await, VmTags::Complete(spec(1).tags));

    fake.show_tags(instance(1), ShownTags::Foreign);
    assert_eq!(tags_of_1().await, VmTags::Foreign);
    fake.delete(permit(1), &of(1), DeleteHow::Now).await.unwrap();
    assert_eq!(fake.standing(), [instance(1), instance(2)], "a stranger is not touched");
    fake.show_tags(instance(1), ShownTags::Absent);
    assert_eq!(seen(&fake, 1).await, Some(Seen::Unknown));
    fake.show_tags(instance(1), ShownTags::AsTheyAre);
    fake.delete(permit(1), &of(1), DeleteHow::Now).await.unwrap();
    assert_eq!(fake.standing(), [instance(2)]);
}

#[tokio::test(start_paused = true)]
async fn a_vm_that_the_cloud_ends_says_why() {
    let fake = fake(FakeOptions { boot_time: Duration::from_secs(10), ..FakeOptions::default() });
    let end_of = |n: u8| EndOf::Choice { subnet: format!("subnet-{n}"), instance_type: None };
    let full =
        ScriptedEnd { of: end_of(1), after: Duration::from_secs(3), times: 1, ended: ended(ErrorClass::Capacity) };
    fake.script_end(full);
    let of_one = EndOf::Instance(instance(2));
    let late = ScriptedEnd { of: of_one, after: Duration::from_secs(20), times: 1, ended: ended(ErrorClass::Quota) };
    fake.script_end(late);
    for n in 1..=3 {
        assert_eq!(create(&fake, n).await.unwrap().ended, None);
    }
    let told = async |n| match described(&fake, n).await {
        Described::Vm(vm) => (vm.seen, vm.ended),
        other => panic!("{other:?}"),
    };
    assert_eq!(told(1).await, (Seen::Pending, None));
    pass(3).await;
    assert_eq!(told(1).await, (Seen::Gone, Some(ended(ErrorClass::Capacity))), "it never ran");
    pass(7).await;
    assert_eq!((told(2).await, told(3).await), ((Seen::Running, None), (Seen::Running, None)));
    pass(10).await;
    assert_eq!(told(2).await, (Seen::Gone, Some(ended(ErrorClass::Quota))));

    fake.end(instance(3), Duration::from_secs(5), &ended(ErrorClass::Invalid));
    assert_eq!(told(3).await, (Seen::Running, None));
    fake.delete(permit(1), &of(3), DeleteHow::Now).await.unwrap();
    assert_eq!(told(3).await, (Seen::Gone, None), "we ended it before");
    let mut other = spec(4);
    other.subnet = "subnet-1".into();
    fake.create(permit(1), &other).await.unwrap();
    pass(10).await;
    assert_eq!(told(4).await, (Seen::Running, None), "the scripted end is used up");
}

#[tokio::test(start_paused = true)]
async fn a_refusal_has_the_scope_and_the_landing_it_is_scripted_with() {
    let fake = fake(FakeOptions::default());
    let quota = ProviderError::new("", ErrorClass::Quota, "32 of 32 vCPUs").with_scope(Scope::Choice).with_code("Vcpu");
    fake.script(Rule::once(Op::Create, When::Always, Outcome::RefuseWith(quota.clone())));
    let error = fake.create(permit(1), &spec(1)).await.unwrap_err();
    assert_eq!(error, ProviderError { op: "create", ..quota });
    assert!(fake.standing().is_empty());
    let left = ProviderError::new("", ErrorClass::Capacity, "could not clean up").with_landed(Landed::Maybe);
    fake.script(Rule::once(Op::Create, When::Always, Outcome::LandThenFailWith(left)));
    let error = fake.create(permit(1), &spec(1)).await.unwrap_err();
    assert_eq!((error.class, error.landed, error.scope), (ErrorClass::Capacity, Landed::Maybe, Scope::Choice));
    assert_eq!(fake.standing(), [instance(1)]);
}

#[tokio::test(start_paused = true)]
async fn an_answered_delete_may_land_later() {
    let fake = fake(FakeOptions { delete_time: Duration::from_secs(5), ..FakeOptions::default() });
    create(&fake, 1).await.unwrap();
    fake.script(Rule::always(Op::Delete, When::Always, Outcome::LandLater(Duration::from_secs(10))));
    for (wait, is) in [(0, Seen::Running), (9, Seen::Running), (1, Seen::Deleting), (5, Seen::Gone)] {
        pass(wait).await;
        fake.delete(permit(1), &of(1), DeleteHow::Now).await.unwrap();
        assert_eq!(seen(&fake, 1).await, Some(is));
    }
}

#[tokio::test(start_paused = true)]
async fn a_vm_that_we_may_not_see_is_not_listed_and_not_absent() {
    let fake = fake(FakeOptions::default());
    create(&fake, 1).await.unwrap();
    fake.forbid(instance(1), true);
    let listing = fake.list().await.unwrap();
    assert_eq!((listing.vms.len(), listing.missing), (0, None));
    let Described::Unknown(error) = described(&fake, 1).await else { panic!("that is no absence") };
    assert_eq!(error.class, ErrorClass::Auth);
    fake.forbid(instance(1), false);
    assert_eq!(fake.list().await.unwrap().vms.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn places_are_given_in_order_and_numbers_once() {
    let options = FakeOptions { reserve_numbers: true, places: 1, ..FakeOptions::default() };
    let cloud = fake(options);
    let first = cloud.reserve(&reserve_spec(1)).await.unwrap();
    assert_eq!((first.id.as_deref(), first.holds_places(), cloud.free_places()), (Some("100"), true, Some(0)));
    let (asks_second, asks_third) = (reserve_spec(2), reserve_spec(3));
    let (mut second, mut third) = (cloud.reserve(&asks_second), cloud.reserve(&asks_third));
    assert!(futures::poll!(&mut second).is_pending() && futures::poll!(&mut third).is_pending());
    drop(first);
    assert!(futures::poll!(&mut third).is_pending(), "it is not its turn");
    let second = second.await.unwrap();
    assert_eq!(second.id.as_deref(), Some("101"));
    drop(second);
    assert_eq!(third.await.unwrap().id.as_deref(), Some("102"));
    assert_eq!(cloud.free_places(), Some(1));

    let successor = cloud.restarted();
    successor.restore(&["102".to_owned(), "unreadable".to_owned()]);
    assert_eq!(successor.reserve(&reserve_spec(4)).await.unwrap().id.as_deref(), Some("103"));
    let careless = cloud.restarted();
    let mut taken = spec(5);
    taken.reserved_id = careless.reserve(&reserve_spec(5)).await.unwrap().id;
    cloud.create(permit(1), &taken).await.unwrap();
    let again = VmSpec { reserved_id: taken.reserved_id, ..spec(6) };
    let refused = cloud.create(permit(1), &again).await.unwrap_err();
    assert_eq!((refused.class, refused.landed), (ErrorClass::Throttled, Landed::No), "a taken id is a refusal");

    cloud.script(Rule::once(Op::Reserve, When::Instance(instance(7)), Outcome::Refuse(ErrorClass::Capacity)));
    assert_eq!(cloud.reserve(&reserve_spec(7)).await.unwrap_err().class, ErrorClass::Capacity);
    assert!(cloud.calls().iter().all(|call| call.op != Op::Reserve), "it is no call to the cloud");
}

#[tokio::test(start_paused = true)]
async fn a_member_comes_in_then_drains_out() {
    let warmup = Duration::from_secs(30);
    let fake = fake(FakeOptions {
        lb_warmup: warmup,
        lb_drain_time: Duration::from_secs(10),
        lb_targets: 2,
        ..FakeOptions::default()
    });
    let made = create(&fake, 1).await.unwrap().vm;
    let (lb, balancers) = (balancer("web"), fake.balancers().unwrap());
    let state = async || match balancers.lb_members(&lb).await.unwrap().as_slice() {
        [] => None,
        [member] => {
            assert_eq!(member.vm, made);
            Some(member.state)
        }
        more => panic!("{more:?}"),
    };
    balancers.lb_register(permit(1), &lb, &of(1)).await.unwrap();
    assert_eq!(state().await, Some(LbMemberState::Coming));
    pass(20).await;
    balancers.lb_register(permit(1), &lb, &made).await.unwrap();
    pass(10).await;
    assert_eq!(state().await, Some(LbMemberState::In), "asking again does not begin anew");
    fake.set_lb_health(&lb.key, instance(1), false);
    assert_eq!(state().await, Some(LbMemberState::Coming));
    fake.set_lb_health(&lb.key, instance(1), true);
    balancers.lb_deregister(permit(1), &lb, &VmRef { provider_id: Some("other".into()), ..of(1) }).await.unwrap();
    assert_eq!(state().await, Some(LbMemberState::In), "the provider id names the member");
    balancers.lb_deregister(permit(1), &lb, &made).await.unwrap();
    assert_eq!(state().await, Some(LbMemberState::Draining));
    pass(10).await;
    assert_eq!(state().await, None);

    fake.put_in_balancer(&lb.key, instance(9));
    let strangers = balancers.lb_members(&lb).await.unwrap();
    assert_eq!((strangers[0].vm.instance, strangers[0].state), (instance(9), LbMemberState::Coming));
    balancers.lb_deregister(permit(1), &lb, &strangers[0].vm).await.unwrap();
    pass(10).await;
    assert!(fake.members(&lb.key).is_empty(), "a member without a VM is taken out by the id that the list gave it");
}

#[tokio::test(start_paused = true)]
async fn a_check_reports_each_need_that_is_not_met() {
    let types = [(
        "small".to_owned(),
        InstanceType {
            arch: Some("amd64".into()),
            cpu: 2,
            memory_bytes: 1 << 30,
            ephemeral_storage_bytes: None,
            gpus: 0,
        },
    )];
    let mut strict = fake(FakeOptions {
        strict_subnets: true,
        subnet_capacity: [("subnet-a".to_owned(), 5)].into(),
        instance_types: types.into(),
        images: vec![("al-1".into(), "img-1".into())],
        image_archs: [("img-1".to_owned(), "arm64".to_owned())].into(),
        load_balancers: Some(["web".parse().unwrap()].into()),
        lb_drain_time: Duration::from_secs(300),
        ..FakeOptions::default()
    });
    strict.self_id = None;
    let query = |name: &str| ImageQuery {
        filters: [("name".to_owned(), vec![name.to_owned()])].into(),
        owners: vec![],
        by_name: false,
        ascending: false,
    };
    let needs = Needs {
        subnets: ["subnet-a", "subnet-b"].map(str::to_owned).into(),
        instance_types: ["small", "large"].map(str::to_owned).into(),
        images: [("al".to_owned(), query("al-*")), ("bsd".to_owned(), query("bsd-*"))].into(),
        load_balancers: vec![balancer("web"), balancer("api")],
        leader_network: Some(LeaderNetwork { ip: IpAddr::from([10, 0, 0, 9]), interface_id: None }),
        drain_timeout: Some(Duration::from_secs(60)),
    };
    let problems: Vec<_> = strict.check(&needs).await.into_iter().map(|it| (it.need, it.severity)).collect();
    assert_eq!(
        problems,
        [
            (Need::Subnet("subnet-b".into()), CheckSeverity::Error),
            (Need::InstanceType("large".into()), CheckSeverity::Error),
            (Need::Image("bsd".into()), CheckSeverity::Error),
            (Need::LoadBalancer("web".parse().unwrap()), CheckSeverity::Warning),
            (Need::LoadBalancer("api".parse().unwrap()), CheckSeverity::Error),
            (Need::LeaderNetwork, CheckSeverity::Error),
        ]
    );
    let found = strict.images().unwrap().resolve_image(&query("al-*")).await.unwrap();
    assert_eq!(found, Some(Image { id: "img-1".into(), arch: Some("arm64".into()) }));
    assert_eq!(fake(FakeOptions::default()).check(&needs).await, [], "a cloud without tables has everything");
    strict.outage(true);
    let failed = strict.check(&needs).await;
    assert_eq!((&failed[0].need, failed[0].error.class, failed.len()), (&Need::Account, ErrorClass::Unavailable, 1));
}

#[tokio::test(start_paused = true)]
async fn pace_deadlines_and_batch_are_told_as_configured() {
    let pace = CreatePace { burst: 5, refill: Duration::from_millis(500) };
    let deadlines = Deadlines { create: Duration::from_secs(600), ..Deadlines::default() };
    let told = fake(FakeOptions { create_pace: pace, deadlines, describe_batch: 7, ..FakeOptions::default() });
    let capabilities = told.capabilities();
    assert_eq!((capabilities.create_pace, capabilities.deadlines, capabilities.describe_batch), (pace, deadlines, 7));
    let strict = fake(FakeOptions { create_pace: pace, enforce_create_pace: true, ..FakeOptions::default() });
    for n in 1..=5 {
        create(&strict, n).await.unwrap();
    }
    assert_eq!(create(&strict, 6).await.unwrap_err(), ErrorClass::Throttled, "the bucket is empty");
    pass(1).await;
    for n in 6..=7 {
        create(&strict, n).await.unwrap();
    }
    assert_eq!(create(&strict, 8).await.unwrap_err(), ErrorClass::Throttled);
    let default = fake(FakeOptions::default()).capabilities().create_pace;
    assert_eq!((default.burst, default.refill), (100, Duration::from_millis(100)));
}
