//! The interface between front ends, such as vhost-user and NBD, and disks.
//!
//! A front end executes the requests of its guest or client on a [`Disk`]. The crate `vdisk`
//! implements disks on objects. This crate implements two disks for tests and measurements:
//! [`NullDisk`], which completes each request at once, and [`MemDisk`], which keeps its content in
//! memory.

mod mem;
mod null;

use std::fmt;
use std::sync::Arc;

use base::BoxFuture;
use bytes::Bytes;
use tokio::sync::watch;

pub use mem::MemDisk;
pub use null::NullDisk;

/// Size of a logical block, in bytes. Offsets and lengths of requests are multiples of this size.
pub const BLOCK: u64 = 512;

/// Result of a request.
pub type Result<T, E = DiskError> = std::result::Result<T, E>;

/// The reason why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The request lies outside the disk, or is not aligned to blocks.
    #[error(
        "{len} bytes at offset {offset} are outside the disk of {size} bytes, or are not aligned to blocks of {BLOCK} bytes"
    )]
    OutOfRange {
        /// Offset of the request, in bytes.
        offset: u64,
        /// Length of the request, in bytes.
        len: u64,
        /// Size of the disk, in bytes.
        size: u64,
    },
    /// The storage has no space left. The request has changed nothing, or a part of its range.
    #[error("no space left: {0}")]
    NoSpace(String),
    /// The disk was attached elsewhere, or was detached. All further requests fail.
    #[error("the disk is no longer attached here: {0}")]
    Detached(String),
    /// The content of the disk is damaged.
    #[error("the data is damaged: {0}")]
    Damaged(String),
    /// The memory of the caller cannot be accessed.
    #[error("the memory of the request cannot be accessed: {0}")]
    Memory(String),
    /// Another failure of the storage, after which later requests may succeed.
    #[error("{0}")]
    Failed(String),
}

/// Properties of a disk that do not change while it is attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskIdentity {
    /// Serial number: up to 20 ASCII characters.
    pub serial: String,
    /// Namespace globally unique identifier (NVMe base specification, section 4.5).
    pub nguid: [u8; 16],
    /// Size of a chunk, in bytes: a power of two. Requests within one chunk are atomic.
    pub chunk: u64,
}

/// A disk, as front ends see it.
///
/// Each request that has succeeded is durable. A request within one chunk is atomic; a longer request
/// may take effect in part before it fails. Overlapping requests in flight take effect in any order.
/// While the storage is unavailable, requests wait. The disk executes any number of requests at the
/// same time; the front end limits their number. A dropped future leaves the outcome of its request
/// open, and the request may take effect until [`quiesce`](Self::quiesce) returns.
///
/// Any thread may call a disk. A request starts at the first poll of its future.
pub trait Disk: Send + Sync + fmt::Debug {
    /// Returns the properties of the disk that do not change.
    fn identity(&self) -> &DiskIdentity;

    /// Returns the size of the disk in bytes, now and after each later change.
    fn size(&self) -> watch::Receiver<u64>;

    /// Reads `len` bytes. The result has exactly this length.
    fn read(&self, offset: u64, len: u64) -> BoxFuture<'static, Result<Vec<Bytes>>>;

    /// Reads into memory of the caller, as many bytes as the memory has.
    fn read_into(&self, offset: u64, memory: Arc<dyn Memory>) -> BoxFuture<'static, Result<()>>;

    /// Writes bytes.
    fn write(&self, offset: u64, data: Vec<Bytes>) -> BoxFuture<'static, Result<()>>;

    /// Writes all bytes of memory of the caller.
    fn write_from(&self, offset: u64, memory: Arc<dyn Memory>) -> BoxFuture<'static, Result<()>>;

    /// Makes a range read as zeros, and gives back its space where that is possible.
    fn discard(&self, offset: u64, len: u64) -> BoxFuture<'static, Result<()>>;

    /// Makes a range read as zeros. With `keeps_space`, later writes to the range need no new space,
    /// where the storage can promise that.
    fn write_zeroes(&self, offset: u64, len: u64, keeps_space: bool) -> BoxFuture<'static, Result<()>>;

    /// Returns which parts of a range have data, as consecutive extents in the order of their offsets.
    /// The first begins at `offset`. The extents cover the range, or at least the first chunk of it.
    fn extents(&self, offset: u64, len: u64) -> BoxFuture<'static, Result<Vec<DiskExtent>>>;

    /// Waits until no request whose future was dropped takes effect any more. A front end calls it before
    /// the first request of a new guest or client.
    fn quiesce(&self) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }
}

/// A range of a disk, which either has data or reads as zeros without taking space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskExtent {
    /// Length, in bytes.
    pub len: u64,
    /// Whether the range has data.
    pub has_data: bool,
}

/// Memory of the caller of a disk: a list of segments, for example of the memory of a virtual machine.
/// Another process may change the bytes at any time.
pub trait Memory: fmt::Debug + Send + Sync {
    /// Returns the length of all segments, in bytes.
    fn len(&self) -> u64;

    /// Returns whether the memory has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies bytes `at..at + to.len()` of the memory.
    ///
    /// # Errors
    /// [`DiskError::Memory`] if the memory does not exist any more.
    fn copy_out(&self, at: u64, to: &mut [u8]) -> Result<()>;

    /// Overwrites bytes `at..at + from.len()` of the memory.
    ///
    /// # Errors
    /// [`DiskError::Memory`] if the memory does not exist any more.
    fn copy_in(&self, at: u64, from: &[u8]) -> Result<()>;
}

/// Checks a range of a request against the size of the disk.
///
/// # Errors
/// [`DiskError::OutOfRange`] if the range is not aligned to blocks, or ends after the disk.
pub fn check_range(offset: u64, len: u64, size: u64) -> Result<()> {
    let is_aligned = offset.is_multiple_of(BLOCK) && len.is_multiple_of(BLOCK);
    match offset.checked_add(len) {
        Some(end) if is_aligned && end <= size => Ok(()),
        _ => Err(DiskError::OutOfRange { offset, len, size }),
    }
}
