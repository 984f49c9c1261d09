//! The interface of a store: [`Submit`], [`ObjectStore`] and [`StoreCalls`].

use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use base::BoxFuture;
use base::block::{self, BLOCK, ChecksumMismatch, Payload};
use base::mem::{Arena, ArenaBuf};
use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use crate::request::{FromReply, take};
use crate::{
    CollectionId, MetadataQuery, ObjectId, Result, Space, StoreError, StoreReply, StoreRequest, Transaction,
};

/// Names extents that were allocated by [`StoreCalls::stage`] and do not belong to an object yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StageId(pub u64);

/// What a store knows of an object without looking at its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    /// Size, in bytes.
    pub size: u64,
    /// Bytes of drive space that the object's blocks take, shared ones counted in full.
    pub allocated: u64,
}

/// What [`StoreCalls::read`] found: whole blocks that cover the range asked for, clipped at the object's end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReadData {
    /// Object offset of the first byte: the range's start, rounded down to its block.
    pub offset: u64,
    /// The bytes, one after the other. Ends at the last block asked for or at the object's end.
    pub data: Vec<Bytes>,
    /// One CRC-32C per block, as stored. The last is that of the block filled up with zeros, if the object ends in it.
    pub checksums: Vec<u32>,
    /// Size of the whole object, in bytes.
    pub object_size: u64,
    /// Whoever brought the data here has compared it with the checksums.
    pub verified: bool,
}

impl ReadData {
    /// Number of bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.data.iter().map(|d| d.len() as u64).sum()
    }

    /// Whether there are no bytes: the range starts at or after the object's end.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.data.iter().all(Bytes::is_empty)
    }

    /// The bytes in one piece; copies only if they are not in one already.
    #[must_use]
    pub fn contiguous(&self) -> Bytes {
        match self.data.as_slice() {
            [] => Bytes::new(),
            [one] => one.clone(),
            many => {
                let mut all = BytesMut::with_capacity(self.len() as usize);
                many.iter().for_each(|d| all.extend_from_slice(d));
                all.freeze()
            }
        }
    }

    /// Compares every block with its checksum, unless that was done already.
    ///
    /// # Errors
    /// The first block that differs.
    pub fn verify(&self) -> std::result::Result<(), ChecksumMismatch> {
        if self.verified {
            return Ok(());
        }
        let all = self.contiguous();
        let mut at = self.offset;
        for (i, piece) in all.chunks(BLOCK as usize).enumerate() {
            let found = block::pad_to_block(block::crc32c(piece), piece.len());
            let expected = self.checksums.get(i).copied().unwrap_or(0);
            if found != expected {
                return Err(ChecksumMismatch { offset: at, expected, found });
            }
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// The part of the data that the range `offset..offset + len` covers.
    #[must_use]
    pub fn slice(&self, offset: u64, len: u64) -> Bytes {
        let all = self.contiguous();
        let start = offset.saturating_sub(self.offset).min(all.len() as u64) as usize;
        let end = offset.saturating_add(len).saturating_sub(self.offset).min(all.len() as u64) as usize;
        all.slice(start..end.max(start))
    }
}

/// A page of an ordered listing: the items, and whether there are more.
pub type Page<T> = (Vec<T>, bool);

/// Collections of objects with data, xattrs and an omap, changed by atomic transactions.
///
/// **Order.** A request takes its place in the order when [`submit`](Submit::submit) is *called*, not when its future
/// is first polled. A transaction is applied even if its future is dropped. Transactions of one collection commit in
/// the order in which they were queued; those of different collections commit in parallel. A request that reads sees
/// every transaction of its collection that was queued before it, durable or not.
///
/// **Durability.** The future of a transaction resolves once the transaction will survive a loss of power, or has
/// failed and changed nothing.
pub trait Submit {
    /// The future of a reply. It may be dropped at any time.
    type Reply: Future<Output = Result<StoreReply>> + Unpin + 'static;

    /// Takes a request.
    fn submit(&self, request: StoreRequest) -> Self::Reply;

    /// Returns the number of the current incarnation. It changes whenever transactions may have been lost, before
    /// anything is queued in the new incarnation. A store in this process has one incarnation.
    fn incarnation(&self) -> u64 {
        0
    }

    /// Returns the unit of staged bytes, in bytes. They can only be written, and named by a transaction, at multiples
    /// of it in their stage and in their object; at the end of a stage or an object, less is allowed. One block, or
    /// more where several targets share an object.
    fn stage_alignment(&self) -> u64 {
        BLOCK
    }

    /// Tells the store of memory that payloads and read destinations will often come from, so that it can register the
    /// memory with the drive's queue. This only saves time. It is called for every attachment of an osd: a store must
    /// drop the memory of earlier attachments, or that memory is never unmapped.
    fn register_memory(&self, _arena: &Arc<Arena>) {}
}

/// A store that any thread may call. Its futures run on any executor.
pub trait ObjectStore: Submit<Reply = StoreFuture> + Send + Sync {}

impl<S: Submit<Reply = StoreFuture> + Send + Sync + ?Sized> ObjectStore for S {}

/// The future of an [`ObjectStore`]'s reply.
pub type StoreFuture = BoxFuture<'static, Result<StoreReply>>;

/// A reply that is there already.
#[must_use]
pub fn ready(reply: Result<StoreReply>) -> StoreFuture {
    Box::pin(std::future::ready(reply))
}

/// The future of a method of [`StoreCalls`].
#[derive(Debug)]
#[must_use]
pub struct ReplyOf<F, T> {
    reply: F,
    found: PhantomData<fn() -> T>,
}

impl<F: Future<Output = Result<StoreReply>> + Unpin, T: FromReply> Future for ReplyOf<F, T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        Pin::new(&mut self.reply).poll(cx).map(take)
    }
}

/// Fails unless a transaction belongs to the current incarnation.
///
/// # Errors
/// [`StoreError::Disconnected`].
pub fn check_incarnation(asked: Option<u64>, current: u64) -> Result<()> {
    match asked {
        Some(incarnation) if incarnation != current => {
            Err(StoreError::Disconnected(format!("incarnation {incarnation} is over")))
        }
        _ => Ok(()),
    }
}

/// The requests to a store as methods.
pub trait StoreCalls: Submit {
    /// Allocates fresh extents for `len` bytes that a later transaction will name. They are invisible until then, and
    /// are freed if the process ends first.
    ///
    /// # Errors
    /// [`NoSpace`](crate::StoreError::NoSpace) before anything is changed.
    fn stage(&self, len: u64) -> ReplyOf<Self::Reply, StageId> {
        answer(self.submit(StoreRequest::Stage { len }))
    }

    /// Writes staged bytes, in any order and in parallel. `offset` must be a multiple of the
    /// [alignment](Submit::stage_alignment), and so must the payload's length unless it ends the stage. Resolves when
    /// the drive has the data (not yet durable).
    ///
    /// A store does not keep the payload's memory once the request is done, here as in transactions: it may be a staging
    /// buffer, or a range of memory that a peer waits to use again.
    fn stage_write(&self, stage: StageId, offset: u64, payload: Payload) -> ReplyOf<Self::Reply, ()> {
        answer(self.submit(StoreRequest::StageWrite { stage, offset, payload }))
    }

    /// Releases staged extents. Parts that transactions queued before have named stay with their objects.
    /// To be called once for every stage, after its last transaction was queued, or to abandon it.
    fn stage_release(&self, stage: StageId) {
        drop(self.submit(StoreRequest::StageRelease { stage }));
    }

    /// Applies a transaction. A transaction that names staged bytes must be queued after their `stage_write` was called;
    /// it waits for them by itself.
    fn queue_transaction(&self, transaction: Transaction) -> ReplyOf<Self::Reply, ()> {
        answer(self.submit(StoreRequest::Transact { transaction, incarnation: None }))
    }

    /// As [`queue_transaction`](Self::queue_transaction), but fails with
    /// [`Disconnected`](crate::StoreError::Disconnected), having done nothing, unless `incarnation` is the current one:
    /// what a transaction was computed from must not outlive the incarnation it was read in.
    fn queue_transaction_in(&self, incarnation: u64, transaction: Transaction) -> ReplyOf<Self::Reply, ()> {
        answer(self.submit(StoreRequest::Transact { transaction, incarnation: Some(incarnation) }))
    }

    /// Reads the blocks that cover `len` bytes at `offset`. With `dest`, the data is put there (it must have room for
    /// the covering blocks), so that it need not be copied again; otherwise the store chooses the memory.
    ///
    /// The store does not verify checksums here: the reader does ([`ReadData::verify`]).
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

    /// Asks for metadata.
    fn query(&self, cid: &CollectionId, query: MetadataQuery) -> Self::Reply {
        self.submit(StoreRequest::Query { cid: cid.clone(), query })
    }

    /// Size of an object.
    fn stat(&self, cid: &CollectionId, oid: &ObjectId) -> ReplyOf<Self::Reply, Stat> {
        answer(self.query(cid, MetadataQuery::Stat { oid: oid.clone() }))
    }

    /// One xattr.
    fn get_xattr(&self, cid: &CollectionId, oid: &ObjectId, name: Bytes) -> ReplyOf<Self::Reply, Bytes> {
        answer(self.query(cid, MetadataQuery::Xattr { oid: oid.clone(), name }))
    }

    /// All xattrs, ordered by name.
    fn get_xattrs(&self, cid: &CollectionId, oid: &ObjectId) -> ReplyOf<Self::Reply, Vec<(Bytes, Bytes)>> {
        answer(self.query(cid, MetadataQuery::Xattrs { oid: oid.clone() }))
    }

    /// The omap's header; empty if there is none.
    fn omap_get_header(&self, cid: &CollectionId, oid: &ObjectId) -> ReplyOf<Self::Reply, Bytes> {
        answer(self.query(cid, MetadataQuery::OmapHeader { oid: oid.clone() }))
    }

    /// The omap entries of those `keys` that exist, ordered by key.
    fn omap_get(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        keys: Vec<Bytes>,
    ) -> ReplyOf<Self::Reply, Vec<(Bytes, Bytes)>> {
        answer(self.query(cid, MetadataQuery::OmapGet { oid: oid.clone(), keys }))
    }

    /// Up to `limit` omap entries with keys of at least `from`, ordered by key, and whether there are more. Stops early,
    /// with at least one entry, at about 1 MiB.
    fn omap_iterate(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        from: Bytes,
        limit: usize,
    ) -> ReplyOf<Self::Reply, Page<(Bytes, Bytes)>> {
        answer(self.query(cid, MetadataQuery::OmapIterate { oid: oid.clone(), from, limit: limit as u64 }))
    }

    /// Up to `limit` objects with ids of at least `from` (all if `None`), in order, and whether there are more. Stops
    /// early, with at least one id, at about 1 MiB.
    fn list(
        &self,
        cid: &CollectionId,
        from: Option<ObjectId>,
        limit: usize,
    ) -> ReplyOf<Self::Reply, Page<ObjectId>> {
        answer(self.query(cid, MetadataQuery::List { from, limit: limit as u64 }))
    }

    /// All collections, in order.
    fn collections(&self) -> ReplyOf<Self::Reply, Vec<CollectionId>> {
        answer(self.submit(StoreRequest::Collections))
    }

    /// The target's space.
    fn space(&self) -> ReplyOf<Self::Reply, Space> {
        answer(self.submit(StoreRequest::Space))
    }

    /// Finishes what was queued, makes a checkpoint and closes the target. Later calls fail with
    /// [`Disconnected`](crate::StoreError::Disconnected).
    fn umount(&self) -> ReplyOf<Self::Reply, ()> {
        answer(self.submit(StoreRequest::Umount))
    }
}

impl<S: Submit + ?Sized> StoreCalls for S {}

fn answer<F, T>(reply: F) -> ReplyOf<F, T> {
    ReplyOf { reply, found: PhantomData }
}
