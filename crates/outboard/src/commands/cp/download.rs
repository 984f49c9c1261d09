//! Copies objects out of a pool.
//!
//! Any client may have written the objects, so their names and link targets are not trusted. A name
//! or a link target must not make the copy write outside its destination. Therefore the copy checks
//! names, creates symlinks last, and refuses to follow a symlink where it expects a directory.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use client::Object;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::io::AsyncWriteExt;

use super::file_meta::{self, FileKind, FileMeta};
use super::local::{self, NewFile};
use super::{CopyOptions, PathOutcome, PoolPrefix, Tally};
use node::failure::{Doing, Failure, Result};

/// Maximum size, in bytes, of an object that the copy reads into memory as a whole.
const SMALL: u64 = 4 << 20;

/// Copies the object or the tree `from` to the local path `to`.
pub async fn run(job: CopyOptions, from: PoolPrefix, to: &Path) -> Result<()> {
    if job.recursive { tree(job, from, to).await } else { single(from, to).await }
}

async fn single(from: PoolPrefix, to: &Path) -> Result<()> {
    let doing = format!("copying {}/{}", from.pool.name(), from.prefix);
    let object = from.pool.object(&from.prefix).map_err(|e| Failure::usage(&doing, e))?;
    let base = from.prefix.rsplit('/').next().unwrap_or_default();
    let to = if to.is_dir() { to.join(base) } else { to.to_owned() };
    let (meta, size) = look(&object).await.doing(&doing)?;
    let mut tally = Tally::new("copying");
    tally.progress.grow(size);
    let outcome = match meta.as_ref().map(|m| m.kind) {
        Some(FileKind::Symlink) => link(&object, &to).await,
        _ => file(&object, &to, meta.as_ref(), size).await,
    };
    tally.add(outcome);
    tally.finish()
}

/// Work that is deferred to the end of the copy.
#[derive(Default)]
struct Later {
    /// Symlinks to create.
    links: Vec<(Object, PathBuf)>,
    /// Directories whose modes the copy must set.
    directories: Vec<(PathBuf, FileMeta)>,
}

/// The destination of a copied tree.
struct Destination {
    root: PathBuf,
    /// Prefix of the objects' names, which the paths below `root` do not contain.
    prefix: String,
    /// Directories below `root` that are known not to be symlinks.
    real: Mutex<HashSet<PathBuf>>,
    later: Mutex<Later>,
}

async fn tree(job: CopyOptions, from: PoolPrefix, to: &Path) -> Result<()> {
    let doing = format!("copying pool {}", from.pool.name());
    fs::create_dir_all(to).doing(format!("creating the directory {}", to.display()))?;
    let destination = Arc::new(Destination {
        root: to.to_owned(),
        prefix: from.directory(),
        real: Mutex::default(),
        later: Mutex::default(),
    });
    let mut listing = from.pool.list(&destination.prefix);
    let mut tally = Tally::new("copying");
    let mut running = FuturesUnordered::new();
    let mut seen = false;
    while let Some(name) = listing.next().await.doing(&doing)? {
        seen = true;
        let object = from.pool.object(name.object()).doing(&doing)?;
        running.push(copy(Arc::clone(&destination), object));
        while running.len() >= job.in_flight {
            running.next().await.into_iter().for_each(|(size, o)| account(&mut tally, size, o));
        }
        if tally.gives_up() {
            return tally.finish();
        }
    }
    while let Some((size, outcome)) = running.next().await {
        account(&mut tally, size, outcome);
        if tally.gives_up() {
            return tally.finish();
        }
    }
    if !seen {
        return Err(Failure::new(
            doing,
            format!("there is no object whose name starts with '{}'", destination.prefix),
        ));
    }
    drop(running);
    finish(&destination, &mut tally).await;
    tally.finish()
}

/// Adds the outcome for one object of `size` bytes to the tally.
fn account(tally: &mut Tally, size: u64, outcome: std::result::Result<PathOutcome, String>) {
    tally.progress.grow(size);
    tally.add(outcome);
}

/// Creates the deferred links. Then sets the modes of directories, the deepest directories first.
async fn finish(destination: &Destination, tally: &mut Tally) {
    let later = std::mem::take(&mut *destination.later.lock().unwrap_or_else(PoisonError::into_inner));
    for (object, path) in later.links {
        let outcome = match destination.real_parent(&path) {
            Ok(()) => link(&object, &path).await,
            Err(e) => Err(e),
        };
        account(tally, 0, outcome);
    }
    let mut directories = later.directories;
    directories.sort_by(|a, b| b.0.cmp(&a.0));
    for (path, meta) in directories {
        let done = local::finish_directory(&path, &meta).map(|()| PathOutcome::Copied(0));
        account(tally, 0, done.map_err(|e| format!("{}: {e}", path.display())));
    }
}

/// Copies one object; returns its size in bytes and the outcome. Links and the modes of directories
/// are deferred.
async fn copy(
    destination: Arc<Destination>,
    object: Object,
) -> (u64, std::result::Result<PathOutcome, String>) {
    match look(&object).await {
        Ok((meta, size)) => (size, place(&destination, &object, meta, size).await),
        Err(e) => (0, PathOutcome::of_failed(&e, format!("{}: {e}", object.name()))),
    }
}

/// Copies one object to its path below the destination, or defers the work for a link or directory.
async fn place(
    destination: &Destination,
    object: &Object,
    meta: Option<FileMeta>,
    size: u64,
) -> std::result::Result<PathOutcome, String> {
    let name = object.name().object();
    let below = name.strip_prefix(&destination.prefix).unwrap_or(name);
    let raw = meta.as_ref().and_then(FileMeta::raw_path_bytes);
    let path = local::destination(&destination.root, raw.as_deref().unwrap_or(below.as_bytes()))?;
    destination.real_parent(&path)?;
    match (meta.as_ref().map(|m| m.kind), meta) {
        (Some(FileKind::Symlink), _) => {
            destination.later().links.push((object.clone(), path));
            Ok(PathOutcome::Deferred)
        }
        (Some(FileKind::Directory), Some(meta)) => {
            destination.real_directory(&path)?;
            destination.later().directories.push((path, meta));
            Ok(PathOutcome::Deferred)
        }
        (_, meta) => file(object, &path, meta.as_ref(), size).await,
    }
}

impl Destination {
    fn later(&self) -> std::sync::MutexGuard<'_, Later> {
        self.later.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn real_parent(&self, path: &Path) -> std::result::Result<(), String> {
        path.parent().map_or(Ok(()), |parent| self.real_directory(parent))
    }

    /// Makes sure that `path`, which lies below the root, and all its parents below the root are
    /// directories and not symlinks. Creates the directories that are missing.
    fn real_directory(&self, path: &Path) -> std::result::Result<(), String> {
        if path == self.root || self.real.lock().unwrap_or_else(PoisonError::into_inner).contains(path) {
            return Ok(());
        }
        self.real_parent(path)?;
        match fs::create_dir(path) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(format!("{}: {e}", path.display()));
            }
            _ => {}
        }
        let found = fs::symlink_metadata(path).map_err(|e| format!("{}: {e}", path.display()))?;
        if !found.is_dir() {
            return Err(format!("{} must be a directory but is not; remove it", path.display()));
        }
        self.real.lock().unwrap_or_else(PoisonError::into_inner).insert(path.to_owned());
        Ok(())
    }
}

/// Queries an object. Returns the metadata of the file that was copied to it, if any, and its size
/// in bytes.
async fn look(object: &Object) -> client::Result<(Option<FileMeta>, u64)> {
    let found = object.describe().await?;
    let meta = found.xattrs.iter().find(|(name, _)| name == file_meta::XATTR);
    Ok((meta.and_then(|(_, value)| FileMeta::decode(value)), found.stat.size))
}

/// Copies the data of an object to the file `path`, unless the file is up to date.
async fn file(
    object: &Object,
    path: &Path,
    meta: Option<&FileMeta>,
    size: u64,
) -> std::result::Result<PathOutcome, String> {
    let failed = |e: &dyn std::fmt::Display| format!("{} to {}: {e}", object.name(), path.display());
    if meta.is_some_and(|meta| local::is_current(path, meta, size)) {
        return Ok(PathOutcome::Kept(size));
    }
    if size <= SMALL {
        let data =
            if size == 0 { bytes::Bytes::new() } else { object.get().await.map_err(|e| failed(&e))? };
        let (path, meta) = (path.to_owned(), meta.cloned());
        let written = tokio::task::spawn_blocking(move || {
            let mut new = NewFile::create(&path)?;
            std::io::Write::write_all(new.file(), &data)?;
            new.finish(meta.as_ref())
        });
        written.await.map_err(|e| failed(&e))?.map_err(|e| failed(&e))?;
        return Ok(PathOutcome::Copied(size));
    }
    let mut new = NewFile::create(path).map_err(|e| failed(&e))?;
    let mut out = tokio::fs::File::from_std(new.file().try_clone().map_err(|e| failed(&e))?);
    object.get_to_writer(&mut out).await.map_err(|e| failed(&e))?;
    out.flush().await.map_err(|e| failed(&e))?;
    new.finish(meta).map_err(|e| failed(&e))?;
    Ok(PathOutcome::Copied(size))
}

/// Creates the symlink `path`, whose target is the data of the object.
async fn link(object: &Object, path: &Path) -> std::result::Result<PathOutcome, String> {
    let failed = |e: &dyn std::fmt::Display| format!("{} to {}: {e}", object.name(), path.display());
    let target = object.get().await.map_err(|e| failed(&e))?;
    local::make_link(path, &target).map_err(|e| failed(&e))?;
    Ok(PathOutcome::Copied(target.len() as u64))
}
