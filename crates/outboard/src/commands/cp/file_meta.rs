//! The metadata of a copied file, which is stored as an xattr of its object, and the mapping from
//! paths to object names.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};

/// Name of the xattr that contains a [`FileMeta`] as JSON.
pub const XATTR: &[u8] = b"outboard.file";

/// The type of a copied path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileKind {
    /// A regular file; the object's data is its content.
    File,
    /// A symbolic link; the object's data is the link's target.
    Symlink,
    /// A directory; the object has no data, and its name ends in a slash.
    Directory,
}

/// The metadata of a copied file, symlink or directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMeta {
    /// The type of the path.
    pub kind: FileKind,
    /// Permission bits.
    pub mode: u32,
    /// Time of the last change, in nanoseconds since 1970. A copy skips a file if the destination
    /// has the same time and size.
    pub mtime_ns: i64,
    /// The path relative to the copied directory, in hexadecimal, if the path is not valid UTF-8
    /// and the object's name therefore differs from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub raw_path: Option<String>,
}

impl FileMeta {
    /// Extracts the metadata from the result of `lstat`; `None` for sockets, pipes and devices,
    /// which are not copied.
    pub fn of(metadata: &Metadata) -> Option<FileMeta> {
        let kind = match metadata.file_type() {
            t if t.is_symlink() => FileKind::Symlink,
            t if t.is_dir() => FileKind::Directory,
            t if t.is_file() => FileKind::File,
            _ => return None,
        };
        let mtime_ns = metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec());
        Some(FileMeta { kind, mode: metadata.mode() & 0o7777, mtime_ns, raw_path: None })
    }

    /// Encodes the metadata as the value of the xattr.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Decodes the value of the xattr; `None` if the value is not valid metadata.
    pub fn decode(xattr: &[u8]) -> Option<FileMeta> {
        serde_json::from_slice(xattr).ok()
    }

    /// Decodes [`FileMeta::raw_path`]; `None` if there is none or if it is not valid hexadecimal.
    pub fn raw_path_bytes(&self) -> Option<Vec<u8>> {
        let hex = self.raw_path.as_deref()?;
        if hex.len() % 2 != 0 || !hex.is_ascii() {
            return None;
        }
        (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).ok()).collect()
    }
}

/// Returns the object name of a path, and the value of [`FileMeta::raw_path`]. A path of valid
/// UTF-8 is used unchanged after the prefix. In any other path, each invalid byte becomes `%xx`,
/// and a hash of the whole path is appended, so that different paths get different names.
pub fn object_name(prefix: &str, path: &[u8]) -> (String, Option<String>) {
    if let Ok(text) = std::str::from_utf8(path) {
        return (format!("{prefix}{text}"), None);
    }
    let mut name = prefix.to_owned();
    for chunk in path.utf8_chunks() {
        name.push_str(chunk.valid());
        chunk.invalid().iter().for_each(|b| name.push_str(&format!("%{b:02x}")));
    }
    let slash = name.ends_with('/');
    name.truncate(name.len() - usize::from(slash));
    name.push_str(&format!(".{:08x}", base::block::crc32c(path)));
    name.push_str(if slash { "/" } else { "" });
    (name, Some(path.iter().map(|b| format!("{b:02x}")).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_not_utf8_is_preserved_byte_for_byte() {
        let path = b"caf\xe9/menu";
        let (name, raw) = object_name("tree/", path);
        assert!(name.starts_with("tree/caf%e9/menu."), "{name}");
        let meta = FileMeta { kind: FileKind::File, mode: 0o644, mtime_ns: -1, raw_path: raw };
        let back = FileMeta::decode(&meta.encode()).unwrap();
        assert_eq!(back, meta);
        assert_eq!(back.raw_path_bytes().unwrap(), path);
        assert_ne!(name, object_name("tree/", b"caf%e9/menu").0);
    }

    #[test]
    fn invalid_metadata_in_the_xattr_is_rejected() {
        assert_eq!(FileMeta::decode(b"{}"), None);
        let odd = FileMeta { kind: FileKind::File, mode: 0, mtime_ns: 0, raw_path: Some("0g".into()) };
        assert_eq!(odd.raw_path_bytes(), None);
        let odd = FileMeta { raw_path: Some("abc".into()), ..odd };
        assert_eq!(odd.raw_path_bytes(), None);
    }
}
