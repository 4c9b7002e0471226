//! An operator of the tests: sees groups and instances, and remembers every event it was told.

use std::{
    net::Ipv4Addr,
    sync::{Arc, Mutex},
    time::Duration,
};

use nstance_core::{
    ids::{Epoch, InstanceId, OperatorId, Tenant, uuid_v7},
    ports::clock::random,
};
use nstance_identity::{
    ca::Bundle,
    keys::KeyPair,
    nonce::{OperatorNonce, new_jti, sign_operator_nonce},
};
use nstance_proto::v1::{self, operator_service_client::OperatorServiceClient};
use nstance_store::{
    cas::Records,
    fence::Fence,
    records::operator::{OperatorRecord, Revoked},
};
use tokio::task::JoinSet;
use tonic::transport::Channel;

use super::{
    Shard, Site, shard_id, tenant, wait_for, wait_until,
    wire::{Line, dial, new_key, register_operator, tls},
};

pub struct Operator {
    pub id: OperatorId,
    pub key: KeyPair,
    pub chain: Vec<u8>,
    client: OperatorServiceClient<Channel>,
    told: Arc<Mutex<Vec<v1::Event>>>,
    /// Its watch goes on where it was opened.
    lines: Vec<Line>,
    _watch: JoinSet<()>,
}

/// What a fresh operator's nonce says.
pub fn claims(site: &Site) -> OperatorNonce {
    let now = site.now();
    OperatorNonce {
        operator: OperatorId::new(uuid_v7(now, random(site.entropy.as_ref()))),
        jti: new_jti(site.entropy.as_ref()),
        issued_at: now,
        expires_at: now.plus(Duration::from_secs(600)),
        cluster: "demo".parse().expect("a cluster"),
        tenant: tenant(),
    }
}

impl Operator {
    /// Registers a new operator, connects it, and has it watch events from the first one of this epoch.
    pub async fn on(shard: &Shard) -> Self {
        Self::of(shard, tenant()).await
    }

    /// The same for another tenant.
    pub async fn of(shard: &Shard, tenant: Tenant) -> Self {
        let key = new_key(shard.site.entropy.as_ref());
        let claims = OperatorNonce { tenant, ..claims(&shard.site) };
        let nonce = sign_operator_nonce(&shard.site.nonce_key().await, &claims);
        let answer = register_operator(shard, &nonce, &key).await.expect("a registration");
        let chain = answer.client_certificate_pem;
        let tls = tls(&shard.site.bundle().await, Some((&chain, &key)));
        let line = dial(&shard.leader.advertised.operator, tls, Ipv4Addr::LOCALHOST).await.expect("the operator port");
        let mut client = OperatorServiceClient::new(line.channel.clone());
        let told = Arc::new(Mutex::new(Vec::new()));
        let resume_token = format!("{}-0", shard.leader.epoch);
        let request = v1::WatchEventsRequest { resume_token, ..v1::WatchEventsRequest::default() };
        let mut events = client.watch_events(request).await.expect("a watch").into_inner();
        let mut watch = JoinSet::new();
        let telling = told.clone();
        watch.spawn(async move {
            while let Ok(Some(event)) = events.message().await {
                telling.lock().expect("no panic").push(event);
            }
        });
        Self { id: claims.operator, key, chain, client, told, lines: vec![line], _watch: watch }
    }

    /// Goes on with a certificate that it was given, on a connection of its own.
    pub async fn go_on_with(&mut self, shard: &Shard, renewed: &v1::RenewCertificateResponse) {
        let bundle = Bundle::parse(&renewed.ca_bundle_pem).expect("a bundle");
        self.chain.clone_from(&renewed.client_certificate_pem);
        let tls = tls(&bundle, Some((&self.chain, &self.key)));
        let line = dial(&shard.leader.advertised.operator, tls, Ipv4Addr::LOCALHOST).await.expect("the operator port");
        self.client = OperatorServiceClient::new(line.channel.clone());
        self.lines.push(line);
        self.client().list_groups(()).await.expect("the new certificate passes");
    }

    /// Marks the operator's record, as the admin tool does.
    pub async fn revoke(&self, site: &Site) {
        let (clock, entropy) = (site.clock.clone(), site.entropy.clone());
        let records = Records::new(site.bucket.clone(), shard_id(), "admin/test".to_owned(), clock, entropy);
        let current = records.read_operator(&tenant(), &self.id).await.expect("a look").expect("a record");
        let revoked = Some(Revoked { at: site.now(), by: "test".to_owned(), reason: "lost laptop".to_owned() });
        let mark = |it: &OperatorRecord| Some(OperatorRecord { revoked: revoked.clone(), ..it.clone() });
        records.update_operator(Fence::Epoch(Epoch(0)), &current, mark).await.expect("the mark");
    }

    /// For calls that may be refused.
    pub fn client(&self) -> OperatorServiceClient<Channel> {
        self.client.clone()
    }

    /// Lets time pass and wakes the group `web`. The lease runs out meanwhile, so the change that wakes is made once it
    /// is renewed.
    pub async fn leap(&self, site: &Site, by: Duration) {
        site.clock.leap(by);
        let vars = [("Leapt".to_owned(), site.now().as_millis().to_string())].into();
        let config = Some(v1::GroupConfig { vars, ..v1::GroupConfig::default() });
        let request = v1::UpsertGroupRequest { key: "web".to_owned(), config, ..v1::UpsertGroupRequest::default() };
        wait_until("the group is woken", async || self.client().upsert_group(request.clone()).await.is_ok()).await;
    }

    pub async fn group(&self, key: &str) -> v1::GroupStatus {
        let groups = self.client.clone().list_groups(()).await.expect("a list").into_inner().groups;
        groups.into_iter().find(|group| group.key == key).expect("the group")
    }

    pub async fn holds(&self, key: &str) -> Vec<String> {
        self.group(key).await.holds.into_iter().map(|hold| hold.kind).collect()
    }

    pub async fn instances(&self) -> Vec<v1::InstanceStatusResponse> {
        let request = v1::ListInstancesRequest { include_deleted: true, ..v1::ListInstancesRequest::default() };
        self.client.clone().list_instances(request).await.expect("a list").into_inner().instances
    }

    pub async fn health(&self, id: InstanceId) -> String {
        let it = self.instances().await.into_iter().find(|it| it.instance_id == id.to_string());
        it.map(|it| it.health).unwrap_or_default()
    }

    pub fn events(&self, reason: &str) -> Vec<v1::Event> {
        let told = self.told.lock().expect("no panic");
        told.iter().filter(|event| event.reason == reason).cloned().collect()
    }

    pub async fn hears(&self, reason: &str) -> v1::Event {
        wait_for(reason, || !self.events(reason).is_empty()).await;
        self.events(reason).remove(0)
    }

    pub async fn hears_of(&self, reason: &str, id: InstanceId) -> v1::Event {
        let of = || self.events(reason).into_iter().find(|event| event.instance_id == id.to_string());
        wait_for(&format!("{reason} of {id}"), || of().is_some()).await;
        of().expect("heard just now")
    }
}
