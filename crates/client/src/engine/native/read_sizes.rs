//! [`ReadSizes`]: how large the objects of a pool are likely to be.
//!
//! A client that reads a whole object does not know the object's size in advance. It offers memory
//! for the largest size. With one-sided transfers, the network device must register the memory that
//! it writes to, and registration takes time in proportion to the memory. So the client exposes only
//! as much of the offered memory as the read is likely to fill. The node sends further data in
//! messages.

use base::collections::HashMap;
use bytes::Bytes;

/// Assumed size of objects of a pool that were not read yet, in bytes.
const UNKNOWN: u64 = 1 << 20;
/// Number of objects after which older objects are forgotten. The estimate is the largest size among
/// the last objects, at least this many and at most twice as many.
const RECENT: u32 = 32;
/// Maximum number of pools whose sizes are remembered.
const POOLS: usize = 64;

/// The sizes of objects that were read recently, by pool.
#[derive(Debug, Default)]
pub(crate) struct ReadSizes(HashMap<Bytes, RecentSizes>);

/// The largest sizes of the objects of one pool, in bytes.
#[derive(Debug, Default)]
struct RecentSizes {
    current: u64,
    before: u64,
    /// Number of objects that `current` covers.
    count: u32,
}

impl ReadSizes {
    /// The likely maximum size of an object of this pool, in bytes.
    pub(crate) fn likely(&self, pool: &[u8]) -> u64 {
        self.0.get(pool).map_or(UNKNOWN, |sizes| sizes.current.max(sizes.before))
    }

    /// Records the size of an object that was read.
    pub(crate) fn learn(&mut self, pool: &Bytes, size: u64) {
        if self.0.len() >= POOLS && !self.0.contains_key(pool) {
            self.0.clear();
        }
        let sizes = self.0.entry(pool.clone()).or_default();
        if sizes.count == RECENT {
            *sizes = RecentSizes { before: sizes.current, ..RecentSizes::default() };
        }
        sizes.current = sizes.current.max(size);
        sizes.count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_follows_the_largest_recent_object_of_the_pool() {
        let (mut sizes, pool) = (ReadSizes::default(), Bytes::from_static(b"p"));
        assert_eq!(sizes.likely(&pool), UNKNOWN);
        sizes.learn(&pool, 100);
        assert_eq!((sizes.likely(&pool), sizes.likely(b"other")), (100, UNKNOWN));
        sizes.learn(&pool, 5000);
        for _ in 0..RECENT {
            assert_eq!(sizes.likely(&pool), 5000);
            sizes.learn(&pool, 100);
        }
        (0..RECENT).for_each(|_| sizes.learn(&pool, 100));
        assert_eq!(sizes.likely(&pool), 100, "large objects are forgotten");
    }

    #[test]
    fn the_number_of_remembered_pools_is_limited() {
        let mut sizes = ReadSizes::default();
        for number in 0..1000 {
            sizes.learn(&Bytes::from(format!("pool {number}")), 7);
        }
        assert!(sizes.0.len() <= POOLS && sizes.likely(b"pool 999") == 7);
    }
}
