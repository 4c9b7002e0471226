//! Errors for watchers: events that name an error class. One is told at once; equal ones that follow within ten
//! seconds are counted and told together when the ten seconds are over.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nstance_core::{
    ids::{Epoch, Tenant},
    ports::clock::Clock,
    time::Mono,
};
use nstance_proto::v1;

use super::{ErrorKind, Registry};
use crate::{
    events::{CLASS, Event, RETRY_AFTER, Severity},
    service::status::timestamp,
};

const WINDOW: Duration = Duration::from_secs(10);
/// More different errors than this within a window are told one by one.
const MAX_FOLDS: usize = 1024;
/// Longest text of an error, in characters.
const MAX_TEXT: usize = 2048;

pub struct Errors {
    pub registry: Arc<Registry<ErrorKind>>,
    clock: Arc<dyn Clock>,
    folds: Mutex<BTreeMap<Same, Fold>>,
}

/// Errors that differ in nothing but their time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Same {
    tenant: Option<Tenant>,
    group: String,
    instance: String,
    reason: String,
    class: String,
    error: String,
}

struct Fold {
    since: Mono,
    n: u32,
    last: v1::ErrorEvent,
}

impl Errors {
    pub fn new(epoch: Epoch, clock: Arc<dyn Clock>) -> Self {
        Self { registry: Arc::new(Registry::new(epoch, clock.clone(), false)), clock, folds: Mutex::default() }
    }

    /// Takes an event in, if it is an error and anybody might want to know.
    pub fn tell(&self, event: &Event) {
        let Some(class) = class(event) else { return };
        let followed = match &event.tenant {
            Some(tenant) => self.registry.is_followed(tenant),
            None => self.registry.has_followers(),
        };
        if !followed {
            return;
        }
        let error = error(event, class);
        let now = self.clock.monotonic();
        let same = Same {
            tenant: event.tenant.clone(),
            group: error.group.clone(),
            instance: error.instance_id.clone(),
            reason: error.reason.clone(),
            class: error.class.clone(),
            error: error.error.clone(),
        };
        let mut folds = self.folds.lock().unwrap_or_else(PoisonError::into_inner);
        match folds.get_mut(&same) {
            Some(fold) if now.since(fold.since) < WINDOW => {
                fold.n = fold.n.saturating_add(1);
                fold.last = error;
            }
            found => {
                let repeated = found.map_or(0, |fold| fold.n);
                if folds.len() < MAX_FOLDS || folds.contains_key(&same) {
                    folds.insert(same.clone(), Fold { since: now, n: 0, last: error.clone() });
                }
                self.publish(same.tenant.as_ref(), v1::ErrorEvent { repeated, ..error });
            }
        }
    }

    /// Tells what was counted in windows that are over. Answers whether others are still open.
    pub fn unfold(&self) -> bool {
        let now = self.clock.monotonic();
        let mut folds = self.folds.lock().unwrap_or_else(PoisonError::into_inner);
        folds.retain(|same, fold| {
            if now.since(fold.since) < WINDOW {
                return true;
            }
            let repeated = std::mem::take(&mut fold.n);
            if 0 < repeated {
                self.publish(same.tenant.as_ref(), v1::ErrorEvent { repeated, ..fold.last.clone() });
                fold.since = now;
            }
            0 < repeated
        });
        !folds.is_empty()
    }

    fn publish(&self, tenant: Option<&Tenant>, error: v1::ErrorEvent) {
        match tenant {
            Some(tenant) => self.registry.publish(tenant, || Arc::new(error)),
            None => self.registry.publish_to_all(&Arc::new(error)),
        }
    }
}

/// The class of an event that is an error: what it says itself, or what its reason stands for.
fn class(event: &Event) -> Option<&str> {
    if event.severity < Severity::Warning {
        return None;
    }
    let by_reason = match event.reason.as_str() {
        "InstanceCreateFailed" | "DeleteFailing" | "ProviderFailing" => Some("provider"),
        "InstanceNeverRegistered" => Some("registration"),
        "LbFailing" => Some("load_balancer"),
        "ImageFailed" => Some("image"),
        "FileDeliveryFailed" => Some("file"),
        "StoreFailing" => Some("store"),
        "ConfigRejected" => Some("config"),
        _ => None,
    };
    event.detail.get(CLASS).map(String::as_str).or(by_reason)
}

fn error(event: &Event, class: &str) -> v1::ErrorEvent {
    let millis = event.detail.get(RETRY_AFTER).and_then(|text| text.parse().ok());
    v1::ErrorEvent {
        group: event.group.as_ref().map(|group| group.group.to_string()).unwrap_or_default(),
        instance_id: event.instance.map(|id| id.to_string()).unwrap_or_default(),
        error: event.message.chars().take(MAX_TEXT).collect(),
        timestamp: Some(timestamp(event.at)),
        reason: event.reason.as_str().to_owned(),
        class: class.to_owned(),
        retry_after: millis.map(|millis| crate::service::status::duration(Duration::from_millis(millis))),
        resume_token: String::new(),
        dropped: 0,
        repeated: 0,
    }
}
