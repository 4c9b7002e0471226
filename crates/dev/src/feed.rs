//! What the server shows, kept up to date in the background: the newest picture, and events one by one.

use std::time::Duration;

use nstance_proto::v1::Event;
use nstance_rt::tasks::Tasks;
use tokio::sync::{mpsc, watch};
use tonic::Streaming;

use crate::{
    api::{self, Client, View},
    layout::Layout,
};

/// Four pictures a second; an event brings one at once.
const PERIOD: Duration = Duration::from_millis(250);
const RETRY: Duration = Duration::from_millis(250);
const QUEUE: usize = 1024;

/// The newest picture, or why there is none.
pub(crate) type Picture = Result<View, String>;

pub(crate) struct Feed {
    pub(crate) picture: watch::Receiver<Option<Picture>>,
    pub(crate) events: mpsc::Receiver<Event>,
}

/// Starts to look and listen, and goes on through every restart of the server until the scope ends.
pub(crate) fn start(tasks: &Tasks, layout: Layout) -> Feed {
    let (pictures, picture) = watch::channel(None);
    let (sender, events) = mpsc::channel(QUEUE);
    tasks.spawn_droppable("feed", async move {
        let mut seen = Seen::default();
        loop {
            let why = match api::connect(&layout).await {
                Ok(client) => follow(client, &pictures, &sender, &mut seen).await,
                Err(error) => format!("{error:#}"),
            };
            pictures.send_replace(Some(Err(why)));
            tokio::time::sleep(RETRY).await;
        }
    });
    Feed { picture, events }
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
    pictures: &watch::Sender<Option<Picture>>,
    sender: &mpsc::Sender<Event>,
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
                Ok(view) => {
                    pictures.send_replace(Some(Ok(view)));
                }
                Err(status) => return status.message().to_owned(),
            },
            event = stream.message() => match event {
                Ok(Some(event)) => {
                    let place = Seen::of(&event.resume_token).unwrap_or_default();
                    if *seen < place {
                        *seen = place;
                        // A reader that is this far behind has no use for the oldest of them.
                        let _ = sender.try_send(event);
                    }
                }
                Ok(None) => return "the server ended the stream of events".to_owned(),
                Err(status) => return status.message().to_owned(),
            },
        }
    }
}
