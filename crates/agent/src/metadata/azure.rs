//! Azure: a list of scheduled events, for this machine and its neighbours alike.

use std::{convert::Infallible, time::Duration};

use serde_json::Value;
use tokio::time::{Instant, sleep_until};

use super::{
    Found, Read,
    dates::parse_date,
    http::{LIMIT, Request},
    monitor::Place,
    service::{Service, Trouble, json, ok, ok_or_none, word},
    tell_all,
};
use crate::{context::Context, notice::Action};

const METADATA: (&str, &str) = ("Metadata", "true");
const EVENTS: &str = "/metadata/scheduledevents?api-version=2020-07-01";

/// The first question switches the events on, which may take two minutes.
const FIRST_LIMIT: Duration = Duration::from_secs(130);

const CALM_PERIOD: Duration = Duration::from_secs(60);

pub(crate) struct Azure<'a> {
    service: Service<'a>,
    /// As scheduled events call this machine.
    name: String,
    spot: bool,
}

impl<'a> Azure<'a> {
    pub(crate) async fn identify(ctx: &'a Context) -> Result<(Self, Place), Trouble> {
        let service = Service::new(ctx, &ctx.parts.metadata.azure);
        let none = |leaf: &str| Trouble::malformed(leaf, "there is none");
        let name = leaf(&service, "name").await?.ok_or_else(|| none("name"))?;
        let location = leaf(&service, "location").await?.ok_or_else(|| none("location"))?;
        let spot = leaf(&service, "priority").await?.is_some_and(|priority| priority == "Spot");
        // Zones are numbers, which mean nothing without their region.
        let zone = match leaf(&service, "zone").await? {
            Some(zone) => format!("{location}-{zone}"),
            None => location,
        };
        let place = Place { provider: Some("azure"), spot: Some(spot), zone: Some(zone) };
        Ok((Self { service, name, spot }, place))
    }

    pub(crate) async fn watch(self) -> Infallible {
        let ctx = self.service.ctx;
        let period = if self.spot { ctx.settings.spot_poll_interval } else { CALM_PERIOD };
        let mut limit = FIRST_LIMIT;
        loop {
            let began = Instant::now();
            let answer = self.find(limit).await;
            ctx.monitor.heard(&ctx.board, EVENTS, &answer);
            if answer.is_ok() {
                limit = LIMIT;
            }
            sleep_until(began + period).await;
        }
    }

    async fn find(&self, limit: Duration) -> Result<(), Trouble> {
        let request = Request { method: "GET", path: EVENTS, headers: &[METADATA] };
        let answer = ok(EVENTS, self.service.ask(&request, limit).await?)?;
        tell_all(self.service.ctx, EVENTS, events(&json(EVENTS, &answer)?, &self.name))
    }
}

/// One thing that Azure knows of this machine, if it does. Asked for one by one: the document that has them all has the
/// user data too, which may be longer than anything that is read here.
async fn leaf(service: &Service<'_>, name: &str) -> Result<Option<String>, Trouble> {
    let path = format!("/metadata/instance/compute/{name}?api-version=2021-02-01&format=text");
    let answer = ok_or_none(&path, service.get(&path, &[METADATA]).await?)?;
    let Some(answer) = answer.filter(|answer| answer.text() != Some("")) else { return Ok(None) };
    let word = word(&path, &answer)?;
    // Text says less of its sender than a document did, and a portal answers everything: none of Azure's has these.
    if word.contains([' ', '<', '>']) {
        return Err(Trouble::malformed(&path, "not a name"));
    }
    Ok(Some(word))
}

/// `{"Events": [{"EventType": "Preempt", "Resources": ["vm-1"], "NotBefore": "Sat, 31 Jan 2026 12:02:00 GMT", …}]}`
fn events(value: &Value, name: &str) -> Read {
    let Some(all) = value.get("Events").and_then(Value::as_array) else { return vec![Err("no list of events")] };
    let ours = |event: &&Value| {
        let resources = event.get("Resources").and_then(Value::as_array);
        let named = |it: &Value| it.as_str().is_some_and(|it| it.eq_ignore_ascii_case(name));
        resources.is_some_and(|all| all.iter().any(named))
    };
    let over =
        |event: &&Value| matches!(event.get("EventStatus").and_then(Value::as_str), Some("Completed" | "Canceled"));
    all.iter().filter(ours).filter(|event| !over(event)).map(event).collect()
}

fn event(event: &Value) -> Result<Found, &'static str> {
    let action = match event.get("EventType").and_then(Value::as_str) {
        Some("Preempt") => Action::Preempt,
        Some("Terminate") => Action::Terminate,
        Some(_) => Action::Maintenance,
        None => return Err("an event without a type"),
    };
    let deadline = match event.get("NotBefore").and_then(Value::as_str) {
        // Nothing once it has begun.
        None | Some("") => None,
        Some(text) => Some(parse_date(text).ok_or("an event at no known time")?),
    };
    Ok(Found { action, deadline })
}

#[cfg(test)]
mod tests {
    use nstance_core::time::Timestamp;
    use serde_json::json;

    use super::*;

    #[test]
    fn only_events_of_this_machine_count() {
        let event = |kind: &str, vm: &str, at: &str| json!({"EventType": kind, "Resources": [vm], "NotBefore": at});
        let all = |value: Value| events(&value, "vm-1").into_iter().collect::<Result<Vec<_>, _>>();
        let found = |list: Value| all(json!({"Events": list}));
        let deadline = Some(Timestamp::from_millis(1_769_860_920_000));
        let date = "Sat, 31 Jan 2026 12:02:00 GMT";
        for (kind, action) in [
            ("Preempt", Action::Preempt),
            ("Terminate", Action::Terminate),
            ("Freeze", Action::Maintenance),
            ("Reboot", Action::Maintenance),
            ("Redeploy", Action::Maintenance),
        ] {
            let list = json!([event(kind, "vm-2", date), event(kind, "VM-1", date)]);
            assert_eq!(found(list), Ok(vec![Found { action, deadline }]));
            assert_eq!(found(json!([event(kind, "vm-1", "")])), Ok(vec![Found { action, deadline: None }]));
            assert!(found(json!([event(kind, "vm-1", "soon")])).is_err());
        }
        assert_eq!(found(json!([])), Ok(vec![]));
        let over = json!({"EventType": "Freeze", "Resources": ["vm-1"], "EventStatus": "Completed"});
        assert_eq!(found(json!([over])), Ok(vec![]));
        assert!(all(json!({})).is_err());
        assert!(found(json!([{"Resources": ["vm-1"]}])).is_err());
    }
}
