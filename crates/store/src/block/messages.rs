//! What goes to a target's core and what comes from it.

use base::block::Payload;
use bytes::Bytes;
use futures::channel::oneshot;

use super::checkpoint::{Checkpoint, Done};
use super::index::{Found, Index};
use super::io::{IoDone, IoRequest};
use super::query::Query;
use super::view::Need;
use crate::{CollectionId, Result, StageId, StatFs, StoreError, Transaction};

pub(crate) type Reply<T> = oneshot::Sender<Result<T>>;

/// A call of the store.
#[derive(Debug)]
pub(crate) enum Command {
    Stage(u64, Reply<StageId>),
    /// A stage that has its name and was promised its blocks already.
    StagePromised(StageId, u64),
    StageWrite(StageId, u64, Payload, Reply<()>),
    StageRelease(StageId),
    Transaction(Transaction, Reply<()>),
    Query(CollectionId, Query),
    Collections(Reply<Vec<CollectionId>>),
    StatFs(Reply<StatFs>),
    Umount(Reply<()>),
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

/// Answers a call that is not carried out.
pub(crate) fn refuse(command: Command, error: &StoreError) {
    match command {
        Command::Stage(_, reply) => drop(reply.send(Err(error.clone()))),
        Command::StageWrite(.., reply) | Command::Transaction(_, reply) => {
            drop(reply.send(Err(error.clone())))
        }
        Command::StageRelease(_) | Command::StagePromised(..) => {}
        Command::Query(_, query) => query.fail(error.clone()),
        Command::Collections(reply) => drop(reply.send(Err(error.clone()))),
        Command::StatFs(reply) => drop(reply.send(Err(error.clone()))),
        Command::Umount(reply) => drop(reply.send(Err(error.clone()))),
    }
}
