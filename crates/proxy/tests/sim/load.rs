//! Tasks of an osd that write and read objects, and the model that says which content is correct.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use base::block::Payload;
use base::entropy::random;
use base::pool::BufferPool;
use bytes::Bytes;
use store::stripes::{Parity, StoreSet, StripeError, StripeWrite, TargetTransaction};
use store::{
    CollectionId, ObjectId, ObjectStore, Op, StageId, StoreCalls, StoreError, Transaction, WriteSource,
};

use crate::world::{TARGETS, World};

/// Number of tasks.
const TASKS: usize = 8;
/// Number of objects of each task.
const OBJECTS: usize = 2;
/// Lengths of objects, in bytes.
const LENGTHS: [usize; 8] = [10, 3000, 8192, 40_000, 70_000, 200_000, 256 << 10, (1 << 20) + 5];
/// Maximum time for which a task holds the data of a read.
const HOLD: Duration = Duration::from_millis(1500);

/// The versions of an object that a read may return: the last acknowledged version, and the later
/// versions whose writes have an unknown outcome or are in progress.
#[derive(Debug, Clone, Copy, Default)]
struct Versions {
    acknowledged: u64,
    attempted: u64,
}

/// The load of an osd. It survives the osd's death.
pub struct Load {
    versions: RefCell<Vec<Versions>>,
    acknowledged: Cell<u64>,
    unknown: Cell<u64>,
    read: Cell<u64>,
    is_stopping: Cell<bool>,
    running: Cell<usize>,
    /// Maximum pause of a task between two operations.
    pause: Duration,
}

fn cid() -> CollectionId {
    CollectionId::new("collection".to_owned()).unwrap()
}

fn oid(object: usize) -> ObjectId {
    ObjectId::new(format!("object {object}")).unwrap()
}

fn target_of(object: usize) -> usize {
    object % TARGETS
}

/// The content of a version of an object.
fn content(object: usize, version: u64) -> Bytes {
    let mut x =
        (object as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ version.wrapping_mul(0xff51_afd7_ed55_8ccd);
    let len = LENGTHS[(x >> 32) as usize % LENGTHS.len()];
    let mut step = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x.to_le_bytes()
    };
    let mut bytes: Vec<u8> = std::iter::repeat_with(&mut step).take(len.div_ceil(8)).flatten().collect();
    bytes.truncate(len);
    bytes.into()
}

/// The stores of an attachment.
#[derive(Clone)]
struct Stores {
    targets: Vec<Arc<dyn ObjectStore>>,
    stripes: Arc<dyn StoreSet>,
    pool: BufferPool,
}

/// Copies data into a staging buffer, if one is free.
fn staging(stores: &Stores, data: Bytes) -> Bytes {
    let Ok(Some(mut buffer)) = stores.pool.try_alloc(data.len()) else { return data };
    buffer.copy_from_slice(&data);
    buffer.freeze()
}

/// Writes data to a stage: whole blocks by a call for several targets, other data by a call for one
/// target.
async fn stage(stores: &Stores, target: usize, stage: StageId, payload: Payload) -> store::Result<()> {
    if !payload.len().is_multiple_of(4096) {
        return stores.targets[target].stage_write(stage, 0, payload).await;
    }
    let parts = vec![Some((World::uuid(target), stage)), None];
    let write = StripeWrite { parts, offset: 0, data: vec![payload.into()], parity: Parity::Copies };
    stores.stripes.stage_stripes(write, None).await.map_err(|e| match e {
        StripeError::Part(_, e) | StripeError::Store(e) => e,
        StripeError::Coding(why) | StripeError::Damaged(why) => panic!("copies need no coding: {why}"),
    })
}

/// Executes a transaction in a request with a transaction of another target.
async fn jointly(stores: &Stores, target: usize, transaction: Transaction) -> store::Result<()> {
    let other = Transaction::new(cid()).with(Op::Touch { oid: ObjectId::new("touched").unwrap() });
    let parts = [(target, transaction), ((target + 1) % TARGETS, other)];
    let part = |(target, transaction)| TargetTransaction {
        uuid: World::uuid(target),
        incarnation: None,
        transaction,
    };
    let mut replies = stores.stripes.queue_transactions(parts.map(part).into()).into_iter().map(store::done);
    let (own, other) = (replies.next().unwrap(), replies.next().unwrap());
    match other.await {
        Err(e) if !is_disconnected(&e) => panic!("the transaction of the other target failed: {e}"),
        _ => own.await,
    }
}

async fn write(stores: &Stores, object: usize, version: u64) -> store::Result<()> {
    let target = target_of(object);
    let store = &stores.targets[target];
    let data = content(object, version);
    let (size, payload) = (data.len() as u64, Payload::compute(0, staging(stores, data)));
    let transaction = |source| {
        let write = Op::Write { oid: oid(object), offset: 0, source };
        Transaction::new(cid()).with(Op::Truncate { oid: oid(object), size }).with(write)
    };
    if size < 50_000 {
        let transaction = transaction(WriteSource::Inline(payload));
        if random::<bool>() {
            return jointly(stores, target, transaction).await;
        }
        return store.queue_transaction(transaction).await;
    }
    let id = store.stage(size).await?;
    let source = WriteSource::Staged { stage: id, offset: 0, len: size };
    let queued = match stage(stores, target, id, payload).await {
        Ok(()) => store.queue_transaction(transaction(source)).await,
        Err(e) => Err(e),
    };
    store.stage_release(id);
    queued
}

/// Reads an object. Returns the pieces of its data, or `None` if it does not exist.
async fn read(store: &Arc<dyn ObjectStore>, object: usize) -> store::Result<Option<Vec<Bytes>>> {
    let read = match store.read(&cid(), &oid(object), 0, 2 << 20, None).await {
        Ok(read) => read,
        Err(StoreError::NoSuchObject(_) | StoreError::NoSuchCollection(_)) => return Ok(None),
        Err(e) => return Err(e),
    };
    read.verify().expect("the checksums of an object match its data");
    Ok(Some(read.data))
}

fn is_disconnected(error: &StoreError) -> bool {
    matches!(error, StoreError::Disconnected(_) | StoreError::NoSuchStage(_))
}

impl Load {
    pub fn new(pause: Duration) -> Rc<Load> {
        Rc::new(Load {
            versions: RefCell::new(vec![Versions::default(); TASKS * OBJECTS]),
            acknowledged: Cell::new(0),
            unknown: Cell::new(0),
            read: Cell::new(0),
            is_stopping: Cell::new(false),
            running: Cell::new(0),
            pause,
        })
    }

    /// Number of acknowledged writes.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.get()
    }

    /// Number of writes whose outcome is unknown.
    pub fn unknown(&self) -> u64 {
        self.unknown.get()
    }

    /// Number of successful reads.
    pub fn read(&self) -> u64 {
        self.read.get()
    }

    /// Starts an osd with the load's tasks.
    pub fn start(self: &Rc<Self>, world: &Rc<World>) {
        let load = Rc::clone(self);
        world.start_osd(async move |attachment| {
            let targets = (0..TARGETS).map(|target| attachment.store(target) as Arc<dyn ObjectStore>);
            let pool = attachment.pool().clone();
            let stores = Stores { targets: targets.collect(), stripes: attachment.store_set(), pool };
            for store in &stores.targets {
                let create = || Transaction::new(cid()).with(Op::CreateCollection);
                while let Err(e) = store.queue_transaction(create()).await
                    && is_disconnected(&e)
                {}
            }
            for task in 0..TASKS {
                let (load, stores) = (Rc::clone(&load), stores.clone());
                load.running.update(|running| running + 1);
                base::task::spawn_local(base::thread::ThreadClass::Osd, async move {
                    load.work(task, &stores).await;
                    load.running.update(|running| running - 1);
                });
            }
        });
    }

    /// The osd was killed.
    pub fn abandon(&self) {
        self.running.set(0);
    }

    async fn work(&self, task: usize, stores: &Stores) {
        while !self.is_stopping.get() {
            let object = task * OBJECTS + random::<u32>() as usize % OBJECTS;
            if random::<u32>().is_multiple_of(3) {
                self.read_and_check(&stores.targets[target_of(object)], object).await;
            } else {
                self.write(stores, object).await;
            }
            tokio::time::sleep(self.pause.mul_f64(random())).await;
        }
    }

    async fn write(&self, stores: &Stores, object: usize) {
        self.versions.borrow_mut()[object].attempted += 1;
        let version = self.versions.borrow()[object].attempted;
        match write(stores, object, version).await {
            Ok(()) => {
                self.versions.borrow_mut()[object].acknowledged = version;
                self.acknowledged.update(|count| count + 1);
            }
            Err(e) if is_disconnected(&e) => self.unknown.update(|count| count + 1),
            Err(e) => panic!("version {version} of object {object} cannot be written: {e}"),
        }
    }

    async fn read_and_check(&self, store: &Arc<dyn ObjectStore>, object: usize) {
        let Versions { acknowledged, attempted } = self.versions.borrow()[object];
        match read(store, object).await {
            Ok(found) => {
                self.read.update(|count| count + 1);
                // No late transfer changes the data while the task holds it.
                tokio::time::sleep(HOLD.mul_f64(random::<f64>().powi(3))).await;
                let is_right = (acknowledged..=attempted).any(|version| match &found {
                    Some(found) => version > 0 && found.concat() == content(object, version),
                    None => version == 0,
                });
                assert!(
                    is_right,
                    "object {object} has {:?} bytes, which are no version from {acknowledged} to {attempted}",
                    found.map(|found| found.concat().len())
                );
            }
            Err(e) if is_disconnected(&e) => {}
            Err(e) => panic!("object {object} cannot be read: {e}"),
        }
    }

    /// Stops the tasks and waits for their end.
    pub async fn stop(&self) {
        self.is_stopping.set(true);
        while self.running.get() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Checks the content of all objects in the store.
    pub async fn check(&self, world: &World) {
        for object in 0..TASKS * OBJECTS {
            let disk = Arc::clone(&world.disks.borrow()[target_of(object)]) as Arc<dyn ObjectStore>;
            self.read_and_check(&disk, object).await;
        }
    }
}
