//! [`WitnessFile`]: the file of the osd's witness.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use base::BoxFuture;
use osd::{WitnessAt, WitnessStorage};

use super::dir::DirError;
use super::durable::replace_file;

/// The file of the osd's witness. A write replaces the file atomically and durably, on a thread of
/// its own, because it waits for the drive. A write continues if its future is dropped, so writes may
/// overlap: they run one after the other, and an older content never replaces a newer one.
#[derive(Debug)]
pub struct WitnessFile {
    path: PathBuf,
    /// Number of writes that have begun.
    begun: AtomicU64,
    /// Number of the newest write that has ended. Locked during a write.
    written: Arc<Mutex<u64>>,
}

impl WitnessFile {
    /// Stores the witness in the file at `path`, which need not exist.
    pub fn at(path: &Path) -> WitnessAt {
        let (begun, written) = (AtomicU64::new(0), Arc::default());
        WitnessAt(Arc::new(WitnessFile { path: path.to_owned(), begun, written }))
    }
}

impl WitnessStorage for WitnessFile {
    fn load(&self) -> io::Result<Option<Vec<u8>>> {
        match std::fs::read(&self.path) {
            Ok(content) => Ok(Some(content)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(io::Error::new(e.kind(), format!("{}: {e}", self.path.display()))),
        }
    }

    fn replace(&self, content: Vec<u8>) -> BoxFuture<'static, io::Result<()>> {
        let (path, written) = (self.path.clone(), Arc::clone(&self.written));
        let number = self.begun.fetch_add(1, Ordering::Relaxed) + 1;
        let writing = tokio::task::spawn_blocking(move || {
            let mut written = written.lock().unwrap_or_else(PoisonError::into_inner);
            if *written > number {
                return Ok(());
            }
            replace_file(&path, content)?;
            *written = number;
            Ok(())
        });
        Box::pin(async {
            let written: Result<(), DirError> = writing.await.map_err(io::Error::other)?;
            written.map_err(io::Error::other)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_file_has_the_last_content_and_survives_a_failed_write() {
        let dir = tempfile::tempdir().unwrap();
        let WitnessAt(file) = WitnessFile::at(&dir.path().join("witness"));
        assert_eq!(file.load().unwrap(), None);
        file.replace(b"one".to_vec()).await.unwrap();
        file.replace(b"two".to_vec()).await.unwrap();
        assert_eq!(file.load().unwrap(), Some(b"two".to_vec()));
        std::os::unix::fs::symlink("/dev/full", dir.path().join("witness.new")).unwrap();
        let error = file.replace(b"three".to_vec()).await.unwrap_err().to_string();
        assert!(error.contains("is full; free some space"), "{error}");
        assert_eq!(file.load().unwrap(), Some(b"two".to_vec()));
    }
}
