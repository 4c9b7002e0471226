//! What every operation passes before it is carried out: the counting, the demand for a signature, the faults.
//!
//! It sits in the protocol library's access check, the one place that knows the operation's name and runs before
//! the operation does. The check is only made where an authentication is configured, so one always is.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use async_trait::async_trait;
use hyper::StatusCode;
use s3s::{
    S3Error, S3ErrorCode, S3Result,
    access::{S3Access, S3AccessContext},
    auth::{S3Auth, SecretKey},
    s3_error,
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    caller,
    disk::Listed,
    faults::{Faults, Instead},
    stats::Counts,
};

/// The one secret of the development environment, of all access keys.
const SECRET: &str = "dev";

/// Answers for any access key. Only asked for signatures that are to be verified.
pub(super) struct AnyKey;

#[async_trait]
impl S3Auth for AnyKey {
    async fn get_secret_key(&self, _access_key: &str) -> S3Result<SecretKey> {
        Ok(SecretKey::from(SECRET))
    }
}

/// Goes with a request through the protocol library, and tells the connection what to do with the answer.
#[derive(Clone, Default)]
pub(super) struct Ticket {
    pub(super) access_key: Arc<str>,
    drop: Arc<AtomicBool>,
}

impl Ticket {
    pub(super) fn new(access_key: &str) -> Ticket {
        Ticket { access_key: access_key.into(), drop: Arc::default() }
    }

    /// The connection is to be closed without an answer.
    pub(super) fn is_dropped(&self) -> bool {
        self.drop.load(Ordering::Relaxed)
    }

    fn set_dropped(&self) {
        self.drop.store(true, Ordering::Relaxed);
    }
}

/// What the operation itself has to know of the faults.
#[derive(Clone, Default)]
pub(super) struct Effects {
    pub(super) ignore_conditions: bool,
    pub(super) stale: Option<Arc<Vec<Listed>>>,
}

pub(super) struct Gate {
    pub(super) require_auth: bool,
    pub(super) faults: Arc<Faults>,
    pub(super) counts: Arc<Counts>,
    pub(super) stop: CancellationToken,
}

#[async_trait]
impl S3Access for Gate {
    async fn check(&self, cx: &mut S3AccessContext<'_>) -> S3Result<()> {
        let ticket = cx.extensions_mut().get::<Ticket>().cloned().unwrap_or_default();
        let operation = cx.s3_op().name();
        self.counts.request(&ticket.access_key, operation);
        if self.require_auth && cx.credentials().is_none() {
            return Err(s3_error!(AccessDenied, "a signature is required"));
        }
        let key = match cx.s3_path().get_object_key() {
            Some(key) => key.to_owned(),
            None => caller::query(cx.uri(), "prefix").unwrap_or_default(),
        };
        let plan = self.faults.plan(&ticket.access_key, operation, &key, Instant::now());
        self.counts.faults(plan.n_rules);
        if !plan.latency.is_zero() {
            tokio::time::sleep(plan.latency).await;
        }
        match plan.instead {
            None => (),
            Some(Instead::Fail { status, code }) => return Err(failure(status, &code)),
            Some(Instead::Drop) => {
                ticket.set_dropped();
                return Err(s3_error!(InternalError, "dropped by a fault rule"));
            }
            Some(Instead::BlackHole(rule)) => {
                tokio::select! {
                    biased;
                    () = self.stop.cancelled() => (),
                    () = self.faults.gone(&rule) => (),
                }
                ticket.set_dropped();
                return Err(s3_error!(InternalError, "swallowed by a fault rule"));
            }
        }
        if plan.drop_after {
            ticket.set_dropped();
        }
        cx.extensions_mut().insert(Effects { ignore_conditions: plan.ignore_conditions, stale: plan.stale });
        Ok(())
    }
}

fn failure(status: u16, code: &str) -> S3Error {
    let code = S3ErrorCode::from_bytes(code.as_bytes()).unwrap_or(S3ErrorCode::InternalError);
    let mut failure = S3Error::with_message(code, "asked for by a fault rule");
    failure.set_status_code(StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR));
    failure
}
