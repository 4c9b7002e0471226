//! The table of routes.

use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::{
    handle::{config, events, groups, instances, plans, stream, this},
    route::{Access, Answer, Handler, Param, Place, Route},
    schema::{
        CURSOR, SPAN, boolean, closed, identifier, instance_id, integer_in, list, named, object, text_of, text_up_to,
    },
    schemas::{self, dated, severity, state, wrapped},
};

macro_rules! handler {
    ($handler:path) => {
        |app, call| Box::pin($handler(app, call))
    };
}

/// `shards`: the names that are configured, which are the only ones that may be asked for.
pub(super) fn all(shards: &[String]) -> Vec<Route> {
    let table = Table { shards };
    let mut routes =
        vec![
            route(Method::GET, "/health", "health", "Whether this process lives", handler!(this::health))
                .open()
                .answer(200, "It does", "text/plain", json!({"type": "string"})),
            route(Method::GET, "/openapi.json", "openapi", "This document", handler!(this::openapi))
                .json(200, "OpenAPI 3.1", json!({"type": "object"}))
                .unchanged()
                .checked(),
            route(Method::GET, "/metrics", "metrics", "Figures for Prometheus", handler!(this::metrics))
                .answer(200, "Text format 0.0.4", "text/plain", json!({"type": "string"}))
                .checked(),
        ];
    routes.extend(table.configs());
    routes.extend(table.groups());
    routes.extend(table.instances());
    routes.extend(table.others());
    routes.into_iter().map(|it| it.0).collect()
}

struct Table<'a> {
    shards: &'a [String],
}

/// A route in the making.
struct Made(Route);

/// Server-sent events. No type: of the text as a whole it would be a string, and some readers of the document take it
/// for that of one event.
fn sse() -> Value {
    json!({"description": "Events with `event` and `data`, which is JSON, and `id` where one can go on after it"})
}

fn route(method: Method, path: &'static str, id: &'static str, summary: &'static str, handler: Handler) -> Made {
    let access = Access::Read;
    Made(Route { method, path, id, summary, access, params: Vec::new(), body: None, answers: Vec::new(), handler })
}

impl Made {
    fn open(mut self) -> Self {
        self.0.access = Access::Open;
        // Only its host can be wrong, and its parameters.
        self.error(400).error(403)
    }

    fn param(mut self, place: Place, name: &'static str, schema: Value, summary: &'static str) -> Self {
        self.0.params.push(Param { name, place, schema, summary });
        self
    }

    fn path(self, name: &'static str, schema: Value, summary: &'static str) -> Self {
        self.param(Place::Path, name, schema, summary)
    }

    fn query(self, name: &'static str, schema: Value, summary: &'static str) -> Self {
        self.param(Place::Query, name, schema, summary)
    }

    fn answer(mut self, status: u16, summary: &'static str, kind: &'static str, schema: Value) -> Self {
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::OK);
        match self.0.answers.iter_mut().find(|it| it.status == status) {
            Some(answer) => answer.content.push((kind, schema)),
            None => self.0.answers.push(Answer { status, summary, content: vec![(kind, schema)] }),
        }
        self
    }

    fn json(self, status: u16, summary: &'static str, schema: Value) -> Self {
        self.answer(status, summary, "application/json", schema)
    }

    /// Without a body.
    fn unchanged(mut self) -> Self {
        let summary = "Unchanged; ETag says what";
        self.0.answers.push(Answer { status: StatusCode::NOT_MODIFIED, summary, content: Vec::new() });
        self
    }

    fn error(self, status: u16) -> Self {
        let summary = match status {
            400 => "Invalid input; all problems are listed",
            401 => "No credentials, or wrong ones",
            403 => "Not allowed: a viewer, a read-only server, a foreign host or origin",
            404 => "There is no such object at any shard that was asked",
            408 => "The body did not come in time",
            409 => "The state forbids it now",
            412 => "The etag differs",
            413 => "The body is too large",
            415 => "The body is not said to be JSON",
            429 => "Too often",
            500 => "The object storage failed, or we did",
            502 => "A shard answered what we do not understand, or refused us",
            503 => "A shard is not reached, or has no leader",
            _ => "A shard took too long",
        };
        self.json(status, summary, named("Error"))
    }

    /// What every route but the open ones may refuse with.
    fn checked(self) -> Self {
        [400, 401, 403, 429].into_iter().fold(self, Self::error)
    }

    /// It asks shards.
    fn asking(self) -> Self {
        [500, 502, 503, 504].into_iter().fold(self.checked(), Self::error)
    }

    fn body(mut self, schema: Value) -> Self {
        self.0.body = Some(schema);
        [408, 413, 415].into_iter().fold(self, Self::error)
    }

    fn change(mut self) -> Self {
        self.0.access = Access::Change;
        [404, 409].into_iter().fold(self, Self::error)
    }

    fn if_match(self) -> Self {
        let summary = "Only if the group's etag is still this one";
        self.param(Place::Header, "If-Match", text_of(super::schema::PRINTABLE, 256), summary).error(412)
    }
}

impl Table<'_> {
    fn shard(&self) -> Value {
        let mut names = list(json!({"type": "string", "enum": self.shards}));
        names["maxItems"] = 64.into();
        names
    }

    /// A route that asks the shards that are named, or all.
    fn on_shards(&self, route: Made) -> Made {
        route.query("shard", self.shard(), "Only this shard; repeatable").asking()
    }

    /// A route that changes several shards: which ones must be said, unless there is but one.
    fn on_chosen(&self, route: Made) -> Made {
        self.on_shards(route).query("all_shards", boolean(), "All shards; not together with shard").change()
    }

    fn configs(&self) -> [Made; 2] {
        let status = "Which config is in force at each shard";
        let refresh = "Have each shard read its config again";
        let asked = closed(&[], [("confirm_removals", boolean()), ("dry_run", boolean())]);
        [
            self.on_shards(route(Method::GET, "/config/status", "config_status", status, handler!(config::status)))
                .query("all_shards", boolean(), "All shards; the same as no shard")
                .json(200, "Of all shards", wrapped("shards", named("ConfigStatus")))
                .json(207, "Of some shards", wrapped("shards", named("ConfigStatus")))
                .unchanged(),
            self.on_chosen(route(
                Method::POST,
                "/config/refresh",
                "config_refresh",
                refresh,
                handler!(config::refresh),
            ))
            .body(asked)
            .json(200, "In force", wrapped("shards", named("Refreshed")))
            .json(207, "At some shards", wrapped("shards", named("Refreshed")))
            .unchanged(),
        ]
    }

    fn groups(&self) -> [Made; 6] {
        let key = |route: Made| route.path("group", identifier(), "The group");
        let groups = || dated("groups", named("Group"));
        let dry_run = "Say what would happen, and do nothing";
        let one_of = |names: [&str; 2]| json!({"anyOf": names.map(named)});
        [
            self.on_chosen(route(
                Method::POST,
                "/group/scale",
                "group_scale",
                "Change a group's size",
                handler!(groups::scale),
            ))
            .body(named("Scale"))
            .json(200, "All shards have the new size", wrapped("results", named("Scaled")))
            .json(207, "Some shards have", wrapped("results", named("Scaled"))),
            self.on_shards(route(Method::GET, "/api/v1/groups", "groups", "All groups", handler!(groups::list)))
                .json(200, "Of all shards", groups())
                .json(207, "Of some shards", groups())
                .unchanged(),
            self.on_shards(key(route(
                Method::GET,
                "/api/v1/groups/{group}",
                "group",
                "One group, at each shard that has it",
                handler!(groups::show),
            )))
            .json(200, "Of all shards", groups())
            .json(207, "Of some shards", groups())
            .unchanged()
            .error(404),
            self.on_chosen(key(route(
                Method::PUT,
                "/api/v1/groups/{group}",
                "group_put",
                "Make or change a group; what is not said stays",
                handler!(groups::put),
            )))
            .query("dry_run", boolean(), dry_run)
            .if_match()
            .body(named("GroupConfig"))
            .json(200, "Changed, or what would happen", wrapped("groups", one_of(["GroupDone", "GroupRehearsed"])))
            .json(201, "Made at all shards", wrapped("groups", named("GroupDone")))
            .json(207, "At some shards", wrapped("groups", one_of(["GroupDone", "GroupRehearsed"]))),
            self.on_chosen(key(route(
                Method::DELETE,
                "/api/v1/groups/{group}",
                "group_delete",
                "Drain and forget a group, or what overrides a static one",
                handler!(groups::delete),
            )))
            .query("dry_run", boolean(), dry_run)
            .if_match()
            .json(200, "What would happen", wrapped("groups", named("GroupDeleted")))
            .json(202, "It begins", wrapped("groups", named("GroupDeleted")))
            .json(207, "At some shards", wrapped("groups", named("GroupDeleted"))),
            self.on_shards(key(route(
                Method::GET,
                "/api/v1/explain/group/{group}",
                "group_explain",
                "Why a group is as it is",
                handler!(groups::explain),
            )))
            .json(200, "Of all shards", dated("explanations", named("Explanation")))
            .json(207, "Of some shards", dated("explanations", named("Explanation")))
            .unchanged()
            .error(404),
        ]
    }

    fn instances(&self) -> [Made; 7] {
        let id = |route: Made| route.path("id", instance_id(), "The instance");
        let page = || {
            object([
                ("instances", list(named("Instance"))),
                ("errors", list(named("ShardError"))),
                ("as_of", schemas::as_of()),
                ("next_cursor", json!({"type": ["string", "null"]})),
            ])
        };
        [
            self.on_shards(route(
                Method::GET,
                "/api/v1/instances",
                "instances",
                "Instances, page by page",
                handler!(instances::list),
            ))
            .query("group", identifier(), "Only of this group")
            .query("state", state(), "Only in this state")
            .query("on_demand", boolean(), "Only such, or only others")
            .query("limit", integer_in(1, 500), "How many at most; 200 if not said")
            .query("cursor", text_of(CURSOR, 62), "next_cursor of the page before")
            .json(200, "Of all shards", page())
            .json(207, "Of some shards", page())
            .unchanged(),
            self.on_shards(route(
                Method::POST,
                "/api/v1/instances",
                "instance_create",
                "Make an instance on demand, at one shard",
                handler!(instances::create),
            ))
            .body(named("InstanceConfig"))
            .change()
            .json(202, "It is being made", named("InstanceCreated")),
            self.on_shards(id(route(
                Method::GET,
                "/api/v1/instances/{id}",
                "instance",
                "One instance, with its timeline",
                handler!(instances::show),
            )))
            .json(200, "The instance", named("InstanceShown"))
            .unchanged()
            .error(404),
            self.on_shards(id(route(
                Method::DELETE,
                "/api/v1/instances/{id}",
                "instance_delete",
                "Drain and delete an instance",
                handler!(instances::delete),
            )))
            .query("shrink", boolean(), "Its group becomes smaller by one, too")
            .query("now", boolean(), "Without a drain")
            .query("dry_run", boolean(), "Say what would happen, and do nothing")
            .change()
            .json(200, "What would happen", named("InstanceDeleted"))
            .json(202, "It begins", named("InstanceDeleted")),
            self.on_shards(id(route(
                Method::POST,
                "/api/v1/instances/{id}/replace",
                "instance_replace",
                "Replace an instance: the new one first",
                handler!(instances::replace),
            )))
            .body(closed(&[], [("reason", text_up_to(1024))]))
            .change()
            .json(202, "It begins", named("InstanceReplaced")),
            self.on_shards(id(route(
                Method::POST,
                "/api/v1/instances/{id}/ack",
                "instance_ack",
                "Say that a drain is done",
                handler!(instances::ack),
            )))
            .body(closed(&[], [("drain_id", text_up_to(32))]))
            .change()
            .json(200, "Noted", named("InstanceAcknowledged")),
            self.on_shards(id(route(
                Method::GET,
                "/api/v1/instances/{id}/why",
                "instance_why",
                "Why an instance is as it is",
                handler!(instances::why),
            )))
            .json(200, "Facts, holds and history", named("Why"))
            .unchanged()
            .error(404),
        ]
    }

    fn others(&self) -> [Made; 6] {
        let plan = "What the planner would do now, and what holds it back";
        let events = "What happened";
        let plans = || wrapped("plans", named("PlanDone"));
        let past = object([
            ("events", list(named("Event"))),
            ("errors", list(named("ShardError"))),
            ("as_of", schemas::as_of()),
        ]);
        [
            self.on_shards(route(
                Method::GET,
                "/api/v1/shards",
                "shards",
                "Which shards answer, and who leads them",
                handler!(this::shards),
            ))
            .json(200, "All shards; one that is not reached says so", dated("shards", named("Shard")))
            .unchanged(),
            self.on_shards(route(Method::GET, "/api/v1/plan", "plan", plan, handler!(plans::plan)))
                .query("group", identifier(), "Only of this group")
                .json(200, "Of all shards", plans())
                .json(207, "Of some shards", plans())
                .unchanged()
                .error(404),
            self.on_shards(route(
                Method::POST,
                "/api/v1/plan",
                "plan_if",
                "The same with other sizes, or another config",
                handler!(plans::plan),
            ))
            .body(named("PlanAsked"))
            .json(200, "Of all shards", plans())
            .json(207, "Of some shards", plans())
            .error(404),
            self.on_shards(route(
                Method::GET,
                "/api/v1/drains",
                "drains",
                "Drains that go on",
                handler!(instances::drains),
            ))
            .json(200, "Of all shards", dated("drains", named("DrainShown")))
            .json(207, "Of some shards", dated("drains", named("DrainShown")))
            .unchanged(),
            self.on_shards(route(Method::GET, "/api/v1/events", "events", events, handler!(events::list)))
                .query("since", text_of(SPAN, 7), "Only of this long ago: 15m, 1h, 2d")
                .query("group", identifier(), "Only of this group")
                .query("instance", instance_id(), "Only of this instance")
                .query("min_severity", severity(), "Only this severe, or more")
                .query(
                    "follow",
                    boolean(),
                    "Go on with what happens; as a stream of lines unless Accept says otherwise",
                )
                .param(Place::Header, "Last-Event-ID", text_up_to(8192), "Go on after this one")
                .json(200, "What is remembered", past.clone())
                .answer(200, "", "text/event-stream", sse())
                .answer(200, "", "application/x-ndjson", json!({"type": "string"}))
                .json(207, "Of some shards", past)
                .unchanged(),
            self.on_shards(route(
                Method::GET,
                "/api/v1/stream",
                "stream",
                "All shards, groups and instances, and whatever changes: StreamMessage after StreamMessage",
                handler!(stream::stream),
            ))
            .query("follow", boolean(), "If false, only what there is now")
            .param(Place::Header, "Last-Event-ID", text_up_to(8192), "Go on after this one, if it is still known")
            .answer(200, "A message per event or line", "text/event-stream", sse())
            .answer(200, "", "application/x-ndjson", json!({"type": "string"})),
        ]
    }
}
