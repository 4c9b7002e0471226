//! Files that failed and have not been sent anew. As long as there is one, the hash that says "all applied" would lie,
//! whatever else a batch brings.

use std::collections::BTreeMap;

/// More than a batch has files. What does not fit fails its own batch all the same.
const MAX_KEPT: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct Failures {
    n_streams: u64,
    open: BTreeMap<String, Failure>,
}

#[derive(Debug)]
struct Failure {
    /// What the batch wanted to be called.
    hash: String,
    stream: u64,
}

impl Failures {
    pub(crate) fn next_stream(&mut self) -> u64 {
        self.n_streams += 1;
        self.n_streams
    }

    pub(crate) fn keep(&mut self, name: &str, hash: &str, stream: u64) {
        if self.open.len() < MAX_KEPT || self.open.contains_key(name) {
            self.open.insert(name.to_owned(), Failure { hash: hash.to_owned(), stream });
        }
    }

    /// It was sent anew and is in its place, or is wanted no longer.
    pub(crate) fn forget(&mut self, name: &str) {
        self.open.remove(name);
    }

    /// How many failures keep this hash from being written.
    ///
    /// A server on a later stream has our reports, which name every failure, so a batch of *another* hash holds each
    /// failed file that is still wanted. Without that way out, a file that left the configuration while servers changed
    /// would hold back every hash for ever.
    pub(crate) fn held_back(&mut self, hash: &str, stream: u64) -> usize {
        self.open.retain(|_, failure| failure.hash == hash || failure.stream == stream);
        self.open.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_holds_back_its_hash_for_ever_and_others_on_its_stream() {
        let mut failures = Failures::default();
        let first = failures.next_stream();
        failures.keep("a", "h1", first);
        assert_eq!(failures.held_back("h1", first), 1);
        assert_eq!(failures.held_back("h2", first), 1);
        let second = failures.next_stream();
        assert_eq!(failures.held_back("h1", second), 1);
        assert_eq!(failures.held_back("h2", second), 0);
        failures.keep("a", "h2", second);
        failures.forget("a");
        assert_eq!(failures.held_back("h2", second), 0);
    }

    #[test]
    fn memory_of_failures_is_bounded() {
        let mut failures = Failures::default();
        for n in 0..2 * MAX_KEPT {
            failures.keep(&n.to_string(), "h", 1);
        }
        assert_eq!(failures.open.len(), MAX_KEPT);
    }
}
