//! Atomic changes of one object.

use bytes::Bytes;
use wire::{Condition, Mutated, Mutation, OpBytes, PartId};

use crate::engine::{ChangeRequest, Source};
use crate::handle::ObjectHandle;
use crate::{Error, Result};

/// Options of a put.
#[derive(Debug, Clone, Default)]
pub struct PutOptions {
    /// Whether the put is refused if the object exists.
    pub exclusive: bool,
    /// Version that the object must have. Otherwise the put is refused. `None` accepts any version.
    pub if_version: Option<u64>,
    /// Xattrs to set together with the data: names and values.
    pub xattrs: Vec<(Bytes, Bytes)>,
}

/// Changes of one object that are applied together, if all conditions hold. Created by
/// [`Object::compound`](crate::Object::compound).
///
/// Conditions are checked on the object's state before the compound. Each op sees the effects of
/// the ops before it. The data of one op may be as large as an object. The data of all other ops is
/// sent inside the message: conditions and ops may have 256 KiB in total, without the largest data.
/// If the largest data has more than 2 MiB, another op of the compound cannot change a part of a
/// 4 KiB block of this data; see `docs/semantics.md`.
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
#[must_use = "a compound has no effect until it is committed"]
pub struct Compound {
    object: ObjectHandle,
    conditions: Vec<Condition>,
    ops: Vec<Mutation>,
    /// Data of the ops: the index of an op, and the op's bytes.
    data: Vec<(usize, Source)>,
}

impl Compound {
    pub(crate) fn new(object: ObjectHandle) -> Compound {
        Compound { object, conditions: Vec::new(), ops: Vec::new(), data: Vec::new() }
    }

    /// Creates a compound with the conditions and xattrs of a put.
    pub(crate) fn of_put(object: ObjectHandle, options: PutOptions) -> Compound {
        let mut compound = Compound::new(object);
        if options.exclusive {
            compound = compound.create();
        }
        if let Some(version) = options.if_version {
            compound = compound.if_version(version);
        }
        options.xattrs.into_iter().fold(compound, |c, (name, value)| c.set_xattr(name, value))
    }

    /// Adds the condition that the object exists.
    pub fn if_exists(self) -> Compound {
        self.condition(Condition::Exists)
    }

    /// Adds the condition that the object does not exist.
    pub fn if_absent(self) -> Compound {
        self.condition(Condition::Absent)
    }

    /// Adds the condition that the object has this version.
    pub fn if_version(self, version: u64) -> Compound {
        self.condition(Condition::Version(version))
    }

    /// Adds the condition that the xattr has this value, or, with `None`, that the xattr does not
    /// exist.
    pub fn if_xattr(self, name: impl Into<Bytes>, value: Option<Bytes>) -> Compound {
        self.condition(Condition::Xattr(name.into(), value))
    }

    /// Adds the condition that the omap entry has this value, or, with `None`, that the entry does
    /// not exist.
    pub fn if_omap(self, key: impl Into<Bytes>, value: Option<Bytes>) -> Compound {
        self.condition(Condition::Omap(key.into(), value))
    }

    /// Adds the condition that the object's data contains these bytes at this offset.
    pub fn if_bytes(self, offset: u64, bytes: impl Into<Bytes>) -> Compound {
        self.condition(Condition::Bytes(offset, bytes.into()))
    }

    /// Creates the object. The compound fails if the object exists already.
    pub fn create(self) -> Compound {
        self.op(Mutation::Create)
    }

    /// Creates the object if it does not exist.
    pub fn touch(self) -> Compound {
        self.op(Mutation::Touch)
    }

    /// Adds a first op: if the object does not exist, makes it a copy of the first of these objects that
    /// exists. They belong to the object's namespace and have its placement key. The engine needs
    /// [`Capability::Inherit`](crate::engine::Capability::Inherit).
    pub fn inherit(self, names: Vec<Bytes>) -> Compound {
        self.op(Mutation::Inherit(names))
    }

    /// Writes data at an offset, in bytes. Extends the object if necessary.
    pub fn write(self, offset: u64, data: impl Into<Bytes>) -> Compound {
        self.write_from(offset, Source::Bytes(data.into()))
    }

    /// Writes the bytes of any source at an offset, in bytes.
    pub fn write_from(self, offset: u64, source: Source) -> Compound {
        self.data_op(source, |source| Mutation::Write { offset, source })
    }

    /// Replaces all data of the object.
    pub fn write_full(self, data: impl Into<Bytes>) -> Compound {
        self.write_full_from(Source::Bytes(data.into()))
    }

    /// Replaces all data of the object by the bytes of any source.
    pub fn write_full_from(self, source: Source) -> Compound {
        self.data_op(source, Mutation::WriteFull)
    }

    /// Writes up to 2 MiB at the end of the object.
    pub fn append(self, data: impl Into<Bytes>) -> Compound {
        self.data_op(Source::Bytes(data.into()), Mutation::Append)
    }

    /// Sets the object's size, in bytes.
    pub fn truncate(self, size: u64) -> Compound {
        self.op(Mutation::Truncate(size))
    }

    /// Sets the `len` bytes from `offset` to zero, and extends the object if necessary.
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

    /// Sends the compound. Returns when all its changes are durable.
    ///
    /// # Errors
    /// [`ConditionFailed`](wire::Error::ConditionFailed) if a condition does not hold. After any
    /// error, either all changes or no changes have taken effect. The changes can have taken effect
    /// only after [some errors](Error::may_have_taken_effect).
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

    fn data_op(mut self, source: Source, op: impl FnOnce(OpBytes) -> Mutation) -> Compound {
        self.data.push((self.ops.len(), source));
        self.op(op(OpBytes::Payload))
    }

    pub(crate) async fn commit_part(mut self, part: Option<PartId>) -> Result<Mutated> {
        let payload = self.take_payload().await?;
        let ObjectHandle { requests, name } = self.object;
        let request = ChangeRequest { name, part, conditions: self.conditions, ops: self.ops, payload };
        requests.mutate(request).await
    }

    /// Returns the largest data of an op as the payload of the request, and embeds the data of all
    /// other ops into these ops.
    async fn take_payload(&mut self) -> Result<Option<Source>> {
        let largest = self.data.iter().max_by_key(|(_, source)| source.len()).map(|(index, _)| *index);
        let mut payload = None;
        for (index, source) in std::mem::take(&mut self.data) {
            if Some(index) == largest {
                payload = Some(source);
                continue;
            }
            let bytes = OpBytes::Embedded(source.load().await?);
            match &mut self.ops[index] {
                Mutation::Write { source, .. } | Mutation::WriteFull(source) | Mutation::Append(source) => {
                    *source = bytes;
                }
                other => return Err(Error::Argument(format!("{other:?} cannot have data"))),
            }
        }
        Ok(payload)
    }
}
