//! The metrics of connections. All connections of a process share them, or all connections of a shard
//! if the process's recorder distinguishes shards.

use metrics::{Counter, Gauge, counter, gauge};

/// Metric handles, looked up once per connection.
pub(crate) struct ConnectionMetrics {
    /// Bytes written to transports, headers included.
    pub(crate) sent_bytes: Counter,
    /// Bytes read from transports, headers included.
    pub(crate) received_bytes: Counter,
    /// Messages sent, not counting repetitions.
    pub(crate) sent_messages: Counter,
    /// Messages received.
    pub(crate) received_messages: Counter,
    /// Bytes of sent and received payload that the messenger itself copied, each time that it copied
    /// them. Includes the heads of received frames that were copied together with their payload.
    pub(crate) copied_bytes: Counter,
    /// Pulls begun by this side.
    pub(crate) pulls: Counter,
    /// Pulls and pushes that this side or the peer refused.
    pub(crate) refusals: Counter,
    /// Resumptions of connections over new transports.
    pub(crate) resumes: Counter,
    /// Transports that were closed because the peer was silent.
    pub(crate) heartbeats_missed: Counter,
    /// Connections that exist now.
    pub(crate) connections: Gauge,
    /// Messages that are queued and not yet written, over all connections.
    pub(crate) queue_depth: Gauge,
}

impl ConnectionMetrics {
    pub(crate) fn new() -> ConnectionMetrics {
        ConnectionMetrics {
            sent_bytes: counter!("outboard_messenger_sent_bytes"),
            received_bytes: counter!("outboard_messenger_received_bytes"),
            sent_messages: counter!("outboard_messenger_sent_messages"),
            received_messages: counter!("outboard_messenger_received_messages"),
            copied_bytes: counter!("outboard_messenger_copied_bytes"),
            pulls: counter!("outboard_messenger_pulls"),
            refusals: counter!("outboard_messenger_refusals"),
            resumes: counter!("outboard_messenger_resumes"),
            heartbeats_missed: counter!("outboard_messenger_heartbeats_missed"),
            connections: gauge!("outboard_messenger_connections"),
            queue_depth: gauge!("outboard_messenger_queued_messages"),
        }
    }
}
