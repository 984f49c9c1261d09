//! Tests of targets on a simulated drive, in simulated time and on one thread.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::task::LocalSet;

use super::sim_drive::{DriveFault, DriveFaultKind, DriveTimes, SimDrive};
use super::store::{BlockStore, MkfsOptions, MountOptions};
use crate::conformance::{self, Workload, compare, oid, random_operations};
use crate::{MemStore, ObjectId, ObjectStore, Op, StoreCalls, StoreError, Transaction};

/// Runs a simulation, in a paused clock and with the given seed.
pub(super) fn simulate<T>(seed: u64, run: impl AsyncFnOnce() -> T) -> T {
    let _seeded = base::entropy::seed_this_thread(seed);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let tasks = LocalSet::new();
    runtime.block_on(tasks.run_until(run()))
}

fn drive(size: u64, seed: u64) -> Arc<SimDrive> {
    let drive = SimDrive::new(size, StdRng::seed_from_u64(seed), DriveTimes::default());
    let options =
        MkfsOptions { log_bytes: Some(size / 8), index_bytes: Some(size / 4), ..MkfsOptions::default() };
    drive.mkfs(&options).unwrap();
    drive
}

pub(super) fn options() -> MountOptions {
    MountOptions { cache_bytes: 2 << 20, buffer_bytes: 1 << 20, ..MountOptions::default() }
}

/// Returns a drive with a small target.
pub(super) fn small_drive(seed: u64) -> Arc<SimDrive> {
    let drive = SimDrive::new(32 << 20, StdRng::seed_from_u64(seed), DriveTimes::default());
    let (log_bytes, index_bytes) = (Some(512 << 10), Some(4 << 20));
    drive.mkfs(&MkfsOptions { log_bytes, index_bytes, ..MkfsOptions::default() }).unwrap();
    drive
}

/// Mounts the target of a drive and starts its driver.
pub(super) async fn mount(drive: &Arc<SimDrive>) -> Arc<BlockStore> {
    let (store, driver) = BlockStore::mount_simulated(drive, &options()).await.unwrap();
    base::task::spawn_local(base::thread::ThreadClass::Store, driver.run());
    store
}

#[test]
fn a_simulated_target_passes_the_conformance_suite() {
    let seed = conformance::seed();
    simulate(seed, async || {
        conformance::run(|| async { mount(&drive(64 << 20, seed)).await as Arc<dyn ObjectStore> }).await;
        let store = mount(&drive(64 << 20, seed)).await;
        random_operations(store.clone(), seed, 1000).await;
        store.umount().await.unwrap();
    });
}

/// A transaction that the model has accepted.
struct Queued {
    number: u64,
    transaction: Transaction,
    acknowledged: bool,
}

/// The transactions of a target, over several lives of its store.
struct History {
    /// The transactions that may have taken effect, in the order of the queue.
    queued: Vec<Queued>,
    last: u64,
    model: MemStore,
    workload: Workload,
}

/// The object in every collection that has the number of the collection's last transaction.
fn marker() -> ObjectId {
    oid("a-marker")
}

impl History {
    fn new(seed: u64) -> History {
        let (model, workload) = (MemStore::new(), Workload::new(seed));
        History { queued: Vec::new(), last: 0, model, workload }
    }

    /// Returns the number of the next transaction, the transaction, and whether it should succeed.
    async fn next(&mut self) -> (u64, Transaction, bool) {
        let mut transaction = self.workload.transaction();
        self.last += 1;
        let entries = vec![("last".into(), Bytes::copy_from_slice(&self.last.to_be_bytes()))];
        transaction.ops.push(Op::OmapSet { oid: marker(), entries });
        let succeeds = self.model.queue_transaction(transaction.clone()).await.is_ok();
        if succeeds {
            let queued = Queued { number: self.last, transaction: transaction.clone(), acknowledged: false };
            self.queued.push(queued);
        }
        (self.last, transaction, succeeds)
    }

    fn acknowledge(&mut self, number: u64) {
        if let Ok(at) = self.queued.binary_search_by_key(&number, |queued| queued.number) {
            self.queued[at].acknowledged = true;
        }
    }

    /// Checks that every collection has the state after one of its transactions, and that no
    /// acknowledged transaction is missing. Continues from that state.
    async fn check(&mut self, store: &dyn ObjectStore) {
        let mut found = BTreeMap::new();
        for c in store.collections().await.unwrap() {
            let last = store.omap_get(&c, &marker(), vec!["last".into()]).await.unwrap();
            found.insert(c, u64::from_be_bytes(last[0].1[..].try_into().unwrap()));
        }
        self.model = MemStore::new();
        for queued in std::mem::take(&mut self.queued) {
            let Queued { number, transaction, acknowledged } = &queued;
            if found.get(&transaction.collection).is_none_or(|last| last < number) {
                assert!(!acknowledged, "the acknowledged transaction {number} is lost");
                continue;
            }
            self.model.queue_transaction(transaction.clone()).await.unwrap();
            self.queued.push(Queued { acknowledged: true, ..queued });
        }
        compare(store, &self.model).await;
    }
}

/// Queues transactions, several at a time, until the store fails or the task is killed.
async fn work(store: &BlockStore, history: &mut History, rng: &mut StdRng) {
    let mut pending = VecDeque::new();
    for _ in 0..40 {
        let (number, transaction, succeeds) = history.next().await;
        pending.push_back((number, succeeds, store.queue_transaction(transaction)));
        if rng.random_bool(0.1) {
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..12))).await;
        }
        while pending.len() > rng.random_range(0..8) {
            let Some((number, succeeds, outcome)) = pending.pop_front() else { break };
            match outcome.await {
                Err(StoreError::Poisoned(_) | StoreError::Io(_) | StoreError::Corrupt { .. }) => return,
                outcome => {
                    assert_eq!(outcome.is_ok(), succeeds, "transaction {number}: {outcome:?}");
                    history.acknowledge(number);
                }
            }
        }
    }
    drop(pending);
    std::future::pending::<()>().await;
}

/// Runs one life of a store: mounts the target twice, works on it, and ends the store at a random
/// time. `faults` hit the first mount and the work.
/// Returns whether the target was mounted.
async fn life(
    drive: &Arc<SimDrive>,
    history: &mut History,
    rng: &mut StdRng,
    faults: Vec<DriveFault>,
    end: impl FnOnce(),
) -> bool {
    let mounted = Cell::new(false);
    let role = LocalSet::new();
    let duration = Duration::from_micros(rng.random_range(0..250_000));
    let body = async {
        let faulty = !faults.is_empty();
        faults.iter().cloned().for_each(|fault| drive.inject(fault));
        match BlockStore::mount_simulated(drive, &options()).await {
            Ok((store, driver)) => {
                base::task::spawn_local(base::thread::ThreadClass::Store, driver.run());
                drop(store);
            }
            Err(_) if faulty => {}
            Err(error) => panic!("the target cannot be mounted: {error}"),
        }
        drive.clear_faults();
        let store = mount(drive).await;
        history.check(&*store).await;
        mounted.set(true);
        faults.into_iter().for_each(|fault| drive.inject(fault));
        work(&store, history, rng).await;
        std::future::pending::<()>().await;
    };
    {
        let mut running = pin!(role.run_until(body));
        let ended = tokio::time::timeout(duration, &mut running).await;
        assert!(ended.is_err(), "the body of a life never ends");
        // From here on, destructors have no effect on the drive.
        end();
    }
    mounted.get()
}

#[derive(Debug, Default)]
struct Totals {
    mounts: u32,
    power_failures: u64,
    kills: u64,
    cut_off: u64,
    lost_sectors: u64,
    write_errors: u64,
    flush_errors: u64,
    stalls: u64,
}

/// Returns random faults that a store must survive without losing an acknowledged transaction.
fn random_faults(rng: &mut StdRng) -> Vec<DriveFault> {
    let late = Duration::from_millis(rng.random_range(1..60));
    let mut faults =
        vec![DriveFault { probability: 0.02, ..DriveFault::always(DriveFaultKind::Stall(late)) }];
    let after = rng.random_range(0..100);
    match rng.random_range(0..4u32) {
        0 => faults.push(DriveFault { after, ..DriveFault::once(DriveFaultKind::WriteError) }),
        1 => faults.push(DriveFault { after: after / 4, ..DriveFault::once(DriveFaultKind::FlushError) }),
        2 => faults.push(DriveFault { after: after / 4, ..DriveFault::always(DriveFaultKind::FlushError) }),
        _ => {}
    }
    faults
}

/// Runs several lives of a store with power failures and kills, and with failing requests if
/// `faulty` is set. Returns the hash of all events of the drive.
fn crashes(seed: u64, faulty: bool, totals: &mut Totals) -> u64 {
    simulate(seed, async || {
        let mut rng = StdRng::seed_from_u64(seed);
        let drive = small_drive(!seed);
        let mut history = History::new(seed);
        for _ in 0..5 {
            let fails = rng.random_bool(0.7);
            let faults = if faulty { random_faults(&mut rng) } else { Vec::new() };
            let end = || match fails {
                true => {
                    drive.power_failure();
                }
                false => drive.sever(),
            };
            totals.mounts += u32::from(life(&drive, &mut history, &mut rng, faults, end).await);
        }
        drive.clear_faults();
        let store = mount(&drive).await;
        history.check(&*store).await;
        store.umount().await.unwrap();
        let report = drive.fsck(&|_, _, _| None).unwrap();
        assert!(report.is_clean() && report.was_clean, "{report:?}");
        let counts = drive.counts();
        totals.power_failures += counts.power_failures;
        totals.kills += counts.severed;
        totals.lost_sectors += counts.lost_sectors;
        totals.write_errors += counts.write_errors;
        totals.flush_errors += counts.flush_errors;
        totals.stalls += counts.stalls;
        totals.cut_off += u64::from(counts.cut_off > 0);
        drive.trace()
    })
}

#[test]
fn kills_and_power_failures_lose_no_acknowledged_transaction() {
    let first = conformance::seed();
    let mut totals = Totals::default();
    for seed in (0..200).map(|n| first.wrapping_add(n)) {
        crashes(seed, false, &mut totals);
    }
    assert!(totals.power_failures > 200 && totals.kills > 100, "{totals:?}");
    assert!(totals.cut_off > 20, "crashes hit mounts and checkpoints: {totals:?}");
    assert!(totals.lost_sectors > 100 && totals.mounts > 500, "{totals:?}");
}

#[test]
fn failing_and_slow_requests_lose_no_acknowledged_transaction() {
    let first = conformance::seed();
    let mut totals = Totals::default();
    for n in 0..100 {
        crashes(first.wrapping_add(n), true, &mut totals);
    }
    assert!(totals.write_errors > 10 && totals.flush_errors > 20 && totals.stalls > 100, "{totals:?}");
    assert!(totals.power_failures > 100 && totals.kills > 50 && totals.mounts > 200, "{totals:?}");
}

#[test]
fn a_seed_repeats_all_events_of_a_drive() {
    let seed = conformance::seed();
    let trace = |seed| crashes(seed, true, &mut Totals::default());
    let traces: Vec<u64> = (0..10).map(|n| trace(seed.wrapping_add(n))).collect();
    for (n, first) in traces.iter().enumerate() {
        assert_eq!(*first, trace(seed.wrapping_add(n as u64)), "seed {seed} + {n}");
    }
    assert!(traces.windows(2).all(|pair| pair[0] != pair[1]), "seeds differ in their events");
}

/// Clients that fill a log of 1 MiB faster than checkpoints free it, because the drive is slow.
struct LogFillers {
    clients: u64,
    index_bytes: u64,
    /// Returns a change of an object.
    change: fn(ObjectId, u64) -> Op,
    /// Number of objects of each client.
    objects: u32,
}

/// Returns the number of acknowledged transactions in each twentieth of the time, and the longest time
/// without an acknowledgement after the first twentieth.
fn fill_the_log_for(time: Duration, fillers: LogFillers) -> (Vec<u32>, Duration) {
    let LogFillers { clients, index_bytes, change, objects } = fillers;
    simulate(1, async || {
        let slow = Duration::from_micros(500);
        let times =
            DriveTimes { write: slow, jitter: slow / 5, slow_probability: 0.0, ..DriveTimes::default() };
        let drive = SimDrive::new(64 << 20, StdRng::seed_from_u64(1), times);
        let (log_bytes, index_bytes) = (Some(1 << 20), Some(index_bytes));
        drive.mkfs(&MkfsOptions { log_bytes, index_bytes, ..MkfsOptions::default() }).unwrap();
        let store = mount(&drive).await;
        let made = Transaction::new(conformance::cid("c")).with(Op::CreateCollection);
        store.queue_transaction(made).await.unwrap();
        let begin = tokio::time::Instant::now();
        let acknowledged = std::rc::Rc::new(std::cell::RefCell::new(vec![begin]));
        let clients: Vec<_> = (0..clients)
            .map(|client| {
                let (store, acknowledged) = (Arc::clone(&store), std::rc::Rc::clone(&acknowledged));
                tokio::task::spawn_local(async move {
                    let mut rng = StdRng::seed_from_u64(client);
                    while begin.elapsed() < time {
                        let object = oid(&format!("{client}-{}", rng.random_range(0..objects)));
                        let changed = Transaction::new(conformance::cid("c")).with(change(object, client));
                        store.queue_transaction(changed).await.unwrap();
                        acknowledged.borrow_mut().push(tokio::time::Instant::now());
                    }
                })
            })
            .collect();
        for client in clients {
            client.await.unwrap();
        }
        store.umount().await.unwrap();
        let acknowledged = acknowledged.borrow();
        let mut counts = vec![0; 20];
        for at in acknowledged.iter().filter(|at| **at - begin < time) {
            counts[((*at - begin).as_nanos() * 20 / time.as_nanos()) as usize] += 1;
        }
        let later: Vec<_> = acknowledged.iter().filter(|at| **at - begin > time / 20).collect();
        let longest = later.windows(2).map(|pair| *pair[1] - *pair[0]).max().unwrap();
        (counts, longest)
    })
}

#[test]
fn transactions_slow_down_as_the_log_fills_but_do_not_stop() {
    let change = |oid: ObjectId, client: u64| {
        let entries = vec![(Bytes::from("note"), conformance::pattern(client, 1500))];
        Op::OmapSet { oid, entries }
    };
    let fillers = LogFillers { clients: 16, index_bytes: 16 << 20, change, objects: 200 };
    let (counts, longest) = fill_the_log_for(Duration::from_secs(4), fillers);
    let log_uses = counts.iter().sum::<u32>() * 1500 / (1 << 20);
    assert!(log_uses > 8, "the log of 1 MiB was filled {log_uses} times");
    // Without the throttle, all transactions wait up to 38 ms for the end of a checkpoint.
    assert!(longest < Duration::from_millis(15), "no transaction for {longest:?}: {counts:?}");
    let later = &counts[10..];
    let mean = later.iter().sum::<u32>() / later.len() as u32;
    assert!(later.iter().all(|count| *count > mean / 2), "{counts:?}");
}

/// The index is only twice as large as the log, as by default. The clients replace the attributes of
/// few objects, so the index does not grow.
#[test]
fn replaced_values_do_not_stop_transactions_for_lack_of_index_space() {
    let change = |oid: ObjectId, client: u64| {
        let xattrs = vec![(Bytes::from("note"), conformance::pattern(client, 150))];
        Op::SetXattrs { oid, xattrs }
    };
    let fillers = LogFillers { clients: 256, index_bytes: 2 << 20, change, objects: 4 };
    let (counts, longest) = fill_the_log_for(Duration::from_secs(4), fillers);
    let log_uses = counts.iter().sum::<u32>() * 200 / (1 << 20);
    assert!(log_uses > 3, "the log of 1 MiB was filled {log_uses} times");
    assert!(longest < Duration::from_millis(15), "no transaction for {longest:?}: {counts:?}");
}
