//! The interface of a store: [`Submit`], [`ObjectStore`] and [`StoreCalls`].

use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use base::BoxFuture;
use base::block::{BLOCK, Payload};
use base::mem::{Arena, ArenaBuf};
use bytes::Bytes;

use crate::request::{FromReply, take};
use crate::{
    CollectionId, MetadataQuery, ObjectExtents, ObjectId, Page, ReadData, Result, Space, StageId, Stat,
    StoreError, StoreReply, StoreRequest, Transaction,
};

/// Access to collections of objects. An object has data, xattrs and an omap. Atomic transactions
/// change objects and collections.
///
/// **Order.** The store orders requests by their calls of [`submit`](Submit::submit), not by the
/// first polls of their futures. The store applies a transaction even if the caller drops the
/// transaction's future. Transactions of one collection commit in the order in which they were
/// queued. Transactions of different collections commit in parallel. A read or query sees every
/// transaction of its collection that was queued before it, even if the transaction is not durable
/// yet. A read or query of an object sees no transaction that was queued after it. A query about a
/// collection may see such transactions. A store that divides long reads states the length up to
/// which this holds.
///
/// **Durability.** The future of a transaction resolves with success once the transaction will
/// survive a power failure. It resolves with an error if the transaction failed. A failed
/// transaction has changed nothing, with two exceptions: after the errors
/// [`Disconnected`](StoreError::Disconnected) and [`Poisoned`](StoreError::Poisoned), the outcome
/// of the transaction is unknown.
pub trait Submit {
    /// Future that resolves with the reply to a request. The caller may drop it at any time.
    type Reply: Future<Output = Result<StoreReply>> + Unpin + 'static;

    /// Submits a request. Returns the future of its reply.
    fn submit(&self, request: StoreRequest) -> Self::Reply;

    /// Returns the number of the current incarnation. The number changes whenever queued
    /// transactions may have been lost. It changes before the store accepts any request in the new
    /// incarnation. A store that never loses queued transactions stays in incarnation 0.
    fn incarnation(&self) -> u64 {
        0
    }

    /// Returns the alignment of staged bytes, in bytes. Writes into a stage, and transactions that
    /// name staged bytes, must use offsets and lengths that are multiples of this alignment. This
    /// applies to offsets in the stage and to offsets in the object. Only the write at the end of a
    /// stage or of an object may have another length. The alignment is one block, or more if
    /// several targets store fragments of one object.
    fn stage_alignment(&self) -> u64 {
        BLOCK
    }

    /// Announces memory that will often contain payloads and destinations of reads, so that the
    /// store can register it with the I/O rings of its drives. Registration makes I/O faster and
    /// has no other effect. Each attachment of an osd calls this method, and several attachments may
    /// exist at a time. At each call, a store must release all memory that only registrations still
    /// refer to, because otherwise the memory of ended attachments would never be unmapped.
    fn register_memory(&self, _arena: &Arc<Arena>) {}
}

/// A store that any thread may call. Its futures can run on any executor.
pub trait ObjectStore: Submit<Reply = StoreFuture> + Send + Sync {}

impl<S: Submit<Reply = StoreFuture> + Send + Sync + ?Sized> ObjectStore for S {}

/// The future of an [`ObjectStore`]'s reply.
pub type StoreFuture = BoxFuture<'static, Result<StoreReply>>;

/// Returns a future that is already complete with `reply`.
#[must_use]
pub fn ready(reply: Result<StoreReply>) -> StoreFuture {
    Box::pin(std::future::ready(reply))
}

/// Future that a method of [`StoreCalls`] returns. It resolves with the method's result.
#[derive(Debug)]
#[must_use]
pub struct ReplyOf<F, T> {
    reply: F,
    found: PhantomData<fn() -> T>,
}

/// Returns the future of a reply to a request that returns no data.
pub fn done<F>(reply: F) -> ReplyOf<F, ()> {
    answer(reply)
}

impl<F: Future<Output = Result<StoreReply>> + Unpin, T: FromReply> Future for ReplyOf<F, T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        Pin::new(&mut self.reply).poll(cx).map(take)
    }
}

/// Checks that `asked` is the current incarnation. `None` means any incarnation and always passes.
///
/// # Errors
/// [`StoreError::Disconnected`] if `asked` is not `current`.
pub fn check_incarnation(asked: Option<u64>, current: u64) -> Result<()> {
    match asked {
        Some(incarnation) if incarnation != current => {
            Err(StoreError::Disconnected(format!("incarnation {incarnation} of the store has ended")))
        }
        _ => Ok(()),
    }
}

/// Methods that submit requests to a store, with one method for each kind of request.
pub trait StoreCalls: Submit {
    /// Allocates a stage: free extents for `len` bytes, which a later transaction will name. No
    /// object contains the extents until then. If the store's process ends first, the store frees
    /// them.
    ///
    /// # Errors
    /// [`NoSpace`](crate::StoreError::NoSpace) if too little space is free.
    /// [`InvalidArgument`](crate::StoreError::InvalidArgument) if `len` is 0. A failed call has
    /// changed nothing.
    fn stage(&self, len: u64) -> ReplyOf<Self::Reply, StageId> {
        answer(self.submit(StoreRequest::Stage { len }))
    }

    /// Writes a payload to byte `offset` of a stage. Writes may run in parallel and in any order.
    /// `offset` must be a multiple of the [alignment](Submit::stage_alignment). The payload's
    /// length must also be a multiple of the alignment, unless the payload ends at the end of the
    /// stage. The future resolves when the drive has received the data. The data is not durable
    /// yet.
    ///
    /// A store must not keep the payload's memory after it has completed the request. The same
    /// applies to payloads of transactions. The memory may be a staging buffer, or a range of
    /// memory that a peer is waiting to reuse.
    fn stage_write(&self, stage: StageId, offset: u64, payload: Payload) -> ReplyOf<Self::Reply, ()> {
        answer(self.submit(StoreRequest::StageWrite { stage, offset, payload }))
    }

    /// Releases a stage. Blocks that queued transactions name remain allocated for their objects.
    /// Call this method once for every stage: after the last transaction that names the stage was
    /// queued, or to abandon the stage.
    fn stage_release(&self, stage: StageId) {
        drop(self.submit(StoreRequest::StageRelease { stage }));
    }

    /// Applies a transaction. If the transaction names staged bytes, call
    /// [`stage_write`](Self::stage_write) for these bytes first. The caller need not wait for the
    /// write, because the transaction does.
    fn queue_transaction(&self, transaction: Transaction) -> ReplyOf<Self::Reply, ()> {
        answer(self.submit(StoreRequest::Transact { transaction, incarnation: None }))
    }

    /// Like [`queue_transaction`](Self::queue_transaction). If `incarnation` is not the current
    /// incarnation, fails with [`Disconnected`](crate::StoreError::Disconnected) and changes
    /// nothing. Use this method for a transaction that depends on data read in `incarnation`.
    fn queue_transaction_in(&self, incarnation: u64, transaction: Transaction) -> ReplyOf<Self::Reply, ()> {
        answer(self.submit(StoreRequest::Transact { transaction, incarnation: Some(incarnation) }))
    }

    /// Reads the blocks that cover `len` bytes at `offset`. With `dest`, the store reads the data
    /// into that buffer, which saves a copy. The buffer must have room for the covering blocks.
    /// Without `dest`, the store chooses the memory.
    ///
    /// The store does not compare the data with its checksums. The caller can do so with
    /// [`ReadData::verify`].
    fn read(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        offset: u64,
        len: u64,
        dest: Option<ArenaBuf>,
    ) -> ReplyOf<Self::Reply, ReadData> {
        answer(self.submit(StoreRequest::Read { cid: cid.clone(), oid: oid.clone(), offset, len, dest }))
    }

    /// Submits a query for metadata of a collection or of one of its objects.
    fn query(&self, cid: &CollectionId, query: MetadataQuery) -> Self::Reply {
        self.submit(StoreRequest::Query { cid: cid.clone(), query })
    }

    /// Returns the size of an object and the drive space that it occupies.
    fn stat(&self, cid: &CollectionId, oid: &ObjectId) -> ReplyOf<Self::Reply, Stat> {
        answer(self.query(cid, MetadataQuery::Stat { oid: oid.clone() }))
    }

    /// Returns the extents of an object in the `len` bytes at `offset`: the ranges that have blocks.
    /// Blocks of zeros that were written count, too. A range is a hole if it was never written, and
    /// each whole block of it that was zeroed or truncated later. A store with redundancy may count a
    /// hole as an extent, but never the other way round.
    ///
    /// One answer has at most [`MAX_EXTENTS`](crate::MAX_EXTENTS) ranges and need not cover the whole
    /// range: see [`ObjectExtents::end`].
    fn extents(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        offset: u64,
        len: u64,
    ) -> ReplyOf<Self::Reply, ObjectExtents> {
        answer(self.query(cid, MetadataQuery::Extents { oid: oid.clone(), offset, len }))
    }

    /// Returns the value of xattr `name` of an object.
    fn get_xattr(&self, cid: &CollectionId, oid: &ObjectId, name: Bytes) -> ReplyOf<Self::Reply, Bytes> {
        answer(self.query(cid, MetadataQuery::Xattr { oid: oid.clone(), name }))
    }

    /// Returns the names and values of all xattrs of an object, ordered by name.
    fn get_xattrs(&self, cid: &CollectionId, oid: &ObjectId) -> ReplyOf<Self::Reply, Vec<(Bytes, Bytes)>> {
        answer(self.query(cid, MetadataQuery::Xattrs { oid: oid.clone() }))
    }

    /// Returns the header of an object's omap, which is empty if no header was set.
    fn omap_get_header(&self, cid: &CollectionId, oid: &ObjectId) -> ReplyOf<Self::Reply, Bytes> {
        answer(self.query(cid, MetadataQuery::OmapHeader { oid: oid.clone() }))
    }

    /// Returns the omap entries of an object with the given `keys`, ordered by key. Omits keys that
    /// do not exist.
    fn omap_get(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        keys: Vec<Bytes>,
    ) -> ReplyOf<Self::Reply, Vec<(Bytes, Bytes)>> {
        answer(self.query(cid, MetadataQuery::OmapGet { oid: oid.clone(), keys }))
    }

    /// Returns a page of up to `limit` omap entries of an object, ordered by key, starting at key
    /// `from`. A page is limited to about 1 MiB, but it contains the first entry even if that entry
    /// is larger.
    fn omap_iterate(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        from: Bytes,
        limit: usize,
    ) -> ReplyOf<Self::Reply, Page<(Bytes, Bytes)>> {
        answer(self.query(cid, MetadataQuery::OmapIterate { oid: oid.clone(), from, limit: limit as u64 }))
    }

    /// Returns a page of up to `limit` object ids of a collection, in bytewise order. The page
    /// starts at id `from`, or at the first object if `from` is `None`. A page is limited to about
    /// 1 MiB.
    fn list(
        &self,
        cid: &CollectionId,
        from: Option<ObjectId>,
        limit: usize,
    ) -> ReplyOf<Self::Reply, Page<ObjectId>> {
        answer(self.query(cid, MetadataQuery::List { from, limit: limit as u64 }))
    }

    /// Returns the ids of all collections, in bytewise order.
    fn collections(&self) -> ReplyOf<Self::Reply, Vec<CollectionId>> {
        answer(self.submit(StoreRequest::Collections))
    }

    /// Returns the total and the free space of the target.
    fn space(&self) -> ReplyOf<Self::Reply, Space> {
        answer(self.submit(StoreRequest::Space))
    }

    /// Completes all queued requests, makes a checkpoint and closes the target. Later calls fail
    /// with [`Disconnected`](crate::StoreError::Disconnected).
    fn umount(&self) -> ReplyOf<Self::Reply, ()> {
        answer(self.submit(StoreRequest::Umount))
    }
}

impl<S: Submit + ?Sized> StoreCalls for S {}

fn answer<F, T>(reply: F) -> ReplyOf<F, T> {
    ReplyOf { reply, found: PhantomData }
}
