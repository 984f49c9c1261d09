//! Virtual disks on objects.
//!
//! A disk is a stack of layers of chunks. The top layer takes the writes. A snapshot freezes the top
//! layer and puts a new one on it; a clone begins with a new layer on the layers of a snapshot. A chunk
//! of a layer is one object, which its first write creates at full size. If an older layer has the
//! chunk, the object begins as a copy that shares the data (`Inherit`). A read falls back to older
//! layers.
//!
//! ```text
//!   disk "vm"                                      clone "vm2" of vm@monday
//!   layer 9  chunk 0 ·  2  ◀─ writes               layer 12  · · 2  ◀─ writes
//!   layer 4  chunk 0 1  ·  ◀─ snapshot "monday" ──────┘
//! ```
//!
//! All objects of a pool's disks are in the namespace [`NAMESPACE`]:
//!
//! ```text
//! directory                 omap: names of disks, clones of layers, next free id
//! header/ID                 the disk: size, layers, snapshots, owner
//! LAYER/ROOT.INDEX          a chunk; all versions of a chunk have the placement key ROOT.INDEX
//! ```
//!
//! [`Disks`] manages the disks of a pool. An [`AttachedDisk`] executes the requests of front ends. It is
//! the exclusive owner of its disk: it has a session of its own, and fences the sessions of earlier
//! owners before its first request. A [`SnapshotReader`] reads a snapshot, and needs no owner.

mod attached;
mod chunk_piece;
mod chunks;
mod directory;
mod disks;
mod enduring;
mod error;
mod gate;
mod header;
mod layers;
mod names;
mod owners;
mod snapshot_reader;
mod upkeep;

pub use attached::{AttachOptions, AttachedDisk};
pub use disks::{CreateOptions, DiskUsage, Disks};
pub use error::{Error, Result};
pub use header::{DiskHeader, DiskLayer, DiskOwner, DiskSnapshot, Parent};
pub use names::{CHUNK_DEFAULT, CHUNK_MAX, CHUNK_MIN, NAMESPACE, SIZE_MAX, SnapshotName, check_name};
pub use owners::OpenSession;
pub use snapshot_reader::SnapshotReader;
pub use upkeep::DiskWorker;
