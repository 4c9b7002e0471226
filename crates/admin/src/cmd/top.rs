//! `top`: shards, groups, instances and events on one screen, as they change.
//!
//! What is known comes from the same streams as over HTTP (`nstance_client::live`), what it looks like from `draw`, which is pure; here is
//! only the waiting and the terminal.

mod draw;
mod screen;

use std::{
    io::{self, IsTerminal as _},
    sync::Arc,
    time::Duration,
};

use clap::Args;
use nstance_client::live::LiveState;
use nstance_rt::{clock::SystemClock, shutdown::StopSignals, tasks::Tasks};
use tokio::time::sleep;

use self::{
    draw::draw,
    screen::{Keys, Screen},
};
use crate::{
    args::{Context, ShardArgs, keep_identity_renewed},
    exit::Exit,
    failure::Failure,
    words,
};

#[derive(Debug, Args)]
pub struct TopArgs {
    #[command(flatten)]
    shards: ShardArgs,
}

/// Nobody reads faster, and a wave of changes must not be a wave of drawing.
const FRAME: Duration = Duration::from_millis(100);
/// Ages go on when nothing else does.
const TICK: Duration = Duration::from_millis(900);
/// For streams to end on the way out.
const GRACE: Duration = Duration::from_millis(100);

pub async fn run(context: &Context, args: TopArgs) -> Result<Exit, Failure> {
    if !io::stdout().is_terminal() || std::env::var_os("TERM").is_some_and(|it| it == "dumb") {
        return Err(Failure::usage("top draws on a terminal, and standard output is none that can be drawn on")
            .next("for programs: nstance-admin group list, instance list or events --follow, with -o json"));
    }
    if !context.output.is_for_people() {
        return Err(Failure::usage("top has no other form than its screen")
            .next("without -o; for programs: nstance-admin events --follow -o json"));
    }
    let shards = args.shards.shards(context).await?;
    let mut stop = StopSignals::listen().map_err(|error| Failure::failed("listen for signals").because(error))?;
    let tasks = Tasks::new();
    let live = LiveState::start(&tasks, &shards, Arc::new(SystemClock));
    tasks.spawn_droppable(
        "operator identity",
        keep_identity_renewed(context.clone(), args.shards.identity_files(context), shards),
    );
    let broken = |error| Failure::failed("draw on the terminal").because(error);
    let (screen, mut keys) = (Screen::open().map_err(broken)?, Keys::open());
    let mut changes = live.subscribe();
    let exit = loop {
        changes.borrow_and_update();
        screen.show(&draw(&live.views(), screen::size(), words::now())).map_err(broken)?;
        let due = async {
            sleep(FRAME).await;
            tokio::select! {
                biased;
                _ = changes.changed() => {}
                () = sleep(TICK) => {}
            }
        };
        tokio::select! {
            biased;
            _ = stop.next() => break Exit::Interrupted,
            () = keys.quit() => break Exit::Done,
            () = due => {}
        }
    };
    drop(screen);
    tasks.end(GRACE).await;
    Ok(exit)
}
