//! What all shards are like now: kept in memory from their streams, for whoever shows it live.
//!
//! A shard tells its past only to those who know where they were, and has few places for watchers. So one task per shard
//! watches, and whoever asks us is answered from what it keeps: the HTTP API its readers, `top` its screen.

#[path = "live/shard_states.rs"]
mod board;
#[path = "live/watch.rs"]
mod follow;
#[path = "live/change_log.rs"]
mod journal;
#[path = "resume_token.rs"]
mod position;
#[path = "live/own_writes.rs"]
mod reach;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nstance_core::{ports::clock::Clock, time::Timestamp};
use nstance_proto::v1::{Event, GroupStatus};
use nstance_rt::tasks::Tasks;
use tokio::sync::{broadcast, watch};

use self::board::Board;
#[cfg(test)]
pub(crate) use self::board::FRESH;
pub(crate) use self::{
    board::{Asked, Begun, News, Picture, Seen, gap},
    journal::{Behind, Delta, Entry},
    position::Position,
};
use crate::shards::{ShardError, Shards};

/// What a reader of events may be behind.
const MAX_BEHIND: usize = 1024;

/// An event and whose it is.
#[derive(Debug, Clone)]
pub(crate) struct Told {
    pub(crate) shard: String,
    pub(crate) event: Event,
}

/// What is remembered of one shard's events.
pub(crate) struct Past {
    pub(crate) shard: String,
    pub(crate) events: Vec<Event>,
    /// When we were last in touch; nothing if never.
    pub(crate) as_of: Option<Timestamp>,
    pub(crate) lost: Option<ShardError>,
}

/// What a reader of changes begins with.
pub(crate) enum Opening {
    /// Nothing: it was away for a moment only, and goes on after the number it gave.
    Resumed,
    /// Everything, and after which number it goes on.
    Fresh(Vec<Seen>, u64),
}

/// A change on its way. Its end counts, whatever became of it: it may have happened.
pub(crate) struct Writing {
    live: Arc<Live>,
    places: Vec<usize>,
}

impl Drop for Writing {
    fn drop(&mut self) {
        let mut board = self.live.board();
        for at in &self.places {
            board.wrote(*at);
        }
    }
}

pub(crate) struct Live {
    names: Vec<String>,
    board: Mutex<Board>,
    /// The number of the last change.
    newest: watch::Sender<u64>,
    told: broadcast::Sender<Arc<Told>>,
    clock: Arc<dyn Clock>,
}

impl Live {
    /// Nothing is known of any of them, and nobody asks yet.
    pub(crate) fn new(shards: &Shards, clock: Arc<dyn Clock>) -> Arc<Self> {
        let names: Vec<String> = shards.targets().iter().map(|it| it.shard.clone()).collect();
        let (told, _) = broadcast::channel(MAX_BEHIND);
        let board = Mutex::new(Board::new(names.iter().cloned()));
        Arc::new(Self { names, board, newest: watch::Sender::new(0), told, clock })
    }

    /// Begins to follow all shards, until the scope ends.
    pub(crate) fn start(tasks: &Tasks, shards: &Shards, clock: Arc<dyn Clock>) -> Arc<Self> {
        let live = Self::new(shards, clock);
        for (at, target) in shards.targets().iter().enumerate() {
            let follow = follow::keep(live.clone(), at, shards.clone(), target.clone());
            tasks.spawn_droppable("streams of a shard", follow);
        }
        live
    }

    fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes news of the shard at this place among the targets.
    pub(crate) fn take(&self, at: usize, news: News) {
        let event = match &news {
            News::Event(event) => Some(Event::clone(event)),
            _ => None,
        };
        let number = {
            let mut board = self.board();
            board.take(at, news, self.clock.now());
            board.journal.last()
        };
        if let (Some(event), Some(shard)) = (event, self.names.get(at)) {
            // Nobody listens: that is fine.
            let _ = self.told.send(Arc::new(Told { shard: shard.clone(), event }));
        }
        self.newest.send_if_modified(|it| std::mem::replace(it, number.max(*it)) < number);
    }

    fn writes(&self, at: usize) -> u64 {
        self.board().writes(at)
    }

    /// Something is about to be changed at these shards. Until the picture of one is known to include it, it is asked.
    pub(crate) fn writing(self: &Arc<Self>, shards: &Shards) -> Writing {
        let is_one = |name: &String| shards.targets().iter().any(|it| it.shard == *name);
        let places = self.names.iter().enumerate().filter(|(_, name)| is_one(name)).map(|(at, _)| at).collect();
        Writing { live: self.clone(), places }
    }

    /// To be called before a shard is asked for what its picture is to be completed with.
    pub(crate) fn asking(&self, shard: &str) -> Option<Asked> {
        self.board().asked(shard)
    }

    /// Takes a list of groups that was asked for.
    pub(crate) fn listed(&self, asked: Option<Asked>, groups: &[GroupStatus], token: &str) {
        let (Some(asked), Some(token)) = (asked, Position::parse(token)) else { return };
        let number = {
            let mut board = self.board();
            board.listed(asked, groups, token);
            board.journal.last()
        };
        self.newest.send_if_modified(|it| std::mem::replace(it, number.max(*it)) < number);
    }

    /// Takes the token of a list of instances that was asked for.
    pub(crate) fn listed_instances(&self, asked: Option<Asked>, token: &str) {
        if let (Some(asked), Some(token)) = (asked, Position::parse(token)) {
            self.board().listed_instances(asked, token);
        }
    }

    /// A shard's groups, and when it was last heard of. Nothing if the shard itself must be asked.
    pub(crate) fn groups(&self, shard: &str) -> Option<(Timestamp, Vec<Arc<GroupStatus>>)> {
        self.board().groups(shard, self.clock.now())
    }

    /// How many instances a shard has, in the same way.
    pub(crate) fn n_instances(&self, shard: &str) -> Option<(Timestamp, usize)> {
        self.board().n_instances(shard, self.clock.now())
    }

    fn position(&self, at: usize) -> Option<Position> {
        self.board().position(at)
    }

    /// Whether each shard is in touch with us.
    pub(crate) fn up(&self) -> Vec<(String, bool)> {
        self.seen().iter().map(|it| (it.shard.to_string(), it.lost.is_none())).collect()
    }

    /// What is known of every shard, in the order in which they are configured.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.board().seen()
    }

    /// Events that are told from now on.
    pub(crate) fn listen(&self) -> broadcast::Receiver<Arc<Told>> {
        self.told.subscribe()
    }

    pub(crate) fn past(&self, shards: &Shards) -> Vec<Past> {
        let board = self.board();
        let wanted = |it: &Seen| shards.targets().iter().any(|target| *target.shard == *it.shard);
        let past = |it: Seen| {
            let events = board.past(&it.shard).iter().map(|it| Event::clone(it)).collect();
            Past { shard: it.shard.to_string(), events, as_of: it.as_of, lost: it.lost }
        };
        board.seen().into_iter().filter(wanted).map(past).collect()
    }

    /// Says whenever something changed.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }

    /// For a reader that was at `place`, or nowhere yet.
    pub(crate) fn open(&self, place: Option<u64>) -> Opening {
        let board = self.board();
        match place {
            Some(number) if board.journal.after(number, 0).is_ok() => Opening::Resumed,
            _ => Opening::Fresh(board.seen(), board.journal.last()),
        }
    }

    /// At most `max` of the changes after this number.
    pub(crate) fn after(&self, number: u64, max: usize) -> Result<Vec<Arc<Entry>>, Behind> {
        self.board().journal.after(number, max)
    }
}
