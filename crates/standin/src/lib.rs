//! Stand-ins for what runs beside an API server in a real cluster: Cluster API's controllers, the kubelets, garbage
//! collection. They are ordinary clients, so the same code runs on dev-k8s and on a real kube-apiserver.
//!
//! Each of them watches all kinds that it works on into a picture, takes its decisions from that picture by pure
//! functions, and carries them out by requests with deadlines; one object that cannot be written never stops the others.
//!
//! ```no_run
//! # use std::sync::Arc;
//! # async fn example(tasks: &nstance_rt::tasks::Tasks, client: kube::Client) {
//! use nstance_standin::{ControlPlane, KeeperOptions, Options};
//!
//! let mut options = Options::new(Arc::new(nstance_rt::clock::SystemClock));
//! options.capi = true;
//! options.gc = true;
//! options.keeper = Some(KeeperOptions {
//!     nodes_dir: Some("temp/dev-k8s/nodes".into()),
//!     instances_dir: Some("temp/instances".into()),
//!     plane: ControlPlane::Absent,
//!     api_is_file_backed: true,
//! });
//! let standin = nstance_standin::start(tasks, client, options);
//! standin.break_node("tst06b");
//! # }
//! ```

mod capi;
mod draft;
mod effect;
mod execute;
mod gc;
mod keeper;
pub mod kinds;
mod object;
mod options;
mod picture;
mod rounds;
mod selector;
mod times;
mod watch;

use std::sync::PoisonError;

use kube::Client;
use nstance_rt::tasks::Tasks;

pub use crate::options::{ControlPlane, KeeperOptions, Options, Timing};

/// The running clients. Dropping it ends nothing; they end with the scope that they were started in.
#[derive(Clone)]
pub struct Handle {
    broken: keeper::Broken,
}

impl Handle {
    /// Stops the heartbeats of a node, as if its kubelet hung.
    pub fn break_node(&self, name: &str) {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
    }

    /// Lets the heartbeats of a node go on.
    pub fn mend_node(&self, name: &str) {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }
}

/// Starts what the options ask for, as tasks of this scope.
pub fn start(tasks: &Tasks, client: Client, options: Options) -> Handle {
    let broken = keeper::Broken::default();
    if options.capi {
        capi::start(tasks, &client, &options);
    }
    if let Some(keeper) = &options.keeper {
        keeper::start(tasks, &client, &options, keeper, keeper::Broken::clone(&broken));
    }
    if options.gc {
        gc::start(tasks, &client, &options);
    }
    Handle { broken }
}
