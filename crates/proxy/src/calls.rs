//! Calls to a store process: made on the present link, and made again on the next one where that is harmless.

use std::sync::Arc;
use std::time::Instant;

use store::StoreError;
use tokio::sync::oneshot;

use crate::link::{AnswerTo, CallAnswered, CallError, Delivered, StoreChannel};
use crate::shared::AttachmentHandle;

/// Where the answer to a call comes out.
pub(crate) type Answers = oneshot::Receiver<CallAnswered>;
/// An answer, or the link was dropped with the call.
pub(crate) type Received = Result<CallAnswered, oneshot::error::RecvError>;

/// Hands a call to the present link, or the next one. It takes its place now.
pub(crate) fn start(
    handle: &AttachmentHandle,
    target: u16,
    call: impl FnOnce(&Arc<StoreChannel>, u16, AnswerTo) + Send + 'static,
) -> Answers {
    let (answer_to, answers) = oneshot::channel();
    handle.shared.with_link(move |link| match link {
        Ok(link) => call(link, target, answer_to),
        // Whoever asked may have gone; then nobody needs to know.
        Err(e) => drop(answer_to.send(Err(e))),
    });
    answers
}

/// Waits for an answer.
pub(crate) async fn answer_of(answers: impl Future<Output = Received>) -> CallAnswered {
    answers.await.unwrap_or_else(|_| Err(CallError::Lost("the attachment was dropped".into())))
}

/// Retry deadline of a call issued now.
pub(crate) fn deadline(handle: &AttachmentHandle) -> Instant {
    Instant::now() + handle.shared.options.wait_for_store
}

/// Makes a call again as long as it fails because its incarnation ended, until `deadline`.
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

/// The error of a store that answers what it was not asked.
pub(crate) fn unexpected() -> StoreError {
    StoreError::Disconnected("the store gave an answer of another kind than asked for".into())
}
