//! Writers and readers: tasks that make random calls. A group of writers shares a client and ends
//! together, like the threads of a client process.

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use client::{Client, Options};
use identity::Trust;
use messenger::StackChoice;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::sync::{RwLock, oneshot};

use crate::calls::CheckedPool;
use crate::expected::{ChangeStep, ExpectedObject, OmapGuard, StampedChange};
use crate::record::{RoundRecord, SharedLedger, locked};

/// Objects of a writer at a time.
const OBJECTS: usize = 6;
/// Maximum number of objects of a round. Objects are replaced when too many outcomes are unknown.
const OBJECTS_MAX: usize = 400;
/// Maximum size of an object, in bytes.
const SIZE_MAX: u64 = 4 << 20;
/// Average pause of a writer between two calls.
const PAUSE: Duration = Duration::from_millis(25);

/// The objects of one writer.
type WriterObjects = Arc<Mutex<Vec<SharedLedger>>>;

/// Client options for calls with a time limit.
fn options(trust: &Trust, request_timeout: Duration) -> Options {
    Options {
        trust: trust.clone(),
        connect_timeout: Duration::from_secs(5),
        request_timeout,
        stack: StackChoice::Paths(Vec::new()),
        ..Options::default()
    }
}

/// What a group of writers needs.
#[derive(Debug, Clone)]
pub struct WriterContext {
    /// Address of the relay.
    pub endpoint: String,
    /// The identity of the clients, and the node behind the relay.
    pub trust: Trust,
    /// The record of the round.
    pub record: Arc<RoundRecord>,
    /// Each call holds this lock for reading; the owner of the write lock pauses all calls.
    pub gate: Arc<RwLock<()>>,
}

/// A group of writers, which run on one thread.
#[derive(Debug)]
pub struct WriterGroup {
    context: WriterContext,
    request_timeout: Duration,
    seed: u64,
    objects: Vec<(usize, WriterObjects)>,
    lives: u64,
    running: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

impl WriterGroup {
    /// Creates a group of the writers with the given numbers, and starts it.
    pub fn start(
        context: WriterContext,
        writers: impl Iterator<Item = usize>,
        request_timeout: Duration,
        seed: u64,
    ) -> WriterGroup {
        let objects = writers.map(|writer| (writer, WriterObjects::default())).collect();
        let mut group = WriterGroup { context, request_timeout, seed, objects, lives: 0, running: None };
        group.run();
        group
    }

    fn run(&mut self) {
        self.lives += 1;
        let (kill, killed) = oneshot::channel();
        let (context, objects, timeout) = (self.context.clone(), self.objects.clone(), self.request_timeout);
        let seed = self.seed.wrapping_add(self.lives << 32);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let Ok(runtime) = runtime else { return };
            runtime.block_on(async {
                tokio::select! {
                    _ = killed => {}
                    () = write_all(context, objects, timeout, seed) => {}
                }
            });
            // Dropping the runtime closes the connection and tells the node nothing.
            runtime.shutdown_background();
        });
        self.running = Some((kill, thread));
    }

    /// Kills the client in the middle of its calls. Returns false if it had ended before.
    pub fn kill(&mut self) -> bool {
        let mut was_running = false;
        if let Some((kill, thread)) = self.running.take() {
            was_running = kill.send(()).is_ok();
            let _ = thread.join();
        }
        for (_, objects) in &self.objects {
            locked(objects).iter().for_each(|ledger| locked(ledger).abandon());
        }
        was_running
    }

    /// Kills the client, and starts another one that continues with the same objects. Returns false
    /// if the client had ended before.
    pub fn replace(&mut self) -> bool {
        let was_running = self.kill();
        self.run();
        was_running
    }

    /// Waits until the writers have ended after the end of the round. Kills them after `patience`.
    pub fn finish(&mut self, patience: Duration) {
        if let Some((_, thread)) = &self.running {
            crate::thrashed_node::wait(patience, || thread.is_finished());
        }
        self.kill();
    }
}

impl Drop for WriterGroup {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Connects, and repeats attempts until the node answers or the round ends.
pub async fn connect(
    endpoint: &str,
    trust: &Trust,
    timeout: Duration,
    record: &Arc<RoundRecord>,
) -> Option<CheckedPool> {
    while !record.is_over() {
        if let Ok(client) = Client::connect(endpoint, options(trust, timeout)).await {
            return CheckedPool::new(client, Arc::clone(record)).ok();
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    None
}

async fn write_all(
    context: WriterContext,
    objects: Vec<(usize, WriterObjects)>,
    timeout: Duration,
    seed: u64,
) {
    let Some(pool) = connect(&context.endpoint, &context.trust, timeout, &context.record).await else {
        return;
    };
    let writers = objects.into_iter().map(|(number, objects)| {
        let random = SmallRng::seed_from_u64(seed.wrapping_mul(31).wrapping_add(number as u64));
        let (pool, context) = (pool.clone(), context.clone());
        tokio::spawn(async move { write(pool, context, number, &objects, random).await })
    });
    let writers: Vec<_> = writers.collect();
    for writer in writers {
        let _ = writer.await;
    }
    pool.client().close().await;
}

async fn write(
    pool: CheckedPool,
    context: WriterContext,
    number: usize,
    objects: &WriterObjects,
    mut random: SmallRng,
) {
    let record = &context.record;
    while !record.is_over() {
        {
            let _open = context.gate.read().await;
            let slot = random.random_range(0..OBJECTS);
            let ledger = object_in(objects, slot, record, number);
            let (retired, state) = {
                let ledger = locked(&ledger);
                (ledger.is_retired(), ledger.likely_state())
            };
            if retired || random.random_range(0..4) == 0 {
                pool.check(&ledger).await;
            } else {
                let change = random_change(record.next_change(), state.as_deref(), &mut random);
                pool.change(&ledger, change).await;
            }
        }
        tokio::time::sleep(PAUSE.mul_f64(random.random_range(0.0..2.0))).await;
    }
}

/// Returns the object in a slot of a writer. Replaces an object that is not changed any more.
fn object_in(objects: &WriterObjects, slot: usize, record: &RoundRecord, number: usize) -> SharedLedger {
    let mut objects = locked(objects);
    while objects.len() <= slot {
        objects.push(record.new_object(number));
    }
    if locked(&objects[slot]).is_retired() && record.ledgers().len() < OBJECTS_MAX {
        objects[slot] = record.new_object(number);
    }
    Arc::clone(&objects[slot])
}

/// Reads random objects of all writers until the round ends.
pub async fn read_all(pool: CheckedPool, context: WriterContext, seed: u64) {
    let mut random = SmallRng::seed_from_u64(seed);
    while !context.record.is_over() {
        {
            let _open = context.gate.read().await;
            let ledgers = context.record.ledgers();
            if !ledgers.is_empty() {
                pool.read(&ledgers[random.random_range(0..ledgers.len())]).await;
            }
        }
        tokio::time::sleep(PAUSE.mul_f64(random.random_range(0.0..4.0))).await;
    }
}

/// Returns the length of new data.
fn random_len(random: &mut SmallRng) -> u64 {
    match random.random_range(0..100) {
        0..40 => random.random_range(1..4096),
        40..75 => random.random_range(4096..65_536),
        75..97 => random.random_range(65_536..300_000),
        _ => random.random_range(2_000_000..3_500_000),
    }
}

/// Returns a random change of an object.
fn random_change(id: u64, state: Option<&ExpectedObject>, random: &mut SmallRng) -> StampedChange {
    let size = state.map_or(0, ExpectedObject::size);
    let plain = |steps| StampedChange { id, guard: None, steps };
    let len = random_len(random);
    let offset = random.random_range(0..=size.min(SIZE_MAX / 2));
    if state.is_none() {
        return match random.random_range(0..4) {
            0 => counted(id, None, random),
            1 => plain(vec![ChangeStep::Append { len: len.min(1 << 20) }]),
            2 => plain(vec![ChangeStep::Write { offset: random.random_range(0..100_000), len }]),
            _ => plain(vec![ChangeStep::Replace { len }]),
        };
    }
    if size > SIZE_MAX {
        return plain(vec![ChangeStep::Truncate { size: offset / 8 }]);
    }
    let xattr = |name: u64| ChangeStep::SetXattr { name: format!("x{name}"), value: format!("change {id}") };
    let key = |n: u64| format!("k{n}");
    match random.random_range(0..22) {
        0 | 1 => plain(vec![ChangeStep::Replace { len }]),
        2..5 => plain(vec![ChangeStep::Write { offset, len }]),
        5..9 => plain(vec![ChangeStep::Append { len: len.min(1 << 20) }]),
        9 => plain(vec![ChangeStep::Truncate { size: random.random_range(0..=size + 10_000) }]),
        10 => plain(vec![ChangeStep::Zero { offset, len: len.min(200_000) }]),
        11..15 => counted(id, state, random),
        15 => plain(vec![xattr(random.random_range(0..4))]),
        16 => plain(vec![ChangeStep::RemoveXattr { name: format!("x{}", random.random_range(0..4)) }]),
        17 => {
            let keys = [random.random_range(0..5), random.random_range(5..10)];
            plain(vec![ChangeStep::SetOmap {
                entries: keys.map(|n| (key(n), format!("change {id}"))).to_vec(),
            }])
        }
        18 => plain(vec![
            ChangeStep::RemoveOmap { keys: vec![key(random.random_range(0..10))] },
            ChangeStep::Truncate { size: offset },
            ChangeStep::Append { len: len.min(60_000) },
            xattr(random.random_range(0..4)),
        ]),
        19 => plain(vec![ChangeStep::Remove, ChangeStep::Append { len: len.min(60_000) }, xattr(0)]),
        20 => plain(vec![
            ChangeStep::Write { offset, len: len.min(30_000) },
            ChangeStep::Append { len: len.min(20_000) },
            ChangeStep::SetOmap { entries: vec![(key(0), format!("change {id}"))] },
        ]),
        _ => plain(vec![ChangeStep::Remove]),
    }
}

/// Returns a compound that increases a counter in the omap if it has the expected value, and appends
/// a record.
fn counted(id: u64, state: Option<&ExpectedObject>, random: &mut SmallRng) -> StampedChange {
    let value = state.and_then(|state| state.omap.get("count")).cloned();
    let next = value.as_ref().and_then(|value| value.parse::<u64>().ok()).unwrap_or(0) + 1;
    StampedChange {
        id,
        guard: Some(OmapGuard { key: "count".to_owned(), value }),
        steps: vec![
            ChangeStep::Append { len: random.random_range(1..3000) },
            ChangeStep::SetOmap { entries: vec![("count".to_owned(), next.to_string())] },
            ChangeStep::SetXattr { name: "counted-by".to_owned(), value: format!("change {id}") },
        ],
    }
}
