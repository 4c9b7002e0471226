//! Reads that are answered from memory. No shard of these tests answers, so whatever is answered is from memory, and
//! whoever asks a shard is told that it does not answer.

use nstance_client::{
    ShardError,
    live::{MAX_AGE, ShardState, SnapshotStart, Update},
};
use nstance_proto::v1::{ConfigStatusResponse, GroupStatus};
use tonic::Code;

use super::*;

fn group(key: &str, size: i32) -> GroupStatus {
    GroupStatus { key: key.into(), size, ..GroupStatus::default() }
}

fn whole(n_writes: u64) -> Update {
    let state = ShardState {
        status: Arc::new(ConfigStatusResponse { epoch: 7, ..ConfigStatusResponse::default() }),
        groups: [("web".to_owned(), Arc::new(group("web", 2)))].into(),
        ..ShardState::default()
    };
    Update::Snapshot(Box::new(state), SnapshotStart { n_writes, instances_at: None })
}

impl Fixture {
    async fn get(&self, path: &str) -> Answered {
        self.get_if(path, "").await
    }

    async fn get_if(&self, path: &str, etag: &str) -> Answered {
        let asked = Request::get(path)
            .header(header::HOST, "localhost")
            .header(header::AUTHORIZATION, bearer(VIEWER))
            .header(header::IF_NONE_MATCH, etag);
        let answered = self.ask(asked.body(Body::empty()).unwrap()).await;
        let path = path.split('?').next().unwrap();
        let route = self.app.routes.iter().find(|it| it.method == Method::GET && it.captures(path).is_some());
        hold_to_the_table(&self.app, route.unwrap(), &answered);
        answered
    }

    /// Of both shards, each group as `shard key size`; else what came instead.
    async fn groups(&self, path: &str) -> Result<Vec<String>, u16> {
        let answered = self.get(path).await;
        if answered.status != 200 {
            return Err(answered.status);
        }
        let groups = answered.document["groups"].as_array().unwrap();
        let said = |it: &Value| format!("{} {} {}", it["shard"], it["group"], it["size"]).replace('"', "");
        Ok(groups.iter().map(said).collect())
    }
}

#[tokio::test(start_paused = true)]
async fn groups_are_answered_from_memory_with_their_age() {
    let fixture = Fixture::quiet();
    assert_eq!(fixture.groups("/api/v1/groups").await, Err(503), "nothing is known, so it is asked");
    for at in [0, 1] {
        fixture.app.live.apply(at, whole(0));
    }
    fixture.app.live.apply(1, Update::Group(Box::new(group("db", 1)), None));
    assert_eq!(fixture.groups("/api/v1/groups").await.unwrap(), ["dev-1 web 2", "dev-2 db 1", "dev-2 web 2"]);
    assert_eq!(fixture.groups("/api/v1/groups?shard=dev-2").await.unwrap(), ["dev-2 db 1", "dev-2 web 2"]);
    assert_eq!(fixture.groups("/api/v1/groups/db").await.unwrap(), ["dev-2 db 1"]);
    assert_eq!(fixture.groups("/api/v1/groups/none").await, Err(404), "proven: all groups are known");
    let (_, seen) = fixture.app.live.groups("dev-1").unwrap();
    assert_eq!(seen.len(), 1);

    let first = fixture.get("/api/v1/groups").await;
    let etag = first.headers[header::ETAG].to_str().unwrap().to_owned();
    tokio::time::advance(Duration::from_secs(4)).await;
    fixture.app.live.apply(0, Update::Alive);
    let second = fixture.get("/api/v1/groups").await;
    let age = |answered: &Answered, shard: &str| answered.document["as_of"][shard].as_str().unwrap().to_owned();
    assert!(age(&first, "dev-1") < age(&second, "dev-1"));
    assert_eq!(age(&first, "dev-2"), age(&second, "dev-2"), "it was not heard of since");
    assert_eq!(fixture.get_if("/api/v1/groups", &etag).await.status, 304, "older, and the same");
    fixture.app.live.apply(0, Update::Group(Box::new(group("web", 3)), None));
    assert_eq!(fixture.get_if("/api/v1/groups", &etag).await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn a_shard_that_is_lost_or_silent_is_asked() {
    let fixture = Fixture::quiet();
    for at in [0, 1] {
        fixture.app.live.apply(at, whole(0));
    }
    tokio::time::advance(MAX_AGE - Duration::from_millis(1)).await;
    fixture.app.live.apply(1, Update::Alive);
    assert_eq!(fixture.get("/api/v1/groups").await.status, 200);
    tokio::time::advance(Duration::from_millis(1)).await;
    let answered = fixture.get("/api/v1/groups").await;
    assert_eq!((answered.status, &answered.document["errors"][0]["shard"]), (207, &json!("dev-1")), "silent");
    assert_eq!(answered.document["as_of"].as_object().unwrap().keys().collect::<Vec<_>>(), ["dev-2"]);
    fixture.app.live.apply(0, Update::Alive);
    assert_eq!(fixture.get("/api/v1/groups").await.status, 200);
    fixture.app.live.apply(1, Update::Disconnected(ShardError::new("dev-2", Code::Unavailable, "gone")));
    let answered = fixture.get("/api/v1/groups").await;
    assert_eq!((answered.status, &answered.document["errors"][0]["shard"]), (207, &json!("dev-2")), "lost");
}

#[tokio::test(start_paused = true)]
async fn who_changed_something_here_never_reads_what_was_before() {
    let fixture = Fixture::quiet();
    let live = fixture.app.live.clone();
    for at in [0, 1] {
        live.apply(at, whole(0));
    }
    let scaled = Request::post("/group/scale?shard=dev-1")
        .header(header::HOST, "localhost")
        .header(header::AUTHORIZATION, bearer(FULL))
        .header(header::CONTENT_TYPE, "application/json");
    // Nobody answered, which proves nothing: it may have happened.
    let scaled = fixture.ask(scaled.body(Body::from(r#"{"group": "web", "size": 3}"#)).unwrap()).await;
    assert_eq!(scaled.status, 503);
    let answered = fixture.get("/api/v1/groups").await;
    assert_eq!((answered.status, &answered.document["errors"][0]["shard"]), (207, &json!("dev-1")), "only that one");
    // Neither what the stream tells nor a picture that was begun before is proof.
    live.apply(0, Update::Group(Box::new(group("web", 2)), None));
    live.apply(0, whole(0));
    assert_eq!(fixture.get("/api/v1/groups").await.status, 207);
    // A list that was asked for afterwards is.
    let asked = live.begin_list("dev-1");
    live.merge_groups(asked, &[group("web", 3)], "7-5");
    assert_eq!(fixture.groups("/api/v1/groups?shard=dev-1").await.unwrap(), ["dev-1 web 3"]);
    // What was on its way since before the list changes nothing any more, what is newer does.
    let place = |text: &str| nstance_client::ResumeToken::parse(text);
    live.apply(0, Update::Group(Box::new(group("web", 2)), place("7-5")));
    assert_eq!(fixture.groups("/api/v1/groups?shard=dev-1").await.unwrap(), ["dev-1 web 3"]);
    live.apply(0, Update::Group(Box::new(group("web", 4)), place("7-6")));
    assert_eq!(fixture.groups("/api/v1/groups?shard=dev-1").await.unwrap(), ["dev-1 web 4"]);
    // So is a whole picture that was begun afterwards.
    drop(live.begin_write(&fixture.app.shards));
    assert_eq!(fixture.get("/api/v1/groups").await.status, 503);
    live.apply(0, whole(2));
    live.apply(1, whole(1));
    assert_eq!(fixture.get("/api/v1/groups").await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn what_only_shards_know_is_asked_for() {
    let fixture = Fixture::quiet();
    for at in [0, 1] {
        fixture.app.live.apply(at, whole(0));
    }
    for path in ["/api/v1/instances", "/api/v1/drains", "/api/v1/plan", "/api/v1/explain/group/web", "/config/status"] {
        assert_eq!(fixture.get(path).await.status, 503, "{path}");
    }
    let answered = fixture.get("/api/v1/shards").await;
    assert_eq!((answered.status, &answered.document["shards"][0]["reachable"]), (200, &json!(false)));
}
