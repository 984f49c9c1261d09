//! Copies files into a pool.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use client::{Object, PutOptions};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::sync::mpsc;

use super::file_meta::{self, FileKind, FileMeta};
use super::local::{self, SourcePath};
use super::{CopyOptions, PathOutcome, PoolPrefix, Tally};
use node::failure::{Doing, Failure, Result};

/// Maximum size, in bytes, of a file that the copy reads into memory as a whole.
const SMALL: u64 = 1 << 20;
/// Maximum number of paths that the walk has found and the copy has not taken yet.
const AHEAD: usize = 256;

/// Copies the local file or tree `from` to `to`.
pub async fn run(job: CopyOptions, from: &Path, to: PoolPrefix) -> Result<()> {
    let is_dir = std::fs::metadata(from).doing(format!("reading {}", from.display()))?.is_dir();
    match (is_dir, job.recursive) {
        (true, false) => {
            Err(Failure::usage(format!("copying {}", from.display()), "it is a directory; copy it with -r"))
        }
        (true, true) => tree(job, from, to).await,
        (false, _) => single(from, to).await,
    }
}

async fn single(from: &Path, to: PoolPrefix) -> Result<()> {
    let doing = format!("copying {}", from.display());
    let name = from.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let name = if to.prefix.is_empty() || to.prefix.ends_with('/') {
        to.prefix.clone() + &name
    } else {
        to.prefix.clone()
    };
    let found = local::found(from, Vec::new()).map_err(|e| Failure::new(&doing, e))?;
    let found = found.ok_or_else(|| {
        Failure::new(&doing, "it is neither a file nor a directory nor a symlink; only these can be copied")
    })?;
    let object = to.pool.object(&name).map_err(|e| Failure::usage(&doing, e))?;
    let mut tally = Tally::new("copying");
    tally.progress.grow(found.size);
    tally.add(copy(object, found, true).await);
    tally.finish()
}

async fn tree(job: CopyOptions, from: &Path, to: PoolPrefix) -> Result<()> {
    let prefix = to.directory();
    let there = Arc::new(names_below(&to, &prefix).await?);
    let mut paths = walk_ahead(from);
    let mut tally = Tally::new("copying");
    let mut running = FuturesUnordered::new();
    loop {
        if tally.gives_up() {
            return tally.finish();
        }
        tokio::select! {
            biased;
            Some(outcome) = running.next(), if !running.is_empty() => tally.add(outcome),
            found = paths.recv(), if running.len() < job.in_flight => match found {
                Some(Ok(found)) => {
                    tally.progress.grow(found.size);
                    running.push(copy_below(to.clone(), prefix.clone(), found, Arc::clone(&there)));
                }
                Some(Err(why)) => tally.add(Err(why)),
                None if running.is_empty() => return tally.finish(),
                None => {
                    let outcome = running.next().await;
                    outcome.into_iter().for_each(|o| tally.add(o));
                }
            },
        }
    }
}

/// Lists the existing objects whose names begin with `prefix`. Only these objects can be up to
/// date, so the copy queries no other objects.
async fn names_below(to: &PoolPrefix, prefix: &str) -> Result<HashSet<String>> {
    let mut names = HashSet::new();
    let mut listing = to.pool.list(prefix);
    while let Some(name) = listing.next().await.doing(format!("listing pool {}", to.pool.name()))? {
        names.insert(name.object().to_owned());
    }
    Ok(names)
}

/// Walks a tree on a separate thread, and sends the paths through a bounded channel.
fn walk_ahead(from: &Path) -> mpsc::Receiver<std::result::Result<SourcePath, String>> {
    let (tx, rx) = mpsc::channel(AHEAD);
    let from = from.to_owned();
    tokio::task::spawn_blocking(move || {
        for found in local::walk(&from) {
            if tx.blocking_send(found).is_err() {
                break;
            }
        }
    });
    rx
}

async fn copy_below(
    to: PoolPrefix,
    prefix: String,
    mut found: SourcePath,
    there: Arc<HashSet<String>>,
) -> std::result::Result<PathOutcome, String> {
    let (name, raw_path) = file_meta::object_name(&prefix, &found.relative);
    found.meta.raw_path = raw_path;
    let object = to.pool.object(&name).map_err(|e| format!("{}: {e}", found.path.display()))?;
    let may_be_there = there.contains(&name);
    copy(object, found, may_be_there).await
}

/// Copies one path to `object`, unless the object is up to date. With `may_be_there` = false, the
/// object is known not to exist, and the copy does not query it.
async fn copy(
    object: Object,
    found: SourcePath,
    may_be_there: bool,
) -> std::result::Result<PathOutcome, String> {
    let path = found.path.clone();
    let failed = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
    if may_be_there {
        match is_there(&object, &found).await {
            Ok(true) => return Ok(PathOutcome::Kept(found.size)),
            Ok(false) => {}
            Err(e) => return PathOutcome::of_failed(&e, failed(&e)),
        }
    }
    let options = PutOptions {
        xattrs: vec![(Bytes::from_static(file_meta::XATTR), found.meta.encode().into())],
        ..PutOptions::default()
    };
    let size = found.size;
    let put = match found.meta.kind {
        FileKind::File if size > SMALL => object.put_file(&found.path, options).await,
        FileKind::Directory => object.put_with(Bytes::new(), options).await,
        FileKind::File | FileKind::Symlink => {
            let data = tokio::task::spawn_blocking(move || content(&found)).await.map_err(|e| failed(&e))?;
            object.put_with(data.map_err(|e| failed(&e))?, options).await
        }
    };
    match put {
        Ok(_) => Ok(PathOutcome::Copied(size)),
        Err(e) => PathOutcome::of_failed(&e, failed(&e)),
    }
}

/// Reads the data to store for a path: the content of a file, or the target of a symlink.
fn content(found: &SourcePath) -> io::Result<Bytes> {
    match found.meta.kind {
        FileKind::Symlink => {
            use std::os::unix::ffi::OsStringExt;
            Ok(std::fs::read_link(&found.path)?.into_os_string().into_vec().into())
        }
        FileKind::File | FileKind::Directory => Ok(std::fs::read(&found.path)?.into()),
    }
}

/// Returns true if the object has the metadata and the size of the path, so that the copy can skip
/// it.
async fn is_there(object: &Object, found: &SourcePath) -> client::Result<bool> {
    let have = match object.describe().await {
        Ok(have) => have,
        Err(e) if e.is_not_found() => return Ok(false),
        Err(e) => return Err(e),
    };
    let meta =
        have.xattrs.iter().find(|(name, _)| name == file_meta::XATTR).and_then(|(_, v)| FileMeta::decode(v));
    Ok(meta.as_ref() == Some(&found.meta) && have.stat.size == found.size)
}
