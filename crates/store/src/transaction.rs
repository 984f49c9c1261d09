//! Ids of collections and objects, and transactions.

use std::fmt;

use base::block::{BLOCK, Payload};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{Result, StageId, StoreError};

/// Maximum length of a collection id, in bytes.
pub const MAX_COLLECTION_ID: usize = 128;
/// Maximum length of an object id, in bytes.
pub const MAX_OBJECT_ID: usize = 2048;
/// Maximum size of all xattrs of one object, names and values together, in bytes.
pub const MAX_XATTRS: usize = wire::limits::MAX_XATTRS;

macro_rules! opaque_id {
    ($(#[$doc:meta])* $name:ident, $max:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "Bytes", into = "Bytes")]
        pub struct $name(Bytes);

        impl $name {
            /// Creates an id from the given bytes.
            ///
            /// # Errors
            /// [`StoreError::InvalidArgument`] if `id` is empty or too long.
            pub fn new(id: impl Into<Bytes>) -> Result<$name> {
                let id = id.into();
                if id.is_empty() || id.len() > $max {
                    return Err(StoreError::InvalidArgument(format!(
                        concat!(stringify!($name), " has {} bytes, but must have 1 to {}"), id.len(), $max
                    )));
                }
                Ok($name(id))
            }

            /// Returns the bytes of the id.
            #[must_use]
            pub fn as_bytes(&self) -> &Bytes {
                &self.0
            }
        }

        impl TryFrom<Bytes> for $name {
            type Error = StoreError;
            fn try_from(id: Bytes) -> Result<$name> {
                $name::new(id)
            }
        }

        impl From<$name> for Bytes {
            fn from(id: $name) -> Bytes {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "\"{}\"", self.0.escape_ascii())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

opaque_id!(
    /// Id of a collection: opaque bytes, ordered bytewise.
    CollectionId,
    MAX_COLLECTION_ID
);
opaque_id!(
    /// Id of an object in its collection: opaque bytes, ordered bytewise.
    ObjectId,
    MAX_OBJECT_ID
);

/// The source of the data of an [`Op::Write`].
#[derive(Debug, Clone, PartialEq)]
pub enum WriteSource {
    /// The transaction contains the data. The payload's block_offset (the offset of its first byte
    /// within a block) must equal the write's offset modulo the block size.
    Inline(Payload),
    /// Bytes `offset..offset + len` of a stage. `offset` and the write's own offset must be
    /// multiples of the block size. `len` must also be a multiple of the block size, unless the
    /// write ends at the end of the stage and at or beyond the object's end.
    Staged {
        /// The stage.
        stage: StageId,
        /// Offset in the stage at which the bytes start, in bytes.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
}

impl WriteSource {
    /// Returns the number of bytes to write.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            WriteSource::Inline(payload) => payload.len() as u64,
            WriteSource::Staged { len, .. } => *len,
        }
    }

    /// Whether the number of bytes to write is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One operation of a transaction, on the transaction's collection. If the object of an op does not
/// exist, the op first creates an empty object, unless the op's description says otherwise. An op
/// with an empty range leaves data and size unchanged.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Op {
    /// Creates the object if it does not exist.
    Touch {
        /// The object.
        oid: ObjectId,
    },
    /// Creates the object; fails with [`StoreError::Exists`] if it exists.
    CreateExclusive {
        /// The object.
        oid: ObjectId,
    },
    /// Writes bytes at an offset. Extends the object as needed; the gap between the old end and the
    /// offset is a hole, which reads as zeros.
    Write {
        /// The object.
        oid: ObjectId,
        /// Offset in the object at which the range starts, in bytes.
        offset: u64,
        /// The data to write.
        source: WriteSource,
    },
    /// Sets a range to zeros. Extends the object as needed, and frees the blocks that lie
    /// completely in the range.
    Zero {
        /// The object.
        oid: ObjectId,
        /// Offset in the object at which the range starts, in bytes.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Sets the object's size. New bytes read as zeros. Bytes beyond the new size are discarded.
    Truncate {
        /// The object.
        oid: ObjectId,
        /// The new size, in bytes.
        size: u64,
    },
    /// Removes the object with its data, xattrs and omap. Fails with [`StoreError::NoSuchObject`]
    /// if it does not exist.
    Remove {
        /// The object.
        oid: ObjectId,
    },
    /// Sets xattrs.
    SetXattrs {
        /// The object.
        oid: ObjectId,
        /// Names and values. All xattrs of an object together are at most [`MAX_XATTRS`] bytes.
        xattrs: Vec<(Bytes, Bytes)>,
    },
    /// Removes an xattr. Succeeds even if the xattr does not exist.
    RemoveXattr {
        /// The object.
        oid: ObjectId,
        /// The xattr's name.
        name: Bytes,
    },
    /// Removes all xattrs of the object.
    RemoveXattrs {
        /// The object.
        oid: ObjectId,
    },
    /// Sets entries of the object's omap.
    OmapSet {
        /// The object.
        oid: ObjectId,
        /// Keys and values.
        entries: Vec<(Bytes, Bytes)>,
    },
    /// Removes omap entries. Ignores keys that do not exist.
    OmapRemove {
        /// The object.
        oid: ObjectId,
        /// The keys.
        keys: Vec<Bytes>,
    },
    /// Removes the omap entries with `from <= key < to`.
    OmapRemoveRange {
        /// The object.
        oid: ObjectId,
        /// First key of the range.
        from: Bytes,
        /// End of the range, exclusive.
        to: Bytes,
    },
    /// Removes all omap entries and the header.
    OmapClear {
        /// The object.
        oid: ObjectId,
    },
    /// Sets the omap's header.
    OmapSetHeader {
        /// The object.
        oid: ObjectId,
        /// The header. An empty header is the same as no header.
        header: Bytes,
    },
    /// Makes `dst` a copy of `src`, with data, xattrs and omap. Both objects share blocks until one
    /// of the objects overwrites them. The earlier content of `dst` is discarded. Fails with
    /// [`StoreError::NoSuchObject`] if `src` does not exist.
    Clone {
        /// The object to copy.
        src: ObjectId,
        /// The object that becomes the copy.
        dst: ObjectId,
    },
    /// Copies a range of `src` into `dst`, and extends `dst` as needed. If both offsets are equal
    /// modulo the block size, the objects share the whole blocks of the range. Bytes beyond the end
    /// of `src` read as zeros. Fails with [`StoreError::NoSuchObject`] if `src` does not exist.
    CloneRange {
        /// The object to copy from.
        src: ObjectId,
        /// The object to copy into.
        dst: ObjectId,
        /// Offset in `src` at which the range starts, in bytes.
        src_offset: u64,
        /// Number of bytes.
        len: u64,
        /// Offset in `dst` at which the copy starts, in bytes.
        dst_offset: u64,
    },
    /// Moves an object, possibly to another collection. Fails with [`StoreError::NoSuchObject`] if
    /// `src` does not exist, and with [`StoreError::Exists`] if `dst` exists. The transaction is
    /// ordered with the requests of both collections.
    MoveRename {
        /// The object, in the transaction's collection.
        src: ObjectId,
        /// The collection to which the object moves.
        dst_collection: CollectionId,
        /// The object's new id in that collection.
        dst: ObjectId,
    },
    /// Fails with [`StoreError::GuardFailed`] unless the xattr has the given value at this point of
    /// the transaction. Changes nothing and creates no object.
    GuardXattr {
        /// The object.
        oid: ObjectId,
        /// The xattr's name.
        name: Bytes,
        /// The expected value. `None` if the xattr, or the object, must not exist.
        value: Option<Bytes>,
    },
    /// Fails with [`StoreError::GuardFailed`] unless the omap entry has the given value at this
    /// point of the transaction. Changes nothing and creates no object.
    GuardOmap {
        /// The object.
        oid: ObjectId,
        /// The entry's key.
        key: Bytes,
        /// The expected value. `None` if the entry, or the object, must not exist.
        value: Option<Bytes>,
    },
    /// Creates the transaction's collection; fails with [`StoreError::Exists`] if it exists.
    CreateCollection,
    /// Removes the transaction's collection; fails with [`StoreError::NotEmpty`] if it has objects.
    RemoveCollection,
    /// Moves every object whose id is `at` or higher to the collection `dst`, which must exist. If
    /// ids start with a hash, this op can split a placement group. The transaction is ordered with
    /// the requests of both collections.
    SplitCollection {
        /// Lowest id of the objects that move.
        at: ObjectId,
        /// The collection to which the objects move.
        dst: CollectionId,
    },
}

/// Ops on one collection. A store applies all of them or none of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Transaction {
    /// The collection that the ops change. The transaction is ordered with the other requests of
    /// this collection.
    pub collection: CollectionId,
    /// The ops, in order. Each op sees the effects of the earlier ops.
    pub ops: Vec<Op>,
    /// Whether the transaction may use the reserve, so that a full target can be managed, emptied
    /// and recovered. Set this field for the node's own records, for recovery and for removals, but
    /// not for user data.
    pub uses_reserve: bool,
}

impl Transaction {
    /// Creates an empty transaction on `collection`.
    #[must_use]
    pub fn new(collection: CollectionId) -> Transaction {
        Transaction { collection, ops: Vec::new(), uses_reserve: false }
    }

    /// Appends an op.
    #[must_use]
    pub fn with(mut self, op: Op) -> Transaction {
        self.ops.push(op);
        self
    }

    /// Allows the transaction to use the reserve (see [`Transaction::uses_reserve`]).
    #[must_use]
    pub fn from_reserve(mut self) -> Transaction {
        self.uses_reserve = true;
        self
    }
}

/// Maximum size of an object, in bytes (16 TiB).
pub const MAX_STORED_OBJECT: u64 = 1 << 44;
/// Maximum length of an omap key and of an xattr name, in bytes.
pub const MAX_STORED_KEY: usize = 2048;
/// Maximum length of an omap value and of an omap header, in bytes.
pub const MAX_STORED_VALUE: usize = 1 << 20;

/// Maximum number of bytes that one read returns.
pub const MAX_READ: u64 = 256 << 20;
/// Maximum number of bytes that one [`Op::CloneRange`] copies.
pub const MAX_CLONE_RANGE: u64 = 1 << 30;

impl Transaction {
    /// Checks the ranges, phases and lengths of all ops, without access to any object. Every store
    /// does this check first.
    ///
    /// # Errors
    /// [`StoreError::InvalidArgument`] or [`StoreError::TooLarge`] for the first invalid op.
    pub fn validate(&self) -> Result<()> {
        self.ops.iter().try_for_each(Op::validate)
    }

    /// Whether the transaction may change an object: its existence, its data or its metadata.
    pub(crate) fn changes(&self, cid: &CollectionId, oid: &ObjectId) -> bool {
        let is_here = self.collection == *cid;
        self.ops.iter().any(|op| match op {
            Op::Touch { oid: changed }
            | Op::CreateExclusive { oid: changed }
            | Op::Write { oid: changed, .. }
            | Op::Zero { oid: changed, .. }
            | Op::Truncate { oid: changed, .. }
            | Op::Remove { oid: changed }
            | Op::SetXattrs { oid: changed, .. }
            | Op::RemoveXattr { oid: changed, .. }
            | Op::RemoveXattrs { oid: changed }
            | Op::OmapSet { oid: changed, .. }
            | Op::OmapRemove { oid: changed, .. }
            | Op::OmapRemoveRange { oid: changed, .. }
            | Op::OmapClear { oid: changed }
            | Op::OmapSetHeader { oid: changed, .. }
            | Op::Clone { dst: changed, .. }
            | Op::CloneRange { dst: changed, .. } => is_here && changed == oid,
            Op::MoveRename { src, dst_collection, dst } => {
                (is_here && src == oid) || (dst_collection == cid && dst == oid)
            }
            Op::SplitCollection { at, dst } => (is_here || dst == cid) && oid >= at,
            Op::CreateCollection | Op::RemoveCollection => is_here,
            Op::GuardXattr { .. } | Op::GuardOmap { .. } => false,
        })
    }
}

impl Op {
    fn validate(&self) -> Result<()> {
        match self {
            Op::Write { offset, source, .. } => {
                check_range(*offset, source.len())?;
                check_source(*offset, source)
            }
            Op::Zero { offset, len, .. } => check_range(*offset, *len),
            Op::Truncate { size, .. } => check_range(*size, 0),
            Op::CloneRange { src_offset, len, dst_offset, .. } => {
                check_range(*src_offset, *len)?;
                check_len(
                    "length in bytes of the range to clone",
                    usize::try_from(*len).unwrap_or(usize::MAX),
                    MAX_CLONE_RANGE as usize,
                )?;
                check_range(*dst_offset, *len)
            }
            Op::SetXattrs { xattrs, .. } => xattrs.iter().try_for_each(|(name, value)| {
                check_len("length in bytes of an xattr name", name.len(), MAX_STORED_KEY)?;
                check_len("length in bytes of an xattr value", value.len(), MAX_XATTRS)
            }),
            Op::OmapSet { entries, .. } => entries.iter().try_for_each(|(key, value)| {
                check_len("length in bytes of an omap key", key.len(), MAX_STORED_KEY)?;
                check_len("length in bytes of an omap value", value.len(), MAX_STORED_VALUE)
            }),
            Op::OmapSetHeader { header, .. } => {
                check_len("length in bytes of an omap header", header.len(), MAX_STORED_VALUE)
            }
            Op::GuardXattr { name, value, .. } => {
                check_len("length in bytes of an xattr name", name.len(), MAX_STORED_KEY)?;
                let len = value.as_ref().map_or(0, Bytes::len);
                check_len("length in bytes of an xattr value", len, MAX_XATTRS)
            }
            Op::GuardOmap { key, value, .. } => {
                check_len("length in bytes of an omap key", key.len(), MAX_STORED_KEY)?;
                let len = value.as_ref().map_or(0, Bytes::len);
                check_len("length in bytes of an omap value", len, MAX_STORED_VALUE)
            }
            _ => Ok(()),
        }
    }
}

/// Compares a value with the expected value of a guard. `name` names the value for the error.
///
/// # Errors
/// [`StoreError::GuardFailed`] if the values differ.
pub(crate) fn check_guard(
    found: Option<&Bytes>,
    expected: Option<&Bytes>,
    name: impl FnOnce() -> String,
) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let found = if found.is_some() { "has another value" } else { "does not exist" };
    Err(StoreError::GuardFailed(format!("{} {found}", name())))
}

/// Names an xattr or an omap entry in the error of a guard.
pub(crate) fn guarded(what: &str, name: &[u8], oid: &ObjectId) -> String {
    format!("{what} \"{}\" of object {oid}", name.escape_ascii())
}

fn check_range(offset: u64, len: u64) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= MAX_STORED_OBJECT => Ok(()),
        _ => Err(StoreError::InvalidArgument(format!(
            "a range of {len} bytes at offset {offset} ends beyond the maximum object size of {MAX_STORED_OBJECT} bytes"
        ))),
    }
}

fn check_source(offset: u64, source: &WriteSource) -> Result<()> {
    match source {
        WriteSource::Inline(payload) if payload.block_offset() != offset % BLOCK => {
            Err(StoreError::InvalidArgument(format!(
                "a payload with block_offset {} cannot be written at offset {offset}: the block_offset must equal the offset modulo {BLOCK}",
                payload.block_offset()
            )))
        }
        WriteSource::Staged { offset: from, .. }
            if !offset.is_multiple_of(BLOCK) || !from.is_multiple_of(BLOCK) =>
        {
            Err(StoreError::InvalidArgument(format!(
                "bytes at offset {from} of a stage cannot be written at offset {offset} of an object: both offsets must be multiples of {BLOCK}"
            )))
        }
        _ => Ok(()),
    }
}

fn check_len(what: &str, size: usize, limit: usize) -> Result<()> {
    if size > limit {
        return Err(StoreError::TooLarge { what: what.to_owned(), size: size as u64, limit: limit as u64 });
    }
    Ok(())
}
