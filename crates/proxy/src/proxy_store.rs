//! [`ProxyStore`]: the object store that the osd uses for a target on the host.

use std::sync::Arc;

use base::block::{BLOCK, Payload, align_down, align_up};
use base::clock::Instant;
use base::mem::ArenaBuf;
use base::reclaim::Reclaim;
use bytes::Bytes;
use store::{
    CollectionId, MAX_READ, ObjectId, ReadData, Result, StageId, StoreError, StoreFuture, StoreReply,
    StoreRequest, Submit, Transaction, ready,
};
use tokio::sync::oneshot;

use crate::calls::{Answers, Received, deadline, done, retrying, start, submit, unexpected};
use crate::messages::{CallAnswer, StoreCall, unpack_checksums};
use crate::shared::AttachmentHandle;
use crate::store_channel::{
    AnswerTo, AnswerUse, CallAnswered, Delivered, ReadCall, StoreChannel, SubmittedTransaction,
};

/// One target of a store process, as the osd uses it.
///
/// If the store restarts, `ProxyStore` repeats unanswered calls that only read or that create a
/// stage. Any other unanswered call then fails with [`StoreError::Disconnected`], and its outcome
/// is unknown. A call that is made while no store is connected waits for the store to return.
///
/// A read of more than [`AttachmentOptions::largest_request`](crate::AttachmentOptions) is split
/// into several reads. Each of them is atomic, but the whole read is not.
pub struct ProxyStore {
    handle: Arc<AttachmentHandle>,
    target: u16,
}

impl ProxyStore {
    pub(crate) fn new(handle: Arc<AttachmentHandle>, target: u16) -> ProxyStore {
        ProxyStore { handle, target }
    }

    /// Passes a call to the current store channel, or queues it for the next store channel. The
    /// call's position in the order of calls is fixed when this function returns.
    fn start(&self, call: impl FnOnce(&Arc<StoreChannel>, u16, AnswerTo) + Send + 'static) -> Answers {
        start(&self.handle, self.target, call)
    }

    /// Makes a repeatable call on the control socket.
    fn ask(&self, call: StoreCall) -> StoreFuture {
        let (handle, target) = (Arc::clone(&self.handle), self.target);
        let make = move || {
            let call = call.clone();
            start(&handle, target, move |store_channel, target, answer_to| {
                store_channel.call(target, call, AnswerUse::Plain, answer_to);
            })
        };
        let answer = self.repeatable(make);
        Box::pin(async move { reply(answer.await?) })
    }

    /// Issues a call now, and issues it again if its incarnation ends before the answer arrives.
    fn repeatable<A: Future<Output = Received>, M: FnMut() -> A>(
        &self,
        mut make: M,
    ) -> impl Future<Output = Result<CallAnswer>> + use<A, M> {
        let (handle, deadline, first) = (Arc::clone(&self.handle), deadline(&self.handle), make());
        async move { Ok(retrying(&handle, deadline, first, make).await?.answer) }
    }
}

fn release(handle: &AttachmentHandle, target: u16, stage: StageId) {
    handle.shared.with_store_channel(move |store_channel| {
        // If the incarnation has ended, the stage no longer exists.
        if let Ok(store_channel) = store_channel {
            store_channel.stage_release(target, stage);
        }
    });
}

/// The part of a read that one request covers.
#[derive(Clone)]
struct PartialRead {
    cid: CollectionId,
    oid: ObjectId,
    offset: u64,
    len: u64,
}

impl PartialRead {
    /// Length of the blocks that cover this part, in bytes.
    fn cover(&self) -> u64 {
        let end = align_up(self.offset.saturating_add(self.len)).unwrap_or(u64::MAX - u64::MAX % BLOCK);
        if self.len == 0 { 0 } else { end - align_down(self.offset) }
    }

    /// The same part, shortened so that the covering blocks have at most `most` bytes.
    fn clipped(&self, most: u64) -> PartialRead {
        let len = if self.cover() <= most { self.len } else { most - self.offset % BLOCK };
        PartialRead { len, ..self.clone() }
    }

    fn start(&self, handle: &AttachmentHandle, target: u16, dest: Option<ArenaBuf>) -> Answers {
        let window = self.clone();
        start(handle, target, move |store_channel, target, answer_to| {
            let part = window.clipped(store_channel.max_range as u64);
            let cover = part.cover() as usize;
            let dest = dest.filter(|_| part.len == window.len);
            let PartialRead { cid, oid, offset, len } = part;
            store_channel.read(target, ReadCall { cid, oid, offset, len, cover, dest }, answer_to);
        })
    }
}

/// Reads one part after the other until the end of the range or of the object.
async fn read_on(
    handle: Arc<AttachmentHandle>,
    target: u16,
    whole: PartialRead,
    mut until: Instant,
    first: Answers,
) -> Result<ReadData> {
    let mut read: Option<ReadData> = None;
    let mut window = whole.clone();
    let mut answers = first;
    loop {
        let again = || window.start(&handle, target, None);
        let Delivered { answer, data, verified } = retrying(&handle, until, answers, again).await?;
        let CallAnswer::Read { offset, checksums, object_size, .. } = answer else {
            return Err(unexpected());
        };
        if offset != align_down(window.offset) {
            // With an answer for another offset, the loop might never end.
            return Err(unexpected());
        }
        let checksums = unpack_checksums(&checksums)?;
        let data: Vec<Bytes> = data.into_iter().filter(|piece| !piece.is_empty()).collect();
        let part = ReadData { offset, data, checksums, object_size, verified };
        let end = part.offset.saturating_add(part.len());
        let got = part.len();
        let all = match &mut read {
            Some(all) => {
                all.data.extend(part.data);
                all.checksums.extend(part.checksums);
                all.verified &= part.verified;
                all
            }
            None => read.insert(part),
        };
        let wanted = whole.offset.saturating_add(whole.len).min(all.object_size);
        let size = wanted.saturating_sub(all.offset);
        if size > MAX_READ {
            return Err(StoreError::TooLarge {
                what: "the result of one read".into(),
                size,
                limit: MAX_READ,
            });
        }
        if end >= wanted || got == 0 || !end.is_multiple_of(BLOCK) {
            return Ok(read.unwrap_or_default());
        }
        window = PartialRead { offset: end, len: wanted - end, ..window };
        until = deadline(&handle);
        answers = window.start(&handle, target, None);
    }
}

impl Submit for ProxyStore {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        match request {
            StoreRequest::Stage { len } => self.submit_stage(len),
            StoreRequest::StageWrite { stage, offset, payload } => {
                self.submit_stage_write(stage, offset, payload)
            }
            StoreRequest::StageRelease { stage } => {
                release(&self.handle, self.target, stage);
                ready(Ok(StoreReply::Done))
            }
            StoreRequest::Transact { transaction, incarnation } => {
                self.submit_transaction(transaction, incarnation)
            }
            StoreRequest::Read { cid, oid, offset, len, dest } => {
                let whole = PartialRead { cid, oid, offset, len };
                let until = deadline(&self.handle);
                let first = whole.start(&self.handle, self.target, dest);
                let reading = read_on(Arc::clone(&self.handle), self.target, whole, until, first);
                Box::pin(async move { reading.await.map(StoreReply::Read) })
            }
            StoreRequest::Query { cid, query } => self.ask(StoreCall::Query { cid, query }),
            StoreRequest::Collections => self.ask(StoreCall::Collections),
            StoreRequest::Space => self.ask(StoreCall::Space),
            StoreRequest::Umount => {
                let answers = self.start(|store_channel, target, to| {
                    store_channel.call(target, StoreCall::Umount, AnswerUse::Plain, to)
                });
                Box::pin(async move { done(answers).await.map(StoreReply::from) })
            }
        }
    }

    fn incarnation(&self) -> u64 {
        self.handle.shared.incarnation()
    }
}

impl ProxyStore {
    fn submit_stage(&self, len: u64) -> StoreFuture {
        let (handle, target) = (Arc::clone(&self.handle), self.target);
        let make = move || {
            let call = move |store_channel: &Arc<StoreChannel>, target, answer_to| {
                store_channel.call(target, StoreCall::Stage { len }, AnswerUse::Stage, answer_to);
            };
            let made_on = Arc::clone(&handle);
            Reclaim::new(start(&handle, target, call), move |made: CallAnswered| {
                if let Ok(Delivered { answer: CallAnswer::Stage(id), .. }) = made {
                    release(&made_on, target, StageId(id));
                }
            })
        };
        let answer = self.repeatable(make);
        Box::pin(async move { reply(answer.await?) })
    }

    fn submit_stage_write(&self, stage: StageId, offset: u64, payload: Payload) -> StoreFuture {
        let (tx, rx) = oneshot::channel();
        let target = self.target;
        self.handle.shared.with_store_channel(move |store_channel| {
            // The caller may have been cancelled; ignore the error.
            drop(match store_channel {
                Ok(store_channel) => tx.send(write_segments(store_channel, target, stage, offset, payload)),
                Err(e) => tx.send(Err(e.into())),
            });
        });
        Box::pin(async move {
            let segments = rx
                .await
                .unwrap_or_else(|_| Err(StoreError::Disconnected("the attachment was dropped".into())))?;
            for segment in segments {
                done(segment).await?;
            }
            Ok(StoreReply::Done)
        })
    }

    fn submit_transaction(&self, transaction: Transaction, incarnation: Option<u64>) -> StoreFuture {
        if let Err(e) = transaction.validate() {
            return ready(Err(e));
        }
        let (answer_to, answers) = oneshot::channel();
        let (target, answer_to) = (self.target, Some(answer_to));
        submit(&self.handle, vec![SubmittedTransaction { target, incarnation, transaction, answer_to }]);
        Box::pin(async move { done(answers).await.map(StoreReply::from) })
    }
}

/// Converts the answer to a call without data into the store's reply.
fn reply(answer: CallAnswer) -> Result<StoreReply> {
    match answer {
        CallAnswer::Done => Ok(StoreReply::Done),
        CallAnswer::Stage(id) => Ok(StoreReply::Stage(StageId(id))),
        CallAnswer::Query(found) => Ok(StoreReply::Query(found)),
        CallAnswer::Collections(collections) => Ok(StoreReply::Collections(collections)),
        CallAnswer::Space(space) => Ok(StoreReply::Space(space)),
        _ => Err(unexpected()),
    }
}

/// Sends data for a stage in segments of at most one transfer each, without waiting in between.
fn write_segments(
    store_channel: &Arc<StoreChannel>,
    target: u16,
    stage: StageId,
    offset: u64,
    payload: Payload,
) -> Result<Vec<Answers>> {
    let most = store_channel.max_segment();
    let aligned = payload.block_offset() == 0 && offset.is_multiple_of(BLOCK);
    let mut segments = Vec::new();
    let mut send = |offset, payload| {
        let (answer_to, answers) = oneshot::channel();
        store_channel.stage_write(target, stage, offset, payload, answer_to);
        segments.push(answers);
    };
    if payload.len() <= most {
        send(offset, payload);
        return Ok(segments);
    }
    if !aligned {
        return Err(StoreError::InvalidArgument(format!(
            "staged data at offset {offset} does not start at a block boundary"
        )));
    }
    let (data, checksums) = payload.into_parts();
    for at in (0..data.len()).step_by(most) {
        let piece = data.slice(at..data.len().min(at + most));
        let first = at / BLOCK as usize;
        let checksums = checksums[first..first + piece.len().div_ceil(BLOCK as usize)].to_vec();
        let start = offset.saturating_add(at as u64);
        let piece = Payload::from_parts(start, piece, checksums)
            .map_err(|e| StoreError::InvalidArgument(e.to_string()))?;
        send(start, piece);
    }
    Ok(segments)
}
