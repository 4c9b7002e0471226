//! Kubernetes and the operator: started, given what the operator needs, and waited for.

use std::{collections::BTreeSet, fs, net::Ipv4Addr, sync::Arc};

use anyhow::Context;
use data_encoding::BASE64;
use nstance_config::Config;
use nstance_core::{ids::Tenant, ports::clock::Clock as _};
use nstance_identity::peer::Peer;
use nstance_rt::clock::SystemClock;
use nstance_store::s3::S3Store;
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use serde_json::{Value, json};

use super::{Failure, Slot, Up, checks, ended, failure};
use crate::{
    component::Spec,
    http,
    layout::Layout,
    objects::{CONFIG_MAPS, NAMESPACE, OUR_POOLS, Objects, POOLS, SECRETS},
    operator,
    ports::Ports,
    records::{self, Kind},
    steps::Tried,
    stop, stored,
};

const CA: &str = "nstance-cluster-ca";
const NONCE: &str = "nstance-operator-nonce";
const CERTIFICATE: &str = "nstance-operator-cert";

/// Whose groups the operator brings to Kubernetes; every config has it.
fn tenant() -> Tenant {
    "default".parse().expect("a constant, well-formed tenant")
}

impl Up {
    /// Early, so that it comes up beside the servers.
    pub(super) fn start_kubernetes(&mut self, ports: Ports) -> Result<(), Failure> {
        if !self.extras().contains(&Kind::Kubernetes) {
            return Ok(());
        }
        let fail = |error: anyhow::Error| Failure::of(records::K8S, &error);
        let port = ports.kubernetes();
        checks::check_free(&[("k8s", port)]).map_err(fail)?;
        let program = std::env::current_exe().context("find our own program").map_err(fail)?;
        let text = |path: std::path::PathBuf| path.display().to_string();
        let mut args = vec!["k8s".to_owned(), "--dir".to_owned(), text(self.layout.objects())];
        args.extend(["--addr".to_owned(), format!("{}:{port}", Ipv4Addr::LOCALHOST)]);
        args.extend(["--instances".to_owned(), text(self.layout.instances())]);
        args.extend(["--kubeconfig".to_owned(), text(self.layout.kubeconfig())]);
        let spec = Spec {
            name: records::K8S.to_owned(),
            kind: Kind::Kubernetes,
            program,
            args: self.with_log_level(args),
            env: self.log_filter(),
            ports: [("k8s".to_owned(), port)].into(),
            grace: stop::K8S_GRACE,
            shard: None,
        };
        // An old one has another port, perhaps.
        let _ = fs::remove_file(self.layout.kubeconfig());
        self.kubernetes = Some(Slot::start(&self.layout, spec).map_err(fail)?);
        Ok(())
    }

    pub(super) async fn await_kubernetes(&mut self, ports: Ports) -> Result<(), Failure> {
        let (slot, kubeconfig) = (&mut self.kubernetes, self.layout.kubeconfig());
        if slot.is_none() {
            return Ok(());
        }
        let gate = self.steps.gate("kubernetes", async || {
            if let Some(how) = ended(slot.as_mut()).await {
                return Tried::Failed(how);
            }
            match http::get(ports.kubernetes(), "/readyz").await {
                Ok(answer) if answer.code == 200 && kubeconfig.exists() => Tried::Done(()),
                Ok(answer) => Tried::Wait(answer.body),
                Err(error) => Tried::Wait(error.to_string()),
            }
        });
        gate.await.map_err(|late| failure(records::K8S, late, self.kubernetes.as_ref()))
    }

    /// Gives the operator what it needs, starts it, and waits until it works and knows all groups.
    pub(super) async fn start_operator(
        &mut self,
        bucket: &Arc<S3Store>,
        configs: &[Arc<Config>],
        ports: Ports,
    ) -> Result<(), Failure> {
        if !self.extras().contains(&Kind::Operator) {
            return Ok(());
        }
        let fail = |error: anyhow::Error| Failure::of(records::OPERATOR, &error);
        let objects = Objects::at(ports.kubernetes());
        prepare(&self.layout, objects, bucket, configs).await.map_err(fail)?;
        let named = [("probes", ports.probes()), ("metrics", ports.metrics())];
        checks::check_free(&named).map_err(fail)?;
        let spec = Spec {
            name: records::OPERATOR.to_owned(),
            kind: Kind::Operator,
            program: checks::beside("nstance-operator").map_err(fail)?,
            args: operator::arguments(
                &self.layout.kubeconfig(),
                &self.layout.operator_config(),
                ports.probes(),
                ports.metrics(),
                self.args.log_level == "debug",
            ),
            env: [self.log_filter(), operator::variables()].into_iter().flatten().collect(),
            ports: named.iter().map(|(name, port)| ((*name).to_owned(), *port)).collect(),
            grace: stop::OPERATOR_GRACE,
            shard: None,
        };
        self.operator = Some(Slot::start(&self.layout, spec).map_err(fail)?);
        self.await_registered(objects, ports).await?;
        self.await_imported(objects, configs).await
    }

    async fn await_registered(&mut self, objects: Objects, ports: Ports) -> Result<(), Failure> {
        let slot = &mut self.operator;
        let gate = self.steps.gate("operator registered", async || {
            if let Some(how) = ended(slot.as_mut()).await {
                return Tried::Failed(how);
            }
            match http::get(ports.probes(), "/readyz").await {
                Ok(answer) if answer.code == 200 => {}
                Ok(answer) => return Tried::Wait(answer.body.trim().to_owned()),
                Err(error) => return Tried::Wait(error.to_string()),
            }
            match objects.get(&format!("{SECRETS}/{CERTIFICATE}")).await {
                Ok(Some(_)) => Tried::Done(()),
                Ok(None) => Tried::Wait("it has no certificate yet".to_owned()),
                Err(error) => Tried::Wait(format!("{error:#}")),
            }
        });
        gate.await.map_err(|late| failure(records::OPERATOR, late, self.operator.as_ref()))
    }

    async fn await_imported(&mut self, objects: Objects, configs: &[Arc<Config>]) -> Result<(), Failure> {
        let tenant = tenant();
        let groups = configs.iter().flat_map(|it| it.groups.keys()).filter(|it| it.tenant == tenant);
        let groups: BTreeSet<String> = groups.map(|it| it.group.to_string()).collect();
        let slot = &mut self.operator;
        let gate = self.steps.gate("pools imported", async || {
            if let Some(how) = ended(slot.as_mut()).await {
                return Tried::Failed(how);
            }
            match missing_pools(objects, &groups).await {
                Ok(missing) if missing.is_empty() => Tried::Done(()),
                Ok(missing) => Tried::Wait(format!("no pool yet for {}", missing.join(", "))),
                Err(error) => Tried::Wait(format!("{error:#}")),
            }
        });
        gate.await.map_err(|late| failure(records::OPERATOR, late, self.operator.as_ref()))
    }
}

/// Those of the groups for which there are not both kinds of pools yet.
async fn missing_pools(objects: Objects, groups: &BTreeSet<String>) -> anyhow::Result<Vec<String>> {
    let (ours, pools) = (objects.list(OUR_POOLS).await?, objects.list(POOLS).await?);
    let names: BTreeSet<&str> = pools.iter().filter_map(|it| it["metadata"]["name"].as_str()).collect();
    let complete: BTreeSet<&str> = ours
        .iter()
        .filter(|it| it["metadata"]["name"].as_str().is_some_and(|name| names.contains(name)))
        .filter_map(|it| it["spec"]["group"].as_str())
        .collect();
    Ok(groups.iter().filter(|it| !complete.contains(it.as_str())).cloned().collect())
}

/// CA, nonce where one is needed, and the configuration file.
async fn prepare(
    layout: &Layout,
    objects: Objects,
    bucket: &Arc<S3Store>,
    configs: &[Arc<Config>],
) -> anyhow::Result<()> {
    let config = configs.first().context("there is no config")?;
    let ca = stored::read_ca(bucket).await?.context("the cluster has no CA yet")?;
    let ca = String::from_utf8(ca).context("read the CA's certificate")?;
    let is_same_ca = put_ca(objects, &ca).await.context("write the CA ConfigMap")?;
    if !is_same_ca || !has_certificate(objects).await? {
        let nonce = stored::operator_nonce(bucket, config, tenant()).await.context("make a nonce")?;
        let data = json!({ "nonce.jwt": BASE64.encode(nonce.as_bytes()) });
        put(objects, SECRETS, "Secret", NONCE, data).await.context("write the nonce Secret")?;
    }
    operator::write_config(layout, configs).context("write the operator's configuration")
}

/// Says whether it was there as it is to be.
async fn put_ca(objects: Objects, ca: &str) -> anyhow::Result<bool> {
    let there = objects.get(&format!("{CONFIG_MAPS}/{CA}")).await?;
    if there.as_ref().is_some_and(|it| it["data"]["ca.crt"] == *ca) {
        return Ok(true);
    }
    put(objects, CONFIG_MAPS, "ConfigMap", CA, json!({ "ca.crt": ca })).await.map(|()| false)
}

async fn put(objects: Objects, kind_path: &str, kind: &str, name: &str, data: Value) -> anyhow::Result<()> {
    let path = format!("{kind_path}/{name}");
    match objects.get(&path).await? {
        Some(mut there) => {
            there["data"] = data;
            objects.replace(&path, &there).await
        }
        None => {
            let metadata = json!({ "name": name, "namespace": NAMESPACE });
            let object = json!({ "apiVersion": "v1", "kind": kind, "metadata": metadata, "data": data });
            objects.create(kind_path, &object).await
        }
    }
}

/// Whether the operator can still be known by what it has. One whose certificate has expired registers with its key.
async fn has_certificate(objects: Objects) -> anyhow::Result<bool> {
    let Some(secret) = objects.get(&format!("{SECRETS}/{CERTIFICATE}")).await? else { return Ok(false) };
    let pem = secret["data"]["tls.crt"].as_str().and_then(|it| BASE64.decode(it.as_bytes()).ok());
    let der = pem.and_then(|pem| CertificateDer::from_pem_slice(&pem).ok().map(CertificateDer::into_owned));
    Ok(der.is_some_and(|der| Peer::accept(&der, SystemClock.now()).is_ok()))
}
