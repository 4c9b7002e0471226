//! `If-Match` and `If-None-Match`, as S3 reads them.

use std::time::SystemTime;

use s3s::{
    S3Result,
    dto::{ETagCondition, Timestamp},
    s3_error,
};

/// Why an operation is not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// `If-Match` on a key that does not exist: S3 answers 404 rather than 412.
    Missing,
    Precondition,
    NotModified,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Conditions {
    if_match: Option<Tags>,
    if_none_match: Option<Tags>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Tags {
    Any,
    OneOf(Vec<String>),
}

impl Tags {
    fn of(condition: ETagCondition) -> Tags {
        match condition {
            ETagCondition::Any => Tags::Any,
            // A list arrives as one value with the inner quotes left in. A weak tag equals nothing we hand out.
            ETagCondition::ETag(tag) => Tags::OneOf(match tag.as_strong() {
                Some(tags) => tags.split(',').map(|tag| tag.trim().trim_matches('"').to_owned()).collect(),
                None => Vec::new(),
            }),
        }
    }

    fn contain(&self, etag: &str) -> bool {
        match self {
            Tags::Any => true,
            Tags::OneOf(tags) => tags.iter().any(|tag| tag == etag),
        }
    }
}

impl Conditions {
    pub(super) fn read(if_match: Option<ETagCondition>, if_none_match: Option<ETagCondition>) -> Conditions {
        Conditions { if_match: if_match.map(Tags::of), if_none_match: if_none_match.map(Tags::of) }
    }

    /// Like `read`, but S3 knows only `*` for `If-None-Match` on writes.
    pub(super) fn write(if_match: Option<ETagCondition>, if_none_match: Option<ETagCondition>) -> S3Result<Conditions> {
        match if_none_match {
            Some(ETagCondition::ETag(_)) => {
                Err(s3_error!(NotImplemented, "If-None-Match of a write accepts only the value *"))
            }
            if_none_match => Ok(Conditions::read(if_match, if_none_match)),
        }
    }

    pub(super) fn check_write(&self, current: Option<&str>) -> Result<(), Refusal> {
        match (&self.if_match, current) {
            (Some(_), None) => return Err(Refusal::Missing),
            (Some(tags), Some(etag)) if !tags.contain(etag) => return Err(Refusal::Precondition),
            _ => (),
        }
        match (&self.if_none_match, current) {
            (Some(tags), Some(etag)) if tags.contain(etag) => Err(Refusal::Precondition),
            _ => Ok(()),
        }
    }

    pub(super) fn check_read(&self, etag: &str) -> Result<(), Refusal> {
        if self.if_match.as_ref().is_some_and(|tags| !tags.contain(etag)) {
            return Err(Refusal::Precondition);
        }
        if self.if_none_match.as_ref().is_some_and(|tags| tags.contain(etag)) {
            return Err(Refusal::NotModified);
        }
        Ok(())
    }

    /// `If-Unmodified-Since` and `If-Modified-Since`, each of which counts only where no ETag was given.
    pub(super) fn check_dates(
        &self,
        modified: SystemTime,
        since: Option<Timestamp>,
        not_since: Option<Timestamp>,
    ) -> Result<(), Refusal> {
        let modified = whole_seconds(modified);
        if self.if_match.is_none() && not_since.is_some_and(|limit| limit < modified) {
            return Err(Refusal::Precondition);
        }
        if self.if_none_match.is_none() && since.is_some_and(|limit| modified <= limit) {
            return Err(Refusal::NotModified);
        }
        Ok(())
    }
}

/// HTTP dates know no fractions, so a client can only send back what is left of ours.
fn whole_seconds(time: SystemTime) -> Timestamp {
    let seconds = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    (SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds)).into()
}
