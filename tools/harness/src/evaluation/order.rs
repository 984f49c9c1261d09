//! Determines the order of the systems in each round. A run affects the next run, for example
//! because the drive is warm or has deferred work. So over all rounds, any two systems run directly
//! one after the other equally often, in both orders.

/// Returns `members` in the order of a round. The orders of successive rounds are the rows of a
/// Williams square. If the number `n` of members is even, any `n` successive rounds are balanced:
/// for any two members `a` and `b`, exactly one round has `b` directly after `a`, and each member
/// takes each position exactly once. If `n` is odd, `2 n` successive rounds are balanced if the
/// number of the first round is a multiple of `n`. Each of these counts is then two. The second half of these rounds
/// repeats the first half in reverse order.
#[must_use]
pub fn turns<T: Clone>(members: &[T], round: usize) -> Vec<T> {
    let n = members.len().max(1);
    // The first row is 0, 1, n - 1, 2, n - 2, …, and each further row adds 1 to all elements,
    // modulo n. If n is even, the differences between neighbours in a row are all different modulo
    // n. So all rows together contain each pair of neighbours once. If n is odd, a row contains
    // half of the differences, each twice, and the reversed row contains the other half.
    let zigzag = |place: usize| if place % 2 == 1 { place.div_ceil(2) } else { n - place / 2 };
    let mut order: Vec<T> =
        (0..members.len()).map(|place| members[(zigzag(place) + round) % n].clone()).collect();
    if n % 2 == 1 && (round / n) % 2 == 1 {
        order.reverse();
    }
    order
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Returns two maps: how often each pair of members occurs directly in succession, and how
    /// often each member takes each position.
    fn counts(n: usize, rounds: std::ops::Range<usize>) -> [BTreeMap<(usize, usize), u32>; 2] {
        let (mut pairs, mut places) = (BTreeMap::new(), BTreeMap::new());
        let members: Vec<usize> = (0..n).collect();
        for round in rounds {
            let order = turns(&members, round);
            order.windows(2).for_each(|w| *pairs.entry((w[0], w[1])).or_default() += 1);
            order.iter().enumerate().for_each(|at| *places.entry((at.0, *at.1)).or_default() += 1);
        }
        [pairs, places]
    }

    #[test]
    fn every_member_directly_follows_every_other_member_equally_often() {
        for n in 1..=9 {
            let (rounds, times) = if n % 2 == 0 { (n, 1) } else { (2 * n, 2) };
            for start in [0, 3 * n] {
                let [pairs, places] = counts(n, start..start + rounds);
                assert_eq!(pairs.len(), n * (n - 1), "{n}");
                assert!(pairs.values().all(|count| *count == times), "{n}: {pairs:?}");
                assert_eq!(places.len(), n * n, "{n}");
                assert!(places.values().all(|count| *count == times), "{n}: {places:?}");
            }
        }
    }

    #[test]
    fn four_successive_rounds_of_four_members_are_balanced_from_any_first_round() {
        for start in 0..8 {
            let [pairs, _] = counts(4, start..start + 4);
            assert!(pairs.len() == 12 && pairs.values().all(|count| *count == 1), "{start}: {pairs:?}");
        }
    }

    #[test]
    fn seven_rounds_of_four_members_are_nearly_balanced() {
        let [pairs, _] = counts(4, 1..8);
        assert_eq!(pairs.len(), 12);
        assert!(pairs.values().all(|count| (1..=2).contains(count)), "{pairs:?}");
    }

    #[test]
    fn no_members_give_an_empty_order_and_one_member_stays_alone() {
        assert!(turns::<u8>(&[], 5).is_empty());
        assert_eq!(turns(&['a'], 5), ['a']);
    }
}
