//! Durable changes of files and directories.
//!
//! A power cut can undo the creation, the renaming and the removal of a file until the directory of
//! the file has been synced. All changes of a node's directory that must survive a power cut
//! therefore go through this module. Logs, sockets and locks need no durability.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::dir::{DirError, io_error};

/// Replaces the content of `path` atomically and durably.
///
/// # Errors
/// If the operating system reports an error.
pub fn replace_file(path: &Path, content: impl AsRef<[u8]>) -> Result<(), DirError> {
    replace_with(path, content.as_ref(), OpenOptions::new().write(true).create(true).truncate(true))
}

/// Like [`replace_file`], for a file that only its owner may read at any time.
///
/// # Errors
/// If the operating system reports an error.
pub fn create_secret(path: &Path, content: impl AsRef<[u8]>) -> Result<(), DirError> {
    // An interrupted call may have left the temporary file of another file with more permissions,
    // for example `keys/store.new` of `keys/store`. Opening this file would keep its mode.
    let left = temporary(path);
    match std::fs::remove_file(&left) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_error("remove", &left)(e)),
        _ => {}
    }
    replace_with(path, content.as_ref(), OpenOptions::new().write(true).create_new(true).mode(0o600))
}

/// The file that a new content is written to before it replaces `path`.
fn temporary(path: &Path) -> PathBuf {
    path.with_extension("new")
}

/// Replaces a file. `options` create the temporary file.
fn replace_with(path: &Path, content: &[u8], options: &OpenOptions) -> Result<(), DirError> {
    let new = temporary(path);
    let write = || {
        let mut file = options.open(&new)?;
        file.write_all(content)?;
        file.sync_all()
    };
    if let Err(e) = write() {
        // Remove the incomplete file, because it occupies space that other files may need.
        let _ = std::fs::remove_file(&new);
        return Err(io_error("write", &new)(e));
    }
    #[cfg(test)]
    steps::note(steps::Step::Write(new.clone()));
    rename(&new, path)
}

/// Renames a file durably. The content of the file must be durable. Both names must be in the same
/// directory.
///
/// # Errors
/// If the operating system reports an error.
pub fn rename(from: &Path, to: &Path) -> Result<(), DirError> {
    std::fs::rename(from, to).map_err(io_error("replace", to))?;
    #[cfg(test)]
    steps::note(steps::Step::Rename(from.to_owned(), to.to_owned()));
    sync_parent(to)
}

/// Removes a file durably, if it exists.
///
/// # Errors
/// If the operating system reports an error.
pub fn remove_file(path: &Path) -> Result<(), DirError> {
    match std::fs::remove_file(path) {
        Ok(()) => {
            #[cfg(test)]
            steps::note(steps::Step::Remove(path.to_owned()));
            sync_parent(path)
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(io_error("remove", path)(e)),
    }
}

/// Creates a directory and its missing ancestors durably, accessible to the owner only. Does
/// nothing if the directory exists.
///
/// # Errors
/// If the operating system reports an error.
pub fn create_directory(path: &Path) -> Result<(), DirError> {
    let create = || DirBuilder::new().mode(0o700).create(path);
    let created = match (create(), path.parent()) {
        (Err(e), Some(parent)) if e.kind() == io::ErrorKind::NotFound => {
            create_directory(parent)?;
            create()
        }
        (created, _) => created,
    };
    match created {
        Ok(()) => {
            #[cfg(test)]
            steps::note(steps::Step::CreateDirectory(path.to_owned()));
            sync_parent(path)
        }
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(e) => Err(io_error("create", path)(e)),
    }
}

/// Makes the entry of a file or directory in its parent directory durable.
///
/// # Errors
/// If the operating system reports an error.
pub fn sync_parent(path: &Path) -> Result<(), DirError> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(io_error("write", parent))?;
    #[cfg(test)]
    steps::note(steps::Step::SyncDirectory(parent.to_owned()));
    Ok(())
}

/// Records the steps of this module, so that a test can determine the states that a power cut can
/// leave.
#[cfg(test)]
pub mod steps {
    use std::cell::RefCell;
    use std::collections::BTreeSet;
    use std::path::{Path, PathBuf};

    /// One change of the file system.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum Step {
        /// A file was created or overwritten, and its content was synced.
        Write(PathBuf),
        /// A file was renamed.
        Rename(PathBuf, PathBuf),
        /// A file was removed.
        Remove(PathBuf),
        /// A directory was created.
        CreateDirectory(PathBuf),
        /// A directory was synced.
        SyncDirectory(PathBuf),
    }

    thread_local! {
        static STEPS: RefCell<Option<Vec<Step>>> = const { RefCell::new(None) };
    }

    /// Records a step, if the thread is in [`record`].
    pub fn note(step: Step) {
        STEPS.with_borrow_mut(|steps| steps.iter_mut().for_each(|steps| steps.push(step.clone())));
    }

    /// Returns the steps that this thread takes in `body`.
    pub fn record(body: impl FnOnce()) -> Vec<Step> {
        STEPS.set(Some(Vec::new()));
        body();
        STEPS.take().unwrap_or_default()
    }

    /// Returns the sets of files that can exist after a power cut or a kill during `steps`. After a
    /// kill, all steps have taken effect. After a power cut, the file system may have forgotten all
    /// changes of directories that were not synced. The initial directories are durable.
    pub fn states(steps: &[Step], initial: &[&Path]) -> Vec<BTreeSet<PathBuf>> {
        let mut now: BTreeSet<PathBuf> = initial.iter().map(|path| (*path).to_owned()).collect();
        let mut durable = now.clone();
        let mut states = vec![now.clone()];
        for step in steps {
            match step {
                Step::Write(path) | Step::CreateDirectory(path) => {
                    now.insert(path.clone());
                }
                Step::Rename(from, to) => {
                    assert!(now.remove(from), "{from:?} was written before it is renamed");
                    now.insert(to.clone());
                }
                Step::Remove(path) => {
                    now.remove(path);
                }
                Step::SyncDirectory(dir) => {
                    durable.retain(|path| path.parent() != Some(dir));
                    durable.extend(now.iter().filter(|path| path.parent() == Some(dir)).cloned());
                }
            }
            let is_reachable = |path: &&PathBuf| {
                let is_initial = |path: &Path| initial.contains(&path);
                let mut above = path.ancestors().take_while(|path| !is_initial(path));
                above.all(|path| durable.contains(path))
            };
            states.push(now.clone());
            states.push(durable.iter().filter(is_reachable).cloned().collect());
        }
        states
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replacing_a_file_on_a_full_file_system_keeps_the_old_content() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("state.json");
        replace_file(&path, "old").unwrap();
        std::os::unix::fs::symlink("/dev/full", root.path().join("state.new")).unwrap();
        let error = replace_file(&path, "new").unwrap_err().to_string();
        assert!(error.contains("is full; free some space"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old");
        replace_file(&path, "new").unwrap();
    }

    #[test]
    fn each_change_of_a_directory_is_followed_by_a_sync_of_this_directory() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("a/b");
        let file = directory.join("f.json");
        let steps = steps::record(|| {
            create_directory(&directory).unwrap();
            replace_file(&file, "text").unwrap();
            remove_file(&file).unwrap();
        });
        use steps::Step::{CreateDirectory, Remove, Rename, SyncDirectory, Write};
        let (a, new) = (root.path().join("a"), directory.join("f.new"));
        let expected = [
            CreateDirectory(a.clone()),
            SyncDirectory(root.path().to_owned()),
            CreateDirectory(directory.clone()),
            SyncDirectory(a),
            Write(new.clone()),
            Rename(new, file.clone()),
            SyncDirectory(directory.clone()),
            Remove(file),
            SyncDirectory(directory),
        ];
        assert_eq!(steps, expected);
    }
}
