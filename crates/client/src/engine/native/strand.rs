//! [`Strand`] and [`StrandIncoming`]: a session on a connection to a shard. The session may have the
//! connection for itself, or share it with other sessions.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base::block::Payload;
use messenger::{Connection, ConnectionEvent, Incoming, Limits, Message, MessengerError};
use tokio::sync::mpsc;
use wire::Reply;

use super::shared_connections::SharedConnection;

/// The sending half of a strand. Clones send on the same strand. The strand ends when all clones and
/// the receiving half are dropped.
#[derive(Clone)]
pub(crate) struct Strand {
    connection: Arc<dyn Connection>,
    hold: Arc<StrandHold>,
}

/// The receiving half of a strand.
pub(crate) struct StrandIncoming {
    events: Events,
    hold: Arc<StrandHold>,
}

enum Events {
    OfConnection(Box<dyn Incoming>),
    OfStrand(mpsc::Receiver<StrandEvent>),
}

/// An event of a strand. Events arrive in order.
pub(crate) enum StrandEvent {
    /// An answer arrived, with its payload.
    Reply(Reply, Payload),
    /// The strand has ended with its connection. No other event follows.
    Lost(MessengerError),
}

/// Keeps a strand open. Both halves own it together.
struct StrandHold {
    number: u32,
    /// The connection that the session shares with others; `None` if it has the connection for itself.
    shared: Option<Arc<SharedConnection>>,
    /// Whether the client has told the node to end the session. The strand ends with it.
    is_over: AtomicBool,
}

impl Drop for StrandHold {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.leave(self.number, !*self.is_over.get_mut());
        }
    }
}

impl Strand {
    /// The only strand of a connection.
    pub(crate) fn own(
        connection: Arc<dyn Connection>,
        incoming: Box<dyn Incoming>,
    ) -> (Strand, StrandIncoming) {
        let hold = Arc::new(StrandHold { number: 0, shared: None, is_over: AtomicBool::new(false) });
        Strand::held(connection, Events::OfConnection(incoming), hold)
    }

    /// The strand with this number of a shared connection, which sends the strand's events to `events`.
    pub(super) fn of(
        shared: Arc<SharedConnection>,
        number: u32,
        events: mpsc::Receiver<StrandEvent>,
    ) -> (Strand, StrandIncoming) {
        let connection = Arc::clone(shared.connection());
        let hold = Arc::new(StrandHold { number, shared: Some(shared), is_over: AtomicBool::new(false) });
        Strand::held(connection, Events::OfStrand(events), hold)
    }

    fn held(
        connection: Arc<dyn Connection>,
        events: Events,
        hold: Arc<StrandHold>,
    ) -> (Strand, StrandIncoming) {
        (Strand { connection, hold: Arc::clone(&hold) }, StrandIncoming { events, hold })
    }

    /// Returns the number of the strand on its connection.
    pub(crate) fn number(&self) -> u32 {
        self.hold.number
    }

    /// Whether other sessions may use the connection too.
    pub(crate) fn is_shared(&self) -> bool {
        self.hold.shared.is_some()
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

    /// Sends the message that ends the session, and waits until the node has received it.
    pub(crate) async fn send_last(&self, message: Message) -> messenger::Result<()> {
        let answered = self.hold.shared.as_ref().map(|shared| shared.await_end(self.number()));
        self.connection.send(message).await?;
        self.hold.is_over.store(true, Ordering::Relaxed);
        if let Some(answered) = answered {
            // A lost connection also ends the wait; the node then removes the session when it
            // expires.
            drop(answered.await);
        }
        Ok(())
    }

    /// Closes the connection, if the session has it for itself. Queued messages are sent before.
    pub(crate) async fn close(self) {
        if !self.is_shared() {
            self.connection.close().await;
        }
    }

    /// Keeps further sessions from sharing the connection, because it does not work.
    pub(super) fn distrust(&self) {
        if let Some(shared) = &self.hold.shared {
            shared.admit_no_more();
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
                        Some(reply) if reply.strand == self.hold.number => {
                            return StrandEvent::Reply(reply, message.payload);
                        }
                        Some(reply) => {
                            tracing::warn!(strand = reply.strand, "dropped an answer on a wrong strand");
                        }
                        None => {}
                    },
                    ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
                    ConnectionEvent::Lost(e) => return StrandEvent::Lost(e),
                }
            },
            Events::OfStrand(events) => events.recv().await.unwrap_or_else(|| {
                let why = "the node has sent too many answers on a strand".to_owned();
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
