//! What agents say of their machines: shown to operators, counted by group, cut when it is too much.

use std::{sync::Arc, time::Duration};

use crate::common::{
    Shard, Site,
    fleet::{Agent, Reporting, report},
    operator::Operator,
    shard_id, wait_for, wait_until,
};
use nstance_core::ids::InstanceId;
use nstance_proto::v1;
use nstance_server::boot::{self, Parts};
use nstance_store::cache::Cache;
use prost::Message as _;
use serde_json::Value;

/// A group of one whose agent is registered, and somebody who looks.
async fn one_agent() -> (Shard, Agent, Operator) {
    let shard = Shard::start(1).await;
    let id = shard.only_vm().await;
    let agent = Agent::register(&shard, id).await;
    let operator = Operator::on(&shard).await;
    (shard, agent, operator)
}

async fn status(operator: &Operator, id: InstanceId) -> v1::InstanceStatusResponse {
    let request = v1::GetInstanceStatusRequest { instance_id: id.to_string(), max_age: None };
    operator.client().get_instance_status(request).await.unwrap().into_inner()
}

fn stage(name: &str, state: &str, detail: &str) -> v1::BootStage {
    let started = Some(prost_types::Timestamp { seconds: 1_800_000_000, nanos: 0 });
    let (name, state, detail) = (name.to_owned(), state.to_owned(), detail.to_owned());
    v1::BootStage { name, state, started, ended: None, detail }
}

fn failed_boot() -> v1::BootReport {
    v1::BootReport {
        stages: vec![stage("kernel", "done", "6.1"), stage("cloud-init", "failed", "runcmd 3 exited 1")],
        failed: true,
        reason: "cloud-init: runcmd failed".to_owned(),
        logs: vec![v1::LogTail { name: "cloud-init".to_owned(), text: "E: no such package\n".to_owned() }],
    }
}

async fn send(stream: &Reporting, report: v1::HealthReportRequest) {
    stream.reports.send(report).await.unwrap();
}

#[tokio::test]
async fn a_black_box_is_told_shown_and_outlives_its_server() {
    let (shard, agent, operator) = one_agent().await;
    let stream = agent.report(&shard.leader).await;
    assert_eq!(status(&operator, agent.id).await.boot, None);
    let boot = failed_boot();
    let change = report(agent.id, v1::ReportKind::Change);
    send(&stream, v1::HealthReportRequest { boot: Some(boot.clone()), ..change.clone() }).await;
    let told = operator.hears_of("BootFailed", agent.id).await;
    assert!(told.message.contains("cloud-init: runcmd failed"), "{}", told.message);
    assert_eq!(told.detail["stage"], "cloud-init");
    assert_eq!(status(&operator, agent.id).await.boot.as_ref(), Some(&boot), "all of it where one asks for one");
    let listed = operator.instances().await.remove(0).boot.unwrap();
    assert!(listed.failed && listed.logs.is_empty(), "and in a list without its logs");
    assert_eq!(listed.stages[1].detail, "runcmd 3 exited 1");
    assert_eq!(listed.reason, boot.reason);

    // A report without one changes nothing, and the same one again is no news.
    send(&stream, change.clone()).await;
    send(&stream, v1::HealthReportRequest { boot: Some(boot.clone()), ..change }).await;
    wait_for("the reports are taken", || shard.server.metrics.reports.get() == 4).await;
    assert_eq!(status(&operator, agent.id).await.boot.as_ref(), Some(&boot));
    assert_eq!(operator.events("BootFailed").len(), 1);

    // The same machine, and so the same cache.
    let shard = shard.restart("srv-1").await;
    let operator = Operator::on(&shard).await;
    assert_eq!(status(&operator, agent.id).await.boot, Some(boot));
}

/// The same with a cache that the test can read while the server runs.
async fn one_agent_and_its_cache(change: impl FnOnce(&mut Value)) -> (Shard, Agent, Operator, Arc<Cache>) {
    let site = Arc::new(Site::new());
    let mut config = site.config(1);
    change(&mut config);
    site.upload(&config).await;
    let cache = Arc::new(Cache::in_memory(&"demo".parse().unwrap(), &shard_id()).unwrap());
    let server = boot::start(Parts { cache: Some(cache.clone()), ..site.parts("srv-1") });
    let shard = Shard::of(site, server).await;
    let id = shard.only_vm().await;
    let agent = Agent::register(&shard, id).await;
    let operator = Operator::on(&shard).await;
    (shard, agent, operator, cache)
}

async fn wait_for_cached(cache: &Cache, id: InstanceId, boot: &v1::BootReport) {
    let wanted = vec![(id, boot.encode_to_vec())];
    wait_for("the black box is written down", || cache.boots().unwrap() == wanted).await;
}

#[tokio::test]
async fn a_failure_is_written_down_at_once_however_young_the_black_box_before_it() {
    let (shard, agent, _operator, cache) = one_agent_and_its_cache(|_| {}).await;
    let stream = agent.report(&shard.leader).await;
    let change = report(agent.id, v1::ReportKind::Change);
    let running = v1::BootReport { stages: vec![stage("cloud-init", "running", "")], ..v1::BootReport::default() };
    for boot in [running, failed_boot()] {
        send(&stream, v1::HealthReportRequest { boot: Some(boot.clone()), ..change.clone() }).await;
        wait_for_cached(&cache, agent.id, &boot).await;
    }
}

#[tokio::test]
async fn the_last_black_box_is_written_down_when_the_stream_ends() {
    let (shard, agent, operator, cache) = one_agent_and_its_cache(|_| {}).await;
    let stream = agent.report(&shard.leader).await;
    let change = report(agent.id, v1::ReportKind::Change);
    let running = |stages: &[&str]| v1::BootReport {
        stages: stages.iter().map(|name| stage(name, "running", "")).collect(),
        ..v1::BootReport::default()
    };
    let (first, last) = (running(&["kernel"]), running(&["kernel", "cloud-init"]));
    for boot in [&first, &last] {
        send(&stream, v1::HealthReportRequest { boot: Some(boot.clone()), ..change.clone() }).await;
    }
    wait_until("it is shown", async || status(&operator, agent.id).await.boot.as_ref() == Some(&last)).await;
    drop(stream);
    wait_for_cached(&cache, agent.id, &last).await;
}

#[tokio::test]
async fn a_black_box_goes_with_its_instance() {
    let (shard, agent, operator, cache) = one_agent_and_its_cache(|config| {
        config["server"]["garbage_collection"]["interval"] = "200ms".into();
        config["server"]["garbage_collection"]["deleted_record_retention"] = "0s".into();
    })
    .await;
    let stream = agent.report(&shard.leader).await;
    let change = report(agent.id, v1::ReportKind::Change);
    send(&stream, v1::HealthReportRequest { boot: Some(failed_boot()), ..change }).await;
    operator.hears_of("BootFailed", agent.id).await;
    wait_for_cached(&cache, agent.id, &failed_boot()).await;
    shard.site.cloud.kill(agent.id);
    wait_until("its record is purged", async || shard.site.record(agent.id).await.is_none()).await;
    wait_for("its black box is gone", || cache.boots().unwrap().is_empty()).await;
}

#[tokio::test]
async fn a_machine_is_described_by_its_agent() {
    let (shard, agent, _) = one_agent().await;
    // Nobody else can tell.
    shard.site.cloud.outage(true);
    let shard = shard.restart("srv-2").await;
    let operator = Operator::on(&shard).await;
    let stream = agent.report(&shard.leader).await;
    let machine = v1::MachineInfo {
        cpu_count: 8,
        memory_bytes: 16 << 30,
        disk_bytes: 100 << 30,
        arch: "amd64".to_owned(),
        os: "Debian 13".to_owned(),
        kernel: "6.12.1".to_owned(),
        boot_id: "b".to_owned(),
    };
    let first = v1::HealthReportRequest {
        machine: Some(machine.clone()),
        provider_facts: [("spot".to_owned(), "true".to_owned())].into(),
        ..report(agent.id, v1::ReportKind::First)
    };
    send(&stream, first).await;
    // Only the first report says it; the later ones do not take it back.
    send(&stream, report(agent.id, v1::ReportKind::Periodic)).await;
    wait_for("the reports are taken", || shard.server.metrics.reports.get() == 3).await;
    let shown = status(&operator, agent.id).await;
    assert_eq!(shown.machine, Some(machine));
    assert!(shown.spot);
    shard.site.cloud.outage(false);
}

#[tokio::test]
async fn figures_of_machines_are_exported_by_group() {
    let shard = Shard::start(2).await;
    let ids = shard.vms(2).await;
    let mut streams = Vec::new();
    for (id, cpu) in ids.iter().zip([20.0, 60.0]) {
        let agent = Agent::register(&shard, *id).await;
        let stream = agent.report(&shard.leader).await;
        let one_minute = v1::Metrics { cpu_usage: cpu, network_bytes_sent: 6000.0, ..v1::Metrics::default() };
        let periodic = report(*id, v1::ReportKind::Periodic);
        send(&stream, v1::HealthReportRequest { one_minute: Some(one_minute), ..periodic }).await;
        streams.push(stream);
    }
    wait_for("the reports are taken", || shard.server.metrics.reports.get() == 4).await;
    let labels = r#"{tenant="default",group="web""#;
    let value = |name: &str| {
        let text = shard.server.metrics.text();
        let line = text.lines().find(|line| line.starts_with(&format!("nstance_{name}"))).map(str::to_owned);
        line.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
    };
    let near = |value: Option<f64>, wanted: f64| value.is_some_and(|it| (it - wanted).abs() < 1e-9);
    let cpu = |stat: &str| value(&format!(r#"group_cpu_usage_ratio{labels},stat="{stat}"}}"#));
    assert!(near(cpu("mean"), 0.4), "{:?}", cpu("mean"));
    assert!(near(cpu("max"), 0.6), "{:?}", cpu("max"));
    assert!(near(value(&format!("group_network_sent_bytes_per_second{labels}}}")), 200.0));
    assert!(near(value(&format!("group_machines_reporting{labels}}}")), 2.0));
    let text = shard.server.metrics.text();
    assert!(ids.iter().all(|id| !text.contains(&id.to_string())), "no instance has a line of its own");
    // Three intervals without a word, and they do not count any more.
    shard.site.clock.leap(Duration::from_secs(180));
    assert_eq!(cpu("mean"), None);
    drop(streams);
}

#[tokio::test]
async fn a_hostile_report_is_cut_and_ends_no_stream() {
    let (shard, agent, operator) = one_agent().await;
    let stream = agent.report(&shard.leader).await;
    let change = report(agent.id, v1::ReportKind::Change);
    let many = v1::BootReport {
        stages: (0..10_000).map(|n| v1::BootStage { name: n.to_string(), ..v1::BootStage::default() }).collect(),
        failed: true,
        reason: "\u{1b}[31mred".to_owned(),
        logs: vec![v1::LogTail { name: "log".to_owned(), text: "x".repeat(20_000) }],
    };
    let figures = v1::Metrics { cpu_usage: f64::NAN, memory_usage: -5.0, disk_used: 50.0, ..v1::Metrics::default() };
    let hostile = v1::HealthReportRequest {
        boot: Some(many),
        one_minute: Some(figures),
        machine: Some(v1::MachineInfo { os: "\u{7}".repeat(1000), ..v1::MachineInfo::default() }),
        private_ipv4: "10.0.0.300".to_owned(),
        hostname: "a b".to_owned(),
        provider_facts: (0..500).map(|n| (format!("fact-{n}"), "x".to_owned())).collect(),
        ..change.clone()
    };
    send(&stream, hostile).await;
    operator.hears_of("BootFailed", agent.id).await;
    let boot = status(&operator, agent.id).await.boot.unwrap();
    assert_eq!(boot.stages.len(), 64);
    assert_eq!(boot.reason, " [31mred");
    assert_eq!(boot.logs[0].text.len(), 16 * 1024);
    assert_eq!(operator.health(agent.id).await, "healthy");
    let text = shard.server.metrics.text();
    for field in ["boot", "machine", "metrics", "addresses"] {
        let line = format!("nstance_report_fields_cut_total{{field=\"{field}\"}}");
        assert!(text.contains(&line), "{line} is missing");
    }
    assert!(text.contains("nstance_group_disk_usage_ratio{"), "what can be is counted");
    assert!(!text.contains("nstance_group_cpu_usage_ratio{") && !text.contains("NaN"));
    // And the stream is as good as before.
    send(&stream, v1::HealthReportRequest { boot: Some(failed_boot()), ..change }).await;
    wait_until("a good one is taken again", async || status(&operator, agent.id).await.boot == Some(failed_boot()))
        .await;
}
