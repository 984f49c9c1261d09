//! [`NativeCall`]: one request of the native engine, with its attempts.

use std::sync::Arc;

use base::BoxFuture;
use base::block::Payload;
use tokio::sync::oneshot;
use tokio::time::Instant;
use wire::{ObjectRequest, RequestBody};

use super::offered::OfferedSource;
use super::pending::{Answer, Answered, Bulk, PendingRequest};
use super::session::{ClientSession, Shared};
use crate::engine::{Call, ChangeRequest, Source};
use crate::{Error, Result};

/// A request's entry in the session's table of unanswered requests. Dropping it removes the request
/// from the table.
struct TableEntry<'a> {
    shared: &'a Shared,
    seq: u64,
}

impl Drop for TableEntry<'_> {
    fn drop(&mut self) {
        self.shared.forget(self.seq);
    }
}

/// Progress of a call.
enum Progress<'a> {
    /// A change that was not attempted yet. Its data may have to be loaded first.
    Change(ChangeRequest),
    /// A request that was not attempted yet. The value is `None` after the request could not enter
    /// the table because the engine was closed.
    Ready(Option<(RequestBody, Bulk)>),
    /// The session's table contains the request.
    Entered(TableEntry<'a>),
}

/// A request of the native engine.
pub(crate) struct NativeCall<'a, T> {
    session: &'a ClientSession,
    progress: Progress<'a>,
    deadline: Instant,
    /// Converts an answer into the result of the call.
    finish: fn(Answer) -> Result<T>,
}

impl<'a, T> NativeCall<'a, T> {
    pub(crate) fn new(
        session: &'a ClientSession,
        body: impl Into<RequestBody>,
        bulk: Bulk,
        deadline: Instant,
        finish: fn(Answer) -> Result<T>,
    ) -> NativeCall<'a, T> {
        NativeCall { session, progress: Progress::Ready(Some((body.into(), bulk))), deadline, finish }
    }

    pub(crate) fn change(
        session: &'a ClientSession,
        request: ChangeRequest,
        deadline: Instant,
        finish: fn(Answer) -> Result<T>,
    ) -> NativeCall<'a, T> {
        NativeCall { session, progress: Progress::Change(request), deadline, finish }
    }

    async fn enter(&mut self, body: RequestBody, bulk: Bulk) -> Result<u64> {
        let shared = &*self.session.shared;
        let seq = shared.enter(PendingRequest::new(body, bulk, self.deadline)).await?;
        self.progress = Progress::Entered(TableEntry { shared, seq });
        Ok(seq)
    }

    async fn try_once(&mut self) -> Answered {
        let shared = &*self.session.shared;
        let seq = match &mut self.progress {
            Progress::Entered(entered) => entered.seq,
            Progress::Change(request) => {
                let (body, bulk) = place_payload(self.session, request).await?;
                self.enter(body, bulk).await?
            }
            Progress::Ready(request) => {
                let (body, bulk) = request.take().ok_or(Error::Closed)?;
                self.enter(body, bulk).await?
            }
        };
        let (done, answer) = oneshot::channel();
        shared.send(seq, done).await?;
        answer.await.map_err(|_| Error::Closed)?
    }
}

impl<T: Send> Call<T> for NativeCall<'_, T> {
    fn obstacle(&self) -> Option<String> {
        self.session.shared.obstacle()
    }

    fn attempt(&mut self) -> BoxFuture<'_, Result<T>> {
        Box::pin(async {
            let answer = self.try_once().await?;
            (self.finish)(answer)
        })
    }
}

/// Decides how the payload of a change is sent: inside the message, or as bulk data.
async fn place_payload(session: &ClientSession, request: &mut ChangeRequest) -> Result<(RequestBody, Bulk)> {
    let offset = request.payload_offset();
    let transfer = session.transfer(&request.name, request.part.as_ref());
    let bulk = match request.payload.clone() {
        None => Bulk::None,
        Some(source) if source.len() <= transfer.inline_max => {
            Bulk::Inline(Payload::compute(offset, source.load().await?))
        }
        Some(Source::Descriptor(_)) => {
            return Err(Error::Unsupported(crate::engine::NO_DESCRIPTORS.into()));
        }
        // With one-sided transfers, the node itself reads the client's memory, so the data must be
        // contiguous in memory.
        Some(source) => {
            let source = if transfer.is_one_sided { Source::Bytes(source.load().await?) } else { source };
            Bulk::Source(Arc::new(OfferedSource { source, offset }))
        }
    };
    Ok((ObjectRequest::Mutate(request.take_wire()?).into(), bulk))
}
