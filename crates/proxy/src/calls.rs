//! Calls to a store process. A call uses the current store channel. If the store channel is lost, a
//! call that is safe to repeat is made again on the next store channel.

use std::sync::Arc;

use base::clock::Instant;
use store::StoreError;
use tokio::sync::oneshot;

use crate::messages::CallAnswer;
use crate::shared::AttachmentHandle;
use crate::store_channel::{
    AnswerTo, CallAnswered, CallError, Delivered, StoreChannel, SubmittedTransaction,
};

/// The receiver of a call's answer.
pub(crate) type Answers = oneshot::Receiver<CallAnswered>;
/// The answer, or an error if the store channel dropped the call.
pub(crate) type Received = Result<CallAnswered, oneshot::error::RecvError>;

/// Passes a call to the current store channel, or queues it for the next store channel. The call's
/// position in the order of calls is fixed when this function returns.
pub(crate) fn start(
    handle: &AttachmentHandle,
    target: u16,
    call: impl FnOnce(&Arc<StoreChannel>, u16, AnswerTo) + Send + 'static,
) -> Answers {
    let (answer_to, answers) = oneshot::channel();
    handle.shared.with_store_channel(move |store_channel| match store_channel {
        Ok(store_channel) => call(store_channel, target, answer_to),
        // The caller may have been cancelled; ignore the error.
        Err(e) => drop(answer_to.send(Err(e))),
    });
    answers
}

/// Passes transactions of different targets to the current store channel, or queues them for the next
/// store channel. Their positions in the order of calls are fixed when this function returns.
pub(crate) fn submit(handle: &AttachmentHandle, mut transactions: Vec<SubmittedTransaction>) {
    handle.shared.with_store_channel(move |store_channel| match store_channel {
        Ok(store_channel) => store_channel.transactions(transactions),
        Err(e) => transactions.iter_mut().for_each(|one| one.fail(e.clone())),
    });
}

/// Waits for an answer.
pub(crate) async fn answer_of(answers: impl Future<Output = Received>) -> CallAnswered {
    answers.await.unwrap_or_else(|_| Err(CallError::Lost("the attachment was dropped".into())))
}

/// Waits for a call that returns no data.
pub(crate) async fn done(answers: Answers) -> Result<(), StoreError> {
    match answer_of(answers).await?.answer {
        CallAnswer::Done => Ok(()),
        _ => Err(unexpected()),
    }
}

/// Retry deadline of a call issued now.
pub(crate) fn deadline(handle: &AttachmentHandle) -> Instant {
    Instant::now() + handle.shared.options.wait_for_store
}

/// Waits for the answer to a call. If the call fails because its incarnation ended, repeats the
/// call until `deadline`.
pub(crate) async fn retrying<A: Future<Output = Received>>(
    handle: &AttachmentHandle,
    deadline: Instant,
    first: A,
    mut again: impl FnMut() -> A,
) -> Result<Delivered, StoreError> {
    let mut answers = first;
    loop {
        match answer_of(answers).await {
            Err(CallError::Lost(_)) if handle.shared.may_retry() && Instant::now() < deadline => {
                answers = again();
            }
            answered => return Ok(answered?),
        }
    }
}

/// The error for an answer that does not match the call.
pub(crate) fn unexpected() -> StoreError {
    StoreError::Disconnected("the store's answer does not match the call".into())
}
