//! Tests of power failures, damage and drive failures on a simulated drive, which contains every
//! byte that the store persists.

use std::sync::Arc;

use base::block::Payload;
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::drive::Drive;
use super::fsck::check;
use super::index::ALWAYS_IN_STEPS;
use super::recovery::{TargetSizes, mkfs};
use super::sim::{Crashes, RecordedDrive, SimStore};
use super::superblock::Superblock;
use crate::conformance::{self, Workload, random_operations, seed};
use crate::{CollectionId, MemStore, ObjectStore, Op, StoreCalls, StoreError, Transaction, WriteSource};

const SIZE: usize = 12 << 20;

fn sizes() -> TargetSizes {
    TargetSizes { uuid: None, log_bytes: Some(1 << 20), index_bytes: Some(4 << 20) }
}

fn fresh() -> Vec<u8> {
    let drive = RecordedDrive::new(vec![0xa5; SIZE]);
    let shared: Arc<dyn Drive> = drive.clone();
    mkfs(&shared, &sizes(), &mut |_, _| {}).unwrap();
    drive.image()
}

fn run<T>(future: impl Future<Output = T>) -> T {
    futures::executor::block_on(future)
}

/// Returns the factor for the number of test rounds, from the environment variable
/// `OUTBOARD_CRASH_FACTOR`; 1 by default.
fn factor() -> usize {
    std::env::var("OUTBOARD_CRASH_FACTOR").ok().and_then(|f| f.parse().ok()).unwrap_or(1)
}

/// Returns a hash of the whole content of a store. Fails if a block does not match its checksum.
async fn digest(store: &dyn ObjectStore) -> Result<u64, StoreError> {
    digest_of(store, &store.collections().await?).await
}

/// Returns a hash of the content of these collections.
pub(super) async fn digest_of(
    store: &dyn ObjectStore,
    collections: &[CollectionId],
) -> Result<u64, StoreError> {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hash = DefaultHasher::new();
    for c in collections {
        c.hash(&mut hash);
        for o in store.list(c, None, usize::MAX).await?.0 {
            let read = store.read(c, &o, 0, 1 << 30, None).await?;
            read.verify().map_err(|e| StoreError::Corrupt { what: o.to_string(), detail: e.to_string() })?;
            (&o, read.object_size, &read.checksums).hash(&mut hash);
            store.stat(c, &o).await?.allocated.hash(&mut hash);
            store.get_xattrs(c, &o).await?.hash(&mut hash);
            store.omap_get_header(c, &o).await?.hash(&mut hash);
            store.omap_iterate(c, &o, Bytes::new(), usize::MAX).await?.0.hash(&mut hash);
        }
    }
    Ok(hash.finish())
}

#[test]
fn a_store_on_a_simulated_drive_passes_the_conformance_suite() {
    let big = || {
        let drive = RecordedDrive::new(vec![0; 48 << 20]);
        let shared: Arc<dyn Drive> = drive.clone();
        let sizes = TargetSizes { uuid: None, log_bytes: Some(9 << 20), index_bytes: Some(16 << 20) };
        mkfs(&shared, &sizes, &mut |_, _| {}).unwrap();
        drive
    };
    let seed = seed();
    run(conformance::run(|| async {
        Arc::new(SimStore::mount(&big(), seed).unwrap()) as Arc<dyn ObjectStore>
    }));
    let drive = big();
    run(random_operations(Arc::new(SimStore::mount(&drive, seed).unwrap()), seed, 400));
}

/// A workload that has run: the states of the target, and the positions in the drive's history at
/// which transactions were acknowledged.
struct Story {
    drive: Arc<RecordedDrive>,
    start: Vec<u8>,
    /// Digest of the target's content before the workload and after each applied transaction.
    states: Vec<u64>,
    /// For each acknowledged transaction: the number of transactions that were applied up to it,
    /// and the drive's position when it was acknowledged.
    acknowledged: Vec<(usize, usize)>,
    /// For each applied transaction: the drive's position when it was queued, and the number of
    /// transactions applied up to it.
    applied: Vec<(usize, usize)>,
    /// Number of checkpoints during the workload.
    checkpoints: u64,
}

/// How a workload ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Unmounted,
    /// The store becomes idle, and the log records that the whole log was flushed.
    Idle,
    /// The workload stops while transactions are in progress.
    Cut,
}

fn tell(start: Vec<u8>, seed: u64, transactions: usize, end: End) -> Story {
    let drive = RecordedDrive::new(start.clone());
    let store = SimStore::mount(&drive, seed).unwrap();
    let model = MemStore::new();
    let mut workload = Workload::new(seed);
    let mut story = Story {
        drive: drive.clone(),
        start,
        states: Vec::new(),
        acknowledged: Vec::new(),
        applied: Vec::new(),
        checkpoints: 0,
    };
    let first = store.lock().checkpoints();
    story.states.push(run(digest(&model)).unwrap());
    let mut waiting: Vec<(usize, _)> = Vec::new();
    for _ in 0..transactions {
        let (mut transaction, mut twin) = (workload.transaction(), None);
        let mut stages = None;
        if workload.rng().random_bool(0.3) {
            let data =
                Payload::compute(0, conformance::pattern(seed, workload.rng().random_range(1..100_000)));
            let len = data.len() as u64;
            let ours = run(store.stage(len));
            let theirs = run(model.stage(len)).unwrap();
            if let Ok(ours) = ours {
                run(model.stage_write(theirs, 0, data.clone())).unwrap();
                // Do not wait for this write, because the transaction waits for it.
                drop(store.stage_write(ours, 0, data));
                let op = |stage| Op::Write {
                    oid: conformance::oid("o1"),
                    offset: 0,
                    source: WriteSource::Staged { stage, offset: 0, len },
                };
                twin = Some(transaction.clone().with(op(theirs)));
                transaction.ops.push(op(ours));
                stages = Some((ours, theirs));
            }
        }
        let expected = run(model.queue_transaction(twin.unwrap_or_else(|| transaction.clone())));
        let position = drive.position();
        let future = store.queue_transaction(transaction);
        if let Some((ours, theirs)) = stages {
            store.stage_release(ours);
            model.stage_release(theirs);
        }
        store.settle_queue();
        if expected.is_ok() {
            story.applied.push((position, story.states.len()));
            story.states.push(run(digest(&model)).unwrap());
        }
        waiting.push((story.states.len() - 1, Box::pin(future)));
        if workload.rng().random_bool(0.1) {
            store.lock().request_checkpoint();
        }
        for _ in 0..workload.rng().random_range(0..12) {
            store.lock().step();
        }
        // Wait for only some of the transactions, so that a simulated crash can lose the others.
        waiting.retain_mut(|(applied, future)| {
            if workload.rng().random_bool(0.7) {
                return true;
            }
            if run(future.as_mut()).is_ok() {
                story.acknowledged.push((*applied, drive.position()));
            }
            false
        });
    }
    story.checkpoints = store.lock().checkpoints() - first;
    if end != End::Cut {
        while store.lock().step() {}
        if end == End::Unmounted {
            run(store.umount()).unwrap();
        }
        story.acknowledged.push((story.states.len() - 1, drive.position()));
    }
    story
}

#[test]
fn a_crash_keeps_all_acknowledged_transactions_and_a_prefix_of_the_others() {
    crash(seed());
}

#[test]
fn a_crash_while_a_checkpoint_runs_in_steps_keeps_a_prefix_of_the_transactions() {
    ALWAYS_IN_STEPS.set(true);
    crash(seed());
    ALWAYS_IN_STEPS.set(false);
}

fn crash(seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let (mut torn, mut checkpoints) = (0, 0);
    for round in 0..3 * factor() as u64 {
        let end = if (seed ^ round) & 1 == 0 { End::Unmounted } else { End::Cut };
        let story = tell(fresh(), seed.wrapping_add(round), 120, end);
        checkpoints += story.checkpoints;
        let mut points = story.drive.flush_boundaries();
        points.extend((0..100).map(|_| rng.random_range(0..=story.drive.position())));
        points.sort_unstable();
        let mut crashes = Crashes::new(&story.drive, story.start.clone());
        for position in points {
            let image = crashes.image(position, &mut rng);
            torn += usize::from(check_crash(&story, position, image));
        }
    }
    assert!(torn > 10, "more than 10 crashes lose unacknowledged transactions ({torn})");
    assert!(checkpoints > 10, "the workloads include more than 10 checkpoints ({checkpoints})");
}

/// Checks the target after one crash. Returns whether the crash lost transactions. Only
/// unacknowledged transactions may be lost.
fn check_crash(story: &Story, position: usize, image: Vec<u8>) -> bool {
    let least =
        story.acknowledged.iter().filter(|(_, at)| *at <= position).map(|(n, _)| *n).max().unwrap_or(0);
    let most = story.applied.iter().filter(|(at, _)| *at <= position).map(|(_, n)| *n).max().unwrap_or(0);
    let drive = RecordedDrive::new(image);
    let shared: Arc<dyn Drive> = drive.clone();
    let report = check(&shared, false, &|_, _, _| None, &mut |_, _| {}).unwrap();
    assert!(report.is_clean(), "fsck after a crash at {position}: {report:#?}");
    let store =
        SimStore::mount(&drive, 1).unwrap_or_else(|e| panic!("mount after a crash at {position}: {e}"));
    let found = run(digest(&store)).unwrap_or_else(|e| panic!("after a crash at {position}: {e}"));
    let prefix = story.states.iter().rposition(|s| *s == found);
    let fits = story.states[least..=most.max(least)].contains(&found);
    assert!(fits, "after a crash at {position}, the state is number {prefix:?}, expected {least}..={most}");
    // What the mount has found must survive another crash, with the changes since.
    let changed = disturb(&store);
    let again = SimStore::mount(&RecordedDrive::new(drive.image()), 1)
        .unwrap_or_else(|e| panic!("second mount after a crash at {position}: {e}"));
    let found_again = run(digest(&again)).unwrap_or_else(|e| panic!("after crashes from {position}: {e}"));
    assert_eq!(found_again, changed, "after crashes at {position} and after the mount");
    story.states[most] != found
}

/// Removes and creates objects. Runs no checkpoint, unless the store needs one. Returns the digest of
/// the result.
fn disturb(store: &SimStore) -> u64 {
    for cid in run(store.collections()).unwrap() {
        let (objects, _) = run(store.list(&cid, None, 100)).unwrap();
        let mut transactions: Vec<_> = objects
            .into_iter()
            .step_by(2)
            .map(|oid| Transaction::new(cid.clone()).with(Op::Remove { oid }))
            .collect();
        let new = conformance::write(&conformance::oid("new"), 0, conformance::pattern(7, 9000));
        transactions.push(Transaction::new(cid.clone()).with(new));
        for transaction in transactions {
            let mut done = std::pin::pin!(store.queue_transaction(transaction));
            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
            while store.lock().step_without_checkpoints() {}
            if done.as_mut().poll(&mut cx).is_pending() {
                run(done).unwrap();
            }
        }
    }
    run(digest(store)).unwrap()
}

/// Flips one bit of a target. Returns the position of the bit's byte on the drive. Also returns the
/// digest of the damaged target's content, or the error of the mount or of a read.
fn flip(image: Vec<u8>, rng: &mut StdRng) -> (usize, Result<u64, StoreError>) {
    // A third of the flips hits any byte, a third hits the first part of the drive, where log and
    // index are, and a third hits bytes that are not zero.
    let byte = match rng.random_range(0..3) {
        0 => rng.random_range(0..SIZE),
        1 => rng.random_range(0..6 << 20),
        _ => loop {
            let byte = rng.random_range(0..SIZE);
            if image[byte] != 0 {
                break byte;
            }
        },
    };
    let drive = RecordedDrive::new(image);
    drive.flip_bit(8 * byte + rng.random_range(0..8));
    (byte, SimStore::mount(&drive, 1).and_then(|store| run(digest(&store))))
}

#[test]
fn a_flipped_bit_after_a_crash_loses_only_data_not_recorded_as_flushed() {
    let seed = seed();
    let mut rng = StdRng::seed_from_u64(seed);
    let story = tell(fresh(), seed, 80, End::Cut);
    let image = Crashes::new(&story.drive, story.start.clone()).image(story.drive.position(), &mut rng);
    let data = Superblock::read(RecordedDrive::new(image.clone()).as_ref()).unwrap().data.offset as usize;
    let least = story.acknowledged.iter().map(|(n, _)| *n).max().unwrap_or(0);
    let (mut reported, mut harmless) = (0, 0);
    for i in 0..125 * factor() {
        let (byte, outcome) = flip(image.clone(), &mut rng);
        match outcome {
            Err(StoreError::Corrupt { .. } | StoreError::NotATarget(_)) => reported += 1,
            Err(other) => panic!("flip {i}: {other}"),
            Ok(found) => {
                assert!(
                    story.states.contains(&found),
                    "after flip {i} of byte {byte}, the content matches no state of the workload"
                );
                let whole = story.states[least..].contains(&found);
                assert!(whole || byte >= data, "flip {i} of byte {byte} lost an acknowledged change");
                harmless += usize::from(whole);
            }
        }
    }
    assert!(reported > 0 && harmless > 5, "{reported} reported, {harmless} harmless");
}

#[test]
fn a_flipped_bit_in_flushed_data_is_reported_or_harmless() {
    let seed = seed();
    let mut rng = StdRng::seed_from_u64(seed);
    let story = tell(fresh(), seed, 80, End::Unmounted);
    let right = *story.states.last().unwrap();
    // If the log does not record that data was flushed, a flipped bit cannot be distinguished from
    // a torn write. The test before this one covers this case.
    let crashed = tell(fresh(), !seed, 80, End::Idle);
    let mut crashes = Crashes::new(&crashed.drive, crashed.start.clone());
    let unclean = crashes.image(crashed.drive.position(), &mut rng);
    let (mut reported, mut harmless) = (0, 0);
    for i in 0..250 * factor() {
        let clean = i % 2 == 0;
        let (_, outcome) = flip(if clean { story.drive.image() } else { unclean.clone() }, &mut rng);
        match outcome {
            Err(StoreError::Corrupt { .. } | StoreError::NotATarget(_)) => reported += 1,
            Err(other) => panic!("flip {i}: {other}"),
            Ok(found) if clean => {
                assert_eq!(found, right, "flip {i} changed the content that is read");
                harmless += 1;
            }
            Ok(found) => {
                let least = crashed.acknowledged.iter().map(|(n, _)| *n).max().unwrap_or(0);
                assert!(crashed.states[least..].contains(&found), "flip {i} lost an acknowledged change");
                harmless += 1;
            }
        }
    }
    assert!(reported > 5 && harmless > 5, "{reported} reported, {harmless} harmless");
}

#[test]
fn a_failing_drive_poisons_the_target_and_loses_no_acknowledged_change() {
    let seed = seed();
    for round in 0..20 {
        let drive = RecordedDrive::new(fresh());
        let store = SimStore::mount(&drive, seed).unwrap();
        let model = MemStore::new();
        let mut workload = Workload::new(seed.wrapping_add(round));
        drive.fail_after(round * 3);
        let mut states = vec![run(digest(&model)).unwrap()];
        let mut durable = 0;
        for _ in 0..1000 {
            let transaction = workload.transaction();
            match run(store.queue_transaction(transaction.clone())) {
                Ok(()) => {
                    run(model.queue_transaction(transaction)).unwrap();
                    states.push(run(digest(&model)).unwrap());
                    durable = states.len() - 1;
                }
                Err(StoreError::Poisoned(_)) => {
                    if run(model.queue_transaction(transaction)).is_ok() {
                        states.push(run(digest(&model)).unwrap());
                    }
                    break;
                }
                Err(_) => {}
            }
        }
        assert!(drive.failures() > 0, "a fault was injected");
        let refused = run(store.queue_transaction(crate::Transaction::new(conformance::cid("c0"))));
        assert!(matches!(refused, Err(StoreError::Poisoned(_))), "{refused:?}");
        assert!(matches!(run(store.umount()), Err(StoreError::Poisoned(_))));
        let again = SimStore::mount(&RecordedDrive::new(drive.image()), seed).unwrap();
        let found = run(digest(&again)).unwrap();
        let prefix = states.iter().rposition(|s| *s == found);
        assert!(
            states[durable..].contains(&found),
            "round {round}: the content is state {prefix:?} of {}, but state {durable} is durable",
            states.len()
        );
    }
}

/// Mounts a target and creates collections `c` and `d`, each with an empty object `o1`.
fn small_target(image: Vec<u8>) -> (Arc<RecordedDrive>, SimStore) {
    let drive = RecordedDrive::new(image);
    let store = SimStore::mount(&drive, seed()).unwrap();
    for c in ["c", "d"] {
        let made = Transaction::new(conformance::cid(c)).with(Op::CreateCollection);
        run(store.queue_transaction(made.with(Op::Touch { oid: conformance::oid("o1") }))).unwrap();
    }
    (drive, store)
}

fn set_omap(key: &str, len: usize) -> Transaction {
    let entries = vec![(Bytes::copy_from_slice(key.as_bytes()), conformance::pattern(1, len))];
    Transaction::new(conformance::cid("c")).with(Op::OmapSet { oid: conformance::oid("o1"), entries })
}

#[test]
fn a_poisoned_target_does_not_return_changes_that_are_not_durable() {
    let (drive, store) = small_target(fresh());
    drive.fail_after(0);
    let lost = run(store.queue_transaction(set_omap("k", 10)));
    assert!(matches!(lost, Err(StoreError::Poisoned(_))) && drive.failures() > 0, "{lost:?}");
    let read = |c| run(store.omap_iterate(&conformance::cid(c), &conformance::oid("o1"), Bytes::new(), 9));
    assert!(matches!(read("c"), Err(StoreError::Poisoned(_))), "{:?}", read("c"));
    assert_eq!(read("d"), Ok((vec![], false)), "durable changes can be read");
}

#[test]
fn one_failed_write_or_flush_of_a_checkpoint_poisons_the_target() {
    let mut fired = 0;
    for after in 0.. {
        let (drive, store) = small_target(fresh());
        while store.lock().step() {}
        drive.fail_once_after(after);
        let ended = run(store.umount());
        if drive.failures() == 0 {
            ended.unwrap();
            break;
        }
        fired += 1;
        assert!(matches!(ended, Err(StoreError::Poisoned(_))), "failure {after}: {ended:?}");
    }
    assert!(fired > 5, "{fired} faults fired");
}

/// Mounts the target of `image` on a drive that fails one write or flush, after `after` successful
/// writes and flushes. Returns the drive and whether the fault was injected. A mount that makes at
/// most `after` such requests does not meet the fault. A mount succeeds despite the fault if only
/// the closing of the index fails.
fn mount_with_fault(image: Vec<u8>, after: u64) -> (Arc<RecordedDrive>, bool) {
    let drive = RecordedDrive::new(image);
    drive.fail_once_after(after);
    let failed = SimStore::mount(&drive, 1).err();
    let fired = drive.failures() > 0;
    assert!(failed.is_none() || fired, "request {after}: {failed:?}");
    (drive, fired)
}

#[test]
fn a_target_can_be_mounted_after_any_two_failed_mounts() {
    let story = tell(fresh(), seed(), 10, End::Cut);
    let start = story.drive.image();
    let acknowledged = story.acknowledged.last().map_or(0, |(transactions, _)| *transactions);
    let expected = run(digest(&SimStore::mount(&RecordedDrive::new(start.clone()), 1).unwrap())).unwrap();
    // The drive may lack transactions that were in progress.
    assert!(story.states[acknowledged..].contains(&expected), "{acknowledged} transactions are acknowledged");
    let mut pairs = 0;
    for first in 0.. {
        let (drive, fired) = mount_with_fault(start.clone(), first);
        if !fired {
            break;
        }
        for second in 0.. {
            let (drive, fired) = mount_with_fault(drive.image(), second);
            let store = SimStore::mount(&RecordedDrive::new(drive.image()), 1)
                .unwrap_or_else(|e| panic!("requests {first} and {second} failed: {e}"));
            assert_eq!(run(digest(&store)).unwrap(), expected, "requests {first} and {second}");
            pairs += 1;
            if !fired {
                break;
            }
        }
    }
    assert!(pairs > 25, "{pairs} pairs of faults");
}

#[test]
fn a_failed_target_still_reports_its_failure_after_an_unmount() {
    let (drive, store) = small_target(fresh());
    drive.fail_after(0);
    let lost = run(store.queue_transaction(set_omap("k", 10)));
    assert!(matches!(lost, Err(StoreError::Poisoned(_))) && drive.failures() > 0, "{lost:?}");
    assert!(matches!(run(store.umount()), Err(StoreError::Poisoned(_))));
    let read = run(store.omap_iterate(&conformance::cid("d"), &conformance::oid("o1"), Bytes::new(), 9));
    assert!(matches!(read, Err(StoreError::Poisoned(_))), "{read:?}");
}

#[test]
fn transactions_continue_after_the_log_filled_up_during_a_checkpoint() {
    let drive = RecordedDrive::new(vec![0; 32 << 20]);
    let shared: Arc<dyn Drive> = drive.clone();
    let sizes = TargetSizes { index_bytes: Some(16 << 20), ..sizes() };
    mkfs(&shared, &sizes, &mut |_, _| {}).unwrap();
    let (_, store) = small_target(drive.image());
    let before = store.lock().checkpoints();
    store.lock().request_checkpoint();
    let queued: Vec<_> =
        (0..30).map(|i| store.queue_transaction(set_omap(&format!("k{i}"), 100_000))).collect();
    while store.lock().step_without_checkpoints() {}
    assert_eq!(store.lock().checkpoints(), before, "the checkpoint has not ended yet");
    queued.into_iter().for_each(|done| run(done).unwrap());
    assert!(store.lock().checkpoints() > before + 1, "the log filled up and needed another checkpoint");
}

#[test]
fn a_repair_corrects_the_bitmap_and_the_reference_counts() {
    let story = tell(fresh(), seed(), 80, End::Unmounted);
    let drive = RecordedDrive::new(story.drive.image());
    let shared: Arc<dyn Drive> = drive.clone();
    super::recovery::spoil_for_test(&shared);
    let found = check(&shared, false, &|_, _, _| None, &mut |_, _| {}).unwrap();
    assert!(found.leaked_blocks > 0 && !found.is_clean(), "{found:?}");
    let repaired = check(&shared, true, &|_, _, _| None, &mut |_, _| {}).unwrap();
    assert!(repaired.is_clean() && repaired.repaired_count > 0, "{repaired:?}");
    let after = check(&shared, false, &|_, _, _| None, &mut |_, _| {}).unwrap();
    assert_eq!((after.is_clean(), after.problem_count), (true, 0), "{after:?}");
    let store = SimStore::mount(&drive, 1).unwrap();
    assert_eq!(run(digest(&store)).unwrap(), *story.states.last().unwrap());
}
