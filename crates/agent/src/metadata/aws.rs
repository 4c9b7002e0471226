//! Amazon: instance metadata, version 2, which wants a token. Without one only if the service itself says that it has
//! none to give; a token endpoint that is merely silent must not talk the agent out of using it.

use std::{convert::Infallible, time::Duration};

use nstance_core::time::{Mono, Timestamp};
use nstance_rt::chain::Chain;
use serde_json::Value;
use tokio::time::{Instant, sleep_until};

use super::{
    Found, Read,
    dates::parse_date,
    http::{LIMIT, Request, Response},
    monitor::Place,
    service::{Service, Trouble, json, ok, ok_or_none, word},
    tell_all,
};
use crate::{context::Context, notice::Action};

const TOKEN: &str = "/latest/api/token";
const TOKEN_HEADER: &str = "X-aws-ec2-metadata-token";
const TTL_HEADER: &str = "X-aws-ec2-metadata-token-ttl-seconds";
const TTL: &str = "21600";
const DEFAULT_LIFE: Duration = Duration::from_secs(21_600);

/// How long "there are no tokens here" is believed.
const TOKENLESS_FOR: Duration = Duration::from_secs(600);

/// Between two tries to renew a token that still holds.
const RENEW_AGAIN: Duration = Duration::from_secs(60);

const INSTANCE_ID: &str = "/latest/meta-data/instance-id";
const LIFE_CYCLE: &str = "/latest/meta-data/instance-life-cycle";
const ZONE: &str = "/latest/meta-data/placement/availability-zone";
const ACTION: &str = "/latest/meta-data/spot/instance-action";
const REBALANCE: &str = "/latest/meta-data/events/recommendations/rebalance";
const MAINTENANCE: &str = "/latest/meta-data/events/maintenance/scheduled";

/// How often advice is asked for where no notice can come.
const ADVICE_PERIOD: Duration = Duration::from_secs(60);

/// Leave to ask: a token, or the knowledge that none is wanted.
struct Grant {
    token: Option<String>,
    renew_at: Mono,
    ends_at: Mono,
}

pub(crate) struct Aws<'a> {
    service: Service<'a>,
    grant: Option<Grant>,
    spot: bool,
}

impl<'a> Aws<'a> {
    pub(crate) async fn identify(ctx: &'a Context) -> Result<(Self, Place), Trouble> {
        let service = Service::new(ctx, &ctx.parts.metadata.aws);
        let mut aws = Self { service, grant: None, spot: false };
        let id = word(INSTANCE_ID, &ok(INSTANCE_ID, aws.get(INSTANCE_ID).await?)?)?;
        if !id.starts_with("i-") {
            return Err(Trouble::malformed(INSTANCE_ID, "not an instance id"));
        }
        let life = ok_or_none(LIFE_CYCLE, aws.get(LIFE_CYCLE).await?)?;
        aws.spot = life.is_some_and(|life| life.text() == Some("spot"));
        let zone = ok_or_none(ZONE, aws.get(ZONE).await?)?;
        let zone = zone.map(|zone| word(ZONE, &zone)).transpose()?;
        let place = Place { provider: Some("aws"), spot: Some(aws.spot), zone };
        Ok((aws, place))
    }

    pub(crate) async fn watch(mut self) -> Infallible {
        let ctx = self.service.ctx;
        let period = if self.spot { ctx.settings.spot_poll_interval } else { ADVICE_PERIOD };
        let mut advice_due = Instant::now();
        loop {
            let began = Instant::now();
            // The order first, and where the service is silent nothing else: it would hold up the next look.
            let silent = self.spot && !self.look(ACTION, |value| vec![action(value)]).await;
            if !silent && self.look(REBALANCE, |value| vec![rebalance(value)]).await && advice_due <= began {
                self.look(MAINTENANCE, maintenance).await;
                advice_due = began + ADVICE_PERIOD;
            }
            sleep_until(began + period).await;
        }
    }

    /// Asks for one kind of notice, and tells what is found. Whether there was an answer at all.
    async fn look(&mut self, path: &'static str, read: fn(&Value) -> Read) -> bool {
        let answer = self.find(path, read).await;
        let ctx = self.service.ctx;
        // Said here and not where tokens are asked for: another cloud's service has none either.
        ctx.monitor.set_tokenless(&ctx.board, self.grant.as_ref().is_some_and(|grant| grant.token.is_none()));
        ctx.monitor.heard(&ctx.board, path, &answer);
        !matches!(answer, Err(Trouble::Http { .. }))
    }

    async fn find(&mut self, path: &'static str, read: fn(&Value) -> Read) -> Result<(), Trouble> {
        let Some(answer) = ok_or_none(path, self.get(path).await?)? else { return Ok(()) };
        tell_all(self.service.ctx, path, read(&json(path, &answer)?))
    }

    async fn get(&mut self, path: &str) -> Result<Response, Trouble> {
        let answer = self.get_once(path).await?;
        if answer.status != 401 {
            return Ok(answer);
        }
        // The token was forgotten by the service, or wanted after all.
        self.grant = None;
        self.get_once(path).await
    }

    async fn get_once(&mut self, path: &str) -> Result<Response, Trouble> {
        match self.token().await? {
            Some(token) => self.service.get(path, &[(TOKEN_HEADER, &token)]).await,
            None => self.service.get(path, &[]).await,
        }
    }

    async fn token(&mut self) -> Result<Option<String>, Trouble> {
        let ctx = self.service.ctx;
        let now = ctx.parts.clock.monotonic();
        if let Some(grant) = self.grant.as_ref().filter(|grant| now < grant.renew_at) {
            return Ok(grant.token.clone());
        }
        let granted = self.new_grant(now).await;
        match (granted, &mut self.grant) {
            (Ok(grant), ours) => Ok(ours.insert(grant).token.clone()),
            // Renewed early so that there is time for this: the old one still holds.
            (Err(error), Some(old)) if now < old.ends_at => {
                tracing::debug!(error = %Chain(&error), "metadata token not renewed");
                ctx.monitor.count();
                old.renew_at = now + RENEW_AGAIN;
                Ok(old.token.clone())
            }
            (Err(error), _) => Err(error),
        }
    }

    async fn new_grant(&self, now: Mono) -> Result<Grant, Trouble> {
        let request = Request { method: "PUT", path: TOKEN, headers: &[(TTL_HEADER, TTL)] };
        let answer = self.service.ask(&request, LIMIT).await?;
        if matches!(answer.status, 403..=405) {
            return Ok(Grant { token: None, renew_at: now + TOKENLESS_FOR, ends_at: now + TOKENLESS_FOR });
        }
        let answer = ok(TOKEN, answer)?;
        let token = word(TOKEN, &answer)?;
        let told = answer.header(TTL_HEADER).and_then(|text| text.parse().ok()).map(Duration::from_secs);
        let life = told.unwrap_or(DEFAULT_LIFE).min(DEFAULT_LIFE);
        Ok(Grant { token: Some(token), renew_at: now + life * 8 / 10, ends_at: now + life })
    }
}

/// `{"action": "terminate", "time": "2026-01-31T12:02:00Z"}`
fn action(value: &Value) -> Result<Found, &'static str> {
    let action = match value.get("action").and_then(Value::as_str) {
        Some("terminate") => Action::Terminate,
        Some("stop") => Action::Stop,
        Some("hibernate") => Action::Hibernate,
        _ => return Err("no known action"),
    };
    let deadline = value.get("time").map(time).transpose()?;
    Ok(Found { action, deadline })
}

/// `{"noticeTime": "2026-01-31T12:00:00Z"}`, which is when the advice was given: a deadline is not part of it.
fn rebalance(value: &Value) -> Result<Found, &'static str> {
    time(value.get("noticeTime").ok_or("no notice time")?)?;
    Ok(Found { action: Action::Rebalance, deadline: None })
}

/// `[{"NotBefore": "21 Jan 2026 09:00:43 GMT", "Code": "system-reboot", "State": "active", …}]`
fn maintenance(value: &Value) -> Read {
    let Some(events) = value.as_array() else { return vec![Err("not a list of events")] };
    let ahead = |event: &&Value| !matches!(event.get("State").and_then(Value::as_str), Some("completed" | "canceled"));
    events.iter().filter(ahead).map(scheduled).collect()
}

fn scheduled(event: &Value) -> Result<Found, &'static str> {
    event.get("Code").and_then(Value::as_str).ok_or("an event without a code")?;
    let deadline = match event.get("NotBefore") {
        None => None,
        Some(text) => Some(text.as_str().and_then(parse_date).ok_or("an event without a time")?),
    };
    Ok(Found { action: Action::Maintenance, deadline })
}

fn time(value: &Value) -> Result<Timestamp, &'static str> {
    value.as_str().and_then(|text| text.parse().ok()).ok_or("not a time")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn spot_notice_needs_a_known_action_and_a_time_that_is_one() {
        for (text, expected) in
            [("terminate", Action::Terminate), ("stop", Action::Stop), ("hibernate", Action::Hibernate)]
        {
            let found = action(&json!({"action": text, "time": "2026-01-31T12:02:00Z"})).unwrap();
            assert_eq!(found, Found { action: expected, deadline: Some(Timestamp::from_millis(1_769_860_920_000)) });
        }
        assert_eq!(action(&json!({"action": "stop"})).unwrap(), Found { action: Action::Stop, deadline: None });
        for bad in [
            json!({"action": "dance", "time": "2026-01-31T12:02:00Z"}),
            json!({"action": "terminate", "time": "soon"}),
            json!({"action": "terminate", "time": 7}),
            json!({"time": "2026-01-31T12:02:00Z"}),
            json!("terminate"),
            json!(null),
        ] {
            assert!(action(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn advice_has_no_deadline_but_scheduled_events_have() {
        let found = rebalance(&json!({"noticeTime": "2026-01-31T12:02:00Z"})).unwrap();
        assert_eq!(found, Found { action: Action::Rebalance, deadline: None });
        assert!(rebalance(&json!({})).is_err() && rebalance(&json!({"noticeTime": "now"})).is_err());
        let event =
            |state: &str| json!({"Code": "system-reboot", "State": state, "NotBefore": "31 Jan 2026 12:02:00 GMT"});
        let deadline = Some(Timestamp::from_millis(1_769_860_920_000));
        let good = Ok(Found { action: Action::Maintenance, deadline });
        assert_eq!(maintenance(&json!([event("completed"), event("active"), event("canceled")])), [good]);
        assert!(maintenance(&json!([])).is_empty());
        for bad in [json!({}), json!([{}]), json!([{"Code": "x", "NotBefore": "later"}])] {
            assert!(matches!(maintenance(&bad)[..], [Err(_)]), "{bad}");
        }
        assert_eq!(maintenance(&json!([{}, event("active")]))[1], good, "whatever stands beside it");
    }
}
