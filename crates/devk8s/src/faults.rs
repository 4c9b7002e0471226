//! Faults that tests switch on: refusals, black holes, late watches.

use std::time::Duration;

use http::StatusCode;
use tokio::sync::watch;

use crate::{error::ApiError, resources::Resource};

/// Something that goes wrong until it is taken back. A caller is named as in its bearer token (the `sub` of a JWT, or
/// the token itself), else by its User-Agent up to the first blank; `*` in a name stands for any text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// Requests of these callers are answered with 503, and their running watches end at their next event.
    Refuse { callers: String },
    /// Requests of these callers are never answered, and their running watches send nothing.
    BlackHole { callers: String },
    /// Requests of these callers for this resource, named like `nodes`, are answered with 403.
    Forbid { callers: String, resource: String },
    /// Watches of this resource, named like `machines`, send each event this long after it happened.
    DelayWatch { resource: String, by: Duration },
}

/// The faults of one server.
#[derive(Clone)]
pub(crate) struct Faults(watch::Sender<Vec<Fault>>);

impl Faults {
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(Vec::new()))
    }

    pub(crate) fn set(&self, faults: Vec<Fault>) {
        self.0.send_replace(faults);
    }

    /// Waits as long as the caller is in a black hole; refuses it if it is to be refused.
    pub(crate) async fn pass(&self, caller: &str) -> Result<(), ApiError> {
        let mut faults = self.0.subscribe();
        let is_in = |faults: &Vec<Fault>| {
            faults.iter().any(|it| matches!(it, Fault::BlackHole { callers } if matches_glob(callers, caller)))
        };
        // The sender lives as long as the server; when it is gone nothing is refused any more.
        let refused = match faults.wait_for(|faults| !is_in(faults)).await {
            Ok(faults) => {
                faults.iter().any(|it| matches!(it, Fault::Refuse { callers } if matches_glob(callers, caller)))
            }
            Err(_) => false,
        };
        if refused {
            let message = "the server is currently unable to handle the request";
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable", message));
        }
        Ok(())
    }

    /// Refuses a caller what is forbidden to it.
    pub(crate) fn permit(&self, caller: &str, resource: &Resource) -> Result<(), ApiError> {
        let forbidden = self.0.borrow().iter().any(|it| match it {
            Fault::Forbid { callers, resource: name } => {
                (*name == resource.plural || *name == resource.id) && matches_glob(callers, caller)
            }
            _ => false,
        });
        if !forbidden {
            return Ok(());
        }
        let why =
            format!("User {caller:?} cannot access resource {:?} in API group {:?}", resource.plural, resource.group);
        Err(ApiError::forbidden(resource, "", &why))
    }

    pub(crate) fn watch_delay(&self, resource: &Resource) -> Option<Duration> {
        self.0.borrow().iter().find_map(|it| match it {
            Fault::DelayWatch { resource: name, by } if *name == resource.plural || *name == resource.id => Some(*by),
            _ => None,
        })
    }
}

/// `*` stands for any text, also none.
fn matches_glob(glob: &str, text: &str) -> bool {
    let Some((head, rest)) = glob.split_once('*') else { return glob == text };
    let Some(text) = text.strip_prefix(head) else { return false };
    if rest.is_empty() {
        return true;
    }
    (0..=text.len()).filter(|at| text.is_char_boundary(*at)).any(|at| matches_glob(rest, &text[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_callers() {
        for (glob, text, matches) in [
            ("operator", "operator", true),
            ("operator", "operator2", false),
            ("system:*:standin", "system:serviceaccount:default:standin", true),
            ("*", "", true),
            ("a*b*c", "a1b2c", true),
            ("a*b", "ac", false),
        ] {
            assert_eq!(matches_glob(glob, text), matches, "{glob} {text}");
        }
    }
}
