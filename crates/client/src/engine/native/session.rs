//! The session with the node: its id, the request numbers, and the table of unanswered requests.
//!
//! Callers put their requests into the table and send them on the connection to the request's shard
//! ([`Routes`]). Each shard has a link with a background task ([`LinkTask`]), which receives the
//! shard's answers. The task also sends the requests that found no connection, and all unanswered
//! requests again when a connection was lost. If a shard refuses a request because the request
//! belongs to another shard, the session learns from the refusal and passes the request to the
//! other link.
//!
//! A node may refuse to continue a session. Then all links move to a new session. They repeat
//! requests that change nothing, and send changes that were not sent before. Changes that were sent
//! before fail with an unknown outcome, because only the old session had their results. If a node
//! has too many sessions, the links keep trying. When the last handle is dropped, the task of one
//! connected link tells the node that the session has ended, so that the node can discard the
//! session's results.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::block::Payload;
use base::thread::ThreadClass;
use base::watch;
use messenger::{BulkRegion, Message, MessengerError};
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use wire::{ObjectName, PartId, Reply, RequestBody, RequestHead, SessionId, UploadId};

use super::capabilities::{CapabilityHolder, RETRY_PAUSE};
use super::link_task::{LinkEnds, LinkTask, RECONNECT_PAUSE, RECONNECT_PAUSE_MAX};
use super::links::{Links, ReadyConnection};
use super::opening::{OpenedStrand, SessionDialer, ShardHello, dial};
use super::pending::{Answered, PendingRequest};
use super::read_sizes::ReadSizes;
use super::routes::Routes;
use super::strand::Strand;
use super::table::RequestTable;
use crate::options::ControlWay;
use crate::{Error, Options, Result};

/// Number of refused capabilities after which a client gives up to open its first connection. One refusal
/// is normal. Another one follows if the user's rights change meanwhile.
const REFUSALS_MAX: u32 = 4;

/// Time limit for telling the node that a session has ended. If the message cannot be sent, the
/// node discards the session's results later.
const CLOSE_TIME: Duration = Duration::from_secs(2);

/// State that callers and the links' tasks share.
pub(crate) struct Shared {
    dialer: SessionDialer,
    options: Options,
    capabilities: CapabilityHolder,
    /// Notified when a request leaves the table of unanswered requests.
    room: Notify,
    session_state: watch::Sender<SessionState>,
    /// Held by the link that opens a new session.
    opening: tokio::sync::Mutex<()>,
    state: Mutex<State>,
}

/// Whether the session is open, closing or closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SessionState {
    Open,
    /// The session is closing, so the links' tasks must end it.
    Closing,
    /// The links' tasks have ended.
    Closed,
}

/// Invariant: all connections in `links` belong to `session`, and their osd has answered with the
/// same list of shards as `routes` has.
struct State {
    /// `None` after the node has refused the session, until a link has opened a new one.
    session: Option<SessionId>,
    /// Version of the object protocol that the osd spoke last.
    version: u16,
    next_upload: u64,
    table: RequestTable,
    routes: Routes,
    /// Address of the node's control plane.
    control: Option<String>,
    links: Links,
    sizes: ReadSizes,
    closed: bool,
    /// Why the node refuses the session of an exclusive owner.
    fenced: Option<wire::Error>,
    /// Why a link could not connect; `None` since a link has connected.
    obstacle: Option<String>,
    /// Whether a link tells the node that the session has ended, or has told it.
    tells_end: bool,
}

/// The session. When it is dropped, a background task tells the node that the session has ended,
/// unless the runtime ends first.
pub(crate) struct ClientSession {
    pub(crate) shared: Arc<Shared>,
}

impl Drop for ClientSession {
    fn drop(&mut self) {
        self.shared.begin_close();
    }
}

/// Marks the session as closed when the last task of a link ends, or when the runtime drops it.
pub(super) struct Ending(Arc<Shared>);

impl Ending {
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.0
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.session_state.send_replace(SessionState::Closed);
    }
}

/// What the task of a link must do next to send the requests that wait for the link.
pub(super) enum NextSend {
    /// Send this message, which contains the request with this number.
    Message(u64, Message),
    /// Wait, because no request waits.
    Nothing,
    /// Wait, because the connection is lost.
    Lost,
    /// Stop, because the session has removed the connection.
    Detached,
}

impl ClientSession {
    /// Connects and opens a session. The links to further shards connect in the background.
    pub(crate) async fn open(
        dialer: SessionDialer,
        endpoint: &str,
        options: Options,
        plane: ControlWay,
    ) -> Result<ClientSession> {
        let capabilities = CapabilityHolder::new(&options, plane);
        let OpenedStrand { strand, incoming, opened } =
            connect_while_busy(&dialer, endpoint, &options, &capabilities).await?;
        let routes = Routes::new(endpoint, opened.shard, opened.ports)?;
        let mut state = State {
            session: Some(opened.session),
            version: opened.version,
            next_upload: 1,
            table: RequestTable::new(),
            routes,
            control: opened.control.map(|control| at_host(&control, endpoint)),
            links: Links::new(strand.limits()),
            sizes: ReadSizes::default(),
            closed: false,
            fenced: None,
            obstacle: None,
            tells_end: false,
        };
        let shards = state.links.add_missing(state.routes.shards());
        let number = state.links.attach(opened.shard, strand.clone());
        let signals: Vec<(u16, Arc<Notify>)> =
            shards.map(|shard| (shard, state.links.signal(shard))).collect();
        let shared = Arc::new(Shared {
            dialer,
            options,
            capabilities,
            room: Notify::new(),
            session_state: watch::Sender::new(SessionState::Open),
            opening: tokio::sync::Mutex::new(()),
            state: Mutex::new(state),
        });
        let ending = Arc::new(Ending(Arc::clone(&shared)));
        base::task::spawn(ThreadClass::Client, Arc::clone(&shared).keep_capability());
        let mut first = Some(LinkEnds { strand, incoming, number });
        for (shard, signal) in signals {
            let ends = if shard == opened.shard { first.take() } else { None };
            LinkTask::start(&ending, shard, signal, ends);
        }
        Ok(ClientSession { shared })
    }

    /// Returns the session's id, which stays the same if the client is an exclusive owner.
    ///
    /// # Errors
    /// [`Error::Fenced`] if the session was fenced, [`Error::Closed`] if it is closed.
    pub(crate) fn owner(&self) -> Result<SessionId> {
        let state = self.shared.lock();
        state.check_open()?;
        state.session.ok_or(Error::Closed)
    }

    /// Returns whether the node supports exclusive owners: fencing, and objects that inherit from others.
    pub(crate) fn supports_owners(&self) -> bool {
        self.shared.lock().version >= wire::VERSION_OWNERS
    }

    /// Returns whether the client can query the extents of objects.
    pub(crate) fn can_query_extents(&self) -> bool {
        self.shared.lock().version >= wire::VERSION_EXTENTS
    }

    /// Returns the session's id.
    pub(crate) fn session(&self) -> Option<SessionId> {
        self.shared.lock().session
    }

    /// Returns the address of the node's control plane; `None` if the node has none.
    ///
    /// # Errors
    /// [`Error::Closed`] if the session is closed.
    pub(crate) fn control(&self) -> Result<Option<String>> {
        let state = self.shared.lock();
        state.check_open()?;
        Ok(state.control.clone())
    }

    /// Returns an id for an upload.
    ///
    /// # Errors
    /// [`Error::Closed`] if the session is closed.
    pub(crate) fn next_upload(&self) -> Result<UploadId> {
        let mut state = self.shared.lock();
        state.check_open()?;
        let session = state.session.ok_or(Error::Closed)?;
        state.next_upload += 1;
        Ok(UploadId { session, number: state.next_upload - 1 })
    }

    /// Returns the likely maximum size of an object of this object's pool, in bytes.
    pub(crate) fn likely_size(&self, name: &ObjectName) -> u64 {
        self.shared.lock().sizes.likely(name.pool().as_bytes())
    }

    /// Returns how data of an object is sent.
    pub(crate) fn transfer(&self, name: &ObjectName, part: Option<&PartId>) -> TransferChoice {
        let limits = {
            let state = self.shared.lock();
            let pool = name.pool().as_bytes();
            state.links.limits(state.routes.shard_of_object(pool, name.namespace(), name.object(), part))
        };
        let inline_max = self.shared.options.inline_max.min(limits.eager) as u64;
        TransferChoice { inline_max, is_one_sided: limits.one_sided }
    }

    /// Ends the session. Returns when the node was told, or after [`CLOSE_TIME`].
    pub(crate) async fn close(&self) {
        self.shared.begin_close();
        let mut session_state = self.shared.session_state.subscribe();
        // The tasks' runtime may not be running, so the wait needs a time limit.
        let _ =
            tokio::time::timeout(CLOSE_TIME, session_state.wait_for(|state| *state == SessionState::Closed))
                .await;
    }
}

/// Returns the address `offered` of a control plane. If its host is a wildcard address, the host of `dialed` replaces it.
pub(super) fn at_host(offered: &str, dialed: &str) -> String {
    let is_wildcard = |address: &SocketAddr| address.ip().is_unspecified();
    match (offered.parse::<SocketAddr>().ok().filter(is_wildcard), dialed.rsplit_once(':')) {
        (Some(offered), Some((host, _))) => format!("{host}:{}", offered.port()),
        _ => offered.to_owned(),
    }
}

/// How data is sent to a shard or from it.
pub(crate) struct TransferChoice {
    /// Maximum size of data that is sent inside a message, in bytes.
    pub(crate) inline_max: u64,
    /// Whether the node itself reads data from the client's memory, by one-sided transfers.
    pub(crate) is_one_sided: bool,
}

impl Shared {
    pub(super) fn dialer(&self) -> &SessionDialer {
        &self.dialer
    }

    pub(super) fn options(&self) -> &Options {
        &self.options
    }

    pub(super) fn capabilities(&self) -> &CapabilityHolder {
        &self.capabilities
    }

    /// Replaces the capability before it expires, until the session is closed.
    async fn keep_capability(self: Arc<Self>) {
        let keeping = async {
            let mut pause = self.capabilities.renew_after();
            loop {
                tokio::time::sleep(pause).await;
                let (old, control) = (self.capabilities.current(), self.lock().control.clone());
                pause = match self.capabilities.replace(&old, control.as_deref()).await {
                    Ok(()) => {
                        self.present_capability().await;
                        self.capabilities.renew_after().max(RETRY_PAUSE)
                    }
                    Err(error) => {
                        tracing::debug!(%error, "the capability cannot be replaced yet; trying again");
                        RETRY_PAUSE
                    }
                };
            }
        };
        tokio::select! {
            biased;
            () = self.close_wanted() => {}
            never = keeping => match never {},
        }
    }

    /// Presents the capability on the connections of the links. The answers have the number 0, which no
    /// request has.
    async fn present_capability(&self) {
        let renew = RequestBody::Renew { capability: self.capabilities.current() };
        let strands = self.lock().links.strands();
        for strand in strands {
            let number = strand.number();
            let head = RequestHead { strand: number, seq: 0, acked_through: 0, retry: false, deadline_ms: 0 };
            let header = wire::encode_request(&head, &renew);
            // If the connection is lost, the link presents the capability on the next one.
            drop(strand.send(Message { header, payload: Default::default() }).await);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock and has changed only a part of the table.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses new requests, fails unanswered requests, and makes the links' tasks end the session.
    fn begin_close(&self) {
        let pending = {
            let mut state = self.lock();
            state.closed = true;
            state.table.take_all()
        };
        drop(pending);
        self.room.notify_waiters();
        self.session_state.send_if_modified(|state| {
            let is_open = *state == SessionState::Open;
            if is_open {
                *state = SessionState::Closing;
            }
            is_open
        });
    }

    pub(super) async fn close_wanted(&self) {
        // The wait cannot fail, because `self` owns the sender.
        drop(self.session_state.subscribe().wait_for(|state| *state != SessionState::Open).await);
    }

    /// Closes the connection of a link. The first link that ends first tells the node that the session
    /// has ended and that none of its requests will be repeated.
    pub(super) async fn end_link(&self, shard: u16) {
        let (strand, seq, is_first) = {
            let mut state = self.lock();
            let Some(strand) = state.links.take(shard) else { return };
            let is_first = !std::mem::replace(&mut state.tells_end, true);
            (strand, state.table.next_seq(), is_first)
        };
        let number = strand.number();
        let head = RequestHead { strand: number, seq, acked_through: seq - 1, retry: false, deadline_ms: 0 };
        let header = wire::encode_request(&head, &RequestBody::CloseSession);
        let ended = async {
            if is_first {
                let message = Message { header, payload: Default::default() };
                if let Err(e) = strand.send_last(message).await {
                    tracing::debug!(error = %e, "could not tell the node that the session has ended");
                }
            }
            strand.close().await;
        };
        if tokio::time::timeout(CLOSE_TIME, ended).await.is_err() {
            tracing::debug!(shard, "could not end the session in time");
        }
    }

    /// Adds a request to the table and returns its number. Waits while the request window is full.
    pub(crate) async fn enter(&self, pending: PendingRequest) -> Result<u64> {
        loop {
            let room = self.room.notified();
            {
                let mut state = self.lock();
                state.check_open()?;
                if state.table.has_room() {
                    return Ok(state.table.add(pending));
                }
            }
            room.await;
        }
    }

    /// Attempts a request that is in the table. Without a connection to the request's shard, the
    /// link's task sends the request later.
    pub(crate) async fn send(&self, seq: u64, done: oneshot::Sender<Answered>) -> Result<()> {
        let (strand, message, repeats_change) = {
            let mut guard = self.lock();
            let state = &mut *guard;
            state.check_open()?;
            let Some(pending) = state.table.get_mut(seq) else { return Err(Error::Closed) };
            pending.begin(done, &state.routes)?;
            let shard = pending.shard();
            let Some(ReadyConnection { strand, number }) = state.links.ready(shard) else {
                state.links.wake(shard);
                return Ok(());
            };
            let message = state.table.message(seq, &strand, number);
            let repeats_change = state.table.get_mut(seq).is_some_and(|pending| pending.repeats_change());
            (strand, message, repeats_change)
        };
        let sent = match message {
            Ok(message) => strand.send(message).await.map_err(Error::from),
            Err(e) => Err(e),
        };
        let failed = match sent {
            // The link's task detects the loss too, and sends the request again on the next
            // connection.
            Ok(()) | Err(Error::Network(MessengerError::ConnectionLost(_))) => return Ok(()),
            Err(e @ Error::Network(_)) if repeats_change => e.of_unknown_outcome(),
            Err(e) => e,
        };
        // No link may send the request after this call has failed.
        self.lock().table.get_mut(seq).map(PendingRequest::end_attempt);
        Err(failed)
    }

    /// Removes a request from the table.
    pub(crate) fn forget(&self, seq: u64) {
        let pending = {
            let mut state = self.lock();
            // A link may wait for the answer before it gives up its connection.
            state.links.wake_draining();
            state.table.remove(seq)
        };
        self.room.notify_waiters();
        drop(pending);
    }

    /// Returns the next message of the requests that wait for a link's connection. If no request
    /// waits, lets callers use the connection.
    pub(super) fn next_unsent(&self, shard: u16, number: u64, strand: &Strand) -> NextSend {
        let mut state = self.lock();
        if !state.links.is_attached(shard, number) {
            return NextSend::Detached;
        }
        loop {
            if state.links.is_draining(shard, number) {
                let waits = state.table.is_in_flight_on(number);
                return if waits { NextSend::Nothing } else { NextSend::Detached };
            }
            let Some(seq) = state.table.first_unsent(shard) else {
                state.links.set_ready(shard);
                return NextSend::Nothing;
            };
            match state.table.message(seq, strand, number) {
                Ok(message) => return NextSend::Message(seq, message),
                Err(Error::Network(MessengerError::ConnectionLost(_))) => return NextSend::Lost,
                Err(e) => {
                    if let Some(pending) = state.table.get_mut(seq) {
                        pending.fail(e, false);
                    }
                }
            }
        }
    }

    /// Fails a request whose message the connection does not accept.
    pub(super) fn fail_sending(&self, seq: u64, e: Error) {
        self.lock().table.fail(seq, e);
    }

    /// Passes an answer of a shard to the caller that waits for it, or passes a request that
    /// belongs to another shard to the other shard's link. Returns `false` if the answer says that
    /// the connection has no session, or no valid capability.
    pub(super) fn take_answer(&self, shard: u16, number: u64, reply: Reply, payload: Payload) -> bool {
        let mut state = self.lock();
        if matches!(reply.result, Err(wire::Error::NoSession(_) | wire::Error::CapabilityRefused { .. })) {
            // The node has not executed this attempt.
            let State { table, routes, links, .. } = &mut *state;
            let refused = table.get_mut(reply.seq).filter(|pending| pending.is_in_flight_on(number));
            let region = refused.and_then(|pending| pending.withdraw(routes));
            // The answers to the other requests in flight tell which of them the node has executed. Then
            // the link opens the session again, if necessary with a new capability.
            links.drain(shard, number);
            let is_drained = !table.is_in_flight_on(number);
            drop(state);
            region.into_iter().for_each(BulkRegion::finish);
            return !is_drained;
        }
        if reply.seq == 0 {
            // The node has answered to a new capability.
            return reply.result.is_ok();
        }
        if let Err(e @ wire::Error::SessionRefused { session, .. }) = &reply.result
            && self.options.exclusive
            && state.session == Some(*session)
        {
            self.end_by_fence(state, e);
            return true;
        }
        let is_last =
            |state: &State| state.links.is_draining(shard, number) && !state.table.is_in_flight_on(number);
        if let Err(wire::Error::WrongShard { groups, shards }) = reply.result {
            let region = state.reroute(reply.seq, (shard, number), groups, shards);
            let is_last = is_last(&state);
            drop(state);
            region.into_iter().for_each(BulkRegion::finish);
            return !is_last;
        }
        let Some(pending) = state.table.get_mut(reply.seq) else { return !is_last(&state) };
        if !pending.is_in_flight_on(number) {
            return !is_last(&state);
        }
        let Some((done, region)) = pending.end_attempt() else { return !is_last(&state) };
        drop(state);
        // The node no longer needs the offered memory. The offer is closed without the lock, so
        // that other callers do not wait.
        region.into_iter().for_each(BulkRegion::finish);
        let mut state = self.lock();
        let State { table, sizes, .. } = &mut *state;
        let Some(pending) = table.get_mut(reply.seq) else { return !is_last(&state) };
        let outcome = match reply.result {
            Ok(body) => {
                if let Some((pool, size)) = pending.size_read(&body) {
                    sizes.learn(pool, size);
                }
                pending.collect(body, payload)
            }
            Err(e) => Err(pending.refused(e)),
        };
        let is_last = is_last(&state);
        drop(state);
        // The caller may have been cancelled; ignore the error of the channel.
        drop(done.send(outcome));
        !is_last
    }

    /// Returns the session to present on a new connection. If there is none, only one link at a
    /// time may open a new session; it keeps the returned guard until then.
    pub(super) async fn session_to_present(
        &self,
    ) -> (Option<tokio::sync::MutexGuard<'_, ()>>, Option<SessionId>) {
        let session = self.lock().session;
        if session.is_some() {
            return (None, session);
        }
        let opening = self.opening.lock().await;
        let session = self.lock().session;
        (Some(opening), session)
    }

    /// Gives a link a connection to `endpoint`, on which the session that the client has
    /// `presented` is open. Starts the tasks of the links to shards that the osd did not have
    /// before. Returns the connection's number, or `None` if the session cannot use the connection
    /// for this link.
    pub(super) fn attach(
        &self,
        ending: &Arc<Ending>,
        shard: u16,
        endpoint: &str,
        presented: Option<SessionId>,
        opened: &ShardHello,
        strand: &Strand,
    ) -> Result<Option<u64>> {
        let mut state = self.lock();
        if presented.is_none() {
            assert!(state.session.is_none(), "only one link opens a new session");
            state.session = Some(opened.session);
        }
        state.version = opened.version;
        if state.session != Some(opened.session) {
            return Ok(None);
        }
        if state.routes.opened(endpoint, opened.shard, &opened.ports)? {
            let shards = state.routes.shards();
            tracing::info!(shards, "the node has other shards than before");
            for new in state.links.add_missing(shards) {
                LinkTask::start(ending, new, state.links.signal(new), None);
            }
            state.restart_links();
        }
        state.control = opened.control.as_ref().map(|control| at_host(control, endpoint));
        if opened.shard != shard {
            tracing::debug!(endpoint, shard, found = opened.shard, "another shard has answered");
            return Ok(None);
        }
        state.obstacle = None;
        Ok(Some(state.links.attach(shard, strand.clone())))
    }

    /// Notes why a link cannot connect.
    pub(super) fn cannot_connect(&self, e: &Error) {
        self.lock().obstacle = Some(e.to_string());
    }

    /// Returns why links cannot connect, if none has connected since.
    pub(super) fn obstacle(&self) -> Option<String> {
        self.lock().obstacle.clone()
    }

    /// Returns the endpoint of a shard; `None` if the osd does not have the shard.
    pub(super) fn endpoint(&self, shard: u16) -> Option<String> {
        self.lock().routes.endpoint(shard)
    }

    /// Removes a connection that was lost. The unanswered requests that were sent on it wait to be
    /// sent again.
    pub(super) fn lost(&self, shard: u16, number: u64) {
        let mut state = self.lock();
        if state.links.detach(shard, number) {
            state.requeue_from(number);
        }
    }

    /// Returns whether another link has a connection, so that a link that cannot connect may wait until
    /// it is needed. Another link that has asked this one to connect asks again if it still cannot.
    pub(super) fn may_rest(&self, shard: u16) -> bool {
        let mut state = self.lock();
        let may_rest = state.links.is_any_connected();
        if may_rest {
            state.links.stop_asking(shard);
        }
        may_rest
    }

    /// Returns whether a link without connection must connect.
    pub(super) fn is_needed(&self, shard: u16) -> bool {
        self.lock().is_needed(shard)
    }

    /// Asks the other links to connect too, if requests wait for a link that cannot connect.
    pub(super) fn ask_other_links(&self, shard: u16) {
        let mut state = self.lock();
        if state.is_needed(shard) {
            state.links.ask_all();
        }
    }

    /// Handles the node's refusal to open the session that a link has `presented`.
    pub(super) fn refused(&self, shard: u16, presented: Option<SessionId>, e: &wire::Error) {
        if is_passing(e) {
            tracing::debug!(shard, error = %e, "the node does not accept the session yet; trying again");
            return;
        }
        let mut state = self.lock();
        if matches!(e, wire::Error::SessionRefused { .. }) && presented.is_some() {
            // Otherwise another link has learned of the refusal before.
            if state.session == presented {
                if self.options.exclusive {
                    self.end_by_fence(state, e);
                    return;
                }
                tracing::warn!(shard, error = %e, "the node refuses the session; opening a new one");
                state.session = None;
                state.table.leave_session(e);
                state.restart_links();
            }
        } else {
            tracing::warn!(shard, error = %e, "the node refuses this client");
            state.table.fail_unsent(shard, || e.clone().into());
        }
    }

    /// Ends the session of an exclusive owner, because the node refuses it.
    fn end_by_fence(&self, mut state: MutexGuard<'_, State>, e: &wire::Error) {
        tracing::warn!(error = %e, "the node refuses the session of an exclusive owner");
        state.fenced = Some(e.clone());
        state.table.end_by_fence(e);
        drop(state);
        self.begin_close();
    }

    /// Fails the requests that wait for a shard, because the node does not accept this client's key, or
    /// is another node.
    pub(super) fn refused_client(&self, shard: u16, e: &MessengerError) {
        tracing::warn!(shard, error = %e, "the node refuses this client");
        self.lock().table.fail_unsent(shard, || e.clone().into());
    }
}

/// Opens the first connection. While the node has too many sessions, tries again until the connect
/// timeout.
async fn connect_while_busy(
    dialer: &SessionDialer,
    endpoint: &str,
    options: &Options,
    capabilities: &CapabilityHolder,
) -> Result<OpenedStrand> {
    let deadline = Instant::now() + options.connect_timeout;
    let mut pause = RECONNECT_PAUSE;
    let mut refusals = 0;
    let mut strand = None;
    loop {
        let capability = capabilities.current();
        let mut dialed = match strand.take() {
            Some(refused) => refused,
            None => dial(dialer, endpoint, options).await?,
        };
        match dialed.open(None, capability.clone()).await {
            Err(Error::Node(wire::Error::CapabilityRefused { control, .. }))
                if refusals < REFUSALS_MAX && !capabilities.is_given() =>
            {
                let control = control.map(|control| at_host(&control, endpoint));
                match capabilities.replace(&capability, control.as_deref()).await {
                    Err(e) if e.is_transient() && Instant::now() + pause < deadline => {
                        tracing::debug!(endpoint, error = %e, "the control plane does not answer yet; trying again");
                    }
                    replaced => {
                        replaced?;
                        refusals += 1;
                        strand = Some(dialed);
                        continue;
                    }
                }
            }
            Err(Error::Node(e)) if is_passing(&e) && Instant::now() + pause < deadline => {
                tracing::debug!(endpoint, error = %e, "the node does not accept the session yet; trying again");
            }
            Err(Error::Network(MessengerError::ConnectionLost(e)))
                if dialed.was_open() && Instant::now() + pause < deadline =>
            {
                tracing::debug!(endpoint, error = %e, "an open connection was lost; connecting again");
            }
            outcome => return outcome.map(|opened| dialed.with(opened)),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RECONNECT_PAUSE_MAX);
    }
}

/// Returns whether a later attempt to open the session may succeed.
fn is_passing(e: &wire::Error) -> bool {
    matches!(e, wire::Error::Busy { .. }) || e.is_transient()
}

impl State {
    /// Checks that the session accepts requests.
    ///
    /// # Errors
    /// [`Error::Fenced`] if it was fenced, [`Error::Closed`] if it is closed.
    fn check_open(&self) -> Result<()> {
        match &self.fenced {
            Some(e) => Err(Error::Fenced(e.clone())),
            None if self.closed => Err(Error::Closed),
            None => Ok(()),
        }
    }

    /// Marks the requests that are in flight on a lost connection as not sent, and wakes the links
    /// that can send them.
    fn requeue_from(&mut self, number: u64) {
        self.table.requeue_from(number, &self.routes);
        self.links.wake(None);
    }

    /// Removes all connections. The links connect again, in the current session and to the current
    /// endpoints, and send all unanswered requests.
    fn restart_links(&mut self) {
        self.links.detach_all();
        self.table.requeue_all(&self.routes);
    }

    fn is_needed(&self, shard: u16) -> bool {
        self.links.is_asked(shard) || self.table.needs(shard)
    }

    /// Passes a request to another link, after a shard has refused the request as one of another
    /// shard. Returns the memory that the request offered to the refusing shard.
    fn reroute(
        &mut self,
        seq: u64,
        (shard, number): (u16, u64),
        groups: u32,
        shards: u16,
    ) -> Option<BulkRegion> {
        let pending = self.table.get_mut(seq).filter(|pending| pending.is_in_flight_on(number))?;
        match pending.reroute(&mut self.routes, shard, groups, shards) {
            Ok(region) => {
                self.links.wake(pending.shard());
                region
            }
            Err(e) => {
                tracing::warn!(shard, error = %e, "the node refuses a request in a wrong way");
                self.table.fail(seq, e);
                None
            }
        }
    }
}
