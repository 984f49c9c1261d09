//! Inputs and outputs of a target's core.

use bytes::Bytes;
use futures::channel::oneshot;

use super::checkpoint::{Checkpoint, CheckpointOutcome};
use super::index::{EntryBatch, Index};
use super::io::{IoDone, IoRequest};
use super::need::Need;
use crate::{Result, StageId, StoreError, StoreReply, StoreRequest};

pub(crate) type ReplySender = oneshot::Sender<Result<StoreReply>>;

/// What the store's handle sends to the target's core.
#[derive(Debug)]
pub(crate) enum CoreCommand {
    Request(StoreRequest, ReplySender),
    /// A stage that has its name and was promised its blocks already.
    StagePromised(StageId, u64),
    StageRelease(StageId),
}

/// Sends the reply to a request. The caller may no longer wait for it.
pub(crate) fn send<T: Into<StoreReply>>(reply: ReplySender, result: Result<T>) {
    let _ = reply.send(result.map(Into::into));
}

/// Blocking work for another thread.
#[derive(Debug)]
pub(crate) enum BlockingWork {
    /// Read the index for a call.
    Load { op: u64, generation: u64, needs: Vec<Need> },
    /// Bring the index forward.
    Checkpoint(Box<Checkpoint>),
}

/// Something that happened.
#[derive(Debug)]
pub(crate) enum CoreEvent {
    Io(IoDone),
    Loaded { op: u64, generation: u64, needs: Vec<Need>, found: Result<Vec<NeedAnswer>> },
    Checkpointed(Result<CheckpointOutcome>),
}

/// What a [`Need`] of the index turned out to be.
#[derive(Debug)]
pub(crate) enum NeedAnswer {
    Key(Option<Bytes>),
    Range(EntryBatch),
}

/// Reads the index for [`Work::Load`].
pub(crate) fn load(index: &Index, needs: &[Need]) -> Result<Vec<NeedAnswer>> {
    /// Bytes that one scan reads at most, about.
    const SCAN_BYTES: usize = 4 << 20;
    needs
        .iter()
        .map(|need| match need {
            Need::Key(key) => Ok(NeedAnswer::Key(index.get_many(std::slice::from_ref(key))?.pop().flatten())),
            Need::Range { from, to, limit } => {
                Ok(NeedAnswer::Range(index.scan(from, to, *limit, SCAN_BYTES)?))
            }
            Need::Block(_) => Ok(NeedAnswer::Key(None)),
        })
        .collect()
}

/// What the driver is to do.
#[derive(Debug, Default)]
pub(crate) struct CoreOutput {
    pub(crate) io: Vec<IoRequest>,
    pub(crate) work: Vec<BlockingWork>,
}

/// Replies to a request that is not carried out.
pub(crate) fn refuse(command: CoreCommand, error: &StoreError) {
    if let CoreCommand::Request(_, reply) = command {
        let _ = reply.send(Err(error.clone()));
    }
}
