//! Whose turn it is: how many Nodes may be emptied at once, and in which order.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It has pods to evict and waits for its turn.
    Waiting,
    /// Its pods are on their way.
    Active,
    /// It goes on, but waits for something that others need not wait for: a disruption budget, volumes, hooks, the shard.
    Blocked,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub standing: Standing,
    pub deadline: Option<Timestamp>,
}

/// The waiting drains whose turn it is now, earliest deadline first. Blocked ones do not count.
pub fn next_turns(places: &BTreeMap<String, Place>, limit: usize) -> Vec<String> {
    let n_active = places.values().filter(|it| it.standing == Standing::Active).count();
    let mut waiting: Vec<(Timestamp, &String)> = places
        .iter()
        .filter(|(_, it)| it.standing == Standing::Waiting)
        .map(|(id, it)| (it.deadline.unwrap_or(Timestamp::MAX), id))
        .collect();
    waiting.sort();
    let n_free = limit.max(1).saturating_sub(n_active);
    waiting.into_iter().take(n_free).map(|(_, id)| id.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(standing: Standing, deadline: i64) -> Place {
        Place { standing, deadline: Timestamp::from_second(deadline).ok() }
    }

    #[test]
    fn the_earliest_deadline_comes_first_and_blocked_drains_do_not_count() {
        let mut places = BTreeMap::from([
            ("a".to_owned(), place(Standing::Active, 9)),
            ("b".to_owned(), place(Standing::Waiting, 50)),
            ("c".to_owned(), place(Standing::Waiting, 10)),
            ("d".to_owned(), place(Standing::Blocked, 1)),
            ("e".to_owned(), Place { standing: Standing::Waiting, deadline: None }),
        ]);
        assert_eq!(next_turns(&places, 1), Vec::<String>::new());
        assert_eq!(next_turns(&places, 2), ["c"]);
        assert_eq!(next_turns(&places, 9), ["c", "b", "e"]);
        places.insert("a".to_owned(), place(Standing::Blocked, 9));
        assert_eq!(next_turns(&places, 0), ["c"]);
    }
}
