//! What the cloud says of this machine: whether it is a spot one, and when it will be taken.
//!
//! Only a well-formed answer is a notice. Anything else is counted, shown in the monitor's state, and asked again: a
//! broken metadata service must neither end a machine nor hide the end of one. What was told once stays told until the
//! process ends, whatever the service says later.

use std::{convert::Infallible, path::PathBuf, time::Duration};

use nstance_core::time::Timestamp;
use nstance_rt::{backoff::Backoff, chain::Chain, entropy::hex};
use tokio::time::sleep;

use self::{aws::Aws, azure::Azure, detect::Cloud, gcp::Gcp, monitor::Place, service::Trouble};
use crate::{
    context::Context,
    notice::{Action, Notice},
    settings::{Address, Provider},
};

mod aws;

mod azure;

mod dates;

mod detect;

mod file;

mod gcp;

mod http;

mod monitor;

mod service;

pub(crate) use self::monitor::Monitor;

/// Between two rounds in which no cloud was recognised.
const DETECT_BASE: Duration = Duration::from_secs(2);
const DETECT_CAP: Duration = Duration::from_secs(60);

/// Where clouds tell a machine about itself. The default is the truth; tests have their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoints {
    /// Tried in order, as are the others.
    pub aws: Vec<Address>,
    pub gcp: Vec<Address>,
    pub azure: Vec<Address>,
    /// What the firmware says about its maker.
    pub dmi: PathBuf,
}

impl Default for Endpoints {
    fn default() -> Self {
        let at = |host: &str| Address { host: host.to_owned(), port: 80 };
        Self {
            aws: vec![at("169.254.169.254"), at("fd00:ec2::254")],
            // The address besides the name: a machine whose resolver is broken is preempted too.
            gcp: vec![at("metadata.google.internal"), at("169.254.169.254")],
            azure: vec![at("169.254.169.254")],
            dmi: PathBuf::from("/sys/class/dmi/id"),
        }
    }
}

/// A notice as a source has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found {
    action: Action,
    deadline: Option<Timestamp>,
}

pub(crate) async fn watch(ctx: &Context) -> Infallible {
    let (never, _) = tokio::join!(watch_cloud(ctx), file::watch(ctx));
    never
}

async fn watch_cloud(ctx: &Context) -> Infallible {
    let clouds = match ctx.settings.provider {
        Provider::Auto => detect::order(&ctx.parts.metadata.dmi),
        Provider::Aws => vec![Cloud::Aws],
        Provider::Gcp => vec![Cloud::Gcp],
        Provider::Azure => vec![Cloud::Azure],
        Provider::Dev if ctx.settings.notice_file.is_some() => {
            // The file says whether this is a spot machine, and is the only source of notices.
            ctx.monitor.begin(&ctx.board, Place { provider: Some("dev"), spot: Some(false), zone: None });
            return std::future::pending().await;
        }
        Provider::Dev => return watch_nothing(ctx, Some("dev")).await,
        Provider::Proxmox => return watch_nothing(ctx, Some("proxmox")).await,
        Provider::None => return watch_nothing(ctx, Some("none")).await,
    };
    let told = (ctx.settings.provider != Provider::Auto).then(|| clouds[0].as_str());
    if ctx.settings.spot_poll_interval.is_zero() {
        return watch_nothing(ctx, told).await;
    }
    ctx.monitor.begin(&ctx.board, Place { provider: told, ..Place::default() });
    let (source, place) = detect(ctx, &clouds).await;
    tracing::info!(provider = place.provider, spot = place.spot, zone = place.zone, "cloud recognised");
    ctx.monitor.begin(&ctx.board, place);
    match source {
        Source::Aws(aws) => aws.watch().await,
        Source::Gcp(gcp) => gcp.watch().await,
        Source::Azure(azure) => azure.watch().await,
    }
}

/// No cloud is asked; the notice file, if there is one, is another's business.
async fn watch_nothing(ctx: &Context, provider: Option<&'static str>) -> Infallible {
    ctx.monitor.stay_off(&ctx.board, provider);
    std::future::pending().await
}

enum Source<'a> {
    Aws(Aws<'a>),
    Gcp(Gcp<'a>),
    Azure(Azure<'a>),
}

/// Asks the clouds in turn until one answers as itself. Without end: the service may come up long after the agent.
async fn detect<'a>(ctx: &'a Context, clouds: &[Cloud]) -> (Source<'a>, Place) {
    let mut backoff = Backoff::new(DETECT_BASE, DETECT_CAP);
    loop {
        let mut last = None;
        for cloud in clouds {
            match identify(ctx, *cloud).await {
                Ok(found) => return found,
                Err(error) => {
                    tracing::debug!(provider = cloud.as_str(), error = %Chain(&error), "not recognised");
                    ctx.monitor.count();
                    last = Some(error);
                }
            }
        }
        if let (0, Some(error)) = (backoff.n_tries(), last) {
            tracing::warn!(
                error = %Chain(&error),
                "no cloud recognised, so no spot notice can be seen; trying on. Set NSTANCE_PROVIDER to end this"
            );
        }
        // At least half of the bound: a machine without a cloud should sleep, not ask.
        let least = backoff.bound() / 2;
        sleep(least + backoff.next(ctx.entropy()) / 2).await;
    }
}

async fn identify(ctx: &Context, cloud: Cloud) -> Result<(Source<'_>, Place), Trouble> {
    Ok(match cloud {
        Cloud::Aws => Aws::identify(ctx).await.map(|(aws, place)| (Source::Aws(aws), place))?,
        Cloud::Gcp => Gcp::identify(ctx).await.map(|(gcp, place)| (Source::Gcp(gcp), place))?,
        Cloud::Azure => Azure::identify(ctx).await.map(|(azure, place)| (Source::Azure(azure), place))?,
    })
}

/// What stands in an answer, one by one.
type Read = Vec<Result<Found, &'static str>>;

/// Tells what could be read: something odd must not hide what stands beside it. What could not is still an error.
fn tell_all(ctx: &Context, path: &str, all: Read) -> Result<(), Trouble> {
    let mut done = Ok(());
    for found in all {
        match found {
            Ok(found) => tell(ctx, &found),
            Err(what) => done = done.and(Err(Trouble::malformed(path, what))),
        }
    }
    done
}

/// Tells the server, unless it has been told as much.
fn tell(ctx: &Context, found: &Found) {
    let told = ctx.board.notice();
    if told.as_ref().is_some_and(|told| !found.adds_to(told)) {
        return;
    }
    let Found { action, deadline } = *found;
    // The same end with a nearer deadline is the same notice.
    let same = told.filter(|told| told.action == action);
    let id = same.map_or_else(|| hex(ctx.entropy(), 8), |told| told.id);
    ctx.board.set_notice(Notice { action, deadline, detected_at: ctx.now(), id });
    tracing::warn!(action = action.as_str(), deadline = deadline.map(tracing::field::display), "notice");
}

impl Found {
    /// Whether it is stronger, or as strong and sooner. Two pieces of advice that both stand are not told by turns.
    fn adds_to(&self, told: &Notice) -> bool {
        let (ours, theirs) = (self.action.weight(), told.action.weight());
        let sooner = match (self.deadline, told.deadline) {
            (Some(ours), Some(theirs)) => ours < theirs,
            (ours, _) => ours.is_some(),
        };
        theirs < ours || theirs == ours && sooner
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_stronger_or_sooner_is_told() {
        let (_outer, ctx) = Context::for_tests(&[]);
        let seen = |action, deadline: Option<i64>| {
            tell(&ctx, &Found { action, deadline: deadline.map(Timestamp::from_millis) });
            let told = ctx.board.notice().expect("a notice");
            (told.action, told.deadline.map(Timestamp::as_millis), told.id)
        };
        let (action, deadline, first) = seen(Action::Rebalance, None);
        assert_eq!((action, deadline), (Action::Rebalance, None));
        let (action, deadline, second) = seen(Action::Maintenance, Some(900));
        assert_eq!((action, deadline), (Action::Maintenance, Some(900)));
        assert_ne!(first, second);
        assert_eq!(seen(Action::Rebalance, None), (Action::Maintenance, Some(900), second.clone()));
        let (action, deadline, third) = seen(Action::Terminate, None);
        assert_eq!((action, deadline), (Action::Terminate, None));
        assert_ne!(second, third);
        for (given, expected) in [(Some(500), 500), (Some(700), 500), (None, 500), (Some(400), 400)] {
            assert_eq!(seen(Action::Terminate, given), (Action::Terminate, Some(expected), third.clone()));
        }
        assert_eq!(seen(Action::Maintenance, Some(1)), (Action::Terminate, Some(400), third));
    }
}
