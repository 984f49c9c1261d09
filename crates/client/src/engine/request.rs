//! Requests to an engine.

use bytes::Bytes;
use wire::{Condition, Data, Manifest, Mutate, Mutation, ObjectName, OpBytes, PartId};

use super::{Sink, Source};
use crate::Result;

/// A change of one object.
#[derive(Debug, Clone)]
pub struct ChangeRequest {
    /// The object.
    pub name: ObjectName,
    /// Part of the object, if the object is striped.
    pub part: Option<PartId>,
    /// Conditions that must all hold before the change.
    pub conditions: Vec<Condition>,
    /// The operations, in the order in which they are applied. At most one of them has
    /// [`OpBytes::Payload`].
    pub ops: Vec<Mutation>,
    /// The bytes of the operation with [`OpBytes::Payload`]; `None` if there is no such operation.
    pub payload: Option<Source>,
}

impl ChangeRequest {
    /// Returns the offset in the object at which the payload is written, in bytes; 0 for an append.
    pub(crate) fn payload_offset(&self) -> u64 {
        let user = self.ops.iter().find(|op| matches!(op.source(), Some(OpBytes::Payload)));
        match user {
            Some(Mutation::Write { offset, .. }) => *offset,
            _ => 0,
        }
    }

    /// Removes the conditions and operations from the request, and returns the change in the form
    /// of the object protocol, without the payload's bytes. After an error, the request is
    /// unchanged.
    ///
    /// # Errors
    /// If a count or size exceeds its limit, or if no operation uses the payload.
    pub(crate) fn take_wire(&mut self) -> Result<Mutate> {
        let data = if self.payload.is_some() { Data::Inline } else { Data::None };
        let (conditions, ops) = (std::mem::take(&mut self.conditions), std::mem::take(&mut self.ops));
        let mutate = Mutate { name: self.name.to_wire(), part: self.part, conditions, ops, data };
        if let Err(e) = mutate.check() {
            (self.conditions, self.ops) = (mutate.conditions, mutate.ops);
            return Err(e.into());
        }
        Ok(mutate)
    }
}

/// A read of a range of one object.
#[derive(Debug, Clone)]
pub struct ReadRequest {
    /// The object.
    pub name: ObjectName,
    /// Part of the object, if the object is striped.
    pub part: Option<PartId>,
    /// Offset of the first byte to read, in bytes.
    pub offset: u64,
    /// Maximum number of bytes to read. The read ends at the object's end.
    pub len: u64,
    /// The read is refused with [`Changed`](wire::Error::Changed) unless the object has this
    /// version.
    pub if_version: Option<u64>,
    /// Destination of the data.
    pub sink: Sink,
    /// Names of objects in the same namespace and with the same placement key. If the object does not
    /// exist, the read concerns the first of them that exists. Needs
    /// [`Capability::Inherit`](super::Capability::Inherit).
    pub fallbacks: Vec<Bytes>,
}

/// Result of a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadReply {
    /// The object is not striped.
    Data {
        /// Which object was read: 0 for the named object, then the fallbacks in their order.
        found: usize,
        /// The object's version.
        version: u64,
        /// The object's size, in bytes.
        object_size: u64,
        /// Number of bytes of the range that exist. All of them were read.
        len: u64,
        /// The bytes in order, for [`Sink::Bytes`]; otherwise empty.
        chunks: Vec<Bytes>,
    },
    /// The object is striped. The caller must read its parts.
    Striped {
        /// Version of the head object.
        version: u64,
        /// Manifest that names the parts.
        manifest: Manifest,
    },
}
