//! Ids and transactions.

use std::fmt;

use base::block::{BLOCK, Payload};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{Result, StageId, StoreError};

/// Longest collection id, in bytes.
pub const MAX_COLLECTION_ID: usize = 128;
/// Longest object id, in bytes.
pub const MAX_OBJECT_ID: usize = 2048;
/// Most bytes of xattrs that one object can have, names and values together.
pub const MAX_XATTRS: usize = 64 * 1024;

macro_rules! opaque_id {
    ($(#[$doc:meta])* $name:ident, $max:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "Bytes", into = "Bytes")]
        pub struct $name(Bytes);

        impl $name {
            /// Makes an id of the given bytes.
            ///
            /// # Errors
            /// [`StoreError::InvalidArgument`] if `id` is empty or too long.
            pub fn new(id: impl Into<Bytes>) -> Result<$name> {
                let id = id.into();
                if id.is_empty() || id.len() > $max {
                    return Err(StoreError::InvalidArgument(format!(
                        concat!(stringify!($name), " has {} bytes; 1 to {} are possible"), id.len(), $max
                    )));
                }
                Ok($name(id))
            }

            /// The id's bytes.
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
    /// Name of a collection: opaque bytes, ordered bytewise.
    CollectionId,
    MAX_COLLECTION_ID
);
opaque_id!(
    /// Name of an object within its collection: opaque bytes, ordered bytewise.
    ObjectId,
    MAX_OBJECT_ID
);

/// The source of the bytes of an [`Op::Write`].
#[derive(Debug, Clone, PartialEq)]
pub enum WriteSource {
    /// In the transaction itself. The payload's phase must be the write's offset modulo the block size.
    Inline(Payload),
    /// Bytes `offset..offset + len` of a stage. `offset` and the write's own offset must be
    /// multiples of the block size. `len` must be one too, unless the write ends at or beyond the
    /// object's end.
    Staged {
        /// The stage.
        stage: StageId,
        /// First byte, from the start of the stage.
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

    /// Whether there are no bytes to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One step of a transaction, on the transaction's collection. An op on an object creates an empty
/// object if it does not exist, unless its description says otherwise. An op with an empty range
/// leaves data and size unchanged.
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
    /// Writes bytes at an offset, extending the object as needed. Holes read as zeros.
    Write {
        /// The object.
        oid: ObjectId,
        /// First byte, in bytes from the object's start.
        offset: u64,
        /// The bytes.
        source: WriteSource,
    },
    /// Makes a range zero, extends the object as needed, and frees the range's whole blocks.
    Zero {
        /// The object.
        oid: ObjectId,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Sets the object's size. New bytes read as zeros. Bytes beyond the new size are lost.
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
    /// Removes an xattr, whether it exists or not.
    RemoveXattr {
        /// The object.
        oid: ObjectId,
        /// The xattr's name.
        name: Bytes,
    },
    /// Removes all xattrs.
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
    /// Removes omap entries, whether they exist or not.
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
        /// First key.
        from: Bytes,
        /// End, exclusive.
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
        /// The header. An empty header equals no header.
        header: Bytes,
    },
    /// Makes `dst` a copy of `src`: data, xattrs and omap. Both share extents until one of them is
    /// overwritten. The earlier content of `dst` is lost. Fails with [`StoreError::NoSuchObject`]
    /// if `src` does not exist.
    Clone {
        /// To be copied.
        src: ObjectId,
        /// The copy.
        dst: ObjectId,
    },
    /// Copies a range of `src` into `dst`, and extends `dst` as needed. Whole blocks are shared
    /// where both offsets allow it. Bytes beyond the end of `src` read as zeros. Fails with
    /// [`StoreError::NoSuchObject`] if `src` does not exist.
    CloneRange {
        /// To be copied from.
        src: ObjectId,
        /// To be copied into.
        dst: ObjectId,
        /// First byte in `src`.
        src_offset: u64,
        /// Number of bytes.
        len: u64,
        /// First byte in `dst`.
        dst_offset: u64,
    },
    /// Moves an object, possibly to another collection. Fails with [`StoreError::NoSuchObject`] if
    /// `src` does not exist, and with [`StoreError::Exists`] if `dst` does. The op takes its place
    /// in the order of both collections.
    MoveRename {
        /// The object, in the transaction's collection.
        src: ObjectId,
        /// The collection it goes to.
        dst_collection: CollectionId,
        /// Its name there.
        dst: ObjectId,
    },
    /// Creates the transaction's collection; fails with [`StoreError::Exists`] if it exists.
    CreateCollection,
    /// Removes the transaction's collection; fails with [`StoreError::NotEmpty`] if it has objects.
    RemoveCollection,
    /// Moves every object with an id of at least `at` to `dst`, which must exist. If ids start with
    /// a hash, this splits a placement group. The op takes its place in the order of both
    /// collections.
    SplitCollection {
        /// First id that moves.
        at: ObjectId,
        /// The collection it moves to.
        dst: CollectionId,
    },
}

/// Ops on one collection, applied completely or not at all.
#[derive(Debug, Clone, PartialEq)]
pub struct Transaction {
    /// The collection that the ops change, and whose order the transaction is part of.
    pub collection: CollectionId,
    /// The steps. Each step sees the effects of the earlier ones.
    pub ops: Vec<Op>,
    /// Whether the transaction may use the reserve, so that a full store can be operated, emptied
    /// and recovered. This is for the node's own records, for recovery and for removals, but not
    /// for user data.
    pub uses_reserve: bool,
}

impl Transaction {
    /// An empty transaction on `collection`.
    #[must_use]
    pub fn new(collection: CollectionId) -> Transaction {
        Transaction { collection, ops: Vec::new(), uses_reserve: false }
    }

    /// Appends a step.
    #[must_use]
    pub fn with(mut self, op: Op) -> Transaction {
        self.ops.push(op);
        self
    }

    /// Lets the transaction use the reserve (see [`Transaction::uses_reserve`]).
    #[must_use]
    pub fn from_reserve(mut self) -> Transaction {
        self.uses_reserve = true;
        self
    }
}

/// Largest object, in bytes (16 TiB).
pub const MAX_OBJECT_SIZE: u64 = 1 << 44;
/// Longest key of an omap and longest name of an xattr, in bytes.
pub const MAX_OMAP_KEY: usize = 2048;
/// Longest value of an omap, and longest omap header, in bytes.
pub const MAX_OMAP_VALUE: usize = 1 << 20;

/// Most bytes that one read returns.
pub const MAX_READ: u64 = 256 << 20;
/// Most bytes that one [`Op::CloneRange`] copies.
pub const MAX_CLONE_RANGE: u64 = 1 << 30;

impl Transaction {
    /// Checks ranges, phases and lengths, which need no look at any object. Every store does this
    /// first.
    ///
    /// # Errors
    /// [`StoreError::InvalidArgument`] or [`StoreError::TooLarge`] for the first op that no store
    /// can accept.
    pub fn validate(&self) -> Result<()> {
        self.ops.iter().try_for_each(Op::validate)
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
                    "range to be cloned",
                    usize::try_from(*len).unwrap_or(usize::MAX),
                    MAX_CLONE_RANGE as usize,
                )?;
                check_range(*dst_offset, *len)
            }
            Op::SetXattrs { xattrs, .. } => xattrs.iter().try_for_each(|(name, value)| {
                check_len("xattr name", name.len(), MAX_OMAP_KEY)?;
                check_len("xattr value", value.len(), MAX_XATTRS)
            }),
            Op::OmapSet { entries, .. } => entries.iter().try_for_each(|(key, value)| {
                check_len("omap key", key.len(), MAX_OMAP_KEY)?;
                check_len("omap value", value.len(), MAX_OMAP_VALUE)
            }),
            Op::OmapSetHeader { header, .. } => check_len("omap header", header.len(), MAX_OMAP_VALUE),
            _ => Ok(()),
        }
    }
}

fn check_range(offset: u64, len: u64) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= MAX_OBJECT_SIZE => Ok(()),
        _ => Err(StoreError::InvalidArgument(format!(
            "range {offset}+{len} ends beyond the largest object of {MAX_OBJECT_SIZE} bytes"
        ))),
    }
}

fn check_source(offset: u64, source: &WriteSource) -> Result<()> {
    match source {
        WriteSource::Inline(payload) if payload.phase() != offset % BLOCK => {
            Err(StoreError::InvalidArgument(format!(
                "payload for phase {} written at offset {offset}",
                payload.phase()
            )))
        }
        WriteSource::Staged { offset: from, .. }
            if !offset.is_multiple_of(BLOCK) || !from.is_multiple_of(BLOCK) =>
        {
            Err(StoreError::InvalidArgument(format!(
                "staged bytes {from} written at {offset}: not whole blocks"
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
