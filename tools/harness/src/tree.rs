//! Reads directory trees and compares them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::Result;

/// The file, symbolic link or directory at one path of a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TreeEntry {
    /// A regular file: permission bits and the SHA-256 of its content.
    File(u32, [u8; 32]),
    /// A symbolic link: its target.
    Symlink(Vec<u8>),
    /// A directory: permission bits.
    Directory(u32),
}

/// All entries under a root directory. The keys are the paths relative to the root, as bytes.
pub type Tree = BTreeMap<Vec<u8>, TreeEntry>;

/// Reads a whole tree. Sockets, pipes and devices are omitted.
///
/// # Errors
/// If an entry of the tree cannot be read.
pub fn read(root: &Path) -> Result<Tree> {
    let mut tree = Tree::new();
    for entry in walkdir::WalkDir::new(root).min_depth(1) {
        let entry = entry?;
        let name = entry.path().strip_prefix(root)?.as_os_str().as_bytes().to_vec();
        let mode = entry.metadata()?.permissions().mode() & 0o7777;
        let kind = entry.file_type();
        let found = if kind.is_symlink() {
            TreeEntry::Symlink(fs::read_link(entry.path())?.as_os_str().as_bytes().to_vec())
        } else if kind.is_dir() {
            TreeEntry::Directory(mode)
        } else if kind.is_file() {
            TreeEntry::File(mode, sha256(entry.path())?)
        } else {
            continue;
        };
        tree.insert(name, found);
    }
    Ok(tree)
}

/// Returns the SHA-256 of a file's content.
///
/// # Errors
/// If the file cannot be read.
pub fn sha256(path: &Path) -> io::Result<[u8; 32]> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 256 << 10];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finalize().into()),
            n => hasher.update(&buffer[..n]),
        }
    }
}

/// Returns the numbers of files, symlinks and directories, in this order.
#[must_use]
pub fn count(tree: &Tree) -> (usize, usize, usize) {
    tree.values().fold((0, 0, 0), |(f, s, d), e| match e {
        TreeEntry::File(..) => (f + 1, s, d),
        TreeEntry::Symlink(_) => (f, s + 1, d),
        TreeEntry::Directory(_) => (f, s, d + 1),
    })
}

/// Returns the paths at which two trees differ.
#[must_use]
pub fn differences(a: &Tree, b: &Tree) -> Vec<String> {
    let names: std::collections::BTreeSet<&Vec<u8>> = a.keys().chain(b.keys()).collect();
    names.into_iter().filter(|n| a.get(*n) != b.get(*n)).map(|n| n.escape_ascii().to_string()).collect()
}

/// Writes a file of `len` pseudo-random bytes (xorshift, fixed seed), which neither compression nor
/// deduplication can shrink.
///
/// # Errors
/// If the file cannot be written.
pub fn write_noise(path: &Path, len: u64) -> io::Result<()> {
    let mut file = File::create(path)?;
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    let mut left = len;
    let mut buffer = Vec::with_capacity(1 << 20);
    while left > 0 {
        buffer.clear();
        while buffer.len() < (1 << 20) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            buffer.extend_from_slice(&x.to_le_bytes());
        }
        let n = left.min(buffer.len() as u64);
        file.write_all(&buffer[..n as usize])?;
        left -= n;
    }
    file.sync_all()
}
