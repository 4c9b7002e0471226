//! A shard as a text picture, and a plan as text: how the tests of planner and checker speak.
//!
//! ```text
//! shard forced=30d
//! group web size=2 lbs=www
//!   a running
//!   b running silent=70s
//!   ? c seen=stopped        a VM without a record
//!   ! some-key              a record that does not parse
//! ```
//! Times are ages (`70s` ago); with a plus they lie ahead (`+70s`).

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use expect_test::Expect;

use super::{Action, Plan, plan};
use crate::{
    check,
    group::Desired,
    ids::{GroupRef, InstanceId, LbKey, Tenant},
    instance::{CreateReason, DrainReason, Health, LbState, Ownership, Phase, Seen},
    ports::provider::VmRef,
    snapshot::{
        BlockKind, Brake, Busy, Candidate, Completeness, CreateBlock, CreateWindow, DrainView, Failures, GroupView,
        InstanceView, ProviderView, Settings, ShardView, Snapshot,
    },
    time::Timestamp,
};

pub(crate) const NOW: Timestamp = Timestamp::from_millis(1_800_000_000_000);

/// Plans the picture, compares the text, and asks the checker for its opinion.
pub(crate) fn planned(picture: &str, expected: Expect) {
    let snapshot = shard(picture);
    let plan = plan(&snapshot, NOW);
    expected.assert_eq(&show(&snapshot, &plan));
    assert_eq!(check::check(&snapshot, &plan, NOW), vec![], "the checker objects");
}

pub(crate) fn settings() -> Settings {
    Settings {
        registration_timeout: span("5m"),
        deleted_record_retention: span("30m"),
        eligible_age: Duration::ZERO,
        forced_age: Duration::ZERO,
        ondemand_age: Duration::ZERO,
        runaway_base: 10,
        runaway_factor: 3,
    }
}

pub(crate) fn id(name: &str) -> InstanceId {
    let mut uuid = [0; 16];
    uuid[..name.len()].copy_from_slice(name.as_bytes());
    InstanceId::new("vmx".parse().unwrap(), uuid)
}

fn name(id: InstanceId) -> String {
    let uuid = id.uuid();
    let name: String = uuid.iter().take_while(|byte| byte.is_ascii_alphanumeric()).map(|byte| *byte as char).collect();
    if name.is_empty() { id.to_string() } else { name }
}

pub(crate) fn group_ref(text: &str) -> GroupRef {
    match text.split_once('/') {
        Some((tenant, group)) => GroupRef::new(tenant.parse().unwrap(), group.parse().unwrap()),
        None => GroupRef::new(Tenant::default_tenant(), text.parse().unwrap()),
    }
}

fn span(text: &str) -> Duration {
    let (number, unit) = text.split_at(text.len() - 1);
    let number: u64 = number.parse().unwrap_or_else(|_| panic!("no duration: {text}"));
    Duration::from_secs(match unit {
        "s" => number,
        "m" => number * 60,
        "h" => number * 3600,
        "d" => number * 86400,
        _ => panic!("no duration: {text}"),
    })
}

fn when(text: &str) -> Timestamp {
    match text.strip_prefix('+') {
        Some(ahead) => NOW.plus(span(ahead)),
        None => NOW.minus(span(text)),
    }
}

fn ids(text: &str) -> impl Iterator<Item = InstanceId> {
    text.split(',').map(id)
}

pub(crate) fn shard(picture: &str) -> Snapshot {
    let mut shard = ShardView {
        complete: Completeness::ALL,
        provider: ProviderView::Available,
        brake: Brake::default(),
        settings: settings(),
    };
    let mut groups = BTreeMap::new();
    let mut current: Option<GroupRef> = None;
    for line in picture.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[0] {
            "shard" => words[1..].iter().for_each(|word| set_shard(&mut shard, word)),
            "group" => {
                let group = group_ref(words[1]);
                let mut view = empty();
                words[2..].iter().for_each(|word| set_group(&mut view, word));
                groups.insert(group.clone(), view);
                current = Some(group);
            }
            first => {
                let view: &mut GroupView = groups.get_mut(current.as_ref().unwrap()).unwrap();
                match first {
                    "?" => view.candidates.push(candidate(&words[1..])),
                    "!" => view.corrupt.push(words[1].to_owned()),
                    _ => {
                        let it = instance(view, &words);
                        view.instances.insert(id(first), it);
                    }
                }
            }
        }
    }
    Snapshot { shard, groups }
}

fn set_shard(shard: &mut ShardView, word: &str) {
    let (key, value) = word.split_once('=').unwrap_or((word, ""));
    let settings = &mut shard.settings;
    match key {
        "no-config" => shard.complete.config = false,
        "no-groups" => shard.complete.groups = false,
        "no-records" => shard.complete.records = false,
        "no-listing" => shard.complete.listing = false,
        "unavailable" => {
            shard.provider = ProviderView::Unavailable { since: NOW, message: "no route".to_owned() };
        }
        "unauthorized" => {
            shard.provider = ProviderView::Unauthorized { since: NOW, message: "denied".to_owned() };
        }
        "held" => shard.brake.held = ids(value).collect(),
        "released" => shard.brake.released = ids(value).collect(),
        "timeout" => settings.registration_timeout = span(value),
        "retention" => settings.deleted_record_retention = span(value),
        "eligible" => settings.eligible_age = span(value),
        "forced" => settings.forced_age = span(value),
        "ondemand" => settings.ondemand_age = span(value),
        "runaway" => (settings.runaway_base, settings.runaway_factor) = (value.parse().unwrap(), 0),
        _ => panic!("no word of a shard: {word}"),
    }
}

pub(crate) fn empty() -> GroupView {
    GroupView {
        desired: Desired::Known(0),
        infra_hash: "h1".to_owned(),
        drain_timeout: span("5m"),
        load_balancers: vec![],
        rollout_paused: false,
        victims: vec![],
        create_blocks: vec![],
        failures: Failures::default(),
        window: CreateWindow::default(),
        instances: BTreeMap::new(),
        candidates: vec![],
        corrupt: vec![],
        mass_removal: None,
    }
}

fn set_group(view: &mut GroupView, word: &str) {
    let (key, value) = word.split_once('=').unwrap_or((word, ""));
    match key {
        "size" => {
            view.desired = Desired::Known(value.parse().unwrap());
            view.window.largest_size = value.parse().unwrap();
        }
        "tombstoned" => view.desired = Desired::Tombstoned,
        "unknown" => view.desired = Desired::Unknown,
        "hash" => view.infra_hash = value.to_owned(),
        "drain" => view.drain_timeout = span(value),
        "lbs" => view.load_balancers = value.split(',').map(|lb| lb.parse().unwrap()).collect(),
        "paused" => view.rollout_paused = true,
        "victims" => view.victims = ids(value).collect(),
        "mass-removal" => view.mass_removal = Some(NOW.minus(span("1m"))),
        "creates" => view.window.n_creates = value.parse().unwrap(),
        "frees" => view.window.frees_at = Some(when(value)),
        "failed-rollouts" => view.failures.rollout_in_a_row = value.parse().unwrap(),
        "probe" => view.failures.rollout_probe_at = Some(when(value)),
        "failed-replacements" => view.failures.replacement_in_a_row = value.parse().unwrap(),
        "retry" => view.failures.replacement_retry_at = Some(when(value)),
        "block" => {
            let (kind, until) = value.split_once(':').unwrap_or((value, ""));
            view.create_blocks.push(CreateBlock {
                kind: match kind {
                    "capacity" => BlockKind::NoCapacity,
                    "quota" => BlockKind::Quota,
                    "auth" => BlockKind::ProviderAuth,
                    "invalid" => BlockKind::InvalidRequest,
                    "image" => BlockKind::ImageUnresolved,
                    "backoff" => BlockKind::BackingOff,
                    _ => panic!("no block: {word}"),
                },
                message: kind.to_owned(),
                since: NOW.minus(span("1m")),
                until: (!until.is_empty()).then(|| when(until)),
            });
        }
        _ => panic!("no word of a group: {word}"),
    }
}

fn seen(text: &str) -> Seen {
    [
        Seen::NotAsked,
        Seen::Unknown,
        Seen::Pending,
        Seen::Running,
        Seen::Stopping,
        Seen::Stopped,
        Seen::Suspended,
        Seen::Deleting,
        Seen::Repairing,
        Seen::HostDown,
        Seen::Gone,
    ]
    .into_iter()
    .find(|it| it.as_str() == text)
    .unwrap_or_else(|| panic!("nothing is seen as {text}"))
}

fn candidate(words: &[&str]) -> Candidate {
    let mut candidate = Candidate {
        vm: VmRef { instance: id(words[0]), provider_id: None },
        seen: Seen::Running,
        ownership: Ownership::Managed,
        created_at: Some(when("1m")),
    };
    for word in &words[1..] {
        match word.split_once('=').unwrap_or((word, "")) {
            ("seen", value) => candidate.seen = seen(value),
            ("age", value) => candidate.created_at = Some(when(value)),
            ("ondemand", _) => candidate.ownership = Ownership::OnDemand,
            _ => panic!("no word of a candidate: {word}"),
        }
    }
    candidate
}

/// The instance of a picture's line: by its phase everything is as it should be, the words say what is not.
fn instance(view: &GroupView, words: &[&str]) -> InstanceView {
    let phase = match words[1] {
        "pending" => Phase::Pending,
        "failed" => Phase::Failed,
        "provisioning" => Phase::Provisioning,
        "running" => Phase::Running,
        "draining" => Phase::Draining,
        "deleting" => Phase::Deleting,
        "deleted" => Phase::Deleted,
        other => panic!("no phase: {other}"),
    };
    let in_use = matches!(phase, Phase::Running | Phase::Draining | Phase::Deleting | Phase::Deleted);
    let mut it = InstanceView {
        ownership: Ownership::Managed,
        phase,
        reason: CreateReason::ScaleUp,
        created_at: when(if in_use { "1h" } else { "30s" }),
        timers_from: when(if in_use { "1h" } else { "30s" }),
        adopted: false,
        confirmed: phase != Phase::Pending,
        registered_at: in_use.then(|| when("59m")),
        infra_hash: "h1".to_owned(),
        seen: match phase {
            Phase::Pending | Phase::Failed => Seen::NotAsked,
            Phase::Deleted => Seen::Gone,
            _ => Seen::Running,
        },
        seen_since: Some(when("59m")),
        health: if in_use { Health::Healthy } else { Health::Starting },
        reported: in_use,
        drain: None,
        delete_requested_at: matches!(phase, Phase::Deleting | Phase::Deleted).then(|| when("2m")),
        delete_gone_at: (phase == Phase::Deleted).then(|| when("1m")),
        create_failed_at: (phase == Phase::Failed).then(|| when("1m")),
        replace_marked_at: None,
        advised_at: None,
        load_balancers: BTreeMap::new(),
        busy: None,
        next_attempt_at: None,
    };
    if matches!(phase, Phase::Running | Phase::Draining) {
        it.load_balancers = view.load_balancers.iter().map(|lb| (lb.clone(), LbState::Registered)).collect();
    }
    if phase == Phase::Draining {
        it.drain = Some(drain(&mut None));
    }
    words[2..].iter().for_each(|word| set_instance(&mut it, word));
    it
}

fn drain(slot: &mut Option<DrainView>) -> DrainView {
    slot.take().unwrap_or(DrainView {
        reason: DrainReason::ScaleDown,
        started_at: when("1m"),
        delete_at: when("+4m"),
        acked: false,
    })
}

fn set_instance(it: &mut InstanceView, word: &str) {
    let (key, value) = word.split_once('=').unwrap_or((word, ""));
    match key {
        "age" => {
            (it.created_at, it.timers_from) = (when(value), when(value));
            it.registered_at = it.registered_at.map(|at| at.max(it.created_at));
        }
        "hash" => it.infra_hash = value.to_owned(),
        "seen" => {
            let (what, since) = value.split_once(':').unwrap_or((value, "5s"));
            (it.seen, it.seen_since) = (seen(what), Some(when(since)));
        }
        "lost" => it.health = Health::Lost { since: when(value) },
        "silent" => it.health = Health::Silent { since: when(value) },
        "notice" => {
            let deadline = (!value.is_empty()).then(|| when(value));
            it.health = Health::Terminating { noticed_at: when("1s"), deadline };
        }
        "starting" => it.health = Health::Starting,
        "unreported" => it.reported = false,
        "unregistered" => it.registered_at = None,
        "adopted" => (it.adopted, it.registered_at) = (true, None),
        "ondemand" => (it.ownership, it.reason) = (Ownership::OnDemand, CreateReason::OnDemand),
        "rotation" => it.reason = CreateReason::Rotation,
        "replacement" => it.reason = CreateReason::Replacement,
        "busy" => it.busy = Some(Busy::Other),
        "creating" => it.busy = Some(Busy::Creating),
        "marked" => it.replace_marked_at = Some(when(value)),
        "advised" => it.advised_at = Some(when(value)),
        "next" => it.next_attempt_at = Some(when(value)),
        "acked" => it.drain = Some(DrainView { acked: true, ..drain(&mut it.drain) }),
        "why" => {
            let reason = DrainReason::parse(value).unwrap();
            it.drain = Some(DrainView { reason, ..drain(&mut it.drain) });
        }
        "until" => it.drain = Some(DrainView { delete_at: when(value), ..drain(&mut it.drain) }),
        "begun" => it.drain = Some(DrainView { started_at: when(value), ..drain(&mut it.drain) }),
        "ended" => match it.phase {
            Phase::Failed => it.create_failed_at = Some(when(value)),
            _ => it.delete_gone_at = Some(when(value)),
        },
        "lb" => {
            let (lb, state) = value.split_once(':').unwrap();
            let state = match state {
                "absent" => LbState::Absent,
                "registering" => LbState::Registering,
                "coming" => LbState::Coming,
                "registered" => LbState::Registered,
                "deregistering" => LbState::Deregistering,
                "draining-out" => LbState::DrainingOut,
                _ => panic!("no state: {word}"),
            };
            it.load_balancers.insert(lb.parse::<LbKey>().unwrap(), state);
        }
        _ => panic!("no word of an instance: {word}"),
    }
}

fn moment(at: Timestamp) -> String {
    let millis = at.as_millis() - NOW.as_millis();
    if millis % 1000 == 0 { format!("{:+}s", millis / 1000) } else { format!("{millis:+}ms") }
}

/// A plan as lines: priority, verb, whom, why. With several groups each line names its own.
pub(crate) fn show(snapshot: &Snapshot, plan: &Plan) -> String {
    let mut text = String::new();
    let prefix = |group: &GroupRef| if 1 < snapshot.groups.len() { format!("{group}: ") } else { String::new() };
    for planned in &plan.actions {
        let what = match &planned.action {
            Action::Create { reason } => format!("create {}", reason.as_str()),
            Action::ResolveCreate { instance } => format!("resolve {}", name(*instance)),
            Action::StartDrain { instance, reason, delete_at, replacement } => {
                let by = replacement.map(|it| format!(" for {}", name(it))).unwrap_or_default();
                format!("drain {} {} until {}{by}", name(*instance), reason.as_str(), moment(*delete_at))
            }
            Action::CancelDrain { instance } => format!("undrain {}", name(*instance)),
            Action::Delete { instance, reason: super::DeleteReason::Drained(reason) } => {
                format!("delete {} drained for {}", name(*instance), reason.as_str())
            }
            Action::Delete { instance, reason } => format!("delete {} {reason}", name(*instance)),
            Action::MarkDeleted { instance } => format!("mark-deleted {}", name(*instance)),
            Action::Forget { instance } => format!("forget {}", name(*instance)),
            Action::Adopt { vm } => format!("adopt {}", name(vm.instance)),
            Action::TerminateOrphan { vm } => format!("terminate {}", name(vm.instance)),
            Action::LbRegister { lb, instance } => format!("register {} in {lb}", name(*instance)),
            Action::LbDeregister { lb, instance } => format!("deregister {} from {lb}", name(*instance)),
        };
        writeln!(text, "{}{} {what}", prefix(&planned.group), planned.priority as u8).unwrap();
    }
    for hold in &plan.holds {
        let whom = hold.instance.map(|it| format!(" {}", name(it))).unwrap_or_default();
        let until = hold.until.map(|at| format!(" until {}", moment(at))).unwrap_or_default();
        writeln!(text, "{}hold {}{whom}{until}", prefix(&hold.group), hold.kind.as_str()).unwrap();
    }
    if let Some(at) = plan.wake_at {
        writeln!(text, "wake {}", moment(at)).unwrap();
    }
    text
}
