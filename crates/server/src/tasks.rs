//! What runs by itself: each looks at state only, is idempotent, and ends with its term.

pub mod capacity;
pub mod check;
pub mod collect;
pub mod images;
pub mod observe;
pub mod reconcile;
pub mod rollouts;
pub mod tombstones;
pub mod types;
pub mod watch;
