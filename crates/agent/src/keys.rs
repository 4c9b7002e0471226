//! Key pairs for the certificates among this machine's files: made here, and only their public halves leave.

use nstance_proto::v1::AgentStreamRequest;

use crate::{
    context::Context,
    health::AGENT_VERSION,
    session::{Client, Ended, Stream, Streams},
};

/// One stream of key requests, from its opening to its end.
pub(crate) async fn stream(ctx: &Context, mut client: Client, open: &Streams<'_>) -> Ended {
    let mut requests = match client.key_gen_requests(hello(ctx)).await {
        Ok(answer) => answer.into_inner(),
        Err(status) => return status.into(),
    };
    open.opened(Stream::Keys);
    loop {
        match requests.message().await {
            Ok(Some(request)) if !ctx.obeys(request.epoch) => return Ended::Deposed,
            Ok(Some(_)) => {}
            Ok(None) => return Ended::Clean,
            Err(status) => return status.into(),
        }
    }
}

/// What opens a stream from the server.
pub(crate) fn hello(ctx: &Context) -> AgentStreamRequest {
    AgentStreamRequest {
        agent_version: AGENT_VERSION.to_owned(),
        session_id: ctx.session_id.clone(),
        config_hash: ctx.dir.config_hash().unwrap_or_default(),
    }
}
