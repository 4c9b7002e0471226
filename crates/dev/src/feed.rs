//! What the leaders show, kept up to date in the background: the newest picture, and events one by one.

use std::{collections::BTreeMap, time::Duration};

use nstance_core::ids::Shard;
use nstance_proto::v1::Event;
use nstance_rt::tasks::Tasks;
use tokio::sync::{mpsc, watch};
use tonic::Streaming;

use crate::{
    api::{self, Client, View},
    kubernetes::{self, KubernetesView},
    layout::Layout,
    roles::{self, Roles},
    shape::Shape,
};

/// Four pictures a second; an event brings one at once.
const PERIOD: Duration = Duration::from_millis(250);
const RETRY: Duration = Duration::from_millis(250);
const QUEUE: usize = 1024;

/// The newest of everything.
#[derive(Debug, Clone, Default)]
pub(crate) struct Picture {
    /// What each shard's leader shows, or why nothing. A shard that was not looked at yet is absent.
    pub(crate) shards: BTreeMap<String, Result<View, String>>,
    pub(crate) roles: Roles,
    pub(crate) kubernetes: KubernetesView,
}

pub(crate) struct Feed {
    pub(crate) picture: watch::Receiver<Picture>,
    /// With the shard each is of.
    pub(crate) events: mpsc::Receiver<(String, Event)>,
}

/// Starts to look and listen, and goes on through every change of leaders until the scope ends.
pub(crate) fn start(tasks: &Tasks, layout: &Layout, shape: Shape) -> Feed {
    let (pictures, picture) = watch::channel(Picture::default());
    let (sender, events) = mpsc::channel(QUEUE);
    for shard in shape.shards() {
        let (layout, pictures, sender) = (layout.clone(), pictures.clone(), sender.clone());
        tasks.spawn_droppable("feed", async move {
            let mut seen = Seen::default();
            loop {
                let why = match api::connect(&layout, &shard).await {
                    Ok(client) => follow(client, &shard, &pictures, &sender, &mut seen).await,
                    Err(error) => format!("{error:#}"),
                };
                show(&pictures, &shard, Err(why));
                tokio::time::sleep(RETRY).await;
            }
        });
    }
    let (place, seen) = (layout.clone(), pictures.clone());
    tasks.spawn_droppable("kubernetes", async move {
        loop {
            let view = kubernetes::look(&place).await;
            seen.send_modify(|it| it.kubernetes = view);
            tokio::time::sleep(PERIOD).await;
        }
    });
    let layout = layout.clone();
    tasks.spawn_droppable("roles", async move {
        loop {
            let roles = roles::look(&layout).await;
            pictures.send_modify(|it| it.roles = roles);
            tokio::time::sleep(PERIOD).await;
        }
    });
    Feed { picture, events }
}

fn show(pictures: &watch::Sender<Picture>, shard: &Shard, view: Result<View, String>) {
    pictures.send_modify(|it| {
        it.shards.insert(shard.to_string(), view);
    });
}

/// The last event that was passed on: a new stream begins with the whole term again.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Seen {
    epoch: u64,
    number: u64,
}

impl Seen {
    fn of(token: &str) -> Option<Self> {
        let (epoch, number) = token.split_once('-')?;
        Some(Self { epoch: epoch.parse().ok()?, number: number.parse().ok()? })
    }
}

/// Passes on what one connection shows. Answers why it ended.
async fn follow(
    mut client: Client,
    shard: &Shard,
    pictures: &watch::Sender<Picture>,
    sender: &mpsc::Sender<(String, Event)>,
    seen: &mut Seen,
) -> String {
    let mut stream: Streaming<Event> = match client.events_from_start().await {
        Ok(stream) => stream,
        Err(status) => return status.message().to_owned(),
    };
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            _ = ticks.tick() => match client.view().await {
                Ok(view) => show(pictures, shard, Ok(view)),
                Err(status) => return status.message().to_owned(),
            },
            event = stream.message() => match event {
                Ok(Some(event)) => {
                    let place = Seen::of(&event.resume_token).unwrap_or_default();
                    if *seen < place {
                        *seen = place;
                        // A reader that is this far behind has no use for the oldest of them.
                        let _ = sender.try_send((shard.to_string(), event));
                    }
                }
                Ok(None) => return "the server ended the stream of events".to_owned(),
                Err(status) => return status.message().to_owned(),
            },
        }
    }
}
