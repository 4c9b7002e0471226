//! `cluster ...`: on the bucket and its secrets directly.

mod doctor;
mod info;
mod nonce;
mod reencrypt;
mod register;
mod restore;
mod rotate;

use clap::Subcommand;

use crate::{args::Context, exit::Exit, failure::Failure};

#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Make a nonce with which one operator may register, once
    Nonce(nonce::NonceArgs),
    /// Make an operator's identity without any server
    RegisterOperator(register::RegisterArgs),
    /// Replace the CA step by step, without anybody noticing
    ///
    /// Without a flag the rotation begins: a new CA is made and trusted. Later --activate lets it issue, and --retire ends
    /// the trust of the old one. Each step is refused while it would cut somebody off.
    RotateCa(rotate::RotateArgs),
    /// Seal every secret with the first encryption key
    Reencrypt(reencrypt::ReencryptArgs),
    /// Show the cluster as its bucket knows it: CAs, shards, leaders, operators
    Info(info::InfoArgs),
    /// Check store, secrets and configs, and how well the bucket is kept
    Doctor(doctor::DoctorArgs),
    /// Put back into a lost bucket what a server's cache remembers
    ///
    /// Only says what it would do, unless --yes is given. Objects that are there are never touched.
    Restore(restore::RestoreArgs),
}

pub(super) async fn run(context: &Context, command: ClusterCommand) -> Result<Exit, Failure> {
    match command {
        ClusterCommand::Nonce(args) => nonce::run(context, args).await,
        ClusterCommand::RegisterOperator(args) => register::run(context, args).await,
        ClusterCommand::RotateCa(args) => rotate::run(context, args).await,
        ClusterCommand::Reencrypt(args) => reencrypt::run(context, args).await,
        ClusterCommand::Info(args) => info::run(context, args).await,
        ClusterCommand::Doctor(args) => doctor::run(context, args).await,
        ClusterCommand::Restore(args) => restore::run(context, args).await,
    }
}
