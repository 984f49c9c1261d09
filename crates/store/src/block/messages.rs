//! Inputs and outputs of a target's core.

use std::sync::Arc;

use bytes::Bytes;
use futures::channel::oneshot;

use super::changes::Changes;
use super::checkpoint::{Checkpoint, CheckpointOutcome};
use super::index::{EntryBatch, Index};
use super::io::{IoDone, IoRequest};
use super::need::Need;
use crate::{Result, StageId, StoreError, StoreReply, StoreRequest};

pub(crate) type ReplySender = oneshot::Sender<Result<StoreReply>>;

/// Commands from the store's handle to the target's core.
#[derive(Debug)]
pub(crate) enum CoreCommand {
    Request(StoreRequest, ReplySender),
    /// Creates a stage. The stage's number is already assigned, and its blocks are already
    /// promised. The second value is the stage's length in bytes.
    StagePromised(StageId, u64),
    StageRelease(StageId),
}

/// Sends the reply to a request. Ignores the error if the caller no longer waits.
pub(crate) fn send<T: Into<StoreReply>>(reply: ReplySender, result: Result<T>) {
    let _ = reply.send(result.map(Into::into));
}

/// Blocking work that the driver hands to another thread.
#[derive(Debug)]
pub(crate) enum BlockingWork {
    /// Reads the index for a call.
    Load { op: u64, generation: u64, needs: Vec<Need> },
    /// Updates the index.
    Checkpoint(Box<Checkpoint>),
    /// Drops changes that are on the drive, which takes long if they are many.
    Discard(Arc<Changes>),
}

/// An event that the driver passes to the core.
#[derive(Debug)]
pub(crate) enum CoreEvent {
    Io(IoDone),
    Loaded {
        op: u64,
        generation: u64,
        needs: Vec<Need>,
        found: Result<Vec<NeedAnswer>>,
    },
    /// Progress of the running checkpoint, in thousandths.
    CheckpointAdvanced(u64),
    Checkpointed(Result<CheckpointOutcome>),
}

/// Answer to a [`Need`] of the index.
#[derive(Debug)]
pub(crate) enum NeedAnswer {
    Key(Option<Bytes>),
    Range(EntryBatch),
}

/// Reads the index for [`BlockingWork::Load`].
///
/// # Errors
/// [`StoreError::Poisoned`] if a read fails, and a write of the index has failed: no later read can succeed
/// before a remount.
pub(crate) fn load(index: &Index, needs: &[Need]) -> Result<Vec<NeedAnswer>> {
    /// Approximate maximum number of bytes that one scan reads.
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
        .collect::<Result<_>>()
        .map_err(|error| match index.has_failed() {
            true => StoreError::Poisoned(format!("write of the index ({error})")),
            false => error,
        })
}

/// Work that the core requests from the driver.
#[derive(Debug, Default)]
pub(crate) struct CoreOutput {
    pub(crate) io: Vec<IoRequest>,
    pub(crate) work: Vec<BlockingWork>,
}

/// Replies with an error to a command that the core does not execute.
pub(crate) fn refuse(command: CoreCommand, error: &StoreError) {
    if let CoreCommand::Request(_, reply) = command {
        let _ = reply.send(Err(error.clone()));
    }
}
