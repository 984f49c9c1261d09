//! [`read_secret`]: reads a file that contains a private key.

use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::IdentityError;

/// Maximum size of a file with a secret, in bytes.
const SIZE_MAX: u64 = 16 << 10;
/// The permissions of users other than the owner.
const OTHERS: u32 = 0o077;
/// The uid of root.
const ROOT: u32 = 0;

/// Reads a file with a secret. Returns `None` if the file does not exist.
///
/// A regular file must belong to the reader, and other users must have no access to it. Root may
/// read the files of all users. Other kinds of files are not checked: the writer of a pipe, for
/// example of a shell's process substitution (`/dev/fd/63`), decides who gets the secret.
///
/// # Errors
/// [`IdentityError::Exposed`] or [`IdentityError::OtherOwner`] if the file is not secret;
/// [`IdentityError::File`] if it cannot be read, or if it is longer than 16 KiB.
pub fn read_secret(path: &Path) -> Result<Option<String>, IdentityError> {
    let fail = |reason: String| IdentityError::File { path: path.to_owned(), reason };
    let refused =
        |e: std::io::Error| fail(format!("cannot be read: {e}; check the path and its permissions"));
    let file = match File::open(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(refused)?,
    };
    // These are the properties of the open file, so they hold for the content.
    let metadata = file.metadata().map_err(refused)?;
    if metadata.is_file() {
        check_access(path, &metadata, rustix::process::geteuid().as_raw())?;
    }
    let mut text = String::new();
    file.take(SIZE_MAX + 1).read_to_string(&mut text).map_err(refused)?;
    if text.len() as u64 > SIZE_MAX {
        return Err(fail(format!(
            "has more than {SIZE_MAX} bytes, so it is no file with a key; name another file"
        )));
    }
    Ok(Some(text))
}

/// Checks that only the user `reader` has access to the file, or that the user is root.
fn check_access(path: &Path, metadata: &Metadata, reader: u32) -> Result<(), IdentityError> {
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o777);
    if owner != reader && reader != ROOT {
        return Err(IdentityError::OtherOwner { path: path.to_owned(), owner, reader });
    }
    if mode & OTHERS != 0 {
        return Err(IdentityError::Exposed { path: path.to_owned(), mode });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_that_other_users_have_access_to_is_refused_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, "secret").unwrap();
        for mode in [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o666, 0o777, 0o440] {
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let error = read_secret(&path).unwrap_err();
            assert_eq!(error, IdentityError::Exposed { path: path.clone(), mode });
            let text = error.to_string();
            assert!(text.contains(&format!("chmod 600 {}", path.display())), "{text}");
            assert!(text.contains(&format!("{mode:03o}")), "{text}");
        }
        for mode in [0o600, 0o400, 0o700] {
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert_eq!(read_secret(&path).unwrap().as_deref(), Some("secret"));
        }
    }

    #[test]
    fn only_root_may_read_the_secret_of_another_user() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, "secret").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let metadata = path.metadata().unwrap();
        let (owner, other) = (metadata.uid(), metadata.uid() + 1);
        assert_eq!(check_access(&path, &metadata, owner), Ok(()));
        assert_eq!(check_access(&path, &metadata, ROOT), Ok(()));
        let error = check_access(&path, &metadata, other).unwrap_err();
        assert_eq!(error, IdentityError::OtherOwner { path: path.clone(), owner, reader: other });
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let error = check_access(&path, &path.metadata().unwrap(), ROOT).unwrap_err();
        assert!(matches!(error, IdentityError::Exposed { mode: 0o644, .. }), "{error}");
    }

    #[test]
    fn a_secret_can_come_through_a_pipe() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let mut writer = File::from(writer);
        writer.write_all(b"secret").unwrap();
        drop(writer);
        let path = format!("/dev/fd/{}", reader.as_raw_fd());
        assert_eq!(read_secret(path.as_ref()).unwrap().as_deref(), Some("secret"));
    }

    #[test]
    fn a_missing_file_is_no_error_and_other_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read_secret(&dir.path().join("none")), Ok(None));
        assert!(matches!(read_secret(dir.path()), Err(IdentityError::File { .. })));
        // A device without end.
        let error = read_secret("/dev/zero".as_ref()).unwrap_err().to_string();
        assert!(error.contains("more than 16384 bytes"), "{error}");
        let path = dir.path().join("long");
        std::fs::write(&path, "x".repeat(SIZE_MAX as usize + 1)).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert!(matches!(read_secret(&path), Err(IdentityError::File { .. })));
    }
}
