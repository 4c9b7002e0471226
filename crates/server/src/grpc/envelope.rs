//! What every answer of every port has in common: it names its epoch and its request, comes within the ceiling of its
//! port, and says in our words what the transport refused in its own.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tonic::{Code, Status, body::Body};
use tower::{Layer, Service};

use super::status::Refusal;
use crate::term::Term;

/// Agents and new clients wait no longer than this; operators as long as the config says.
const CALL: Duration = Duration::from_secs(10);

/// The one call whose answer comes when its stream ends.
const ENDLESS: &str = "/ReportHealth";

#[derive(Clone)]
pub struct Envelope {
    term: Arc<Term>,
    ceiling: Ceiling,
}

#[derive(Clone, Copy)]
enum Ceiling {
    Fixed,
    Configured,
}

impl Envelope {
    /// For registration and agents.
    pub fn fixed(term: &Arc<Term>) -> Self {
        Self { term: term.clone(), ceiling: Ceiling::Fixed }
    }

    pub fn configured(term: &Arc<Term>) -> Self {
        Self { term: term.clone(), ceiling: Ceiling::Configured }
    }

    fn ceiling(&self) -> Duration {
        match self.ceiling {
            Ceiling::Fixed => CALL,
            Ceiling::Configured => self.term.applied().config.server.request_timeout,
        }
    }
}

impl<S> Layer<S> for Envelope {
    type Service = Enveloped<S>;

    fn layer(&self, inner: S) -> Enveloped<S> {
        Enveloped { inner, envelope: self.clone() }
    }
}

#[derive(Clone)]
pub struct Enveloped<S> {
    inner: S,
    envelope: Envelope,
}

impl<S> Service<http::Request<Body>> for Enveloped<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        // The clone that was polled ready must be the one that is called.
        let ready = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, ready);
        let envelope = self.envelope.clone();
        let (ceiling, patience) = (ceiling_of(request.uri().path(), envelope.ceiling()), patience(request.headers()));
        // Not below: whatever is made in there has its room for as long as a stream lives.
        let answering = inner.call(request);
        Box::pin(async move {
            let term = &envelope.term;
            let (epoch, request_id) = (term.epoch().0, nstance_rt::entropy::hex(term.shared.entropy.as_ref(), 8));
            let response = match (ceiling, patience) {
                (None, None) => answering.await?,
                _ => as_long_as_waited_for(patience, Box::pin(within(ceiling, answering))).await?,
            };
            let mut response = in_our_words(response);
            let headers = response.headers_mut();
            headers.insert("nstance-epoch", epoch.into());
            if let Ok(value) = request_id.parse() {
                headers.insert("nstance-request-id", value);
            }
            Ok(response)
        })
    }
}

fn ceiling_of(path: &str, ceiling: Duration) -> Option<Duration> {
    (!path.ends_with(ENDLESS)).then_some(ceiling)
}

/// The answer, or that it did not come in time. Streams have answered once they began.
async fn within(
    ceiling: Option<Duration>,
    answering: impl Future<Output = Result<http::Response<Body>, Infallible>>,
) -> Result<http::Response<Body>, Infallible> {
    let Some(ceiling) = ceiling else { return answering.await };
    tokio::time::timeout(ceiling, answering).await.unwrap_or_else(|_| {
        let message = format!("no answer within {ceiling:?}, the store is slow; it may be done all the same, retry");
        Ok(Status::from(Refusal::unavailable("STORE_UNAVAILABLE", message)).into_http())
    })
}

/// How long the client waits for its answer, if it says so: at most eight digits and a unit.
fn patience(headers: &http::HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number: u64 = number.parse().ok().filter(|_| number.len() <= 8)?;
    Some(match unit {
        "H" => Duration::from_hours(number),
        "M" => Duration::from_mins(number),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

/// The answer, unless nobody waits for it any more: then the call is given up.
async fn as_long_as_waited_for(
    patience: Option<Duration>,
    answering: impl Future<Output = Result<http::Response<Body>, Infallible>>,
) -> Result<http::Response<Body>, Infallible> {
    let Some(patience) = patience else { return answering.await };
    tokio::time::timeout(patience, answering).await.unwrap_or_else(|_| {
        let message = format!("no answer within the {patience:?} you wait; it may be done all the same, retry");
        Ok(Status::from(Refusal::new(Code::DeadlineExceeded, "DEADLINE_EXCEEDED", message)).into_http())
    })
}

/// A message over its limit is refused by the transport, with a code of its own that no handler uses.
fn in_our_words(response: http::Response<Body>) -> http::Response<Body> {
    let refused = Status::from_header_map(response.headers()).filter(|status| status.code() == Code::OutOfRange);
    match refused {
        Some(status) => {
            let refusal = Refusal::new(Code::ResourceExhausted, "MESSAGE_TOO_LARGE", status.message());
            Status::from(refusal).into_http()
        }
        None => response,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grpc::status::reason_of;

    fn status(response: &http::Response<Body>) -> (Code, Option<String>) {
        let status = Status::from_header_map(response.headers()).unwrap();
        (status.code(), reason_of(&status))
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_takes_too_long_is_answered_for_it() {
        let began = tokio::time::Instant::now();
        let ceiling = ceiling_of("/nstance.v1.AgentService/RenewCertificate", CALL);
        let response = within(ceiling, std::future::pending()).await.unwrap();
        assert_eq!(began.elapsed(), CALL);
        assert_eq!(status(&response), (Code::Unavailable, Some("STORE_UNAVAILABLE".to_owned())));
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_nobody_waits_for_is_given_up() {
        let wait = |text: &'static str| {
            patience(&http::HeaderMap::from_iter([("grpc-timeout".parse().unwrap(), text.parse().unwrap())]))
        };
        for (text, wanted) in
            [("1H", 3_600_000), ("2M", 120_000), ("3S", 3000), ("99999999m", 99_999_999), ("5000u", 5), ("7000000n", 7)]
        {
            assert_eq!(wait(text), Some(Duration::from_millis(wanted)), "{text}");
        }
        for nonsense in ["", "S", "5", "-1S", "100000000S", "5x", "\u{e9}"] {
            assert_eq!(wait(nonsense), None, "{nonsense}");
        }
        let began = tokio::time::Instant::now();
        let response = as_long_as_waited_for(wait("3S"), std::future::pending()).await.unwrap();
        assert_eq!((began.elapsed(), status(&response).0), (Duration::from_secs(3), Code::DeadlineExceeded));
    }

    #[test]
    fn a_report_stream_has_no_ceiling() {
        assert_eq!(ceiling_of("/nstance.v1.AgentService/ReportHealth", CALL), None);
    }

    #[test]
    fn a_message_that_is_too_large_is_refused_in_our_words() {
        let of_the_transport = Status::out_of_range("decoded message length too large").into_http();
        let ours = in_our_words(of_the_transport);
        assert_eq!(status(&ours), (Code::ResourceExhausted, Some("MESSAGE_TOO_LARGE".to_owned())));
        let other = in_our_words(Status::from(Refusal::not_found("nobody")).into_http());
        assert_eq!(status(&other), (Code::NotFound, Some("NOT_FOUND".to_owned())));
    }
}
