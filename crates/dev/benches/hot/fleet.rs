//! A server that leads a fleet, made from one seed: a plane of the simulation with two real instances, and as many
//! copies of their records as are wanted, each with its report stream open.

use std::sync::Arc;

use anyhow::{Context, ensure};
use nstance_core::{
    group::Desired,
    ids::{GroupRef, InstanceId, uuid_v7},
    instance::{Instance, Seen},
    ports::{
        clock::random,
        objects::{Condition, ObjectStore as _},
    },
};
use nstance_proto::v1;
use nstance_rt::entropy::SeededEntropy;
use nstance_server::{service::health::Session, term::Term};
use nstance_sim::{Beginning, Plane};
use nstance_store::{
    memory::MemoryStore,
    records::{Extra, Meta, VERSION, encode, instance_key},
};
use tokio_util::sync::CancellationToken;

pub(crate) const SEED: u64 = 1;

pub(crate) struct Fleet {
    /// Held: the term ends with it.
    _plane: Plane,
    pub(crate) term: Arc<Term>,
    pub(crate) group: GroupRef,
    pub(crate) records: Vec<Instance>,
    pub(crate) sessions: Vec<Session>,
}

impl Fleet {
    /// A shard that leads two instances, and the records of `n` more that it has not heard of.
    pub(crate) async fn recorded(n: usize) -> anyhow::Result<Self> {
        // The second group has no load balancer, in which the copies would have to be registered first.
        let plane = Plane::start(Beginning { sizes: [0, 2], ..Beginning::new(SEED) }).await?;
        plane.settle().await;
        ensure!(plane.violations().is_empty(), "the plane did not come up: {:?}", plane.violations());
        let term = plane.term().context("nobody leads")?;
        let first = plane.records().into_iter().next().context("no instance")?;
        let entropy = SeededEntropy::new(SEED);
        let now = term.world.now();
        let copy = |_| Instance {
            id: InstanceId::new(first.id.kind(), uuid_v7(now, random(&entropy))),
            created_at: now,
            ..first.clone()
        };
        let records = (0..n).map(copy).collect();
        let group = first.group.clone();
        Ok(Self { _plane: plane, term, group, records, sessions: Vec::new() })
    }

    /// The same with all of them known, running, connected and asked for: nothing is left to do.
    pub(crate) async fn led(n: usize) -> anyhow::Result<Self> {
        let mut fleet = Self::recorded(n).await?;
        let store = fleet.store().await?;
        let (shard, entropy) = (&fleet.term.shared.shard, SeededEntropy::new(SEED));
        let rebuilt = nstance_store::rebuild::rebuild(&store, None, shard, &entropy).await?;
        fleet.term.world.load(rebuilt.instances, Vec::new());
        let now = fleet.term.world.now();
        {
            let mut state = fleet.term.world.lock();
            for record in &fleet.records {
                state.observe(record.id, Seen::Running, None, now);
            }
            let size = u32::try_from(state.group(&fleet.group).members.len())?;
            state.group(&fleet.group).desired = Desired::Known(size);
        }
        for record in &fleet.records {
            let session = Session::open(&fleet.term, record.id, CancellationToken::new());
            let session = session.context("an instance that the world does not know")?;
            session.report(&report(record.id));
            fleet.sessions.push(session);
        }
        Ok(fleet)
    }

    /// A bucket with the records.
    pub(crate) async fn store(&self) -> anyhow::Result<MemoryStore> {
        let store = MemoryStore::new();
        for record in &self.records {
            let meta = Meta {
                version: VERSION,
                epoch: record.epoch,
                writer: "s1/bench".to_owned(),
                write_id: record.id.to_string(),
                updated_at: record.created_at,
            };
            let key = instance_key(&record.shard, &record.group.tenant, &record.id);
            store.put(&key, encode(record, &meta, &Extra::default()), Condition::Create).await?;
        }
        Ok(store)
    }
}

/// What an agent says every so often, all fields filled in.
pub(crate) fn report(instance: InstanceId) -> v1::HealthReportRequest {
    let time = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
    let metrics = || {
        Some(v1::Metrics {
            cpu_usage: 0.25,
            cpu_core_usage: vec![0.2, 0.3, 0.25, 0.25],
            memory_usage: 0.5,
            disk_used: 0.4,
            ..v1::Metrics::default()
        })
    };
    v1::HealthReportRequest {
        version: "1".to_owned(),
        instance_id: instance.to_string(),
        timestamp: time(1_800_000_000),
        started: time(1_799_999_000),
        count: 17,
        uptime: "1000s".to_owned(),
        one_minute: metrics(),
        five_minutes: metrics(),
        fifteen_minutes: metrics(),
        kind: v1::ReportKind::Periodic.into(),
        interval_ms: 60_000,
        agent_version: "0.1.0".to_owned(),
        session_id: "0123456789abcdef".to_owned(),
        private_ipv4: "10.0.0.1".to_owned(),
        hostname: "web-1".to_owned(),
        ..v1::HealthReportRequest::default()
    }
}
