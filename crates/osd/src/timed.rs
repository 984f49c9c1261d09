//! A store that is called directly, with its calls booked as the host's time of the requests that make them.
//!
//! A store behind the host–DPU channel does not need that: its proxy knows what of a call was transfer, and what the host's.

use std::sync::Arc;

use base::BoxFuture;
use base::block::Payload;
use base::mem::{Arena, ArenaBuf};
use base::phases::{self, Phase};
use bytes::Bytes;
use store::{
    CollectionId, ObjectId, ObjectStore, Page, ReadData, Result, StageId, Stat, StatFs, Transaction,
};

/// The store, timed from each call to its answer.
pub(crate) struct Timed(pub(crate) Arc<dyn ObjectStore>);

/// Books a call from now on, if it is made for a request.
fn timed<T: 'static>(call: impl FnOnce() -> BoxFuture<'static, T>) -> BoxFuture<'static, T> {
    let Some(clock) = phases::current() else { return call() };
    let lasting = clock.begin(Phase::Host);
    let answer = call();
    Box::pin(async move {
        let answer = answer.await;
        drop(lasting);
        answer
    })
}

impl ObjectStore for Timed {
    fn stage(&self, len: u64) -> BoxFuture<'static, Result<StageId>> {
        timed(|| self.0.stage(len))
    }

    fn stage_write(&self, stage: StageId, offset: u64, payload: Payload) -> BoxFuture<'static, Result<()>> {
        timed(|| self.0.stage_write(stage, offset, payload))
    }

    fn stage_release(&self, stage: StageId) {
        self.0.stage_release(stage);
    }

    fn queue_transaction(&self, transaction: Transaction) -> BoxFuture<'static, Result<()>> {
        timed(|| self.0.queue_transaction(transaction))
    }

    fn session(&self) -> u64 {
        self.0.session()
    }

    fn queue_transaction_in(&self, session: u64, transaction: Transaction) -> BoxFuture<'static, Result<()>> {
        timed(|| self.0.queue_transaction_in(session, transaction))
    }

    fn read(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        offset: u64,
        len: u64,
        dest: Option<ArenaBuf>,
    ) -> BoxFuture<'static, Result<ReadData>> {
        timed(|| self.0.read(cid, oid, offset, len, dest))
    }

    fn stat(&self, cid: &CollectionId, oid: &ObjectId) -> BoxFuture<'static, Result<Stat>> {
        timed(|| self.0.stat(cid, oid))
    }

    fn get_xattr(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        name: Bytes,
    ) -> BoxFuture<'static, Result<Bytes>> {
        timed(|| self.0.get_xattr(cid, oid, name))
    }

    fn get_xattrs(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
    ) -> BoxFuture<'static, Result<Vec<(Bytes, Bytes)>>> {
        timed(|| self.0.get_xattrs(cid, oid))
    }

    fn omap_get_header(&self, cid: &CollectionId, oid: &ObjectId) -> BoxFuture<'static, Result<Bytes>> {
        timed(|| self.0.omap_get_header(cid, oid))
    }

    fn omap_get(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        keys: Vec<Bytes>,
    ) -> BoxFuture<'static, Result<Vec<(Bytes, Bytes)>>> {
        timed(|| self.0.omap_get(cid, oid, keys))
    }

    fn omap_iterate(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        from: Bytes,
        limit: usize,
    ) -> BoxFuture<'static, Result<Page<(Bytes, Bytes)>>> {
        timed(|| self.0.omap_iterate(cid, oid, from, limit))
    }

    fn list(
        &self,
        cid: &CollectionId,
        from: Option<ObjectId>,
        limit: usize,
    ) -> BoxFuture<'static, Result<Page<ObjectId>>> {
        timed(|| self.0.list(cid, from, limit))
    }

    fn collections(&self) -> BoxFuture<'static, Result<Vec<CollectionId>>> {
        timed(|| self.0.collections())
    }

    fn statfs(&self) -> BoxFuture<'static, Result<StatFs>> {
        timed(|| self.0.statfs())
    }

    fn register_memory(&self, arena: &Arc<Arena>) {
        self.0.register_memory(arena);
    }

    fn umount(&self) -> BoxFuture<'static, Result<()>> {
        timed(|| self.0.umount())
    }
}
