//! The commands.

pub mod cert;
pub mod check;
pub mod cluster;
pub mod config;
pub mod drains;
pub mod events;
pub mod explain;
pub mod group;
pub mod instance;
pub mod operator;
pub mod plan;
pub mod shards;
pub mod top;

mod completion;

mod env;

mod man;

mod version;

use clap::{ArgMatches, Subcommand};

pub(crate) use self::completion::with_candidates;
use crate::{args::Context, exit::Exit, failure::Failure};

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show every shard: whether it answers, who leads it, since which epoch, and what it has
    Shards(shards::ShardsArgs),
    /// Look at the config of each shard, apply a changed one, check a new one
    Config(config::ConfigArgs),
    /// Look at groups, make them, scale them, delete them
    Group(group::GroupArgs),
    /// Look at instances, make, replace, drain and delete them, and ask why they are as they are
    Instance(instance::InstanceArgs),
    /// Show who is being drained
    Drains(drains::DrainsArgs),
    /// Show what the planner would do now, and what it holds back
    Plan(plan::PlanArgs),
    /// Show the facts, decisions and holds behind a group or an instance
    Explain(explain::ExplainArgs),
    /// Show what happened, and follow what happens
    Events(events::EventsArgs),
    /// Show shards, groups, instances and events on one screen, as they change
    Top(top::TopArgs),
    /// Work on the cluster through its bucket, without any server
    #[command(subcommand)]
    Cluster(cluster::ClusterCommand),
    /// Look at issued certificates, and end one
    #[command(subcommand)]
    Cert(cert::CertCommand),
    /// Look at operators, and revoke one
    #[command(subcommand)]
    Operator(operator::OperatorCommand),
    /// Check everything, from the clock to the fleet, and say how to repair what is wrong
    Check(check::CheckArgs),
    /// Serve the shards over HTTP, with an OpenAPI document at /openapi.json
    Serve(crate::serve::ServeArgs),
    /// Print the script that teaches a shell to complete commands, groups and instances
    Completion(completion::CompletionArgs),
    /// Print or write the manual pages
    Man(man::ManArgs),
    /// Show the value of every flag and where it came from
    Env(env::EnvArgs),
    /// Show our version and those of the servers
    Version(version::VersionArgs),
}

impl Command {
    pub(crate) async fn run(self, context: &Context, matches: &ArgMatches) -> Result<Exit, Failure> {
        match self {
            Self::Shards(args) => shards::run(context, args).await,
            Self::Completion(args) => completion::run(&args),
            Self::Man(args) => man::run(&args),
            Self::Env(_) => Ok(env::run(context, matches)),
            Self::Version(args) => version::run(context, args).await,
            Self::Config(args) => config::run(context, args).await,
            Self::Group(args) => group::run(context, args).await,
            Self::Instance(args) => instance::run(context, args).await,
            Self::Drains(args) => drains::run(context, args).await,
            Self::Plan(args) => plan::run(context, args).await,
            Self::Explain(args) => explain::run(context, args).await,
            Self::Events(args) => events::run(context, args).await,
            Self::Top(args) => top::run(context, args).await,
            Self::Serve(args) => crate::serve::run(context, args).await,
            Self::Cluster(command) => cluster::run(context, command).await,
            Self::Cert(command) => cert::run(context, command).await,
            Self::Operator(command) => operator::run(context, command).await,
            Self::Check(args) => check::run(context, args).await,
        }
    }
}
