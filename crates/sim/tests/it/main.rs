//! The simulation: random stories, and directed ones that do one thing at one moment.
//!
//! All modules are one program, so that it is linked once.

mod crash_points;
mod leadership;
mod outage;
mod recovery;
mod seeds;
mod traps;
