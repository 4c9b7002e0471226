//! A minimal Kubernetes API server for development and tests.
//!
//! It keeps each object in a JSON file that may be looked at, edited, added and removed by hand, and serves what
//! operators and kubectl use: reads, writes, watches, patches, tables and a few subresources. It knows no schemas, no
//! permissions and no controllers.
//!
//! ```no_run
//! # async fn example() -> anyhow::Result<()> {
//! use nstance_devk8s::{Options, Server};
//! use nstance_rt::tasks::Tasks;
//!
//! let tasks = Tasks::new();
//! let running = Server::start(&tasks, Options::new("temp/dev-k8s")).await?;
//! std::fs::write("kubeconfig", running.kubeconfig())?;
//! # Ok(())
//! # }
//! ```

pub mod real;

mod discovery;
mod error;
mod faults;
mod http;
mod list;
mod object;
mod patch;
mod pki;
mod query;
mod render;
mod resources;
mod route;
mod seed;
mod selector;
mod server;
mod store;
mod subresources;
mod table;
mod watch;
mod write;

pub use self::{
    faults::Fault,
    server::{Options, Running, Server, kubeconfig},
    store::FileChanges,
};
