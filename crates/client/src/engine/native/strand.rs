//! [`Strand`] and [`StrandIncoming`]: the way of one session to one shard. It is a connection of its own,
//! or one of the strands of a connection that several sessions share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base::block::Payload;
use messenger::{Connection, ConnectionEvent, Incoming, Limits, Message, MessengerError};
use tokio::sync::mpsc;
use wire::Reply;

use super::shared_connections::SharedConnection;

/// The sending half of a strand. Clones send on the same strand. The strand ends when all clones and the
/// receiving half are dropped.
#[derive(Clone)]
pub(crate) struct Strand {
    connection: Arc<dyn Connection>,
    place: Arc<StrandPlace>,
}

/// The receiving half of a strand.
pub(crate) struct StrandIncoming {
    events: Events,
    place: Arc<StrandPlace>,
}

enum Events {
    OfConnection(Box<dyn Incoming>),
    OfStrand(mpsc::UnboundedReceiver<StrandEvent>),
}

/// An event of a strand. Events arrive in order.
pub(crate) enum StrandEvent {
    /// An answer arrived, with its payload.
    Reply(Reply, Payload),
    /// The strand has ended with its connection. No other event follows.
    Lost(MessengerError),
}

/// The place of a strand on its connection.
struct StrandPlace {
    number: u32,
    /// The connection that the strand shares with others; `None` if the connection is the strand's own.
    shared: Option<Arc<SharedConnection>>,
    /// Whether the client has told the node to end the session of the strand. The strand ends with it.
    is_over: AtomicBool,
}

impl Drop for StrandPlace {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.leave(self.number, !*self.is_over.get_mut());
        }
    }
}

impl Strand {
    /// Makes a connection the only strand of itself.
    pub(crate) fn own(
        connection: Arc<dyn Connection>,
        incoming: Box<dyn Incoming>,
    ) -> (Strand, StrandIncoming) {
        let place = Arc::new(StrandPlace { number: 0, shared: None, is_over: AtomicBool::new(false) });
        Strand::at(connection, Events::OfConnection(incoming), place)
    }

    /// The strand with this number of a shared connection, which sends the events of the strand to `events`.
    pub(super) fn of(
        shared: Arc<SharedConnection>,
        number: u32,
        events: mpsc::UnboundedReceiver<StrandEvent>,
    ) -> (Strand, StrandIncoming) {
        let connection = Arc::clone(shared.connection());
        let place = Arc::new(StrandPlace { number, shared: Some(shared), is_over: AtomicBool::new(false) });
        Strand::at(connection, Events::OfStrand(events), place)
    }

    fn at(
        connection: Arc<dyn Connection>,
        events: Events,
        place: Arc<StrandPlace>,
    ) -> (Strand, StrandIncoming) {
        (Strand { connection, place: Arc::clone(&place) }, StrandIncoming { events, place })
    }

    /// Returns the number of the strand on its connection.
    pub(crate) fn number(&self) -> u32 {
        self.place.number
    }

    /// Whether other sessions may use the connection too.
    pub(crate) fn is_shared(&self) -> bool {
        self.place.shared.is_some()
    }

    /// Returns the connection. Offers of memory belong to it, and not to the strand.
    pub(crate) fn connection(&self) -> &dyn Connection {
        &*self.connection
    }

    pub(crate) fn limits(&self) -> Limits {
        self.connection.limits()
    }

    /// Queues a message. Its header names the strand.
    pub(crate) async fn send(&self, message: Message) -> messenger::Result<()> {
        self.connection.send(message).await
    }

    /// Closes the connection, if it is the strand's own. `is_over` says that the client has told the node
    /// to end the session.
    pub(crate) async fn close(self, is_over: bool) {
        self.place.is_over.store(is_over, Ordering::Relaxed);
        if !self.is_shared() {
            self.connection.close().await;
        }
    }
}

impl StrandIncoming {
    /// Waits for the next event. No event is lost if the returned future is dropped.
    pub(crate) async fn next(&mut self) -> StrandEvent {
        match &mut self.events {
            Events::OfConnection(incoming) => loop {
                match incoming.next().await {
                    ConnectionEvent::Message(message) => match decode(&message) {
                        Some(reply) if reply.strand == self.place.number => {
                            return StrandEvent::Reply(reply, message.payload);
                        }
                        Some(reply) => {
                            tracing::warn!(strand = reply.strand, "dropped an answer on a wrong strand")
                        }
                        None => {}
                    },
                    ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
                    ConnectionEvent::Lost(e) => return StrandEvent::Lost(e),
                }
            },
            Events::OfStrand(events) => events.recv().await.unwrap_or_else(|| {
                let why = "the task of the shared connection has ended".to_owned();
                StrandEvent::Lost(MessengerError::ConnectionLost(why))
            }),
        }
    }
}

/// Decodes an answer; `None` if it cannot be decoded.
pub(super) fn decode(message: &Message) -> Option<Reply> {
    let decoded = wire::decode_reply(&message.header);
    decoded.inspect_err(|e| tracing::warn!(error = %e, "dropped an answer that cannot be decoded")).ok()
}
