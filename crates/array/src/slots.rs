//! [`Slots`]: the undo objects that the members store in the slots of their intents.

use std::collections::BTreeMap;

use crate::record::{IntentPlace, UndoObjects};

/// The undo objects of a slot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SlotContent {
    /// By position.
    undo_objects: Vec<UndoObjects>,
    /// Number of bytes in the undo objects, summed over all members.
    bytes: u64,
}

impl SlotContent {
    /// Adds the undo objects of the member at a position, which contain `bytes` bytes.
    pub(crate) fn add(&mut self, position: usize, undo_objects: UndoObjects, bytes: u64) {
        if self.undo_objects.len() <= position {
            self.undo_objects.resize(position + 1, Vec::new());
        }
        self.undo_objects[position] = undo_objects;
        self.bytes += bytes;
    }

    /// The undo objects on the member at a position.
    pub(crate) fn undo_objects(&self, position: usize) -> &[usize] {
        self.undo_objects.get(position).map_or(&[], Vec::as_slice)
    }

    fn count(&self) -> usize {
        self.undo_objects.iter().map(Vec::len).sum()
    }
}

/// The slots in which members store intents of finished changes. This type is pure state.
///
/// A change that is in progress takes its slot, and puts its own content into the slot when all
/// members have committed it.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    contents: BTreeMap<IntentPlace, SlotContent>,
    undo_objects: usize,
    bytes: u64,
}

impl Slots {
    /// Takes the content of a slot.
    pub(crate) fn take(&mut self, place: IntentPlace) -> Option<SlotContent> {
        let content = self.contents.remove(&place)?;
        self.undo_objects -= content.count();
        self.bytes -= content.bytes;
        Some(content)
    }

    /// Puts content into an empty slot.
    pub(crate) fn put(&mut self, place: IntentPlace, content: SlotContent) {
        self.undo_objects += content.count();
        self.bytes += content.bytes;
        let before = self.contents.insert(place, content);
        assert!(before.is_none(), "the slot of {place:?} is in use");
    }

    /// Takes the contents of all slots that have undo objects.
    pub(crate) fn take_undo_objects(&mut self) -> Vec<(IntentPlace, SlotContent)> {
        let has_some = self.contents.iter().filter(|(_, content)| content.count() > 0);
        let places: Vec<IntentPlace> = has_some.map(|(place, _)| *place).collect();
        places.into_iter().filter_map(|place| Some((place, self.take(place)?))).collect()
    }

    /// Number of undo objects, summed over all members.
    pub(crate) fn undo_objects(&self) -> usize {
        self.undo_objects
    }

    /// Number of bytes in undo objects, summed over all members.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counts_follow_the_contents() {
        let mut slots = Slots::default();
        let mut content = SlotContent::default();
        content.add(2, vec![0, 3], 8192);
        content.add(0, vec![0], 4096);
        slots.put(IntentPlace::Slot(1), content.clone());
        slots.put(IntentPlace::Slot(2), SlotContent::default());
        assert_eq!((slots.undo_objects(), slots.bytes()), (3, 12288));
        let taken = slots.take(IntentPlace::Slot(1)).unwrap();
        assert_eq!((taken.undo_objects(2), taken.undo_objects(1)), (&[0, 3][..], &[][..]));
        assert_eq!((slots.undo_objects(), slots.bytes()), (0, 0));
        assert!(slots.take(IntentPlace::Slot(1)).is_none());
        slots.put(IntentPlace::Slot(1), content.clone());
        assert_eq!(slots.take_undo_objects(), [(IntentPlace::Slot(1), content)]);
        assert_eq!((slots.undo_objects(), slots.bytes()), (0, 0));
        assert!(slots.take(IntentPlace::Slot(2)).is_some(), "a slot without undo objects stays");
    }
}
