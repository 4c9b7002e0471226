//! The command lines of the programs. Everything binds to loopback.

use std::{io, net::TcpListener, path::Path};

use super::Program;

/// One port for each listener.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ports {
    etcd: u16,
    etcd_peer: u16,
    api_server: u16,
    controller_manager: u16,
    scheduler: u16,
}

impl Ports {
    /// Ports that are free now. All are held until all are chosen, so that they differ.
    pub(super) fn free() -> io::Result<Self> {
        let hold = || TcpListener::bind(("127.0.0.1", 0));
        let held = [hold()?, hold()?, hold()?, hold()?, hold()?];
        let port = |at: usize| held[at].local_addr().map(|it| it.port());
        Ok(Self {
            etcd: port(0)?,
            etcd_peer: port(1)?,
            api_server: port(2)?,
            controller_manager: port(3)?,
            scheduler: port(4)?,
        })
    }

    pub(super) fn of(&self, program: Program) -> u16 {
        match program {
            Program::Etcd => self.etcd,
            Program::ApiServer => self.api_server,
            Program::ControllerManager => self.controller_manager,
            Program::Scheduler => self.scheduler,
        }
    }
}

/// Whether something makes the service account `default` of each namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Accounts {
    Made,
    None,
}

/// Controllers that an operator meets; the others would only use memory.
const CONTROLLERS: &[&str] = &[
    "garbage-collector-controller",
    "namespace-controller",
    "serviceaccount-controller",
    "root-ca-certificate-publisher-controller",
    "clusterrole-aggregation-controller",
    "disruption-controller",
    "pod-garbage-collector-controller",
    "node-lifecycle-controller",
    "taint-eviction-controller",
    "deployment-controller",
    "replicaset-controller",
    "statefulset-controller",
    "daemonset-controller",
    "job-controller",
    "certificatesigningrequest-approving-controller",
    "certificatesigningrequest-signing-controller",
    "certificatesigningrequest-cleaner-controller",
    "bootstrap-signer-controller",
    "token-cleaner-controller",
    "legacy-serviceaccount-token-cleaner-controller",
];

pub(super) fn etcd(dir: &Path, ports: &Ports) -> Vec<String> {
    let (client, peer) = (ports.etcd, ports.etcd_peer);
    vec![
        "--name=test".to_owned(),
        flag("--data-dir", &dir.join("etcd")),
        // Tests outlive no power failure.
        "--unsafe-no-fsync".to_owned(),
        "--logger=zap".to_owned(),
        "--log-level=warn".to_owned(),
        format!("--listen-client-urls=http://127.0.0.1:{client}"),
        format!("--advertise-client-urls=http://127.0.0.1:{client}"),
        format!("--listen-peer-urls=http://127.0.0.1:{peer}"),
        format!("--initial-advertise-peer-urls=http://127.0.0.1:{peer}"),
        format!("--initial-cluster=test=http://127.0.0.1:{peer}"),
    ]
}

pub(super) fn api_server(dir: &Path, ports: &Ports, accounts: Accounts) -> Vec<String> {
    let pki = dir.join("pki");
    let port = ports.api_server;
    let mut flags = vec![
        format!("--etcd-servers=http://127.0.0.1:{}", ports.etcd),
        "--bind-address=127.0.0.1".to_owned(),
        format!("--secure-port={port}"),
        // With these two it starts where the only network is loopback.
        "--advertise-address=127.0.0.1".to_owned(),
        "--endpoint-reconciler-type=none".to_owned(),
        flag("--tls-cert-file", &pki.join("server.crt")),
        flag("--tls-private-key-file", &pki.join("server.key")),
        flag("--client-ca-file", &pki.join("ca.crt")),
        "--enable-bootstrap-token-auth=true".to_owned(),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        format!("--service-account-issuer=https://127.0.0.1:{port}"),
        flag("--service-account-key-file", &pki.join("sa.pub")),
        flag("--service-account-signing-key-file", &pki.join("sa.key")),
        "--service-cluster-ip-range=10.0.0.0/24".to_owned(),
        "--allow-privileged=true".to_owned(),
        "--profiling=false".to_owned(),
    ];
    if accounts == Accounts::None {
        // It refuses pods whose service account does not exist.
        flags.push("--disable-admission-plugins=ServiceAccount".to_owned());
    }
    flags
}

pub(super) fn controller_manager(dir: &Path, ports: &Ports) -> Vec<String> {
    let pki = dir.join("pki");
    let mut flags = serving(dir, ports.controller_manager);
    flags.extend([
        flag("--kubeconfig", &pki.join("kube-controller-manager.kubeconfig")),
        "--use-service-account-credentials=true".to_owned(),
        flag("--service-account-private-key-file", &pki.join("sa.key")),
        flag("--root-ca-file", &pki.join("ca.crt")),
        flag("--cluster-signing-cert-file", &pki.join("ca.crt")),
        flag("--cluster-signing-key-file", &pki.join("ca.key")),
        format!("--controllers={}", CONTROLLERS.join(",")),
    ]);
    flags
}

pub(super) fn scheduler(dir: &Path, ports: &Ports) -> Vec<String> {
    let mut flags = serving(dir, ports.scheduler);
    flags.push(flag("--kubeconfig", &dir.join("pki").join("kube-scheduler.kubeconfig")));
    flags
}

/// What controller manager and scheduler have in common: they serve their health, and run alone.
fn serving(dir: &Path, port: u16) -> Vec<String> {
    let pki = dir.join("pki");
    vec![
        "--bind-address=127.0.0.1".to_owned(),
        format!("--secure-port={port}"),
        flag("--tls-cert-file", &pki.join("server.crt")),
        flag("--tls-private-key-file", &pki.join("server.key")),
        "--leader-elect=false".to_owned(),
        "--profiling=false".to_owned(),
    ]
}

fn flag(name: &str, path: &Path) -> String {
    format!("{name}={}", path.display())
}
