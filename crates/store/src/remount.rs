//! A target of this process that is mounted anew while it is in use.

use std::sync::{Arc, PoisonError, RwLock};

use base::BoxFuture;
use base::block::Payload;
use base::mem::{Arena, ArenaBuf};
use bytes::Bytes;

use crate::{
    CollectionId, ObjectId, ObjectStore, Op, Page, ReadData, Result, StageId, Stat, StatFs, StoreError,
    Transaction, WriteSource,
};

/// Stands for a target whose store may be replaced: by the target mounted anew, after a failure of its drive.
///
/// Each replacement begins a new [session](ObjectStore::session). A stage belongs to the session that it was made in; in a
/// later one the calls that name it fail with [`StoreError::Disconnected`], as after the crash of a store's process.
pub struct RemountedStore {
    current: RwLock<Current>,
}

struct Current {
    session: u64,
    store: Arc<dyn ObjectStore>,
    /// Memory to be registered with the next store, too.
    memory: Option<Arc<Arena>>,
}

impl std::fmt::Debug for RemountedStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemountedStore").field("session", &self.session()).finish_non_exhaustive()
    }
}

/// Stages of a session have numbers below those of the next one.
const STAGES_PER_SESSION: u32 = 48;

impl RemountedStore {
    /// Begins with `store`, in session 0.
    #[must_use]
    pub fn new(store: Arc<dyn ObjectStore>) -> RemountedStore {
        RemountedStore { current: RwLock::new(Current { session: 0, store, memory: None }) }
    }

    /// What the stages of `session` are numbered after: `MountOptions::stages_after` of its store.
    #[must_use]
    pub fn stages_after(session: u64) -> u64 {
        session << STAGES_PER_SESSION
    }

    /// Begins the next session, with `store`. Calls that were made before end with the earlier store's answers.
    pub fn replace(&self, store: Arc<dyn ObjectStore>) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = &current.memory {
            store.register_memory(memory);
        }
        current.session += 1;
        current.store = store;
    }

    fn current(&self) -> (u64, Arc<dyn ObjectStore>) {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        (current.session, Arc::clone(&current.store))
    }

    fn store(&self) -> Arc<dyn ObjectStore> {
        self.current().1
    }

    /// The store that a stage belongs to.
    fn store_of(&self, stage: StageId) -> Result<Arc<dyn ObjectStore>> {
        let (session, store) = self.current();
        if stage.0 >> STAGES_PER_SESSION == session { Ok(store) } else { Err(over()) }
    }
}

fn over() -> StoreError {
    StoreError::Disconnected("the target was mounted anew".into())
}

fn fail<T: Send + 'static>(error: StoreError) -> BoxFuture<'static, Result<T>> {
    Box::pin(std::future::ready(Err(error)))
}

fn stages(transaction: &Transaction) -> impl Iterator<Item = StageId> + '_ {
    transaction.ops.iter().filter_map(|op| match op {
        Op::Write { source: WriteSource::Staged { stage, .. }, .. } => Some(*stage),
        _ => None,
    })
}

impl ObjectStore for RemountedStore {
    fn stage(&self, len: u64) -> BoxFuture<'static, Result<StageId>> {
        self.store().stage(len)
    }
    fn stage_alignment(&self) -> u64 {
        self.store().stage_alignment()
    }
    fn stage_write(&self, stage: StageId, offset: u64, payload: Payload) -> BoxFuture<'static, Result<()>> {
        match self.store_of(stage) {
            Ok(store) => store.stage_write(stage, offset, payload),
            Err(e) => fail(e),
        }
    }
    fn stage_release(&self, stage: StageId) {
        if let Ok(store) = self.store_of(stage) {
            store.stage_release(stage);
        }
    }
    fn queue_transaction(&self, transaction: Transaction) -> BoxFuture<'static, Result<()>> {
        self.queue_transaction_in(self.session(), transaction)
    }
    fn session(&self) -> u64 {
        self.current().0
    }
    fn queue_transaction_in(&self, session: u64, transaction: Transaction) -> BoxFuture<'static, Result<()>> {
        let (current, store) = self.current();
        let is_of_now = |stage: StageId| stage.0 >> STAGES_PER_SESSION == current;
        if session != current || !stages(&transaction).all(is_of_now) {
            return fail(over());
        }
        store.queue_transaction(transaction)
    }
    fn read(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        offset: u64,
        len: u64,
        dest: Option<ArenaBuf>,
    ) -> BoxFuture<'static, Result<ReadData>> {
        self.store().read(cid, oid, offset, len, dest)
    }
    fn stat(&self, cid: &CollectionId, oid: &ObjectId) -> BoxFuture<'static, Result<Stat>> {
        self.store().stat(cid, oid)
    }
    fn get_xattr(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        name: Bytes,
    ) -> BoxFuture<'static, Result<Bytes>> {
        self.store().get_xattr(cid, oid, name)
    }
    fn get_xattrs(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
    ) -> BoxFuture<'static, Result<Vec<(Bytes, Bytes)>>> {
        self.store().get_xattrs(cid, oid)
    }
    fn omap_get_header(&self, cid: &CollectionId, oid: &ObjectId) -> BoxFuture<'static, Result<Bytes>> {
        self.store().omap_get_header(cid, oid)
    }
    fn omap_get(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        keys: Vec<Bytes>,
    ) -> BoxFuture<'static, Result<Vec<(Bytes, Bytes)>>> {
        self.store().omap_get(cid, oid, keys)
    }
    fn omap_iterate(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        from: Bytes,
        limit: usize,
    ) -> BoxFuture<'static, Result<Page<(Bytes, Bytes)>>> {
        self.store().omap_iterate(cid, oid, from, limit)
    }
    fn list(
        &self,
        cid: &CollectionId,
        from: Option<ObjectId>,
        limit: usize,
    ) -> BoxFuture<'static, Result<Page<ObjectId>>> {
        self.store().list(cid, from, limit)
    }
    fn collections(&self) -> BoxFuture<'static, Result<Vec<CollectionId>>> {
        self.store().collections()
    }
    fn statfs(&self) -> BoxFuture<'static, Result<StatFs>> {
        self.store().statfs()
    }
    fn register_memory(&self, arena: &Arc<Arena>) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        current.memory = Some(Arc::clone(arena));
        current.store.register_memory(arena);
    }
    fn umount(&self) -> BoxFuture<'static, Result<()>> {
        self.store().umount()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockStore, MkfsOptions, MountOptions};

    #[tokio::test]
    async fn a_stage_of_an_earlier_session_is_refused_after_a_remount() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("target");
        BlockStore::mkfs(&path, &MkfsOptions { size: Some(32 << 20), ..MkfsOptions::default() }, |_, _| {})
            .unwrap();
        let mount = |session| {
            let stages_after = RemountedStore::stages_after(session);
            BlockStore::mount(&path, &MountOptions { stages_after, ..MountOptions::default() }).unwrap()
        };
        let first = mount(0);
        let target = RemountedStore::new(first.clone());
        let cid = CollectionId::new(b"c".to_vec()).unwrap();
        let mut make = Transaction::new(cid.clone());
        make.ops.push(Op::CreateCollection);
        target.queue_transaction(make).await.unwrap();
        let early = target.stage(4096).await.unwrap();
        first.umount().await.unwrap();
        drop(first);
        target.replace(mount(1));
        let late = target.stage(4096).await.unwrap();
        assert_ne!(early, late);
        let refused = target.stage_write(early, 0, Payload::compute(0, Bytes::from(vec![1; 4096]))).await;
        assert!(matches!(refused, Err(StoreError::Disconnected(_))), "{refused:?}");
        let oid = ObjectId::new(b"o".to_vec()).unwrap();
        let mut write = Transaction::new(cid.clone());
        let source = WriteSource::Staged { stage: early, offset: 0, len: 4096 };
        write.ops.push(Op::Write { oid: oid.clone(), offset: 0, source });
        let refused = target.queue_transaction(write).await;
        assert!(matches!(refused, Err(StoreError::Disconnected(_))), "{refused:?}");
        let refused = target.queue_transaction_in(0, Transaction::new(cid.clone())).await;
        assert!(matches!(refused, Err(StoreError::Disconnected(_))), "{refused:?}");
        target.queue_transaction_in(1, Transaction::new(cid)).await.unwrap();
        target.umount().await.unwrap();
    }
}
