//! A target that is not there.

use base::BoxFuture;
use base::block::Payload;
use base::mem::ArenaBuf;
use bytes::Bytes;

use crate::{
    CollectionId, ObjectId, ObjectStore, Page, ReadData, Result, StageId, Stat, StatFs, StoreError,
    Transaction,
};

/// Stands for a target that cannot be mounted: every call fails with the reason. So a node with other targets goes on
/// without it.
#[derive(Debug, Clone)]
pub struct AbsentStore {
    why: String,
}

impl AbsentStore {
    /// `why` says what is wrong and what to do.
    #[must_use]
    pub fn new(why: impl Into<String>) -> AbsentStore {
        AbsentStore { why: why.into() }
    }

    fn fail<T: Send + 'static>(&self) -> BoxFuture<'static, Result<T>> {
        Box::pin(std::future::ready(Err(StoreError::Absent(self.why.clone()))))
    }
}

impl ObjectStore for AbsentStore {
    fn stage(&self, _len: u64) -> BoxFuture<'static, Result<StageId>> {
        self.fail()
    }
    fn stage_write(&self, _: StageId, _offset: u64, _payload: Payload) -> BoxFuture<'static, Result<()>> {
        self.fail()
    }
    fn stage_release(&self, _: StageId) {}
    fn queue_transaction(&self, _: Transaction) -> BoxFuture<'static, Result<()>> {
        self.fail()
    }
    fn read(
        &self,
        _: &CollectionId,
        _: &ObjectId,
        _offset: u64,
        _len: u64,
        _dest: Option<ArenaBuf>,
    ) -> BoxFuture<'static, Result<ReadData>> {
        self.fail()
    }
    fn stat(&self, _: &CollectionId, _: &ObjectId) -> BoxFuture<'static, Result<Stat>> {
        self.fail()
    }
    fn get_xattr(&self, _: &CollectionId, _: &ObjectId, _name: Bytes) -> BoxFuture<'static, Result<Bytes>> {
        self.fail()
    }
    fn get_xattrs(&self, _: &CollectionId, _: &ObjectId) -> BoxFuture<'static, Result<Vec<(Bytes, Bytes)>>> {
        self.fail()
    }
    fn omap_get_header(&self, _: &CollectionId, _: &ObjectId) -> BoxFuture<'static, Result<Bytes>> {
        self.fail()
    }
    fn omap_get(
        &self,
        _: &CollectionId,
        _: &ObjectId,
        _keys: Vec<Bytes>,
    ) -> BoxFuture<'static, Result<Vec<(Bytes, Bytes)>>> {
        self.fail()
    }
    fn omap_iterate(
        &self,
        _: &CollectionId,
        _: &ObjectId,
        _from: Bytes,
        _limit: usize,
    ) -> BoxFuture<'static, Result<Page<(Bytes, Bytes)>>> {
        self.fail()
    }
    fn list(
        &self,
        _: &CollectionId,
        _from: Option<ObjectId>,
        _limit: usize,
    ) -> BoxFuture<'static, Result<Page<ObjectId>>> {
        self.fail()
    }
    fn collections(&self) -> BoxFuture<'static, Result<Vec<CollectionId>>> {
        self.fail()
    }
    fn statfs(&self) -> BoxFuture<'static, Result<StatFs>> {
        self.fail()
    }
    fn umount(&self) -> BoxFuture<'static, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}
