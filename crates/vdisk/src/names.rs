//! Names of disks and snapshots, and of their objects.

use bytes::Bytes;

use crate::{Error, Result};

/// Namespace of the objects of disks.
pub const NAMESPACE: &str = "_disk";
/// Name of the directory object.
pub(crate) const DIRECTORY: &str = "directory";
/// Minimum size of a chunk, in bytes.
pub const CHUNK_MIN: u64 = 1 << 20;
/// Default size of a chunk, in bytes.
pub const CHUNK_DEFAULT: u64 = 4 << 20;
/// Maximum size of a chunk, in bytes.
pub const CHUNK_MAX: u64 = 16 << 20;
/// Maximum size of a disk, in bytes.
pub const SIZE_MAX: u64 = 64 << 40;
/// Maximum length of the name of a disk or of a snapshot, in bytes.
pub(crate) const NAME_MAX: usize = 128;

/// Names a snapshot: `DISK@SNAPSHOT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotName {
    /// Name of the disk.
    pub disk: String,
    /// Name of the snapshot.
    pub snapshot: String,
}

impl std::str::FromStr for SnapshotName {
    type Err = Error;

    fn from_str(text: &str) -> Result<SnapshotName> {
        let Some((disk, snapshot)) = text.split_once('@') else {
            return Err(Error::Argument(format!("\"{text}\" names no snapshot; write DISK@SNAPSHOT")));
        };
        check_name("disk", disk)?;
        check_name("snapshot", snapshot)?;
        Ok(SnapshotName { disk: disk.to_owned(), snapshot: snapshot.to_owned() })
    }
}

/// Checks the name of a disk or of a snapshot; `what` is "disk" or "snapshot".
///
/// # Errors
/// [`Error::Argument`] unless it has 1 to 128 letters, digits, `.`, `_` or `-`, and begins with a letter or
/// digit.
pub fn check_name(what: &str, name: &str) -> Result<()> {
    let is_inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let is_valid = name.len() <= NAME_MAX
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(is_inner);
    if is_valid {
        return Ok(());
    }
    Err(Error::Argument(format!(
        "\"{}\" is not a valid name of a {what}; use 1 to {NAME_MAX} letters, digits, '.', '_' and '-', and begin \
         with a letter or digit",
        name.escape_debug()
    )))
}

/// Returns the name of the header of a disk.
pub(crate) fn header(id: u64) -> String {
    format!("header/{id:x}")
}

/// Returns the name of a chunk's object in a layer. `root` is the id of the first disk of a family of
/// clones.
pub(crate) fn chunk(layer: u64, root: u64, index: u64) -> String {
    format!("{layer:x}/{root:x}.{index:x}")
}

/// Returns the prefix of the names of a layer's chunks.
pub(crate) fn layer_prefix(layer: u64) -> String {
    format!("{layer:x}/")
}

/// Returns the number of a chunk from the name of its object; `None` if it is not the name of a chunk.
pub(crate) fn index_of(name: &str) -> Option<u64> {
    let (_, key) = name.split_once('/')?;
    let (_, index) = key.split_once('.')?;
    u64::from_str_radix(index, 16).ok()
}

/// Returns the key of a disk's entry in the directory.
pub(crate) fn name_key(name: &str) -> Bytes {
    [b"n/", name.as_bytes()].concat().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_chunks_show_their_number_and_share_their_placement_key() {
        assert_eq!(chunk(10, 1, 255), "a/1.ff");
        assert_eq!(index_of("a/1.ff"), Some(255));
        for other in ["directory", "header/1", "a/1", "a/1.x", ""] {
            assert_eq!(index_of(other), None, "{other}");
        }
        let key = |layer| wire::placement::key(NAMESPACE, &chunk(layer, 1, 7)).to_owned();
        assert_eq!(key(2), key(3));
        assert!(wire::is_system_namespace(NAMESPACE));
    }

    #[test]
    fn invalid_names_are_refused() {
        let named: SnapshotName = "vm@monday".parse().unwrap();
        assert_eq!((&*named.disk, &*named.snapshot), ("vm", "monday"));
        for name in ["vm", "@x", "vm@", "a/b@x", "vm@x@y", ".vm@x", "v m@x"] {
            assert!(name.parse::<SnapshotName>().is_err(), "{name}");
        }
        assert!(check_name("disk", &"x".repeat(129)).is_err());
    }
}
