//! Times as Kubernetes writes them.

use nstance_core::time::Timestamp;

fn jiff(at: Timestamp) -> jiff::Timestamp {
    jiff::Timestamp::from_millisecond(at.as_millis()).unwrap_or(jiff::Timestamp::UNIX_EPOCH)
}

/// `metav1.Time`: whole seconds, as the server gives them back.
pub(crate) fn seconds(at: Timestamp) -> String {
    format!("{:.0}", jiff(at))
}

/// `metav1.MicroTime`: six decimals, which a Lease needs.
pub(crate) fn micros(at: Timestamp) -> String {
    format!("{:.6}", jiff(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_the_digits_that_kubernetes_wants() {
        let at = Timestamp::from_millis(1_700_000_000_987);
        assert_eq!(seconds(at), "2023-11-14T22:13:20Z");
        assert_eq!(micros(at), "2023-11-14T22:13:20.987000Z");
    }
}
