//! Requests that have no final answer yet, and their answers.

use std::sync::Arc;

use base::block::Payload;
use bytes::Bytes;
use messenger::{BulkRegion, Message};
use tokio::sync::oneshot;
use tokio::time::Instant;
use wire::{Data, ObjectReply, ObjectRequest, ReadFirst, ReplyBody, RequestBody, RequestHead};

use super::chunks::{BlockWindow, ChunkSink};
use super::offered::OfferedSource;
use super::routes::Routes;
use super::strand::Strand;
use crate::{Error, Result};

/// Maximum number of shards that may refuse one attempt of a request. The first refusal teaches the
/// request's shard. Another one is only possible if the pool was removed and created again, or if
/// the osd was restarted.
const REROUTES_MAX: u32 = 8;

/// Data of a request or of its answer.
#[derive(Debug, Clone)]
pub(crate) enum Bulk {
    None,
    /// Data of a change that is sent inside the message.
    Inline(Payload),
    /// Data of a change that the node pulls.
    Source(Arc<OfferedSource>),
    /// Data of a read. If `pushed` is set, the node may push the data into offered memory.
    /// Otherwise the answer contains the data.
    Read {
        window: BlockWindow,
        pushed: bool,
    },
}

/// An answer, with the data that arrived with it.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) body: ReplyBody,
    /// Requested bytes of a read. Empty if these bytes were written to the caller's memory.
    pub(crate) data: Vec<Bytes>,
    /// Number of requested bytes that a read has returned, in `data` or in the caller's memory.
    pub(crate) len: u64,
}

/// The outcome of one attempt.
pub(crate) type Answered = Result<Answer>;

/// A request that has no final answer yet.
pub(crate) struct PendingRequest {
    body: RequestBody,
    bulk: Bulk,
    deadline: Instant,
    /// Shard to which the request belongs; `None` while this is unknown.
    shard: Option<u16>,
    /// Number of the connection on which the current attempt was sent; 0 if it was not sent yet, or
    /// if its connection was lost.
    sent_on: u64,
    /// Whether an attempt was sent that may have taken effect.
    pub(super) was_sent: bool,
    /// Whether an attempt before the last one may have taken effect.
    repeated: bool,
    /// Number of shards that have refused the current attempt.
    reroutes: u32,
    /// Reason why the node refused the session in which the request was sent. With a reason, the
    /// request must not be sent in another session.
    orphaned: Option<wire::Error>,
    /// Passes the answer to the caller. `None` while the caller pauses before the next attempt.
    done: Option<oneshot::Sender<Answered>>,
    region: Option<BulkRegion>,
    sink: Option<Arc<ChunkSink>>,
}

impl PendingRequest {
    /// Creates a request that was not sent yet and must be answered by `deadline`.
    pub(crate) fn new(body: RequestBody, bulk: Bulk, deadline: Instant) -> PendingRequest {
        PendingRequest {
            body,
            bulk,
            deadline,
            shard: None,
            sent_on: 0,
            was_sent: false,
            repeated: false,
            reroutes: 0,
            orphaned: None,
            done: None,
            region: None,
            sink: None,
        }
    }

    /// Begins an attempt, whose answer `done` passes to the caller.
    ///
    /// # Errors
    /// If an earlier attempt was sent in a session that the node has refused since.
    pub(crate) fn begin(&mut self, done: oneshot::Sender<Answered>, routes: &Routes) -> Result<()> {
        if let Some(why) = &self.orphaned {
            return Err(Error::from(why.clone()).of_unknown_outcome());
        }
        self.done = Some(done);
        self.reroutes = 0;
        self.requeue(routes);
        Ok(())
    }

    /// Marks the current attempt as not sent, and chooses its shard again.
    pub(crate) fn requeue(&mut self, routes: &Routes) {
        self.sent_on = 0;
        self.shard = routes.shard_of(&self.body);
    }

    /// Returns the shard to which the request belongs; `None` while this is unknown.
    pub(crate) fn shard(&self) -> Option<u16> {
        self.shard
    }

    /// Returns whether the current attempt was sent on the connection with this number, and is not
    /// answered yet.
    pub(crate) fn is_in_flight_on(&self, number: u64) -> bool {
        self.sent_on == number
    }

    /// Returns whether the request can be sent to `shard` and is not in flight. Between two
    /// attempts, this is also true.
    pub(crate) fn may_need(&self, shard: u16) -> bool {
        self.sent_on == 0 && self.shard.is_none_or(|wanted| wanted == shard)
    }

    /// Returns whether an attempt waits to be sent to `shard`.
    pub(crate) fn is_unsent(&self, shard: u16) -> bool {
        self.done.is_some() && self.may_need(shard)
    }

    /// Handles the refusal of the current attempt by a shard to which the request does not belong.
    /// The attempt has had no effect, and is sent again as the same attempt. Returns the offered
    /// memory.
    ///
    /// # Errors
    /// [`Error::Protocol`] if too many shards have refused the attempt.
    pub(crate) fn reroute(
        &mut self,
        routes: &mut Routes,
        shard: u16,
        groups: u32,
        shards: u16,
    ) -> Result<Option<BulkRegion>> {
        routes.wrong_shard(&self.body, shard, groups, shards)?;
        self.reroutes += 1;
        if self.reroutes > REROUTES_MAX {
            let why = format!(
                "{} shards in turn have refused a request that belongs to another shard",
                self.reroutes
            );
            return Err(Error::Protocol(why));
        }
        Ok(self.withdraw(routes))
    }

    /// Handles the refusal of the current attempt, which has had no effect. The attempt is sent again as
    /// the same attempt. Returns the offered memory.
    pub(crate) fn withdraw(&mut self, routes: &Routes) -> Option<BulkRegion> {
        self.was_sent = self.repeated;
        self.requeue(routes);
        self.region.take()
    }

    /// Ends the current attempt with an answer of the node. Returns the sender of the outcome and
    /// the offered memory, or `None` if no caller waits.
    pub(crate) fn end_attempt(&mut self) -> Option<(oneshot::Sender<Answered>, Option<BulkRegion>)> {
        self.sent_on = 0;
        let done = self.done.take()?;
        Some((done, self.region.take()))
    }

    /// Ends the current attempt with an error, if a caller waits for its outcome. If `is_unknown`
    /// is set, the error says that the outcome is unknown.
    pub(crate) fn fail(&mut self, e: Error, is_unknown: bool) {
        if let Some((done, _withdrawn)) = self.end_attempt() {
            // The caller may have been cancelled; ignore the error of the channel.
            drop(done.send(Err(if is_unknown { e.of_unknown_outcome() } else { e })));
        }
    }

    /// Fails the request if it is a change that was sent in the session that the node refuses with
    /// `e`. All other requests can be sent in a new session.
    pub(crate) fn leave_session(&mut self, e: &wire::Error) {
        if self.is_bound_to_session() {
            self.orphaned = Some(e.clone());
            self.fail(e.clone().into(), true);
        }
    }

    /// Encodes the request as a message for `strand`, on the `number`th connection of the session.
    /// Offers the request's memory on this connection.
    pub(crate) fn message(
        &mut self,
        seq: u64,
        acked_through: u64,
        strand: &Strand,
        number: u64,
    ) -> Result<Message> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let deadline_ms = u32::try_from(left.as_millis()).unwrap_or(u32::MAX);
        let connection = strand.connection();
        let head =
            RequestHead { strand: strand.number(), seq, acked_through, retry: self.was_sent, deadline_ms };
        self.repeated = head.retry;
        self.region = None;
        let mut payload = Payload::default();
        match &self.bulk {
            Bulk::None => {}
            Bulk::Inline(data) => payload = data.clone(),
            Bulk::Source(source) => self.region = Some(connection.offer_source(source.clone())?),
            Bulk::Read { pushed: false, .. } => {}
            Bulk::Read { window, pushed: true } => {
                let sink = Arc::new(ChunkSink::new(window.clone()));
                self.region = Some(connection.offer_sink(sink.clone(), 0)?);
                self.sink = Some(sink);
            }
        }
        let descriptor = self.region.as_ref().map(|region| region.descriptor.clone());
        match &mut self.body {
            RequestBody::Object(ObjectRequest::Mutate(mutate)) => {
                if let Some(descriptor) = descriptor {
                    mutate.data = Data::Bulk(descriptor);
                }
            }
            RequestBody::Object(
                ObjectRequest::Read(read) | ObjectRequest::ReadFirst(ReadFirst { read, .. }),
            ) => read.sink = descriptor,
            _ => {}
        }
        let header = wire::encode_request(&head, &self.body);
        let (size, limit) = (header.len() as u64, connection.limits().max_header as u64);
        if size > limit {
            return Err(wire::Error::TooLarge { what: "request without its data".into(), size, limit }.into());
        }
        self.sent_on = number;
        self.was_sent = true;
        Ok(Message { header, payload })
    }

    /// Returns whether the request may have taken effect, and would take effect again in another
    /// session.
    pub(crate) fn is_bound_to_session(&self) -> bool {
        self.was_sent && self.is_change()
    }

    /// Returns whether an attempt before the last one may have taken effect.
    pub(crate) fn repeats_change(&self) -> bool {
        self.repeated && self.is_change()
    }

    fn is_change(&self) -> bool {
        matches!(self.body, RequestBody::Object(ObjectRequest::Mutate(_)))
    }

    /// Converts a refusal of the node into the caller's error. The node checks some properties of a
    /// request before it looks for the result of an earlier attempt. If one of these checks fails,
    /// the refusal says nothing about an earlier attempt, so the outcome of a repeated change is
    /// unknown.
    pub(crate) fn refused(&self, e: wire::Error) -> Error {
        use wire::Error as E;
        let is_before_results = matches!(
            e,
            E::NoSuchPool(_)
                | E::BadName(_)
                | E::BadRequest(_)
                | E::Busy { .. }
                | E::NotPermitted { .. }
                | E::NotAdministrator { .. }
        );
        let error = Error::from(e);
        if is_before_results && self.repeats_change() { error.of_unknown_outcome() } else { error }
    }

    /// Returns the pool and the size of the object that this request read; `None` for other
    /// requests.
    pub(crate) fn size_read(&self, body: &ReplyBody) -> Option<(&Bytes, u64)> {
        match (&self.body, body) {
            (
                RequestBody::Object(ObjectRequest::Read(read)),
                ReplyBody::Object(ObjectReply::Read { object_size, .. }),
            ) if read.part.is_none() => Some((&read.name.pool, *object_size)),
            _ => None,
        }
    }

    /// Joins an answer with the data that arrived for it.
    pub(crate) fn collect(&mut self, body: ReplyBody, payload: Payload) -> Answered {
        let sink = self.sink.take();
        let (
            Bulk::Read { window, .. },
            ReplyBody::Object(ObjectReply::Read { sent, .. } | ObjectReply::ReadFirst { sent, .. }),
        ) = (&self.bulk, &body)
        else {
            return Ok(Answer { body, data: Vec::new(), len: 0 });
        };
        let sent = *sent;
        // The answer contains small data even if memory was offered.
        let data = match sink {
            Some(sink) if payload.is_empty() => sink.take(sent).ok_or_else(|| incomplete(sent))?,
            _ if payload.len() as u64 != sent => return Err(incomplete(sent)),
            _ => {
                let kept = window.deliver(0, payload.into_parts().0);
                if kept.is_empty() { Vec::new() } else { vec![kept] }
            }
        };
        Ok(Answer { body, data, len: window.wanted(sent) })
    }
}

fn incomplete(sent: u64) -> Error {
    Error::Protocol(format!("the node announced {sent} bytes, but another number arrived"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use messenger::BulkSink;

    fn collected(sink: Option<&[u8]>, payload: &[u8], sent: u64) -> Result<usize> {
        let window = BlockWindow::new(0, 1 << 20, None);
        let sink = sink.map(|pushed| {
            let sink = Arc::new(ChunkSink::new(window.clone()));
            assert!(sink.write(0, Payload::compute(0, pushed.to_vec().into())));
            sink
        });
        let body = RequestBody::CloseSession;
        let bulk = Bulk::Read { window, pushed: sink.is_some() };
        let mut pending = PendingRequest::new(body, bulk, Instant::now());
        pending.sink = sink;
        let body = ReplyBody::Object(ObjectReply::Read { version: 1, object_size: 1 << 30, sent });
        let answer = pending.collect(body, Payload::compute(0, payload.to_vec().into()))?;
        assert_eq!(answer.len, sent);
        Ok(answer.data.iter().map(Bytes::len).sum())
    }

    #[test]
    fn a_read_fails_unless_the_announced_number_of_bytes_arrived() {
        assert_eq!(collected(None, b"abc", 3).ok(), Some(3));
        assert_eq!(collected(Some(b""), b"abc", 3).ok(), Some(3));
        assert_eq!(collected(Some(b"abcd"), b"", 4).ok(), Some(4));
        assert_eq!(collected(Some(b""), b"", 0).ok(), Some(0));
        for (sink, payload, sent) in [
            (None, &b"abc"[..], 4),
            (None, b"", 4),
            (Some(&b""[..]), b"abc", 1 << 20),
            (Some(b"abcd"), b"", 3),
            (Some(b"abcd"), b"", 5),
        ] {
            let outcome = collected(sink, payload, sent);
            assert!(matches!(outcome, Err(Error::Protocol(_))), "{sink:?} {payload:?} {sent}: {outcome:?}");
        }
    }
}
