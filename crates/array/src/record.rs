//! The records that an array stores for itself, in addition to the objects of its owner. The
//! records are omap entries of one object in the group's collection. All members in sync have the
//! same entries, except for the undo information in the intents.
//!
//! ```text
//! e            membership record: term, members and their standings (format byte, then postcard)
//! p            proposed membership record, in force when all members listed as in sync have it
//! t            number up to which all transactions are settled (8 bytes)
//! i number     intent of transaction `number`: what it changes, and how to undo that (postcard)
//! d object     dirty note: the object `object` changed while a member was unavailable
//! ```
//!
//! A transaction copies the data that it overwrites to an undo object. The undo object stays until
//! every member has committed the transaction. If only some members commit it, those members
//! restore the old data from the undo object.

use bytes::{BufMut, Bytes, BytesMut};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use store::{ObjectId, Op, StoreError};
use uuid::Uuid;

const FORMAT: u8 = 1;
/// Prefix of the ids of the array's own objects, which sort before all other objects.
const OWN: &[u8] = b"\0\0\0\0\0a";

/// Name of the xattr that stores an object's size in bytes.
pub const SIZE_XATTR: Bytes = Bytes::from_static(b"a");

/// Standing of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Standing {
    /// The member has every acknowledged change.
    InSync,
    /// The member was unavailable. It lacks only changes of objects with dirty notes.
    Stale,
    /// The member's content is unknown. A rebuild copies everything.
    Blank,
}

/// A member: the target that stores the fragment of one position, and its standing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemberRecord {
    pub(crate) target: Uuid,
    pub(crate) standing: Standing,
}

/// Membership record of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GroupRecord {
    /// Number of the record, which grows with each change of the members in sync.
    pub(crate) term: u64,
    /// The members, in the order of their positions.
    pub(crate) members: Vec<MemberRecord>,
}

impl GroupRecord {
    /// Positions of the members in sync.
    pub(crate) fn in_sync(&self) -> impl Iterator<Item = usize> {
        (0..).zip(&self.members).filter(|(_, m)| m.standing == Standing::InSync).map(|(position, _)| position)
    }

    /// Returns true if a member needs dirty notes, because it is stale.
    pub(crate) fn needs_notes(&self) -> bool {
        self.members.iter().any(|m| m.standing == Standing::Stale)
    }

    /// Encodes the record for storage.
    pub(crate) fn encode(&self) -> Bytes {
        // Encoding cannot fail: the output grows as needed, and the type is plain data.
        postcard::to_extend(self, vec![FORMAT]).expect("plain data can be encoded").into()
    }

    fn decode(bytes: &[u8]) -> Option<GroupRecord> {
        postcard::from_bytes(bytes.strip_prefix(&[FORMAT])?).ok()
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
    /// The undo object contains these ranges (offset, length) of the old data, at the same offsets.
    /// The old fragment was `size` bytes long.
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

/// Id of the object that contains the array's records.
pub(crate) fn own_object() -> ObjectId {
    fixed([OWN, b"rray"].concat())
}

/// Id of the undo object for object number `index` of a transaction.
pub(crate) fn undo_object(intent: u64, index: usize) -> ObjectId {
    let mut id = BytesMut::from(OWN);
    id.put_slice(b"undo");
    id.put_u64(intent);
    id.put_u32(index as u32);
    fixed(id.to_vec())
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

pub(crate) fn key_trimmed() -> Bytes {
    Bytes::from_static(b"t")
}

pub(crate) fn key_intent(number: u64) -> Bytes {
    let mut key = BytesMut::with_capacity(9);
    key.put_u8(b'i');
    key.put_u64(number);
    key.freeze()
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
    Trimmed(u64),
    Intent(u64, Intent),
    Dirty(ObjectId),
}

impl GroupEntry {
    /// Decodes a record from the key and the value of its omap entry.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if the entry is invalid.
    pub(crate) fn decode(key: &[u8], value: &[u8]) -> store::Result<GroupEntry> {
        let number = |bytes: &[u8]| bytes.try_into().ok().map(u64::from_be_bytes);
        let entry = match key.split_first() {
            Some((b'e', [])) => GroupRecord::decode(value).map(GroupEntry::Record),
            Some((b'p', [])) => GroupRecord::decode(value).map(GroupEntry::Proposal),
            Some((b't', [])) => number(value).map(GroupEntry::Trimmed),
            Some((b'i', rest)) => {
                number(rest).zip(plain(value)).map(|(n, intent)| GroupEntry::Intent(n, intent))
            }
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
    postcard::to_allocvec(value).expect("plain data can be encoded").into()
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
        let member = MemberRecord { target: Uuid::from_u128(7), standing: Standing::Stale };
        let record = GroupRecord { term: 3, members: vec![member] };
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
        assert_eq!(round(key_intent(5), encode(&intent)), GroupEntry::Intent(5, intent));
        assert_eq!(round(key_trimmed(), 4u64.to_be_bytes().to_vec().into()), GroupEntry::Trimmed(4));
        assert_eq!(round(key_dirty(&oid), Bytes::new()), GroupEntry::Dirty(oid));
    }

    #[test]
    fn the_arrays_own_objects_are_recognized_by_their_ids() {
        assert!(is_own(&own_object()) && is_own(&undo_object(1, 0)));
        assert!(!is_own(&ObjectId::new(&b"\0\0\0\0\0meta"[..]).unwrap()));
        assert!(!is_own(&ObjectId::new(&b"\0\0\0\0\x01\0a"[..]).unwrap()));
    }
}
