//! A status as lines of text: the live view of `up`, and `status` without `--json`.

use nstance_proto::v1::Event;

use crate::{
    api::millis,
    kubernetes,
    records::Kind,
    status::{InstanceStatus, LeaseStatus, Status, short},
};

/// A table whose columns are as wide as their widest cell; numbers stand to the right.
pub(crate) fn columns(rows: &[Vec<String>], right: &[usize]) -> Vec<String> {
    let n_columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..n_columns).map(width).collect();
    rows.iter()
        .map(|row| {
            let cells: Vec<String> = row
                .iter()
                .zip(&widths)
                .enumerate()
                .map(|(column, (cell, width))| {
                    let width = *width;
                    if right.contains(&column) { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
                })
                .collect();
            cells.join("  ").trim_end().to_owned()
        })
        .collect()
}

fn heading(words: &str) -> Vec<String> {
    words.split_ascii_whitespace().map(str::to_owned).collect()
}

pub(crate) fn shards(status: &Status) -> Vec<String> {
    let mut rows = vec![heading("SHARD LEADER EPOCH LEASE GROUP WANT ACTUAL READY DRAINING")];
    for shard in &status.shards {
        let leader = if shard.reachable { shard.leader.clone() } else { "-".to_owned() };
        let head = vec![shard.name.clone(), leader, shard.epoch.to_string(), lease(shard.lease.as_ref())];
        if shard.groups.is_empty() {
            rows.push(head.clone());
        }
        for it in &shard.groups {
            let name = if it.tenant == "default" { it.name.clone() } else { format!("{}/{}", it.tenant, it.name) };
            let counts = [it.size, it.actual, it.ready, it.draining].map(|n| n.to_string());
            rows.push(head.iter().cloned().chain([name]).chain(counts).collect());
        }
    }
    columns(&rows, &[2, 5, 6, 7, 8])
}

fn lease(lease: Option<&LeaseStatus>) -> String {
    match lease {
        None => "-".to_owned(),
        Some(it) if it.released => "released".to_owned(),
        Some(it) => format!("renewed {:.1} s ago", it.renewed_seconds_ago),
    }
}

/// Who leads and who stands by.
pub(crate) fn servers(status: &Status) -> Vec<String> {
    let mut rows = vec![heading("SERVER SHARD ROLE EPOCH PID STATE RESTARTS")];
    let text = |it: &Option<String>| it.clone().unwrap_or_else(|| "-".to_owned());
    for it in status.components.iter().filter(|it| it.kind == Kind::Server) {
        rows.push(vec![
            it.name.clone(),
            text(&it.shard),
            text(&it.role),
            // A standby has none.
            it.epoch.filter(|it| 0 < *it).map_or_else(|| "-".to_owned(), |it| it.to_string()),
            it.pid.map_or_else(|| "-".to_owned(), |it| it.to_string()),
            it.state.to_owned(),
            it.restarts.to_string(),
        ]);
    }
    columns(&rows, &[3, 4, 6])
}

pub(crate) fn instances(status: &Status, most: usize) -> Vec<String> {
    let mut rows = vec![heading("INSTANCE SHARD GROUP STATE HEALTH AGE REPORT PID")];
    rows.extend(status.instances.iter().take(most).map(instance));
    let mut lines = columns(&rows, &[5, 6, 7]);
    if most < status.instances.len() {
        lines.push(format!("... and {} more", status.instances.len() - most));
    }
    lines
}

fn instance(it: &InstanceStatus) -> Vec<String> {
    vec![
        it.id.clone(),
        it.shard.clone(),
        it.group.clone(),
        it.state.clone(),
        it.health.clone(),
        short(it.age_seconds),
        it.last_report_seconds.map_or_else(|| "-".to_owned(), short),
        it.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
    ]
}

/// The whole of `status` for a person.
pub(crate) fn plain(status: &Status) -> Vec<String> {
    let since = status.up_since.as_deref().unwrap_or("nobody");
    let mut lines = vec![format!("nstance-dev  dir={}  provider={}  up since {since}", status.dir, status.provider)];
    let mut rows = vec![heading("COMPONENT PID STATE RESTARTS MEMORY PORTS")];
    for it in &status.components {
        let ports: Vec<String> = it.ports.iter().map(|(name, port)| format!("{name}:{port}")).collect();
        let memory = format!("{} MB", it.rss_bytes / 1_000_000);
        rows.push(vec![
            it.name.clone(),
            it.pid.map_or_else(|| "-".to_owned(), |it| it.to_string()),
            it.state.to_owned(),
            it.restarts.to_string(),
            memory,
            ports.join(" "),
        ]);
    }
    lines.extend(columns(&rows, &[1, 3, 4]));
    lines.push(String::new());
    lines.extend(shards(status));
    if let Some(kubernetes) = &status.kubernetes {
        lines.push(kubernetes::line(kubernetes));
    }
    lines.push(String::new());
    lines.extend(servers(status));
    if !status.instances.is_empty() {
        lines.push(String::new());
        lines.extend(instances(status, usize::MAX));
    }
    lines.push(String::new());
    if status.healthy {
        lines.push("all healthy".to_owned());
    }
    lines.extend(status.problems.iter().map(|problem| format!("not healthy: {problem}")));
    lines.extend(holds(status));
    lines.extend(status.kubernetes.iter().flat_map(kubernetes::blocked));
    lines.extend(status.faults.iter().map(|it| format!("fault: {} (since {})", it.what, it.since)));
    lines
}

/// Why groups do not do what they otherwise would.
pub(crate) fn holds(status: &Status) -> Vec<String> {
    let groups = status.shards.iter().flat_map(|shard| &shard.groups);
    groups
        .flat_map(|group| group.holds.iter().map(|hold| format!("{}/{} holds: {hold}", group.tenant, group.name)))
        .collect()
}

/// One event on one line: `12:00:07  dev-1  InstanceRegistered  tst06b...  agent registered`.
pub(crate) fn event(shard: &str, it: &Event) -> String {
    let subject = if it.instance_id.is_empty() { &it.group } else { &it.instance_id };
    let time = time_of_day(millis(it.at.as_ref()).unwrap_or(0));
    let mut line = format!("{time}  {shard}  {:<23}  {subject:<29}  {}", it.reason, it.message);
    if 0 < it.dropped {
        line.push_str(&format!("  ({} events missed)", it.dropped));
    }
    line.trim_end().to_owned()
}

/// UTC, like every time in logs and records.
pub(crate) fn time_of_day(millis: i64) -> String {
    let of_day = millis.rem_euclid(86_400_000);
    let (seconds, rest) = (of_day / 1000, of_day % 1000);
    format!("{:02}:{:02}:{:02}.{rest:03}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_they_must_be() {
        let rows = vec![heading("NAME N"), vec!["a-long-name".into(), "7".into()], vec!["b".into(), "12".into()]];
        assert_eq!(columns(&rows, &[1]), ["NAME          N", "a-long-name   7", "b            12"]);
    }

    #[test]
    fn events_are_one_line() {
        let it = Event {
            at: Some(prost_types::Timestamp { seconds: 43_207, nanos: 5_000_000 }),
            reason: "LeaderAcquired".into(),
            message: "server-1 leads".into(),
            dropped: 2,
            ..Event::default()
        };
        let line = event("dev-1", &it);
        assert!(line.starts_with("12:00:07.005  dev-1  LeaderAcquired"), "{line}");
        assert!(line.ends_with("server-1 leads  (2 events missed)"), "{line}");
    }
}
