//! The forms of what is answered, as `view` makes them, and of what is asked. Every key is always there.

mod stream;

use serde_json::{Map, Value, json};

use super::schema::{
    VAR, boolean, closed, count, identifier, instance_id, integer, integer_in, list, named, object, one_of, or_null,
    text, text_of, text_or_null, text_up_to, texts, time, time_or_null,
};

/// Largest size of a group, as in the config.
pub(super) const MAX_SIZE: i64 = 10_000;

const STATES: &[&str] = &["pending", "failed", "provisioning", "running", "draining", "deleting", "deleted"];

pub(super) fn state() -> Value {
    one_of(STATES)
}

pub(super) fn severity() -> Value {
    one_of(&["debug", "info", "warning", "error"])
}

/// What a request may give to templates.
fn vars() -> Value {
    json!({
        "type": "object",
        "maxProperties": 256,
        "propertyNames": text_of(VAR, 128),
        "additionalProperties": {"type": "string", "maxLength": 4096},
    })
}

/// Adds keys to an object's schema.
fn with<const N: usize>(mut schema: Value, fields: [(&str, Value); N]) -> Value {
    for (name, field) in fields {
        schema["properties"][name] = field;
        if let Some(required) = schema["required"].as_array_mut() {
            required.push(name.into());
        }
    }
    schema
}

/// The answer of a route: a list under its name, and what went wrong at which shard.
pub(super) fn wrapped(name: &'static str, of: Value) -> Value {
    object([(name, list(of)), ("errors", list(named("ShardError")))])
}

/// The same with how old it is.
pub(super) fn dated(name: &'static str, of: Value) -> Value {
    with(wrapped(name, of), [("as_of", as_of())])
}

/// An entry of one shard.
fn entry(schema: Value) -> Value {
    with(schema, [("code", integer_in(200, 299))])
}

pub(super) fn all() -> Map<String, Value> {
    let groups = [
        ("Group", group()),
        ("GroupDone", entry(group())),
        (
            "GroupRehearsed",
            entry(object([("shard", text()), ("group", text()), ("exists", boolean()), ("plan", or_null("Plan"))])),
        ),
        (
            "GroupDeleted",
            entry(object([
                ("shard", text()),
                ("group", text()),
                ("is_static", boolean()),
                ("effect", text()),
                ("actual_size", count()),
            ])),
        ),
        ("Scaled", entry(object([("shard", text()), ("group", text()), ("size", count())]))),
        (
            "Rollout",
            object([
                ("target_hash", text_or_null()),
                ("updated", count()),
                ("total", count()),
                ("paused", boolean()),
                ("failures", count()),
                ("reason", text_or_null()),
            ]),
        ),
        (
            "GroupConfig",
            closed(
                &[],
                [
                    ("template", text_up_to(128)),
                    ("size", integer_in(0, MAX_SIZE)),
                    ("instance_type", text_up_to(128)),
                    ("subnet_pool", identifier()),
                    ("vars", vars()),
                    ("drain_timeout_seconds", integer_in(0, 7 * 86_400)),
                    ("load_balancers", json!({"type": "array", "items": identifier(), "maxItems": 32})),
                    ("rollout_paused", boolean()),
                ],
            ),
        ),
        (
            "Scale",
            closed(
                &["group", "size"],
                [
                    ("group", identifier()),
                    ("size", integer_in(0, MAX_SIZE)),
                    ("victims", json!({"type": "array", "items": instance_id(), "maxItems": 1000})),
                    ("total", boolean()),
                ],
            ),
        ),
    ];
    let plans = [
        ("Plan", plan()),
        ("PlanDone", entry(plan())),
        (
            "Hold",
            object([
                ("kind", text()),
                ("group", text_or_null()),
                ("instance_id", text_or_null()),
                ("message", text()),
                ("since", time_or_null()),
                ("until", time_or_null()),
            ]),
        ),
        (
            "Action",
            object([
                ("kind", text()),
                ("group", text_or_null()),
                ("instance_id", text_or_null()),
                ("reason", text()),
                ("priority", integer()),
                ("detail", texts()),
            ]),
        ),
        (
            "PlanAsked",
            closed(
                &[],
                [
                    ("group", identifier()),
                    (
                        "sizes",
                        json!({
                            "type": "object",
                            "propertyNames": identifier(),
                            "additionalProperties": integer_in(0, MAX_SIZE),
                        }),
                    ),
                    ("config", text()),
                ],
            ),
        ),
        ("Explanation", explanation()),
        ("Why", with(explanation(), [("instance", named("Instance"))])),
        ("Fact", object([("name", text()), ("value", text()), ("source", text()), ("at", time_or_null())])),
        ("Event", event()),
    ];
    let groups_and_plans = groups.into_iter().chain(plans);
    let all = groups_and_plans.chain(instances()).chain(shards()).chain(stream::messages());
    all.map(|(name, schema)| (name.to_owned(), schema)).collect()
}

fn shards() -> [(&'static str, Value); 6] {
    [
        ("ConfigStatus", entry(config_status())),
        (
            "Refreshed",
            with(
                entry(object([
                    ("shard", text()),
                    ("updated", boolean()),
                    ("prev_etag", text_or_null()),
                    ("etag", text()),
                    ("changed_groups", list(text())),
                    ("removed_groups", list(text())),
                    ("restarted", list(text())),
                    ("warnings", list(text())),
                ])),
                [("code", json!({"type": "integer", "enum": [200, 304]}))],
            ),
        ),
        (
            "Shard",
            json!({"anyOf": [
                with(config_status(), [
                    ("reachable", json!({"type": "boolean", "enum": [true]})),
                    ("groups", count()),
                    ("instances", count()),
                    ("latency_ms", json!({"type": "number", "minimum": 0})),
                ]),
                object([
                    ("shard", text()),
                    ("reachable", json!({"type": "boolean", "enum": [false]})),
                    ("problem", text()),
                ]),
            ]}),
        ),
        (
            "ShardError",
            object([
                ("shard", text()),
                ("code", text()),
                ("message", text()),
                ("problems", list(named("Problem"))),
                ("status", integer_in(400, 599)),
            ]),
        ),
        (
            "Problem",
            object([
                ("severity", text()),
                ("code", text()),
                ("path", text()),
                ("line", count()),
                ("column", count()),
                ("message", text()),
                ("suggestion", text_or_null()),
            ]),
        ),
        (
            "Error",
            object([
                ("error", text()),
                ("code", text()),
                ("problems", list(named("Problem"))),
                ("shards", list(named("ShardError"))),
                ("hint", text_or_null()),
                ("request_id", text()),
            ]),
        ),
    ]
}

fn instances() -> [(&'static str, Value); 13] {
    [
        ("Instance", instance()),
        ("InstanceShown", with(instance(), [("timeline", list(named("Event")))])),
        ("InstanceCreated", object([("instance", named("Instance")), ("request_id", text())])),
        (
            "InstanceDeleted",
            object([
                ("instance_id", instance_id()),
                ("shard", text()),
                ("group", text()),
                ("status", text()),
                ("effect", text()),
                ("dry_run", boolean()),
            ]),
        ),
        (
            "InstanceReplaced",
            object([
                ("instance_id", instance_id()),
                ("shard", text()),
                ("status", one_of(&["requested", "replacing", "draining"])),
                ("replacement_id", text_or_null()),
            ]),
        ),
        (
            "InstanceAcknowledged",
            object([("instance_id", instance_id()), ("shard", text()), ("acknowledged", boolean())]),
        ),
        (
            "InstanceConfig",
            closed(
                &["group"],
                [
                    ("group", identifier()),
                    ("template", text_up_to(128)),
                    ("instance_type", text_up_to(128)),
                    ("subnet_pool", identifier()),
                    ("vars", vars()),
                    ("request_id", text_of(super::schema::PRINTABLE, 64)),
                ],
            ),
        ),
        ("Drain", drain()),
        (
            "DrainShown",
            with(
                drain(),
                [
                    ("instance_id", instance_id()),
                    ("shard", text()),
                    ("group", text()),
                    ("status", text()),
                    ("blocked_by", list(named("Blocker"))),
                ],
            ),
        ),
        ("Blocker", blocker()),
        ("Notice", object([("action", text()), ("deadline", time_or_null()), ("detected_at", time_or_null())])),
        (
            "Machine",
            object([
                ("cpu_count", count()),
                ("memory_bytes", count()),
                ("disk_bytes", count()),
                ("arch", text_or_null()),
                ("os", text_or_null()),
                ("kernel", text_or_null()),
            ]),
        ),
        (
            "Boot",
            object([
                ("failed", boolean()),
                ("reason", text_or_null()),
                (
                    "stages",
                    list(object([
                        ("name", text()),
                        ("state", text()),
                        ("started", time_or_null()),
                        ("ended", time_or_null()),
                        ("detail", text_or_null()),
                    ])),
                ),
                ("logs", list(object([("name", text()), ("text", text())]))),
            ]),
        ),
    ]
}

fn config_status() -> Value {
    object([
        ("shard", text()),
        ("etag", text()),
        ("last_modified", time_or_null()),
        ("size", count()),
        ("loaded_at", time_or_null()),
        ("groups_etag", text_or_null()),
        ("cluster_id", text()),
        ("leader", text()),
        ("epoch", count()),
        ("provider", text()),
        ("region", text_or_null()),
        ("zone", text_or_null()),
        ("server_version", text()),
        ("stale", boolean()),
        ("pending_etag", text_or_null()),
        ("apply_errors", list(text())),
    ])
}

fn group() -> Value {
    object([
        ("group", text()),
        ("shard", text()),
        ("tenant", text()),
        ("template", text()),
        ("size", count()),
        ("actual_size", count()),
        ("ready_size", count()),
        ("pending_size", count()),
        ("registered_size", count()),
        ("draining_size", count()),
        ("unhealthy_size", count()),
        ("updated_size", count()),
        ("instance_type", text_or_null()),
        ("subnet_pool", text_or_null()),
        ("kind", text_or_null()),
        ("arch", text_or_null()),
        ("vars", texts()),
        ("capacity", texts()),
        ("load_balancers", list(text())),
        ("drain_timeout_seconds", json!({"type": ["integer", "null"]})),
        ("is_static", boolean()),
        ("deleting", boolean()),
        ("etag", text()),
        ("runtime_hash", text_or_null()),
        ("infra_hash", text_or_null()),
        ("rollout", or_null("Rollout")),
        ("holds", list(named("Hold"))),
        ("provider_ids", list(text())),
    ])
}

fn plan() -> Value {
    object([
        ("shard", text()),
        ("actions", list(named("Action"))),
        ("holds", list(named("Hold"))),
        ("snapshot_at", time_or_null()),
        ("complete", boolean()),
        ("epoch", count()),
        ("wake_at", time_or_null()),
    ])
}

fn explanation() -> Value {
    object([
        ("shard", text()),
        ("summary", text()),
        ("facts", list(named("Fact"))),
        ("actions", list(named("Action"))),
        ("holds", list(named("Hold"))),
        ("history", list(named("Event"))),
    ])
}

fn event() -> Value {
    object([
        ("at", time_or_null()),
        ("shard", text()),
        ("reason", text()),
        ("severity", severity()),
        ("group", text_or_null()),
        ("instance_id", text_or_null()),
        ("message", text()),
        ("detail", texts()),
        ("epoch", count()),
        ("actor", text_or_null()),
        ("dropped", count()),
        ("resume_token", text()),
    ])
}

fn drain() -> Value {
    object([
        ("drain_id", text()),
        ("reason", text()),
        ("started_at", time_or_null()),
        ("delete_at", time_or_null()),
        ("acked_at", time_or_null()),
    ])
}

fn blocker() -> Value {
    let mut schema = object([("kind", text()), ("message", text())]);
    schema["description"] =
        "What a drain waits for. The kind is acknowledgement, deletion (of its VM), delete-failing, or \
                             that of a hold, as in Plan; there may be more one day."
            .into();
    schema
}

fn instance() -> Value {
    object([
        ("instance_id", instance_id()),
        ("shard", text()),
        ("tenant", text()),
        ("group", text()),
        ("status", state()),
        ("health", text()),
        ("instance_type", text_or_null()),
        ("subnet", text_or_null()),
        ("spot", boolean()),
        ("on_demand", boolean()),
        ("provider_instance_id", text_or_null()),
        ("provider_state", text_or_null()),
        ("provider_state_at", time_or_null()),
        ("created_at", time_or_null()),
        ("registered_at", time_or_null()),
        ("last_seen", time_or_null()),
        ("deleted_at", time_or_null()),
        ("private_ipv4", text_or_null()),
        ("private_ipv6", text_or_null()),
        ("hostname", text_or_null()),
        ("k8s_provider_id", text_or_null()),
        ("infra_hash", text_or_null()),
        ("runtime_hash", text_or_null()),
        ("replaces", text_or_null()),
        ("replaced_by", text_or_null()),
        ("failure_reason", text_or_null()),
        ("failure_message", text_or_null()),
        ("drain", or_null("Drain")),
        ("notice", or_null("Notice")),
        ("machine", or_null("Machine")),
        ("boot", or_null("Boot")),
    ])
}

/// The times of an answer that may come from memory.
pub(super) fn as_of() -> Value {
    json!({
        "type": "object",
        "description": "By shard: all that it told until then is in the answer. What was asked for is of the moment of \
                        the question. What was known already is of the moment when the shard was last heard of, 10 s \
                        ago at most; it tells changes of groups a quarter of a second after they were planned. ETag \
                        does not cover it.",
        "additionalProperties": time(),
    })
}
