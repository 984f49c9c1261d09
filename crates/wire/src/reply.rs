//! Replies of the osd.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{Manifest, Result, SessionId};

/// Reply to one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    /// The request's strand.
    pub strand: u32,
    /// The request's number.
    pub seq: u64,
    /// The request's outcome.
    pub result: Result<ReplyBody>,
}

/// Content of a successful reply.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ReplyBody {
    /// The session is open.
    Opened {
        /// Protocol version that client and osd use.
        version: u16,
        /// The session that the client presented, or a new session.
        session: SessionId,
        /// Number of the shard that serves this connection.
        shard: u16,
        /// Port of each shard of the osd, by the shard's number. All shards listen at the same
        /// network addresses. Contains `shard`, and at most [`MAX_SHARDS`](crate::limits::MAX_SHARDS)
        /// ports.
        shards: Vec<u16>,
        /// Address of the node's control plane (`host:port`); `None` if the node has none. If the
        /// host is a wildcard address, the control plane is at the host of the osd.
        control: Option<String>,
    },
    /// The session is closed.
    Closed,
    /// The session has the new capability.
    Renewed,
    /// Reply to an [`ObjectRequest`](crate::ObjectRequest).
    Object(ObjectReply),
    /// The session has ended for good.
    Fenced,
}

impl From<ObjectReply> for ReplyBody {
    fn from(reply: ObjectReply) -> ReplyBody {
        ReplyBody::Object(reply)
    }
}

/// Reply to an [`ObjectRequest`](crate::ObjectRequest).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ObjectReply {
    /// The change is durable.
    Mutated(Mutated),
    /// One answer per query op.
    Queried(Vec<QueryAnswer>),
    /// The data was written to the read's sink, or is the payload of this message. The data
    /// consists of the whole blocks that contain the range, and ends at the object's end at the
    /// latest.
    Read {
        /// The object's version.
        version: u64,
        /// The object's size, in bytes.
        object_size: u64,
        /// Number of bytes sent, including the bytes of the first and the last block that are
        /// outside the range.
        sent: u64,
    },
    /// The object is striped; the client must read its parts.
    Striped {
        /// Version of the head object.
        version: u64,
        /// Manifest that names the parts.
        manifest: Manifest,
    },
    /// A page of object names.
    Listed(Listed),
    /// Answer to a read of the first of several objects that exists. The data was sent as that of
    /// [`Read`](Self::Read).
    ReadFirst {
        /// Which object was read: 0 for the first one, then the fallback objects in their order.
        found: u32,
        /// The object's version.
        version: u64,
        /// The object's size, in bytes.
        object_size: u64,
        /// Number of bytes sent.
        sent: u64,
    },
}

/// Effect of a change on its object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mutated {
    /// The object's new version. For a removed object, the version of the removal.
    pub version: u64,
    /// The object's new size, in bytes.
    pub size: u64,
    /// Offset in the object at which the request's last append wrote its bytes; 0 if the request
    /// has no append.
    pub appended_at: u64,
}

/// Answer to one [`QueryOp`](crate::QueryOp).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum QueryAnswer {
    /// Answer to `Stat`.
    Stat(StatAnswer),
    /// Answer to `Xattr`; `None` if the xattr does not exist.
    Xattr(Option<Bytes>),
    /// Answer to `Xattrs`, ordered by name.
    Xattrs(Vec<(Bytes, Bytes)>),
    /// Answer to `OmapGet` and `OmapRange`, ordered by key.
    Omap {
        /// The entries.
        entries: Vec<(Bytes, Bytes)>,
        /// Whether more entries follow.
        more: bool,
    },
    /// Answer to `Allocated`: drive space of the object's extents, in bytes. It is a multiple of the
    /// block size. Parity, and the copies of a mirror beyond the first, do not count.
    Allocated(u64),
    /// Answer to `Extents`.
    Extents {
        /// Start and length of each extent, in bytes, in ascending order. The extents neither overlap
        /// nor touch. There are at most [`MAX_PAGE`](crate::limits::MAX_PAGE).
        ranges: Vec<(u64, u64)>,
        /// Offset up to which the answer is complete: the end of the requested range, or the start of
        /// the range of the next query.
        end: u64,
    },
}

/// An object's size, version and other metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatAnswer {
    /// Size, in bytes.
    pub size: u64,
    /// Version of the object. It grows with each change and is never reused, even after the object
    /// was removed.
    pub version: u64,
    /// Time of the last change according to the osd's clock, in milliseconds since 1970.
    pub modified_ms: u64,
    /// Manifest of the object, if the object is striped.
    pub manifest: Option<Manifest>,
}

/// A page of object names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Namespace and name of each object. Ordered by namespace and name if the request named a group.
    pub names: Vec<(String, String)>,
    /// Cursor for the request of the next page; empty if this was the last page.
    pub cursor: Bytes,
    /// Number of placement groups of the pool.
    pub groups: u32,
    /// The placement groups that were skipped before the end of this page.
    pub skipped: Option<Box<SkippedGroups>>,
}

/// Placement groups whose objects a listing lacks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedGroups {
    /// Number of groups.
    pub groups: u32,
    /// Why the last of them is not available.
    pub reason: String,
}
