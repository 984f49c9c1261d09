//! The effect of requests on one object, as pure functions.
//!
//! This module implements the part of `docs/semantics.md` that concerns single objects, in the
//! simplest way: a change clones the object, and applies its operations one after the other.
//! [`MemEngine`](super::MemEngine) stores the results. A simulator compares the answers of a node
//! with them. Because a simulator handles many large objects, the functions do not depend on the
//! representation of an object's data, which is a type parameter ([`Content`]).

mod bulk_blocks;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;

use base::block::{BLOCK, align_down};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use wire::{
    Condition, Error as E, Manifest, Mutation, ObjectName, OpBytes, QueryAnswer, QueryOp, StatAnswer, limits,
};

use super::EngineLimits;
use crate::{Error, Result};
use bulk_blocks::BulkBlocks;
pub use bulk_blocks::BulkRule;

/// Size of a node's own xattrs of an object, in bytes.
const OWN_XATTRS: usize = 100;

/// Data of an object.
pub trait Content: Debug + Clone + Default {
    /// Data of one operation.
    type Piece;

    /// Returns the size in bytes.
    fn size(&self) -> u64;

    /// Returns the number of bytes of an operation's data.
    fn piece_len(piece: &Self::Piece) -> u64;

    /// Changes the size. New bytes are zero.
    fn resize(&mut self, size: u64);

    /// Replaces the bytes from `offset` on. The range lies within the data.
    fn write(&mut self, offset: u64, piece: &Self::Piece);

    /// Sets bytes to zero. The range lies within the data.
    fn zero(&mut self, range: Range<u64>);

    /// Returns whether the data has these bytes at this offset.
    fn has_bytes(&self, offset: u64, bytes: &[u8]) -> bool;

    /// Returns the extents of the data in a range, in ascending order; `None` if the data does not
    /// record its holes. The range may end beyond the data.
    fn extents(&self, _range: Range<u64>) -> Option<Vec<Range<u64>>> {
        None
    }
}

/// State of an object that exists.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelledObject<C> {
    /// Version of the last change.
    pub version: u64,
    /// Time of the last change, in milliseconds since 1970.
    pub modified_ms: u64,
    /// Data; empty if the object is striped.
    pub data: C,
    /// The manifest, if the object is striped.
    pub manifest: Option<Manifest>,
    /// The xattrs.
    pub xattrs: BTreeMap<Bytes, Bytes>,
    /// The omap.
    pub omap: BTreeMap<Bytes, Bytes>,
}

impl<C: Content> ModelledObject<C> {
    /// Returns the size that users see, in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.manifest.map_or(self.data.size(), |manifest| manifest.size)
    }
}

/// A change of one object.
#[derive(Debug, Clone, Copy)]
pub struct ObjectChange<'a, C: Content> {
    /// The object, for errors.
    pub name: &'a ObjectName,
    /// Conditions on the object before the change.
    pub conditions: &'a [Condition],
    /// The operations, in the order of their execution.
    pub ops: &'a [Mutation],
    /// Data of each operation; `None` for operations without data.
    pub pieces: &'a [Option<C::Piece>],
    /// Operations that the engine refuses after an operation with bulk data.
    pub bulk_rule: BulkRule,
    /// The object that [`Mutation::Inherit`] copies; `None` if none of its objects exists.
    pub inherited: Option<&'a ModelledObject<C>>,
}

/// Effect of a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Effect<C> {
    /// The object after the change, still with the version and time of the object before the
    /// change; `None` if the object does not exist any more.
    pub object: Option<ModelledObject<C>>,
    /// Offset at which the last append wrote its data; 0 if there was no append.
    pub appended_at: u64,
}

impl<C: Content> Effect<C> {
    /// Returns the object's size after the change, in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.object.as_ref().map_or(0, ModelledObject::size)
    }
}

impl<C: Content> ObjectChange<'_, C> {
    /// Returns the effect of the change on an object. The caller has already checked the change
    /// itself ([`check_payload`], `wire::Mutate::check`).
    ///
    /// # Errors
    /// The first error, in the order that `docs/semantics.md` specifies. The change then has no
    /// effect.
    pub fn apply(&self, object: Option<&ModelledObject<C>>) -> Result<Effect<C>> {
        check_conditions(self.name, object, self.conditions)?;
        let bulk = BulkBlocks::new(self.bulk_rule);
        let mut state = ExecutionState { name: self.name, object: object.cloned(), appended_at: 0, bulk };
        for (op, piece) in self.ops.iter().zip(self.pieces) {
            match op {
                Mutation::Inherit(_) if state.object.is_some() => {}
                Mutation::Inherit(_) => state.object = self.inherited.cloned(),
                op => state.apply(op, piece.as_ref())?,
            }
        }
        Ok(Effect { object: state.object, appended_at: state.appended_at })
    }
}

/// Returns the error for an object that does not exist.
#[must_use]
pub fn missing(name: &ObjectName) -> Error {
    E::NoSuchObject(name.to_string()).into()
}

/// Returns the error for an object that is striped.
pub(super) fn striped(name: &ObjectName, what: &str) -> Error {
    E::Striped { name: name.to_string(), what: what.to_owned() }.into()
}

/// Checks conditions on an object.
///
/// # Errors
/// [`ConditionFailed`](E::ConditionFailed) for the first condition that does not hold.
pub fn check_conditions<C: Content>(
    name: &ObjectName,
    object: Option<&ModelledObject<C>>,
    conditions: &[Condition],
) -> Result<()> {
    for (index, condition) in conditions.iter().enumerate() {
        let holds = match condition {
            Condition::Exists => object.is_some(),
            Condition::Absent => object.is_none(),
            Condition::Version(version) => object.is_some_and(|o| o.version == *version),
            Condition::Xattr(xattr, value) => object.and_then(|o| o.xattrs.get(xattr)) == value.as_ref(),
            Condition::Omap(key, value) => object.and_then(|o| o.omap.get(key)) == value.as_ref(),
            Condition::Bytes(offset, bytes) => match object {
                Some(object) if object.manifest.is_some() => return Err(striped(name, "comparing bytes")),
                Some(object) => object.data.has_bytes(*offset, bytes),
                None => false,
            },
        };
        if !holds {
            let index = u16::try_from(index).unwrap_or(u16::MAX);
            return Err(E::ConditionFailed { index, detail: format!("expected {condition:?}") }.into());
        }
    }
    Ok(())
}

/// Checks whether the payload of a change, which has `len` bytes, is small enough for an op.
///
/// # Errors
/// [`TooLarge`](E::TooLarge) if the payload is too large.
pub fn check_payload(op: &Mutation, len: u64) -> Result<()> {
    match op {
        Mutation::Write { offset, source: OpBytes::Payload } => checked(*offset, len).map(drop),
        Mutation::WriteFull(OpBytes::Payload) => checked(0, len).map(drop),
        Mutation::Append(OpBytes::Payload) if len > limits::MAX_APPEND => {
            Err(E::TooLarge { what: "append".into(), size: len, limit: limits::MAX_APPEND }.into())
        }
        _ => Ok(()),
    }
}

fn check_xattrs(xattrs: &BTreeMap<Bytes, Bytes>) -> Result<()> {
    // A node stores each name with a prefix of one byte.
    let size = xattrs.iter().map(|(name, value)| 1 + name.len() + value.len()).sum::<usize>() + OWN_XATTRS;
    let (size, limit) = (size as u64, limits::MAX_XATTRS as u64);
    if size > limit {
        let what = "size in bytes of all xattrs of an object".into();
        return Err(E::TooLarge { what, size, limit }.into());
    }
    Ok(())
}

/// A change in progress, with the state of the object after the ops applied so far.
struct ExecutionState<'a, C> {
    name: &'a ObjectName,
    /// `None` while the object does not exist.
    object: Option<ModelledObject<C>>,
    appended_at: u64,
    bulk: BulkBlocks,
}

impl<C: Content> ExecutionState<'_, C> {
    /// Applies one op with its data.
    fn apply(&mut self, op: &Mutation, piece: Option<&C::Piece>) -> Result<()> {
        let ExecutionState { name, object, appended_at, bulk } = self;
        let name = *name;
        match op {
            Mutation::Create if object.is_some() => return Err(E::Exists(name.to_string()).into()),
            Mutation::Remove if object.is_none() => return Err(missing(name)),
            Mutation::Remove => {
                *object = None;
                bulk.clear();
                return Ok(());
            }
            _ => {}
        }
        let object = object.get_or_insert_default();
        let refuse_striped = |what| if object.manifest.is_some() { Err(striped(name, what)) } else { Ok(()) };
        let size = object.data.size();
        match op {
            Mutation::Touch | Mutation::Create => {}
            Mutation::Write { offset, source } => {
                refuse_striped("writing at an offset")?;
                write(&mut object.data, bulk, *offset, source, piece)?;
            }
            Mutation::WriteFull(source) => {
                object.manifest = None;
                object.data = C::default();
                bulk.clear();
                write(&mut object.data, bulk, 0, source, piece)?;
            }
            Mutation::Append(source) => {
                refuse_striped("appending")?;
                *appended_at = size;
                write(&mut object.data, bulk, size, source, piece)?;
            }
            Mutation::Truncate(to) => {
                refuse_striped("truncating")?;
                bulk.truncate(*to, size)?;
                object.data.resize(checked(*to, 0)?);
            }
            Mutation::Zero { offset, len } => {
                refuse_striped("zeroing")?;
                let end = checked(*offset, *len)?;
                if *len > 0 {
                    if *offset < size {
                        bulk.change(*offset..size.min(end), size)?;
                    }
                    object.data.resize(size.max(end));
                    object.data.zero(*offset..end);
                }
            }
            Mutation::SetXattr(xattr, value) => {
                object.xattrs.insert(xattr.clone(), value.clone());
                check_xattrs(&object.xattrs)?;
            }
            Mutation::RemoveXattr(xattr) => {
                object.xattrs.remove(xattr);
            }
            Mutation::OmapSet(entries) => object.omap.extend(entries.iter().cloned()),
            Mutation::OmapRemove(keys) => keys.iter().for_each(|key| {
                object.omap.remove(key);
            }),
            Mutation::OmapRemoveRange(from, to) => object.omap.retain(|key, _| key < from || key >= to),
            Mutation::OmapClear => object.omap.clear(),
            Mutation::SetManifest(manifest) => {
                object.data = C::default();
                bulk.clear();
                object.manifest = Some(*manifest);
            }
            other => {
                return Err(E::BadRequest(format!("the model does not support {other:?}")).into());
            }
        }
        Ok(())
    }
}

/// Writes the data of an op at an offset. An empty write does not extend the object.
fn write<C: Content>(
    data: &mut C,
    bulk: &mut BulkBlocks,
    offset: u64,
    source: &OpBytes,
    piece: Option<&C::Piece>,
) -> Result<()> {
    let piece = piece.ok_or_else(|| Error::Argument("the op has no data".into()))?;
    let len = C::piece_len(piece);
    let end = checked(offset, len)?;
    if len == 0 {
        return Ok(());
    }
    let (range, size) = (offset..end, data.size());
    match source {
        OpBytes::Embedded(_) => bulk.change(range, size)?,
        OpBytes::Payload => bulk.fill(range, size),
    }
    data.resize(size.max(end));
    data.write(offset, piece);
    Ok(())
}

/// Returns the end of a range. Fails if the end exceeds the maximum size of an object.
fn checked(offset: u64, len: u64) -> Result<u64> {
    let limit = EngineLimits::PROTOCOL.object_bytes_max;
    match offset.checked_add(len) {
        Some(end) if end <= limit => Ok(end),
        end => {
            let size = end.unwrap_or(u64::MAX);
            Err(E::TooLarge { what: "the object".into(), size, limit }.into())
        }
    }
}

/// Answers a query about an object.
///
/// # Errors
/// [`BadRequest`](E::BadRequest) if the model does not know the query, or the data does not record
/// its holes.
pub fn answer<C: Content>(object: &ModelledObject<C>, op: &QueryOp) -> Result<QueryAnswer> {
    let pair = |(key, value): (&Bytes, &Bytes)| (key.clone(), value.clone());
    Ok(match op {
        QueryOp::Stat => QueryAnswer::Stat(StatAnswer {
            size: object.size(),
            version: object.version,
            modified_ms: object.modified_ms,
            manifest: object.manifest,
        }),
        QueryOp::Xattr(name) => QueryAnswer::Xattr(object.xattrs.get(name).cloned()),
        QueryOp::Xattrs => QueryAnswer::Xattrs(object.xattrs.iter().map(pair).collect()),
        QueryOp::OmapGet(keys) => {
            let found = object.omap.iter().filter(|(key, _)| keys.contains(key));
            QueryAnswer::Omap { entries: found.map(pair).collect(), more: false }
        }
        QueryOp::OmapRange { from, to, limit } => {
            let in_range = |key: &Bytes| key >= from && to.as_ref().is_none_or(|to| key < to);
            let mut found = object.omap.iter().filter(|(key, _)| in_range(key)).peekable();
            let (mut entries, mut bytes) = (Vec::new(), 0);
            while let Some(entry) = found.next_if(|(key, value)| {
                bytes += key.len() + value.len();
                entries.len() < *limit as usize && (entries.is_empty() || bytes <= limits::OMAP_PAGE_BYTES)
            }) {
                entries.push(pair(entry));
            }
            QueryAnswer::Omap { entries, more: found.peek().is_some() }
        }
        QueryOp::Allocated => {
            let extents = object.data.extents(0..object.data.size()).ok_or_else(|| unsupported(op))?;
            let blocks = |range: &Range<u64>| range.end.next_multiple_of(BLOCK) - align_down(range.start);
            QueryAnswer::Allocated(extents.iter().map(blocks).sum())
        }
        QueryOp::Extents { offset, len } => {
            let mut end = offset.saturating_add(*len);
            let mut extents = object.data.extents(*offset..end).ok_or_else(|| unsupported(op))?;
            if let Some(next) = extents.get(limits::MAX_PAGE as usize) {
                end = next.start;
                extents.truncate(limits::MAX_PAGE as usize);
            }
            let ranges = extents.into_iter().map(|range| (range.start, range.end - range.start)).collect();
            QueryAnswer::Extents { ranges, end }
        }
        other => return Err(unsupported(other)),
    })
}

fn unsupported(op: &QueryOp) -> Error {
    E::BadRequest(format!("the model does not support {op:?}")).into()
}
