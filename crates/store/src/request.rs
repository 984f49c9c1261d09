//! Requests to a store and its replies, as one enum each. A store, a wrapper around a store and a
//! channel to a store therefore need only one entry point.

use base::block::Payload;
use base::mem::ArenaBuf;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{CollectionId, ObjectId, Page, ReadData, Result, Space, StageId, Stat, StoreError, Transaction};

/// One request to a store. The method of [`StoreCalls`](crate::StoreCalls) for each request
/// documents what it does.
#[derive(Debug)]
pub enum StoreRequest {
    /// Allocates a stage of `len` bytes.
    Stage {
        /// Length, in bytes.
        len: u64,
    },
    /// Writes staged bytes.
    StageWrite {
        /// The stage.
        stage: StageId,
        /// Offset in the stage, in bytes.
        offset: u64,
        /// The bytes.
        payload: Payload,
    },
    /// Releases a stage. The reply comes at once, and the caller need not wait for it.
    StageRelease {
        /// The stage.
        stage: StageId,
    },
    /// Applies a transaction.
    Transact {
        /// The transaction.
        transaction: Transaction,
        /// The incarnation that the transaction belongs to; `None` stands for the current one.
        incarnation: Option<u64>,
    },
    /// Reads the blocks that cover a range.
    Read {
        /// The collection.
        cid: CollectionId,
        /// The object.
        oid: ObjectId,
        /// Start of the range, in bytes.
        offset: u64,
        /// Length of the range, in bytes.
        len: u64,
        /// Memory for the data; `None` lets the store choose.
        dest: Option<ArenaBuf>,
    },
    /// Asks for metadata of one collection.
    Query {
        /// The collection.
        cid: CollectionId,
        /// The question.
        query: MetadataQuery,
    },
    /// Lists the collections.
    Collections,
    /// Asks for the target's space.
    Space,
    /// Unmounts the target.
    Umount,
}

impl StoreRequest {
    /// Returns the collection of the request; `None` if the request concerns a stage or the whole
    /// target.
    #[must_use]
    pub fn collection(&self) -> Option<&CollectionId> {
        match self {
            StoreRequest::Transact { transaction, .. } => Some(&transaction.collection),
            StoreRequest::Read { cid, .. } | StoreRequest::Query { cid, .. } => Some(cid),
            _ => None,
        }
    }
}

/// A question about the metadata of one collection. It changes nothing, so it may be repeated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetadataQuery {
    /// Size of an object.
    Stat {
        /// The object.
        oid: ObjectId,
    },
    /// One xattr.
    Xattr {
        /// The object.
        oid: ObjectId,
        /// The xattr's name.
        name: Bytes,
    },
    /// All xattrs.
    Xattrs {
        /// The object.
        oid: ObjectId,
    },
    /// The omap's header.
    OmapHeader {
        /// The object.
        oid: ObjectId,
    },
    /// The omap entries of some keys.
    OmapGet {
        /// The object.
        oid: ObjectId,
        /// The keys.
        keys: Vec<Bytes>,
    },
    /// A page of the omap.
    OmapIterate {
        /// The object.
        oid: ObjectId,
        /// The first key.
        from: Bytes,
        /// Most entries returned.
        limit: u64,
    },
    /// A page of the collection's objects.
    List {
        /// The first object; `None` starts with the collection's first.
        from: Option<ObjectId>,
        /// Most objects returned.
        limit: u64,
    },
}

impl MetadataQuery {
    /// Returns the object of the query; `None` if the query concerns the collection.
    #[must_use]
    pub fn oid(&self) -> Option<&ObjectId> {
        match self {
            MetadataQuery::Stat { oid }
            | MetadataQuery::Xattr { oid, .. }
            | MetadataQuery::Xattrs { oid }
            | MetadataQuery::OmapHeader { oid }
            | MetadataQuery::OmapGet { oid, .. }
            | MetadataQuery::OmapIterate { oid, .. } => Some(oid),
            MetadataQuery::List { .. } => None,
        }
    }
}

/// What a [`MetadataQuery`] found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum QueryReply {
    /// Of an object.
    Stat(Stat),
    /// An xattr's value, or an omap's header.
    Bytes(Bytes),
    /// Names and values of xattrs, or keys and values of omap entries.
    Pairs(Vec<(Bytes, Bytes)>),
    /// A page of omap entries.
    PairsPage(Page<(Bytes, Bytes)>),
    /// A page of objects.
    Objects(Page<ObjectId>),
}

/// The reply to a [`StoreRequest`].
#[derive(Debug)]
pub enum StoreReply {
    /// To requests that return nothing.
    Done,
    /// To [`StoreRequest::Stage`].
    Stage(StageId),
    /// To [`StoreRequest::Read`].
    Read(ReadData),
    /// To [`StoreRequest::Query`].
    Query(QueryReply),
    /// To [`StoreRequest::Collections`].
    Collections(Vec<CollectionId>),
    /// To [`StoreRequest::Space`].
    Space(Space),
}

impl From<()> for StoreReply {
    fn from((): ()) -> StoreReply {
        StoreReply::Done
    }
}

impl From<StageId> for StoreReply {
    fn from(stage: StageId) -> StoreReply {
        StoreReply::Stage(stage)
    }
}

impl From<ReadData> for StoreReply {
    fn from(data: ReadData) -> StoreReply {
        StoreReply::Read(data)
    }
}

impl From<QueryReply> for StoreReply {
    fn from(found: QueryReply) -> StoreReply {
        StoreReply::Query(found)
    }
}

impl From<Vec<CollectionId>> for StoreReply {
    fn from(collections: Vec<CollectionId>) -> StoreReply {
        StoreReply::Collections(collections)
    }
}

impl From<Space> for StoreReply {
    fn from(space: Space) -> StoreReply {
        StoreReply::Space(space)
    }
}

/// A type that a method of [`StoreCalls`](crate::StoreCalls) extracts from a reply.
pub(crate) trait FromReply: Sized {
    fn from_reply(reply: StoreReply) -> Option<Self>;
}

macro_rules! from_reply {
    ($($type:ty: $pattern:pat => $value:expr;)*) => {$(
        impl FromReply for $type {
            fn from_reply(reply: StoreReply) -> Option<Self> {
                match reply {
                    $pattern => Some($value),
                    _ => None,
                }
            }
        }
    )*};
}

from_reply! {
    (): StoreReply::Done => ();
    StageId: StoreReply::Stage(stage) => stage;
    ReadData: StoreReply::Read(data) => data;
    Stat: StoreReply::Query(QueryReply::Stat(stat)) => stat;
    Bytes: StoreReply::Query(QueryReply::Bytes(bytes)) => bytes;
    Vec<(Bytes, Bytes)>: StoreReply::Query(QueryReply::Pairs(pairs)) => pairs;
    Page<(Bytes, Bytes)>: StoreReply::Query(QueryReply::PairsPage(page)) => page;
    Page<ObjectId>: StoreReply::Query(QueryReply::Objects(page)) => page;
    Vec<CollectionId>: StoreReply::Collections(collections) => collections;
    Space: StoreReply::Space(space) => space;
}

/// Extracts from a reply the value that the request asked for.
pub(crate) fn take<T: FromReply>(reply: Result<StoreReply>) -> Result<T> {
    let another_kind = || StoreError::Disconnected("the reply is not of the request's kind".into());
    T::from_reply(reply?).ok_or_else(another_kind)
}
