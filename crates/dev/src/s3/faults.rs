//! Faults on purpose: rules that say for whom, on what and how the store misbehaves.
//!
//! Rules are tried in the order they were added, and what several of them ask for adds up; of answers that exclude
//! each other the first wins. Nothing here is random: `after`, `share` and `times` say exactly which requests are hit, so a
//! test can make the second put ambiguous and no other.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::{sync::watch, time::Instant};

use super::disk::Listed;

/// One rule. A request it matches suffers all its effects.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FaultRule {
    /// Names the rule. One that is added under the name of another replaces it; without a name it gets a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Glob over the access key; unsigned requests have the empty one.
    #[serde(alias = "access-key", alias = "client", skip_serializing_if = "Option::is_none")]
    pub access_key: Option<String>,
    /// Glob over S3's name of the operation: `PutObject`, `List*`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operation: Option<String>,
    /// Glob over the object's key, or the prefix of a listing. `*` also matches slashes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Lets this many matching requests pass first.
    #[serde(skip_serializing_if = "is_default")]
    pub after: u64,
    /// Hits only this share of the matching requests, spread evenly: 0.25 is every fourth.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// Ends after this many requests were hit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub times: Option<u64>,

    /// Waits this long before anything else.
    #[serde(alias = "latency-ms", skip_serializing_if = "is_default")]
    pub latency_ms: u64,
    /// Answers with this status, and applies nothing.
    #[serde(alias = "error_status", alias = "error-status", skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// The S3 error code to go with `status`; a fitting one if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// Closes the connection without an answer, and applies nothing.
    #[serde(alias = "drop-before-apply", skip_serializing_if = "is_default")]
    pub drop_before_apply: bool,
    /// Applies, then closes the connection without an answer.
    #[serde(alias = "drop-after-apply", skip_serializing_if = "is_default")]
    pub drop_after_apply: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throttle: Option<Throttle>,
    /// Carries out conditional operations as if they had no conditions, like a store that is not safe.
    #[serde(alias = "ignore-conditions", skip_serializing_if = "is_default")]
    pub ignore_conditions: bool,
    /// Listings show what there was when the rule was added.
    #[serde(alias = "stale-list", skip_serializing_if = "is_default")]
    pub stale_list: bool,
    /// Takes the request and never answers, and applies nothing. Ends with the rule, by closing the connection.
    #[serde(alias = "black-hole", skip_serializing_if = "is_default")]
    pub black_hole: bool,
}

/// Refuses what comes faster than a rate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Throttle {
    #[serde(alias = "per-second", alias = "rate")]
    pub per_second: f64,
    /// How many may come at once; the rate of a second, but at least one, if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<f64>,
    /// 503 with `SlowDown` if not given, as S3 does; GCS says 429.
    #[serde(default = "slow_down")]
    pub status: u16,
}

fn slow_down() -> u16 {
    503
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A rule as it stands: with its name, and how often it was met and took effect.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FaultState {
    #[serde(flatten)]
    pub rule: FaultRule,
    pub matched: u64,
    pub applied: u64,
}

/// What happens to one request.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) latency: Duration,
    pub(super) instead: Option<Instead>,
    pub(super) drop_after: bool,
    pub(super) ignore_conditions: bool,
    pub(super) stale: Option<Arc<Vec<Listed>>>,
    pub(super) n_rules: u64,
}

/// What happens in place of the operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Instead {
    Fail {
        status: u16,
        code: String,
    },
    Drop,
    /// Until the rule of this name is gone.
    BlackHole(String),
}

pub(super) struct Faults {
    rules: Mutex<Vec<Rule>>,
    changed: watch::Sender<u64>,
}

struct Rule {
    id: String,
    rule: FaultRule,
    matched: u64,
    applied: u64,
    due: f64,
    bucket: Option<Bucket>,
    stale: Option<Arc<Vec<Listed>>>,
}

struct Bucket {
    tokens: f64,
    filled_at: Instant,
}

impl Faults {
    pub(super) fn new() -> Faults {
        Faults { rules: Mutex::default(), changed: watch::Sender::new(0) }
    }

    /// Adds rules; `snapshot` is what those about stale listings will show.
    pub(super) fn add(&self, rules: Vec<FaultRule>, snapshot: Option<Arc<Vec<Listed>>>) {
        {
            let mut all = self.rules();
            for rule in rules {
                let id = rule.id.clone().unwrap_or_else(|| {
                    (1u64..).map(|n| n.to_string()).find(|id| all.iter().all(|it| it.id != *id)).unwrap_or_default()
                });
                all.retain(|it| it.id != id);
                let stale = snapshot.clone().filter(|_| rule.stale_list);
                all.push(Rule { id, rule, matched: 0, applied: 0, due: 0.0, bucket: None, stale });
            }
        }
        self.changed.send_modify(|n| *n += 1);
    }

    /// Removes one rule, or all. Says how many there were.
    pub(super) fn remove(&self, id: Option<&str>) -> usize {
        let n_removed = {
            let mut all = self.rules();
            let n_before = all.len();
            all.retain(|it| id.is_some_and(|id| it.id != id));
            n_before - all.len()
        };
        self.changed.send_modify(|n| *n += 1);
        n_removed
    }

    pub(super) fn show(&self) -> Vec<FaultState> {
        let state = |it: &Rule| FaultState {
            rule: FaultRule { id: Some(it.id.clone()), ..it.rule.clone() },
            matched: it.matched,
            applied: it.applied,
        };
        self.rules().iter().map(state).collect()
    }

    pub(super) fn plan(&self, access_key: &str, operation: &str, key: &str, now: Instant) -> Plan {
        let mut plan = Plan::default();
        for rule in self.rules().iter_mut() {
            if rule.matches(access_key, operation, key) {
                rule.apply(&mut plan, operation, now);
            }
        }
        plan
    }

    /// Returns when the rule is gone.
    pub(super) async fn gone(&self, id: &str) {
        let mut changed = self.changed.subscribe();
        while self.rules().iter().any(|it| it.id == id) {
            if changed.changed().await.is_err() {
                return;
            }
        }
    }

    fn rules(&self) -> MutexGuard<'_, Vec<Rule>> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rule {
    fn matches(&self, access_key: &str, operation: &str, key: &str) -> bool {
        let rule = &self.rule;
        [(&rule.access_key, access_key), (&rule.operation, operation), (&rule.key, key)]
            .into_iter()
            .all(|(pattern, text)| pattern.as_ref().is_none_or(|pattern| glob(pattern, text)))
    }

    fn apply(&mut self, plan: &mut Plan, operation: &str, now: Instant) {
        self.matched += 1;
        let spent = self.rule.times.is_some_and(|times| times <= self.applied);
        if self.matched <= self.rule.after || spent {
            return;
        }
        self.due += self.rule.share.unwrap_or(1.0);
        if self.due < 1.0 {
            return;
        }
        self.due -= 1.0;
        let throttled = self.throttle(now);
        let rule = &self.rule;
        let instead = match rule {
            rule if rule.black_hole => Some(Instead::BlackHole(self.id.clone())),
            rule if rule.drop_before_apply => Some(Instead::Drop),
            rule => rule.status.or(throttled).map(|status| Instead::Fail {
                status,
                code: rule.code.clone().unwrap_or_else(|| code_for(status).to_owned()),
            }),
        };
        let stale = self.stale.as_ref().filter(|_| operation.starts_with("ListObjects"));
        let takes_effect = instead.is_some()
            || 0 < rule.latency_ms
            || rule.drop_after_apply
            || rule.ignore_conditions
            || stale.is_some();
        if !takes_effect {
            return;
        }
        self.applied += 1;
        plan.n_rules += 1;
        plan.latency += Duration::from_millis(rule.latency_ms);
        plan.drop_after |= rule.drop_after_apply;
        plan.ignore_conditions |= rule.ignore_conditions;
        plan.stale = plan.stale.take().or(stale.cloned());
        plan.instead = plan.instead.take().or(instead);
    }

    /// Takes a token, or says the status for want of one.
    fn throttle(&mut self, now: Instant) -> Option<u16> {
        let throttle = self.rule.throttle.as_ref()?;
        let burst = throttle.burst.unwrap_or_else(|| throttle.per_second.max(1.0));
        let bucket = self.bucket.get_or_insert(Bucket { tokens: burst, filled_at: now });
        let filled = now.saturating_duration_since(bucket.filled_at).as_secs_f64() * throttle.per_second;
        bucket.tokens = (bucket.tokens + filled).min(burst);
        bucket.filled_at = now;
        if 1.0 <= bucket.tokens {
            bucket.tokens -= 1.0;
            return None;
        }
        Some(throttle.status)
    }
}

fn code_for(status: u16) -> &'static str {
    match status {
        400 => "InvalidRequest",
        401 | 403 => "AccessDenied",
        404 => "NoSuchKey",
        408 => "RequestTimeout",
        409 => "ConditionalRequestConflict",
        412 => "PreconditionFailed",
        429 => "TooManyRequests",
        503 => "SlowDown",
        _ => "InternalError",
    }
}

/// `*` stands for any run of characters, `?` for one.
fn glob(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) = (pattern.chars().collect(), text.chars().collect());
    let (mut p, mut t) = (0, 0);
    let mut star = None; // where the last star stood, and how far its run reaches
    while t < text.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(c) if *c == '?' || *c == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match star {
                Some((at, reach)) => {
                    star = Some((at, reach + 1));
                    p = at + 1;
                    t = reach + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_as_people_expect() {
        for (pattern, text, expected) in [
            ("*", "", true),
            ("shard/*/leader.json", "shard/dev-1/leader.json", true),
            ("shard/*/leader.json", "shard/dev-1/leader.json.bak", false),
            ("*.json", "a/b/c.json", true),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*a*b", "xaxbxb", true),
            ("List*", "ListObjectsV2", true),
            ("", "x", false),
        ] {
            assert_eq!(glob(pattern, text), expected, "{pattern:?} on {text:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn throttling_refills_with_time() {
        let faults = Faults::new();
        let throttle = Throttle { per_second: 2.0, burst: None, status: 429 };
        faults.add(vec![FaultRule { throttle: Some(throttle), ..FaultRule::default() }], None);
        let refused = || faults.plan("", "PutObject", "k", Instant::now()).instead.is_some();
        assert_eq!([refused(), refused(), refused()], [false, false, true]);
        tokio::time::advance(Duration::from_millis(500)).await;
        assert_eq!([refused(), refused()], [false, true]);
    }

    #[test]
    fn after_and_times_choose_the_requests() {
        let faults = Faults::new();
        let rule = FaultRule { after: 1, times: Some(2), status: Some(500), ..FaultRule::default() };
        faults.add(vec![rule], None);
        let now = Instant::now();
        let hit: Vec<bool> = (0..5).map(|_| faults.plan("", "GetObject", "k", now).instead.is_some()).collect();
        assert_eq!(hit, [false, true, true, false, false]);
        assert_eq!((faults.show()[0].matched, faults.show()[0].applied), (5, 2));
    }

    #[test]
    fn a_share_is_spread_evenly() {
        let faults = Faults::new();
        faults.add(vec![FaultRule { share: Some(0.25), status: Some(500), ..FaultRule::default() }], None);
        let now = Instant::now();
        let hit: Vec<bool> = (0..8).map(|_| faults.plan("", "GetObject", "k", now).instead.is_some()).collect();
        assert_eq!(hit, [false, false, false, true, false, false, false, true]);
    }

    #[test]
    fn a_rule_of_the_same_name_replaces_the_other() {
        let faults = Faults::new();
        let rule = |latency_ms| FaultRule { id: Some("x".into()), latency_ms, ..FaultRule::default() };
        faults.add(vec![rule(1), FaultRule::default(), rule(2)], None);
        assert_eq!(faults.show().len(), 2);
        assert_eq!(faults.remove(Some("x")), 1);
        assert_eq!(faults.remove(None), 1);
    }
}
