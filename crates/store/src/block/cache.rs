//! [`ValueCache`]: recently used values of the index.

use std::hash::BuildHasher;

use base::collections::{HashMap, RandomKeys};
use bytes::Bytes;

/// Number of parts of the cache. Growing or dropping a map takes time in proportion to its size.
/// With many parts, a call never waits for the work on a large map.
const PARTS: usize = 64;
/// Estimated memory of an entry in addition to the bytes of its key and its value.
const ENTRY_BYTES: usize = 192;

/// Cache of values of the index, with a limit in bytes. A value of `None` means that the index does
/// not have the key.
#[derive(Debug)]
pub(super) struct ValueCache {
    parts: Vec<CachePart>,
    hasher: RandomKeys,
    /// Limit of each generation of a part, in bytes.
    generation_bytes: usize,
    /// Estimated memory of all entries, in bytes.
    bytes: usize,
}

/// A part of the cache. When its young generation is full, it replaces the old generation.
#[derive(Debug, Default)]
struct CachePart {
    young: HashMap<Bytes, Option<Bytes>>,
    old: HashMap<Bytes, Option<Bytes>>,
    young_bytes: usize,
    old_bytes: usize,
}

fn entry_bytes(key: &Bytes, value: &Option<Bytes>) -> usize {
    key.len() + value.as_ref().map_or(0, Bytes::len) + ENTRY_BYTES
}

impl ValueCache {
    /// Creates a cache that uses at most about `limit` bytes.
    pub(super) fn new(limit: usize) -> ValueCache {
        let parts = std::iter::repeat_with(CachePart::default).take(PARTS).collect();
        ValueCache { parts, hasher: RandomKeys::default(), generation_bytes: limit / 2 / PARTS, bytes: 0 }
    }

    fn part(&self, key: &Bytes) -> usize {
        self.hasher.hash_one(key) as usize % PARTS
    }

    /// Returns the value of `key` if it is cached.
    pub(super) fn get(&mut self, key: &Bytes) -> Option<Option<Bytes>> {
        let number = self.part(key);
        let part = &mut self.parts[number];
        if let Some(value) = part.young.get(key) {
            return Some(value.clone());
        }
        let (key, value) = part.old.remove_entry(key)?;
        part.old_bytes -= entry_bytes(&key, &value);
        self.bytes -= part.insert(key, value.clone(), self.generation_bytes);
        Some(value)
    }

    /// Caches the value of `key`. Returns the value that was cached before.
    pub(super) fn insert(&mut self, key: Bytes, value: Option<Bytes>) -> Option<Option<Bytes>> {
        let number = self.part(&key);
        let part = &mut self.parts[number];
        self.bytes += entry_bytes(&key, &value);
        if let Some(before) = part.young.get_mut(&key) {
            let bytes = entry_bytes(&key, before);
            part.young_bytes = part.young_bytes + entry_bytes(&key, &value) - bytes;
            self.bytes -= bytes;
            return Some(std::mem::replace(before, value));
        }
        let (bytes, before) = part.remove(&key);
        self.bytes -= bytes;
        self.bytes -= part.insert(key, value, self.generation_bytes);
        before
    }

    /// Removes the value of `key`. Returns the value that was cached.
    pub(super) fn remove(&mut self, key: &Bytes) -> Option<Option<Bytes>> {
        let number = self.part(key);
        let (bytes, before) = self.parts[number].remove(key);
        self.bytes -= bytes;
        before
    }

    /// Whether less than half of the limit is in use, so that new entries replace no others.
    pub(super) fn has_room(&self) -> bool {
        self.bytes() < self.generation_bytes * PARTS
    }

    /// Returns the estimated memory of the cached entries, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl CachePart {
    /// Removes a key. Returns the size of its entry, or 0 if the part does not have the key, and its
    /// value.
    fn remove(&mut self, key: &Bytes) -> (usize, Option<Option<Bytes>>) {
        if let Some((key, value)) = self.young.remove_entry(key) {
            let bytes = entry_bytes(&key, &value);
            self.young_bytes -= bytes;
            (bytes, Some(value))
        } else if let Some((key, value)) = self.old.remove_entry(key) {
            let bytes = entry_bytes(&key, &value);
            self.old_bytes -= bytes;
            (bytes, Some(value))
        } else {
            (0, None)
        }
    }

    /// Inserts a key that the part does not have. Returns the size of the entries that were dropped.
    fn insert(&mut self, key: Bytes, value: Option<Bytes>, limit: usize) -> usize {
        self.young_bytes += entry_bytes(&key, &value);
        self.young.insert(key, value);
        if self.young_bytes <= limit {
            return 0;
        }
        self.old = std::mem::take(&mut self.young);
        std::mem::replace(&mut self.old_bytes, std::mem::take(&mut self.young_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u32) -> Bytes {
        Bytes::copy_from_slice(&number.to_be_bytes())
    }

    #[test]
    fn the_cache_keeps_used_entries_and_stays_within_its_limit() {
        let limit = 1 << 20;
        let mut cache = ValueCache::new(limit);
        for number in 0..100_000 {
            cache.insert(key(number), (number % 3 > 0).then(|| key(number)));
            assert_eq!(cache.get(&key(0)), Some(None), "an entry that is used often stays cached");
            assert_eq!(cache.get(&key(number)), Some((number % 3 > 0).then(|| key(number))));
        }
        assert!(cache.bytes() <= limit && cache.bytes() > limit / 4, "{}", cache.bytes());
        assert_eq!((cache.get(&key(1)), cache.has_room()), (None, false));
        let counted: usize = (cache.parts.iter().flat_map(|s| s.young.iter().chain(&s.old)))
            .map(|(key, value)| entry_bytes(key, value))
            .sum();
        assert_eq!(counted, cache.bytes());
    }

    #[test]
    fn the_cache_returns_the_last_value_and_no_removed_one() {
        let mut cache = ValueCache::new(1 << 20);
        cache.insert(key(1), Some(key(1)));
        cache.insert(key(1), Some(key(2)));
        assert_eq!(cache.get(&key(1)), Some(Some(key(2))));
        cache.remove(&key(1));
        assert_eq!((cache.get(&key(1)), cache.bytes()), (None, 0));
        assert!(cache.has_room());
    }
}
