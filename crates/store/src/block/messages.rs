//! What goes to a target's core and what comes from it.

use bytes::Bytes;
use futures::channel::oneshot;

use super::checkpoint::{Checkpoint, Done};
use super::index::{Found, Index};
use super::io::{IoDone, IoRequest};
use super::need::Need;
use crate::{Result, StageId, StoreError, StoreReply, StoreRequest};

pub(crate) type Reply = oneshot::Sender<Result<StoreReply>>;

/// What the store's handle sends to the target's core.
#[derive(Debug)]
pub(crate) enum Command {
    Request(StoreRequest, Reply),
    /// A stage that has its name and was promised its blocks already.
    StagePromised(StageId, u64),
    StageRelease(StageId),
}

/// Sends the reply to a request. The caller may no longer wait for it.
pub(crate) fn send<T: Into<StoreReply>>(reply: Reply, result: Result<T>) {
    let _ = reply.send(result.map(Into::into));
}

/// Blocking work for another thread.
#[derive(Debug)]
pub(crate) enum Work {
    /// Read the index for a call.
    Load { op: u64, generation: u64, needs: Vec<Need> },
    /// Bring the index forward.
    Checkpoint(Box<Checkpoint>),
}

/// Something that happened.
#[derive(Debug)]
pub(crate) enum Event {
    Io(IoDone),
    Loaded { op: u64, generation: u64, needs: Vec<Need>, found: Result<Vec<Answer>> },
    Checkpointed(Result<Done>),
}

/// What a [`Need`] of the index turned out to be.
#[derive(Debug)]
pub(crate) enum Answer {
    Key(Option<Bytes>),
    Range(Found),
}

/// Reads the index for [`Work::Load`].
pub(crate) fn load(index: &Index, needs: &[Need]) -> Result<Vec<Answer>> {
    /// Bytes that one scan reads at most, about.
    const SCAN_BYTES: usize = 4 << 20;
    needs
        .iter()
        .map(|need| match need {
            Need::Key(key) => Ok(Answer::Key(index.get_many(std::slice::from_ref(key))?.pop().flatten())),
            Need::Range { from, to, limit } => Ok(Answer::Range(index.scan(from, to, *limit, SCAN_BYTES)?)),
            Need::Block(_) => Ok(Answer::Key(None)),
        })
        .collect()
}

/// What the driver is to do.
#[derive(Debug, Default)]
pub(crate) struct Output {
    pub(crate) io: Vec<IoRequest>,
    pub(crate) work: Vec<Work>,
}

/// Replies to a request that is not carried out.
pub(crate) fn refuse(command: Command, error: &StoreError) {
    if let Command::Request(_, reply) = command {
        let _ = reply.send(Err(error.clone()));
    }
}
