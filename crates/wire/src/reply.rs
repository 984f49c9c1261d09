//! What the OSD answers.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{AdminReply, Manifest, Result, SessionId};

/// Answer to one request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    /// The request's number.
    pub seq: u64,
    /// What came of it.
    pub result: Result<ReplyBody>,
}

/// The answer proper.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ReplyBody {
    /// The session is open.
    Opened {
        /// Version that both speak.
        version: u16,
        /// The session: the one presented, or a new one.
        session: SessionId,
    },
    /// The session is over.
    Closed,
    /// The answer to an [`ObjectRequest`](crate::ObjectRequest).
    Object(ObjectReply),
    /// The answer to an [`AdminRequest`](crate::AdminRequest).
    Admin(AdminReply),
}

impl From<ObjectReply> for ReplyBody {
    fn from(reply: ObjectReply) -> ReplyBody {
        ReplyBody::Object(reply)
    }
}

impl From<AdminReply> for ReplyBody {
    fn from(reply: AdminReply) -> ReplyBody {
        ReplyBody::Admin(reply)
    }
}

/// The answer to an [`ObjectRequest`](crate::ObjectRequest).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ObjectReply {
    /// The change is durable.
    Mutated(Mutated),
    /// One answer per question.
    Queried(Vec<QueryAnswer>),
    /// Data was put into the sink, or is the message's payload: whole blocks, from the start of the range's first one
    /// to the end of its last one or of the object.
    Read {
        /// The object's version.
        version: u64,
        /// The object's size, in bytes.
        object_size: u64,
        /// Number of bytes sent.
        sent: u64,
    },
    /// The object is striped: read its parts.
    Striped {
        /// The head's version.
        version: u64,
        /// Its parts.
        manifest: Manifest,
    },
    /// A page of names.
    Listed(Listed),
}

/// What a change did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mutated {
    /// The object's new version; of a removed object, the version of its removal.
    pub version: u64,
    /// The object's new size, in bytes.
    pub size: u64,
    /// Where the last append of the request was put.
    pub appended_at: u64,
}

/// Answer to one question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum QueryAnswer {
    /// To `Stat`.
    Stat(StatAnswer),
    /// To `Xattr`.
    Xattr(Option<Bytes>),
    /// To `Xattrs`, ordered by name.
    Xattrs(Vec<(Bytes, Bytes)>),
    /// To `OmapGet` and `OmapRange`, ordered by key.
    Omap {
        /// The entries.
        entries: Vec<(Bytes, Bytes)>,
        /// Whether there are more.
        more: bool,
    },
}

/// What is known of an object without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatAnswer {
    /// Size, in bytes.
    pub size: u64,
    /// Version: grows with each change, and is never used again after the object was removed.
    pub version: u64,
    /// Time of the last change by the OSD's clock, in milliseconds since 1970.
    pub modified_ms: u64,
    /// Its parts, if the object is striped.
    pub manifest: Option<Manifest>,
}

/// A page of names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Namespace and object name of each, in no order that means anything.
    pub names: Vec<(String, String)>,
    /// To be given to get the next page; empty: this was the last page.
    pub cursor: Bytes,
}
