//! A filter that tells which objects the index may contain. The filter saves a read of the drive
//! when a new object is created.
//!
//! The filter is a Bloom filter of the keys of onodes, in memory. After a mount, a background scan
//! of the index, which consists of many reads, fills the filter. Keys that are put into the index
//! during the scan are added to the filter, too. Until the scan ends, the filter reports every
//! object as possibly present. Keys of removed objects stay in the filter. When the filter is too
//! full to be useful, the store builds a larger filter.

use bytes::Bytes;
use fastbloom::BloomFilter;

use super::index::EntryBatch;
use super::need::Need;
use super::records::key;

/// Number of keys that one read of a scan returns. The target's thread needs about 1 to 2 µs for each
/// key, in which no call can run.
const PIECE: usize = 128;
/// Minimum and maximum number of keys for which a filter is sized. The largest filter takes 40 MB.
const CAPACITY: std::ops::RangeInclusive<u64> = 1 << 16..=1 << 25;
/// Estimate of the minimum number of index bytes per object, for the size of the first filter.
const INDEX_BYTES_PER_OBJECT: u64 = 256;
/// Share of false positives when the filter has as many keys as it was sized for.
const FALSE_POSITIVES: f64 = 0.01;

/// Tells which objects the index may contain.
pub(crate) struct Presence {
    /// The filter that has all keys of onodes; `None` before the first scan has ended.
    complete: Option<Filter>,
    /// The filter that the current scan fills; `None` if no scan is in progress.
    growing: Option<Filter>,
}

struct Filter {
    bits: BloomFilter,
    capacity: u64,
    keys: u64,
}

impl std::fmt::Debug for Presence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Presence").field("complete", &self.complete.is_some()).finish_non_exhaustive()
    }
}

impl Filter {
    fn new(keys: u64) -> Filter {
        let capacity = keys.clamp(*CAPACITY.start(), *CAPACITY.end());
        let seed = base::entropy::random();
        let bits = BloomFilter::with_false_pos(FALSE_POSITIVES).seed(&seed).expected_items(capacity as usize);
        Filter { bits, capacity, keys: 0 }
    }

    fn insert(&mut self, key: &[u8]) {
        self.keys += u64::from(!self.bits.insert(key));
    }
}

impl Presence {
    /// Creates a filter without keys, for an index with `used` bytes in use.
    pub(crate) fn new(used: u64) -> Presence {
        Presence { complete: None, growing: Some(Filter::new(2 * used / INDEX_BYTES_PER_OBJECT)) }
    }

    /// Returns the first read of a scan.
    pub(crate) fn first_piece() -> Need {
        let (from, to) = key::kind_range(key::ONODE);
        Need::Range { from, to, limit: PIECE }
    }

    /// Records that the key of an onode is put into the index.
    pub(crate) fn insert(&mut self, key: &[u8]) {
        for filter in self.complete.iter_mut().chain(&mut self.growing) {
            filter.insert(key);
        }
    }

    /// Whether the index may contain the onode with this key. If this method returns `false`, the
    /// index does not contain it.
    pub(crate) fn may_have(&self, key: &[u8]) -> bool {
        self.complete.as_ref().is_none_or(|filter| filter.bits.contains(key))
    }

    /// Adds the keys that one read of the scan found. Returns the next read, or `None` if the scan
    /// has ended.
    pub(crate) fn scanned(&mut self, found: &EntryBatch) -> Option<Need> {
        let growing = self.growing.as_mut()?;
        found.entries.iter().for_each(|(key, _)| growing.insert(key));
        match &found.resume {
            Some(from) => {
                let to = key::kind_range(key::ONODE).1;
                Some(Need::Range { from: from.clone(), to, limit: PIECE })
            }
            None => {
                self.complete = self.growing.take();
                None
            }
        }
    }

    /// Starts a larger filter if the current filter is too full. If this method returns `true`, the
    /// caller must begin a scan.
    pub(crate) fn outgrown(&mut self) -> bool {
        let Some(full) = self.complete.as_ref().filter(|f| f.keys > f.capacity) else { return false };
        if self.growing.is_some() || full.capacity >= *CAPACITY.end() {
            return false;
        }
        self.growing = Some(Filter::new(2 * full.keys));
        true
    }

    /// Discards the filter of a scan that has failed.
    pub(crate) fn scan_failed(&mut self) {
        self.growing = None;
    }
}

/// Whether a key is the key of an onode.
pub(crate) fn is_onode(key: &Bytes) -> bool {
    key.first() == Some(&key::ONODE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn onode(n: u32) -> Bytes {
        key::onode(7, &n.to_be_bytes())
    }

    fn piece(keys: impl Iterator<Item = u32>, resume: Option<u32>) -> EntryBatch {
        EntryBatch { entries: keys.map(|n| (onode(n), Bytes::new())).collect(), resume: resume.map(onode) }
    }

    #[test]
    fn the_filter_reports_every_object_as_possibly_present_until_the_scan_ends() {
        let mut presence = Presence::new(0);
        assert!(presence.may_have(&onode(1)));
        let next = presence.scanned(&piece(0..10, Some(10)));
        assert!(matches!(next, Some(Need::Range { from, .. }) if from == onode(10)));
        presence.insert(&onode(1000));
        assert!(presence.may_have(&onode(77)));
        assert!(presence.scanned(&piece(10..20, None)).is_none());
        assert!((0..20).chain([1000]).all(|n| presence.may_have(&onode(n))));
        let wrong = (2000..12_000).filter(|n| presence.may_have(&onode(*n))).count();
        assert!(wrong < 100, "{wrong} of 10 000 absent keys are reported as possibly present");
    }

    #[test]
    fn a_filter_that_is_too_full_stays_in_use_until_a_larger_filter_is_complete() {
        let mut presence = Presence::new(0);
        presence.scanned(&piece(0..0, None));
        let mut n = 0;
        while !presence.outgrown() {
            presence.insert(&onode(n));
            n += 1;
        }
        assert!(!presence.outgrown(), "only one larger filter is built at a time");
        presence.insert(&onode(n));
        assert!((0..=n).all(|n| presence.may_have(&onode(n))));
        presence.scanned(&piece(0..n, None));
        assert!((0..=n).all(|n| presence.may_have(&onode(n))));
        let wrong = (n + 1..n + 10_001).filter(|n| presence.may_have(&onode(*n))).count();
        assert!(wrong < 200, "{wrong} of 10 000 absent keys are reported as possibly present");
    }
}
