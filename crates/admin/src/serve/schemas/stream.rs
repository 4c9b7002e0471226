//! The messages of the stream of changes.

use serde_json::{Value, json};

use super::{
    super::schema::{boolean, list, named, object, or_null, text, text_or_null, time_or_null},
    as_of, config_status, with,
};

fn kind(word: &str) -> Value {
    json!({"type": "string", "enum": [word]})
}

fn list_or_null(name: &str) -> Value {
    json!({"type": ["array", "null"], "items": named(name)})
}

/// A change of a shard.
fn change<const N: usize>(word: &str, own: [(&str, Value); N]) -> Value {
    let common = object([("type", kind(word)), ("id", text()), ("shard", text()), ("as_of", time_or_null())]);
    with(common, own)
}

fn snapshot() -> Value {
    object([
        ("type", kind("snapshot")),
        ("shard", text()),
        ("as_of", time_or_null()),
        ("reachable", boolean()),
        ("problem", text_or_null()),
        ("status", or_null("ShardStatus")),
        ("groups", list_or_null("Group")),
        ("instances", list_or_null("Instance")),
        ("events", list(named("Event"))),
    ])
}

pub(super) fn messages() -> [(&'static str, Value); 2] {
    [
        ("ShardStatus", config_status()),
        (
            "StreamMessage",
            json!({
                "description": "Begins with begin, a snapshot of each shard and ready. A snapshot replaces all that was \
                                told of its shard; groups and instances are null if it was never reached. A lost shard \
                                keeps what was known of it, as of as_of. After begin with resumed, what was told \
                                before still holds.",
                "anyOf": [
                    object([
                        ("type", kind("begin")),
                        ("resumed", boolean()),
                        ("shards", list(text())),
                        ("as_of", as_of()),
                    ]),
                    snapshot(),
                    with(snapshot(), [("id", text())]),
                    object([("type", kind("ready")), ("id", text())]),
                    change("status", [("status", named("ShardStatus"))]),
                    change("group", [("group", named("Group"))]),
                    change("group_gone", [("group", text())]),
                    change("instance", [("instance", named("Instance"))]),
                    change("event", [("event", named("Event"))]),
                    change("lost", [("code", text()), ("problem", text())]),
                    object([("type", kind("pulse")), ("as_of", as_of())]),
                    object([("type", kind("cut")), ("problem", text())]),
                ],
            }),
        ),
    ]
}
