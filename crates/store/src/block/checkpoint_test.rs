//! Tests of slow or hanging checkpoints while calls wait for them.

use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use std::{io, thread};

use base::clock::Instant;

use super::drive::{Drive, FileDrive};
use super::{BlockStore, CheckpointWatch, DriveCalls, MkfsOptions, MountOptions};
use crate::conformance::{cid, oid, pattern};
use crate::{Op, StoreCalls, Transaction};

/// Maximum time to wait for an expected event, long enough for a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A drive whose blocking writes wait until the test allows them.
#[derive(Debug)]
struct GatedDrive {
    inner: FileDrive,
    /// Number of further writes that the test allows.
    passes: Mutex<u64>,
    changed: Condvar,
}

impl GatedDrive {
    fn set(&self, passes: u64) {
        *self.passes.lock().unwrap() = passes;
        self.changed.notify_all();
    }
}

impl Drive for GatedDrive {
    fn size(&self) -> u64 {
        self.inner.size()
    }
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.inner.read_at(offset, out)
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let passes = self.passes.lock().unwrap();
        *self.changed.wait_while(passes, |passes| *passes == 0).unwrap() -= 1;
        self.inner.write_at(offset, data)
    }
    fn flush(&self) -> io::Result<()> {
        self.inner.flush()
    }
}

fn made(dir: &Path) -> std::path::PathBuf {
    let path = dir.join("target");
    let (log_bytes, index_bytes) = (Some(1 << 20), Some(8 << 20));
    let options = MkfsOptions { size: Some(32 << 20), log_bytes, index_bytes, ..MkfsOptions::default() };
    BlockStore::mkfs(&path, &options, |_, _| {}).unwrap();
    path
}

fn until<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < deadline, "timed out waiting until {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Whether calls wait for a checkpoint, and this checkpoint makes no progress for 200 ms.
fn stands_still(watch: &CheckpointWatch) -> bool {
    let before = watch.awaited();
    thread::sleep(Duration::from_millis(200));
    before.is_some() && watch.awaited() == before
}

#[test]
fn the_checkpoint_watch_tells_whether_an_awaited_checkpoint_makes_progress() {
    let dir = tempfile::tempdir().unwrap();
    let path = made(dir.path());
    let file = FileDrive::open(&path, None).unwrap();
    let gate = GatedDrive { inner: file.clone(), passes: Mutex::new(u64::MAX), changed: Condvar::new() };
    let gate = Arc::new(gate);
    let drive = Arc::clone(&gate) as Arc<dyn Drive>;
    let (store, driver) = BlockStore::prepare_on(file, drive, &path, &MountOptions::default()).unwrap();
    let driving = thread::spawn(move || driver.run_alone());
    let watch = store.checkpoint_watch();
    assert_eq!((watch.awaited(), watch.thread().as_str()), (None, "store-ckpt0"));

    gate.set(0);
    let c = cid("c");
    let mut written = vec![store.queue_transaction(Transaction::new(c.clone()).with(Op::CreateCollection))];
    for n in 0..200u64 {
        let entries = vec![(bytes::Bytes::from(format!("k{n:04}")), pattern(n, 16 << 10))];
        let note = Op::OmapSet { oid: oid("o"), entries };
        written.push(store.queue_transaction(Transaction::new(c.clone()).with(note)));
    }
    until("calls wait for the checkpoint", || watch.awaited().filter(|_| stands_still(&watch)));
    for _ in 0..3 {
        let before = watch.awaited();
        gate.set(1);
        until("the checkpoint makes progress", || (watch.awaited() > before).then_some(()));
    }
    gate.set(u64::MAX);
    written.into_iter().for_each(|written| futures::executor::block_on(written).unwrap());
    until("no call waits for a checkpoint", || watch.awaited().is_none().then_some(()));
    futures::executor::block_on(store.umount()).unwrap();
    driving.join().unwrap();
}

#[test]
fn the_drive_calls_of_a_recovery_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let path = made(dir.path());
    let calls = DriveCalls::default();
    calls.count_this_thread();
    drop(BlockStore::mount(&path, &MountOptions::default()).unwrap());
    assert!(calls.count() > 5, "{} calls", calls.count());
}
