//! [`ValueCache`]: recently used values of the index.

use std::hash::BuildHasher;

use base::collections::RandomKeys;
use bytes::Bytes;
use hashbrown::HashTable;

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
    young: HashTable<CacheEntry>,
    old: HashTable<CacheEntry>,
    young_bytes: usize,
    old_bytes: usize,
}

/// An entry of the cache, with the hash of its key, so that the key is hashed only once.
#[derive(Debug)]
struct CacheEntry {
    hash: u64,
    key: Bytes,
    value: Option<Bytes>,
}

impl CacheEntry {
    /// Returns the estimated memory of the entry.
    fn bytes(&self) -> usize {
        self.key.len() + self.value.as_ref().map_or(0, Bytes::len) + ENTRY_BYTES
    }
}

impl ValueCache {
    /// Creates a cache that uses at most about `limit` bytes.
    pub(super) fn new(limit: usize) -> ValueCache {
        let parts = std::iter::repeat_with(CachePart::default).take(PARTS).collect();
        ValueCache { parts, hasher: RandomKeys::default(), generation_bytes: limit / 2 / PARTS, bytes: 0 }
    }

    /// Returns the hash of a key, and the number of its part.
    fn place(&self, key: &Bytes) -> (u64, usize) {
        let hash = self.hasher.hash_one(key);
        // The tables of a part use the lowest and the highest bits.
        (hash, (hash >> 32) as usize % PARTS)
    }

    /// Returns the value of `key` if it is cached.
    pub(super) fn get(&mut self, key: &Bytes) -> Option<Option<Bytes>> {
        let (hash, number) = self.place(key);
        let part = &mut self.parts[number];
        if let Some(entry) = part.young.find(hash, |entry| entry.key == key) {
            return Some(entry.value.clone());
        }
        let entry = take(&mut part.old, hash, key)?;
        let value = entry.value.clone();
        part.old_bytes -= entry.bytes();
        self.bytes -= part.insert(entry, self.generation_bytes);
        Some(value)
    }

    /// Caches the value of `key`. Returns the value that was cached before.
    pub(super) fn insert(&mut self, key: Bytes, value: Option<Bytes>) -> Option<Option<Bytes>> {
        let (hash, number) = self.place(&key);
        let part = &mut self.parts[number];
        let before = part.remove(hash, &key);
        let entry = CacheEntry { hash, key, value };
        self.bytes += entry.bytes();
        self.bytes -= before.as_ref().map_or(0, CacheEntry::bytes);
        self.bytes -= part.insert(entry, self.generation_bytes);
        before.map(|entry| entry.value)
    }

    /// Removes the value of `key`. Returns the value that was cached.
    pub(super) fn remove(&mut self, key: &Bytes) -> Option<Option<Bytes>> {
        let (hash, number) = self.place(key);
        let before = self.parts[number].remove(hash, key)?;
        self.bytes -= before.bytes();
        Some(before.value)
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
    /// Removes the entry of a key.
    fn remove(&mut self, hash: u64, key: &Bytes) -> Option<CacheEntry> {
        if let Some(entry) = take(&mut self.young, hash, key) {
            self.young_bytes -= entry.bytes();
            return Some(entry);
        }
        let entry = take(&mut self.old, hash, key)?;
        self.old_bytes -= entry.bytes();
        Some(entry)
    }

    /// Inserts an entry whose key the part does not have. Returns the size of the entries that were
    /// dropped.
    fn insert(&mut self, entry: CacheEntry, limit: usize) -> usize {
        self.young_bytes += entry.bytes();
        self.young.insert_unique(entry.hash, entry, |entry| entry.hash);
        if self.young_bytes <= limit {
            return 0;
        }
        self.old = std::mem::take(&mut self.young);
        std::mem::replace(&mut self.old_bytes, std::mem::take(&mut self.young_bytes))
    }
}

/// Removes the entry of a key from a table.
fn take(table: &mut HashTable<CacheEntry>, hash: u64, key: &Bytes) -> Option<CacheEntry> {
    Some(table.find_entry(hash, |entry| entry.key == key).ok()?.remove().0)
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
        let counted: usize = (cache.parts.iter().flat_map(|part| part.young.iter().chain(&part.old)))
            .map(CacheEntry::bytes)
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
