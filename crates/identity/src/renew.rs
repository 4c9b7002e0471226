//! When a certificate is renewed: with a third of its life left, a little earlier by chance, so that a fleet born in one
//! minute does not renew in one minute.

use std::time::Duration;

use nstance_core::{
    ports::clock::{Entropy, random},
    time::Timestamp,
};

use crate::issue::BACKDATING;

/// The life a certificate has from its issue on. Backdating is no life: it would make a short-lived certificate due
/// the moment it is made.
fn life(not_before: Timestamp, not_after: Timestamp) -> Duration {
    not_after.since(not_before.plus(BACKDATING))
}

/// When a third of the life is left: the `renew_after` of answers.
pub fn renew_after(not_before: Timestamp, not_after: Timestamp) -> Timestamp {
    not_after.minus(life(not_before, not_after) / 3)
}

/// When to renew: `told` by the issuer, else [`renew_after`], minus up to a tenth of the life.
pub fn renew_at(
    told: Option<Timestamp>,
    not_before: Timestamp,
    not_after: Timestamp,
    entropy: &dyn Entropy,
) -> Timestamp {
    let due = told.unwrap_or_else(|| renew_after(not_before, not_after)).min(not_after);
    let share = f64::from(u32::from_be_bytes(random(entropy))) / f64::from(u32::MAX);
    due.minus((life(not_before, not_after) / 10).mul_f64(share))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{DAY, Dice, NOW};

    #[test]
    fn renewal_begins_with_a_third_of_life_left_and_spreads() {
        let (from, until) = (NOW.minus(BACKDATING), NOW.plus(DAY));
        assert_eq!(renew_after(from, until), NOW.plus(DAY * 2 / 3));
        let dice = Dice::new(1);
        let times: Vec<_> = (0..1000).map(|_| renew_at(None, from, until, &dice)).collect();
        let (earliest, latest) = (*times.iter().min().unwrap(), *times.iter().max().unwrap());
        assert!(NOW.plus(DAY * 2 / 3 - DAY / 10) <= earliest && latest <= NOW.plus(DAY * 2 / 3));
        assert!(DAY / 11 < latest.since(earliest));
    }

    #[test]
    fn told_time_is_obeyed_but_never_after_the_end() {
        let (from, until) = (NOW.minus(BACKDATING), NOW.plus(DAY));
        let told = NOW.plus(DAY / 2);
        let at = renew_at(Some(told), from, until, &Dice::new(1));
        assert!(told.minus(DAY / 10) <= at && at <= told);
        assert!(renew_at(Some(until.plus(DAY)), from, until, &Dice::new(1)) <= until);
    }

    #[test]
    fn certificate_of_seconds_is_not_due_at_once() {
        let (from, until) = (NOW.minus(BACKDATING), NOW.plus(Duration::from_secs(6)));
        assert_eq!(renew_after(from, until), NOW.plus(Duration::from_secs(4)));
    }
}
