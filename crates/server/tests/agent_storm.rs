//! Reports by the thousand leave nothing behind. Alone in its process, whose memory it measures.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "it/common/mod.rs"]
mod common;

use common::{
    Shard,
    fleet::{Agent, report},
    wait_for,
};
use nstance_proto::v1;

#[tokio::test]
async fn a_report_storm_keeps_memory_flat() {
    let shard = Shard::start(1).await;
    let agent = Agent::register(&shard, shard.only_vm().await).await;
    let stream = agent.report(&shard.leader).await;
    wait_for("the first report", || shard.server.metrics.reports.get() == 1).await;
    // Two kilobytes each: kept, or waiting somewhere, they would show.
    let time = v1::file_status::Status::LastModified(prost_types::Timestamp::default());
    let file = v1::FileStatus { status: Some(time), ..v1::FileStatus::default() };
    let files = (0..32).map(|n| (format!("{n:02}-{}", "x".repeat(48)), file.clone()));
    let large = v1::HealthReportRequest { files: files.collect(), ..report(agent.id, v1::ReportKind::Periodic) };
    let storm = async |n: u64| {
        let all = shard.server.metrics.reports.get() + n;
        for _ in 0..n {
            stream.reports.send(large.clone()).await.unwrap();
        }
        wait_for("all reports", || shard.server.metrics.reports.get() == all).await;
    };
    let n_tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let resident_kib = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap().to_owned();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    storm(2000).await;
    let (tasks, before) = (n_tasks(), resident_kib());
    storm(8000).await;
    assert!(n_tasks() <= tasks + 8, "{tasks} tasks before, {} after", n_tasks());
    // 16 MB went by.
    let after = resident_kib();
    assert!(after < before + 8 * 1024, "{before} KiB before, {after} KiB after");
}
