//! `notice`: an instance is told that its cloud will take it, by the file its agent watches.
//!
//! The rest is as with a spot machine: its replacement is asked for at once, it is drained, and at the deadline the
//! server removes it.

use std::{fs, path::Path, process::ExitCode};

use anyhow::{Context, bail};
use nstance_core::time::Timestamp;

use crate::{
    cli::NoticeArgs,
    kill::{self, Began},
    layout::Layout,
    target::{self, Target},
};

pub(crate) async fn run(layout: &Layout, args: &NoticeArgs) -> anyhow::Result<ExitCode> {
    let target: Target = args.target.parse().map_err(anyhow::Error::msg)?;
    let Target::Instance(id) = &target else {
        bail!("only an instance gets a notice; name one as instance/ID, `nstance-dev status` lists them");
    };
    let agent = target::agent(layout, id)?;
    let shard = target::shard_of(layout, id);
    // Listening must begin before there is something to hear.
    let watched = if args.no_wait { None } else { Some(kill::listen(layout, &shard).await) };
    let began = Began::now();
    let deadline = args.within.map(|within| began.at.plus(within));
    give(&layout.instances().join(id), args.action.name(), deadline)?;
    let within = args.within.map(|it| format!(", in {} s", it.as_secs_f64())).unwrap_or_default();
    say!("told instance/{id} (pid {}): {}{within}", agent.pid, args.action.name());
    kill::tell_recovery(layout, watched, id, began).await
}

/// Writes the notice beside its place and renames it, so that the agent never reads half of one.
pub(crate) fn give(directory: &Path, action: &str, deadline: Option<Timestamp>) -> anyhow::Result<()> {
    let deadline = deadline.map(|at| at.to_string());
    let notice = serde_json::json!({ "action": action, "deadline": deadline });
    let (part, whole) = (directory.join(".notice.json.tmp"), directory.join("notice.json"));
    fs::write(&part, notice.to_string()).with_context(|| format!("write {}", part.display()))?;
    fs::rename(&part, &whole).with_context(|| format!("write {}", whole.display()))
}
