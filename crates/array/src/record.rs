//! The records that an array stores for itself, in addition to the objects of its owner. The
//! records are omap entries of one object in the group's collection. All members in sync have the
//! same entries, except for the undo information in the intents.
//!
//! ```text
//! e               membership record: term, members and their standings, changes that were undone
//!                 (format byte, then postcard)
//! p               proposed membership record
//! t               id of a change up to which all changes are settled: term, number
//! s slot          intent: the change, a change up to which all changes are settled, what the change
//!                 modifies, and how to undo that (postcard)
//! i term number   intent, as earlier versions stored it: without the two ids
//! d object        dirty note: the object `object` changed while a member was unavailable
//! ```
//!
//! Integers in keys, and the two integers of `t`, have 8 bytes each, most significant first; `slot`
//! has one byte. Nodes with records of format 1 identified a change by its number alone. The keys and
//! the undo objects of such changes still do. They count as changes of term 0.
//!
//! A change with number *n* stores its intent in slot *n* modulo [`SLOTS`], and replaces the intent of
//! an earlier change, which is settled. The intents of settled changes remain until they are replaced
//! or trimmed. The highest change that `t` or an intent calls settled counts: a member ignores its
//! intents up to this change.
//!
//! A transaction copies the data that it overwrites to an undo object, which belongs to the slot. If
//! only some members commit the transaction, those members restore the old data from the undo object.

use std::collections::BTreeSet;

use bytes::{BufMut, Bytes, BytesMut};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use store::{ObjectId, Op, StoreError};
use uuid::Uuid;

/// Number of slots for intents, and so the maximum number of changes in progress.
pub(crate) const SLOTS: u64 = 128;

const FORMAT: u8 = 2;
/// Earlier format of the membership record, which can still be read.
const OLD_FORMAT: u8 = 1;
/// Usual length of an encoded value, in bytes.
const USUAL: usize = 256;
/// Prefix of the ids of the array's own objects, which sort before all other objects.
const OWN: &[u8] = b"\0\0\0\0\0a";

/// Name of the xattr that stores an object's size in bytes.
pub const SIZE_XATTR: Bytes = Bytes::from_static(b"a");

/// The xattr of an object whose copy on a member is incomplete. Its value is the UUID of the member's
/// target, so the xattrs of this copy differ from those of all other copies. Members have such copies
/// while they are rebuilt or salvaged.
pub const UNFINISHED_XATTR: Bytes = Bytes::from_static(b"unfinished");

/// Identifies a change of a group: one transaction. Later changes have greater ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub(crate) struct ChangeId {
    /// Term of the interval in which the change was made.
    pub(crate) term: u64,
    /// Number within the group.
    pub(crate) number: u64,
}

impl ChangeId {
    /// Encodes the id for keys. Encoded ids of changes after term 0 have the order of the ids.
    pub(crate) fn encode(self) -> Vec<u8> {
        let term = if self.term > 0 { self.term.to_be_bytes().to_vec() } else { Vec::new() };
        [&term[..], &self.number.to_be_bytes()].concat()
    }

    fn decode(bytes: &[u8]) -> Option<ChangeId> {
        let (term, number) = bytes.split_at_checked(bytes.len().checked_sub(8)?)?;
        let integer = |bytes: &[u8]| bytes.try_into().ok().map(u64::from_be_bytes);
        let term = if term.is_empty() { 0 } else { integer(term)? };
        Some(ChangeId { term, number: integer(number)? })
    }
}

/// Standing of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Standing {
    /// The member has every acknowledged change.
    InSync,
    /// The member was unavailable. If it still has what it had when it was last in sync, it lacks
    /// only changes of objects with dirty notes.
    Stale {
        /// The term of the last record that lists the member as in sync.
        term: u64,
        /// The member had every change up to this one.
        settled: ChangeId,
    },
    /// The member's content is unknown. A rebuild copies everything.
    Blank,
}

/// A member: the target that stores the fragment of one position, and its standing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct MemberRecord {
    pub(crate) target: Uuid,
    pub(crate) standing: Standing,
}

/// Membership record of a group.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct GroupRecord {
    /// Number of the record. It grows with each decision about members or changes.
    pub(crate) term: u64,
    /// The members, in the order of their positions.
    pub(crate) members: Vec<MemberRecord>,
    /// Changes that a decision has undone. A member that still has one of them must undo it.
    pub(crate) undone: BTreeSet<ChangeId>,
}

impl GroupRecord {
    /// Positions of the members in sync.
    pub(crate) fn in_sync(&self) -> impl Iterator<Item = usize> {
        (0..).zip(&self.members).filter(|(_, m)| m.standing == Standing::InSync).map(|(position, _)| position)
    }

    /// Whether a target is a member that is not blank.
    pub(crate) fn has_objects_on(&self, target: &Uuid) -> bool {
        let member = self.members.iter().find(|member| member.target == *target);
        member.is_some_and(|member| member.standing != Standing::Blank)
    }

    /// Returns true if a member needs dirty notes, because it is stale.
    pub(crate) fn needs_notes(&self) -> bool {
        self.members.iter().any(|m| matches!(m.standing, Standing::Stale { .. }))
    }

    /// Encodes the record for storage.
    pub(crate) fn encode(&self) -> Bytes {
        // Encoding cannot fail: the output grows as needed, and the type is plain data.
        postcard::to_extend(self, vec![FORMAT]).expect("plain data can be encoded").into()
    }

    fn decode(bytes: &[u8]) -> Option<GroupRecord> {
        let (format, record) = bytes.split_first()?;
        match *format {
            FORMAT => plain(record),
            OLD_FORMAT => plain::<OldRecord>(record).map(GroupRecord::from),
            _ => None,
        }
    }
}

/// Membership record of format 1.
#[derive(Serialize, Deserialize)]
struct OldRecord {
    term: u64,
    members: Vec<(Uuid, OldStanding)>,
}

#[derive(Serialize, Deserialize)]
enum OldStanding {
    InSync,
    Stale,
    Blank,
}

impl From<OldRecord> for GroupRecord {
    fn from(old: OldRecord) -> GroupRecord {
        let member = |(target, standing)| MemberRecord {
            target,
            standing: match standing {
                OldStanding::InSync => Standing::InSync,
                OldStanding::Stale => Standing::Stale { term: 0, settled: ChangeId::default() },
                OldStanding::Blank => Standing::Blank,
            },
        };
        let members = old.members.into_iter().map(member).collect();
        GroupRecord { term: old.term, members, undone: BTreeSet::new() }
    }
}

/// The changes that a transaction makes to one object, and how a member undoes them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Touched {
    pub(crate) oid: ObjectId,
    pub(crate) undo: Undo,
    /// True if xattrs change.
    pub(crate) xattrs: bool,
    /// Keys of omap entries that change.
    pub(crate) omap_keys: Vec<Bytes>,
    /// Ranges of omap keys that change. A range without an end includes all following keys.
    pub(crate) omap_ranges: Vec<(Bytes, Option<Bytes>)>,
}

/// How a member restores the old data of its fragment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Undo {
    /// The data has not changed, so there is nothing to restore.
    Unchanged,
    /// The object did not exist: remove it.
    Remove,
    /// The old object was renamed to the undo object: rename it back. If a new object has the old
    /// id by now, remove the new object first.
    Return,
    /// The undo object contains these ranges (offset, length) of the old data, which consist of whole
    /// blocks ([`IntentPlace::saved_at`]). The old fragment was `size` bytes long.
    Restore { size: u64, saved: Vec<(u64, u64)> },
}

impl Undo {
    /// Returns true if there is an undo object.
    pub(crate) fn keeps_object(&self) -> bool {
        match self {
            Undo::Unchanged | Undo::Remove => false,
            Undo::Return => true,
            Undo::Restore { saved, .. } => !saved.is_empty(),
        }
    }
}

/// The intent of a transaction: what the transaction changes, and how a member undoes the changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Intent {
    /// The objects that the transaction changes. The index of an object in this list is part of the
    /// id of its undo object.
    pub(crate) objects: Vec<Touched>,
}

impl Intent {
    /// Indices of the objects that have an undo object.
    pub(crate) fn undo_objects(&self) -> UndoObjects {
        let objects = (0..).zip(&self.objects);
        objects.filter(|(_, touched)| touched.undo.keeps_object()).map(|(index, _)| index).collect()
    }

    /// Number of bytes in the undo objects, without renamed objects.
    pub(crate) fn undo_bytes(&self) -> u64 {
        let saved = self.objects.iter().filter_map(|touched| match &touched.undo {
            Undo::Restore { saved, .. } => Some(saved.iter().map(|(_, len)| len).sum::<u64>()),
            _ => None,
        });
        saved.sum()
    }
}

/// The undo objects of one change on one member, by the indices of their objects in the intent.
pub(crate) type UndoObjects = Vec<usize>;

/// Where a member stores the intent of a change and its undo objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum IntentPlace {
    /// In a slot.
    Slot(u8),
    /// In an entry of its own, as earlier versions did.
    Entry(ChangeId),
}

impl IntentPlace {
    /// The place of a new change.
    pub(crate) fn of(change: ChangeId) -> IntentPlace {
        IntentPlace::Slot((change.number % SLOTS) as u8)
    }

    /// Key of the intent.
    pub(crate) fn key(self) -> Bytes {
        match self {
            IntentPlace::Slot(slot) => vec![b's', slot].into(),
            IntentPlace::Entry(change) => [b"i", &change.encode()[..]].concat().into(),
        }
    }

    /// Id of the undo object for object number `index` of the intent.
    pub(crate) fn undo_object(self, index: usize) -> ObjectId {
        let mut id = BytesMut::from(OWN);
        id.put_slice(b"undo");
        match self {
            IntentPlace::Slot(slot) => id.put_u8(slot),
            IntentPlace::Entry(change) => id.put_slice(&change.encode()),
        }
        id.put_u32(index as u32);
        fixed(id.to_vec())
    }

    /// Returns where an undo object contains ranges (offset, length) of the old data: offset in the
    /// object, offset in the undo object, length. In the undo object of a slot, the ranges follow one
    /// another, so that its extent map is small.
    pub(crate) fn saved_at(self, ranges: &[(u64, u64)]) -> impl Iterator<Item = (u64, u64, u64)> {
        let mut end = 0;
        ranges.iter().map(move |&(at, len)| {
            let kept_at = match self {
                IntentPlace::Slot(_) => end,
                IntentPlace::Entry(_) => at,
            };
            end += len;
            (at, kept_at, len)
        })
    }
}

/// An intent as a member stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredIntent {
    pub(crate) change: ChangeId,
    /// A change up to which all changes are settled.
    pub(crate) settled: ChangeId,
    pub(crate) place: IntentPlace,
    pub(crate) intent: Intent,
}

impl StoredIntent {
    /// Encodes the intent for its place.
    pub(crate) fn encode(&self) -> Bytes {
        match self.place {
            IntentPlace::Slot(_) => encode(&(self.change, self.settled, &self.intent)),
            IntentPlace::Entry(_) => encode(&self.intent),
        }
    }

    /// The omap entry of the intent.
    pub(crate) fn entry(&self) -> (Bytes, Bytes) {
        (self.place.key(), self.encode())
    }

    fn decode_slot(slot: u8, value: &[u8]) -> Option<StoredIntent> {
        let (change, settled, intent) = plain::<(ChangeId, ChangeId, Intent)>(value)?;
        let place = IntentPlace::Slot(slot);
        (settled < change && IntentPlace::of(change) == place).then_some(StoredIntent {
            change,
            settled,
            place,
            intent,
        })
    }

    fn decode_entry(change: &[u8], value: &[u8]) -> Option<StoredIntent> {
        let (change, intent) = ChangeId::decode(change).zip(plain(value))?;
        let place = IntentPlace::Entry(change);
        Some(StoredIntent { change, settled: ChangeId::default(), place, intent })
    }
}

/// Id of the object that contains the array's records.
pub(crate) fn own_object() -> ObjectId {
    fixed([OWN, b"rray"].concat())
}

/// Returns true if an object is one of the array's own: the object with the records, or an undo
/// object.
pub(crate) fn is_own(oid: &ObjectId) -> bool {
    oid.as_bytes().starts_with(OWN)
}

pub(crate) fn key_record() -> Bytes {
    Bytes::from_static(b"e")
}

pub(crate) fn key_proposal() -> Bytes {
    Bytes::from_static(b"p")
}

pub(crate) fn key_settled() -> Bytes {
    Bytes::from_static(b"t")
}

pub(crate) fn key_dirty(oid: &ObjectId) -> Bytes {
    [b"d", &oid.as_bytes()[..]].concat().into()
}

/// The op that removes all of the array's records except the dirty notes.
pub(crate) fn forget_all_but_dirty() -> Op {
    Op::OmapRemoveRange { oid: own_object(), from: Bytes::from_static(b"e"), to: Bytes::from_static(b"\xff") }
}

/// One of the array's records, decoded from its omap entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GroupEntry {
    Record(GroupRecord),
    Proposal(GroupRecord),
    Settled(ChangeId),
    Intent(StoredIntent),
    Dirty(ObjectId),
}

impl GroupEntry {
    /// Decodes a record from the key and the value of its omap entry.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if the entry is invalid.
    pub(crate) fn decode(key: &[u8], value: &[u8]) -> store::Result<GroupEntry> {
        let entry = match key.split_first() {
            Some((b'e', [])) => GroupRecord::decode(value).map(GroupEntry::Record),
            Some((b'p', [])) => GroupRecord::decode(value).map(GroupEntry::Proposal),
            Some((b't', [])) => ChangeId::decode(value).map(GroupEntry::Settled),
            Some((b's', [slot])) => StoredIntent::decode_slot(*slot, value).map(GroupEntry::Intent),
            Some((b'i', change)) => StoredIntent::decode_entry(change, value).map(GroupEntry::Intent),
            Some((b'd', oid)) => ObjectId::new(Bytes::copy_from_slice(oid)).ok().map(GroupEntry::Dirty),
            _ => None,
        };
        entry.ok_or_else(|| StoreError::Corrupt {
            what: "record of a placement group".into(),
            detail: format!("entry \"{}\" cannot be decoded", key.escape_ascii()),
        })
    }
}

/// Encodes a value for storage.
pub(crate) fn encode<T: Serialize>(value: &T) -> Bytes {
    // Encoding cannot fail: the output grows as needed, and the types are plain data.
    postcard::to_extend(value, Vec::with_capacity(USUAL)).expect("plain data can be encoded").into()
}

fn plain<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    postcard::from_bytes(bytes).ok()
}

fn fixed(id: Vec<u8>) -> ObjectId {
    ObjectId::new(id).expect("the id is not empty and not too long")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn decoding_arbitrary_record_entries_never_panics(key in proptest::collection::vec(any::<u8>(), 0..20), value in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = GroupEntry::decode(&key, &value);
        }
    }

    #[test]
    fn decoding_a_record_entry_returns_the_encoded_record() {
        let oid = ObjectId::new("object").unwrap();
        let change = |term, number| ChangeId { term, number };
        let standing = Standing::Stale { term: 2, settled: change(2, 5) };
        let member = MemberRecord { target: Uuid::from_u128(7), standing };
        let record = GroupRecord { term: 3, members: vec![member], undone: [change(2, 9)].into() };
        let touched = Touched {
            oid: oid.clone(),
            undo: Undo::Restore { size: 9000, saved: vec![(4096, 4096)] },
            xattrs: true,
            omap_keys: vec!["k".into()],
            omap_ranges: vec![("a".into(), None)],
        };
        let intent = Intent { objects: vec![touched] };
        let round = |key: Bytes, value: Bytes| GroupEntry::decode(&key, &value).unwrap();
        assert_eq!(round(key_proposal(), record.encode()), GroupEntry::Proposal(record.clone()));
        assert_eq!(round(key_record(), record.encode()), GroupEntry::Record(record));
        for change in [change(3, 5), change(0, 5)] {
            let settled = ChangeId::default();
            for place in [IntentPlace::of(change), IntentPlace::Entry(change)] {
                let stored = StoredIntent { change, settled, place, intent: intent.clone() };
                let (key, value) = stored.entry();
                assert_eq!(round(key, value), GroupEntry::Intent(stored));
            }
            assert_eq!(round(key_settled(), change.encode().into()), GroupEntry::Settled(change));
        }
        let place = IntentPlace::of(change(3, 5));
        let stored = StoredIntent { change: change(3, 5), settled: change(3, 4), place, intent };
        let misplaced = GroupEntry::decode(&IntentPlace::Slot(6).key(), &stored.encode());
        misplaced.unwrap_err();
        let wrong = StoredIntent { settled: change(3, 5), ..stored };
        GroupEntry::decode(&place.key(), &wrong.encode()).unwrap_err();
        assert_eq!(round(key_dirty(&oid), Bytes::new()), GroupEntry::Dirty(oid));
    }

    #[test]
    fn records_of_format_1_can_be_decoded() {
        // A record of term 3 with the members 7 (in sync), 8 (stale) and 9 (blank), and the intent 5
        // of a change without objects.
        let uuid = |n: u8| [&[16][..], &[0; 15], &[n]].concat();
        let members = [(7, 0), (8, 1), (9, 2)].map(|(n, standing)| [uuid(n), vec![standing]].concat());
        let stored = [&[1, 3, 3][..], &members.concat()].concat();
        let Ok(GroupEntry::Record(record)) = GroupEntry::decode(b"e", &stored) else { panic!() };
        let standings: Vec<Standing> = record.members.iter().map(|m| m.standing).collect();
        let stale = Standing::Stale { term: 0, settled: ChangeId::default() };
        assert_eq!((record.term, standings), (3, vec![Standing::InSync, stale, Standing::Blank]));
        assert_eq!(record.members[1].target, Uuid::from_u128(8));
        let change = ChangeId { term: 0, number: 5 };
        let place = IntentPlace::Entry(change);
        assert_eq!(place.key(), [&b"i"[..], &5u64.to_be_bytes()].concat());
        let GroupEntry::Intent(stored) = GroupEntry::decode(&place.key(), &[0]).unwrap() else { panic!() };
        assert_eq!((stored.change, stored.place, stored.intent.objects), (change, place, Vec::new()));
    }

    #[test]
    fn the_arrays_own_objects_are_recognized_by_their_ids() {
        let change = ChangeId { term: 1, number: 1 };
        assert!(
            [IntentPlace::of(change), IntentPlace::Entry(change)].iter().all(|p| is_own(&p.undo_object(0)))
        );
        assert!(!is_own(&ObjectId::new(&b"\0\0\0\0\0meta"[..]).unwrap()));
        assert!(!is_own(&ObjectId::new(&b"\0\0\0\0\x01\0a"[..]).unwrap()));
    }
}
