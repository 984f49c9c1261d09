//! [`Changes`]: changes of the index, in the order of their keys.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::collections::{BTreeMap, btree_map};
use std::ops::{Bound, RangeBounds};

use bytes::Bytes;

/// Changes of the index: keys with their new values. `None` removes the key.
///
/// Each key is stored with its first 16 bytes, so most comparisons need not read the key's memory,
/// which is often not in the processor's cache.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Changes(BTreeMap<OrderedKey, Option<Bytes>>);

/// A key with its head, by which it is compared first.
#[derive(Debug, Clone)]
struct OrderedKey {
    head: u128,
    key: Bytes,
}

/// A key of which only a reference exists.
struct KeyProbe<'a> {
    head: u128,
    key: &'a [u8],
}

/// The parts of a key that determine its order.
trait KeyOrder {
    fn head(&self) -> u128;
    fn key(&self) -> &[u8];
}

/// Returns the first 16 bytes of a key. A shorter key is padded with zeros, so that heads have the
/// order of their keys or are equal.
fn head(key: &[u8]) -> u128 {
    let mut head = [0; 16];
    let len = key.len().min(16);
    head[..len].copy_from_slice(&key[..len]);
    u128::from_be_bytes(head)
}

impl OrderedKey {
    fn new(key: Bytes) -> OrderedKey {
        OrderedKey { head: head(&key), key }
    }
}

impl<'a> KeyProbe<'a> {
    fn new(key: &'a [u8]) -> KeyProbe<'a> {
        KeyProbe { head: head(key), key }
    }
}

impl KeyOrder for OrderedKey {
    fn head(&self) -> u128 {
        self.head
    }

    fn key(&self) -> &[u8] {
        &self.key
    }
}

impl KeyOrder for KeyProbe<'_> {
    fn head(&self) -> u128 {
        self.head
    }

    fn key(&self) -> &[u8] {
        self.key
    }
}

impl PartialEq for dyn KeyOrder + '_ {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for dyn KeyOrder + '_ {}

impl PartialOrd for dyn KeyOrder + '_ {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for dyn KeyOrder + '_ {
    fn cmp(&self, other: &Self) -> Ordering {
        self.head().cmp(&other.head()).then_with(|| self.key().cmp(other.key()))
    }
}

impl PartialEq for OrderedKey {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for OrderedKey {}

impl PartialOrd for OrderedKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for OrderedKey {
    fn cmp(&self, other: &Self) -> Ordering {
        self.head.cmp(&other.head).then_with(|| self.key.cmp(&other.key))
    }
}

impl<'a> Borrow<dyn KeyOrder + 'a> for OrderedKey {
    fn borrow(&self) -> &(dyn KeyOrder + 'a) {
        self
    }
}

impl Changes {
    /// Creates an empty list of changes.
    pub(crate) fn new() -> Changes {
        Changes::default()
    }

    /// Number of changed keys.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no key changes.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Sets the new value of a key. Returns the value that this one replaces in the list.
    pub(crate) fn insert(&mut self, key: Bytes, value: Option<Bytes>) -> Option<Option<Bytes>> {
        self.0.insert(OrderedKey::new(key), value)
    }

    /// Sets the new value of a key, unless the list already has the key.
    pub(crate) fn insert_if_absent(&mut self, key: Bytes, value: Option<Bytes>) {
        self.0.entry(OrderedKey::new(key)).or_insert(value);
    }

    /// Takes a key out of the list.
    pub(crate) fn remove(&mut self, key: &[u8]) -> Option<Option<Bytes>> {
        self.0.remove(&KeyProbe::new(key) as &dyn KeyOrder)
    }

    /// Returns the new value of a key.
    pub(crate) fn get(&self, key: &[u8]) -> Option<&Option<Bytes>> {
        self.0.get(&KeyProbe::new(key) as &dyn KeyOrder)
    }

    /// Whether the key changes.
    pub(crate) fn contains_key(&self, key: &[u8]) -> bool {
        self.get(key).is_some()
    }

    /// Returns the changes in the order of their keys.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Bytes, &Option<Bytes>)> {
        self.0.iter().map(|(key, value)| (&key.key, value))
    }

    /// Returns the changes in a range of keys, in their order.
    pub(crate) fn range(
        &self,
        range: impl RangeBounds<Bytes>,
    ) -> impl Iterator<Item = (&Bytes, &Option<Bytes>)> {
        let ordered = |bound: Bound<&Bytes>| bound.map(|key| OrderedKey::new(key.clone()));
        let bounds = (ordered(range.start_bound()), ordered(range.end_bound()));
        self.0.range::<OrderedKey, _>(bounds).map(|(key, value)| (&key.key, value))
    }
}

impl FromIterator<(Bytes, Option<Bytes>)> for Changes {
    fn from_iter<T: IntoIterator<Item = (Bytes, Option<Bytes>)>>(changes: T) -> Changes {
        Changes(changes.into_iter().map(|(key, value)| (OrderedKey::new(key), value)).collect())
    }
}

impl Extend<(Bytes, Option<Bytes>)> for Changes {
    fn extend<T: IntoIterator<Item = (Bytes, Option<Bytes>)>>(&mut self, changes: T) {
        self.0.extend(changes.into_iter().map(|(key, value)| (OrderedKey::new(key), value)));
    }
}

impl IntoIterator for Changes {
    type Item = (Bytes, Option<Bytes>);
    type IntoIter = IntoChanges;

    fn into_iter(self) -> IntoChanges {
        IntoChanges(self.0.into_iter())
    }
}

/// The changes of a list, in the order of their keys.
pub(crate) struct IntoChanges(btree_map::IntoIter<OrderedKey, Option<Bytes>>);

impl Iterator for IntoChanges {
    type Item = (Bytes, Option<Bytes>);

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(|(key, value)| (key.key, value))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn changes_behave_like_a_map_of_their_keys(
            keys in proptest::collection::vec(proptest::collection::vec(0..3u8, 0..20), 0..60),
            from in proptest::collection::vec(0..3u8, 0..20),
            to in proptest::collection::vec(0..3u8, 0..20),
        ) {
            let (mut changes, mut model) = (Changes::new(), BTreeMap::new());
            for (number, key) in keys.iter().enumerate() {
                let (key, value) = (Bytes::from(key.clone()), Some(Bytes::from(vec![number as u8])));
                prop_assert_eq!(changes.insert(key.clone(), value.clone()), model.insert(key, value));
            }
            prop_assert!(changes.iter().eq(model.iter()));
            let (from, to) = (Bytes::from(from), Bytes::from(to));
            if from <= to {
                prop_assert!(changes.range(from.clone()..to.clone()).eq(model.range(from.clone()..to)));
            }
            prop_assert_eq!(changes.get(&from), model.get(&from));
            prop_assert_eq!(changes.remove(&from), model.remove(&from));
            changes.insert_if_absent(from.clone(), None);
            model.entry(from).or_insert(None);
            prop_assert!(changes.into_iter().eq(model));
        }
    }
}
