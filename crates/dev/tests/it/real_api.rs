//! The README's part "A cluster of your own", on a real Kubernetes API server in place of kind.

use std::{fs, path::Path, time::Duration};

use nstance_devk8s::real::{Assets, Setup};
use serde_json::Value;
use tokio::process::Command;

use crate::e2e_common::{DEV, Env, PATIENCE, text};

struct Kubectl<'a> {
    program: &'a Path,
    kubeconfig: &'a Path,
}

impl Kubectl<'_> {
    async fn try_run(&self, args: &[&str]) -> Result<String, String> {
        let output = Command::new(self.program).env("KUBECONFIG", self.kubeconfig).args(args).output().await.unwrap();
        let said = text(&output);
        if output.status.success() { Ok(said) } else { Err(said) }
    }

    async fn run(&self, args: &[&str]) -> String {
        self.try_run(args).await.unwrap_or_else(|said| panic!("kubectl {args:?}: {said}"))
    }
}

#[tokio::test]
async fn the_steps_for_a_cluster_of_ones_own_work() {
    let place = tempfile::tempdir().unwrap();
    let Some(api) = Setup::new().start_if_built(place.path()).await.unwrap() else { return };
    let assets = Assets::from_env().unwrap();
    let program = assets.kubectl().unwrap();
    let env = Env::new();
    env.up(&["--shards", "2", "--no-operator"]).await;
    let status = env.healthy().await;

    let kubeconfig = env.dir().join("operator/kubeconfig");
    fs::write(&kubeconfig, api.kubeconfig().unwrap()).unwrap();
    let kubectl = Kubectl { program: &program, kubeconfig: &kubeconfig };
    // What `clusterctl init` would have brought.
    let crds = assets.capi_crds().unwrap();
    kubectl.run(&["apply", "--server-side", "-f", crds.to_str().unwrap()]).await;
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/crd");
    kubectl.run(&["apply", "-k", config.to_str().unwrap()]).await;
    kubectl.run(&["wait", "--for=condition=Established", "--timeout=60s", "crd", "--all"]).await;
    let ca = format!("--from-file=ca.crt={}", env.dir().join("dev-s3/cluster/ca.crt").display());
    kubectl.run(&["create", "configmap", "nstance-cluster-ca", &ca]).await;
    let nonce = "cluster nonce --cluster-id example-cluster --storage-bucket dev --key-provider env --output -";
    let nonce = env.ok(&[&["admin", "--"], &nonce.split(' ').collect::<Vec<_>>()[..]].concat()).await;
    let nonce = format!("--from-literal=nonce.jwt={}", nonce.trim());
    kubectl.run(&["create", "secret", "generic", "nstance-operator-nonce", &nonce]).await;
    fs::write(env.dir().join("operator/config.yaml"), operator_config(&status)).unwrap();

    let log = fs::File::create(place.path().join("clients.log")).unwrap();
    let start = |args: &[&str]| {
        let mut command = Command::new(DEV);
        command.args(args).arg("--dir").arg(env.dir()).kill_on_drop(true);
        command.stdout(log.try_clone().unwrap()).stderr(log.try_clone().unwrap()).spawn().unwrap()
    };
    // Port 0: other tests run operators too.
    let _operator = start(&["operator", "--probes", "0", "--metrics", "0"]);
    let _standin = start(&["standin", "--bare", "--kubeconfig", kubeconfig.to_str().unwrap()]);

    let seen = async |what: &str, n: usize| {
        let mut last = Err(String::new());
        let wait = async {
            loop {
                last = kubectl.try_run(&["get", what, "--no-headers"]).await;
                if last.as_ref().is_ok_and(|it| it.lines().filter(|it| !it.starts_with("No resources")).count() == n) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        };
        if tokio::time::timeout(PATIENCE, wait).await.is_err() {
            let clients = fs::read_to_string(place.path().join("clients.log")).unwrap();
            panic!("there are not {n} {what}: {last:?}\n{clients}");
        }
    };
    seen("nstancemachinepools", 1).await;
    seen("nodes", 4).await;
    seen("machines", 4).await;
    kubectl.run(&["scale", "machinepool", "nstance-test", "--replicas", "2"]).await;
    seen("nodes", 2).await;
    env.until_agents(2).await;
}

fn operator_config(status: &Value) -> String {
    let port = |server: &str, name: &str| crate::e2e_common::server(status, server)["ports"][name].as_u64().unwrap();
    let mut text = "cluster_id: example-cluster\ntenant: default\nshards:\n".to_owned();
    for (shard, server) in [("dev-1", "server-1"), ("dev-2", "server-2")] {
        let (registration, operator) = (port(server, "registration"), port(server, "operator"));
        text.push_str(&format!(
            "  {shard}: {{ registration_addr: 127.0.0.1:{registration}, operator_addr: 127.0.0.1:{operator} }}\n"
        ));
    }
    text
}
