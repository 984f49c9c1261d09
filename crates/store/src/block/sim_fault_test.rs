//! Tests of the faults of a simulated drive, and of a store on a drive with faults.

use std::sync::Arc;
use std::time::Duration;

use base::clock::Instant;
use bytes::Bytes;
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::sim_drive::{DriveFault, DriveFaultKind, DriveImage, DrivePart, DriveTimes, SimDrive, Survivors};
use super::sim_drive_test::{mount, options, simulate, small_drive};
use super::store::{BlockStore, MkfsOptions};
use crate::conformance::{self, cid, oid, pattern, write};
use crate::{Op, StoreCalls, StoreError, Transaction};

/// A target with one collection, whose objects have known contents.
struct SmallTarget {
    drive: Arc<SimDrive>,
    store: Arc<BlockStore>,
}

fn put(name: &str, len: usize) -> Transaction {
    Transaction::new(cid("c")).with(write(&oid(name), 0, pattern(len as u64, len)))
}

impl SmallTarget {
    async fn new() -> SmallTarget {
        let drive = small_drive(base::entropy::random());
        let store = mount(&drive).await;
        let made = Transaction::new(cid("c")).with(Op::CreateCollection);
        store.queue_transaction(made).await.unwrap();
        let target = SmallTarget { drive, store };
        target.put("old", 100_000).await.unwrap();
        target
    }

    async fn put(&self, name: &str, len: usize) -> Result<(), StoreError> {
        self.store.queue_transaction(put(name, len)).await
    }

    /// Reads an object and compares its data with its checksums.
    async fn read(&self, name: &str) -> Result<Bytes, StoreError> {
        let read = self.store.read(&cid("c"), &oid(name), 0, 1 << 20, None).await?;
        read.verify().map_err(|e| StoreError::Corrupt { what: name.to_owned(), detail: e.to_string() })?;
        Ok(read.contiguous())
    }

    async fn assert_has(&self, name: &str, len: usize) {
        assert_eq!(self.read(name).await.unwrap(), pattern(len as u64, len));
    }

    /// Ends the store by a power failure and mounts the target again.
    async fn fail_power(self) -> SmallTarget {
        self.drive.power_failure();
        self.mount_again().await
    }

    /// Ends the store by an unmount and mounts the target again.
    async fn remount(self) -> SmallTarget {
        let _ = self.store.umount().await;
        self.mount_again().await
    }

    async fn mount_again(self) -> SmallTarget {
        let SmallTarget { drive, store } = self;
        drop(store);
        let store = mount(&drive).await;
        SmallTarget { drive, store }
    }
}

#[test]
fn a_failed_read_is_reported_once_and_succeeds_later() {
    simulate(1, async || {
        let target = SmallTarget::new().await;
        let range = target.drive.part(DrivePart::Data);
        target.drive.inject(DriveFault { range, ..DriveFault::once(DriveFaultKind::ReadError) });
        let read = target.read("old").await;
        assert!(matches!(read, Err(StoreError::Io(_))), "{read:?}");
        assert_eq!(target.drive.counts().read_errors, 1);
        target.assert_has("old", 100_000).await;
    });
}

#[test]
fn a_failed_write_or_flush_poisons_the_target_until_a_remount() {
    for kind in [DriveFaultKind::WriteError, DriveFaultKind::FlushError] {
        simulate(1, async || {
            let target = SmallTarget::new().await;
            target.drive.inject(DriveFault::once(kind));
            let lost = target.put("new", 50_000).await;
            assert!(matches!(lost, Err(StoreError::Poisoned(_))), "{lost:?}");
            let counts = target.drive.counts();
            assert_eq!(counts.write_errors + counts.flush_errors, 1);
            assert!(matches!(target.put("new", 1).await, Err(StoreError::Poisoned(_))));
            assert!(matches!(target.store.umount().await, Err(StoreError::Poisoned(_))));
            let after = target.read("old").await;
            assert!(matches!(after, Err(StoreError::Poisoned(_))), "the failure is still known: {after:?}");
            let target = target.mount_again().await;
            target.put("new", 60_000).await.unwrap();
            let target = target.fail_power().await;
            target.assert_has("old", 100_000).await;
            target.assert_has("new", 60_000).await;
        });
    }
}

/// Mounts and unmounts the target of `image` on a drive that fails one write or flush after `after`
/// successes. Returns the content of the drive afterwards, and whether the fault has fired.
async fn mount_with_fault(image: &DriveImage, kind: DriveFaultKind, after: u64) -> (DriveImage, bool) {
    let rng = StdRng::seed_from_u64(base::entropy::random());
    let drive = SimDrive::with_image(image, rng, DriveTimes::default());
    drive.inject(DriveFault { after, ..DriveFault::once(kind) });
    let ended = match BlockStore::mount_simulated(&drive, &options()).await {
        Ok((store, driver)) => {
            base::task::spawn_local(base::thread::ThreadClass::Store, driver.run());
            store.umount().await
        }
        Err(error) => Err(error),
    };
    let counts = drive.counts();
    let fired = counts.write_errors + counts.flush_errors > 0;
    assert!(ended.is_ok() || fired, "request {after}: {ended:?}");
    drive.sever();
    (drive.image(), fired)
}

#[test]
fn a_target_can_be_mounted_after_any_two_failed_mounts_with_torn_writes() {
    let mut pairs = 0;
    simulate(conformance::seed(), async || {
        let target = SmallTarget::new().await;
        for n in 1..6 {
            target.put(&format!("o{n}"), n * 3000).await.unwrap();
        }
        let start = target.drive.image_after_power_failure(Survivors::Nothing);
        for kinds in [DriveFaultKind::WriteError, DriveFaultKind::FlushError]
            .into_iter()
            .flat_map(|first| [(first, DriveFaultKind::WriteError), (first, DriveFaultKind::FlushError)])
        {
            for first in 0.. {
                let (image, fired) = mount_with_fault(&start, kinds.0, first).await;
                if !fired {
                    break;
                }
                for second in 0.. {
                    let (image, fired) = mount_with_fault(&image, kinds.1, second).await;
                    let rng = StdRng::seed_from_u64(base::entropy::random());
                    let drive = SimDrive::with_image(&image, rng, DriveTimes::default());
                    let store = mount(&drive).await;
                    let target = SmallTarget { drive, store };
                    for n in 1..6 {
                        target.assert_has(&format!("o{n}"), n * 3000).await;
                    }
                    pairs += 1;
                    if !fired {
                        break;
                    }
                }
            }
        }
    });
    assert!(pairs > 100, "{pairs} pairs of faults");
}

#[test]
fn changes_after_mounts_whose_flushes_were_lost_survive_a_power_failure() {
    let mut failed_mounts = 0;
    for (was_unmounted, after) in
        [true, false].into_iter().flat_map(|unmounted| (0..12).map(move |n| (unmounted, n)))
    {
        simulate(1, async || {
            let target = SmallTarget::new().await;
            if was_unmounted {
                target.store.umount().await.unwrap();
            } else {
                target.drive.sever();
            }
            let SmallTarget { drive, store } = target;
            drop(store);
            drive.inject(DriveFault { after, ..DriveFault::once(DriveFaultKind::LostFlush) });
            let mounted = BlockStore::mount_simulated(&drive, &options()).await;
            failed_mounts += u32::from(mounted.is_err());
            drop(mounted);
            drive.sever();
            drive.clear_faults();
            let target = SmallTarget { store: mount(&drive).await, drive };
            target.put("new", 50_000).await.unwrap();
            target.drive.power_failure_with(Survivors::Nothing);
            let target = target.mount_again().await;
            target.assert_has("old", 100_000).await;
            target.assert_has("new", 50_000).await;
        });
    }
    assert!(failed_mounts > 4, "{failed_mounts} mounts failed");
}

#[test]
fn a_drive_whose_flushes_fail_for_a_while_can_be_mounted_afterwards() {
    simulate(1, async || {
        let target = SmallTarget::new().await;
        let until = Some(Instant::now() + Duration::from_secs(5));
        target.drive.inject(DriveFault { until, ..DriveFault::always(DriveFaultKind::FlushError) });
        assert!(target.put("new", 50_000).await.is_err());
        drop(target.store);
        let refused = BlockStore::mount_simulated(&target.drive, &options()).await;
        assert!(refused.is_err() && target.drive.counts().flush_errors > 1, "{refused:?}");
        tokio::time::sleep(Duration::from_secs(5)).await;
        let store = mount(&target.drive).await;
        SmallTarget { store, drive: target.drive }.assert_has("old", 100_000).await;
    });
}

#[test]
fn a_stalled_request_delays_a_transaction_and_is_harmless() {
    simulate(1, async || {
        let target = SmallTarget::new().await;
        target.drive.inject(DriveFault::once(DriveFaultKind::Stall(Duration::from_secs(7))));
        let started = Instant::now();
        target.put("new", 50_000).await.unwrap();
        assert!(started.elapsed() >= Duration::from_secs(7));
        assert_eq!(target.drive.counts().stalls, 1);
        target.assert_has("new", 50_000).await;
    });
}

#[test]
fn a_bit_flipped_in_a_read_is_detected_and_the_drive_stays_correct() {
    simulate(1, async || {
        let target = SmallTarget::new().await;
        let range = target.drive.part(DrivePart::Data);
        target.drive.inject(DriveFault { range, ..DriveFault::once(DriveFaultKind::FlipInRead) });
        let read = target.read("old").await;
        assert!(matches!(read, Err(StoreError::Corrupt { .. })), "{read:?}");
        assert_eq!(target.drive.counts().flips_in_reads, 1);
        target.assert_has("old", 100_000).await;
    });
}

#[test]
fn a_bit_flipped_in_a_write_or_at_rest_is_detected() {
    simulate(1, async || {
        let target = SmallTarget::new().await;
        let range = target.drive.part(DrivePart::Data);
        target.drive.inject(DriveFault { range, ..DriveFault::once(DriveFaultKind::FlipInWrite) });
        target.put("new", 8 * 4096).await.unwrap();
        assert_eq!(target.drive.counts().flips_in_writes, 1);
        let read = target.read("new").await;
        assert!(matches!(read, Err(StoreError::Corrupt { .. })), "{read:?}");
        target.assert_has("old", 100_000).await;
        target
            .store
            .queue_transaction(Transaction::new(cid("c")).with(Op::Remove { oid: oid("new") }))
            .await
            .unwrap();
        let target = target.remount().await;
        // The blocks of the removed object may be hit, too.
        let mut damaged = false;
        for _ in 0..100 {
            assert!(target.drive.flip_bit_in(DrivePart::Data).is_some());
            damaged |= matches!(target.read("old").await, Err(StoreError::Corrupt { .. }));
        }
        assert!(damaged && target.drive.counts().flips_at_rest == 100);
    });
}

#[test]
fn a_bit_flipped_in_the_index_or_in_one_superblock_is_detected_or_harmless() {
    let (mut reported, mut harmless) = (0, 0);
    for seed in 0..60 {
        simulate(seed, async || {
            let target = SmallTarget::new().await;
            target.store.umount().await.unwrap();
            let part = if seed % 2 == 0 { DrivePart::Index } else { DrivePart::Superblock };
            assert!(target.drive.flip_bit_in(part).is_some());
            let outcome = match BlockStore::mount_simulated(&target.drive, &options()).await {
                Err(error) => Err(error),
                Ok((store, driver)) => {
                    base::task::spawn_local(base::thread::ThreadClass::Store, driver.run());
                    SmallTarget { store, drive: Arc::clone(&target.drive) }.read("old").await
                }
            };
            match outcome {
                Ok(data) => {
                    assert_eq!(data, pattern(100_000, 100_000), "seed {seed}");
                    harmless += 1;
                }
                Err(StoreError::Corrupt { .. } | StoreError::NotATarget(_)) => reported += 1,
                Err(error) => panic!("seed {seed}: {error}"),
            }
        });
    }
    assert!(reported > 0 && harmless > 10, "{reported} reported, {harmless} harmless");
}

/// Bits that flip on the way from the drive while a target is mounted must not make the store
/// change the drive for the worse.
#[test]
fn bits_flipped_in_reads_of_mounts_damage_nothing() {
    let (mut refused, mut flips) = (0, 0);
    for seed in 0..100 {
        simulate(seed, async || {
            let mut target = SmallTarget::new().await;
            // Each unmount writes a checkpoint, so that both slots of the index's header are in use.
            for name in ["a", "b"] {
                target.put(name, 3000).await.unwrap();
                target = target.remount().await;
            }
            target.put("c", 500_000).await.unwrap();
            target.drive.sever();
            let drive = target.drive;
            let metadata = [DrivePart::Superblock, DrivePart::Index];
            let parts = match seed % 4 {
                0 => &[DrivePart::Data][..],
                1 => &[DrivePart::Log],
                _ => &metadata,
            };
            for &part in parts {
                let range = drive.part(part);
                let fault = DriveFault::always(DriveFaultKind::FlipInRead);
                drive.inject(DriveFault { range, probability: 0.7, ..fault });
            }
            for _ in 0..3 {
                refused += usize::from(BlockStore::mount_simulated(&drive, &options()).await.is_err());
                drive.sever();
            }
            flips += drive.counts().flips_in_reads;
            drive.clear_faults();
            let target = SmallTarget { store: mount(&drive).await, drive };
            for (name, len) in [("old", 100_000), ("a", 3000), ("b", 3000), ("c", 500_000)] {
                target.assert_has(name, len).await;
            }
        });
    }
    assert!(refused > 100 && flips > 500, "{refused} mounts refused, {flips} flips");
}

/// The older copy of the superblock may say that the target is clean, although changes followed.
#[test]
fn a_damaged_superblock_does_not_hide_changes_after_a_clean_unmount() {
    for copy in 0..2 {
        simulate(copy, async || {
            let target = SmallTarget::new().await.remount().await;
            target.put("new", 20_000).await.unwrap();
            target.drive.sever();
            let block = base::block::BLOCK;
            assert!(target.drive.flip_bit(copy * block..(copy + 1) * block).is_some());
            let target = target.mount_again().await;
            target.assert_has("old", 100_000).await;
            target.assert_has("new", 20_000).await;
        });
    }
}

#[test]
fn a_lying_flush_loses_acknowledged_changes_in_a_power_failure() {
    simulate(1, async || {
        let target = SmallTarget::new().await;
        target.drive.inject(DriveFault::always(DriveFaultKind::LyingFlush));
        target.put("new", 50_000).await.unwrap();
        assert!(target.drive.counts().lying_flushes > 0);
        target.drive.clear_faults();
        target.drive.power_failure_with(Survivors::Nothing);
        let target = target.mount_again().await;
        assert!(matches!(target.read("new").await, Err(StoreError::NoSuchObject(_))));
        target.assert_has("old", 100_000).await;
    });
}

#[test]
fn a_mount_makes_visible_changes_of_a_lost_flush_durable() {
    simulate(1, async || {
        let target = SmallTarget::new().await;
        target.drive.inject(DriveFault::once(DriveFaultKind::LostFlush));
        assert!(matches!(target.put("new", 50_000).await, Err(StoreError::Poisoned(_))));
        assert_eq!(target.drive.counts().flush_errors, 1);
        let target = target.remount().await;
        target.assert_has("new", 50_000).await;
        target.drive.power_failure_with(Survivors::Nothing);
        let target = target.mount_again().await;
        target.assert_has("new", 50_000).await;
        target.assert_has("old", 100_000).await;
    });
}

#[test]
fn a_removed_drive_fails_all_requests_and_returns_with_its_durable_content() {
    simulate(1, async || {
        let target = SmallTarget::new().await;
        target.drive.remove();
        assert!(matches!(target.put("new", 50_000).await, Err(StoreError::Poisoned(_))));
        assert!(target.read("old").await.is_err());
        let _ = target.store.umount().await;
        drop(target.store);
        assert!(BlockStore::mount_simulated(&target.drive, &options()).await.is_err());
        assert!(target.drive.counts().absent_errors > 2, "{:?}", target.drive.counts());
        target.drive.reinsert();
        let store = mount(&target.drive).await;
        SmallTarget { store, drive: target.drive }.assert_has("old", 100_000).await;
    });
}

#[test]
fn a_drive_can_be_copied_and_can_return_with_older_content() {
    simulate(1, async || {
        let target = SmallTarget::new().await;
        target.store.umount().await.unwrap();
        let older = target.drive.image();
        let target = target.mount_again().await;
        target.put("new", 50_000).await.unwrap();
        let copy = target.drive.copy(StdRng::seed_from_u64(1));
        target.drive.restore(&older);
        let target = target.mount_again().await;
        assert!(matches!(target.read("new").await, Err(StoreError::NoSuchObject(_))));
        let store = mount(&copy).await;
        SmallTarget { store, drive: copy }.assert_has("new", 50_000).await;
    });
}

#[test]
fn a_target_has_one_mount_at_a_time_and_a_severed_mount_cannot_change_it() {
    simulate(1, async || {
        let target = SmallTarget::new().await;
        let second = BlockStore::mount_simulated(&target.drive, &options()).await;
        assert!(matches!(second, Err(StoreError::InUse(_))), "{second:?}");
        assert!(matches!(target.drive.mkfs(&MkfsOptions::default()), Err(StoreError::InUse(_))));
        target.drive.sever();
        let before = target.drive.trace();
        assert!(target.put("new", 50_000).await.is_err());
        let _ = target.store.umount().await;
        assert_eq!(target.drive.trace(), before);
        assert!(target.drive.counts().refused > 0);
        let target = target.mount_again().await;
        assert!(matches!(target.read("new").await, Err(StoreError::NoSuchObject(_))));
        target.assert_has("old", 100_000).await;
    });
}

#[test]
fn a_mounted_target_injects_the_faults_of_its_options() {
    simulate(1, async || {
        let drive = small_drive(base::entropy::random());
        let options = options();
        options.faults.arm("drive.write=fail,after=1000,count=1".parse().unwrap()).unwrap();
        let (store, driver) = BlockStore::mount_simulated(&drive, &options).await.unwrap();
        base::task::spawn_local(base::thread::ThreadClass::Store, driver.run());
        store.queue_transaction(Transaction::new(cid("c")).with(Op::CreateCollection)).await.unwrap();
        options.faults.clear();
        options.faults.arm("drive.write=fail,count=1".parse().unwrap()).unwrap();
        let lost = store.queue_transaction(put("new", 5000)).await;
        assert!(matches!(lost, Err(StoreError::Poisoned(_))), "{lost:?}");
        assert_eq!(options.faults.fired(base::fault::Site::DriveWrite), 1);
    });
}
