//! The fake Node of a VM through the VM's life.

use super::{
    tests::{Bench, OBEDIENT, eventually, instance, of, permit, spec, state},
    *,
};

struct Nodes(PathBuf);

impl Nodes {
    fn with(bench: &Bench) -> (Self, ProcessProvider) {
        let node_dir = bench.agent().with_file_name("nodes");
        let provider =
            bench.provider_with(ProcessOptions { node_dir: Some(node_dir.clone()), ..bench.options("dev-1") });
        (Self(node_dir), provider)
    }

    fn file(&self, n: u8) -> PathBuf {
        self.0.join(format!("{}.json", instance(n)))
    }

    fn text(&self, n: u8) -> Option<String> {
        fs::read_to_string(self.file(n)).ok()
    }
}

#[tokio::test]
async fn a_node_that_others_changed_or_removed_stays_so_while_its_vm_lives() {
    let bench = Bench::new(OBEDIENT);
    let (nodes, provider) = Nodes::with(&bench);
    for n in [1, 2] {
        provider.create(permit(), &spec("dev-1", n)).await.unwrap();
        assert!(nodes.text(n).unwrap().contains("dev:///nstance-agent-"));
    }
    fs::write(nodes.file(1), "theirs").unwrap();
    fs::remove_file(nodes.file(2)).unwrap();
    let look = async || {
        let (_, successor) = Nodes::with(&bench);
        for n in [1, 2] {
            successor.create(permit(), &spec("dev-1", n)).await.unwrap();
        }
        successor.list().await.unwrap();
        assert_eq!((nodes.text(1).as_deref(), nodes.text(2)), (Some("theirs"), None));
    };
    look().await;
    power::power_off(&bench.work_dir(), Duration::from_secs(3)).await.unwrap();
    power::power_on(&bench.work_dir(), &bench.agent()).await.unwrap();
    look().await;
    for n in [1, 2] {
        provider.delete(permit(), &of(n), DeleteHow::Now).await.unwrap();
        eventually("deleted", async || state(&provider, n) == Some(VmState::Deleted)).await;
    }
    eventually("no node is left", async || fs::read_dir(&nodes.0).unwrap().count() == 0).await;
}

#[tokio::test]
async fn a_node_that_its_creator_did_not_get_to_is_shown_by_a_listing() {
    let bench = Bench::new(OBEDIENT);
    let (nodes, provider) = Nodes::with(&bench);
    // One that shows no nodes stands for a creator that died before it could.
    let creator = bench.provider("dev-1");
    for n in [1, 2] {
        creator.create(permit(), &spec("dev-1", n)).await.unwrap();
    }
    assert!(kill_agent(&bench.work_dir(), instance(2)).unwrap());
    eventually(
        "dead",
        async || matches!(&creator.describe(&[of(2)]).await[0], Described::Vm(vm) if vm.seen == Seen::Gone),
    )
    .await;
    provider.list().await.unwrap();
    assert!(nodes.text(1).is_some());
    assert_eq!(nodes.text(2), None, "the dead have no node");
    fs::remove_file(nodes.file(1)).unwrap();
    provider.list().await.unwrap();
    assert_eq!(nodes.text(1), None, "once in a life");
}
