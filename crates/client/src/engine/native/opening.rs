//! Connecting to a shard of the osd, and opening the session on the connection.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use messenger::{ConnectOptions, Message, NetworkStack};
use wire::{ReplyBody, RequestBody, RequestHead, SessionId};

use super::shared_connections::{JoinedStrand, SharedConnections};
use super::strand::{Strand, StrandEvent, StrandIncoming};
use crate::{Error, Options, Result};

/// How a session reaches the shards.
#[derive(Clone)]
pub(crate) enum SessionDialer {
    /// By connections of its own.
    Own(Arc<dyn NetworkStack>),
    /// By connections that it shares with other sessions.
    Shared(SharedConnections),
}

/// A strand without session.
pub(super) struct DialedStrand {
    strand: Strand,
    incoming: StrandIncoming,
    timeout: Duration,
    /// Whether the connection may be dead without the client knowing: another session uses it, or the
    /// node has refused to open the session before.
    was_open: bool,
}

/// What the osd has answered to `Open`.
pub(super) struct ShardHello {
    /// The version of the protocol that client and osd speak.
    pub(super) version: u16,
    pub(super) session: SessionId,
    /// The shard that has answered.
    pub(super) shard: u16,
    /// Port of each shard.
    pub(super) ports: Vec<u16>,
    /// Address of the node's control plane.
    pub(super) control: Option<String>,
}

/// A strand on which the session is open.
pub(super) struct OpenedStrand {
    pub(super) strand: Strand,
    pub(super) incoming: StrandIncoming,
    pub(super) opened: ShardHello,
}

/// Connects to an endpoint, or takes a strand of a connection to it.
pub(super) async fn dial(dialer: &SessionDialer, endpoint: &str, options: &Options) -> Result<DialedStrand> {
    let timeout = options.connect_timeout;
    let (strand, incoming, was_open) = match dialer {
        SessionDialer::Own(stack) => {
            let (connection, incoming) = stack.connect(endpoint, ConnectOptions { timeout }).await?;
            let (strand, incoming) = Strand::own(connection, incoming);
            (strand, incoming, false)
        }
        SessionDialer::Shared(connections) => {
            let JoinedStrand { strand, incoming, was_open } = connections.strand(endpoint, timeout).await?;
            (strand, incoming, was_open)
        }
    };
    Ok(DialedStrand { strand, incoming, timeout, was_open })
}

impl DialedStrand {
    /// Resumes the session on the strand, with this capability; with `None`, opens a new session.
    /// After the node has refused the capability, the session may be opened with another one.
    pub(super) async fn open(&mut self, session: Option<SessionId>, capability: Bytes) -> Result<ShardHello> {
        let timeout = self.timeout;
        let opened = tokio::time::timeout(timeout, self.handshake(session, capability)).await;
        let opened = opened.unwrap_or(Err(Error::TimedOut(timeout.into())));
        if matches!(opened, Err(Error::TimedOut(_) | Error::Network(_))) {
            self.strand.distrust();
        }
        self.was_open |= matches!(opened, Err(Error::Node(_)));
        opened
    }

    /// Returns whether the connection was open before this attempt to open the session.
    pub(super) fn was_open(&self) -> bool {
        self.was_open
    }

    /// Adds the session that is open on the strand.
    pub(super) fn with(self, opened: ShardHello) -> OpenedStrand {
        OpenedStrand { strand: self.strand, incoming: self.incoming, opened }
    }

    async fn handshake(&mut self, presented: Option<SessionId>, capability: Bytes) -> Result<ShardHello> {
        let strand = self.strand.number();
        let head = RequestHead { strand, seq: 0, acked_through: 0, retry: false, deadline_ms: 0 };
        let oldest = if self.strand.is_shared() { wire::VERSION_STRANDS } else { wire::VERSION_OLDEST };
        let newest = wire::VERSION;
        let body = RequestBody::Open { oldest, newest, session: presented, capability };
        let header = wire::encode_request(&head, &body);
        self.strand.send(Message { header, payload: Default::default() }).await?;
        match self.incoming.next().await {
            StrandEvent::Reply(reply, _) => match reply.result? {
                ReplyBody::Opened { version, session, shard, shards: ports, control } => {
                    if presented.is_some_and(|presented| presented != session) {
                        return Err(Error::Protocol("the node has opened another session".into()));
                    }
                    Ok(ShardHello { version, session, shard, ports, control })
                }
                other => Err(Error::Protocol(format!("expected an open session, got {other:?}"))),
            },
            StrandEvent::Lost(e) => Err(e.into()),
        }
    }
}
