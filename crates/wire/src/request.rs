//! What a client asks for.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::limits::{
    MAX_OBJECT_SIZE, MAX_OMAP_KEY, MAX_OMAP_VALUE, MAX_OPS, MAX_PAGE, MAX_PARTS, MAX_XATTR_NAME,
    MAX_XATTR_VALUE,
};
use crate::{AdminRequest, BulkDescriptor, Error, Result, SessionId, UploadId, WireName};

/// What stands in front of every request, so that it can be answered even if the rest makes no sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestHead {
    /// Number of the request within its session; never used twice but for a retry.
    pub seq: u64,
    /// The client has the answers to all requests up to this number, or no longer wants them.
    pub acked_through: u64,
    /// The request may have been sent before: look for its result.
    pub retry: bool,
    /// Milliseconds after which the client no longer waits.
    pub deadline_ms: u32,
}

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
#[expect(
    clippy::large_enum_variant,
    reason = "nearly all requests are for data, and a box costs each an allocation"
)]
pub enum RequestBody {
    /// Opens a session, or goes on with one. The first request of every connection.
    Open {
        /// Oldest version that the client speaks.
        oldest: u16,
        /// Newest version that the client speaks.
        newest: u16,
        /// The session to go on with.
        session: Option<SessionId>,
    },
    /// Ends the session: the client repeats none of its requests and wants no more results. The OSD
    /// forgets the session's results with later changes of the same placement groups. A repeat that
    /// comes all the same is refused with [`Error::RequestExpired`]. A client need not wait for the
    /// answer.
    CloseSession,
    /// Reads or changes objects.
    Object(ObjectRequest),
    /// Administers the node.
    Admin(AdminRequest),
}

impl From<ObjectRequest> for RequestBody {
    fn from(request: ObjectRequest) -> RequestBody {
        RequestBody::Object(request)
    }
}

impl From<AdminRequest> for RequestBody {
    fn from(request: AdminRequest) -> RequestBody {
        RequestBody::Admin(request)
    }
}

/// A request for data: what an object front end sends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ObjectRequest {
    /// Changes one object.
    Mutate(Mutate),
    /// Asks for what is small about one object.
    Query(Query),
    /// Reads data of one object.
    Read(Read),
    /// A page of object names.
    List(List),
}

/// One part of a striped object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PartId {
    /// The upload it belongs to.
    pub upload: UploadId,
    /// Its index, from 0.
    pub index: u32,
}

/// How a striped object is composed. Part `i` has the bytes from `i * part_size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The upload that made the parts.
    pub upload: UploadId,
    /// Size of every part but the last, in bytes; a multiple of 4096.
    pub part_size: u64,
    /// Size of the object, in bytes.
    pub size: u64,
}

impl Manifest {
    /// Number of parts.
    #[must_use]
    pub fn parts(&self) -> u64 {
        self.size.div_ceil(self.part_size.max(1))
    }

    /// Checks what came over the wire.
    ///
    /// # Errors
    /// If sizes are impossible.
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
            detail: format!("{} bytes in parts of {}", self.size, self.part_size),
        })
    }
}

/// Where a request's bulky bytes are. At most one op of a request has [`OpBytes::Payload`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Data {
    /// There are none.
    None,
    /// In the message's payload.
    Inline,
    /// To be pulled.
    Bulk(BulkDescriptor),
}

/// Bytes of one op.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpBytes {
    /// Here.
    Embedded(Bytes),
    /// The request's [`Data`], all of it.
    Payload,
}

/// What must hold, before anything of the request is done, for it to be done at all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Condition {
    /// The object exists.
    Exists,
    /// The object does not exist.
    Absent,
    /// The object exists and has this version.
    Version(u64),
    /// An xattr has this value; `None`: does not exist.
    Xattr(Bytes, Option<Bytes>),
    /// An omap entry has this value; `None`: does not exist.
    Omap(Bytes, Option<Bytes>),
    /// The object's data has these bytes at this offset.
    Bytes(u64, Bytes),
}

/// A change. Unless said otherwise it creates the object if there is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Mutation {
    /// Creates the object, empty, if it does not exist.
    Touch,
    /// Creates the object; refused with [`Error::Exists`] if it exists.
    Create,
    /// Writes at an offset, in bytes.
    Write {
        /// First byte.
        offset: u64,
        /// The bytes.
        source: OpBytes,
    },
    /// Replaces all data. Xattrs and omap stay.
    WriteFull(OpBytes),
    /// Writes at the object's end.
    Append(OpBytes),
    /// Sets the size.
    Truncate(u64),
    /// Makes a range zero, extending the object if need be.
    Zero {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Removes the object; refused with [`Error::NoSuchObject`] if there is none.
    Remove,
    /// Sets an xattr.
    SetXattr(Bytes, Bytes),
    /// Removes an xattr, whether it exists or not.
    RemoveXattr(Bytes),
    /// Sets omap entries.
    OmapSet(Vec<(Bytes, Bytes)>),
    /// Removes omap entries, whether they exist or not.
    OmapRemove(Vec<Bytes>),
    /// Removes the omap entries with `from <= key < to`.
    OmapRemoveRange(Bytes, Bytes),
    /// Removes all omap entries.
    OmapClear,
    /// Makes the object the head of a striped one. Replaces its data.
    SetManifest(Manifest),
}

/// A change of one object, all of it or nothing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Mutate {
    /// The object.
    pub name: WireName,
    /// The part of it, if it is striped.
    pub part: Option<PartId>,
    /// What must hold.
    pub conditions: Vec<Condition>,
    /// What to do, one after the other.
    pub ops: Vec<Mutation>,
    /// The bulky bytes.
    pub data: Data,
}

/// A question about one object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum QueryOp {
    /// Size, version and time of the last change.
    Stat,
    /// An xattr.
    Xattr(Bytes),
    /// All xattrs.
    Xattrs,
    /// Those of some omap entries that exist.
    OmapGet(Vec<Bytes>),
    /// A page of omap entries with keys of at least `from`.
    OmapRange {
        /// First key.
        from: Bytes,
        /// End, exclusive; `None` for no end.
        to: Option<Bytes>,
        /// Most entries wanted.
        limit: u32,
    },
}

/// Questions about one object, answered together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Query {
    /// The object.
    pub name: WireName,
    /// What must hold.
    pub conditions: Vec<Condition>,
    /// What is asked.
    pub ops: Vec<QueryOp>,
}

/// A read of data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Read {
    /// The object.
    pub name: WireName,
    /// The part of it, if it is striped.
    pub part: Option<PartId>,
    /// First byte.
    pub offset: u64,
    /// Most bytes wanted; the read ends at the object's end. More than 2 MiB are read in several steps, and refused with
    /// [`Error::Changed`] if the object is changed in between.
    pub len: u64,
    /// Refuse with [`Error::Changed`] unless the object has this version.
    pub if_version: Option<u64>,
    /// Where to put the blocks that cover the range, from the start of the first one; `None`: into the answer. Little
    /// data comes in the answer in any case.
    pub sink: Option<BulkDescriptor>,
}

/// A page of a pool's listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct List {
    /// The pool.
    pub pool: Bytes,
    /// Only this namespace; `None`: all.
    pub namespace: Option<Bytes>,
    /// Only names that start so.
    pub prefix: Bytes,
    /// Where the last page ended; empty for the first page. Opaque.
    pub cursor: Bytes,
    /// Most names wanted.
    pub limit: u32,
}

impl Mutate {
    /// Checks counts and sizes, and that the data is used by exactly one op.
    ///
    /// # Errors
    /// The first thing that is beyond a limit.
    pub fn check(&self) -> Result<()> {
        check_count("conditions", self.conditions.len(), MAX_OPS)?;
        check_count("ops", self.ops.len(), MAX_OPS)?;
        if self.ops.is_empty() {
            return Err(Error::BadRequest("a change without ops".into()));
        }
        let users = self.ops.iter().filter(|op| matches!(op.source(), Some(OpBytes::Payload))).count();
        let wanted = usize::from(!matches!(self.data, Data::None));
        if users != wanted {
            return Err(Error::BadRequest(format!("{users} ops use the data, expected {wanted}")));
        }
        self.conditions.iter().try_for_each(Condition::check)?;
        self.ops.iter().try_for_each(Mutation::check)
    }
}

impl Query {
    /// Checks counts and sizes.
    ///
    /// # Errors
    /// The first thing that is beyond a limit.
    pub fn check(&self) -> Result<()> {
        check_count("conditions", self.conditions.len(), MAX_OPS)?;
        check_count("ops", self.ops.len(), MAX_OPS)?;
        self.conditions.iter().try_for_each(Condition::check)?;
        self.ops.iter().try_for_each(|op| match op {
            QueryOp::OmapGet(keys) => check_count("omap keys", keys.len(), MAX_PAGE as usize),
            QueryOp::OmapRange { limit, .. } => {
                check_count("omap entries", *limit as usize, MAX_PAGE as usize)
            }
            QueryOp::Stat | QueryOp::Xattr(_) | QueryOp::Xattrs => Ok(()),
        })
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
    /// The op's bytes, if it has any.
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

/// Checks that a range does not overflow and ends within what one object can have.
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
