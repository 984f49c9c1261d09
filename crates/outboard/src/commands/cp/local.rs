//! The part of a copy that accesses the local file system: it walks trees, and creates files, links
//! and directories.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::file_meta::{FileKind, FileMeta};

/// A local path to copy into a pool.
#[derive(Debug, Clone)]
pub struct SourcePath {
    /// The path in the local file system.
    pub path: PathBuf,
    /// The path relative to the copied directory; the path of a directory ends in a slash. It is
    /// empty if a single file is copied.
    pub relative: Vec<u8>,
    /// The metadata of the path.
    pub meta: FileMeta,
    /// Size in bytes of the file, or of the target of the link.
    pub size: u64,
}

/// Walks the tree below `root`, and yields each directory before its contents. An unreadable path
/// yields an error, and the walk continues. Sockets, pipes and devices are skipped, and links are
/// not followed.
pub fn walk(root: &Path) -> impl Iterator<Item = Result<SourcePath, String>> + use<> {
    let base = root.to_owned();
    walkdir::WalkDir::new(root).min_depth(1).into_iter().filter_map(move |entry| {
        let entry = match entry {
            Ok(entry) => entry,
            Err(e) => return Some(Err(e.to_string())),
        };
        let relative =
            entry.path().strip_prefix(&base).unwrap_or(entry.path()).as_os_str().as_bytes().to_vec();
        found(entry.path(), relative).transpose()
    })
}

/// Reads the metadata of one path; `None` for a socket, pipe or device, which is not copied.
pub fn found(path: &Path, mut relative: Vec<u8>) -> Result<Option<SourcePath>, String> {
    let metadata = fs::symlink_metadata(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let Some(meta) = FileMeta::of(&metadata) else { return Ok(None) };
    if meta.kind == FileKind::Directory {
        relative.push(b'/');
    }
    let size = if meta.kind == FileKind::Directory { 0 } else { metadata.len() };
    Ok(Some(SourcePath { path: path.to_owned(), relative, meta, size }))
}

/// Returns the local path of an object that belongs at `relative` below `root`.
///
/// # Errors
/// The result would lie outside `root`. An object may have any name, and its writer is not trusted.
pub fn destination(root: &Path, relative: &[u8]) -> Result<PathBuf, String> {
    let path = Path::new(std::ffi::OsStr::from_bytes(relative));
    let plain = path.components().all(|c| matches!(c, Component::Normal(_)));
    if !plain || relative.is_empty() || relative.contains(&0) {
        return Err(format!("\"{}\" does not name a file below the destination", relative.escape_ascii()));
    }
    Ok(root.join(path))
}

/// Returns true if the local path is a regular file with the time of `meta` and the size `size`, so
/// that the copy can skip it.
pub fn is_current(path: &Path, meta: &FileMeta, size: u64) -> bool {
    let Ok(metadata) = fs::symlink_metadata(path) else { return false };
    FileMeta::of(&metadata).is_some_and(|have| {
        have.kind == FileKind::File
            && meta.kind == FileKind::File
            && have.mtime_ns == meta.mtime_ns
            && metadata.len() == size
    })
}

/// Number in the name of the next temporary file of this process.
static NEXT_TEMPORARY: AtomicU64 = AtomicU64::new(0);

/// Returns true if `path`, with links followed, is a device, a pipe or a socket.
pub fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir())
}

/// A new file, under a temporary name in the directory of its destination.
/// [`finish`](NewFile::finish) gives it its final name. A value that is dropped unfinished removes
/// the temporary file.
pub struct NewFile {
    file: Option<File>,
    temporary: PathBuf,
    destination: PathBuf,
}

impl NewFile {
    /// Creates the temporary file, and the parent directories that are missing.
    ///
    /// # Errors
    /// An error of the system. The function also fails if the destination is a device, a pipe or a
    /// socket, because a file must not replace these.
    pub fn create(destination: &Path) -> io::Result<NewFile> {
        if is_special(destination) {
            return Err(io::Error::other(
                "the destination is a device, pipe or socket; name a regular file instead",
            ));
        }
        let parent = destination.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(parent)?;
        // Keep the temporary name below the limit of 255 bytes for file names.
        let tail = destination.file_name().map(OsStrExt::as_bytes).unwrap_or_default();
        let tail = std::ffi::OsStr::from_bytes(&tail[tail.len().saturating_sub(200)..]);
        loop {
            // The number keeps the temporary names of two long names with the same tail apart.
            let number = NEXT_TEMPORARY.fetch_add(1, Ordering::Relaxed);
            let mut name = std::ffi::OsString::from(format!(".outboard-{}-{number}-", std::process::id()));
            name.push(tail);
            let temporary = parent.join(name);
            // `create_new` never opens an existing file or follows a link that another user has
            // created here.
            match File::create_new(&temporary) {
                Ok(file) => {
                    return Ok(NewFile { file: Some(file), temporary, destination: destination.to_owned() });
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Returns the temporary file for writing.
    pub fn file(&mut self) -> &mut File {
        self.file.as_mut().expect("the file is open until it is finished")
    }

    /// Sets the file's mode and time from `meta`, if given, and gives the file its final name.
    pub fn finish(mut self, meta: Option<&FileMeta>) -> io::Result<()> {
        let mut file = self.file.take().expect("a file is finished once");
        file.flush()?;
        if let Some(meta) = meta {
            file.set_permissions(Permissions::from_mode(meta.mode))?;
            file.set_modified(time(meta.mtime_ns))?;
        }
        fs::rename(&self.temporary, &self.destination)
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // If the file was finished, it no longer has its temporary name, and this call fails
        // without effect.
        let _ = fs::remove_file(&self.temporary);
    }
}

/// Creates a symbolic link at `destination`. It replaces an existing file or link, and fails if
/// `destination` is a directory.
pub fn make_link(destination: &Path, target: &[u8]) -> io::Result<()> {
    if let Some(parent) = destination.parent() {
        fs::create_dir_all(parent)?;
    }
    match fs::remove_file(destination) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    symlink(std::ffi::OsStr::from_bytes(target), destination)
}

/// Sets the mode of a directory. The mode may forbid writing, so call this function after all
/// entries of the directory have been created.
pub fn finish_directory(path: &Path, meta: &FileMeta) -> io::Result<()> {
    fs::set_permissions(path, Permissions::from_mode(meta.mode))
}

/// Converts nanoseconds since 1970, which may be negative. A time out of range becomes 1970.
fn time(ns: i64) -> SystemTime {
    let (size, before) = (Duration::from_nanos(ns.unsigned_abs()), ns < 0);
    let at = if before { UNIX_EPOCH.checked_sub(size) } else { UNIX_EPOCH.checked_add(size) };
    at.unwrap_or(UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_leads_outside_the_destination_is_refused() {
        let root = Path::new("/tmp/x");
        assert_eq!(destination(root, b"a/b").unwrap(), Path::new("/tmp/x/a/b"));
        for bad in [&b"../b"[..], b"/etc/passwd", b"a/../../b", b"", b"a\0b"] {
            assert!(destination(root, bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_file_never_replaces_a_device_pipe_or_socket() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, link) = (dir.path().join("socket"), dir.path().join("link"));
        let _listening = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        symlink(&socket, &link).unwrap();
        for path in [&socket, &link] {
            assert!(is_special(path));
            assert!(NewFile::create(path).is_err());
        }
        assert!(!is_special(dir.path()) && !is_special(&dir.path().join("missing")));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn files_whose_long_names_end_alike_can_be_written_concurrently() {
        let dir = tempfile::tempdir().unwrap();
        let path = |first: &str| dir.path().join(format!("{first}{}", "x".repeat(220)));
        let mut files = ["a", "b"].map(|first| NewFile::create(&path(first)).unwrap());
        for (file, text) in files.iter_mut().zip(["1", "2"]) {
            file.file().write_all(text.as_bytes()).unwrap();
        }
        files.into_iter().for_each(|file| file.finish(None).unwrap());
        assert_eq!(["a", "b"].map(|first| fs::read_to_string(path(first)).unwrap()), ["1", "2"]);
    }

    #[test]
    fn an_unfinished_file_is_removed_when_it_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/file");
        let mut file = NewFile::create(&path).unwrap();
        file.file().write_all(b"x").unwrap();
        drop(file);
        assert_eq!(fs::read_dir(dir.path().join("sub")).unwrap().count(), 0);

        let meta = FileMeta { kind: FileKind::File, mode: 0o600, mtime_ns: 1_500_000_000, raw_path: None };
        let mut file = NewFile::create(&path).unwrap();
        file.file().write_all(b"xyz").unwrap();
        file.finish(Some(&meta)).unwrap();
        assert!(is_current(&path, &meta, 3));
        assert!(!is_current(&path, &meta, 4));
        let have = found(&path, b"file".to_vec()).unwrap().unwrap();
        assert_eq!((have.meta, have.size), (meta, 3));
    }
}
