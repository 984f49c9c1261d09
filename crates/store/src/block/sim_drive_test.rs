//! Tests of targets on a simulated drive, in simulated time and on one thread.

use std::sync::Arc;

use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::task::LocalSet;

use super::sim_drive::{DriveTimes, SimDrive};
use super::store::{BlockStore, MkfsOptions, MountOptions};
use crate::conformance::{self, random_operations};
use crate::{ObjectStore, StoreCalls};

/// Runs a simulation, in a paused clock and with the given seed.
fn simulate<T>(seed: u64, run: impl AsyncFnOnce() -> T) -> T {
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

fn options() -> MountOptions {
    MountOptions {
        index_cache_bytes: 1 << 20,
        metadata_cache_bytes: 1 << 20,
        buffer_bytes: 1 << 20,
        ..MountOptions::default()
    }
}

/// Mounts the target of a drive and starts its driver.
async fn mount(drive: &Arc<SimDrive>) -> Arc<BlockStore> {
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
