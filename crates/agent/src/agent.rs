//! The life of the agent: enrol, keep a session, rejoin, park.
//!
//! It ends by itself only when a stop is asked for. Nothing a server says or does makes it end: a fail-over must not
//! restart a fleet.

use std::{convert::Infallible, time::Duration};

use nstance_core::time::Mono;
use nstance_rt::backoff::Backoff;

use crate::{
    boot,
    context::{Components, Context, Control, State, Stopped},
    enrol::{Enrolment, Help, enrol, rejoin},
    files,
    health::Reports,
    local, metadata, sample,
    session::{SessionOver, serve},
    settings::Settings,
};

/// How often a parked agent looks whether somebody has helped it.
const PARKED_LOOK: Duration = Duration::from_secs(10);

/// Between two rejoins that did not help.
const REJOIN_BASE: Duration = Duration::from_secs(2);
const REJOIN_CAP: Duration = Duration::from_secs(60);

/// A rejoin that held this long did help.
const REJOIN_FORGOTTEN: Duration = Duration::from_secs(600);

/// Runs an agent until it is told to stop. Its directories are ready ([`crate::identity_dir::prepare`]).
///
/// ```no_run
/// # async fn example(settings: nstance_agent::settings::Settings) {
/// use std::sync::Arc;
/// use nstance_agent::{Components, Control, Endpoints, TcpNet, disk::Disk, host::Host};
/// use nstance_rt::{clock::SystemClock, entropy::SystemEntropy};
///
/// let parts = Components {
///     clock: Arc::new(SystemClock),
///     entropy: Arc::new(SystemEntropy::new()),
///     net: Arc::new(TcpNet),
///     disk: Disk::default(),
///     metadata: Endpoints::default(),
///     host: Host::machine(),
///     console: false,
/// };
/// nstance_agent::run(settings, parts, Control::new()).await;
/// # }
/// ```
pub async fn run(settings: Settings, parts: Components, control: Control) {
    let ctx = Context::new(settings, parts, control);
    let mut reports = Reports::new(&ctx);
    tokio::select! {
        biased;
        // `Stopped` outside a session: there is nobody to tell, for there is no identity to tell it with.
        _ = live(&ctx, &mut reports) => {}
        never = beside(&ctx) => match never {},
    }
    ctx.control.set(State::Leaving);
}

/// What goes on whether there is a session or not.
async fn beside(ctx: &Context) -> Infallible {
    let parts = async {
        tokio::join!(metadata::watch(ctx), boot::watch(ctx), sample::watch(ctx), local::serve(ctx), files::watch(ctx))
    };
    let (never, ..) = parts.await;
    never
}

enum Step<'a> {
    /// Whether the certificate at hand was refused.
    Enrol {
        refused: bool,
    },
    Rejoin,
    Serve,
    Park {
        why: String,
        refused: bool,
        /// Made before what failed was begun.
        help: Help<'a>,
    },
}

async fn live(ctx: &Context, reports: &mut Reports) -> Result<(), Stopped> {
    let mut step = Step::Enrol { refused: false };
    let mut rejoins = Rejoins::new();
    loop {
        step = match step {
            Step::Enrol { refused } => {
                ctx.control.set(State::Enrolling);
                let help = Help::new(ctx);
                match enrol(ctx, &help, refused).await? {
                    Enrolment::Ready => Step::Serve,
                    Enrolment::Rejoin => Step::Rejoin,
                    Enrolment::Helped => Step::Enrol { refused },
                    Enrolment::Fatal(why) => Step::Park { why, refused, help },
                }
            }
            Step::Rejoin => {
                // Whoever is dismissed stays so until a server takes it back.
                if !ctx.control.is(&State::Dismissed) {
                    ctx.control.set(State::Rejoining);
                }
                let help = Help::new(ctx);
                ctx.pause_unless_urgent(rejoins.pause(ctx)).await?;
                match rejoin(ctx, &help).await? {
                    Enrolment::Ready => Step::Serve,
                    Enrolment::Rejoin => Step::Rejoin,
                    Enrolment::Helped => Step::Enrol { refused: true },
                    Enrolment::Fatal(why) => Step::Park { why, refused: true, help },
                }
            }
            Step::Serve => match serve(ctx, reports).await {
                SessionOver::Rejoin => Step::Rejoin,
                SessionOver::Helped => Step::Enrol { refused: true },
                SessionOver::Park { why, refused } => Step::Park { why, refused, help: Help::new(ctx) },
                SessionOver::Left => return Ok(()),
            },
            Step::Park { why, refused, help } => {
                park(ctx, why, &help).await?;
                Step::Enrol { refused }
            }
        };
    }
}

/// Keeps a server that gives certificates and then refuses them from being asked without end.
struct Rejoins {
    backoff: Backoff,
    last: Option<Mono>,
}

impl Rejoins {
    fn new() -> Self {
        Self { backoff: Backoff::new(REJOIN_BASE, REJOIN_CAP), last: None }
    }

    /// None before the first in a while, then more and more.
    fn pause(&mut self, ctx: &Context) -> Duration {
        let now = ctx.parts.clock.monotonic();
        if self.last.replace(now).is_none_or(|last| REJOIN_FORGOTTEN <= now.since(last)) {
            self.backoff.reset();
            return Duration::ZERO;
        }
        self.backoff.next(ctx.entropy())
    }
}

/// Alive and quiet, until a new nonce or CA bundle lies there, or somebody sends SIGHUP.
async fn park(ctx: &Context, why: String, help: &Help<'_>) -> Result<(), Stopped> {
    tracing::error!(reason = why, "parked: this machine needs a new nonce or CA bundle, or to be replaced");
    ctx.control.set(State::Parked(why));
    while !help.came_within_quietly(PARKED_LOOK).await? {}
    Ok(())
}
