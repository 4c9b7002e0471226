//! What a report says of its machine: cut to size, stored, and never believed for more than it is.
//!
//! A field that is out of bounds is cut or left out, and counted; the stream goes on. (A message beyond all bounds does
//! not come this far: the port does not take it.) The rest of a report, which
//! matters more, is taken in before this by `health.rs`.

use std::{sync::Arc, time::Duration};

use nstance_core::{
    group::Desired,
    ids::{GroupRef, InstanceId},
    instance::{Addresses, Phase},
    time::Timestamp,
};
use nstance_proto::v1;
use nstance_rt::chain::Chain;
use nstance_store::cache::Cache;
use prost::Message as _;

use super::register::is_host;
use crate::{
    events::{Reason, Tell},
    metrics::{
        FieldLabels, Metrics,
        hosts::{Machines, Sizes},
    },
    term::Term,
    world::{GroupState, Load, StreamId, counts_for},
};

const MAX_STAGES: usize = 64;
const MAX_TAILS: usize = 16;
/// All log tails of a black box together.
const MAX_LOGS: usize = 16 * 1024;
const MAX_NAME: usize = 64;
const MAX_DETAIL: usize = 256;
const MAX_REASON: usize = 2 * 1024;
/// A page of a list shows hundreds of instances in one message.
const MAX_BRIEF_STAGES: usize = 32;
const MAX_BRIEF_TEXT: usize = 128;
/// Nothing moves more than a petabyte in a minute.
const MAX_BYTES: f64 = 1e15;
/// The figures of `one_minute` are of the last minute, or of less while the agent is young.
const MINUTE: f64 = 60.0;

/// A black box that changes all the time is written down this often.
const CACHE_PAUSE: Duration = Duration::from_secs(10);
/// What one machine can say anew with every report is told this often: its failed boot, names that are not its own.
pub(super) const TELL_PAUSE: Duration = Duration::from_secs(30);

/// Takes in what a report of this stream says of the machine.
pub(super) fn take(
    term: &Term,
    (group, instance, stream): (&GroupRef, InstanceId, StreamId),
    report: &v1::HealthReportRequest,
    now: Timestamp,
) {
    let metrics = &term.shared.metrics;
    let boot = report.boot.as_ref().map(|boot| cut_boot(boot, metrics));
    let info = report.machine.as_ref().map(|machine| cut_machine(machine, metrics));
    let until = now.plus(counts_for(Duration::from_millis(u64::from(report.interval_ms))));
    let load = load(report, metrics).map(|load| (load, until));
    let addresses = addresses(report, metrics);
    let spot = report.provider_facts.get("spot").and_then(|it| it.parse::<bool>().ok());
    let mut failed = None;
    let mut write = None;
    {
        let mut state = term.world.lock();
        let Some(entry) = state.entries.get_mut(&instance) else { return };
        if entry.link.stream != Some(stream) {
            return;
        }
        let machine = &mut entry.link.machine;
        machine.info = info.or(machine.info.take());
        machine.load = load.or(machine.load);
        machine.spot = spot.or(machine.spot);
        let said = &mut machine.addresses;
        for (said, new) in [
            (&mut said.ip4, addresses.ip4),
            (&mut said.ip6, addresses.ip6),
            (&mut said.hostname, addresses.hostname),
            (&mut said.fqdn, addresses.fqdn),
        ] {
            if new.is_some() {
                *said = new;
            }
        }
        let known = &mut machine.boot;
        if let Some(boot) = boot
            && known.report.as_deref() != Some(&boot)
        {
            let is_news = boot.failed
                && known.report.as_ref().is_none_or(|old| !old.failed || old.reason != boot.reason)
                && known.told_at.is_none_or(|at| TELL_PAUSE <= now.since(at));
            if is_news {
                known.told_at = Some(now);
                failed = Some(boot.clone());
            }
            known.report = Some(Arc::new(boot));
            known.is_new = true;
        }
        // The word that it failed may be the last. By what was written, not by what was said: one that takes it back and
        // says it again would otherwise have us write all day.
        let is_last_word = known.report.as_ref().is_some_and(|it| it.failed) && !known.cached_failed;
        if is_last_word || known.cached_at.is_none_or(|at| CACHE_PAUSE <= now.since(at)) {
            write = known.to_cache(now);
        }
    }
    if let Some(boot) = write {
        put(term, instance, &boot, now);
    }
    if let Some(boot) = failed {
        let stage = boot.stages.iter().rev().find(|stage| matches!(stage.state.as_str(), "failed" | "stalled"));
        let reason = if boot.reason.is_empty() { "the machine did not say why" } else { boot.reason.as_str() };
        let tell = Tell::instance(Reason::BootFailed, group, instance, format!("boot failed: {reason}"));
        term.tell(match stage {
            Some(stage) => tell.detail("stage", &stage.name),
            None => tell,
        });
    }
}

/// Writes down what is not yet: whoever has spoken may never speak again.
pub(super) fn flush(term: &Term, instance: InstanceId) {
    let now = term.now();
    let write = term.world.lock().entries.get_mut(&instance).and_then(|entry| entry.link.machine.boot.to_cache(now));
    if let Some(boot) = write {
        put(term, instance, &boot, now);
    }
}

fn put(term: &Term, instance: InstanceId, boot: &v1::BootReport, now: Timestamp) {
    term.shared.cache.put_boot(instance, boot.failed, boot.encode_to_vec(), now);
}

fn count(metrics: &Metrics, field: &'static str, is_cut: bool) {
    if is_cut {
        metrics.report_fields_cut.get_or_create(&FieldLabels { field }).inc();
    }
}

/// Whole characters up to `max` bytes, without those that would move a reader's cursor or turn his text around.
pub(super) fn clean(text: &str, max: usize, has_lines: bool) -> String {
    let text = &text[..text.floor_char_boundary(max)];
    let is_plain = |it: char| {
        let is_line = has_lines && matches!(it, '\n' | '\t');
        let turns = matches!(it, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        is_line || !(it.is_control() || turns)
    };
    text.chars().map(|it| if is_plain(it) { it } else { ' ' }).collect()
}

/// A time that can be shown; from before 1970 or after 9999 there are none.
pub(super) fn at(time: Option<prost_types::Timestamp>) -> Option<prost_types::Timestamp> {
    time.filter(|it| (0..=253_402_300_799).contains(&it.seconds) && (0..1_000_000_000).contains(&it.nanos))
}

fn cut_boot(boot: &v1::BootReport, metrics: &Metrics) -> v1::BootReport {
    // The newest stages say where it stands.
    let from = boot.stages.len().saturating_sub(MAX_STAGES);
    let stages = boot.stages[from..]
        .iter()
        .map(|stage| v1::BootStage {
            name: clean(&stage.name, MAX_NAME, false),
            state: clean(&stage.state, MAX_NAME, false),
            started: at(stage.started),
            ended: at(stage.ended),
            detail: clean(&stage.detail, MAX_DETAIL, false),
        })
        .collect();
    let mut left = MAX_LOGS;
    let logs = boot
        .logs
        .iter()
        .take(MAX_TAILS)
        .map(|tail| {
            // Of a log its end counts.
            let from = tail.text.ceil_char_boundary(tail.text.len().saturating_sub(left));
            let text = clean(&tail.text[from..], MAX_LOGS, true);
            left = left.saturating_sub(text.len());
            v1::LogTail { name: clean(&tail.name, MAX_NAME, false), text }
        })
        .filter(|tail| !tail.text.is_empty())
        .collect();
    let kept = v1::BootReport { stages, failed: boot.failed, reason: clean(&boot.reason, MAX_REASON, true), logs };
    count(metrics, "boot", kept != *boot);
    kept
}

fn cut_machine(machine: &v1::MachineInfo, metrics: &Metrics) -> v1::MachineInfo {
    let text = |it: &str| clean(it, MAX_NAME, false);
    let kept = v1::MachineInfo {
        arch: text(&machine.arch),
        os: text(&machine.os),
        kernel: text(&machine.kernel),
        boot_id: text(&machine.boot_id),
        ..machine.clone()
    };
    count(metrics, "machine", kept != *machine);
    kept
}

fn addresses(report: &v1::HealthReportRequest, metrics: &Metrics) -> Addresses {
    let said = |text: &String, fits: &dyn Fn(&str) -> bool| {
        let told = !text.is_empty();
        let kept = (told && fits(text)).then(|| text.clone());
        count(metrics, "addresses", told && kept.is_none());
        kept
    };
    Addresses {
        ip4: said(&report.private_ipv4, &|it| it.parse::<std::net::Ipv4Addr>().is_ok()),
        ip6: said(&report.private_ipv6, &|it| it.parse::<std::net::Ipv6Addr>().is_ok()),
        hostname: said(&report.hostname, &is_host),
        fqdn: said(&report.fqdn, &is_host),
    }
}

fn load(report: &v1::HealthReportRequest, metrics: &Metrics) -> Option<Load> {
    let said = report.one_minute.as_ref()?;
    let known = |value: Option<f64>| {
        count(metrics, "metrics", value.is_none());
        value
    };
    // A hair above the whole is rounding.
    let share = |percent: f64| known((0.0..=100.5).contains(&percent).then(|| (percent / 100.0).min(1.0)));
    let seconds = window(report);
    let rate = |bytes: f64| known((0.0..=MAX_BYTES).contains(&bytes).then(|| bytes / seconds));
    Some(Load {
        cpu: share(said.cpu_usage),
        memory: share(said.memory_usage),
        disk: share(said.disk_used),
        sent: rate(said.network_bytes_sent),
        received: rate(said.network_bytes_received),
        read: rate(said.disk_bytes_read),
        written: rate(said.disk_bytes_written),
    })
}

/// How many seconds the figures of the last minute are of.
fn window(report: &v1::HealthReportRequest) -> f64 {
    let seconds = |it: Option<prost_types::Timestamp>| at(it).map(|it| it.seconds);
    match (seconds(report.window_start), seconds(report.window_end)) {
        (Some(start), Some(end)) if start < end => {
            i32::try_from(end - start).map_or(MINUTE, |it| f64::from(it).min(MINUTE))
        }
        _ => MINUTE,
    }
}

/// A black box for lists: where it stands and why, without its logs.
pub fn brief(boot: &v1::BootReport) -> v1::BootReport {
    let from = boot.stages.len().saturating_sub(MAX_BRIEF_STAGES);
    let stages = boot.stages[from..].iter().map(|stage| {
        let is_wrong = matches!(stage.state.as_str(), "failed" | "stalled");
        let detail = if is_wrong { clean(&stage.detail, MAX_BRIEF_TEXT, false) } else { String::new() };
        v1::BootStage { detail, ..stage.clone() }
    });
    let reason = clean(&boot.reason, MAX_BRIEF_TEXT, false);
    v1::BootReport { stages: stages.collect(), failed: boot.failed, reason, logs: Vec::new() }
}

/// Takes the black boxes over that this server's cache remembers: their agents may never speak again.
pub fn recall(term: &Term, cache: &Cache) {
    let boots = cache.boots().unwrap_or_else(|error| {
        tracing::warn!(error = %Chain(&error), "cached black boxes not read");
        Vec::new()
    });
    let mut state = term.world.lock();
    for (id, body) in boots {
        if let Some(entry) = state.entries.get_mut(&id)
            && entry.link.machine.boot.report.is_none()
            && let Ok(boot) = v1::BootReport::decode(body.as_slice())
        {
            entry.link.machine.boot.report = Some(Arc::new(boot));
        }
    }
}

impl Machines for Term {
    fn loads(&self) -> Vec<(GroupRef, Load)> {
        if self.tasks.is_stopping() {
            return Vec::new();
        }
        let now = self.now();
        let state = self.world.lock();
        let in_use = |it: &crate::world::Entry| matches!(it.phase(), Phase::Running | Phase::Draining);
        let loads = state.entries.values().filter(|it| in_use(it)).filter_map(|entry| {
            let (load, _) = entry.link.machine.load.filter(|(_, until)| now < *until)?;
            Some((entry.instance().group.clone(), load))
        });
        loads.collect()
    }

    fn sizes(&self) -> Vec<(GroupRef, Sizes)> {
        if self.tasks.is_stopping() {
            return Vec::new();
        }
        let state = self.world.lock();
        // A tombstone outlives its group by a day.
        let is_gone =
            |it: &GroupState| it.desired == Desired::Tombstoned && it.living.is_empty() && it.candidates.is_empty();
        let sizes = state.groups.iter().filter(|(_, it)| !is_gone(it));
        sizes.filter_map(|(group, it)| Some((group.clone(), it.shown?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(metrics: &Metrics, field: &'static str) -> u64 {
        metrics.report_fields_cut.get_or_create(&FieldLabels { field }).get()
    }

    #[test]
    fn a_black_box_within_its_bounds_is_kept_as_it_is() {
        let metrics = Metrics::new();
        let time = Some(prost_types::Timestamp { seconds: 1_800_000_000, nanos: 5 });
        let boot = v1::BootReport {
            stages: vec![v1::BootStage {
                name: "user:äpfel".to_owned(),
                state: "failed".to_owned(),
                started: time,
                ended: time,
                detail: "no network".to_owned(),
            }],
            failed: true,
            reason: "line one\nline two".to_owned(),
            logs: vec![v1::LogTail { name: "cloud-init".to_owned(), text: "a\tb\nc".to_owned() }],
        };
        assert_eq!(cut_boot(&boot, &metrics), boot);
        assert_eq!(counted(&metrics, "boot"), 0);
    }

    #[test]
    fn a_hostile_black_box_is_cut_field_by_field() {
        let metrics = Metrics::new();
        let wrong = Some(prost_types::Timestamp { seconds: -1, nanos: -1 });
        let stage = |n: usize| v1::BootStage {
            name: format!("{n}\u{1b}[2J{}", "ä".repeat(500)),
            state: "done\n".to_owned(),
            started: wrong,
            ended: wrong,
            detail: "\u{202e}x".repeat(1000),
        };
        let boot = v1::BootReport {
            stages: (0..10_000).map(stage).collect(),
            failed: true,
            reason: "\0".repeat(100_000),
            logs: (0..1000)
                .map(|n| v1::LogTail { name: n.to_string(), text: format!("{}{n} is the end", "ö\r".repeat(9000)) })
                .collect(),
        };
        let kept = cut_boot(&boot, &metrics);
        assert_eq!(kept.stages.len(), MAX_STAGES);
        assert!(kept.stages[63].name.starts_with("9999 [2J"), "{}", kept.stages[63].name);
        assert!(kept.stages.iter().all(|it| it.started.is_none() && it.ended.is_none()));
        assert!(kept.logs[0].text.ends_with("0 is the end"), "of a log the end is kept");
        assert!(kept.logs.iter().map(|it| it.text.len()).sum::<usize>() <= MAX_LOGS);
        assert!(kept.encoded_len() < 48 * 1024, "{}", kept.encoded_len());
        let texts = kept.stages.iter().flat_map(|it| [&it.name, &it.state, &it.detail]);
        for text in texts.chain(kept.logs.iter().map(|it| &it.text)).chain([&kept.reason]) {
            assert!(text.chars().all(|it| it == '\n' || !it.is_control()), "{text:?}");
            assert!(!text.contains('\u{202e}'));
        }
        assert_eq!(counted(&metrics, "boot"), 1);
        assert!(brief(&kept).encoded_len() < 6 * 1024, "{}", brief(&kept).encoded_len());
    }

    #[test]
    fn figures_that_cannot_be_are_left_out_one_by_one() {
        let metrics = Metrics::new();
        let report = |one_minute: v1::Metrics| v1::HealthReportRequest {
            one_minute: Some(one_minute),
            ..v1::HealthReportRequest::default()
        };
        let good = v1::Metrics {
            cpu_usage: 50.0,
            memory_usage: 100.2,
            disk_used: 0.0,
            network_bytes_sent: 600.0,
            ..v1::Metrics::default()
        };
        let read = load(&report(good.clone()), &metrics).unwrap();
        assert_eq!((read.cpu, read.memory, read.disk, read.sent), (Some(0.5), Some(1.0), Some(0.0), Some(10.0)));
        assert_eq!(counted(&metrics, "metrics"), 0);
        let young = v1::HealthReportRequest {
            window_start: Some(prost_types::Timestamp { seconds: 100, nanos: 0 }),
            window_end: Some(prost_types::Timestamp { seconds: 120, nanos: 0 }),
            ..report(good.clone())
        };
        assert_eq!(load(&young, &metrics).unwrap().sent, Some(30.0));
        let bad = v1::Metrics {
            cpu_usage: f64::NAN,
            memory_usage: -1.0,
            disk_used: 1e300,
            network_bytes_sent: f64::INFINITY,
            network_bytes_received: -0.5,
            disk_bytes_read: f64::NEG_INFINITY,
            disk_bytes_written: 60.0,
            ..good
        };
        let read = load(&report(bad), &metrics).unwrap();
        let gone = [read.cpu, read.memory, read.disk, read.sent, read.received, read.read];
        assert!(gone.iter().all(Option::is_none), "{read:?}");
        assert_eq!(read.written, Some(1.0), "and the good one counts");
        assert_eq!(counted(&metrics, "metrics"), 6);
    }
}
