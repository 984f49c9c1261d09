//! [`BlockTransform`]: the place where the osd transforms the blocks of objects on their way to the
//! store and back.
//!
//! Encryption of stored data will be a transform. It belongs between the placement group and its
//! store: before the data is divided among targets, and after checksums were verified. Until then, the
//! only transform is [`Unchanged`].

use base::block::Payload;
use store::{Op, ReadData, StoreRequest, WriteSource};

/// Transforms blocks of 4 KiB. A transform keeps the number and the length of the blocks. The last
/// block of an object may be shorter.
pub(crate) trait BlockTransform {
    /// Transforms blocks that will be stored, with their checksums.
    fn outgoing(&self, blocks: Payload) -> Payload;

    /// Transforms blocks that were stored, with their checksums.
    fn incoming(&self, blocks: ReadData) -> ReadData;

    /// Transforms the blocks in a request to a store.
    fn request(&self, request: StoreRequest) -> StoreRequest {
        match request {
            StoreRequest::StageWrite { stage, offset, payload } => {
                StoreRequest::StageWrite { stage, offset, payload: self.outgoing(payload) }
            }
            StoreRequest::Transact { mut transaction, incarnation } => {
                for op in &mut transaction.ops {
                    if let Op::Write { source: WriteSource::Inline(payload), .. } = op {
                        *payload = self.outgoing(std::mem::take(payload));
                    }
                }
                StoreRequest::Transact { transaction, incarnation }
            }
            other => other,
        }
    }
}

/// Stores blocks as they are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unchanged;

impl BlockTransform for Unchanged {
    fn outgoing(&self, blocks: Payload) -> Payload {
        blocks
    }

    fn incoming(&self, blocks: ReadData) -> ReadData {
        blocks
    }
}
