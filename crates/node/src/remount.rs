//! Remounts targets that have failed or were absent at the start. The role that owns the targets
//! runs this module.
//!
//! A failed write or flush ends a mount, because the drive may lack data that the store has in
//! memory. A remount replays the target's log, which restores all acknowledged changes. Remounts of
//! different targets run independently.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base::fault::Faults;
use futures::future::join_all;
use store::{AbsentStore, BlockStore, MountOptions, RemountedStore, StoreCalls};
use tokio::time::Instant;

use super::config::Config;
use super::targets::{Mounted, mount_options};

/// Pause before the first attempt to remount a target. The pause doubles with each attempt.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// Maximum pause before an attempt. Pause and log replay together must stay below 30 s, the time
/// limit for recovery after a fault. The pause must not be short: each mount interrupts requests to
/// the role's other targets, and a bad drive may fail after each mount.
const PAUSE_MAX: Duration = Duration::from_secs(16);
/// If a target works for this time without a failure, its next remount begins with [`PAUSE_MIN`]
/// again.
const STEADY: Duration = Duration::from_secs(60);

/// Remounts each of `targets` when the target is not mounted or its drive has failed. `mount` mounts
/// the target with the given index and [`MountOptions::stages_after`](store::MountOptions). Passes
/// each new mount to `replace`.
pub async fn keep_mounted<D>(
    targets: &mut [Mounted],
    mount: impl AsyncFn(usize, u64) -> Result<(Arc<BlockStore>, D), String>,
    replace: impl Fn(&Mounted, &Arc<BlockStore>, D),
) -> Infallible {
    let (mount, replace) = (&mount, &replace);
    let keeping = targets.iter_mut().enumerate().map(|(index, target)| {
        keep(target, async move |stages_after| mount(index, stages_after).await, replace)
    });
    join_all(keeping).await;
    std::future::pending().await
}

/// Returns a function for [`keep_mounted`] that mounts `targets` with `mount` on a thread of its
/// own, because a mount reads the drive and blocks.
pub fn mount_on_thread<D, F>(
    targets: &[Mounted],
    config: &Config,
    faults: &Faults,
    mount: F,
) -> impl AsyncFn(usize, u64) -> Result<(Arc<BlockStore>, D), String> + use<D, F>
where
    D: Send + 'static,
    F: Fn(&Path, &MountOptions) -> store::Result<(Arc<BlockStore>, D)> + Copy + Send + 'static,
{
    let options = |(index, target): (usize, &Mounted)| {
        let shared = mount_options(index, targets.len(), config, faults);
        let options = MountOptions { expected_uuid: Some(target.uuid), ..shared };
        (target.path.clone(), options)
    };
    let targets: Vec<_> = targets.iter().enumerate().map(options).collect();
    async move |index, stages_after| {
        let (path, options) = targets[index].clone();
        let options = MountOptions { stages_after, ..options };
        let mounting = tokio::task::spawn_blocking(move || mount(&path, &options));
        match mounting.await {
            Ok(mounted) => mounted.map_err(|e| e.to_string()),
            Err(e) => Err(e.to_string()),
        }
    }
}

async fn keep<D>(
    target: &mut Mounted,
    mount: impl AsyncFn(u64) -> Result<(Arc<BlockStore>, D), String>,
    replace: &impl Fn(&Mounted, &Arc<BlockStore>, D),
) -> Infallible {
    let (mut pause, mut since, mut session) = (PAUSE_MIN, Instant::now(), 0);
    loop {
        let_go(target).await;
        if since.elapsed() >= STEADY {
            pause = PAUSE_MIN;
        }
        let mut last = String::new();
        let (store, driver) = loop {
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(PAUSE_MAX);
            match mount(RemountedStore::stages_after(session + 1)).await {
                Ok(mounted) => break mounted,
                Err(why) if why != last => {
                    tracing::warn!(target_uuid = %target.uuid, path = %target.path.display(), "the target cannot be remounted: {why}");
                    last = why;
                }
                Err(_) => {}
            }
        };
        tracing::info!(target_uuid = %target.uuid, path = %target.path.display(), "the target was remounted");
        metrics::counter!("outboard_store_remounts_total").increment(1);
        session += 1;
        since = Instant::now();
        replace(target, &store, driver);
        target.store = Ok(store);
    }
}

/// Waits until a mounted target has failed and has released its drive.
async fn let_go(target: &mut Mounted) {
    let Ok(store) = &target.store else { return };
    let why = store.failure().await;
    tracing::error!(target_uuid = %target.uuid, path = %target.path.display(), "the target has failed and will be remounted: {why}");
    // The call waits for the requests that the drive still executes. Ignore its error: the log of a
    // failed target cannot be written.
    drop(store.umount().await);
    target.store = Err(AbsentStore::new(why));
}
