//! A node in this process: an OSD over memory stores that can be made to fail, and clients of it over TCP.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use base::BoxFuture;
use base::block::Payload;
use base::mem::Arena;
use base::phases::{self, Phase};
use base::pool::BufferPool;
use bytes::Bytes;
use client::engine::{Engine, NativeEngine};
use client::{Client, Object, Options, Pool, Redundancy};
use messenger::{NetworkStack, StackChoice, StackOptions, UseAs};
use osd::{OsdConfig, OsdServer};
use store::{
    MemStore, MetadataQuery, ObjectStore, Op, StageId, StoreError, StoreFuture, StoreRequest, Submit,
    Transaction, WriteSource, check_incarnation, ready,
};
use tokio::sync::watch;
use uuid::Uuid;

/// What happens to the next transaction that changes an object's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    /// The store goes away before it has taken the transaction.
    Before,
    /// The store takes the transaction, but goes away before it says so.
    After,
    /// The log contains the transaction, but the flush fails. The target is mounted anew at once, and replays it.
    Flush,
}

/// Is told of transactions.
pub(crate) type Watch = Arc<dyn Fn() + Send + Sync>;

/// A store whose session is lost on demand.
pub(crate) struct FaultStore {
    pub(crate) inner: Arc<dyn ObjectStore>,
    /// Called before each transaction.
    watch: Option<Watch>,
    session: AtomicU64,
    armed_before: AtomicBool,
    armed_after: AtomicBool,
    armed_flush: AtomicBool,
    armed_read: AtomicBool,
    armed_late_read: AtomicBool,
    /// Transactions with data that are still to be refused for want of space.
    full: AtomicU64,
    /// Transactions with data that are still to be refused for what they are, so that no retry
    /// helps.
    refused: AtomicU64,
    /// While that is set, changes of the node's map are refused for want of space.
    full_for_map: AtomicBool,
    /// While that is set, every call fails: the drive is gone.
    down: AtomicBool,
    /// While that is set, nothing becomes durable, and late reads wait.
    held: watch::Sender<bool>,
    /// While that is set, staged data waits.
    stages_held: watch::Sender<bool>,
    /// While that is set, records of groups of targets that are to be put in force wait.
    records_held: watch::Sender<bool>,
    armed_gone_at_record: AtomicBool,
    /// Stages that were made.
    pub(crate) stages: AtomicU64,
    /// Reads of objects of placement groups.
    pub(crate) reads: AtomicU64,
    /// Calls that found `held` set.
    pub(crate) waited: AtomicU64,
    /// Faults that have fired.
    pub(crate) fired: AtomicU64,
    /// Whether to take staged data for transferred, as a store behind a channel does.
    pub(crate) transfers: AtomicBool,
    /// Calls that asked for all xattrs of an object.
    pub(crate) listed_xattrs: AtomicU64,
    /// Transactions that would have made an object that there is.
    pub(crate) not_new: Arc<AtomicU64>,
    /// Transactions that removed omap entries, and the most entries that one removed; `None` while
    /// nobody counts.
    removals: Mutex<Option<(usize, usize)>>,
}

impl FaultStore {
    pub(crate) fn new() -> Arc<FaultStore> {
        FaultStore::over(Arc::new(MemStore::new()), None)
    }

    /// Over another store; `watch` is told of each transaction before it is queued.
    pub(crate) fn over(inner: Arc<dyn ObjectStore>, watch: Option<Watch>) -> Arc<FaultStore> {
        Arc::new(FaultStore {
            inner,
            watch,
            session: AtomicU64::new(1),
            armed_before: AtomicBool::new(false),
            armed_after: AtomicBool::new(false),
            armed_flush: AtomicBool::new(false),
            armed_read: AtomicBool::new(false),
            armed_late_read: AtomicBool::new(false),
            full: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            full_for_map: AtomicBool::new(false),
            down: AtomicBool::new(false),
            held: watch::Sender::new(false),
            stages_held: watch::Sender::new(false),
            records_held: watch::Sender::new(false),
            armed_gone_at_record: AtomicBool::new(false),
            stages: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            fired: AtomicU64::new(0),
            transfers: AtomicBool::new(false),
            listed_xattrs: AtomicU64::new(0),
            not_new: Arc::default(),
            removals: Mutex::default(),
        })
    }

    /// What it has, for whoever damages that.
    pub(crate) fn inner(&self) -> &dyn ObjectStore {
        &*self.inner
    }

    /// Counts, from now on, the transactions that remove omap entries.
    pub(crate) fn watch_transactions(&self) {
        *self.removals.lock().unwrap() = Some((0, 0));
    }

    /// How many such transactions there were, and the most entries that one removed. A range counts
    /// as a thousand.
    pub(crate) fn watched(&self) -> (usize, usize) {
        self.removals.lock().unwrap().unwrap()
    }

    fn count_removals(&self, transaction: &Transaction) {
        let removed = transaction.ops.iter().map(|op| match op {
            Op::OmapRemove { keys, .. } => keys.len(),
            Op::OmapRemoveRange { .. } => 1000,
            _ => 0,
        });
        let removed = removed.sum::<usize>();
        if let (Some((count, most)), 1..) = (&mut *self.removals.lock().unwrap(), removed) {
            *count += 1;
            *most = removed.max(*most);
        }
    }

    /// Makes the next transaction with data fail.
    pub(crate) fn arm(&self, loss: Loss) {
        let armed = match loss {
            Loss::Before => &self.armed_before,
            Loss::After => &self.armed_after,
            Loss::Flush => &self.armed_flush,
        };
        armed.store(true, Ordering::SeqCst);
    }

    /// Makes that many transactions with data be refused for want of space.
    pub(crate) fn set_full(&self, count: u64) {
        self.full.store(count, Ordering::SeqCst);
    }

    /// Has changes of the node's map refused for want of space from now on, or no longer.
    pub(crate) fn set_full_for_map(&self, full: bool) {
        self.full_for_map.store(full, Ordering::SeqCst);
    }

    /// Takes the drive away, or brings it back with what it had.
    pub(crate) fn set_down(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
    }

    /// Whether the drive is gone.
    pub(crate) fn is_down(&self) -> bool {
        self.down.load(Ordering::SeqCst)
    }

    /// What calls come to while the drive is gone.
    fn gone(&self) -> Option<StoreFuture> {
        if !self.is_down() {
            return None;
        }
        self.fired.fetch_add(1, Ordering::SeqCst);
        Some(ready(Err(StoreError::Io("injected: the drive is gone".into()))))
    }

    fn disarm(&self) {
        self.set_full(0);
        self.refused.store(0, Ordering::SeqCst);
        self.armed_before.store(false, Ordering::SeqCst);
        self.armed_after.store(false, Ordering::SeqCst);
        self.armed_flush.store(false, Ordering::SeqCst);
    }

    /// Makes the next read fail.
    pub(crate) fn arm_read(&self) {
        self.armed_read.store(true, Ordering::SeqCst);
    }

    /// Makes the next read lose its session while the store is held, and be repeated in the next session.
    pub(crate) fn arm_late_read(&self) {
        self.armed_late_read.store(true, Ordering::SeqCst);
    }

    /// Holds up, from now on, whatever would become durable; or lets it go.
    pub(crate) fn hold(&self, held: bool) {
        self.held.send_replace(held);
    }

    /// Holds up staged data from now on; or lets it go.
    pub(crate) fn hold_stages(&self, held: bool) {
        self.stages_held.send_replace(held);
    }

    /// Holds up, from now on, what puts records of groups of targets in force, which have been proposed; or lets it go.
    pub(crate) fn hold_records(&self, held: bool) {
        self.records_held.send_replace(held);
    }

    /// Takes the drive away when a record that has been proposed is to be put in force next.
    pub(crate) fn arm_gone_at_record(&self) {
        self.armed_gone_at_record.store(true, Ordering::SeqCst);
    }

    /// Waits while a record is held; `None` if none is, or nothing puts one in force.
    fn until_record_let_go(&self, transaction: &Transaction) -> Option<BoxFuture<'static, ()>> {
        let mut held = self.records_held.subscribe();
        if !*held.borrow() || !puts_record_in_force(transaction) {
            return None;
        }
        self.waited.fetch_add(1, Ordering::SeqCst);
        Some(Box::pin(async move { drop(held.wait_for(|held| !held).await) }))
    }

    fn until_let_go(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut held = self.held.subscribe();
        self.waited.fetch_add(u64::from(*held.borrow()), Ordering::SeqCst);
        async move { drop(held.wait_for(|held| !held).await) }
    }

    pub(crate) fn end_session(&self) {
        self.fired.fetch_add(1, Ordering::SeqCst);
        self.session.fetch_add(1, Ordering::SeqCst);
    }

    fn lose(&self) -> StoreFuture {
        self.end_session();
        Box::pin(std::future::ready(Err(StoreError::Disconnected("injected".into()))))
    }
}

/// Whether a transaction puts a record of a group of targets in force: then it removes the proposal.
fn puts_record_in_force(transaction: &Transaction) -> bool {
    transaction.ops.iter().any(|op| matches!(op, Op::OmapRemove { keys, .. } if keys == &["p"]))
}

/// The model store keeps what it is given; a real one gives buffers back once the data is on its drive.
fn copied(payload: Payload) -> Payload {
    let phase = payload.phase();
    let (data, checksums) = payload.into_parts();
    Payload::from_parts(phase, Bytes::copy_from_slice(&data), checksums).unwrap()
}

impl Submit for FaultStore {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        if matches!(request, StoreRequest::StageRelease { .. }) {
            return self.inner.submit(request);
        }
        if let Some(gone) = self.gone() {
            return gone;
        }
        match request {
            StoreRequest::StageWrite { stage, offset, payload } => {
                self.submit_stage_write(stage, offset, payload)
            }
            StoreRequest::Transact { transaction, incarnation } => {
                match check_incarnation(incarnation, self.incarnation()) {
                    Ok(()) => self.transact(transaction),
                    Err(e) => ready(Err(e)),
                }
            }
            StoreRequest::Read { ref cid, .. } => {
                self.reads.fetch_add(u64::from(cid.as_bytes().starts_with(b"P")), Ordering::SeqCst);
                if self.armed_late_read.swap(false, Ordering::SeqCst) {
                    let (inner, late) = (Arc::clone(&self.inner), self.until_let_go());
                    return Box::pin(async move {
                        late.await;
                        inner.submit(request).await
                    });
                }
                let reading = self.inner.submit(request);
                if self.armed_read.swap(false, Ordering::SeqCst) { self.lose() } else { reading }
            }
            request => {
                let counted = match &request {
                    StoreRequest::Stage { .. } => Some(&self.stages),
                    StoreRequest::Query { query: MetadataQuery::Xattrs { .. }, .. } => {
                        Some(&self.listed_xattrs)
                    }
                    _ => None,
                };
                if let Some(count) = counted {
                    count.fetch_add(1, Ordering::SeqCst);
                }
                self.inner.submit(request)
            }
        }
    }

    fn incarnation(&self) -> u64 {
        self.session.load(Ordering::SeqCst)
    }
}

impl FaultStore {
    fn submit_stage_write(&self, stage: StageId, offset: u64, payload: Payload) -> StoreFuture {
        let clock = phases::current().filter(|_| self.transfers.load(Ordering::SeqCst));
        let transfer = clock.map(|clock| clock.begin(Phase::Dma));
        let payload = copied(payload);
        drop(transfer);
        let written = self.inner.submit(StoreRequest::StageWrite { stage, offset, payload });
        let let_go = self.until_let_go();
        let mut held = self.stages_held.subscribe();
        self.waited.fetch_add(u64::from(*held.borrow()), Ordering::SeqCst);
        Box::pin(async move {
            drop(held.wait_for(|held| !held).await);
            let_go.await;
            written.await
        })
    }

    fn transact(&self, transaction: Transaction) -> StoreFuture {
        if puts_record_in_force(&transaction) && self.armed_gone_at_record.swap(false, Ordering::SeqCst) {
            self.set_down(true);
            return self.gone().unwrap_or_else(|| self.transact(transaction));
        }
        self.watch.iter().for_each(|watch| watch());
        self.count_removals(&transaction);
        if let Some(let_go) = self.until_record_let_go(&transaction) {
            let inner = Arc::clone(&self.inner);
            return Box::pin(async move {
                let_go.await;
                inner.submit(StoreRequest::Transact { transaction, incarnation: None }).await
            });
        }
        let has_data = transaction.ops.iter().any(|op| matches!(op, Op::Write { .. }));
        if has_data && self.armed_before.swap(false, Ordering::SeqCst) {
            return self.lose();
        }
        let one_less = |left: u64| left.checked_sub(1);
        if has_data && self.refused.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok() {
            self.fired.fetch_add(1, Ordering::SeqCst);
            let known = self.until_let_go();
            return Box::pin(async move {
                known.await;
                Err(StoreError::TooLarge { what: "injected".into(), size: 1, limit: 0 })
            });
        }
        if has_data && self.full.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok() {
            self.fired.fetch_add(1, Ordering::SeqCst);
            let known = self.until_let_go();
            return Box::pin(async move {
                known.await;
                Err(StoreError::NoSpace { target: Uuid::nil(), area: store::Area::Data, needed: 1, free: 0 })
            });
        }
        let changes_map = transaction.collection.as_bytes() == "N" && !transaction.ops.is_empty();
        if changes_map && self.full_for_map.load(Ordering::SeqCst) {
            self.fired.fetch_add(1, Ordering::SeqCst);
            let (target, area) = (Uuid::nil(), store::Area::Index);
            return Box::pin(std::future::ready(Err(StoreError::NoSpace {
                target,
                area,
                needed: 1,
                free: 0,
            })));
        }
        let mut transaction = transaction;
        for op in &mut transaction.ops {
            if let Op::Write { source: WriteSource::Inline(payload), .. } = op {
                *payload = copied(std::mem::take(payload));
            }
        }
        let done = self.inner.submit(StoreRequest::Transact { transaction, incarnation: None });
        if has_data && self.armed_after.swap(false, Ordering::SeqCst) {
            return self.lose();
        }
        if has_data && self.armed_flush.swap(false, Ordering::SeqCst) {
            self.end_session();
            return Box::pin(std::future::ready(Err(StoreError::Poisoned("flush".into()))));
        }
        let durable = self.until_let_go();
        let not_new = Arc::clone(&self.not_new);
        Box::pin(async move {
            durable.await;
            let done = done.await;
            not_new.fetch_add(u64::from(matches!(done, Err(StoreError::Exists(_)))), Ordering::SeqCst);
            done
        })
    }
}

/// A node of two targets, and one client.
pub(crate) struct Node {
    pub(crate) stores: Vec<Arc<FaultStore>>,
    pub(crate) staging: BufferPool,
    pub(crate) config: OsdConfig,
    pub(crate) osd: Option<OsdServer>,
    pub(crate) endpoint: String,
}

pub(crate) const STAGING: usize = 16 << 20;

/// The network that everything runs over: TCP unless the environment says otherwise, e.g. `OUTBOARD_TEST_NETWORK=ofi:tcp`.
pub(crate) fn network() -> StackChoice {
    std::env::var("OUTBOARD_TEST_NETWORK").map_or(StackChoice::TCP, |name| name.parse().unwrap())
}

/// So long that a request which was sent has reached the osd; an emulated machine needs more.
pub(crate) async fn moment() {
    let millis = if network() == StackChoice::TCP { 20 } else { 300 };
    tokio::time::sleep(std::time::Duration::from_millis(millis)).await;
}

pub(crate) fn stack(use_as: UseAs) -> Arc<dyn NetworkStack> {
    messenger::open(&network(), &StackOptions::default(), use_as).unwrap()
}

impl Node {
    pub(crate) fn start() -> Node {
        Node::start_with(OsdConfig::default())
    }

    pub(crate) fn start_with(config: OsdConfig) -> Node {
        let mut node = Node::new(config);
        node.restart();
        node
    }

    /// Stores and memory, and no OSD yet.
    pub(crate) fn new(config: OsdConfig) -> Node {
        Node::of(2, config)
    }

    /// Stores of that many targets and memory, and no OSD yet.
    pub(crate) fn of(targets: usize, config: OsdConfig) -> Node {
        Node::over((0..targets).map(|_| FaultStore::new()).collect(), config)
    }

    /// These stores and memory, and no OSD yet.
    pub(crate) fn over(stores: Vec<Arc<FaultStore>>, config: OsdConfig) -> Node {
        let staging = BufferPool::new(Arena::anonymous(STAGING).unwrap(), 0, 2 << 20);
        Node { stores, staging, config, osd: None, endpoint: "127.0.0.1:0".into() }
    }

    pub(crate) fn targets(&self) -> Vec<(Uuid, Arc<dyn ObjectStore>)> {
        let uuids = (1..).map(Uuid::from_u128);
        uuids.zip(&self.stores).map(|(uuid, s)| (uuid, Arc::clone(s) as Arc<dyn ObjectStore>)).collect()
    }

    /// Stops the OSD if it runs, and starts another on the same address.
    pub(crate) fn restart(&mut self) {
        if let Some(osd) = self.osd.take() {
            osd.stop();
        }
        let stack = stack(UseAs::Server);
        let mut tries = 0;
        let osd = loop {
            let (config, targets, pool) = (self.config.clone(), self.targets(), self.staging.clone());
            match OsdServer::start(config, targets, pool, stack.clone(), &self.endpoint) {
                Ok(osd) => break osd,
                // The old listener's socket may take a moment to go.
                Err(osd::StartError::Listen(_)) if tries < 100 => {
                    tries += 1;
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                Err(e) => panic!("{e}"),
            }
        };
        self.endpoint = osd.endpoint().to_owned();
        self.osd = Some(osd);
    }

    pub(crate) async fn client(&self) -> Client {
        self.client_with(Options::default()).await
    }

    pub(crate) async fn client_with(&self, options: Options) -> Client {
        let options = Options { stack: network(), ..options };
        Client::connect(&self.endpoint, options).await.unwrap()
    }

    /// A session of its own, as an engine.
    pub(crate) async fn engine(&self) -> Arc<dyn Engine> {
        let options = Options { stack: network(), ..Options::default() };
        Arc::new(NativeEngine::connect(&self.endpoint, &options).await.unwrap())
    }

    /// A client with a pool.
    pub(crate) async fn pool(&self) -> (Client, Pool) {
        self.pool_of(0).await
    }

    /// A client with a pool of that many placement groups; 0 for the usual number.
    pub(crate) async fn pool_of(&self, groups: u32) -> (Client, Pool) {
        let client = self.client().await;
        client.create_pool_with("pool", groups, Redundancy::Single).await.unwrap();
        let pool = client.pool("pool").unwrap();
        (client, pool)
    }

    /// An object that does not exist yet.
    pub(crate) async fn object(&self) -> Object {
        self.pool().await.1.object("object").unwrap()
    }

    pub(crate) fn arm(&self, loss: Loss) {
        self.stores.iter().for_each(|s| s.arm(loss));
    }

    /// Takes back what was armed and has not fired.
    pub(crate) fn disarm(&self) {
        self.stores.iter().for_each(|s| s.disarm());
    }

    /// Makes the next change of data be refused, once.
    pub(crate) fn arm_refusal(&self) {
        self.stores.iter().for_each(|s| s.refused.store(1, Ordering::SeqCst));
    }

    pub(crate) fn hold(&self, held: bool) {
        self.stores.iter().for_each(|s| s.hold(held));
    }

    /// Waits until `count` calls have found their store held.
    pub(crate) async fn waited(&self, count: u64) {
        while self.stores.iter().map(|s| s.waited.load(Ordering::SeqCst)).sum::<u64>() < count {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    }

    pub(crate) fn not_new(&self) -> u64 {
        self.stores.iter().map(|s| s.not_new.load(Ordering::SeqCst)).sum()
    }

    pub(crate) fn listed_xattrs(&self) -> u64 {
        self.stores.iter().map(|s| s.listed_xattrs.load(Ordering::SeqCst)).sum()
    }

    pub(crate) fn fired(&self) -> u64 {
        self.stores.iter().map(|s| s.fired.load(Ordering::SeqCst)).sum()
    }
}

/// Bytes that differ everywhere.
pub(crate) fn data(len: usize, salt: u64) -> Bytes {
    let mut state = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out.into()
}

/// The seed of a random test: printed, and taken from `OUTBOARD_SEED` if that is set.
#[expect(clippy::print_stdout, reason = "the test harness shows it when the test fails")]
pub(crate) fn seed() -> u64 {
    let given = std::env::var("OUTBOARD_SEED").ok().and_then(|s| s.parse().ok());
    let seed = given.unwrap_or_else(rand::random);
    println!("OUTBOARD_SEED={seed}");
    seed
}
