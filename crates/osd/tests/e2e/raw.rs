//! A client that encodes requests itself, so that it can send requests that no real client sends.

use std::sync::Arc;

use base::block::Payload;
use bytes::Bytes;
use messenger::{ConnectOptions, Connection, ConnectionEvent, Incoming, Message, UseAs};
use wire::{
    Data, Mutate, Mutated, Mutation, ObjectReply, ObjectRequest, OpBytes, Reply, ReplyBody, RequestBody,
    RequestHead, SessionId, WireName,
};

pub(crate) struct Raw {
    pub(crate) connection: Arc<dyn Connection>,
    incoming: Box<dyn Incoming>,
    pub(crate) session: SessionId,
    endpoint: String,
    /// The shard of the connection, and the ports of all shards.
    shard: u16,
    shards: Vec<u16>,
    pub(crate) capability: Bytes,
}

/// Returns the head of a request's first attempt.
pub(crate) fn head(seq: u64) -> RequestHead {
    RequestHead { strand: 0, seq, acked_through: 0, retry: false, deadline_ms: 10_000 }
}

pub(crate) fn name(object: &str) -> WireName {
    WireName {
        pool: "pool".into(),
        namespace: Bytes::new(),
        object: Bytes::copy_from_slice(object.as_bytes()),
    }
}

/// Returns a request that appends a few bytes.
pub(crate) fn append(object: &str, bytes: &'static str) -> RequestBody {
    mutate(object, vec![Mutation::Append(OpBytes::Embedded(bytes.into()))], Data::None)
}

pub(crate) fn mutate(object: &str, ops: Vec<Mutation>, data: Data) -> RequestBody {
    RequestBody::Object(ObjectRequest::Mutate(Mutate {
        name: name(object),
        part: None,
        conditions: vec![],
        ops,
        data,
    }))
}

impl Raw {
    pub(crate) async fn connect(endpoint: &str, session: Option<SessionId>) -> Raw {
        Raw::connect_with(endpoint, session, crate::common::capability(endpoint).await).await
    }

    async fn connect_with(endpoint: &str, session: Option<SessionId>, capability: Bytes) -> Raw {
        let stack = crate::common::stack(UseAs::Client);
        let (connection, incoming) = stack.connect(endpoint, ConnectOptions::default()).await.unwrap();
        let (session_id, endpoint) = (SessionId(0), endpoint.to_owned());
        let mut raw =
            Raw { connection, incoming, session: session_id, endpoint, shard: 0, shards: vec![], capability };
        let open = raw.opening(session);
        match raw.call_here(head(0), &open).await.unwrap() {
            ReplyBody::Opened { session, shard, shards, .. } => {
                (raw.session, raw.shard, raw.shards) = (session, shard, shards);
            }
            other => panic!("{other:?}"),
        }
        raw
    }

    /// Returns a request that opens or resumes a session.
    pub(crate) fn opening(&self, session: Option<SessionId>) -> RequestBody {
        let (oldest, newest, capability) = (wire::VERSION_OLDEST, wire::VERSION, self.capability.clone());
        RequestBody::Open { oldest, newest, session, capability }
    }

    /// Sends a request, to one shard after another until the right one answers.
    pub(crate) async fn call(&mut self, head: RequestHead, body: RequestBody) -> wire::Result<ReplyBody> {
        for _ in 1..self.shards.len() {
            match self.call_here(head, &body).await {
                Err(wire::Error::WrongShard { .. }) => self.move_to_next_shard().await,
                result => return result,
            }
        }
        self.call_here(head, &body).await
    }

    /// Continues the session on a connection to the next shard.
    async fn move_to_next_shard(&mut self) {
        let next = (usize::from(self.shard) + 1) % self.shards.len();
        let (host, _) = self.endpoint.rsplit_once(':').unwrap();
        let endpoint = format!("{host}:{}", self.shards[next]);
        *self = Box::pin(Raw::connect_with(&endpoint, Some(self.session), self.capability.clone())).await;
    }

    async fn call_here(&mut self, head: RequestHead, body: &RequestBody) -> wire::Result<ReplyBody> {
        self.send(wire::encode_request(&head, body), Payload::default()).await;
        let reply = self.reply().await.unwrap();
        assert_eq!(reply.seq, head.seq);
        reply.result
    }

    pub(crate) async fn changed(&mut self, head: RequestHead, body: RequestBody) -> wire::Result<Mutated> {
        match self.call(head, body).await? {
            ReplyBody::Object(ObjectReply::Mutated(mutated)) => Ok(mutated),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn send(&self, header: Bytes, payload: Payload) {
        self.connection.send(Message { header, payload }).await.unwrap();
    }

    /// Returns the next reply; `None` if the node has closed the connection.
    pub(crate) async fn reply(&mut self) -> Option<Reply> {
        loop {
            match self.incoming.next().await {
                ConnectionEvent::Message(message) => {
                    return Some(wire::decode_reply(&message.header).unwrap());
                }
                ConnectionEvent::Lost(_) => return None,
                ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
            }
        }
    }
}
