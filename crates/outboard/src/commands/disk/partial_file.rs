//! [`PartialFile`]: the output file of an export until it is complete, with a record of its progress.
//!
//! ```text
//! FILE.part        the data so far, at full size
//! FILE.part.json   an ExportRecord: all bytes before "done" are in FILE.part, durably
//! ```

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// What an export copies. Two exports with equal values copy the same bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportedContent {
    /// `POOL/DISK` or `POOL/DISK@SNAPSHOT`.
    pub source: String,
    /// The identifier of the disk, as hexadecimal digits.
    pub nguid: String,
    /// Number of the attachment of a disk; number of the newest layer of a snapshot.
    pub epoch: u64,
    /// Size, in bytes.
    pub size: u64,
}

/// The progress of an export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ExportRecord {
    #[serde(flatten)]
    content: ExportedContent,
    /// Offset up to which the data is complete, in bytes.
    done: u64,
}

/// The output file of an export in progress. A value that is dropped leaves the file, so that a later
/// export can continue.
#[derive(Debug)]
pub struct PartialFile {
    file: Arc<File>,
    destination: PathBuf,
}

impl PartialFile {
    /// Opens or creates the partial file of `destination`, and locks it.
    ///
    /// # Errors
    /// If another export writes it, or an error of the system.
    pub fn open(destination: &Path) -> io::Result<PartialFile> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(part(destination))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::other("another export writes this file; wait for its end"));
            }
            Err(TryLockError::Error(e)) => return Err(e),
        }
        Ok(PartialFile { file: Arc::new(file), destination: destination.to_owned() })
    }

    /// Returns the offset up to which an earlier export has copied `content`; `None` if there is no
    /// record of one, or if it has copied another content.
    ///
    /// # Errors
    /// If the record cannot be read.
    pub fn resumed(&self, content: &ExportedContent) -> io::Result<Option<u64>> {
        let bytes = match fs::read(record(&self.destination)) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            bytes => bytes?,
        };
        let Ok(record) = serde_json::from_slice::<ExportRecord>(&bytes) else { return Ok(None) };
        let has_size = self.file.metadata()?.len() == content.size;
        let fits = record.content == *content && has_size && record.done <= content.size;
        Ok(fits.then_some(record.done))
    }

    /// Begins from the start: makes the file a hole of `size` bytes.
    ///
    /// # Errors
    /// An error of the system.
    pub fn restart(&self, size: u64) -> io::Result<()> {
        match fs::remove_file(record(&self.destination)) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        self.file.set_len(0)?;
        self.file.set_len(size)
    }

    /// Writes bytes at an offset.
    ///
    /// # Errors
    /// An error of the system.
    pub async fn write(&self, offset: u64, data: Vec<Bytes>) -> io::Result<()> {
        let file = Arc::clone(&self.file);
        let write = move || {
            let mut at = offset;
            for piece in data {
                file.write_all_at(&piece, at)?;
                at += piece.len() as u64;
            }
            Ok(())
        };
        tokio::task::spawn_blocking(write).await.map_err(io::Error::other)?
    }

    /// Records that all bytes before `done` are complete.
    ///
    /// # Errors
    /// An error of the system.
    pub async fn checkpoint(&self, content: &ExportedContent, done: u64) -> io::Result<()> {
        let (file, record_path) = (Arc::clone(&self.file), record(&self.destination));
        let bytes = serde_json::to_vec(&ExportRecord { content: content.clone(), done })?;
        let write = move || {
            // The record must not be durable before the data.
            file.sync_data()?;
            let new = record_path.with_extension("new");
            let mut file = File::create(&new)?;
            file.write_all(&bytes)?;
            file.sync_data()?;
            fs::rename(&new, &record_path)
        };
        tokio::task::spawn_blocking(write).await.map_err(io::Error::other)?
    }

    /// Gives the complete file its final name.
    ///
    /// # Errors
    /// If the file has not the size `size`, or an error of the system.
    pub fn finish(self, size: u64) -> io::Result<()> {
        let found = self.file.metadata()?.len();
        if found != size {
            let why = format!("the file has {found} bytes instead of {size}; another program has changed it");
            return Err(io::Error::other(why));
        }
        self.file.sync_all()?;
        fs::rename(part(&self.destination), &self.destination)?;
        match fs::remove_file(record(&self.destination)) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}

fn part(destination: &Path) -> PathBuf {
    with_suffix(destination, ".part")
}

fn record(destination: &Path) -> PathBuf {
    with_suffix(destination, ".part.json")
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(epoch: u64) -> ExportedContent {
        ExportedContent { source: "p/vm".into(), nguid: "0a".into(), epoch, size: 8192 }
    }

    #[tokio::test]
    async fn an_export_continues_only_with_the_same_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let file = PartialFile::open(&path).unwrap();
        assert_eq!(file.resumed(&content(1)).unwrap(), None);
        file.restart(8192).unwrap();
        file.write(512, vec![Bytes::from_static(&[7; 512]), Bytes::from_static(&[8; 512])]).await.unwrap();
        file.checkpoint(&content(1), 4096).await.unwrap();
        assert!(PartialFile::open(&path).is_err(), "another export must not write the file");
        drop(file);

        let file = PartialFile::open(&path).unwrap();
        assert_eq!(file.resumed(&content(1)).unwrap(), Some(4096));
        assert_eq!(file.resumed(&content(2)).unwrap(), None);
        assert!(!path.exists());
        file.finish(8192).unwrap();
        let bytes = fs::read(&path).unwrap();
        assert!(bytes.len() == 8192 && bytes[512..1024] == [7; 512] && bytes[1024..1536] == [8; 512]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no other file remains");
    }

    #[tokio::test]
    async fn a_damaged_record_or_a_file_of_another_size_starts_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let file = PartialFile::open(&path).unwrap();
        file.restart(8192).unwrap();
        file.checkpoint(&content(1), 4096).await.unwrap();
        file.file.set_len(4096).unwrap();
        assert_eq!(file.resumed(&content(1)).unwrap(), None);
        file.file.set_len(8192).unwrap();
        fs::write(record(&path), "{").unwrap();
        assert_eq!(file.resumed(&content(1)).unwrap(), None);
        file.file.set_len(8191).unwrap();
        assert!(file.finish(8192).is_err() && !path.exists());
    }
}
