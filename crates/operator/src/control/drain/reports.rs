//! Writes what people read about drains: `status.drain` and condition `DrainingSucceeded` of NstanceMachines; pools collect it
//! from there. What only changes in detail is written at most every ten seconds.

use std::time::Duration;

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Condition, jiff::Timestamp};
use serde_json::{Value, json};

use super::{Drains, Subject};
use crate::{
    api::{
        NstanceMachine,
        conditions::{self, kind},
        machine::DrainStatus,
        names::{API_VERSION, manager},
    },
    cluster::events::{Reason, Severity},
    decide::{
        drain::{
            Memory, after,
            report::{self, ConditionText, Progress},
            until,
        },
        observed::Drain,
    },
    ports::{Apply, KubeErrorKind, ObjectRef, Target, kinds},
};

/// The least time between two writes that differ only in details.
const PACE: Duration = Duration::from_secs(10);

/// What was last written to an NstanceMachine.
#[derive(Debug, Clone)]
pub(super) struct Reported {
    status: DrainStatus,
    condition: Condition,
    at: Timestamp,
}

/// The condition as it is now. Its transition time is the known one's unless its status changes.
fn made(text: &ConditionText, known: &Condition, generation: Option<i64>, now: Timestamp) -> Condition {
    let mut all = vec![known.clone()];
    conditions::set(&mut all, &known.type_, text.status, text.reason, text.message.clone(), generation, now);
    all.remove(0)
}

fn blank(kind: &str) -> Condition {
    Condition {
        type_: kind.to_owned(),
        status: String::new(),
        reason: String::new(),
        message: String::new(),
        observed_generation: None,
        last_transition_time: k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::UNIX_EPOCH),
    }
}

impl Drains {
    /// Writes where a drain stands. `Some`: there is more to write, after this time.
    pub(super) async fn report(
        &self,
        subject: &Subject,
        drain: &Drain,
        progress: &Progress,
        memory: &Memory,
        blocked: &[String],
    ) -> Option<Duration> {
        let machine = subject.nstance_machine.as_ref()?;
        let now = self.ctx.now();
        let last = self.open().get(&subject.id).and_then(|it| it.reported.clone()).or_else(|| stored(machine));
        let known = last.as_ref().map_or_else(|| blank(kind::DRAINING_SUCCEEDED), |it| it.condition.clone());
        let text = report::condition(progress, memory, blocked);
        let condition = made(&text, &known, machine.metadata.generation, now);
        let status = report::status(drain, memory, blocked);
        if let Some(last) = &last {
            if last.status == status && last.condition == condition {
                return None;
            }
            let due = after(last.at, PACE);
            if last.condition.reason == condition.reason && now < due {
                return Some(until(now, due));
            }
        }
        let body = json!({"drain": status, "conditions": [condition]});
        if !self.apply_status(machine, body).await {
            return Some(super::RETRY);
        }
        if !blocked.is_empty() {
            let text = report::shortened(blocked).join("; ");
            self.tell(subject, None, Severity::Warning, Reason::DrainBlocked, &text);
        }
        if let Some(open) = self.open().get_mut(&subject.id) {
            open.reported = Some(Reported { status, condition, at: now });
        }
        None
    }

    /// The drain is off: takes back what was written of it.
    pub(super) async fn report_nothing(&self, subject: &Subject) {
        let Some(machine) = &subject.nstance_machine else { return };
        if machine.status.as_ref().is_some_and(|it| it.drain.is_some()) {
            self.apply_status(machine, json!({})).await;
        }
    }

    /// Whether it was written, or need not be any more.
    async fn apply_status(&self, machine: &NstanceMachine, status: Value) -> bool {
        let name = machine.metadata.name.as_deref().unwrap_or_default();
        let object = ObjectRef::new(kinds::NSTANCE_MACHINE, &self.ctx.settings.namespace, name);
        let body = json!({
            "apiVersion": API_VERSION,
            "kind": object.kind.kind,
            "metadata": {"name": name, "namespace": object.namespace, "uid": machine.metadata.uid},
            "status": status,
        });
        let how = Apply { manager: manager::DRAIN, force: true, target: Target::Status };
        match self.ctx.kube.apply(&object, &body, how).await {
            Ok(_) => true,
            Err(error) if matches!(error.kind, KubeErrorKind::NotFound | KubeErrorKind::Conflict) => true,
            Err(error) => {
                tracing::warn!(%object, %error, "status of a drain not written, trying again");
                false
            }
        }
    }
}

/// What an earlier run of the operator wrote.
fn stored(machine: &NstanceMachine) -> Option<Reported> {
    let status = machine.status.as_ref()?;
    let condition = conditions::find(&status.conditions, kind::DRAINING_SUCCEEDED)?;
    Some(Reported { status: status.drain.clone()?, condition: condition.clone(), at: Timestamp::UNIX_EPOCH })
}
