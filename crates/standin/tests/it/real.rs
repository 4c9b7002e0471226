//! Every story on a real kube-apiserver.

use crate::{capi, gc, keeper, site};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stories_hold_on_a_real_api_server() {
    if site::real_kubeconfig().await.is_none() {
        eprintln!("NOT RUN: the stand-ins on a real API server; its programs are not built");
        return;
    }
    capi::on_a_real_server().await;
    keeper::on_a_real_server().await;
    gc::on_a_real_server().await;
}
