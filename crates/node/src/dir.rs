//! A node's directory: its configuration, roster, targets, run-time files and logs, and the lock
//! that gives one supervisor exclusive ownership.
//!
//! ```text
//! DIR/outboard.toml        configuration, which the first `up` writes last
//! DIR/node.json            roster of the node: its UUID and the UUIDs of its targets
//! DIR/keys/, DIR/credentials.toml   the node's keys, see `node_keys`
//! DIR/making.json          files that the first `up` creates; removed when the node is complete
//! DIR/targets/N.img        targets, unless the configuration names others
//! DIR/witness              last state of the placement groups, unless `osd.witness` names another file
//! DIR/run/lock             locked while the node runs; contains the supervisor's pid
//! DIR/run/state.json       state of the processes, for `status` and for finding the endpoint
//! DIR/run/store.sock       control socket between osd and store
//! DIR/run/store.debug      debug socket of the store
//! DIR/run/control.port     last port of the control plane, unless `control.listen` names one
//! DIR/log/ROLE.log         logs of the roles
//! ```
//!
//! `run/` contains only the state of a running node. It may be deleted while the node is stopped.
//! Files that must survive a power cut are changed through [`durable`](super::durable).

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::fs::FlockOperation;

use super::config_file;
use super::durable::{create_directory, sync_parent};

/// Path of the control socket, relative to the node's directory. Roles run in this directory, so
/// the relative path suffices. It fits into the 107 bytes of a UNIX socket's address, however long
/// the path of the directory is.
pub const STORE_SOCKET: &str = "run/store.sock";
/// Control socket of the holder, relative to the node's directory.
pub const HOLDER_SOCKET: &str = "run/holder.sock";

/// Path of the debug socket of the store, relative to the node's directory.
pub const DEBUG_SOCKET: &str = "run/store.debug";

/// Path of the record of a first `up`, relative to the node's directory; see [`NodeDir::making`].
const MAKING: &str = "making.json";
/// Path of the same record, as older versions of Outboard wrote it.
const OLD_MAKING: &str = "run/making.json";

/// Reason why a node's directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    /// A node runs in the directory.
    #[error(
        "a node is running in {} (supervisor's pid {}); stop it with `outboard down --dir {}` first",
        dir.display(), pid.map_or("unknown".to_owned(), |p| p.to_string()), dir.display()
    )]
    InUse {
        /// The directory.
        dir: PathBuf,
        /// The supervisor's pid.
        pid: Option<u32>,
    },
    /// The directory contains no node.
    #[error("{} contains no node (it has no outboard.toml); create a node with `outboard up --dir {}`, or choose another directory with --dir or OUTBOARD_DIR", dir.display(), dir.display())]
    NoNode {
        /// The directory.
        dir: PathBuf,
    },
    /// The file system is full.
    #[error("cannot {action} {}: its file system is full; free some space there and try again", path.display())]
    Full {
        /// What was attempted.
        action: &'static str,
        /// The affected file or directory.
        path: PathBuf,
    },
    /// The operating system refused the action.
    #[error("cannot {action} {}: {source}; check the path, its permissions and the free space", path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// The affected file or directory.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
}

/// A node's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeDir {
    root: PathBuf,
}

/// The exclusive ownership of a node's directory, until the lock is dropped or the process ends.
#[derive(Debug)]
pub struct DirLock {
    file: File,
}

impl DirLock {
    /// Converts the lock to the standard input of a new process. The new process takes the lock
    /// with [`NodeDir::take_lock`], so the directory has an owner at every moment.
    pub fn hand_down(self) -> Stdio {
        self.file.into()
    }

    /// Writes the owner's pid into the lock's file.
    fn sign(mut self, path: &Path) -> Result<DirLock, DirError> {
        self.file
            .set_len(0)
            .and_then(|()| self.file.seek(SeekFrom::Start(0)))
            .and_then(|_| self.file.write_all(std::process::id().to_string().as_bytes()))
            .map_err(io_error("write", path))?;
        Ok(self)
    }
}

impl NodeDir {
    /// Creates the directory and its subdirectories if they are missing. Only the owner may enter
    /// them, because a user who can open the control socket or the targets can read and change all
    /// data. The directories are durable when this function returns.
    ///
    /// # Errors
    /// If the operating system reports an error.
    pub fn create(root: &Path) -> Result<NodeDir, DirError> {
        let folders = [root.to_owned(), root.join("targets"), root.join("run"), root.join("log")];
        folders.iter().try_for_each(|folder| create_directory(folder))?;
        // An earlier `up` may have been killed after it had created a directory and before it could
        // sync the parent directory.
        sync_parent(&folders[1])?;
        let dir = NodeDir::at(root)?;
        match sync_parent(&dir.root) {
            // The directory was created by a user with more permissions.
            Err(DirError::Io { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {}
            result => result?,
        }
        Ok(dir)
    }

    /// Opens the directory of a node that has been started before.
    ///
    /// # Errors
    /// [`DirError::NoNode`] if the directory contains no node.
    pub fn open(root: &Path) -> Result<NodeDir, DirError> {
        if !root.join(config_file::FILE).is_file() {
            return Err(DirError::NoNode { dir: root.to_owned() });
        }
        NodeDir::at(root)
    }

    /// Returns whether `root` contains a node, or files of an interrupted first `up`.
    pub fn is_begun(root: &Path) -> bool {
        [config_file::FILE, MAKING, OLD_MAKING].iter().any(|file| root.join(file).exists())
    }

    fn at(root: &Path) -> Result<NodeDir, DirError> {
        let root = root.canonicalize().map_err(io_error("find", root))?;
        Ok(NodeDir { root })
    }

    /// Returns the absolute path of the directory.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// Returns the path of the configuration file.
    pub fn config(&self) -> PathBuf {
        self.root.join(config_file::FILE)
    }

    /// Returns the path of the record of the node's processes.
    pub fn state(&self) -> PathBuf {
        self.root.join("run/state.json")
    }

    /// Returns the path of the node's [roster](super::roster).
    pub fn roster(&self) -> PathBuf {
        self.root.join("node.json")
    }

    /// Returns the path of the record of a first `up`, which exists until the node is complete.
    pub fn making(&self) -> PathBuf {
        self.root.join(MAKING)
    }

    /// Returns the path at which older versions of Outboard write the record of a first `up`.
    pub fn old_making(&self) -> PathBuf {
        self.root.join(OLD_MAKING)
    }

    /// Returns whether the directory contains the log of a role, so that a role has been started.
    pub fn has_logs(&self) -> bool {
        std::fs::read_dir(self.root.join("log")).is_ok_and(|mut entries| entries.next().is_some())
    }

    /// Returns the path of the log of `role`.
    pub fn log(&self, role: &str) -> PathBuf {
        self.root.join(format!("log/{role}.log"))
    }

    /// Returns the path of the store's debug socket.
    pub fn debug_socket(&self) -> PathBuf {
        self.root.join(DEBUG_SOCKET)
    }

    fn lock_path(&self) -> PathBuf {
        self.root.join("run/lock")
    }

    /// Takes ownership of the directory, and writes the owner's pid into the lock's file.
    ///
    /// # Errors
    /// [`DirError::InUse`] if a process owns the directory.
    pub fn lock(&self) -> Result<DirLock, DirError> {
        // `run/` may have been deleted.
        create_directory(&self.root.join("run"))?;
        let path = self.lock_path();
        let mut options = OpenOptions::new();
        let mut file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(io_error("open", &path))?;
        match try_lock(&file) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(DirError::InUse { dir: self.root.clone(), pid: read_pid(&mut file) });
            }
            Err(e) => return Err(io_error("lock", &path)(e.into())),
        }
        DirLock { file }.sign(&path)
    }

    /// Takes ownership of the directory with the lock that the parent process [handed
    /// down](DirLock::hand_down). Without a lock from the parent process, this method works like
    /// [`lock`](NodeDir::lock).
    ///
    /// # Errors
    /// The same errors as [`lock`](NodeDir::lock).
    pub fn take_lock(&self) -> Result<DirLock, DirError> {
        let path = self.lock_path();
        let given = std::io::stdin().as_fd().try_clone_to_owned().map(File::from);
        let of = |file: &File| file.metadata().map(|m| (m.dev(), m.ino()));
        match given {
            Ok(file) if File::open(&path).and_then(|at| Ok(of(&at)? == of(&file)?)).unwrap_or(false) => {
                DirLock { file }.sign(&path)
            }
            _ => self.lock(),
        }
    }

    /// Returns the pid of the supervisor that owns the directory, if there is one.
    ///
    /// # Errors
    /// If the operating system reports an error; [`DirError::InUse`] if the owner's pid is unknown.
    pub fn owner(&self) -> Result<Option<u32>, DirError> {
        let path = self.lock_path();
        let mut file = match OpenOptions::new().read(true).open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(io_error("open", &path)(e)),
        };
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Ok(None),
            Err(rustix::io::Errno::WOULDBLOCK) => match read_pid(&mut file) {
                Some(pid) => Ok(Some(pid)),
                None => Err(DirError::InUse { dir: self.root.clone(), pid: None }),
            },
            Err(e) => Err(io_error("inspect", &path)(e.into())),
        }
    }
}

/// Takes the lock. A process that only checks for an owner ([`NodeDir::owner`]) holds the lock for
/// a moment. This function waits up to about 100 ms for the end of this check.
fn try_lock(file: &File) -> rustix::io::Result<()> {
    let attempt = || rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive);
    for _ in 0..10 {
        match attempt() {
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(std::time::Duration::from_millis(10)),
            result => return result,
        }
    }
    attempt()
}

fn read_pid(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

/// Converts an error of the operating system. `action` is what was attempted with `path`.
pub fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DirError {
    let path = path.to_owned();
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => DirError::Full { action, path },
        _ => DirError::Io { action, path, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_at_most_one_owner() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        assert_eq!(dir.owner().unwrap(), None);
        let lock = dir.lock().unwrap();
        let me = std::process::id();
        assert_eq!(dir.owner().unwrap(), Some(me));
        assert!(matches!(dir.lock(), Err(DirError::InUse { pid: Some(pid), .. }) if pid == me));
        drop(lock);
        assert_eq!(dir.owner().unwrap(), None);
        dir.lock().unwrap();
    }

    #[test]
    fn opening_a_directory_without_a_node_is_refused() {
        let root = tempfile::tempdir().unwrap();
        assert!(matches!(NodeDir::open(root.path()), Err(DirError::NoNode { .. })));
        std::fs::write(root.path().join(config_file::FILE), "").unwrap();
        assert_eq!(NodeDir::open(root.path()).unwrap().path(), root.path().canonicalize().unwrap());
    }
}
