//! Events: what a person reads in `kubectl describe`.

use crate::ports::ObjectRef;

macro_rules! reasons {
    ($($name:ident,)*) => {
        /// Why an event was written. A closed set: people and dashboards select by it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason { $($name,)* }

        impl Reason {
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* }
            }
        }
    };
}

reasons! {
    GroupImported,
    ImportWaiting,
    SizePushed,
    ConfigInvalid,
    ShardUnreachable,
    ShardReachable,
    ProviderError,
    InstanceCreated,
    InstanceDeleted,
    BootFailed,
    DrainStarted,
    DrainBlocked,
    DrainCompleted,
    DrainTimedOut,
    DrainCancelled,
    AmbiguousNode,
    CertificateRenewed,
    CertificateExpired,
    CABundleStale,
    GroupOrphaned,
    ShardRemoved,
    NodeDeleted,
    ClusterMoved,
    FieldConflict,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    Normal,
    Warning,
}

/// The object that an event is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct About {
    pub object: ObjectRef,
    pub uid: String,
}

/// Takes events and never waits. The same (object, reason, message) is written once in ten minutes.
pub trait EventSink: Send + Sync {
    /// `reason` is usually [`Reason::as_str`]; events that a shard reports carry the shard's own reason code.
    fn emit(&self, about: &About, severity: Severity, reason: &str, message: &str);
}
