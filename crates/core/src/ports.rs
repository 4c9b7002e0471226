//! What the domain needs of the outside world, as traits whose contracts stand in prose.
//!
//! Every adapter of a port passes that port's contract suite, the in-memory ones included.

pub mod clock;

pub mod objects;

pub mod peers;

pub mod secrets;

pub mod schema;

pub mod provider;
