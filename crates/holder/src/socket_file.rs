//! Sockets in the file system: creates, replaces, connects and removes them.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::error::SocketFileError;

/// Number of connections that may wait until a socket accepts them.
const BACKLOG: i32 = 64;
/// Maximum length of a file name, in bytes. The address of a socket has space for 107 bytes, and the
/// path of the directory's descriptor takes up to 30.
const NAME_BYTES_MAX: usize = 64;

/// Device and inode number of a socket's file.
pub(crate) type FileId = (u64, u64);

/// The file of a listening socket. Dropping it removes the file, unless another file has taken its
/// place. Drop it before the listener: the listener prevents that the file system uses the inode number
/// again.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    id: FileId,
}

/// A path that is resolved as far as its directory.
struct SocketPlace<'a> {
    path: &'a Path,
    dir: OwnedFd,
    name: &'a str,
}

impl SocketFile {
    /// Listens at `path`, whose file gets the permissions `mode`. Replaces the socket of a process that
    /// has ended.
    pub fn listen(path: &Path, mode: u32) -> Result<(UnixListener, SocketFile), SocketFileError> {
        let place = SocketPlace::of(path)?;
        place.make_free()?;
        let failed = |e: Errno| place.failed(e);
        let socket = new_socket().map_err(failed)?;
        rustix::net::bind(&socket, &place.address().map_err(failed)?).map_err(failed)?;
        // Until `listen`, no process can connect, so the permissions apply to the first connection.
        let publish = || {
            rustix::fs::chmodat(&place.dir, place.name, Mode::from_raw_mode(mode), AtFlags::empty())?;
            rustix::net::listen(&socket, BACKLOG)?;
            Ok(place.stat()?.1)
        };
        match publish() {
            Ok(id) => {
                let file = SocketFile { path: path.to_owned(), id };
                Ok((UnixListener::from(socket), file))
            }
            Err(e) => {
                // The file is useless; its removal may fail like the calls before.
                let _ = rustix::fs::unlinkat(&place.dir, place.name, AtFlags::empty());
                Err(failed(e))
            }
        }
    }

    /// Returns the id of the file.
    pub fn id(&self) -> FileId {
        self.id
    }

    /// Returns the id of the file at `path`, if it exists and this process may find it.
    pub fn id_at(path: &Path) -> Option<FileId> {
        let (_, id) = SocketPlace::of(path).ok()?.stat().ok()?;
        Some(id)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let removed = SocketPlace::of(&self.path).and_then(|place| {
            let remove = || match place.stat() {
                Ok((_, id)) if id == self.id => {
                    rustix::fs::unlinkat(&place.dir, place.name, AtFlags::empty())
                }
                Ok(_) | Err(Errno::NOENT) => Ok(()),
                Err(e) => Err(e),
            };
            remove().map_err(|e| place.failed(e))
        });
        if let Err(e) = removed {
            tracing::warn!("the file of a socket cannot be removed: {e}");
        }
    }
}

/// Connects to the socket at `path` without waiting. The stream does not block.
pub(crate) fn connect(path: &Path) -> Result<UnixStream, SocketFileError> {
    let place = SocketPlace::of(path)?;
    place.connect().map_err(|e| place.failed(e))
}

impl<'a> SocketPlace<'a> {
    fn of(path: &'a Path) -> Result<SocketPlace<'a>, SocketFileError> {
        let bad = || SocketFileError::BadPath(path.to_string_lossy().into_owned());
        let text = path.to_str().ok_or_else(bad)?;
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Err(bad()) };
        let name = name.to_str().ok_or_else(bad)?;
        // `Path` ignores a slash at the end, but the kernel does not.
        if !path.is_absolute() || !text.ends_with(name) || name.len() > NAME_BYTES_MAX || text.contains('\0')
        {
            return Err(bad());
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(parent, flags, Mode::empty())
            .map_err(|e| SocketFileError::Failed { path: text.to_owned(), reason: e.to_string() })?;
        Ok(SocketPlace { path, dir, name })
    }

    /// Returns the address of the socket. It names the directory by its descriptor, because the whole
    /// path may be too long for an address.
    fn address(&self) -> Result<SocketAddrUnix, Errno> {
        SocketAddrUnix::new(format!("/proc/self/fd/{}/{}", self.dir.as_raw_fd(), self.name))
    }

    fn stat(&self) -> Result<(FileType, FileId), Errno> {
        let stat = rustix::fs::statat(&self.dir, self.name, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok((FileType::from_raw_mode(stat.st_mode), (stat.st_dev, stat.st_ino)))
    }

    fn connect(&self) -> Result<UnixStream, Errno> {
        let socket = new_socket()?;
        rustix::net::connect(&socket, &self.address()?)?;
        Ok(UnixStream::from(socket))
    }

    /// Removes the socket of a process that has ended.
    fn make_free(&self) -> Result<(), SocketFileError> {
        match self.stat() {
            Err(Errno::NOENT) => return Ok(()),
            Err(e) => return Err(self.failed(e)),
            Ok((FileType::Socket, _)) => {}
            Ok(_) => return Err(SocketFileError::NotASocket(self.text())),
        }
        match self.connect() {
            Err(Errno::CONNREFUSED) => match rustix::fs::unlinkat(&self.dir, self.name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => Ok(()),
                Err(e) => Err(self.failed(e)),
            },
            Err(Errno::NOENT) => Ok(()),
            // The error EAGAIN means that a process listens, and that too many connections wait for
            // it. A socket of another type has an owner, too.
            Ok(_) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Err(SocketFileError::InUse(self.text())),
            Err(e) => Err(self.failed(e)),
        }
    }

    fn failed(&self, e: Errno) -> SocketFileError {
        match e {
            // Another process has bound the path in between.
            Errno::ADDRINUSE => SocketFileError::InUse(self.text()),
            e => SocketFileError::Failed { path: self.text(), reason: e.to_string() },
        }
    }

    fn text(&self) -> String {
        self.path.to_string_lossy().into_owned()
    }
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Creates the directory `path` with access for this user only, or checks that it has this access.
/// Returns permissions and owner of an existing directory to which others have access.
pub(crate) fn private_dir(path: &Path) -> std::io::Result<Result<(), (u32, u32)>> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt};
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(e),
        Ok(()) | Err(_) => {}
    }
    let dir = File::open(path)?.metadata()?;
    if !dir.is_dir() {
        return Err(std::io::ErrorKind::NotADirectory.into());
    }
    let (mode, owner) = (dir.mode() & 0o777, dir.uid());
    let is_private = mode & 0o077 == 0 && owner == rustix::process::geteuid().as_raw();
    Ok(if is_private { Ok(()) } else { Err((mode, owner)) })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_left_over_socket_is_replaced_and_only_the_own_file_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let (listener, file) = SocketFile::listen(&path, 0o640).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(SocketFile::listen(&path, 0o600).unwrap_err(), SocketFileError::InUse(text(&path)));
        connect(&path).unwrap();
        drop(file);
        assert!(!path.exists());
        drop(listener);
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "a process that is killed leaves its socket behind");
        let (_listener, file) = SocketFile::listen(&path, 0o600).unwrap();
        assert_eq!(SocketFile::id_at(&path), Some(file.id()));
        std::fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        assert_ne!(SocketFile::id_at(&path), Some(file.id()));
        drop(file);
        assert!(path.exists(), "the file belongs to another process");
    }

    #[test]
    fn a_file_that_is_not_a_socket_is_never_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        std::fs::write(&file, "data").unwrap();
        let _stale = std::os::unix::net::UnixListener::bind(dir.path().join("stale")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("stale"), &link).unwrap();
        for path in [&file, &link] {
            assert_eq!(SocketFile::listen(path, 0o600).unwrap_err(), SocketFileError::NotASocket(text(path)));
        }
        assert_eq!(std::fs::read(&file).unwrap(), b"data");
        assert!(link.symlink_metadata().unwrap().is_symlink());
    }

    #[test]
    fn a_long_directory_is_no_obstacle() {
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("d".repeat(120));
        std::fs::create_dir(&long).unwrap();
        let (_listener, _file) = SocketFile::listen(&long.join("socket"), 0o600).unwrap();
        connect(&long.join("socket")).unwrap();
    }

    #[test]
    fn paths_that_name_no_file_are_refused() {
        for bad in ["", "relative", "/", "/tmp/..", "/tmp/x/", &format!("/tmp/{}", "n".repeat(65))] {
            let refused = SocketFile::listen(Path::new(bad), 0o600).unwrap_err();
            assert_eq!(refused, SocketFileError::BadPath(bad.to_owned()));
        }
        let refused = SocketFile::listen(Path::new("/does-not-exist/socket"), 0o600).unwrap_err();
        assert!(matches!(refused, SocketFileError::Failed { .. }), "{refused}");
    }

    #[test]
    fn a_private_directory_is_created_and_one_with_access_for_others_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let private = dir.path().join("private");
        for _ in 0..2 {
            assert_eq!(private_dir(&private).unwrap(), Ok(()));
        }
        std::fs::set_permissions(&private, std::fs::Permissions::from_mode(0o710)).unwrap();
        assert_eq!(private_dir(&private).unwrap(), Err((0o710, rustix::process::geteuid().as_raw())));
    }

    fn text(path: &Path) -> String {
        path.to_str().unwrap().to_owned()
    }
}
