//! From facts to sentences. Pure.

use nstance_core::time::Timestamp;
use nstance_proto::v1::{ExplainResponse, InstanceStatusResponse};

use crate::words::{age, left};

pub(super) struct Answer {
    /// One sentence about what it is now.
    pub(super) summary: String,
    /// How it came to that.
    pub(super) because: Vec<String>,
    /// What a person can do.
    pub(super) next: Option<String>,
}

pub(super) fn answer(it: &InstanceStatusResponse, explained: &ExplainResponse, now: Timestamp) -> Answer {
    let fact = |name: &str| explained.facts.iter().find(|fact| fact.name == name).map(|fact| fact.value.as_str());
    let last = |reason: &str| explained.history.iter().rev().find(|event| event.reason == reason);
    let mut because = Vec::new();
    because.extend(fact("created").and_then(|why| made(why, &it.group)));
    because.extend(fact("replace").map(|by| format!("somebody asked for its replacement: {by}")));
    let (summary, next) = match it.status.as_str() {
        "pending" => {
            let since = age(it.created_at.as_ref(), now);
            (format!("asked for {since} ago; the provider has not confirmed a machine yet"), None)
        }
        "failed" => {
            because.push(format!("the provider refused it: {}: {}", it.failure_reason, it.failure_message));
            let next = if it.on_demand { "repeat `instance create`".to_owned() } else { explain(&it.group) };
            ("it never came to be".to_owned(), Some(next))
        }
        "provisioning" => {
            let since = age(it.created_at.as_ref(), now);
            let boot = booting(it, now);
            because.extend(boot);
            let next = (it.provider_state == "running").then(|| "look at the machine's console, or wait".to_owned());
            (format!("its machine is there ({}), its agent has not come since {since}", it.provider_state), next)
        }
        "running" => running(it, now),
        "draining" => draining(it, now, &mut because),
        _ => {
            because.extend(fact("delete").map(went));
            if let Some(event) =
                last("InstanceDead").or_else(|| last("InstanceNeverRegistered")).or_else(|| last("InstanceSilent"))
            {
                because.push(format!("{} ago {}: {}", age(event.at.as_ref(), now), event.reason, event.message));
            }
            because.extend(booting(it, now).filter(|_| it.registered_at.is_none()));
            let gone = age(it.deleted_at.as_ref(), now);
            let summary =
                if gone.is_empty() { "its machine is being deleted".to_owned() } else { format!("gone since {gone}") };
            let next = (!it.on_demand).then(|| format!("nstance-admin instance list --group {}", it.group));
            (summary, next)
        }
    };
    if !it.replaced_by.is_empty() {
        because.push(format!("its replacement is {}", it.replaced_by));
    }
    let mut next = next;
    for action in &explained.actions {
        let reason = if action.reason.is_empty() { String::new() } else { format!(" because of {}", action.reason) };
        because.push(format!("due now: {}{reason}", action.kind));
    }
    for hold in &explained.holds {
        because.push(format!("held back by {}: {}", hold.kind, hold.message));
        next.get_or_insert_with(|| explain(&it.group));
    }
    Answer { summary, because, next }
}

fn explain(group: &str) -> String {
    format!("nstance-admin explain group {group}")
}

fn made(why: &str, group: &str) -> Option<String> {
    Some(match why {
        "scale-up" => format!("it was made because group {group} had fewer instances than asked for"),
        "replacement" => format!("it was made in place of an instance of group {group} that was lost"),
        "rotation" => format!("it was made to take over from an older instance of group {group}"),
        "on-demand" => "it was made because somebody asked for exactly one; no group counts it".to_owned(),
        _ => return None,
    })
}

/// `dead by planner`, as records have it.
fn went(value: &str) -> String {
    let (reason, by) = value.split_once(" by ").unwrap_or((value, ""));
    let by = if by.is_empty() { String::new() } else { format!(" (decided by {by})") };
    let words = match reason {
        "dead" => "its machine had died, so its place was given to another one",
        "never-registered" => "its agent never registered in time",
        "unresolved" => "nobody could find out what became of its create",
        other => return format!("it was deleted: {}{by}", cause(other)),
    };
    format!("{words}{by}")
}

/// The reasons of drains.
fn cause(reason: &str) -> String {
    match reason {
        "scale-down" => "its group was made smaller",
        "group-deleted" => "its group was deleted",
        "requested" => "somebody asked for it",
        "replaced" => "somebody asked for its replacement",
        "unhealthy" => "its agent had been silent for too long",
        "config-drift" => "the config of its group changed",
        "forced-expiry" | "eligible-expiry" | "ondemand-expiry" => "it had reached its age",
        "spot-terminating" => "the provider announced its end",
        "maintenance" => "the provider announced maintenance",
        other => return other.to_owned(),
    }
    .to_owned()
}

fn running(it: &InstanceStatusResponse, now: Timestamp) -> (String, Option<String>) {
    let seen = age(it.last_seen.as_ref(), now);
    let said = format!("the provider says {}", it.provider_state);
    match it.health.as_str() {
        "healthy" => (format!("it runs; its agent reported {seen} ago"), None),
        "starting" => ("its agent registered and has not reported yet".to_owned(), None),
        "lost" => (format!("its agent's connection is gone since {seen}; {said}"), None),
        "silent" => {
            let next = format!("nstance-admin explain instance {}", it.instance_id);
            (format!("its agent has said nothing for {seen}; {said}"), Some(next))
        }
        "terminating" => {
            let notice = it.notice.as_ref();
            let left = left(notice.and_then(|it| it.deadline.as_ref()), now);
            let left = if left.is_empty() { "soon".to_owned() } else { format!("in {left}") };
            let action = notice.map_or("its end", |it| it.action.as_str());
            (format!("the provider announced {action} {left}"), None)
        }
        other => (format!("it runs, {other}; {said}"), None),
    }
}

fn draining(it: &InstanceStatusResponse, now: Timestamp, because: &mut Vec<String>) -> (String, Option<String>) {
    let Some(drain) = &it.drain else { return ("it is being drained".to_owned(), None) };
    because.push(format!("it is drained because {}", cause(&drain.reason)));
    if drain.acked_at.is_some() {
        return ("its drain was acknowledged; it is deleted next".to_owned(), None);
    }
    let left = left(drain.delete_at.as_ref(), now);
    let summary = format!("it is being drained: waits for an acknowledgement, and is deleted in {left} at the latest");
    (summary, Some(format!("nstance-admin instance ack {}, if nothing of value is on it", it.instance_id)))
}

/// The stage that the machine is in, or failed at.
fn booting(it: &InstanceStatusResponse, now: Timestamp) -> Option<String> {
    let boot = it.boot.as_ref()?;
    if boot.failed {
        return Some(format!("booting failed: {}", boot.reason));
    }
    let stage = boot.stages.iter().rev().find(|it| matches!(it.state.as_str(), "running" | "stalled"))?;
    Some(format!("boot stage {} is {} for {}", stage.name, stage.state, age(stage.started.as_ref(), now)))
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use nstance_proto::v1::{
        BootReport, BootStage, DrainStatus, Event, Fact, PlanHold, PlannedAction, TerminationNotice,
    };

    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_000_000);

    fn ago(seconds: i64) -> Option<prost_types::Timestamp> {
        Some(prost_types::Timestamp { seconds: 1000 - seconds, nanos: 0 })
    }

    fn instance(status: &str, health: &str) -> InstanceStatusResponse {
        InstanceStatusResponse {
            instance_id: "tst1".into(),
            group: "workers".into(),
            status: status.into(),
            health: health.into(),
            provider_state: "running".into(),
            created_at: ago(90),
            last_seen: ago(4),
            ..InstanceStatusResponse::default()
        }
    }

    fn facts(facts: &[(&str, &str)]) -> ExplainResponse {
        let fact =
            |(name, value): &(&str, &str)| Fact { name: (*name).into(), value: (*value).into(), ..Fact::default() };
        ExplainResponse { facts: facts.iter().map(fact).collect(), ..ExplainResponse::default() }
    }

    fn check(it: &InstanceStatusResponse, explained: &ExplainResponse, expected: Expect) {
        let answer = answer(it, explained, NOW);
        let mut lines = vec![answer.summary];
        lines.extend(answer.because.iter().map(|it| format!("  {it}")));
        lines.extend(answer.next.map(|it| format!("next: {it}")));
        expected.assert_eq(&lines.join("\n"));
    }

    #[test]
    fn killed_instance_is_said_to_have_died() {
        let gone = InstanceStatusResponse { deleted_at: ago(20), ..instance("deleted", "silent") };
        let mut explained = facts(&[("created", "scale-up"), ("delete", "dead by server-1")]);
        let event = |reason: &str, seconds, message: &str| Event {
            reason: reason.into(),
            at: ago(seconds),
            message: message.into(),
            ..Event::default()
        };
        explained.history =
            vec![event("InstanceLost", 31, "report stream ended"), event("InstanceDead", 30, "the provider says gone")];
        check(
            &gone,
            &explained,
            expect![[r#"
                gone since 20s
                  it was made because group workers had fewer instances than asked for
                  its machine had died, so its place was given to another one (decided by server-1)
                  30s ago InstanceDead: the provider says gone
                next: nstance-admin instance list --group workers"#]],
        );
    }

    #[test]
    fn instance_that_never_joined_shows_where_its_boot_ended() {
        let boot = BootReport { failed: true, reason: "cloud-init exited with 1".into(), ..BootReport::default() };
        let gone = InstanceStatusResponse { deleted_at: ago(20), boot: Some(boot), ..instance("deleted", "starting") };
        check(
            &gone,
            &facts(&[("created", "replacement"), ("delete", "never-registered by server-1")]),
            expect![[r#"
                gone since 20s
                  it was made in place of an instance of group workers that was lost
                  its agent never registered in time (decided by server-1)
                  booting failed: cloud-init exited with 1
                next: nstance-admin instance list --group workers"#]],
        );
        let stage =
            BootStage { name: "cloud-init".into(), state: "running".into(), started: ago(12), ..BootStage::default() };
        let boot = BootReport { stages: vec![stage], ..BootReport::default() };
        check(
            &InstanceStatusResponse { boot: Some(boot), ..instance("provisioning", "starting") },
            &facts(&[]),
            expect![[r#"
                its machine is there (running), its agent has not come since 1m30s
                  boot stage cloud-init is running for 12s
                next: look at the machine's console, or wait"#]],
        );
    }

    #[test]
    fn waiting_instance_names_what_holds_it() {
        let mut explained = facts(&[("created", "scale-up")]);
        let hold =
            PlanHold { kind: "NoCapacity".into(), message: "all subnets are full".into(), ..PlanHold::default() };
        explained.holds = vec![hold];
        explained.actions = vec![PlannedAction { kind: "ResolveCreate".into(), ..PlannedAction::default() }];
        check(
            &instance("pending", "starting"),
            &explained,
            expect![[r#"
                asked for 1m30s ago; the provider has not confirmed a machine yet
                  it was made because group workers had fewer instances than asked for
                  due now: ResolveCreate
                  held back by NoCapacity: all subnets are full
                next: nstance-admin explain group workers"#]],
        );
        let failed = InstanceStatusResponse {
            failure_reason: "quota".into(),
            failure_message: "20 of 20 used".into(),
            ..instance("failed", "starting")
        };
        check(
            &failed,
            &facts(&[]),
            expect![[r#"
                it never came to be
                  the provider refused it: quota: 20 of 20 used
                next: nstance-admin explain group workers"#]],
        );
    }

    #[test]
    fn drain_says_who_must_act_and_until_when() {
        let drain = DrainStatus { reason: "scale-down".into(), delete_at: ago(-75), ..DrainStatus::default() };
        let leaving = InstanceStatusResponse { drain: Some(drain.clone()), ..instance("draining", "healthy") };
        check(
            &leaving,
            &facts(&[]),
            expect![[r#"
                it is being drained: waits for an acknowledgement, and is deleted in 1m15s at the latest
                  it is drained because its group was made smaller
                next: nstance-admin instance ack tst1, if nothing of value is on it"#]],
        );
        let acked = DrainStatus { acked_at: ago(1), reason: "replaced".into(), ..drain };
        check(
            &InstanceStatusResponse {
                drain: Some(acked),
                replaced_by: "tst2".into(),
                ..instance("draining", "healthy")
            },
            &facts(&[("replace", "bad disk by opr1")]),
            expect![[r#"
                its drain was acknowledged; it is deleted next
                  somebody asked for its replacement: bad disk by opr1
                  it is drained because somebody asked for its replacement
                  its replacement is tst2"#]],
        );
    }

    #[test]
    fn running_instance_says_how_its_agent_is() {
        let explained = facts(&[("created", "on-demand")]);
        check(
            &instance("running", "healthy"),
            &explained,
            expect![[r#"
                it runs; its agent reported 4s ago
                  it was made because somebody asked for exactly one; no group counts it"#]],
        );
        check(
            &instance("running", "lost"),
            &facts(&[]),
            expect!["its agent's connection is gone since 4s; the provider says running"],
        );
        let notice = TerminationNotice { action: "preempt".into(), deadline: ago(-30), ..TerminationNotice::default() };
        check(
            &InstanceStatusResponse { notice: Some(notice), ..instance("running", "terminating") },
            &facts(&[]),
            expect!["the provider announced preempt in 30s"],
        );
    }
}
