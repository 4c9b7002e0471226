//! `drains watch --exec`: a program per drain, its success is the acknowledgement.

use std::{collections::BTreeSet, path::PathBuf, process::Stdio, sync::Mutex, time::Duration};

use clap::Args;
use futures::{StreamExt as _, stream::FuturesUnordered};
use nstance_client::{Connection, ShardError, Shards, UnknownShard};
use nstance_proto::v1::{DrainAckRequest, InstanceStatusResponse, WatchRequest};
use nstance_rt::{backoff::Backoff, entropy::SystemEntropy, shutdown::StopSignals};
use tokio::{
    io::AsyncWriteExt as _,
    process::Command,
    sync::{Semaphore, mpsc},
};

use super::document;
use crate::{
    args::{Context, ShardArgs},
    exit::Exit,
    failure::Failure,
};

#[derive(Debug, Args)]
pub(super) struct WatchArgs {
    /// Gets the drain as JSON on stdin; its success acknowledges the drain
    #[arg(long, value_name = "PROGRAM")]
    exec: PathBuf,
    /// Programs at once
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1000))]
    parallel: u16,
    #[command(flatten)]
    shards: ShardArgs,
}

/// A drain that wants its program, once however often it is told.
struct Due {
    shard: String,
    instance: Box<InstanceStatusResponse>,
}

pub(super) async fn run(context: &Context, args: WatchArgs) -> Result<Exit, Failure> {
    let shards = args.shards.shards(context).await?;
    let (sender, mut dues) = mpsc::channel::<Due>(64);
    let mut following =
        Box::pin(futures::future::join_all(shards.connections().iter().map(|it| follow(context, it, sender.clone()))));
    let mut stop = StopSignals::listen().map_err(|error| Failure::failed("listen for signals").because(error))?;
    let places = Semaphore::new(args.parallel.into());
    let begun: Mutex<BTreeSet<(String, String)>> = Mutex::default();
    let mut running = FuturesUnordered::new();
    loop {
        tokio::select! {
            biased;
            _ = stop.next() => {
                if !running.is_empty() {
                    context.output.note("programs that still run go on; their drains are not acknowledged");
                }
                return Ok(Exit::Interrupted);
            }
            Some(()) = running.next() => {}
            Some(due) = dues.recv() => {
                let drain = due.instance.drain.as_ref().map(|it| it.drain_id.clone()).unwrap_or_default();
                let key = (due.instance.instance_id.clone(), drain);
                let is_new = begun.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(key);
                if is_new {
                    running.push(drained(context, &shards, &args.exec, due, &places));
                }
            }
            _ = &mut following => return Err(Failure::failed("follow the shards: all streams ended")),
        }
    }
}

/// Every drain that there is, and every one that begins.
async fn follow(context: &Context, connection: &Connection, dues: mpsc::Sender<Due>) {
    let entropy = SystemEntropy::new();
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));
    let mut down = false;
    loop {
        let watched: Result<(), ShardError> = async {
            let refused = |status: tonic::Status| ShardError::from_status(connection.shard(), &status);
            let mut client = connection.client().await?;
            let mut stream =
                client.service.watch_instances(WatchRequest::default()).await.map_err(refused)?.into_inner();
            backoff.reset();
            down = false;
            while let Some(event) = stream.message().await.map_err(refused)? {
                let Some(instance) = event.instance.filter(|it| it.status == "draining") else { continue };
                if instance.drain.as_ref().is_some_and(|it| it.acked_at.is_some()) {
                    continue;
                }
                let due = Due { shard: connection.shard().to_owned(), instance: Box::new(instance) };
                if dues.send(due).await.is_err() {
                    return Ok(());
                }
            }
            Err(ShardError::new(connection.shard(), tonic::Code::Unavailable, "the stream ended"))
        }
        .await;
        let Err(error) = watched else { return };
        if !std::mem::replace(&mut down, true) {
            context.output.note(&format!("note: {error}; trying again"));
        }
        tokio::time::sleep(backoff.next(&entropy)).await;
    }
}

/// Runs the program of one drain. A failure leaves the drain to its deadline.
async fn drained(context: &Context, shards: &Shards, program: &std::path::Path, due: Due, places: &Semaphore) {
    let Ok(_place) = places.acquire().await else { return };
    let (shard, it) = (&due.shard, &due.instance);
    let told = document(shard, it);
    let ended = async {
        let mut child = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(|error| format!("start {}: {error}", program.display()))?;
        if let Some(mut stdin) = child.stdin.take() {
            // A program that does not care for its input may close it.
            let _ = stdin.write_all(format!("{told}\n").as_bytes()).await;
        }
        let status = child.wait().await.map_err(|error| format!("wait for {}: {error}", program.display()))?;
        if status.success() { Ok(()) } else { Err(format!("{} ended with {status}", program.display())) }
    }
    .await;
    let outcome = match ended {
        Ok(()) => acknowledge(shards, &due).await.map(|()| "acknowledged").map_err(|error| error.message),
        Err(why) => Err(why),
    };
    let mut said = told;
    match outcome {
        Ok(word) => {
            said["result"] = word.into();
            context.output.item(&said, || format!("{}  {shard}  {word}", it.instance_id));
        }
        Err(why) => {
            said["result"] = "failed".into();
            said["message"] = why.clone().into();
            context.output.item(&said, || format!("{}  {shard}  not acknowledged: {why}", it.instance_id));
        }
    }
}

async fn acknowledge(shards: &Shards, due: &Due) -> Result<(), ShardError> {
    let internal = |error: UnknownShard| ShardError::new(&due.shard, tonic::Code::Internal, error.to_string());
    let there = shards.only(std::slice::from_ref(&due.shard)).map_err(internal)?;
    let request = DrainAckRequest {
        instance_id: due.instance.instance_id.clone(),
        drain_id: due.instance.drain.as_ref().map(|it| it.drain_id.clone()).unwrap_or_default(),
    };
    let request = &request;
    let answers = there
        .each(|mut client| async move { client.service.acknowledge_drained(request.clone()).await.map(|_| ()) })
        .await;
    answers.errors.into_iter().next().map_or(Ok(()), Err)
}
