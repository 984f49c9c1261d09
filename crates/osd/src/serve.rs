//! Serves connections: receives requests and sends replies.

use std::rc::Rc;
use std::sync::{Arc, Weak};

use base::block::Payload;
use base::phases::Clock;
use messenger::{Connection, ConnectionEvent, Incoming, Listener, Message};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Duration, Instant};
use wire::{
    Error, Mutate, Mutated, ObjectReply, ObjectRequest, Reply, ReplyBody, RequestBody, RequestHead, SessionId,
};

use crate::gather::{COMPANY, Puller};
use crate::inflight::{RequestClaim, joined};
use crate::mutate::Change;
use crate::osd::Osd;
use crate::pg::Origin;
use crate::request::RequestContext;
use crate::sessions::{ConnectionId, OpenedSession};
use crate::task::spawn;
use crate::times::RequestKind;
use crate::{list, query, read};

/// Minimum time between two updates of a session's last activity.
const HEARD_PAUSE: Duration = Duration::from_secs(1);

/// Accepts connections until the osd stops.
pub(crate) async fn accept(osd: Rc<Osd>, mut listener: Box<dyn Listener>) {
    let mut next: ConnectionId = 0;
    loop {
        match listener.accept().await {
            Ok((connection, incoming)) => {
                next += 1;
                osd.connections.borrow_mut().insert(next, Arc::downgrade(&connection));
                let heard = Instant::now();
                let served = Served { osd: Rc::clone(&osd), connection, id: next, session: None, heard };
                spawn(served.run(incoming));
            }
            Err(e) => tracing::debug!(error = %e, "a peer failed to connect"),
        }
    }
}

/// An open connection and its session.
struct Served {
    osd: Rc<Osd>,
    connection: Arc<dyn Connection>,
    id: ConnectionId,
    session: Option<SessionId>,
    /// Time at which the session's activity was last recorded.
    heard: Instant,
}

impl Served {
    async fn run(mut self, mut incoming: Box<dyn Incoming>) {
        let room = Arc::new(Semaphore::new(self.osd.config.requests_per_connection));
        loop {
            match incoming.next().await {
                ConnectionEvent::Message(message) => {
                    let clock = Clock::start();
                    let Ok(permit) = Arc::clone(&room).acquire_owned().await else { break };
                    if !self.take(message, permit, &room, clock).await {
                        self.connection.close().await;
                        break;
                    }
                }
                ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
                ConnectionEvent::Lost(e) => {
                    tracing::debug!(peer = self.connection.peer().address, error = %e, "a connection ended");
                    break;
                }
            }
        }
        self.osd.connections.borrow_mut().remove(&self.id);
        if let Some(session) = self.session {
            self.osd.sessions.borrow_mut().detach(session, self.id);
        }
    }

    /// Handles a message. Returns `false` if the message is not a request, so that the caller must
    /// close the connection.
    async fn take(
        &mut self,
        message: Message,
        permit: OwnedSemaphorePermit,
        room: &Arc<Semaphore>,
        clock: Clock,
    ) -> bool {
        let Ok((head, rest)) = wire::decode_head(&message.header) else {
            tracing::warn!(
                peer = self.connection.peer().address,
                "a connection is closed because its peer sent a message that is not a request"
            );
            return false;
        };
        let body = match wire::decode_body(rest) {
            Ok(body) => body,
            Err(e) => {
                let refused = Err(Error::BadRequest(e.to_string()));
                answer(&self.connection, head.seq, refused, Payload::default()).await;
                return true;
            }
        };
        let session = match (&body, self.session) {
            (RequestBody::Open { oldest, newest, session }, _) => {
                let opened = self.open(*oldest, *newest, *session);
                answer(&self.connection, head.seq, opened, Payload::default()).await;
                return true;
            }
            (RequestBody::CloseSession, Some(session))
                if self.osd.sessions.borrow().is_attached(session, self.id) =>
            {
                drop(permit);
                self.close_session(session, head.seq, room);
                return true;
            }
            (_, Some(session)) if self.osd.sessions.borrow().is_attached(session, self.id) => session,
            _ => {
                let refused = Err(Error::NoSession(
                    "the session was resumed on another connection, or never opened".into(),
                ));
                answer(&self.connection, head.seq, refused, Payload::default()).await;
                return true;
            }
        };
        if self.heard.elapsed() >= HEARD_PAUSE {
            self.heard = Instant::now();
            self.osd.sessions.borrow_mut().heard(session);
        }
        let request = RequestContext { head, session, connection: Arc::clone(&self.connection) };
        let osd = Rc::clone(&self.osd);
        let running = clock.clone();
        spawn(running.scope(async move {
            let kind = RequestKind::of(&body);
            osd.requests.set(osd.requests.get() + 1);
            if matches!(kind, RequestKind::Write | RequestKind::Read) {
                osd.pace.client_served();
            }
            let (result, payload) = osd.carry_out(&request, body, message.payload).await;
            osd.requests.set(osd.requests.get() - 1);
            let carried_out = result.is_ok();
            answer(&request.connection, request.head.seq, result, payload).await;
            if carried_out {
                osd.times.add(kind, clock.finish());
            }
            drop(permit);
        }));
        true
    }

    /// Ends the session once its requests in progress have finished. From now on, the connection
    /// has no session, so further requests are refused.
    fn close_session(&mut self, session: SessionId, seq: u64, room: &Arc<Semaphore>) {
        self.session = None;
        let (osd, connection, room) = (Rc::clone(&self.osd), Arc::clone(&self.connection), Arc::clone(room));
        spawn(async move {
            let all = u32::try_from(osd.config.requests_per_connection).unwrap_or(u32::MAX);
            let Ok(_all_done) = room.acquire_many(all).await else { return };
            osd.close_session(session);
            answer(&connection, seq, Ok(ReplyBody::Closed), Payload::default()).await;
        });
    }

    fn open(&mut self, oldest: u16, newest: u16, presented: Option<SessionId>) -> wire::Result<ReplyBody> {
        let version = newest.min(wire::VERSION);
        if version < oldest.max(wire::VERSION_OLDEST) {
            return Err(Error::WrongVersion { oldest: wire::VERSION_OLDEST, newest: wire::VERSION });
        }
        let peer = self.connection.peer().peer;
        let OpenedSession { id: session, reclaimed } =
            self.osd.sessions.borrow_mut().open(presented, self.id, peer)?;
        if let Some(before) = self.session.replace(session)
            && before != session
        {
            // A connection has only one session. If the earlier session stayed attached, it would
            // keep its slot forever.
            self.osd.sessions.borrow_mut().detach(before, self.id);
        }
        if let Some(reclaimed) = reclaimed {
            metrics::counter!("outboard_osd_sessions_reclaimed_total").increment(1);
            let victim = self.osd.connections.borrow().get(&reclaimed).and_then(Weak::upgrade);
            if let Some(victim) = victim {
                spawn(async move { victim.close().await });
            }
        }
        Ok(ReplyBody::Opened { version, session, shard: 0, shards: vec![self.osd.port.get()] })
    }
}

async fn answer(
    connection: &Arc<dyn Connection>,
    seq: u64,
    result: wire::Result<ReplyBody>,
    payload: Payload,
) {
    if let Err(e) = &result {
        metrics::counter!("outboard_osd_refused_total").increment(1);
        tracing::debug!(seq, error = %e, "a request was refused");
    }
    let mut header = wire::encode_reply(&Reply { seq, result });
    let limit = connection.limits().max_header;
    if header.len() > limit {
        let (what, size) = ("size of the reply".into(), header.len() as u64);
        let result = Err(Error::TooLarge { what, size, limit: limit as u64 });
        header = wire::encode_reply(&Reply { seq, result });
    }
    if let Err(e) = connection.send(Message { header, payload }).await {
        // The client reconnects and sends a retry.
        tracing::debug!(seq, error = %e, "a reply could not be sent");
    }
}

impl Osd {
    async fn carry_out(
        self: &Rc<Osd>,
        request: &RequestContext,
        body: RequestBody,
        payload: Payload,
    ) -> (wire::Result<ReplyBody>, Payload) {
        count(&body);
        let (mut result, payload) = match body {
            RequestBody::Object(body) => match self.carry_out_object(request, body, payload).await {
                Ok((reply, payload)) => (Ok(ReplyBody::Object(reply)), payload),
                Err(e) => (Err(e), Payload::default()),
            },
            RequestBody::Admin(body) => {
                (self.administer(request, body).await.map(ReplyBody::Admin), Payload::default())
            }
            other => (Err(Error::BadRequest(format!("{other:?} is not supported"))), Payload::default()),
        };
        if let Err(Error::NoSpace { target, .. }) = &mut result {
            *target = self.map.borrow().name_of(target);
        }
        (result, payload)
    }

    /// Executes a request about objects. Returns the reply and its payload.
    async fn carry_out_object(
        self: &Rc<Osd>,
        request: &RequestContext,
        body: ObjectRequest,
        payload: Payload,
    ) -> wire::Result<(ObjectReply, Payload)> {
        let reply = match body {
            ObjectRequest::Mutate(mutate) => {
                ObjectReply::Mutated(self.mutate(request, &mutate, payload).await?)
            }
            ObjectRequest::Read(wanted) => return read::read(self, request, &wanted).await,
            ObjectRequest::Query(query) => query::query(self, request, &query).await?,
            ObjectRequest::List(wanted) => list::list(self, request, &wanted).await?,
            other => return Err(Error::BadRequest(format!("{other:?} is not supported"))),
        };
        Ok((reply, Payload::default()))
    }

    async fn mutate(
        self: &Rc<Osd>,
        request: &RequestContext,
        mutate: &Mutate,
        inline: Payload,
    ) -> wire::Result<Mutated> {
        let RequestHead { seq, retry, .. } = request.head;
        loop {
            match self.in_flight.claim(request.session, seq) {
                RequestClaim::First(running) => {
                    let result = self.change(request, mutate, inline.clone()).await;
                    running.finish(&result);
                    return result;
                }
                RequestClaim::Join(_) if !retry => {
                    return Err(Error::BadRequest(format!(
                        "a request with number {seq} is in progress already"
                    )));
                }
                RequestClaim::Join(attempt) => match joined(attempt).await {
                    // The first attempt failed because its connection or the store was lost. This
                    // attempt may succeed.
                    Some(Err(e)) if e.is_transient() => {}
                    Some(result) => return result,
                    None => {}
                },
            }
        }
    }

    async fn change(
        self: &Rc<Osd>,
        request: &RequestContext,
        mutate: &Mutate,
        inline: Payload,
    ) -> wire::Result<Mutated> {
        mutate.check()?;
        let name = mutate.name.check()?;
        let place = self.place(&name, mutate.part.as_ref())?;
        let RequestHead { seq, acked_through, retry, .. } = request.head;
        let change = Change {
            osd: self,
            place: &place,
            name: &name.to_string(),
            conditions: &mutate.conditions,
            ops: &mutate.ops,
            origin: Some(Origin { session: request.session, seq, acked_through }),
            patience: request.patience(&self.config),
        };
        let puller = Puller {
            connection: &*request.connection,
            staging: &self.staging,
            timeout: self.config.transfer_timeout,
            segments_in_flight: self.config.segments_in_flight(),
            in_company: self.requests.get() >= COMPANY,
        };
        let gather = async || {
            self.check_parts(&name, &mutate.ops).await?;
            puller.gather(mutate, inline.clone(), &place.pg.backing).await
        };
        let done = change.run(retry, gather).await?;
        if let Some(manifest) = done.dropped {
            self.drop_parts(name, manifest);
        }
        Ok(done.mutated)
    }
}

fn count(body: &RequestBody) {
    let kind = match body {
        RequestBody::Object(ObjectRequest::Mutate(_)) => "mutate",
        RequestBody::Object(ObjectRequest::Read(_)) => "read",
        RequestBody::Object(ObjectRequest::Query(_)) => "query",
        RequestBody::Object(ObjectRequest::List(_)) => "list",
        _ => "admin",
    };
    metrics::counter!("outboard_osd_requests_total", "kind" => kind).increment(1);
}
