//! The stand-ins on an API server: on dev-k8s always, and on a real kube-apiserver where a kubeconfig of one is given.
//!
//! Each story runs in a namespace of its own with stand-ins of its own, so that all can share one real server.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod capi;
mod gc;
mod keeper;
mod real;
mod site;

/// Runs each story as a test on dev-k8s, and makes the list that the test on a real server runs.
macro_rules! stories {
    ($($story:ident),* $(,)?) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $story() {
                story::$story(&crate::site::Site::on_dev_k8s(stringify!($story)).await).await;
            }
        )*

        pub(crate) async fn on_a_real_server() {
            $(
                let site = crate::site::Site::on_real_server(stringify!($story)).await;
                story::$story(&site).await;
                site.clean().await;
                eprintln!("on the real API server: {} ok", stringify!($story));
            )*
        }
    };
}

pub(crate) use stories;
