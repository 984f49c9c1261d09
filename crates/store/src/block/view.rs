//! The index as transactions see it, in three layers: queued changes, the changes of the running
//! checkpoint, and the index on the drive.
//!
//! No method in this module waits for the drive. If a value is not in memory, the method returns a
//! [`Need`]. The caller loads the value and calls the method again.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use base::collections::HashMap;
use bytes::Bytes;

use super::cache::ValueCache;
use super::changes::Changes;
use super::index::EntryBatch;
use super::need::Need;
use super::presence::{Presence, ScanPace, is_onode};
use super::records::key;

/// Data that was loaded from the drive for one call.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    keys: HashMap<Bytes, Option<Bytes>>,
    /// Ranges by their first key. Ranges that overlap or touch are merged into one range.
    ranges: BTreeMap<Bytes, KeyRange>,
    pub(crate) blocks: HashMap<u64, Bytes>,
}

/// The entries of the index on the drive from a first key up to `to`, exclusive.
#[derive(Debug)]
struct KeyRange {
    to: Bytes,
    entries: Changes,
}

impl KeyRange {
    /// Merges a range that overlaps or touches this range. `later` says whether the other range was
    /// loaded after this range. If both ranges have a key, the value that was loaded later is kept.
    fn join(&mut self, other: KeyRange, later: bool) {
        if other.to > self.to {
            self.to = other.to;
        }
        let (mut from, newest) = (other.entries, later);
        // Move the entries of the smaller range, so that a long range that is loaded in pieces is
        // not copied for each piece.
        let moved_is_newest = if from.len() > self.entries.len() {
            std::mem::swap(&mut from, &mut self.entries);
            !newest
        } else {
            newest
        };
        for (key, value) in from {
            match moved_is_newest {
                true => drop(self.entries.insert(key, value)),
                false => self.entries.insert_if_absent(key, value),
            }
        }
    }
}

impl Loaded {
    pub(crate) fn insert_key(&mut self, key: Bytes, value: Option<Bytes>) {
        self.keys.insert(key, value);
    }

    /// Adds the result of a scan of `from..to`. If the scan stopped before `to`, only the scanned
    /// part is added.
    pub(crate) fn insert_range(&mut self, from: Bytes, to: Bytes, found: EntryBatch) {
        let entries = found.entries.into_iter().map(|(k, v)| (k, Some(v))).collect();
        let to = found.resume.unwrap_or(to);
        if from >= to {
            return;
        }
        let mut first = from;
        let mut range = KeyRange { to, entries };
        if let Some((start, before)) = self.ranges.range(..=first.clone()).next_back()
            && before.to >= first
        {
            let start = start.clone();
            let mut before = self.ranges.remove(&start).expect("it was just found");
            before.join(range, true);
            (first, range) = (start, before);
        }
        while let Some((start, _)) = self.ranges.range(first.clone()..=range.to.clone()).next() {
            let start = start.clone();
            let after = self.ranges.remove(&start).expect("it was just found");
            range.join(after, false);
        }
        self.ranges.insert(first, range);
    }

    /// Returns the loaded range that covers `key`.
    fn covering(&self, key: &Bytes) -> Option<&KeyRange> {
        let (_, range) = self.ranges.range(..=key.clone()).next_back()?;
        (range.to > *key).then_some(range)
    }

    /// Updates the loaded data with changes that a checkpoint has written to the drive since the
    /// data was loaded.
    fn update(&mut self, changes: &Changes) {
        for (key, value) in &mut self.keys {
            if let Some(new) = changes.get(key) {
                value.clone_from(new);
            }
        }
        for (from, range) in &mut self.ranges {
            let new = changes.range(from.clone()..range.to.clone());
            range.entries.extend(new.map(|(k, v)| (k.clone(), v.clone())));
        }
    }
}

/// Size of a layer of changes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ChangesSize {
    /// Memory of the changes, approximately, in bytes.
    pub(crate) memory: usize,
    /// Bytes of keys and values that the changes add to the index, minus the bytes that they remove.
    /// A key whose earlier value is not known counts as added.
    growth: i64,
}

impl ChangesSize {
    /// Memory of a change in addition to the bytes of its key and its value.
    const ENTRY: usize = 80;

    fn memory(key_len: usize, value: Option<&Bytes>) -> usize {
        key_len + value.map_or(0, Bytes::len) + ChangesSize::ENTRY
    }

    /// Records that a change of a key, whose earlier value is `before`, was added. `replaced` is the
    /// earlier change of the key in the same layer.
    fn add(
        &mut self,
        key_len: usize,
        value: Option<&Bytes>,
        replaced: Option<&Option<Bytes>>,
        before: Option<&Bytes>,
    ) {
        let stored = |value: &Bytes| (key_len + value.len()) as i64;
        self.growth += value.map_or(0, stored) - before.map_or(0, stored);
        self.memory += ChangesSize::memory(key_len, value);
        if let Some(replaced) = replaced {
            self.memory -= ChangesSize::memory(key_len, replaced.as_ref());
        }
    }

    /// Returns the number of bytes by which the changes may make the content of the index grow.
    pub(crate) fn growth(&self) -> u64 {
        self.growth.max(0) as u64
    }
}

/// The layers of the index. The [module](self) documentation describes them.
#[derive(Debug)]
pub(crate) struct IndexView {
    active: Changes,
    active_size: ChangesSize,
    /// The changes that the running checkpoint writes.
    frozen: Option<Arc<Changes>>,
    frozen_size: ChangesSize,
    /// Current values, newer than the drive's values if a layer in memory has the key.
    cache: RefCell<ValueCache>,
    /// Collections and objects with this number or a higher number are not in the index on the
    /// drive.
    base_nid: u64,
    pub(crate) presence: Presence,
}

/// A page of a scan: its entries, and `true` if more entries follow the page.
pub(crate) type Scanned = (Vec<(Bytes, Bytes)>, bool);

impl IndexView {
    pub(crate) fn new(base_nid: u64, cache_bytes: usize, presence: Presence) -> IndexView {
        let cache = RefCell::new(ValueCache::new(cache_bytes));
        IndexView {
            active: Changes::new(),
            active_size: ChangesSize::default(),
            frozen: None,
            frozen_size: ChangesSize::default(),
            cache,
            base_nid,
            presence,
        }
    }

    /// Starts a larger filter of present objects if the current filter is too full. If this method
    /// returns `true`, the caller must start a scan of the index on the drive. The scan does not
    /// see the layers in memory, so this method adds their objects to the new filter.
    pub(crate) fn presence_outgrown(&mut self) -> bool {
        if !self.presence.outgrown() {
            return false;
        }
        let layers = std::iter::once(&self.active).chain(self.frozen.as_deref());
        for (key, value) in layers.flat_map(Changes::iter) {
            if is_onode(key) && value.is_some() {
                self.presence.insert(key);
            }
        }
        true
    }

    /// Returns the number of queued changes that no checkpoint has taken yet, and their size.
    pub(crate) fn active(&self) -> (usize, ChangesSize) {
        (self.active.len(), self.active_size)
    }

    /// Returns the size of the changes that the running checkpoint writes.
    pub(crate) fn frozen(&self) -> ChangesSize {
        self.frozen_size
    }

    /// Whether all changes are on the drive.
    pub(crate) fn is_unchanged(&self) -> bool {
        self.active.is_empty() && self.frozen.is_none()
    }

    /// Limits the growth by the queued changes to `bytes`, because they cannot make the index grow
    /// more.
    pub(crate) fn limit_growth(&mut self, bytes: u64) {
        self.active_size.growth = self.active_size.growth.min(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    /// Returns the memory of the cached values, approximately, in bytes.
    pub(crate) fn cached_bytes(&self) -> usize {
        self.cache.borrow().bytes()
    }

    /// Adds changes to the layer of queued changes. Caches new values of onodes and leaves, because
    /// they are likely to be read again.
    pub(crate) fn apply(&mut self, puts: impl IntoIterator<Item = (Bytes, Option<Bytes>)>) {
        let cache = self.cache.get_mut();
        for (key, value) in puts {
            let is_present = is_onode(&key) && value.is_some();
            let cached = match key.first() {
                Some(&(key::ONODE | key::LEAF)) => cache.insert(key.clone(), value.clone()),
                _ => cache.remove(&key),
            };
            // The filter already has the onode if the index has it.
            if is_present && !matches!(cached, Some(Some(_))) {
                self.presence.insert(&key);
            }
            let replaced = self.active.insert(key.clone(), value.clone());
            let known = replaced.as_ref().or(cached.as_ref());
            let before = known.or_else(|| self.frozen.as_ref()?.get(&key)).and_then(Option::as_ref);
            self.active_size.add(key.len(), value.as_ref(), replaced.as_ref(), before);
        }
    }

    /// The layers in memory. The first layer is the newest.
    fn layers(&self) -> impl Iterator<Item = &Changes> {
        std::iter::once(&self.active).chain(self.frozen.as_deref())
    }

    /// Freezes the queued changes and returns them, for a checkpoint.
    pub(crate) fn freeze(&mut self) -> Arc<Changes> {
        assert!(self.frozen.is_none(), "checkpoints do not overlap");
        self.frozen_size = std::mem::take(&mut self.active_size);
        let frozen = Arc::new(std::mem::take(&mut self.active));
        self.frozen = Some(Arc::clone(&frozen));
        frozen
    }

    /// Records that the checkpoint has written the frozen changes to the drive. Updates the data
    /// that was loaded for calls. Returns the changes. Dropping them takes long.
    pub(crate) fn thaw<'a>(
        &mut self,
        base_nid: u64,
        loaded: impl Iterator<Item = &'a mut Loaded>,
    ) -> Option<Arc<Changes>> {
        self.frozen_size = ChangesSize::default();
        self.base_nid = base_nid;
        let changes = self.frozen.take()?;
        loaded.for_each(|l| l.update(&changes));
        Some(changes)
    }

    /// Caches the value that the drive has for `key`, unless a layer in memory has a newer value.
    pub(crate) fn remember(&self, key: Bytes, value: Option<Bytes>) {
        if !self.layers().any(|layer| layer.contains_key(&key)) {
            self.cache.borrow_mut().insert(key, value);
        }
    }

    /// Does one step of the scan of existing objects. If no checkpoint has ended since the step's
    /// entries were read, caches their values, as long as the cache has room for them without
    /// dropping other values. `generation` is the current generation of the index. Returns the next
    /// read, if one is due.
    pub(crate) fn scan_step(&mut self, generation: u64, pace: ScanPace) -> Option<Need> {
        let step = self.presence.step(pace)?;
        if step.generation == generation {
            for (key, value) in step.entries {
                if !self.cache.get_mut().has_room() {
                    break;
                }
                self.remember(key, Some(value));
            }
        }
        step.next
    }

    /// Whether the drive cannot have the key, because its object or collection is newer than the
    /// last checkpoint.
    fn is_fresh(&self, key: &[u8]) -> bool {
        matches!(key.first(), Some(&(key::ONODE | key::LEAF | key::OMAP)))
            && key::number(key).is_some_and(|n| n >= self.base_nid)
    }

    /// Returns the value of `key`; `Err` if the value must be loaded first.
    pub(crate) fn get(&self, loaded: &Loaded, key: &Bytes) -> Result<Option<Bytes>, Need> {
        if let Some(value) = self.cache.borrow_mut().get(key) {
            return Ok(value);
        }
        if is_onode(key) && !self.presence.may_have(key) {
            return Ok(None);
        }
        let known = self.layers().find_map(|layer| layer.get(key)).or_else(|| loaded.keys.get(key));
        match known {
            Some(value) => Ok(value.clone()),
            None if self.is_fresh(key) => Ok(None),
            None => Err(Need::Key(key.clone())),
        }
    }

    /// Returns entries with `from <= key < to`: at most `limit` entries and about `max_bytes`
    /// bytes. The changes in `top` take precedence over all layers. Returns `Err` if entries must
    /// be loaded first.
    pub(crate) fn scan(
        &self,
        top: Option<&Changes>,
        loaded: &Loaded,
        from: &Bytes,
        to: &Bytes,
        limit: usize,
        max_bytes: usize,
    ) -> Result<Scanned, Need> {
        if from >= to {
            return Ok((Vec::new(), false));
        }
        let base = loaded.covering(from);
        let base_end = match base {
            _ if self.is_fresh(from) && self.is_fresh(to) => to.clone(),
            Some(range) => range.to.clone().min(to.clone()),
            None => from.clone(),
        };
        let bounds = || from.clone()..base_end.clone();
        let base = base.map(|range| &range.entries);
        let layers: Vec<&Changes> = top.into_iter().chain(self.layers()).chain(base).collect();
        let mut cursors: Vec<_> = layers.iter().map(|l| l.range(bounds()).peekable()).collect();
        let (mut found, mut bytes, mut removed) = (Vec::new(), 0, 0);
        loop {
            let next = cursors.iter_mut().filter_map(|c| c.peek().map(|(k, _)| (*k).clone())).min();
            let Some(key) = next else { break };
            let mut value = None;
            for cursor in &mut cursors {
                if let Some((_, v)) = cursor.next_if(|(k, _)| **k == key) {
                    value.get_or_insert(v);
                }
            }
            let Some(Some(value)) = value else {
                removed += 1;
                continue;
            };
            if found.len() >= limit || (!found.is_empty() && bytes + key.len() + value.len() > max_bytes) {
                return Ok((found, true));
            }
            bytes += key.len() + value.len();
            found.push((key, value.clone()));
        }
        if base_end < *to {
            // The next call examines the loaded entries again. If most of them are removed, load many
            // more, so that the number of calls grows only with the logarithm of the entries.
            let limit = limit.saturating_add(1).max(2 * removed);
            return Err(Need::Range { from: base_end, to: to.clone(), limit });
        }
        Ok((found, false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::index::EntryBatch;
    use proptest::prelude::*;

    fn byte_key(byte: u8) -> Bytes {
        Bytes::copy_from_slice(&[byte])
    }

    /// Returns the result of a scan of `from..to`, with at most `limit` entries, on a drive with
    /// the entries `drive`.
    fn found(drive: &Changes, from: u8, to: u8, limit: usize) -> EntryBatch {
        let mut entries = drive.range(byte_key(from)..byte_key(to)).map(|(k, v)| (k.clone(), v.clone()));
        let taken: Vec<_> = entries.by_ref().take(limit).map(|(k, v)| (k, v.unwrap())).collect();
        EntryBatch { entries: taken, resume: entries.next().map(|(k, _)| k) }
    }

    proptest! {
        #[test]
        fn a_scan_returns_the_entries_of_the_drive_for_any_order_of_loads(
            keys in proptest::collection::btree_set(0u8..200, 0..60),
            removed in proptest::collection::btree_set(0u8..200, 0..20),
            loads in proptest::collection::vec((0u8..200, 1u8..60, 1usize..9), 0..24),
            thawed in 0usize..24,
            scan in (0u8..200, 1u8..100),
        ) {
            let mut drive: Changes = keys.iter().map(|k| (byte_key(*k), Some(byte_key(*k)))).collect();
            let mut loaded = Loaded::default();
            for (number, (from, len, limit)) in loads.into_iter().enumerate() {
                if number == thawed {
                    loaded.update(&removed.iter().map(|k| (byte_key(*k), None)).collect());
                    removed.iter().for_each(|k| drop(drive.remove(&byte_key(*k))));
                }
                let to = from.saturating_add(len);
                loaded.insert_range(byte_key(from), byte_key(to), found(&drive, from, to, limit));
            }
            let apart = loaded.ranges.iter().zip(loaded.ranges.iter().skip(1));
            prop_assert!(apart.into_iter().all(|((_, a), (start, _))| a.to < *start), "{:?}", loaded.ranges);
            let view = IndexView::new(0, 1 << 20, Presence::new(0));
            let (from, to) = (byte_key(scan.0), byte_key(scan.0.saturating_add(scan.1)));
            let (mut at, mut rounds) = (from.clone(), 0);
            loop {
                match view.scan(None, &loaded, &from, &to, 1000, 1 << 20) {
                    Ok((entries, more)) => {
                        let expected: Vec<_> =
                            drive.range(from..to).map(|(k, v)| (k.clone(), v.clone().unwrap())).collect();
                        prop_assert_eq!((entries, more), (expected, false));
                        break;
                    }
                    Err(Need::Range { from: start, to: end, .. }) => {
                        prop_assert!(start >= at, "each load advances the scan");
                        let page = found(&drive, start[0], end[0], 2);
                        loaded.insert_range(start.clone(), end, page);
                        at = start;
                    }
                    Err(other) => prop_assert!(false, "{other:?}"),
                }
                rounds += 1;
                prop_assert!(rounds < 300);
            }
        }
    }

    #[test]
    fn only_new_keys_and_longer_values_make_the_index_grow() {
        let nothing_on_the_drive = || EntryBatch { entries: Vec::new(), resume: None };
        let mut view = IndexView::new(0, 1 << 20, Presence::new(0));
        view.presence.scan_all(nothing_on_the_drive());
        let (key, omap) = (key::onode(7, b"o"), key::omap(9, b"k"));
        let value = |len: usize| Some(Bytes::from(vec![1; len]));
        let growth = |view: &IndexView| (view.frozen().growth(), view.active().1.growth());
        let entry = |len: usize| (key.len() + len) as u64;
        view.apply([(key.clone(), value(100))]);
        assert_eq!(growth(&view), (0, entry(100)));
        let memory = view.active().1.memory;
        for _ in 0..10 {
            view.apply([(key.clone(), value(100))]);
        }
        assert_eq!((growth(&view), view.active().1.memory), ((0, entry(100)), memory));
        view.freeze();
        view.apply([(key.clone(), value(130))]);
        assert_eq!(growth(&view), (entry(100), 30));
        view.apply([(key.clone(), None)]);
        assert_eq!(growth(&view), (entry(100), 0));
        view.apply([(key.clone(), value(20))]);
        assert_eq!(growth(&view), (entry(100), 0));
        view.thaw(0, std::iter::empty());
        view.freeze();
        assert_eq!(growth(&view), (0, 0));
        // The earlier value of this key is not known.
        view.apply([(omap.clone(), value(10))]);
        assert_eq!(growth(&view), (0, (omap.len() + 10) as u64));
        view.limit_growth(5);
        assert_eq!(growth(&view), (0, 5));
    }

    /// The removal of many objects is not on the drive yet, and a scan looks for objects that are left.
    #[test]
    fn a_scan_passes_over_many_removed_keys_with_few_loads() {
        let nothing_on_the_drive = || EntryBatch { entries: Vec::new(), resume: None };
        let onode = |n: u32| key::onode(7, &n.to_be_bytes());
        let mut view = IndexView::new(1 << 20, 1 << 20, Presence::new(0));
        view.presence.scan_all(nothing_on_the_drive());
        let drive: Changes = (0..10_000).map(|n| (onode(n), Some(Bytes::from_static(b"v")))).collect();
        view.apply((0..9_999).map(|n| (onode(n), None)));
        let (from, to) = key::range(key::ONODE, 7);
        let (mut loaded, mut loads) = (Loaded::default(), 0);
        let found = loop {
            match view.scan(None, &loaded, &from, &to, 1, 1 << 20) {
                Ok(found) => break found,
                Err(Need::Range { from, to, limit }) => {
                    let mut entries = drive.range(from.clone()..to.clone());
                    let taken = entries.by_ref().take(limit).map(|(k, v)| (k.clone(), v.clone().unwrap()));
                    let entries_found = taken.collect();
                    let resume = entries.next().map(|(k, _)| k.clone());
                    loaded.insert_range(from, to, EntryBatch { entries: entries_found, resume });
                    loads += 1;
                }
                Err(other) => panic!("{other:?}"),
            }
        };
        assert_eq!(found, (vec![(onode(9_999), Bytes::from_static(b"v"))], false));
        assert!(loads < 20, "{loads} loads");
    }

    /// A step may run long after its entries were read, and a checkpoint may have written newer values
    /// since.
    #[test]
    fn a_scan_caches_no_values_that_were_read_before_the_last_checkpoint() {
        let key = key::onode(7, b"o");
        for (current, expected) in [(5, Ok(Some(Bytes::from_static(b"v")))), (6, Err(Need::Key(key.clone())))]
        {
            let mut view = IndexView::new(1 << 20, 1 << 20, Presence::new(0));
            let entries = vec![(key.clone(), Bytes::from_static(b"v"))];
            view.presence.scanned(EntryBatch { entries, resume: None }, 5);
            assert_eq!(view.scan_step(current, ScanPace::Idle), None);
            assert_eq!(view.get(&Loaded::default(), &key), expected);
            assert!(!view.presence.may_have(b"x"), "the filter is complete");
        }
    }

    /// Regression test. After 262144 new objects, a larger filter was built. It lacked the objects
    /// that were created last: no checkpoint had written them, so the scan for the new filter did
    /// not find them.
    #[test]
    fn a_larger_filter_contains_objects_that_no_checkpoint_has_written() {
        let nothing_on_the_drive = || EntryBatch { entries: Vec::new(), resume: None };
        let onode = |n: u32| key::onode(7, &n.to_be_bytes());
        let mut view = IndexView::new(0, 1 << 20, Presence::new(0));
        view.presence.scan_all(nothing_on_the_drive());
        let mut n = 0;
        loop {
            view.apply([(onode(n), Some(Bytes::new()))]);
            if view.presence_outgrown() {
                break;
            }
            // Some objects are in the frozen layer, and the other objects are in the active layer.
            if n == 1000 {
                view.freeze();
            }
            n += 1;
        }
        view.presence.scan_all(nothing_on_the_drive());
        assert!((0..=n).all(|n| view.presence.may_have(&onode(n))));
    }
}
