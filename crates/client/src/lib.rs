//! A caller's side of the shards of one cluster, shared by the admin tool and the operator.
//!
//! A caller has an [`Identity`] and the [`Targets`]. It makes [`Shards`] of them, one [`Connection`] per shard, and then
//! either calls (`Shards::each`, `Connection::call`) or follows the watch streams ([`live`], [`events`], [`goal`]).
//!
//! Invariants:
//! - shards are independent: no call and no stream of one shard waits for another shard;
//! - "not found" is reported only if every shard was asked and does not have the object;
//! - a shard that cannot be reached is unknown, never empty;
//! - every queue is bounded, and a reader that falls behind is told that it did.
//!
//! Deliberately absent: command line, terminal, JSON, HTTP server, files, Kubernetes. Where a renewed identity is saved is
//! the caller's decision ([`SaveIdentity`]).

pub mod target;

pub mod error;

pub mod identity;

mod dial;

mod shard_client;

pub mod connection;

pub mod shards;

pub mod renewal;

pub mod registration;

pub mod resume_token;

pub mod events;

pub mod live;

pub mod goal;

pub use self::{
    connection::Connection,
    error::{NextStep, ShardError},
    identity::{Identity, IdentityError, RenewedIdentity, SaveIdentity},
    registration::{Registration, Rejoining},
    renewal::RenewError,
    resume_token::ResumeToken,
    shard_client::{ShardClient, wire_duration},
    shards::{Answers, Shards, UnknownShard},
    target::{Target, Targets},
};

#[cfg(test)]
mod testing;
