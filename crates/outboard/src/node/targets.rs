//! The targets of a node: made at its first start, mounted by the role that owns them.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use store::{BlockStore, Driver, MkfsOptions, MountOptions, ObjectStore, StoreError};
use uuid::Uuid;

use super::config::Config;
use super::dir::NodeDir;
use super::state::{NodeState, Target};
use crate::progress::Progress;

/// Why targets cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The store refused.
    #[error("target {}: {source}", path.display())]
    Store {
        /// File or device.
        path: PathBuf,
        /// Why.
        source: StoreError,
    },
    /// A node that has run before lacks a target's file.
    #[error(
        "target {} is missing, and the node has run with it; put it back, mount its drive, or make an empty node in another directory",
        path.display()
    )]
    Missing {
        /// File.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("target {}: cannot {action}: {source}; check the path and its permissions", path.display())]
    Io {
        /// File or device.
        path: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// A mounted target.
pub struct Mounted {
    /// File or device.
    pub path: PathBuf,
    /// Its identity.
    pub uuid: Uuid,
    /// The store on it.
    pub store: Arc<BlockStore>,
}

impl Mounted {
    /// For an OSD.
    pub fn offered(&self) -> (Uuid, Arc<dyn ObjectStore>) {
        (self.uuid, Arc::clone(&self.store) as Arc<dyn ObjectStore>)
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

/// Makes the targets that a node's configuration names and that are not there: files that do not exist, and with
/// `format` devices that have no target on them. Files are made only for a node that has never run (its `run/state.json`
/// knows no targets): later one that is not there is a drive that is not mounted, and must not be taken for an empty one.
///
/// # Errors
/// One cannot be made, or is missing.
pub fn make_missing(dir: &NodeDir, config: &Config, format: bool) -> Result<(), TargetError> {
    let count = config.targets.len();
    let has_run = NodeState::load(dir).is_some_and(|state| !state.targets.is_empty());
    for (n, target) in config.targets.iter().enumerate() {
        let path = dir.path().join(target);
        let label = format!("making target {} of {count}", n + 1);
        match std::fs::metadata(&path) {
            Ok(there) if there.file_type().is_block_device() => {
                if format && has_no_target(&path)? {
                    mkfs(&path, None, &label)?;
                }
            }
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound && has_run => {
                return Err(TargetError::Missing { path });
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => make_file(&path, config, &label)?,
            Err(e) => return Err(in_system("look at it", &path)(e)),
        }
    }
    Ok(())
}

fn has_no_target(device: &Path) -> Result<bool, TargetError> {
    match BlockStore::mount(device, &MountOptions::default()) {
        Ok(store) => futures::executor::block_on(store.umount()).map(|()| false).map_err(in_store(device)),
        Err(StoreError::NotATarget(_)) => Ok(true),
        Err(e) => Err(in_store(device)(e)),
    }
}

/// Makes a target's file under another name first: what an interrupted start leaves is not taken for a target.
fn make_file(path: &Path, config: &Config, label: &str) -> Result<(), TargetError> {
    let unfinished = path.with_extension("unfinished");
    let removed = std::fs::remove_file(&unfinished);
    if let Err(e) = removed.or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) }) {
        return Err(in_system("remove what an interrupted start left", &unfinished)(e));
    }
    let made = mkfs(&unfinished, Some(config.target_size.0), label);
    if made.is_err() {
        // It takes space that may be what was missing.
        let _ = std::fs::remove_file(&unfinished);
    }
    made?;
    std::fs::rename(&unfinished, path).map_err(in_system("rename it into place", path))
}

fn mkfs(path: &Path, size: Option<u64>, label: &str) -> Result<(), TargetError> {
    let progress = Progress::bytes(label, size.unwrap_or(0));
    let options = MkfsOptions { size, ..MkfsOptions::default() };
    let made = BlockStore::mkfs(path, &options, |done, total| progress.set(done, total));
    drop(progress);
    made.map(drop).map_err(in_store(path))
}

/// Mounts targets, each with a thread of its own. Blocks while their logs are replayed.
///
/// # Errors
/// One cannot be mounted; then none is.
pub fn mount(paths: &[PathBuf], config: &Config) -> Result<Vec<Mounted>, TargetError> {
    mount_each(paths, config, BlockStore::mount, |store| (store, ())).map(|mounted| mounted.0)
}

/// Mounts targets, to be run by whoever gets their drivers. Blocks while their logs are replayed.
///
/// # Errors
/// One cannot be mounted; then none is.
pub fn mount_driven(paths: &[PathBuf], config: &Config) -> Result<(Vec<Mounted>, Vec<Driver>), TargetError> {
    mount_each(paths, config, BlockStore::mount_driven, |mounted| mounted)
}

fn mount_each<T, D>(
    paths: &[PathBuf],
    config: &Config,
    mount: impl Fn(&Path, &MountOptions) -> store::Result<T>,
    parts: impl Fn(T) -> (Arc<BlockStore>, D),
) -> Result<(Vec<Mounted>, Vec<D>), TargetError> {
    let mount = |(index, path): (usize, &PathBuf)| {
        let options = MountOptions {
            expected_uuid: None,
            index,
            index_cache_bytes: config.store.index_cache.0 as usize,
            metadata_cache_bytes: config.store.metadata_cache.0 as usize,
            buffer_bytes: config.store.buffers.0 as usize,
        };
        let (store, driver) = parts(mount(path, &options).map_err(in_store(path))?);
        let uuid = store.uuid();
        tracing::info!(target_uuid = %uuid, path = %path.display(), "mounted");
        Ok((Mounted { path: path.clone(), uuid, store }, driver))
    };
    paths.iter().enumerate().map(mount).collect()
}

/// What a role announces of its targets.
pub fn announced(mounted: &[Mounted]) -> Vec<Target> {
    mounted.iter().map(|m| Target { path: m.path.clone(), uuid: m.uuid.to_string() }).collect()
}

/// Unmounts targets, all of them even if one fails.
///
/// # Errors
/// The first one's.
pub async fn unmount(mounted: Vec<Mounted>) -> Result<(), TargetError> {
    let mut result = Ok(());
    for Mounted { path, store, .. } in mounted {
        if let Err(e) = store.umount().await {
            tracing::error!(path = %path.display(), "cannot be unmounted: {e}");
            result = result.and(Err(TargetError::Store { path, source: e }));
        }
    }
    result
}
