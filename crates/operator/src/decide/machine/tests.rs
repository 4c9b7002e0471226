use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};
use nstance_client::ShardError;
use proptest::prelude::*;
use tonic::Code;

use super::*;
use crate::{
    api::names::{annotation, label},
    decide::observed::{Drain, Picture, Reach},
};

fn terminating<K: kube::Resource>(mut object: K, is_it: bool) -> K {
    object.meta_mut().deletion_timestamp = is_it.then_some(Time(Timestamp::UNIX_EPOCH));
    object
}

fn annotated<K: kube::Resource>(mut object: K, keys: &[(&str, bool)]) -> K {
    let all = keys.iter().filter(|(_, is_set)| *is_set).map(|(key, _)| ((*key).to_owned(), "x".to_owned()));
    object.meta_mut().annotations = Some(all.collect());
    object
}

fn view() -> impl Strategy<Value = InstanceView> {
    let statuses = prop::sample::select(vec![
        InstanceStatus::Pending,
        InstanceStatus::Running,
        InstanceStatus::Draining,
        InstanceStatus::Deleting,
        InstanceStatus::Failed,
    ]);
    let present = (statuses, any::<bool>(), any::<bool>()).prop_map(|(status, is_vm_gone, is_acked)| {
        let acked_at = is_acked.then_some(Timestamp::UNIX_EPOCH);
        InstanceView::Present(Arc::new(Instance {
            id: "i1".to_owned(),
            status,
            provider_state: if is_vm_gone { "gone" } else { "running" }.to_owned(),
            drain: Some(Drain { acked_at, ..Drain::default() }),
            ..Instance::default()
        }))
    });
    prop_oneof![present, Just(InstanceView::Gone), Just(InstanceView::Unknown)]
}

fn conditions(owner_remediated: Option<bool>, health: Option<bool>) -> Vec<Condition> {
    let one = |kind: &str, status: Option<bool>| {
        status.map(|status| Condition {
            type_: kind.to_owned(),
            status: if status { "True" } else { "False" }.to_owned(),
            reason: "R".to_owned(),
            message: String::new(),
            observed_generation: None,
            last_transition_time: Time(Timestamp::UNIX_EPOCH),
        })
    };
    [one("OwnerRemediated", owner_remediated), one("HealthCheckSucceeded", health)].into_iter().flatten().collect()
}

prop_compose! {
    fn machines()(
        is_terminating in any::<bool>(),
        has_hook in any::<bool>(),
        is_released in any::<bool>(),
        owner_remediated in any::<Option<bool>>(),
        health in any::<Option<bool>>(),
    ) -> Machine {
        let mut machine = annotated(
            terminating(Machine::default(), is_terminating),
            &[(annotation::PRE_DRAIN_HOOK, has_hook), (annotation::EXCLUDE_NODE_DRAINING, is_released)],
        );
        machine.status = Some(crate::api::capi::MachineStatus {
            conditions: conditions(owner_remediated, health),
            ..crate::api::capi::MachineStatus::default()
        });
        machine
    }
}

proptest! {
    #[test]
    fn a_member_is_replaced_deleted_and_freed_only_where_that_is_safe(
        machine in prop::option::of(machines()),
        object in prop::option::of(any::<bool>().prop_map(|it| terminating(NstanceMachine::default(), it))),
        view in view(),
        is_ending: bool,
        is_node_drained: bool,
    ) {
        let input =
            MemberInput { object: object.as_ref(), machine: machine.as_ref(), view: &view, is_ending, is_node_drained };
        let plan = member(&input);
        let is_leaving = view.instance().is_some_and(Instance::is_leaving);
        if plan.replace.is_some() {
            prop_assert!(!is_ending && !is_leaving && !view.is_gone() && object.is_some());
        }
        if plan.delete_machine {
            prop_assert!(view.is_gone() && object.as_ref().is_none_or(|it| it.is_terminating()));
        }
        let machine = machine.unwrap_or_default();
        let has_hook = machine.annotation(annotation::PRE_DRAIN_HOOK).is_some();
        match plan.hook {
            HookChange::Keep => {}
            HookChange::Add => prop_assert!(!has_hook && machine.annotation(annotation::EXCLUDE_NODE_DRAINING).is_none()),
            HookChange::Remove | HookChange::RemoveOfGone => {
                let is_acked = view.instance().is_some_and(|it| it.drain.as_ref().is_some_and(|it| it.acked_at.is_some()));
                let is_dead = view.is_gone() || view.instance().is_some_and(Instance::is_vm_dead);
                prop_assert!(has_hook && (is_dead || is_node_drained || is_acked));
            }
        }
    }

    #[test]
    fn a_finalizer_never_goes_while_an_instance_may_be_left(
        view in view(),
        has_request: bool,
        has_id: bool,
        created in prop::option::of(prop::sample::select(vec![
            Code::NotFound, Code::InvalidArgument, Code::Unavailable, Code::PermissionDenied,
        ])),
    ) {
        let mut object = annotated(NstanceMachine::default(), &[(annotation::REQUEST_ID, has_request)]);
        object.spec.shard = Some("a".to_owned());
        object.spec.instance_id = has_id.then(|| "i1".to_owned());
        let view = if has_id { view } else { InstanceView::Unnamed };
        let created = created.map(|code| Progress::Refused(ShardError::new("a", code, "no")));
        let input = RemovalInput {
            object: &object, view: &view, is_shard_configured: true, created: created.as_ref(), pool: None,
        };
        if removal(&input) == Removal::Drop {
            let is_failed = view.instance().is_some_and(|it| it.status == InstanceStatus::Failed);
            let is_refused = matches!(&created, Some(Progress::Refused(error))
                if matches!(error.code, Code::NotFound | Code::InvalidArgument));
            prop_assert!(view.is_gone() || is_failed || (!has_id && (!has_request || is_refused)));
        }
    }
}

#[test]
fn absence_is_believed_of_members_from_the_picture_and_of_others_from_an_answer() {
    let shard = |picture: Option<Picture>| ShardView {
        name: "a".to_owned(),
        reach: Reach::Ready,
        picture: picture.map(Arc::new),
        last_contact: None,
    };
    let mut object = NstanceMachine::default();
    object.spec.instance_id = Some("i1".to_owned());
    let mut member = object.clone();
    member.metadata.labels = Some([(label::POOL_NAME.to_owned(), "pool".to_owned())].into());
    let (empty, unread) = (shard(Some(Picture::default())), shard(None));
    assert_eq!(instance_view(&member, Some(&empty), None), InstanceView::Gone);
    assert_eq!(instance_view(&member, Some(&unread), None), InstanceView::Unknown);
    assert_eq!(instance_view(&member, None, None), InstanceView::Unknown);
    assert_eq!(instance_view(&object, Some(&empty), None), InstanceView::Unknown);
    assert!(must_ask(&object, Some(&empty)) && !must_ask(&member, Some(&empty)) && !must_ask(&object, Some(&unread)));
    let refused = |code| Progress::Refused(ShardError::new("a", code, "no"));
    assert_eq!(instance_view(&object, Some(&empty), Some(&refused(Code::NotFound))), InstanceView::Gone);
    assert_eq!(instance_view(&object, Some(&empty), Some(&refused(Code::InvalidArgument))), InstanceView::Unknown);
    let answered = |status| {
        let instance = Instance { id: "i1".to_owned(), status, ..Instance::default() };
        Progress::Answered(Answer::InstanceStatus(Box::new(instance)))
    };
    assert_eq!(instance_view(&object, Some(&empty), Some(&answered(InstanceStatus::Deleted))), InstanceView::Gone);
    let running = instance_view(&object, Some(&empty), Some(&answered(InstanceStatus::Running)));
    assert!(running.instance().is_some());
}
