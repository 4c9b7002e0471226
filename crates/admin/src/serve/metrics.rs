//! What Prometheus reads. Labels are routes, methods, codes and shards: all closed sets.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{Mutex, PoisonError},
};

use http::{Method, StatusCode};

#[derive(Default)]
pub(super) struct Metrics {
    requests: Mutex<BTreeMap<(&'static str, String, u16), u64>>,
}

impl Metrics {
    /// `route` is the path of the table, empty for what is none of ours.
    pub(super) fn count(&self, method: &Method, route: &'static str, status: StatusCode) {
        // Methods that nobody knows would make a series each.
        let method = if route.is_empty() { String::new() } else { method.to_string() };
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        *requests.entry((route, method, status.as_u16())).or_default() += 1;
    }

    /// `shards`: whether each is in touch with us.
    pub(super) fn text(&self, shards: &[(String, bool)]) -> String {
        let mut text = String::from(
            "# HELP nstance_admin_requests_total Requests answered, by route and code.\n\
             # TYPE nstance_admin_requests_total counter\n",
        );
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        for ((route, method, code), n) in requests.iter() {
            let _ = writeln!(
                text,
                "nstance_admin_requests_total{{route=\"{route}\",method=\"{method}\",code=\"{code}\"}} {n}"
            );
        }
        text.push_str(
            "# HELP nstance_admin_shard_up Whether the shard's leader is in touch with us.\n\
             # TYPE nstance_admin_shard_up gauge\n",
        );
        for (shard, up) in shards {
            let _ = writeln!(text, "nstance_admin_shard_up{{shard=\"{shard}\"}} {}", u8::from(*up));
        }
        text
    }
}
