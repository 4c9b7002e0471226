//! The cloud in memory does what it is told to, and says so afterwards.

use nstance_core::{
    ids::Epoch,
    ports::provider::Bootstrap,
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
    assert_eq!(fake.resolve_image(&query(false)).await.unwrap().as_deref(), Some("img-2"));
    assert_eq!(fake.resolve_image(&query(true)).await.unwrap().as_deref(), Some("img-1"));
    pass(1).await;
    fake.publish_image("al-3", "img-4");
    assert_eq!(fake.resolve_image(&query(false)).await.unwrap().as_deref(), Some("img-4"));
    fake.withdraw_image("al-3");
    assert_eq!(fake.resolve_image(&query(false)).await.unwrap().as_deref(), Some("img-2"));
    let none = ImageQuery { filters: [("name".to_owned(), vec!["bsd-*".to_owned()])].into(), ..query(false) };
    assert_eq!(fake.resolve_image(&none).await.unwrap(), None);
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
    let read = FakeOptions::from_options(&options).unwrap();
    assert_eq!(read.latency_of(Op::Create), Duration::from_millis(500));
    assert_eq!((read.page_size, read.idempotent_create), (7, false));
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
