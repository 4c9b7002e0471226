//! Where instances run: the provider adapters and the contract suite that each of them passes.
//!
//! No other room knows a cloud. An adapter never decides; it performs one call and says exactly what it knows
//! afterwards: only a provider's own word makes an absence, and everything else is "unknown".

pub mod process;

pub mod fake;

pub mod faulty;

pub mod minimal;

pub mod contract;
