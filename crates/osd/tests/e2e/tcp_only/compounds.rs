//! Comparison of compounds with a model: pairs and triples of all kinds of ops, on all kinds of
//! objects.
//!
//! Each case creates an object, changes it by one compound, and then compares the content and the
//! stored sizes with a byte vector. Half of the objects are not cached by the osd when the compound
//! arrives. After each batch, a scrub of the pool must find no error. The ordinary tests run a
//! random sample of cases. The ignored tests run every case, which takes a quarter of an hour with
//! optimization on two cores:
//!
//! ```text
//! CARGO_PROFILE_DEV_OPT_LEVEL=3 cargo test -p outboard-osd --test e2e every_compound -- --ignored
//! --test-threads 2
//! ```

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use base::mem::Arena;
use base::pool::BufferPool;
use bytes::Bytes;
use client::{Client, Error, Mutated, NodeError, Object, Options, Pool};
use futures::stream::{self, StreamExt};
use messenger::UseAs;
use osd::{OsdServer, OsdStarted, ShardResources, StripesAt};
use proxy::{Attachment, AttachmentOptions, Server, ServerOptions, StoreEndpoint, StoreListener};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use store::{
    BlockStore, MemStore, MkfsOptions, MountOptions, ObjectId, ObjectStore, Op, StoreCalls, Transaction, fsck,
};
use tokio::sync::oneshot;
use uuid::Uuid;
use wire::{Data, Manifest, Mutation, OpBytes, Placement, SessionId, UploadId};

use crate::common::{CurrentAdministrator, administered, data, register, seed, stack};
use crate::raw::{Raw, head, mutate};
use crate::redundancy::{config, redundancy, scrub};

/// Size of the largest staging buffer, in bytes. Longer bulk data is staged in the store before its
/// transaction.
const LARGEST_BUFFER: usize = 64 << 10;
/// Length of data that is staged, in bytes.
const STAGED: usize = 70_000;
/// Number of cases between two restarts of the osd.
const BATCH: usize = 2000;
/// Maximum number of requests that the test keeps in progress at a time.
const COMPANY: usize = 32;
/// Number of cases of an ordinary run, for each redundancy scheme and placement.
const SAMPLE: usize = 2000;

/// One op of a compound. Offsets and lengths are in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Step {
    Touch,
    Create,
    Remove,
    Write(u64, usize),
    WriteFull(usize),
    Append(usize),
    Truncate(u64),
    Zero(u64, u64),
    SetXattr,
    RemoveXattr,
    OmapSet,
    OmapRemove,
    OmapRemoveRange,
    OmapClear,
    SetManifest,
}

/// Every kind of op, with offsets and sizes near block boundaries, in holes and beyond the end, and
/// with large data.
const STEPS: [Step; 41] = [
    Step::Touch,
    Step::Create,
    Step::Remove,
    Step::Write(3, 0),
    Step::Write(0, 10),
    Step::Write(100, 10),
    Step::Write(4090, 12),
    Step::Write(4096, 4096),
    Step::Write(8192, 10),
    Step::Write(5000, 20_000),
    Step::Write(1 << 20, 10),
    Step::Write(0, STAGED),
    Step::Write(4100, STAGED),
    Step::WriteFull(0),
    Step::WriteFull(10),
    Step::WriteFull(8192),
    Step::WriteFull(20_000),
    Step::WriteFull(STAGED),
    Step::Append(0),
    Step::Append(10),
    Step::Append(5000),
    Step::Truncate(0),
    Step::Truncate(10),
    Step::Truncate(4096),
    Step::Truncate(8193),
    Step::Truncate(18_450),
    Step::Truncate(20_000),
    Step::Truncate(1 << 20),
    Step::Zero(50, 0),
    Step::Zero(0, 4096),
    Step::Zero(100, 10),
    Step::Zero(4000, 9000),
    Step::Zero(8192, 8192),
    Step::Zero(40_000, 10),
    Step::SetXattr,
    Step::RemoveXattr,
    Step::OmapSet,
    Step::OmapRemove,
    Step::OmapRemoveRange,
    Step::OmapClear,
    Step::SetManifest,
];

impl Step {
    /// Length of the op's data, in bytes; `None` if it has none.
    fn len(self) -> Option<usize> {
        match self {
            Step::Write(_, len) | Step::WriteFull(len) | Step::Append(len) => Some(len),
            _ => None,
        }
    }

    fn changes_data(self) -> bool {
        self.len().is_some() || matches!(self, Step::Truncate(_) | Step::Zero(..))
    }
}

/// The object that exists before the compound.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Absent,
    Empty,
    /// 100 bytes, an xattr and omap entries.
    Short,
    /// 30 000 bytes, an xattr and omap entries.
    Long,
    /// 10 bytes after a hole of 40 000 bytes.
    Holey,
}

const KINDS: [Kind; 5] = [Kind::Absent, Kind::Empty, Kind::Short, Kind::Long, Kind::Holey];

#[derive(Debug, Clone)]
struct Case {
    kind: Kind,
    steps: Vec<Step>,
}

impl Case {
    /// Returns whether the compound's bulk data is staged and other ops change data, too. The osd
    /// refuses ops that need the staged bytes.
    fn mixes_staged_data(&self) -> bool {
        let staged = self.steps.iter().any(|step| step.len().is_some_and(|len| len > LARGEST_BUFFER));
        staged && self.steps.iter().filter(|step| step.changes_data()).count() > 1
    }
}

/// State of an object according to the contract.
#[derive(Debug, Clone, Default, PartialEq)]
struct Model {
    data: Vec<u8>,
    xattrs: BTreeMap<Bytes, Bytes>,
    omap: BTreeMap<Bytes, Bytes>,
    striped: bool,
}

/// Reason why a compound must be refused.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Refusal {
    Exists,
    NoSuchObject,
    Striped,
}

impl Model {
    fn of(kind: Kind) -> Option<Model> {
        let metadata = Model {
            xattrs: BTreeMap::from([("a".into(), "before".into())]),
            omap: ["k1", "k2", "k3"].map(|key| (key.into(), "before".into())).into(),
            ..Model::default()
        };
        match kind {
            Kind::Absent => None,
            Kind::Empty => Some(Model::default()),
            Kind::Short => Some(Model { data: data(100, 77).to_vec(), ..metadata }),
            Kind::Long => Some(Model { data: data(30_000, 77).to_vec(), ..metadata }),
            Kind::Holey => {
                let mut model = Model::default();
                model.write(40_000, &data(10, 77));
                Some(model)
            }
        }
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.data.resize(self.data.len().max(offset + bytes.len()), 0);
        self.data[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    /// Applies one op to the object. Returns the offset at which an append began.
    fn step(state: &mut Option<Model>, step: Step, index: usize) -> Result<Option<u64>, Refusal> {
        let exists = state.is_some();
        match step {
            Step::Create if exists => return Err(Refusal::Exists),
            Step::Remove if !exists => return Err(Refusal::NoSuchObject),
            Step::Remove => {
                *state = None;
                return Ok(None);
            }
            _ => {}
        }
        let model = state.get_or_insert_default();
        if model.striped && step.changes_data() && !matches!(step, Step::WriteFull(_)) {
            return Err(Refusal::Striped);
        }
        let value = Bytes::from(format!("value {index}"));
        match step {
            Step::Touch | Step::Create | Step::Remove => {}
            Step::Write(offset, len) => model.write(offset as usize, &content(index, len)),
            Step::WriteFull(len) => {
                model.data = content(index, len).to_vec();
                model.striped = false;
            }
            Step::Append(len) => {
                let at = model.data.len();
                model.write(at, &content(index, len));
                return Ok(Some(at as u64));
            }
            Step::Truncate(size) => model.data.resize(size as usize, 0),
            Step::Zero(offset, len) => model.write(offset as usize, &vec![0; len as usize]),
            Step::SetXattr => drop(model.xattrs.insert("a".into(), value)),
            Step::RemoveXattr => drop(model.xattrs.remove(&b"a"[..])),
            Step::OmapSet => model.omap.extend(entries(index)),
            Step::OmapRemove => drop(model.omap.remove(&b"k1"[..])),
            Step::OmapRemoveRange => {
                let removed = Bytes::from("k2")..Bytes::from("k3");
                model.omap.retain(|key, _| !removed.contains(key));
            }
            Step::OmapClear => model.omap.clear(),
            Step::SetManifest => {
                model.data.clear();
                model.striped = true;
            }
        }
        Ok(None)
    }
}

/// Returns the data of op number `index` of a compound.
fn content(index: usize, len: usize) -> Bytes {
    data(len, index as u64 + 1)
}

fn entries(index: usize) -> Vec<(Bytes, Bytes)> {
    vec![("k1".into(), format!("value {index}").into()), ("k4".into(), "new".into())]
}

/// Returns a manifest without parts, which needs no upload.
fn manifest() -> Manifest {
    Manifest { upload: UploadId { session: SessionId(1), number: 1 }, part_size: 4096, size: 0 }
}

/// Commits a compound through the client library.
async fn commit(object: &Object, steps: &[Step]) -> client::Result<Mutated> {
    let mut change = object.compound();
    for (index, step) in steps.iter().enumerate() {
        change = match *step {
            Step::Touch => change.touch(),
            Step::Create => change.create(),
            Step::Remove => change.remove(),
            Step::Write(offset, len) => change.write(offset, content(index, len)),
            Step::WriteFull(len) => change.write_full(content(index, len)),
            Step::Append(len) => change.append(content(index, len)),
            Step::Truncate(size) => change.truncate(size),
            Step::Zero(offset, len) => change.zero(offset, len),
            Step::SetXattr => change.set_xattr("a", format!("value {index}")),
            Step::RemoveXattr => change.remove_xattr("a"),
            Step::OmapSet => change.omap_set(entries(index)),
            Step::OmapRemove => change.omap_remove(vec!["k1".into()]),
            Step::OmapRemoveRange => change.omap_remove_range("k2", "k3"),
            Step::OmapClear => change.omap_clear(),
            Step::SetManifest => panic!("the library sets manifests by itself"),
        };
    }
    change.commit().await
}

/// Commits a compound whose data is all embedded in the request.
async fn commit_by_hand(raw: &mut Raw, seq: u64, name: &str, steps: &[Step]) -> wire::Result<Mutated> {
    let mutation = |(index, step): (usize, &Step)| {
        let source = |len| OpBytes::Embedded(content(index, len));
        match *step {
            Step::Touch => Mutation::Touch,
            Step::Create => Mutation::Create,
            Step::Remove => Mutation::Remove,
            Step::Write(offset, len) => Mutation::Write { offset, source: source(len) },
            Step::WriteFull(len) => Mutation::WriteFull(source(len)),
            Step::Append(len) => Mutation::Append(source(len)),
            Step::Truncate(size) => Mutation::Truncate(size),
            Step::Zero(offset, len) => Mutation::Zero { offset, len },
            Step::SetXattr => Mutation::SetXattr("a".into(), format!("value {index}").into()),
            Step::RemoveXattr => Mutation::RemoveXattr("a".into()),
            Step::OmapSet => Mutation::OmapSet(entries(index)),
            Step::OmapRemove => Mutation::OmapRemove(vec!["k1".into()]),
            Step::OmapRemoveRange => Mutation::OmapRemoveRange("k2".into(), "k3".into()),
            Step::OmapClear => Mutation::OmapClear,
            Step::SetManifest => Mutation::SetManifest(manifest()),
        }
    };
    let ops = steps.iter().enumerate().map(mutation).collect();
    let mut head = head(seq);
    head.acked_through = seq - 1;
    raw.changed(head, mutate(name, ops, Data::None)).await
}

/// A node with exactly the targets that a pool needs, in one placement.
pub(crate) struct Rig {
    redundancy: String,
    placement: Placement,
    /// The targets themselves, for tests that inspect the stored data.
    pub(crate) behind: Vec<Arc<dyn ObjectStore>>,
    /// Server that offers the targets to an osd with placement `Dpu`.
    served: Option<(Server, StoreEndpoint, tempfile::TempDir)>,
    osd: Option<Running>,
    endpoint: String,
    administrator: CurrentAdministrator,
}

/// An osd on a thread of its own.
struct Running {
    stop: oneshot::Sender<()>,
    thread: std::thread::JoinHandle<()>,
}

impl Running {
    fn stop(self) {
        // If the receiver was dropped, the osd has already stopped.
        let _ = self.stop.send(());
        self.thread.join().unwrap();
    }
}

impl Rig {
    fn new(text: &str, placement: Placement) -> Rig {
        let count = redundancy(text).targets();
        let behind = (0..count).map(|_| Arc::new(MemStore::new()) as Arc<dyn ObjectStore>).collect();
        Rig::over(text, placement, behind)
    }

    fn over(text: &str, placement: Placement, behind: Vec<Arc<dyn ObjectStore>>) -> Rig {
        let served = (placement == Placement::Dpu).then(|| {
            let dir = tempfile::tempdir().unwrap();
            let at = dir.path().join("store.sock");
            let target = |(uuid, store): (Uuid, &Arc<dyn ObjectStore>)| proxy::ServedTarget {
                uuid,
                store: Arc::clone(store),
            };
            let targets = (1..).map(Uuid::from_u128).zip(&behind).map(target).collect();
            let server = Server::serve(StoreListener::unix(&at).unwrap(), targets, ServerOptions::default());
            (server.unwrap(), StoreEndpoint::Unix(at), dir)
        });
        let redundancy = text.to_owned();
        let mut rig = Rig {
            redundancy,
            placement,
            behind,
            served,
            osd: None,
            endpoint: "127.0.0.1:0".into(),
            administrator: Arc::default(),
        };
        rig.restart();
        rig
    }

    /// Stops the osd if it runs, and starts another osd, which has not cached any object.
    fn restart(&mut self) {
        if let Some(osd) = self.osd.take() {
            osd.stop();
        }
        let mut tries = 0;
        let (osd, endpoint) = loop {
            match self.start() {
                Ok(started) => break started,
                // The socket of the old listener may stay open for a moment.
                Err(osd::StartError::Listen(_)) if tries < 100 => {
                    tries += 1;
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                Err(e) => panic!("{e}"),
            }
        };
        self.osd = Some(osd);
        self.endpoint = endpoint;
    }

    fn start(&self) -> Result<(Running, String), osd::StartError> {
        let (ready, started) = std::sync::mpsc::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let stores = self.behind.clone();
        let joined = self.served.as_ref().map(|(_, endpoint, _)| endpoint.clone());
        let listen = self.endpoint.clone();
        let serve = async move || {
            let mut config = config();
            let (targets, pool, _attachment) = match joined {
                None => {
                    let arena = Arena::anonymous(16 << 20).unwrap();
                    (stores, BufferPool::new(arena, 0, LARGEST_BUFFER), None)
                }
                Some(endpoint) => {
                    let mut options = AttachmentOptions::default();
                    options.memory.pool_len = 16 << 20;
                    options.memory.largest_buffer = LARGEST_BUFFER;
                    let attachment = Attachment::connect(endpoint, options).await.unwrap();
                    assert!(attachment.status().by_dma, "{:?}", attachment.status());
                    config.placement = Placement::Dpu;
                    config.coding.stripes = StripesAt::There(attachment.store_set());
                    let targets: Vec<_> = (0..stores.len())
                        .map(|index| attachment.store(index) as Arc<dyn ObjectStore>)
                        .collect();
                    (targets, attachment.pool().clone(), Some(attachment))
                }
            };
            let targets = (1..).map(Uuid::from_u128).zip(targets).collect();
            let ready = move |outcome| ready.send(outcome).unwrap();
            let stopped = async { drop(stopped.await) };
            let resources = vec![ShardResources { config, targets, staging: pool }];
            OsdServer::serve_on_one_thread(resources, stack(UseAs::Server), &listen, ready, stopped).await;
        };
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            tokio::task::LocalSet::new().block_on(&runtime, serve());
        });
        let OsdStarted { endpoint, administrator, .. } = started.recv().unwrap()?;
        register(&endpoint, &administrator);
        *self.administrator.lock().unwrap() = Some(administrator);
        Ok((Running { stop, thread }, endpoint))
    }

    async fn pool(&self) -> (Client, Pool) {
        let options = administered(Options::default(), &self.administrator);
        let client = Client::connect(&self.endpoint, options).await.unwrap();
        if client.pools().await.unwrap().is_empty() {
            client.create_pool_with("pool", 2, redundancy(&self.redundancy)).await.unwrap();
        }
        let pool = client.pool("pool").unwrap();
        (client, pool)
    }

    /// Runs one batch of cases.
    async fn run(&mut self, cases: &[Case]) -> Tally {
        let what = format!("{} {:?}", self.redundancy, self.placement);
        {
            let (_client, pool) = self.pool().await;
            let pool = &pool;
            let made = cases.iter().enumerate().map(|(n, case)| async move {
                let object = pool.object(&name(n)).unwrap();
                let Some(Model { data, xattrs, omap, .. }) = Model::of(case.kind) else { return };
                let mut change = object.compound().create();
                if case.kind == Kind::Holey {
                    change = change.write(40_000, data[40_000..].to_vec());
                } else if !data.is_empty() {
                    change = change.write(0, data);
                }
                for (name, value) in xattrs {
                    change = change.set_xattr(name, value);
                }
                if !omap.is_empty() {
                    change = change.omap_set(omap.into_iter().collect());
                }
                change.commit().await.unwrap();
            });
            stream::iter(made).buffer_unordered(COMPANY).for_each(|()| async {}).await;
        }
        self.restart();
        let (client, pool) = self.pool().await;
        let changed: Vec<_> = {
            let (pool, what) = (&pool, &what);
            let changes = cases.iter().enumerate().map(|(n, case)| async move {
                let object = pool.object(&name(n)).unwrap();
                if n % 2 == 1 {
                    // From now on, the osd has cached the object.
                    drop(object.stat().await);
                }
                if case.steps.contains(&Step::SetManifest) {
                    return None;
                }
                Some(judge(case, commit(&object, &case.steps).await, what))
            });
            stream::iter(changes).buffered(COMPANY).collect().await
        };
        let mut tally = Tally::default();
        let mut raw = Raw::connect(&self.endpoint, None).await;
        let mut models = HashMap::new();
        for (n, (case, changed)) in cases.iter().zip(changed).enumerate() {
            let judged = match changed {
                Some(judged) => judged,
                None => {
                    let done = commit_by_hand(&mut raw, n as u64 + 1, &name(n), &case.steps).await;
                    judge(case, done.map_err(Error::Node), &what)
                }
            };
            tally.count(case, &judged);
            models.insert(name(n), judged.model);
        }
        self.compare(&pool, cases, &models).await;
        self.compare_sizes(cases, &models).await;
        let scrub = scrub(&client, false).await;
        let there = models.values().flatten().count() as u64;
        assert_eq!((scrub.objects, &scrub.failure), (there, &None), "{what}");
        assert_eq!((scrub.damaged, scrub.inconsistent, scrub.wrong_size), (0, 0, 0), "{what}: {scrub:?}");
        tally
    }

    /// Stops the osd and closes the targets.
    async fn close(mut self) {
        if let Some(osd) = self.osd.take() {
            osd.stop();
        }
        drop(self.served.take());
        for store in &self.behind {
            store.umount().await.unwrap();
        }
    }

    /// Compares the objects that clients read with the models.
    async fn compare(&self, pool: &Pool, cases: &[Case], models: &HashMap<String, Option<Model>>) {
        let reads = cases.iter().enumerate().map(|(n, case)| async move {
            let what = || format!("{} {:?}, {case:?}", self.redundancy, self.placement);
            let object = pool.object(&name(n)).unwrap();
            let Some(model) = &models[&name(n)] else {
                let found = object.stat().await;
                assert!(found.as_ref().is_err_and(Error::is_not_found), "{}: {found:?}", what());
                return;
            };
            let found = object.describe().await.unwrap_or_else(|e| panic!("{}: {e}", what()));
            assert_eq!(found.stat.size, model.data.len() as u64, "{}", what());
            assert_eq!(found.stat.manifest.is_some(), model.striped, "{}", what());
            let xattrs: Vec<(Bytes, Bytes)> = model.xattrs.clone().into_iter().collect();
            assert_eq!(found.xattrs, xattrs, "{}", what());
            let page = object.omap_range("", None, 100).await.unwrap();
            assert_eq!(page.entries, model.omap.clone().into_iter().collect::<Vec<_>>(), "{}", what());
            let bytes = object.get().await.unwrap_or_else(|e| panic!("{}: {e}", what()));
            let first = bytes.iter().zip(&model.data).position(|(a, b)| a != b);
            assert!(bytes == model.data, "{}: {} bytes, first difference at {first:?}", what(), bytes.len());
        });
        stream::iter(reads).buffer_unordered(COMPANY).for_each(|()| async {}).await;
    }

    /// Compares the sizes of the stored objects with the sizes in the models.
    async fn compare_sizes(&self, cases: &[Case], models: &HashMap<String, Option<Model>>) {
        let mut copies: HashMap<String, usize> = HashMap::new();
        for store in &self.behind {
            for (name, size) in sizes(&**store, self.redundancy.starts_with("ec")).await {
                let case = &cases[name[1..].parse::<usize>().unwrap()];
                let expected = models[&name].as_ref().map(|model| model.data.len() as u64);
                assert_eq!(Some(size), expected, "{} {:?}, {case:?}", self.redundancy, self.placement);
                *copies.entry(name).or_default() += 1;
            }
        }
        for (name, model) in models {
            let expected = if model.is_some() { self.behind.len() } else { 0 };
            assert_eq!(copies.get(name).copied().unwrap_or(0), expected, "copies of {name}");
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(osd) = self.osd.take() {
            // A failed test has already reported its error, so a panic of the osd's thread does not
            // matter.
            let _ = osd.stop.send(());
            drop(osd.thread.join());
        }
    }
}

fn name(number: usize) -> String {
    format!("o{number}")
}

/// Numbers of compounds by outcome.
#[derive(Debug, Default)]
struct Tally {
    done: usize,
    refused: usize,
    /// Successful compounds with staged data and other changes of data.
    staged: usize,
    /// Refused compounds with staged data and other changes of data.
    staged_refused: usize,
}

impl Tally {
    fn count(&mut self, case: &Case, judged: &Judged) {
        let count = match (case.mixes_staged_data(), judged.refused) {
            (true, false) => &mut self.staged,
            (true, true) => &mut self.staged_refused,
            (false, false) => &mut self.done,
            (false, true) => &mut self.refused,
        };
        *count += 1;
    }

    fn add(&mut self, other: &Tally) {
        self.done += other.done;
        self.refused += other.refused;
        self.staged += other.staged;
        self.staged_refused += other.staged_refused;
    }
}

struct Judged {
    refused: bool,
    /// State that the object must have now.
    model: Option<Model>,
}

/// Compares the answer to a compound with the model.
fn judge(case: &Case, answer: client::Result<Mutated>, what: &str) -> Judged {
    let before = Model::of(case.kind);
    let (mut model, mut appended_at) = (before.clone(), 0);
    let apply = |(index, step): (usize, &Step)| {
        appended_at = Model::step(&mut model, *step, index)?.unwrap_or(appended_at);
        Ok(())
    };
    let expected: Result<(), Refusal> = case.steps.iter().enumerate().try_for_each(apply);
    match (&answer, expected) {
        (Ok(done), Ok(())) => {
            let size = model.as_ref().map_or(0, |model| model.data.len() as u64);
            assert_eq!((done.size, done.appended_at), (size, appended_at), "{what}, {case:?}");
            Judged { refused: false, model }
        }
        (Err(Error::Node(NodeError::BadRequest(_))), _) if case.mixes_staged_data() => {
            Judged { refused: true, model: before }
        }
        (Err(Error::Node(NodeError::Exists(_))), Err(Refusal::Exists))
        | (Err(Error::Node(NodeError::NoSuchObject(_))), Err(Refusal::NoSuchObject))
        | (Err(Error::Node(NodeError::Striped { .. })), Err(Refusal::Striped)) => {
            Judged { refused: true, model: before }
        }
        (answer, expected) => panic!("{what}, {case:?}: {answer:?} instead of {expected:?}"),
    }
}

/// Returns the sizes of users' objects on a target. If the target `has_fragments`, returns the
/// sizes of the whole objects.
async fn sizes(store: &dyn ObjectStore, has_fragments: bool) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    let mut collections = store.collections().await.unwrap();
    collections.retain(|cid| cid.as_bytes().starts_with(b"P"));
    for cid in collections {
        let mut from = None;
        loop {
            let (ids, more) = store.list(&cid, from, 1000).await.unwrap();
            for oid in &ids {
                // An id consists of four zeros, the kind, an empty namespace and the name.
                let Some(name) = oid.as_bytes().get(4..).and_then(|id| id.strip_prefix(&[3, 0])) else {
                    continue;
                };
                let size = if has_fragments {
                    let size = store.get_xattr(&cid, oid, "a".into()).await.unwrap();
                    u64::from_be_bytes(size[..].try_into().unwrap())
                } else {
                    store.stat(&cid, oid).await.unwrap().size
                };
                found.push((String::from_utf8(name.to_vec()).unwrap(), size));
            }
            match ids.last() {
                Some(last) if more => {
                    from = Some(ObjectId::new([last.as_bytes(), &b"\0"[..]].concat()).unwrap());
                }
                _ => break,
            }
        }
    }
    found
}

/// Returns all compounds of `len` ops.
fn all(len: usize) -> impl Iterator<Item = Vec<Step>> {
    let count = STEPS.len();
    (0..count.pow(len as u32))
        .map(move |number| (0..len as u32).map(|place| STEPS[number / count.pow(place) % count]).collect())
}

/// Runs cases in batches, each batch on a node of its own.
async fn run(text: &str, placement: Placement, cases: impl Iterator<Item = Case>) {
    let mut cases = cases.peekable();
    let mut tally = Tally::default();
    while cases.peek().is_some() {
        let batch: Vec<Case> = cases.by_ref().take(BATCH).collect();
        tally.add(&Rig::new(text, placement).run(&batch).await);
    }
    assert!(tally.done > 0 && tally.refused > 0, "{tally:?}");
    assert!(tally.staged > 0 && tally.staged_refused > 0, "{tally:?}");
}

/// Runs a random sample of pairs and triples, about half of each.
async fn run_sample(text: &str, placement: Placement) {
    let cases = sample(&mut StdRng::seed_from_u64(seed()), SAMPLE);
    run(text, placement, cases.into_iter()).await;
}

fn sample(rng: &mut StdRng, count: usize) -> Vec<Case> {
    let mut one = || {
        let steps = (0..rng.random_range(2..=3)).map(|_| *STEPS.choose(rng).unwrap()).collect();
        Case { kind: *KINDS.choose(rng).unwrap(), steps }
    };
    (0..count).map(|_| one()).collect()
}

/// Runs every single op, every pair and every triple on every kind of object.
async fn run_all(text: &str, placement: Placement) {
    let compounds = (1..=3).flat_map(all);
    let cases = compounds.flat_map(|steps| KINDS.map(|kind| Case { kind, steps: steps.clone() }));
    run(text, placement, cases).await;
}

macro_rules! compounds {
    ($($sample:ident, $every:ident: $redundancy:literal, $placement:ident;)*) => {$(
        #[tokio::test]
        async fn $sample() {
            run_sample($redundancy, Placement::$placement).await;
        }

        #[tokio::test]
        #[ignore = "350 000 cases take many minutes"]
        async fn $every() {
            run_all($redundancy, Placement::$placement).await;
        }
    )*};
}

compounds! {
    sampled_compounds_on_one_target_match_the_model,
        every_compound_on_one_target_matches_the_model: "single", Host;
    sampled_compounds_on_a_mirror_match_the_model,
        every_compound_on_a_mirror_matches_the_model: "mirror:2", Host;
    sampled_compounds_on_an_erasure_code_match_the_model,
        every_compound_on_an_erasure_code_matches_the_model: "ec:2+1", Host;
    sampled_compounds_on_one_target_behind_a_channel_match_the_model,
        every_compound_on_one_target_behind_a_channel_matches_the_model: "single", Dpu;
    sampled_compounds_on_a_mirror_behind_a_channel_match_the_model,
        every_compound_on_a_mirror_behind_a_channel_matches_the_model: "mirror:2", Dpu;
    sampled_compounds_on_an_erasure_code_behind_a_channel_match_the_model,
        every_compound_on_an_erasure_code_behind_a_channel_matches_the_model: "ec:2+1", Dpu;
}

/// Commits each compound on a new object of its kind, and compares the result with the model.
async fn run_these(cases: &[(Kind, &[Step])]) {
    let cases = || cases.iter().map(|(kind, steps)| Case { kind: *kind, steps: steps.to_vec() });
    for text in ["single", "mirror:2", "ec:2+1"] {
        let batch: Vec<Case> = cases().collect();
        Rig::new(text, Placement::Host).run(&batch).await;
    }
}

#[tokio::test]
async fn a_compound_that_truncates_in_a_hole_leaves_a_readable_object() {
    run_these(&[
        (Kind::Empty, &[Step::Truncate(20_000), Step::Truncate(18_450)]),
        (Kind::Empty, &[Step::Write(1 << 20, 10), Step::Truncate(8193)]),
        (Kind::Holey, &[Step::Truncate(1 << 20), Step::Truncate(100_001)]),
        (Kind::Long, &[Step::WriteFull(10), Step::Truncate(20_000), Step::Truncate(18_450)]),
    ])
    .await;
}

#[tokio::test]
async fn ops_on_an_absent_object_see_the_ops_before_them() {
    run_these(&[
        (Kind::Absent, &[Step::Write(1 << 20, 10), Step::Write(100, 10)]),
        (Kind::Absent, &[Step::Create, Step::Write(8192, 10), Step::Write(100, 10)]),
        (Kind::Absent, &[Step::Truncate(1 << 20), Step::Zero(100, 10)]),
        (Kind::Absent, &[Step::SetManifest, Step::Remove]),
        (Kind::Absent, &[Step::Truncate(20_000), Step::Truncate(18_450)]),
    ])
    .await;
}

/// A compound that creates and then removes an object is refused if the object exists, like any
/// other compound with the op `Create`.
#[tokio::test]
async fn a_compound_that_creates_and_removes_is_refused_on_an_existing_object() {
    run_these(&[
        (Kind::Long, &[Step::Create, Step::Remove]),
        // Every second case is on an object that the osd has cached.
        (Kind::Long, &[Step::Create, Step::Remove]),
        (Kind::Long, &[Step::Create, Step::Remove, Step::Write(0, 10)]),
        (Kind::Long, &[Step::Create, Step::Remove, Step::Write(0, 10)]),
        (Kind::Absent, &[Step::Create, Step::Remove, Step::Write(0, 10)]),
    ])
    .await;
}

/// Bulk data that an op has removed does not affect the ops after it.
#[tokio::test]
async fn ops_after_the_removal_of_bulk_data_are_executed() {
    let object = async |text| {
        let rig = Rig::new(text, Placement::Host);
        let (client, pool) = rig.pool().await;
        (pool.object("object").unwrap(), client, rig)
    };
    for text in ["single", "mirror:2", "ec:2+1"] {
        for steps in [
            &[Step::Write(0, STAGED), Step::Truncate(0), Step::Write(100, 10)][..],
            &[Step::Write(0, STAGED), Step::Remove, Step::Write(100, 10)],
            &[Step::Write(0, STAGED), Step::WriteFull(10), Step::Append(10)],
        ] {
            let (object, _client, _rig) = object(text).await;
            let case = Case { kind: Kind::Absent, steps: steps.to_vec() };
            let judged = judge(&case, commit(&object, steps).await, text);
            assert!(!judged.refused, "{text}, {steps:?}");
            assert!(object.get().await.unwrap() == judged.model.unwrap().data, "{text}, {steps:?}");
        }
    }
}

/// Targets on files. [`Rig::close`] closes them.
struct Drives {
    dir: tempfile::TempDir,
    count: usize,
}

impl Drives {
    fn new(text: &str) -> Drives {
        let drives = Drives { dir: tempfile::tempdir().unwrap(), count: redundancy(text).targets() };
        let options = MkfsOptions {
            size: Some(48 << 20),
            log_bytes: Some(9 << 20),
            index_bytes: Some(16 << 20),
            ..MkfsOptions::default()
        };
        for path in drives.paths() {
            BlockStore::mkfs(&path, &options, |_, _| {}).unwrap();
        }
        drives
    }

    fn paths(&self) -> Vec<std::path::PathBuf> {
        (0..self.count).map(|number| self.dir.path().join(format!("{number}.img"))).collect()
    }

    fn rig(&self, text: &str, placement: Placement) -> Rig {
        let mount = |path: &std::path::PathBuf| {
            BlockStore::mount(path, &MountOptions::default()).unwrap() as Arc<dyn ObjectStore>
        };
        Rig::over(text, placement, self.paths().iter().map(mount).collect())
    }

    /// Returns the problems that fsck finds on the targets, which must be closed.
    fn problems(&self) -> Vec<String> {
        let check = |path: std::path::PathBuf| {
            let report = fsck(&path, false, &osd::inspect_object, |_, _| {}).unwrap();
            assert!(report.complete, "{report:?}");
            report.problems
        };
        self.paths().into_iter().flat_map(check).map(|problem| problem.detail).collect()
    }
}

/// Runs a sample of compounds on targets that are files, behind the host–DPU channel.
#[tokio::test]
async fn sampled_compounds_on_files_leave_targets_that_fsck_finds_clean() {
    let mut rng = StdRng::seed_from_u64(seed());
    for text in ["single", "ec:2+1"] {
        let drives = Drives::new(text);
        let mut rig = drives.rig(text, Placement::Dpu);
        rig.run(&sample(&mut rng, 150)).await;
        rig.close().await;
        assert_eq!(drives.problems(), Vec::<String>::new(), "{text}");
    }
}

/// Truncates the stored data of an object to `stored` bytes, but keeps the recorded size. Nodes
/// that spoke a version of the object protocol below 5 left objects in this state.
async fn cut_short(rig: &Rig, name: &str, stored: u64) {
    let stripe = u64::from(crate::redundancy::UNIT) * 2;
    let is_coded = rig.redundancy.starts_with("ec");
    assert!(stored.is_multiple_of(stripe), "both data fragments and parity end with a whole unit");
    let mut found = 0;
    for store in &rig.behind {
        let mut collections = store.collections().await.unwrap();
        collections.retain(|cid| cid.as_bytes().starts_with(b"P"));
        for collection in collections {
            let (oids, more) = store.list(&collection, None, 1000).await.unwrap();
            assert!(!more);
            for oid in oids.into_iter().filter(|oid| oid.as_bytes().ends_with(name.as_bytes())) {
                let size = if is_coded { stored / 2 } else { stored };
                let mut transaction =
                    Transaction::new(collection.clone()).with(Op::Truncate { oid: oid.clone(), size });
                if rig.redundancy != "single" {
                    let xattrs = vec![("a".into(), Bytes::copy_from_slice(&stored.to_be_bytes()))];
                    transaction = transaction.with(Op::SetXattrs { oid, xattrs });
                }
                store.queue_transaction(transaction).await.unwrap();
                found += 1;
            }
        }
    }
    assert_eq!(found, rig.behind.len(), "the object was on every target");
}

fn is_wrong_size<T: std::fmt::Debug>(answer: client::Result<T>, sizes: (u64, u64)) -> bool {
    match answer {
        Err(Error::Node(NodeError::WrongSize { stored, recorded, .. })) => (stored, recorded) == sizes,
        other => panic!("{other:?}"),
    }
}

/// fsck and scrub find objects whose last block was stored incompletely by an older version. A
/// scrub with repair adds the missing zeros, but only where the missing bytes are certain to be
/// zeros.
#[tokio::test]
async fn objects_that_were_stored_too_short_are_found_and_repaired() {
    for text in ["single", "mirror:2", "ec:2+1"] {
        let drives = Drives::new(text);
        let bytes = data(16_384, 1);
        let mut expected = bytes.to_vec();
        expected.resize(18_450, 0);

        let rig = drives.rig(text, Placement::Host);
        let mut versions = Vec::new();
        {
            let (client, pool) = rig.pool().await;
            for name in ["whole", "short", "lost"] {
                let object = pool.object(name).unwrap();
                object.put(bytes.clone()).await.unwrap();
                versions.push(
                    object.compound().truncate(20_000).truncate(18_450).commit().await.unwrap().version,
                );
            }
            drop(client);
        }
        rig.close().await;
        assert_eq!(drives.problems(), Vec::<String>::new(), "{text}");

        let rig = drives.rig(text, Placement::Host);
        cut_short(&rig, "short", 16_384).await;
        // More than the last block is missing, so the missing bytes are not certain to be zeros.
        cut_short(&rig, "lost", 0).await;
        rig.close().await;
        let problems = drives.problems();
        let found = |name: &str, advice: &str| {
            problems.iter().filter(|p| p.contains(name) && p.contains(advice)).count()
        };
        assert_eq!(found("\"short\"", "scrub --repair"), redundancy(text).targets(), "{problems:?}");
        assert_eq!(found("\"lost\"", "restore it"), redundancy(text).targets(), "{problems:?}");
        assert_eq!(problems.len(), 2 * redundancy(text).targets(), "{problems:?}");

        let rig = drives.rig(text, Placement::Host);
        {
            let (client, pool) = rig.pool().await;
            let object = |name| pool.object(name).unwrap();
            assert!(is_wrong_size(object("short").get().await, (16_384, 18_450)), "{text}");
            assert!(is_wrong_size(object("short").append("x").await, (16_384, 18_450)), "{text}");
            assert!(object("whole").get().await.unwrap() == expected, "{text}");
            let found = scrub(&client, false).await;
            assert_eq!((found.objects, found.wrong_size, found.resized), (3, 2, 0), "{text}: {found:?}");
            assert_eq!((found.damaged, found.inconsistent), (0, 0), "{text}: {found:?}");
            assert!(is_wrong_size(object("short").get().await, (16_384, 18_450)), "{text}");
            let found = scrub(&client, true).await;
            assert_eq!((found.wrong_size, found.resized), (2, 1), "{text}: {found:?}");
            for (name, version) in ["whole", "short"].into_iter().zip(&versions) {
                assert!(object(name).get().await.unwrap() == expected, "{text}, {name}");
                assert_eq!(object(name).stat().await.unwrap().version, *version, "{text}, {name}");
            }
            assert!(is_wrong_size(object("lost").get().await, (0, 18_450)), "{text}");
            object("lost").put(bytes.clone()).await.unwrap();
            assert!(object("lost").get().await.unwrap() == bytes, "{text}");
            object("short").append("x").await.unwrap();
            let found = scrub(&client, false).await;
            assert_eq!((found.objects, found.wrong_size, found.damaged), (3, 0, 0), "{text}: {found:?}");
        }
        rig.close().await;
        assert_eq!(drives.problems(), Vec::<String>::new(), "{text}");
    }
}
