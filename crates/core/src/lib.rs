//! The pure domain of Nstance.
//!
//! Nothing here does I/O, reads a clock, draws chance or knows how anything is spelled on disk or on the wire.
//! Outside [`ports`] there is no async and no error of the outside world: planning cannot fail.

mod words;

pub mod time;

pub mod ids;

pub mod value;

pub mod group;

pub mod instance;

pub mod term;

pub mod snapshot;

mod victims;

pub mod budget;

pub mod distribute;

pub mod plan;

pub mod check;

pub mod model;

pub mod ports;
