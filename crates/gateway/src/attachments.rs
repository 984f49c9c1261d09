//! [`AttachmentFile`]: the list of attachments, which survives restarts of the gateway.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use wire::FrontEnd;

/// A disk that the gateway has attached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskAttachment {
    /// Name of the pool.
    pub pool: String,
    /// Name of the disk.
    pub disk: String,
    /// How guests or clients reach the disk.
    pub front_end: FrontEnd,
    /// Whether they may only read.
    pub is_read_only: bool,
}

impl DiskAttachment {
    /// Returns the name of the disk with its pool: `POOL/DISK`.
    #[must_use]
    pub fn place(&self) -> String {
        format!("{}/{}", self.pool, self.disk)
    }
}

/// The file with the list of attachments, in JSON.
#[derive(Debug, Clone)]
pub struct AttachmentFile(PathBuf);

impl AttachmentFile {
    /// Names the file.
    #[must_use]
    pub fn at(path: &Path) -> AttachmentFile {
        AttachmentFile(path.to_owned())
    }

    /// Reads the list. It is empty if the file does not exist.
    ///
    /// # Errors
    /// If the file cannot be read, or does not contain a list.
    pub fn load(&self) -> io::Result<Vec<DiskAttachment>> {
        let named = |e: String| io::Error::other(format!("{}: {e}", self.0.display()));
        match std::fs::read(&self.0) {
            Ok(text) => serde_json::from_slice(&text).map_err(|e| named(e.to_string())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(named(e.to_string())),
        }
    }

    /// Replaces the list durably.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, list: &[DiskAttachment]) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(list).map_err(io::Error::other)?;
        let new = self.0.with_extension("new");
        std::fs::write(&new, text)?;
        std::fs::File::open(&new)?.sync_all()?;
        std::fs::rename(&new, &self.0)?;
        let folder = self.0.parent().filter(|folder| !folder.as_os_str().is_empty());
        std::fs::File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_survives_and_a_damaged_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = AttachmentFile::at(&dir.path().join("attachments.json"));
        assert!(file.load().unwrap().is_empty());
        let list = vec![DiskAttachment {
            pool: "p".into(),
            disk: "vm".into(),
            front_end: FrontEnd::Nbd("127.0.0.1:1".into()),
            is_read_only: true,
        }];
        file.save(&list).unwrap();
        assert_eq!(file.load().unwrap(), list);
        std::fs::write(dir.path().join("attachments.json"), "{").unwrap();
        assert!(file.load().unwrap_err().to_string().contains("attachments.json"));
    }
}
