//! From what is known to lines on a screen. Pure.

use std::collections::BTreeMap;

use nstance_client::live::ShardView;
use nstance_core::time::Timestamp;
use nstance_proto::v1::{Event, InstanceStatusResponse};

use super::screen::Size;
use crate::{
    output::Table,
    view,
    wait::group_progress,
    words::{self, count},
};

/// Below this many lines every line is needed for something.
const ROOMY: usize = 16;

/// Never more lines than the screen has, and none wider.
pub(super) fn draw(seen: &[ShardView], size: Size, now: Timestamp) -> Vec<String> {
    let mut lines = vec![title(seen, now)];
    let parts = [shards(seen, now), groups(seen, now), instances(seen, now), events(seen, now)];
    let gap = usize::from(ROOMY <= size.height);
    let room = size.height.saturating_sub(lines.len() + gap * parts.len());
    let shares = share(&parts.each_ref().map(Vec::len), room);
    for (part, share) in parts.into_iter().zip(shares) {
        if 0 < share {
            lines.extend(std::iter::repeat_n(String::new(), gap));
            lines.extend(cut(part, share));
        }
    }
    lines.truncate(size.height);
    lines.iter().map(|line| printable(line, size.width)).collect()
}

/// Each gets what it needs, or as much as the others that do not.
fn share(needs: &[usize], mut room: usize) -> Vec<usize> {
    let mut shares = vec![0; needs.len()];
    while 0 < room && shares.iter().zip(needs).any(|(share, need)| share < need) {
        for (share, need) in shares.iter_mut().zip(needs) {
            if *share < *need && 0 < room {
                *share += 1;
                room -= 1;
            }
        }
    }
    shares
}

/// The first lines, and how many more there are.
fn cut(mut lines: Vec<String>, room: usize) -> Vec<String> {
    if room < lines.len() {
        let n_hidden = lines.len() - room + 1;
        lines.truncate(room - 1);
        lines.push(format!("... {n_hidden} more"));
    }
    lines
}

/// What others said may hold words to the terminal; they are not for us to pass on.
fn printable(line: &str, width: usize) -> String {
    line.chars().take(width).map(|it| if it.is_control() { ' ' } else { it }).collect()
}

fn title(seen: &[ShardView], now: Timestamp) -> String {
    let states = || seen.iter().filter_map(|it| it.state.as_ref());
    let n_groups = states().map(|it| it.groups.len()).sum::<usize>();
    let n_instances = states().map(|it| it.instances.len()).sum::<usize>();
    let lost = match seen.iter().filter(|it| it.disconnected.is_some()).count() {
        0 => String::new(),
        n => format!(" ({n} lost)"),
    };
    let (shards, groups) = (count(seen.len(), "shard"), count(n_groups, "group"));
    // To the second: the rest would only flicker.
    let time: String = now.to_string().chars().take(19).collect();
    format!("{shards}{lost}, {groups}, {} - {time}Z - q quits", count(n_instances, "instance"))
}

/// A shard's name, with the word that what is shown of it is old.
fn of(seen: &ShardView) -> String {
    if seen.disconnected.is_some() { format!("{} (lost)", seen.shard) } else { seen.shard.to_string() }
}

fn shards(seen: &[ShardView], now: Timestamp) -> Vec<String> {
    let mut table =
        Table::new(&["SHARD", "STATE", "LEADER", ">EPOCH", "CONFIG", ">GROUPS", ">INSTANCES", ">HEARD", "PROBLEM"]);
    // Who is lost must not be what does not fit.
    let (lost, well): (Vec<&ShardView>, Vec<&ShardView>) = seen.iter().partition(|it| it.disconnected.is_some());
    for it in lost.into_iter().chain(well) {
        let status = it.state.as_ref().map(|it| &it.status);
        let number = |of: Option<usize>| of.map(|it| it.to_string()).unwrap_or_default();
        let problem = match (&it.disconnected, status) {
            (Some(error), _) => error.message.clone(),
            (None, Some(status)) => status.apply_errors.join("; "),
            (None, None) => String::new(),
        };
        table.row([
            it.shard.to_string(),
            if it.disconnected.is_some() { "lost" } else { "ok" }.to_owned(),
            status.map(|it| it.leader_id.clone()).unwrap_or_default(),
            status.map(|it| it.epoch.to_string()).unwrap_or_default(),
            status.map(|it| it.etag.chars().take(12).collect()).unwrap_or_default(),
            number(it.state.as_ref().map(|it| it.groups.len())),
            number(it.state.as_ref().map(|it| it.instances.len())),
            it.as_of.map(|at| words::span(now.since(at))).unwrap_or_default(),
            problem,
        ]);
    }
    table.lines(false)
}

fn groups(seen: &[ShardView], now: Timestamp) -> Vec<String> {
    let mut table = Table::new(&["GROUP", "SHARD", "STANDING", "HELD BACK BY"]);
    for shard in seen {
        let Some(state) = &shard.state else { continue };
        let mut members: BTreeMap<&str, Vec<&InstanceStatusResponse>> = BTreeMap::new();
        for it in state.instances.values().filter(|it| !it.on_demand) {
            members.entry(it.group.as_str()).or_default().push(it);
        }
        for group in state.groups.values() {
            let members = members.remove(group.key.as_str()).unwrap_or_default();
            let holds: Vec<&str> = group.holds.iter().map(|it| it.kind.as_str()).collect();
            let standing = group_progress(group, &members, true, now).join(", ");
            table.row([group.key.clone(), of(shard), standing, holds.join(", ")]);
        }
    }
    if table.is_empty() { vec!["no groups are known".to_owned()] } else { table.lines(false) }
}

/// What somebody may have to look after stands before what runs.
fn rank(it: &InstanceStatusResponse) -> usize {
    const STATES: [&str; 5] = ["failed", "draining", "deleting", "pending", "provisioning"];
    match STATES.iter().position(|state| *state == it.status) {
        Some(at) => at,
        None if it.health == "healthy" => STATES.len() + 1,
        None => STATES.len(),
    }
}

fn instances(seen: &[ShardView], now: Timestamp) -> Vec<String> {
    let all = seen.iter().flat_map(|shard| {
        let instances = shard.state.iter().flat_map(|it| it.instances.values());
        instances.map(move |it| (shard, it))
    });
    let mut all: Vec<_> = all.collect();
    all.sort_by_key(|(_, it)| (rank(it), std::cmp::Reverse(view::time(it.created_at.as_ref()))));
    let mut table = Table::new(&["INSTANCE", "GROUP", "SHARD", "STATE", "HEALTH", "TYPE", ">AGE"]);
    for (shard, it) in all {
        let age = words::age(it.created_at.as_ref(), now);
        let (id, group) = (it.instance_id.clone(), it.group.clone());
        table.row([id, group, of(shard), it.status.clone(), it.health.clone(), it.instance_type.clone(), age]);
    }
    if table.is_empty() { vec!["no instances are known".to_owned()] } else { table.lines(false) }
}

/// The newest first: the oldest are those that do not fit.
fn events(seen: &[ShardView], now: Timestamp) -> Vec<String> {
    let all = seen.iter().flat_map(|shard| shard.events.iter().map(move |it| (shard, &**it)));
    let mut all: Vec<(&ShardView, &Event)> = all.collect();
    all.sort_by_key(|(_, it)| view::time(it.at.as_ref()));
    let mut table = Table::new(&[">AGO", "SEVERITY", "SHARD", "OF", "REASON", "MESSAGE"]);
    for (shard, it) in all.iter().rev() {
        let of = [it.group.as_str(), &it.instance_id].into_iter().filter(|it| !it.is_empty());
        let of = of.collect::<Vec<_>>().join("/");
        let (ago, severity) = (words::age(it.at.as_ref(), now), view::severity(it.severity()));
        table.row([&ago, severity, &*shard.shard, &of, &it.reason, &it.message]);
    }
    if table.is_empty() { vec!["no events yet".to_owned()] } else { table.lines(false) }
}

#[cfg(test)]
mod tests;
