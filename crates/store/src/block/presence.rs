//! A filter that tells which objects the index may contain. The filter saves a read of the drive
//! when a new object is created.
//!
//! The filter is a Bloom filter of the keys of onodes, in memory. After a mount, a background scan
//! of the index, which consists of many reads, fills the filter. The target's thread adds the keys
//! of a read in steps, between which calls run. Keys that are put into the index during the scan are
//! added to the filter, too. Until the scan ends, the filter reports every object as possibly
//! present. Keys of removed objects stay in the filter. When the filter is too full to be useful, the
//! store builds a larger filter.

use bytes::Bytes;
use fastbloom::BloomFilter;

use super::index::EntryBatch;
use super::need::Need;
use super::records::key;

/// Number of keys that one read of a scan returns.
const PIECE: usize = 1024;
/// Minimum and maximum number of keys for which a filter is sized. The largest filter takes 40 MB.
const CAPACITY: std::ops::RangeInclusive<u64> = 1 << 16..=1 << 25;
/// Estimate of the minimum number of index bytes per object, for the size of the first filter.
const INDEX_BYTES_PER_OBJECT: u64 = 256;
/// Share of false positives when the filter has as many keys as it was sized for.
const FALSE_POSITIVES: f64 = 0.01;

/// How fast a scan proceeds. The target's thread needs about 1 to 2 µs for each key, in which no call
/// can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScanPace {
    /// No call is in progress. One step follows the other.
    Idle,
    /// A few calls wait for reads of the index. The steps are shorter.
    Light,
    /// Many calls, or calls that use the drive, are in progress. There is one short step per turn of
    /// the driver, and calls need several turns each.
    Busy,
}

impl ScanPace {
    /// Returns the number of keys that one step adds.
    fn step(self) -> usize {
        match self {
            ScanPace::Idle => 64,
            ScanPace::Light => 16,
            ScanPace::Busy => 8,
        }
    }
}

/// Tells which objects the index may contain.
pub(crate) struct Presence {
    /// The filter that has all keys of onodes; `None` before the first scan has ended.
    complete: Option<Filter>,
    /// `None` if no scan is in progress.
    scan: Option<PresenceScan>,
}

/// A scan in progress.
struct PresenceScan {
    /// The filter that the scan fills.
    filter: Filter,
    /// The result of the last read; `None` while a read is in progress.
    found: Option<FoundEntries>,
}

/// The result of one read of a scan.
struct FoundEntries {
    /// The entries whose keys the filter does not have yet.
    entries: std::vec::IntoIter<(Bytes, Bytes)>,
    /// The key at which to continue the scan, if the index has more entries.
    resume: Option<Bytes>,
    /// The generation of the index in which the read began.
    generation: u64,
}

/// One step of a scan.
pub(crate) struct ScanStep {
    /// The entries whose keys were added to the filter.
    pub(crate) entries: Vec<(Bytes, Bytes)>,
    /// The generation of the index in which the entries were read.
    pub(crate) generation: u64,
    /// The next read, if the step has added the last keys of a read.
    pub(crate) next: Option<Need>,
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

impl PresenceScan {
    fn new(keys: u64) -> PresenceScan {
        PresenceScan { filter: Filter::new(keys), found: None }
    }
}

impl Presence {
    /// Creates a filter without keys, for an index with `used` bytes in use.
    pub(crate) fn new(used: u64) -> Presence {
        Presence { complete: None, scan: Some(PresenceScan::new(2 * used / INDEX_BYTES_PER_OBJECT)) }
    }

    /// Returns the first read of a scan.
    pub(crate) fn first_piece() -> Need {
        let (from, to) = key::kind_range(key::ONODE);
        Need::Range { from, to, limit: PIECE }
    }

    /// Records that the key of an onode is put into the index.
    pub(crate) fn insert(&mut self, key: &[u8]) {
        let growing = self.scan.as_mut().map(|scan| &mut scan.filter);
        for filter in self.complete.iter_mut().chain(growing) {
            filter.insert(key);
        }
    }

    /// Whether the index may contain the onode with this key. If this method returns `false`, the
    /// index does not contain it.
    pub(crate) fn may_have(&self, key: &[u8]) -> bool {
        self.complete.as_ref().is_none_or(|filter| filter.bits.contains(key))
    }

    /// Takes the result of one read of the scan. The read began in this generation of the index.
    pub(crate) fn scanned(&mut self, found: EntryBatch, generation: u64) {
        let EntryBatch { entries, resume } = found;
        if let Some(scan) = &mut self.scan {
            scan.found = Some(FoundEntries { entries: entries.into_iter(), resume, generation });
        }
    }

    /// Whether [`step`](Self::step) has keys to add.
    pub(crate) fn has_step(&self) -> bool {
        self.scan.as_ref().is_some_and(|scan| scan.found.is_some())
    }

    /// Adds the next keys that the scan has found; `None` if there are none now.
    pub(crate) fn step(&mut self, pace: ScanPace) -> Option<ScanStep> {
        let scan = self.scan.as_mut()?;
        let found = scan.found.as_mut()?;
        let entries: Vec<_> = found.entries.by_ref().take(pace.step()).collect();
        entries.iter().for_each(|(key, _)| scan.filter.insert(key));
        let mut step = ScanStep { entries, generation: found.generation, next: None };
        if found.entries.len() == 0 {
            match scan.found.take().and_then(|found| found.resume) {
                Some(from) => {
                    let to = key::kind_range(key::ONODE).1;
                    step.next = Some(Need::Range { from, to, limit: PIECE });
                }
                None => self.complete = self.scan.take().map(|scan| scan.filter),
            }
        }
        Some(step)
    }

    /// Starts a larger filter if the current filter is too full. If this method returns `true`, the
    /// caller must begin a scan.
    pub(crate) fn outgrown(&mut self) -> bool {
        let Some(full) = self.complete.as_ref().filter(|f| f.keys > f.capacity) else { return false };
        if self.scan.is_some() || full.capacity >= *CAPACITY.end() {
            return false;
        }
        self.scan = Some(PresenceScan::new(2 * full.keys));
        true
    }

    /// Takes the result of one read, and does all steps. Returns the next read.
    #[cfg(test)]
    pub(crate) fn scan_all(&mut self, found: EntryBatch) -> Option<Need> {
        self.scanned(found, 0);
        std::iter::from_fn(|| self.step(ScanPace::Idle)).last()?.next
    }

    /// Discards the filter of a scan that has failed.
    pub(crate) fn scan_failed(&mut self) {
        self.scan = None;
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
        presence.scanned(piece(0..100, Some(100)), 0);
        for (pace, keys) in [(ScanPace::Busy, 8), (ScanPace::Light, 16), (ScanPace::Idle, 64)] {
            let step = presence.step(pace).unwrap();
            assert_eq!((step.entries.len(), step.next), (keys, None));
        }
        let next = presence.step(ScanPace::Idle).unwrap().next;
        assert!(!presence.has_step(), "the next read is in progress");
        assert!(matches!(next, Some(Need::Range { from, .. }) if from == onode(100)));
        presence.insert(&onode(1000));
        assert!(presence.may_have(&onode(77)));
        assert!(presence.scan_all(piece(100..200, None)).is_none());
        assert!((0..200).chain([1000]).all(|n| presence.may_have(&onode(n))));
        let wrong = (2000..12_000).filter(|n| presence.may_have(&onode(*n))).count();
        assert!(wrong < 100, "{wrong} of 10 000 absent keys are reported as possibly present");
    }

    #[test]
    fn a_filter_that_is_too_full_stays_in_use_until_a_larger_filter_is_complete() {
        let mut presence = Presence::new(0);
        presence.scan_all(piece(0..0, None));
        let mut n = 0;
        while !presence.outgrown() {
            presence.insert(&onode(n));
            n += 1;
        }
        assert!(!presence.outgrown(), "only one larger filter is built at a time");
        presence.insert(&onode(n));
        assert!((0..=n).all(|n| presence.may_have(&onode(n))));
        presence.scan_all(piece(0..n, None));
        assert!((0..=n).all(|n| presence.may_have(&onode(n))));
        let wrong = (n + 1..n + 10_001).filter(|n| presence.may_have(&onode(*n))).count();
        assert!(wrong < 200, "{wrong} of 10 000 absent keys are reported as possibly present");
    }
}
