//! Members of pools: what a deleted, failed or surplus Machine means for its instance, and the hook that keeps Cluster API
//! from draining before the shard has begun.

use super::InstanceView;
use crate::api::{
    NstanceMachine,
    capi::{Machine, Meta as _},
    conditions,
    names::annotation,
};

/// Conditions that Cluster API's health checks set on Machines.
const OWNER_REMEDIATED: &str = "OwnerRemediated";
const HEALTH_CHECK_SUCCEEDED: &str = "HealthCheckSucceeded";

pub struct MemberInput<'a> {
    /// Absent: only its Machine is left.
    pub object: Option<&'a NstanceMachine>,
    pub machine: Option<&'a Machine>,
    pub view: &'a InstanceView,
    /// Its pool, its MachinePool or the Cluster is being deleted or gone.
    pub is_ending: bool,
    /// Its Node says that it is drained.
    pub is_node_drained: bool,
}

/// What becomes of the annotation that holds Cluster API's own drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HookChange {
    #[default]
    Keep,
    Add,
    /// Removed, and Cluster API does not drain at all.
    Remove,
    /// As `Remove`, and Cluster API does not wait for volumes either: the VM is gone.
    RemoveOfGone,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemberPlan {
    /// The instance is to be replaced, for this reason.
    pub replace: Option<&'static str>,
    pub hook: HookChange,
    /// The Machine stands for nothing any more.
    pub delete_machine: bool,
    /// The Machine is healthy again: the next outage can be seen.
    pub set_remediated: bool,
}

pub fn member(input: &MemberInput<'_>) -> MemberPlan {
    let instance = input.view.instance();
    let is_machine_terminating = input.machine.is_some_and(|it| it.is_terminating());
    let is_object_terminating = input.object.is_some_and(|it| it.is_terminating());
    let is_gone = input.view.is_gone();
    let is_dead = is_gone || instance.is_some_and(|it| it.is_vm_dead());
    let is_drained =
        input.is_node_drained || instance.is_some_and(|it| it.drain.as_ref().is_some_and(|it| it.acked_at.is_some()));
    let is_leaving = instance.is_some_and(|it| it.is_leaving());

    let reason = if is_machine_terminating {
        Some("its Machine is being deleted")
    } else if is_object_terminating {
        Some("its NstanceMachine is being deleted")
    } else if input.machine.is_some_and(needs_remediation) {
        Some("its Machine failed a health check")
    } else {
        None
    };
    let has_instance = matches!(input.view, InstanceView::Present(_) | InstanceView::Unknown);
    let replace =
        reason.filter(|_| has_instance && input.object.is_some() && !input.is_ending && !is_leaving && !is_dead);

    let hook = input.machine.map_or(HookChange::Keep, |machine| {
        let has_hook = machine.annotation(annotation::PRE_DRAIN_HOOK).is_some();
        let is_released = machine.annotation(annotation::EXCLUDE_NODE_DRAINING).is_some();
        match has_hook {
            true if is_dead => HookChange::RemoveOfGone,
            // A drain of a Machine that stays may be cancelled: the hook is needed again then.
            true if is_drained && is_machine_terminating => HookChange::Remove,
            false if !is_released && !is_dead && !input.is_ending && input.object.is_some() => HookChange::Add,
            _ => HookChange::Keep,
        }
    });

    // Cluster API makes the Machine anew as long as the NstanceMachine is there, even if that is being deleted.
    let is_left_over = is_gone && !is_machine_terminating && (input.object.is_none() || is_object_terminating);
    MemberPlan {
        replace,
        hook,
        delete_machine: input.machine.is_some() && is_left_over,
        set_remediated: input.machine.is_some_and(|it| !it.is_terminating() && is_recovered(it)),
    }
}

/// A health check failed and the Machine's owner shall act. Cluster API never deletes a pool's Machine by itself.
fn needs_remediation(machine: &Machine) -> bool {
    let is_false = |kind| machine.status.as_ref().is_some_and(|it| conditions::is_false(&it.conditions, kind));
    is_false(OWNER_REMEDIATED) && is_false(HEALTH_CHECK_SUCCEEDED)
}

/// The check succeeds again, but Cluster API leaves the other condition as it is.
fn is_recovered(machine: &Machine) -> bool {
    machine.status.as_ref().is_some_and(|it| {
        conditions::is_false(&it.conditions, OWNER_REMEDIATED)
            && conditions::is_true(&it.conditions, HEALTH_CHECK_SUCCEEDED)
    })
}
