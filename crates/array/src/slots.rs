//! [`Slots`]: the undo objects that the members store in the slots of their intents.

use std::collections::BTreeMap;

use crate::record::{ChangeId, Intent, IntentPlace, Undo, UndoObjects};

/// What the members store in a slot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SlotContent {
    /// The change of the intents; the last one if members have intents of different changes.
    change: ChangeId,
    /// Undo objects by position.
    undo_objects: Vec<UndoObjects>,
    /// Number of bytes in the undo objects, summed over all members.
    bytes: u64,
    /// Whether an undo object is a renamed object, which may have a large omap.
    has_renamed: bool,
}

impl SlotContent {
    /// Creates the content of the slot of a change without undo objects.
    pub(crate) fn new(change: ChangeId) -> SlotContent {
        SlotContent { change, ..SlotContent::default() }
    }

    /// Adds the intent of the member at a position, whose undo objects contain `bytes` bytes.
    pub(crate) fn add(&mut self, change: ChangeId, position: usize, intent: &Intent, bytes: u64) {
        if self.undo_objects.len() <= position {
            self.undo_objects.resize(position + 1, Vec::new());
        }
        self.change = self.change.max(change);
        self.undo_objects[position] = intent.undo_objects();
        self.bytes += bytes;
        self.has_renamed |= intent.objects.iter().any(|touched| touched.undo == Undo::Return);
    }

    /// The undo objects on the member at a position.
    pub(crate) fn undo_objects(&self, position: usize) -> &[usize] {
        self.undo_objects.get(position).map_or(&[], Vec::as_slice)
    }

    /// Whether an undo object is a renamed object.
    pub(crate) fn has_renamed(&self) -> bool {
        self.has_renamed
    }

    /// The change whose intent is in the slot.
    pub(crate) fn change(&self) -> ChangeId {
        self.change
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

    /// The slots that can be trimmed: they have undo objects of changes up to `settled`.
    fn trimmable(&self, settled: ChangeId) -> impl Iterator<Item = (IntentPlace, &SlotContent)> {
        let is_trimmable = move |content: &SlotContent| content.count() > 0 && content.change <= settled;
        let contents = self.contents.iter().filter(move |(_, content)| is_trimmable(content));
        contents.map(|(place, content)| (*place, content))
    }

    /// Whether a slot has undo objects of a change up to `settled`.
    pub(crate) fn can_trim(&self, settled: ChangeId) -> bool {
        self.trimmable(settled).next().is_some()
    }

    /// Takes the contents of up to `most` slots that have undo objects of changes up to `settled`.
    /// The last of them may have a renamed object, which may take long to remove.
    pub(crate) fn take_trimmable(
        &mut self,
        settled: ChangeId,
        most: usize,
    ) -> Vec<(IntentPlace, SlotContent)> {
        let mut places = Vec::new();
        for (place, content) in self.trimmable(settled).take(most) {
            places.push(place);
            if content.has_renamed {
                break;
            }
        }
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
    use store::ObjectId;

    use super::*;
    use crate::record::Touched;

    fn id(number: u64) -> ChangeId {
        ChangeId { term: 1, number }
    }

    fn intent(undos: &[Undo]) -> Intent {
        let touched = |undo: &Undo| Touched {
            oid: ObjectId::new("o").unwrap(),
            undo: undo.clone(),
            xattrs: false,
            omap_keys: Vec::new(),
            omap_ranges: Vec::new(),
        };
        Intent { objects: undos.iter().map(touched).collect() }
    }

    fn saved() -> Undo {
        Undo::Restore { size: 4096, saved: vec![(0, 4096)] }
    }

    #[test]
    fn the_counts_follow_the_contents() {
        let mut slots = Slots::default();
        let mut content = SlotContent::new(id(1));
        content.add(id(1), 2, &intent(&[saved(), Undo::Unchanged, saved()]), 8192);
        content.add(id(1), 0, &intent(&[saved()]), 4096);
        slots.put(IntentPlace::Slot(1), content.clone());
        slots.put(IntentPlace::Slot(2), SlotContent::new(id(2)));
        assert_eq!((slots.undo_objects(), slots.bytes()), (3, 12288));
        let taken = slots.take(IntentPlace::Slot(1)).unwrap();
        assert_eq!((taken.undo_objects(2), taken.undo_objects(1)), (&[0, 2][..], &[][..]));
        assert_eq!((slots.undo_objects(), slots.bytes()), (0, 0));
        assert!(slots.take(IntentPlace::Slot(1)).is_none());
    }

    #[test]
    fn a_trim_takes_only_undo_objects_of_settled_changes() {
        let mut slots = Slots::default();
        for number in 1..=4 {
            let mut content = SlotContent::new(id(number));
            content.add(id(number), 0, &intent(&[saved()]), 4096);
            slots.put(IntentPlace::of(id(number)), content);
        }
        slots.put(IntentPlace::of(id(5)), SlotContent::new(id(5)));
        assert!(!slots.can_trim(id(0)) && slots.can_trim(id(1)));
        assert_eq!(slots.take_trimmable(id(3), 2).len(), 2);
        let left = slots.take_trimmable(id(3), 8);
        assert_eq!(left.iter().map(|(_, content)| content.change()).collect::<Vec<_>>(), [id(3)]);
        assert!(!slots.can_trim(id(3)) && slots.undo_objects() == 1);
    }

    #[test]
    fn a_trim_takes_one_renamed_object() {
        let mut slots = Slots::default();
        for (number, undo) in [(1, saved()), (2, Undo::Return), (3, Undo::Return)] {
            let mut content = SlotContent::new(id(number));
            content.add(id(number), 0, &intent(&[undo]), 0);
            slots.put(IntentPlace::of(id(number)), content);
        }
        assert_eq!(slots.take_trimmable(id(9), 8).len(), 2);
        assert_eq!(slots.take_trimmable(id(9), 8).len(), 1);
    }
}
