//! Replicas over shards: how many of a total each shard shall have.

/// What a shard has, and how many of its instances are named to go first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Part {
    pub size: u32,
    pub n_hints: u32,
}

/// Where nothing is known of before, or the shards are others than before: evenly, the first ones get one more.
pub fn even(total: u32, n_shards: usize) -> Vec<u32> {
    let n = u32::try_from(n_shards).unwrap_or(u32::MAX).max(1);
    (0..n_shards).map(|at| total / n + u32::from(at < (total % n) as usize)).collect()
}

/// From the sizes there are to a new total, in the order of the shards. Grows the smallest and shrinks the largest, one
/// at a time; a shard whose instances are named shrinks first. Never raises one shard while it lowers another.
pub fn distribute(total: u32, parts: &[Part]) -> Vec<u32> {
    let mut parts = parts.to_vec();
    let mut sum: u64 = parts.iter().map(|it| u64::from(it.size)).sum();
    while sum < u64::from(total) {
        let Some(part) = parts.iter_mut().min_by_key(|it| it.size) else { break };
        part.size += 1;
        sum += 1;
    }
    while u64::from(total) < sum {
        let hinted = parts.iter().enumerate().filter(|(_, it)| 0 < it.n_hints && 0 < it.size);
        // Of equals the last one, which is what `max_by_key` takes.
        let named = hinted.max_by_key(|(_, it)| it.size).map(|(at, _)| at);
        let largest = || parts.iter().enumerate().max_by_key(|(_, it)| it.size).map(|(at, _)| at);
        let Some(at) = named.or_else(largest) else { break };
        parts[at].size -= 1;
        parts[at].n_hints = parts[at].n_hints.saturating_sub(1);
        sum -= 1;
    }
    parts.into_iter().map(|it| it.size).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parts(sizes: &[u32]) -> Vec<Part> {
        sizes.iter().map(|size| Part { size: *size, n_hints: 0 }).collect()
    }

    #[test]
    fn named_machines_go_where_they_are_and_ties_go_by_order() {
        assert_eq!(even(7, 3), [3, 2, 2]);
        assert_eq!(distribute(7, &parts(&[2, 2, 2])), [3, 2, 2]);
        assert_eq!(distribute(5, &parts(&[2, 2, 2])), [2, 2, 1]);
        assert_eq!(distribute(5, &[Part { size: 2, n_hints: 1 }, Part { size: 3, n_hints: 0 }]), [2, 3]);
        assert_eq!(distribute(4, &[Part { size: 2, n_hints: 1 }, Part { size: 3, n_hints: 0 }]), [1, 3]);
        assert_eq!(distribute(6, &parts(&[5, 0])), [5, 1], "nothing moves just to look even");
        assert_eq!(distribute(3, &[]), [0_u32; 0]);
    }

    proptest! {
        #[test]
        fn sum_is_exact_and_nobody_is_raised_while_another_is_lowered(
            total in 0_u32..60,
            before in prop::collection::vec((0_u32..12, 0_u32..3), 1..6),
        ) {
            let parts: Vec<Part> = before.iter().map(|(size, n_hints)| Part { size: *size, n_hints: *n_hints }).collect();
            let after = distribute(total, &parts);
            prop_assert_eq!(after.iter().sum::<u32>(), total);
            let raised = parts.iter().zip(&after).any(|(part, size)| part.size < *size);
            let lowered = parts.iter().zip(&after).any(|(part, size)| *size < part.size);
            prop_assert!(!(raised && lowered));
        }

        #[test]
        fn without_hints_an_even_state_stays_even(total in 0_u32..60, from in 0_u32..60, n in 1_usize..7) {
            let after = distribute(total, &parts(&even(from, n)));
            prop_assert!(after.iter().max().unwrap() - after.iter().min().unwrap() <= 1);
            prop_assert_eq!(after, even(total, n));
        }
    }
}
