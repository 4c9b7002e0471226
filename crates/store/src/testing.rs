//! What the tests of this room share.

use std::sync::Arc;

use nstance_core::{
    ids::{Epoch, GroupRef, InstanceId, Shard, uuid_v7},
    instance::{CreateReason, Instance, NonceFact, Ownership, ProviderFact},
    ports::{clock::Clock, objects::ObjectStore},
    term::Guard,
    time::Timestamp,
};
use nstance_rt::{clock::TokioClock, entropy::SeededEntropy};

use crate::{
    cas::Records,
    faulty::{FaultPlan, FaultyStore},
    memory::MemoryStore,
};

pub(crate) fn shard() -> Shard {
    "a".parse().unwrap()
}

pub(crate) fn instance(n: u32) -> Instance {
    let mut random = [0; 10];
    random[6..].copy_from_slice(&n.to_be_bytes());
    let created_at = Timestamp::from_millis(1_700_000_000_000 + i64::from(n));
    Instance {
        id: InstanceId::new("knc".parse().unwrap(), uuid_v7(created_at, random)),
        group: GroupRef::new("default".parse().unwrap(), "web".parse().unwrap()),
        cluster: "c".parse().unwrap(),
        shard: shard(),
        epoch: Epoch(1),
        intent_epoch: Epoch(1),
        ownership: Ownership::Managed,
        created_at,
        reason: CreateReason::ScaleUp,
        request: None,
        arch: "amd64".into(),
        template: "knc".into(),
        infra_hash: "i".into(),
        runtime_hash: "r".into(),
        config_etag: "e".into(),
        instance_type: Some("t3.small".into()),
        subnet: "subnet-1".into(),
        image: None,
        nonce: NonceFact { jti: format!("{n:032x}"), expires_at: created_at, used_at: None },
        provider: ProviderFact { kind: "fake".into(), ..ProviderFact::default() },
        create_failure: None,
        registration: None,
        cert: None,
        rejoin: None,
        replace: None,
        drain: None,
        delete: None,
        adopted_at: None,
    }
}

/// A bucket, and one client's way to it.
pub(crate) struct Bench {
    pub(crate) bucket: Arc<MemoryStore>,
    pub(crate) clock: Arc<dyn Clock>,
}

impl Bench {
    /// Inside a paused runtime.
    pub(crate) fn new() -> Self {
        let clock = Arc::new(TokioClock::starting_at(Timestamp::from_millis(1_700_000_000_000)));
        Self { bucket: Arc::new(MemoryStore::new()), clock }
    }

    pub(crate) fn link(&self, seed: u64) -> Arc<FaultyStore> {
        let entropy = Arc::new(SeededEntropy::new(seed));
        Arc::new(FaultyStore::new(self.bucket.clone(), entropy, FaultPlan::default()))
    }

    pub(crate) fn records(&self, store: Arc<dyn ObjectStore>, seed: u64) -> Records {
        let entropy = Arc::new(SeededEntropy::new(seed));
        Records::new(store, shard(), format!("a/s{seed}"), self.clock.clone(), entropy)
    }

    pub(crate) fn guard(&self, epoch: u64) -> Guard {
        Guard::unfenced(Epoch(epoch), self.clock.clone())
    }
}
