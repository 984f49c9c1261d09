//! Destinations of the data of reads.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use wire::BulkDescriptor;

/// Destination of the data of a read.
#[derive(Debug, Clone)]
pub enum Sink {
    /// The reply contains the data, as chunks that the engine allocates.
    Bytes,
    /// The engine writes the data to memory of the caller.
    Memory(Arc<dyn SinkMemory>),
    /// The data is written to memory that a bulk descriptor names. A gateway could use this variant
    /// to let the node write to the memory of an application directly. All engines refuse this
    /// variant today, with [`Error::Unsupported`](crate::Error::Unsupported).
    Descriptor(BulkDescriptor),
}

/// Memory of the caller that a read fills. The memory is as long as the range to read.
pub trait SinkMemory: fmt::Debug + Send + Sync {
    /// Stores bytes `offset..offset + data.len()` of the range. Chunks arrive in any order, and lie
    /// within the requested range. Chunks of one attempt do not overlap. A new attempt of the read
    /// delivers the whole range again, so its chunks replace those of earlier attempts. This method
    /// must not block, because the network thread calls it.
    fn put(&self, offset: u64, data: Bytes);
}
