//! Files that the server sends: staged, judged, and put into their places together.

use crate::{
    context::Context,
    keys::hello,
    session::{Client, Ended, Stream, Streams},
};

/// One stream of files, from its opening to its end.
pub(crate) async fn stream(ctx: &Context, mut client: Client, open: &Streams<'_>) -> Ended {
    let mut files = match client.receive_files(hello(ctx)).await {
        Ok(answer) => answer.into_inner(),
        Err(status) => return status.into(),
    };
    open.opened(Stream::Files);
    loop {
        match files.message().await {
            Ok(Some(file)) if !ctx.obeys(file.epoch) => return Ended::Deposed,
            Ok(Some(_)) => {}
            Ok(None) => return Ended::Clean,
            Err(status) => return status.into(),
        }
    }
}
