//! Creates single targets, mounts them in the role that owns them, and
//! checks them while the node is stopped.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base::block::BLOCK;
use base::fault::Faults;
use store::{
    AbsentStore, BlockStore, Driver, MkfsOptions, MountOptions, ObjectStore, StoreCalls, StoreError,
};
use uuid::Uuid;

pub use store::FsckReport;

use super::config::Config;
use super::dir::DirError;
use super::durable::{remove_file, rename};
use super::plan::PlanError;
use super::roster::KnownTarget;
use super::state::MountedTarget;
use super::watchdog::Checkpoints;
use crate::progress::ProgressMeter;

/// Reason why a target cannot be created, mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The store reported an error.
    #[error("target {}: {source}", path.display())]
    Store {
        /// Path of the target's file or device.
        path: PathBuf,
        /// The store's error.
        source: StoreError,
    },
    /// There is too little space for the targets.
    #[error(transparent)]
    Space(#[from] PlanError),
    /// A file of the node cannot be written or removed.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The operating system refused the action.
    #[error("target {}: cannot {action}: {source}; check the path and its permissions", path.display())]
    Io {
        /// Path of the target's file or device.
        path: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// The operating system's error.
        source: io::Error,
    },
}

/// A target that a role has mounted, or has failed to mount.
pub struct Mounted {
    /// Path of the target's file or device.
    pub path: PathBuf,
    /// UUID of the target.
    pub uuid: Uuid,
    /// The store on the target, or the reason why it cannot be mounted.
    pub store: Result<Arc<BlockStore>, AbsentStore>,
}

impl Mounted {
    /// Returns the target's store. If the target cannot be mounted, the returned store fails every
    /// request.
    pub fn object_store(&self) -> Arc<dyn ObjectStore> {
        match &self.store {
            Ok(store) => Arc::clone(store) as Arc<dyn ObjectStore>,
            Err(absent) => Arc::new(absent.clone()),
        }
    }
}

fn in_store(path: &Path) -> impl FnOnce(StoreError) -> TargetError {
    let path = path.to_owned();
    move |source| TargetError::Store { path, source }
}

fn in_system(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TargetError {
    let path = path.to_owned();
    move |source| TargetError::Io { path, action, source }
}

/// Creates a target on a block device that has none, if the device may be formatted. Does nothing
/// for a file.
///
/// # Errors
/// If the target cannot be created.
pub fn make_on_device(path: &Path, format: bool, label: &str) -> Result<(), TargetError> {
    if is_to_be_formatted(path, format)? {
        mkfs(path, MkfsOptions::default(), label)?;
    }
    Ok(())
}

/// Returns whether a target must be created at `path`: the path is a block device without a target,
/// and may be formatted.
///
/// # Errors
/// If the device is not suitable.
pub fn is_to_be_formatted(path: &Path, format: bool) -> Result<bool, TargetError> {
    let there = std::fs::metadata(path).map_err(in_system("inspect it", path))?;
    let is_to_be = format && there.file_type().is_block_device() && has_no_target(path)?;
    if is_to_be {
        BlockStore::check_device(path, &MkfsOptions::default()).map_err(in_store(path))?;
    }
    Ok(is_to_be)
}

fn has_no_target(device: &Path) -> Result<bool, TargetError> {
    match BlockStore::uuid_at(device) {
        Ok(_) => Ok(false),
        Err(StoreError::NotATarget(_)) => Ok(true),
        Err(e) => Err(in_store(device)(e)),
    }
}

/// Returns the temporary path of a target's file until the file is complete.
pub fn unfinished(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".unfinished");
    name.into()
}

/// Creates a target's file, first under a temporary name, so that the file of an interrupted start
/// does not count as a target. The new file is durable.
///
/// # Errors
/// If the file cannot be created. No part of the file remains.
pub fn make_file(path: &Path, config: &Config, uuid: Option<Uuid>, label: &str) -> Result<(), TargetError> {
    let unfinished = unfinished(path);
    remove_file(&unfinished)?;
    let options = MkfsOptions { size: Some(config.target_size.0), uuid, ..MkfsOptions::default() };
    let made = mkfs(&unfinished, options, label);
    if made.is_err() {
        // Remove the incomplete file, because it occupies space that other files may need.
        let _ = std::fs::remove_file(&unfinished);
    }
    made?;
    // The last step of `mkfs` is a flush, so the content of the file is durable.
    #[cfg(test)]
    super::durable::steps::note(super::durable::steps::Step::Write(unfinished.clone()));
    Ok(rename(&unfinished, path)?)
}

/// Creates a target with the UUID `uuid` in place of a lost target. An existing file is kept under
/// a different name.
///
/// # Errors
/// If the target cannot be created.
pub fn make_replacement(path: &Path, config: &Config, uuid: Uuid) -> Result<(), TargetError> {
    let label = format!("creating target {uuid}");
    match std::fs::metadata(path) {
        Ok(there) if there.file_type().is_block_device() => {
            return mkfs(path, MkfsOptions { uuid: Some(uuid), ..MkfsOptions::default() }, &label);
        }
        Ok(_) => {
            let kept = path.with_extension(format!("before-{uuid}"));
            rename(path, &kept)?;
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(in_system("inspect it", path)(e)),
    }
    make_file(path, config, Some(uuid), &label)
}

fn mkfs(path: &Path, options: MkfsOptions, label: &str) -> Result<(), TargetError> {
    let progress = ProgressMeter::bytes(label, options.size.unwrap_or(0));
    let made = BlockStore::mkfs(path, &options, |done, total| progress.set(done, total));
    drop(progress);
    made.map(drop).map_err(in_store(path))
}

/// The targets that a role mounts.
#[derive(Debug, Clone)]
pub struct TargetPaths {
    /// Path of each target's file or device.
    pub paths: Vec<PathBuf>,
    /// Targets whose UUIDs are known. If one of them cannot be mounted, or its path contains another
    /// target, the role serves the other targets.
    pub known: Vec<KnownTarget>,
}

/// Mounts targets, and runs each target on its own thread. Blocks while the logs of the targets are
/// replayed.
///
/// # Errors
/// If no target can be mounted, or if a target whose UUID is not known cannot be mounted. After an
/// error, no target is mounted.
pub fn mount(targets: &TargetPaths, config: &Config, faults: &Faults) -> Result<Vec<Mounted>, TargetError> {
    mount_each(targets, config, faults, BlockStore::mount, |store| (store, ())).map(|mounted| mounted.0)
}

/// Mounts targets and returns their drivers, which the caller must run. Blocks while the logs of
/// the targets are replayed.
///
/// # Errors
/// The same errors as [`mount`].
pub fn mount_driven(
    targets: &TargetPaths,
    config: &Config,
    faults: &Faults,
) -> Result<(Vec<Mounted>, Vec<Driver>), TargetError> {
    mount_each(targets, config, faults, BlockStore::mount_driven, |mounted| mounted)
}

/// Returns the mount options of target number `index` of `count` targets, which share the memory for
/// caches equally.
pub fn mount_options(index: usize, count: usize, config: &Config, faults: &Faults) -> MountOptions {
    let cache = config.store.cache_bytes() / count.max(1) as u64;
    MountOptions {
        expected_uuid: None,
        index,
        cache_bytes: cache as usize,
        buffer_bytes: config.store.buffers.0 as usize,
        faults: faults.clone(),
        stages_after: 0,
    }
}

fn mount_each<T, D>(
    targets: &TargetPaths,
    config: &Config,
    faults: &Faults,
    mount: impl Fn(&Path, &MountOptions) -> store::Result<T>,
    parts: impl Fn(T) -> (Arc<BlockStore>, D),
) -> Result<(Vec<Mounted>, Vec<D>), TargetError> {
    let mount = |(index, path): (usize, &PathBuf), expected_uuid: Option<Uuid>| {
        let options =
            MountOptions { expected_uuid, ..mount_options(index, targets.paths.len(), config, faults) };
        let (store, driver) = parts(mount(path, &options)?);
        let uuid = store.uuid();
        tracing::info!(target_uuid = %uuid, path = %path.display(), "mounted");
        Ok((Mounted { path: path.clone(), uuid, store: Ok(store) }, driver))
    };
    let (mut mounted, mut drivers) = (Vec::new(), Vec::new());
    let mut failure = None;
    for (index, path) in targets.paths.iter().enumerate() {
        let known = targets.known.iter().find(|known| known.path() == path);
        match (mount((index, path), known.map(KnownTarget::uuid)), known) {
            (Ok((target, driver)), _) => {
                mounted.push(target);
                drivers.push(driver);
            }
            (Err(e), Some(known)) if may_be_absent(&e) => {
                tracing::error!(target_uuid = %known.uuid(), path = %path.display(), "the target cannot be mounted: {e}");
                let why = if let StoreError::Io(why) = &e { why.clone() } else { e.to_string() };
                let shown = path.display().to_string();
                let why = if why.contains(&shown) { why } else { format!("{shown}: {why}") };
                let absent = AbsentStore::new(why);
                mounted.push(Mounted { path: path.clone(), uuid: known.uuid(), store: Err(absent) });
                failure = Some(in_store(path)(e));
            }
            (Err(e), _) => return Err(in_store(path)(e)),
        }
    }
    match failure {
        Some(failure) if drivers.is_empty() => Err(failure),
        _ => Ok((mounted, drivers)),
    }
}

/// Returns whether the role may run without a target that failed to mount with this error. The role
/// may not run if the target is in use.
fn may_be_absent(e: &StoreError) -> bool {
    matches!(
        e,
        StoreError::Io(_)
            | StoreError::Corrupt { .. }
            | StoreError::NotATarget(_)
            | StoreError::WrongVersion { .. }
            | StoreError::WrongUuid { .. }
    )
}

/// Returns the checkpoints of all mounted targets, for the watchdog.
pub fn checkpoints(mounted: &[Mounted]) -> Checkpoints {
    let checkpoints = Checkpoints::default();
    for target in mounted {
        if let Ok(store) = &target.store {
            checkpoints.add(target.path.clone(), store.checkpoint_watch());
        }
    }
    checkpoints
}

/// Returns the targets for a role's announcement.
pub fn announced(mounted: &[Mounted]) -> Vec<MountedTarget> {
    mounted.iter().map(|m| MountedTarget { path: m.path.clone(), uuid: m.uuid }).collect()
}

/// Unmounts all targets, even if the unmounting of one fails.
///
/// # Errors
/// The first target's error.
pub async fn unmount(mounted: Vec<Mounted>) -> Result<(), TargetError> {
    let mut result = Ok(());
    for Mounted { path, store, .. } in mounted {
        let Ok(store) = store else { continue };
        if let Err(e) = store.umount().await {
            tracing::error!(path = %path.display(), "the target cannot be unmounted: {e}");
            result = result.and(Err(TargetError::Store { path, source: e }));
        }
    }
    result
}

/// Checks a target that no process has mounted, and repairs some kinds of damage with `repair`.
/// Shows the progress after `label` on a terminal.
///
/// # Errors
/// If the target cannot be checked.
pub fn check(path: &Path, repair: bool, label: &str) -> store::Result<FsckReport> {
    let progress = ProgressMeter::bytes(label, 0);
    store::fsck(path, repair, &osd::inspect_object, |done, all| {
        progress.set(done.saturating_mul(BLOCK), all.saturating_mul(BLOCK));
    })
}
