//! [`DirtyNotes`]: the objects that have dirty notes.

use std::collections::BTreeSet;

use store::ObjectId;

/// The objects that have dirty notes on the members in sync, because they changed while a member was
/// unavailable.
#[derive(Debug, Default)]
pub(crate) struct DirtyNotes {
    oids: BTreeSet<ObjectId>,
    /// Total length of the ids, in bytes.
    bytes: u64,
    /// Whether the next interval discards all notes. Stale members, which need the notes, become blank.
    are_discarded: bool,
}

impl DirtyNotes {
    pub(crate) fn new(oids: BTreeSet<ObjectId>) -> DirtyNotes {
        let bytes = oids.iter().map(len).sum();
        DirtyNotes { oids, bytes, are_discarded: false }
    }

    /// The objects.
    pub(crate) fn oids(&self) -> &BTreeSet<ObjectId> {
        &self.oids
    }

    /// Total length of the ids of all objects, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes the next interval discard all notes.
    pub(crate) fn discard(&mut self) {
        self.are_discarded = true;
    }

    /// Returns whether the interval that begins discards all notes. Later ones do not.
    pub(crate) fn take_discarded(&mut self) -> bool {
        std::mem::take(&mut self.are_discarded)
    }

    /// Adds notes of objects that have none.
    pub(crate) fn add(&mut self, oids: &[ObjectId]) {
        for oid in oids {
            let is_new = self.oids.insert(oid.clone());
            assert!(is_new, "the object {oid} has a dirty note");
            self.bytes += len(oid);
        }
    }

    /// Removes notes that [`add`](Self::add) has added, and that no member has stored.
    pub(crate) fn take_back(&mut self, oids: &[ObjectId]) {
        for oid in oids {
            if self.oids.remove(oid) {
                self.bytes -= len(oid);
            }
        }
    }
}

fn len(oid: &ObjectId) -> u64 {
    oid.as_bytes().len() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_that_no_member_has_are_taken_back() {
        let [a, b, c] = ["a", "bb", "ccc"].map(|id| ObjectId::new(id).unwrap());
        let mut notes = DirtyNotes::new([a.clone()].into());
        notes.add(&[b.clone(), c.clone()]);
        assert_eq!((notes.oids().len(), notes.bytes()), (3, 6));
        notes.take_back(&[b]);
        assert_eq!((notes.oids(), notes.bytes()), (&[a, c].into(), 4));
    }
}
