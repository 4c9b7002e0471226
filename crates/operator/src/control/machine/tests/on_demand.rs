use super::*;

pub(super) fn put_on_demand(world: &World, name: &str) -> NstanceMachine {
    let object = json!({
        "apiVersion": API_VERSION,
        "kind": "NstanceMachine",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"group": "jobs", "vars": {"A": "1"}},
    });
    world.kube.put(kinds::NSTANCE_MACHINE, &serde_json::from_value::<NstanceMachine>(object).unwrap())
}

/// Two shards that have the group; an NstanceMachine and its Machine.
pub(super) fn world() -> World {
    let world = World::new(&["a", "b"]);
    for shard in ["a", "b"] {
        world.shards.put_group(shard, Group { key: "jobs".to_owned(), ..Group::default() });
    }
    put_on_demand(&world, "m");
    put_machine(&world, "m", &[]);
    world
}

pub(super) fn running(id: &str) -> Instance {
    Instance {
        id: id.to_owned(),
        group: "jobs".to_owned(),
        on_demand: true,
        status: InstanceStatus::Running,
        provider_id: Some(format!("dev:///{id}")),
        ..Instance::default()
    }
}

/// A shard that makes one instance per request id, and answers questions for instances and deletes.
pub(super) fn serve(world: &World) -> Arc<std::sync::Mutex<BTreeMap<String, String>>> {
    let made = Arc::new(std::sync::Mutex::new(BTreeMap::<String, String>::new()));
    let requests = made.clone();
    world.shards.script(move |shard, _, wish| {
        let mut requests = requests.lock().unwrap();
        match wish {
            Wish::CreateInstance(wish) => {
                let n = requests.len() + 1;
                let id = requests.entry(wish.request_id.clone()).or_insert_with(|| format!("i{n}")).clone();
                Progress::Answered(Answer::Instance { id, status: "pending".to_owned() })
            }
            Wish::InstanceStatus { id } if requests.values().any(|it| it == id) => {
                Progress::Answered(Answer::InstanceStatus(Box::new(Instance {
                    shard: shard.to_owned(),
                    ..running(id)
                })))
            }
            Wish::InstanceStatus { id } | Wish::DeleteInstance { id } => {
                Progress::Refused(ShardError::new(shard, Code::NotFound, format!("there is no instance {id}")))
            }
            _ => Progress::Waiting,
        }
    });
    made
}

fn asked(world: &World) -> Vec<String> {
    world.shards.asked().iter().map(|it| format!("{} {}", it.shard, it.key.topic)).collect()
}

#[tokio::test(start_paused = true)]
async fn the_request_id_is_stored_before_anything_is_asked() {
    let world = world();
    turn(&world, "m").await;
    assert!(world.shards.asked().is_empty(), "the finalizer comes first");
    assert!(nstance_machine(&world, "m").unwrap().has_finalizer(finalizer::MACHINE));
    world.kube.fail_nth("apply", 1, KubeErrorKind::Unavailable);
    world.feed();
    assert!(reconcile(&world.context, &key("m")).await.is_err());
    assert!(world.shards.asked().is_empty());
    turn(&world, "m").await;
    let object = nstance_machine(&world, "m").unwrap();
    assert_eq!(object.annotation(annotation::REQUEST_ID), object.metadata.uid.as_deref());
    assert_eq!(object.spec.shard.as_deref(), Some("a"));
    let Wish::CreateInstance(wish) = &world.shards.asked()[0].wish else { panic!("{:?}", world.shards.asked()) };
    assert_eq!(Some(&wish.request_id), object.metadata.uid.as_ref());
    assert_eq!((wish.group.as_str(), wish.vars["A"].as_str()), ("jobs", "1"));
    assert_eq!(condition(&object, kind::READY), "False Asking");
}

#[tokio::test(start_paused = true)]
async fn a_crash_or_a_lost_answer_after_any_step_yields_one_instance() {
    // Each write of the way may be lost before or after it was made, and the operator may be restarted after it.
    for verb in ["json_patch", "apply"] {
        for nth in 1..=5 {
            for lands in [false, true] {
                let world = world();
                let made = serve(&world);
                if lands {
                    world.kube.lose_answer(verb, nth);
                } else {
                    world.kube.fail_nth(verb, nth, KubeErrorKind::Unavailable);
                }
                for _ in 0..8 {
                    world.feed();
                    if reconcile(&world.context, &key("m")).await.is_err() {
                        // The operator starts again: nothing in memory is left.
                        world.shards.forget_wishes();
                        world.context.forget_applied(&ObjectRef::new(kinds::NSTANCE_MACHINE, NAMESPACE, "m"));
                    }
                    world.shards.forget_wishes();
                }
                let object = nstance_machine(&world, "m").unwrap();
                assert_eq!(object.spec.instance_id.as_deref(), Some("i1"), "{verb} {nth} {lands}");
                assert_eq!(made.lock().unwrap().len(), 1, "{verb} {nth} {lands}");
                assert_eq!(object.spec.shard.as_deref(), Some("a"), "{verb} {nth} {lands}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_choice_made_from_an_old_state_of_the_object_has_no_effect() {
    let world = world();
    turn(&world, "m").await;
    turn(&world, "m").await;
    assert_eq!(nstance_machine(&world, "m").unwrap().spec.shard.as_deref(), Some("a"));
    // The store is behind: it has the object without a shard, and now shard b looks better.
    let world = World { context: crate::testing::context(&world.kube, &world.shards, &world.events), ..world };
    let mut old = nstance_machine(&world, "m").unwrap();
    old.spec.shard = None;
    old.metadata.annotations = None;
    old.metadata.resource_version = Some("1".to_owned());
    world.feed();
    world.context.stores.nstance_machines.remove(&key("m"));
    world.context.stores.nstance_machines.put(old);
    world.shards.put_instance("a", running("other"));
    reconcile(&world.context, &key("m")).await.unwrap();
    assert_eq!(nstance_machine(&world, "m").unwrap().spec.shard.as_deref(), Some("a"));
    assert!(world.shards.asked().iter().all(|it| it.shard == "a"));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_asked_before_the_machine_the_cluster_and_the_bootstrap_data_are_there() {
    let world = World::new(&["a"]);
    world.shards.put_group("a", Group { key: "jobs".to_owned(), ..Group::default() });
    put_on_demand(&world, "m");
    turn(&world, "m").await;
    turn(&world, "m").await;
    assert_eq!(condition(&nstance_machine(&world, "m").unwrap(), kind::READY), "False WaitingForMachine");
    put_machine(&world, "m", &[]);
    world.kube.edit(kinds::MACHINE, NAMESPACE, "m", |it| it["spec"]["bootstrap"] = json!({}));
    world.kube.edit(kinds::CLUSTER, NAMESPACE, CLUSTER, |it| it["status"] = json!({}));
    turn(&world, "m").await;
    assert_eq!(condition(&nstance_machine(&world, "m").unwrap(), kind::READY), "False WaitingForCluster");
    world.kube.edit(kinds::CLUSTER, NAMESPACE, CLUSTER, |it| {
        it["status"] = json!({"initialization": {"infrastructureProvisioned": true}});
    });
    turn(&world, "m").await;
    assert_eq!(condition(&nstance_machine(&world, "m").unwrap(), kind::READY), "False WaitingForBootstrapData");
    assert!(world.shards.asked().is_empty());
    world.kube.edit(kinds::MACHINE, NAMESPACE, "m", |it| it["spec"]["bootstrap"] = json!({"dataSecretName": ""}));
    turn(&world, "m").await;
    assert_eq!(asked(&world), ["a create-instance"]);
}

#[tokio::test(start_paused = true)]
async fn the_machines_failure_domain_is_the_shard() {
    let world = world();
    world.kube.edit(kinds::MACHINE, NAMESPACE, "m", |it| it["spec"]["failureDomain"] = json!("b"));
    turn(&world, "m").await;
    turn(&world, "m").await;
    assert_eq!(nstance_machine(&world, "m").unwrap().spec.shard.as_deref(), Some("b"));
    assert_eq!(asked(&world), ["b create-instance"]);
}

#[tokio::test(start_paused = true)]
async fn a_refused_request_says_why() {
    let world = world();
    turn(&world, "m").await;
    turn(&world, "m").await;
    let error = ShardError::new("a", Code::InvalidArgument, "vars.A: unknown");
    world.shards.refuse("a", &wish_key("m", CREATE), error);
    turn(&world, "m").await;
    let object = nstance_machine(&world, "m").unwrap();
    assert_eq!(condition(&object, kind::READY), "False Refused");
    assert_eq!(condition(&object, kind::STALLED), "True Refused");
    let conditions = &object.status.as_ref().unwrap().conditions;
    assert!(conditions::find(conditions, kind::READY).unwrap().message.contains("vars.A: unknown"));
    assert_eq!(world.events.messages("ConfigInvalid").len(), 1);
    // It is tried again by the shard's actor; what was refused is not asked anew by us.
    turn(&world, "m").await;
    assert_eq!(asked(&world), ["a create-instance"]);
}

#[tokio::test(start_paused = true)]
async fn the_status_follows_the_instance() {
    let world = world();
    serve(&world);
    for _ in 0..2 {
        turn(&world, "m").await;
    }
    let mut instance = running("i1");
    instance.status = InstanceStatus::Provisioning;
    instance.provider_id = None;
    instance.ip4 = Some("10.0.0.7".to_owned());
    instance.spot = true;
    world.shards.put_instance("a", instance);
    turn(&world, "m").await;
    let object = nstance_machine(&world, "m").unwrap();
    let status = object.status.clone().unwrap();
    assert_eq!(status.phase, Some(crate::api::machine::Phase::Provisioning));
    assert_eq!((status.ready, status.initialization), (Some(false), None));
    assert_eq!((status.failure_domain.as_deref(), status.interruptible), (Some("a"), Some(true)));
    assert_eq!(status.addresses[0].address, "10.0.0.7");
    world.shards.put_instance("a", running("i1"));
    turn(&world, "m").await;
    turn(&world, "m").await;
    let object = nstance_machine(&world, "m").unwrap();
    assert_eq!(object.spec.provider_id.as_deref(), Some("dev:///i1"));
    assert_eq!(object.status.as_ref().unwrap().ready, Some(true));
    assert!(object.status.as_ref().unwrap().initialization.is_some());
    // What a Node spells otherwise stays as it was adopted.
    world.kube.edit(kinds::NSTANCE_MACHINE, NAMESPACE, "m", |it| it["spec"]["providerID"] = json!("dev:///adopted"));
    turn(&world, "m").await;
    assert_eq!(nstance_machine(&world, "m").unwrap().spec.provider_id.as_deref(), Some("dev:///adopted"));
    assert!(world.events.messages("FieldConflict").is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_unchanged_machine_is_not_written_again() {
    let world = world();
    serve(&world);
    for _ in 0..4 {
        turn(&world, "m").await;
    }
    world.shards.put_instance("a", running("i1"));
    for _ in 0..3 {
        turn(&world, "m").await;
    }
    world.kube.clear_calls();
    for _ in 0..3 {
        turn(&world, "m").await;
    }
    assert_eq!(world.kube.writes(), []);
}

#[tokio::test(start_paused = true)]
async fn the_finalizer_stays_until_the_shard_proves_absence() {
    let world = world();
    for _ in 0..2 {
        turn(&world, "m").await;
    }
    let instance = Answer::Instance { id: "i1".to_owned(), status: "pending".to_owned() };
    world.shards.grant("a", &wish_key("m", CREATE), instance);
    turn(&world, "m").await;
    world.shards.put_instance("a", running("i1"));
    turn(&world, "m").await;
    world.kube.delete_by_user(kinds::NSTANCE_MACHINE, NAMESPACE, "m");
    turn(&world, "m").await;
    world.shards.grant("a", &wish_key("m", DELETE), Answer::Done);
    // The delete was taken, and the shard goes down: nothing is proven.
    world.shards.take_down("a", k8s_openapi::jiff::Timestamp::UNIX_EPOCH);
    turn(&world, "m").await;
    assert!(nstance_machine(&world, "m").is_some());
    world.shards.bring_back("a");
    world.shards.remove_instance("a", "i1");
    turn(&world, "m").await;
    assert!(nstance_machine(&world, "m").is_some(), "a picture without it proves nothing of an on-demand instance");
    let gone = ShardError::new("a", Code::NotFound, "there is no instance i1");
    world.shards.refuse("a", &wish_key("m", DESCRIBE), gone);
    turn(&world, "m").await;
    assert!(nstance_machine(&world, "m").is_none());
    assert!(world.shards.wishes().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_machine_deleted_before_its_id_was_stored_asks_again_to_learn_it() {
    let world = world();
    let made = serve(&world);
    turn(&world, "m").await;
    // The apply of the id is lost.
    world.kube.fail_nth("apply", 2, KubeErrorKind::Unavailable);
    world.feed();
    assert!(reconcile(&world.context, &key("m")).await.is_err());
    world.shards.forget_wishes();
    assert!(nstance_machine(&world, "m").unwrap().spec.instance_id.is_none());
    world.kube.delete_by_user(kinds::NSTANCE_MACHINE, NAMESPACE, "m");
    turn(&world, "m").await;
    assert_eq!(nstance_machine(&world, "m").unwrap().spec.instance_id.as_deref(), Some("i1"));
    world.shards.put_instance("a", running("i1"));
    assert_eq!(made.lock().unwrap().len(), 1);
    turn(&world, "m").await;
    assert!(nstance_machine(&world, "m").is_none(), "the shard says that it does not exist");
    assert_eq!(asked(&world).last().map(String::as_str), Some("a delete-instance"));
}

#[tokio::test(start_paused = true)]
async fn a_machine_for_which_nothing_was_asked_goes_at_once() {
    let world = World::new(&["a"]);
    put_on_demand(&world, "m");
    turn(&world, "m").await;
    world.kube.delete_by_user(kinds::NSTANCE_MACHINE, NAMESPACE, "m");
    turn(&world, "m").await;
    assert!(nstance_machine(&world, "m").is_none());
    assert!(world.shards.asked().is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_is_gone_takes_its_machine_with_it() {
    let world = world();
    let made = serve(&world);
    for _ in 0..4 {
        turn(&world, "m").await;
    }
    world.shards.put_instance("a", running("i1"));
    turn(&world, "m").await;
    made.lock().unwrap().clear();
    world.shards.remove_instance("a", "i1");
    turn(&world, "m").await;
    let object = nstance_machine(&world, "m").unwrap();
    assert_eq!(condition(&object, kind::SERVER_DELETED), "True Deleted");
    assert_eq!(object.status.as_ref().unwrap().ready, Some(false));
    let machine = machine(&world, "m").unwrap();
    assert!(machine.is_terminating());
    assert_eq!(machine.annotation(annotation::EXCLUDE_NODE_DRAINING), Some("true"));
    assert_eq!(machine.annotation(annotation::EXCLUDE_WAIT_FOR_VOLUME_DETACH), Some("true"));
    assert_eq!(world.events.messages("InstanceDeleted").len(), 1);
    world.kube.delete_by_user(kinds::NSTANCE_MACHINE, NAMESPACE, "m");
    turn(&world, "m").await;
    assert!(nstance_machine(&world, "m").is_none());
}

#[tokio::test(start_paused = true)]
async fn a_new_instance_that_the_picture_does_not_have_yet_is_not_taken_for_gone() {
    let world = world();
    serve(&world);
    for _ in 0..6 {
        turn(&world, "m").await;
    }
    let object = nstance_machine(&world, "m").unwrap();
    assert_eq!(object.spec.instance_id.as_deref(), Some("i1"));
    assert_eq!(condition(&object, kind::SERVER_DELETED), "");
    assert!(!machine(&world, "m").unwrap().is_terminating());
}

#[tokio::test(start_paused = true)]
async fn a_paused_machine_has_no_effects() {
    let world = world();
    world.kube.edit(kinds::CLUSTER, NAMESPACE, CLUSTER, |it| it["spec"]["paused"] = json!(true));
    for _ in 0..3 {
        turn(&world, "m").await;
    }
    let object = nstance_machine(&world, "m").unwrap();
    assert_eq!(condition(&object, kind::PAUSED), "True Paused");
    assert!(world.shards.asked().is_empty());
    assert!(!object.has_finalizer(finalizer::MACHINE));
    world.kube.edit(kinds::CLUSTER, NAMESPACE, CLUSTER, |it| it["spec"]["paused"] = json!(false));
    for _ in 0..3 {
        turn(&world, "m").await;
    }
    assert_eq!(condition(&nstance_machine(&world, "m").unwrap(), kind::PAUSED), "False NotPaused");
    assert_eq!(asked(&world), ["a create-instance"]);
}

#[tokio::test(start_paused = true)]
async fn the_least_used_reachable_shard_with_the_group_is_chosen() {
    let world = world();
    world.shards.put_instance("a", running("other"));
    turn(&world, "m").await;
    turn(&world, "m").await;
    assert_eq!(nstance_machine(&world, "m").unwrap().spec.shard.as_deref(), Some("b"));
    // The next one counts this one, although no picture has its instance.
    world.shards.put_instance("a", running("third"));
    world.shards.remove_instance("a", "third");
    put_on_demand(&world, "n");
    put_machine(&world, "n", &[]);
    turn(&world, "n").await;
    turn(&world, "n").await;
    assert_eq!(nstance_machine(&world, "n").unwrap().spec.shard.as_deref(), Some("a"));
}

#[tokio::test(start_paused = true)]
async fn a_shard_that_left_the_config_leaves_its_instance() {
    let world = world();
    serve(&world);
    for _ in 0..4 {
        turn(&world, "m").await;
    }
    world.kube.delete_by_user(kinds::NSTANCE_MACHINE, NAMESPACE, "m");
    world.shards.configure(&["b"]);
    turn(&world, "m").await;
    assert!(nstance_machine(&world, "m").is_none());
    assert_eq!(world.events.messages("ShardRemoved").len(), 1);
}
