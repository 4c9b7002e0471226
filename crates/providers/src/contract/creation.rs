//! One instance, one VM, whatever happens to the call.

use futures::future::join_all;
use nstance_core::{
    instance::Seen,
    ports::{
        provider::{CreateMode, Described, ErrorClass, Landed},
        schema::ArgsContext,
    },
    value::Value,
};
use nstance_schemas::find;

use super::*;

pub async fn create_then_describe_then_list(subject: &dyn Subject) {
    let made = create(subject, 1).await;
    assert_eq!(made.vm.instance, instance(1));
    let id = made.vm.provider_id.clone().expect("success means that the provider named it");
    settle(subject).await;
    until("the VM runs", async || seen(subject, &made.vm).await == Some(Seen::Running)).await;
    for vm in [&made.vm, &by_name(1)] {
        let Described::Vm(vm) = look(subject, vm).await else { panic!("a made VM is there") };
        check(subject, &vm, &id);
    }
    until("the VM is listed", async || list(subject).await.contains_key(&instance(1))).await;
    let listed = list(subject).await;
    check(subject, &listed[&instance(1)], &id);
    assert_eq!(listed.len(), 1);
    assert!(!subject.provider().k8s_provider_id(&made.vm).is_empty());
    assert_eq!(subject.provider().k8s_provider_id(&made.vm), subject.provider().k8s_provider_id(&made.vm));
}

fn check(subject: &dyn Subject, vm: &Vm, id: &str) {
    let asked = spec_of(subject, 1);
    assert_eq!(vm.vm.instance, asked.instance);
    assert_eq!(vm.vm.provider_id.as_deref(), Some(id));
    assert_eq!(vm.tags.complete(), Some(&asked.tags));
    assert_eq!(vm.ended, None);
    assert_eq!(vm.instance_type, asked.instance_type);
    assert_eq!(vm.subnet.as_deref(), Some(asked.subnet.as_str()));
    assert!(vm.created_at.is_some());
}

pub async fn create_twice_is_one(subject: &dyn Subject) {
    let provider = subject.provider();
    let (spec, _places) = reserved(&provider, spec_of(subject, 1)).await;
    let first = create_as(subject, &provider, &spec).await.expect("the VM is made");
    settle(subject).await;
    match create_as(subject, &provider, &spec).await {
        Ok(same) => assert_eq!(same.vm, first.vm),
        Err(error) => {
            assert_eq!(provider.capabilities().create, CreateMode::RecordFirst, "{error}");
            assert_eq!(error.landed, Landed::No);
        }
    }
    let (parallel, _places) = reserved(&provider, spec_of(subject, 2)).await;
    let answers = join_all((0..8).map(|_| create_as(subject, &provider, &parallel))).await;
    let made: Vec<Vm> = answers.into_iter().filter_map(Result::ok).collect();
    assert!(!made.is_empty(), "one of them is accepted");
    assert!(made.iter().all(|vm| vm.vm == made[0].vm));
    settle(subject).await;
    until("both are listed", async || list(subject).await.len() == 2).await;
}

pub async fn a_timed_out_create_yields_one_vm(subject: &dyn Subject) {
    if !subject.lose_create_answer() {
        return;
    }
    let provider = subject.provider();
    let (spec, _places) = reserved(&provider, spec_of(subject, 1)).await;
    if let Err(error) = provider.create(permit(subject), &spec).await {
        assert!(is_passing(&error), "a lost answer is no refusal: {error}");
    }
    settle(subject).await;
    let made = create_as(subject, &provider, &spec).await.expect("a repeat finds it or makes it");
    settle(subject).await;
    until("it is listed", async || list(subject).await.len() == 1).await;
    assert_eq!(list(subject).await[&instance(1)].vm, made.vm);
}

pub async fn a_refusal_that_may_have_landed_yields_one_vm(subject: &dyn Subject) {
    use ErrorClass::*;
    let provider = subject.provider();
    for (n, class) in (1..).zip([Capacity, Quota, Invalid, Unavailable]) {
        if !subject.land_and_refuse(class) {
            return;
        }
        let (spec, _places) = reserved(&provider, spec_of(subject, n)).await;
        let error = provider.create(permit(subject), &spec).await.expect_err("its answer is a refusal");
        // Behind a bad network another answer may have come in its place.
        assert!((error.class, error.landed) == (class, Landed::Maybe) || is_passing(&error), "{error:?}");
        settle(subject).await;
        let made = create_as(subject, &provider, &spec).await.expect("a repeat finds it or makes it");
        settle(subject).await;
        until("each is there once", async || list(subject).await.len() == usize::from(n)).await;
        assert_eq!(list(subject).await[&instance(n)].vm, made.vm);
    }
}

pub async fn tags_are_there_from_the_first_moment(subject: &dyn Subject) {
    let creates = join_all((1..=10).map(|n| create(subject, n)));
    let watch = async {
        for _ in 0..50 {
            if let Ok(listing) = subject.provider().list().await {
                assert!(listing.vms.iter().all(|vm| vm.tags.complete().is_some()), "a VM was seen before its tags");
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    futures::join!(creates, watch);
}

pub async fn failed_create_leaves_nothing(subject: &dyn Subject) {
    if !subject.refuse_creates(Some(ErrorClass::Capacity)) {
        return;
    }
    let provider = subject.provider();
    let (spec, places) = reserved(&provider, spec_of(subject, 1)).await;
    let error = create_as(subject, &provider, &spec).await.expect_err("it is refused");
    drop(places);
    assert_eq!(error.landed, Landed::No);
    retry(async || provider.clean(permit(subject), &by_name(1)).await).await;
    settle(subject).await;
    assert!(list(subject).await.is_empty());
    assert_eq!(seen(subject, &by_name(1)).await, None);
}

pub async fn cancel_mid_create_is_recoverable(subject: &dyn Subject) {
    let provider = subject.provider();
    for n in 1..=12 {
        let (spec, _places) = reserved(&provider, spec_of(subject, n)).await;
        // On a slow provider these fall before, amid and after the landing.
        let patience = Duration::from_millis(u64::from(n) * 10 - 10);
        let _ = tokio::time::timeout(patience, provider.create(permit(subject), &spec)).await;
        settle(subject).await;
        match create_as(subject, &provider, &spec).await {
            Ok(vm) => assert_eq!(vm.vm.instance, instance(n)),
            // Already there, and asking twice is refused.
            Err(error) => assert_eq!(provider.capabilities().create, CreateMode::RecordFirst, "{error}"),
        }
    }
    settle(subject).await;
    until("each is there once", async || list(subject).await.len() == 12).await;
}

pub async fn error_classes_are_right(subject: &dyn Subject) {
    use ErrorClass::*;
    for class in [Capacity, Quota, Throttled, Auth, Invalid, Unavailable, Ambiguous] {
        if !subject.refuse_creates(Some(class)) {
            return;
        }
        let answer = subject.provider().create(permit(subject), &spec_of(subject, 1)).await;
        let error = answer.expect_err("it is refused");
        // Behind a bad network the call may be lost before it is refused.
        assert!(error.class == class || is_passing(&error), "{class:?} became {:?}", error.class);
        assert_eq!(error.op, "create");
        match error.class {
            Ambiguous => assert_eq!(error.landed, Landed::Maybe),
            Capacity | Quota | Auth | Invalid => assert_eq!(error.landed, Landed::No, "{error:?}"),
            _ => {}
        }
        if error.class != class {
            return;
        }
    }
}

pub async fn a_refusal_says_what_it_is_about(subject: &dyn Subject) {
    use ErrorClass::*;
    let kinds = [
        (Capacity, Scope::Choice),
        (Quota, Scope::Choice),
        (Quota, Scope::Account),
        (Invalid, Scope::Image),
        (Invalid, Scope::Account),
    ];
    for (class, scope) in kinds {
        if !subject.refuse_creates_about(class, scope) {
            continue;
        }
        let error = subject.provider().create(permit(subject), &spec_of(subject, 1)).await;
        let error = error.expect_err("it is refused");
        // Behind a bad network the call may be lost before it is refused.
        assert!((error.class, error.scope) == (class, scope) || is_passing(&error), "{error:?}");
        subject.refuse_creates(None);
    }
}

pub async fn an_unknown_arg_is_an_error(subject: &dyn Subject) {
    let provider = subject.provider();
    let mut wrong = spec_of(subject, 1);
    wrong.args.insert("ImageIdd", Value::from("x"));
    let problems =
        find(provider.kind()).expect("every kind has a schema").check_args(&wrong.args, ArgsContext::default());
    assert_eq!(problems.len(), 1);
    assert_eq!(problems[0].path, ["ImageIdd"]);
    let error = create_as(subject, &provider, &wrong).await.expect_err("an unknown arg is refused");
    assert_eq!(error.class, ErrorClass::Invalid);
    assert!(list(subject).await.is_empty());
}

pub async fn twenty_parallel_creates_spread_and_all_succeed(subject: &dyn Subject) {
    let made = join_all((1..=20).map(|n| create(subject, n))).await;
    settle(subject).await;
    until("all are listed", async || list(subject).await.len() == 20).await;
    let mut hosts: BTreeMap<String, usize> = BTreeMap::new();
    for host in made.into_iter().filter_map(|vm| vm.host) {
        *hosts.entry(host).or_default() += 1;
    }
    if let (Some(most), Some(least)) = (hosts.values().max(), hosts.values().min()) {
        assert!(most - least <= 1, "a burst lands on one host: {hosts:?}");
    }
}

pub async fn no_secret_in_errors(subject: &dyn Subject) {
    let provider = subject.provider();
    let mut wrong = spec_of(subject, 1);
    wrong.args.insert("ImageIdd", Value::from("x"));
    subject.refuse_creates(Some(ErrorClass::Auth));
    for spec in [spec_of(subject, 1), wrong.clone(), wrong] {
        let shown = match provider.create(permit(subject), &spec).await {
            Ok(vm) => format!("{vm:?} {spec:?}"),
            Err(error) => format!("{error} {error:?} {spec:?}"),
        };
        for secret in [NONCE, USERDATA] {
            assert!(!shown.contains(secret), "{shown}");
        }
    }
}
