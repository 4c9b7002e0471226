//! Where the next instance goes: the first choice of its group that is not known to be full.

use std::time::Duration;

use nstance_core::time::Timestamp;

use crate::world::{Figure, Pair, Places, Room};

/// Addresses of a subnet that are left to others.
pub(super) const SPARED: u64 = 10;

/// When to look again at subnets that have too few addresses left.
const SHORT: Duration = Duration::from_secs(15);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Choice {
    Go(Pair),
    /// Every choice is used up; the first may be free again then, and it is this one.
    Wait {
        pair: Option<Pair>,
        until: Timestamp,
        why: String,
    },
}

/// Chooses among `pairs`, best first. A subnet of which nothing is known comes after all others, but it comes: not to
/// know is no reason not to try. `hidden` counts our creates that a subnet's figure does not show.
pub(super) fn choose<'a>(
    pairs: &'a [Pair],
    places: &Places,
    now: Timestamp,
    hidden: impl Fn(&str, Figure) -> u64,
) -> Choice {
    let mut unsure = None;
    let (mut n_penalised, mut n_short) = (0, 0);
    let mut first: Option<(Timestamp, &Pair)> = None;
    let ends = |first: &mut Option<(Timestamp, &'a Pair)>, at: Timestamp, pair: &'a Pair| {
        if first.is_none_or(|(until, _)| at < until) {
            *first = Some((at, pair));
        }
    };
    let (avoided, others): (Vec<&Pair>, Vec<&Pair>) =
        pairs.iter().partition(|pair| places.is_avoided(&pair.subnet, now));
    let n_others = others.len();
    for (n, pair) in others.into_iter().chain(avoided).enumerate() {
        // Where machines are taken back we go last, after what is merely not known.
        if n == n_others && unsure.is_some() {
            break;
        }
        if let Some(end) = places.penalty(pair, now) {
            n_penalised += 1;
            ends(&mut first, end, pair);
            continue;
        }
        match places.room(&pair.subnet, now) {
            Room::Unlimited => return Choice::Go(pair.clone()),
            Room::Known(figure) if SPARED.saturating_add(hidden(&pair.subnet, figure)) < figure.free => {
                return Choice::Go(pair.clone());
            }
            Room::Known(_) => {
                n_short += 1;
                ends(&mut first, now.plus(SHORT), pair);
            }
            Room::Unknown => {
                unsure.get_or_insert(pair);
            }
        }
    }
    match unsure {
        Some(pair) => Choice::Go(pair.clone()),
        None => Choice::Wait {
            pair: first.map(|(_, pair)| pair.clone()),
            until: first.map_or(now.plus(SHORT), |(until, _)| until),
            why: format!(
                "of {} choices of subnet and instance type {n_penalised} had no capacity lately and {n_short} have too \
                 few free addresses",
                pairs.len()
            ),
        },
    }
}

#[cfg(test)]
mod tests {
    use nstance_core::ports::provider::SubnetFree;

    use super::*;

    const T0: Timestamp = Timestamp::EPOCH;

    fn pair(subnet: &str, instance_type: &str) -> Pair {
        Pair { subnet: subnet.to_owned(), instance_type: Some(instance_type.to_owned()) }
    }

    fn pairs() -> Vec<Pair> {
        vec![pair("a", "big"), pair("a", "small"), pair("b", "big"), pair("b", "small")]
    }

    fn at(seconds: u64) -> Timestamp {
        T0.plus(Duration::from_secs(seconds))
    }

    fn chosen(places: &Places, now: Timestamp) -> Option<Pair> {
        match choose(&pairs(), places, now, |_, _| 0) {
            Choice::Go(pair) => Some(pair),
            Choice::Wait { .. } => None,
        }
    }

    #[test]
    fn the_first_choice_is_taken_while_nothing_speaks_against_it() {
        assert_eq!(chosen(&Places::default(), T0), Some(pair("a", "big")));
    }

    #[test]
    fn a_penalised_choice_is_passed_over_for_three_minutes() {
        let mut places = Places::default();
        places.penalise(pair("a", "big"), T0);
        assert_eq!(chosen(&places, at(179)), Some(pair("a", "small")));
        assert_eq!(chosen(&places, at(180)), Some(pair("a", "big")));
    }

    #[test]
    fn a_pardoned_choice_is_taken_again() {
        let mut places = Places::default();
        places.penalise(pair("a", "big"), T0);
        places.pardon(&pair("a", "big"));
        assert_eq!(chosen(&places, T0), Some(pair("a", "big")));
    }

    #[test]
    fn when_all_failed_it_waits_for_the_first_penalty_to_end() {
        let mut places = Places::default();
        for (n, pair) in pairs().into_iter().enumerate() {
            places.penalise(pair, at(n as u64));
        }
        let choice = choose(&pairs(), &places, at(4), |_, _| 0);
        assert!(matches!(choice, Choice::Wait { until, .. } if until == at(180)), "{choice:?}");
        places.shorten(&pairs(), at(19));
        assert_eq!(chosen(&places, at(18)), None);
        assert_eq!(chosen(&places, at(19)), Some(pair("a", "big")));
    }

    #[test]
    fn a_subnet_with_too_few_addresses_is_left_out() {
        let mut places = Places::default();
        places.learn("a", SubnetFree::Free(12), T0);
        places.learn("b", SubnetFree::Unlimited, T0);
        let with = |n_hidden| choose(&pairs(), &places, T0, |_, _| n_hidden);
        assert_eq!(with(1), Choice::Go(pair("a", "big")));
        assert_eq!(with(2), Choice::Go(pair("b", "big")));
    }

    #[test]
    fn an_unknown_subnet_comes_last_but_comes() {
        let mut places = Places::default();
        places.learn("b", SubnetFree::Free(100), T0);
        assert_eq!(chosen(&places, T0), Some(pair("b", "big")));
        places.learn("b", SubnetFree::Free(3), T0);
        assert_eq!(chosen(&places, T0), Some(pair("a", "big")));
    }

    #[test]
    fn a_subnet_whose_machines_are_taken_back_goes_last_for_half_an_hour() {
        let mut places = Places::default();
        for n in [0, 1] {
            places.taken(pair("a", "big"), at(n));
        }
        places.taken(pair("a", "small"), at(2));
        assert_eq!(chosen(&places, at(2)), Some(pair("a", "big")), "three, but not of one choice");
        places.taken(pair("a", "big"), at(601));
        assert_eq!(chosen(&places, at(601)), Some(pair("a", "big")), "the first is too long ago");
        places.taken(pair("a", "big"), at(601));
        assert_eq!(chosen(&places, at(601)), Some(pair("b", "big")));
        for instance_type in ["big", "small"] {
            places.penalise(pair("b", instance_type), at(700));
        }
        assert_eq!(chosen(&places, at(700)), Some(pair("a", "big")), "last, but not left out");
        assert_eq!(chosen(&places, at(601 + 1799)), Some(pair("b", "big")));
        assert_eq!(chosen(&places, at(601 + 1800)), Some(pair("a", "big")));
    }

    #[test]
    fn what_is_not_known_goes_before_where_machines_are_taken_back() {
        let mut places = Places::default();
        for _ in 0..3 {
            places.taken(pair("a", "big"), T0);
        }
        places.learn("a", SubnetFree::Unlimited, T0);
        assert_eq!(chosen(&places, T0), Some(pair("b", "big")));
    }

    #[test]
    fn an_old_figure_is_not_believed() {
        let mut places = Places::default();
        places.learn("a", SubnetFree::Free(0), T0);
        places.learn("b", SubnetFree::Free(0), T0);
        assert_eq!(chosen(&places, at(29)), None);
        assert_eq!(chosen(&places, at(30)), Some(pair("a", "big")));
    }
}
