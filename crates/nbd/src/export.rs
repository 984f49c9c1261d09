//! [`Export`] and [`Exports`]: the disks that clients can choose by name.

use std::collections::BTreeMap;
use std::sync::Arc;

use disk::Disk;

/// A disk that clients can use.
#[derive(Debug, Clone)]
pub struct Export {
    /// The disk.
    pub disk: Arc<dyn Disk>,
    /// Whether clients may only read the disk.
    pub is_read_only: bool,
    /// Text that clients can show to a user, up to 4096 bytes. May be empty.
    pub description: String,
}

/// The exports of a server. Any thread may call it, and calls must not block.
pub trait Exports: Send + Sync {
    /// Returns the export with this name. Clients without a preference ask for the empty name.
    fn find(&self, name: &str) -> Option<Export>;

    /// Returns the name and the description of each export that clients may see in a list. A name has
    /// up to 4096 bytes.
    fn list(&self) -> Vec<(String, String)>;
}

/// A fixed set of exports, by their names.
impl Exports for BTreeMap<String, Export> {
    fn find(&self, name: &str) -> Option<Export> {
        self.get(name).cloned()
    }

    fn list(&self) -> Vec<(String, String)> {
        self.iter().map(|(name, export)| (name.clone(), export.description.clone())).collect()
    }
}
