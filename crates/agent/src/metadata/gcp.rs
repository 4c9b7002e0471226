//! Google: values that can be waited for. A read hangs until the value changes, so a notice comes when it is given.

use std::{convert::Infallible, time::Duration};

use tokio::time::{Instant, sleep_until};

use super::{
    Found,
    http::{LIMIT, Request, Response},
    monitor::Place,
    service::{Service, Trouble, ok, word},
    tell,
};
use crate::{context::Context, notice::Action};

const FLAVOR: (&str, &str) = ("Metadata-Flavor", "Google");
const NAME: &str = "/computeMetadata/v1/instance/name";
const ZONE: &str = "/computeMetadata/v1/instance/zone";
const PREEMPTIBLE: &str = "/computeMetadata/v1/instance/scheduling/preemptible";
const PREEMPTED: &str = "/computeMetadata/v1/instance/preempted";
const MAINTENANCE: &str = "/computeMetadata/v1/instance/maintenance-event";

/// A hanging read is answered after the 60 s it asks for at the latest, plus the way there and back.
const HANG_LIMIT: Duration = Duration::from_secs(65);

/// After a hanging read that nobody answered, values are read as others are for this long: a machine has half a minute
/// left when it is preempted, and the next such read may hang for twice as long.
const NO_HANGING: Duration = Duration::from_secs(3600);

/// After a failure on a machine that nobody takes away at short notice.
const CALM_PERIOD: Duration = Duration::from_secs(60);

pub(crate) struct Gcp<'a> {
    service: Service<'a>,
    spot: bool,
}

/// How to read next.
enum Read {
    Now,
    /// When it is no longer what this tag stands for: a change between two reads is not missed then.
    Changed(Option<String>),
}

impl<'a> Gcp<'a> {
    pub(crate) async fn identify(ctx: &'a Context) -> Result<(Self, Place), Trouble> {
        let service = Service::new(ctx, &ctx.parts.metadata.gcp);
        let mut gcp = Self { service, spot: false };
        gcp.word(NAME).await?;
        // `projects/123/zones/europe-west1-b`
        let zone = gcp.word(ZONE).await?;
        let zone = zone.rsplit('/').next().map(str::to_owned);
        gcp.spot = gcp.word(PREEMPTIBLE).await? == "TRUE";
        let place = Place { provider: Some("gcp"), spot: Some(gcp.spot), zone };
        Ok((gcp, place))
    }

    async fn word(&self, path: &str) -> Result<String, Trouble> {
        word(path, &self.get(path, path, LIMIT).await?)
    }

    /// A 200 by Google's own service; a captive portal or another cloud's service does not say so.
    async fn get(&self, path: &str, asked: &str, limit: Duration) -> Result<Response, Trouble> {
        let request = Request { method: "GET", path: asked, headers: &[FLAVOR] };
        let answer = self.service.ask(&request, limit).await?;
        if answer.header(FLAVOR.0) != Some(FLAVOR.1) {
            return Err(Trouble::malformed(path, "not from Google's metadata service"));
        }
        ok(path, answer)
    }

    pub(crate) async fn watch(self) -> Infallible {
        if !self.spot {
            return self.follow(MAINTENANCE, maintenance).await;
        }
        let (never, _) = tokio::join!(self.follow(PREEMPTED, preempted), self.follow(MAINTENANCE, maintenance));
        never
    }

    async fn follow(
        &self,
        path: &'static str,
        read: impl Fn(&str) -> Result<Option<Found>, &'static str>,
    ) -> Infallible {
        let ctx = self.service.ctx;
        let period = if self.spot { ctx.settings.spot_poll_interval } else { CALM_PERIOD };
        let mut next = Read::Now;
        let mut hang_from = Instant::now();
        loop {
            let began = Instant::now();
            let answer = self.find(path, &next, &read).await;
            if let Ok((Some(found), _)) = &answer {
                tell(ctx, found);
            }
            ctx.monitor.heard(&ctx.board, path, &answer);
            let waited = matches!(next, Read::Changed(_));
            if waited && answer.as_ref().is_err_and(Trouble::is_late) {
                hang_from = Instant::now() + NO_HANGING;
            }
            next = match answer {
                Ok((_, tag)) if hang_from <= Instant::now() => Read::Changed(tag),
                _ => Read::Now,
            };
            // A service that does not let its readers wait is not asked more often than others are.
            if (waited || matches!(next, Read::Now)) && began.elapsed() < period {
                sleep_until(began + period).await;
                if matches!(next, Read::Changed(None)) {
                    next = Read::Now;
                }
            }
        }
    }

    async fn find(
        &self,
        path: &'static str,
        next: &Read,
        read: &impl Fn(&str) -> Result<Option<Found>, &'static str>,
    ) -> Result<(Option<Found>, Option<String>), Trouble> {
        let answer = match next {
            Read::Now => self.get(path, path, LIMIT).await?,
            Read::Changed(tag) => {
                let tag = tag.as_ref().map(|tag| format!("&last_etag={tag}")).unwrap_or_default();
                let asked = format!("{path}?wait_for_change=true&timeout_sec=60{tag}");
                self.get(path, &asked, HANG_LIMIT).await?
            }
        };
        let found = read(&word(path, &answer)?).map_err(|what| Trouble::malformed(path, what))?;
        // It goes into the next request's first line.
        let plain = |tag: &&str| !tag.is_empty() && tag.bytes().all(|byte| byte.is_ascii_alphanumeric());
        Ok((found, answer.header("ETag").filter(plain).map(str::to_owned)))
    }
}

fn preempted(text: &str) -> Result<Option<Found>, &'static str> {
    match text {
        "TRUE" => Ok(Some(Found { action: Action::Preempt, deadline: None })),
        "FALSE" => Ok(None),
        _ => Err("neither TRUE nor FALSE"),
    }
}

fn maintenance(text: &str) -> Result<Option<Found>, &'static str> {
    match text {
        "NONE" => Ok(None),
        "MIGRATE_ON_HOST_MAINTENANCE" | "TERMINATE_ON_HOST_MAINTENANCE" => {
            Ok(Some(Found { action: Action::Maintenance, deadline: None }))
        }
        _ => Err("no known maintenance event"),
    }
}
