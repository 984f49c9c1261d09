//! The [`ObjectStore`] trait and what its calls return.

use base::BoxFuture;
use base::block::{self, BLOCK, ChecksumMismatch, Payload};
use base::mem::{Arena, ArenaBuf};
use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

use crate::{CollectionId, ObjectId, Result, Transaction};

/// Names extents that were allocated by [`ObjectStore::stage`] and do not belong to an object yet.
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

/// Space of a target, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StatFs {
    /// For data, in all.
    pub total: u64,
    /// For data, free.
    pub free: u64,
    /// Taken by staged extents that no transaction has named yet (part of what is not free).
    pub staged: u64,
    /// Free space is in that many pieces.
    pub free_extents: u64,
    /// Length of the longest free piece, in bytes.
    pub largest_free_extent: u64,
    /// Free bytes of the index, and its size: it limits the number of objects.
    pub index_free: u64,
    /// Size of the index region.
    pub index_total: u64,
}

/// What [`ObjectStore::read`] found: whole blocks that cover the range asked for, clipped at the object's end.
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

/// A page of an ordered listing.
pub type Page<T> = (Vec<T>, bool);

/// Collections of objects with data, xattrs and an omap, changed by atomic transactions.
///
/// **Order.** A call takes its place when the method is *called*, not when its future is first polled; dropping the
/// future of a transaction does not undo it. Transactions of one collection commit in the order they were queued,
/// those of different collections go in parallel. A read of any kind sees every transaction of its collection that
/// was queued before it, durable or not.
///
/// **Durability.** The future of [`queue_transaction`](Self::queue_transaction) resolves once the transaction will
/// survive a loss of power, or has failed and changed nothing.
///
/// **Threads.** Any thread may call any method. Futures run on any executor; they only wait for messages.
pub trait ObjectStore: Send + Sync {
    /// Allocates fresh extents for `len` bytes that a later transaction will name. Invisible until then, and freed if
    /// the process ends first.
    ///
    /// # Errors
    /// [`NoSpace`](crate::StoreError::NoSpace) before anything is changed.
    fn stage(&self, len: u64) -> BoxFuture<'static, Result<StageId>>;

    /// Staged bytes can only be written, and named by a transaction, at multiples of that of their stage and of their object, in
    /// bytes; where a stage or an object ends, less will do. One block, or more where several targets share an object.
    fn stage_alignment(&self) -> u64 {
        BLOCK
    }

    /// Writes staged bytes, in any order and in parallel. `offset` must be a multiple of the
    /// [alignment](Self::stage_alignment), and so must the payload's length unless it ends the stage. Resolves when the drive has the data (not yet durable).
    ///
    /// Here as in transactions: a store does not keep the payload's memory once the call is done. It may be a staging
    /// buffer, or a range of memory that a peer waits to use again.
    fn stage_write(&self, stage: StageId, offset: u64, payload: Payload) -> BoxFuture<'static, Result<()>>;

    /// Gives staged extents back. Parts that transactions queued before have named stay with their objects.
    /// To be called once for every stage, after its last transaction was queued, or to abandon it.
    fn stage_release(&self, stage: StageId);

    /// Applies a transaction. A transaction that names staged bytes must be queued after their `stage_write` was called;
    /// it waits for them by itself.
    fn queue_transaction(&self, transaction: Transaction) -> BoxFuture<'static, Result<()>>;

    /// Number of the current session with the store. It changes whenever transactions may have been lost, before
    /// anything is queued in the new session; a store in this process has one session for ever.
    fn session(&self) -> u64 {
        0
    }

    /// As [`queue_transaction`](Self::queue_transaction), but fails with
    /// [`Disconnected`](crate::StoreError::Disconnected), having done nothing, unless `session` is the current one:
    /// what a transaction was computed from must not outlive the session it was read in.
    fn queue_transaction_in(&self, session: u64, transaction: Transaction) -> BoxFuture<'static, Result<()>> {
        if session == self.session() {
            return self.queue_transaction(transaction);
        }
        let gone = format!("session {session} is over");
        Box::pin(std::future::ready(Err(crate::StoreError::Disconnected(gone))))
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
    ) -> BoxFuture<'static, Result<ReadData>>;

    /// Size of an object.
    fn stat(&self, cid: &CollectionId, oid: &ObjectId) -> BoxFuture<'static, Result<Stat>>;

    /// One xattr.
    fn get_xattr(&self, cid: &CollectionId, oid: &ObjectId, name: Bytes)
    -> BoxFuture<'static, Result<Bytes>>;

    /// All xattrs, ordered by name.
    fn get_xattrs(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
    ) -> BoxFuture<'static, Result<Vec<(Bytes, Bytes)>>>;

    /// The omap's header; empty if there is none.
    fn omap_get_header(&self, cid: &CollectionId, oid: &ObjectId) -> BoxFuture<'static, Result<Bytes>>;

    /// The omap entries of those `keys` that exist, ordered by key.
    fn omap_get(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        keys: Vec<Bytes>,
    ) -> BoxFuture<'static, Result<Vec<(Bytes, Bytes)>>>;

    /// Up to `limit` omap entries with keys of at least `from`, ordered by key, and whether there are more. Stops early,
    /// with at least one entry, at about 1 MiB.
    fn omap_iterate(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        from: Bytes,
        limit: usize,
    ) -> BoxFuture<'static, Result<Page<(Bytes, Bytes)>>>;

    /// Up to `limit` objects with ids of at least `from` (all if `None`), in order, and whether there are more. Stops
    /// early, with at least one id, at about 1 MiB.
    fn list(
        &self,
        cid: &CollectionId,
        from: Option<ObjectId>,
        limit: usize,
    ) -> BoxFuture<'static, Result<Page<ObjectId>>>;

    /// All collections, in order.
    fn collections(&self) -> BoxFuture<'static, Result<Vec<CollectionId>>>;

    /// Space.
    fn statfs(&self) -> BoxFuture<'static, Result<StatFs>>;

    /// Tells the store of memory that payloads and read destinations will often come from, so that it can register it
    /// with the drive's queue. Only makes things faster. Called anew for every session of an osd: memory of earlier
    /// sessions must not be kept, or it is never unmapped.
    fn register_memory(&self, _arena: &Arc<Arena>) {}

    /// Finishes what was queued, makes a checkpoint and closes the target. Later calls fail with
    /// [`Disconnected`](crate::StoreError::Disconnected).
    fn umount(&self) -> BoxFuture<'static, Result<()>>;
}
