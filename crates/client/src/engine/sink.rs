//! Where the data of a read goes.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use wire::BulkDescriptor;

/// Where the data of a read goes.
#[derive(Debug, Clone)]
pub enum Sink {
    /// Into the answer, as chunks that the engine allocates.
    Bytes,
    /// Into memory of the caller.
    Memory(Arc<dyn SinkMemory>),
    /// Into memory that a bulk descriptor names: a gateway passes on the memory of an application.
    /// No engine takes it today; all refuse it with [`Error::Unsupported`](crate::Error::Unsupported).
    Descriptor(BulkDescriptor),
}

/// Memory of the caller that a read fills. Its length is that of the range that is read.
pub trait SinkMemory: fmt::Debug + Send + Sync {
    /// Takes bytes `offset..offset + data.len()` of the range. Chunks come in any order, within the
    /// range that was asked for; they do not overlap within an attempt. Every attempt of a read begins
    /// anew, so later chunks replace earlier ones. Must not block: the thread of the network calls it.
    fn put(&self, offset: u64, data: Bytes);
}
