//! A group's plan while it is being written: actions with their urgency, holds, and the next moment that matters.
//!
//! Steps add in whatever order they like; the order of the finished plan comes from the urgency alone, so that a plan
//! does not depend on the order of its input or of its making.

use std::collections::BTreeSet;

use super::{Action, Hold, HoldKind, Plan, Planned, Priority, Scene};
use crate::{ids::InstanceId, time::Timestamp};

/// What decides who goes first: the priority, then the oldest cause, then the id of the instance that is the cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Urgency {
    pub priority: Priority,
    pub since: Timestamp,
    pub cause: Option<InstanceId>,
}

impl Urgency {
    pub(super) fn new(priority: Priority, since: Timestamp, cause: InstanceId) -> Self {
        Self { priority, since, cause: Some(cause) }
    }
}

pub(super) struct Draft<'a> {
    scene: Scene<'a>,
    actions: Vec<(Urgency, Action)>,
    holds: Vec<Hold>,
    wake_at: Option<Timestamp>,
    leaving: BTreeSet<InstanceId>,
    deleting: BTreeSet<InstanceId>,
}

impl<'a> Draft<'a> {
    pub(super) fn new(scene: Scene<'a>) -> Self {
        Self {
            scene,
            actions: Vec::new(),
            holds: Vec::new(),
            wake_at: None,
            leaving: BTreeSet::new(),
            deleting: BTreeSet::new(),
        }
    }

    pub(super) fn act(&mut self, urgency: Urgency, action: Action) {
        if let Action::StartDrain { instance, .. } | Action::Delete { instance, .. } = &action {
            self.leaving.insert(*instance);
        }
        if let Action::Delete { instance, .. } = &action {
            self.deleting.insert(*instance);
        }
        self.actions.push((urgency, action));
    }

    /// This plan deletes it: its drain, if it had one, is over.
    pub(super) fn is_deleting(&self, id: InstanceId) -> bool {
        self.deleting.contains(&id)
    }

    /// This plan sends it away.
    pub(super) fn is_leaving(&self, id: InstanceId) -> bool {
        self.leaving.contains(&id)
    }

    /// Notes why nothing happens. The hold's end is also a moment to look again.
    pub(super) fn hold(&mut self, kind: HoldKind, message: impl Into<String>) -> &mut Hold {
        self.holds.push(Hold {
            kind,
            group: self.scene.group.clone(),
            instance: None,
            message: message.into(),
            since: None,
            until: None,
        });
        self.holds.last_mut().expect("one was pushed in the line above")
    }

    /// Something changes by time alone at `at`. What lies behind us changes nothing any more.
    pub(super) fn wake(&mut self, at: Timestamp) {
        if self.scene.now < at {
            self.wake_at = Some(self.wake_at.map_or(at, |earlier| earlier.min(at)));
        }
    }

    pub(super) fn wake_if(&mut self, at: Option<Timestamp>) {
        if let Some(at) = at {
            self.wake(at);
        }
    }

    pub(super) fn has_actions(&self) -> bool {
        !self.actions.is_empty()
    }

    pub(super) fn has_holds(&self) -> bool {
        !self.holds.is_empty()
    }

    pub(super) fn finish(mut self) -> Finished {
        // Who is called back waits for nothing any more.
        let called_back: BTreeSet<InstanceId> = self
            .actions
            .iter()
            .filter_map(|(_, action)| match action {
                Action::CancelDrain { instance } => Some(*instance),
                _ => None,
            })
            .collect();
        self.holds.retain(|hold| hold.instance.is_none_or(|instance| !called_back.contains(&instance)));
        for until in self.holds.iter().filter_map(|hold| hold.until).collect::<Vec<_>>() {
            self.wake(until);
        }
        let group = self.scene.group;
        let actions = self
            .actions
            .into_iter()
            .map(|(urgency, action)| (urgency, Planned { priority: urgency.priority, group: group.clone(), action }))
            .collect();
        Finished { actions, holds: self.holds, wake_at: self.wake_at }
    }
}

/// The parts of a plan, not yet in order.
#[derive(Default)]
pub(super) struct Finished {
    actions: Vec<(Urgency, Planned)>,
    holds: Vec<Hold>,
    wake_at: Option<Timestamp>,
}

impl Finished {
    pub(super) fn extend(&mut self, other: Self) {
        self.actions.extend(other.actions);
        self.holds.extend(other.holds);
        self.wake_at = [self.wake_at, other.wake_at].into_iter().flatten().min();
    }

    pub(super) fn into_plan(mut self) -> Plan {
        // Equal keys are equal actions (several creates for one reason), so the order is total where it matters.
        self.actions.sort_by(|(a, x), (b, y)| {
            a.cmp(b).then_with(|| rank(&x.action).cmp(&rank(&y.action))).then_with(|| x.group.cmp(&y.group))
        });
        self.holds.sort_by(|a, b| hold_key(a).cmp(&hold_key(b)));
        Plan {
            actions: self.actions.into_iter().map(|(_, planned)| planned).collect(),
            holds: self.holds,
            wake_at: self.wake_at,
        }
    }
}

fn hold_key(hold: &Hold) -> impl Ord + '_ {
    (&hold.group, hold.kind, hold.instance, &hold.message, hold.since, hold.until)
}

/// Within one cause: what brings capacity comes before what takes it, and leaving a balancer before leaving the world.
fn rank(action: &Action) -> (u8, Option<InstanceId>, &str) {
    match action {
        Action::CancelDrain { instance } => (0, Some(*instance), ""),
        Action::Create { reason } => (1, None, reason.as_str()),
        Action::ResolveCreate { instance } => (2, Some(*instance), ""),
        Action::StartDrain { instance, .. } => (3, Some(*instance), ""),
        Action::LbDeregister { lb, instance } => (4, Some(*instance), lb.as_str()),
        Action::Delete { instance, .. } => (5, Some(*instance), ""),
        Action::MarkDeleted { instance } => (6, Some(*instance), ""),
        Action::LbRegister { lb, instance } => (7, Some(*instance), lb.as_str()),
        Action::Adopt { vm } => (8, Some(vm.instance), vm.provider_id.as_deref().unwrap_or_default()),
        Action::TerminateOrphan { vm } => (9, Some(vm.instance), vm.provider_id.as_deref().unwrap_or_default()),
        Action::Forget { instance } => (10, Some(*instance), ""),
    }
}
