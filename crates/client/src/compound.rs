//! Several changes of one object, all or none.

use bytes::Bytes;
use wire::{
    Condition, Data, Mutate, Mutated, Mutation, ObjectReply, ObjectRequest, PartId, ReplyBody, Source,
};

use crate::client::unexpected;
use crate::pending::Bulk;
use crate::source::{Content, ContentSource};
use crate::{Error, Object, Result};
use base::block::Payload;
use std::sync::Arc;

/// Changes of one object that are applied together, if all conditions hold. Made by [`Object::compound`].
///
/// Conditions are about the object as it was before; each op sees what the ops before it have made. The largest piece of
/// data may be as large as an object; the others travel in the message and must together stay within some tens of
/// kilobytes. If the largest piece has more than 2 MiB, other ops cannot change a part of it: the node refuses the
/// compound as [`BadRequest`](wire::Error::BadRequest).
///
/// ```no_run
/// # async fn example(counter: client::Object) -> client::Result<()> {
/// let seen = counter.stat().await?;
/// let done = counter
///     .compound()
///     .if_version(seen.version)
///     .write(0, "42")
///     .set_xattr("changed-by", "me")
///     .commit()
///     .await?;
/// assert!(done.version > seen.version);
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "nothing happens before commit"]
pub struct Compound {
    object: Object,
    conditions: Vec<Condition>,
    ops: Vec<Mutation>,
    /// The bytes of ops, by index.
    data: Vec<(usize, Content)>,
}

impl Compound {
    pub(crate) fn new(object: Object) -> Compound {
        Compound { object, conditions: Vec::new(), ops: Vec::new(), data: Vec::new() }
    }

    /// Only if the object exists.
    pub fn if_exists(self) -> Compound {
        self.condition(Condition::Exists)
    }

    /// Only if the object does not exist.
    pub fn if_absent(self) -> Compound {
        self.condition(Condition::Absent)
    }

    /// Only if the object has this version.
    pub fn if_version(self, version: u64) -> Compound {
        self.condition(Condition::Version(version))
    }

    /// Only if the xattr has this value; `None`: does not exist.
    pub fn if_xattr(self, name: impl Into<Bytes>, value: Option<Bytes>) -> Compound {
        self.condition(Condition::Xattr(name.into(), value))
    }

    /// Only if the omap entry has this value; `None`: does not exist.
    pub fn if_omap(self, key: impl Into<Bytes>, value: Option<Bytes>) -> Compound {
        self.condition(Condition::Omap(key.into(), value))
    }

    /// Only if the object has these bytes at this offset.
    pub fn if_bytes(self, offset: u64, bytes: impl Into<Bytes>) -> Compound {
        self.condition(Condition::Bytes(offset, bytes.into()))
    }

    /// Creates the object; it must not exist.
    pub fn create(self) -> Compound {
        self.op(Mutation::Create)
    }

    /// Creates the object if it does not exist.
    pub fn touch(self) -> Compound {
        self.op(Mutation::Touch)
    }

    /// Writes at an offset, in bytes.
    pub fn write(self, offset: u64, data: impl Into<Bytes>) -> Compound {
        self.data_op(Content::Memory(data.into()), |source| Mutation::Write { offset, source })
    }

    /// Replaces all data.
    pub fn write_full(self, data: impl Into<Bytes>) -> Compound {
        self.write_full_content(Content::Memory(data.into()))
    }

    pub(crate) fn write_full_content(self, content: Content) -> Compound {
        self.data_op(content, Mutation::WriteFull)
    }

    /// Writes at the end. At most 2 MiB.
    pub fn append(self, data: impl Into<Bytes>) -> Compound {
        self.data_op(Content::Memory(data.into()), Mutation::Append)
    }

    /// Sets the size.
    pub fn truncate(self, size: u64) -> Compound {
        self.op(Mutation::Truncate(size))
    }

    /// Makes a range zero.
    pub fn zero(self, offset: u64, len: u64) -> Compound {
        self.op(Mutation::Zero { offset, len })
    }

    /// Removes the object.
    pub fn remove(self) -> Compound {
        self.op(Mutation::Remove)
    }

    /// Sets an xattr.
    pub fn set_xattr(self, name: impl Into<Bytes>, value: impl Into<Bytes>) -> Compound {
        self.op(Mutation::SetXattr(name.into(), value.into()))
    }

    /// Removes an xattr.
    pub fn remove_xattr(self, name: impl Into<Bytes>) -> Compound {
        self.op(Mutation::RemoveXattr(name.into()))
    }

    /// Sets omap entries.
    pub fn omap_set(self, entries: Vec<(Bytes, Bytes)>) -> Compound {
        self.op(Mutation::OmapSet(entries))
    }

    /// Removes omap entries.
    pub fn omap_remove(self, keys: Vec<Bytes>) -> Compound {
        self.op(Mutation::OmapRemove(keys))
    }

    /// Removes the omap entries with `from <= key < to`.
    pub fn omap_remove_range(self, from: impl Into<Bytes>, to: impl Into<Bytes>) -> Compound {
        self.op(Mutation::OmapRemoveRange(from.into(), to.into()))
    }

    /// Removes all omap entries.
    pub fn omap_clear(self) -> Compound {
        self.op(Mutation::OmapClear)
    }

    /// Does it. Resolves when all of it is durable.
    ///
    /// # Errors
    /// [`ConditionFailed`](wire::Error::ConditionFailed) if a condition does not hold; then, as
    /// with every error that is not [one of those](Error::may_have_taken_effect) after which it may
    /// be, nothing was changed.
    pub async fn commit(self) -> Result<Mutated> {
        self.commit_part(None).await
    }

    pub(crate) fn condition(mut self, condition: Condition) -> Compound {
        self.conditions.push(condition);
        self
    }

    pub(crate) fn op(mut self, op: Mutation) -> Compound {
        self.ops.push(op);
        self
    }

    fn data_op(mut self, content: Content, op: impl FnOnce(Source) -> Mutation) -> Compound {
        self.data.push((self.ops.len(), content));
        self.op(op(Source::Payload))
    }

    pub(crate) async fn commit_part(mut self, part: Option<PartId>) -> Result<Mutated> {
        let (data, bulk) = self.place_data().await?;
        let (client, name) = self.object.parts();
        let mutate = Mutate { name: name.to_wire(), part, conditions: self.conditions, ops: self.ops, data };
        mutate.check()?;
        match client.link.call(ObjectRequest::Mutate(mutate), bulk).await?.body {
            ReplyBody::Object(ObjectReply::Mutated(mutated)) => Ok(mutated),
            other => Err(unexpected(&other)),
        }
    }

    /// The largest piece becomes the request's data, the others are embedded.
    async fn place_data(&mut self) -> Result<(Data, Bulk)> {
        let Some(largest) = self.data.iter().max_by_key(|(_, content)| content.len()).map(|(i, _)| *i) else {
            return Ok((Data::None, Bulk::None));
        };
        let mut placed = (Data::None, Bulk::None);
        for (index, content) in std::mem::take(&mut self.data) {
            if index == largest {
                placed = self.place_largest(index, content).await?;
                continue;
            }
            let bytes = Source::Embedded(content.load().await?);
            match &mut self.ops[index] {
                Mutation::Write { source, .. } | Mutation::WriteFull(source) | Mutation::Append(source) => {
                    *source = bytes;
                }
                other => return Err(Error::Argument(format!("{other:?} takes no data"))),
            }
        }
        Ok(placed)
    }

    async fn place_largest(&self, index: usize, content: Content) -> Result<(Data, Bulk)> {
        let offset = match &self.ops[index] {
            Mutation::Write { offset, .. } => *offset,
            _ => 0,
        };
        let (client, _) = self.object.parts();
        if content.len() <= client.link.inline_max() {
            let payload = Payload::compute(offset, content.load().await?);
            return Ok((Data::Inline, Bulk::Inline(payload)));
        }
        // What is in memory the node may fetch by itself.
        let content =
            if client.link.is_one_sided() { Content::Memory(content.load().await?) } else { content };
        // The descriptor takes this place when the request is sent.
        Ok((Data::Inline, Bulk::Source(Arc::new(ContentSource { content, offset }))))
    }
}
