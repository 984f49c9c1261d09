//! The session with the node. It uses one connection at a time, and reconnects when the connection
//! is lost.
//!
//! Callers put their requests into a table and send them on the current connection. One background
//! task receives all messages. When the connection is lost, the task connects again, presents the
//! session's id, and sends all unanswered requests again, in order and marked as retries.
//!
//! A node may refuse to continue a session. Then the task opens a new session. It repeats requests
//! that change nothing, and sends changes that were not sent before. Changes that were sent before
//! fail with an unknown outcome, because only the old session had their results. If a node has too
//! many sessions, the task keeps trying. When the last handle is dropped, the task tells the node
//! that the session has ended, so that the node can discard the session's results.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use base::thread::ThreadClass;
use base::watch;
use messenger::{
    ConnectOptions, Connection, ConnectionEvent, Incoming, Limits, Message, MessengerError, NetworkStack,
};
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use wire::limits::REQUEST_WINDOW;
use wire::{Reply, ReplyBody, RequestBody, RequestHead, SessionId, UploadId};

use super::pending::{Answered, PendingRequest};
use crate::{Error, Options, Result};

/// Maximum pause between two attempts to reconnect.
const RECONNECT_PAUSE_MAX: Duration = Duration::from_millis(500);
/// First pause between two attempts to connect. The pause doubles with each attempt, up to
/// [`RECONNECT_PAUSE_MAX`].
const RECONNECT_PAUSE: Duration = Duration::from_millis(10);
/// Time limit for telling the node that a session has ended. If the message cannot be sent, the
/// node discards the session's results later.
const CLOSE_TIME: Duration = Duration::from_secs(2);

/// Pause before a lost connection is opened again while no request needs it. A node that has
/// reached its limit of connections drops idle connections to serve other clients. If the clients
/// of the dropped connections reconnected at once, the node would have to drop further connections.
/// The pause is shorter than the time for which nodes keep the uploads of disconnected clients.
const IDLE_RECONNECT_PAUSE: Duration = Duration::from_secs(60);

/// State that callers and the background task share.
pub(crate) struct Shared {
    stack: Arc<dyn NetworkStack>,
    endpoint: String,
    options: Options,
    /// Notified when a request leaves the table of unanswered requests.
    room: Notify,
    /// Notified when a request enters the table while the session has no connection.
    wanted: Notify,
    limits: OnceLock<Limits>,
    session_state: watch::Sender<SessionState>,
    state: Mutex<State>,
}

/// Whether the session is open, closing or closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SessionState {
    Open,
    /// The session is closing, so the background task must end it.
    Closing,
    /// The background task has ended.
    Closed,
}

struct State {
    /// The connection on which callers send; `None` while the session has no connection.
    connection: Option<Arc<dyn Connection>>,
    /// Number of the current connection, counted from 1.
    number: u64,
    session: Option<SessionId>,
    next_seq: u64,
    next_upload: u64,
    pending: BTreeMap<u64, PendingRequest>,
    closed: bool,
}

/// The session. When it is dropped, the background task tells the node that the session has ended,
/// unless the runtime ends first.
pub(crate) struct ClientSession {
    pub(crate) shared: Arc<Shared>,
}

impl Drop for ClientSession {
    fn drop(&mut self) {
        self.shared.begin_close();
    }
}

/// Marks the session as closed when the background task ends, or when the runtime drops the task.
struct Ending(Arc<Shared>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.session_state.send_replace(SessionState::Closed);
    }
}

impl ClientSession {
    /// Connects and opens a session.
    pub(crate) async fn open(
        stack: Arc<dyn NetworkStack>,
        endpoint: &str,
        options: Options,
    ) -> Result<ClientSession> {
        let shared = Arc::new(Shared {
            stack,
            endpoint: endpoint.to_owned(),
            options,
            room: Notify::new(),
            wanted: Notify::new(),
            limits: OnceLock::new(),
            session_state: watch::Sender::new(SessionState::Open),
            state: Mutex::new(State::new()),
        });
        let (connection, incoming) = shared.connect_while_busy().await?;
        shared.lock().connection = Some(connection);
        base::task::spawn(ThreadClass::Client, run(Ending(Arc::clone(&shared)), incoming));
        Ok(ClientSession { shared })
    }

    /// Returns the session's id.
    pub(crate) fn session(&self) -> Option<SessionId> {
        self.shared.lock().session
    }

    /// Returns an id for an upload.
    ///
    /// # Errors
    /// [`Error::Closed`] if the session is closed.
    pub(crate) fn next_upload(&self) -> Result<UploadId> {
        let mut state = self.shared.lock();
        let session = state.session.filter(|_| !state.closed).ok_or(Error::Closed)?;
        state.next_upload += 1;
        Ok(UploadId { session, number: state.next_upload - 1 })
    }

    /// Returns the maximum size of data that is sent inside a message, in bytes.
    pub(crate) fn inline_max(&self) -> u64 {
        let limit = self.shared.limits().map_or(0, |limits| limits.eager);
        self.shared.options.inline_max.min(limit) as u64
    }

    /// Returns whether the node itself reads data from the client's memory, by one-sided transfers.
    pub(crate) fn is_one_sided(&self) -> bool {
        self.shared.limits().is_some_and(|limits| limits.one_sided)
    }

    /// Ends the session. Returns when the node was told, or after [`CLOSE_TIME`].
    pub(crate) async fn close(&self) {
        self.shared.begin_close();
        let mut session_state = self.shared.session_state.subscribe();
        // The task's runtime may not be running, so the wait needs a time limit.
        let _ =
            tokio::time::timeout(CLOSE_TIME, session_state.wait_for(|state| *state == SessionState::Closed))
                .await;
    }
}

impl Shared {
    /// Returns the limits of the current connection. Without a connection, returns the limits of
    /// the first connection.
    fn limits(&self) -> Option<Limits> {
        let now = self.lock().connection.as_ref().map(|connection| connection.limits());
        now.or_else(|| self.limits.get().copied())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock and has changed only a part of the table.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses new requests, fails unanswered requests, and makes the background task end the
    /// session.
    fn begin_close(&self) {
        let pending = {
            let mut state = self.lock();
            state.closed = true;
            std::mem::take(&mut state.pending)
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

    async fn close_wanted(&self) {
        // The wait cannot fail, because `self` owns the sender.
        drop(self.session_state.subscribe().wait_for(|state| *state != SessionState::Open).await);
    }

    /// Tells the node that the session has ended and that none of its requests will be repeated.
    /// Then closes the connection.
    async fn end_session(&self) {
        let (connection, seq) = {
            let mut state = self.lock();
            (state.connection.take(), state.next_seq)
        };
        let Some(connection) = connection else { return };
        let head = RequestHead { seq, acked_through: seq - 1, retry: false, deadline_ms: 0 };
        let header = wire::encode_request(&head, &RequestBody::CloseSession);
        let ended = async {
            let message = Message { header, payload: Default::default() };
            if let Err(e) = connection.send(message).await {
                tracing::debug!(endpoint = self.endpoint, error = %e, "could not tell the node that the session has ended");
            }
            connection.close().await;
        };
        if tokio::time::timeout(CLOSE_TIME, ended).await.is_err() {
            tracing::debug!(
                endpoint = self.endpoint,
                "could not tell the node in time that the session has ended"
            );
        }
    }

    /// Adds a request to the table and returns its number. Waits while the request window is full.
    pub(crate) async fn enter(&self, pending: PendingRequest) -> Result<u64> {
        loop {
            let room = self.room.notified();
            {
                let mut state = self.lock();
                if state.closed {
                    return Err(Error::Closed);
                }
                let oldest = state.pending.first_key_value().map_or(state.next_seq, |(seq, _)| *seq);
                if state.next_seq - oldest < REQUEST_WINDOW {
                    let seq = state.next_seq;
                    state.next_seq += 1;
                    state.pending.insert(seq, pending);
                    if state.connection.is_none() {
                        self.wanted.notify_one();
                    }
                    return Ok(seq);
                }
            }
            room.await;
        }
    }

    /// Sends a request that is in the table. Without a connection, the background task sends the
    /// request later.
    pub(crate) async fn send(&self, seq: u64, done: oneshot::Sender<Answered>) -> Result<()> {
        let (connection, message, repeats_change) = {
            let mut state = self.lock();
            let Some(pending) = state.pending.get_mut(&seq) else { return Err(Error::Closed) };
            if let Some(why) = &pending.orphaned {
                return Err(Error::from(why.clone()).of_unknown_outcome());
            }
            pending.done = Some(done);
            let Some(connection) = state.connection.clone() else { return Ok(()) };
            let message = state.message(seq, &connection);
            let repeats_change = state.pending.get(&seq).is_some_and(PendingRequest::repeats_change);
            (connection, message, repeats_change)
        };
        let sent = match message {
            Ok(message) => connection.send(message).await.map_err(Error::from),
            Err(e) => Err(e),
        };
        match sent {
            // The background task detects the loss too, and sends the request again on the next
            // connection.
            Err(Error::Network(MessengerError::ConnectionLost(_))) => Ok(()),
            Err(e @ Error::Network(_)) if repeats_change => Err(e.of_unknown_outcome()),
            sent => sent,
        }
    }

    /// Removes a request from the table.
    pub(crate) fn forget(&self, seq: u64) {
        let pending = self.lock().pending.remove(&seq);
        self.room.notify_waiters();
        drop(pending);
    }

    /// Opens the first connection. While the node has too many sessions, tries again until the
    /// connect timeout.
    async fn connect_while_busy(&self) -> Result<(Arc<dyn Connection>, Box<dyn Incoming>)> {
        let deadline = Instant::now() + self.options.connect_timeout;
        let mut pause = RECONNECT_PAUSE;
        loop {
            match self.connect().await {
                Err(Error::Node(e)) if is_passing(&e) && Instant::now() + pause < deadline => {
                    tracing::debug!(endpoint = self.endpoint, error = %e, "the node does not accept the session yet; trying again");
                }
                outcome => return outcome,
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RECONNECT_PAUSE_MAX);
        }
    }

    /// Connects, and opens or resumes the session on the connection.
    async fn connect(&self) -> Result<(Arc<dyn Connection>, Box<dyn Incoming>)> {
        let timeout = self.options.connect_timeout;
        let options = ConnectOptions { tenant: self.options.tenant.clone(), timeout };
        let (connection, mut incoming) = self.stack.connect(&self.endpoint, options).await?;
        let opened = tokio::time::timeout(timeout, self.handshake(&*connection, &mut *incoming)).await;
        opened.unwrap_or(Err(Error::TimedOut(timeout)))?;
        let _ = self.limits.set(connection.limits());
        Ok((connection, incoming))
    }

    async fn handshake(&self, connection: &dyn Connection, incoming: &mut dyn Incoming) -> Result<()> {
        let head = RequestHead { seq: 0, acked_through: 0, retry: false, deadline_ms: 0 };
        let session = self.lock().session;
        let body = RequestBody::Open { oldest: wire::VERSION_OLDEST, newest: wire::VERSION, session };
        let header = wire::encode_request(&head, &body);
        connection.send(Message { header, payload: Default::default() }).await?;
        loop {
            match incoming.next().await {
                ConnectionEvent::Message(message) => {
                    let reply = decode(&message)?;
                    return match reply.result? {
                        ReplyBody::Opened { session, .. } => {
                            self.lock().session = Some(session);
                            Ok(())
                        }
                        other => Err(Error::Protocol(format!("expected an open session, got {other:?}"))),
                    };
                }
                ConnectionEvent::Lost(e) => return Err(e.into()),
                ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
            }
        }
    }

    /// Passes an answer to the caller that waits for it. Returns `false` if the answer says that
    /// the connection has no session.
    fn take_answer(&self, message: Message) -> bool {
        let reply = match decode(&message) {
            Ok(reply) => reply,
            Err(e) => {
                tracing::warn!(error = %e, "dropped an answer that cannot be decoded");
                return true;
            }
        };
        if matches!(reply.result, Err(wire::Error::NoSession(_))) {
            return false;
        }
        let mut state = self.lock();
        let Some(pending) = state.pending.get_mut(&reply.seq) else { return true };
        let Some(done) = pending.done.take() else { return true };
        let region = pending.region.take();
        drop(state);
        // The node no longer needs the offered memory. The offer is closed without the lock, so
        // that other callers do not wait.
        if let Some(region) = region {
            region.finish();
        }
        let mut state = self.lock();
        let Some(pending) = state.pending.get_mut(&reply.seq) else { return true };
        let outcome = match reply.result {
            Ok(body) => pending.collect(body, message.payload),
            Err(e) => Err(pending.refused(e)),
        };
        drop(state);
        // The caller may have been cancelled; ignore the error of the channel.
        drop(done.send(outcome));
        true
    }

    /// Sends all unanswered requests on a new connection, then lets callers use the connection.
    async fn resend(&self, connection: Arc<dyn Connection>) {
        loop {
            let message = {
                let mut state = self.lock();
                let number = state.number;
                let next = state.pending.iter().find(|(_, p)| p.sent_on != number && p.done.is_some());
                let Some(seq) = next.map(|(seq, _)| *seq) else {
                    state.connection = Some(connection);
                    return;
                };
                match state.message(seq, &connection) {
                    Ok(message) => message,
                    Err(Error::Network(MessengerError::ConnectionLost(_))) => return,
                    Err(e) => {
                        let done = state.pending.get_mut(&seq).and_then(|p| p.done.take());
                        drop(done.map(|done| done.send(Err(e))));
                        continue;
                    }
                }
            };
            if connection.send(message).await.is_err() {
                return;
            }
        }
    }

    /// Waits until there is a request that needs a connection, or for [`IDLE_RECONNECT_PAUSE`].
    async fn wait_for_need(&self) {
        if self.lock().pending.is_empty() {
            // Connect in both cases: after the timeout, and when a request needs the connection.
            let _ = tokio::time::timeout(IDLE_RECONNECT_PAUSE, self.wanted.notified()).await;
        }
    }

    async fn reconnect(&self) -> (Arc<dyn Connection>, Box<dyn Incoming>) {
        let mut pause = RECONNECT_PAUSE;
        loop {
            match self.connect().await {
                Ok(connected) => return connected,
                Err(Error::Node(e)) => self.refused(&e),
                Err(e) => tracing::debug!(endpoint = self.endpoint, error = %e, "cannot reconnect yet"),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RECONNECT_PAUSE_MAX);
        }
    }

    /// Handles the node's refusal to open the session.
    fn refused(&self, e: &wire::Error) {
        if is_passing(e) {
            tracing::debug!(endpoint = self.endpoint, error = %e, "the node does not accept the session yet; trying again");
            return;
        }
        let mut state = self.lock();
        if matches!(e, wire::Error::SessionRefused { .. }) && state.session.take().is_some() {
            tracing::warn!(endpoint = self.endpoint, error = %e, "the node refuses the session; opening a new one");
            state.give_up_session(e);
        } else {
            tracing::warn!(endpoint = self.endpoint, error = %e, "the node refuses this client");
            state.fail_all(e);
        }
    }
}

/// Returns whether a later attempt to open the session may succeed.
fn is_passing(e: &wire::Error) -> bool {
    matches!(e, wire::Error::Busy { .. }) || e.is_transient()
}

impl State {
    /// Creates the state before the first connection.
    fn new() -> State {
        State {
            connection: None,
            number: 1,
            session: None,
            next_seq: 1,
            next_upload: 1,
            pending: BTreeMap::new(),
            closed: false,
        }
    }

    /// Fails all changes that were sent in the session, because their outcome is unknown. All other
    /// requests can be sent in a new session.
    fn give_up_session(&mut self, e: &wire::Error) {
        for pending in self.pending.values_mut().filter(|pending| pending.is_bound_to_session()) {
            pending.orphaned = Some(e.clone());
            let unknown = Error::from(e.clone()).of_unknown_outcome();
            drop(pending.done.take().map(|done| done.send(Err(unknown))));
        }
    }

    /// Fails every request, because the node refuses this client. Keeps the session, because the
    /// node may accept it later.
    fn fail_all(&mut self, e: &wire::Error) {
        for pending in self.pending.values_mut() {
            let mut error = Error::from(e.clone());
            if pending.is_bound_to_session() {
                error = error.of_unknown_outcome();
            }
            drop(pending.done.take().map(|done| done.send(Err(error))));
        }
    }

    /// Encodes a request as a message for `connection`. If a change was sent before and cannot be
    /// sent again, the error says that the outcome is unknown.
    fn message(&mut self, seq: u64, connection: &Arc<dyn Connection>) -> Result<Message> {
        let oldest = self.pending.first_key_value().map_or(self.next_seq, |(seq, _)| *seq);
        let number = self.number;
        let Some(pending) = self.pending.get_mut(&seq) else { return Err(Error::Closed) };
        pending.message(seq, oldest - 1, connection, number).map_err(|e| match e {
            Error::Network(MessengerError::ConnectionLost(_)) => e,
            e if pending.is_bound_to_session() => e.of_unknown_outcome(),
            e => e,
        })
    }
}

fn decode(message: &Message) -> Result<Reply> {
    wire::decode_reply(&message.header).map_err(|e| Error::Protocol(e.to_string()))
}

/// The background task: serves the session until it is closed, then tells the node.
async fn run(ending: Ending, incoming: Box<dyn Incoming>) {
    let shared = &ending.0;
    tokio::select! {
        biased;
        () = shared.close_wanted() => {}
        never = serve(shared, incoming) => match never {},
    }
    shared.end_session().await;
}

async fn serve(shared: &Arc<Shared>, mut incoming: Box<dyn Incoming>) -> Infallible {
    let mut resend = None;
    loop {
        let event = match &mut resend {
            None => incoming.next().await,
            // Receive answers while requests are sent again. Otherwise client and node could wait
            // for each other (deadlock).
            Some(sending) => tokio::select! {
                biased;
                () = sending => {
                    resend = None;
                    continue;
                }
                event = incoming.next() => event,
            },
        };
        let lost = match event {
            // `take_answer` returns `false` if the node has attached the session to an earlier,
            // abandoned connection. This happens if the node received the request to open the
            // session on the abandoned connection last.
            ConnectionEvent::Message(message) => !shared.take_answer(message),
            ConnectionEvent::Interrupted | ConnectionEvent::Resumed => false,
            ConnectionEvent::Lost(e) => {
                tracing::info!(endpoint = shared.endpoint, error = %e, "connection lost");
                true
            }
        };
        if lost {
            shared.lock().connection = None;
            drop(resend.take());
            shared.wait_for_need().await;
            let (connection, again) = shared.reconnect().await;
            shared.lock().number += 1;
            incoming = again;
            resend = Some(Box::pin(shared.resend(connection)));
        }
    }
}

#[cfg(test)]
mod tests {
    use base::BoxFuture;
    use base::block::Payload;
    use base::mem::ArenaBuf;
    use messenger::{BulkRegion, BulkSink, BulkSource, PeerInfo, Pulled};
    use wire::{BulkDescriptor, Data, ObjectRequest};

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
        let refusing: Arc<dyn Connection> = Arc::new(Refusing);
        for (sent_on, unknown) in [(0, false), (1, true)] {
            let mut pending = PendingRequest::new(
                body.clone(),
                Bulk::Read { window: BlockWindow::new(0, 1, None), pushed: true },
                Instant::now(),
            );
            pending.sent_on = sent_on;
            let mut state = State { number: 2, pending: [(1, pending)].into(), ..State::new() };
            let Err(error) = state.message(1, &refusing) else { panic!("nothing can be offered") };
            assert_eq!(error.may_have_taken_effect(), unknown, "{error}");
            assert!(error.to_string().contains("bulk transfer refused"), "{error}");
        }
    }
}
