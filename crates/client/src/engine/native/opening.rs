//! Connecting to a shard of the osd, and opening the session on the connection.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use messenger::{ConnectOptions, Connection, ConnectionEvent, Incoming, Message, NetworkStack};
use wire::{ReplyBody, RequestBody, RequestHead, SessionId};

use super::session::decode;
use crate::{Error, Options, Result};

/// A connection without session.
pub(super) struct DialedConnection {
    connection: Arc<dyn Connection>,
    incoming: Box<dyn Incoming>,
    timeout: Duration,
}

/// What the osd has answered to `Open`.
pub(super) struct ShardHello {
    pub(super) session: SessionId,
    /// The shard that has answered.
    pub(super) shard: u16,
    /// Port of each shard.
    pub(super) ports: Vec<u16>,
    /// Address of the node's control plane.
    pub(super) control: Option<String>,
}

/// A connection on which the session is open.
pub(super) struct OpenedConnection {
    pub(super) connection: Arc<dyn Connection>,
    pub(super) incoming: Box<dyn Incoming>,
    pub(super) opened: ShardHello,
}

/// Connects to an endpoint.
pub(super) async fn dial(
    stack: &dyn NetworkStack,
    endpoint: &str,
    options: &Options,
) -> Result<DialedConnection> {
    let timeout = options.connect_timeout;
    let (connection, incoming) = stack.connect(endpoint, ConnectOptions { timeout }).await?;
    Ok(DialedConnection { connection, incoming, timeout })
}

impl DialedConnection {
    /// Resumes the session on the connection, with this capability; with `None`, opens a new session.
    pub(super) async fn open(
        mut self,
        session: Option<SessionId>,
        capability: Bytes,
    ) -> Result<OpenedConnection> {
        let opened = tokio::time::timeout(self.timeout, self.handshake(session, capability)).await;
        let opened = opened.unwrap_or(Err(Error::TimedOut(self.timeout)))?;
        Ok(OpenedConnection { connection: self.connection, incoming: self.incoming, opened })
    }

    async fn handshake(&mut self, presented: Option<SessionId>, capability: Bytes) -> Result<ShardHello> {
        let head = RequestHead { seq: 0, acked_through: 0, retry: false, deadline_ms: 0 };
        let (oldest, newest) = (wire::VERSION_OLDEST, wire::VERSION);
        let body = RequestBody::Open { oldest, newest, session: presented, capability };
        let header = wire::encode_request(&head, &body);
        self.connection.send(Message { header, payload: Default::default() }).await?;
        loop {
            match self.incoming.next().await {
                ConnectionEvent::Message(message) => {
                    return match decode(&message)?.result? {
                        ReplyBody::Opened { session, shard, shards: ports, control, .. } => {
                            if presented.is_some_and(|presented| presented != session) {
                                return Err(Error::Protocol("the node has opened another session".into()));
                            }
                            Ok(ShardHello { session, shard, ports, control })
                        }
                        other => Err(Error::Protocol(format!("expected an open session, got {other:?}"))),
                    };
                }
                ConnectionEvent::Lost(e) => return Err(e.into()),
                ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
            }
        }
    }
}
