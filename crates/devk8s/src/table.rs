//! The tables that kubectl prints.

mod jsonpath;
mod kinds;

use nstance_core::time::Timestamp;
use serde_json::{Value, json};

use crate::{
    object::{name, text},
    resources::{Column, Served},
};

/// The columns after the name.
enum Columns<'a> {
    Paths(&'a [Column]),
    /// Those of nodes, pods and events are computed.
    Computed(&'static kinds::Kind),
}

fn columns_of(served: &Served) -> Columns<'_> {
    match (kinds::kind(&served.resource.id), served.columns()) {
        (Some(kind), _) => Columns::Computed(kind),
        (None, Some(columns)) => Columns::Paths(columns),
        (None, None) => Columns::Computed(&kinds::AGE),
    }
}

/// The column definitions of a table.
pub(crate) fn columns(served: &Served) -> Vec<Value> {
    let column = |name: &str, kind: &str, format: &str, description: &str, priority: i64| {
        json!({
            "name": name, "type": kind, "format": format, "description": description, "priority": priority,
        })
    };
    let mut all = Vec::new();
    match columns_of(served) {
        Columns::Computed(kind) => {
            if !kind.begins_with_own {
                all.push(column("Name", "string", "name", "Name must be unique within a namespace.", 0));
            }
            all.extend(kind.columns.iter().map(|(name, kind, priority)| column(name, kind, "", "", *priority)));
        }
        Columns::Paths(columns) => {
            all.push(column("Name", "string", "name", "Name must be unique within a namespace.", 0));
            all.extend(columns.iter().map(|it| column(&it.name, &it.kind, "", &it.description, it.priority)));
        }
    }
    all
}

/// The cells of one object, in the order of the columns.
pub(crate) fn cells(object: &Value, served: &Served, now: Timestamp) -> Vec<Value> {
    match columns_of(served) {
        Columns::Computed(kind) => {
            let cells = (kind.cells)(object, now);
            if kind.begins_with_own {
                return cells;
            }
            std::iter::once(json!(name(object))).chain(cells).collect()
        }
        Columns::Paths(columns) => {
            let cells = columns.iter().map(|column| cell(object, column, now));
            std::iter::once(json!(name(object))).chain(cells).collect()
        }
    }
}

fn cell(object: &Value, column: &Column, now: Timestamp) -> Value {
    let Some(value) = jsonpath::first(object, &column.path).filter(|it| !it.is_null()) else {
        return Value::Null;
    };
    match (column.kind.as_str(), value) {
        ("date", Value::String(at)) => json!(age_of(at, now)),
        ("string", Value::String(_)) | ("integer" | "number", Value::Number(_)) | ("boolean", Value::Bool(_)) => {
            value.clone()
        }
        ("string", Value::Array(items)) if items.iter().all(Value::is_string) => json!(value.to_string()),
        ("string", other) => json!(other.to_string()),
        // A value that is not of its column's type is left out, as a real API server does.
        _ => Value::Null,
    }
}

/// Time since then, as kubectl writes ages.
fn age_of(then: &str, now: Timestamp) -> String {
    match then.parse::<Timestamp>() {
        Ok(then) => duration(now.since(then).as_secs()),
        Err(_) => "<unknown>".to_owned(),
    }
}

pub(super) fn age(object: &Value, now: Timestamp) -> Value {
    json!(age_of(text(object, "/metadata/creationTimestamp"), now))
}

/// Two units at most: `45s`, `3m20s`, `12m`, `5h10m`, `20h`, `3d4h`, `40d`, `2y100d`, `9y`.
fn duration(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let two = |n: u64, unit: &str, rest: u64, small: &str| {
        if rest == 0 { format!("{n}{unit}") } else { format!("{n}{unit}{rest}{small}") }
    };
    match seconds {
        0..120 => format!("{seconds}s"),
        120..600 => two(minutes, "m", seconds % 60, "s"),
        600..10_800 => format!("{minutes}m"),
        10_800..28_800 => two(hours, "h", minutes % 60, "m"),
        28_800..172_800 => format!("{hours}h"),
        172_800..691_200 => two(days, "d", hours % 24, "h"),
        _ if days < 365 * 2 => format!("{days}d"),
        _ if days < 365 * 8 => two(days / 365, "y", days % 365, "d"),
        _ => format!("{}y", days / 365),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_read_as_kubectl_writes_them() {
        for (seconds, text) in [
            (0, "0s"),
            (119, "119s"),
            (200, "3m20s"),
            (240, "4m"),
            (725, "12m"),
            (18_600, "5h10m"),
            (72_000, "20h"),
            (273_600, "3d4h"),
            (3_456_000, "40d"),
            (71_712_000, "2y100d"),
        ] {
            assert_eq!(duration(seconds), text);
        }
    }
}
