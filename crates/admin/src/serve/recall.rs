//! What shards have, from memory where that is as good as asking, and else asked for.
//!
//! Only groups and numbers are answered from memory: streams tell every change of a group, but of an instance only its
//! phases and drains, and neither its last report nor who acknowledged. So instances are always asked for.

use std::sync::Arc;

use nstance_client::{Answers, ShardClient, ShardError, Shards};
use nstance_core::time::Timestamp;
use nstance_proto::v1::{ConfigStatusResponse, GroupStatus, ListInstancesRequest};
use tonic::{Code, Status};

use super::App;
use crate::cmd::shards::{self, Seen};

/// What a shard has, and how old that is at most.
pub(super) struct Dated<T> {
    pub as_of: Timestamp,
    pub it: T,
}

/// Puts what each shard has into another form.
pub(super) fn shown<T, U>(answers: &Answers<Dated<T>>, form: impl Fn(&str, &T) -> U) -> Answers<Dated<U>> {
    let shown =
        |(shard, dated): &(String, Dated<T>)| (shard.clone(), Dated { as_of: dated.as_of, it: form(shard, &dated.it) });
    Answers { ok: answers.ok.iter().map(shown).collect(), errors: answers.errors.clone() }
}

/// Answers that were all asked for at this moment.
pub(super) fn asked_at<T>(as_of: Timestamp, answers: Answers<T>) -> Answers<Dated<T>> {
    let ok = answers.ok.into_iter().map(|(shard, it)| (shard, Dated { as_of, it })).collect();
    Answers { ok, errors: answers.errors }
}

/// All groups of these shards.
pub(super) async fn groups(app: &App, shards: &Shards) -> Answers<Dated<Vec<Arc<GroupStatus>>>> {
    let mut known: Vec<_> = shards
        .names()
        .filter_map(|shard| {
            app.live.groups(shard).map(|(as_of, groups)| (shard.to_owned(), Dated { as_of, it: groups }))
        })
        .collect();
    let others = shards.without(|shard| known.iter().any(|(it, _)| it == shard));
    let now = app.clock.now();
    let asked = others.each(|mut client| async move { ask_groups(app, &mut client).await }).await;
    let Answers { ok, errors } = asked_at(now, asked);
    known.extend(ok);
    known.sort_by_key(|(shard, _)| shards.position(shard));
    Answers { ok: known, errors }
}

/// One group at each shard that has it. Whoever has it not is asked in vain.
pub(super) async fn group(app: &App, shards: &Shards, key: &str) -> Answers<Dated<Arc<GroupStatus>>> {
    let Answers { ok, mut errors } = groups(app, shards).await;
    let mut found = Vec::new();
    for (shard, Dated { as_of, it }) in ok {
        match it.into_iter().find(|it| it.key == key) {
            Some(it) => found.push((shard, Dated { as_of, it })),
            None => {
                errors.push(ShardError::new(&shard, Code::NotFound, format!("there is no group {key} in {shard}")));
            }
        }
    }
    Answers { ok: found, errors }
}

/// What these shards are. Who answers, who leads and how fast can only be asked for; how much they have is known.
pub(super) async fn looks(app: &App, shards: &Shards) -> Answers<Dated<Seen>> {
    shards.each(|client| look(app, client)).await
}

async fn look(app: &App, mut client: ShardClient) -> Result<Dated<Seen>, Status> {
    let (shard, now) = (client.shard.clone(), app.clock.now());
    let (config, latency_ms): (ConfigStatusResponse, f64) = shards::timed(&mut client).await?;
    let (groups_at, n_groups) = match app.live.groups(&shard) {
        Some((at, groups)) => (at, groups.len()),
        None => (now, ask_groups(app, &mut client).await?.len()),
    };
    let (instances_at, n_instances) = match app.live.n_instances(&shard) {
        Some(known) => known,
        None => (now, ask_n_instances(app, &mut client).await?),
    };
    let as_of = now.min(groups_at).min(instances_at);
    Ok(Dated { as_of, it: Seen { config, n_groups, n_instances, latency_ms } })
}

async fn ask_groups(app: &App, client: &mut ShardClient) -> Result<Vec<Arc<GroupStatus>>, Status> {
    let request = app.live.begin_list(&client.shard);
    let answer = client.service.list_groups(()).await?.into_inner();
    app.live.merge_groups(request, &answer.groups, &answer.resume_token);
    Ok(answer.groups.into_iter().map(Arc::new).collect())
}

async fn ask_n_instances(app: &App, client: &mut ShardClient) -> Result<usize, Status> {
    let request = app.live.begin_list(&client.shard);
    let (instances, token) = client.instances_and_token(ListInstancesRequest::default()).await?;
    app.live.note_instances_token(request, &token);
    Ok(instances.len())
}
