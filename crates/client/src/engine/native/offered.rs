//! The data that a change offers to the node.

use base::BoxFuture;
use base::block::Payload;
use messenger::BulkSource;

use crate::engine::Source;

/// Data of a change, and the data's offset in the object.
#[derive(Debug)]
pub(crate) struct OfferedSource {
    pub(crate) source: Source,
    /// Offset of the first byte in the object, in bytes.
    pub(crate) offset: u64,
}

impl BulkSource for OfferedSource {
    fn len(&self) -> u64 {
        self.source.len()
    }

    fn block_offset(&self) -> u64 {
        self.offset % base::block::BLOCK
    }

    fn read(&self, offset: u64, len: usize) -> BoxFuture<'_, Result<Payload, String>> {
        Box::pin(async move {
            if offset.checked_add(len as u64).is_none_or(|end| end > self.source.len()) {
                return Err(format!("the node requested bytes {offset}+{len}, which are outside the data"));
            }
            let data = self.source.read(offset, len).await.map_err(|e| e.to_string())?;
            Ok(Payload::compute(self.offset + offset, data))
        })
    }

    fn memory(&self) -> Option<Payload> {
        match &self.source {
            Source::Bytes(data) => Some(Payload::compute(self.offset, data.clone())),
            Source::Segments(_) | Source::File { .. } | Source::Descriptor(_) => None,
        }
    }
}
