//! Requests of a client.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::limits::{
    MAX_FALLBACKS, MAX_OBJECT_SIZE, MAX_OMAP_KEY, MAX_OMAP_VALUE, MAX_OPS, MAX_PAGE, MAX_PARTS,
    MAX_XATTR_NAME, MAX_XATTR_VALUE,
};
use crate::name::namespace_from_wire;
use crate::{BulkDescriptor, Error, ObjectName, PoolName, Result, SessionId, UploadId, WireName};

/// First part of every request. With the head alone, the osd can reply with an error if it cannot
/// decode the rest of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestHead {
    /// The strand of the request: number of a session on its connection. The client chooses the number
    /// when it opens the session on the connection. A connection with one session uses strand 0.
    pub strand: u32,
    /// Request number within the session. Only a retry reuses a number.
    pub seq: u64,
    /// The client has the replies to all requests up to this number, or no longer needs them.
    pub acked_through: u64,
    /// Whether the request is a retry. For a retry, the osd first looks for the result of an
    /// earlier attempt.
    pub retry: bool,
    /// Time for which the client waits for the reply, in milliseconds. With 0, only the osd limits
    /// the time.
    pub deadline_ms: u32,
}

/// Content of a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[expect(
    clippy::large_enum_variant,
    reason = "nearly all requests access objects, and a box would cost an allocation per request"
)]
pub enum RequestBody {
    /// Opens or resumes a session on a strand. This is the first request of every strand. If the strand has
    /// another session, the new session replaces it.
    Open {
        /// Oldest protocol version that the client supports.
        oldest: u16,
        /// Newest protocol version that the client supports.
        newest: u16,
        /// Session to resume; `None` opens a new one.
        session: Option<SessionId>,
        /// The client's capability; empty if it has none yet. The osd refuses the request with
        /// [`Error::CapabilityRefused`] if it is not valid.
        capability: Bytes,
    },
    /// Replaces the capability of the session on this strand. If the osd refuses the new one, the
    /// session keeps the old one.
    Renew {
        /// The new capability.
        capability: Bytes,
    },
    /// Ends the session: the client sends no more retries and needs no more results. When the osd
    /// executes later changes in a placement group, it also removes the session's results from that
    /// group. After this, the osd refuses a retry with [`Error::RequestExpired`]. The client does
    /// not have to wait for the reply.
    CloseSession,
    /// Reads or changes objects.
    Object(ObjectRequest),
    /// Ends the strand, but not its session, which the client may resume on another strand or connection.
    /// There is no reply.
    Leave,
    /// Ends another session of the same client for good. Once the osd has replied, no request of that
    /// session takes effect any more, whether it was sent before or after, on any shard and across
    /// restarts. The client may repeat the request.
    Fence {
        /// The session to end.
        session: SessionId,
    },
}

impl From<ObjectRequest> for RequestBody {
    fn from(request: ObjectRequest) -> RequestBody {
        RequestBody::Object(request)
    }
}

/// A request about objects.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ObjectRequest {
    /// Changes one object.
    Mutate(Mutate),
    /// Queries metadata of one object: sizes, xattrs and omap entries.
    Query(Query),
    /// Reads data of one object.
    Read(Read),
    /// Lists a page of object names.
    List(List),
    /// Reads data of the first of several objects that exists.
    ReadFirst(ReadFirst),
}

/// Id of a part of a striped object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PartId {
    /// The upload that the part belongs to.
    pub upload: UploadId,
    /// Index of the part, from 0.
    pub index: u32,
}

/// Composition of a striped object. Part `i` contains the object's bytes from offset `i *
/// part_size` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The upload that created the parts.
    pub upload: UploadId,
    /// Size of every part except the last, in bytes; a multiple of 4096.
    pub part_size: u64,
    /// Size of the object, in bytes.
    pub size: u64,
}

impl Manifest {
    /// Returns the number of parts.
    #[must_use]
    pub fn parts(&self) -> u64 {
        self.size.div_ceil(self.part_size.max(1))
    }

    /// Checks a manifest that came over the wire.
    ///
    /// # Errors
    /// If a size is out of range.
    pub fn check(&self) -> Result<()> {
        let good = self.part_size > 0
            && self.part_size <= MAX_OBJECT_SIZE
            && self.part_size.is_multiple_of(4096)
            && self.parts() <= u64::from(MAX_PARTS);
        if good {
            return Ok(());
        }
        Err(Error::OutOfRange {
            what: "manifest".into(),
            detail: format!(
                "an object of {} bytes cannot consist of parts of {} bytes",
                self.size, self.part_size
            ),
        })
    }
}

/// Location of a request's bulk data. At most one op of a request has [`OpBytes::Payload`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Data {
    /// The request has no bulk data.
    None,
    /// The data is the message's payload.
    Inline,
    /// The osd pulls the data from this memory.
    Bulk(BulkDescriptor),
}

/// Location of one op's bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpBytes {
    /// The op contains its bytes.
    Embedded(Bytes),
    /// The op's bytes are the whole [`Data`] of the request.
    Payload,
}

/// A check on the object that must succeed before the osd executes any op of the request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Condition {
    /// The object exists.
    Exists,
    /// The object does not exist.
    Absent,
    /// The object exists and has this version.
    Version(u64),
    /// The xattr with this name has this value. With `None`, the xattr must not exist.
    Xattr(Bytes, Option<Bytes>),
    /// The omap entry with this key has this value. With `None`, the entry must not exist.
    Omap(Bytes, Option<Bytes>),
    /// The object's data contains these bytes at this offset.
    Bytes(u64, Bytes),
}

/// An op that changes an object. If the object does not exist, the op creates it, unless the
/// variant says otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Mutation {
    /// Creates an empty object if the object does not exist.
    Touch,
    /// Creates an empty object. The op fails with [`Error::Exists`] if the object exists.
    Create,
    /// Writes bytes at an offset.
    Write {
        /// Offset of the first byte.
        offset: u64,
        /// The bytes.
        source: OpBytes,
    },
    /// Replaces all data of the object, but keeps its xattrs and omap.
    WriteFull(OpBytes),
    /// Writes bytes at the object's end.
    Append(OpBytes),
    /// Sets the object's size, in bytes.
    Truncate(u64),
    /// Fills a range with zeros, and extends the object if necessary.
    Zero {
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Removes the object. The op fails with [`Error::NoSuchObject`] if the object does not exist.
    Remove,
    /// Sets an xattr.
    SetXattr(Bytes, Bytes),
    /// Removes an xattr if it exists.
    RemoveXattr(Bytes),
    /// Sets omap entries.
    OmapSet(Vec<(Bytes, Bytes)>),
    /// Removes the omap entries with these keys. Missing entries are ignored.
    OmapRemove(Vec<Bytes>),
    /// Removes the omap entries with `from <= key < to`.
    OmapRemoveRange(Bytes, Bytes),
    /// Removes all omap entries.
    OmapClear,
    /// Makes the object the head object of a striped object, and replaces the object's data by the
    /// parts that the manifest describes.
    SetManifest(Manifest),
    /// If the object does not exist, makes it a copy of the first object of this list that exists, with
    /// data, xattrs and omap. If none of them exists, the op has no effect. The objects belong to the
    /// namespace of the object, and have its [placement key](crate::placement::key). They must not be
    /// striped. The op must be the first one of the change. Copies share the drive space of the data
    /// until one of them overwrites it.
    Inherit(Vec<Bytes>),
}

/// A compound: an atomic change of one object.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Mutate {
    /// Name of the object.
    pub name: WireName,
    /// Part of the object to change. `None` for an object that is not striped, or for the head
    /// object.
    pub part: Option<PartId>,
    /// Conditions that must all hold.
    pub conditions: Vec<Condition>,
    /// Ops, in the order of their execution.
    pub ops: Vec<Mutation>,
    /// Bulk data of the ops.
    pub data: Data,
}

/// A query for one kind of an object's metadata.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum QueryOp {
    /// Queries size, version, time of the last change, and manifest.
    Stat,
    /// Queries an xattr.
    Xattr(Bytes),
    /// Queries all xattrs.
    Xattrs,
    /// Queries omap entries by key. The answer omits keys that do not exist.
    OmapGet(Vec<Bytes>),
    /// Queries a page of omap entries, ordered by key. The page begins with the first key that is
    /// at least `from`.
    OmapRange {
        /// Lowest key of the range.
        from: Bytes,
        /// End of the key range, exclusive; `None` for no end.
        to: Option<Bytes>,
        /// Maximum number of entries.
        limit: u32,
    },
    /// Queries the drive space of the object's extents. The query fails with [`Error::Striped`] on a
    /// striped object. It needs version [`VERSION_EXTENTS`](crate::VERSION_EXTENTS).
    Allocated,
    /// Queries the extents of the object in a range: the ranges that have data. The query fails with
    /// [`Error::Striped`] on a striped object. It needs version
    /// [`VERSION_EXTENTS`](crate::VERSION_EXTENTS).
    Extents {
        /// Start of the range, in bytes.
        offset: u64,
        /// Length of the range, in bytes. The range may end beyond the object's end, but not beyond
        /// the maximum size of an object.
        len: u64,
    },
}

/// Queries about one object. The osd answers all of them from the same version of the object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Query {
    /// The object.
    pub name: WireName,
    /// Conditions that must all hold.
    pub conditions: Vec<Condition>,
    /// The queries.
    pub ops: Vec<QueryOp>,
}

/// A read of a range of an object's data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Read {
    /// Name of the object.
    pub name: WireName,
    /// Part of the object to read. `None` for an object that is not striped.
    pub part: Option<PartId>,
    /// Offset of the first byte.
    pub offset: u64,
    /// Maximum number of bytes; the read ends at the object's end at the latest. The osd reads more
    /// than 2 MiB in several steps, and refuses the read with [`Error::Changed`] if the object
    /// changes between two steps.
    pub len: u64,
    /// Version that the object must have. If the object has another version, the osd refuses the
    /// read with [`Error::Changed`].
    pub if_version: Option<u64>,
    /// Memory to which the osd writes the blocks that cover the range, beginning with the start of
    /// the first block. If `None`, the reply contains the data. Small data is always sent in the
    /// reply.
    pub sink: Option<BulkDescriptor>,
}

/// A read of the first of several objects that exists. The objects belong to the same namespace and have
/// the same [placement key](crate::placement::key).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadFirst {
    /// The read of the first object.
    pub read: Read,
    /// Names of the other objects, at most [`MAX_FALLBACKS`].
    pub fallbacks: Vec<Bytes>,
}

/// A request for a page of a pool's listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct List {
    /// The pool.
    pub pool: Bytes,
    /// Lists only this namespace; `None` lists all namespaces.
    pub namespace: Option<Bytes>,
    /// Lists only names with this prefix.
    pub prefix: Bytes,
    /// Lists only the placement group with this number, in the order of namespaces and names. `None`
    /// lists all groups, one after the other, without any promise about the order.
    pub group: Option<u32>,
    /// Cursor from the previous page; empty for the first page. The cursor is opaque, except in the
    /// listing of one group: there it is [`ObjectName::to_cursor`](crate::ObjectName::to_cursor), and
    /// the page begins after this name.
    pub cursor: Bytes,
    /// Maximum number of names.
    pub limit: u32,
    /// Whether to skip placement groups that are not available because targets have failed. Without
    /// this, the request fails.
    pub skip_unavailable: bool,
}

impl List {
    /// Returns the namespace to which the listing is limited, after checking it.
    ///
    /// # Errors
    /// [`Error::BadName`](crate::Error::BadName) if the namespace is invalid.
    pub fn checked_namespace(&self) -> Result<Option<&str>> {
        Ok(self.namespace.as_deref().map(namespace_from_wire).transpose()?)
    }

    /// Returns the name after which the listing of a group continues; `None` at its start.
    ///
    /// # Errors
    /// [`Error::BadRequest`](crate::Error::BadRequest) if the cursor contains no valid name.
    pub fn after(&self) -> Result<Option<ObjectName>> {
        match self.cursor.is_empty() {
            true => Ok(None),
            false => ObjectName::from_cursor(PoolName::from_wire(&self.pool)?, &self.cursor).map(Some),
        }
    }
}

impl Mutate {
    /// Checks the number of conditions and ops, and the sizes in them. If the request has bulk
    /// data, also checks that exactly one op uses the data.
    ///
    /// # Errors
    /// The first violated limit.
    pub fn check(&self) -> Result<()> {
        check_count("conditions", self.conditions.len(), MAX_OPS)?;
        check_count("ops", self.ops.len(), MAX_OPS)?;
        if self.ops.is_empty() {
            return Err(Error::BadRequest("the change has no ops".into()));
        }
        let users = self.ops.iter().filter(|op| matches!(op.source(), Some(OpBytes::Payload))).count();
        let wanted = usize::from(!matches!(self.data, Data::None));
        if users != wanted {
            return Err(Error::BadRequest(format!(
                "{users} ops use the request's data, but the number must be {wanted}"
            )));
        }
        self.conditions.iter().try_for_each(Condition::check)?;
        if self.ops[1..].iter().any(|op| matches!(op, Mutation::Inherit(_))) {
            return Err(Error::BadRequest("an op that copies another object must be the first op".into()));
        }
        if self.part.is_some() && self.inherits_from().is_some() {
            return Err(Error::BadRequest("a part of a striped object cannot be a copy".into()));
        }
        self.ops.iter().try_for_each(Mutation::check)
    }

    /// Returns the names of the objects of which the change may copy one.
    #[must_use]
    pub fn inherits_from(&self) -> Option<&[Bytes]> {
        match self.ops.first() {
            Some(Mutation::Inherit(names)) => Some(names),
            _ => None,
        }
    }
}

impl ReadFirst {
    /// Checks the number of objects.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if there are too many.
    pub fn check(&self) -> Result<()> {
        check_count("fallback objects", self.fallbacks.len(), MAX_FALLBACKS)?;
        match self.read.part {
            Some(_) => Err(Error::BadRequest("a read of a part has no fallback objects".into())),
            None => Ok(()),
        }
    }
}

impl Query {
    /// Checks the number of conditions and ops, and the sizes in them.
    ///
    /// # Errors
    /// The first violated limit.
    pub fn check(&self) -> Result<()> {
        check_count("conditions", self.conditions.len(), MAX_OPS)?;
        check_count("ops", self.ops.len(), MAX_OPS)?;
        self.conditions.iter().try_for_each(Condition::check)?;
        self.ops.iter().try_for_each(|op| match op {
            QueryOp::OmapGet(keys) => check_count("omap keys", keys.len(), MAX_PAGE as usize),
            QueryOp::OmapRange { limit, .. } => {
                check_count("omap entries", *limit as usize, MAX_PAGE as usize)
            }
            QueryOp::Extents { offset, len } => check_range(*offset, *len),
            QueryOp::Stat | QueryOp::Xattr(_) | QueryOp::Xattrs | QueryOp::Allocated => Ok(()),
        })
    }
}

impl QueryOp {
    /// Returns whether the op needs version [`VERSION_EXTENTS`](crate::VERSION_EXTENTS).
    #[must_use]
    pub fn needs_extents(&self) -> bool {
        matches!(self, QueryOp::Allocated | QueryOp::Extents { .. })
    }
}

impl Condition {
    fn check(&self) -> Result<()> {
        match self {
            Condition::Bytes(offset, bytes) => check_range(*offset, bytes.len() as u64),
            _ => Ok(()),
        }
    }
}

impl Mutation {
    /// Returns the location of the op's bytes, if the op has any.
    #[must_use]
    pub fn source(&self) -> Option<&OpBytes> {
        match self {
            Mutation::Write { source, .. } | Mutation::WriteFull(source) | Mutation::Append(source) => {
                Some(source)
            }
            _ => None,
        }
    }

    fn check(&self) -> Result<()> {
        match self {
            Mutation::Write { offset, source } => match source {
                OpBytes::Embedded(bytes) => check_range(*offset, bytes.len() as u64),
                OpBytes::Payload => check_range(*offset, 0),
            },
            Mutation::Truncate(size) => check_range(0, *size),
            Mutation::Zero { offset, len } => check_range(*offset, *len),
            Mutation::SetXattr(name, value) => {
                check_count("xattr name", name.len(), MAX_XATTR_NAME)?;
                check_count("xattr value", value.len(), MAX_XATTR_VALUE)
            }
            Mutation::RemoveXattr(name) => check_count("xattr name", name.len(), MAX_XATTR_NAME),
            Mutation::OmapSet(entries) => {
                check_count("omap entries", entries.len(), MAX_PAGE as usize)?;
                entries.iter().try_for_each(|(key, value)| {
                    check_count("omap key", key.len(), MAX_OMAP_KEY)?;
                    check_count("omap value", value.len(), MAX_OMAP_VALUE)
                })
            }
            Mutation::OmapRemove(keys) => check_count("omap keys", keys.len(), MAX_PAGE as usize),
            Mutation::SetManifest(manifest) => manifest.check(),
            Mutation::Inherit(names) => check_count("objects to copy", names.len(), MAX_FALLBACKS),
            Mutation::Touch
            | Mutation::Create
            | Mutation::WriteFull(_)
            | Mutation::Append(_)
            | Mutation::Remove
            | Mutation::OmapRemoveRange(..)
            | Mutation::OmapClear => Ok(()),
        }
    }
}

/// Checks that a range does not overflow and ends within the maximum object size.
pub(crate) fn check_range(offset: u64, len: u64) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= MAX_OBJECT_SIZE => Ok(()),
        Some(end) => {
            Err(Error::TooLarge { what: "end of the range".into(), size: end, limit: MAX_OBJECT_SIZE })
        }
        None => Err(Error::OutOfRange {
            what: "range".into(),
            detail: format!("offset {offset} and length {len} overflow"),
        }),
    }
}

fn check_count(what: &str, size: usize, limit: usize) -> Result<()> {
    if size > limit {
        return Err(Error::TooLarge { what: what.into(), size: size as u64, limit: limit as u64 });
    }
    Ok(())
}
