//! [`RequestTable`]: the unanswered requests of the session, by their numbers.

use std::collections::BTreeMap;

use messenger::{Message, MessengerError};
use wire::limits::REQUEST_WINDOW;

use super::pending::PendingRequest;
use super::routes::Routes;
use super::strand::Strand;
use crate::{Error, Result};

/// The unanswered requests of the session, by their numbers. The numbers of all requests in the
/// table are in the request window.
pub(crate) struct RequestTable {
    next_seq: u64,
    pending: BTreeMap<u64, PendingRequest>,
}

impl RequestTable {
    pub(crate) fn new() -> RequestTable {
        RequestTable { next_seq: 1, pending: BTreeMap::new() }
    }

    /// Returns the number that the next request gets.
    pub(crate) fn next_seq(&self) -> u64 {
        self.next_seq
    }

    /// Returns whether the request window has room for another request.
    pub(crate) fn has_room(&self) -> bool {
        self.next_seq - self.oldest() < REQUEST_WINDOW
    }

    /// Adds a request and returns its number. The table must have room.
    pub(crate) fn add(&mut self, pending: PendingRequest) -> u64 {
        assert!(self.has_room(), "the request window is full");
        let seq = self.next_seq;
        self.next_seq += 1;
        self.pending.insert(seq, pending);
        seq
    }

    pub(crate) fn get_mut(&mut self, seq: u64) -> Option<&mut PendingRequest> {
        self.pending.get_mut(&seq)
    }

    pub(crate) fn remove(&mut self, seq: u64) -> Option<PendingRequest> {
        self.pending.remove(&seq)
    }

    /// Removes all requests.
    pub(crate) fn take_all(&mut self) -> BTreeMap<u64, PendingRequest> {
        std::mem::take(&mut self.pending)
    }

    /// Returns the number of the first request that waits to be sent to a shard.
    pub(crate) fn first_unsent(&self, shard: u16) -> Option<u64> {
        self.pending.iter().find(|(_, pending)| pending.is_unsent(shard)).map(|(seq, _)| *seq)
    }

    /// Returns whether a request needs a connection to a shard, now or in its next attempt.
    pub(crate) fn needs(&self, shard: u16) -> bool {
        self.pending.values().any(|pending| pending.may_need(shard))
    }

    /// Returns whether requests are in flight on a connection.
    pub(crate) fn is_in_flight_on(&self, number: u64) -> bool {
        self.pending.values().any(|pending| pending.is_in_flight_on(number))
    }

    /// Marks the requests that are in flight on a connection as not sent.
    pub(crate) fn requeue_from(&mut self, number: u64, routes: &Routes) {
        let in_flight = self.pending.values_mut().filter(|pending| pending.is_in_flight_on(number));
        in_flight.for_each(|pending| pending.requeue(routes));
    }

    /// Marks all requests as not sent.
    pub(crate) fn requeue_all(&mut self, routes: &Routes) {
        self.pending.values_mut().for_each(|pending| pending.requeue(routes));
    }

    /// Fails the changes that were sent in the session, because the node refuses the session.
    pub(crate) fn leave_session(&mut self, e: &wire::Error) {
        self.pending.values_mut().for_each(|pending| pending.leave_session(e));
    }

    /// Fails all requests, because the node refuses the session of an exclusive owner.
    pub(crate) fn end_by_fence(&mut self, e: &wire::Error) {
        for pending in self.pending.values_mut() {
            let is_unknown = pending.is_bound_to_session();
            pending.fail(Error::Fenced(e.clone()), is_unknown);
        }
    }

    /// Fails the requests that wait to be sent to a shard, because the shard refuses this client.
    pub(crate) fn fail_unsent(&mut self, shard: u16, error: impl Fn() -> Error) {
        for pending in self.pending.values_mut().filter(|pending| pending.is_unsent(shard)) {
            let is_unknown = pending.is_bound_to_session();
            pending.fail(error(), is_unknown);
        }
    }

    /// Fails an attempt of a request. If an earlier attempt of a change may have taken effect, the
    /// error says that the outcome is unknown.
    pub(crate) fn fail(&mut self, seq: u64, e: Error) {
        if let Some(pending) = self.pending.get_mut(&seq) {
            let is_unknown = pending.repeats_change();
            pending.fail(e, is_unknown);
        }
    }

    /// Encodes a request as a message for a connection. If a change was sent before and cannot be
    /// sent again, the error says that the outcome is unknown.
    pub(crate) fn message(&mut self, seq: u64, strand: &Strand, number: u64) -> Result<Message> {
        let acked_through = self.oldest() - 1;
        let Some(pending) = self.pending.get_mut(&seq) else { return Err(Error::Closed) };
        pending.message(seq, acked_through, strand, number).map_err(|e| match e {
            Error::Network(MessengerError::ConnectionLost(_)) => e,
            e if pending.is_bound_to_session() => e.of_unknown_outcome(),
            e => e,
        })
    }

    /// Returns the number of the oldest request, or the next number if the table is empty.
    fn oldest(&self) -> u64 {
        self.pending.first_key_value().map_or(self.next_seq, |(seq, _)| *seq)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use base::BoxFuture;
    use base::block::Payload;
    use base::mem::ArenaBuf;
    use messenger::{
        BulkRegion, BulkSink, BulkSource, Connection, ConnectionEvent, Incoming, Limits, PeerInfo, Pulled,
    };
    use tokio::time::Instant;
    use wire::{BulkDescriptor, Data, ObjectRequest, RequestBody};

    use super::super::chunks::BlockWindow;
    use super::super::pending::Bulk;
    use super::*;

    /// A connection that refuses all offers of memory.
    struct Refusing;

    impl Connection for Refusing {
        fn peer(&self) -> &PeerInfo {
            unreachable!("not asked for")
        }
        fn limits(&self) -> Limits {
            unreachable!("not asked for")
        }
        fn send(&self, _: Message) -> BoxFuture<'_, messenger::Result<()>> {
            unreachable!("nothing is sent")
        }
        fn offer_source(&self, _: Arc<dyn BulkSource>) -> messenger::Result<BulkRegion> {
            Err(MessengerError::BulkRefused("test".into()))
        }
        fn offer_sink(&self, _: Arc<dyn BulkSink>, _: u16) -> messenger::Result<BulkRegion> {
            Err(MessengerError::BulkRefused("test".into()))
        }
        fn bulk_read<'a>(
            &'a self,
            _: &'a BulkDescriptor,
            _: u64,
            _: ArenaBuf,
            _: Duration,
        ) -> BoxFuture<'a, messenger::Result<Pulled>> {
            unreachable!("a client does not pull")
        }
        fn bulk_write<'a>(
            &'a self,
            _: &'a BulkDescriptor,
            _: u64,
            _: Payload,
            _: Duration,
        ) -> BoxFuture<'a, messenger::Result<()>> {
            unreachable!("a client does not push")
        }
        fn close(&self) -> BoxFuture<'_, ()> {
            unreachable!("the test closes no connection")
        }
    }

    /// The receiving half of a connection on which nothing arrives.
    struct Silent;

    impl Incoming for Silent {
        fn next(&mut self) -> BoxFuture<'_, ConnectionEvent> {
            unreachable!("not asked for")
        }
    }

    #[test]
    fn a_change_has_an_unknown_outcome_if_it_was_sent_and_cannot_be_resent() {
        let body = RequestBody::Object(ObjectRequest::Mutate(wire::Mutate {
            name: wire::WireName {
                pool: "pool".into(),
                namespace: bytes::Bytes::new(),
                object: bytes::Bytes::from_static(b"object"),
            },
            part: None,
            conditions: vec![],
            ops: vec![],
            data: Data::None,
        }));
        let (refusing, _incoming) = Strand::own(Arc::new(Refusing), Box::new(Silent));
        for (was_sent, unknown) in [(false, false), (true, true)] {
            let mut pending = PendingRequest::new(
                body.clone(),
                Bulk::Read { window: BlockWindow::new(0, 1, None), pushed: true },
                Instant::now(),
            );
            pending.was_sent = was_sent;
            let mut table = RequestTable::new();
            let seq = table.add(pending);
            let Err(error) = table.message(seq, &refusing, 2) else { panic!("nothing can be offered") };
            assert_eq!(error.may_have_taken_effect(), unknown, "{error}");
            assert!(error.to_string().contains("bulk transfer refused"), "{error}");
        }
    }
}
