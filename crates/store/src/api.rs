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

/// Names extents that [`StoreCalls::stage`] allocated and that no object owns yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StageId(pub u64);

/// Size and space of an object, which a store reports without reading the object's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    /// Size, in bytes.
    pub size: u64,
    /// Bytes of drive space that the object's blocks take. Shared blocks count in full.
    pub allocated: u64,
}

/// Result of [`StoreCalls::read`]: whole blocks that cover the requested range, clipped at the
/// object's end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReadData {
    /// Object offset of the first byte: the range's start, rounded down to its block.
    pub offset: u64,
    /// The bytes, in consecutive pieces. They end at the last requested block or at the object's
    /// end.
    pub data: Vec<Bytes>,
    /// One CRC-32C per block, as stored. If the object ends inside its last block, that block's
    /// checksum covers the block padded with zeros.
    pub checksums: Vec<u32>,
    /// Size of the whole object, in bytes.
    pub object_size: u64,
    /// Whether the data was already compared with the checksums on its way here.
    pub verified: bool,
}

impl ReadData {
    /// Number of bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.data.iter().map(|d| d.len() as u64).sum()
    }

    /// Whether there are no bytes, because the range starts at or after the object's end.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.data.iter().all(Bytes::is_empty)
    }

    /// Returns the bytes in one piece. Copies them only if they are in several pieces.
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

    /// Compares every block with its checksum, unless `verified` is already set.
    ///
    /// # Errors
    /// Names the first block that differs.
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

    /// Returns the part of the data inside the range `offset..offset + len`.
    #[must_use]
    pub fn slice(&self, offset: u64, len: u64) -> Bytes {
        let all = self.contiguous();
        let start = offset.saturating_sub(self.offset).min(all.len() as u64) as usize;
        let end = offset.saturating_add(len).saturating_sub(self.offset).min(all.len() as u64) as usize;
        all.slice(start..end.max(start))
    }
}

/// A page of an ordered listing: the items, and whether more items follow.
pub type Page<T> = (Vec<T>, bool);

/// Collections of objects with data, xattrs and an omap, changed by atomic transactions.
///
/// **Order.** A request takes its place in the order when [`submit`](Submit::submit) is *called*,
/// not when its future is first polled. The store applies a transaction even if the caller drops
/// its future. Transactions of one collection commit in the order in which they were queued.
/// Transactions of different collections commit in parallel. A read sees every transaction of its
/// collection that was queued before it, durable or not.
///
/// **Durability.** The future of a transaction resolves with success once the transaction will
/// survive a power failure. It resolves with an error if the transaction failed and changed
/// nothing.
pub trait Submit {
    /// The future of a reply. The caller may drop it at any time.
    type Reply: Future<Output = Result<StoreReply>> + Unpin + 'static;

    /// Submits a request.
    fn submit(&self, request: StoreRequest) -> Self::Reply;

    /// Returns the number of the current incarnation. It changes whenever transactions may have been lost, before
    /// anything is queued in the new incarnation. A store in this process has one incarnation.
    fn incarnation(&self) -> u64 {
        0
    }

    /// Returns the alignment of staged bytes, in bytes. Writes into a stage, and transactions that
    /// name staged bytes, must use multiples of it, both in the stage and in the object. Only the
    /// last part of a stage or an object may be shorter. The alignment is one block, or more where
    /// several targets share an object.
    fn stage_alignment(&self) -> u64 {
        BLOCK
    }

    /// Announces memory that payloads and read destinations will often come from, so that the store
    /// can register it with the drive's queue. Registration only saves time. The osd calls this at
    /// every attachment. A store must drop the memory of earlier attachments, because otherwise
    /// that memory is never unmapped.
    fn register_memory(&self, _arena: &Arc<Arena>) {}
}

/// A store that any thread may call. Its futures run on any executor.
pub trait ObjectStore: Submit<Reply = StoreFuture> + Send + Sync {}

impl<S: Submit<Reply = StoreFuture> + Send + Sync + ?Sized> ObjectStore for S {}

/// The future of an [`ObjectStore`]'s reply.
pub type StoreFuture = BoxFuture<'static, Result<StoreReply>>;

/// Returns a future that is already complete with `reply`.
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

/// Fails if `asked` names another incarnation than the current one.
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
    /// Allocates fresh extents for `len` bytes that a later transaction will name. The extents are
    /// invisible until then. The store frees them if its process ends first.
    ///
    /// # Errors
    /// [`NoSpace`](crate::StoreError::NoSpace), without any change.
    fn stage(&self, len: u64) -> ReplyOf<Self::Reply, StageId> {
        answer(self.submit(StoreRequest::Stage { len }))
    }

    /// Writes staged bytes. Writes may run in parallel and in any order. `offset` must be a
    /// multiple of the [alignment](Submit::stage_alignment). The payload's length must be a
    /// multiple of it too, unless the payload ends the stage. The future resolves when the drive
    /// has the data, which is not durable yet.
    ///
    /// A store releases the payload's memory when the request is done, both here and in
    /// transactions. The memory may be a staging buffer, or a range that a peer waits to use again.
    fn stage_write(&self, stage: StageId, offset: u64, payload: Payload) -> ReplyOf<Self::Reply, ()> {
        answer(self.submit(StoreRequest::StageWrite { stage, offset, payload }))
    }

    /// Releases staged extents. Parts that already queued transactions name stay with their
    /// objects. Call this once for every stage, after its last transaction was queued, or to
    /// abandon the stage.
    fn stage_release(&self, stage: StageId) {
        drop(self.submit(StoreRequest::StageRelease { stage }));
    }

    /// Applies a transaction. If it names staged bytes, queue it after the call of their
    /// `stage_write`. The transaction waits for those writes by itself.
    fn queue_transaction(&self, transaction: Transaction) -> ReplyOf<Self::Reply, ()> {
        answer(self.submit(StoreRequest::Transact { transaction, incarnation: None }))
    }

    /// Like [`queue_transaction`](Self::queue_transaction), but fails with
    /// [`Disconnected`](crate::StoreError::Disconnected) and does nothing if `incarnation` is not
    /// the current one. Use it for a transaction that depends on data read in that incarnation.
    fn queue_transaction_in(&self, incarnation: u64, transaction: Transaction) -> ReplyOf<Self::Reply, ()> {
        answer(self.submit(StoreRequest::Transact { transaction, incarnation: Some(incarnation) }))
    }

    /// Reads the blocks that cover `len` bytes at `offset`. With `dest`, the store puts the data
    /// into that buffer, which saves a copy. The buffer must have room for the covering blocks.
    /// Without `dest`, the store chooses the memory.
    ///
    /// The store does not verify checksums here. The reader does so with [`ReadData::verify`].
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

    /// Returns the omap entries of those of the given `keys` that exist, ordered by key.
    fn omap_get(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        keys: Vec<Bytes>,
    ) -> ReplyOf<Self::Reply, Vec<(Bytes, Bytes)>> {
        answer(self.query(cid, MetadataQuery::OmapGet { oid: oid.clone(), keys }))
    }

    /// Returns up to `limit` omap entries, ordered by key, starting at key `from`, and whether more
    /// entries follow. A page ends early at about 1 MiB, but has at least one entry.
    fn omap_iterate(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        from: Bytes,
        limit: usize,
    ) -> ReplyOf<Self::Reply, Page<(Bytes, Bytes)>> {
        answer(self.query(cid, MetadataQuery::OmapIterate { oid: oid.clone(), from, limit: limit as u64 }))
    }

    /// Returns up to `limit` object ids in order, starting at `from` (or at the first object if
    /// `None`), and whether more ids follow. A page ends early at about 1 MiB, but has at least one
    /// id.
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
