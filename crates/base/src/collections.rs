//! Hash maps and sets whose order of iteration a simulation can repeat.
//!
//! The maps hash with SipHash 1-3 under random keys, as the maps of the standard library do, so a
//! client cannot choose names that collide. The keys come from [`entropy`](crate::entropy). In a
//! simulation, the order of iteration is therefore a function of the seed.

use std::hash::BuildHasher;

use siphasher::sip::SipHasher13;

use crate::entropy::random;

/// A hash map with repeatable order.
#[expect(clippy::disallowed_types, reason = "this is the only use of the standard library's map")]
pub type HashMap<K, V> = std::collections::HashMap<K, V, RandomKeys>;

/// A hash set with repeatable order.
#[expect(clippy::disallowed_types, reason = "this is the only use of the standard library's set")]
pub type HashSet<T> = std::collections::HashSet<T, RandomKeys>;

/// The keys of one map's hash function.
#[derive(Debug, Clone)]
pub struct RandomKeys(u64, u64);

impl Default for RandomKeys {
    fn default() -> RandomKeys {
        RandomKeys(random(), random())
    }
}

impl BuildHasher for RandomKeys {
    type Hasher = SipHasher13;

    fn build_hasher(&self) -> SipHasher13 {
        SipHasher13::new_with_keys(self.0, self.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_a_map_is_a_function_of_the_seed() {
        let order = |seed| {
            let _seeded = crate::entropy::seed_this_thread(seed);
            let set: HashSet<u32> = (0..100).collect();
            set.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
    }
}
