//! [`RemountedStore`]: a target of this process that can be remounted while it is in use.

use std::sync::{Arc, PoisonError, RwLock};

use base::mem::{Arena, ArenaRegistration};

use crate::{
    ObjectStore, Op, StageId, StoreError, StoreFuture, StoreReply, StoreRequest, Submit, Transaction,
    WriteSource, ready,
};

/// A store that forwards requests to its current store. The current store can be replaced, for
/// example when its target is remounted after a failure of the drive.
///
/// Each replacement begins a new [incarnation](crate::Submit::incarnation). A stage belongs to the
/// incarnation in which it was allocated. In a later incarnation, calls that name the stage fail
/// with [`StoreError::Disconnected`], as they do after a crash of the store's process.
pub struct RemountedStore {
    current: RwLock<Current>,
}

struct Current {
    incarnation: u64,
    store: Arc<dyn ObjectStore>,
    /// Memory that was registered with the current store, and that later stores must register, too.
    memory: Vec<ArenaRegistration>,
}

impl std::fmt::Debug for RemountedStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemountedStore").field("incarnation", &self.incarnation()).finish_non_exhaustive()
    }
}

/// Number of low bits of a stage number that number the stages of one incarnation. The bits above
/// them contain the incarnation's number. All stage numbers of an incarnation are therefore lower
/// than all stage numbers of the next incarnation.
const STAGES_PER_INCARNATION: u32 = 48;

impl RemountedStore {
    /// Creates a store that forwards to `store`, in incarnation 0.
    #[must_use]
    pub fn new(store: Arc<dyn ObjectStore>) -> RemountedStore {
        RemountedStore { current: RwLock::new(Current { incarnation: 0, store, memory: Vec::new() }) }
    }

    /// Returns the value of [`MountOptions::stages_after`](crate::MountOptions::stages_after) for
    /// the store of `incarnation`. The stages of this incarnation get numbers above this value.
    #[must_use]
    pub fn stages_after(incarnation: u64) -> u64 {
        incarnation << STAGES_PER_INCARNATION
    }

    /// Begins the next incarnation, in which `store` is the current store. Calls that were
    /// submitted before still receive the replies of the previous store.
    pub fn replace(&self, store: Arc<dyn ObjectStore>) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        current.memory.retain(|memory| !memory.is_all_there_is());
        for memory in &current.memory {
            store.register_memory(memory.arena());
        }
        current.incarnation += 1;
        current.store = store;
    }

    fn current(&self) -> (u64, Arc<dyn ObjectStore>) {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        (current.incarnation, Arc::clone(&current.store))
    }
}

fn over() -> StoreError {
    StoreError::Disconnected("the target was remounted".into())
}

fn stages(transaction: &Transaction) -> impl Iterator<Item = StageId> + '_ {
    transaction.ops.iter().filter_map(|op| match op {
        Op::Write { source: WriteSource::Staged { stage, .. }, .. } => Some(*stage),
        _ => None,
    })
}

impl Submit for RemountedStore {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        let (current, store) = self.current();
        // The current store refuses numbers that no stage has had yet.
        let has_ended = |stage: &StageId| stage.0 >> STAGES_PER_INCARNATION < current;
        match request {
            StoreRequest::StageWrite { stage, .. } if has_ended(&stage) => ready(Err(over())),
            StoreRequest::StageRelease { stage } if has_ended(&stage) => ready(Ok(StoreReply::Done)),
            StoreRequest::Transact { transaction, incarnation } => {
                let incarnation = incarnation.unwrap_or(current);
                if incarnation != current || stages(&transaction).any(|stage| has_ended(&stage)) {
                    return ready(Err(over()));
                }
                store.submit(StoreRequest::Transact { transaction, incarnation: None })
            }
            request => store.submit(request),
        }
    }

    fn incarnation(&self) -> u64 {
        self.current().0
    }

    fn stage_alignment(&self) -> u64 {
        self.current().1.stage_alignment()
    }

    fn register_memory(&self, arena: &Arc<Arena>) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        current.memory.retain(|memory| !memory.is_all_there_is() && !Arc::ptr_eq(memory.arena(), arena));
        current.memory.push(ArenaRegistration::new(arena));
        current.store.register_memory(arena);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, Weak};

    use base::block::Payload;
    use bytes::Bytes;

    use super::*;
    use crate::conformance::{random_operations, run, seed};
    use crate::{BlockStore, CollectionId, MemStore, MkfsOptions, MountOptions, ObjectId, StoreCalls};

    #[tokio::test]
    async fn a_remounted_store_passes_the_conformance_suite() {
        let make = || Arc::new(RemountedStore::new(Arc::new(MemStore::new()))) as Arc<dyn ObjectStore>;
        run(|| async { make() }).await;
        random_operations(make(), seed(), 500).await;
    }

    /// A store that only counts the memory that it registers.
    #[derive(Default)]
    struct CountsMemory(Mutex<Vec<Weak<Arena>>>);

    impl CountsMemory {
        fn registered(&self) -> usize {
            self.0.lock().unwrap().len()
        }
    }

    impl Submit for CountsMemory {
        type Reply = StoreFuture;

        fn submit(&self, _: StoreRequest) -> StoreFuture {
            ready(Ok(StoreReply::Done))
        }

        fn register_memory(&self, arena: &Arc<Arena>) {
            self.0.lock().unwrap().push(Arc::downgrade(arena));
        }
    }

    #[test]
    fn a_remounted_store_registers_the_memory_that_is_still_in_use() {
        let [first, second] = [(); 2].map(|()| Arc::new(CountsMemory::default()));
        let target = RemountedStore::new(first.clone());
        let mut arenas: Vec<_> = (0..3).map(|_| Arena::anonymous(4096).unwrap()).collect();
        for arena in arenas.iter().chain(&arenas[..1]) {
            target.register_memory(arena);
        }
        assert_eq!(first.registered(), 4);
        let (ended, used) = (Arc::downgrade(&arenas[0]), &arenas.split_off(1));
        drop(arenas);
        target.replace(second.clone());
        assert_eq!(second.registered(), used.len(), "each once");
        assert_eq!(ended.strong_count(), 0);
    }

    #[tokio::test]
    async fn a_stage_of_an_earlier_incarnation_is_refused_after_a_remount() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("target");
        BlockStore::mkfs(&path, &MkfsOptions { size: Some(32 << 20), ..MkfsOptions::default() }, |_, _| {})
            .unwrap();
        let mount = |incarnation| {
            let stages_after = RemountedStore::stages_after(incarnation);
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
