//! The index as transactions see it: what is queued, over what a checkpoint is writing, over what the drive has.
//!
//! Nothing here waits. What is not in memory is reported as a [`Need`]; the caller has it loaded and tries again.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;

use super::index::{Changes, Found};
use super::presence::{Presence, is_onode};
use super::records::key;

/// Something that must be loaded before a call can go on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Need {
    /// The value of a key of the index.
    Key(Bytes),
    /// Entries of the index from the first key to before the second.
    Range { from: Bytes, to: Bytes, limit: usize },
    /// The content of a block of the data region.
    Block(u64),
}

/// What was loaded for one call.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    keys: HashMap<Bytes, Option<Bytes>>,
    ranges: Vec<Range>,
    pub(crate) blocks: HashMap<u64, Bytes>,
}

#[derive(Debug)]
struct Range {
    from: Bytes,
    to: Bytes,
    entries: Changes,
}

impl Loaded {
    pub(crate) fn insert_key(&mut self, key: Bytes, value: Option<Bytes>) {
        self.keys.insert(key, value);
    }

    /// Takes what a scan of `from..to` found; the range ends where the scan stopped.
    pub(crate) fn insert_range(&mut self, from: Bytes, to: Bytes, found: Found) {
        let entries = found.entries.into_iter().map(|(k, v)| (k, Some(v))).collect();
        self.ranges.push(Range { from, to: found.resume.unwrap_or(to), entries });
    }

    /// A checkpoint has brought these changes to the drive: what was loaded before is brought forward too.
    fn update(&mut self, changes: &Changes) {
        for (key, value) in &mut self.keys {
            if let Some(new) = changes.get(key) {
                value.clone_from(new);
            }
        }
        for range in &mut self.ranges {
            let new = changes.range(range.from.clone()..range.to.clone());
            range.entries.extend(new.map(|(k, v)| (k.clone(), v.clone())));
        }
    }
}

/// Values of the index that were read lately, in two generations, bounded by bytes.
#[derive(Debug, Default)]
struct Cache {
    young: HashMap<Bytes, Option<Bytes>>,
    old: HashMap<Bytes, Option<Bytes>>,
    young_bytes: usize,
    limit: usize,
}

impl Cache {
    fn get(&mut self, key: &Bytes) -> Option<Option<Bytes>> {
        if let Some(value) = self.young.get(key) {
            return Some(value.clone());
        }
        let (key, value) = self.old.remove_entry(key)?;
        self.insert(key, value.clone());
        Some(value)
    }

    fn insert(&mut self, key: Bytes, value: Option<Bytes>) {
        self.young_bytes += key.len() + value.as_ref().map_or(0, Bytes::len) + 128;
        self.young.insert(key, value);
        if self.young_bytes > self.limit / 2 {
            self.old = std::mem::take(&mut self.young);
            self.young_bytes = 0;
        }
    }

    /// Takes what a checkpoint has brought to the drive. What says where an object's data is stays: it is likely to be
    /// asked for again.
    fn update(&mut self, changes: &Changes) {
        for (key, value) in changes {
            self.old.remove(key);
            if value.is_some() && matches!(key.first(), Some(&(key::ONODE | key::SHARD))) {
                self.insert(key.clone(), value.clone());
            } else {
                self.young.remove(key);
            }
        }
    }
}

/// The layers of the index.
#[derive(Debug)]
pub(crate) struct View {
    active: Changes,
    active_bytes: usize,
    frozen: Option<Arc<Changes>>,
    frozen_bytes: usize,
    cache: RefCell<Cache>,
    /// Collections and objects numbered from here on are not on the drive yet.
    base_nid: u64,
    pub(crate) presence: Presence,
}

/// A page of a scan: entries, and whether there are more.
pub(crate) type Scanned = (Vec<(Bytes, Bytes)>, bool);

impl View {
    pub(crate) fn new(base_nid: u64, cache_bytes: usize, presence: Presence) -> View {
        let cache = RefCell::new(Cache { limit: cache_bytes, ..Cache::default() });
        View {
            active: Changes::new(),
            active_bytes: 0,
            frozen: None,
            frozen_bytes: 0,
            cache,
            base_nid,
            presence,
        }
    }

    /// Begins a larger filter of what is present if the one there is has become too full; the caller then has the drive's index scanned.
    /// That scan does not see the layers above it, so the new filter learns what is in them now.
    pub(crate) fn presence_outgrown(&mut self) -> bool {
        if !self.presence.outgrown() {
            return false;
        }
        for (key, value) in self.active.iter().chain(self.frozen.iter().flat_map(|f| f.iter())) {
            if is_onode(key) && value.is_some() {
                self.presence.insert(key);
            }
        }
        true
    }

    /// Bytes of changes that are not frozen.
    pub(crate) fn active_bytes(&self) -> usize {
        self.active_bytes
    }

    /// Bytes of changes that are not on the drive.
    pub(crate) fn changed_bytes(&self) -> usize {
        self.active_bytes + self.frozen_bytes
    }

    /// Puts changes on top.
    pub(crate) fn apply(&mut self, puts: impl IntoIterator<Item = (Bytes, Option<Bytes>)>) {
        for (key, value) in puts {
            if is_onode(&key) && value.is_some() {
                self.presence.insert(&key);
            }
            self.active_bytes += key.len() + value.as_ref().map_or(0, Bytes::len) + 64;
            self.active.insert(key, value);
        }
    }

    /// Sets everything so far apart for a checkpoint.
    pub(crate) fn freeze(&mut self) -> Arc<Changes> {
        debug_assert!(self.frozen.is_none());
        self.frozen_bytes = std::mem::take(&mut self.active_bytes);
        let frozen = Arc::new(std::mem::take(&mut self.active));
        self.frozen = Some(Arc::clone(&frozen));
        frozen
    }

    /// The frozen changes are on the drive.
    pub(crate) fn thaw<'a>(&mut self, base_nid: u64, loaded: impl Iterator<Item = &'a mut Loaded>) {
        self.frozen_bytes = 0;
        if let Some(frozen) = self.frozen.take() {
            self.cache.get_mut().update(&frozen);
            loaded.for_each(|l| l.update(&frozen));
        }
        self.base_nid = base_nid;
    }

    /// Remembers what the drive has for `key`.
    pub(crate) fn remember(&self, key: &Bytes, value: &Option<Bytes>) {
        self.cache.borrow_mut().insert(key.clone(), value.clone());
    }

    /// Whether the drive cannot have the key, because its object or collection is newer than the last checkpoint.
    fn is_fresh(&self, key: &[u8]) -> bool {
        matches!(key.first(), Some(&(key::ONODE | key::SHARD | key::OMAP)))
            && key::number(key).is_some_and(|n| n >= self.base_nid)
    }

    /// The value of `key`; `Err` if it must be loaded.
    pub(crate) fn get(&self, loaded: &Loaded, key: &Bytes) -> Result<Option<Bytes>, Need> {
        if is_onode(key) && !self.presence.may_have(key) {
            return Ok(None);
        }
        let layers = [Some(&self.active), self.frozen.as_deref()];
        if let Some(value) =
            layers.into_iter().flatten().find_map(|l| l.get(key)).or_else(|| loaded.keys.get(key))
        {
            return Ok(value.clone());
        }
        if self.is_fresh(key) {
            return Ok(None);
        }
        self.cache.borrow_mut().get(key).ok_or_else(|| Need::Key(key.clone()))
    }

    /// Entries with `from <= key < to`, up to `limit` of them and about `max_bytes`, `top` over everything else.
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
        let base_end =
            if self.is_fresh(from) && self.is_fresh(to) { to.clone() } else { loaded_end(loaded, from, to) };
        let bounds = || from.clone()..base_end.clone();
        let base = loaded.ranges.iter().filter(|r| r.from < base_end && r.to > *from).map(|r| &r.entries);
        let layers: Vec<&Changes> =
            top.into_iter().chain([&self.active]).chain(self.frozen.as_deref()).chain(base).collect();
        let mut cursors: Vec<_> = layers.iter().map(|l| l.range(bounds()).peekable()).collect();
        let (mut found, mut bytes) = (Vec::new(), 0);
        loop {
            let next = cursors.iter_mut().filter_map(|c| c.peek().map(|(k, _)| (*k).clone())).min();
            let Some(key) = next else { break };
            let mut value = None;
            for cursor in &mut cursors {
                if let Some((_, v)) = cursor.next_if(|(k, _)| **k == key) {
                    value.get_or_insert(v);
                }
            }
            let Some(Some(value)) = value else { continue };
            if found.len() >= limit || (!found.is_empty() && bytes + key.len() + value.len() > max_bytes) {
                return Ok((found, true));
            }
            bytes += key.len() + value.len();
            found.push((key, value.clone()));
        }
        if base_end < *to {
            return Err(Need::Range { from: base_end, to: to.clone(), limit: limit.saturating_add(1) });
        }
        Ok((found, false))
    }
}

/// How far from `from` the loaded ranges reach without a gap.
fn loaded_end(loaded: &Loaded, from: &Bytes, to: &Bytes) -> Bytes {
    let mut end = from.clone();
    let mut by_start: BTreeMap<&Bytes, &Bytes> = BTreeMap::new();
    for range in &loaded.ranges {
        let reach = by_start.entry(&range.from).or_insert(&range.to);
        *reach = (*reach).max(&range.to);
    }
    for (start, reach) in by_start {
        if *start <= end && *reach > end {
            end = reach.clone();
        }
    }
    end.min(to.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::index::Found;

    /// Of 262144 new objects, those that were put last before the filter grew seemed not to be there: no checkpoint had written them
    /// yet, so the scan for the new filter did not find them.
    #[test]
    fn a_larger_filter_knows_what_no_checkpoint_has_written() {
        let nothing_on_the_drive = || Found { entries: Vec::new(), resume: None };
        let onode = |n: u32| key::onode(7, &n.to_be_bytes());
        let mut view = View::new(0, 1 << 20, Presence::new(0));
        view.presence.scanned(&nothing_on_the_drive());
        let mut n = 0;
        loop {
            view.apply([(onode(n), Some(Bytes::new()))]);
            if view.presence_outgrown() {
                break;
            }
            // Some are in the frozen layer, some in the active one.
            if n == 1000 {
                view.freeze();
            }
            n += 1;
        }
        view.presence.scanned(&nothing_on_the_drive());
        assert!((0..=n).all(|n| view.presence.may_have(&onode(n))));
    }
}
