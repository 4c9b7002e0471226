//! The development environment: the whole of Nstance on one machine, and what its tests stand on.

pub mod s3;
