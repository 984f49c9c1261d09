//! All requests to a store as one enum, and all replies of a store as another enum. With these
//! enums, a store, a wrapper around a store and a channel to a store need only one entry point.

use base::block::Payload;
use base::mem::ArenaBuf;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{
    CollectionId, ObjectExtents, ObjectId, Page, ReadData, Result, Space, StageId, Stat, StoreError,
    Transaction,
};

/// One request to a store. Each request is documented at the corresponding method of
/// [`StoreCalls`](crate::StoreCalls).
#[derive(Debug)]
pub enum StoreRequest {
    /// Allocates a stage of `len` bytes.
    Stage {
        /// Length, in bytes.
        len: u64,
    },
    /// Writes data to a stage.
    StageWrite {
        /// The stage.
        stage: StageId,
        /// Offset in the stage, in bytes.
        offset: u64,
        /// The data to write.
        payload: Payload,
    },
    /// Releases a stage. The store replies immediately, and the caller need not wait for the reply.
    StageRelease {
        /// The stage.
        stage: StageId,
    },
    /// Applies a transaction.
    Transact {
        /// The transaction.
        transaction: Transaction,
        /// The only incarnation in which the store may apply the transaction; `None` for any
        /// incarnation.
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
        /// Destination of the data. With `None`, the store chooses the memory.
        dest: Option<ArenaBuf>,
    },
    /// Queries metadata of one collection or of one of its objects.
    Query {
        /// The collection.
        cid: CollectionId,
        /// The query.
        query: MetadataQuery,
    },
    /// Lists the collections.
    Collections,
    /// Queries the total and the free space of the target.
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

/// A query for metadata of one collection or of one of its objects. It changes nothing, so the
/// caller may repeat it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetadataQuery {
    /// Returns the size of an object and the drive space that it occupies.
    Stat {
        /// The object.
        oid: ObjectId,
    },
    /// Returns the value of one xattr.
    Xattr {
        /// The object.
        oid: ObjectId,
        /// The xattr's name.
        name: Bytes,
    },
    /// Returns all xattrs of an object.
    Xattrs {
        /// The object.
        oid: ObjectId,
    },
    /// Returns the header of an object's omap.
    OmapHeader {
        /// The object.
        oid: ObjectId,
    },
    /// Returns the omap entries with the given keys.
    OmapGet {
        /// The object.
        oid: ObjectId,
        /// The keys.
        keys: Vec<Bytes>,
    },
    /// Returns a page of the entries of an object's omap.
    OmapIterate {
        /// The object.
        oid: ObjectId,
        /// Key at which the page starts.
        from: Bytes,
        /// Maximum number of entries in the page.
        limit: u64,
    },
    /// Returns a page of the ids of the collection's objects.
    List {
        /// Object id at which the page starts; `None` for the start of the collection.
        from: Option<ObjectId>,
        /// Maximum number of objects in the page.
        limit: u64,
    },
    /// Returns the extents of an object in a range.
    Extents {
        /// The object.
        oid: ObjectId,
        /// Start of the range, in bytes.
        offset: u64,
        /// Length of the range, in bytes.
        len: u64,
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
            | MetadataQuery::OmapIterate { oid, .. }
            | MetadataQuery::Extents { oid, .. } => Some(oid),
            MetadataQuery::List { .. } => None,
        }
    }
}

/// Result of a [`MetadataQuery`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum QueryReply {
    /// Size and drive space of an object.
    Stat(Stat),
    /// An xattr's value, or an omap's header.
    Bytes(Bytes),
    /// Names and values of xattrs, or keys and values of omap entries.
    Pairs(Vec<(Bytes, Bytes)>),
    /// A page of omap entries.
    PairsPage(Page<(Bytes, Bytes)>),
    /// A page of object ids.
    Objects(Page<ObjectId>),
    /// Extents of an object.
    Extents(ObjectExtents),
}

/// The reply to a [`StoreRequest`].
#[derive(Debug)]
pub enum StoreReply {
    /// Reply to requests that return no data.
    Done,
    /// Reply to [`StoreRequest::Stage`].
    Stage(StageId),
    /// Reply to [`StoreRequest::Read`].
    Read(ReadData),
    /// Reply to [`StoreRequest::Query`].
    Query(QueryReply),
    /// Reply to [`StoreRequest::Collections`].
    Collections(Vec<CollectionId>),
    /// Reply to [`StoreRequest::Space`].
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
    ObjectExtents: StoreReply::Query(QueryReply::Extents(extents)) => extents;
    Vec<CollectionId>: StoreReply::Collections(collections) => collections;
    Space: StoreReply::Space(space) => space;
}

/// Extracts from a reply the value that the request asked for.
pub(crate) fn take<T: FromReply>(reply: Result<StoreReply>) -> Result<T> {
    let another_kind = || StoreError::Disconnected("the reply does not match the kind of the request".into());
    T::from_reply(reply?).ok_or_else(another_kind)
}
