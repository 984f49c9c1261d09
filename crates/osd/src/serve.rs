//! Serves connections: receives requests and sends replies.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use base::block::Payload;
use base::phases::Clock;
use messenger::{Connection, ConnectionEvent, Incoming, Listener, Message};
use store::Submit;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Duration, Instant};
use wire::limits::MAX_STRANDS;
use wire::{
    Error, Mutate, Mutated, ObjectReply, ObjectRequest, Reply, ReplyBody, RequestBody, RequestHead, SessionId,
};

use crate::audit_log::{AuditEvent, AuditKind};
use crate::authorize::{SessionRights, authorize, authorize_fence};
use crate::clients::ConnectionId;
use crate::gather::{self, Puller};
use crate::inflight::{RequestClaim, joined};
use crate::mutate::Change;
use crate::osd::{OpeningConnection, Osd};
use crate::pg::Origin;
use crate::pool::ActivePool;
use crate::pull_choice::{ChosenPull, PullWay};
use crate::request::RequestContext;
use crate::sessions::BindingNumber;
use crate::shard::Shard;
use crate::task::spawn;
use crate::times::RequestKind;
use crate::{list, query, read};

/// Minimum time between two updates of a session's last activity.
const HEARD_PAUSE: Duration = Duration::from_secs(1);

/// Accepts connections until the osd stops.
pub(crate) async fn accept(shard: Rc<Shard>, mut listener: Box<dyn Listener>) {
    loop {
        match listener.accept().await {
            Ok((connection, incoming)) => {
                let id = shard.clients.connected(&connection);
                let strands = BTreeMap::new();
                spawn(Served { shard: Rc::clone(&shard), connection, id, strands }.run(incoming));
            }
            Err(e) => tracing::debug!(error = %e, "a peer failed to connect"),
        }
    }
}

/// An open connection and its sessions.
struct Served {
    shard: Rc<Shard>,
    connection: Arc<dyn Connection>,
    id: ConnectionId,
    /// The sessions by their strands.
    strands: BTreeMap<u32, ServedStrand>,
}

/// A session on a connection.
struct ServedStrand {
    session: SessionId,
    binding: BindingNumber,
    rights: Rc<SessionRights>,
    /// One permit for each request of the session on this connection that may be in progress.
    room: Arc<Semaphore>,
    /// Time at which the session's activity was last recorded.
    heard: Instant,
}

impl ServedStrand {
    /// Returns whether the shard accepts requests of the session on this strand.
    fn is_current(&self, shard: &Shard) -> bool {
        shard.clients.is_bound(self.session, self.binding)
    }

    /// Ends the strand. Its session may continue on another one.
    fn end(self, shard: &Rc<Shard>) {
        let ServedStrand { session, binding, .. } = self;
        if shard.clients.unbind(session, binding) {
            let on = shard.share.shard();
            shard.tell_first(move |osd| osd.session_left(session, on, binding));
        }
    }
}

impl Served {
    async fn run(mut self, mut incoming: Box<dyn Incoming>) {
        loop {
            match incoming.next().await {
                ConnectionEvent::Message(message) => {
                    let clock = Clock::start();
                    if !self.take(message, clock).await {
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
        for (_, strand) in self.strands {
            strand.end(&self.shard);
        }
        self.shard.clients.disconnected(self.id);
    }

    /// Handles a message. Returns `false` if the message is not a request, so that the caller must
    /// close the connection.
    async fn take(&mut self, message: Message, clock: Clock) -> bool {
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
                self.shard.refuse_request(&self.connection, &head, Error::BadRequest(e.to_string())).await;
                return true;
            }
        };
        match &body {
            RequestBody::Open { oldest, newest, session, capability } => {
                let opened = self.open(head.strand, (*oldest, *newest), *session, capability).await;
                self.shard.answer(&self.connection, &head, opened, Payload::default()).await;
                return true;
            }
            RequestBody::Leave => {
                if let Some(strand) = self.strands.remove(&head.strand) {
                    strand.end(&self.shard);
                }
                return true;
            }
            RequestBody::Renew { capability } if self.strands.contains_key(&head.strand) => {
                let renewed = self.renew(head.strand, capability);
                self.shard.answer(&self.connection, &head, renewed, Payload::default()).await;
                return true;
            }
            RequestBody::CloseSession if self.is_current(head.strand) => {
                self.close_session(head);
                return true;
            }
            RequestBody::CloseSession
            | RequestBody::Renew { .. }
            | RequestBody::Fence { .. }
            | RequestBody::Object(_) => {}
        }
        let shard = Rc::clone(&self.shard);
        let Some((strand, permit)) = self.admit(head.strand).await else {
            let why = "the session was resumed on another connection, has ended, or was never opened";
            self.shard.refuse_request(&self.connection, &head, Error::NoSession(why.into())).await;
            return true;
        };
        let session = strand.session;
        if strand.heard.elapsed() >= HEARD_PAUSE {
            strand.heard = Instant::now();
            shard.tell_first(move |osd| osd.session_heard(session));
        }
        let rights = Rc::clone(&strand.rights);
        let request = RequestContext { head, session, connection: Arc::clone(&self.connection), rights };
        let running = clock.clone();
        spawn(running.scope(async move {
            let kind = RequestKind::of(&body);
            let counted = shard.requests.enter();
            if matches!(kind, RequestKind::Write | RequestKind::Read) {
                shard.pace.client_served();
            }
            let (result, payload) = shard.carry_out(&request, body, message.payload).await;
            drop(counted);
            let carried_out = result.is_ok();
            shard.answer(&request.connection, &request.head, result, payload).await;
            if carried_out {
                shard.times.add(kind, clock.finish());
            }
            drop(permit);
        }));
        true
    }

    /// Returns whether the shard accepts requests on a strand.
    fn is_current(&self, number: u32) -> bool {
        self.strands.get(&number).is_some_and(|strand| strand.is_current(&self.shard))
    }

    /// Returns the session of a strand with a permit for one more request. Waits while the session has
    /// as many requests in progress as it may. Returns `None` if the strand has no session.
    async fn admit(&mut self, number: u32) -> Option<(&mut ServedStrand, OwnedSemaphorePermit)> {
        let room = self.strands.get(&number).filter(|strand| strand.is_current(&self.shard))?.room.clone();
        // Acquiring fails only if the semaphore was closed, and nothing closes it.
        let permit = room.acquire_owned().await.ok()?;
        // The session may have ended meanwhile.
        let strand = self.strands.get_mut(&number).filter(|strand| strand.is_current(&self.shard))?;
        Some((strand, permit))
    }

    /// Ends the session once its requests in progress have finished. From now on, the strand has no
    /// session, so further requests are refused.
    fn close_session(&mut self, head: RequestHead) {
        let Some(ServedStrand { session, .. }) = self.strands.remove(&head.strand) else { return };
        let (shard, connection) = (Rc::clone(&self.shard), Arc::clone(&self.connection));
        spawn(async move {
            let closed = shard.on_first(move |osd| async move { osd.close_session(session).await }).await;
            let result = closed.flatten().map(|()| ReplyBody::Closed).map_err(Error::from);
            shard.answer(&connection, &head, result, Payload::default()).await;
        });
    }

    /// Notes a refusal in the audit log.
    fn refuse(&self, what: &str, e: Error) -> Error {
        let peer = self.connection.peer();
        self.shard.config.audit.record(|| AuditEvent {
            at_ms: self.shard.config.clock.now_ms(),
            event: AuditKind::Refused,
            user: peer.user.as_ref().map(ToString::to_string),
            key: peer.key,
            peer: Some(peer.address.clone()),
            what: what.to_owned(),
            why: Some(e.to_string()),
        });
        e
    }

    /// Replaces the rights of a session.
    fn renew(&mut self, strand: u32, capability: &[u8]) -> wire::Result<ReplyBody> {
        let peer = self.connection.peer();
        let verified = SessionRights::verify(&self.shard, capability, peer);
        let verified = verified.and_then(|rights| match self.strands.get(&strand) {
            Some(strand) if strand.rights.owner(peer) == rights.owner(peer) => Ok(rights),
            _ => Err(Error::BadRequest("the capability belongs to another user than the session".into())),
        });
        let rights = verified.map_err(|e| self.refuse("renew a capability", e))?;
        self.strands.get_mut(&strand).expect("the caller has looked").rights = rights;
        Ok(ReplyBody::Renewed)
    }

    /// Returns whether the connection has no room for the strand with this number.
    fn is_full(&self, strand: u32) -> bool {
        !self.strands.contains_key(&strand) && self.strands.len() >= MAX_STRANDS
    }

    /// Opens a session on a strand.
    async fn open(
        &mut self,
        strand: u32,
        (oldest, newest): (u16, u16),
        presented: Option<SessionId>,
        capability: &[u8],
    ) -> wire::Result<ReplyBody> {
        let version = newest.min(wire::VERSION);
        if version < oldest.max(wire::VERSION_OLDEST) {
            return Err(Error::WrongVersion { oldest: wire::VERSION_OLDEST, newest: wire::VERSION });
        }
        let verified = SessionRights::verify(&self.shard, capability, self.connection.peer());
        let rights = match verified {
            // Each new client opens a session without a capability first, to learn where to get one.
            Err(e @ Error::CapabilityRefused { .. }) if capability.is_empty() => return Err(e),
            verified => verified.map_err(|e| self.refuse("open a session", e))?,
        };
        // Strands whose sessions have left are forgotten before they are more than the others.
        if self.strands.len() > 2 * self.shard.clients.sessions_on(self.id) || self.is_full(strand) {
            self.strands.retain(|_, strand| strand.is_current(&self.shard));
        }
        if self.is_full(strand) {
            let (what, advice) = ("sessions on one connection".into(), "open another connection".into());
            return Err(Error::Busy { what, limit: MAX_STRANDS as u64, advice });
        }
        let room = Arc::new(Semaphore::new(self.shard.config.requests_per_connection));
        let connection = OpeningConnection {
            shard: self.shard.share.shard(),
            id: self.id,
            strand,
            peer: self.connection.peer().peer,
            owner: rights.owner(self.connection.peer()),
            about: rights.about(&self.shard, self.connection.peer().address.clone()),
            room: Arc::clone(&room),
        };
        let opening = move |osd: Rc<Osd>| async move { osd.open_session(presented, connection).await };
        self.shard.clients.set_opening(self.id, true);
        let opened = self.shard.on_first(opening).await;
        self.shard.clients.set_opening(self.id, false);
        let (session, binding) = opened?.map_err(|e| match e {
            e @ Error::SessionRefused { .. } => self.refuse("resume a session", e),
            e => e,
        })?;
        let opened = ServedStrand { session, binding, rights, room, heard: Instant::now() };
        if let Some(before) = self.strands.insert(strand, opened) {
            // If an earlier session stayed bound, it would keep its slot forever.
            before.end(&self.shard);
        }
        let endpoint = self.shard.endpoint().expect("an osd with connections has ports");
        let (shard, shards) = (self.shard.share.shard(), endpoint.ports.clone());
        let control = self.shard.config.control.clone();
        Ok(ReplyBody::Opened { version, session, shard, shards, control })
    }
}

impl Shard {
    /// Refuses a request before it is carried out.
    async fn refuse_request(&self, connection: &Arc<dyn Connection>, head: &RequestHead, e: Error) {
        self.answer(connection, head, Err(e), Payload::default()).await;
    }

    async fn answer(
        &self,
        connection: &Arc<dyn Connection>,
        &RequestHead { strand, seq, .. }: &RequestHead,
        result: wire::Result<ReplyBody>,
        payload: Payload,
    ) {
        if let Err(e) = &result {
            self.times.refused();
            tracing::debug!(seq, error = %e, "a request was refused");
        }
        let mut header = wire::encode_reply(&Reply { strand, seq, result });
        let limit = connection.limits().max_header;
        if header.len() > limit {
            let (what, size) = ("size of the reply".into(), header.len() as u64);
            let result = Err(Error::TooLarge { what, size, limit: limit as u64 });
            header = wire::encode_reply(&Reply { strand, seq, result });
        }
        if let Err(e) = connection.send(Message { header, payload }).await {
            // The client reconnects and sends a retry.
            tracing::debug!(seq, error = %e, "a reply could not be sent");
        }
    }

    async fn carry_out(
        self: &Rc<Shard>,
        request: &RequestContext,
        body: RequestBody,
        payload: Payload,
    ) -> (wire::Result<ReplyBody>, Payload) {
        self.times.count(&body);
        let (mut result, payload) = match body {
            RequestBody::Object(body) => match self.carry_out_object(request, body, payload).await {
                Ok((reply, payload)) => (Ok(ReplyBody::Object(reply)), payload),
                Err(e) => (Err(e), Payload::default()),
            },
            RequestBody::Fence { session } => {
                let fenced = self.fence(request, session).await;
                (fenced.map(|()| ReplyBody::Fenced), Payload::default())
            }
            RequestBody::Open { .. }
            | RequestBody::Renew { .. }
            | RequestBody::CloseSession
            | RequestBody::Leave => {
                (Err(Error::BadRequest("the request concerns the connection".into())), Payload::default())
            }
        };
        if let Err(Error::NoSpace { target, .. }) = &mut result {
            *target = self.map.borrow().name_of(target);
        }
        (result, payload)
    }

    /// Ends another session of the client for good.
    async fn fence(self: &Rc<Shard>, request: &RequestContext, fenced: SessionId) -> wire::Result<()> {
        let sender = (&*request.rights, request.session, request.connection.peer());
        let owner = authorize_fence(self, sender, fenced);
        let fencing = async {
            let owner = owner?;
            self.on_first(move |osd| async move { osd.fence_for(fenced, &owner).await }).await?
        };
        fencing.await.inspect_err(|e| {
            if matches!(e, Error::SessionRefused { .. }) {
                self.audit_refusal(request, e);
            }
        })
    }

    /// Notes the refusal of a request in the audit log.
    fn audit_refusal(&self, request: &RequestContext, e: &Error) {
        let peer = request.connection.peer();
        self.config.audit.record(|| AuditEvent {
            at_ms: self.config.clock.now_ms(),
            event: AuditKind::Refused,
            user: Some(request.rights.user().to_owned()),
            key: peer.key,
            peer: Some(peer.address.clone()),
            what: format!("request {} of session {}", request.head.seq, request.session),
            why: Some(e.to_string()),
        });
    }

    /// Executes a request about objects. Returns the reply and its payload.
    async fn carry_out_object(
        self: &Rc<Shard>,
        request: &RequestContext,
        body: ObjectRequest,
        payload: Payload,
    ) -> wire::Result<(ObjectReply, Payload)> {
        let authorized = authorize(self, &request.rights, &body);
        let pool = authorized.inspect_err(|e| {
            if matches!(e, Error::NotPermitted { .. } | Error::NotAdministrator { .. }) {
                self.audit_refusal(request, e);
            }
        })?;
        let reply = match body {
            ObjectRequest::Mutate(mutate) => {
                ObjectReply::Mutated(self.mutate(request, &pool, &mutate, payload).await?)
            }
            ObjectRequest::Read(wanted) => return read::read(self, request, &pool, &wanted).await,
            ObjectRequest::ReadFirst(wanted) => {
                return read::read_first(self, request, &pool, &wanted).await;
            }
            ObjectRequest::Query(query) => query::query(self, request, &pool, &query).await?,
            ObjectRequest::List(wanted) => list::list(self, request, &pool, &wanted).await?,
        };
        Ok((reply, Payload::default()))
    }

    async fn mutate(
        self: &Rc<Shard>,
        request: &RequestContext,
        pool: &ActivePool,
        mutate: &Mutate,
        inline: Payload,
    ) -> wire::Result<Mutated> {
        let RequestHead { seq, retry, .. } = request.head;
        loop {
            match self.in_flight.claim(request.session, seq) {
                RequestClaim::First(running) => {
                    let result = self.change(request, pool, mutate, inline.clone()).await;
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
        self: &Rc<Shard>,
        request: &RequestContext,
        pool: &ActivePool,
        mutate: &Mutate,
        inline: Payload,
    ) -> wire::Result<Mutated> {
        mutate.check()?;
        let name = mutate.name.check()?;
        let place = pool.place(name.namespace(), name.object(), mutate.part.as_ref())?;
        let sources = pool.siblings(&name, mutate.inherits_from().unwrap_or_default())?;
        let RequestHead { mut seq, acked_through, retry, .. } = request.head;
        if base::mutant!(LookOnOldShard) {
            seq |= u64::from(self.share.shard()) << 32;
        }
        let change = Change {
            shard: self,
            place: &place,
            name: &name.to_string(),
            conditions: &mutate.conditions,
            ops: &mutate.ops,
            sources: &sources,
            origin: Some(Origin { session: request.session, seq, acked_through }),
            patience: request.patience(&self.config),
        };
        let chosen = gather::stageable_bytes(mutate).and_then(|len| {
            let (backing, largest) = (&place.pg.backing, self.staging.largest() as u64);
            let (alignment, now) = (backing.stage_alignment(), self.requests.now());
            self.pulls.choose(len, alignment, largest, now, backing.is_redundant())
        });
        let puller = Puller {
            connection: &*request.connection,
            staging: &self.staging,
            times: &self.times,
            timeout: self.config.transfer_timeout,
            segments_in_flight: self.config.segments_in_flight(),
            segment: self.segment(),
            way: chosen.as_ref().map_or(PullWay::Whole, ChosenPull::way),
        };
        let gathers = Cell::new(0_u32);
        let gather = async || {
            gathers.set(gathers.get() + 1);
            self.check_parts(pool.record.id, &name, &mutate.ops).await?;
            puller.gather(mutate, inline.clone(), &place.pg.backing).await
        };
        let done = change.run(retry, gather).await?;
        // A repeated request may need no data, and a request that waited for space fetches its data
        // again. Their times do not tell how long a pull takes.
        if let Some(chosen) = chosen.filter(|_| gathers.get() == 1) {
            self.pulls.done(&chosen);
        }
        if let Some(manifest) = done.dropped {
            self.drop_parts(pool.record.id, name, manifest);
        }
        Ok(done.mutated)
    }
}
