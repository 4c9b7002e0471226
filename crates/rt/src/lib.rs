//! The one door to time, chance, tasks and telemetry. Whatever is not pure and not I/O of a domain stands here.

pub mod clock;

pub mod entropy;

pub mod backoff;

pub mod lane;

pub mod process;

pub mod tasks;

pub mod shutdown;

pub mod pipe;

pub mod chain;

pub mod telemetry;
