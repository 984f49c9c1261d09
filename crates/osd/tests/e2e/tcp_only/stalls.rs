//! Tests with targets that stall for a while and then continue: all targets at once, as on an
//! overloaded host, or single targets.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::block::Payload;
use bytes::Bytes;
use client::{Client, Pool, TargetState};
use osd::{OsdConfig, TargetRetry};
use rand::rngs::StdRng;
use rand::seq::IteratorRandom;
use rand::{Rng, SeedableRng};
use store::{CollectionId, MemStore, ObjectStore, StoreCalls, StoreFuture, StoreRequest, Submit};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use wire::{Data, Mutation, OpBytes};

use crate::common::{FaultStore, Node, data, seed};
use crate::raw::{Raw, head, mutate};
use crate::redundancy::{Rig, redundancy, wait_until_whole};
use crate::tcp_only::recovery::until;

type Waiting = Vec<Box<dyn FnOnce() + Send>>;

/// A store that can be stopped. Calls then wait, and are executed in order when the store
/// continues, even if their callers have given up.
struct StallStore {
    inner: Arc<dyn ObjectStore>,
    waiting: Mutex<Option<Waiting>>,
    /// If set, only calls in this collection wait.
    only: Mutex<Option<CollectionId>>,
    /// Number of calls that had to wait.
    stalled: AtomicU64,
}

impl StallStore {
    fn new() -> Arc<StallStore> {
        let inner = Arc::new(MemStore::new());
        Arc::new(StallStore {
            inner,
            waiting: Mutex::default(),
            only: Mutex::default(),
            stalled: AtomicU64::new(0),
        })
    }

    fn stop(&self) {
        self.waiting.lock().unwrap().get_or_insert_default();
    }

    /// Stops the calls in one collection.
    fn stop_in(&self, cid: CollectionId) {
        *self.only.lock().unwrap() = Some(cid);
        self.stop();
    }

    fn go_on(&self) {
        let mut waiting = self.waiting.lock().unwrap();
        *self.only.lock().unwrap() = None;
        waiting.take().into_iter().flatten().for_each(|call| call());
    }
}

impl Submit for StallStore {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        let mut waiting = self.waiting.lock().unwrap();
        let stands = self.only.lock().unwrap().as_ref().is_none_or(|only| Some(only) == request.collection());
        let Some(waiting) = waiting.as_mut().filter(|_| stands) else { return self.inner.submit(request) };
        self.stalled.fetch_add(1, Ordering::SeqCst);
        let ((answer_to, answer), inner) = (oneshot::channel(), Arc::clone(&self.inner));
        waiting.push(Box::new(move || drop(answer_to.send(inner.submit(request)))));
        Box::pin(async move { answer.await.unwrap().await })
    }
}

/// Time limit for a target's answer. [`STALL`] is clearly longer.
const TIMEOUT: Duration = Duration::from_millis(400);
const STALL: Duration = Duration::from_millis(1100);

const RETRY: TargetRetry = TargetRetry {
    slow_pause: Duration::from_millis(10),
    slow_pause_max: Duration::from_millis(200),
    probe_max: Duration::from_millis(200),
    failing_pause: Duration::from_millis(50),
    failing_pause_max: Duration::from_millis(200),
    relapses_max: 5,
    hopeful_for: Duration::from_secs(20),
};

fn config() -> OsdConfig {
    OsdConfig {
        target_timeout: TIMEOUT,
        store_patience: 3 * TIMEOUT,
        target_retry: RETRY,
        ..crate::redundancy::config()
    }
}

/// A node with a pool, whose targets can be stopped.
struct Stalls {
    rig: Rig,
    stores: Vec<Arc<StallStore>>,
}

impl Stalls {
    async fn new(text: &str, groups: u32, config: OsdConfig) -> Stalls {
        let redundancy = redundancy(text);
        let stores: Vec<_> = (0..redundancy.targets().max(2)).map(|_| StallStore::new()).collect();
        let over =
            |store: &Arc<StallStore>| FaultStore::over(Arc::clone(store) as Arc<dyn ObjectStore>, None);
        let mut node = Node::over(stores.iter().map(over).collect(), config);
        node.restart();
        let client = node.client().await;
        client.create_pool_with("pool", groups, redundancy).await.unwrap();
        let pool = client.pool("pool").unwrap();
        Stalls { rig: Rig { node, client, pool, objects: Vec::new() }, stores }
    }

    fn all(&self) -> Vec<usize> {
        (0..self.stores.len()).collect()
    }

    fn stop(&self, targets: &[usize]) {
        targets.iter().for_each(|&target| self.stores[target].stop());
    }

    fn go_on(&self, targets: &[usize]) {
        targets.iter().for_each(|&target| self.stores[target].go_on());
    }

    /// Stops targets for the time `long`. At least one call must arrive meanwhile.
    async fn stall(&self, targets: &[usize], long: Duration) {
        let stalled = || targets.iter().map(|&t| self.stores[t].stalled.load(Ordering::SeqCst)).sum::<u64>();
        let before = stalled();
        self.stop(targets);
        tokio::time::sleep(long).await;
        self.go_on(targets);
        assert!(stalled() > before, "no call arrived while {targets:?} were stopped");
    }

    async fn state(&self, target: usize) -> TargetState {
        self.rig.client.status().await.unwrap().targets[target].state
    }

    async fn all_is_well(&self) {
        wait_until_whole(&self.rig.client).await;
        let up = async {
            while self.rig.client.status().await.unwrap().targets.iter().any(|t| t.state != TargetState::Up) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), up).await.expect("targets are used again");
        self.rig.check("after all targets are used again").await;
    }

    /// Checks by a scrub that no target lacks data, and that the data of all targets is consistent.
    async fn scrub(&self) {
        self.rig.client.start_scrub("pool", false).await.unwrap();
        let mut scrub = self.rig.client.scrub_status("pool").await.unwrap();
        while scrub.running {
            tokio::time::sleep(Duration::from_millis(5)).await;
            scrub = self.rig.client.scrub_status("pool").await.unwrap();
        }
        assert_eq!((scrub.failure.clone(), scrub.damaged, scrub.inconsistent), (None, 0, 0), "{scrub:?}");
        assert!(scrub.objects > 0);
    }
}

/// Clients that write and read their objects until they are stopped.
struct Load {
    stop: Arc<AtomicU64>,
    done: Arc<AtomicU64>,
    clients: Vec<JoinHandle<(String, Bytes)>>,
}

impl Load {
    async fn start(client: &Client, pool: &Pool, count: usize) -> Load {
        let (stop, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let run = |number: usize| {
            let (pool, stop, done) = (pool.clone(), Arc::clone(&stop), Arc::clone(&done));
            tokio::spawn(async move {
                let name = format!("load{number}");
                let object = pool.object(&name).unwrap();
                let mut version = 0;
                loop {
                    // The first client's objects are large enough to be staged.
                    let len = if number == 0 { 3 << 20 } else { 5000 * (number + 1) };
                    let bytes = data(len, (number << 32) as u64 + version);
                    object.put(bytes.clone()).await.unwrap_or_else(|e| panic!("put {name}: {e}"));
                    let read = object.get().await.unwrap_or_else(|e| panic!("get {name}: {e}"));
                    assert!(read == bytes, "{name} differs from the acknowledged data");
                    version += 1;
                    done.fetch_add(1, Ordering::SeqCst);
                    if stop.load(Ordering::SeqCst) > 0 {
                        return (name, bytes);
                    }
                }
            })
        };
        let clients = (0..count).map(run).collect();
        let load = Load { stop, done, clients };
        // Wait until the clients are connected, and one of them has completed a put and a read.
        assert!(client.status().await.is_ok());
        load.has_done(1).await;
        load
    }

    /// Waits until the clients have completed `more` further puts, each with a read of the object.
    async fn has_done(&self, more: u64) {
        let enough = self.done.load(Ordering::SeqCst) + more;
        let done = async {
            while self.done.load(Ordering::SeqCst) < enough {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), done).await.expect("clients are served again");
    }

    /// Stops the clients. Returns the names and contents of their objects.
    async fn finish(self) -> Vec<(String, Bytes)> {
        self.stop.store(1, Ordering::SeqCst);
        let mut objects = Vec::new();
        for client in self.clients {
            objects.push(client.await.unwrap());
        }
        objects
    }
}

async fn a_stall_of_all_targets(text: &str) {
    let mut stalls = Stalls::new(text, 4, config()).await;
    let load = Load::start(&stalls.rig.client, &stalls.rig.pool, 6).await;
    // The last stall is longer than requests wait for the store, so the clients must send retries.
    for long in [STALL, STALL, 6 * TIMEOUT] {
        stalls.stall(&stalls.all(), long).await;
        load.has_done(12).await;
    }
    stalls.rig.objects = load.finish().await;
    stalls.all_is_well().await;
    stalls.scrub().await;
}

#[tokio::test]
async fn clients_survive_a_stall_of_all_targets_of_a_mirror() {
    a_stall_of_all_targets("mirror:2").await;
}

#[tokio::test]
async fn clients_survive_a_stall_of_all_targets_of_an_erasure_code() {
    a_stall_of_all_targets("ec:2+1").await;
}

#[tokio::test]
async fn clients_survive_a_stall_of_all_targets_without_redundancy() {
    a_stall_of_all_targets("single").await;
}

#[tokio::test]
async fn a_target_that_stalls_repeatedly_catches_up_by_itself() {
    let mut stalls = Stalls::new("ec:2+1", 2, config()).await;
    let load = Load::start(&stalls.rig.client, &stalls.rig.pool, 6).await;
    for round in 0..6 {
        let target = [round % 3];
        stalls.stop(&target);
        // The other targets continue to serve the clients.
        load.has_done(20).await;
        assert_eq!(stalls.state(target[0]).await, TargetState::Slow, "round {round}");
        stalls.go_on(&target);
        wait_until_whole(&stalls.rig.client).await;
        assert_eq!(stalls.state(target[0]).await, TargetState::Up, "round {round}");
    }
    stalls.rig.objects = load.finish().await;
    stalls.all_is_well().await;
    stalls.scrub().await;
}

#[tokio::test]
async fn clients_survive_a_stall_while_placement_groups_are_opened() {
    for (text, targets) in [
        ("mirror:2", &[0][..]),
        ("mirror:2", &[1]),
        ("mirror:2", &[0, 1]),
        ("ec:2+1", &[1]),
        ("ec:2+1", &[0, 1, 2]),
    ] {
        let mut stalls = Stalls::new(text, 2, config()).await;
        stalls.rig.fill(&[10_000, 70_001]).await;
        // The targets stall once while the node is opened, and once while its groups are opened.
        for during_start in [true, false] {
            let stores: Vec<_> = targets.iter().map(|&target| Arc::clone(&stalls.stores[target])).collect();
            let stop = || stores.iter().for_each(|store| store.stop());
            if during_start {
                stop();
            }
            let resumed = {
                let stores = stores.clone();
                std::thread::spawn(move || {
                    std::thread::sleep(STALL);
                    stores.iter().for_each(|store| store.go_on());
                })
            };
            stalls.rig.node.restart();
            if !during_start {
                stop();
            }
            stalls.rig.check(&format!("{text}: {targets:?} were stopped")).await;
            stalls.rig.pool.object("after").unwrap().put("x").await.unwrap();
            resumed.join().unwrap();
            // The reads may not have needed the stalled targets, and a group may have continued
            // without its stalled target.
            stalls.all_is_well().await;
        }
        assert!(stores_stalled(&stalls) > 0);
        stalls.scrub().await;
    }
}

fn stores_stalled(stalls: &Stalls) -> u64 {
    stalls.stores.iter().map(|store| store.stalled.load(Ordering::SeqCst)).sum()
}

#[tokio::test]
async fn a_rebuild_continues_after_its_source_has_stalled() {
    let mut stalls = Stalls::new("ec:2+1", 1, OsdConfig { rebuild_rate: 1 << 20, ..config() }).await;
    stalls.rig.set_down(&[0], true);
    let sizes: Vec<usize> = (0..100).map(|number| 20_000 + 100 * number).collect();
    stalls.rig.fill(&sizes).await;
    stalls.rig.set_down(&[0], false);
    let rebuilt = async || stalls.rig.client.status().await.unwrap().rebuild.objects;
    let under_way = async {
        while rebuilt().await < 5 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), under_way).await.expect("the rebuild begins by itself");
    assert!(rebuilt().await < 100, "the rebuild was too fast for the test");
    stalls.stall(&[1], STALL).await;
    stalls.rig.client.set_rebuild_rate(0).await.unwrap();
    stalls.all_is_well().await;
    stalls.scrub().await;
}

#[tokio::test]
async fn a_group_waits_for_a_stalled_member_that_it_cannot_do_without() {
    for (text, gone, slow) in [("mirror:2", 0, 1), ("ec:2+1", 1, 2)] {
        // One target is lost for the whole test.
        let retry = TargetRetry { failing_pause: Duration::from_secs(3600), ..RETRY };
        let config = OsdConfig { target_retry: retry, store_patience: Duration::from_secs(20), ..config() };
        let mut stalls = Stalls::new(text, 1, config).await;
        stalls.rig.fill(&[10_000, 70_001]).await;
        stalls.rig.set_down(&[gone], true);
        stalls.rig.pool.object("before").unwrap().put("x").await.unwrap();
        assert_eq!(stalls.state(gone).await, TargetState::Failing);
        let load = Load::start(&stalls.rig.client, &stalls.rig.pool, 3).await;
        let watched = async {
            tokio::time::sleep(STALL).await;
            stalls.state(slow).await
        };
        let stalled = [slow];
        let (state, ()) = tokio::join!(watched, stalls.stall(&stalled, 2 * STALL));
        assert_eq!(state, TargetState::Up, "{text}: a target that the group needs was marked as failed");
        load.has_done(6).await;
        let objects = load.finish().await;
        stalls.rig.objects.extend(objects);
        stalls.rig.check("with only the needed members").await;
    }
}

/// The only copy with the newest change stalls before the other copy, which stalled earlier, has
/// received this change. Requests must wait for the copy that has all changes.
#[tokio::test]
async fn a_copy_that_was_slow_is_not_read_before_it_has_all_changes() {
    let mut stalls = Stalls::new("mirror:2", 1, config()).await;
    stalls.rig.fill(&[10_000]).await;
    let object = stalls.rig.pool.object("o10000").unwrap();
    stalls.stop(&[0]);
    let newer = data(12_000, 5);
    object.put(newer.clone()).await.unwrap();
    stalls.rig.objects[0].1 = newer;
    assert_eq!(stalls.state(0).await, TargetState::Slow);
    // The copy with the change stalls before the other copy has received the change.
    stalls.stop(&[1]);
    stalls.go_on(&[0]);
    let read = tokio::spawn({
        let object = stalls.rig.pool.object("o10000").unwrap();
        async move { object.get().await }
    });
    tokio::time::sleep(2 * STALL).await;
    assert!(
        !read.is_finished(),
        "a copy without the change was read: {:?}",
        read.await.unwrap().map(|b| b.len())
    );
    stalls.go_on(&[1]);
    assert!(read.await.unwrap().unwrap() == stalls.rig.objects[0].1);
    stalls.all_is_well().await;
    stalls.scrub().await;
}

#[tokio::test]
async fn a_target_is_used_again_automatically_once_its_io_errors_end() {
    // The pool loses as many targets as it tolerates, or all of them.
    for (text, lost) in [("ec:2+1", &[0][..]), ("ec:2+1", &[0, 1, 2]), ("mirror:2", &[0, 1])] {
        let mut stalls = Stalls::new(text, 2, config()).await;
        let load = Load::start(&stalls.rig.client, &stalls.rig.pool, 4).await;
        let fired = stalls.rig.node.fired();
        stalls.rig.set_down(lost, true);
        tokio::time::sleep(STALL).await;
        let states = [stalls.state(lost[0]).await, TargetState::Failing];
        stalls.rig.set_down(lost, false);
        assert_eq!(states[0], states[1], "{text} {lost:?}");
        assert!(stalls.rig.node.fired() > fired);
        load.has_done(8).await;
        stalls.rig.objects = load.finish().await;
        stalls.all_is_well().await;
        stalls.scrub().await;
    }
}

#[tokio::test]
async fn a_client_gets_a_transient_error_while_the_targets_are_probed() {
    let stalls = Stalls::new("mirror:2", 1, config()).await;
    stalls.rig.pool.object("o").unwrap().put("x").await.unwrap();
    stalls.stop(&stalls.all());
    let mut raw = Raw::connect(&stalls.rig.node.endpoint, None).await;
    let source = OpBytes::Embedded(Bytes::from_static(b"y"));
    let put = mutate("o", vec![Mutation::WriteFull(source)], Data::None);
    raw.send(wire::encode_request(&head(1), &put), Payload::default()).await;
    let reply = tokio::time::timeout(Duration::from_secs(30), raw.reply()).await.unwrap().unwrap();
    assert!(matches!(reply.result, Err(wire::Error::Unavailable(_))), "{:?}", reply.result);
    stalls.go_on(&stalls.all());
    stalls.all_is_well().await;
}

/// Changes one object at random and compares it with a model until `stop` is set. Returns the
/// object's name and its last content.
async fn change_at_random(pool: Pool, number: u64, seed: u64, stop: Arc<AtomicU64>) -> (String, Bytes) {
    let mut rng = StdRng::seed_from_u64(seed.wrapping_add(number));
    let name = format!("random{number}");
    let object = pool.object(&name).unwrap();
    let mut model: Option<Vec<u8>> = None;
    for step in 0.. {
        let bytes = data(rng.random_range(1..70_000), seed ^ (number << 32) ^ step);
        let old = model.clone().unwrap_or_default();
        let changed = match rng.random_range(0..5) {
            0 | 1 => {
                model = Some(bytes.to_vec());
                object.put(bytes).await
            }
            2 => {
                let at = rng.random_range(0..=old.len());
                let mut new = old;
                new.resize(new.len().max(at + bytes.len()), 0);
                new[at..at + bytes.len()].copy_from_slice(&bytes);
                model = Some(new);
                object.write(at as u64, bytes).await
            }
            3 if old.len() < 300_000 => {
                model = Some([&old[..], &bytes[..]].concat());
                object.append(bytes).await
            }
            _ if model.is_some() && stop.load(Ordering::SeqCst) == 0 => {
                model = None;
                object.remove().await
            }
            _ => {
                model = Some(bytes.to_vec());
                object.put(bytes).await
            }
        };
        changed.unwrap_or_else(|e| panic!("{name}, step {step}: {e}"));
        match &model {
            Some(model) => assert!(object.get().await.unwrap() == *model, "{name}, step {step}"),
            None => assert!(object.get().await.unwrap_err().is_not_found(), "{name}, step {step}"),
        }
        if stop.load(Ordering::SeqCst) > 0
            && let Some(model) = &model
        {
            return (name, model.clone().into());
        }
    }
    unreachable!("the steps are endless")
}

async fn stalls_at_random(text: &str) {
    let seed = seed();
    let mut rng = StdRng::seed_from_u64(seed);
    let mut stalls = Stalls::new(text, 2, config()).await;
    let stop = Arc::new(AtomicU64::new(0));
    let change =
        |number| tokio::spawn(change_at_random(stalls.rig.pool.clone(), number, seed, Arc::clone(&stop)));
    let clients: Vec<_> = (0..5).map(change).collect();
    for _ in 0..12 {
        // Some targets stall at a time, and sometimes all of them. They continue at different
        // times.
        let count = rng.random_range(1..=stalls.stores.len());
        let stopped = stalls.all().into_iter().choose_multiple(&mut rng, count);
        for &target in &stopped {
            stalls.stop(&[target]);
            if rng.random_bool(0.3) {
                stalls.rig.node.stores[target].end_session();
            }
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..50))).await;
        }
        tokio::time::sleep(STALL.mul_f64(rng.random_range(0.2..1.5))).await;
        for target in stopped {
            stalls.go_on(&[target]);
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..200))).await;
        }
    }
    assert!(stores_stalled(&stalls) > 0);
    stop.store(1, Ordering::SeqCst);
    for client in clients {
        let (name, bytes) = client.await.unwrap();
        stalls.rig.objects.push((name, bytes));
    }
    stalls.all_is_well().await;
    stalls.scrub().await;
}

#[tokio::test]
async fn random_stalls_lose_no_data_of_an_erasure_coded_pool() {
    stalls_at_random("ec:4+2").await;
}

#[tokio::test]
async fn random_stalls_lose_no_data_of_a_mirrored_pool() {
    stalls_at_random("mirror:3").await;
}

/// Calls in one placement group's collection hang on a target that answers all other calls. The
/// target must not be used before it answers calls in this collection again.
#[tokio::test]
async fn a_target_that_hangs_in_one_collection_stays_unused_until_it_answers() {
    for text in ["mirror:2", "ec:2+1"] {
        let mut stalls = Stalls::new(text, 2, config()).await;
        let load = Load::start(&stalls.rig.client, &stalls.rig.pool, 6).await;
        let collections = stalls.stores[0].inner.collections().await.unwrap();
        let group = collections.into_iter().find(|cid| cid.as_bytes().starts_with(b"P")).unwrap();
        stalls.stores[0].stop_in(group);
        let slow = async {
            while stalls.state(0).await != TargetState::Slow {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), slow).await.expect("the first calls stall");
        // If the target were used by mistake, this would happen after a pause of at most 200 ms.
        for _ in 0..10 {
            load.has_done(6).await;
            for _ in 0..40 {
                assert_eq!(stalls.state(0).await, TargetState::Slow, "{text}");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        assert!(stores_stalled(&stalls) > 0);
        stalls.go_on(&[0]);
        stalls.rig.objects = load.finish().await;
        stalls.all_is_well().await;
        stalls.scrub().await;
    }
}

/// A change that waits for space makes its group free overwritten data. The group cannot free data
/// while a target stalls.
#[tokio::test]
async fn a_change_without_space_is_refused_in_time_while_its_group_cannot_free_space() {
    let (target_timeout, store_patience) = (Duration::from_secs(45), Duration::from_secs(2));
    let config = OsdConfig { target_timeout, store_patience, ..config() };
    let stalls = Stalls::new("mirror:2", 1, config).await;
    let object = stalls.rig.pool.object("o").unwrap();
    for salt in 0..2 {
        object.put(data(10_000, salt)).await.unwrap();
    }
    let fired = stalls.rig.node.fired();
    stalls.rig.node.stores.iter().for_each(|store| store.set_full(u64::MAX));
    stalls.stop(&stalls.all());
    let put = object.put(data(10_000, 2));
    let put = tokio::time::timeout(Duration::from_secs(40), put)
        .await
        .expect("the put is answered before the group gives up");
    assert!(matches!(put, Err(client::Error::Node(client::NodeError::NoSpace { .. }))), "{put:?}");
    assert!(stalls.rig.node.fired() > fired && stores_stalled(&stalls) > 0);
    stalls.rig.node.stores.iter().for_each(|store| store.set_full(0));
    stalls.go_on(&stalls.all());
    assert!(object.get().await.unwrap() == data(10_000, 1));
}

/// A target does not answer any more, and does not fail either.
#[tokio::test]
async fn the_loss_of_a_target_that_never_answers_can_be_accepted() {
    let stalls = Stalls::new("ec:2+1", 1, config()).await;
    let rig = &stalls.rig;
    let [kept, changed] = ["kept", "changed"].map(|name| rig.pool.object(name).unwrap());
    for object in [&kept, &changed] {
        object.put(data(50_000, 1)).await.unwrap();
    }
    rig.set_down(&[2], true);
    changed.put(data(50_000, 2)).await.unwrap();
    stalls.stop(&[0]);
    rig.set_down(&[2], false);
    rig.client.set_target_out(2, false).await.unwrap();
    let read = async { kept.get().await };
    let forget = until("the group waits", async || rig.client.forget_target(0, true).await.is_ok());
    assert!(futures::future::join(read, forget).await.0.unwrap() == data(50_000, 1));
    assert!(changed.get().await.unwrap_err().is_not_found());
    stalls.go_on(&[0]);
    stalls.all_is_well().await;
    assert!(kept.get().await.unwrap() == data(50_000, 1));
    assert!(changed.get().await.unwrap_err().is_not_found());
}
