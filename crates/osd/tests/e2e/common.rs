//! A node in the test's process: an osd over memory stores that can be made to fail, and its
//! clients.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use base::BoxFuture;
use base::block::Payload;
use base::mem::Arena;
use base::phases::{self, Phase};
use base::pool::BufferPool;
use bytes::Bytes;
use client::engine::{Engine, InProcess, NativeEngine};
use client::{Client, ControlWay, Object, Options, Pool, Redundancy};
use identity::Caller;
use messenger::{NetworkStack, StackChoice, StackOptions, UseAs};
use osd::{OsdAdministrator, OsdConfig, OsdServer, ShardResources};
use store::{
    MemStore, MetadataQuery, ObjectStore, Op, StageId, StoreError, StoreFuture, StoreRequest, Submit,
    Transaction, WriteSource, check_incarnation, ready,
};
use tokio::sync::watch;
use uuid::Uuid;
use wire::{AdminReply, AdminRequest};

/// Fault that hits the next transaction that changes an object's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    /// The store becomes unreachable before it has received the transaction.
    Before,
    /// The store executes the transaction, but becomes unreachable before it replies.
    After,
    /// The log contains the transaction, but the flush fails. The target is remounted at once, and
    /// the remount replays the transaction.
    Flush,
}

/// Callback that runs before each transaction.
pub(crate) type Watch = Arc<dyn Fn() + Send + Sync>;

/// Returns the error of a request, or `None` if the store executes the request.
pub(crate) type Refusal = Box<dyn FnMut(&StoreRequest) -> Option<StoreError> + Send>;

/// A store that fails or begins a new incarnation on demand. The names of its fields and methods
/// call an incarnation a session.
pub(crate) struct FaultStore {
    pub(crate) inner: Arc<dyn ObjectStore>,
    /// Runs before each transaction.
    watch: Option<Watch>,
    session: AtomicU64,
    armed_before: AtomicBool,
    armed_after: AtomicBool,
    armed_flush: AtomicBool,
    armed_read: AtomicBool,
    /// Number of further reads that are delayed.
    late_reads: AtomicU64,
    /// Number of further transactions with data that are refused for lack of space.
    full: AtomicU64,
    /// Number of further transactions with data that are refused as too large, so that no retry
    /// helps.
    refused: AtomicU64,
    /// Whether changes of the node's map are refused for lack of space.
    full_for_map: AtomicBool,
    /// Whether every call fails, as if the drive were removed.
    down: AtomicBool,
    /// Chooses requests that fail.
    refusal: Mutex<Option<Refusal>>,
    /// While this is true, no change becomes durable, and reads delayed by
    /// [`FaultStore::arm_late_reads`] wait.
    held: watch::Sender<bool>,
    /// While this is true, writes of staged data wait.
    stages_held: watch::Sender<bool>,
    /// While this is true, transactions that put proposed membership records in force wait.
    records_held: watch::Sender<bool>,
    armed_gone_at_record: AtomicBool,
    /// Number of stages created.
    pub(crate) stages: AtomicU64,
    /// Number of reads of objects of placement groups.
    pub(crate) reads: AtomicU64,
    /// Number of calls that had to wait because the test held them.
    pub(crate) waited: AtomicU64,
    /// Number of faults that have fired.
    pub(crate) fired: AtomicU64,
    /// Whether the time of writing staged data counts as DMA time, as with a store behind a
    /// channel.
    pub(crate) transfers: AtomicBool,
    /// Number of calls that requested all xattrs of an object.
    pub(crate) listed_xattrs: AtomicU64,
    /// Number of transactions that failed because the object to be created exists already.
    pub(crate) not_new: Arc<AtomicU64>,
    /// Number of transactions that removed omap entries, and the maximum number of entries that one
    /// of them removed; `None` if removals are not counted.
    removals: Mutex<Option<(usize, usize)>>,
}

impl FaultStore {
    pub(crate) fn new() -> Arc<FaultStore> {
        FaultStore::over(Arc::new(MemStore::new()), None)
    }

    /// Creates a store that injects faults into `inner`. `watch` runs before each transaction is
    /// queued.
    pub(crate) fn over(inner: Arc<dyn ObjectStore>, watch: Option<Watch>) -> Arc<FaultStore> {
        Arc::new(FaultStore {
            inner,
            watch,
            session: AtomicU64::new(1),
            armed_before: AtomicBool::new(false),
            armed_after: AtomicBool::new(false),
            armed_flush: AtomicBool::new(false),
            armed_read: AtomicBool::new(false),
            late_reads: AtomicU64::new(0),
            full: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            full_for_map: AtomicBool::new(false),
            down: AtomicBool::new(false),
            refusal: Mutex::default(),
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

    /// Returns the inner store, for tests that inspect or damage its data.
    pub(crate) fn inner(&self) -> &dyn ObjectStore {
        &*self.inner
    }

    /// Starts to count the transactions that remove omap entries.
    pub(crate) fn watch_transactions(&self) {
        *self.removals.lock().unwrap() = Some((0, 0));
    }

    /// Returns the number of transactions that removed omap entries, and the maximum number of
    /// entries that one of them removed. A removed range counts as 1000 entries.
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

    /// Makes the next transaction with data fail in the given way.
    pub(crate) fn arm(&self, loss: Loss) {
        let armed = match loss {
            Loss::Before => &self.armed_before,
            Loss::After => &self.armed_after,
            Loss::Flush => &self.armed_flush,
        };
        armed.store(true, Ordering::SeqCst);
    }

    /// Makes the store refuse the next `count` transactions with data for lack of space.
    pub(crate) fn set_full(&self, count: u64) {
        self.full.store(count, Ordering::SeqCst);
    }

    /// Sets whether changes of the node's map are refused for lack of space.
    pub(crate) fn set_full_for_map(&self, full: bool) {
        self.full_for_map.store(full, Ordering::SeqCst);
    }

    /// Makes all calls fail as if the drive were removed, or ends this. The content stays.
    pub(crate) fn set_down(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
    }

    /// Makes requests fail with the errors that `refusal` returns; with none, ends this.
    pub(crate) fn refuse(&self, refusal: Option<Refusal>) {
        *self.refusal.lock().unwrap() = refusal;
    }

    /// Returns whether the drive counts as removed.
    pub(crate) fn is_down(&self) -> bool {
        self.down.load(Ordering::SeqCst)
    }

    /// Returns the error for a call while the drive is removed; `None` if the drive is present.
    fn gone(&self) -> Option<StoreFuture> {
        if !self.is_down() {
            return None;
        }
        self.fired.fetch_add(1, Ordering::SeqCst);
        Some(ready(Err(StoreError::Io("injected: the drive is removed".into()))))
    }

    fn disarm(&self) {
        self.set_full(0);
        self.refused.store(0, Ordering::SeqCst);
        self.armed_before.store(false, Ordering::SeqCst);
        self.armed_after.store(false, Ordering::SeqCst);
        self.armed_flush.store(false, Ordering::SeqCst);
    }

    /// Makes the next read fail and end the store's session.
    pub(crate) fn arm_read(&self) {
        self.armed_read.store(true, Ordering::SeqCst);
    }

    /// Delays the next `count` reads until the store is no longer held. The test can end the store's
    /// session before that.
    pub(crate) fn arm_late_reads(&self, count: u64) {
        self.late_reads.store(count, Ordering::SeqCst);
    }

    /// Holds changes before they become durable, or releases them.
    pub(crate) fn hold(&self, held: bool) {
        self.held.send_replace(held);
    }

    /// Holds writes of staged data, or releases them.
    pub(crate) fn hold_stages(&self, held: bool) {
        self.stages_held.send_replace(held);
    }

    /// Holds transactions that put proposed membership records in force, or releases them.
    pub(crate) fn hold_records(&self, held: bool) {
        self.records_held.send_replace(held);
    }

    /// Removes the drive when the next transaction would put a proposed membership record in force.
    pub(crate) fn arm_gone_at_record(&self) {
        self.armed_gone_at_record.store(true, Ordering::SeqCst);
    }

    /// Returns a future that waits while records are held; `None` if records are not held, or if
    /// the transaction puts no record in force.
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

/// Returns whether a transaction puts a membership record in force. Such a transaction removes the
/// proposal.
fn puts_record_in_force(transaction: &Transaction) -> bool {
    transaction.ops.iter().any(|op| matches!(op, Op::OmapRemove { keys, .. } if keys == &["p"]))
}

/// Copies a payload. The model store would keep the payload's buffer, but a real store returns the
/// buffer once the data is on its drive.
fn copied(payload: Payload) -> Payload {
    let block_offset = payload.block_offset();
    let (data, checksums) = payload.into_parts();
    Payload::from_parts(block_offset, Bytes::copy_from_slice(&data), checksums).unwrap()
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
        let refused = self.refusal.lock().unwrap().as_mut().and_then(|refusal| refusal(&request));
        if let Some(e) = refused {
            self.fired.fetch_add(1, Ordering::SeqCst);
            return ready(Err(e));
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
                let one_less = |left: u64| left.checked_sub(1);
                if self.late_reads.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok() {
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

/// A node: its stores, its memory and its osd.
pub(crate) struct Node {
    pub(crate) stores: Vec<Arc<FaultStore>>,
    /// UUIDs of the targets, in the order of `stores`.
    pub(crate) uuids: Vec<Uuid>,
    pub(crate) staging: BufferPool,
    pub(crate) config: OsdConfig,
    pub(crate) osd: Option<OsdServer>,
    pub(crate) endpoint: String,
    /// Numbers of shards: the first for the next start of the osd, and so on in turn.
    pub(crate) shards: VecDeque<u16>,
    /// The administrator of the osd that was started last.
    administrator: CurrentAdministrator,
}

/// The administrator of the osd that was started last.
pub(crate) type CurrentAdministrator = Arc<Mutex<Option<OsdAdministrator>>>;

/// The administrators of the osds that the tests have started, by the endpoints.
static ADMINISTRATORS: Mutex<BTreeMap<String, OsdAdministrator>> = Mutex::new(BTreeMap::new());

/// Notes the administrator of an osd, so that [`capability`] finds it.
pub(crate) fn register(endpoint: &str, administrator: &OsdAdministrator) {
    ADMINISTRATORS.lock().unwrap().insert(endpoint.to_owned(), administrator.clone());
}

/// Returns a capability of the process for the osd at an endpoint; empty if no test has registered it.
pub(crate) async fn capability(endpoint: &str) -> Bytes {
    let administrator = ADMINISTRATORS.lock().unwrap().get(endpoint).cloned();
    let Some(administrator) = administrator else { return Bytes::new() };
    let request = AdminRequest::IssueCapability { grants: None, key: None, lifetime_s: 0 };
    match administrator.administer(Caller::process(), request, false).await {
        Ok(AdminReply::Capability(issued)) => issued,
        other => panic!("{other:?}"),
    }
}

/// Returns the options of a client whose administrative requests go to `current`.
pub(crate) fn administered(options: Options, current: &CurrentAdministrator) -> Options {
    let current = Arc::clone(current);
    let administer = move |request, is_repeated| {
        let administrator = current.lock().unwrap().clone();
        administrator.expect("the osd was started").administer(Caller::process(), request, is_repeated)
    };
    let control = Some(ControlWay(Arc::new(InProcess(administer))));
    Options { stack: network(), control, ..options }
}

/// Returns the numbers of shards of the osds: 1, unless `OUTBOARD_TEST_SHARDS` names other numbers,
/// such as `3` or `1,3,2`.
fn shard_counts() -> VecDeque<u16> {
    let counts = std::env::var("OUTBOARD_TEST_SHARDS").unwrap_or_else(|_| "1".into());
    counts.split(',').map(|count| count.parse().unwrap()).collect()
}

/// Returns a local address that is free, and followed by a few free ports for further shards.
pub(crate) fn free_endpoint() -> String {
    let is_free = |port: u16| std::net::TcpListener::bind(("127.0.0.1", port)).is_ok();
    loop {
        // Ports below the range from which the kernel chooses.
        let first = 10_000 + 8 * (rand::random::<u16>() % 2500);
        if (first..first + 8).all(is_free) {
            return format!("127.0.0.1:{first}");
        }
    }
}

pub(crate) const STAGING: usize = 16 << 20;

/// Returns the network of the tests: TCP, unless `OUTBOARD_TEST_NETWORK` names another one, such as
/// `ofi:tcp`.
pub(crate) fn network() -> StackChoice {
    std::env::var("OUTBOARD_TEST_NETWORK").map_or(StackChoice::TCP, |name| name.parse().unwrap())
}

/// Waits until a request that was sent has reached the osd. An emulated machine needs more time.
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

    /// Creates a node with two targets. Its osd is not started yet.
    pub(crate) fn new(config: OsdConfig) -> Node {
        Node::of(2, config)
    }

    /// Creates a node with this number of targets. Its osd is not started yet.
    pub(crate) fn of(targets: usize, config: OsdConfig) -> Node {
        Node::over((0..targets).map(|_| FaultStore::new()).collect(), config)
    }

    /// Creates a node over these stores. Its osd is not started yet.
    pub(crate) fn over(stores: Vec<Arc<FaultStore>>, config: OsdConfig) -> Node {
        let staging = BufferPool::new(Arena::anonymous(STAGING).unwrap(), 0, 2 << 20);
        let uuids = (1..=stores.len() as u128).map(Uuid::from_u128).collect();
        let shards = shard_counts();
        let endpoint =
            if shards.iter().all(|count| *count == 1) { "127.0.0.1:0".into() } else { free_endpoint() };
        let administrator = Arc::default();
        Node { stores, uuids, staging, config, osd: None, endpoint, shards, administrator }
    }

    /// Returns what each shard of the next osd works with.
    pub(crate) fn resources(&self) -> Vec<ShardResources> {
        let shard = |number| {
            let arena = || Arena::anonymous(STAGING).unwrap();
            let staging =
                if number == 0 { self.staging.clone() } else { BufferPool::new(arena(), 0, 2 << 20) };
            ShardResources { config: self.config.clone(), targets: self.targets(), staging }
        };
        (0..self.shards[0]).map(shard).collect()
    }

    pub(crate) fn targets(&self) -> Vec<(Uuid, Arc<dyn ObjectStore>)> {
        let targets = self.uuids.iter().zip(&self.stores);
        targets.map(|(uuid, s)| (*uuid, Arc::clone(s) as Arc<dyn ObjectStore>)).collect()
    }

    /// Stops the osd if it runs, and starts another osd at the same address.
    pub(crate) fn restart(&mut self) {
        if let Some(osd) = self.osd.take() {
            osd.stop();
        }
        let stack = stack(UseAs::Server);
        let mut tries = 0;
        let osd = loop {
            match OsdServer::start(self.resources(), stack.clone(), &self.endpoint) {
                Ok(osd) => break osd,
                // The socket of the old listener may stay open for a moment.
                Err(osd::StartError::Listen(_)) if tries < 100 => {
                    tries += 1;
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                Err(e) => panic!("{e}"),
            }
        };
        self.endpoint = osd.endpoint().to_owned();
        register(&self.endpoint, osd.administrator());
        *self.administrator.lock().unwrap() = Some(osd.administrator().clone());
        self.osd = Some(osd);
        self.shards.rotate_left(1);
    }

    pub(crate) async fn client(&self) -> Client {
        self.client_with(Options::default()).await
    }

    pub(crate) async fn client_with(&self, options: Options) -> Client {
        Client::connect(&self.endpoint, self.options(options)).await.unwrap()
    }

    /// Returns the options of a client of this node.
    pub(crate) fn options(&self, options: Options) -> Options {
        administered(options, &self.administrator)
    }

    /// Returns an engine with a session of its own.
    pub(crate) async fn engine(&self) -> Arc<dyn Engine> {
        let options = self.options(Options::default());
        Arc::new(NativeEngine::connect(&self.endpoint, &options).await.unwrap())
    }

    /// Returns a client and a new pool.
    pub(crate) async fn pool(&self) -> (Client, Pool) {
        self.pool_of(0).await
    }

    /// Returns a client and a new pool with this number of placement groups; 0 means the default
    /// number.
    pub(crate) async fn pool_of(&self, groups: u32) -> (Client, Pool) {
        let client = self.client().await;
        client.create_pool_with("pool", groups, Redundancy::Single).await.unwrap();
        let pool = client.pool("pool").unwrap();
        (client, pool)
    }

    /// Returns an object that does not exist yet, in a new pool.
    pub(crate) async fn object(&self) -> Object {
        self.pool().await.1.object("object").unwrap()
    }

    pub(crate) fn arm(&self, loss: Loss) {
        self.stores.iter().for_each(|s| s.arm(loss));
    }

    /// Disarms the faults that have not fired.
    pub(crate) fn disarm(&self) {
        self.stores.iter().for_each(|s| s.disarm());
    }

    /// Makes each store refuse its next change of data, once.
    pub(crate) fn arm_refusal(&self) {
        self.stores.iter().for_each(|s| s.refused.store(1, Ordering::SeqCst));
    }

    pub(crate) fn hold(&self, held: bool) {
        self.stores.iter().for_each(|s| s.hold(held));
    }

    /// Waits until `count` calls have had to wait because the test held them.
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

/// Returns `len` pseudo-random bytes that depend on `salt`.
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

/// Returns the seed of a random test, from `OUTBOARD_SEED` if that is set, and prints the seed.
#[expect(clippy::print_stdout, reason = "the test harness shows it when the test fails")]
pub(crate) fn seed() -> u64 {
    let given = std::env::var("OUTBOARD_SEED").ok().and_then(|s| s.parse().ok());
    let seed = given.unwrap_or_else(rand::random);
    println!("OUTBOARD_SEED={seed}");
    seed
}
